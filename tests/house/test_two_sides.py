"""The two sides of a check: what runs beside a student's answer, and what only the kernel knows.

A rank that a sandbox holds has only the files of the rank's side. So an answer can't import what
computes the right result, what judges it, or the texts about mistakes.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest
from imports import UTILS, modules
from places import ROOT

from utils.course.imports import closure, file_of, imported

JUDGES = {
    f"utils.checks.{name}" for name in ("task", "comparison", "verdict", "score", "card", "model")
}
#: What every rank imports, whatever the lab is.
RANK = ("utils.cluster.rank_side", "utils.cluster.boxes.rank_program")
CELL = re.compile(r"\s*%%(px|writefile)\b")

Name = tuple[str, str]


# --- which modules are on which side -------------------------------------------------------------


@functools.cache
def parsed(module: str) -> ast.Module:
    """Return a module of ours as a tree."""
    file = file_of(module, ROOT)
    assert file, module
    return ast.parse(file.read_text(encoding="utf-8"))


def ours() -> Iterator[str]:
    """Yield the names by which all modules of `utils` are imported."""
    for name, _ in modules(UTILS):
        yield name.removeprefix("utils.mpi.") if ".torch_mpi" in name else name


def is_probe(node: ast.stmt) -> bool:
    """Return whether a definition is a probe: `(user_ns, *, rank, …)`, called on the ranks."""
    if not isinstance(node, ast.FunctionDef):
        return False
    named = {arg.arg for arg in node.args.kwonlyargs}
    return [arg.arg for arg in node.args.args] == ["user_ns"] and "rank" in named


def probes() -> set[Name]:
    """Return module and name of each probe."""
    return {
        (module, node.name)
        for module in ours()
        if module.startswith(("utils.labs", "utils.checks"))
        for node in parsed(module).body
        if is_probe(node)
    }


@functools.cache
def notebooks(on_ranks: bool) -> tuple[ast.Module, ...]:
    """Return the code of each solution: of the cells that run on ranks, or of all cells."""
    return tuple(
        ast.Module([node for code in cells(path, on_ranks) for node in code.body], [])
        for path in sorted((ROOT / "solutions").glob("[0-9]*.ipynb"))
    )


def cells(path: Path, on_ranks: bool) -> Iterator[ast.Module]:
    """Yield the code of a notebook's cells."""
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] != "code" or (on_ranks and not CELL.match(text)):
            continue
        lines = ("" if line.lstrip().startswith(("%", "!")) else line for line in text.split("\n"))
        with contextlib.suppress(SyntaxError):  # the text of a file that is no Python
            yield ast.parse("\n".join(lines))


@functools.cache
def of_cells() -> set[str]:
    """Return the modules of ours that the solutions' cells import on ranks."""
    found: set[str] = set()
    for code in notebooks(on_ranks=True):
        for node in ast.walk(code):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found |= {node.module or "", *(f"{node.module}.{a.name}" for a in node.names)}
    return {name for name in found if file_of(name, ROOT)}


@functools.cache
def rank_side() -> set[str]:
    """Return the modules with which a rank begins."""
    return {*RANK, *(module for module, _ in probes()), *of_cells()}


def is_judges(module: str, graph: Mapping[str, Iterable[str]]) -> bool:
    """Return whether a module is on the judge's side: it judges, or it imports what judges."""
    own = module.endswith(".checks") and module.startswith("utils.labs.")
    return (
        module in JUDGES
        or own
        or module.startswith("utils.grading")
        or bool(JUDGES & set(graph.get(module, ())))
    )


def leaks(graph: Mapping[str, Iterable[str]], begin: Iterable[str]) -> list[str]:
    """Return each path of imports from these modules to the judge's side, in words."""
    paths = {module: module for module in begin}
    todo = sorted(paths)
    found = []
    while todo:
        module = todo.pop(0)
        if is_judges(module, graph):
            found.append(paths[module])
            continue
        for target in sorted(graph.get(module, ())):
            if target not in paths:
                paths[target] = f"{paths[module]} imports {target}"
                todo.append(target)
    return found


# --- the rules -----------------------------------------------------------------------------------


@pytest.mark.quick
def test_no_answer_can_import_what_judges_it():
    begin = rank_side()
    assert len(begin) > 40
    graph = {module: imported(module, ROOT) for module in closure(begin, ROOT)}
    assert not leaks(graph, begin)


