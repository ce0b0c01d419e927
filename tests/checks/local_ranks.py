"""Ranks without processes: each is a thread of this process, and one runs at a time.

:class:`LocalRanks` has what checks use of :class:`utils.cluster.Ranks`: ``n`` and ``ask``. A rank
runs until it waits for another one; then the next that can go on does. So a run is the same each
time, and a deadlock is found at once, when nobody can go on. What belongs to a process belongs to
each rank: PyTorch's world and its random numbers, the record of calls, the clocks and functions
that a check replaces (:data:`OWN`).
"""

from __future__ import annotations

import builtins
import contextlib
import datetime
import importlib
import io
import json
import os
import sys
import threading
import time
import timeit
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from local_group import LocalGroup, LocalWork, Traffic, now
from mpi4py import MPI
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

import torch_mpi.record
from torch_mpi.errors import (
    CommunicationError,
    CommunicationStopped,
    CommunicationTimeout,
    errors_line,
    users_line,
)
from torch_mpi.network import link
from torch_mpi.protocol.diagnosis import diagnose
from utils import data
from utils.cluster import notebook_words, questions
from utils.cluster.questions import Reply, about, plain, target_of, texts

#: Attributes of modules that each rank has for itself, as processes would.
OWN = [
    *((time, name) for name in ("perf_counter", "monotonic", "time")),
    *((time, f"{name}_ns") for name in ("perf_counter", "monotonic", "time")),
    *(
        (time, "sleep"),
        (timeit, "default_timer"),
        (datetime, "datetime"),
        (sys, "stdout"),
        (sys, "stderr"),
    ),
    *((MPI, "Wtime"), (dist, "new_group"), (distributed_c10d, "new_group")),
    *((module, name) for module in (dist, distributed_c10d) for name in ("isend", "irecv")),
    *((torch_mpi.record, "recorder"), (data, "fashion_mnist")),
    *((os, "fsync"), (os, "fdatasync"), (torch, "save")),
]
# Seconds after which a rank that neither ends nor communicates is given up.
PATIENCE = 60.0
CELL = "<ipython-input-local>"
#: How many accidents there were, and the names on each rank.
Traces = tuple[int, list[dict[str, Any]]]


