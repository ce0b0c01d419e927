"""Checks of lab 05: stopwatches, laws, predictions and a job script.

No check depends on how busy the machine is: what it times are clocks that the check moves on, and
what it fits are times that the check made up.
"""

from __future__ import annotations

import contextlib
import functools
import random
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from utils.scaling import batch

from .clock import Clock, moved_clocks
from .functions import judge_calls
from .mistakes import Mistake, is_number, same, short, table
from .model import use_model as use_model
from .probe import answer_named, told
from .replicas import rules_of
from .task import Report, task, to_each

# -- 5.1 --------------------------------------------------------------------------------------

# Calls after which every rank knows that the others were there, too.
_MEETINGS = ("barrier", "allreduce", "allgather", "_allgather_base")
# Seconds that the very first step takes longer than the others.
WARM = 5000.0


def probe_stopwatch(
    user_ns: dict, *, rank: int, steps: int, rounds: int, late: float, takes: float
) -> dict:
    """`time_rounds` on clocks that each step moves on; collectives make the ranks' clocks meet.

    late, takes: seconds of `prepare` and of a step on this rank.
    """
    if not dist.is_initialized():
        dist.init_process_group("mpi")
    function = answer_named(user_ns, "time_rounds")
    events = []

    def prepare() -> None:
        events.append("prepare")
        clock.advance(late)

    def step() -> None:
        events.append("step")
        # Its gradients meet first, so a rank that is early waits here, as in a training.
        dist.all_reduce(torch.zeros(1))
        clock.advance(takes + (WARM if events.count("step") == 1 else 0.0))

    known = getattr(function, "__globals__", {})
    with moved_clocks(known) as clock, _meetings(clock, events):
        result = function(prepare, step, rounds, steps)
    return {"result": told(result), "events": events}


@contextlib.contextmanager
def _meetings(clock: Clock, events: list[str]) -> Iterator[None]:
    """A collective ends at the same moment on all ranks: that of the last one."""
    group = dist.group.WORLD
    reduce_all = group.allreduce
    # In a step it is the training that communicates, not the stopwatch.
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX

    def meeting(name: str, call: Callable) -> Callable:
        def met(*args, **kwargs):
            events.append(name)
            work = call(*args, **kwargs)
            if work is not None:
                work.wait()
            latest = torch.tensor([clock.ahead], dtype=torch.float64)
            reduce_all([latest], options).wait()
            clock.ahead = latest.item()
            return work

        return met

    known = [name for name in _MEETINGS if hasattr(group, name)]
    patched = {name: meeting(name, getattr(group, name)) for name in known}
    with mock.patch.multiple(group, **patched):
        yield


@task("5.1", "a stopwatch for many ranks", points=3)
def time_rounds(ranks, report: Report) -> None:
    """The slowest rank's seconds per step, warmed up, from a common start."""
    for trial, (rounds, steps) in enumerate(((3, 2), (4, 3))):
        chance = random.Random(report.seed + trial)
        # No whole seconds: who cuts them off is far enough from the truth.
        takes = [chance.randrange(20, 30) + 0.8, chance.randrange(50, 60) + 0.8]
        late = [chance.uniform(500, 900), chance.uniform(10, 40)]
        if chance.random() < 0.5:  # either rank may be the slow one, and either the late one
            takes.reverse()
        if trial == 1:
            late.reverse()
        given, of_ranks = {"steps": steps, "rounds": rounds}, {"late": late, "takes": takes}
        each = to_each(**of_ranks)
        answers = report.answers(ranks, __name__, "probe_stopwatch", each=each, **given)
        what = f"a step takes {takes[0]:.1f} s on rank 0, {takes[1]:.1f} s on rank 1"
        for answer in answers:
            rank, got, events = answer.rank, answer.value["result"], answer.value["events"]
            alike = all(other.value["result"] == got for other in answers)
            wrong, right = (
                _wrong_stopwatches(events, alike, **given, **of_ranks),
                [max(takes)] * rounds,
            )
            count, form = events.count("prepare"), {"form": "the times", "tolerance": 0.01}
            said = f"prepare() belongs to every round: expected {rounds + 1} calls, it made {count}"
            if report.judge(rank, got, right, wrong, what=what, **form):
                report.communication(rank, [], *rules_of({said: not 0 <= count - rounds <= 2}))
        if report.found:
            return


