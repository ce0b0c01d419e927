"""The probes of lab 18, which run on the ranks beside the student's answers."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from utils.checks.probe import answer_named, reading_answer, told

from .ward import program

# -- operators in the parts of a step --------------------------------------------------------------


LABELS = ["forward", "loss", "backward", "clip", "log", "step"]  # no plan has a step


def labels_of(seed: int) -> list[str]:
    """Return all labels but one, in some order.

    The calls of the part that is left out belong to the label around it, or to none.
    """
    return random.Random(f"labels {seed}").sample(LABELS, len(LABELS) - 1)


ITEM = "aten::_local_scalar_dense"
COPY = "aten::_to_copy"
PRODUCT = "aten::mm"
#: aten::expand_as calls it, so names that begin alike count twice.
EXPAND = "aten::expand"
#: A part of a step: its label ("" for none), how often its work runs, and the parts inside it.
Part = tuple[str, int, Sequence[Any]]


def plan_of(seed: int) -> list[Part]:
    """Return the parts of a step; a label may come twice, and inside another one."""
    draw = random.Random(seed)
    count = lambda: draw.randint(1, 5)  # noqa: E731
    inner: list[Part] = [("log", count(), []), ("loss", count(), [])]
    parts: list[Part] = [
        ("forward", count(), inner[: draw.randint(1, 2)]),
        ("backward", count(), []),
        ("", draw.choice((0, count())), []),
        ("clip", count(), [("log", count(), [])]),
        ("forward", count(), []),
    ]
    draw.shuffle(parts)
    return parts


def marked(work: Callable[[], object]) -> None:
    """Do work inside many marks that are not among the labels, although two contain some."""
    with contextlib.ExitStack() as stack:
        for mark in ("the backward pass", *map(str, range(8)), "logbook"):
            stack.enter_context(record_function(mark))
        work()


def run(parts: Sequence[Part], work: Callable[[], object]) -> None:
    """Run the work in each part as often as the plan says."""
    for label, times, inside in parts:
        if not label:
            for _ in range(times):
                work()
            continue
        with record_function(label):
            for _ in range(times):
                marked(work)
            run(inside, work)


def works(x: Tensor) -> dict[str, Callable[[], object]]:
    """Return work that calls an operator once, and never directly, by the operator's name."""
    return {
        ITEM: lambda: x[0, 0].item(),  # aten::item calls it
        COPY: lambda: x.double(),  # aten::to calls it
        EXPAND: lambda: x[:1].expand_as(x),
        PRODUCT: lambda: torch.nn.functional.linear(x, x.t()),  # aten::linear calls it
    }


def probe_calls(user_ns: dict, *, rank: int, seed: int, op: str, labels: list) -> dict:
    """Return the student's counts for one step, and how often the step ran."""
    parts = plan_of(seed)
    x = torch.ones(3, 3)
    work = works(x)[op]
    others = [w for name, w in works(x).items() if name != op]
    ran = []

    def step() -> None:
        ran.append(rank)
        run(parts, work)
        for other in others:
            other()
        for mark in (op.rpartition(":")[2], f"{op}_"):  # called like the operator, nearly
            with record_function(mark):
                others[0]()

    counts = reading_answer(user_ns, "calls_in")(step, op, labels)
    return {"counts": told(counts), "ran": len(ran)}


# -- names and repaired programs -------------------------------------------------------------------


def probe_name(user_ns: dict[str, Any], *, rank: int) -> Any:
    """Return this rank's `my_name`; if it isn't a string or a number, a list with its type."""
    name = answer_named(user_ns, "my_name")
    return name if isinstance(name, str | int) else [type(name).__name__]


def probe_answer(user_ns: dict[str, Any], *, rank: int, answer: str) -> dict[str, Any]:
    """Return the student's name, and the student's object that is called `answer`."""
    name = probe_name(user_ns, rank=rank)
    return {"name": name, "answer": told(answer_named(user_ns, answer))}


def probe_reference(user_ns: dict[str, Any], *, rank: int, **asked: Any) -> dict[str, Any]:
    """Run a program with one of the reference's repairs; return what it gave.

    Args:
        asked: the arguments of :func:`.ward.program.measured`.
    """
    return program.measured(**asked)


def probe_ready(user_ns: dict[str, Any], *, rank: int, answer: str, text: str, name: str) -> bool:
    """Put the student's repair into the program, and load it; an error says what is wrong."""
    repaired = program.repaired(text, answer_named(user_ns, answer))
    return bool(program.loaded(repaired, name))


def probe_repair(
    user_ns: dict[str, Any], *, rank: int, answer: str, text: str, **asked: Any
) -> dict[str, Any]:
    """Run the program with the student's repair; return what it gave.

    Args:
        asked: the other arguments of :func:`.ward.program.measured`.
    """
    repaired = program.repaired(text, answer_named(user_ns, answer))
    return program.measured(repaired, **asked)
