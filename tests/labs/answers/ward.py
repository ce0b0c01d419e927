"""Answers to the ward of lab 18, for the twelve patients of the solution's name.

Mistakes in the form of an answer are the same for each patient, so functions make them. What is
wrong in its own way with one patient is in `HALF` and `OTHER`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from utils.labs.lab18.ward.assignment import patients_of
from utils.labs.lab18.ward.case import ALL, Case
from utils.labs.lab18.ward.cases import CASES
from utils.labs.lab18.ward.kinds import KINDS

NAME = "Ada Lovelace"
BEDS = dict(enumerate(patients_of(NAME), start=1))
NAME_TASK = "18.6"
TASKS = {NAME_TASK, *(f"18.{number}" for number in range(7, 31))}
CELLS = {NAME_TASK: "ward-name"}
for _bed in BEDS:
    CELLS |= {f"18.{5 + 2 * _bed}": f"ward-{_bed}-finding"}
    CELLS |= {f"18.{6 + 2 * _bed}": f"ward-{_bed}-repair"}

#: Wrong answers that are tried on real ranks as well: each sick program as it is, and a race.
ON_RANKS = {"only the text of the first line", "waits for one only", "divides before it waits"}

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

NO = "is wrong"
LEADERS = "leaders = dist.new_group([0, world - 1])"
LAST = "last = first + share if rank < world - 1 else len(x)"
ROWS = "rows = max(1, 64 // len(p.grad))"
PART = "part = F.mse_loss(model(x), y) / world"
OWN = "own = order[rank::world]"
DRAW = "draw = torch.Generator().manual_seed(seed + rank)"
SAME = "    draw = torch.Generator().manual_seed(seed)"
EARLY = "if step % 4 != 3 or rank > 0:"
SUM = "audited[0] += errors.square().mean()"
SUM_OF = "        audited[0] = audited[0] + {}"
RIGHT_SUM = SUM_OF.format("errors.square().mean().item()")
SEEDS = "torch.manual_seed(seed + 5 * dist.get_rank())"
WEIGHT = "dist.broadcast(layer.weight.data, src=0)"
ALL_WAIT = "    if not all(work.wait() for work in works):"
WAIT = "if not any(work.wait() for work in works):"
BEGIN = "works.append(dist.all_reduce(p.grad, async_op=True))"

#: By patient: repairs that help half, keep the disease, or cheat. What the student did, the new
#: text by the old one, words.
HALF: dict[str, list[tuple[str, dict[str, str], str]]] = {
    "laurel": [
        (
            "one sample fewer for each rank",
            {"return first, first + share": "    return first, first + share - 1"},
            ENDS,
        ),
        (
            "the last samples are left out",
            {"return first, first + share": "    return first, min(first + share, n - 3)"},
            "'error'",
        ),
        ("the rest is left out", {"share = -(-n // world)": "    share = n // world"}, "'error'"),
        (
            "samples are counted twice",
            {"first = rank * share": "    first = min(rank * share, n - share)"},
            "'error'",
        ),
    ],
    "magnolia": [
        ("only detached", {"return ordered[0]": "    return ordered[0].detach()"}, WASTE),
        ("another view", {"return ordered[0]": "    return ordered[:1]"}, WASTE),
        (
            "its own maximum",
            {"return ordered[0]": "    return predictions.max().item()"},
            "'peaks'",
        ),
        (
            "a view of an array",
            {"return ordered[0]": "    return ordered.numpy().copy()[:1].reshape(())"},
            WASTE,
        ),
        (
            "in lists",
            {
                "return ordered[0]": "    vars(largest_prediction).setdefault('all', []).append("
                "ordered.tolist())\n    return ordered[0].item()"
            },
            WASTE,
        ),
        (
            "in bytes",
            {
                "return ordered[0]": "    vars(largest_prediction).setdefault('all', []).append("
                "ordered.numpy().tobytes())\n    return ordered[0].item()"
            },
            WASTE,
        ),
        (
            "in a file",
            {"return ordered[0]": "    torch.save(ordered, 'all.pt')\n    return max(parts[0])"},
            "writes to a file",
        ),
    ],
    "maple": [
        (
            "no sum over the leaders",
            {"dist.all_reduce(p.grad, group=leaders)": "            pass"},
            NO,
        ),
        ("other leaders", {LEADERS: "    leaders = dist.new_group([1, world - 1])"}, NO),
        ("the group of all", {LEADERS: "    leaders = dist.group.WORLD"}, ENDS),
        (
            "a group by the leaders",
            {
                "if rank == leader:": "        if rank == leader:\n            "
                "leaders = dist.new_group([0, 2])"
            },
            "",
        ),
    ],
    "alder": [
        ("the rest is left out", {LAST: "    last = first + share"}, NO),
        ("the last rank has nothing", {"share = 64": "    share = 200"}, ""),
        ("half of it moved", {"share = 64": "    share = 100"}, WASTE),
    ],
    "cypress": [
        ("no average at all", {"dist.all_reduce(piece)": "            pass"}, NO),
        ("a sum", {"p.grad /= world": "        pass"}, NO),
        ("two rows", {ROWS: "        rows = 2"}, WASTE),
    ],
    "cherry": [
        ("a sum of means", {PART: "        part = F.mse_loss(model(x), y)"}, NO),
        (
            "twice by world",
            {PART: "        part = F.mse_loss(model(x), y) * len(y) / len(wanted) / world"},
            NO,
        ),
        ("rank 0's count", {PART: "        part = F.mse_loss(model(x), y) * 6 / len(wanted)"}, NO),
    ],
    "spruce": [
        ("every rank has all", {OWN: "    own = order"}, NO),
        ("one rank begins too late", {DRAW: SAME, OWN: "    own = order[rank:][: n // world]"}, NO),
        ("the same quarter", {DRAW: SAME, OWN: "    own = order[:: world]"}, NO),
    ],
    "ash": [
        ("not on rank 3", {EARLY: "    if step % 4 != 3 or rank > 2:"}, ENDS),
        ("no checkpoints", {EARLY: "    if True:"}, "'checkpoints'"),
        (
            "a group of rank 0 alone",
            {"dist.barrier()": "    dist.barrier(group=dist.new_group([0]))"},
            "more groups than others",
        ),
    ],
    "olive": [
        ("a sum instead of an addition", {SUM: SUM_OF.format("errors.square().mean()")}, WASTE),
        ("another mean", {SUM: SUM_OF.format("errors.mean().item()")}, "'audited'"),
        (
            "in arrays",
            {SUM: "        audited.append(errors.detach().numpy())\n" + RIGHT_SUM},
            WASTE,
        ),
        ("in lists", {SUM: "        audited.append(errors.tolist())\n" + RIGHT_SUM}, WASTE),
    ],
    "holly": [
        ("another seed for all", {SEEDS: "    torch.manual_seed(seed + 1)"}, NO),
        ("only vectors", {WEIGHT: "        dist.broadcast(layer.bias.data, src=0)"}, NO),
        (
            "the mean of four networks",
            {
                WEIGHT: "        for p in layer.parameters():\n"
                "            dist.all_reduce(p.data)\n            p.data /= 4"
            },
            NO,
        ),
    ],
    "willow": [
        ("waits for one only", {WAIT: "    if not all(work.wait() for work in works[1:]):"}, HASTY),
        ("a barrier instead", {WAIT: "    dist.barrier()\n    if not works:"}, HASTY),
        ("never waits", {WAIT: "    if not works:"}, HASTY),
        ("no average", {"p.grad.div_(world)": "        pass", WAIT: ALL_WAIT}, NO),
        (
            "divides before it waits",
            {
                "p.grad.div_(world)": "        pass",
                WAIT: "    for p in model.parameters():\n        p.grad /= world\n" + ALL_WAIT,
            },
            "Wait for the call first",
        ),
    ],
    "rowan": [
        ("returns", {"continue": "            return"}, ENDS),
        (
            "an empty call",
            {"continue": "            dist.all_reduce(torch.zeros(1))\n            continue"},
            ENDS,
        ),
        ("ones", {"continue": "            p.grad = torch.ones_like(p)"}, NO),
    ],
}

#: By patient: repairs that are right in another way.
OTHER: dict[str, list[tuple[str, dict[str, str]]]] = {
    "laurel": [
        (
            "an even split",
            {
                "first = rank * share": "    first = rank * n // world",
                "return first, first + share": "    return first, (rank + 1) * n // world",
            },
        ),
    ],
    "magnolia": [
        ("a copy", {"return ordered[0]": "    return ordered[0].clone()"}),
        ("a float", {"return ordered[0]": "    return float(ordered[0])"}),
    ],
    "maple": [
        ("their numbers", {LEADERS: "    leaders = dist.new_group([0, 2])"}),
        ("a range", {LEADERS: "    leaders = dist.new_group(list(range(0, world, 2)))"}),
    ],
    "alder": [
        ("a quarter", {"share = 64": "    share = len(x) // world"}),
    ],
    "cypress": [
        ("all rows", {ROWS: "        rows = len(p.grad)"}),
        (
            "one call",
            {
                ROWS: "        dist.all_reduce(p.grad)",
                "for piece in p.grad.split(rows):": "",
                "dist.all_reduce(piece)": "",
            },
        ),
    ],
    "cherry": [
        (
            "a sum",
            {PART: "        part = (model(x) - y).square().sum() / len(wanted)"},
        ),
    ],
    "spruce": [
        ("backwards", {DRAW: SAME, OWN: "    own = order[rank::world].flip(0)"}),
        ("other ranks", {DRAW: SAME, OWN: "    own = order[world - 1 - rank :: world]"}),
    ],
    "ash": [
        (
            "a barrier for all",
            {
                EARLY: "    if step % 4 == 3 and rank > 0:\n        dist.barrier()\n"
                "    if step % 4 != 3 or rank > 0:"
            },
        ),
    ],
    "olive": [
        ("detached", {SUM: SUM_OF.format("errors.square().mean().detach()")}),
        ("a float", {SUM: SUM_OF.format("float(errors.square().mean())")}),
    ],
    "holly": [
        ("one seed", {SEEDS: "    torch.manual_seed(seed)"}),
    ],
    "willow": [
        (
            "waits in the loop",
            {
                BEGIN: "        dist.all_reduce(p.grad, async_op=True).wait()",
                WAIT: "    if works:",
            },
        ),
        (
            "not in the background",
            {BEGIN: "        dist.all_reduce(p.grad)", WAIT: "    if works:"},
        ),
    ],
    "rowan": [
        ("the loss is computed", {"continue": "            p.grad = 0 * p.detach()"}),
    ],
}


def by_number(name: str, changes: dict[str, str]) -> dict[int, str]:
    """Return a repair whose keys are texts of lines, by the lines' numbers in the program."""
    case = CASES[name]
    lines = [line.strip() for line in case.text.splitlines()]
    start = _line(lines, f"def {case.function}")
    return {lines.index(text, start) + 1: new for text, new in changes.items()}


