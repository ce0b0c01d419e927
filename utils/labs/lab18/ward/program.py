"""Run a patient's program on a rank, repaired or not, and count what it needs."""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch_mpi.errors import CommunicationError

#: A repair may change at most so many lines, and have at most so many characters.
MOST_LINES = 12
MOST_CHARACTERS = 4000
#: The beginning of a line that catches an error.
CATCHES = re.compile(r"^\s*except\b", re.MULTILINE)

#: A call that writes to a file.
WRITES = re.compile(r"\b(?:open|save|tofile|memmap|dump|write\w*|\w*TemporaryFile|mkstemp)\s*\(")
#: A call in the background.
BACKGROUND = re.compile(r"async_op|irecv")


class RepairError(Exception):
    """A repair can't be put into the program; the message says why, and what to do."""


def repaired(text: str, repair: Any) -> str:
    """Return the program with new text instead of some of its lines.

    Args:
        text: the program.
        repair: by a line's number, from 1, its new text; "" deletes the line.

    Raises:
        RepairError: the repair has another form, names a line that isn't there, catches errors, or
            writes to files.
    """
    lines = text.splitlines()
    _check_form(repair, len(lines))
    kept = ((number, repair.get(number, line)) for number, line in enumerate(lines, start=1))
    whole = "\n".join(new for number, new in kept if new or number not in repair) + "\n"
    if len(CATCHES.findall(whole)) > len(CATCHES.findall(text)):
        raise RepairError("Your repair catches an error. Repair what causes the error")
    if WRITES.search(whole):
        raise RepairError("Your repair writes to a file. Keep only what the program still needs")
    return whole


def _check_form(repair: Any, n: int) -> None:
    """Raise RepairError if a repair isn't a dict of few numbers of the n lines, and their text."""
    if not isinstance(repair, Mapping) or not repair:
        raise RepairError('A repair is a dict such as {17: "    dist.all_reduce(loss)"}')
    if len(repair) > MOST_LINES or sum(len(str(new)) for new in repair.values()) > MOST_CHARACTERS:
        raise RepairError(f"Your repair changes a lot. Change at most {MOST_LINES} lines")
    for number, new in repair.items():
        if isinstance(number, bool) or not isinstance(number, int):
            raise RepairError(f"Your repair has the key {number!r}. Use the number of a line")
        if not 1 <= number <= n:
            raise RepairError(f"Line {number} is not in the program, which has {n} lines")
        if not isinstance(new, str):
            raise RepairError(f"The new text of line {number} is {new!r}. Write it as a string")


def loaded(text: str, name: str) -> Any:
    """Return the function `train` of a program; tracebacks then show its lines.

    Raises:
        RepairError: the text isn't a Python program, or has no such function.
    """
    file = f"{name}.py"
    try:
        code = compile(text, file, "exec")
    except SyntaxError as error:
        shown = (error.text or "").strip()
        said = f"Your repaired program is not valid Python: {error.msg} in {shown!r}"
        raise RepairError(f"{said}. Look at quotes and indentation") from None
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {"__name__": name}
    exec(code, namespace)
    if not callable(train := namespace.get("train")):
        raise RepairError("Your repaired program has no function train any more. Keep its line")
    return train


def _with_its_line(error: Exception, text: str, name: str) -> RepairError:
    """Return an error that quotes the program's innermost line in the traceback."""
    walk = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in walk if frame.f_code.co_filename == f"{name}.py"]
    where = f" at `{text.splitlines()[lines[-1] - 1].strip()}`" if lines else ""
    return RepairError(f"Your repaired program raises {type(error).__name__}{where}: {error}")


def measured(
    text: str,
    name: str,
    seeds: Sequence[int],
    limits: Collection[str],
    arguments: Mapping[str, Any],
) -> dict[str, Any]:
    """Run a program on this rank, once for each seed; return its results and what it needed.

    Args:
        text, name: the program.
        seeds: what the program draws its numbers from.
        limits: what its case limits, see :class:`.case.Case`.
        arguments: further arguments of `train`.

    Raises:
        RepairError: the text isn't a program, or it raises an error; the message quotes the line.
        CommunicationError: a call of the program failed.

    Returns:
        A dict with "results" (what `train` returned for each seed), "calls" (the records of its
        communication), "hasty" (calls in the background that a step of the optimizer did not wait
        for), "races" (operations on tensors of such calls), "groups" (groups that it asked for),
        "rate" (the largest learning rate), "work" (numbers that PyTorch's operations computed),
        "peak" (the most bytes of tensors at once), and "kept" (the most bytes of tensors, arrays
        and Python objects to which the program refers at a step). The last three don't depend
        on the seed, so only the first run has them; they are 0 if the patient has no such limit.
    """
    first, *others = seeds
    runs = [_once(text, name, first, limits, arguments)]
    runs += [_once(text, name, seed, (), arguments) for seed in others]
    totals = {key: sum(run[key] for run in runs) for key in ("hasty", "races", "groups", "work")}
    most = {key: max(run[key] for run in runs) for key in ("rate", "peak", "kept")}
    return {
        "results": [run["result"] for run in runs],
        "calls": [call for run in runs for call in run["calls"]],
        **totals,
        **most,
    }


def _once(
    text: str, name: str, seed: int, limits: Collection[str], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Run a program with one seed."""
    from utils.checks.probe import recorded, told

    from .counters import Watched, counted

    train = loaded(text, name)
    watched = Watched()
    train.__globals__["dist"] = watched
    looked = {*limits, *(["races"] if BACKGROUND.search(text) else [])}  # a mode makes it slower
    try:
        with counted(looked, f"{name}.py", watched) as counts:
            result, calls = recorded(train, seed, **arguments)
    except CommunicationError:
        raise  # its message has the line
    except Exception as error:
        raise _with_its_line(error, text, name) from error
    return {"result": told(result), "calls": calls, **counts}
