"""Decides what an entry reached and used, from what its ranks left behind, not from its claims."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from utils import data, models
from utils.checks.verdict import STILL_OPEN, Problem, Verdict
from utils.forecast.machines import Machine
from utils.jobs import mpi_job

from . import other_machine
from .device import recorded
from .replay import Clock, lost, replay, traffic
from .rules import RANKS, SIZES, TEST, Rules, is_slow

TITLE = "your entry"


#: A model has 203,560 bytes. If fewer than these cross between the nodes in a whole run, the nodes
#: hardly train together, or they exchange data in a way that the harness doesn't see.
FEW = 10_000
ODD = ", with hardly a byte between the nodes: how do they agree?"


@dataclass(frozen=True)
class Entry:
    """A line of the scoreboard.

    Attributes:
        name, scheme: as the team gave them.
        accuracy: share of the test images that the last weights classify correctly; None without
            weights.
        seconds: of the played machine, until weights reached the target; None if none did.
        slow_bytes, slow_messages: traffic between the nodes, in both directions.
        messages: the number of all messages.
        lost: images whose gradients were lost with the rank that died; None without weights.
        victim: the rank that died.
        exceeded: what the entry missed (accuracy, seconds, bytes, failure); empty within budget.
        problem: why the entry can't be judged; usually empty.
        is_open: whether a rank met the stub, which raises NotImplementedError.
        curve: (seconds, accuracy) of all submitted weights.
        elsewhere: name of the second machine; "" without a second score. Its seconds and its curve
            are in `elsewhere_seconds` and `elsewhere_curve`.
        played_on: returns these three fields for a machine; None if there are no events to play.
    """

    name: str
    scheme: str = ""
    accuracy: float | None = None
    seconds: float | None = None
    slow_bytes: int = 0
    slow_messages: int = 0
    messages: int = 0
    lost: int | None = None
    victim: int | None = None
    exceeded: tuple[str, ...] = ()
    problem: str = ""
    is_open: bool = False
    curve: tuple[tuple[float, float], ...] = ()
    elsewhere: str = ""
    elsewhere_seconds: float | None = None
    elsewhere_curve: tuple[tuple[float, float], ...] = ()
    played_on: Callable[[Machine], dict] | None = field(default=None, repr=False, compare=False)

    def on(self, machine: Machine) -> Entry:
        """Return this entry with a second score: its recorded events, played on another machine.

        An entry that can't be judged, or that comes from a file, stays as it is.
        """
        return replace(self, **self.played_on(machine)) if self.played_on else self

    @property
    def within(self) -> bool:
        """Return whether the entry reached the target within the budget."""
        return not (self.exceeded or self.problem)

    @property
    def verdict(self) -> str:
        """Return the text of the scoreboard's last column."""
        if self.problem:
            return self.problem
        if not self.within:
            return "missed: " + ", ".join(self.exceeded)
        return f"within budget{ODD if self.slow_bytes < FEW else ''}"

    def as_verdict(self) -> Verdict:
        """Return the entry as a check's verdict on task 14.1."""
        if self.is_open:
            return Verdict("14.1", TITLE, passed=False, open=STILL_OPEN)
        texts = [self.problem] if self.problem else [f"missed: {text}" for text in self.exceeded]
        problems = tuple(Problem(text) for text in texts)
        return Verdict("14.1", TITLE, passed=self.within, problems=problems)

    def __str__(self) -> str:
        from tabulate import tabulate

        second = bool(self.elsewhere)
        look = {"tablefmt": "simple", "disable_numparse": True}
        return tabulate([self.cells(second)], headers=heads(second), **look)

    def cells(self, second: bool = False) -> list[str]:
        """Return the texts of the entry's line on the scoreboard, below `heads`."""
        there = "–" if self.elsewhere_seconds is None else f"{self.elsewhere_seconds:.2f}"
        return [
            self.name,
            self.scheme,
            "–" if self.accuracy is None else f"{100 * self.accuracy:.1f} %",
            "–" if self.seconds is None else f"{self.seconds:.1f}",
            *([f"{self.elsewhere} {there}".strip()] if second else []),
            f"{self.slow_bytes / 1e6:.1f}",
            f"{self.slow_messages:,} of {self.messages:,}",
            "–" if self.lost is None else f"{self.lost:,}",
            self.verdict,
        ]


