"""A program: strands of steps, drawn by a seed, and mixed."""

from __future__ import annotations

from random import Random

from . import collectives, messages
from .drawing import Draw

#: Seconds that a wait may last. Nothing in a right program comes near it.
TIMEOUT = 60.0


def draw(seed: int, size: int, strands: int | None = None, faulty: bool = False) -> dict:
    """A program for ``size`` ranks: the same for the same seed.

    Args:
        strands: how many calls, with what belongs to them; 4 to 14 without a number.
        faulty: for a fault to be planted in: see :class:`Draw`.
    """
    d = Draw(Random(f"{seed} of {size}"), size, [list(range(size))], faulty=faulty)
    program = {"seed": seed, "size": size, **surroundings(d)}
    return program | {"steps": mixed(d, strands or d.random.randint(4, 14))}


def surroundings(d: Draw) -> dict:
    """What a program runs in: a timeout, now and then a slow network, or all checks of PyTorch."""
    network = [20e-6, d.random.choice((1e9, 2e8))] if d.chance(0.15) else None
    return {"timeout": TIMEOUT, "network": network, "strict": d.chance(0.1)}


def mixed(d: Draw, count: int, first: int = 0) -> list[dict]:
    """Strands that begin one after the other and go on by chance, up to five at a time.

    They have numbers from `first` on.
    """
    steps, open_strands, begun = [], [], 0
    while begun < count or open_strands:
        if begun < count and (not open_strands or (len(open_strands) < 5 and d.chance(0.5))):
            begun += 1
            strand = _strand(d, first + begun)
            if strand[0]["do"] == "new_group":  # the next strand may be on it
                steps += strand
                continue
            open_strands.append(strand)
        strand = d.random.choice(open_strands)
        while True:
            step = strand.pop(0)
            steps.append(step)
            for group, sources, target, tag in step.pop("frees", ()):
                d.give_back(group, sources, target, tag)
            if not step.get("with_next"):
                break
        if not strand:
            open_strands.remove(strand)
            d.usable += [] if "gives" not in step else [step.pop("gives")]
    return steps


def _strand(d: Draw, number: int) -> list[dict]:
    """The steps of one call."""
    group = d.random.randrange(len(d.groups))
    several = len(d.groups[group]) > 1
    kind = d.random.random()
    if kind < 0.08 and d.size > 1 and len(d.groups) < 4:
        steps = _new_group(d)
    elif kind < 0.40 and d.faulty and not several:
        steps = _collective(d, group)
    elif kind < 0.28:
        steps = messages.pair(d, group)
    elif kind < 0.34 and several:
        steps = messages.from_any(d, group)
    elif kind < 0.40:
        steps = messages.batch(d, group)
    elif kind < 0.46:
        steps = messages.objects(d, group)
    else:
        steps = _collective(d, group)
    for step in steps:
        step["strand"] = number
    return steps


def _new_group(d: Draw) -> list[dict]:
    members = sorted(d.random.sample(range(d.size), d.random.randint(1, d.size)))
    d.groups.append(members)
    return [{"id": d.number(), "do": "new_group", "group": len(d.groups) - 1, "members": members}]


def _collective(d: Draw, group: int) -> list[dict]:
    step = collectives.draw(d, group)
    steps = [step]
    if step["async"]:
        ranks = d.random.sample(step["async"], len(step["async"]))
        cut = d.random.randint(1, len(ranks))
        parts = [ranks[:cut], ranks[cut:]]
        steps += [messages.wait(d, step, part) for part in parts if part]
    if step["do"] in ("all_reduce", "broadcast"):
        made = [specs[0] for specs in step["make"]]
        if not any(one.get("layout") == "expanded" for one in made):
            shape = step["shape"] if "shape" in step else made[0]["shape"]
            steps[-1]["gives"] = (step["id"], step["members"], step["dtype"], shape)
    return steps
