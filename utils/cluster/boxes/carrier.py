"""The kernel's side of the ranks' communication: it takes their calls to the world.

One thread for each rank reads the rank's frames. A lock lets one of them at a time use the world.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torch_mpi.errors import CommunicationError
from torch_mpi.group.rank_group import Declaration, RankGroup
from torch_mpi.record import Call, Log
from utils.cluster import notebook_words
from utils.cluster.world.carrier import Place, Waited
from utils.cluster.world.group import Group
from utils.cluster.world.shared_ranks import SharedRanks
from utils.cluster.world.work import Work

from . import values
from .frames import BrokenFrame, Frame, Frames, Piece
from .rank_state import Pending, RankState, Wait

#: The collectives that a rank may call, by name.
DECLARATIONS: dict[str, Declaration] = {
    method.__wrapped__.__name__: method.__wrapped__
    for method in vars(RankGroup).values()
    if hasattr(method, "__wrapped__")
}
#: What a rank may learn from the record of its call.
RECORD = ("matched", "end", "peer", "message", "sequence", "moved_out", "moved_in")
#: Seconds between two looks at ranks that wait.
EVERY = 0.25


class RealClocks:
    """One clock for all ranks, which goes on by itself."""

    def now(self, rank: int) -> float:
        """Return the time in seconds, on the clock of ``time.perf_counter``."""
        return time.perf_counter()

    def reach(self, rank: int, moment: float) -> None:
        """Do nothing: a rank itself waits until its communication is over."""

    def stopped(self, rank: int) -> contextlib.AbstractContextManager[None]:
        """Do nothing: this clock doesn't stop."""
        return contextlib.nullcontext()