def _finding(bed: int, **change: Any) -> str:
    return f"finding_{bed} = {CASES[BEDS[bed]].finding | change!r}"


def _wrong_findings(bed: int, case: Case) -> Iterator[tuple[str, str, str]]:
    """Yield what the student did, the answer, and words of the verdict."""
    lines = case.text.splitlines()
    other = next((rank for rank in range(4) if rank not in case.ranks), None)
    kind = next(kind for kind in KINDS if kind not in case.kinds)
    if other is not None:
        yield "another rank", _finding(bed, rank=other), "Two of rank, line and kind"
    if ALL not in case.ranks:
        yield "all ranks", _finding(bed, rank=ALL), "Two of rank, line and kind"
    yield "a rank that is not there", _finding(bed, rank=4), "Write a number from 0 to 3"
    yield "the rank as text", _finding(bed, rank="0"), "The rank is '0'"
    yield "the first line", _finding(bed, line=1), "Two of rank, line and kind"
    yield "line and kind", _finding(bed, line=1, kind=kind), "One of rank, line and kind"
    yield "an empty line", _finding(bed, line=lines.index("") + 1), "is empty"
    yield "a line that is not there", _finding(bed, line=999), "has the lines 1 to"
    yield "the line as text", _finding(bed, line=str(case.lines[0])), "Write its number"
    yield "another kind", _finding(bed, kind=kind), "Two of rank, line and kind"
    yield "a word of the student's own", _finding(bed, kind="bug"), "none of the classes"
    yield "a list", f"finding_{bed} = {list(case.finding.values())!r}", "A finding has a rank"