@pytest.mark.quick
def test_an_import_of_a_judge_is_found_wherever_it_hides(tmp_path):
    labs = tmp_path / "utils" / "labs" / "lab01"
    checks = tmp_path / "utils" / "checks"
    for folder in (labs, checks):
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
    (tmp_path / "utils" / "__init__.py").touch()
    (labs.parent / "__init__.py").touch()
    (checks / "task.py").touch()
    files = {
        "probes": "from . import tensors",
        "tensors": "def drawn():\n    from .right_sums import total",
        "right_sums": "import utils.checks.task",
        "clean": "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from utils.checks.task import Report\n",
    }
    for name, text in files.items():
        (labs / f"{name}.py").write_text(text)

    def found(name: str) -> list[str]:
        begin = f"utils.labs.lab01.{name}"
        graph = {module: imported(module, tmp_path) for module in closure([begin], tmp_path)}
        return leaks(graph, [begin])

    lab = "utils.labs.lab01"
    assert found("probes") == [f"{lab}.probes imports {lab}.tensors imports {lab}.right_sums"]
    assert found("clean") == []
    assert found("right_sums") == [f"{lab}.right_sums"]


@pytest.mark.quick
def test_a_cell_on_the_ranks_imports_modules_and_no_room():
    """`lab06.x` would open the lab's checks on a rank."""
    rooms = {name for name in of_cells() if re.fullmatch(r"utils\.labs\.(lab\d\d|shared)", name)}
    named = {
        alias.name
        for code in notebooks(on_ranks=True)
        for node in ast.walk(code)
        if isinstance(node, ast.ImportFrom) and node.module == "utils.labs"
        for alias in node.names
    }
    used = {
        node.attr
        for code in notebooks(on_ranks=True)
        for node in ast.walk(code)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and re.fullmatch(r"lab\d\d", node.value.id)
    }
    assert not named
    assert not used
    # As in `from utils.labs.lab13 import faults`, which opens this module only.
    assert rooms <= {"utils.labs.lab13", "utils.labs.lab18"}


# --- nothing else is on the ranks' side ----------------------------------------------------------


def names_of(node: ast.stmt) -> list[str]:
    """Return the names that a statement at the top of a module defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if not isinstance(node, ast.Assign | ast.AnnAssign):
        return []
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [name.id for one in targets for name in ast.walk(one) if isinstance(name, ast.Name)]


class Names:
    """Which names at the top of our modules need which others.

    A name that stands alone is used; so are all names of a module that isn't followed by a dot.
    """

    def __init__(self, trees: Mapping[str, ast.Module]):
        self._trees = trees
        self.defined = {
            (module, name): node
            for module, tree in trees.items()
            for node in tree.body
            for name in names_of(node)
        }
        self._imports = {module: dict(self._of(module, tree)) for module, tree in trees.items()}

    def _of(self, module: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
        package = module if self._is_package(module) else module.rpartition(".")[0]
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                above = package.split(".")[: package.count(".") + 2 - node.level]
                base = ".".join([*(above if node.level else ()), *filter(None, [node.module])])
                for alias in node.names:
                    yield alias.asname or alias.name, f"{base}.{alias.name}"

    def _is_package(self, module: str) -> bool:
        file = file_of(module, ROOT)
        return file is not None and file.name == "__init__.py"

    def _found(self, full: str) -> Iterator[Name]:
        """Yield the definition that a full name means; all of a module."""
        module, _, name = full.rpartition(".")
        if full in self._trees:
            yield from (one for one in self.defined if one[0] == full)
        elif (module, name) in self.defined:
            yield module, name
        elif name in self._imports.get(module, {}):
            yield from self._found(self._imports[module][name])

    def of(self, tree: ast.AST, imports: Mapping[str, str], module: str = "") -> Iterator[Name]:
        """Yield the names of ours that a piece of code uses."""
        used: list[ast.Name] = []
        attributes: dict[int, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                used.append(node)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                attributes[id(node.value)] = node.attr
        for node in used:
            if (module, node.id) in self.defined:
                yield module, node.id
            full = imports.get(node.id, "")
            dotted = full in self._trees and id(node) in attributes
            yield from self._found(f"{full}.{attributes[id(node)]}" if dotted else full)

    def reached(self, begin: Iterable[Name]) -> set[Name]:
        """Return all names that these need, and what runs when their modules are imported."""
        found: set[Name] = set()
        todo = [*begin, *self._when_imported()]
        while todo:
            name = todo.pop()
            if name not in found and name in self.defined:
                found.add(name)
                todo += self.of(self.defined[name], self._imports[name[0]], name[0])
        return found

    def _when_imported(self) -> Iterator[Name]:
        for module, tree in self._trees.items():
            for node in tree.body:
                if not names_of(node) and not isinstance(node, ast.Import | ast.ImportFrom):
                    yield from self.of(node, self._imports[module], module)

    def of_cells(self) -> Iterator[Name]:
        """Yield the names that cells use."""
        for code in notebooks(on_ranks=False):
            imports = dict(self._of("", code))
            yield from self.of(code, imports)
            for full in imports.values():
                if full not in self._trees:
                    yield from self._found(full)
            # lab06.pictures.topologies and lab06.board, of which the last is from lab06/checks.py
            for node in ast.walk(code):
                if isinstance(node, ast.Attribute) and (chain := dotted_name(node)):
                    yield from self._opened(chain)

    def promised(self, modules: Iterable[str]) -> Iterator[Name]:
        """Yield what these modules list in `__all__`: tools that students may use."""
        for module in modules:
            if module.startswith("utils.labs.") and (module, "__all__") in self.defined:
                node = self.defined[module, "__all__"]
                listed = [one.value for one in ast.walk(node) if isinstance(one, ast.Constant)]
                yield from ((module, name) for name in listed)

    def _opened(self, chain: list[str]) -> Iterator[Name]:
        if re.fullmatch(r"lab\d\d", chain[0]):
            room = f"utils.labs.{chain[0]}"
            inner = ".".join(chain[1:])
            yield from self._found(f"{room}.{inner}")
            yield from self._found(f"{room}.checks.{inner}")


def dotted_name(node: ast.expr) -> list[str]:
    """Return ["a", "b", "c"] for `a.b.c`; an empty list for other expressions."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    return [node.id, *parts] if isinstance(node, ast.Name) else []


