"""Checks of lab 13: reports of deaths, resharding, intervals, going on with fewer.

The checks of saves and of resumed trainings are in modules of their own. Nothing dies here: what
survivors do is judged in groups of 4, 3, 2 and 1 ranks.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from utils.checks.calls import inside, only, some, waited
from utils.checks.functions import Case, judge_calls, probe_calls
from utils.checks.groups import (
    WORLD,
    Group,
    GroupAnswer,
    Partition,
    in_group,
    judge_groups,
    keywords,
    on,
    places,
    tried,
)
from utils.checks.mistakes import Mistake, same, table
from utils.checks.model import use_model as use_model
from utils.checks.probe import answer_named, reading_answer, recorded
from utils.checks.steps import Step, communication, facts, value
from utils.checks.task import Report, task, to_each
from utils.cluster.contracts import Ranks

from .crashes import safe_save as safe_save
from .resumable_training import resume as resume

PARTITIONS = ([[0, 1, 2], [3]], [[1, 3], [0, 2]], None)

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
    """The launcher's sentence; breaks: the share of its spaces that end a line."""
    node = draw.choice([f"n{pid % 7}", f"gpu-{pid % 7}.rack{pid % 3}.example.org"])
    words = (
        f"prterun noticed that process rank {rank} with PID {pid} on node {node} "
        f"exited on signal {signal} ({_SIGNALS[signal]})."
    ).split()
    ends = ["\n" if draw.random() < breaks else " " for _ in words[1:]]
    sentence = "".join(word + end for word, end in zip(words, [*ends, ""], strict=True))
    return f"{_LINE}\n{sentence}\n{_LINE}"


