"""The program of a rank whose messages the kernel carries.

It gets its socket's number as its argument. One thread reads what the kernel sends, and the main
thread runs cells and answers questions.
"""

from __future__ import annotations

import builtins
import contextlib
import getpass
import importlib.abc
import os
import pickle
import queue
import socket
import sys
import tempfile
import threading
import traceback
import types
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from ipyparallel.client.client import Metadata
from IPython.core.interactiveshell import InteractiveShell
from torch.distributed import distributed_c10d

from torch_mpi import autoload, compat, present
from torch_mpi.lines import text_of
from torch_mpi.protocol.interrupts import guard, interrupt_main_thread
from utils.cluster import cell_replies, rank_side, stacks
from utils.cluster.rank_shell import Output, RankShell, Stream
from utils.jobs import NeedsProcesses

from . import values
from .frames import Frame, Frames, Piece
from .kernel_link import KernelLink
from .kernel_modules import KernelModules
from .rank_group import BoxGroup

#: How many frames of its stack a rank shows.
MOST_FRAMES = 200


class RankProgram:
    """A rank.

    Args:
        frames: the connection to the kernel.
        begin: what the kernel has sent first: rank, number of ranks, threads, folder.
    """

    def __init__(self, frames: Frames, begin: dict[str, Any]):
        self.rank = begin["rank"]
        self.n = begin["n"]
        self._frames = frames
        self._kernel = KernelLink(frames, self.rank, self.n)
        self._requests: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        torch.set_num_threads(begin["threads"])
        self._shell = _shell(self.rank, self.n)
        self._user_ns = self._shell.user_ns
        self._output = Output(Metadata(data={}, outputs=[]), self._show)
        self._shell.output = self._output
        self._request = 0
        sys.stdout = RankStream("stdout", lambda: self._output)
        sys.stderr = RankStream("stderr", lambda: self._output)
        sys.displayhook = self._shell.displayhook
        rank_side.keep_streams()
        # The kernel's folder is not in a sandbox.
        kernels = Path(begin["folder"])
        self._folder = kernels if os.access(kernels, os.W_OK) else Path(tempfile.mkdtemp())
        rank_side.watch_cells(self._user_ns, self.rank, self._folder)
        vars(self._shell)["ask_exit"] = rank_side.refuse_exit
        vars(builtins)["input"] = vars(getpass)["getpass"] = cell_replies.refuse_input
        self._bring_groups()

    def _bring_groups(self) -> None:
        """Let ``init_process_group("mpi")`` make a group whose messages the kernel carries."""
        compat.adapt_pytorch()
        autoload.explain_missing_store(distributed_c10d)
        vars(autoload)["LazyProcessGroupMPI"] = self
        vars(distributed_c10d).update(_MPI_AVAILABLE=True, ProcessGroupMPI=self)
        for module in (dist, distributed_c10d):
            vars(module)["is_mpi_available"] = lambda: True
        sys.meta_path.insert(0, NoMPI())
        sys.meta_path.append(KernelModules(self._kernel))

    def create(self, ranks: list[int]) -> BoxGroup | None:
        """Make a group, in the place of PyTorch's ``ProcessGroupMPI.create``.

        Args:
            ranks: its global ranks; empty for all.
        """
        compat.check_request()
        present.world = self._kernel.world
        members = tuple(ranks) if ranks else tuple(range(self.n))
        return self._kernel.new_group(members) if self.rank in members else None

    # -- the thread that reads --------------------------------------------------------------------

    def read_for_good(self) -> None:
        """Take what the kernel sends. Without the kernel, this process ends."""
        try:
            while (frame := self._frames.receive()) is not None and frame.kind != "end":
                if not self._kernel.take(frame):
                    self._take(frame)
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
            os._exit(1)
        os._exit(0)

    def _take(self, frame: Frame) -> None:
        if frame.kind == "interrupt":
            self._kernel.interrupt_futures()
            interrupt_main_thread()
        elif frame.kind == "where":
            place = stacks.place_of(_stack_of_main_thread(), self._folder / f"cells-{self.rank}")
            self._frames.send("at", {"place": place})
        else:
            self._requests.put(frame)

    # -- the main thread --------------------------------------------------------------------------

    def serve_for_good(self) -> None:
        """Do what the kernel asks for, one request after the other."""
        guard.install()
        while True:
            with contextlib.suppress(KeyboardInterrupt):  # it came too late
                frame = self._requests.get()
                self._serve(frame)

    def _serve(self, frame: Frame) -> None:
        self._request = frame.fields["request"]
        self._output = self._shell.output = Output(Metadata(data={}, outputs=[]), self._show)
        pieces: list[Piece] = []
        reply: dict[str, Any] = {"request": self._request}
        try:
            if frame.kind == "execute":
                reply |= self._execute(frame.fields["code"], frame.fields["silent"])
            else:
                reply["value"] = values.packed(self._do(frame), pieces)
        except BaseException as error:
            kind = type(error).__name__
            text = text_of(error)
            reply["error"] = [kind, text, f"{kind}: {text}".rstrip(": ")]
            pieces = []
        reply["data"] = values.packed(self._output.metadata["data"] or {}, pieces)
        self._frames.send("done", reply, pieces)

    def _execute(self, code: str, silent: bool) -> dict[str, Any]:
        count = self._shell.run(code, self._output, silent)
        return {"count": count, "error": self._shell.error}

    def _do(self, frame: Frame) -> Any:
        """Do what is asked for without IPython, and return the result."""
        if frame.kind == "ask":
            return exec(frame.fields["code"], self._user_ns)
        if frame.kind == "push":
            return self._user_ns.update(pickle.loads(frame.pieces[0]))
        if frame.kind == "pull":
            names = frame.fields["names"]
            if isinstance(names, str):
                return eval(names, self._user_ns)
            return [eval(name, self._user_ns) for name in names]
        from ipyparallel.serialize import uncan

        function, args, kwargs = pickle.loads(frame.pieces[0])
        args = [uncan(value, self._user_ns) for value in args]
        kwargs = {name: uncan(value, self._user_ns) for name, value in kwargs.items()}
        return uncan(function, self._user_ns)(*args, **kwargs)

    def _show(self, kind: str, content: dict[str, Any]) -> None:
        pieces: list[Piece] = []
        shown = values.packed(content, pieces)
        self._frames.send(
            "output", {"request": self._request, "kind": kind, "shown": shown}, pieces
        )