def heads(second: bool = False) -> list[str]:
    """Return the names of the columns, with the second score or without it."""
    names = ["name", "scheme", "accuracy", "s to target", *(["s elsewhere"] if second else [])]
    return [*names, "MB between nodes", "messages, slow", "images lost", "verdict"]


def judged(
    place: Path, ended: mpi_job.Ended, *, name: str, scheme: str, plan: dict, rules: Rules
) -> Entry:
    """Return the entry of a job that left its traces and weights in a folder."""
    reports = _reports(place)
    traces = {rank: report["events"] for rank, report in reports.items()}
    entry = Entry(name, scheme, victim=plan["victim"], **_communication(traces))
    if problem := _what_went_wrong(reports, ended) or _another_record(traces, place):
        is_open = any(report["how"] == "open" for report in reports.values())
        return replace(entry, problem=problem, is_open=is_open)
    clock = replay(traces, rules)
    try:
        accuracies = {file: accuracy(place / file) for _, _, file in clock.shown}
    except ValueError as error:
        return replace(entry, problem=str(error))
    curve = tuple((seconds, accuracies[file]) for seconds, _, file in clock.shown)
    if not curve:
        return replace(entry, problem="The entry submitted no weights. Call job.show(model)")
    if problem := _unexplained(curve, clock):
        return replace(entry, problem=problem, curve=curve)
    entry = replace(
        entry,
        accuracy=curve[-1][1],
        seconds=next((seconds for seconds, right in curve if right >= rules.target), None),
        lost=lost(traces),
        curve=curve,
        played_on=partial(other_machine.score, traces, rules, accuracies),
    )
    return replace(entry, exceeded=_exceeded(entry, clock, rules))


def _reports(place: Path) -> dict[int, dict]:
    """Return the reports that ranks left in a folder; some ranks may have left none."""
    paths = {rank: place / f"rank-{rank}.json" for rank in range(RANKS)}
    texts = {r: path.read_text(encoding="utf-8") for r, path in paths.items() if path.exists()}
    return {rank: json.loads(text) for rank, text in texts.items()}


def _communication(traces: dict[int, list]) -> dict[str, int]:
    counts = traffic(traces)
    between_nodes = [count for pair, count in counts.items() if is_slow(*pair)]
    return {
        "slow_bytes": sum(nbytes for _, nbytes in between_nodes),
        "slow_messages": sum(messages for messages, _ in between_nodes),
        "messages": sum(messages for messages, _ in counts.values()),
    }


def _what_went_wrong(reports: dict[int, dict], ended: mpi_job.Ended) -> str:
    """Return in one line why a job can't be judged; empty if it can."""
    if ended.status == mpi_job.LATE:
        return f"The entry was not done after {ended.seconds:.0f} s of this machine"
    raised = {
        rank: report["words"]
        for rank, report in reports.items()
        if report["how"] in ("raised", "open")
    }
    if raised:
        rank = min(raised)
        words = raised[rank] if len(raised[rank]) < 200 else raised[rank][:199] + "…"
        return f"Rank {rank} raised an error in {words}" if words.startswith("line") else words
    if missing := [rank for rank in range(RANKS) if rank not in reports]:
        last = (ended.err.strip().splitlines() or ["it printed nothing"])[-1]
        return f"Rank {missing[0]} ended early: {last[:200]}"
    return ""


def _another_record(traces: dict[int, list], place: Path) -> str:
    """Return which rank's record isn't that of its device, which counts by itself; usually ""."""
    for rank, events in traces.items():
        path = place / f"device-{rank}.txt"
        computed = recorded(path) if path.exists() else []
        told = [(count, weights) for kind, count, weights in filter(_is_work, events)]
        if told != computed:
            return (
                f"Rank {rank} recorded gradients of {_images(told):,} images, and its device "
                f"recorded {_images(computed):,}. Don't change what the harness records"
            )
    return ""


