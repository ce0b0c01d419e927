"""Programs with a planted fault, and what the backend has to say of each.

A fault is a strand somewhere in a right program, with all that is under way there; ``instead`` of
a step says what single ranks do in its place. Every program ends with a collective that is like no
other, so that no fault runs through.
"""

from __future__ import annotations

import re
from random import Random

from . import collectives, text
from .drawing import Draw
from .jobs import TESTS, Outcome
from .program import TIMEOUT, mixed, surroundings
from .tensors import spec

#: Seconds within which a fault has to be known on all ranks; the groups' timeout is longer.
SOON = TIMEOUT / 2
_MISMATCH, _STUCK = "CommunicationMismatch", "CommunicationTimeout"
_ERRORS = (_MISMATCH, _STUCK, "CommunicationStopped")
_SIMPLE = (
    *("all_reduce", "broadcast", "reduce", "all_gather_into_tensor", "reduce_scatter_tensor"),
    *("all_gather", "all_to_all_single", "gather", "scatter"),
)
_SHAPED = _SIMPLE[:6]
_REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter_tensor", "reduce_scatter")
_ROOTED = ("broadcast", "reduce", "gather", "scatter")


def draw(seed: int, size: int, kind: str | None = None) -> dict:
    """A program for ``size`` ranks, two at least, with a fault: the same for the same seed."""
    d = Draw(Random(f"fault {seed} of {size}"), size, [list(range(size))], faulty=True)
    kind = kind or d.random.choice(tuple(KINDS))
    program = {"seed": seed, "size": size, **surroundings(d)}
    right = mixed(d, d.random.randint(0, 6))
    group = d.random.choice([g for g, members in enumerate(d.groups) if len(members) > 1])
    odd = d.random.choice(d.groups[group])
    planted = KINDS[kind][0](d, group, odd)
    for step in planted:
        step["strand"] = 100
    place = d.random.choice(_places(right, group))
    told = {"kind": kind, "rank": odd, "steps": [s["id"] for s in planted], "strands": [100]}
    return program | {"fault": told, "steps": [*right[:place], *planted, *right[place:]]}


def _places(steps: list[dict], group: int) -> list[int]:
    """Where a call on a group may stand: not before it is made, nor within a blocking pair."""
    made = [k for k, s in enumerate(steps) if s["do"] == "new_group" and s["group"] == group]
    first = made[0] + 1 if made else 0
    return [k for k in range(first, len(steps) + 1) if not (k and steps[k - 1].get("with_next"))]


# -- how they are planted -------------------------------------------------------------------------


def _call(d: Draw, group: int, names, **fixed) -> dict:
    """A small blocking collective."""
    fixed = {"dtype": "float32", "shape": [4], "op": "SUM"} | fixed
    return collectives.draw(d, group, d.random.choice(names), **fixed) | {"async": []}


def _differs(d: Draw, step: dict, odd: int, other: dict | None) -> list[dict]:
    """One rank does something else in a step; now and then without waiting for it at once."""
    if other is not None:
        other["id"] = step["id"]
    steps = [step | {"instead": {str(odd): other}}]
    if d.chance(0.3):
        for one in (steps[0], other):
            if one is not None:
                one["async"] = list(step["members"])
        ranks = [r for r in step["members"] if other is not None or r != odd]
        how = ["wait"] * len(ranks)
        steps.append({"id": d.number(), "do": "wait", "of": step["id"], "ranks": ranks, "how": how})
    return steps


def _missing(d: Draw, group: int, odd: int) -> list[dict]:
    return _differs(d, _call(d, group, (*_SIMPLE, "barrier")), odd, None)


def _other_collective(d: Draw, group: int, odd: int) -> list[dict]:
    first, second = d.random.sample((*_SIMPLE, "barrier"), 2)
    return _differs(d, _call(d, group, [first]), odd, _call(d, group, [second]))


def _other_shape(d: Draw, group: int, odd: int) -> list[dict]:
    name = d.random.choice(_SHAPED)
    return _differs(d, _call(d, group, [name]), odd, _like(d, group, name, shape=[5]))


def _like(d: Draw, group: int, name: str, **fixed) -> dict:
    return _call(d, group, [name], **fixed)


