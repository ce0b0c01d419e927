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
    right = causes(waits)
    mistakes = _unlike(right, _wrong_causes(waits))
    mistakes.append(
        Mistake(lambda got: isinstance(got, list) and sorted(got) == right, "Sort the ranks")
    )
    return Case("blame", [waits], right, mistakes, "a list of ranks")


def _wrong_causes(waits: Waits) -> dict[str, Any]:
    n = len(waits)
    ends = [rank for rank in range(n) if not waits[rank]]
    cycles = [rank for rank in range(n) if rank in reached(waits, rank)]
    looked = [rank for rank in range(n) if reached(waits, rank) & set(cycles)]
    awaited = sorted(set[int]().union(*waits))
    return {
        "Some of these ranks only wait for a cycle. Take the ranks on it": sorted({
            *causes(waits),
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


def _unlike(right: Any, wrong: dict[str, Any]) -> list[Mistake]:
    """Return the mistakes that give something else than the right result."""
    return [one for one in table(wrong) if one.gives != right]


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
    # Six seeds in a row have each kind, and two groups of one rank in both orders of their places.
    turn = seed % 6
    n = (5, 7, 8, 3, 4, 13)[turn]
    ranks = [together] * n
    odds = sorted(draw.sample(range(n), 2 if turn < 2 else draw.randint(1, (n - 1) // 2)))
    for odd in odds:
        ranks[odd] = draw.choice(kinds)
    ranks[odds[0]] = kinds[turn]
    if turn < 2:
        ranks[odds[1]] = kinds[1 - turn]
    # Up to three threads beside the main one.
    return file, [[loader] * draw.choice((0, 0, 1, 1, 2, 3)) + [main] for main in ranks]


def _groups(seed: int) -> Case:
    file, ranks = _stacks(seed)
    # The dumps of two ranks may be equal.
    dumps = [dump_of(threads, 8 * (rank // 3)) for rank, threads in enumerate(ranks)]
    right = grouped(place_of(threads[-1], file) for threads in ranks)
    places = [_wrong_places(threads, file) for threads in ranks]
    wrong: dict[str, Any] = {text: grouped(of[text] for of in places) for text in places[0]}
    wrong |= {
        "You left out ranks without a frame in the file. Their place is an empty text": [
            one for one in right if one[0]
        ],
        "The largest group comes first. Begin with the smallest one": right[::-1],
    }
    mistakes = _unlike(right, wrong)
    mistakes.append(
        Mistake(_unsorted(right), "These are the groups, but in another order. Sort them")
    )
    return Case("groups", [dumps, file], right, mistakes, "a list of [place, ranks]")


def _wrong_places(threads: Sequence[Frames], file: str) -> dict[str, str]:
    """Return where a rank is by each mistake."""
    main = threads[-1]
    return {
        "You read the first thread, but it is a loader's. The main thread comes last": place_of(
            threads[0], file
        ),
        "You took the outermost frame. The first one of the file is where the rank is": place_of(
            main, file, -1
        ),
        "You took frames of other files, too. Compare the whole name of the file": place_of(
            main, main[0][0]
        ),
        "You compared the end of the file's name only, but another file ends alike": _first_place(
            main, lambda name: name.endswith("train.py")
        ),
        "You compared the beginning of the file's name only, but train.pyx begins alike": (
            _first_place(main, lambda name: name.startswith(file))
        ),
        "You grouped by function. Two ranks in one function can be at different lines": place_of(
            main, file
        ).partition(",")[0],
    }


def _first_place(frames: Frames, is_meant: Callable[[str], bool]) -> str:
    """Return a thread's innermost frame in the files that are meant; "" if it has none there."""
    return next((f"{what}, line {line}" for name, line, what in frames if is_meant(name)), "")


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
    numbers = _compared_numbers(dumps, since, until)
    for seq in reversed(numbers) if latest else numbers:
        found = _difference_at([of.get(seq) for of in by_seq], keys)
        if found:
            return [seq, *found]
    return None


def _compared_numbers(
    dumps: Sequence[Sequence[Entry]], since: int | None, until: int | None
) -> range:
    """Return the sequence numbers that are compared, see `difference`."""
    filled = [dump for dump in dumps if dump]
    if since is None:
        since = max((dump[0]["seq"] for dump in filled), default=1)
    if until is None:
        until = max((dump[-1]["seq"] for dump in filled), default=0)
    return range(since, until + 1)


def _difference_at(entries: list[Entry | None], keys: Sequence[str]) -> list[Any] | None:
    """Return the culprits and what differs in the ranks' entries with one sequence number."""
    if not all(entries):
        return [minority([entry is None for entry in entries]), "missing"]
    for key in keys:
        values = [str(entry[key]) for entry in entries if entry]
        if len(set(values)) > 1:
            return [minority(values), key]
    return None


def minority(values: Sequence[Any]) -> list[int]:
    """Return the ranks outside the largest group; of equal groups, the lowest rank's counts."""
    most = Counter(values).most_common(1)[0][0]  # the first one met among equals
    return [rank for rank, value in enumerate(values) if value != most]


#: What a rank calls: the operation, the sizes of its tensors, and a line, or text for a place.
Called = tuple[str, list[list[int]], Any]
USUAL: list[Called] = [("all_reduce", [[8, 64]], 31), ("all_reduce", [[1]], 38)]
RARE: list[Called] = [("broadcast", [[512]], 44), ("all_reduce", [[1]], 52), ("barrier", [], 57)]
#: Accidents that can happen to two ranks.
OF_SEVERAL = ("call", "sizes", "order", "two ways", "skips", "ends")


def _recordings(seed: int, accident: str) -> list[list[Entry]]:
    """Return the ranks' recordings; `accident` is what some rank does differently, or ""."""
    draw = random.Random(f"{seed} {accident}")
    n = draw.randint(4 if accident == "two ways" else 3, 6)
    program, at = _program(draw, accident)
    ranks = [list(program) for _ in range(n)]
    culprits = _culprits(draw, accident, n)
    for rank in culprits:
        _happen(accident, ranks, rank, at)
    firsts = [0 if accident == "never" else draw.randint(0, 6) for _ in range(n)]
    if accident == "long ago":
        firsts = [0 if rank in culprits else draw.randint(3, 6) for rank in range(n)]
    # A rank that is late has completed fewer calls, and does nothing else.
    dumps = [_entries(calls, at - 2 * (rank % 3)) for rank, calls in enumerate(ranks)]
    return [dump[first:] for dump, first in zip(dumps, firsts, strict=True)]


def _culprits(draw: random.Random, accident: str, n: int) -> list[int]:
    """Return the ranks to which an accident happens: one, or two of several."""
    culprit = 0 if accident == "line" else draw.randrange(n)
    pair = draw.sample(range(n), 2) if n > 4 or accident == "two ways" else [culprit]
    return pair if accident in OF_SEVERAL else [culprit]


def _program(draw: random.Random, accident: str) -> tuple[list[Called], int]:
    """Return what all ranks call, and the position of the call at which the accident happens."""
    length = draw.randint(14, 22)
    program = [USUAL[k % 2] if k % 7 else draw.choice(RARE) for k in range(length)]
    at = draw.randint(8, length - 3)
    if accident == "order":
        program[at] = USUAL[0]
    elif accident in ("sizes", "line") and draw.random() < 0.5:
        program[at] = ("all_to_all", [[8, 4]], 71) if accident == "sizes" else RARE[0]
    return program, at


def _happen(accident: str, ranks: list[list[Called]], rank: int, at: int) -> None:
    """Let an accident happen to a rank, at this position in its calls."""
    calls = ranks[rank]
    call, sizes, line = calls[at]
    instead: dict[str, Called] = {
        "call": ("reduce_scatter", sizes, 61),
        "sizes": (call, [[384]], line),
        "two ways": (call, [[384 + rank]], line),
        "order": (call, [size[::-1] for size in sizes], line),
        "line": (call, sizes, line + 9),
        "function": (call, sizes, f"first_step, line {line}"),
        "backend": (f"nccl:{call}", sizes, line),
    }
    if accident in instead:
        calls[at] = instead[accident]
    elif accident == "skips":
        del calls[at]
    elif accident == "ends":
        del calls[at:]
    elif accident == "once more":
        calls.append(USUAL[1])
    elif accident == "never":
        calls.clear()
    elif accident == "long ago":
        del calls[2:]
    elif accident == "call and line":
        calls[at] = ("reduce_scatter", sizes, line)
        ranks[rank - 1][at] = instead["line"]


def _entries(calls: list[Called], completed: int) -> list[Entry]:
    """Return a rank's recording, in which so many calls are completed."""
    return [
        {
            "seq": k + 1,
            "call": call,
            "sizes": sizes,
            "line": line if isinstance(line, str) else f"step, line {line}",
            "state": "completed" if k < completed else "scheduled",
        }
        for k, (call, sizes, line) in enumerate(calls)
    ]


def _compared(dumps: list[list[Entry]]) -> Case:
    right = difference(dumps)
    wrong = _wrong_differences(dumps)
    if right:
        wrong |= _wrong_culprits(right, len(dumps))
    else:
        wrong["The ranks agree. Return None"] = lambda got: got is not None
    mistakes = _unlike(right, wrong)
    return Case("first_difference", [dumps], right, mistakes)  # None is a result, too


def _wrong_differences(dumps: list[list[Entry]]) -> dict[str, Any]:
    at = [[{**entry, "seq": k} for k, entry in enumerate(dump, 1)] for dump in dumps]
    lasts = [dump[-1]["seq"] for dump in dumps if dump]
    whole = len(lasts) == len(dumps)
    oldest = min(dump[0]["seq"] for dump in dumps if dump)
    return {
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


def _wrong_culprits(right: list[Any], n: int) -> dict[str, Any]:
    seq, ranks, what = right
    others = [rank for rank in range(n) if rank not in ranks]
    return {
        "You named the ranks that agree. The culprits are the fewer ones": [seq, others, what],
        "Return all ranks outside the largest group": lambda got: (
            got in ([seq, ranks[:1], what], [seq, ranks[-1:], what])
        ),
    }


@task("18.3", "compare the recordings", points=3)
def recordings_compared(ranks: Ranks, report: Report) -> None:
    """Judge the first difference of recordings, whose oldest entries are overwritten."""
    accidents = (
        *("skips", "ends", "", "call", "sizes", "order", "line"),
        *("once more", "never", "two ways", "function", "backend", "long ago", "call and line"),
    )
    cases = [_compared(_recordings(report.seed + k, one)) for k in range(2) for one in accidents]
    trials.judge_calls(ranks, report, cases)
