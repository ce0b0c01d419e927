"""Checks of lab 13: reports of deaths, checkpoints, resharding, intervals, going on with fewer.

Nothing dies here. A save is judged by what is on the disk after each of its operations
(:mod:`utils.labs.lab13.crashes`), a resumed training by the twin that was never stopped, and what
survivors do by groups of 4, 3, 2 and 1 ranks.
"""

from __future__ import annotations

import copy
import functools
import io
import math
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from utils.checks.calls import TOGETHER, inside, only, some, waited
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
from utils.checks.probe import answer_named, as_dict, kept, reading_answer, recorded
from utils.checks.steps import Step, communication, facts, value
from utils.checks.task import Report, task, to_each
from utils.cluster.questions import Ranks

from .crashes import KINDS, Watched, states, written_by_python
from .resumable_training import Job, Survivor, bytes_in, through_a_file

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
        lambda got: isinstance(got, list | str | int) and not isinstance(got, bool),
        'return a dict, {"rank": 2, "signal": 9}, or None',
    )
    if right is None:
        yield Mistake(
            lambda got: isinstance(got, dict), "nobody was killed by a signal here: return None"
        )
        return
    rank, signal = right["rank"], right["signal"]
    texts = {"rank": str(rank), "signal": None if signal is None else str(signal)}
    yield Mistake(texts, "these are texts: numbers are asked for, int(…)")
    yield from _wrong_ranks(rank)
    yield from _wrong_signals(signal)
    silent = (
        ": the launcher is silent, but the survivors say 'rank … died'; the signal is None then"
    )
    yield Mistake(
        lambda got: got is None, f"a rank died, and None came back{'' if signal else silent}"
    )


def _wrong_ranks(rank: int) -> Iterator[Mistake]:
    """Yield what tells another rank than this one."""

    def first_digit(got: Any) -> bool:
        digit = got.get("rank") if isinstance(got, dict) else None
        return isinstance(digit, int) and digit != rank and str(rank).startswith(str(digit))

    def another(got: Any) -> bool:
        return isinstance(got, dict) and got.get("rank") not in (rank, None)

    yield Mistake(first_digit, "only the first digit of the rank: jobs have more than ten of them")
    if rank == 0:
        yield Mistake(
            another,
            "rank 0 died first: it is a rank like the others, and what comes later in the log is "
            "another death",
        )
    yield Mistake(
        another,
        "this rank is not the one that died: it waits, or the number is that of a process or step. "
        "Look for 'process rank …', else for 'rank … died'",
    )


def _wrong_signals(signal: int | None) -> Iterator[Mistake]:
    """Yield what tells another signal than this one."""

    def without(got: Any) -> bool:
        return isinstance(got, dict) and got.get("signal") is None

    def another(got: Any) -> bool:
        return isinstance(got, dict) and got.get("signal") != signal

    if signal is None:
        yield Mistake(
            another,
            "the survivors can't know the signal, so it is None; an exit code is none",
        )
    else:
        yield Mistake(
            without,
            "the launcher told the signal: 'process rank … with PID … on node … exited on signal "
            "…'. A line may break between two words, and every job has another PID and node",
        )
    yield Mistake(
        another, "another signal: it stands behind 'exited on', in the launcher's words only"
    )


# -- 13.2: all that a training is -------------------------------------------------------------

BEFORE, AFTER = 5, 7
_FORGOTTEN = {
    "weights": "the weights are not back: model.load_state_dict",
    "buffers": "the model's buffers are not back, such as the means of a batch norm: they are in "
    "model.state_dict(), and not among its parameters",
    "momentum": "the momentum is not back: each weight goes on with a velocity, which is in "
    "optimizer.state_dict()",
    "rate": "the learning rate is not that of this step, or another setting of the optimizer is "
    "not back: both are in its state",
    "schedule": "the schedule counts from another step, so the next decay comes at another time: "
    "schedule.state_dict()",
    "epoch": "the sampler is in another epoch, which has another order of samples: job.epoch",
    "position": "the sampler begins at another place of its epoch: some samples are seen twice, "
    "others never. job.position",
    "step": "job.step is not back",
    "random": "the random numbers go on differently, so dropout drops others: "
    "torch.get_rng_state() and torch.set_rng_state(…), the last thing to be restored",
}  # fmt: skip


