"""A rank's process group whose messages the kernel carries, and what is pending in it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import Work as TorchWork

from torch_mpi import compat
from torch_mpi.errors import CommunicationError, count_as_library
from torch_mpi.group import arguments, storages, tensors
from torch_mpi.group.arguments import Tensors
from torch_mpi.group.rank_group import Declaration, RankGroup
from torch_mpi.group.seals import Seal, sealed
from torch_mpi.record import Call

from . import values

if TYPE_CHECKING:
    from .kernel_link import KernelLink

# A line of this file is never shown as the student's.
count_as_library(__file__)
#: As in Open MPI and MPICH.
LARGEST_TAG = 2**31 - 1
_real_clock = time.perf_counter
_real_sleep = time.sleep


class BoxGroup(RankGroup):
    """A group of ranks whose messages the kernel carries.

    Args:
        kernel: the connection to the kernel.
        rank: this rank's global number.
        members: global ranks, in the order of the group.
        number: this rank's number of the group.
    """

    @property
    def late_works(self) -> type[BoxWork]:  # type: ignore[override]
        """Return the class of works whose futures complete when the kernel has answered."""
        return BoxWork

    def __init__(self, kernel: KernelLink, rank: int, members: tuple[int, ...], number: int):
        super().__init__(rank, members)
        self.kernel = kernel
        self.number = number
        self._collectives = 0

    def thread_name(self) -> str:
        """Return the name of the calling thread; "" for the main thread."""
        thread = threading.current_thread()
        return "" if thread is threading.main_thread() else thread.name

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing: the kernel has one timeout for all groups."""

    _set_default_timeout = set_timeout

    def _get_sequence_number_for_group(self) -> int:
        return self._collectives

    def child(self, members: tuple[int, ...], timeout: timedelta | None) -> RankGroup:
        """Return a new group of some ranks of this group, to which this rank belongs."""
        return self.kernel.new_group(members)

    def shutdown(self) -> None:
        """End the group on this rank, for ``destroy_process_group``."""
        if not self.lost:
            self.lost = "it was destroyed"
            self.kernel.ask("shutdown", self.number)

    # -- collectives --------------------------------------------------------------------------

    def call(
        self, declare: Declaration, fast: str, given: Sequence[Any], options: dict[str, Any]
    ) -> BoxWork:
        """Declare a collective with these arguments, and send it to the kernel."""
        operation = declare(self, *given, **options)
        self._collectives += 1
        call = operation.call
        call.sequence = self._collectives
        work = BoxWork(self, call, operation.result, operation.outputs, operation.finish)
        about = {
            "collective": declare.__name__,
            "given": values.described_arguments([*given, *options.values()]),
            "inputs": [values.described(tensor) for tensor in operation.inputs],
        }
        return self._begin(work, about, operation.inputs)

    def join(self, works: Sequence[TorchWork], result: list[torch.Tensor]) -> BoxWork:
        """Return a work that is over when all of these are."""
        *others, last = works
        assert isinstance(last, BoxWork)
        last.others = others
        return last

    # -- messages -----------------------------------------------------------------------------

    def send(self, inputs: Tensors, dst: int, tag: int = 0) -> BoxWork:
        """Send a tensor to a rank of the group."""
        tensor = arguments.single(inputs, "send")
        arguments.check_message(self, "send", "dst", dst, tag, LARGEST_TAG)
        memory = tensors.readable(tensor)
        blocking = compat.is_called_by("send")
        call = self.record("send", [tensor], peer=dst, tag=tag, blocking=blocking)
        work = BoxWork(self, call, [tensor])
        work.seal = None if blocking else sealed(call, memory)
        about = {"send": dst, "tag": tag, "tensor": values.described(tensor)}
        return self._begin(work, about, [memory])

    def recv(self, outputs: Tensors, src: int | None, tag: int = 0) -> BoxWork:
        """Receive a tensor from a rank of the group; ``None`` accepts any rank."""
        arguments.check_message(self, "recv", "src", src, tag, LARGEST_TAG)
        tensor = arguments.single(outputs, "recv")
        arguments.check_writable(tensor, "recv")
        peer = -1 if src is None else src
        blocking = compat.is_called_by("recv")
        call = self.record("recv", [tensor], peer=peer, tag=tag, blocking=blocking, sent=0)
        call.received = call.nbytes
        call.any_source = src is None
        work = BoxWork(self, call, [tensor], [tensor.detach()])
        about = {"recv": src, "tag": tag, "tensor": values.described(tensor)}
        return self._begin(work, about, [])

    def recv_anysource(self, outputs: Tensors, tag: int = 0) -> BoxWork:
        """Receive a tensor from any rank of the group."""
        return self.recv(outputs, None, tag)

    def _begin(self, work: BoxWork, about: dict[str, Any], inputs: Tensors) -> BoxWork:
        about |= {"group": self.number, "blocking": work.call.blocking}
        pieces = [values.bytes_of(tensor) for tensor in inputs]
        self.kernel.begin(work, about, pieces)
        if work.call.blocking:
            work.wait()
        return work


