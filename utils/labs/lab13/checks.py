"""Checks of lab 13: reports of deaths, resharding, intervals.

No rank dies in these checks. :mod:`utils.labs.lab13.crashes` checks saves, and
:mod:`utils.labs.lab13.resumable_training` checks trainings that continue.
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
from utils.checks.probe import probe_calls
from utils.checks.task import Report, Step, task, value
from utils.checks.trials import Case, judge_calls
from utils.cluster.questions import Ranks

from .crashes import safe_save as safe_save
from .resumable_training import resume as resume
from .resumable_training import survive as survive

# -- 13.1: which rank died --------------------------------------------------------------------

_SIGNALS = {6: "Aborted", 9: "Killed", 11: "Segmentation fault", 15: "Terminated"}
_LINE = "-" * 74
_WAITS = "  rank {} waits in all_reduce(SUM) at train.py:{}"


def _survivors_say(dead: int, pid: int, waiting: list[int], line: int) -> str:
    """Return what the survivors print, who wait at this line when a rank dies."""
    rows = [f"rank {dead} died: its process {pid} is gone."]
    rows += [_WAITS.format(rank, line) for rank in waiting]
    return "\n".join([*rows, f"  rank {dead} died: its process {pid} is gone"])


def _launcher_says(rank: int, pid: int, signal: int, draw: random.Random, breaks: float) -> str:
    """Return the launcher's sentence, in which a share `breaks` of the spaces end a line."""
    node = draw.choice([f"n{pid % 7}", f"gpu-{pid % 7}.rack{pid % 3}.example.org"])
    words = (
        f"prterun noticed that process rank {rank} with PID {pid} on node {node} "
        f"exited on signal {signal} ({_SIGNALS[signal]})."
    ).split()
    ends = ["\n" if draw.random() < breaks else " " for _ in words[1:]]
    sentence = "".join(word + end for word, end in zip(words, [*ends, ""], strict=True))
    return f"{_LINE}\n{sentence}\n{_LINE}"


