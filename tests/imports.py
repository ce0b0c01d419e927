"""Who imports whom: in `utils` and `benchmarks`, and from the tests and the notebooks on.

`modules` and `imported` read both for the rules of tests/house/test_rooms.py. `Reach` follows the
imports of tests, so that `make test-room` finds the tests that a change in a room can break.
"""

from __future__ import annotations

import ast
import functools
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from places import ROOT

UTILS = ROOT / "utils"
BACKEND = UTILS / "mpi"
BENCHMARKS = ROOT / "benchmarks"
OF_OURS = (UTILS, BENCHMARKS)
#: The first words of our modules' names.
OURS = {"utils", "torch_mpi", "benchmarks"}

#: Code in a text, such as a notebook's cell that a test runs: `from utils import cluster`.
CODE_IN_A_TEXT = re.compile(
    r"(?:^|[\n;])[ \t]*"
    r"(?:from[ \t]+((?:utils|torch_mpi|benchmarks)[\w.]*)[ \t]+import[ \t]+([\w, \t]+)"
    r"|import[ \t]+((?:utils|torch_mpi|benchmarks)[\w.]*))"
)
#: The name of a module as a text: for `python -m`, `importlib`, `monkeypatch`.
NAME_IN_A_TEXT = re.compile(r"(?:utils|torch_mpi|benchmarks|answers)(?:\.\w+)+\.?")


# --- utils and benchmarks ------------------------------------------------------------------------


def modules(*folders: Path) -> Iterator[tuple[str, Path]]:
    """Yield each module of these folders by its full name, or of `utils` and `benchmarks`.

    The backend's tests and examples are left out.
    """
    for path in sorted(file for one in folders or OF_OURS for file in one.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if not {"tests", "examples"} & set(parts):
            yield ".".join(parts).removesuffix(".__init__"), path


NAMES = {name for name, _ in modules()}


def imported(module: str, path: Path) -> set[str]:
    """The modules of ours that a module imports, also inside of functions and for types."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        found |= set(_of_statement(node, package))
    return {name for name in found if name.split(".")[0] in OURS}


def _of_statement(node: ast.AST, package: str) -> Iterator[str]:
    """Yield what an import statement names: modules where there is one of the name."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = package.split(".")[: len(package.split(".")) - node.level + 1]
        base = ".".join([*above, node.module or ""]).strip(".") if node.level else node.module
        for alias in node.names:
            full = f"{base}.{alias.name}"
            yield full if full in NAMES else base or ""


# --- from the tests on ---------------------------------------------------------------------------


class Reach:
    """Which files a test reaches by imports, its own ones and those of what it imports.

    A test or a notebook also reaches what texts in it name: a module, a file of the repository, or
    an import in the code of a cell. A helper that lists the notebooks, such as that of the site,
    reaches them all, and with them the labs.
    """

    def __init__(self) -> None:
        self._files = dict(_names_of_files())
        self._names = {path: name for name, path in self._files.items()}
        self._of_utils = {path for _, path in modules()}

    @functools.cache  # noqa: B019 - one for a run
    def of(self, path: Path, every_lab: bool = True) -> frozenset[Path]:
        """Return the files that a file reaches, itself among them.

        Args:
            path: a module, a test, or a notebook.
            every_lab: whether what goes through the notebooks or answers of all labs counts. False
                for a test that has one lab as its parameter, which reaches the files of that lab.
        """
        found: set[Path] = set()
        todo = [path]
        while todo:
            one = todo.pop()
            if one not in found:
                found.add(one)
                todo += self._next(one, every_lab)
        return frozenset(found)

    @functools.cache  # noqa: B019 - one for a run
    def _next(self, path: Path, every_lab: bool) -> frozenset[Path]:
        if path.suffix not in (".py", ".ipynb"):
            return frozenset()
        named: set[str] = set()
        files: set[Path] = set()
        package = self._package(path)
        for code in _codes(path):
            for node in ast.walk(code):
                named |= set(_of_statement(node, package))
                if path in self._of_utils:
                    continue
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    named |= set(_named(node.value))
                    files |= set(_file(node.value))
                if isinstance(node, ast.JoinedStr) and every_lab:
                    named |= set(self._beginning_with(node))
        for name in named:
            files |= set(self._found(name))
        if every_lab and path not in self._of_utils and not path.name.startswith("test_"):
            files |= set(_notebooks() if _lists_notebooks(path) else ())
        return frozenset(files)

    def _package(self, path: Path) -> str:
        name = self._names.get(path, path.stem)
        return name if path.name == "__init__.py" else name.rpartition(".")[0]

    def _found(self, name: str) -> Iterator[Path]:
        """Yield the file of a module, and those of the packages it is in."""
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            if path := self._files.get(".".join(parts[:length])):
                yield path

    def _beginning_with(self, text: ast.JoinedStr) -> Iterator[str]:
        """Yield the modules that a text such as f"answers.{name}" may name."""
        first = text.values[0]
        if isinstance(first, ast.Constant) and NAME_IN_A_TEXT.fullmatch(f"{first.value}x"):
            yield from (name for name in self._files if name.startswith(str(first.value)))


def _names_of_files() -> Iterator[tuple[str, Path]]:
    """Yield the names by which tests and modules import a file, and the file."""
    for name, path in modules():
        yield name.removeprefix("utils.mpi.") if path.is_relative_to(BACKEND) else name, path
    for folder in (ROOT / "tests", BACKEND / "tests"):
        for path in sorted(folder.rglob("*.py")):
            # The folders of tests are on Python's path: a helper is imported by its own name.
            parent = path.parent.name
            inner = parent in {"answers", "mpi_fuzz", "mpi_cases", "stress"}
            yield f"{parent}.{path.stem}" if inner else path.stem, path


def _codes(path: Path) -> Iterator[ast.Module]:
    """Yield the parsed code of a file: a module, or the cells of a notebook."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield ast.parse(text)
        return
    for cell in json.loads(text)["cells"]:
        if cell["cell_type"] == "code":
            lines = "".join(cell["source"]).splitlines()
            plain = ("" if line.lstrip().startswith(("%", "!")) else line for line in lines)
            try:
                yield ast.parse("\n".join(plain))
            except SyntaxError:  # a cell that is no Python, such as the text of a file
                continue


def _named(text: str) -> Iterator[str]:
    """Yield the modules that a text names."""
    if NAME_IN_A_TEXT.fullmatch(text.partition(" ")[0]):
        yield text.partition(" ")[0]
    for base, names, module in CODE_IN_A_TEXT.findall(text):
        yield base or module
        yield from (f"{base}.{word}" for word in re.findall(r"(?:^|,)\s*(\w+)", names) if base)


def _file(text: str) -> Iterator[Path]:
    """Yield the file of the repository that a text names by its path, if it names one."""
    if 3 < len(text) < 100 and "/" in text and "\n" not in text and text.strip("/"):
        path = ROOT / text.lstrip("/")
        if path.suffix in (".py", ".ipynb", ".sh") and path.is_file():
            yield path


def _lists_notebooks(path: Path) -> bool:
    """Return whether a helper of tests, or the site, works on all notebooks."""
    return path.suffix == ".py" and "notebooks(" in path.read_text(encoding="utf-8")


def _notebooks() -> Iterable[Path]:
    """Return the notebooks of all labs."""
    return [*(ROOT / "solutions").glob("[0-9]*.ipynb"), *(ROOT / "labs").glob("[0-9]*.ipynb")]