class BoxWork(TorchWork):
    """A communication of this rank.

    Args:
        outputs: the tensors whose values the kernel sends when the communication is over.
        finish: is called when they have been written.

    Attributes:
        number: its number on this rank.
        seal: of the tensor of an ``isend``.
        others: works that the caller waits for together with this one.
    """

    number = 0
    seal: Seal | None = None

    def __init__(
        self,
        group: BoxGroup,
        call: Call,
        result: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor] = (),
        finish: Callable[[], None] | None = None,
    ):
        super().__init__()
        self.group = group
        self.call = call
        self.others: Sequence[TorchWork] = ()
        self.ended = threading.Event()
        self._result = list(result)
        self._outputs = outputs
        self._finish = finish
        self._error: Exception | None = None
        self._over = 0.0
        self._has_values = self._is_seen = False
        self._source: torch.futures.Future[Any] | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._completing = threading.Lock()
        self._is_complete = False
        # Tensors made in inference mode may be written only in it.
        self._for_inference = any(tensor.is_inference() for tensor in result)

        storages.note(self)

    def tensors(self) -> Sequence[torch.Tensor]:
        """Return the tensors that it sends, and those that get values when it is over."""
        return [*self._result, *self._outputs]

    def is_pending(self) -> bool:
        """Return whether the values haven't come yet."""
        return not self.ended.is_set()

    # -- from the thread that reads ---------------------------------------------------------------

    def end(
        self, record: dict[str, Any], written: Sequence[torch.Tensor], error: Exception | None
    ) -> threading.Event:
        """Note that it is over.

        Args:
            record: what the kernel knows of the call: when it ended, its partner, ...
            written: the values of the outputs.
            error: what the caller gets.

        Returns:
            the event that wakes the program. The caller sets it when it holds this work no
            longer, so that the program's tensors are freed with the program's last name.
        """
        self._over = record["end"]
        self._error = error
        # A check may have given this rank another clock.
        shift = time.perf_counter() - _real_clock()
        for name in ("matched", "end"):
            record[name] = max(self.call.start, record.get(name, record["end"]) + shift)
        for name, value in record.items():
            setattr(self.call, name, value)
        try:
            if error is None:
                self._write(written)
        except Exception as wrong:
            self._error = wrong
        self._outputs = ()
        self._finish = None
        self._has_values = True
        if self._source is not None:
            self._complete_later(self._source)
        return self.ended

    def _write(self, written: Sequence[torch.Tensor]) -> None:
        with torch.inference_mode(self._for_inference), torch.no_grad():
            for output, value in zip(self._outputs, written, strict=True):
                output.copy_(value.reshape(output.shape))
            if self._finish is not None:
                self._finish()

    # -- from the rank's program ------------------------------------------------------------------

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it is over.

        Args:
            timeout: of a receive: when it gives up.

        Raises:
            CommunicationError: it failed, or it will never be over.
        """
        if torch.autograd._profiler_enabled():
            with torch.profiler.record_function(f"mpi:{self.call.op}"):
                return self._wait(timeout)
        return self._wait(timeout)

    synchronize = wait  # type: ignore[assignment]

    def _wait(self, timeout: timedelta | None) -> bool:
        for other in self.others:
            other.wait()
        self.call.waited = True
        if self._is_seen:
            return True
        limit = timeout.total_seconds() if timeout and self.call.op == "recv" else 0.0
        self._block(max(0.0, limit))
        self._is_seen = True
        self._lift_seal()
        return True

    def _block(self, limit: float = 0.0) -> None:
        """Wait until it is over, and raise its error; a receive is given up after the limit."""
        wait = [time.perf_counter(), 0.0]
        self.call.waits.append(wait)
        if not self.ended.is_set() or self._error is not None:
            self.group.kernel.wait(self, limit)
        while (left := self._over - _real_clock()) > 0:
            _real_sleep(left)  # the slow network
        wait[1] = time.perf_counter()
        if self._error is not None:
            raise self._error

    def _lift_seal(self) -> None:
        """Look at the seal once, because the program may change the tensor from now on."""
        seal, self.seal = self.seal, None
        if seal is not None:
            seal.check()

    def is_completed(self) -> bool:
        """Return whether it is over now."""
        over = self.ended.is_set() and _real_clock() >= self._over
        self.call.waited |= over
        if over and self._error is None:
            self._lift_seal()
        return over

    def is_success(self) -> bool:
        """Return whether it is over, and without an error."""
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        """Return its error."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Return its tensors."""
        return self._result

    def source_rank(self) -> int:
        """Return the sender's rank in the group."""
        return -1 if self.call.peer is None else self.call.peer

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Return the future that is complete when this is over, for DDP and hooks."""
        if self.others:
            self.wait()
        self.call.waited = True
        self.seal = None  # the future says when the program may change the tensor
        if self._future is None:
            self._source = torch.futures.Future()
            # PyTorch's C++ sees an error of then(), but not one of set_exception().
            self._future = self._source.then(self._outcome)
            if self.is_completed():
                self._complete(self._source)
            elif self._has_values:
                self._complete_later(self._source)
            else:
                self.group.kernel.wait_in_background(self)
        # DDP ends backward with a wait in C++, which sees no deadlock and hears no Ctrl-C.
        with contextlib.suppress(RuntimeError):  # outside a backward pass
            torch.autograd.Variable._execution_engine.queue_callback(self._wait_in_backward)
        return self._future

    def _wait_in_backward(self) -> None:
        if not self.is_completed():
            self._block()

    def _outcome(self, _source: torch.futures.Future[Any]) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self._result

    def interrupt_future(self) -> None:
        """Let what waits inside C++ for the future go on, with an error."""
        if self._source is not None:
            self._error = self._error or CommunicationError("interrupted", self.call)
            self._complete(self._source)

    def _complete_later(self, source: torch.futures.Future[Any]) -> None:
        """Complete a future in a separate thread, where callbacks may wait for other futures."""
        left = 0.0 if self._error is not None else max(0.0, self._over - _real_clock())
        timer = threading.Timer(left, self._complete, [source])
        timer.name = "future"
        timer.start()

    def _complete(self, source: torch.futures.Future[Any]) -> None:
        with self._completing:
            is_first, self._is_complete = not self._is_complete, True
        if is_first:
            source.set_result(None)
