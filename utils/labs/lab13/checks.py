"""Checks of lab 13: reports of deaths, checkpoints, resharding, intervals, going on with fewer.

Nothing dies here. A save is judged by what is on the disk after each of its operations
(:mod:`utils.labs.lab13.crashes`), a resumed training by the twin that was never stopped, and what
survivors do by groups of 4, 3, 2 and 1 ranks.
"""

from __future__ import annotations

import copy
import io
import math
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from utils.checks.calls import TOGETHER, inside, only, rules_of, some, waited
from utils.checks.functions import Case, judge_calls, probe_calls
from utils.checks.groups import WORLD, Group, Partition, in_group, keywords, on, places, tried
from utils.checks.mistakes import Mistake, same, table
from utils.checks.model import use_model as use_model
from utils.checks.probe import answer_named, as_dict, kept, reading_answer, recorded
from utils.checks.task import Report, task, to_each
from utils.cluster.contracts import Ranks

from .crashes import KINDS, Watched, states, written_by_python
from .resumable_training import Job, Survivor, bytes_in, through_a_file

PARTITIONS = ([[0, 1, 2], [3]], [[1, 3], [0, 2]], None)

# -- 13.1: who died ---------------------------------------------------------------------------

_SIGNALS = {6: "Aborted", 9: "Killed", 11: "Segmentation fault", 15: "Terminated"}
_LINE = "-" * 74
_WAITS = "  rank {} waits in all_reduce(SUM) at train.py:{}"


def _survivors_say(dead: int, pid: int, waiting: list[int], line: int) -> str:
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
    said = "".join(word + end for word, end in zip(words, [*ends, ""], strict=True))
    return f"{_LINE}\n{said}\n{_LINE}"