def _wrong_stopwatches(events, alike, steps, rounds, late, takes) -> list[Mistake]:
    made, start, slowest = events.count("step"), (*events, "step").index("step"), max(takes)
    late_by = 0.4 * (max(late) - min(late)) / steps
    inside = "prepare(), or the wait at the barrier, is in it: start the clock after the barrier"
    if "prepare" in events[:start] and events[start - 1] not in _MEETINGS:
        inside = "one rank waits, inside the time, for the other one's prepare(): a barrier "
        inside += "belongs between prepare() and the start of the clock"
    return table({
        f"return a list of {rounds} numbers": lambda got: not _numbers(got),
        f"it made {made} calls of step(): there are {rounds} rounds of {steps}, and one round "
        "before them that warms up": lambda got: made <= rounds * steps,
        "the first round warms up and is not in the list": lambda got: len(got) == rounds + 1,
        f"there is one number for each of {rounds} rounds": lambda got: len(got) != rounds,
        "the first step is in it, and that warms up": lambda got: got[0] > WARM / steps,
        "that is a whole round: divide by the steps in it": [slowest * steps] * rounds,
        "the times grow: start the clock anew in every round": lambda got: got[-1] > 1.5 * got[0],
        inside: lambda got: np.median(got) > slowest + late_by,
        "the ranks return different lists: reduce with dist.ReduceOp.MAX, so that all have the "
        "slowest rank's": lambda got: not alike,
        "the slowest rank counts, not the mean, the sum or the fastest of the ranks: "
        "dist.ReduceOp.MAX": lambda got: True,
    })  # fmt: skip


def _numbers(got: Any, count: int = 0) -> bool:
    """A list of numbers, of so many if that is said?"""
    return isinstance(got, list) and all(map(is_number, got)) and len(got) in (count or len(got),)


# -- 5.2 --------------------------------------------------------------------------------------


@task("5.2", "speedup with its uncertainty", points=2)
def speedup_band(ranks, report: Report) -> None:
    """Ratio of the medians, ends from opposite quartiles; efficiency."""
    cases = []
    for trial in range(2):
        random_ = np.random.default_rng([report.seed, trial])
        one = (10 + random_.gamma(2, 1.5, 7 + 2 * trial)).round(3)
        many = (4 + random_.gamma(2, 0.8, 5 + 2 * trial)).round(3)
        p, speedup = int(random_.integers(2, 9)), round(float(random_.uniform(1, 4)), 3)
        q1, q2 = (np.percentile(times, [25, 50, 75]) for times in (one, many))
        band, form = (q1 / q2[::-1]).tolist(), "three numbers: (low, middle, high)"
        wrong = _wrong_bands(one, many, q1, q2, *band)
        cases.append(("speedup_band", [one.tolist(), many.tolist()], band, wrong, form))
        wrong = {
            "that is p / speedup, upside down": p / speedup,
            "divide by the ranks": speedup * p,
            "that is in per cent: the task asks for speedup / p": 100 * speedup / p,
            "this divides by 2, whatever p is": speedup / 2,
        }
        cases.append(("efficiency", [speedup, p], speedup / p, table(wrong), "speedup / p"))
    judge_calls(ranks, report, cases)


def _wrong_bands(one, many, q1, q2, low: float, middle: float, high: float) -> list[Mistake]:
    def has_middle(value: float) -> Callable:
        return lambda got: same(got[1], float(value))

    return table({
        "return three numbers: (low, middle, high)": lambda got: not _numbers(got, 3),
        "that is T(p) / T(1), upside down": (q2 / q1[::-1]).tolist(),
        "the ends pair quartiles of the same side: pair slow with fast": (q1 / q2).tolist(),
        "low and high are exchanged": [high, middle, low],
        "the order is low, middle, high": [middle, low, high],
        "these are the extreme rounds, not the quartiles":
            lambda got: same(got[::2], [min(one) / max(many), max(one) / min(many)]),
        "the middle is a ratio of means, which one disturbed round moves: take the medians":
            has_middle(np.mean(one) / np.mean(many)),
        "the middle is halfway between the ends: take the medians": has_middle((low + high) / 2),
        "the middle is that of the fastest rounds": has_middle(min(one) / min(many)),
        "the middle is right, the ends are not: q25 and q75, of opposite sides": has_middle(middle),
    })  # fmt: skip


