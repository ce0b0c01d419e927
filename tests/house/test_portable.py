"""Files that every system can have, and read in the same way: Linux, macOS, and Windows."""

from __future__ import annotations

import ast
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from places import ROOT

pytestmark = pytest.mark.quick

FORBIDDEN = set('<>:"|?*\\') | {chr(number) for number in range(32)}
RESERVED = {"aux", "con", "nul", "prn", "conin$", "conout$"}
RESERVED |= {f"{device}{number}" for device in ("com", "lpt") for number in range(10)}
#: Windows limits a path to 260 characters, and the course's folder needs some of them.
LONGEST = 200
#: Rooms whose code runs on Windows.
ROOMS = ("utils", "benchmarks", "docs")
#: Options of `subprocess.run` by which a pipe has text.
TEXT_PIPES = ("text", "universal_newlines")


def names() -> list[str]:
    """The names of all committed files."""
    if not (ROOT / ".git").exists():
        pytest.skip("no git clone")
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    return done.stdout.decode().split("\0")[:-1]


def why_not(part: str) -> str:
    """Why Windows has no file or folder of this name; empty if it can have it."""
    if FORBIDDEN & set(part):
        return "a forbidden character"
    if part.endswith((".", " ")):
        return "a dot or a space at the end"
    return "a reserved name" if part.lower().partition(".")[0].strip() in RESERVED else ""


def test_a_clone_on_windows_has_every_file():
    assert not {
        f"{name}: {why}" for name in names() for part in name.split("/") if (why := why_not(part))
    }
    assert not [name for name in names() if len(name) > LONGEST]


def test_no_file_replaces_another_where_case_does_not_count():
    paths = {str(folder) for name in names() for folder in (Path(name), *Path(name).parents)}
    counted = Counter(path.casefold() for path in paths)
    assert not [path for path, count in counted.items() if count > 1]


@pytest.mark.parametrize(
    "name", ["a:b", "what?", "aux", "AUX.py", "com1.txt", "end.", "end ", "tab\t", "back\\slash"]
)
def test_names_that_windows_refuses_are_found(name):
    assert why_not(name)


def test_git_gives_notebooks_and_scripts_the_same_bytes_on_windows():
    assert "* text=auto eol=lf" in (ROOT / ".gitattributes").read_text().splitlines()


# --- encodings -----------------------------------------------------------------------------------


def mode_of(call: ast.Call, place: int) -> str:
    """The mode in which a call opens a file; "b" if it is not written there."""
    given = [word.value for word in call.keywords if word.arg == "mode"] + call.args[place:][:1]
    value = given[0] if given else ast.Constant("r")
    return str(value.value) if isinstance(value, ast.Constant) else "b"


def reads_as_the_system_likes(call: ast.Call) -> bool:
    """Whether a call reads or writes text without saying in which encoding."""
    words = {word.arg: word.value for word in call.keywords}
    if "encoding" in words or None in words:
        return False
    match call.func:
        case ast.Name("open"):
            return len(call.args) < 4 and "b" not in mode_of(call, 1)
        case ast.Attribute(attr="run" | "Popen" | "check_output"):
            return any(ast.unparse(words.get(way, call)) == "True" for way in TEXT_PIPES)
        case ast.Attribute(attr="read_text"):
            return not call.args
        case ast.Attribute(attr="write_text"):
            return len(call.args) == 1
        case ast.Attribute(value=ast.Name("os" | "webbrowser" | "tarfile" | "zipfile" | "Image")):
            return False
        case ast.Attribute(attr="open"):
            return len(call.args) < 3 and "b" not in mode_of(call, 0)
    return False


def places() -> Iterator[str]:
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if name.startswith("utils/mpi/tests/"):
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and reads_as_the_system_likes(node):
                    yield f"{name}:{node.lineno}: {ast.unparse(node)}"


def test_texts_of_the_course_are_utf8_on_windows_too():
    """Windows reads and writes cp1252 otherwise, which has no → and no ✓."""
    assert not [*places()]