def probe_resume(user_ns: dict, *, rank: int, seed: int) -> dict:
    """A training that goes on, and one that goes on from its state."""
    capture, restore = (reading_answer(user_ns, name) for name in ("capture", "restore"))
    before = torch.get_rng_state()
    try:
        return _resumed(capture, restore, seed, seed + 1 + rank)
    finally:
        torch.set_rng_state(before)


def _resumed(capture: Callable, restore: Callable, seed: int, draws: int) -> dict[str, Any]:
    """Return what is captured, and what is restored from it; draws: the seed of dropout."""
    twin = Job(seed, draws)
    expected = [twin.train_step() for _ in range(BEFORE + AFTER)]
    job = Job(seed, draws)
    losses = [job.train_step() for _ in range(BEFORE)]
    parts = job.parts()
    state = capture(job)
    if not isinstance(state, dict):
        lists = ("lacking", "changed", "elsewhere", "resumed", "expected")
        flags = {"is state": False, "small": False, "unchanged": True, "aliased": False}
        return flags | {name: [] for name in lists}
    unchanged, small = job.parts() == parts, bytes_in(state) < job.nbytes()
    at_once = copy.deepcopy(state)
    losses += [job.train_step() for _ in range(AFTER)]
    loaded = through_a_file(state)
    fresh = _restored(restore, loaded, seed)
    lacking = _lacking(fresh, parts)
    aliased = False
    if lacking:  # was it right when it was taken?
        other = _restored(restore, through_a_file(at_once), seed)
        aliased = len(_lacking(other, parts)) < len(lacking)
    resumed = [fresh.train_step() for _ in range(AFTER)]
    changed = _lacking(_restored(restore, loaded, seed), parts)
    fresh.train_step()
    kept("capture", state, lambda: capture(fresh))  # before the first state is used again
    elsewhere = _lacking(_restored(restore, loaded, seed), parts)
    return {
        "is state": True,
        "small": small,
        "unchanged": unchanged and losses == expected,
        "lacking": lacking,
        "aliased": aliased,
        "changed": [] if lacking else changed,
        "elsewhere": [] if lacking or changed else elsewhere,
        "resumed": resumed,
        "expected": expected[BEFORE:],
    }


def _restored(restore: Callable, state: dict, seed: int) -> Job:
    """Return a new job that is restored from a state."""
    job = Job(seed, 99)
    restore(job, state)
    return job


def _lacking(job: Job, parts: dict[str, Any]) -> list[str]:
    """Return the names of those parts of a job that are not these."""
    return [name for name, part in job.parts().items() if part != parts[name]]


@task("13.2", "everything that a training is", points=4)
def resume(ranks: Ranks, report: Report) -> None:
    """The losses of the resumed training are those of the one that went on, bit for bit."""
    for answer in report.answers(ranks, probe_resume, seed=report.seed):
        rank, result = answer.rank, answer.value
        if not report.follow(rank, _captured(result)):
            continue
        for name in result["lacking"]:
            report.problem(_FORGOTTEN[name], rank)
        if not result["lacking"]:
            report.follow(rank, _restored_again(result))
            report.follow(rank, _goes_on(result))


def _captured(result: dict[str, Any]) -> Iterator[Step]:
    """Judge whether the state is a dict with all of it, and capturing it changes nothing."""
    yield facts({
        "capture returned no dict: return the state, a dict": not result["is state"],
        "capture changes the training: it draws random numbers, or sets something. It has to "
        "look only": not result["unchanged"],
        "the state is smaller than weights, momentum and random state are: all of them have to "
        "be in the dict, or a new process does not find them": result["small"],
        "the state has changed since it was captured: state_dict() holds the weights "
        "themselves, not copies of them, and the training went on. copy.deepcopy(…)":
            result["aliased"],
    })  # fmt: skip


