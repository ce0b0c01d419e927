"""Checks of tasks 18.1 to 18.3: follow waits to their cause, group stacks, compare recordings.

The checks make new reports, dumps and recordings in each run, in the form of real ones. The module
also imports the lab's other checks.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from utils.checks import trials
from utils.checks.comparison import Mistake, table
from utils.checks.model import use_model as use_model
from utils.checks.task import Report, task
from utils.checks.trials import Case
from utils.cluster.questions import Ranks

from .digest_checks import flip_found as flip_found
from .profiles import calls_counted as calls_counted
from .ward_checks import *  # noqa: F403

# -- 18.1: who is to blame --------------------------------------------------------------------

Waits = list[list[int]]


def reached(waits: Waits, start: int) -> set[int]:
    """Return the ranks that a rank waits for, directly or through others."""
    found: set[int] = set()
    ahead = list(waits[start])
    while ahead:
        rank = ahead.pop()
        if rank not in found:
            found.add(rank)
            ahead += waits[rank]
    return found


def causes(waits: Waits) -> list[int]:
    """Return the ranks at which chains of waits end, and those on a cycle."""
    ends = {other for others in waits for other in others if not waits[other]}
    return sorted(ends | {rank for rank in range(len(waits)) if rank in reached(waits, rank)})


def _waits(seed: int) -> list[Waits]:
    """Return reports: known forms with renamed ranks, and random waits."""
    draw = random.Random(seed)
    forms: list[Waits] = [
        [[1], [2], [3], []],  # a chain
        [[3], [3], [3], [], []],  # a collective without rank 3, and rank 4 idle
        [[1], [0], [0], [2], []],  # a cycle with a tail
        [[1], [2], [0], []],
        [[], [], []],
        [[1], [0], [3], []],  # a cycle, and a chain beside it
        [[0], [0], []],  # a rank that waits for itself
        [[1, 2, 3], [2, 3], [], [2]],
        [[1], [2], [3], [1], [0]],
        [[1], [0, 2], [3], [4], [3]],  # rank 2 is between two cycles, and on none
        [[8], [0], [], [], [], [], [], [], [1], []],  # a cycle of the ranks 0, 1 and 8
        [[1], [2], [0]],
        [[(rank + 1) % 13] for rank in range(13)],
    ]
    found = []
    for form in forms:
        names = draw.sample(range(len(form)), len(form))
        renamed: Waits = [[] for _ in form]
        for rank, others in enumerate(form):
            renamed[names[rank]] = sorted(names[other] for other in others)
        found.append(renamed)
    for _ in range(12):
        n = draw.randint(4, 12)
        found.append([sorted(draw.sample(range(n), draw.choice((0, 1, 1, 2)))) for _ in range(n)])
    return found


def _blame(waits: Waits) -> Case:
    right, n = causes(waits), len(waits)
    ends = [rank for rank in range(n) if not waits[rank]]
    cycles = [rank for rank in range(n) if rank in reached(waits, rank)]
    looked = [rank for rank in range(n) if reached(waits, rank) & set(cycles)]
    awaited = sorted({other for others in waits for other in others})
    wrong: dict[str, Any] = {
        "Some of these ranks only wait for a cycle. Take the ranks on it": sorted({
            *right,
            *looked,
        }),
        "You returned the ranks that wait, but they are the victims. Follow their waits": [
            rank for rank in range(n) if waits[rank]
        ],
        "Nobody waits for some of these ranks. Leave out ranks that nobody waits for": sorted({
            *ends,
            *cycles,
        }),
        "You left out the cycle, in which each rank waits for another one": [
            rank for rank in ends if rank in awaited
        ],
        "You left out ranks that wait for nobody while others wait for them": cycles,
        "Some of these ranks wait, too, without a cycle. Follow their waits to the end": awaited,
    }
    mistakes = [one for one in table(wrong) if one.gives != right]
    mistakes.append(
        Mistake(lambda got: isinstance(got, list) and sorted(got) == right, "Sort the ranks")
    )
    return Case("blame", [waits], right, mistakes, "a list of ranks")


@task("18.1", "follow the waits", points=2)
def waits_followed(ranks: Ranks, report: Report) -> None:
    """Judge the ranks at which waits end, for chains, cycles and random reports."""
    trials.judge_calls(ranks, report, [_blame(waits) for waits in _waits(report.seed)])


# -- 18.2: stacks -----------------------------------------------------------------------------

Frames = list[tuple[str, int, str]]  # file, line and function, innermost first
LIBRARY = "/opt/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
STANDARD = "/usr/lib/python3.11"


def dump_of(threads: Sequence[Frames], name: int) -> str:
    """Return the text that faulthandler writes after a timeout; the main thread comes last."""
    parts = ["Timeout (0:00:01)!\n"]
    for k, frames in enumerate(threads):
        parts.append(
            f"Thread 0x{0x7F31C0000000 + 0x1000 * (name + k):016x} (most recent call first):\n"
        )
        parts += [f'  File "{file}", line {line} in {what}\n' for file, line, what in frames]
        parts.append("\n" if k < len(threads) - 1 else "")
    return "".join(parts)


def place_of(frames: Frames, file: str, pick: int = 0) -> str:
    """Return a thread's frame in a file as `function, line 7`; "" if it has none there."""
    own = [f"{what}, line {line}" for name, line, what in frames if name == file]
    return own[pick] if own else ""