def _logs(seed: int) -> list[tuple[str, dict | None]]:
    """Return the logs of jobs, each with the death in it, or None."""
    draw = random.Random(seed)
    logs: list[tuple[str, dict | None]] = []

    def add(log: str, rank: int, signal: int | None) -> None:
        logs.append((log, {"rank": rank, "signal": signal}))

    for signal, breaks, pids in (
        (9, 1.0, (10, 99)),
        (11, 0.0, (10_000, 99_999)),
        (15, 0.3, (1_000_000, 4_000_000)),
    ):
        # The first rank has two digits, so that its first digit alone is another rank.
        rank = draw.randrange(2 if logs else 10, 30)
        pid = draw.randrange(*pids)
        others = [r for r in range(30) if r not in (rank, rank // 10)]
        waiting = sorted(draw.sample(others, 3))
        survivors = _survivors_say(rank, pid, waiting, draw.randrange(10, 90))
        launcher = _launcher_says(rank, pid, signal, draw, breaks)
        add(f"step 9: loss 1.{pid}\n{survivors}\n{launcher}\n", rank, signal)
        if signal == 11:  # nobody was waiting
            launcher = _launcher_says(rank, pid, 6, draw, breaks)
            add(f"step 3: loss 2.{pid}\n{launcher}\n", rank, 6)
    # Rank 0 dies. Another rank dies later, after the job was restarted.
    later = _launcher_says(draw.randrange(2, 30), 23_456, 15, draw, 0.3)
    zero = _launcher_says(0, 12_345, 6, draw, 0.3)
    add(f"{zero}\nlife 1: all go on from step 4\n{later}\n", 0, 6)
    rank = draw.randrange(2, 30)
    pid = draw.randrange(10_000, 99_999)
    add(_survivors_say(rank, pid, [0, 1], 40), rank, None)
    add(_survivors_say(0, pid, [rank], 40), 0, None)
    # Later, another rank dies: the first death is the cause.
    add(f"{_survivors_say(rank, pid, [0], 40)}\n{_survivors_say(0, pid + 1, [1], 41)}", rank, None)
    add(f"{_survivors_say(rank, pid, [0], 40)}\n   Exit code:    1\n", rank, None)
    # The launcher names the rank; the survivors here name another one, and the launcher counts.
    launcher = _launcher_says(rank, pid, 9, draw, 0.3)
    add(f"{_survivors_say(31, pid, [0], 40)}\n{launcher}\n", rank, 9)
    logs.append((f"step {draw.randrange(9)}: loss 0.31\nall ranks are done\n", None))
    failed = f"{_LINE}\n   Process name: [prterun-vm-{pid}@1,{rank}]\n   Exit code:    3\n{_LINE}\n"
    logs.append((failed, None))
    longest = max(len(log) for log, _ in logs)
    return [(log.ljust(longest, "\n"), right) for log, right in logs]


@task("13.1", "which rank died, and why", points=2)
def first_death(ranks: Ranks, report: Report) -> None:
    """Judge which rank and which signal the answer finds in a job's log."""
    cases = [
        Case("first_death", [log], right, list(_wrong_deaths(right)))
        for log, right in _logs(report.seed)
    ]
    judge_calls(ranks, report, cases)


def _wrong_deaths(right: dict[str, Any] | None) -> Iterator[Mistake]:
    """Yield mistakes in reading a log, in which this rank died, or no rank."""
    yield Mistake(
        lambda death: isinstance(death, list | str | int) and not isinstance(death, bool),
        'Return a dict such as {"rank": 2, "signal": 9}, or None',
    )
    if right is None:
        nobody = "You found a death, but no rank was killed by a signal. Return None"
        yield Mistake(lambda death: isinstance(death, dict), nobody)
        return
    rank, signal = right["rank"], right["signal"]
    texts = {"rank": str(rank), "signal": None if signal is None else str(signal)}
    yield Mistake(texts, "You returned texts. Convert rank and signal to numbers with int(…)")
    yield Mistake(
        _reads("rank", lambda r: r != rank and isinstance(r, int) and f"{rank}".startswith(f"{r}")),
        "You read only the first digit of the rank. Read the whole number, as in rank 12",
    )
    yield from _wrong_entries(rank, signal)
    where = "launcher's 'process rank …'" if signal else "survivors' 'rank … died'"
    said = f"You returned None, but a rank died. Look for the {where} in the log"
    yield Mistake(lambda death: death is None, said)


def _wrong_entries(rank: int, signal: int | None) -> Iterator[Mistake]:
    """Yield mistakes in one entry of a death."""
    another_rank = (
        "You returned another rank, but rank 0 died first. Treat rank 0 like any other rank, and "
        "return the first death of the log"
        if rank == 0
        else "You returned a rank that was waiting, or a process ID or a step. Look for 'process "
        "rank …' first, and only then for 'rank … died'"
    )
    yield Mistake(_reads("rank", lambda r: r not in (rank, None)), another_rank)
    yield Mistake(
        _reads("signal", lambda s: s is None and signal is not None),
        "You missed the launcher's 'process rank … with PID … on node … exited on signal …'. "
        "Accept any PID and any node, and a line break between any two words",
    )
    another_signal = (
        "The survivors can't know the signal, and an exit code isn't one. Return None as the signal"
        if signal is None
        else "You returned another signal. Take the number after 'exited on signal'"
    )
    yield Mistake(_reads("signal", lambda s: s != signal), another_signal)


def _reads(name: str, wrong: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return a function that recognizes a death with one wrong entry."""
    return lambda death: isinstance(death, dict) and wrong(death.get(name))


# -- 13.4: from the files of the old ranks to the new ranks -----------------------------------


def shard(n: int, p: int, rank: int, cut: str = "up") -> tuple[int, int]:
    """Return the begin and end of a rank's shard, cut as torch.chunk cuts or by another rule."""
    if cut == "even":  # as tensor_split cuts
        each, longer = divmod(n, p)
        begin = rank * each + min(rank, longer)
        return begin, begin + each + (rank < longer)
    each = -(-n // p) if cut == "up" else n // p
    return min(n, rank * each), min(n, (rank + 1) * each)


def plan(n: int, old: int, new: int, rank: int, cut: str = "up") -> list[list[int]]:
    """Return the reads of a new rank, each of them [old rank, start, stop, at]."""
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


# What each mistake makes of a read (file, start, stop, at). The functions also get where the file
# begins in the tensor, how long the file is, and where the new rank's shard begins.
_WRONG_READS: dict[str, Callable[..., list[int]]] = {
    "You counted start and stop in the whole tensor. Count them in the old rank's file": (
        lambda file, a, b, at, begin, *_: [file, a + begin, b + begin, at]
    ),
    "You counted `at` in the whole tensor. Count it in the new rank's shard": (
        lambda file, a, b, at, begin, length, first: [file, a, b, at + first]
    ),
    "All your reads have `at` 0, so each would overwrite the last. Count `at` in the new shard": (
        lambda file, a, b, at, *_: [file, a, b, 0]
    ),
    "Your third number is a length. Return stop, the position after the last element": (
        lambda file, a, b, at, *_: [file, a, b - a, at]
    ),
    "You left out the last element of each read. Let stop be the position after the last element": (
        lambda file, a, b, at, *_: [file, a, b - 1, at]
    ),
    "You read whole files. Read only what overlaps with the new rank's shard": (
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
        "Return a list of reads, each of them a tuple (file, start, stop, at)": _are_no_reads,
        "You rounded down with n // p, so the last elements belong to no rank. Round up with "
        "-(-n // p)": plan(n, old, new, rank, "down"),
        "You cut as tensor_split does, into sizes that differ by at most one. Cut as torch.chunk "
        "does: each shard has -(-n // p) elements, and the last ones may have fewer": plan(
            n, old, new, rank, "even"
        ),
        "You returned the reads of another rank. Use the argument `rank`, not dist.get_rank()": (
            lambda reads: reads != [] and reads in of_others
        ),
    }
    for text, change in _WRONG_READS.items():
        wrong[text] = [change(*read, begins[read[0]], lengths[read[0]], first) for read in right]
    return table(wrong | _needless_reads(right, lengths))


def _are_no_reads(reads: Any) -> bool:
    """Return whether this isn't a list of lists with four entries."""
    return not isinstance(reads, list) or any(
        not isinstance(read, list) or len(read) != 4 for read in reads
    )


def _needless_reads(right: list[list[int]], lengths: dict[int, int]) -> dict[str, Any]:
    """Return mistakes that read too much or too little; `lengths` has the length of each file."""
    return {
        "A read goes beyond the end of its file, because the last shard ends at n. Limit the end "
        "to min(n, (r + 1) * each)": (
            lambda reads: any(f in lengths and b > lengths[f] for f, _, b, _ in reads)
        ),
        "Your list has reads of nothing. Leave them out": (
            lambda reads: [read for read in reads if read[1] < read[2]] == right != reads
        ),
        "You read every file. Leave out the files that don't overlap with the new rank's shard": (
            lambda reads: len(right) < len(lengths) and {f for f, *_ in reads} == set(lengths)
        ),
        "You missed a read, because a shard may be in several files. Return a read for each of "
        "them, and round up with -(-n // p)": lambda reads: len(reads) < len(right),
        "All your reads are of nothing. Leave them out": [[file, 0, 0, 0] for file in lengths],
    }


@task("13.4", "from four ranks to two", points=3)
def reshard(ranks: Ranks, report: Report) -> None:
    """Judge which part of which file each rank of the new job reads."""
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
    many = draw.randrange(1100, 1500)
    splits.append((2 * many + 1, many, 2))  # one element more than fits, which needs rounding up
    return splits


def _all_reads(cases: list[Case], results: list) -> Iterator[Step]:
    for case, reads in zip(cases, results, strict=True):
        if isinstance(reads, list) and all(isinstance(read, list) for read in reads):
            reads = sorted(reads)
        call = f"reads({', '.join(map(str, case.arguments))})"
        yield value(reads, case.right, case.mistakes, what=call, form=case.form, tolerance=0)


# -- 13.5: how often --------------------------------------------------------------------------


def account(
    work: float,
    interval: float,
    save: float,
    restart: float,
    failures: list[float],
    wrong: str = "",
) -> dict:
    """Return the account of a job with failures; `wrong` names a mistake of `_BOOKS` to make."""
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
    """Return the next failure that hits something, and drop earlier failures."""
    awake = now - restart if wrong == "in restarts" else now
    while coming[0] < awake or (wrong == "at a beginning" and coming[0] == now):
        coming.popleft()
    return coming[0]


def _lost(seconds: float, piece: float, done: float, wrong: str) -> float:
    """Return the work lost if a failure comes so many seconds after a piece began."""
    gone = min(seconds, piece)
    of_mistakes = {
        "saving is lost": seconds,
        "whole intervals": piece,
        "nothing lost": 0.0,
        "from the start": gone + done,
    }
    return of_mistakes.get(wrong, gone)


_BOOKS = {
    "saves at the end": "You save after the last piece, when the job is over. Leave this save out",
    "in restarts": "You counted a failure during a restart. Skip it, because nothing was running",
    "kept in a save": "You kept an interval although its save was interrupted. Add it to `lost`",
    "saving is lost": "`lost` contains seconds of saving. Count only the work that is done again",
    "whole intervals": "You counted whole intervals as lost. Count the work before the failure",
    "nothing lost": "`lost` is 0. Add up the work that has to be done again",
    "from the start": "Your job starts at 0 after a failure. Continue from the last checkpoint",
    "no restart": "You left out the time of the restart. Add it after each failure",
    "at a beginning": "You skipped a failure at the very moment when something ends. Count it, "
    "because it hits what begins then",
}


@task("13.5", "what an interval costs", points=4)
def interval(ranks: Ranks, report: Report) -> None:
    """Judge how long a job with failures takes, and Young's interval."""
    draw = random.Random(report.seed)
    fixed = [
        [100.0, 10.0, 1.0, 5.0, []],
        # A failure at the very end of the job changes nothing, because the job is over.
        [10.0, 10.0, 1.0, 5.0, [10.0]],
        # One failure comes at the end of a save, and one at the end of a restart.
        [100.0, 10.0, 1.0, 5.0, [11.0, 16.0]],
        # A failure when a save begins ends this save; then one at the very beginning of the job.
        [100.0, 10.0, 1.0, 5.0, [10.0]],
        [100.0, 10.0, 1.0, 5.0, [0.0]],
        # Two more failures come during the restart.
        [100.0, 10.0, 1.0, 5.0, [3.0, 5.0, 6.0]],
    ]
    cases = [
        Case("with_failures", job, account(*job), _wrong_books(*job), "a dict")
        for job in (*fixed, *_drawn_jobs(draw))
    ]
    for seconds in (1, 1, 1e-4):
        save = seconds * draw.uniform(1, 60)
        mtbf = seconds * draw.uniform(600, 90_000)
        right = math.sqrt(2 * save * mtbf)
        cases.append(Case("young", [save, mtbf], right, _wrong_intervals(save, mtbf), "seconds"))
    cases.append(Case("young", [50.0, 60.0], math.sqrt(6000), _wrong_intervals(50, 60), "seconds"))
    judge_calls(ranks, report, cases)
    if any(kind == "interrupted" for _, kind, _ in report.found):
        report.problem(
            "Your loop may never end. Move the time forward after a failure, so that the same "
            "failure doesn't come again"
        )


def _drawn_jobs(draw: random.Random) -> list[list]:
    """Return arguments for `with_failures` that differ from run to run."""
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
        # The first failure hits a save, and the second one comes during the restart.
        first = every + 0.4 * save
        later = (t for t in times if t > first + restart + 3)
        jobs.append([work, every, save, restart, sorted([first, first + restart / 2, *later])])
    return jobs


def _wrong_intervals(save: float, mtbf: float) -> list[Mistake]:
    return table({
        "You left out the 2. Put it under the root": math.sqrt(save * mtbf),
        "You left out the square root. Take it of the whole product": 2 * save * mtbf,
        "You divided save by mtbf, but the interval grows with both": math.sqrt(2 * save / mtbf),
        "You put the 2 in front of the root. Put it under the root": 2 * math.sqrt(save * mtbf),
        "You divided mtbf by save, but the interval grows with both": math.sqrt(mtbf / (2 * save)),
        "You divided by 2 under the root. Multiply by 2": math.sqrt(save * mtbf / 2),
    })


def _wrong_books(*job: Any) -> list[Mistake]:
    """Return mistakes with the accounts that they lead to; `job` has the arguments of `account`."""
    work, every, *_ = job
    right = account(*job)

    def wrong_entries(book: dict[str, float]) -> list[str]:
        return [key for key in right if not same(book[key], right[key])]

    mistakes = [
        Mistake(
            lambda book: not isinstance(book, dict) or book.keys() != right.keys(),
            'Return a dict with these keys: {"seconds": …, "lost": …, "failures": …}',
        )
    ]
    for how, text in _BOOKS.items():
        if how == "from the start" and work < 5 * every:
            continue  # this mistake may never reach the end
        mistakes.append(Mistake(account(*job, wrong=how), text))
    meanings = {
        "failures": "Count only the failures that stop something",
        "seconds": "Return the seconds until the work is done",
        "lost": "Add up the seconds of work that were done twice",
    }
    for name, meaning in meanings.items():
        said = f"Only {name!r} is wrong. {meaning}"
        mistakes.append(Mistake(lambda book, name=name: wrong_entries(book) == [name], said))
    return mistakes