def _restored_again(result: dict[str, Any]) -> Iterator[Step]:
    """Judge whether the same state gives the same job once more."""
    yield facts({
        f"a second job restored from the same state has another {name}: the training of the first "
        "has changed the state. An optimizer keeps the momentum tensors that load_state_dict gives "
        "it, so restore from copy.deepcopy(state)": True
        for name in result["changed"]
    })  # fmt: skip
    yield facts({
        f"after another job was captured, the first state gives a job with another {name}: capture "
        "keeps something outside of the state, in a global name or an attribute. All of it has to "
        "be in the dict": True
        for name in result["elsewhere"]
    })  # fmt: skip


def _goes_on(result: dict[str, Any]) -> Iterator[Step]:
    """Judge the losses of the resumed training."""
    what = "the losses after resuming"
    yield value(result["resumed"], result["expected"], what=what, tolerance=0)


# -- 13.3: a save that may end at any moment --------------------------------------------------

OLD, NEW = 10, 20
REMAINS = b"half of a file"  # of a save that crashed


def _name(step: int) -> str:
    """Return the name of a checkpoint's folder."""
    return f"step-{step:06d}"


def _state(step: int, place: int) -> dict:
    """Return what a rank saves."""
    return {"step": step, "place": place, "weights": torch.arange(40.0) + step + place}


def _prepared(folder: Path, p: int, leftover: bool) -> None:
    """An old checkpoint of p ranks, and perhaps what a crashed save has left."""
    (folder / _name(OLD)).mkdir(parents=True)
    for place in range(p):
        torch.save(_state(OLD, place), folder / _name(OLD) / f"rank-{place}.pt")
    (folder / "latest").write_text(_name(OLD))
    if leftover:
        (folder / _name(NEW)).mkdir()
        for place in range(p):
            (folder / _name(NEW) / f"rank-{place}.pt").write_bytes(REMAINS)


def _content(path: str, content: bytes) -> str:
    """Return what is in a file: its text, or which state it holds."""
    if path == "latest":
        return content.decode(errors="replace").strip()
    if not content or content == REMAINS:
        return "still what a crashed save left" if content else "empty"
    try:
        state = torch.load(io.BytesIO(content))
        if not isinstance(state, dict):
            return "torn"
        place, step = state["place"], state["step"]
        whole = torch.equal(state["weights"], _state(step, place)["weights"])
        return f"{step} of {place}" if whole else "torn"
    except Exception:
        return "torn"


@in_group
def probe_save(user_ns: dict, *, rank: int, group: Group, partition) -> dict:
    """All that may be left of this rank's folder, in the course of a save."""
    from torch_mpi.record import log

    save = reading_answer(user_ns, "save")
    place, p = dist.get_rank(group), dist.get_world_size(group)
    mark, known = log.mark(), {}

    def calls() -> tuple[int, int]:
        made = [c for c in log.since(mark) if c.op not in ("send", "recv")]
        sure = [k + 1 for k, c in enumerate(made) if c.op in TOGETHER and c.waited]
        return len(made), max(sure, default=0)

    def content_of(path: str, content: bytes) -> str:
        if (path, content) not in known:
            known[path, content] = _content(path, content)
        return known[path, content]

    with tempfile.TemporaryDirectory() as parent, written_by_python():
        folder = Path(parent, "checkpoints")
        _prepared(folder, p, leftover=p > 1)
        watched = Watched(folder, calls, unsure={_name(NEW)} if p > 1 else ())
        state = _state(NEW, place)
        watched.run(save, folder, NEW, state, names=user_ns, **keywords(partition, group))
        files = {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()}
    moments = [
        {
            "calls": moment.calls,
            "sure": moment.sure,
            "left": [
                {path: content_of(path, c) for path, c in tree.items()} for tree in moment.left
            ],
        }
        for moment in watched.moments
    ]
    made = [as_dict(call) for call in log.since(mark)]
    return {"moments": moments, "files": sorted(files), "calls": made}


