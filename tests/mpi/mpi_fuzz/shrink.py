"""A failing program made shorter, while it still fails in the same way."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

from . import faults
from .jobs import Stage


def failure(program: dict, stage: Stage, times: int = 1) -> str:
    """What goes wrong in a program that is run alone, up to some times; "" for nothing."""
    for _ in range(times):
        for outcome in stage.run([program]):
            if why := faults.wrong(outcome):
                return why
    return ""


def shrunk(
    program: dict, stage: Stage, times: int = 1, say: Callable[[str], object] = lambda _: None
) -> tuple[dict, str]:
    """The shortest program found that fails as this one does, and what goes wrong in it.

    Args:
        times: how often each one is run, where it fails only sometimes.
    """
    why = failure(program, stage, times)
    if not why:
        return program, ""
    smaller = True
    while smaller:
        smaller = False
        for one in candidates(program):
            said = failure(one, stage, times)
            if said and _kind(said) == _kind(why):
                say(f"{len(one['steps'])} steps: {said.splitlines()[0][:120]}")
                program, why, smaller = one, said, True
                break
    return program, why


def _kind(why: str) -> str:
    """The error's class: another one is another fault."""
    return why.partition(":")[0]


def candidates(program: dict) -> Iterator[dict]:
    """Programs that are a little less than this one: the largest cuts first."""
    planted = program.get("fault", {}).get("strands", [])
    strands = list(
        dict.fromkeys(s["strand"] for s in program["steps"] if s["strand"] not in planted)
    )
    length = len(strands)
    while length:
        for start in range(0, len(strands), length):
            if one := _without(program, set(strands[start : start + length])):
                yield one
        length //= 2
    if program["network"]:
        yield {**program, "network": None}
    if program["strict"]:
        yield {**program, "strict": False}
    for index, step in enumerate(program["steps"]):
        for simpler in _simpler(step):
            yield {
                **program,
                "steps": [*program["steps"][:index], simpler, *program["steps"][index + 1 :]],
            }


def _without(program: dict, strands: set[int]) -> dict | None:
    """The program without some strands; None where what is left needs them."""
    left = [s for s in program["steps"] if s["strand"] not in strands]
    groups = {s["group"] for s in left if s["do"] == "new_group"} | {0}
    numbers = {s["id"] for s in left}
    for step in left:
        needed = {spec["step"] for spec in specs(step) if "step" in spec}
        if step.get("group", 0) not in groups or not needed <= numbers:
            return None
    return {**program, "steps": left}


def specs(step: dict) -> list[dict]:
    """The tensors of a step on all its ranks, as data."""
    made = step.get("make", [])
    return [spec for one in made for spec in (one if isinstance(one, list) else [one])]


def _simpler(step: dict) -> Iterator[dict]:
    """The step with plain tensors, all of one seed; with plain waits; with all ranks blocking."""
    one = copy.deepcopy(step)
    for spec in specs(one):
        if "layout" in spec:
            spec["layout"] = "plain"
    if one != step:
        yield one
    same = copy.deepcopy(step)
    for spec in specs(same):
        if "seed" in spec:
            spec["seed"] = 1
    if same != step:
        yield same
    if step["do"] == "wait" and set(step["how"]) != {"wait"}:
        yield {**step, "how": ["wait"] * len(step["how"])}