def _logs(seed: int) -> list[tuple[str, dict | None]]:
    """Texts of jobs, and what is in them."""
    draw = random.Random(seed)
    found: list[tuple[str, dict | None]] = []
    for signal, breaks in ((9, 1.0), (11, 0.0), (15, 0.3)):
        # The first rank has two digits: its first one alone is another rank.
        rank, pid = draw.randrange(2 if found else 10, 30), draw.randrange(10_000, 99_999)
        others = [r for r in range(30) if r not in (rank, rank // 10)]
        waiting = sorted(draw.sample(others, 3))
        said = _survivors_say(rank, pid, waiting, draw.randrange(10, 90))
        said = f"step 9: loss 1.{pid}\n{said}\n{_launcher_says(rank, pid, signal, draw, breaks)}\n"
        found.append((said, {"rank": rank, "signal": signal}))
        if signal == 11:  # nobody was waiting
            alone = f"step 3: loss 2.{pid}\n{_launcher_says(rank, pid, 6, draw, breaks)}\n"
            found.append((alone, {"rank": rank, "signal": 6}))
    # Rank 0 dies. Later another one does, in the next life of the same job.
    later = _launcher_says(draw.randrange(2, 30), 23_456, 15, draw, 0.3)
    zero = f"{_launcher_says(0, 12_345, 6, draw, 0.3)}\nlife 1: all go on from step 4\n"
    found.append((f"{zero}{later}\n", {"rank": 0, "signal": 6}))
    rank, pid = draw.randrange(2, 30), draw.randrange(10_000, 99_999)
    found.append((_survivors_say(rank, pid, [0, 1], 40), {"rank": rank, "signal": None}))
    found.append((_survivors_say(0, pid, [rank], 40), {"rank": 0, "signal": None}))
    ended = f"{_survivors_say(rank, pid, [0], 40)}\n   Exit code:    1\n"
    found.append((ended, {"rank": rank, "signal": None}))
    # The launcher knows which rank it was; those who wait for another dead one don't.
    both = f"{_survivors_say(31, pid, [0], 40)}\n{_launcher_says(rank, pid, 9, draw, 0.3)}\n"
    found.append((both, {"rank": rank, "signal": 9}))
    found.append((f"step {draw.randrange(9)}: loss 0.31\nall ranks are done\n", None))
    failed = f"{_LINE}\n   Process name: [prterun-vm-{pid}@1,{rank}]\n   Exit code:    3\n{_LINE}\n"
    found.append((failed, None))
    longest = max(len(log) for log, _ in found)
    return [(log.ljust(longest, "\n"), right) for log, right in found]


@task("13.1", "who died, and of what", points=2)
def first_death(ranks: Ranks, report: Report) -> None:
    """Rank and signal from what a job has printed."""
    cases = []
    for log, right in _logs(report.seed):
        wrong = [Mistake(lambda v: isinstance(v, list | str | int) and not isinstance(v, bool),
                         'return a dict, {"rank": 2, "signal": 9}, or None')]  # fmt: skip
        if right:
            rank, signal = right["rank"], right["signal"]
            texts = {"rank": str(rank), "signal": None if signal is None else str(signal)}
            wrong.append(Mistake(texts, "these are texts: numbers are asked for, int(…)"))
            wrong += [
                Mistake(
                    lambda v, rank=rank: isinstance(v, dict)
                    and isinstance(v.get("rank"), int)
                    and str(rank).startswith(str(v["rank"]))
                    and v["rank"] != rank,
                    "only the first digit of the rank: jobs have more than ten of them",
                ),
                Mistake(
                    lambda v, rank=rank: isinstance(v, dict)
                    and rank == 0
                    and v.get("rank") not in (rank, None),
                    "rank 0 died first: it is a rank like the others, and what comes later in the "
                    "log is another death",
                ),
                Mistake(
                    lambda v, rank=rank: isinstance(v, dict) and v.get("rank") not in (rank, None),
                    "this rank is not the one that died: it waits, or the number is that of a "
                    "process or step. Look for 'process rank …', else for 'rank … died'",
                ),
                Mistake(
                    lambda v, signal=signal: isinstance(v, dict)
                    and signal is not None
                    and v.get("signal") is None,
                    "the launcher told the signal: 'process rank … with PID … on node … exited on "
                    "signal …'. A line may break between two words, and every job has another PID "
                    "and node",
                ),
                Mistake(
                    lambda v, signal=signal: isinstance(v, dict)
                    and signal is None
                    and v.get("signal") is not None,
                    "the survivors can't know the signal, so it is None; an exit code is none",
                ),
                Mistake(
                    lambda v, signal=signal: isinstance(v, dict) and v.get("signal") != signal,
                    "another signal: it stands behind 'exited on', in the launcher's words only",
                ),
                Mistake(
                    lambda v: v is None,
                    "a rank died, and None came back"
                    + ("" if signal else ": the launcher is silent, but the survivors say "
                                         "'rank … died'; the signal is None then"),
                ),
            ]  # fmt: skip
        else:
            wrong.append(Mistake(lambda v: isinstance(v, dict),
                                 "nobody was killed by a signal here: return None"))  # fmt: skip
        cases.append(Case("first_death", [log], right, wrong))
    judge_calls(ranks, report, cases)


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
    draws, before = seed + 1 + rank, torch.get_rng_state()
    try:
        twin = Job(seed, draws)
        expected = [twin.train_step() for _ in range(BEFORE + AFTER)]
        job = Job(seed, draws)
        losses = [job.train_step() for _ in range(BEFORE)]
        parts = job.parts()
        state = capture(job)
        if not isinstance(state, dict):
            lists = "lacking", "changed", "elsewhere", "resumed", "expected"
            nothing = {name: [] for name in lists}
            return {
                "is state": False,
                "small": False,
                "unchanged": True,
                "aliased": False,
            } | nothing
        unchanged, small = job.parts() == parts, bytes_in(state) < job.nbytes()
        at_once = copy.deepcopy(state)
        losses += [job.train_step() for _ in range(AFTER)]
        loaded, fresh = through_a_file(state), Job(seed, 99)
        restore(fresh, loaded)
        lacking = [name for name, value in fresh.parts().items() if value != parts[name]]
        aliased = False
        if lacking:  # was it right when it was taken?
            other = Job(seed, 99)
            restore(other, through_a_file(at_once))
            late = [name for name, value in other.parts().items() if value != parts[name]]
            aliased = len(late) < len(lacking)
        resumed = [fresh.train_step() for _ in range(AFTER)]
        restore(second := Job(seed, 99), loaded)
        changed = [] if lacking else [n for n, v in second.parts().items() if v != parts[n]]
        fresh.train_step()
        kept("capture", state, lambda: capture(fresh))  # before the first state is used again
        restore(third := Job(seed, 99), loaded)
        elsewhere = [n for n, v in third.parts().items() if v != parts[n]]
    finally:
        torch.set_rng_state(before)
    return {
        "is state": True,
        "small": small,
        "unchanged": unchanged and losses == expected,
        "lacking": lacking,
        "aliased": aliased,
        "changed": changed,
        "elsewhere": [] if lacking or changed else elsewhere,
        "resumed": resumed,
        "expected": expected[BEFORE:],
    }


@task("13.2", "everything that a training is", points=4)
def resume(ranks: Ranks, report: Report) -> None:
    """The losses of the resumed training are those of the one that went on, bit for bit."""
    for answer in report.answers(ranks, probe_resume, seed=report.seed):
        value, rank = answer.value, answer.rank
        report.facts(rank, {
            "capture returned no dict: return the state, a dict": not value["is state"],
            "capture changes the training: it draws random numbers, or sets something. It has to "
            "look only": not value["unchanged"],
            "the state is smaller than weights, momentum and random state are: all of them have to "
            "be in the dict, or a new process does not find them": value["small"],
            "the state has changed since it was captured: state_dict() holds the weights "
            "themselves, not copies of them, and the training went on. copy.deepcopy(…)":
                value["aliased"],
        })  # fmt: skip
        if report.of(rank):
            continue
        for name in value["lacking"]:
            report.problem(_FORGOTTEN[name], rank)
        if value["changed"]:
            report.problem(
                f"a second job restored from the same state has another {value['changed'][0]}: the "
                "training of the first has changed the state. An optimizer keeps the momentum "
                "tensors that load_state_dict gives it, so restore from copy.deepcopy(state)",
                rank,
            )
        if value["elsewhere"]:
            report.problem(
                f"after another job was captured, the first state gives a job with another "
                f"{value['elsewhere'][0]}: capture keeps something outside of the state, in a "
                "global name or an attribute. All of it has to be in the dict",
                rank,
            )
        if not value["lacking"] and value["resumed"] != value["expected"]:
            report.judge(rank, value["resumed"], value["expected"], tolerance=0,
                         what="the losses after resuming")  # fmt: skip


# -- 13.3: a save that may end at any moment --------------------------------------------------

OLD, NEW = 10, 20
REMAINS = b"half of a file"  # of a save that crashed


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _state(step: int, place: int) -> dict:
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


def _what(path: str, content: bytes) -> str:
    """Of a file: its text, or which state it holds."""
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

    def what(path: str, content: bytes) -> str:
        if (path, content) not in known:
            known[path, content] = _what(path, content)
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
            "calls": m.calls,
            "sure": m.sure,
            "left": [{path: what(path, c) for path, c in tree.items()} for tree in m.left],
        }
        for m in watched.moments
    ]
    made = [as_dict(call) for call in log.since(mark)]
    return {"moments": moments, "files": sorted(files), "calls": made}