def _left(values: list[dict], chosen: list[int], kind: str) -> dict[str, str]:
    """Return what is on the disk of all ranks: of a file what the rank has that changes it."""
    trees = [
        result["moments"][k]["left"][KINDS.index(kind)]
        for result, k in zip(values, chosen, strict=True)
    ]
    first, left = _at_first(values), {}
    for path in {path for tree in trees for path in tree} | set(first):
        contents = [tree.get(path) for tree in trees]
        changed = [content for content in contents if content != first.get(path)]
        # Who removes a file of another rank's has a copy of its own: there, it is written.
        changed.sort(key=lambda content: content is None)
        content = changed[0] if changed else first.get(path)
        if content is not None:
            left[path] = content
    return left


def _at_first(values: list[dict]) -> dict[str, str]:
    """Return what is in each file before the save."""
    return values[0]["moments"][0]["left"][0]


def to_rank(rank: int, step: Step) -> Step:
    """Return the step as one that this rank is told of, whichever rank the others are about."""
    return lambda report, _: step(report, rank)


def _loaded(left: dict[str, str], p: int, kind: str, done: bool, where: str) -> Iterator[Step]:
    """Judge what somebody who loads this would meet."""
    marker, kill = left.get("latest", ""), kind == "kill"
    end = f"{where}: {'a kill' if kill else 'a power failure'}"
    why = (
        "open(…, 'w') empties it at once, the text comes later: write to another file, then "
        "os.replace"
        if kill
        else "without file.flush() and os.fsync before the renaming, the name may be there and its "
        "content not"
    )
    yield facts({
        f"{end} may leave `latest` empty or missing: {why}": not marker,
        f"{end} may leave {marker!r} in `latest`; expected {_name(NEW)!r}, the folder's name, "
        "whole: write it to another file, then os.replace":
            marker not in (_name(OLD), _name(NEW)),
    })  # fmt: skip
    for place in range(p):
        content = left.get(f"{marker}/rank-{place}.pt", "missing")
        yield _file(marker, place, content, kill, where)
    yield facts({
        f"{where}: save has returned on all ranks, and after a power failure `latest` is the old "
        "one: one rank writes it, then os.fsync, os.replace, and flush_folder(folder), so that the "
        "new name is on the disk": done and marker == _name(OLD),
    })  # fmt: skip


def _file(marker: str, place: int, content: str, kill: bool, where: str) -> Step:
    """Judge the content of a rank's file, after a kill or a power failure."""
    end = f"{where}: {'a kill' if kill else 'a power failure'}"
    old, name = marker == _name(OLD), f"rank-{place}.pt"
    why = (
        "the data of all ranks first: every rank writes, a barrier, then the marker"
        if kill
        else "its content, or its name, is not on the disk yet: flush_folder of the parent after "
        "mkdir, file.flush() and os.fsync before the file is renamed, flush_folder of its folder "
        "after, and all that before the marker"
    )
    wrong = content != f"{OLD if old else NEW} of {place}"
    return facts({
        f"{end} in the middle leaves `latest` at {marker}, whose {name} is {content}: the only "
        "whole checkpoint was overwritten. Write into a new folder": wrong and old,
        f"{where}: {marker}/{name} holds the state of step {content}: each rank writes its own":
            wrong and " of " in content,
        f"{end} may leave `latest` at {marker}, whose {name} is {content}: {why}": wrong,
    })  # fmt: skip


def _all_over(values: list[dict]) -> list[int]:
    """Return the last moment of each rank."""
    return [len(result["moments"]) - 1 for result in values]


