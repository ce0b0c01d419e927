"""The reference of what notebooks import: a page for each public module, and a list of pages."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.errors import PycodeError
from sphinx.pycode import ModuleAnalyzer

from utils.course.notebook import LABS, notebooks, read

from .address import ROOT

IMPORT = re.compile(r"^\s*from ((?:utils|torch_mpi)[\w.]*) import (.+)$", re.MULTILINE)
#: Modules that no cell imports, but that a notebook or its author needs.
MORE = {"utils.labs.lab06.chunk_steps", "utils.mpi.benchmark.alpha_beta", "utils.timeline"}
MORE |= {"utils.forecast"}
#: Modules with the checks of a lab get no page, because the notebook explains the checks.
CHECKS = re.compile(r"utils\.labs\.lab\d\d")
#: Titles of the list's parts. A module is in the first part that has a beginning of its name.
GROUPS = {
    "Ranks, jobs and messages": ("utils.cluster", "utils.jobs", "torch_mpi", "utils.mpi"),
    "Pictures and predictions": ("utils.figures", "utils.timeline", "utils.forecast"),
    "Data, models and clocks": ("utils.data", "utils.models", "utils.checks"),
    "Shared by several labs": ("utils.labs.shared",),
    "One lab": ("utils.labs",),
}
#: Sphinx replaces these by mocks, because importing them needs seconds and 200 MB of memory.
PRETENDED = ("torch", "torchvision", "mpi4py")
#: Packages whose modules Sphinx may read. It imports PyTorch's as it reads them, and with the mock
#: alone some of our modules can't be imported (`dist.ProcessGroup | None`).
READ = ("utils", "torch_mpi", "torch")
source_of_any = ModuleAnalyzer.get_module_source


def api_page(module: str) -> str:
    """Return the page of a module, in reStructuredText."""
    return f"{module}\n{'=' * len(module)}\n\n.. automodule:: {module}\n   :members:\n"


@cache
def modules() -> list[str]:
    """Return the modules that have a page: the modules of `MORE`, and those that labs import."""
    found = set(MORE)
    for path in notebooks(LABS):
        for cell in read(path).cells:
            for base, names in IMPORT.findall(cell.source if cell.cell_type == "code" else ""):
                words = re.findall(r"(\w+)(?: as \w+)?", names.partition("#")[0])
                inside = {f"{base}.{name}" for name in words}
                found |= {name if _path(name) else base for name in inside}
    return sorted(name for name in found if not CHECKS.fullmatch(name))


def listed() -> str:
    """Return all modules in MyST, group by group, each with its purpose and links to its names."""
    lines = []
    left = modules()
    for title, beginnings in GROUPS.items():
        mine = [name for start in beginnings for name in left if name.startswith(start)]
        left = [name for name in left if name not in mine]
        lines += [f"## {title}", ""] if mine else []
        for module in mine:
            tree = ast.parse(_path(module).read_text("utf-8"))
            what = " ".join((ast.get_docstring(tree) or "").partition("\n\n")[0].split())
            names = ", ".join(f"{{py:obj}}`~{module}.{name}`" for name in _names(tree))
            lines += [f"[`{module}`](api/{module}.rst)", f": {what}\n\n  {names}", ""]
    return "\n".join(lines)


def _path(module: str) -> Path | None:
    """Return the file of a module, or None if no module has this name."""
    folder = ROOT / "utils/mpi" if module.startswith("torch_mpi") else ROOT
    path = folder / module.replace(".", "/")
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)


def _names(tree: ast.Module) -> list[str]:
    """Return the functions and classes that a module offers."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return [name for name in ast.literal_eval(node.value) if not name.isupper()]
    made = (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef))
    return [node.name for node in made if not node.name.startswith("_")]


#: A name in backticks with letters after it: reStructuredText reads it as an open quotation.
PLURAL = re.compile(r"(?<![\w`])(`[^`\s][^`\n]*`)(?=[a-z])")
#: A line of a docstring that explains a name.
NAMES = re.compile(r"(?P<names>[a-z_]\w*(?:, [a-z_]\w*)*): (?P<meaning>\S.*)")


def setup(app: Sphinx) -> None:
    """Let Sphinx read docstrings in the form in which this course writes them."""
    app.connect("autodoc-process-docstring", in_sphinxs_words, priority=400)  # before napoleon
    ModuleAnalyzer.get_module_source = staticmethod(source_of_ours)


def source_of_ours(module: str) -> tuple:
    """Return the file and the source of a module, as Sphinx asks for it.

    Sphinx would also read matplotlib's modules and all others whose classes and functions ours use.
    That would take a third of the time that the reference takes, and show nothing.

    Raises:
        PycodeError: the module belongs to a package that isn't read.
    """
    if module.partition(".")[0] not in READ:
        raise PycodeError(f"{module} isn't read for the reference")
    return source_of_any(module)


def in_sphinxs_words(app, what: str, name: str, thing: object, options, lines: list[str]) -> None:
    """Translate a docstring's lines, in place, to reStructuredText.

    A paragraph of lines such as ``timeout: seconds …`` becomes a list of definitions, and an
    indented paragraph becomes code.
    """
    blocks = PLURAL.sub(r"\1\\ ", "\n".join(lines)).split("\n\n")
    before = ""
    for k, block in enumerate(blocks):
        rows = block.split("\n")
        if NAMES.match(rows[0]) and all(NAMES.match(row) or row[:1] in (" ", "") for row in rows):
            blocks[k] = "\n".join(_definition(row) for row in rows)
        elif rows[0].startswith("    ") and before and not before.startswith(" "):
            blocks[k] = f"::\n\n{block}"
        before = before if rows[0].startswith("    ") else rows[0]
    lines[:] = "\n\n".join(blocks).split("\n")


def _definition(row: str) -> str:
    found = NAMES.match(row)
    if not found:
        return row
    names = ", ".join(f"``{name}``" for name in found["names"].split(", "))
    return f"{names}\n    {found['meaning']}"