# -- 5.3 and 5.4 ------------------------------------------------------------------------------

# Rank counts, and errors of a measurement there: a straight line through all points does not notice
# them, nor a mean over the points; the first points, the last one, and other lines do.
NOISY = [1, 2, 3, 5, 8, 13, 20]
SHARE_NOISE = 0.09 * np.array([0, 0.235, -1, 0.674, 1, 0.066, -0.974])  # of T(p) / T(1)
SPEEDUP_NOISE = 0.13 * np.array([0, 1.94, 1.75, -4.99, -7.72, -13, 11.82])  # of p · T(1) / T(p)


def probe_law(user_ns: dict, *, rank: int, law: str, ps: list, serial: float, times: list) -> dict:
    """A law at one p and at several, and its fit."""
    function = answer_named(user_ns, law)
    return {
        "one": told(function(ps[-1], serial)),
        "array": told(function(np.array(ps, float), serial)),
        "fit": told(answer_named(user_ns, f"fit_{law}")(list(ps), list(times))),
    }


@task("5.3", "Amdahl's law and its fit", points=3)
def fit_amdahl(ranks, report: Report) -> None:
    """The law, and the serial fraction of exact, noisy and too good times."""
    for s, one, ps, noisy in _law_data(report.seed):
        p, x, serial = ps[-1], 1 / np.array(ps), max(0.0, s)
        share = s + (1 - s) * x
        if noisy:
            inverse = np.append(0, 1 / (1 - x[1:]))
            share += _unseen(SHARE_NOISE, np.ones_like(x), x, inverse)
        times = one * share
        slope, start = np.polyfit(x, times, 1)
        laws = {
            "that is Gustafson's law": p - serial * (p - 1),
            "the serial part s is missing below the line": p / (1 - serial),
            "the parallel part is 1 − s, not 1": 1 / (serial + 1 / p),
            "serial and parallel part are exchanged": 1 / (1 - serial + serial / p),
            "that is T(p) / T(1): the speedup is its inverse": serial + (1 - serial) / p,
        }
        fits = {
            "that is the parallel fraction: s is the other one": 1 - serial,
            "that is the serial time T(1) · s in seconds: divide by T(1)": start,
            "that is the parallel time in seconds: s is the serial share": slope,
            "these are speedups that were fitted as if they were times": _share(x, 1 / share),
            "that is below 0: np.clip(s, 0, 1)": s,
        }
        fits |= _alone(share[1:] / share[0], x[1:], 1 - x[1:])
        law = 1 / (serial + (1 - serial) * x)
        _judge_law(ranks, report, "amdahl", (ps, serial, times), law, laws, fits)
        if report.found:
            return


@task("5.4", "Gustafson's law and its fit", points=2)
def fit_gustafson(ranks, report: Report) -> None:
    """The law, and the serial fraction of exact, noisy and too good times."""
    for s, one, ps, noisy in _law_data(report.seed + 1):
        p, all_p, serial = ps[-1], np.array(ps, float), max(0.0, s)
        more = all_p - 1
        missing = s * more  # speedup
        if noisy:
            missing += _unseen(SPEEDUP_NOISE, more, np.append(0, 1 / more[1:]))
        times = one * all_p / (all_p - missing)
        unscaled = more @ (all_p - one / times) / (more @ more)
        any_start = np.polyfit(more, missing, 1)[0]
        laws = {
            "that is Amdahl's law": 1 / (serial + (1 - serial) / p),
            "s counts p − 1 times, not p times": p - serial * p,
            "serial and parallel part are exchanged": 1 + serial * (p - 1),
        }
        small = "here p ranks do p times the work: their speedup is p · T(1) / T(p)"
        fits = {
            "that is the parallel fraction: s is the other one": 1 - serial,
            "that is below 0: np.clip(s, 0, 1)": s,
            "the line goes through the origin, without an intercept": any_start,
            small: _share(1 / all_p, times),
            f"{small}, in the fit": float(np.clip(unscaled, 0, 1)),
        }
        fits |= _alone(missing[1:], 0.0, more[1:])
        law = all_p - serial * more
        _judge_law(ranks, report, "gustafson", (ps, serial, times), law, laws, fits)
        if report.found:
            return