def _left(values: list[dict], chosen: list[int], kind: str) -> dict[str, str]:
    """What is on the disk of all ranks: of a file what the rank has that changes it."""
    trees = [
        v["moments"][k]["left"][KINDS.index(kind)] for v, k in zip(values, chosen, strict=True)
    ]
    first = values[0]["moments"][0]["left"][0]
    found: dict[str, str] = {}
    for path in {path for tree in trees for path in tree} | set(first):
        there = [tree.get(path) for tree in trees]
        changed = [one for one in there if one != first.get(path)]
        # Who removes a file of another rank's has a copy of its own: there, it is written.
        changed.sort(key=lambda one: one is None)
        one = changed[0] if changed else first.get(path)
        if one is not None:
            found[path] = one
    return found


def _wrong_with(left: dict[str, str], p: int, kind: str, done: bool) -> str | None:
    """What somebody who loads this would meet."""
    of = "a power failure" if kind != "kill" else "a kill"
    marker = left.get("latest")
    if not marker:
        why = ("without file.flush() and os.fsync before the renaming, the name may be there "
               "and its content not"
               if kind != "kill" else "open(…, 'w') empties it at once, the text comes later: "
               "write to another file, then os.replace")  # fmt: skip
        return f"{of} may leave `latest` empty or missing: {why}"
    if marker not in (_name(OLD), _name(NEW)):
        return (
            f"{of} may leave {marker!r} in `latest`; expected {_name(NEW)!r}, the folder's name, "
            "whole: write it to another file, then os.replace"
        )
    step = OLD if marker == _name(OLD) else NEW
    for place in range(p):
        path = f"{marker}/rank-{place}.pt"
        content = left.get(path, "missing")
        if content == f"{step} of {place}":
            continue
        if step == OLD:
            return (
                f"{of} in the middle leaves `latest` at {marker}, whose rank-{place}.pt is "
                f"{content}: the only whole checkpoint was overwritten. Write into a new folder"
            )
        if " of " in content:
            return f"{path} holds the state of step {content}: each rank writes its own"
        why = ("the data of all ranks first: every rank writes, a barrier, then the marker"
               if kind == "kill" else "its content, or its name, is not on the disk yet: "
               "flush_folder of the parent after mkdir, file.flush() and os.fsync before the "
               "file is renamed, flush_folder of its folder after, and all that before the "
               "marker")  # fmt: skip
        return f"{of} may leave `latest` at {marker}, whose rank-{place}.pt is {content}: {why}"
    if done and step == OLD:
        return (
            "save has returned on all ranks, and after a power failure `latest` is the old one: "
            "one rank writes it, then os.fsync, os.replace, and flush_folder(folder), so that the "
            "new name is on the disk"
        )
    return None


