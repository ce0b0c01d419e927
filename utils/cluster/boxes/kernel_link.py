"""A rank's connection to the kernel, which carries its messages, and its view of all ranks."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

from torch_mpi import errors, settings
from torch_mpi.errors import CommunicationError, count_as_library, users_place
from torch_mpi.lines import text_of
from torch_mpi.protocol.interrupts import guard
from torch_mpi.protocol.status import Status
from utils.cluster import notebook_words

from . import values
from .frames import Frame, Frames, Piece
from .rank_group import BoxGroup, BoxWork

# A line of this file is never shown as the student's.
count_as_library(__file__)
_KINDS = {
    kind.__name__: kind
    for kind in (
        errors.CommunicationError,
        errors.CommunicationMismatch,
        errors.CommunicationStopped,
        errors.CommunicationTimeout,
    )
}


class Answer:
    """The kernel's answer to a question, to come."""

    def __init__(self) -> None:
        self.there = threading.Event()
        self.value: Any = None
        self.error = ""


class KernelLink:
    """What a rank sends to the kernel about its communication, and what the kernel answers.

    Args:
        frames: the connection.
        rank: this rank's number.
        n: number of ranks.

    Attributes:
        world: this rank's view of all ranks.
    """

    def __init__(self, frames: Frames, rank: int, n: int):
        self._frames = frames
        self.rank = rank
        self.n = n
        self.world = BoxWorld(self)
        self._works: dict[int, BoxWork] = {}
        self._answers: dict[int, Answer] = {}
        self._numbers = itertools.count(1)
        self._sent = 0
        self._beginning = threading.Lock()

    # -- from the rank's program ------------------------------------------------------------------

    def new_group(self, members: tuple[int, ...]) -> BoxGroup:
        """Make a group of these global ranks, to which this rank belongs."""
        group = BoxGroup(self, self.rank, members, self.ask("new_group", list(members)))
        self.world.groups.append(group)
        return group

    def begin(self, work: BoxWork, about: dict[str, Any], pieces: Sequence[Piece]) -> None:
        """Send a call to the kernel."""
        about |= _place()
        if work.call.blocking:
            about |= _about_wait()
        # The kernel must get the calls of several threads in the order of their numbers.
        with guard, self._beginning:
            work.number = work.call.number = next(self._numbers)
            if work.call.op == "send":
                self._sent += 1
                work.call.message = self.rank, self._sent
            self._works[work.number] = work
            self._frames.send("call", about | {"number": work.number}, pieces)

    def wait(self, work: BoxWork, limit: float) -> None:
        """Wait until a work is over.

        Args:
            work: the work.
            limit: seconds after which a receive is given up; 0 for none.
        """
        try:
            if not work.call.blocking:  # otherwise the call has said that the rank waits
                about: dict[str, Any] = {"number": work.number} | _about_wait()
                if limit:
                    about["thread"] = None  # a receive that gives up waits for nobody for good
                self._frames.send("wait", about)
            if limit and not work.ended.wait(limit):
                self._frames.send("drop", {"number": work.number, "limit": limit})
            work.ended.wait()
        except BaseException:  # an interrupt
            self._frames.send("leave", {"number": work.number})
            raise

    def wait_in_background(self, work: BoxWork) -> None:
        """Tell the kernel that something else than a thread of Python waits for a work."""
        self._frames.send(
            "wait", {"number": work.number, "limit": None, "thread": None, "others": []}
        )

    def ask(self, method: str, *arguments: Any) -> Any:
        """Ask the kernel, and wait for its answer.

        Raises:
            RuntimeError: the answer is an error.
            KeyboardInterrupt: this rank was interrupted.
        """
        number = next(self._numbers)
        answer = Answer()
        self._answers[number] = answer
        self._frames.send("ask", {"number": number, "method": method, "arguments": arguments})
        try:
            answer.there.wait()
        finally:
            self._answers.pop(number, None)
        if answer.error:
            raise RuntimeError(answer.error)
        return answer.value

    # -- from the thread that reads ---------------------------------------------------------------

    def interrupt_futures(self) -> None:
        """Let the rank go on if it waits inside C++, where it notices no signal."""
        for work in list(self._works.values()):
            work.interrupt_future()

    def take(self, frame: Frame) -> bool:
        """Take a frame that belongs to a call or a question; return False for others."""
        fields = frame.fields
        if frame.kind == "ended":
            self._end(frame).set()
        elif frame.kind == "answer":
            if answer := self._answers.get(fields["number"]):
                answer.value = fields.get("value")
                answer.error = fields.get("error", "")
                answer.there.set()
        else:
            return False
        return True

    def _end(self, frame: Frame) -> threading.Event:
        """Give a work its values or its error, and return the event that wakes the program."""
        fields = frame.fields
        written = map(values.tensor_of, fields["outputs"], frame.pieces)
        work = self._works.pop(fields["number"])
        error = _error_of(work, fields["error"])
        return work.end(_record_of(fields["record"]), list(written), error)