def _other_dtype(d: Draw, group: int, odd: int) -> list[dict]:
    name = d.random.choice(_SIMPLE)
    root = d.random.choice(d.groups[group])
    first = _call(d, group, [name], root=root)
    return _differs(d, first, odd, _call(d, group, [name], root=root, dtype="int32"))


def _other_op(d: Draw, group: int, odd: int) -> list[dict]:
    name, root = d.random.choice(_REDUCTIONS), d.random.choice(d.groups[group])
    first = _call(d, group, [name], root=root)
    return _differs(d, first, odd, _call(d, group, [name], root=root, op="MAX"))


def _other_root(d: Draw, group: int, odd: int) -> list[dict]:
    name = d.random.choice(_ROOTED)
    roots = d.random.sample(d.groups[group], 2)
    first, second = (_call(d, group, [name], root=root) for root in roots)
    return _differs(d, first, odd, second)


def _other_order(d: Draw, group: int, odd: int) -> list[dict]:
    first, second = (_call(d, group, [n]) for n in d.random.sample(_SIMPLE, 2))
    return [first | {"instead": {str(odd): second}}, second | {"instead": {str(odd): first}}]


def _groups_in_other_order(d: Draw, group: int, odd: int) -> list[dict]:
    """The same members have two groups; one of them uses the second first."""
    members, steps = d.groups[group], []
    for _ in range(2):
        d.groups.append(members)
        made = {"id": d.number(), "do": "new_group", "group": len(d.groups) - 1}
        steps.append(made | {"members": members})
    name = d.random.choice(("all_reduce", "barrier", "all_gather", "all_to_all_single"))
    first, second = (_call(d, len(d.groups) - k, [name]) for k in (2, 1))
    steps.append(first | {"instead": {str(odd): second}})
    return [*steps, second | {"instead": {str(odd): first}}]


def _message(d: Draw, do: str, group: int, ranks: tuple[int, int], shape, dtype="float32") -> dict:
    step = {"id": d.number(), "do": do, "group": group, "rank": ranks[0], "peer": ranks[1]}
    return step | {"tag": 99, "make": [spec(1, shape, dtype)], "message": 0}


def _peer(d: Draw, group: int, odd: int) -> int:
    return d.random.choice([r for r in d.groups[group] if r != odd])


def _recv_alone(d: Draw, group: int, odd: int) -> list[dict]:
    return [_message(d, "recv", group, (odd, _peer(d, group, odd)), [4])]


def _send_alone(d: Draw, group: int, odd: int) -> list[dict]:
    return [_message(d, "send", group, (odd, _peer(d, group, odd)), [300_000])]


def _other_message(d: Draw, group: int, odd: int) -> list[dict]:
    """Sender and receiver mean different messages."""
    peer = _peer(d, group, odd)
    count = d.random.choice((4, 2000))
    other = d.random.choice((([count + 1], "float32"), ([count], "int32"), ([count], "float64")))
    sent = _message(d, "send", group, (peer, odd), [count])
    return [sent, _message(d, "recv", group, (odd, peer), *other)]


KINDS = {
    "a collective is missing": (_missing, (_MISMATCH, _STUCK)),
    "another collective": (_other_collective, (_MISMATCH,)),
    "another shape": (_other_shape, (_MISMATCH,)),
    "another dtype": (_other_dtype, (_MISMATCH,)),
    "another op": (_other_op, (_MISMATCH,)),
    "another root": (_other_root, (_MISMATCH,)),
    "another order": (_other_order, (_MISMATCH,)),
    "groups in another order": (_groups_in_other_order, (_STUCK,)),
    "a receive without a send": (_recv_alone, (_STUCK,)),
    "a send without a receive": (_send_alone, (_STUCK,)),
    "another message": (_other_message, (_MISMATCH,)),
}


# -- faults that end a rank: of a script of their own ---------------------------------------------


def _raises(d: Draw, odd: int) -> dict:
    return {"id": d.number(), "do": "raise", "rank": odd}


def _ends(d: Draw, odd: int) -> dict:
    return {"id": d.number(), "do": "exit", "rank": odd}


