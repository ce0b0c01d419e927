"""The rules of `utils/` and `benchmarks/`: who imports whom, what is there, how long things are."""

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
from imports import BENCHMARKS, OF_OURS, UTILS, imported, modules
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
    "grading": {"checks", "course", "figures", "jobs", "mpi"},
    "doctor": {"data", "jobs", "mpi"},
    "__main__": {"course", "doctor", "forecast", "grading", "jobs", "mpi"},
    "__init__": set(),
    # What measures the course is beside `utils/`, and no room may import it.
    "benchmarks": {"cluster", "jobs", "mpi"},
}
FILE_LINES = 500
FUNCTION_LINES = 60
#: How many lines of Python the house may have. Whoever raises a sum says in the commit's message
#: what a user gains, and what could not go for it.
SUMS = {
    "platform": 44_430,  # utils without labs, tests left out
    "labs": 36_570,  # labs 00 to 18
    "tests": 59_730,
    "benchmarks": 1_725,
}
#: How many lines each lab after 18 may have.
NEW_LAB = 1_000
#: Arrows that only a type checker follows: they are below `if TYPE_CHECKING`.
FOR_TYPES = {("timeline", "cluster")}


def room_of(module: str) -> str:
    """The room of a module: `utils.labs.lab06.checks` is in "labs"."""
    parts = module.split(".")
    if parts[0] == "torch_mpi":
        return "mpi"
    if parts[0] == "benchmarks":
        return "benchmarks"
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
    assert entries | {"benchmarks"} == set(MAY_IMPORT)
    assert len(entries - {"__init__"}) <= ENTRIES


def readmes() -> list[Path]:
    """The README of every room, and of the rooms in rooms."""
    backend = UTILS / "mpi" / "README.md"  # for those who install the package: another kind of page
    found = (path for folder in OF_OURS for path in folder.rglob("README.md"))
    return sorted(path for path in found if path != backend)


@functools.cache
def all_tests() -> str:
    """The text of all test files."""
    folders = (ROOT / "tests", UTILS / "mpi" / "tests")
    return "".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))


@pytest.mark.quick
def test_every_room_has_a_readme_that_a_newcomer_reads_in_two_minutes():
    rooms = [path for path in UTILS.iterdir() if path.is_dir() and path.name != "__pycache__"]
    rooms.append(BENCHMARKS)
    labs = [path for path in (UTILS / "labs").iterdir() if re.match(r"lab\d\d|shared", path.name)]
    assert not [room.name for room in [*rooms, *labs] if not (room / "README.md").is_file()]
    lengths = {path: len(path.read_text().splitlines()) for path in readmes()}
    assert not {path for path, lines in lengths.items() if lines > README_LINES}


#: Files of users, and files that programs of the course write, which our pages name.
OF_USERS = {
    "entries/own.py",
    "scoreboard.json",
    "utils.py",
    "deadlines.toml",
    "results/statistics.ipynb",
    "scaling/series.sh",
}
#: Tests of PyTorch that our pages name.
OF_PYTORCH = {"test_isend", "test_irecv"}


@functools.cache
def tracked() -> list[str]:
    """The files of the repository, as `/utils/models.py`; none outside of a clone."""
    if not (ROOT / ".git").exists():
        return []
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [f"/{name}" for name in done.stdout.splitlines()]


def pages() -> list[str]:
    """All pages but the changelog, which names what was there before."""
    return [name for name in tracked() if name.endswith(".md") and name != "/CHANGELOG.md"]


@pytest.mark.quick
@pytest.mark.parametrize("page", pages())
def test_the_files_and_tests_that_a_page_names_are_there(page):
    quoted = re.findall(r"`([^`\n]+)`", (ROOT / page[1:]).read_text(encoding="utf-8"))
    files = {
        text for text in quoted if re.fullmatch(r"\w[\w./]*\.(py|md|json|sh|toml|ipynb)", text)
    }
    assert not {
        text
        for text in files - OF_USERS
        if "NN" not in text and not any(name.endswith(f"/{text}") for name in tracked())
    }
    in_rooms = {text for text in quoted if re.fullmatch(r"(\.\./)+[\w./]+\.\w+", text)}
    room = (ROOT / page[1:]).parent
    assert not {text for text in in_rooms if not (room / text).exists()}
    tests = {text for text in quoted if re.fullmatch(r"test_\w+", text)}
    assert not {name for name in tests - OF_PYTORCH if f"def {name}(" not in all_tests()}


@pytest.mark.quick
def test_a_notebooks_first_cell_does_not_wait_for_pytorch():
    labs = ", ".join(path.name for path in sorted((UTILS / "labs").glob("lab*")))
    code = f"from utils.labs import {labs}; import sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT)


@pytest.mark.quick
@pytest.mark.parametrize("lab", sorted(path.name for path in (UTILS / "labs").glob("lab*")))
def test_a_check_is_not_hidden_by_a_module_of_its_name(lab):
    """Once a module `lab11/zero.py` is imported, `lab11.zero` is the module, not the check."""
    front = "capstone" if lab == "lab14" else "checks"
    names = vars(importlib.import_module(f"utils.labs.{lab}.{front}"))
    modules = {path.stem for path in (UTILS / "labs" / lab).glob("*.py")}
    assert not [name for name in modules & names.keys() if not inspect.ismodule(names[name])]


@pytest.mark.quick
def test_the_readme_of_the_measuring_tools_names_each_command_and_each_command_starts():
    readme = (BENCHMARKS / "README.md").read_text()
    commands = {path for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text()}
    named = set(re.findall(r"`python -m (benchmarks\.[\w.]+)`", readme))
    assert named == {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in commands}
    for name in named:
        command = [sys.executable, "-m", name, "--help"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert f"python -m {name}" in done.stdout, done.stderr


# --- how long things are -------------------------------------------------------------------------


def lines_of(path: Path) -> int:
    """How many lines a file has."""
    return len(path.read_text(encoding="utf-8").splitlines())


def sum_of(path: Path) -> str:
    """Which sum a file of `utils` counts for; a lab after 18 has its own."""
    first, *inner = path.relative_to(UTILS).parts
    if first != "labs":
        return "platform"
    number = re.fullmatch(r"lab(\d+)", inner[0])
    return inner[0] if number and int(number[1]) > 18 else "labs"


@pytest.mark.quick
def test_the_house_keeps_to_its_three_sums_of_lines():
    lines: Counter[str] = Counter()
    for _, path in modules(UTILS):
        lines[sum_of(path)] += lines_of(path)
    for folder in ("tests", "benchmarks"):
        lines[folder] = sum(map(lines_of, (ROOT / folder).rglob("*.py")))
    most = {name: SUMS.get(name, NEW_LAB) for name in lines}
    too_long = {name: count for name, count in lines.items() if count > most[name]}
    assert not too_long, f"may have {most}"


@pytest.mark.quick
def test_a_file_can_be_read_at_one_sitting():
    lengths = {name: lines_of(path) for name, path in modules()}
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
