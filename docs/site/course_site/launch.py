"""The head of a lab's page, with links that open the lab, and the button to mark it as read."""

from __future__ import annotations

import sys
from html import escape

from docutils import nodes
from sphinx.application import Sphinx

from .address import ROOT, branch, in_binder, is_placeholder, repository

sys.path.append(str(ROOT / "hpc"))
from git_link import git_link  # hpc/ is a folder of scripts

#: A placeholder, which hub.js replaces by the address of the reader's hub.
HUB = "https://hub.invalid"
#: A button that read_marks.js shows. A reader who scrolls to it has read the lab.
END = '<p class="end-of-lab" hidden><button type="button">Mark as read</button></p>'


def setup(app: Sphinx) -> None:
    """Add the head and the end to each lab's page, and copy the notebooks beside the pages."""
    app.connect("doctree-read", add_head_and_end)
    app.connect("build-finished", copy_notebooks)


def add_head_and_end(app: Sphinx, doctree: nodes.document) -> None:
    """Add the ways to open a lab below its first paragraph, and the end, if a page is a lab's."""
    name = app.env.docname
    first = doctree.next_node(nodes.paragraph)
    if is_lab(name) and first is not None:
        first.parent.insert(first.parent.index(first) + 1, nodes.raw("", head(name), format="html"))
        doctree.append(nodes.raw("", END, format="html"))


def is_lab(docname: str) -> bool:
    """Return whether a page is a lab's, given its name on the site, such as labs/01_c10d."""
    return docname.startswith("labs/") and docname[5:7].isdigit()


def head(docname: str) -> str:
    """Return the ways to open a lab, in HTML.

    Binder and hubs fetch the repository, so their buttons need its public address. The button for
    a hub also needs a script, because it asks the reader for the hub's address.
    """
    notebook = f"{docname}.ipynb"
    download = f'<a href="{notebook.rpartition("/")[2]}" download>Download the notebook</a>'
    if is_placeholder():
        return f'<div class="launch"><div class="ways">{download}</div></div>'
    hub = git_link(HUB, repository(), notebook, branch(), "").removeprefix(HUB)
    return f"""<div class="launch" data-hub="{escape(hub)}">
<div class="ways">
<button type="button" class="hub" aria-expanded="false" aria-controls="hub-form" hidden>
Open in my hub</button>
<a href="{escape(in_binder(notebook))}">Open in Binder</a>
{download}
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
    """Copy the students' notebooks beside their pages."""
    for name in [] if error else sorted(filter(is_lab, app.env.found_docs)):
        notebook = f"{name}.ipynb"
        (app.outdir / notebook).write_bytes((ROOT / notebook).read_bytes())