def _all_over(values: list[dict]) -> list[int]:
    return [len(value["moments"]) - 1 for value in values]


def _form(report: Report, members: list[int], values: list[dict]) -> bool:
    """Whether the right files are there at the end, and nobody writes those of another."""
    first = values[0]["moments"][0]["left"][0]
    for place, (rank, value) in enumerate(zip(members, values, strict=True)):
        path = f"{_name(NEW)}/rank-{place}.pt"
        last = value["moments"][-1]["left"][0]
        changed = {p for p, one in last.items() if first.get(p) != one}
        new = [p for p in changed if p.endswith(".pt") and p != path]
        markers = [
            r
            for r, v in zip(members, values, strict=True)
            if any(m["left"][0].get("latest") != _name(OLD) for m in v["moments"])
        ]
        overwritten = [p for p in new if p.startswith(_name(OLD))]
        wrong = {
            f"{overwritten[:1]} was overwritten: that is the checkpoint that a crash now would "
            "need. Write into the folder of the new step": overwritten,
            f"it wrote {new[:1]}; place {place} of the group writes {path}": new,
            f"there is no {path} at the end; there are {value['files'][:6]}":
                path not in value["files"],
            f"{path} is still what a crashed save left: each rank writes its own file":
                last.get(path) == first.get(path) is not None,
            f"{path} is {last.get(path)}: torch.load has to give the state back, all of it":
                last.get(path) != f"{NEW} of {place}",
            "nobody writes `latest`: the rank at place 0 of the group does, "
            "place_and_size(group), which need not be rank 0": not markers,
            f"ranks {markers} write `latest`: one rank does, place 0": len(markers) > 1,
        }  # fmt: skip
        wrong |= _meets_others(members, values, place)
        if not report.facts(rank, wrong):
            return False
    return True


