"""A communication between ranks whose messages one process carries, and what is pending."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.distributed import Work as TorchWork

from torch_mpi.errors import (
    CommunicationError,
    CommunicationMismatch,
    count_as_library,
)
from torch_mpi.group import storages
from torch_mpi.protocol import words
from torch_mpi.record import Call

from .costs import bytes_sent

if TYPE_CHECKING:
    from datetime import timedelta

    from torch_mpi.group.operation import Operation
    from torch_mpi.group.seals import Seal
    from torch_mpi.network import Arrival

    from .group import Group

# A line of this file is never shown as the student's.
count_as_library(__file__)
#: Collectives whose record counts the bytes of all parts of this rank's input.
IN_PARTS = ("reduce_scatter", "all_to_all")
NO_BACKWARD = -1


@dataclass(eq=False)
class Message:
    """A message that a rank has sent, or asks for.

    Attributes:
        source: rank of the sender in the group; ``None`` accepts any sender.
        to: rank of the receiver in the group.
        gone, arrives: when a sent message leaves and arrives, if its receiver doesn't delay it.
    """

    tensor: torch.Tensor
    work: Work
    source: int | None
    to: int
    tag: int
    gone: float = 0.0
    arrives: float = 0.0


@dataclass
class Traffic:
    """What is pending between the ranks of one group, which all of them share."""

    sent: list[Message] = field(default_factory=list)
    awaited: list[Message] = field(default_factory=list)
    #: The calls of each collective, by its number and by rank.
    rounds: dict[int, dict[int, CollectiveWork]] = field(default_factory=dict)
    #: The ranks that have destroyed the group.
    closed: set[int] = field(default_factory=set)

    def clear(self) -> None:
        """Forget what was pending."""
        self.sent.clear()
        self.awaited.clear()
        self.rounds.clear()


class Work(TorchWork):
    """A communication of one rank.

    Attributes:
        done: whether it is over, or will be over at the time :attr:`ends`.
        ends: that time, on the ranks' clocks.
        arrival: of a received message; others that arrive before may still delay it.
        place: the user's line that waits for it.
        others: works that the caller waits for together with this one.
    """

    seal: Seal | None = None  #: of the tensor of an ``isend``

    def __init__(self, group: Group, call: Call, result: Sequence[torch.Tensor]):
        super().__init__()
        self.group = group
        self.call = call
        self._result = list(result)
        self.done = False
        self.ends = 0.0
        self.arrival: Arrival | None = None
        self.error: Exception | None = None
        self.place: tuple[str, int, str] | None = None
        self.others: list[Work] = []
        storages.note(self)

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that it reads or writes until it is over."""
        return self._result

    def is_pending(self) -> bool:
        """Return whether it still reads or writes its tensors."""
        return not self.done

    def end(self, at: float, error: Exception | None = None, matched: float = 0.0) -> None:
        """Note that it is over at this time.

        Args:
            at: seconds on the ranks' clocks.
            error: what its caller gets.
            matched: when all ranks that take part had called it; by default, `at`.
        """
        self.error = error
        self.done = True
        self.ends = at
        self.call.matched = matched or at
        self.call.end = at
        self.group.ranks.carrier.ended(self)

    def settle(self) -> float:
        """Return when it ends, as far as is known now."""
        if self.arrival is not None:
            self.ends = self.call.end = max(self.call.start, self.arrival.due())
        return self.ends

    def missing(self) -> tuple[list[int], bool, bool]:
        """Return the global ranks still missing, whether one suffices, and whether data move."""
        raise NotImplementedError

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let other ranks run until it is over. A deadlock is found at once.

        Args:
            timeout: of a receive: when it gives up, on this rank's clock.

        Raises:
            CommunicationError: it failed, or it will never be over.
        """
        if torch.autograd._profiler_enabled():
            with torch.profiler.record_function(f"mpi:{self.call.op}"):
                return self._wait(timeout)
        return self._wait(timeout)

    def _wait(self, timeout: timedelta | None) -> bool:
        for other in self.others:
            other.wait()
        ranks = self.group.ranks
        rank = self.group.me
        self.call.waited = True
        wait = [ranks.clocks.now(rank), 0.0]
        self.call.waits.append(wait)
        if not self.done:
            # The line of isend or irecv says more than the line of its wait.
            self.place = ranks.carrier.place() if self.call.blocking else None
            limit = timeout.total_seconds() if timeout and self.call.op == "recv" else 0.0
            ranks.wait_for(self, rank, max(0.0, limit))
        ranks.clocks.reach(rank, self.settle())
        wait[1] = ranks.clocks.now(rank)
        self._raise_error()
        self._lift_seal()
        return True

    def _lift_seal(self) -> None:
        """Look at the seal once, because the program may change the tensor from now on."""
        seal, self.seal = self.seal, None
        if seal is not None:
            with self.group.ranks.clocks.stopped(self.group.me):
                seal.check()

    def _raise_error(self) -> None:
        if self.error is not None:
            self.group.ranks.heard.add(self.group.me)
            raise self.error

    synchronize = wait

    def is_completed(self) -> bool:
        """Return whether it is over now. If only this rank can go on, time passes until it is."""
        ranks = self.group.ranks
        rank = self.group.me
        if not ranks.carrier.let_others_run() and self.done:
            ranks.clocks.reach(rank, self.settle())
        over = self.done and ranks.clocks.now(rank) >= self.settle()
        self.call.waited |= over
        if over and self.error is None:
            self._lift_seal()
        return over

    def is_success(self) -> bool:
        """Return whether it is over, and without an error."""
        return self.is_completed() and self.error is None

    def exception(self) -> Exception | None:
        """Return its error."""
        return self.error

    def result(self) -> list[torch.Tensor]:
        """Return its tensors."""
        return self._result

    def source_rank(self) -> int:
        """Return the sender's rank in the group."""
        return self.call.peer

    _source_rank = source_rank

    def _end_backward(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future:
        """Return a complete future: PyTorch's C++ would wait for one and let no other rank run.

        During backward, time passes only when backward is over, because DDP waits there.
        """
        if self.others or torch._C._current_graph_task_id() == NO_BACKWARD:
            self.wait()
        else:
            if not self.done:
                self.place = self.group.ranks.carrier.place()
                self.group.ranks.wait_for(self, self.group.me)
            self._raise_error()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        self.seal = None  # the future says when the program may change the tensor
        future = torch.futures.Future()
        future.set_result(self._result)
        return future


class MessageWork(Work):
    """A message that a rank sends or receives."""

    def missing(self) -> tuple[list[int], bool, bool]:
        """Return the global ranks still missing, whether one suffices, and whether data move."""
        partner = self.call.partner
        if partner is None:
            return [rank for rank in self.group.members if rank != self.group.me], True, False
        return [partner], False, False


class CollectiveWork(Work):
    """A collective that a rank has called.

    Args:
        inputs: copies of the operation's inputs, because the rank may go on before the others come.
    """

    def __init__(self, group: Group, operation: Operation, inputs: list[torch.Tensor]):
        super().__init__(group, operation.call, operation.result)
        self.operation: Operation | None = operation
        self.inputs = inputs
        call = operation.call
        self.key = (call.op, call.dtype, operation.key, call.reduce_op, call.peer)
        # Tensors made in inference mode may be written only in it.
        self._for_inference = any(tensor.is_inference() for tensor in operation.result)

    def missing(self) -> tuple[list[int], bool, bool]:
        """Return the global ranks still missing, whether one suffices, and whether data move."""
        there = self.group.traffic.rounds.get(self.call.sequence or 0, {})
        members = enumerate(self.group.members)
        return [rank for k, rank in members if k not in there], False, False

    def take(self, given: Sequence[list[torch.Tensor]]) -> None:
        """Compute this rank's result from the inputs of all ranks.

        Raises:
            CommunicationMismatch: a part has another size than its place. Nothing was written.
        """
        operation = self.operation
        assert operation is not None, "a collective ends once"
        with torch.inference_mode(self._for_inference), torch.no_grad():
            values = list(operation.definition(given))
            sources = zip(operation.sources, values, operation.outputs, strict=False)
            for source, value, output in sources:
                if value.nbytes != output.nbytes:
                    sides = self.group.members[source], value.nbytes, self.group.me, output.nbytes
                    raise CommunicationMismatch(words.of_part(self.call, *sides), self.call)
            for output, value in zip(operation.outputs, values, strict=True):
                output.copy_(value.reshape(output.shape))
            if operation.finish is not None:
                operation.finish()

    def end(self, at: float, error: Exception | None = None, matched: float = 0.0) -> None:
        """Note that it is over at this time, see :meth:`Work.end`, and let go of its tensors."""
        self.operation = None
        self.inputs = []
        super().end(at, error, matched)


def complete(works: list[CollectiveWork]) -> None:
    """Do the work of a collective to which all ranks of the group have come, in group order."""
    ranks = works[0].group.ranks
    members = works[0].group.members
    called = max(work.call.start for work in works)
    odd = next((work for work in works if work.key != works[0].key), None)
    if odd is not None:
        sides = {work.group.me: work.call.side() for work in (works[0], odd)}
        error = CommunicationMismatch(words.of_collectives(sides))
        ranks.mismatch(dict.fromkeys(works, error), called)
        return
    op = works[0].call.op
    nbytes = max(work.call.nbytes for work in works)
    share = nbytes // len(works) if op.startswith(IN_PARTS) else nbytes
    end = ranks.costs.collective(op, members, share, called)
    with ranks.clocks.stopped(ranks.carrier.rank):
        errors = _taken(works)
    for work in works:
        if work not in errors:
            work.call.moved_out = bytes_sent(op, len(members), nbytes)
            work.end(end, matched=called)
    if errors:
        ranks.mismatch(errors, called)


def _taken(works: list[CollectiveWork]) -> dict[CollectiveWork, CommunicationError]:
    """Let each rank take its result; return the errors of those that can't."""
    given = [work.inputs for work in works]
    errors: dict[CollectiveWork, CommunicationError] = {}
    for work in works:
        try:
            work.take(given)
        except CommunicationMismatch as error:
            errors[work] = error
        except Exception as error:  # of this rank, and not of the one that came last
            text = f"{work.call.describe()} failed: {type(error).__name__}: {error}"
            errors[work] = CommunicationError(text, work.call)
    return errors


def fits(message: Message, wanted: Message) -> bool:
    """Return whether a message is the one that a rank asks for."""
    return (
        message.to == wanted.to
        and message.tag == wanted.tag
        and wanted.source in (None, message.source)
    )


def deliver(message: Message, wanted: Message) -> None:
    """Copy a message to its receiver, and end both calls."""
    sent = message.work.call
    call = wanted.work.call
    group = wanted.work.group
    call.peer = message.source
    call.message = sent.message
    matched = max(sent.start, call.start)
    if (sent.dtype, sent.nbytes) != (call.dtype, call.nbytes):
        text = words.of_message(
            group.members[message.source], sent.dtype, sent.shape, sent.nbytes, group.me, call
        )
        error = CommunicationMismatch(text, call)
        group.ranks.mismatch({wanted.work: error}, matched)  # the sender stops waiting
        return
    with group.ranks.clocks.stopped(group.ranks.carrier.rank):
        wanted.tensor.data.copy_(message.tensor.reshape(wanted.tensor.shape))
    costs = group.ranks.costs
    me = wanted.work.group.me
    source = message.work.group.me
    told = message.arrives
    if not message.work.done:
        gone = costs.leaves_late(source, me, sent.nbytes, message.gone, matched)
        told += gone - message.gone
        message.work.end(max(gone, matched), matched=matched)
    wanted.work.arrival = costs.arrives(me, source, sent.nbytes, told)
    wanted.work.end(0.0, matched=matched)
    wanted.work.settle()
