"""Checks of lab 05: stopwatches, laws, predictions and a job script.

No check depends on how busy the machine is: what it times are clocks that the check moves on, and
what it fits are times that the check made up.
"""

from __future__ import annotations

import contextlib
import random
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator, Mapping
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from .clock import Clock, moved_clocks
from .mistakes import short
from .model import use_model as use_model
from .probe import answer_named, told
from .task import Report, task

WORLD = 2


def _near(got: object, expected: float, tolerance: float) -> bool:
    """A finite number that differs by at most tolerance · max(1, |expected|)?"""
    if isinstance(got, bool) or not isinstance(got, int | float):
        return False
    return abs(got - expected) <= tolerance * max(1.0, abs(expected))


def _judge_number(
    report: Report,
    rank: int,
    what: str,
    got: object,
    expected: float,
    suspects: Mapping[str, float] | None = None,
    tolerance: float = 1e-4,
) -> bool:
    """Compare a number; where a likely mistake would give it, say which."""
    if _near(got, expected, tolerance):
        return True
    words = f"{what}: expected {expected:.4g}, got {short(got)}"
    near = [pair for pair in (suspects or {}).items() if _near(got, pair[1], tolerance)]
    if near:  # the nearest; of equal ones the first
        step = 1e-4 * max(1.0, abs(expected))
        words += f". {min(near, key=lambda pair: round(abs(pair[1] - got) / step))[0]}"
    report.problem(words, rank)
    return False


# -- 5.1 --------------------------------------------------------------------------------------

# Calls after which every rank knows that the others were there, too.
_MEETINGS = ("barrier", "allreduce", "allgather", "_allgather_base")


def probe_stopwatch(
    user_ns: dict, *, rank: int, steps: int, rounds: int, late: list, takes: list, warm: float
) -> dict:
    """`time_rounds` on clocks that each step moves on; collectives make the ranks' clocks meet.

    late, takes: seconds of `prepare` and of a step by rank. warm: more for the first step.
    """
    if not dist.is_initialized():
        dist.init_process_group("mpi")
    function = answer_named(user_ns, "time_rounds")
    events = []

    def prepare() -> None:
        events.append("prepare")
        clock.advance(late[rank])

    def step() -> None:
        events.append("step")
        # Its gradients meet first, so a rank that is early waits here, as in a training.
        dist.all_reduce(torch.zeros(1))
        clock.advance(takes[rank] + (warm if events.count("step") == 1 else 0.0))

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

    with contextlib.ExitStack() as patches:
        for name in _MEETINGS:
            if hasattr(group, name):
                patched = meeting(name, getattr(group, name))
                patches.enter_context(mock.patch.object(group, name, patched))
        yield


@task("5.1", "a stopwatch for many ranks", points=3)
def time_rounds(ranks, report: Report) -> None:
    """The slowest rank's seconds per step, warmed up, from a common start."""
    for trial, (rounds, steps) in enumerate(((3, 2), (4, 3))):
        chance = random.Random(report.seed + trial)
        takes = [chance.uniform(20, 30), chance.uniform(50, 90)]
        late = [chance.uniform(500, 900), chance.uniform(10, 40)]
        if chance.random() < 0.5:  # either rank may be the slow one, and either the late one
            takes.reverse()
        if trial == 1:
            late.reverse()
        arguments = {"steps": steps, "rounds": rounds, "late": late, "takes": takes}
        answers = report.answers(ranks, __name__, "probe_stopwatch", warm=5000.0, **arguments)
        for answer in answers:
            _judge_stopwatch(report, answer.rank, answer.value, answers, arguments)
        if report.problems:
            return