def _meets_others(members: list[int], values: list[dict], place: int) -> dict[str, bool]:
    """What goes wrong in one folder for all ranks, though each has its own copy here."""
    first = values[0]["moments"][0]["left"][0]
    made = [{p for m in v["moments"] for p in m["left"][0]} - set(first) for v in values]
    others = [k for k in range(len(members)) if k != place]
    shared = sorted(p for k in others for p in made[place] & made[k])
    removed = []
    for k in others:
        path = f"{_name(NEW)}/rank-{k}.pt"
        wrote = (m for m in values[k]["moments"] if m["left"][0].get(path) != first.get(path))
        gone = (m for m in values[place]["moments"] if path not in m["left"][0])
        begins, ends = next(wrote, None), next(gone, None)
        if path in first and begins and ends and begins["sure"] <= ends["calls"]:
            removed.append(path)
    return {
        f"several ranks write {shared[:1]}, at the same time: in the lab all save into one folder. "
        "Each rank's temporary file needs a name of its own": bool(shared),
        f"it removes {removed[:1]}, which another rank may just have written: remove only what is "
        "this rank's own": bool(removed),
    }


@task("13.3", "a save that may crash", points=4)
def safe_save(ranks: Ranks, report: Report) -> None:
    """Whenever the ranks end, `latest` names a whole checkpoint."""
    cases = [{"partition": [[1, 2, 3], [0]]}, {"partition": None}]
    for _, members, values in tried(ranks, report, probe_save, cases):
        p = len(members)
        rules = (inside(members), waited)
        kept = [report.communication(r, v["calls"], *rules)
                for r, v in zip(members, values, strict=True)]  # fmt: skip
        if not all(kept) or not _form(report, members, values):
            continue
        seen = set()
        over = _all_over(values)
        ends = [(kind, 0, over) for kind in KINDS]
        moments = [value["moments"] for value in values]
        for kind, place, chosen in [*states(moments), *ends]:
            left = _left(values, chosen, kind)
            key = (kind == "kill", chosen == over, tuple(sorted(left.items())))
            if key in seen:
                continue
            seen.add(key)
            if said := _wrong_with(left, p, kind, done=chosen == over):
                report.problem(f"{on(members)}: {said}", members[place])
                break
        for rank, value in zip(members, values, strict=True):
            if not report.found:
                report.communication(rank, value["calls"], some(members))


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
    found = []
    for file in range(old):
        begin, end = shard(n, old, file, cut)
        a, b = max(first, begin), min(last, end)
        if a < b:
            found.append([file, a - begin, b - begin, a - first])
    return found


SPLITS = (
    *((12, 4, 2), (12, 3, 2), (12, 4, 1), (10, 4, 2), (10, 4, 3), (10, 2, 4)),
    *((3, 4, 2), (3, 4, 1), (3, 2, 4), (7, 3, 3)),
)