def _form(members: list[int], values: list[dict], place: int) -> dict[str, object]:
    """Return what is wrong with the files that a rank has written, and leaves at the end."""
    first, result, path = _at_first(values), values[place], f"{_name(NEW)}/rank-{place}.pt"
    last = result["moments"][-1]["left"][0]
    changed = {name for name, content in last.items() if first.get(name) != content}
    others = [name for name in changed if name.endswith(".pt") and name != path]
    overwritten = [name for name in others if name.startswith(_name(OLD))]
    markers = [
        rank
        for rank, of_rank in zip(members, values, strict=True)
        if any(moment["left"][0].get("latest") != _name(OLD) for moment in of_rank["moments"])
    ]
    return {
        f"{overwritten[:1]} was overwritten: that is the checkpoint that a crash now would "
        "need. Write into the folder of the new step": overwritten,
        f"it wrote {others[:1]}; place {place} of the group writes {path}": others,
        f"there is no {path} at the end; there are {result['files'][:6]}":
            path not in result["files"],
        f"{path} is still what a crashed save left: each rank writes its own file":
            last.get(path) == first.get(path) is not None,
        f"{path} is {last.get(path)}: torch.load has to give the state back, all of it":
            last.get(path) != f"{NEW} of {place}",
        "nobody writes `latest`: the rank at place 0 of the group does, "
        "place_and_size(group), which need not be rank 0": not markers,
        f"ranks {markers} write `latest`: one rank does, place 0": len(markers) > 1,
    }  # fmt: skip


def _meets_others(members: list[int], values: list[dict], place: int) -> dict[str, object]:
    """Return what goes wrong in one folder for all ranks, though each has its own copy here."""
    first = _at_first(values)
    written = [
        {path for moment in result["moments"] for path in moment["left"][0]} - set(first)
        for result in values
    ]
    others = [k for k in range(len(members)) if k != place]
    shared = sorted(path for k in others for path in written[place] & written[k])
    removed = [
        f"{_name(NEW)}/rank-{k}.pt"
        for k in others
        if _removes(values[place], values[k], first, f"{_name(NEW)}/rank-{k}.pt")
    ]
    return {
        f"several ranks write {shared[:1]}, at the same time: in the lab all save into one folder. "
        "Each rank's temporary file needs a name of its own": shared,
        f"it removes {removed[:1]}, which another rank may just have written: remove only what is "
        "this rank's own": removed,
    }  # fmt: skip


def _removes(result: dict, other: dict, first: dict[str, str], path: str) -> bool:
    """Return whether a rank may remove a file after the other rank has written it."""
    wrote = (m for m in other["moments"] if m["left"][0].get(path) != first.get(path))
    gone = (m for m in result["moments"] if path not in m["left"][0])
    begins, ends = next(wrote, None), next(gone, None)
    return bool(path in first and begins and ends and begins["sure"] <= ends["calls"])


@task("13.3", "a save that may crash", points=4)
def safe_save(ranks: Ranks, report: Report) -> None:
    """Whenever the ranks end, `latest` names a whole checkpoint."""
    cases = [{"partition": [[1, 2, 3], [0]]}, {"partition": None}]
    for _, members, values in tried(ranks, report, probe_save, cases):
        kept_in_group = [
            report.communication(rank, result["calls"], inside(members), waited)
            for rank, result in zip(members, values, strict=True)
        ]
        if all(kept_in_group):
            report.follow(None, _saves(members, values))


