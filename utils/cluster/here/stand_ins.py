"""What replaces processes while ranks are threads, in PyTorch, IPython and Python.

Everything here asks which thread calls it. The kernel's own threads get what they always had.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib.abc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from IPython import get_ipython
from IPython.core.interactiveshell import InteractiveShell
from torch.autograd import profiler
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

from torch_mpi import autoload, compat
from torch_mpi.network import link
from utils.cluster import cell_replies
from utils.cluster.rank_shell import ENDS_ALL
from utils.jobs import NeedsProcesses, thread_plan

from .rank import Rank

NOBODY_DIES = "shrink() makes a group without the dead ranks, and ranks inside the kernel can't die"
HELPERS = (
    "A thread that a rank starts would communicate while the rank computes, and ranks inside the "
    "kernel take turns. Let the rank itself communicate"
)


class Worlds(ThreadLocalWorld):
    """PyTorch's view of the groups, for each thread of the process.

    Args:
        helps: returns whether the present thread was started by a rank.
    """

    def __init__(self, helps: Callable[[], bool]):
        super().__init__()
        self._helps = helps

    def _get_world(self) -> Any:
        if self._helps():
            raise NeedsProcesses(HELPERS)
        return super()._get_world()


class StandIns(contextlib.ExitStack):
    """The stand-ins, until the end of the ``with`` block.

    Args:
        create: makes a process group, see ``ProcessGroupMPI.create`` of PyTorch.
        mine: returns the rank whose thread calls it; ``None`` in a thread of the kernel.
    """

    def __init__(self, create: Callable[[list[int]], Any], mine: Callable[[], Rank | None]):
        super().__init__()
        self.create = create
        self._mine = mine
        self._profiling: Rank | None = None
        self._replace_groups()
        self._replace_shells()
        self._replace_ends()
        self._replace_input()
        self._replace_profiler()
        self._replace(thread_plan, "is_rank_here", lambda: self._mine() is not None)
        finder = _NoMPI(mine)
        sys.meta_path.insert(0, finder)
        self.callback(sys.meta_path.remove, finder)

    def _replace(self, module: Any, name: str, value: Any) -> None:
        self.callback(setattr, module, name, getattr(module, name))
        setattr(module, name, value)

    def _replace_groups(self) -> None:
        """Give each rank its own world in PyTorch, and our groups under the name "mpi"."""
        self._replace_threads()
        self._replace(
            distributed_c10d, "_world", Worlds(lambda: _helps(threading.current_thread()))
        )
        isolate = vars(torch._C._distributed_c10d)["_set_thread_isolation_mode"]
        isolate(True)
        self.callback(isolate, False)
        compat.adapt_pytorch()
        autoload.explain_missing_store(distributed_c10d)
        self._replace(autoload, "LazyProcessGroupMPI", self)
        if hasattr(distributed_c10d, "ProcessGroupMPI"):  # PyTorch 2.13
            self._replace(distributed_c10d, "ProcessGroupMPI", self)
        for module in (torch.distributed, distributed_c10d):
            self._replace(module, "is_mpi_available", lambda: True)
        self.callback(link.set, link.network)

    def _replace_threads(self) -> None:
        """Note which threads ranks start: they belong to no rank, so they can't communicate."""
        start = threading.Thread.start

        def noted(thread: threading.Thread) -> None:
            if self._mine() is not None or _helps(threading.current_thread()):
                vars(thread)["_helps_a_rank"] = True
            start(thread)

        self._replace(threading.Thread, "start", noted)

    def _replace_shells(self) -> None:
        """Let ``get_ipython()`` return a rank's own IPython on the rank."""
        instance: Any = InteractiveShell.instance
        initialized: Any = InteractiveShell.initialized

        def instance_of(cls: type, *args: Any, **kwargs: Any) -> Any:
            rank = self._mine()
            return instance.__func__(cls, *args, **kwargs) if rank is None else rank.shell

        def is_there(cls: type) -> bool:
            return self._mine() is not None or bool(initialized.__func__(cls))

        for name, function in (("instance", instance_of), ("initialized", is_there)):
            setattr(InteractiveShell, name, classmethod(function))
            self.callback(delattr, InteractiveShell, name)

    def _replace_ends(self) -> None:
        """Refuse what would end the process of all ranks."""

        here = os.getpid()

        def refusing(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
            def refuse(*args: Any) -> Any:
                is_own = name != "kill" or (args[0] == os.getpid() and args[1])
                # A child, such as a worker of a DataLoader, may end itself.
                if is_own and self._mine() is not None and os.getpid() == here:
                    raise NeedsProcesses(f"os.{name}() {ENDS_ALL}")
                return real(*args)

            return refuse

        for name in ("_exit", "abort", "kill"):
            self._replace(os, name, refusing(name, getattr(os, name)))

    def _replace_input(self) -> None:
        """Refuse a rank's questions to the user: ranks that are processes can't ask, either."""

        def refusing(real: Callable[..., str]) -> Callable[..., str]:
            def ask(*args: Any) -> str:
                if self._mine() is not None:
                    cell_replies.refuse_input()
                return real(*args)

            return ask

        # The kernel makes its `raw_input` the builtin `input` at the beginning of each cell.
        kernel = getattr(get_ipython(), "kernel", None)
        for place, name in ((builtins, "input"), (kernel, "raw_input"), (kernel, "getpass")):
            if hasattr(place, name):
                self._replace(place, name, refusing(getattr(place, name)))

    def _replace_profiler(self) -> None:
        """Let one rank at a time profile, because PyTorch profiles a whole process."""
        prepare = profiler._prepare_profiler
        disable = profiler._disable_profiler

        def prepare_for_one(*args: Any, **kwargs: Any) -> Any:
            rank = self._mine()
            if rank is not None and self._profiling not in (None, rank):
                raise NeedsProcesses(
                    "PyTorch profiles a whole process, and these ranks share one. Profile on one "
                    "rank: `if rank == 0:`"
                )
            self._profiling = rank
            with _quiet():
                return prepare(*args, **kwargs)

        def disabled() -> Any:
            self._profiling = None
            return disable()

        # PyTorch's C++ would write lines about itself into the cell.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        self._replace(profiler, "_prepare_profiler", prepare_for_one)
        self._replace(profiler, "_disable_profiler", disabled)


def _helps(thread: threading.Thread) -> bool:
    return hasattr(thread, "_helps_a_rank")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide what C++ writes: an error that the thread isn't the one that has imported PyTorch."""
    kept = os.dup(2)
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


class _NoMPI(importlib.abc.MetaPathFinder):
    """Hides mpi4py from ranks that are threads: MPI would take all of them for one rank."""

    def __init__(self, mine: Callable[[], Rank | None]):
        self._mine = mine

    def find_spec(self, name: str, *_: Any) -> None:
        """Raise an error if a rank imports mpi4py, or what continues without dead ranks."""
        if name == "torch_mpi.survivors" and self._mine() is not None:
            raise NeedsProcesses(NOBODY_DIES)
        if name.partition(".")[0] == "mpi4py" and self._mine() is not None:
            raise ModuleNotFoundError(
                "mpi4py needs a process for each rank, and these ranks are threads of one process",
                name=name,
            )