def _law_data(seed: int) -> Iterator[tuple[float, float, list[int], bool]]:
    """(serial fraction, T(1), rank counts, noisy?): ordinary, noisy, better than ideal."""
    chance = random.Random(seed)
    for serial in (chance.uniform(0.05, 0.2), chance.uniform(0.3, 0.45), -0.05):
        ps, noisy = [1, *sorted(chance.sample(range(2, 20), 4))], serial > 0.2
        yield round(serial, 3), round(chance.uniform(2, 30), 2), NOISY if noisy else ps, noisy


def _unseen(noise: np.ndarray, *lines: np.ndarray) -> np.ndarray:
    """The noise, made exactly so that a fit of these lines does not notice it."""
    basis, _ = np.linalg.qr(np.stack(lines)[:, 1:].T)
    return np.append(0.0, noise[1:] - basis @ (basis.T @ noise[1:]))


def _share(x: np.ndarray, times: np.ndarray) -> float:
    """Amdahl's fraction by a straight line in x = 1/p, clipped."""
    slope, start = np.polyfit(x, times, 1)
    return float(np.clip(start / (start + slope), 0, 1))


def _alone(values, start, width) -> dict[str, float]:
    """Fractions that the last and the first point alone give."""
    said = "that is what the {} point alone says: let all of them count"
    fractions = np.clip((values - start) / width, 0, 1)
    return {said.format("last"): fractions[-1], said.format("second"): fractions[0]}


def _judge_law(ranks, report: Report, law: str, given: tuple, right, laws, fits) -> None:
    """The law at one rank count and at several, and the fraction that its fit finds.

    given: rank counts, serial fraction, times. laws: mistakes at the last p. fits: in the fit.
    """
    ps, serial, times = given[0], given[1], given[2].tolist()
    # By chance several mistakes may give about the same.
    near = {said: functools.partial(same, expected=v, tolerance=2e-3) for said, v in fits.items()}
    arguments = {"law": law, "ps": ps, "serial": serial, "times": times}
    for answer in report.answers(ranks, __name__, "probe_law", **arguments):
        rank, got, what = answer.rank, answer.value, f"{law}({ps[-1]}, {serial})"
        if report.judge(rank, got["one"], float(right[-1]), table(laws), what=what):
            report.judge(rank, got["array"], right.tolist(), what=f"{law} of an array of p")
        what, form = f"fit_{law}, {ps} ranks took {short(times)} s", "the serial fraction"
        report.judge(rank, got["fit"], serial, table(near), what=what, form=form, tolerance=0.01)


# -- 5.5 --------------------------------------------------------------------------------------


@task("5.5", "predict a step", points=3)
def predict_step(ranks, report: Report) -> None:
    """Messages and bytes of a ring, and the step with an all_reduce for each gradient."""
    chance = random.Random(report.seed)
    cases = []
    for p in (4, chance.randrange(5, 40), 2, 1):
        n = chance.randrange(10**3, 10**7)
        right = [2 * (p - 1), 2 * (p - 1) / p * n]
        cases.append(("ring", [p, n], right, _wrong_rings(p, n, *right), "(messages, sent)"))
    for p in (2, chance.randrange(3, 20), 1):
        sizes = [chance.randrange(10**3, 10**7) for _ in range(chance.randrange(3, 7))]
        compute, latency = chance.uniform(0.5, 2), chance.uniform(0.05, 0.2)
        arguments = [compute, sizes, p, latency, chance.uniform(5e6, 2e7)]
        cases.append(("predict_step", arguments, *_steps(*arguments), "the seconds of a step"))
    judge_calls(ranks, report, cases)


def _wrong_rings(p: int, n: int, messages: int, sent: float) -> list[Mistake]:
    def counts(value: float) -> Callable:
        return lambda got: same(got[0], value)

    def volume(value: float) -> Callable:
        return lambda got: same(got, [messages, value])

    return table({
        "return a pair of numbers: (messages, sent)": lambda got: not _numbers(got, 2),
        "one rank sends nothing": lambda got: p == 1,
        "the two are exchanged: (messages, sent)": [sent, messages],
        "that is one round of the ring: the sums still have to be passed on": counts(p - 1),
        "p − 1 steps, and p − 1 more: nobody sends to itself": counts(2 * p),
        "these are the messages of all ranks together: count those of one": counts(messages * p),
        "each message has n/p bytes, not n": volume(messages * n),
        "these are the bytes of one round of the ring: there are two": volume(sent / 2),
        "that is one message: give the bytes of all": volume(n / p),
        "these are the bytes of all ranks together: count those of one": volume(sent * p),
    })  # fmt: skip


