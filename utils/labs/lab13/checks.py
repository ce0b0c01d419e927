"""Checks of lab 13: reports of deaths, resharding, intervals.

Nothing dies here. The checks of saves are in :mod:`utils.labs.lab13.crashes`, those of trainings
that go on in :mod:`utils.labs.lab13.resumable_training`.
"""

from __future__ import annotations

import collections
import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

from utils.checks.comparison import Mistake, same, table
from utils.checks.model import use_model as use_model
from utils.checks.task import Report, Step, task, value
from utils.checks.trials import Case, judge_calls, probe_calls
from utils.cluster.questions import Ranks

from .crashes import safe_save as safe_save
from .resumable_training import resume as resume
from .resumable_training import survive as survive

# -- 13.1: who died ---------------------------------------------------------------------------

_SIGNALS = {6: "Aborted", 9: "Killed", 11: "Segmentation fault", 15: "Terminated"}
_LINE = "-" * 74
_WAITS = "  rank {} waits in all_reduce(SUM) at train.py:{}"


def _survivors_say(dead: int, pid: int, waiting: list[int], line: int) -> str:
    """Return what those say who wait at this line when a rank has died."""
    rows = [f"rank {dead} died: its process {pid} is gone."]
    rows += [_WAITS.format(rank, line) for rank in waiting]
    return "\n".join([*rows, f"  rank {dead} died: its process {pid} is gone"])


def _launcher_says(rank: int, pid: int, signal: int, draw: random.Random, breaks: float) -> str:
    """Return the launcher's sentence; breaks: the share of its spaces that end a line."""
    node = draw.choice([f"n{pid % 7}", f"gpu-{pid % 7}.rack{pid % 3}.example.org"])
    words = (
        f"prterun noticed that process rank {rank} with PID {pid} on node {node} "
        f"exited on signal {signal} ({_SIGNALS[signal]})."
    ).split()
    ends = ["\n" if draw.random() < breaks else " " for _ in words[1:]]
    sentence = "".join(word + end for word, end in zip(words, [*ends, ""], strict=True))
    return f"{_LINE}\n{sentence}\n{_LINE}"