def unused(names: Names, begin: Iterable[Name], files: Iterable[str]) -> set[str]:
    """Return the names in these modules that nothing in `begin` needs."""
    reached = names.reached(begin)
    return {
        f"{module}.{name}"
        for module, name in names.defined
        if module in files and (module, name) not in reached and not name.startswith("__")
    }


@pytest.mark.quick
def test_what_only_a_judge_needs_is_not_within_reach_of_an_answer():
    rooms = ("utils.labs", "utils.checks")
    names = Names({module: parsed(module) for module in ours() if module.startswith(rooms)})
    files = {
        module
        for module in closure(rank_side(), ROOT)
        if re.match(r"utils\.labs\.(lab\d\d|shared)\.", module)
    }
    assert len(files) > 30
    begin = {*probes(), *names.of_cells(), *names.promised(of_cells())}
    assert not unused(names, begin, files)


@pytest.mark.quick
def test_a_reference_that_drifts_to_the_ranks_is_found():
    code = {
        "a.probes": "from .tensors import drawn\nfrom . import others\nSIZE = 3\n"
        "def probe_sum(user_ns, *, rank): return drawn(SIZE) + others.one()\n"
        "def right_sum(): return 6",
        "a.tensors": "def drawn(n): return n\ndef total(n): return drawn(n)",
        "a.others": "def one(): return two()\ndef two(): return 2\ndef three(): return 3",
    }
    names = Names({name: ast.parse(text) for name, text in code.items()})
    left = unused(names, {("a.probes", "probe_sum")}, code)
    assert left == {"a.probes.right_sum", "a.tensors.total", "a.others.three"}


# --- the files of a sandbox ----------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("module", [RANK[1], "utils.labs.lab18.probes"])
def test_a_rank_imports_its_modules_where_only_the_files_of_its_side_are(module, tmp_path):
    for file in closure([module], ROOT).values():
        copy = tmp_path / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
    path = os.pathsep.join(map(str, (tmp_path, tmp_path / "utils" / "mpi")))
    code = f"import {module} as made; print(made.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))


@pytest.mark.quick
def test_the_files_of_a_module_that_is_not_there_are_not_an_empty_list():
    with pytest.raises(ModuleNotFoundError, match=r"utils\.labs\.lab99"):
        closure(["utils.labs.lab99.probes"], ROOT)