class World:
    """The ranks, of which one runs at a time."""

    def __init__(self, n: int):
        self.n = n
        #: The rank that runs.
        self.rank = 0
        #: What a rank waits for; True: it can run; None: it has nothing to do.
        self.state: list[LocalWork | bool | None] = [None] * n
        self.failed: dict[int, dict] = {}
        self.incident: str | None = None
        self.counts: list[dict[str, int]] = [{} for _ in range(n)]
        self.groups: dict[tuple, Traffic] = {}
        self.of_groups: list[LocalGroup] = []
        # Locks that are released by another thread: many times cheaper than threading.Semaphore.
        self._turns = [_taken() for _ in range(n)]
        self._over = _taken()
        self._outside = [getattr(module, name) for module, name in OWN]
        self._own = [list(self._outside) for _ in range(n)]
        for own in self._own:
            own[OWN.index((torch_mpi.record, "recorder"))] = torch_mpi.record.Log()
        self._random = [torch.random.get_rng_state() for _ in range(n)]

    # -- turns ----------------------------------------------------------------------------

    def run(self) -> None:
        """All ranks have something to do: until they all are done."""
        outside = torch.random.get_rng_state()
        self._outside = [getattr(module, name) for module, name in OWN]
        self.state = [True] * self.n
        self._turns[0].release()
        if not self._over.acquire(timeout=PATIENCE):
            stacks = [
                "".join(traceback.format_stack(frame)[-3:])
                for frame in sys._current_frames().values()
            ]
            raise AssertionError(f"rank {self.rank} does not end:\n" + "\n".join(stacks))
        _set(self._outside)
        torch.random.set_rng_state(outside)

    def enter(self, rank: int) -> None:
        """It is this rank's turn."""
        self._turns[rank].acquire()
        self.rank = rank
        _set(self._own[rank])
        torch.random.set_rng_state(self._random[rank])

    def _leave(self, rank: int, to: int | None) -> None:
        self._own[rank] = [getattr(module, name) for module, name in OWN]
        self._random[rank] = torch.random.get_rng_state()
        (self._over if to is None else self._turns[to]).release()

    def done(self, rank: int) -> None:
        """This rank has nothing to do any more."""
        self.state[rank] = None
        following = self._following(rank)
        if following is None and any(self.state):
            self._stop(None)
            following = self._following(rank)
        self._leave(rank, following)

    def block(self, work: LocalWork) -> None:
        """The rank that runs waits for this."""
        rank = self.rank
        if work.done:
            return
        if self.incident:
            self._end(work, rank)
            return
        self.state[rank] = work
        if self._following(rank) is None:
            self._stop(rank)
        self._pass_on(rank)
        self.state[rank] = True

    def let_others_run(self) -> None:
        """The rank that runs asks for something, and would go on asking."""
        self._pass_on(self.rank)

    def _pass_on(self, rank: int) -> None:
        following = self._following(rank)
        if following != rank:
            self._leave(rank, following)
            self.enter(rank)

    def _following(self, rank: int) -> int | None:
        """The next rank that can run; this one, if there is no other."""
        for k in range(1, self.n + 1):
            state = self.state[(rank + k) % self.n]
            if state is True or (isinstance(state, LocalWork) and state.done):
                return (rank + k) % self.n
        return None

    # -- errors ---------------------------------------------------------------------------

    def raised(self, rank: int, error: BaseException) -> None:
        """The code of a rank has ended with an error."""
        if isinstance(error, CommunicationError) and self.incident:
            return
        text = f"{type(error).__name__}: {error}"
        self.failed[rank] = {"kind": "raised", "error": text, "where": errors_line(error)}
        self._stop(None)

    def _stop(self, rank: int | None) -> None:
        """Nobody can go on, or a rank has failed: all who wait get an error."""
        waiting = {r: w for r, w in enumerate(self.state) if isinstance(w, LocalWork)}
        statuses = [self._status(r, waiting.get(r)) for r in range(self.n)]
        self.incident = str(diagnose(statuses))
        for r, work in waiting.items():
            if not work.done:
                self._end(work, r)

    def _status(self, rank: int, work: LocalWork | None) -> dict:
        status = {"rank": rank, "state": "left", "at": now()} | self.failed.get(rank, {})
        if status.get("kind"):
            return status | {"state": "stopped"}
        if work is None or work.done:
            return status if self.state[rank] is None else status | {"state": "running"}
        missing, any_of_them = work.missing()
        calls = [c for c in self._log(rank).since(0) if c.name() == work.call.name()]
        return status | {
            "state": "stopped",
            "kind": "followed" if self.failed else "deadlock",
            "error": self._text(work, rank),
            "call": work.call.name(),
            "what": work.call.describe(),
            "where": work.call.where,
            "for": missing,
            "any": any_of_them,
            "times": len(calls),
        }

    def _log(self, rank: int) -> torch_mpi.record.Log:
        module, name = at = (torch_mpi.record, "recorder")
        return getattr(module, name) if rank == self.rank else self._own[rank][OWN.index(at)]

    def _text(self, work: LocalWork, rank: int) -> str:
        missing, any_of_them = work.missing()
        who = "any rank" if any_of_them else ", ".join(f"rank {other}" for other in missing)
        if work.call.op in ("send", "recv"):
            who = f"the matching {'receive' if work.call.op == 'send' else 'send'} of {who}"
        where = work.call.where or users_line()
        return f"rank {rank} waits in {work.call.describe()} at {where}, and {who} never comes."

    def _end(self, work: LocalWork, rank: int) -> None:
        kind = CommunicationStopped if self.failed else CommunicationTimeout
        work.end(kind(f"{self._text(work, rank)}\n{self.incident}", work.call))

    # -- what groups need -----------------------------------------------------------------

    def begin(self, call: torch_mpi.record.Call) -> None:
        """A communication of the rank that runs."""
        torch_mpi.record.recorder.add(call)

    def count(self, what: str) -> int:
        """How many of them this rank has had, with this one."""
        counts = self.counts[self.rank]
        counts[what] = counts.get(what, 0) + 1
        return counts[what]

    def create(self, ranks: list[int]) -> LocalGroup | None:
        """What stands in for PyTorch's ``ProcessGroupMPI.create``."""
        members = tuple(ranks) if ranks else tuple(range(self.n))
        number = self.count(f"groups of {members}")
        if self.rank not in members:
            return None
        traffic = self.groups.setdefault((members, number), Traffic())
        group = LocalGroup(self, members, traffic)
        self.of_groups.append(group)
        return group

    def sweep(self) -> dict[int, list[str]]:
        """Messages that nobody has received, in words, by sender; they are thrown away."""
        left: dict[int, list[str]] = {}
        for (members, _), traffic in self.groups.items():
            for message in traffic.sent:
                call, sender = message.work.call, members[message.source]
                what = f"{call.dtype}{list(call.shape)} ({call.nbytes} bytes, tag={call.tag})"
                letter = {"to": members[message.to], "what": what, "where": call.where}
                left.setdefault(sender, []).append(questions.unreceived(letter))
            traffic.sent.clear()
            traffic.awaited.clear()  # receives that nobody has sent to are taken back
        return left

    def meet_again(self) -> None:
        """After an error: nothing is under way, and all ranks count their collectives anew."""
        self.failed, self.incident = {}, None
        for traffic in self.groups.values():
            traffic.clear()
        for group in self.of_groups:
            group.number = 0