def _is_work(event: list) -> bool:
    return event[0] == "work"


def _images(gradients: list[tuple[int, str]]) -> int:
    return sum(count for count, _ in gradients)


#: Accuracy, and how many images an entry needs at least. It is half of the fewest images with which
#: SGD, momentum and Adam reached it, with small batches and averaged weights, from the same start.
LEAST_IMAGES = (
    *((0.45, 25), (0.6, 75), (0.7, 200), (0.76, 500)),
    *((0.8, 1000), (0.82, 2500), (0.83, 3500)),
)


def _unexplained(curve: Iterable[tuple[float, float]], clock: Clock) -> str:
    """Return which weights are better than their few images can explain; "" if none are."""
    for seconds, right in curve:
        images = clock.images_until(seconds)
        least = max((least for share, least in LEAST_IMAGES if right >= share), default=0)
        if images < least:
            return (
                f"The weights reached {100 * right:.1f} % when all ranks together had computed "
                f"gradients of {images:,} images. The harness knows no training that gets there "
                f"with fewer than {least:,}, so these weights seem to come from another training"
            )
    return ""


def _exceeded(entry: Entry, clock: Clock, rules: Rules) -> tuple[str, ...]:
    seconds = entry.seconds or 0
    missed = {
        f"failure (the entry ended after {max(clock.end.values()):.1f} s, before the rank died)": (
            clock.died is None
        ),
        f"accuracy {100 * entry.accuracy:.1f} < {100 * rules.target:g} %": (
            entry.accuracy < rules.target
        ),
        f"seconds {seconds:.1f} > {rules.seconds:g}": seconds > rules.seconds,
        f"bytes {entry.slow_bytes / 1e6:.1f} > {rules.slow_bytes / 1e6:g} MB": (
            entry.slow_bytes > rules.slow_bytes
        ),
    }
    return tuple(text for text, is_missed in missed.items() if is_missed)


# --- accuracy ----------------------------------------------------------------------------------


def accuracy(path: Path) -> float:
    """Return the share of the test images that these weights classify correctly.

    Raises:
        ValueError: the file doesn't contain the model's weights; the message says what it contains.
    """
    try:
        weights = torch.load(path, weights_only=True)
    except Exception as error:
        raise ValueError(f"The submitted file contains no weights ({error})") from error
    model = models.mlp(seed=0, sizes=SIZES)
    _require_fit(weights, model.state_dict())
    model.load_state_dict(weights)
    images, labels = _test_images()
    with torch.no_grad():
        return (model(images).argmax(1) == labels).float().mean().item()


def _require_fit(weights: object, wanted: dict[str, Tensor]) -> None:
    if not isinstance(weights, dict) or weights.keys() != wanted.keys():
        names = ", ".join(map(str, weights))[:80] if isinstance(weights, dict) else type(weights)
        raise ValueError(
            f"The entry submitted {names or 'nothing'} instead of the weights {', '.join(wanted)}"
        )
    for name, tensor in wanted.items():
        if weights[name].shape != tensor.shape:
            shapes = f"{list(weights[name].shape)}, expected {list(tensor.shape)}"
            raise ValueError(f"The entry submitted weights {name} of shape {shapes}")
        if not torch.isfinite(weights[name].float()).all():
            raise ValueError(f"The weights {name} contain inf or nan: the training diverged")


_kept: list[tuple[Tensor, Tensor]] = []


def _test_images() -> tuple[Tensor, Tensor]:
    """Return the first TEST test images, normalized, and their labels, which are read only once."""
    if not _kept:
        images = data.fashion_mnist(train=False, transform=None)
        shift, scale = -data.MEAN / data.STD, 1 / (255 * data.STD)
        pixels = (shift + scale * images.data[:TEST].float()).unsqueeze(1)
        _kept.append((pixels, images.targets[:TEST].to(torch.int64)))
    return _kept[0]
