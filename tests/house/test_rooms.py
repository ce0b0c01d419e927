"""The rules of `utils/`: which room may import which, what is in it, and how long things are."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib
import inspect
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from imports import UTILS, imported, modules
from places import ROOT

ENTRIES = 14
README_LINES = 40

#: Which room may import which. A lab may import no other lab; `labs/shared` is for two or more.
MAY_IMPORT = {
    "mpi": set(),
    "models": set(),
    "data": set(),
    "figures": {"mpi"},
    "forecast": set(),
    "jobs": {"mpi"},
    "timeline": {"cluster", "figures", "forecast", "mpi"},
    "cluster": {"figures", "jobs", "mpi", "timeline"},
    "checks": {"cluster", "jobs", "mpi"},
    "labs": {
        *("checks", "cluster", "data", "figures", "forecast", "jobs", "models", "mpi", "timeline")
    },
    "course": {"checks", "figures", "jobs"},
    "grading": {"checks", "course", "figures", "jobs"},
    "doctor": {"data", "jobs", "mpi"},
    "__main__": {"course", "doctor", "forecast", "grading", "jobs", "mpi"},
    "__init__": set(),
}
FILE_LINES = 500
FUNCTION_LINES = 60
#: How many lines of Python a room may have, tests left out. Whoever raises a budget says why in
#: the commit's message.
BUDGETS = {
    "__init__": 20,
    "__main__": 355,
    "checks": 2100,
    "cluster": 4580,
    "cluster/boxes": 2440,
    "cluster/here": 1490,
    "cluster/world": 1200,
    "course": 2560,
    "data": 740,
    "doctor": 1490,
    "figures": 1450,
    "forecast": 1630,
    "grading": 5930,
    "jobs": 3960,
    "labs": 140,
    "labs/lab00": 60,
    "labs/lab01": 970,
    "labs/lab02": 940,
    "labs/lab03": 1220,
    "labs/lab04": 1410,
    "labs/lab05": 2100,
    "labs/lab06": 3170,
    "labs/lab07": 1960,
    "labs/lab08": 1470,
    "labs/lab09": 1910,
    "labs/lab10": 1490,
    "labs/lab11": 3610,
    "labs/lab12": 1930,
    "labs/lab13": 1980,
    "labs/lab14": 1540,
    "labs/lab15": 1210,
    "labs/lab16": 1060,
    "labs/lab17": 1220,
    "labs/lab18": 3_420,
    "labs/shared": 2270,
    "models": 290,
    "mpi/benchmark": 660,
    "mpi/labelled": 1140,
    "mpi/torch_mpi": 9350,
    "timeline": 2360,
}
#: Arrows that only a type checker follows: they are below `if TYPE_CHECKING`.
FOR_TYPES = {("timeline", "cluster")}


def room_of(module: str) -> str:
    """The room of a module: `utils.labs.lab06.checks` is in "labs"."""
    parts = module.split(".")
    if parts[0] == "torch_mpi":
        return "mpi"
    return parts[1] if len(parts) > 1 else "__init__"


@functools.cache
def arrows() -> list[tuple[str, str]]:
    """Return who imports whom, module by module."""
    return [(module, target) for module, path in modules() for target in imported(module, path)]


@pytest.mark.quick
@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_rooms_below_it(room):
    across = {
        f"{source} imports {target}"
        for source, target in arrows()
        if room_of(source) == room != room_of(target)
        and room_of(target) not in MAY_IMPORT[room] | {"__init__"}
    }
    assert not across


@pytest.mark.quick
def test_the_rooms_form_no_circle():
    real = {
        room: {other for other in below if (room, other) not in FOR_TYPES}
        for room, below in MAY_IMPORT.items()
    }
    list(graphlib.TopologicalSorter(real).static_order())  # raises CycleError


@pytest.mark.quick
def test_the_world_of_ranks_can_have_another_carrier_than_threads():
    assert not [
        f"{source} imports {target}"
        for source, target in arrows()
        if source.startswith("utils.cluster.world")
        if not target.startswith(("torch_mpi", "utils.cluster.world"))
    ]


@pytest.mark.quick
def test_an_arrow_for_types_costs_no_import():
    code = "import sys, utils.timeline; sys.exit('utils.cluster' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT)


@pytest.mark.quick
def test_whoever_changes_one_lab_changes_no_other():
    def lab(module: str) -> str:
        return found[0] if (found := re.findall(r"^utils\.labs\.(lab\d\d)", module)) else ""

    assert not [
        f"{source} imports {target}"
        for source, target in arrows()
        if lab(target) and room_of(source) != "__main__" and lab(source) != lab(target)
    ]


@pytest.mark.quick
def test_every_room_is_in_the_list_and_the_listing_stays_short():
    entries = {path.stem for path in UTILS.iterdir() if not path.name.startswith("__pycache__")}
    assert entries == set(MAY_IMPORT)
    assert len(entries - {"__init__"}) <= ENTRIES


def readmes() -> list[Path]:
    """The README of every room, and of the rooms in rooms."""
    backend = UTILS / "mpi" / "README.md"  # for those who install the package: another kind of page
    return sorted(path for path in UTILS.rglob("README.md") if path != backend)


@functools.cache
def all_tests() -> str:
    """The text of all test files."""
    folders = (ROOT / "tests", UTILS / "mpi" / "tests")
    return "".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))


@pytest.mark.quick
def test_every_room_has_a_readme_that_a_newcomer_reads_in_two_minutes():
    rooms = [path for path in UTILS.iterdir() if path.is_dir() and path.name != "__pycache__"]
    labs = [path for path in (UTILS / "labs").iterdir() if re.match(r"lab\d\d|shared", path.name)]
    assert not [room.name for room in [*rooms, *labs] if not (room / "README.md").is_file()]
    lengths = {path: len(path.read_text().splitlines()) for path in readmes()}
    assert not {path for path, lines in lengths.items() if lines > README_LINES}


@pytest.mark.quick
@pytest.mark.parametrize("readme", readmes(), ids=lambda path: path.parent.name)
def test_the_files_and_tests_that_a_readme_names_are_there(readme):
    quoted = re.findall(r"`([^`\n]+)`", readme.read_text())
    files = {text for text in quoted if re.fullmatch(r"[\w./]+\.(py|md|json|sh)", text)}
    of_a_user = {"utils.py"}
    assert not {
        text
        for text in files - of_a_user
        if "NN" not in text and not (ROOT / text).exists() and not list(UTILS.rglob(text))
    }
    tests = {text for text in quoted if re.fullmatch(r"test_\w+", text)}
    assert not {name for name in tests if f"def {name}(" not in all_tests()}


@pytest.mark.quick
def test_a_notebooks_first_cell_does_not_wait_for_pytorch():
    labs = ", ".join(path.name for path in sorted((UTILS / "labs").glob("lab*")))
    code = f"from utils.labs import {labs}; import sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT)


@pytest.mark.quick
@pytest.mark.parametrize("lab", sorted(path.name for path in (UTILS / "labs").glob("lab*")))
def test_a_check_is_not_hidden_by_a_module_of_its_name(lab):
    """Once `lab11/offload.py` is imported, `lab11.offload` would be the module."""
    front = "capstone" if lab == "lab14" else "checks"
    names = vars(importlib.import_module(f"utils.labs.{lab}.{front}"))
    modules = {path.stem for path in (UTILS / "labs" / lab).glob("*.py")}
    assert not [name for name in modules & names.keys() if not inspect.ismodule(names[name])]


# --- how long things are -------------------------------------------------------------------------


def budgeted(path: Path) -> str:
    """Return the room whose budget a file counts for: a lab, a package in `mpi`, or an entry."""
    first, *inner = path.relative_to(UTILS).with_suffix("").parts
    has_rooms = first in {"labs", "mpi"} or inner[:1] in (["boxes"], ["here"], ["world"])
    return f"{first}/{inner[0]}" if has_rooms and len(inner) > 1 else first


@pytest.mark.quick
def test_a_room_keeps_to_its_budget_of_lines():
    lines: Counter[str] = Counter()
    for _, path in modules():
        lines[budgeted(path)] += len(path.read_text().splitlines())
    assert lines.keys() == BUDGETS.keys()
    assert not {
        f"{room} has {count} lines, its budget is {BUDGETS[room]}"
        for room, count in lines.items()
        if count > BUDGETS[room]
    }


@pytest.mark.quick
def test_a_file_can_be_read_at_one_sitting():
    lengths = {name: len(path.read_text().splitlines()) for name, path in modules()}
    assert not {name: count for name, count in lengths.items() if count > FILE_LINES}


@pytest.mark.quick
def test_a_function_fits_on_a_screen():
    assert not {
        f"{name}.{node.name}"
        for name, path in modules()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= FUNCTION_LINES
    }


@pytest.mark.quick
def test_the_formatter_lays_code_out():
    assert not [name for name, path in modules() if "# fmt: " in path.read_text()]