class Carrier:
    """Carries the messages of ranks that are processes, see :class:`world.carrier.Carrier`.

    Args:
        frames: the connection to each rank.
        timeout: seconds that a rank may wait while another one computes.
        place: returns where a rank is, in words.

    Attributes:
        lock: is held by whoever uses the world.
        world: what the ranks do.
        given: the files of the modules that ranks may get from the kernel, by the modules' names.
        is_strict: whether the ranks answer a question of a check. Then no rank may ask about others
            or meet them, because this would tell them more than messages do.
    """

    stuck: Callable[[], None]
    clocks = RealClocks()

    def __init__(self, frames: Sequence[Frames], timeout: float, place: Callable[[int], str]):
        self.n = len(frames)
        self.batch = 0
        self.lock = threading.Condition(threading.RLock())
        self._timeout = timeout
        self._place_of = place
        self._sides = [RankState(end) for end in frames]
        self._pending: dict[Work, Pending] = {}
        self.given: dict[str, str] = {}
        self.is_strict = False
        self._present = threading.local()
        self._is_over = threading.Event()
        self.world = SharedRanks(self)
        threading.Thread(target=self._look_for_good, name="patience", daemon=True).start()

    def end(self) -> None:
        """End the thread that looks for long waits."""
        self._is_over.set()

    def begin_requests(self, ranks: Iterable[int]) -> None:
        """Note that these ranks have something to do. All have it before one counts as stuck."""
        with self.lock:
            if not self.busy():
                self.batch += 1
            for rank in ranks:
                self._sides[rank].is_busy = True
                self._sides[rank].has_raised = False

    def end_request(self, rank: int) -> None:
        """Note that a rank has nothing to do any more."""
        with self.lock:
            side = self._sides[rank]
            side.is_busy = False
            side.was_interrupted = False
            side.before = side.latest
            side.waits.clear()
            side.refused.clear()
            side.left = None
            self._look()

    def leave(self, rank: int, why: str) -> None:
        """Note that a rank's process is gone; ranks that wait for it get an error."""
        with self.lock:
            side = self._sides[rank]
            side.is_gone = True
            side.is_busy = False
            side.waits.clear()
            self.world.died(rank, why)
            self._look()

    # -- what ranks send --------------------------------------------------------------------------

    def take(self, rank: int, frame: Frame) -> bool:
        """Take a frame that is about communication; return False for others.

        Raises:
            BrokenFrame: the frame asks for something that there is not.
        """
        act = {
            "call": self._call,
            "wait": self._wait,
            "leave": self._leave,
            "drop": self._drop,
            "ask": self._ask,
        }.get(frame.kind)
        if act is None:
            return False
        try:
            with self.lock:
                self._present.rank = rank
                self._present.frame = frame
                act(self._sides[rank], frame)
                self._look()
        except BrokenFrame:
            raise
        except Exception as error:  # whatever it asks for, only this rank must suffer from it
            raise BrokenFrame(f"a frame {frame.kind} can't be understood: {error!r}") from error
        return True

    def _call(self, side: RankState, frame: Frame) -> None:
        about = frame.fields
        if about["place"] is not None:
            cell, running = about["cells"]
            notebook_words.number_cell(about["place"][0], cell)
            notebook_words.cell_runs(running)
        group = side.groups[about["group"]]
        number = int(about["number"])
        if number <= side.latest:
            raise BrokenFrame(f"call {number} comes after call {side.latest}")
        side.latest = number
        outputs: Sequence[torch.Tensor] = ()
        try:
            if "collective" in about:
                work, outputs = self._collective(group, frame)
            elif "send" in about:
                tensor = values.tensor_of(about["tensor"], frame.pieces[0])
                work = group.send([tensor], about["send"], about["tag"])
            else:
                (tensor,) = values.arguments_of([about["tensor"]])
                work = group.recv([tensor], about["recv"], about["tag"])
                outputs = [tensor]
        except CommunicationError as error:
            if not about["blocking"]:  # the rank hears of it when it waits
                side.refused.add(number)
                self.world.heard.discard(self._present.rank)
            self._send_end(side, number, None, (), error)
            return
        side.works[number] = work
        side.note(number, work.call)
        self._pending[work] = Pending(number, outputs)
        if work.done:
            self.ended(work)
        elif about["blocking"]:
            work.place = self.place()
            self._wait(side, frame)

    def _collective(self, group: Group, frame: Frame) -> tuple[Work, Sequence[torch.Tensor]]:
        about = frame.fields
        declare = DECLARATIONS[about["collective"]]
        operation = declare(group, *values.arguments_of(about["given"]))
        told = list(map(values.tensor_of, about["inputs"], frame.pieces))
        kinds = [[(t.numel(), t.dtype) for t in each] for each in (told, operation.inputs)]
        if kinds[0] != kinds[1]:
            raise BrokenFrame("the tensors of a call don't fit its arguments")
        operation = dataclasses.replace(operation, inputs=told, finish=None)
        return group.run(operation), operation.outputs

    def _wait(self, side: RankState, frame: Frame) -> None:
        about = frame.fields
        work = side.works.get(about["number"])
        if work is None:  # it has ended, and the rank will hear of it, or has heard
            if about["number"] in side.refused:
                self.world.heard.add(self._present.rank)
            return
        work.call.waited = True
        if work.done or self.world.end_after_incident(work, work.group.me):
            self.world.heard.add(work.group.me)
            side.works.pop(about["number"], None)
            return
        limit = float(about.get("limit") or self._timeout)
        others = frozenset(about["others"])
        wait = Wait(work, time.monotonic(), limit, about["thread"], others)
        side.waits[about["number"]] = wait

    def _leave(self, side: RankState, frame: Frame) -> None:
        side.left = side.waits.pop(frame.fields["number"], None)

    def _drop(self, side: RankState, frame: Frame) -> None:
        work = side.works.get(frame.fields["number"])
        if work is not None and not work.done:
            self.world.drop(work, work.group.me, float(frame.fields["limit"]))

    def _send_end(
        self,
        side: RankState,
        number: int,
        work: Work | None,
        outputs: Sequence[torch.Tensor],
        error: Exception | None,
    ) -> None:
        record = {name: getattr(work.call, name) for name in RECORD} if work else {}
        told = None
        if error is not None:
            side.has_raised = True
            about = error.record if isinstance(error, CommunicationError) else {}
            told = {"kind": type(error).__name__, "text": str(error), "record": about}
            outputs = ()
        pieces: list[Piece] = [values.bytes_of(tensor) for tensor in outputs]
        fields = {
            "number": number,
            "record": record or {"message": None, "end": time.perf_counter()},
            "outputs": [values.described(tensor) for tensor in outputs],
            "error": told,
        }
        with contextlib.suppress(OSError):  # the rank is gone
            side.frames.send("ended", fields, pieces)

    def _ask(self, side: RankState, frame: Frame) -> None:
        about = frame.fields
        rank = self.rank
        answer: dict[str, Any] = {"number": about["number"]}
        try:
            ask = _QUESTIONS[about["method"]]
            if self.is_strict and about["method"] in ("own", "statuses", "recover", "sweep"):
                raise RuntimeError("a check asks this rank, which may not ask about other ranks")
            answer["value"] = ask(self, rank, *about["arguments"])
        except (RuntimeError, KeyboardInterrupt) as error:
            answer["error"] = str(error) or type(error).__name__
        with contextlib.suppress(OSError):
            side.frames.send("answer", answer)

    # -- questions of ranks -----------------------------------------------------------------------

    def _new_group(self, rank: int, members: list[int]) -> int:
        if rank not in members or not all(0 <= member < self.n for member in members):
            raise BrokenFrame(f"rank {rank} can't make the group {members}")
        groups = self._sides[rank].groups
        number = len(groups)
        groups[number] = self.world.new_group(tuple(members))
        return number

    def _module(self, rank: int, name: str) -> tuple[str, str] | None:
        """Return file and source of a module that ranks may get; ``None`` for any other name."""
        file = self.given.get(name)
        return None if file is None else (file, Path(file).read_text(encoding="utf-8"))

    def _shutdown(self, rank: int, number: int) -> None:
        self._sides[rank].groups[number].shutdown()

    def _raised(self, rank: int, kind: str, name: str, text: str, where: str) -> None:
        self._sides[rank].has_raised = True
        bases = {"communication": CommunicationError, "interrupt": KeyboardInterrupt}
        error = type(name, (bases.get(kind, Exception),), {})(text)
        if kind == "communication" and self.world.incident:
            return
        left, self._sides[rank].left = self._sides[rank].left, None
        work = left.work if left is not None and kind == "interrupt" else None
        self.world.raised(rank, error, where, work)

    # -- the contract of a carrier ----------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Return the rank whose call the world works on."""
        rank: int = self._present.rank
        return rank

    def block(self, waited: Waited, until: float | None = None) -> None:
        """Let the other ranks go on until this is done, or until a moment.

        Raises:
            KeyboardInterrupt: this rank has been interrupted.
        """
        side = self._sides[self.rank]
        side.meeting = waited
        self._look()
        while not waited.done and not side.was_interrupted and not side.is_gone:
            left = None if until is None else until - time.perf_counter()
            if left is not None and left <= 0:
                break
            self.lock.wait(left)
        side.meeting = None
        if side.was_interrupted and not waited.done:
            side.was_interrupted = False
            raise KeyboardInterrupt

    def ended(self, waited: Waited) -> None:
        """Tell a rank that a communication of its is over."""
        assert isinstance(waited, Work)
        pending = self._pending.pop(waited, None)
        if pending is None:
            return  # its call has not returned yet
        rank = waited.group.me
        side = self._sides[rank]
        waited.settle()
        waits = side.waits.pop(pending.number, None) is not None or waited.call.blocking
        if waits and waited.error is not None:
            self.world.heard.add(rank)
        if waited.error is None:
            del side.works[pending.number]
        self._send_end(side, pending.number, waited, pending.outputs, waited.error)
        self.lock.notify_all()

    def let_others_run(self) -> bool:
        """Return False: the ranks run by themselves."""
        return False

    def waiting(self) -> Mapping[int, Waited]:
        """Return by rank what ranks wait for."""
        found: dict[int, Waited] = {}
        for rank, side in enumerate(self._sides):
            waits = [wait for wait in side.waits.values() if not wait.work.done]
            threads = {wait.thread for wait in waits}
            if 0 in threads and waits[-1].others <= threads:
                found[rank] = next(wait.work for wait in waits if wait.thread == 0)
            if side.meeting is not None and not side.meeting.done:
                found[rank] = side.meeting
        return found

    def busy(self) -> list[int]:
        """Return the ranks that have something to do."""
        return [rank for rank, side in enumerate(self._sides) if side.is_busy]

    def interrupt(self, ranks: Iterable[int]) -> None:
        """Raise KeyboardInterrupt on these ranks."""
        for rank in ranks:
            side = self._sides[rank]
            if not side.is_busy:
                continue
            with contextlib.suppress(OSError):
                side.frames.send("interrupt", {})
            with self.lock:
                side.was_interrupted = side.meeting is not None
                self.lock.notify_all()

    def has_raised(self, rank: int) -> bool:
        """Return whether a rank has reported or received an error since its latest request."""
        return self._sides[rank].has_raised

    def calls_of(self, rank: int) -> dict[int, Call]:
        """Return a rank's latest calls, by their numbers."""
        with self.lock:
            return dict(self._sides[rank].calls)

    def before(self, rank: int) -> int:
        """Return the number of a rank's latest call when it ended its last request."""
        return self._sides[rank].before

    def forgotten(self, rank: int) -> int:
        """Return the number of a rank's latest call that is too long ago to be kept."""
        return self._sides[rank].forgotten

    def log(self, rank: int) -> Log:
        """Return the record of a rank's calls."""
        return self._sides[rank].log

    def place(self) -> Place | None:
        """Return file, line and function of the user's code that made this call."""
        place = self._present.frame.fields.get("place")
        return None if place is None else (str(place[0]), int(place[1]), str(place[2]))

    def is_called_by(self, name: str) -> bool:
        """Return whether PyTorch's blocking ``name`` made this call of ``isend`` or ``irecv``."""
        return bool(self._present.frame.fields["blocking"])

    # -- long waits -------------------------------------------------------------------------------

    def _look(self) -> None:
        """Begin an incident if each rank that has something to do waits for another one."""
        busy = set(self.busy())
        waiting = self.waiting()
        if waiting and busy <= set(waiting):
            self.stuck()
        self.lock.notify_all()

    def _look_for_good(self) -> None:
        while not self._is_over.wait(EVERY):
            late = self._late()
            if late is not None:
                computing, limit = late
                place = self._place_of(computing)
                with self.lock:
                    self._present.rank = computing
                    if not self.world.incident:
                        self.world.give_up(computing, place, limit)

    def _late(self) -> tuple[int, float] | None:
        """Return a rank that computes on and on while others wait, and for how many seconds."""
        with self.lock:
            self._present.rank = 0
            late = self._overdue()
            if not late or self.world.incident:
                return None
            for wait in late:  # for as long as a program would wait
                wait.thread = 0
                wait.others = frozenset()
            self._look()
            computing = [rank for rank in self.busy() if rank not in self.waiting()]
            return (computing[0], late[0].limit) if computing and not self.world.incident else None

    def _overdue(self) -> list[Wait]:
        """Return the waits that last longer than their limit."""
        now = time.monotonic()
        waits = [wait for side in self._sides for wait in side.waits.values()]
        return [wait for wait in waits if not wait.work.done and now - wait.since > wait.limit]


_QUESTIONS: dict[str, Callable[..., Any]] = {
    "new_group": Carrier._new_group,
    "module": Carrier._module,
    "shutdown": Carrier._shutdown,
    "raised": Carrier._raised,
    "own": lambda carrier, rank: carrier.world.status(rank),
    "statuses": lambda carrier, rank: carrier.world.statuses(),
    "begin_section": lambda carrier, rank, name: carrier.world.worlds[rank].begin_section(name),
    "end_section": lambda carrier, rank: carrier.world.worlds[rank].end_section(),
    "recover": lambda carrier, rank, limit: carrier.world.worlds[rank].recover(limit),
    "balance": lambda carrier, rank: carrier.world.worlds[rank].balance(),
    "sweep": lambda carrier, rank: carrier.world.worlds[rank].sweep(),
    "withdraw_receives": lambda carrier, rank, since: carrier.world.worlds[rank].withdraw_receives(
        float(since)
    ),
}