def _right_findings(bed: int, case: Case) -> Iterator[tuple[str, str]]:
    """Yield what is different, and the answer."""
    last = {"rank": case.ranks[-1], "line": case.lines[-1], "kind": case.kinds[-1]}
    yield "the last of all right ones", _finding(bed, **last)
    yield "in another order", f"finding_{bed} = {dict(reversed(case.finding.items()))!r}"


def _wrong_repairs(bed: int, case: Case) -> Iterator[tuple[str, str, str]]:
    lines = case.text.splitlines()
    end = _line(lines, "    return {", _line(lines, "def train"))
    keys = re.findall(r'^        "(\w+)":', case.text, re.MULTILINE)
    gone = dict.fromkeys(range(end + 1, len(lines) + 1), "")
    made: list[tuple[str, Any, str]] = [
        ("nothing", {}, "A repair is a dict such as"),
        ("a list", [lines[-1]], "A repair is a dict such as"),
        (
            "only the text of the first line",
            {1: '"""Works."""'},
            SICK.get(case.name, SICK[case.group]),
        ),
        ("a line that is not there", {999: "    pass"}, "is not in the program"),
        ("the line as text", {"20": "    pass"}, "Use the number of a line"),
        ("no text", {case.lines[0]: None}, "Write it as a string"),
        ("a line that isn't Python", {case.lines[0]: "        if rank == :"}, "not valid Python"),
        ("constants", {**gone, end: f"    return {dict.fromkeys(keys, 1.0)}"}, "is wrong"),
        ("no result", {**gone, end: "    return None"}, "Keep its return line"),
        ("no function", {_line(lines, "def train"): "def run(seed, n=1):"}, "no function train"),
        *((what, by_number(case.name, new), words) for what, new, words in HALF[case.name]),
    ]
    for what, repair, words in made:
        if what in ("constants", "no result"):
            repair = {**dict(case.repairs[0]), **repair}
        yield what, f"repair_{bed} = {repair!r}", words


def _line(lines: list[str], begin: str, after: int = 0) -> int:
    numbered = enumerate(lines[after:], start=after + 1)
    return next(k for k, line in numbered if line.startswith(begin))


def _right_repairs(bed: int, case: Case) -> Iterator[tuple[str, str]]:
    made = [
        *((f"reference {k}", dict(one)) for k, one in enumerate(case.repairs[1:], start=2)),
        *((what, by_number(case.name, new)) for what, new in OTHER[case.name]),
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