def _wrong_reads(n: int, old: int, new: int, rank: int) -> list[Mistake]:
    right = plan(n, old, new, rank)
    starts = {file: shard(n, old, file)[0] for file in range(old)}
    first = shard(n, new, rank)[0]
    empty = [[file, 0, 0, 0] for file in range(old)]
    return [
        Mistake(lambda v: not isinstance(v, list) or any(
            not isinstance(one, list) or len(one) != 4 for one in v),
            "return a list of reads (file, start, stop, at)"),
        Mistake(plan(n, old, new, rank, "down"),
                "n // p rounds down, and the last elements belong to nobody: -(-n // p) rounds up"),
        Mistake(plan(n, old, new, rank, "even"),
                "cut as tensor_split does, into sizes that differ by one at most. Here each shard "
                "has -(-n // p) elements, and the last ones have fewer, or none"),
        Mistake(lambda v: any(v == plan(n, old, new, r) for r in range(new) if r != rank) and v,
                "these are the reads of another rank: `rank` is an argument, not dist.get_rank()"),
        *table({
            "start and stop count in the whole tensor; they are places in that rank's file": [
                [f, a + starts[f], b + starts[f], at] for f, a, b, at in right],
            "`at` counts in the whole tensor; it is the place in the new rank's own shard": [
                [f, a, b, at + first] for f, a, b, at in right],
            "`at` is 0 in all reads: each would be written over the one before": [
                [f, a, b, 0] for f, a, b, _ in right],
            "the third number is a length: stop is one behind the last element": [
                [f, a, b - a, at] for f, a, b, at in right],
            "one element too few of each: stop is one behind the last element": [
                [f, a, b - 1, at] for f, a, b, at in right],
            "whole files are read: only what overlaps with the own shard": [
                [f, 0, shard(n, old, f)[1] - starts[f], at] for f, _, _, at in right],
        }),
        Mistake(lambda v: any(
            one[0] in starts and one[2] > shard(n, old, one[0])[1] - starts[one[0]] for one in v),
            "a read goes beyond the end of its file: the last shard ends at n, so "
            "min(n, (r + 1) * each)"),
        Mistake(lambda v: [one for one in v if one[1] < one[2]] == right != v,
                "there are reads of nothing: leave them out"),
        Mistake(lambda v: {one[0] for one in v} == set(range(old)) and len(right) < old,
                "every file is read: only what overlaps with the own shard"),
        Mistake(lambda v: len(v) < len(right),
                "something is missing: a shard may lie in several files, and -(-n // p) rounds up"),
        Mistake(lambda v: v == empty, "reads of nothing"),
    ]  # fmt: skip


@task("13.4", "from four ranks to two", points=3)
def reshard(ranks: Ranks, report: Report) -> None:
    """Which part of which file a rank of the new job reads."""
    draw = random.Random(report.seed)
    others = [(draw.randrange(8, 60), draw.randrange(2, 7), draw.randrange(1, 7)) for _ in range(3)]
    others.append((draw.randrange(100, 400), draw.randrange(20, 40), draw.randrange(2, 5)))
    many = draw.randrange(150, 250)
    others.append((2 * many + 1, many, 2))  # one element more than fits: rounded up all the same
    cases = [
        Case("reads", [n, old, new, rank], plan(n, old, new, rank),
             _wrong_reads(n, old, new, rank), "a list of reads (file, start, stop, at)")
        for n, old, new in (*SPLITS, *others) for rank in range(new)
    ]  # fmt: skip
    calls = [[case.name, case.arguments] for case in cases]
    for answer in report.answers(ranks, probe_calls, calls=calls):
        for case, got in zip(cases, answer.value, strict=True):
            lists = isinstance(got, list) and all(isinstance(one, list) for one in got)
            what = f"reads({', '.join(map(str, case.arguments))})"
            given = sorted(got) if lists else got
            if not report.judge(answer.rank, given, case.right, case.mistakes, what=what,
                                form=case.form):  # fmt: skip
                break


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
    cases = [Case("with_failures", [100.0, 10.0, 1.0, 5.0, []],
                  replay(100.0, 10.0, 1.0, 5.0, []), _wrong_books(100.0, 10.0, 1.0, 5.0, []),
                  "a dict")]  # fmt: skip
    # A failure comes at the very end of the job: it is over.
    tie = [10.0, 10.0, 1.0, 5.0, [10.0]]
    cases.append(Case("with_failures", tie, replay(*tie), _wrong_books(*tie), "a dict"))
    # At the end of a save, and at that of a restart.
    on = [100.0, 10.0, 1.0, 5.0, [11.0, 16.0]]
    cases.append(Case("with_failures", on, replay(*on), _wrong_books(*on), "a dict"))
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
        times = sorted([first, first + restart / 2, *later])
        given = [work, every, save, restart, times]
        cases.append(Case("with_failures", given, replay(*given), _wrong_books(*given), "a dict"))
    for seconds in (1, 1, 1e-4):
        save, mtbf = seconds * draw.uniform(1, 60), seconds * draw.uniform(600, 90_000)
        wrong = table({
            "the 2 is missing": math.sqrt(save * mtbf),
            "the square root is missing": 2 * save * mtbf,
            "this is save / mtbf: the interval grows with both": math.sqrt(2 * save / mtbf),
            "the 2 belongs below the root": 2 * math.sqrt(save * mtbf),
            "upside down": math.sqrt(mtbf / (2 * save)),
            "half of the root": math.sqrt(save * mtbf / 2),
        })  # fmt: skip
        cases.append(Case("young", [save, mtbf], math.sqrt(2 * save * mtbf), wrong, "seconds"))
    judge_calls(ranks, report, cases)
    if any(kind == "silent" for _, kind, _ in report.found):
        report.problem("does the loop end? After a failure the time goes on, so that the same "
                       "failure does not come again")  # fmt: skip


