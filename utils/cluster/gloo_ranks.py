"""Ranks whose groups of the backend "mpi" are groups of gloo, which comes with PyTorch.

If a new PyTorch breaks our backend, a class can still work: ``DDL_LABS_BACKEND=gloo`` lets the
ranks of `cluster.start` communicate by gloo. Labs 00 to 05 run, and their checks work, because each
group records its calls. What only our backend knows is lacking: who waits for whom in a deadlock,
when a partner came, and messages that nobody received. A communication that never ends raises
gloo's error after the timeout. Gloo can't use a connection any more after an error, so the next
cell connects the ranks again.

MPI still starts the ranks.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from IPython import get_ipython
from torch.distributed import Work as TorchWork

from torch_mpi import autoload, compat
from torch_mpi.errors import count_as_library
from torch_mpi.group import arguments
from torch_mpi.group.arguments import Tensors
from torch_mpi.group.rank_group import Declaration, RankGroup
from torch_mpi.record import Call
from utils.jobs import NeedsBackend

# A line of this file is never shown as the student's.
count_as_library(__file__)
LARGEST_TAG = 2**31 - 1
#: Seconds between two chances of Ctrl-C.
LOOK = 0.1
#: A blocking send of so many bytes doesn't wait for its receiver, as in MPI.
EAGER = 4096
NOT_MET = (
    "No rank has received this message. A send of the course's backend would have returned, and a "
    "send of gloo waits until both ranks have met"
)
#: The key of the number of errors.
ERRORS = "errors"
#: The names of gloo's methods, by those of our collectives, where they differ.
METHODS = {
    **{"all_reduce": "allreduce", "all_gather": "allgather", "all_to_all": "alltoall"},
    **{"all_gather_single": "_allgather_base", "reduce_scatter_single": "_reduce_scatter_base"},
    "all_to_all_single": "alltoall_base",
}


def use(folder: Path) -> None:
    """Let ``init_process_group("mpi")`` of this rank make groups of gloo.

    Args:
        folder: A folder that all ranks can write to.
    """
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    name = world.bcast(secrets.token_hex(8))
    store = dist.FileStore(str(folder / f"gloo-{name}"), world.size)
    # Two ranks connect when they first communicate. Otherwise a message would need all ranks.
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    groups = GlooGroups(world.rank, world.size, store)
    vars(autoload)["LazyProcessGroupMPI"].create = staticmethod(groups.create)
    get_ipython().events.register("pre_run_cell", groups.begin_cell)
    get_ipython().events.register("post_run_cell", groups.end_cell)


class GlooGroups:
    """Makes the groups of a rank, in the place of PyTorch's ``ProcessGroupMPI``.

    Attributes:
        errors: How many errors of communication the ranks had before the present cell.
    """

    def __init__(self, rank: int, size: int, store: dist.Store):
        self.rank, self.size, self.store = rank, size, store
        self.errors = 0
        self._eager: list[GlooWork] = []
        self._made: dict[tuple[int, ...], int] = {}

    def begin_cell(self, _info: object = None) -> None:
        """Learn how many errors there were. All ranks have ended the cell before."""
        self.errors = self.store.add(ERRORS, 0)

    def end_cell(self, _result: object = None) -> None:
        """Let the next cell find no message that nobody has received in this one."""
        self._eager = [work for work in self._eager if not work.is_completed()]
        if self._eager:
            self.note_error()

    def note_error(self) -> None:
        """Let all ranks connect again in the next cell."""
        self.store.add(ERRORS, 1)

    def keep(self, work: GlooWork) -> None:
        """Keep a short message until it is received."""
        self._eager.append(work)

    def create(self, ranks: Sequence[int]) -> GlooGroup | None:
        """Make the group of `ranks` (global ranks; empty: all); None on other ranks."""
        compat.adapt_pytorch()
        members = tuple(ranks) or tuple(range(self.size))
        number = self._made[members] = self._made.get(members, 0) + 1
        if self.rank not in members:
            return None
        return GlooGroup(self, members, f"{members} {number}")


class GlooGroup(RankGroup):
    """A group that records each call and lets gloo carry it."""

    def __init__(self, groups: GlooGroups, members: tuple[int, ...], name: str):
        super().__init__(groups.rank, members)
        self.groups = groups
        self._name_of_store = name
        self._connected: tuple[int, Any] | None = None
        self._collectives = 0

    def gloo(self) -> Any:
        """Return gloo's group; after an error of an earlier cell, a new one."""
        errors = self.groups.errors
        if self._connected is None or self._connected[0] != errors:
            store = dist.PrefixStore(f"{self._name_of_store} {errors}", self.groups.store)
            limit = timedelta(seconds=float(os.environ.get("MPI_BACKEND_TIMEOUT", "20")))
            made = dist.ProcessGroupGloo(store, self._rank, len(self.members), limit)
            self._connected = errors, made
        return self._connected[1]

    @property
    def late_works(self) -> type[GlooWork]:  # type: ignore[override]
        """Return the class of works whose futures complete when gloo is done."""
        return GlooWork

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing: gloo keeps the timeout with which the group was made."""

    _set_default_timeout = set_timeout

    def _get_sequence_number_for_group(self) -> int:
        return self._collectives

    def child(self, members: tuple[int, ...], timeout: timedelta | None) -> RankGroup:
        """Return a new group of some ranks of this group, to which this rank belongs."""
        made = self.groups.create(members)
        assert made is not None
        return made

    def shutdown(self) -> None:
        """End the group on this rank, for ``destroy_process_group``."""
        self.lost = self.lost or "it was destroyed"

    def call(
        self, declare: Declaration, fast: str, given: Sequence[Any], options: dict[str, Any]
    ) -> GlooWork:
        """Check the arguments of a collective, record it, and let gloo do it."""
        operation = declare(self, *given, **options)
        self._collectives += 1
        operation.call.sequence = self._collectives
        name = METHODS.get(declare.__name__, declare.__name__)
        begin = partial(getattr(self.gloo(), name), *given, **options)
        return self._begun(GlooWork(self.groups, operation.call, begin, operation.result))

    def join(self, works: Sequence[TorchWork], result: list[torch.Tensor]) -> TorchWork:
        """Return a work that is over when all of these are."""
        for work in works[:-1]:
            work.wait()
        return works[-1]

    def send(self, inputs: Tensors, dst: int, tag: int = 0) -> TorchWork:
        """Send a tensor to a rank of the group."""
        tensor = arguments.single(inputs, "send")
        arguments.check_message(self, "send", "dst", dst, tag, LARGEST_TAG)
        blocking = compat.is_called_by("send")
        call = self.record("send", [tensor], peer=dst, tag=tag, blocking=blocking)
        eager = blocking and call.nbytes <= EAGER
        memory = tensor.detach().clone() if eager else tensor.detach().contiguous()
        begin = partial(self.gloo().send, [memory.contiguous()], dst, tag)
        if not eager:
            return self._begun(GlooWork(self.groups, call, begin, [tensor]))
        try:
            self.groups.keep(GlooWork(self.groups, call, begin, [tensor]))
        except RuntimeError as error:
            raise NeedsBackend(NOT_MET) from error
        return SentWork(call, tensor)

    def recv(self, outputs: Tensors, src: int | None, tag: int = 0) -> GlooWork:
        """Receive a tensor from a rank of the group; ``None`` accepts any rank."""
        arguments.check_message(self, "recv", "src", src, tag, LARGEST_TAG)
        tensor = arguments.single(outputs, "recv")
        arguments.check_writable(tensor, "recv")
        blocking = compat.is_called_by("recv")
        peer = -1 if src is None else src
        call = self.record("recv", [tensor], peer=peer, tag=tag, blocking=blocking, sent=0)
        call.received, call.any_source = call.nbytes, src is None
        memory = tensor.detach()
        arrived = memory if memory.is_contiguous() else torch.empty_like(memory).contiguous()
        gloo = self.gloo()
        begin = partial(gloo.recv_anysource, [arrived], tag)
        if src is not None:
            begin = partial(gloo.recv, [arrived], src, tag)
        copied = None if arrived is memory else lambda: memory.copy_(arrived)
        return self._begun(GlooWork(self.groups, call, begin, [tensor], copied))

    def recv_anysource(self, outputs: Tensors, tag: int = 0) -> GlooWork:
        """Receive a tensor from any rank of the group."""
        return self.recv(outputs, None, tag)

    def _begun(self, work: GlooWork) -> GlooWork:
        if work.call.blocking:
            work.wait()
        return work


def interruptible(call: Callable[[], Any]) -> Any:
    """Return what a call of gloo returns, and let Ctrl-C end the wait for it.

    Python can't interrupt a call inside C++, so another thread makes it.
    """
    done: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

    def make() -> None:
        try:
            done.put((call(), None))
        except Exception as error:
            done.put((None, error))

    threading.Thread(target=make, daemon=True, name="gloo").start()
    while True:
        with contextlib.suppress(queue.Empty):
            value, error = done.get(timeout=LOOK)
            break
    if error is not None:
        raise error
    return value


class SentWork(TorchWork):
    """A short message, which has left, as far as its sender can tell."""

    def __init__(self, call: Call, tensor: torch.Tensor):
        super().__init__()
        self._result = [tensor]
        call.waited = True
        call.matched = call.end = time.perf_counter()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def result(self) -> list[torch.Tensor]:
        """Return its tensor."""
        return self._result


class GlooWork(TorchWork):
    """A communication of gloo, and its record.

    Args:
        begin: Begins it.
        finish: Is called when gloo is done.
    """

    def __init__(
        self,
        groups: GlooGroups,
        call: Call,
        begin: Callable[[], TorchWork],
        result: Sequence[torch.Tensor],
        finish: Callable[[], object] | None = None,
    ):
        super().__init__()
        self.call, self._groups = call, groups
        self._result, self._finish = list(result), finish
        with self._noting_errors():
            self._work: TorchWork = interruptible(begin)

    @contextlib.contextmanager
    def _noting_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException:  # Ctrl-C, too
            self._groups.note_error()
            raise

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it is over.

        Raises:
            RuntimeError: Gloo's, if it failed or takes longer than the timeout.
        """
        self.call.waited = True
        if not self.call.end:
            wait = [time.perf_counter(), 0.0]
            self.call.waits.append(wait)
            with self._noting_errors():
                interruptible(partial(self._work.wait, *([timeout] if timeout else [])))
            wait[1] = time.perf_counter()
            self._note_end()
        return True

    synchronize = wait  # type: ignore[assignment]

    def _note_end(self) -> None:
        if self.call.end:
            return
        self.call.matched = self.call.start
        self.call.end = time.perf_counter()
        if self.call.any_source:
            self.call.peer = self._work._source_rank()
        if self._finish is not None:
            self._finish()

    def is_completed(self) -> bool:
        """Return whether it is over now."""
        if over := self._work.is_completed():
            self.call.waited = True
            self._note_end()
        return over

    def is_success(self) -> bool:
        """Return whether it is over, and without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Any:
        """Return its error."""
        return self._work.exception()

    def result(self) -> list[torch.Tensor]:
        """Return its tensors."""
        return self._result

    def source_rank(self) -> int:
        """Return the sender's rank in the group."""
        return -1 if self.call.peer is None else self.call.peer

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Return the future that is complete when this is over, for DDP and hooks."""
        self.call.waited = True
        return self._work.get_future().then(self._outcome)

    def _outcome(self, done: torch.futures.Future[Any]) -> list[torch.Tensor]:
        with self._noting_errors():
            done.value()
        self._note_end()
        return self._result