def _steps(compute, sizes, p, latency, bandwidth) -> tuple[float, list[Mistake]]:
    """Seconds of a step, and wrong ones."""
    count, moved = len(sizes), 2 * (p - 1) / p * sum(sizes)
    once, sent = 2 * (p - 1) * latency, moved / bandwidth
    waits, alone = count * once, compute / p
    wrong = {
        "the latency is paid by each gradient's all_reduce of its own": compute + once + sent,
        "the computation is missing: communication comes after it, add both": waits + sent,
        "compute is what one rank computes: do not divide it by p": alone + waits + sent,
        "the latency is missing": compute + sent,
        "the bytes are missing: sent / bandwidth": compute + waits,
        "bandwidth is in bytes per second: divide by it": compute + waits + moved * bandwidth,
        "every message pays the latency, 2(p − 1) of them": compute + count * latency + sent,
        "the computation counts once, not for each gradient": count * compute + waits + sent,
        "what takes longer does not hide the rest: add both": max(compute, waits + sent),
    }
    return compute + waits + sent, table(wrong)


# -- 5.6 --------------------------------------------------------------------------------------


def probe_script(user_ns: dict, *, rank: int, settings: list) -> list[dict]:
    """`job_script` for several settings: the text, and what bash makes of it."""
    texts = [told(answer_named(user_ns, "job_script")(*given)) for given in settings]
    return [
        {"text": text, "launches": batch.launches(text, *given[:3]), "said": batch.unreadable(text)}
        if isinstance(text, str)
        else {"text": text}
        for text, given in zip(texts, settings, strict=True)
    ]


@task("5.6", "a Slurm job script", points=3)
def job_script(ranks, report: Report) -> None:
    """A script that asks for what it uses, and uses what it asks for."""
    chance = random.Random(report.seed)
    command = f"python train.py --strong {chance.randrange(100, 999)}"
    other = chance.choice((3, 5, 6)), chance.choice((1, 4)), chance.randrange(5, 33), command
    settings = [(4, 2, 24, "python train.py --strong 256"), other]
    for answer in report.answers(ranks, __name__, "probe_script", settings=settings):
        for given, script in zip(settings, answer.value, strict=True):
            for problem in _script_problems(script, *given):
                report.problem(f"job_script{given[:3]}: {problem}", answer.rank)
            if report.of(answer.rank):
                break


def _script_problems(script: dict, nodes: int, domains: int, cores: int, command) -> Iterator[str]:
    """What is wrong with a job script, one text each."""
    text, ranks = script["text"], nodes * domains
    if not isinstance(text, str):
        yield f"return the text of a script, got {short(text)}"
        return
    lines = text.replace("\\\n", " ").splitlines()
    if not lines or not lines[0].startswith("#!"):
        yield "the first line must say who reads the script: #!/bin/bash"
    if script["said"]:
        yield f"bash can't read it: {script['said']}"
        return
    commands = [k for k, line in enumerate(lines) if line.strip() and line[0] != "#"]
    for k, line in enumerate(lines):
        if re.match(r"\s*#\s+SBATCH|\s+#SBATCH", line):
            yield f"line {k + 1}, {line.strip()!r}: Slurm wants #SBATCH first, without blanks"
        elif line.startswith("#SBATCH") and commands and k > commands[0]:
            first = f"the first command (line {commands[0] + 1})"
            yield f"#SBATCH below {first}: Slurm does not read it there, move it up"
    asked = batch.request(lines[: commands[0]] if commands else lines)
    yield from _request_problems(asked, nodes, domains, cores)
    if not script["launches"]:
        yield "no mpiexec (or srun) line starts the ranks"
        return
    launcher, threads, *words = script["launches"][-1]
    options = batch.options(words)
    if said := re.search(r"OMP_NUM_THREADS=(\S+)", " ".join(words)):  # mpiexec -x
        threads = said[1]
    number = options.get("--ntasks", str(ranks))
    unset = f"not set to {cores} before the ranks start: export it"
    if "OMP_NUM_THREADS=" in text:
        unset = "set, but not exported: the ranks do not see it"
    rule = _srun_rules if launcher == "srun" else _mpiexec_rules
    yield from _broken([
        (command not in " ".join(words), f"the {launcher} line does not run {command!r}"),
        (not threads, f"OMP_NUM_THREADS is {unset}"),
        (threads not in ("", str(cores)), f"OMP_NUM_THREADS={threads}, a rank has {cores} cores"),
        (number != str(ranks), f"{launcher} starts {number or '?'} ranks, the request has {ranks}"),
    ])  # fmt: skip
    yield from _broken(rule(options, text, domains, cores))[:1]


