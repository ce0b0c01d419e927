"""The world of ranks works without threads that take turns: here sockets bring it the calls."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time

import pytest
import torch

from torch_mpi.record import Log
from utils.cluster.world.shared_ranks import SharedRanks

pytestmark = pytest.mark.timeout(60)
LENGTH = struct.Struct("!I")


class RealClocks:
    """One clock for all ranks, which nobody moves on."""

    def now(self, rank):
        return time.perf_counter()

    def reach(self, rank, moment):
        pass

    def stopped(self, rank):
        return contextlib.nullcontext()


class Sockets:
    """A carrier: each rank sends its calls through a socket, and a thread here answers them."""

    batch, clocks = 1, RealClocks()

    def __init__(self, sockets):
        self.n = len(sockets)
        self.logs = [Log() for _ in sockets]
        self._world = SharedRanks(self)
        self._turn = threading.Condition()
        self._waited, self._busy = {}, set(range(self.n))
        self._here = threading.local()
        self._threads = [
            threading.Thread(target=self._serve, args=(rank, end), daemon=True)
            for rank, end in enumerate(sockets)
        ]
        for thread in self._threads:
            thread.start()

    def join(self):
        """Wait until all ranks have closed their ends."""
        for thread in self._threads:
            thread.join()

    @property
    def rank(self):
        return self._here.rank

    def _serve(self, rank, end):
        self._here.rank = rank
        with self._turn:
            group = self._world.new_group(tuple(range(self.n)))
        while call := received(end):
            self._here.call = call
            with self._turn:
                reply = self._answer(group, call)
            sent(end, reply)
        with self._turn:
            self._busy.discard(rank)
            self._look()

    def _answer(self, group, call):
        tensor = torch.tensor(call["values"])
        try:
            getattr(group, call["op"])([tensor], *call["more"]).wait()
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return {"values": tensor.tolist()}

    # -- the contract of a carrier ------------------------------------------------------------

    def block(self, waited, until=None):
        self._waited[self.rank] = waited
        self._look()
        self._turn.wait_for(lambda: waited.done, until and until - time.perf_counter())
        del self._waited[self.rank]

    def _look(self):
        """A rank that computes may still call, so only ranks that all wait are stuck."""
        if self._busy == set(self._waited) and not any(w.done for w in self._waited.values()):
            self.stuck()
        self._turn.notify_all()

    def ended(self, waited):
        pass

    def let_others_run(self):
        return False

    def waiting(self):
        return {rank: waited for rank, waited in self._waited.items() if not waited.done}

    def busy(self):
        return sorted(self._busy)

    def interrupt(self, ranks):
        raise NotImplementedError

    def log(self, rank):
        return self.logs[rank]

    def place(self):
        return "answer.py", self._here.call["line"], "main"

    def is_called_by(self, name):
        return True


def sent(end, message):
    """Send a frame: the length, and JSON."""
    body = json.dumps(message).encode()
    end.sendall(LENGTH.pack(len(body)) + body)


def received(end):
    """Return the next frame; None when the other end has closed."""
    with end.makefile("rb", buffering=0) as stream:
        head = stream.read(LENGTH.size)
        return json.loads(stream.read(LENGTH.unpack(head)[0])) if head else None


def play(*programs):
    """Let each rank make its calls; return all replies by rank, and the carrier."""
    pairs = [socket.socketpair() for _ in programs]
    carrier = Sockets([here for here, _ in pairs])
    replies = [[] for _ in programs]

    def rank_of(end, program, mine):
        for line, (op, values, *more) in enumerate(program, 1):
            sent(end, {"op": op, "values": values, "more": more, "line": line})
            mine.append(received(end))
        end.shutdown(socket.SHUT_WR)

    ranks = [
        threading.Thread(target=rank_of, args=(end, program, mine))
        for (_, end), program, mine in zip(pairs, programs, replies, strict=True)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    carrier.join()
    for pair in pairs:
        for end in pair:
            end.close()
    return replies, carrier


def test_a_world_behind_sockets_computes_and_records_each_call():
    ring = [[("send", [1.0 * r], (r + 1) % 3), ("recv", [0.0], (r - 1) % 3)] for r in range(3)]
    sums = [[("allreduce", [1.0, r])] for r in range(3)]
    replies, carrier = play(*[ring[r] + sums[r] for r in range(3)])
    assert [reply[1]["values"] for reply in replies] == [[2.0], [0.0], [1.0]]
    assert [reply[2]["values"] for reply in replies] == [[3.0, 3.0]] * 3
    for log in carrier.logs:
        assert [call.op for call in log.since(0)] == ["send", "recv", "all_reduce"]
        assert [call.place[1] for call in log.since(0)] == [1, 2, 3]
        assert all(call.start <= call.matched <= call.end for call in log.since(0))


def test_a_world_behind_sockets_names_both_sides_of_a_mismatch():
    (first, second), _ = play([("allreduce", [1.0])], [("allreduce", [1.0, 2.0])])
    said = first[0]["error"], second[0]["error"]
    assert all("CommunicationMismatch" in text for text in said)
    assert all("float32[1]" in text and "float32[2]" in text for text in said)


def test_a_world_behind_sockets_ends_a_deadlock_at_once_and_says_who_waits():
    (first, second), _ = play([("recv", [0.0], 1)], [("recv", [0.0], 0)])
    assert "CommunicationTimeout" in first[0]["error"]
    assert "answer.py" in first[0]["error"]
    assert "rank 1" in first[0]["error"]
    assert "rank 0" in second[0]["error"]


def test_a_rank_that_leaves_lets_the_other_know_that_its_message_never_comes():
    (first, _), _ = play([("recv", [0.0], 1)], [])
    assert "CommunicationTimeout" in first[0]["error"]