#: The names of this process's own threads, which never communicate.
OWN_THREADS = {"reader", "notes", "future"}


def _about_wait() -> dict[str, Any]:
    """Return how long this thread waits at most, and which other threads may communicate."""
    main = threading.main_thread()
    threads = [0 if thread is main else thread.ident for thread in threading.enumerate()]
    own = {thread.ident for thread in threading.enumerate() if thread.name in OWN_THREADS}
    present = 0 if threading.current_thread() is main else threading.get_ident()
    others = [number for number in threads if number != present and number not in own]
    return {"limit": settings.time_limit, "thread": present, "others": others}


def _place() -> dict[str, Any]:
    """Return the user's line; for a cell, also its number, and that of the running cell."""
    place = users_place()
    if place is None:
        return {"place": None}
    cells = notebook_words.number_of(place[0]), notebook_words.running()
    return {"place": place, "cells": cells}


def _record_of(told: dict[str, Any]) -> dict[str, Any]:
    message = told["message"]
    return told | {"message": message and tuple(message)}


def _error_of(work: BoxWork, told: dict[str, Any] | None) -> Exception | None:
    if told is None:
        return None
    kind = _KINDS.get(told["kind"], CommunicationError)
    return kind(told["text"], work.call, told["record"])


class BoxWorld:
    """A rank's view of all ranks, see :class:`torch_mpi.present.World`: the kernel has it.

    Attributes:
        groups: the groups of this rank.
    """

    one_machine = True

    def __init__(self, kernel: KernelLink):
        self._kernel = kernel
        self.rank = kernel.rank
        self.groups: list[BoxGroup] = []

    @property
    def own(self) -> Status:
        """Return this rank's status."""
        status: Status = self._kernel.ask("own")
        return status

    def statuses(self) -> list[Status]:
        """Return each rank's status."""
        statuses: list[Status] = self._kernel.ask("statuses")
        return statuses

    def begin_section(self, name: str) -> None:
        """Begin a part of the program."""
        self._kernel.ask("begin_section", name)

    def end_section(self) -> None:
        """Note that this rank has run its part of the section."""
        self._kernel.ask("end_section")

    def raised(self, error: BaseException, where: str) -> None:
        """Begin an incident, because the user's code ended with an error on this rank."""
        kind = "communication" if isinstance(error, CommunicationError) else "other"
        kind = "interrupt" if isinstance(error, KeyboardInterrupt) else kind
        self._kernel.ask("raised", kind, type(error).__name__, text_of(error), where)

    def recover(self, timeout: float) -> None:
        """Meet the other ranks after an incident."""
        self._kernel.ask("recover", timeout)

    def refuse_if_not_whole(self) -> None:
        """Do nothing: these ranks can always communicate again."""

    def balance(self) -> int:
        """Return how many messages of this rank no rank has received."""
        count: int = self._kernel.ask("balance")
        return count

    def sweep(self) -> list[dict[str, object]]:
        """Discard this rank's messages that no rank has received, and return them."""
        left: list[dict[str, object]] = self._kernel.ask("sweep")
        return left

    def withdraw_receives(self, since: float) -> None:
        """Give up this rank's pending receives, unless a rank that still runs sends to them."""
        self._kernel.ask("withdraw_receives", since)
