"""The head of a lab's page: open it in the reader's hub, in Binder, or take the notebook."""

from __future__ import annotations

import sys
from html import escape

from docutils import nodes
from sphinx.application import Sphinx

from .address import ROOT, branch, in_binder, repository

sys.path.append(str(ROOT / "hpc"))
from git_link import git_link  # hpc/ is a folder of scripts

#: Stands for the reader's hub, which site.js puts in its place.
HUB = "https://hub.invalid"


def setup(app: Sphinx) -> None:
    """Put it below the title of each lab, and the notebooks beside the pages."""
    app.connect("doctree-read", add_head)
    app.connect("build-finished", copy_notebooks)


def add_head(app: Sphinx, doctree: nodes.document) -> None:
    """Add it to a page, if that is a lab's."""
    name = app.env.docname
    title = doctree.next_node(nodes.title)
    if is_lab(name) and title is not None:
        title.parent.insert(title.parent.index(title) + 1, nodes.raw("", head(name), format="html"))


def is_lab(docname: str) -> bool:
    """Whether a page is a lab's, by its name on the site: labs/01_c10d."""
    return docname.startswith("labs/") and docname[5:7].isdigit()


def head(docname: str) -> str:
    """Three ways to open a lab, in HTML. Without scripts there are two: a hub needs an address."""
    notebook = f"{docname}.ipynb"
    hub = git_link(HUB, repository(), notebook, branch(), "").removeprefix(HUB)
    file = notebook.rpartition("/")[2]
    return f"""<div class="launch" data-hub="{escape(hub)}">
<div class="ways">
<button type="button" class="hub" aria-expanded="false" aria-controls="hub-form" hidden>
Open in my hub</button>
<a href="{escape(in_binder(notebook))}">Open in Binder</a>
<a href="{file}" download>Download the notebook</a>
</div>
<form id="hub-form" hidden>
<label for="hub-address">Address of your JupyterHub</label>
<input id="hub-address" type="url" required autocomplete="url"
placeholder="https://hub.example.org">
<button type="submit">Open</button>
<p>It is kept in this browser only. The hub needs nbgitpuller and the course's environment, as
<a href="../hpc/README.html">hpc/</a> installs it.</p>
</form>
</div>"""


def copy_notebooks(app: Sphinx, error: Exception | None) -> None:
    """Lay the students' notebooks beside their pages."""
    for name in [] if error else sorted(filter(is_lab, app.env.found_docs)):
        notebook = f"{name}.ipynb"
        (app.outdir / notebook).write_bytes((ROOT / notebook).read_bytes())
