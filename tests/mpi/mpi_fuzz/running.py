"""What the text of a program calls: its checks against the model, and its waits."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from torch_mpi.network import Network, link

from .model import Model, objects_after, thing
from .tensors import memory

__all__ = ["Checks", "completed", "options", "thing"]


class Wrong(AssertionError):
    """A rank holds something else than the model says."""


class Checks:
    """A program's begin and end, and the comparisons of one rank.

    Attributes:
        tensors: of this rank, by the numbers of steps.
    """

    def __init__(self, program: dict):
        self._program = program
        self._steps = {step["id"]: step for step in program["steps"]}
        self.tensors: dict[int, list[torch.Tensor]] = {}

    def begin(self) -> None:
        """Make the default group, on the network that the program asks for."""
        level = dist.DebugLevel.DETAIL if self._program["strict"] else dist.DebugLevel.OFF
        dist.set_debug_level(level)
        timeout = timedelta(seconds=self._program["timeout"])
        dist.init_process_group("mpi", timeout=timeout)
        self._rank = dist.get_rank()
        if "fault" not in self._program:
            self._model = Model(self._program, self._rank)
        network = self._program["network"]
        link.set(Network(*network) if network else None)

    def __call__(self, step: int) -> None:
        """What a step has left in this rank's tensors, bit for bit, and around them in memory.

        Raises:
            Wrong: something else, with both sides.
        """
        tensors, expected = self.tensors[step], self._model.after[step]
        if self._steps[step]["do"] in ("recv_any", "irecv_any"):
            self._any_order(step, tensors, expected)
            return
        for place, (got, want) in enumerate(zip(tensors, expected, strict=True)):
            if not torch.equal(memory(got), want):
                raise Wrong(self._differ(step, place, got, want))

    def _any_order(self, step: int, tensors: list, expected: list) -> None:
        got = sorted(_digest(t) for t in tensors)
        if got != sorted(_digest(t) for t in expected):
            raise Wrong(f"step {step}, rank {self._rank}: got {tensors}, expected {expected}")

    def _differ(self, step: int, place: int, got: torch.Tensor, want: torch.Tensor) -> str:
        whole = torch.empty(0, dtype=got.dtype).set_(want.untyped_storage())
        expected = whole.as_strided(got.shape, got.stride(), got.storage_offset())
        what = self._steps[step]["do"]
        return (
            f"step {step}, {what}: rank {self._rank}, tensor {place} of its list is {got}, "
            f"expected {expected}; of {len(want)} bytes {int((memory(got) != want).sum())} differ"
        )

    def objects(self, step: int, got: list | None) -> None:
        """The objects that a rank has after a step of objects.

        Raises:
            Wrong: something else.
        """
        expected = objects_after(self._steps[step], self._rank)
        if "fault" not in self._program and (got or []) != expected:
            raise Wrong(f"step {step}, rank {self._rank}: {str(got)[:300]}: {str(expected)[:300]}")

    def end(self) -> None:
        """Nothing has changed after it was checked; the groups are destroyed."""
        if "fault" not in self._program:
            for step, tensors in self._model.tensors[self._rank].items():
                if self._steps[step]["do"] in ("recv_any", "irecv_any"):
                    continue
                for place, (got, want) in enumerate(zip(self.tensors[step], tensors, strict=True)):
                    if not torch.equal(memory(got), memory(want)):
                        text = self._differ(step, place, got, memory(want))
                        raise Wrong(f"at the end of the program: {text}")
        dist.destroy_process_group()


def _digest(tensor: torch.Tensor) -> bytes:
    return bytes(memory(tensor.clone(memory_format=torch.contiguous_format)).tolist())


def completed(works: list, how: str) -> None:
    """Return when all works are over: by ``wait``, by their futures, or by asking them."""
    for work in works:
        future = work if isinstance(work, torch._C.Future) else None  # of a coalesced call
        if how == "poll":
            while not (work.is_completed() if future is None else future.done()):
                time.sleep(1e-4)
        elif how == "future" and future is None:
            work.get_future().wait()
        work.wait()


def options(op) -> dist.ReduceScatterOptions:
    """Options of a reduce_scatter for the group's own method."""
    made = dist.ReduceScatterOptions()
    made.reduceOp = op
    return made