def _logs(seed: int) -> list[tuple[str, dict | None]]:
    """Return what jobs have printed, and what is in it."""
    draw = random.Random(seed)
    logs: list[tuple[str, dict | None]] = []

    def add(log: str, rank: int, signal: int | None) -> None:
        logs.append((log, {"rank": rank, "signal": signal}))

    for signal, breaks in ((9, 1.0), (11, 0.0), (15, 0.3)):
        # The first rank has two digits: its first one alone is another rank.
        rank = draw.randrange(2 if logs else 10, 30)
        pid = draw.randrange(10_000, 99_999)
        others = [r for r in range(30) if r not in (rank, rank // 10)]
        waiting = sorted(draw.sample(others, 3))
        survivors = _survivors_say(rank, pid, waiting, draw.randrange(10, 90))
        launcher = _launcher_says(rank, pid, signal, draw, breaks)
        add(f"step 9: loss 1.{pid}\n{survivors}\n{launcher}\n", rank, signal)
        if signal == 11:  # nobody was waiting
            launcher = _launcher_says(rank, pid, 6, draw, breaks)
            add(f"step 3: loss 2.{pid}\n{launcher}\n", rank, 6)
    # Rank 0 dies. Later another one does, in the next life of the same job.
    later = _launcher_says(draw.randrange(2, 30), 23_456, 15, draw, 0.3)
    zero = _launcher_says(0, 12_345, 6, draw, 0.3)
    add(f"{zero}\nlife 1: all go on from step 4\n{later}\n", 0, 6)
    rank = draw.randrange(2, 30)
    pid = draw.randrange(10_000, 99_999)
    add(_survivors_say(rank, pid, [0, 1], 40), rank, None)
    add(_survivors_say(0, pid, [rank], 40), 0, None)
    add(f"{_survivors_say(rank, pid, [0], 40)}\n   Exit code:    1\n", rank, None)
    # The launcher knows which rank it was; those who wait for another dead one don't.
    launcher = _launcher_says(rank, pid, 9, draw, 0.3)
    add(f"{_survivors_say(31, pid, [0], 40)}\n{launcher}\n", rank, 9)
    logs.append((f"step {draw.randrange(9)}: loss 0.31\nall ranks are done\n", None))
    failed = f"{_LINE}\n   Process name: [prterun-vm-{pid}@1,{rank}]\n   Exit code:    3\n{_LINE}\n"
    logs.append((failed, None))
    longest = max(len(log) for log, _ in logs)
    return [(log.ljust(longest, "\n"), right) for log, right in logs]


@task("13.1", "who died, and of what", points=2)
def first_death(ranks: Ranks, report: Report) -> None:
    """Judge the rank and the signal that are read from what a job has printed."""
    cases = [
        Case("first_death", [log], right, list(_wrong_deaths(right)))
        for log, right in _logs(report.seed)
    ]
    judge_calls(ranks, report, cases)


def _wrong_deaths(right: dict[str, Any] | None) -> Iterator[Mistake]:
    """Yield what mistakes read from a log; it tells of this death, or of none."""
    yield Mistake(
        lambda death: isinstance(death, list | str | int) and not isinstance(death, bool),
        'return a dict, {"rank": 2, "signal": 9}, or None',
    )
    if right is None:
        nobody = "nobody was killed by a signal here: return None"
        yield Mistake(lambda death: isinstance(death, dict), nobody)
        return
    rank, signal = right["rank"], right["signal"]
    texts = {"rank": str(rank), "signal": None if signal is None else str(signal)}
    yield Mistake(texts, "these are texts: numbers are asked for, int(…)")
    yield Mistake(
        _reads("rank", lambda r: r != rank and isinstance(r, int) and f"{rank}".startswith(f"{r}")),
        "only the first digit of the rank: jobs have more than ten of them",
    )
    yield from _wrong_entries(rank, signal)
    silent = (
        ": the launcher is silent, but the survivors say 'rank … died'; the signal is None then"
    )
    said = f"a rank died, and None came back{'' if signal else silent}"
    yield Mistake(lambda death: death is None, said)


def _wrong_entries(rank: int, signal: int | None) -> Iterator[Mistake]:
    """Yield mistakes in one entry of a death."""
    another_rank = (
        "rank 0 died first: it is a rank like the others, and what comes later in the log is "
        "another death"
        if rank == 0
        else "this rank is not the one that died: it waits, or the number is that of a process or "
        "step. Look for 'process rank …', else for 'rank … died'"
    )
    yield Mistake(_reads("rank", lambda r: r not in (rank, None)), another_rank)
    yield Mistake(
        _reads("signal", lambda s: s is None and signal is not None),
        "the launcher told the signal: 'process rank … with PID … on node … exited on signal "
        "…'. A line may break between two words, and every job has another PID and node",
    )
    another_signal = (
        "the survivors can't know the signal, so it is None; an exit code is none"
        if signal is None
        else "another signal: it stands behind 'exited on', in the launcher's words only"
    )
    yield Mistake(_reads("signal", lambda s: s != signal), another_signal)


def _reads(name: str, wrong: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return what recognises a death by one wrong entry."""
    return lambda death: isinstance(death, dict) and wrong(death.get(name))


# -- 13.4: as many files as ranks, once -------------------------------------------------------


def shard(n: int, p: int, rank: int, cut: str = "up") -> tuple[int, int]:
    """Return where the shard of a rank begins and ends: as torch.chunk cuts, or by another rule."""
    if cut == "even":  # as tensor_split cuts
        each, longer = divmod(n, p)
        begin = rank * each + min(rank, longer)
        return begin, begin + each + (rank < longer)
    each = -(-n // p) if cut == "up" else n // p
    return min(n, rank * each), min(n, (rank + 1) * each)


def plan(n: int, old: int, new: int, rank: int, cut: str = "up") -> list[list[int]]:
    """Return the reads of a new rank: (old rank, from, to, at)."""
    first, last = shard(n, new, rank, cut)
    reads = []
    for file in range(old):
        begin, end = shard(n, old, file, cut)
        a, b = max(first, begin), min(last, end)
        if a < b:
            reads.append([file, a - begin, b - begin, a - first])
    return reads


SPLITS = (
    *((12, 4, 2), (12, 3, 2), (12, 4, 1), (10, 4, 2), (10, 4, 3), (10, 2, 4)),
    *((3, 4, 2), (3, 4, 1), (3, 2, 4), (7, 3, 3)),
)


# What mistakes make of a read (file, start, stop, at): by where its file begins in the tensor, how
# long the file is, and where the shard of the new rank begins.
_WRONG_READS: dict[str, Callable[..., list[int]]] = {
    "start and stop count in the whole tensor; they are places in that rank's file": (
        lambda file, a, b, at, begin, *_: [file, a + begin, b + begin, at]
    ),
    "`at` counts in the whole tensor; it is the place in the new rank's own shard": (
        lambda file, a, b, at, begin, length, first: [file, a, b, at + first]
    ),
    "`at` is 0 in all reads: each would be written over the one before": (
        lambda file, a, b, at, *_: [file, a, b, 0]
    ),
    "the third number is a length: stop is one behind the last element": (
        lambda file, a, b, at, *_: [file, a, b - a, at]
    ),
    "one element too few of each: stop is one behind the last element": (
        lambda file, a, b, at, *_: [file, a, b - 1, at]
    ),
    "whole files are read: only what overlaps with the own shard": (
        lambda file, a, b, at, begin, length, *_: [file, 0, length, at]
    ),
}


def _wrong_reads(n: int, old: int, new: int, rank: int) -> list[Mistake]:
    right = plan(n, old, new, rank)
    first, _ = shard(n, new, rank)
    begins = [shard(n, old, file)[0] for file in range(old)] + [n]
    lengths = {file: end - begin for file, (begin, end) in enumerate(itertools.pairwise(begins))}
    of_others = [plan(n, old, new, other) for other in range(new) if other != rank]
    wrong = {
        "return a list of reads (file, start, stop, at)": _are_no_reads,
        "n // p rounds down, and the last elements belong to nobody: -(-n // p) rounds up": plan(
            n, old, new, rank, "down"
        ),
        "cut as tensor_split does, into sizes that differ by one at most. Here each shard has "
        "-(-n // p) elements, and the last ones have fewer, or none": plan(
            n, old, new, rank, "even"
        ),
        "these are the reads of another rank: `rank` is an argument, not dist.get_rank()": (
            lambda reads: reads != [] and reads in of_others
        ),
    }
    for text, change in _WRONG_READS.items():
        wrong[text] = [change(*read, begins[read[0]], lengths[read[0]], first) for read in right]
    return table(wrong | _needless_reads(right, lengths))


def _are_no_reads(reads: Any) -> bool:
    """Return whether this is anything but a list of lists of four."""
    return not isinstance(reads, list) or any(
        not isinstance(read, list) or len(read) != 4 for read in reads
    )


def _needless_reads(right: list[list[int]], lengths: dict[int, int]) -> dict[str, Any]:
    """Return mistakes of who reads more than there is, or too little; lengths: of each file."""
    return {
        "a read goes beyond the end of its file: the last shard ends at n, so "
        "min(n, (r + 1) * each)": (
            lambda reads: any(f in lengths and b > lengths[f] for f, _, b, _ in reads)
        ),
        "there are reads of nothing: leave them out": (
            lambda reads: [read for read in reads if read[1] < read[2]] == right != reads
        ),
        "every file is read: only what overlaps with the own shard": (
            lambda reads: len(right) < len(lengths) and {f for f, *_ in reads} == set(lengths)
        ),
        "something is missing: a shard may lie in several files, and -(-n // p) rounds up": (
            lambda reads: len(reads) < len(right)
        ),
        "reads of nothing": [[file, 0, 0, 0] for file in lengths],
    }


@task("13.4", "from four ranks to two", points=3)
def reshard(ranks: Ranks, report: Report) -> None:
    """Judge which part of which file a rank of the new job reads."""
    form = "a list of reads (file, start, stop, at)"
    cases = [
        Case("reads", [*sizes, rank], plan(*sizes, rank), _wrong_reads(*sizes, rank), form)
        for sizes in (*SPLITS, *_drawn_splits(report.seed))
        for rank in range(sizes[2])
    ]
    calls = [[case.name, case.arguments] for case in cases]
    for answer in report.answers(ranks, probe_calls, calls=calls):
        report.follow(answer.rank, _all_reads(cases, answer.value))


def _drawn_splits(seed: int) -> list[tuple[int, int, int]]:
    draw = random.Random(seed)
    splits = [(draw.randrange(8, 60), draw.randrange(2, 7), draw.randrange(1, 7)) for _ in range(3)]
    splits.append((draw.randrange(100, 400), draw.randrange(20, 40), draw.randrange(2, 5)))
    many = draw.randrange(150, 250)
    splits.append((2 * many + 1, many, 2))  # one element more than fits: rounded up all the same
    return splits


def _all_reads(cases: list[Case], results: list) -> Iterator[Step]:
    for case, reads in zip(cases, results, strict=True):
        if isinstance(reads, list) and all(isinstance(read, list) for read in reads):
            reads = sorted(reads)
        call = f"reads({', '.join(map(str, case.arguments))})"
        yield value(reads, case.right, case.mistakes, what=call, form=case.form)


# -- 13.5: how often --------------------------------------------------------------------------


def replay(
    work: float,
    interval: float,
    save: float,
    restart: float,
    failures: list[float],
    wrong: str = "",
) -> dict:
    """Return the books of a job, or of one with a mistake in the bookkeeping (see `_BOOKS`)."""
    now = done = lost = 0.0
    count = 0
    coming = collections.deque([*sorted(failures), math.inf])
    while done < work:
        piece = min(interval, work - done)
        is_last = done + piece >= work and wrong != "saves at the end"
        end = now + (piece if is_last else piece + save)
        failure = _next_failure(coming, now, restart, wrong)
        if failure >= end:
            now = end
            done += piece
            continue
        coming.popleft()
        count += 1
        if wrong == "kept in a save" and now + piece <= failure:
            done += piece
        else:
            lost += _lost(failure - now, piece, done, wrong)
        if wrong == "from the start":
            done = 0.0
        now = failure if wrong == "no restart" else failure + restart
    return {"seconds": now, "lost": lost, "failures": count}


def _next_failure(
    coming: collections.deque[float], now: float, restart: float, wrong: str
) -> float:
    """Return the next failure that hits something; drop those that are over."""
    awake = now - restart if wrong == "in restarts" else now
    while coming[0] < awake or (wrong == "at a beginning" and coming[0] == now):
        coming.popleft()
    return coming[0]


def _lost(seconds: float, piece: float, done: float, wrong: str) -> float:
    """Return the work that is lost by a failure, so many seconds after a piece began."""
    gone = min(seconds, piece)
    of_mistakes = {
        "saving is lost": seconds,
        "whole intervals": piece,
        "nothing lost": 0.0,
        "from the start": gone + done,
    }
    return of_mistakes.get(wrong, gone)


_BOOKS = {
    "saves at the end": "it saves after the last piece, too: the job is over then",
    "in restarts": "a failure while nothing runs, during a restart, changes nothing",
    "kept in a save": "a save that fails in the middle is none: its interval is lost as well",
    "saving is lost": "`lost` has seconds of saving in it: it counts work that is done again",
    "whole intervals": "of an interval only what was done by then is lost",
    "nothing lost": "`lost` is 0: add up the work that has to be done again",
    "from the start": "it begins at 0 after a failure: there is a checkpoint",
    "no restart": "a restart takes its time, too",
    "at a beginning": "a failure in the very moment in which something ends hits what begins then: "
    "it counts, and a restart follows",
}


@task("13.5", "what an interval costs", points=4)
def interval(ranks: Ranks, report: Report) -> None:
    """Judge a job's seconds under failures, and Young's interval."""
    draw = random.Random(report.seed)
    fixed = [
        [100.0, 10.0, 1.0, 5.0, []],
        # A failure comes at the very end of the job: it is over.
        [10.0, 10.0, 1.0, 5.0, [10.0]],
        # At the end of a save, and at that of a restart.
        [100.0, 10.0, 1.0, 5.0, [11.0, 16.0]],
    ]
    cases = [
        Case("with_failures", job, replay(*job), _wrong_books(*job), "a dict")
        for job in (*fixed, *_drawn_jobs(draw))
    ]
    for seconds in (1, 1, 1e-4):
        save = seconds * draw.uniform(1, 60)
        mtbf = seconds * draw.uniform(600, 90_000)
        right = math.sqrt(2 * save * mtbf)
        cases.append(Case("young", [save, mtbf], right, _wrong_intervals(save, mtbf), "seconds"))
    judge_calls(ranks, report, cases)
    if any(kind == "silent" for _, kind, _ in report.found):
        report.problem(
            "does the loop end? After a failure the time goes on, so that the same failure does "
            "not come again"
        )


def _drawn_jobs(draw: random.Random) -> list[list]:
    """Return arguments of `with_failures` that are different in each run."""
    jobs = []
    for work, every, save, restart in (
        *((100.0, 10.0, 1.0, 5.0), (95.0, 20.0, draw.uniform(3, 5), draw.uniform(1, 2))),
        (60.0, 100.0, 1.0, draw.uniform(4, 6)),
    ):
        times = []
        now = 0.0
        while now < 8 * work:
            now += draw.expovariate(1 / 25)
            times.append(now)
        # One while a save is written, one in a restart.
        first = every + 0.4 * save
        later = (t for t in times if t > first + restart + 3)
        jobs.append([work, every, save, restart, sorted([first, first + restart / 2, *later])])
    return jobs


def _wrong_intervals(save: float, mtbf: float) -> list[Mistake]:
    return table({
        "the 2 is missing": math.sqrt(save * mtbf),
        "the square root is missing": 2 * save * mtbf,
        "this is save / mtbf: the interval grows with both": math.sqrt(2 * save / mtbf),
        "the 2 belongs below the root": 2 * math.sqrt(save * mtbf),
        "upside down": math.sqrt(mtbf / (2 * save)),
        "half of the root": math.sqrt(save * mtbf / 2),
    })


def _wrong_books(*job: Any) -> list[Mistake]:
    """Return which books mistakes lead to; the job is that of :func:`replay`."""
    work, every, *_ = job
    right = replay(*job)

    def wrong_entries(book: dict[str, float]) -> list[str]:
        return [key for key in right if not same(book[key], right[key])]

    mistakes = [
        Mistake(
            lambda book: not isinstance(book, dict) or book.keys() != right.keys(),
            'return {"seconds": …, "lost": …, "failures": …}',
        )
    ]
    for how, text in _BOOKS.items():
        if how == "from the start" and work < 5 * every:
            continue  # may go on for very long
        mistakes.append(Mistake(replay(*job, wrong=how), text))
    meanings = {
        "failures": "the number of failures: only those that stop something count",
        "seconds": "the seconds until the work is done",
        "lost": "the seconds of work that were done twice",
    }
    for name, meaning in meanings.items():
        said = f"only {name!r} is wrong: {meaning}"
        mistakes.append(Mistake(lambda book, name=name: wrong_entries(book) == [name], said))
    return mistakes