def _saves(members: list[int], values: list[dict]) -> Iterator[Step]:
    """Judge the files of all ranks at the end, and what may be left at any moment before."""
    for place, rank in enumerate(members):
        wrong = _form(members, values, place) | _meets_others(members, values, place)
        yield to_rank(rank, facts(wrong))
    over, seen = _all_over(values), set()
    moments = [result["moments"] for result in values]
    for kind, place, chosen in [*states(moments), *((kind, 0, over) for kind in KINDS)]:
        left, done = _left(values, chosen, kind), chosen == over
        key = (kind == "kill", done, tuple(sorted(left.items())))
        if key in seen:
            continue
        seen.add(key)
        for step in _loaded(left, len(members), kind, done, on(members)):
            yield to_rank(members[place], step)
    for rank, result in zip(members, values, strict=True):
        yield to_rank(rank, communication(result["calls"], some(members)))


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
    starts = {file: shard(n, old, file)[0] for file in range(old)}
    lengths = {file: shard(n, old, file)[1] - starts[file] for file in range(old)}
    first = shard(n, new, rank)[0]
    of_others = [plan(n, old, new, other) for other in range(new) if other != rank]
    return [
        Mistake(_is_no_list_of_reads, "return a list of reads (file, start, stop, at)"),
        *table({
            "n // p rounds down, and the last elements belong to nobody: -(-n // p) rounds up":
                plan(n, old, new, rank, "down"),
            "cut as tensor_split does, into sizes that differ by one at most. Here each shard has "
            "-(-n // p) elements, and the last ones have fewer, or none":
                plan(n, old, new, rank, "even"),
            "these are the reads of another rank: `rank` is an argument, not dist.get_rank()":
                lambda reads: bool(reads) and reads in of_others,
            "start and stop count in the whole tensor; they are places in that rank's file":
                [[f, a + starts[f], b + starts[f], at] for f, a, b, at in right],
            "`at` counts in the whole tensor; it is the place in the new rank's own shard":
                [[f, a, b, at + first] for f, a, b, at in right],
            "`at` is 0 in all reads: each would be written over the one before":
                [[f, a, b, 0] for f, a, b, _ in right],
            "the third number is a length: stop is one behind the last element":
                [[f, a, b - a, at] for f, a, b, at in right],
            "one element too few of each: stop is one behind the last element":
                [[f, a, b - 1, at] for f, a, b, at in right],
            "whole files are read: only what overlaps with the own shard":
                [[f, 0, lengths[f], at] for f, _, _, at in right],
            "a read goes beyond the end of its file: the last shard ends at n, so "
            "min(n, (r + 1) * each)":
                lambda reads: any(f in starts and b > lengths[f] for f, _, b, _ in reads),
            "there are reads of nothing: leave them out":
                lambda reads: [read for read in reads if read[1] < read[2]] == right != reads,
            "every file is read: only what overlaps with the own shard":
                lambda reads: len(right) < old and {f for f, *_ in reads} == set(range(old)),
            "something is missing: a shard may lie in several files, and -(-n // p) rounds up":
                lambda reads: len(reads) < len(right),
            "reads of nothing": [[file, 0, 0, 0] for file in range(old)],
        }),
    ]  # fmt: skip


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
    """What becomes of a job, or of one with a mistake in the bookkeeping."""
    now = done = lost = 0.0
    count, k, coming = 0, 0, [*sorted(failures), math.inf]
    while done < work:
        piece = min(interval, work - done)
        last = done + piece >= work and wrong != "saves at the end"
        need = piece + (0 if last else save)
        while coming[k] < now - restart * (wrong == "in restarts") or (
            wrong == "at a beginning" and coming[k] == now
        ):
            k += 1
        failure = coming[k]
        if wrong == "kept in a save" and now + piece <= failure < now + need:
            done += piece
            now, count = failure + restart, count + 1
        elif failure >= now + need:
            now, done = now + need, done + piece
        else:
            gone = failure - now if wrong == "saving is lost" else min(failure - now, piece)
            gone = {"whole intervals": piece, "nothing lost": 0.0}.get(wrong, gone)
            if wrong == "from the start":
                gone, done = gone + done, 0.0
            lost, count, k = lost + gone, count + 1, k + 1
            now = failure + (0 if wrong == "no restart" else restart)
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
    return table({
        "the 2 is missing": math.sqrt(save * mtbf),
        "the square root is missing": 2 * save * mtbf,
        "this is save / mtbf: the interval grows with both": math.sqrt(2 * save / mtbf),
        "the 2 belongs below the root": 2 * math.sqrt(save * mtbf),
        "upside down": math.sqrt(mtbf / (2 * save)),
        "half of the root": math.sqrt(save * mtbf / 2),
    })  # fmt: skip


def _values(book: dict[str, float]) -> list[float]:
    """Return the entries in the order of their names."""
    return [book[key] for key in sorted(book)]


