"""Answers to the ward of lab 18, for the twelve patients of the solution's name.

Mistakes in the form of an answer are the same for each patient, so functions make them. What is
wrong in its own way with one patient is in `HALF` and `OTHER`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from utils.labs.lab18.ward.case import ALL, Case, text_of
from utils.labs.lab18.ward.cases import CASES
from utils.labs.lab18.ward.drawing import drawn
from utils.labs.lab18.ward.kinds import KINDS

NAME = "Ada Lovelace"
BEDS = dict(enumerate(drawn(NAME), start=1))
NAME_TASK = "18.6"
TASKS = {NAME_TASK, *(f"18.{number}" for number in range(7, 31))}
CELLS = {NAME_TASK: "ward-name"}
for _bed in BEDS:
    CELLS |= {f"18.{5 + 2 * _bed}": f"ward-{_bed}-finding"}
    CELLS |= {f"18.{6 + 2 * _bed}": f"ward-{_bed}-repair"}

#: Wrong answers that are tried on real ranks as well: each sick program as it is, and a race.
ON_RANKS = {"only the text of the first line", "waits for one only", "a barrier instead"}

ENDS, WRONG_NUMBER, WASTE = "did not come to its end", "is wrong", "Remove the waste"
HASTY = "Wait for all calls first"
#: By group, or for one patient: what the check says of a program that is still sick.
SICK = {
    "hangs": ENDS,
    "dies": ENDS,
    "wrong": WRONG_NUMBER,
    "drifts": WRONG_NUMBER,
    "slow": WASTE,
    "memory": WASTE,
    "willow": HASTY,
}

#: By patient: repairs that help half, or cheat. What the student did, repair, words.
HALF: dict[str, list[tuple[str, dict[int, str], str]]] = {
    "laurel": [
        (
            "one sample fewer for each rank",
            {18: "        for k in range(first, first + share - 1):"},
            ENDS,
        ),
        (
            "the last rank leaves its share out",
            {18: "        for k in range(first, 36):"},
            "'mean'",
        ),
        ("samples are counted twice", {14: "    first = min(rank * share, 33)"}, "'mean'"),
    ],
    "magnolia": [
        ("only detached", {27: "            predictions.append(torch.cat(parts).detach())"}, WASTE),
        ("only the last step", {27: "            predictions = [torch.cat(parts)]"}, "'largest'"),
    ],
    "maple": [
        ("no level between the leaders", {24: "", 25: "", 26: ""}, "is wrong"),
    ],
    "alder": [
        ("the rest is left out", {16: "    stop = start + BLOCK"}, "is wrong"),
        ("the first rank has it all", {8: "BLOCK = 1024", 16: "    stop = n"}, "is wrong"),
        ("half of it moved", {8: "BLOCK = 512"}, WASTE),
    ],
    "cypress": [
        ("no average at all", {20: "", 21: "", 22: "", 23: ""}, "is wrong"),
        ("a sum", {21: "            dist.all_reduce(p.grad)", 22: "", 23: ""}, "is wrong"),
    ],
    "cherry": [
        ("a sum by its own count", {24: "        mean = errors.sum() / 90"}, "is wrong"),
        ("twice by world", {24: "        mean = errors.mean() / world"}, "is wrong"),
    ],
    "spruce": [
        (
            "every rank trains on everything",
            {15: "    own = order"},
            "computed numbers",
        ),
        (
            "a larger learning rate",
            {18: "    optimizer = torch.optim.SGD(model.parameters(), lr=0.4)"},
            "learning rate",
        ),
        ("another half of the samples", {15: "    own = order[share : 2 * share]"}, "is wrong"),
        ("one rank begins too late", {15: "    own = order[rank:][:share]"}, "is wrong"),
    ],
    "ash": [
        (
            "the others wait, too, but elsewhere",
            {23: "        if step % 2 == 1 and rank < 3:"},
            ENDS,
        ),
        ("no checkpoints", {24: "", 25: "            pass"}, "'checkpoints'"),
    ],
    "olive": [
        (
            "a list instead of a sum",
            {24: "            total = total + ((model(x) - y) ** 2).mean()"},
            WASTE,
        ),
        ("the loss before the step", {24: "            total += loss.item()"}, "'mean'"),
    ],
    "holly": [
        ("another seed for all", {13: "    model = network(seed + 1)"}, "is wrong"),
        (
            "only the first parameter",
            {
                13: "    model = network(seed + rank)\n"
                "    dist.broadcast(next(model.parameters()).data, src=0)"
            },
            "is wrong",
        ),
        (
            "the mean of four networks",
            {
                13: "    model = network(seed + rank)\n    for p in model.parameters():\n"
                "        dist.all_reduce(p.data)\n        p.data /= 4"
            },
            "is wrong",
        ),
    ],
    "willow": [
        (
            "waits for one only",
            {24: "        works[-1].wait()\n        optimizer.step()"},
            HASTY,
        ),
        ("a barrier instead", {24: "        dist.barrier()\n        optimizer.step()"}, HASTY),
        ("no average", {20: "", 23: "            pass", 25: "", 26: ""}, "is wrong"),
        ("never waits", {24: "", 26: "            pass\n        optimizer.step()"}, HASTY),
    ],
    "rowan": [
        ("break instead of continue", {21: "            break"}, ENDS),
        (
            "the rank counts before it goes on",
            {21: "            dist.all_reduce(known.sum())\n            continue"},
            ENDS,
        ),
        ("no step for anybody", {20: "        if True:"}, "is wrong"),
    ],
}

#: By patient: repairs that are right in another way.
OTHER: dict[str, list[tuple[str, dict[int, str]]]] = {
    "laurel": [
        (
            "the loop jumps over what isn't there",
            {
                18: "        for k in range(first, first + share):\n"
                "            if k >= 45:\n                break"
            },
        ),
        ("a stride", {18: "        for k in range(rank, len(x), world):"}),
    ],
    "magnolia": [
        ("a number", {27: "            predictions.append(torch.cat(parts).max().clone())"}),
        ("no tensor of all", {27: "            predictions.append(max(p.max() for p in parts))"}),
    ],
    "maple": [
        ("all ranks go to the barrier", {24: "        if True:"}),
        (
            "a barrier for all",
            {
                23: "        dist.reduce(gradient, dst=leader, group=pair)\n        dist.barrier()",
                25: "",
            },
        ),
    ],
    "alder": [
        ("a quarter as the block", {8: "BLOCK = 1024"}),
        (
            "a stride of samples",
            {
                15: "    x, y = x[rank::world], y[rank::world]\n    start = 0",
                16: "    stop = len(x)",
            },
        ),
    ],
    "cypress": [
        (
            "one flat tensor",
            {
                20: "        average_gradients(model)",
                21: "",
                22: "",
                23: "",
                6: "from utils.labs.lab18.job import average_gradients, network, norms, samples",
            },
        )
    ],
    "cherry": [
        (
            "sum of sums",
            {24: "        mean = errors.sum()", 26: "        validation.append(mean.item() / 90)"},
        ),
        ("weights", {24: "        mean = errors.mean() * len(errors) * world / 90"}),
    ],
    "spruce": [
        ("blocks", {15: "    own = order[rank * share : (rank + 1) * share]"}),
        ("chunks", {15: "    own = order.chunk(world)[rank]"}),
    ],
    "ash": [
        ("a barrier for all", {25: "", 21: "        optimizer.step()\n        dist.barrier()"}),
    ],
    "olive": [
        (
            "no gradient",
            {
                24: "            with torch.no_grad():\n"
                "                total += ((model(x) - y) ** 2).mean()"
            },
        ),
    ],
    "holly": [
        (
            "a broadcast",
            {
                13: "    model = network(seed + rank)\n    for p in model.parameters():\n"
                "        dist.broadcast(p.data, src=0)"
            },
        ),
    ],
    "willow": [
        (
            "waits in the loop",
            {
                20: "",
                23: "            dist.all_reduce(p.grad, async_op=True).wait()",
                25: "",
                26: "",
            },
        ),
    ],
    "rowan": [
        ("the loop goes on without targets", {20: "", 21: "        pass"}),
    ],
}


def _finding(bed: int, **change: Any) -> str:
    return f"finding_{bed} = {CASES[BEDS[bed]].finding | change!r}"


def _wrong_findings(bed: int, case: Case) -> Iterator[tuple[str, str, str]]:
    """Yield what the student did, the answer, and words of the verdict."""
    lines = text_of(case.name).splitlines()
    other = next((rank for rank in range(4) if rank not in case.ranks), 7)
    kind = next(kind for kind in KINDS if kind not in case.kinds)
    yield "another rank", _finding(bed, rank=other), "at fault" if other < 4 else "from 0 to 3"
    if ALL not in case.ranks:
        yield "all ranks", _finding(bed, rank=ALL), "Not all ranks do the same"
    yield "a rank that is not there", _finding(bed, rank=4), "Write a number from 0 to 3"
    yield "the rank as text", _finding(bed, rank="0"), "The rank is '0'"
    yield "the first line", _finding(bed, line=1), "Line 1"
    yield "an empty line", _finding(bed, line=lines.index("") + 1), "is empty"
    yield "a line that is not there", _finding(bed, line=99), "has the lines 1 to"
    yield "the line as text", _finding(bed, line=str(case.lines[0])), "Write its number"
    yield "another kind", _finding(bed, kind=kind), "The cause is of another kind"
    yield "a word of the student's own", _finding(bed, kind="bug"), "none of the classes"
    yield "a list", f"finding_{bed} = {list(case.finding.values())!r}", "A finding has a rank"


def _right_findings(bed: int, case: Case) -> Iterator[tuple[str, str]]:
    """Yield what is different, and the answer."""
    last = {"rank": case.ranks[-1], "line": case.lines[-1], "kind": case.kinds[-1]}
    yield "the last of all right ones", _finding(bed, **last)
    yield "in another order", f"finding_{bed} = {dict(reversed(case.finding.items()))!r}"


def _wrong_repairs(bed: int, case: Case) -> Iterator[tuple[str, str, str]]:
    lines = text_of(case.name).splitlines()
    keys = re.findall(r'"(\w+)":', lines[-1])
    made: list[tuple[str, Any, str]] = [
        ("nothing", {}, "A repair is a dict such as"),
        ("a list", [lines[-1]], "A repair is a dict such as"),
        (
            "only the text of the first line",
            {1: '"""Works."""'},
            SICK.get(case.name, SICK[case.group]),
        ),
        ("a line that is not there", {99: "    pass"}, "is not in the program"),
        ("the line as text", {"20": "    pass"}, "Use the number of a line"),
        ("no text", {case.lines[0]: None}, "Write it as a string"),
        ("a line that isn't Python", {case.lines[0]: "        if rank == :"}, "not valid Python"),
        ("constants", {len(lines): f"    return {dict.fromkeys(keys, 1.0)}"}, "is wrong"),
        ("no result", {len(lines): "    return None"}, "Keep its return line"),
        ("no function", {_line(lines, "def train"): "def run(seed, n=1):"}, "no function train"),
        *HALF.get(case.name, []),
    ]
    for what, repair, words in made:
        if what in ("constants", "no result"):
            repair = {**dict(case.repairs[0]), **repair}
        yield what, f"repair_{bed} = {repair!r}", words


def _line(lines: list[str], begin: str) -> int:
    return next(k for k, line in enumerate(lines, start=1) if line.startswith(begin))


def _right_repairs(bed: int, case: Case) -> Iterator[tuple[str, str]]:
    own = OTHER.get(case.name, [])
    made = [
        *((f"reference {k}", dict(one)) for k, one in enumerate(case.repairs[1:], start=2)),
        *own,
        ("with another first line", {**case.repairs[0], 1: '"""Repaired."""'}),
    ]
    for what, repair in made:
        yield what, f"repair_{bed} = {repair!r}"


WRONG = [
    (NAME_TASK, "no name", "my_name = None", "my_name is a NoneType"),
    (NAME_TASK, "an empty name", 'my_name = ""', "no letter or digit"),
    (NAME_TASK, "spaces", 'my_name = "   "', "no letter or digit"),
    (NAME_TASK, "three dots", 'my_name = "..."', "no letter or digit"),
    (NAME_TASK, "the dots of the cell", "my_name = ...", "Write your name as a string"),
    (NAME_TASK, "a list", 'my_name = ["Ada", "Lovelace"]', "Write your name as a string"),
    (NAME_TASK, "true", "my_name = True", "Write your name as a string"),
    (NAME_TASK, "a story", 'my_name = "Ada" * 100', "longer than"),
    (NAME_TASK, "another name on each rank", 'my_name = f"Ada {rank}"', "different names"),
]
RIGHT = [
    (NAME_TASK, "a number", "my_name = 123456"),
    (NAME_TASK, "another spelling", 'my_name = " ada  LOVELACE "'),
]
for _bed, _name in BEDS.items():
    _case = CASES[_name]
    _find, _repair = f"18.{5 + 2 * _bed}", f"18.{6 + 2 * _bed}"
    WRONG += [(_find, *rest) for rest in _wrong_findings(_bed, _case)]
    WRONG += [(_repair, *rest) for rest in _wrong_repairs(_bed, _case)]
    RIGHT += [(_find, *rest) for rest in _right_findings(_bed, _case)]
    RIGHT += [(_repair, *rest) for rest in _right_repairs(_bed, _case)]