def _judge_stopwatch(report: Report, rank: int, value: dict, answers: list, given: dict) -> None:
    got, events, rounds, steps = value["result"], value["events"], given["rounds"], given["steps"]
    if not isinstance(got, list) or not all(isinstance(one, int | float) for one in got):
        report.problem(f"expected a list of {rounds} numbers, got {short(got)}", rank)
        return
    if len(got) != rounds:
        more = " The first round warms up and is not in the list." if len(got) == rounds + 1 else ""
        report.problem(f"expected {rounds} numbers, got {len(got)}.{more}", rank)
        return
    made = events.count("step")
    if made <= rounds * steps:
        report.problem(
            f"{made} calls of step(): expected {rounds} rounds of {steps}, and one round before "
            "them that warms up",
            rank,
        )
        return
    expected = max(given["takes"])
    if all(_near(one, expected, 0.02) for one in got):
        return
    report.problem(
        f"a step takes {given['takes'][0]:.1f} s on rank 0 and {given['takes'][1]:.1f} s on rank "
        f"1, so expected {rounds} times {expected:.1f}, got {short(got)}. "
        + _why_stopwatch(got, expected, steps, events, given, answers),
        rank,
    )


def _why_stopwatch(got, expected, steps, events, given, answers) -> str:
    """The likeliest mistake."""
    if got[0] > 5000.0 / steps:
        return "The first step is in it, which warms up."
    middle = sorted(got)[len(got) // 2]
    if _near(middle, expected * steps, 0.02):
        return "That is a whole round: divide by the steps in it."
    waits = max(given["late"]) - min(given["late"])
    if middle > expected + 0.4 * waits / steps:
        before_start = events[: events.index("step")]
        if "prepare" in before_start and before_start[-1] not in _MEETINGS:
            return (
                "One rank waits, inside the time, for the other one's prepare(): a barrier "
                "belongs between prepare() and the start of the clock."
            )
        return "prepare(), or the wait at the barrier, is in it: start the clock after the barrier."
    others = [answer.value["result"] for answer in answers]
    if any(other != got for other in others):
        return (
            "The ranks return different lists: reduce with dist.ReduceOp.MAX, so that all have "
            "the slowest rank's."
        )
    return "The slowest rank counts, not the mean or the sum of the ranks: dist.ReduceOp.MAX."


# -- 5.2 --------------------------------------------------------------------------------------


def probe_speedup(
    user_ns: dict, *, rank: int, one: list, many: list, speedup: float, p: int
) -> dict:
    """`speedup_band` and `efficiency`."""
    return {
        "band": told(answer_named(user_ns, "speedup_band")(list(one), list(many))),
        "efficiency": told(answer_named(user_ns, "efficiency")(speedup, p)),
    }


@task("5.2", "speedup with its uncertainty", points=2)
def speedup_band(ranks, report: Report) -> None:
    """Ratio of the medians, ends from opposite quartiles; efficiency."""
    for trial in range(2):
        random_ = np.random.default_rng([report.seed, trial])
        one = (10 + random_.gamma(2, 1.5, 7 + 2 * trial)).round(3)
        many = (4 + random_.gamma(2, 0.8, 5 + 2 * trial)).round(3)
        p, speedup = int(random_.integers(2, 9)), round(float(random_.uniform(1, 4)), 3)
        given = {"one": one.tolist(), "many": many.tolist(), "speedup": speedup, "p": p}
        for answer in report.answers(ranks, __name__, "probe_speedup", **given):
            _judge_band(report, answer.rank, answer.value["band"], one, many)
            _judge_number(
                report, answer.rank, f"efficiency({speedup}, {p})", answer.value["efficiency"],
                speedup / p, {"That is p / speedup.": p / speedup,
                              "Divide by the ranks.": speedup * p},
            )  # fmt: skip
        if report.problems:
            return


def _judge_band(report: Report, rank: int, got: object, one, many) -> None:
    if not isinstance(got, list) or len(got) != 3:
        report.problem(
            f"speedup_band: expected three numbers (low, middle, high), got {short(got)}", rank
        )
        return
    q1, q2 = np.percentile(one, [25, 50, 75]), np.percentile(many, [25, 50, 75])
    opposite = (q1 / q2[::-1]).tolist()
    if all(_near(g, e, 1e-4) for g, e in zip(got, opposite, strict=True)):
        return
    suspects = {
        "That is T(p) / T(1): upside down.": (q2 / q1[::-1]).tolist(),
        "The ends pair quartiles of the same side; pair slow with fast.": (q1 / q2).tolist(),
        "low and high are exchanged.": opposite[::-1],
        "These are the extreme rounds, not the quartiles.": [
            min(one) / max(many), opposite[1], max(one) / min(many),
        ],
        "The middle is a ratio of means; one disturbed round moves a mean.": [
            opposite[0], np.mean(one) / np.mean(many), opposite[2],
        ],
    }  # fmt: skip
    words = f"speedup_band: expected {short(opposite)}, got {short(got)}"
    for mistake, values in suspects.items():
        if all(_near(g, e, 1e-4) for g, e in zip(got, values, strict=True)):
            words += f". {mistake}"
            break
    report.problem(words, rank)


# -- 5.3 and 5.4 ------------------------------------------------------------------------------


def probe_law(
    user_ns: dict, *, rank: int, law: str, p: float, serial: float, ps: list, times: list
) -> dict:
    """A law at one p and at several, and its fit."""
    function = answer_named(user_ns, law)
    return {
        "one": told(function(p, serial)),
        "array": told(function(np.array(ps, float), serial)),
        "fit": told(answer_named(user_ns, f"fit_{law}")(list(ps), list(times))),
    }


@task("5.3", "Amdahl's law and its fit", points=3)
def fit_amdahl(ranks, report: Report) -> None:
    """The law, and the serial fraction of exact, noisy and too good times."""
    for trial, (serial, one, ps) in enumerate(_law_data(report.seed)):
        x = 1 / np.array(ps, float)
        share = serial + (1 - serial) * x
        if trial == 1:
            # The last point alone is 0.05 off, and the line through all of them is right.
            noise = _unseen_by(np.ones_like(x), x, seen=_last(len(ps)))
            share += 0.05 * (1 - x[-1]) * noise / noise[-1]
        times = (one * share).tolist()
        p = 3 + report.seed % 61
        serial = max(0.0, serial)
        suspects = {
            "That is Gustafson's law.": p - serial * (p - 1),
            "The serial part s is missing below the line.": p / (1 - serial),
            "The parallel part is 1 − s.": 1 / (serial + 1 / p),
            "serial and parallel part are exchanged.": 1 / (1 - serial + serial / p),
        }
        speedups = [times[0] / value for value in times]
        slope, intercept = np.polyfit(x, times, 1)
        last = (share[-1] / share[0] - x[-1]) / (1 - x[-1])
        fits = {
            "That is the parallel fraction: s is the other one.": 1 - serial,
            "That is the serial time T(1) · s in seconds: divide by T(1).": float(intercept),
            "These are speedups that were fitted as if they were times.": _share(ps, speedups),
            "That is below 0: np.clip(s, 0, 1).": float(intercept / (intercept + slope)),
            "That is what the last point alone says: let all of them count.": float(last),
        }
        right = 1 / (serial + (1 - serial) * x)
        given = {"law": "amdahl", "p": p, "serial": serial, "ps": ps, "times": times}
        _judge_law(ranks, report, given, 1 / (serial + (1 - serial) / p), right, suspects, fits)
        if report.problems:
            return


@task("5.4", "Gustafson's law and its fit", points=2)
def fit_gustafson(ranks, report: Report) -> None:
    """The law, and the serial fraction of exact, noisy and too good times."""
    for trial, (serial, one, ps) in enumerate(_law_data(report.seed + 1, points=7)):
        more = np.array(ps, float) - 1
        missing = serial * more  # speedup
        if trial == 1:
            missing += _off_the_line(more)
        times = (one * np.array(ps) / (np.array(ps) - missing)).tolist()
        p = 3 + report.seed % 61
        serial = max(0.0, serial)
        suspects = {
            "That is Amdahl's law.": 1 / (serial + (1 - serial) / p),
            "s counts p − 1 times, not p times.": p - serial * p,
            "serial and parallel part are exchanged.": 1 + serial * (p - 1),
        }
        raw = [p - p * times[0] / value for p, value in zip(ps, times, strict=True)]
        fits = {
            "That is the parallel fraction: s is the other one.": 1 - serial,
            # What Amdahl's fit gives, and a speedup without the factor p.
            "Here p ranks do p times the work: their speedup is p · T(1) / T(p).": 1.0,
            "That is below 0: np.clip(s, 0, 1).": float(more @ raw / (more @ more)),
            "The line goes through the origin, without an intercept.": float(
                np.polyfit(more, raw, 1)[0]
            ),
            "That is what the last point alone says: let all of them count.": raw[-1] / more[-1],
        }
        right = np.array(ps) - serial * more
        given = {"law": "gustafson", "p": p, "serial": serial, "ps": ps, "times": times}
        tolerance = 0.005 if trial == 1 else 0.02
        value = p - serial * (p - 1)
        _judge_law(ranks, report, given, value, right, suspects, fits, tolerance)
        if report.problems:
            return


def _law_data(seed: int, points: int = 4) -> list[tuple[float, float, list[int]]]:
    """(serial fraction, T(1), rank counts): twice ordinary, then better than ideal."""
    chance = random.Random(seed)
    found = []
    for serial in (chance.uniform(0.05, 0.2), chance.uniform(0.25, 0.45), -0.05):
        ps = [1, *sorted(chance.sample(range(2, 20), points))]
        found.append((round(serial, 3), round(chance.uniform(2, 30), 2), ps))
    return found


def _last(count: int) -> np.ndarray:
    return np.eye(count)[-1]


def _unseen_by(*lines: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Noise like `seen`, without any in the first point, that no fit of these lines notices."""
    basis, _ = np.linalg.qr(np.stack(lines)[:, 1:].T)
    return np.append(0.0, seen[1:] - basis @ (basis.T @ seen[1:]))


def _off_the_line(more: np.ndarray) -> np.ndarray:
    """Noise of p − S(p): a line with an intercept, and the last point, are 0.012 off or more.

    A line through the origin is right, and so is the mean of the points' fractions.
    """
    lines = more, np.append(0.0, 1 / more[1:])
    noise = _unseen_by(*lines, seen=np.ones_like(more))
    noise *= 0.012 / abs(np.polyfit(more, noise, 1)[0])
    if (lacking := 0.012 * more[-1] - abs(noise[-1])) > 0:
        alone = _unseen_by(*lines, seen=_last(len(more)))
        noise += np.copysign(lacking, noise[-1]) * alone / alone[-1]
    return noise


def _share(ps, times) -> float:
    """Amdahl's fraction by a straight line in 1/p, clipped."""
    slope, intercept = np.polyfit(1 / np.array(ps, float), times, 1)
    return float(np.clip(intercept / (intercept + slope), 0, 1))


def _judge_law(
    ranks, report: Report, given: dict, value, values, suspects, fits, tolerance: float = 0.02
) -> None:
    """The law at one rank count and at several, and the fraction that its fit finds."""
    law, serial = given["law"], given["serial"]
    for answer in report.answers(ranks, __name__, "probe_law", **given):
        rank, got = answer.rank, answer.value
        what = f"{law}({given['p']}, {serial})"
        if _judge_number(report, rank, what, got["one"], float(value), suspects):
            ok = isinstance(got["array"], list) and len(got["array"]) == len(values)
            if not ok or not np.allclose(got["array"], values, rtol=1e-4):
                report.problem(
                    f"{law} of an array of rank counts: expected {short(values.tolist())}, got "
                    f"{short(got['array'])}",
                    rank,
                )
        what = f"fit_{law}: {given['ps']} ranks took {short(given['times'])} s. Serial fraction"
        _judge_number(report, rank, what, got["fit"], serial, fits, tolerance)


# -- 5.5 --------------------------------------------------------------------------------------


def probe_predict(user_ns: dict, *, rank: int, rings: list, steps: list) -> dict:
    """`ring` and `predict_step` on several inputs."""
    ring, predict = answer_named(user_ns, "ring"), answer_named(user_ns, "predict_step")
    return {
        "rings": [told(ring(p, nbytes)) for p, nbytes in rings],
        "steps": [told(predict(*arguments)) for arguments in steps],
    }


@task("5.5", "predict a step", points=3)
def predict_step(ranks, report: Report) -> None:
    """Messages and bytes of a ring, and the step with an all_reduce for each gradient."""
    chance = random.Random(report.seed)
    rings = [(p, chance.randrange(10**3, 10**7)) for p in (1, 2, 4, chance.randrange(5, 40))]
    steps = []
    for p in (2, chance.randrange(3, 20), 1):
        sizes = [chance.randrange(10**3, 10**7) for _ in range(chance.randrange(3, 7))]
        compute, latency = chance.uniform(0.5, 2), chance.uniform(0.05, 0.2)
        steps.append((compute, sizes, p, latency, chance.uniform(5e6, 2e7)))
    for answer in report.answers(ranks, __name__, "probe_predict", rings=rings, steps=steps):
        rank, value = answer.rank, answer.value
        for (p, nbytes), got in zip(rings, value["rings"], strict=True):
            _judge_ring(report, rank, p, nbytes, got)
        if report.of(rank):
            continue
        for arguments, got in zip(steps, value["steps"], strict=True):
            _judge_step(report, rank, arguments, got)


def _judge_ring(report: Report, rank: int, p: int, nbytes: int, got: object) -> None:
    if not isinstance(got, list) or len(got) != 2:
        report.problem(f"ring({p}, {nbytes}): expected (messages, sent), got {short(got)}", rank)
        return
    messages, sent = 2 * (p - 1), 2 * (p - 1) / p * nbytes
    if p == 1 and got != [0, 0]:
        report.problem(f"ring(1, {nbytes}): one rank sends nothing, got {short(got)}", rank)
        return
    counts = {
        "That is one round of the ring: the sums still have to be passed on.": p - 1,
        "p − 1 steps, and p − 1 more; nobody sends to itself.": 2 * p,
        "These are the messages of all ranks together; count those of one.": messages * p,
    }
    if _judge_number(report, rank, f"ring({p}, {nbytes}), messages", got[0], messages, counts):
        volumes = {
            "Each message has n/p bytes, not n.": messages * nbytes,
            "That is one round of the ring: the sums still have to be passed on.": sent / 2,
            "That is one message; give the bytes of all.": nbytes / p,
            "These are the bytes of all ranks together.": sent * p,
        }
        _judge_number(report, rank, f"ring({p}, {nbytes}), bytes", got[1], sent, volumes)


def _judge_step(report: Report, rank: int, arguments: tuple, got: object) -> None:
    compute, sizes, p, latency, bandwidth = arguments
    moved, total = 2 * (p - 1) / p, sum(sizes)
    waits, travels = 2 * (p - 1) * latency, moved * total / bandwidth
    expected = compute + len(sizes) * waits + travels
    suspects = {
        "The latency is paid for every gradient: each has an all_reduce of its own.": compute
        + waits
        + travels,
        "The computation is missing.": expected - compute,
        "compute is what one rank computes already: do not divide it by p.": expected
        - compute
        + compute / p,
        "The latency is missing.": compute + travels,
        "bandwidth is in bytes per second: divide by it.": compute
        + len(sizes) * waits
        + moved * total * bandwidth,
        "Every message pays the latency, 2(p − 1) of them.": compute
        + len(sizes) * latency
        + travels,
    }
    what = f"predict_step with {len(sizes)} gradients on {p} rank{'s' * (p > 1)}, seconds"
    _judge_number(report, rank, what, got, expected, suspects)


# -- 5.6 --------------------------------------------------------------------------------------


def probe_script(user_ns: dict, *, rank: int, settings: list) -> list:
    """`job_script` for several settings."""
    function = answer_named(user_ns, "job_script")
    return [told(function(*arguments)) for arguments in settings]


@task("5.6", "a Slurm job script", points=3)
def job_script(ranks, report: Report) -> None:
    """A script that asks for what it uses, and uses what it asks for."""
    chance = random.Random(report.seed)
    settings = [(4, 2, 24, "python train.py --strong 256")]
    command = f"python train.py --strong {chance.randrange(100, 999)}"
    settings.append(
        (chance.choice((3, 5, 6)), chance.choice((1, 4)), chance.randrange(5, 33), command)
    )
    for answer in report.answers(ranks, __name__, "probe_script", settings=settings):
        for arguments, text in zip(settings, answer.value, strict=True):
            before = len(report.problems)
            for problem in _script_problems(text, *arguments):
                report.problem(f"job_script{arguments[:3]}: {problem}", answer.rank)
            if len(report.problems) > before:
                break


SHORT_OPTIONS = {"-N": "--nodes", "-n": "--ntasks", "-c": "--cpus-per-task", "-t": "--time"}
_OMP = r"OMP_NUM_THREADS=[\"']?(\$\{?SLURM_CPUS_PER_TASK\}?|\d+)"
# Where mpiexec may put one rank for each domain.
_DOMAIN_MAPS = ("numa", "socket", "package", "l3cache")


def _script_problems(text, nodes: int, domains: int, cores: int, command: str) -> Iterator[str]:
    """What is wrong with a job script, one text each."""
    if not isinstance(text, str):
        yield f"expected the text of a script, got {short(text)}"
        return
    lines = text.replace("\\\n", " ").splitlines()
    if not lines or not lines[0].startswith("#!"):
        yield "the first line must say who reads the script: #!/bin/bash"
    if said := _bash_says(text):
        yield f"bash can't read it: {said}"
        return
    commands = [k for k, line in enumerate(lines) if line.strip() and not line.startswith("#")]
    directives = [k for k, line in enumerate(lines) if line.startswith("#SBATCH")]
    for k, line in enumerate(lines):
        if re.match(r"\s*#\s+SBATCH|\s+#SBATCH", line):
            yield f"line {k + 1}, {line.strip()!r}: Slurm wants #SBATCH first, without blanks"
    if commands and any(k > commands[0] for k in directives):
        yield (
            f"#SBATCH below the first command (line {commands[0] + 1}): Slurm does not read it "
            "there, move it up"
        )
        directives = [k for k in directives if k < commands[0]]
    asked = {}
    for k in directives:
        asked |= _options(lines[k].removeprefix("#SBATCH"))
    yield from _request_problems(asked, nodes, domains, cores)
    known = {"NTASKS": nodes * domains, "CPUS_PER_TASK": cores, "NNODES": nodes}
    known |= {"JOB_NUM_NODES": nodes, "NTASKS_PER_NODE": domains}
    typed = _with_values([lines[k] for k in commands], {f"SLURM_{k}": v for k, v in known.items()})
    yield from _launch_problems(typed, nodes * domains, cores, command)


def _with_values(lines: list[str], known: dict[str, int]) -> list[str]:
    """The lines with numbers for the variables that Slurm or the script has set to one."""
    values, typed = {name: str(value) for name, value in known.items()}, []
    for line in lines:
        line = re.sub(r"\$\{?(\w+)\}?", lambda found: values.get(found[1], found[0]), line)
        line = re.sub(r"\$\(\(\s*(\d+)\s*\*\s*(\d+)\s*\)\)", _product, line)
        typed.append(line)
        for name, value in re.findall(r"(\w+)=[\"']?(\d+)[\"']?(?=\s|;|$)", line):
            values[name] = value
    return typed


def _product(found: re.Match) -> str:
    return str(int(found[1]) * int(found[2]))


def _bash_says(text: str) -> str:
    try:
        done = subprocess.run(
            ["bash", "-n"], input=text, capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""  # no bash here: Slurm's nodes have one
    return done.stderr.strip().splitlines()[0] if done.returncode else ""


def _options(text: str) -> dict[str, str]:
    """{"--nodes": "4"} of "-N 4", "--nodes 4" or "--nodes=4"; comments are left out."""
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        return {}
    found = {}
    for k, word in enumerate(words):
        name, equals, value = word.partition("=")
        if not name.startswith("-"):
            continue
        if attached := re.fullmatch(r"(-[Nnct])(\d\S*)", word):
            name, equals, value = attached[1], "=", attached[2]
        if not equals and k + 1 < len(words) and not words[k + 1].startswith("-"):
            value = words[k + 1]
        found[SHORT_OPTIONS.get(name, name)] = value
    return found


def _request_problems(asked: dict, nodes: int, domains: int, cores: int) -> Iterator[str]:
    wanted = {
        "--nodes": (nodes, "the nodes"),
        "--ntasks-per-node": (domains, "one rank for each NUMA domain of a node"),
        "--cpus-per-task": (cores, "the cores of a domain"),
    }
    everywhere = asked.get("--ntasks") == str(nodes * domains)
    for name, (value, words) in wanted.items():
        if name == "--ntasks-per-node" and name not in asked and everywhere:
            continue  # Slurm gives each node as many
        if name not in asked:
            yield f"#SBATCH {name}={value} is missing: {words}"
        elif asked[name] != str(value):
            yield f"#SBATCH {name}: expected {value} ({words}), got {asked[name] or 'nothing'}"
    if asked.get("--ntasks", str(nodes * domains)) != str(nodes * domains):
        yield (
            f"#SBATCH --ntasks={asked['--ntasks']} contradicts {nodes} nodes × {domains} ranks: "
            f"{nodes * domains}"
        )
    if "--time" not in asked:
        yield "#SBATCH --time=… is missing: many clusters refuse a job without a limit"


def _launch_problems(lines: list[str], ranks: int, cores: int, command: str) -> Iterator[str]:
    found = re.compile(r"(?:^|[\s;&|/])(mpiexec|mpirun|srun)\s")
    launches = [line for line in lines if found.search(f" {line} ")]
    if not launches:
        yield "no mpiexec (or srun) line starts the ranks"
        return
    line = launches[-1]
    launcher = found.search(f" {line} ")[1]
    if command not in " ".join(line.split()):
        yield f"the {launcher} line does not run the command {command!r}"
    yield from _thread_problems(lines, line, cores)
    options = _options(line.partition(launcher)[2].partition(command)[0])
    number = next((options[n] for n in ("--ntasks", "-np", "--np") if n in options), None)
    if number not in (None, str(ranks)):
        yield f"{launcher} starts {number or '?'} ranks, the request has {ranks}"
    yield from (_srun_problems if launcher == "srun" else _mpiexec_problems)(options, lines, cores)


def _thread_problems(lines: list[str], launch: str, cores: int) -> Iterator[str]:
    """Does OMP_NUM_THREADS reach the ranks?"""
    at = lines.index(launch)
    exported = [m[1] for line in lines[:at] if (m := re.search(r"export\s+.*?" + _OMP, line))]
    ahead = [m[1] for m in [re.search(_OMP, launch)] if m]
    if exported or ahead:
        value = (exported + ahead)[-1]
        if value.isdigit() and int(value) != cores:
            yield f"OMP_NUM_THREADS={value}, but each rank has {cores} cores"
    elif re.search(_OMP, "\n".join(lines[:at])):
        if not re.search(r"export\s+OMP_NUM_THREADS\s*$", "\n".join(lines[:at]), re.MULTILINE):
            yield "OMP_NUM_THREADS is set, but not exported: the ranks do not see it"
    else:
        yield f"OMP_NUM_THREADS is not set to {cores} before the ranks start: export it"


def _mpiexec_problems(options: dict, lines: list[str], cores: int) -> Iterator[str]:
    bind, by = options.get("--bind-to", ""), options.get("--map-by", "")
    if not bind or bind == "none":
        yield "mpiexec must bind: --bind-to core (or numa)"
        return
    if bind == "core" and cores > 1 and f"pe={cores}" not in by.lower():
        yield (
            f"--bind-to core gives each rank one core, for {cores} threads: --map-by "
            f"ppr:1:numa:PE={cores} gives it {cores}"
        )
    elif bind == "core" or any(name in by.lower() for name in _DOMAIN_MAPS):
        return
    elif by or bind not in _DOMAIN_MAPS:
        # Without --map-by Open MPI goes from package to package by itself.
        yield "--map-by ppr:1:numa is missing: two ranks may land in the same domain"


def _srun_problems(options: dict, lines: list[str], cores: int) -> Iterator[str]:
    given = options.get("--cpus-per-task", "")
    if given != str(cores) and not any("SRUN_CPUS_PER_TASK=" in line for line in lines):
        yield f"srun must be told again: --cpus-per-task={cores} (since Slurm 22.05)"
    if options.get("--cpu-bind", "none") in ("", "none", "no"):
        yield "srun must bind: --cpu-bind=cores"