def grouped(places: Iterable[str]) -> list[list[Any]]:
    """Return pairs of a place and its ranks, the smallest group first, then by the lowest rank."""
    groups: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        groups.setdefault(place, []).append(rank)
    return sorted(
        ([place, of] for place, of in groups.items()), key=lambda one: (len(one[1]), one[1])
    )


def _stacks(seed: int) -> tuple[str, list[list[Frames]]]:
    """Return a file, and the threads of each rank."""
    draw = random.Random(seed)
    folder = ("/home/ann/job", "/data/run+7 (old)", "/srv/train")[seed % 3]
    file = f"{folder}/train.py"
    lines = draw.sample(range(10, 400), 6)
    below: Frames = [(file, lines[0], "train"), (file, lines[1], "<module>")]
    together: Frames = [(LIBRARY, 3245, "all_reduce"), (file, lines[2], "average"), *below]
    late: Frames = [(f"{STANDARD}/queue.py", 171, "get"), (file, lines[3], "next_batch"), *below]
    # The same function at another line, a file whose name ends alike, and a rank that has ended.
    other: Frames = [(LIBRARY, 3145, "broadcast"), (file, lines[4], "average"), *below]
    alike: Frames = [
        (f"{folder}/old_train.py", lines[5], "load"),
        (f"{folder}/train_py", lines[5], "load"),
        (f"{folder}/Train.py", lines[5], "load"),
        (f"/old{file}", 9, "read"),
        (f"{folder}/train.pyx", lines[4], "parse"),
        *late[1:],
    ]
    ended: Frames = [(f"{STANDARD}/threading.py", 1590, "_shutdown")]
    deep: Frames = [*30 * [(LIBRARY, 900, "wrapper")], *late]
    kinds = [late, other, alike, ended, deep, [(file, lines[5], "<listcomp>"), *below]]
    loader: Frames = [(f"{STANDARD}/threading.py", 324, "wait"), (file, lines[5], "prefetch")]
    n = draw.choice((3, 4, 5, 7, 8, 13))
    ranks = [together] * n
    for odd in draw.sample(range(n), draw.randint(1, (n - 1) // 2)):
        ranks[odd] = draw.choice(kinds)
    # Up to three threads beside the main one.
    return file, [[loader] * draw.choice((0, 0, 1, 1, 2, 3)) + [main] for main in ranks]


def _groups(seed: int) -> Case:
    file, ranks = _stacks(seed)
    # The dumps of two ranks may be equal.
    dumps = [dump_of(threads, 8 * (rank // 3)) for rank, threads in enumerate(ranks)]
    mains = [threads[-1] for threads in ranks]
    right = grouped(place_of(main, file) for main in mains)
    wrong: dict[str, Any] = {
        "You read the first thread, but it is a loader's. The main thread comes last": grouped(
            place_of(threads[0], file) for threads in ranks
        ),
        "You took the outermost frame. The first one of the file is where the rank is": grouped(
            place_of(main, file, -1) for main in mains
        ),
        "You took frames of other files, too. Compare the whole name of the file": grouped(
            place_of(main, main[0][0]) for main in mains
        ),
        "You compared the end of the file's name only, but another file ends alike": grouped(
            next(
                (f"{what}, line {line}" for name, line, what in main if name.endswith("train.py")),
                "",
            )
            for main in mains
        ),
        "You compared the beginning of the file's name only, but train.pyx begins alike": grouped(
            next((f"{what}, line {line}" for name, line, what in main if name.startswith(file)), "")
            for main in mains
        ),
        "You grouped by function. Two ranks in one function can be at different lines": grouped(
            place_of(main, file).partition(",")[0] for main in mains
        ),
        "You left out ranks without a frame in the file. Their place is an empty text": [
            one for one in right if one[0]
        ],
        "The largest group comes first. Begin with the smallest one": right[::-1],
    }
    mistakes = [one for one in table(wrong) if one.gives != right]
    mistakes.append(
        Mistake(_unsorted(right), "These are the groups, but in another order. Sort them")
    )
    return Case("groups", [dumps, file], right, mistakes, "a list of [place, ranks]")


def _unsorted(right: list[list[Any]]) -> Callable[[Any], bool]:
    def is_so(got: Any) -> bool:
        if not isinstance(got, list) or not all(
            isinstance(one, list) and len(one) == 2 for one in got
        ):
            return False
        return sorted(map(str, got)) == sorted(map(str, right))

    return is_so


@task("18.2", "group the stacks", points=2)
def stacks_grouped(ranks: Ranks, report: Report) -> None:
    """Judge the groups of ranks by place, for dumps that are new in each run."""
    trials.judge_calls(ranks, report, [_groups(report.seed + k) for k in range(12)])


# -- 18.3: recordings -------------------------------------------------------------------------

Entry = dict[str, Any]
KEYS = ("call", "sizes", "line")


def difference(
    dumps: Sequence[Sequence[Entry]],
    keys: Sequence[str] = KEYS,
    *,
    since: int | None = None,
    until: int | None = None,
    latest: bool = False,
) -> list[Any] | None:
    """Return the first difference of recordings: sequence number, culprits and what differs.

    Args:
        dumps: the entries of each rank, in order.
        keys: what is compared.
        since, until: the sequence numbers that are compared; by default, from the first number that
            no rank has overwritten to the last of any rank.
        latest: return the last difference.
    """
    by_seq = [{entry["seq"]: entry for entry in dump} for dump in dumps]
    firsts = [dump[0]["seq"] for dump in dumps if dump]
    first = max(firsts, default=1) if since is None else since
    last = max((dump[-1]["seq"] for dump in dumps if dump), default=0) if until is None else until
    numbers = range(first, last + 1)
    for seq in reversed(numbers) if latest else numbers:
        entries = [of.get(seq) for of in by_seq]
        if not all(entries):
            return [seq, minority([entry is None for entry in entries]), "missing"]
        for key in keys:
            values = [str(entry[key]) for entry in entries if entry]
            if len(set(values)) > 1:
                return [seq, minority(values), key]
    return None


def minority(values: Sequence[Any]) -> list[int]:
    """Return the ranks outside the largest group; of equal groups, the lowest rank's counts."""
    most = Counter(values).most_common(1)[0][0]  # the first one met among equals
    return [rank for rank, value in enumerate(values) if value != most]


def _recordings(seed: int, accident: str) -> list[list[Entry]]:
    """Return the ranks' recordings; `accident` is what some rank does differently, or ""."""
    draw = random.Random(f"{seed} {accident}")
    n, length = draw.randint(4 if accident == "two ways" else 3, 6), draw.randint(14, 22)
    kinds = [("all_reduce", [[8, 64]], 31), ("all_reduce", [[1]], 38), ("broadcast", [[512]], 44)]
    kinds += [("all_reduce", [[1]], 52), ("barrier", [], 57)]
    program = [kinds[k % 2] if k % 7 else draw.choice(kinds[2:]) for k in range(length)]
    at = draw.randint(8, length - 3)
    if accident == "order":
        program[at] = kinds[0]
    elif accident in ("sizes", "line") and draw.random() < 0.5:
        program[at] = ("all_to_all", [[8, 4]], 71) if accident == "sizes" else kinds[2]
    ranks: list[list[Any]] = [list(program) for _ in range(n)]
    culprit = 0 if accident == "line" else draw.randrange(n)
    pair = draw.sample(range(n), 2) if n > 4 or accident == "two ways" else [culprit]
    of_several = "call", "sizes", "order", "two ways", "skips", "ends"
    for rank in pair if accident in of_several else [culprit]:
        call, sizes, line = program[at]
        changed = {
            "call": ("reduce_scatter", sizes, 61),
            "sizes": (call, [[384]], line),
            "order": (call, [size[::-1] for size in sizes], line),
            "line": (call, sizes, line + 9),
            "function": (call, sizes, f"first_step, line {line}"),
            "backend": (f"nccl:{call}", sizes, line),
        }
        if accident in changed:
            ranks[rank][at] = changed[accident]
        elif accident == "two ways":
            ranks[rank][at] = (call, [[384 + rank]], line)
        elif accident == "skips":
            del ranks[rank][at]
        elif accident == "ends":
            del ranks[rank][at:]
        elif accident == "once more":
            ranks[rank].append(kinds[1])
        elif accident == "never":
            ranks[rank].clear()
        elif accident == "long ago":
            del ranks[rank][2:]
        elif accident == "call and line":
            ranks[rank][at] = ("reduce_scatter", sizes, line)
            ranks[rank - 1][at] = (call, sizes, line + 9)
    firsts = [0 if accident == "never" else draw.randint(0, 6) for _ in range(n)]
    if accident == "long ago":
        firsts = [0 if rank == culprit else draw.randint(3, 6) for rank in range(n)]
    return [
        [
            {
                "seq": k + 1,
                "call": call,
                "sizes": sizes,
                "line": line if isinstance(line, str) else f"step, line {line}",
                # A rank that is late has completed fewer calls, and does nothing else.
                "state": "completed" if k < at - 2 * (rank % 3) else "scheduled",
            }
            for k, (call, sizes, line) in enumerate(calls)
        ][first:]
        for rank, (calls, first) in enumerate(zip(ranks, firsts, strict=True))
    ]


def _compared(dumps: list[list[Entry]]) -> Case:
    right = difference(dumps)
    at = [[{**entry, "seq": k} for k, entry in enumerate(dump, 1)] for dump in dumps]
    lasts = [dump[-1]["seq"] for dump in dumps if dump]
    whole = len(lasts) == len(dumps)
    oldest = min(dump[0]["seq"] for dump in dumps if dump)
    wrong: dict[str, Any] = {
        "Some ranks have overwritten this entry. Begin with the largest of the ranks' first "
        "seq": difference(dumps, since=oldest),
        "You compared positions in the lists. Compare entries with the same seq": difference(
            at, since=1
        ),
        "You stopped at the shortest recording, or left one out that is empty, but a rank is "
        "missing": difference(dumps, until=min(lasts) if whole else 0),
        "You did not compare the lines. Ranks can meet in different lines, without an "
        "error": difference(dumps, ("call", "sizes")),
        "You did not compare the sizes before the lines": difference(dumps, ("call", "line")),
        "You did not compare the calls first": difference(dumps, ("sizes", "line")),
        "You compared the state, but a rank may be late. Compare call, sizes and line": difference(
            dumps, (*KEYS, "state")
        ),
        "You compared the state before the line. Leave it out": difference(
            dumps, ("call", "sizes", "state", "line")
        ),
        "This is the last difference. Later ones follow from the first": difference(
            dumps, latest=True
        ),
    }
    if right:
        seq, ranks, what = right
        others = [rank for rank in range(len(dumps)) if rank not in ranks]
        wrong["You named the ranks that agree. The culprits are the fewer ones"] = [
            seq,
            others,
            what,
        ]
        wrong["Return all ranks outside the largest group"] = lambda got: (
            got in ([seq, ranks[:1], what], [seq, ranks[-1:], what])
        )
    else:
        wrong["The ranks agree. Return None"] = lambda got: got is not None
    mistakes = [one for one in table(wrong) if one.gives != right]
    return Case("first_difference", [dumps], right, mistakes)  # None is a result, too


@task("18.3", "compare the recordings", points=3)
def recordings_compared(ranks: Ranks, report: Report) -> None:
    """Judge the first difference of recordings, whose oldest entries are overwritten."""
    accidents = (
        *("skips", "ends", "", "call", "sizes", "order", "line"),
        *("once more", "never", "two ways", "function", "backend", "long ago", "call and line"),
    )
    cases = [_compared(_recordings(report.seed + k, one)) for k in range(2) for one in accidents]
    trials.judge_calls(ranks, report, cases)