def _wrong_books(
    work: float, every: float, save: float, restart: float, failures: list[float]
) -> list[Mistake]:
    """Return which books mistakes lead to."""
    job, names = (work, every, save, restart, failures), {"seconds", "lost", "failures"}
    right = replay(*job)
    mistakes = [
        Mistake(
            lambda got: not isinstance(got, dict) or set(got) != names,
            'return {"seconds": …, "lost": …, "failures": …}',
        )
    ]
    for how, text in _BOOKS.items():
        if how == "from the start" and work < 5 * every:
            continue  # may go on for very long
        numbers = _values(replay(*job, wrong=how))
        if not same(numbers, _values(right)):
            mistakes.append(Mistake(functools.partial(_has_values, numbers), text))
    return [*mistakes, *_wrong_entries(right)]


def _has_values(numbers: list[float], book: dict[str, float]) -> bool:
    """Return whether a book has these numbers."""
    return same(_values(book), numbers)


def _wrong_entries(right: dict[str, float]) -> Iterator[Mistake]:
    """Yield what a book is told in which only one entry is wrong."""
    for name, meaning in (
        ("failures", "the number of failures: only those that stop something count"),
        ("seconds", "the seconds until the work is done"),
        ("lost", "the seconds of work that were done twice"),
    ):
        yield Mistake(
            functools.partial(_differs_in, name, right), f"only {name!r} is wrong: {meaning}"
        )


def _differs_in(name: str, right: dict[str, float], book: dict[str, float]) -> bool:
    """Return whether a book differs from the right one in this entry alone."""
    return [key for key in right if not same(book[key], right[key])] == [name]


# -- 13.6: with those that live ---------------------------------------------------------------


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
    yield facts({
        f"{where}: job.tensors() are near those of the furthest rank, and not the same bits: hand "
        "them over as they are, one of them is float64":
            result["tensors"] != states_by_step[most],
        f"{where}: job.tensors() has other tensors now: fill those that are there, broadcast does":
            not result["same objects"],
        f"{where}: job.go_to(step) was called with {result['asked']}, expected {most} on every "
        "rank: sampler and learning rate have to be at that step": result["asked"][-1:] != [most],
    })  # fmt: skip
    yield communication(result["calls"], some(members))


def _tensors(seed: int, step: int) -> list[list[float]]:
    """Return weights and momentum of all survivors that are at a step."""
    return [tensor.tolist() for tensor in Survivor(seed, step).tensors()]


def _wrong_states(
    steps: list[int], states_by_step: dict[int, list], place: int
) -> Iterator[Mistake]:
    """Yield which states mistakes lead to, at a place of the group."""
    own, right = states_by_step[steps[place]], states_by_step[max(steps)]
    half = len(right) // 2
    columns = zip(*(states_by_step[step] for step in steps), strict=True)
    means = [
        [sum(numbers) / len(steps) for numbers in zip(*tensors, strict=True)] for tensors in columns
    ]
    yield from table({
        "this rank's own tensors, unchanged": own if steps[place] > min(steps) else None,
        "this is the state of the smallest step: it is consistent, but throws away an update that "
        "some ranks have": states_by_step[min(steps)],
        "the weights are right, the momentum is this rank's own: all of job.tensors()":
            right[:half] + own[half:],
        "these are means over the ranks: states of two steps do not mix": means,
        "the state of the group's first rank, which is not the one that is furthest":
            states_by_step[steps[0]],
    })  # fmt: skip


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
    yield from table({
        "this rank's own gradient, unchanged": gradients[place],
        "the sum of samples · gradient, not divided by the number of all samples": weighted,
        "each rank counts the same, though they have different numbers of samples":
            sum(gradients) / p,
        "the sum of the gradients: weight each by its samples, and divide": sum(gradients),
        "divided by 4 ranks, of which some are not there any more": sum(gradients) / 4,
        "divided by 4 at the end: the number of ranks that there once were": weighted / 4,
        "divided by 64, or by another number of samples from before": weighted / 64,
        "divided by the number of ranks after weighting: divide by the samples of all":
            weighted / p,
        "divided by this rank's own number of samples": weighted / shares[place],
        "divided by the ranks as well": weighted / sum(shares) / p if p > 1 else None,
    })  # fmt: skip