def _taken() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


def _set(values: list) -> None:
    for (module, name), value in zip(OWN, values, strict=True):
        setattr(module, name, value)


class LocalRanks:
    """Ranks for checks. Use it with ``with``: it stands in for the backend meanwhile."""

    def __init__(self, n: int):
        notebook_words.use()
        self.n = n
        self.world = World(n)
        self.user_ns: list[dict[str, Any]] = [
            {"__builtins__": builtins, "rank": rank, "world_size": n} for rank in range(n)
        ]
        #: Runs that ended with an error, in a deadlock, or with messages that nobody received.
        self.accidents = 0
        self._jobs: list[Callable[[], None] | None] = [None] * n
        self._threads: list[threading.Thread] = []
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> LocalRanks:
        self._replace(distributed_c10d, "_world", ThreadLocalWorld())
        self._replace(distributed_c10d, "ProcessGroupMPI", self.world)
        isolate = torch._C._distributed_c10d._set_thread_isolation_mode
        isolate(True)
        self._exit.callback(isolate, False)
        # Ranks in threads share it, and put back what another one of them has set.
        self._exit.callback(link.set, link.network)
        # What a check computes itself is small, too: more threads would only wait for each other.
        self._exit.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        self._threads = [
            threading.Thread(target=self._live, args=(rank,), daemon=True) for rank in range(self.n)
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._all(None)
        self._exit.close()

    def _replace(self, module: object, name: str, value: object) -> None:
        self._exit.callback(setattr, module, name, getattr(module, name))
        setattr(module, name, value)

    def _live(self, rank: int) -> None:
        torch.set_num_threads(1)
        while True:
            self.world.enter(rank)
            job = self._jobs[rank]
            if job is not None:
                job()
            self.world.done(rank)
            if job is None:
                return

    def _all(self, job: Callable[[int], None] | None) -> None:
        for rank in range(self.n):
            self._jobs[rank] = None if job is None else lambda rank=rank: job(rank)
        self.world.run()

    def run(self, code: str) -> None:
        """Run a cell on every rank; raises what it raises there."""
        errors: list[BaseException] = []

        def cell(rank: int) -> None:
            try:
                exec(compile(code, CELL, "exec"), self.user_ns[rank])
            except Exception as error:
                self.world.raised(rank, error)
                errors.append(error)

        self._all(cell)
        if errors:
            self._meet_again()
            raise errors[0]

    def ask(
        self, target: str | Callable[..., Any], *, timeout=60.0, each=None, **kwargs: Any
    ) -> list[Reply]:
        """One `Reply` of each rank, as `cluster.Ranks.ask` gives it."""
        target = target_of(target)
        arguments = texts(self.n, target, kwargs, each)
        module, _, name = target.partition(":")
        function = getattr(importlib.import_module(module), name)
        replies: list[Reply | None] = [None] * self.n

        def answer(rank: int) -> None:
            replies[rank] = self._reply(rank, function, arguments[rank])

        self._all(answer)
        if any(reply.status != "ok" for reply in replies):
            self._meet_again()
            return replies
        left = self.world.sweep()
        self.accidents += bool(left)
        return [replace(r, unreceived=tuple(left.get(r.rank, ()))) for r in replies]

    def _meet_again(self) -> None:
        self.accidents += 1
        self.world.meet_again()

    def traces(self) -> Traces:
        """What a run may leave behind that another one notices."""
        return self.accidents, [dict(namespace) for namespace in self.user_ns]

    def _reply(self, rank: int, function: Callable, arguments: str) -> Reply:
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                value = function(self.user_ns[rank], rank=rank, **json.loads(arguments))
            before = torch_mpi.record.recorder.mark()
            value = json.loads(json.dumps(plain(value)))
            late = torch_mpi.record.recorder.mark() > before
        except Exception as error:
            self.world.raised(rank, error)
            said = f"{type(error).__name__}: {error}"
            line = errors_line(error)
            where = line if line.startswith("cell") else None
            told = {"stdout": printed.getvalue(), **about(error, str(error))}
            return Reply(rank, "error", error=said, line=where, **told)
        forged = "the rank communicated while its result was read" if late else ""
        return Reply(rank, "ok", value, stdout=printed.getvalue(), forged=forged)
