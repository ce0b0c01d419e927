"""What the kernel knows of one rank: its calls, and what it waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torch_mpi.record import CAPACITY, Call, Log
from utils.cluster.world.carrier import Waited
from utils.cluster.world.group import Group
from utils.cluster.world.work import Work

from .frames import Frames


@dataclass
class Pending:
    """A communication of a rank that is not over, or of whose end the rank has not heard."""

    number: int
    outputs: Sequence[torch.Tensor]


@dataclass
class Wait:
    """A rank's wait for a communication.

    Attributes:
        limit: seconds after which the wait has lasted too long.
        thread: number of the thread that waits: 0 for the main thread, ``None`` for C++.
        others: numbers of the rank's other threads, which may still communicate.
    """

    work: Work
    since: float
    limit: float
    thread: int | None
    others: frozenset[int]


class RankState:
    """What the kernel knows of one rank.

    Attributes:
        groups: its groups, by number.
        log: its calls.
        calls: its latest calls, by their numbers.
        latest: the number of its latest call.
        before: the number of its latest call when it ended its last request.
        refused: the numbers of calls in the background that failed at once, since its last request.
        forgotten: the number of the latest call that is not among them any more.
        has_raised: whether it has reported or received an error since its latest request.
        works: its communications of which it has not heard yet, by number.
        waits: its waits, by the number of the communication.
        left: the wait in which it was interrupted.
        meeting: what its thread here waits for in its name.
    """

    def __init__(self, frames: Frames):
        self.frames = frames
        self.groups: dict[int, Group] = {}
        self.log: Log = Log()  # type: ignore[no-untyped-call]
        self.calls: dict[int, Call] = {}
        self.latest = self.before = self.forgotten = 0
        self.works: dict[int, Work] = {}
        self.refused: set[int] = set()
        self.waits: dict[int, Wait] = {}
        self.left: Wait | None = None
        self.meeting: Waited | None = None
        self.is_busy = False
        self.is_gone = False
        self.was_interrupted = False
        self.has_raised = False

    def note(self, number: int, call: Call) -> None:
        """Keep a call under its number, and forget the oldest one if there are too many."""
        self.calls[number] = call
        if len(self.calls) > CAPACITY:
            self.forgotten = next(iter(self.calls))
            del self.calls[self.forgotten]