def _leaves_a_message(d: Draw, odd: int) -> dict:
    return _message(d, "send", 0, (odd, _peer(d, 0, odd)), [4])


#: What is planted; the exit status that is not 0; what stands on stderr, with the rank's number.
ENDINGS = {
    "a rank raises": (
        _raises,
        True,
        r"rank {rank} raised ValueError: planted at program.py:{line}",
    ),
    "a rank ends early": (_ends, True, r"rank {rank}[^\n]* ended"),
    "a message is left": (_leaves_a_message, False, r"never received rank {rank}'s .*:{line}"),
}


def draw_ending(seed: int, size: int, kind: str) -> dict:
    """A program in which a rank ends on its own, or leaves something: to be run as a script."""
    d = Draw(Random(f"ending {seed} of {size}"), size, [list(range(size))], faulty=True)
    program = {"seed": seed, "size": size, **surroundings(d)}
    before, odd = mixed(d, 3), d.random.randrange(size)
    step = ENDINGS[kind][0](d, odd) | {"strand": 100}
    told = {"kind": kind, "rank": odd, "steps": [step["id"]], "strands": [100]}
    return program | {"fault": told, "steps": [*before, step]}


def wrong_ending(program: dict, status: int, err: str) -> str:
    """What is wrong about the report of a script; "" for nothing."""
    fault = program["fault"]
    _, fails, words = ENDINGS[fault["kind"]]
    lines = "|".join(map(str, sorted(lines_of(program))))
    pattern = words.format(rank=fault["rank"], line=f"(?:{lines})")
    if bool(status) is not fails:
        return f"Status: {status}, {fault['kind']}\n{err}"
    return "" if re.search(pattern, err) else f"Report: lacks {pattern!r}\n{err}"


# -- what has to be said --------------------------------------------------------------------------


def wrong(outcome: Outcome) -> str:
    """What is wrong about the outcome of a program; "" for nothing.

    Without a fault no rank has an error. With one each rank has, one of them has the right class
    and names the rank and the line, and it took no deadline to find it.
    """
    if not outcome.ranks:
        return f"Ended: on the way\n{outcome.report}"
    if "fault" not in outcome.program:
        failed = [r for r in outcome.ranks if r["error"]]
        return "".join(f"{r['error']}: on rank {r['rank']}\n{r['text']}" for r in failed)
    if why := _wrong_about_a_fault(outcome):
        said = (f"rank {k}: {r['error']} {r['text']}" for k, r in enumerate(outcome.ranks))
        return "\n".join([f"{why}; {outcome.program['fault']}", *said])
    return ""


def _wrong_about_a_fault(outcome: Outcome) -> str:
    fault = outcome.program["fault"]
    classes = [r["error"] for r in outcome.ranks]
    if strange := [c for c in classes if c not in _ERRORS]:
        return f"Class: {strange[0] or 'no error'} on rank {classes.index(strange[0])}"
    causes = [r["text"] for r in outcome.ranks if r["error"] in KINDS[fault["kind"]][1]]
    if not causes or set(classes) - {"CommunicationStopped", *KINDS[fault["kind"]][1]}:
        return f"Class: {sorted(set(classes))}"
    if max(r["seconds"] for r in outcome.ranks) > SOON or any(
        "the timeout of" in c for c in causes
    ):
        return "Late: found by nothing but a deadline"
    if not any(f"rank {fault['rank']}" in cause for cause in causes):
        return f"Rank: {fault['rank']} is not named"
    places = " ".join([*causes, *(r["where"] for r in outcome.ranks)])
    named = {int(line) for line in re.findall(rf"{text.NAME}:(\d+)", places)}
    if not named & lines_of(outcome.program):
        return f"Line: none of {sorted(lines_of(outcome.program))} is named"
    return ""


def lines_of(program: dict) -> set[int]:
    """Numbers of the lines of the planted steps in the program's text."""
    found, inside = set(), False
    for number, line in enumerate(text.python(program, TESTS).splitlines(), 1):
        if head := re.match(r"# (\d+): ", line):
            inside = int(head[1]) in program["fault"]["steps"]
        elif line.startswith("closing ="):
            inside = False
        elif inside:
            found.add(number)
    return found
