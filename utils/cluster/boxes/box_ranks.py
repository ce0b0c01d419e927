"""The running ranks of a notebook that are processes with one socket each."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ipyparallel.client.asyncresult import AsyncResult

from torch_mpi.network import Network, link
from utils.cluster.questions import Confirmed
from utils.cluster.running import Running
from utils.jobs import RanksError
from utils.jobs.box_plan import RANK, BoxPlan

from .carrier import Carrier
from .client import Client
from .frames import BrokenFrame, Frame, Frames
from .records import Confirmation, ForgedRecord

#: Seconds that ranks get to start, and to end.
START = 180.0
END = 2.0
#: Most characters of the place at which a rank says it is.
MOST_OF_A_PLACE = 400


class BoxRank:
    """The process of one rank.

    Attributes:
        frames: the connection to it.
        facts: what it says of itself.
    """

    def __init__(self, rank: int, plan: BoxPlan, folder: Path):
        here, there = socket.socketpair()
        self.frames = Frames(here)
        self.frames.limit_sends()
        self.facts: dict[str, Any] = {}
        self.is_up = threading.Event()
        self.place: str | None = None
        self.reader: threading.Thread | None = None
        self._errors = folder / f"errors-{rank}"
        with self._errors.open("wb") as errors, there:
            self.process = _started(rank, there, plan, errors)
        self.frames.send(
            "begin", {"rank": rank, "n": plan.n, "threads": plan.threads, "folder": str(folder)}
        )

    def is_alive(self) -> bool:
        """Return whether the process runs."""
        return self.process.poll() is None

    def last_words(self) -> str:
        """Return what the process wrote to its standard error, and how it ended."""
        return self._errors.read_text(encoding="utf-8", errors="replace")[-4000:].strip()

    def kill(self) -> None:
        """End the process."""
        self.frames.close()
        self.process.kill()
        self.process.wait()


def _started(
    rank: int, there: socket.socket, plan: BoxPlan, errors: Any
) -> subprocess.Popen[bytes]:
    """Start the process of a rank, which gets this socket."""
    program = plan.command("-m", "utils.cluster.boxes.rank_program")
    variables = plan.variables() | {RANK: str(rank)}
    kept: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": errors, "env": variables}
    if hasattr(socket, "fromshare"):  # Windows
        process = subprocess.Popen([*program, "512"], stdin=subprocess.PIPE, **kept)
        assert process.stdin is not None
        with process.stdin:
            process.stdin.write(there.share(process.pid).ljust(512, b"\0"))  # type: ignore[attr-defined]
        return process
    number = there.fileno()
    # Ctrl-C in a terminal is for the kernel, which tells its ranks.
    return subprocess.Popen(
        [*program, str(number)],
        stdin=subprocess.DEVNULL,
        pass_fds=[number],
        start_new_session=True,
        **kept,
    )


class Boxes(Running):
    """Ranks that are processes, whose messages this process carries."""

    client: Client

    def __init__(self, plan: BoxPlan):
        super().__init__(plan.n)
        self._plan = plan
        self._folder = Path(tempfile.mkdtemp(prefix="ddl-labs-"))
        self._network = link.network
        # The number of each rank's last call before it was asked a question.
        self._asked_at: dict[int, int] = {}
        self._begin()

    def _begin(self) -> None:
        self._ranks = [BoxRank(rank, self._plan, self._folder) for rank in range(self.n)]
        frames = [rank.frames for rank in self._ranks]
        self._carrier = Carrier(frames, self._plan.timeout, self._place_of)
        self.client = Client(frames, self._carrier)
        for number, rank in enumerate(self._ranks):
            rank.reader = threading.Thread(
                target=self._read, args=(number, rank), name=f"rank {number}", daemon=True
            )
            rank.reader.start()
        deadline = time.monotonic() + START
        for number, rank in enumerate(self._ranks):
            rank.is_up.wait(max(0.0, deadline - time.monotonic()))
            if not rank.facts:
                said = rank.last_words() or f"it was not ready after {START:g} s"
                self.close()
                raise RanksError(f"rank {number} did not start: {said}")
        self.facts = [
            {
                "rank": number,
                "host": str(rank.facts["host"]),
                "cores": list(rank.facts["cores"]),
                "numa": [],
                "threads": self._plan.threads,
                "library": "none: the kernel carries the messages",
                "pid": rank.process.pid,
            }
            for number, rank in enumerate(self._ranks)
        ]

    def _read(self, number: int, rank: BoxRank) -> None:
        """Take what a rank sends until its process has ended."""
        why = ""
        try:
            while (frame := rank.frames.receive()) is not None:
                if not (self._carrier.take(number, frame) or self.client.take(number, frame)):
                    self._take(rank, frame)
        except (BrokenFrame, RecursionError) as error:
            why = str(error)
            rank.process.kill()
        except (OSError, ValueError):
            pass  # its process is gone, or this end is closed
        status = rank.process.wait()
        rank.is_up.set()
        if number in self.client.ids:
            self.client.ids.remove(number)
        self._carrier.leave(number, why or _death(status))
        self.client.abandon(number)

    def _take(self, rank: BoxRank, frame: Frame) -> None:
        if frame.kind == "ready":
            rank.facts = frame.fields
            rank.is_up.set()
        elif frame.kind == "at":
            rank.place = str(frame.fields["place"])[:MOST_OF_A_PLACE]
        else:
            raise BrokenFrame(f"there is no frame {frame.kind}")

    # -- the contract of ranks -------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        """Return the folder that the kernel and its ranks share."""
        return self._folder

    def over(self) -> bool:
        """Return whether all processes have ended."""
        return not any(rank.is_alive() for rank in self._ranks)

    def last_words(self) -> str:
        """Return how ranks that died have ended, in the words of a launcher."""
        lines = []
        for number, rank in enumerate(self._ranks):
            status = rank.process.poll()
            if status is not None:
                by = _signal(status)
                how = f"signal {by}" if by else ""
                where = f"process rank {number} with PID {rank.process.pid} on node here"
                lines.append(
                    f"{where} exited on {how}" if how else f"rank {number} ended: {status}"
                )
                lines.append(rank.last_words())
        return "\n".join(lines)

    def send(self, cells: Mapping[int, str]) -> dict[int, AsyncResult]:
        """Send a silent cell to each of these ranks, all at once."""
        living = {rank: code for rank, code in cells.items() if rank in self.client.ids}
        # What a rank's threads have called since its last request counts for this one, too.
        self._asked_at |= {rank: self._carrier.before(rank) for rank in living}
        return self.client.question_each(living)

    def signal(self, name: str, targets: list[int] | None = None, wait: float = 2.0) -> None:
        """Interrupt ranks, or send another signal to their processes."""
        ranks = self.client.ids if targets is None else targets
        if name == signal.Signals.SIGINT.name:
            self._carrier.interrupt(ranks)
            return
        for rank in ranks:
            if self._ranks[rank].is_alive():
                os.kill(self._ranks[rank].process.pid, signal.Signals[name])

    def places(self, timeout: float) -> list[str]:
        """Return the place of each rank, in words."""
        busy = self._carrier.busy()
        asked = {rank: self._ranks[rank] for rank in busy}
        for rank in asked.values():
            rank.place = None
            if rank.is_alive():
                rank.frames.send("where", {})
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and any(r.place is None for r in asked.values()):
            time.sleep(0.005)
        return [self._told(k) if k in busy else "idle" for k in range(self.n)]

    def _told(self, number: int) -> str:
        return self._ranks[number].place or "inside C, where it can't say its line"

    def _place_of(self, number: int) -> str:
        return self.places(1.0)[number]

    def expect(self, module: str, of_ours: bool) -> None:
        """Let the ranks import this module and what it needs, although they have no such file."""
        self._carrier.given |= self._plan.given(module)
        self._carrier.is_strict = not of_ours

    def confirmed(self, rank: int, value: Any) -> Confirmed:
        """Return a rank's reply with the kernel's own records, and what the reply leaves out."""
        if self._carrier.has_raised(rank):
            raise ForgedRecord("a communication of the rank failed, and it went on")
        before = self._asked_at.get(rank, 0)
        calls = self._carrier.calls_of(rank)
        if self._carrier.forgotten(rank) > before:
            raise ForgedRecord("the rank made more calls than the kernel keeps")
        look = Confirmation({number: call for number, call in calls.items() if number > before})
        return Confirmed(look.of(value), look.lists, look.left_out())

    def use_network(self, values: dict[str, Any] | None) -> None:
        """Use the network with these attributes for the messages, or the machine's own."""
        link.set(Network.from_dict(values))
        self._carrier.world.costs.forget_messages()

    def replace_ranks(self) -> bool:
        """End the processes, and start new ones."""
        view = self.client
        self._end_processes()
        for notes in self._folder.glob("cells-*"):
            notes.unlink()
        self._begin()
        view.become(self.client)
        self.client = view
        return True

    def _end_processes(self) -> None:
        self._carrier.end()
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            if rank.reader is not None:
                rank.reader.join(END)

    def close(self) -> None:
        """End the ranks and everything that was started for them."""
        self._end_processes()
        self.client.close()
        link.set(self._network)
        shutil.rmtree(self._folder, ignore_errors=True)


def _signal(status: int) -> int:
    """Return the signal that ended a process, or 0; a sandbox adds 128 to the number."""
    if status < 0:
        return -status
    return status - 128 if status - 128 in signal.valid_signals() else 0


def _death(status: int) -> str:
    """Return how a process ended, in words."""
    by = _signal(status)
    return f"signal {by}" if by else f"its process ended with status {status}"