class RankStream(Stream):
    """A rank's standard output or error, which loses nothing that threads print between cells."""

    def write(self, text: str) -> int:
        """Write a text, or keep it for the next cell if no cell would show it."""
        if isinstance(text, str) and rank_side.is_between_cells():
            rank_side.keep_for_next_cell(text)
            return len(text)
        return super().write(text)


class NoMPI(importlib.abc.MetaPathFinder):
    """Hides mpi4py, for which this process would be the only rank."""

    def find_spec(self, name: str, *_: Any) -> None:
        """Raise an error for mpi4py and for what continues without dead ranks."""
        if name == "torch_mpi.survivors":
            raise NeedsProcesses(
                "shrink() makes a group without the dead ranks, which needs ranks of MPI: "
                'cluster.start(n, where="processes", fault_tolerant=True)'
            )
        if name.partition(".")[0] == "mpi4py":
            raise ModuleNotFoundError(
                "mpi4py can't reach these ranks, because the kernel carries their messages. Start "
                'them with where="processes" to use MPI',
                name=name,
            )


def _shell(rank: int, n: int) -> RankShell:
    """Return the IPython of this process, which has the names of the rank's cells."""
    shell = RankShell()
    main = types.ModuleType("__main__")
    main.__dict__.update(shell.user_ns)
    shell.user_module = main
    shell.user_ns = main.__dict__
    # ipyparallel's engines have these names as well.
    main.__dict__.update(mpi_rank=rank, mpi_size=n)
    sys.modules["__main__"] = main
    # `get_ipython()`, and ipyparallel, which asks for the shell of a kernel.
    vars_of_class: dict[str, Any] = {
        "instance": lambda cls, *_, **__: shell,
        "initialized": lambda cls: True,
    }
    for name, function in vars_of_class.items():
        setattr(InteractiveShell, name, classmethod(function))
    return shell


def _stack_of_main_thread() -> list[stacks.Frame]:
    """Return the frames of the main thread, innermost first."""
    stack: list[stacks.Frame] = []
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and len(stack) < MOST_FRAMES:
        code = frame.f_code
        stack.append(stacks.Frame(code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return stack


def main(number: str) -> None:
    """Connect, get ready, and serve the kernel."""
    frames = Frames(_socket(number))
    begin = frames.receive()
    if begin is None:
        return
    try:
        program = RankProgram(frames, begin.fields)
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
        raise
    threading.Thread(target=program.read_for_good, name="reader", daemon=True).start()
    frames.send("ready", {"host": socket.gethostname(), "cores": rank_side.cores()})
    program.serve_for_good()


def _socket(number: str) -> socket.socket:
    """Return the socket that the kernel has given to this process."""
    if hasattr(socket, "fromshare"):  # Windows
        shared: socket.socket = socket.fromshare(sys.stdin.buffer.read(int(number)))
        return shared
    return socket.socket(fileno=int(number))


if __name__ == "__main__":
    main(sys.argv[1])