def _values(book: dict) -> list[float]:
    return [book[key] for key in sorted(book)]


def _wrong_books(*given) -> list[Mistake]:
    right = replay(*given)
    found = [
        Mistake(lambda v: not isinstance(v, dict) or set(v) != {"seconds", "lost", "failures"},
                'return {"seconds": …, "lost": …, "failures": …}')
    ]  # fmt: skip
    if given[0] < given[1] * 5:
        return [*found, *_books(given, right, without="from the start")]
    return [*found, *_books(given, right)]


def _books(given, right: dict, without: str = "") -> Iterator[Mistake]:
    for wrong, said in _BOOKS.items():
        if wrong == without:
            continue  # may go on for very long
        gives = replay(*given, wrong=wrong)
        if not same(_values(gives), _values(right)):
            yield Mistake(lambda v, gives=gives: same(_values(v), _values(gives)), said)
    for key, said in (
        ("failures", "the number of failures: only those that stop something count"),
        ("seconds", "the seconds until the work is done"),
        ("lost", "the seconds of work that were done twice"),
    ):
        yield Mistake(
            lambda v, key=key: (
                not same(v[key], right[key])
                and all(same(v[k], right[k]) for k in right if k != key)
            ),
            f"only {key!r} is wrong: {said}",
        )


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
    return torch.cat([p.grad.flatten() for p in model.parameters()]).tolist()


@task("13.6", "go on with fewer", points=4)
def survive(ranks: Ranks, report: Report) -> None:
    """One state for all survivors; gradients weighted by samples, over those who are there."""
    cases = [_agree_case(report, partition) for partition in PARTITIONS]
    cases.append(_agree_case(report, None, ahead=True))
    for case, members, values in tried(ranks, report, probe_agree, cases):
        _judge_agreed(report, members, values, [case["each"][rank] for rank in members])
    if report.found:
        return
    draw = random.Random(report.seeds(1)[0])
    shares = [draw.randrange(5, 40) for _ in range(WORLD)]
    each = to_each(seed=report.seeds(WORLD), samples=shares)
    cases = [{"partition": partition, "each": each} for partition in PARTITIONS]
    for _, members, values in tried(ranks, report, probe_mean, cases):
        _judge_means(report, members, values, [each[rank] for rank in members])


