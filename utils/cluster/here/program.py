"""Runs a program on ranks that are threads of this process, as mpiexec runs it on processes."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, TextIO

import torch
from ipyparallel.client.client import Metadata
from ipyparallel.client.futures import MessageFuture

from torch_mpi import settings
from torch_mpi.errors import CommunicationError
from utils.cluster.rank_shell import Output
from utils.jobs.thread_plan import ThreadPlan

from .rank import Rank
from .thread_ranks import Threads


def main(n: str, threads: str, script: str, *arguments: str) -> None:
    """Run a script on n ranks and end this process: with status 1 if a rank fails.

    The process also ends when its standard input does, so it doesn't outlive its parent.
    """
    end = os._exit  # a rank's own os._exit is refused
    threading.Thread(target=_end_with, args=(sys.stdin, end), daemon=True).start()
    streams = {"stdout": sys.stdout, "stderr": sys.stderr}
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    code = compile(Path(script).read_text(encoding="utf-8"), script, "exec")
    ranks = Threads(ThreadPlan(int(n), int(threads)))
    settings.section = "program"
    settings.seals_sends = False

    def run(rank: Rank, future: MessageFuture) -> None:
        torch.set_num_threads(int(threads))
        rank.shell.output = Output(Metadata(), _passing_on(streams))
        rank.user_ns |= {"__name__": "__main__", "__file__": script}
        rank.user_ns |= {"exit": sys.exit, "quit": sys.exit}  # instead of IPython's
        status = _status(code, rank)
        for stream in streams.values():
            stream.flush()
        if status:
            end(status)

    for answer in ranks.client.submit(dict.fromkeys(range(int(n)), run)).values():
        answer.result()
    end(0)


def _status(code: Any, rank: Rank) -> int:
    """Run the program on one rank; return its exit status."""
    try:
        exec(code, rank.user_ns)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException as error:
        # The first frame is the one above, which no student has written.
        frames = error.__traceback__ and error.__traceback__.tb_next
        traceback.print_exception(error.with_traceback(frames))
        if not isinstance(error, CommunicationError):  # which names its ranks
            print(f"The error occurred on rank {rank.number}.", file=sys.stderr)
        return 1
    return 0


def _passing_on(streams: dict[str, TextIO]) -> Any:
    """Return what prints each piece of a rank's output at once."""

    def show(kind: str, content: dict[str, Any]) -> None:
        if kind == "stream":
            stream = streams[content["name"]]
            stream.write(content["text"])
            stream.flush()

    return show


def _end_with(stream: TextIO, end: Any) -> None:
    stream.read()
    end(1)
