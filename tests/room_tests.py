"""Chooses the tests that a change in one room can break: `make test-room ROOM=lab06`.

A test is chosen if it reaches a file of the room by imports (see imports.py), if it goes through
all notebooks and the room is a lab, or if it reads all files, as the tests of the house do. A test
with a lab as its parameter, such as an answer or a notebook, is chosen if that lab reaches the
room.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from imports import Reach
from places import ROOT

#: Folders of tests that read the files of every room. Of the tests in them only quick ones run.
OF_ALL_ROOMS = ("house", "course")


class UnknownRoomError(Exception):
    """There is no room of this name; the message lists the rooms."""


def files_of(room: str) -> frozenset[Path]:
    """Return the files of a room: of a folder or file in `utils`, or of any path, as `benchmarks`.

    A lab's room is `utils/labs/lab06` with its notebooks and the answers to it.

    Raises:
        UnknownRoomError: nothing has this name.
    """
    places = [ROOT / "utils" / room, ROOT / "utils/labs" / room, ROOT / "utils" / f"{room}.py"]
    place = next((path for path in [*places, ROOT / room] if room and path.exists()), None)
    if place is None:
        raise UnknownRoomError(
            f"There is no room '{room}'. Name one of these: {', '.join(rooms())}."
        )
    found = set(place.rglob("*")) if place.is_dir() else {place}
    if lab := re.fullmatch(r"lab(\d\d)", place.name):
        found |= {*ROOT.glob(f"solutions/{lab[1]}_*.ipynb"), *ROOT.glob(f"labs/{lab[1]}_*.ipynb")}
        found |= {ROOT / f"tests/labs/answers/{place.name}.py"}
    return frozenset(path for path in found if path.is_file())


def rooms() -> list[str]:
    """Return the names of all rooms."""
    inner = ("labs", "cluster", "mpi")
    folders = [*(ROOT / "utils").iterdir()]
    folders += [path for name in inner for path in (ROOT / "utils" / name).iterdir()]
    names = [path.relative_to(ROOT / "utils").as_posix() for path in folders if _is_room(path)]
    return sorted(["benchmarks", *(name.removeprefix("labs/") for name in names)])


def _is_room(path: Path) -> bool:
    return (path.is_dir() and any(path.glob("*.py"))) or path.name == "mpi"


def divided(items: list[pytest.Item], room: str) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the tests that a change in this room can break, and all others.

    Raises:
        UnknownRoomError: there is no such room.
    """
    files, reach = files_of(room), Reach()
    kept: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        (kept if _can_break(item, files, reach) else others).append(item)
    return kept, others


def _can_break(item: pytest.Item, files: frozenset[Path], reach: Reach) -> bool:
    folder = item.path.parent
    if folder.name in OF_ALL_ROOMS and item.get_closest_marker("quick"):
        return True
    lab = lab_of(item)
    if files & reach.of(item.path, every_lab=not lab):
        return True
    if not lab and "notebooks(" in inspect.getsource(item.function):
        return any(path.suffix == ".ipynb" for path in files)
    own = [ROOT / f"utils/labs/lab{lab}/checks.py", ROOT / f"tests/labs/answers/lab{lab}.py"]
    own += [*ROOT.glob(f"solutions/{lab}_*.ipynb")] if lab else []
    return bool(lab) and any(files & reach.of(path) for path in own if path.is_file())


def lab_of(item: pytest.Item) -> str:
    """Return the number of the lab that a test has as its parameter, such as "06"; "" for none."""
    call = getattr(item, "callspec", None)
    if call is None:
        return ""
    for value in call.params.values():
        if isinstance(value, Path) and value.parent.parent == ROOT and value.suffix == ".ipynb":
            return value.name[:2]
        if isinstance(value, str) and (found := re.fullmatch(r"(?:lab)?(\d\d)(_\w+)?", value)):
            return found[1]
    return ""