def _broken(rules: list[tuple[bool, str]]) -> list[str]:
    return [said for broken, said in rules if broken]


def _request_problems(asked: dict, nodes: int, domains: int, cores: int) -> Iterator[str]:
    ranks = str(nodes * domains)
    wanted = {
        "--nodes": (nodes, "the nodes"),
        "--ntasks-per-node": (domains, "one rank for each NUMA domain of a node"),
        "--cpus-per-task": (cores, "the cores of a domain"),
    }
    if "--ntasks-per-node" not in asked and asked.get("--ntasks") == ranks:
        del wanted["--ntasks-per-node"]  # Slurm gives each node as many
    for name, (value, words) in wanted.items():
        if name not in asked:
            yield f"#SBATCH {name}={value} is missing: {words}"
        elif asked[name] != str(value):
            yield f"#SBATCH {name}: expected {value} ({words}), got {asked[name] or 'nothing'}"
    if asked.get("--ntasks", ranks) != ranks:
        got = asked["--ntasks"]
        yield f"#SBATCH --ntasks={got} contradicts {nodes} nodes × {domains} ranks: {ranks}"
    if not asked.get("--time"):
        yield "#SBATCH --time=… is missing: many clusters refuse a job without a limit"


def _mpiexec_rules(options: dict, text: str, domains: int, cores: int) -> list[tuple[bool, str]]:
    """What mpiexec's options place wrongly; `utils.scaling.runs.rehearse` tells the same."""
    bind, by = options.get("--bind-to", "none"), options.get("--map-by", "").lower()
    each, place = re.match(r"(?:ppr:(\d+):)?(\w*)", by).groups()
    pe = re.search(r":pe=(\d+)", by)
    pe = pe[1] if pe else options.get("--cpus-per-proc", "")
    got = f"{pe} cores" if pe else "one core"
    known = ("numa", "socket", "package", "l3cache")
    # Without --map-by Open MPI goes from package to package by itself.
    spread = bind == "core" or place in known or (not by and bind in known)
    return [
        (bind == "none", "mpiexec must bind: --bind-to core (or numa)"),
        (bind == "hwthread", "--bind-to hwthread binds to parts of cores: --bind-to core"),
        (int(each or 0) not in (0, domains if place == "node" else 1),
         f"--map-by {by}: there is one rank in each domain, {domains} on a node"),
        (place in ("core", "hwthread"),
         f"--map-by {by} puts one rank beside the other: one for each domain, ppr:1:numa"),
        (pe and bind != "core", f"PE={pe} counts cores, so it takes --bind-to core"),
        (bind == "core" and (pe or "1") != str(cores),
         f"--bind-to core gives each rank {got}, for {cores} threads: --map-by "
         f"ppr:1:numa:PE={cores} gives it {cores}"),
        (not spread, "--map-by ppr:1:numa is missing: two ranks may land in the same domain"),
    ]  # fmt: skip


def _srun_rules(options: dict, text: str, domains: int, cores: int) -> list[tuple[bool, str]]:
    told_again = options.get("--cpus-per-task") == str(cores) or "SRUN_CPUS_PER_TASK=" in text
    unbound = options.get("--cpu-bind", "none") in ("", "none", "no")
    return [
        (not told_again, f"srun must be told again: --cpus-per-task={cores} (since Slurm 22.05)"),
        (unbound, "srun must bind: --cpu-bind=cores"),
    ]