def _agree_case(report: Report, partition: Partition, ahead: bool = False) -> dict:
    """The step of each survivor, and the seed of the state that all have who are there."""
    at, (of_steps,) = places(partition), report.seeds(1)
    steps = [_steps(of_steps, p, ahead)[place] for place, p in at]
    of_states = dict(zip(sorted(set(steps)), report.seeds(WORLD), strict=False))
    each = to_each(step=steps, seed=[of_states[step] for step in steps])
    return {"partition": partition, "each": each}


def _judge_agreed(report: Report, members: list[int], values: list[dict], given: list) -> None:
    p, steps = len(members), [one["step"] for one in given]
    seeds = {one["step"]: one["seed"] for one in given}
    most, least = max(steps), min(steps)
    where = on(members)

    def tensors(step: int) -> list:
        return [t.tolist() for t in Survivor(seeds[step], step).tensors()]

    right = tensors(most)
    for rank, value, own in zip(members, values, steps, strict=True):
        if not report.communication(rank, value["calls"], inside(members), waited):
            continue
        wrong = table({
            "this rank's own tensors, unchanged": tensors(own) if own > least else None,
            "this is the state of the smallest step: it is consistent, but throws away an update "
            "that some ranks have": tensors(least),
            "the weights are right, the momentum is this rank's own: all of job.tensors()": (
                right[: len(right) // 2] + tensors(own)[len(right) // 2 :]),
            "these are means over the ranks: states of two steps do not mix": [
                [sum(v) / p for v in zip(*column, strict=True)]
                for column in zip(*(tensors(s) for s in steps), strict=True)],
            "the state of the group's first rank, which is not the one that is furthest":
                tensors(steps[0]),
        })  # fmt: skip
        what = f"{where}: weights and momentum"
        if report.judge(rank, value["tensors"], right, wrong, what=what):
            said = {
                f"{where}: job.tensors() are near those of the furthest rank, and not the same "
                "bits: hand them over as they are, one of them is float64":
                    value["tensors"] != right,
                f"{where}: job.tensors() has other tensors now: fill those that are there, "
                "broadcast does": not value["same objects"],
                f"{where}: job.go_to(step) was called with {value['asked']}, expected {most} on "
                "every rank: sampler and learning rate have to be at that step":
                    value["asked"][-1:] != [most],
            }  # fmt: skip
            report.communication(rank, value["calls"], *rules_of(said), some(members))


def _judge_means(report: Report, members: list[int], values: list[dict], given: list) -> None:
    p, where, shares = len(members), on(members), [one["samples"] for one in given]
    own = [torch.tensor(_flat(_model(one["seed"]))) for one in given]
    weighted = sum(n * g for n, g in zip(shares, own, strict=True))
    right = weighted / sum(shares)
    for place, (rank, value) in enumerate(zip(members, values, strict=True)):
        rules = (only("all_reduce"), inside(members), waited)
        if not report.communication(rank, value["calls"] + value["calls again"], *rules):
            continue
        wrong = table({
            "this rank's own gradient, unchanged": own[place],
            "the sum of samples · gradient, not divided by the number of all samples": weighted,
            "each rank counts the same, though they have different numbers of samples":
                sum(own) / p,
            "the sum of the gradients: weight each by its samples, and divide": sum(own),
            "divided by 4 ranks, of which some are not there any more": sum(own) / 4,
            "divided by 4 at the end: the number of ranks that there once were": weighted / 4,
            "divided by 64, or by another number of samples from before": weighted / 64,
            "divided by the number of ranks after weighting: divide by the samples of all":
                weighted / p,
            "divided by this rank's own number of samples": weighted / shares[place],
            "divided by the ranks as well": right / p if p > 1 else None,
        })  # fmt: skip
        form = "nothing, and change the gradients in place"
        what = f"{where}, with {shares} samples: the gradient"
        how = {"form": form, "tolerance": 1e-4, "what": what}
        if report.judge(rank, value["gradient"], right.tolist(), wrong, **how):
            for calls in (value["calls"], value["calls again"]):
                report.communication(rank, calls, some(members))
