"""Settings of Sphinx for the site of the course, which `make site` builds."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1]), str(HERE.parents[1] / "utils/mpi")]

from course_site import address  # noqa: E402
from course_site.api import PRETENDED  # noqa: E402

project = "Distributed deep learning"
html_title = project
author = copyright = "the authors of the course"
language = "en"

extensions = [
    *("myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"),
    "course_site.extension",
]
templates_path = ["_templates"]
root_doc = "index"
exclude_patterns = [".doctrees"]
default_role = "code"

# Notebooks are shown with their stored outputs, and not executed.
nb_execution_mode = "off"
nb_merge_streams = True
nb_render_error_lexer = "none"
myst_enable_extensions = ["attrs_block", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4
html_math_renderer = "mathml"

# Code and commands have a copy button, which leaves out the shell's prompt. Outputs have none.
copybutton_selector = ".highlight:not(.cell_output .highlight) pre"
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True

# The reference of modules
autodoc_mock_imports = list(PRETENDED)
autodoc_member_order = "bysource"
autodoc_use_type_comments = False
napoleon_use_ivar = True

html_theme = "pydata_sphinx_theme"
html_static_path = ["_static"]
html_css_files = ["site.css", "predictions.css", "pictures.css", "print.css"]
SCRIPTS = ("hub", "predictions", "pictures", "motion", "read_marks", "excerpts")
html_js_files = [(f"{job}.js", {"defer": "defer"}) for job in SCRIPTS]
html_show_sourcelink = html_copy_source = False
html_show_search_summary = False  # excerpts.js shows what is around a hit
html_theme_options = {
    "github_url": "" if address.is_placeholder() else address.repository(),
    "back_to_top_button": False,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
}

# The code of hint 3 has … where a student decides, which isn't Python.
suppress_warnings = ["misc.highlighting_failure"]