def _logs(seed: int) -> list[tuple[str, dict | None]]:
    """Texts of jobs, and what is in them."""
    draw = random.Random(seed)
    logs: list[tuple[str, dict | None]] = []
    for signal, breaks in ((9, 1.0), (11, 0.0), (15, 0.3)):
        # The first rank has two digits: its first one alone is another rank.
        rank, pid = draw.randrange(2 if logs else 10, 30), draw.randrange(10_000, 99_999)
        others = [r for r in range(30) if r not in (rank, rank // 10)]
        waiting = sorted(draw.sample(others, 3))
        survivors = _survivors_say(rank, pid, waiting, draw.randrange(10, 90))
        launcher = _launcher_says(rank, pid, signal, draw, breaks)
        log = f"step 9: loss 1.{pid}\n{survivors}\n{launcher}\n"
        logs.append((log, {"rank": rank, "signal": signal}))
        if signal == 11:  # nobody was waiting
            alone = f"step 3: loss 2.{pid}\n{_launcher_says(rank, pid, 6, draw, breaks)}\n"
            logs.append((alone, {"rank": rank, "signal": 6}))
    # Rank 0 dies. Later another one does, in the next life of the same job.
    later = _launcher_says(draw.randrange(2, 30), 23_456, 15, draw, 0.3)
    zero = f"{_launcher_says(0, 12_345, 6, draw, 0.3)}\nlife 1: all go on from step 4\n"
    logs.append((f"{zero}{later}\n", {"rank": 0, "signal": 6}))
    rank, pid = draw.randrange(2, 30), draw.randrange(10_000, 99_999)
    logs.append((_survivors_say(rank, pid, [0, 1], 40), {"rank": rank, "signal": None}))
    logs.append((_survivors_say(0, pid, [rank], 40), {"rank": 0, "signal": None}))
    ended = f"{_survivors_say(rank, pid, [0], 40)}\n   Exit code:    1\n"
    logs.append((ended, {"rank": rank, "signal": None}))
    # The launcher knows which rank it was; those who wait for another dead one don't.
    both = f"{_survivors_say(31, pid, [0], 40)}\n{_launcher_says(rank, pid, 9, draw, 0.3)}\n"
    logs.append((both, {"rank": rank, "signal": 9}))
    logs.append((f"step {draw.randrange(9)}: loss 0.31\nall ranks are done\n", None))
    failed = f"{_LINE}\n   Process name: [prterun-vm-{pid}@1,{rank}]\n   Exit code:    3\n{_LINE}\n"
    logs.append((failed, None))
    longest = max(len(log) for log, _ in logs)
    return [(log.ljust(longest, "\n"), right) for log, right in logs]


@task("13.1", "who died, and of what", points=2)
def first_death(ranks: Ranks, report: Report) -> None:
    """Rank and signal from what a job has printed."""
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
        said = "nobody was killed by a signal here: return None"
        yield Mistake(lambda death: isinstance(death, dict), said)
        return
    rank, signal = right["rank"], right["signal"]
    texts = {"rank": str(rank), "signal": None if signal is None else str(signal)}
    yield Mistake(texts, "these are texts: numbers are asked for, int(…)")
    yield Mistake(
        _reads("rank", lambda r: r != rank and isinstance(r, int) and f"{rank}".startswith(f"{r}")),
        "only the first digit of the rank: jobs have more than ten of them",
    )
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
    silent = (
        ": the launcher is silent, but the survivors say 'rank … died'; the signal is None then"
    )
    said = f"a rank died, and None came back{'' if signal else silent}"
    yield Mistake(lambda death: death is None, said)


def _reads(name: str, wrong: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return what recognises a death by one wrong entry."""
    return lambda death: isinstance(death, dict) and wrong(death.get(name))


# -- 13.4: as many files as ranks, once -------------------------------------------------------


def shard(n: int, p: int, rank: int, cut: str = "up") -> tuple[int, int]:
    """Where the shard of a rank begins and ends: as torch.chunk cuts, or by another rule."""
    if cut == "even":  # as tensor_split cuts
        each, longer = divmod(n, p)
        begin = rank * each + min(rank, longer)
        return begin, begin + each + (rank < longer)
    each = -(-n // p) if cut == "up" else n // p
    return min(n, rank * each), min(n, (rank + 1) * each)


def plan(n: int, old: int, new: int, rank: int, cut: str = "up") -> list[list[int]]:
    """Reads of a new rank: (old rank, from, to, at)."""
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


def _wrong_reads(n: int, old: int, new: int, rank: int) -> list[Mistake]:
    """Return which reads mistakes lead to."""
    right = plan(n, old, new, rank)
    begins = {file: shard(n, old, file)[0] for file in range(old)}
    lengths = {file: shard(n, old, file)[1] - begins[file] for file in range(old)}
    first = shard(n, new, rank)[0]
    of_others = [plan(n, old, new, other) for other in range(new) if other != rank]
    wrong = {
        "return a list of reads (file, start, stop, at)": _is_no_list_of_reads,
        "n // p rounds down, and the last elements belong to nobody: -(-n // p) rounds up": plan(
            n, old, new, rank, "down"
        ),
        "cut as tensor_split does, into sizes that differ by one at most. Here each shard has "
        "-(-n // p) elements, and the last ones have fewer, or none": plan(
            n, old, new, rank, "even"
        ),
        "these are the reads of another rank: `rank` is an argument, not dist.get_rank()": (
            lambda reads: bool(reads) and reads in of_others
        ),
        "start and stop count in the whole tensor; they are places in that rank's file": [
            [f, a + begins[f], b + begins[f], at] for f, a, b, at in right
        ],
        "`at` counts in the whole tensor; it is the place in the new rank's own shard": [
            [f, a, b, at + first] for f, a, b, at in right
        ],
        "`at` is 0 in all reads: each would be written over the one before": [
            [f, a, b, 0] for f, a, b, _ in right
        ],
        "the third number is a length: stop is one behind the last element": [
            [f, a, b - a, at] for f, a, b, at in right
        ],
        "one element too few of each: stop is one behind the last element": [
            [f, a, b - 1, at] for f, a, b, at in right
        ],
        "whole files are read: only what overlaps with the own shard": [
            [f, 0, lengths[f], at] for f, _, _, at in right
        ],
        "a read goes beyond the end of its file: the last shard ends at n, so "
        "min(n, (r + 1) * each)": (
            lambda reads: any(f in begins and b > lengths[f] for f, _, b, _ in reads)
        ),
        "there are reads of nothing: leave them out": (
            lambda reads: [read for read in reads if read[1] < read[2]] == right != reads
        ),
        "every file is read: only what overlaps with the own shard": (
            lambda reads: len(right) < old and {f for f, *_ in reads} == set(range(old))
        ),
        "something is missing: a shard may lie in several files, and -(-n // p) rounds up": (
            lambda reads: len(reads) < len(right)
        ),
        "reads of nothing": [[file, 0, 0, 0] for file in range(old)],
    }
    return table(wrong)


def _is_no_list_of_reads(reads: Any) -> bool:
    """Return whether this is anything but a list of lists of four."""
    if not isinstance(reads, list):
        return True
    return any(not isinstance(read, list) or len(read) != 4 for read in reads)


@task("13.4", "from four ranks to two", points=3)
def reshard(ranks: Ranks, report: Report) -> None:
    """Which part of which file a rank of the new job reads."""
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
    """Return elements, old ranks and new ranks of cases that are different in each run."""
    draw = random.Random(seed)
    splits = [(draw.randrange(8, 60), draw.randrange(2, 7), draw.randrange(1, 7)) for _ in range(3)]
    splits.append((draw.randrange(100, 400), draw.randrange(20, 40), draw.randrange(2, 5)))
    many = draw.randrange(150, 250)
    splits.append((2 * many + 1, many, 2))  # one element more than fits: rounded up all the same
    return splits


def _all_reads(cases: list[Case], results: list) -> Iterator[Step]:
    """Judge the reads of each case, in whichever order they are."""
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
    count, k, coming = 0, 0, [*sorted(failures), math.inf]
    while done < work:
        piece = min(interval, work - done)
        is_last = done + piece >= work and wrong != "saves at the end"
        end = now + (piece if is_last else piece + save)
        awake = now - restart if wrong == "in restarts" else now
        while coming[k] < awake or (wrong == "at a beginning" and coming[k] == now):
            k += 1
        failure = coming[k]
        if failure >= end:
            now, done = end, done + piece
            continue
        count, k = count + 1, k + 1
        if wrong == "kept in a save" and now + piece <= failure:
            done += piece
        else:
            gone = min(failure - now, piece)
            wrongly_gone = {
                "saving is lost": failure - now,
                "whole intervals": piece,
                "nothing lost": 0.0,
                "from the start": gone + done,
            }
            lost += wrongly_gone.get(wrong, gone)
            if wrong == "from the start":
                done = 0.0
        now = failure if wrong == "no restart" else failure + restart
    return {"seconds": now, "lost": lost, "failures": count}


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
    """A job's seconds under failures; Young's interval."""
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
        save, mtbf = seconds * draw.uniform(1, 60), seconds * draw.uniform(600, 90_000)
        right, mistakes = math.sqrt(2 * save * mtbf), _wrong_intervals(save, mtbf)
        cases.append(Case("young", [save, mtbf], right, mistakes, "seconds"))
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
        times, now = [], 0.0
        while now < 8 * work:
            now += draw.expovariate(1 / 25)
            times.append(now)
        # One while a save is written, one in a restart.
        first = every + 0.4 * save
        later = (t for t in times if t > first + restart + 3)
        jobs.append([work, every, save, restart, sorted([first, first + restart / 2, *later])])
    return jobs


def _wrong_intervals(save: float, mtbf: float) -> list[Mistake]:
    """Return which of Young's intervals mistakes lead to."""
    wrong = {
        "the 2 is missing": math.sqrt(save * mtbf),
        "the square root is missing": 2 * save * mtbf,
        "this is save / mtbf: the interval grows with both": math.sqrt(2 * save / mtbf),
        "the 2 belongs below the root": 2 * math.sqrt(save * mtbf),
        "upside down": math.sqrt(mtbf / (2 * save)),
        "half of the root": math.sqrt(save * mtbf / 2),
    }
    return table(wrong)


def _wrong_books(*job: Any) -> list[Mistake]:
    """Return which books mistakes lead to; the job is that of :func:`replay`."""
    work, every, *_ = job
    right = replay(*job)
    mistakes = [
        Mistake(
            lambda book: not isinstance(book, dict) or book.keys() != right.keys(),
            'return {"seconds": …, "lost": …, "failures": …}',
        )
    ]
    for how, text in _BOOKS.items():
        if how == "from the start" and work < 5 * every:
            continue  # may go on for very long
        book = replay(*job, wrong=how)
        if not same(book, right):
            mistakes.append(Mistake(book, text))
    meanings = {
        "failures": "the number of failures: only those that stop something count",
        "seconds": "the seconds until the work is done",
        "lost": "the seconds of work that were done twice",
    }
    for name, meaning in meanings.items():
        said = f"only {name!r} is wrong: {meaning}"
        mistakes.append(Mistake(functools.partial(_differs_in, name, right), said))
    return mistakes


def _differs_in(name: str, right: dict[str, float], book: dict[str, float]) -> bool:
    """Return whether a book differs from the right one in this entry alone."""
    return [key for key in right if not same(book[key], right[key])] == [name]


# -- 13.6: with those that live ---------------------------------------------------------------


class Survivor:
    """What a rank is left with after a death: weights, momentum, a step.

    Replicas of one step are equal; those of the next have moved on.
    """

    def __init__(self, seed: int, step: int):
        generator = torch.Generator().manual_seed(seed + step)
        self.step = step
        self.asked: list[int] = []
        self._tensors = [
            torch.randn(n, generator=generator, dtype=kind)
            for kind in (torch.float32, torch.float64)
            for n in (5, 3, 4, 2)
        ]

    def tensors(self) -> list[torch.Tensor]:
        """Return weights, then momentum."""
        return self._tensors

    def go_to(self, step: int) -> None:
        """Put sampler and learning rate to this step."""
        self.asked.append(step)
        self.step = step


def _steps(seed: int, p: int, ahead: bool) -> list[int]:
    """At which step each survivor is: of three or more the first is neither first nor last.

    ahead: all but one are at the furthest step. It is more than float32 holds.
    """
    draw = random.Random(seed * 8 + p)
    base, rest = draw.randrange(3, 30), [0, 2, *([2] if p == 4 else [])][: p - 1]
    if ahead:
        return [2**24 + base // 2 * 2 + (place != 1) for place in range(p)]
    draw.shuffle(rest)
    return [base + more for more in [1, *rest][:p]]


@in_group
def probe_agree(user_ns: dict, *, rank: int, group: Group, partition, seed: int, step: int) -> dict:
    """What a survivor has after `agree`; the seed is that of the state of its step."""
    job = Survivor(seed, step)
    objects = [id(t) for t in job.tensors()]
    function = reading_answer(user_ns, "agree")
    _, calls = recorded(function, job, **keywords(partition, group))
    return {
        "tensors": [t.tolist() for t in job.tensors()],
        "same objects": objects == [id(t) for t in job.tensors()],
        "step": job.step,
        "asked": job.asked,
        "calls": calls,
    }


@in_group
def probe_mean(
    user_ns: dict, *, rank: int, group: Group, partition, seed: int, samples: int
) -> dict:
    """The second gradients that are averaged; each rank has another number of samples."""
    function = answer_named(user_ns, "mean_gradients")
    named, model = keywords(partition, group), _model(seed)
    _, first = recorded(function, _model(seed), samples + 7 * rank + 1, **named)
    _, calls = recorded(function, model, samples, **named)
    return {"gradient": _flat(model), "calls": calls, "calls again": first}


def _model(seed: int) -> nn.Module:
    """A model whose gradient is that of a rank's own samples."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2), nn.Linear(2, 1))
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return model


def _flat(model: nn.Module) -> list[float]:
    """Return all gradients in one row."""
    return torch.cat([p.grad.flatten() for p in model.parameters()]).tolist()


@task("13.6", "go on with fewer", points=4)
def survive(ranks: Ranks, report: Report) -> None:
    """One state for all survivors; gradients weighted by samples, over those who are there."""
    if not _all_agree(ranks, report):
        return
    draw = random.Random(report.seeds(1)[0])
    shares = [draw.randrange(5, 40) for _ in range(WORLD)]
    each = to_each(seed=report.seeds(WORLD), samples=shares)
    cases = [{"partition": partition, "each": each} for partition in PARTITIONS]
    judge_groups(ranks, report, probe_mean, cases, _mean)


def _all_agree(ranks: Ranks, report: Report) -> bool:
    """Judge what survivors agree on; return whether every rank is right in each case."""
    cases = [_agree_case(report, partition) for partition in PARTITIONS]
    cases.append(_agree_case(report, None, ahead=True))
    right = 0
    for case, members, values in tried(ranks, report, probe_agree, cases):
        for place, rank in enumerate(members):
            right += report.follow(rank, _agreed(GroupAnswer(case, members, place, values)))
    return right == WORLD * len(cases)


def _agree_case(report: Report, partition: Partition, ahead: bool = False) -> dict:
    """The step of each survivor, and the seed of the state that all have who are there."""
    at, (of_steps,) = places(partition), report.seeds(1)
    steps = [_steps(of_steps, p, ahead)[place] for place, p in at]
    of_states = dict(zip(sorted(set(steps)), report.seeds(WORLD), strict=False))
    each = to_each(step=steps, seed=[of_states[step] for step in steps])
    return {"partition": partition, "each": each}


def _agreed(answer: GroupAnswer) -> Iterator[Step]:
    """Judge the state that a survivor has afterwards, which is that of the furthest one."""
    result, members, where = answer.value, answer.members, on(answer.members)
    given = [answer.case["each"][rank] for rank in members]
    steps, seeds = [of_rank["step"] for of_rank in given], [of_rank["seed"] for of_rank in given]
    most = max(steps)
    states_by_step = {step: _tensors(seed, step) for step, seed in zip(steps, seeds, strict=True)}
    mistakes = _wrong_states(steps, states_by_step, answer.place)
    what = f"{where}: weights and momentum"
    yield communication(result["calls"], inside(members), waited)
    yield value(result["tensors"], states_by_step[most], mistakes, what=what)
    wrong = {
        f"{where}: job.tensors() are near those of the furthest rank, and not the same bits: hand "
        "them over as they are, one of them is float64": (
            result["tensors"] != states_by_step[most]
        ),
        f"{where}: job.tensors() has other tensors now: fill those that are there, broadcast "
        "does": not result["same objects"],
        f"{where}: job.go_to(step) was called with {result['asked']}, expected {most} on every "
        "rank: sampler and learning rate have to be at that step": result["asked"][-1:] != [most],
    }
    yield facts(wrong)
    yield communication(result["calls"], some(members))


def _tensors(seed: int, step: int) -> list[list[float]]:
    """Return weights and momentum of all survivors that are at a step."""
    return [tensor.tolist() for tensor in Survivor(seed, step).tensors()]


def _wrong_states(
    steps: list[int], states_by_step: dict[int, list], place: int
) -> Iterator[Mistake]:
    """Yield which states mistakes lead to, at a place of the group."""
    state, right = states_by_step[steps[place]], states_by_step[max(steps)]
    half = len(right) // 2
    columns = zip(*(states_by_step[step] for step in steps), strict=True)
    means = [
        [sum(numbers) / len(steps) for numbers in zip(*tensors, strict=True)] for tensors in columns
    ]
    wrong = {
        "this rank's own tensors, unchanged": state if steps[place] > min(steps) else None,
        "this is the state of the smallest step: it is consistent, but throws away an update that "
        "some ranks have": states_by_step[min(steps)],
        "the weights are right, the momentum is this rank's own: all of job.tensors()": (
            right[:half] + state[half:]
        ),
        "these are means over the ranks: states of two steps do not mix": means,
        "the state of the group's first rank, which is not the one that is furthest": (
            states_by_step[steps[0]]
        ),
    }
    yield from table(wrong)


def _mean(answer: GroupAnswer) -> Iterator[Step]:
    """Judge the gradient that a survivor has, averaged over the samples of all."""
    result, members = answer.value, answer.members
    given = [answer.case["each"][rank] for rank in members]
    shares = [of_rank["samples"] for of_rank in given]
    gradients = [torch.tensor(_flat(_model(of_rank["seed"]))) for of_rank in given]
    weighted = sum(n * gradient for n, gradient in zip(shares, gradients, strict=True))
    mistakes = _wrong_means(gradients, shares, answer.place)
    rules = (only("all_reduce"), inside(members), waited)
    yield communication(result["calls"] + result["calls again"], *rules)
    yield value(
        result["gradient"],
        (weighted / sum(shares)).tolist(),
        mistakes,
        what=f"{on(members)}, with {shares} samples: the gradient",
        form="nothing, and change the gradients in place",
        tolerance=1e-4,
    )
    for calls in (result["calls"], result["calls again"]):
        yield communication(calls, some(members))


def _wrong_means(gradients: list[torch.Tensor], shares: list[int], place: int) -> Iterator[Mistake]:
    """Yield which gradients mistakes lead to, at a place of the group."""
    p = len(shares)
    weighted = sum(n * gradient for n, gradient in zip(shares, gradients, strict=True))
    wrong = {
        "this rank's own gradient, unchanged": gradients[place],
        "the sum of samples · gradient, not divided by the number of all samples": weighted,
        "each rank counts the same, though they have different numbers of samples": (
            sum(gradients) / p
        ),
        "the sum of the gradients: weight each by its samples, and divide": sum(gradients),
        "divided by 4 ranks, of which some are not there any more": sum(gradients) / 4,
        "divided by 4 at the end: the number of ranks that there once were": weighted / 4,
        "divided by 64, or by another number of samples from before": weighted / 64,
        "divided by the number of ranks after weighting: divide by the samples of all": (
            weighted / p
        ),
        "divided by this rank's own number of samples": weighted / shares[place],
        "divided by the ranks as well": weighted / sum(shares) / p if p > 1 else None,
    }
    yield from table(wrong)
