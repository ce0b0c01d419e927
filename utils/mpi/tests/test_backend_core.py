"""The core of the backend without ranks: who has come, what is written, when a wait ends.

What takes real messages is in tests/mpi_cases. Here one process plays all ranks.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import os
import random
import re
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import greenlet
import numpy as np
import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI

from torch_mpi import errors
from torch_mpi.errors import CommunicationStopped, CommunicationTimeout
from torch_mpi.group import arguments, arithmetic, datatypes, tensors
from torch_mpi.group.collective_work import START_AFTER, START_AFTER_WITHOUT_CORE, start_after
from torch_mpi.group.messages import Channels
from torch_mpi.group.step_runner import Steps, now
from torch_mpi.group.work import DoneWork, MPIWork
from torch_mpi.protocol import board as board_module
from torch_mpi.protocol import wait_monitor
from torch_mpi.protocol import world as world_module
from torch_mpi.protocol.board import TEXT, Board, MessageBoard
from torch_mpi.protocol.handshake import (
    DEPTH,
    NUMBER,
    WORDS,
    Announcements,
    Entry,
    Handshake,
    Seen,
    State,
    fingerprint,
    signature,
    unnumbered,
)
from torch_mpi.protocol.interfaces import Waitable
from torch_mpi.protocol.progress import Progress, Threads
from torch_mpi.protocol.rendezvous import Rendezvous
from torch_mpi.protocol.wait_monitor import wait_for
from torch_mpi.record import Call, Log

LATER = 9999.0  # seconds: a wait for it would end by the time limit of the test


def boards(size: int, words: int = WORDS, text: bool = True) -> list[Board]:
    """The boards of all ranks of a group, which share their memory."""
    memory = bytearray(8 * words * size + TEXT * size)

    class Shared(Board):
        def _map(self):
            return memory

    return [Shared(SimpleNamespace(rank=r, size=size), words, text) for r in range(size)]


# --- the board ---------------------------------------------------------------------------------


def test_what_a_rank_writes_on_the_board_all_others_read():
    one, two = boards(2, words=3)
    one.set(1, 7)
    two.set(1, 2**64 - 1)
    assert one.of_all(1) == two.of_all(1) == [7, 2**64 - 1]
    assert one.of_all(0) == one.of_all(2) == [0, 0]
    two.write("rank 1 waits in Größe")
    assert one.read(1) == "rank 1 waits in Größe"
    assert one.read(0) == ""


def test_a_text_that_is_just_being_written_reads_as_none_not_as_half_of_it():
    one, two = boards(2)
    two.write("first")
    place = two._text_offset + TEXT
    two._memory[place + 9] ^= 1
    assert one.read(1) == ""
    two.write("second")
    assert one.read(1) == "second"


def test_a_text_that_is_too_long_keeps_its_beginning():
    (alone,) = boards(1)
    alone.write("x" * (2 * TEXT))
    assert set(alone.read(0)) == {"x"}
    assert TEXT - 16 < len(alone.read(0)) < TEXT


def test_a_board_of_messages_is_taken_where_the_ranks_share_no_memory(monkeypatch):
    monkeypatch.delenv("MPI_BACKEND_BOARD", raising=False)
    me, copy = MPI.COMM_SELF, MPI.COMM_SELF.Dup
    kinds = [type(board_module.make(me, copy, one, 3)) for one in (True, False)]
    monkeypatch.setenv("MPI_BACKEND_BOARD", "messages")
    kinds.append(type(board_module.make(me, copy, True, 3)))
    assert kinds == [board_module.SharedBoard, MessageBoard, MessageBoard]


# --- who has come ------------------------------------------------------------------------------


def group(size: int) -> list[Announcements]:
    return [Announcements(board) for board in boards(size, text=False)]


SUM, MAX = signature(("all_reduce", "SUM", 4)), signature(("all_reduce", "MAX", 4))


def test_a_collective_begins_when_all_ranks_have_come_with_the_same_call():
    ranks = group(3)
    mine = fingerprint(1, SUM, blocking=True)
    for rank in ranks[:2]:
        rank.announce(1, mine)
    assert ranks[0].look(1, mine) == Seen(missing=[2], mismatched=[], blocking=False)
    ranks[2].announce(1, mine)
    assert [rank.look(1, mine) for rank in ranks] == [Seen([], [], True)] * 3


def test_another_call_is_seen_by_all_and_is_not_taken_for_a_missing_rank():
    ranks = group(3)
    words = [fingerprint(1, code, blocking=True) for code in (SUM, MAX, SUM)]
    for rank, mine in zip(ranks, words, strict=True):
        rank.announce(1, mine)
    assert ranks[0].look(1, words[0]) == Seen([], [1], True)
    assert ranks[1].look(1, words[1]) == Seen([], [0, 2], True)


def test_blocking_and_asynchronous_calls_of_one_collective_belong_together():
    ranks = group(2)
    words = [fingerprint(1, SUM, direct) for direct in (True, False)]
    for rank, mine in zip(ranks, words, strict=True):
        rank.announce(1, mine)
    assert [r.look(1, m) for r, m in zip(ranks, words, strict=True)] == [Seen([], [], False)] * 2


def test_a_rank_that_takes_its_call_back_is_missing_again():
    one, two = group(2)
    mine = fingerprint(1, SUM, blocking=True)
    one.announce(1, mine)
    two.announce(1, mine)
    assert two.withdraw(1, mine)
    assert one.look(1, mine).missing == [1]


def test_an_old_word_in_the_same_place_is_not_taken_for_an_arrival():
    one, two = group(2)
    two.announce(1, fingerprint(1, SUM, blocking=True))
    later = fingerprint(1 + DEPTH, SUM, blocking=True)
    one.announce(1 + DEPTH, later)
    assert one.look(1 + DEPTH, later).missing == [1]


def two_that_came() -> tuple[Announcements, Announcements, int]:
    """Two ranks in one blocking call, and the word of both."""
    one, two = group(2)
    mine = fingerprint(1, SUM, blocking=True)
    for rank in (one, two):
        rank.announce(1, mine)
    return one, two, mine


def test_a_call_that_another_rank_has_begun_is_not_taken_back():
    one, two, mine = two_that_came()
    assert two.acknowledge(1, mine).complete
    assert not one.withdraw(1, mine)
    assert two.look(1, mine).complete
    assert one.acknowledge(1, mine).complete


def test_a_rank_does_not_begin_what_another_one_takes_back_just_then():
    one, two, mine = two_that_came()
    assert one.look(1, mine).complete
    assert two.withdraw(1, mine)
    assert one.acknowledge(1, mine).missing == [1]
    assert one.withdraw(1, mine)


def test_a_call_that_fits_no_other_is_refused_unless_another_rank_has_begun_it():
    one, two, mine = two_that_came()
    # What did not fit a moment ago was of another thread of rank 1.
    assert two.acknowledge(1, mine).complete
    assert not one.refuse(1, mine)
    assert one.acknowledge(1, mine).complete

    one, two, mine = two_that_came()
    assert one.refuse(1, mine)
    # From now on nobody can begin it.
    assert two.look(1, mine).missing == [0]
    assert two.acknowledge(1, mine).missing == [0]


def test_a_mismatch_names_a_rank_with_another_call_not_one_that_has_refused_this_one():
    ranks = group(3)
    this, other = fingerprint(1, 7, True), fingerprint(1, 8, True)
    for rank, mine in zip(ranks, (this, other, this), strict=True):
        rank.announce(1, mine)
    assert ranks[0].refuse(1, this)
    assert ranks[2].look(1, this).mismatched == [1]
    assert ranks[2].look(1, this).missing == [0]
    assert ranks[1].look(1, other).mismatched == [0, 2]


def test_after_an_error_on_the_fast_path_a_rank_begins_nothing_before_recovery():
    here, there = (Handshake(board) for board in boards(2, text=False))
    theirs = fingerprint(1, SUM, blocking=False)
    here.announcements.announce(1, fingerprint(1, SUM, blocking=True))
    there.announcements.announce(1, theirs)
    assert there.announcements.acknowledge(1, theirs).complete
    # The other is in no blocking call, and relies on this rank.
    assert not here.meet(unnumbered(SUM))
    here.end_fast_path()
    entry = Entry(SUM, Call("all_reduce", (0, 1)), None, may_block=True)
    here.call(entry)
    here.hasten()
    here.pump()
    assert entry.state is State.CALLED


class Turns(Board):
    """A board whose every access waits for its turn: the places where ranks can be interleaved."""

    def set(self, index, value):
        next_turn()
        super().set(index, value)

    def of_all(self, index):
        # One word after the other: they are not read at one moment.
        found = []
        for rank in range(self.size):
            next_turn()
            found.append(self.words[index * self.size + rank])
        return found


def next_turn() -> None:
    greenlet.getcurrent().parent.switch()


def comes_and_may_leave(rank: Announcements, patience: int) -> str:
    """What a rank does in a collective, and when an error or Ctrl-C ends it after some looks."""
    mine = fingerprint(1, SUM, blocking=True)
    rank.announce(1, mine)
    while True:
        for _ in range(patience):
            if rank.look(1, mine).complete and rank.acknowledge(1, mine).complete:
                return "blocked"
        if rank.withdraw(1, mine):
            return "left"
        patience = max(patience, 1)


def turned(size: int, program, arguments) -> list:
    """The program of each rank as a greenlet that has run until its first turn."""
    memory = bytearray(8 * WORDS * size)

    class Shared(Turns):
        def _map(self):
            return memory

    ranks = [Announcements(Shared(SimpleNamespace(rank=r, size=size), WORDS)) for r in range(size)]
    players = [greenlet.greenlet(program) for _ in ranks]
    for player, rank, argument in zip(players, ranks, arguments, strict=True):
        player.switch(rank, argument)
    return players


def play(patiences: tuple[int, ...], choose) -> list[str]:
    """Play all ranks; ``choose`` says whose turn it is, of those that are not done."""
    size = len(patiences)
    players = turned(size, comes_and_may_leave, patiences)
    ends: list[str] = [""] * size
    while waiting := [r for r in range(size) if not players[r].dead]:
        r = choose(waiting)
        ends[r] = players[r].switch() or ""
    return ends


@pytest.mark.parametrize("patiences", [(0, 0, 3), (1, 0, 2), (1, 1, 1), (2, 1, 3)])
def test_no_rank_is_left_alone_in_a_blocking_call_in_whatever_order_the_others_leave(
    patiences, monkeypatch
):
    """Who is in the MPI call can't be interrupted: then all must be, or the job is wedged."""
    monkeypatch.setattr(Board, "fence", lambda self: None)  # one thread sees what it has written
    seen = set()
    for seed in range(1000):
        turns = random.Random(seed)
        ends = play(patiences, turns.choice)
        seen.add(tuple(ends))
        assert len(set(ends)) == 1 or "blocked" not in ends, (seed, ends)
    assert ("left",) * len(patiences) in seen


def comes_many_times(rank: Announcements, last: int) -> str:
    """A rank calls one collective after the other, and begins each when all have come."""
    come = begun = 0
    while begun < last:
        if come < last and rank.may_announce(come + 1):
            come += 1
            rank.announce(come, fingerprint(come, SUM, blocking=False))
        elif begun < come:
            mine = fingerprint(begun + 1, SUM, blocking=False)
            begun += (
                rank.look(begun + 1, mine).complete and rank.acknowledge(begun + 1, mine).complete
            )
    return "done"


@pytest.mark.parametrize("seed", range(8))
def test_ranks_that_call_hundreds_of_collectives_at_once_begin_all_of_them(seed):
    """Nobody writes over a word that another rank may still have to read."""
    players = turned(2, comes_many_times, [3 * DEPTH] * 2)
    choose, turns = random.Random(seed).choice, 0
    while waiting := [player for player in players if not player.dead]:
        choose(waiting).switch()
        turns += 1
        assert turns < 100_000, "they wait for each other"


def test_a_rank_that_is_far_ahead_waits_for_the_slowest():
    fast, slow = group(2)
    assert fast.may_announce(DEPTH - 1)
    for rank in (fast, slow):
        assert not fast.may_announce(DEPTH)
        for number in (1, 2):
            mine = fingerprint(number, SUM, blocking=True)
            for one in (fast, slow):
                one.announce(number, mine)
            assert rank.acknowledge(number, mine).complete
    assert fast.may_announce(DEPTH + 1)
    assert not fast.may_announce(DEPTH + 2)


def test_the_number_of_a_collective_may_outgrow_its_bits():
    one, two = group(2)
    number = NUMBER + 5
    mine = fingerprint(number, SUM, blocking=False)
    two.announce(number, mine)
    one.announce(number, mine)
    assert one.look(number, mine) == Seen([], [], False)
    assert mine < 2**64


def test_the_page_names_every_module_of_the_backend():
    page = (Path(__file__).parents[1] / "PROTOCOL.md").read_text("utf-8")
    table = page[page.index("## The layers") : page.index("## The board")]
    package = Path(errors.__file__).parent
    modules = {path.stem for path in package.rglob("*.py")} - {"__init__"}
    assert modules - set(re.findall(r"`(\w+)`", table)) == set()


def test_a_signature_is_the_same_in_every_process():
    # hash() of a text is not: a rank would find that all others call something else.
    assert SUM == 3_200_499_962_049
    assert SUM != MAX


# --- threads -------------------------------------------------------------------------------------


def test_threads_that_wait_in_a_library_are_not_taken_for_ones_that_may_communicate():
    threads = Threads()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(sum, [1]).result()
        assert threads.alone(set())


@pytest.mark.parametrize("kind", ["runs the user's code", "will run it", "an event loop"])
def test_a_thread_that_may_communicate_is_waited_for(kind):
    threads, go_on = Threads(), threading.Event()
    loop = asyncio.new_event_loop()
    thread = {
        "runs the user's code": threading.Thread(target=lambda: go_on.wait()),
        "will run it": threading.Timer(LATER, print),
        "an event loop": threading.Thread(target=loop.run_forever),
    }[kind]
    thread.start()
    try:
        assert not threads.alone(set())
        assert threads.alone({thread})
    finally:
        go_on.set()
        loop.call_soon_threadsafe(loop.stop)
        getattr(thread, "cancel", bool)()
        thread.join()
        if kind != "an event loop":
            loop.run_forever()
        loop.close()
    assert threads.alone(set())


def test_a_thread_that_has_communicated_counts_until_it_ends():
    go_on, told, made = threading.Event(), threading.Event(), threading.Event()

    def communicate() -> None:
        made.wait()
        threads.communicates()
        told.set()
        go_on.wait()

    thread = threading.Thread(target=communicate)
    thread.start()
    try:
        threads = Threads()
        made.set()
        assert told.wait(60)
        assert not threads.alone(set())
    finally:
        go_on.set()
        thread.join()
    assert threads.alone(set())


# --- steps ---------------------------------------------------------------------------------------


class Request(MPI.Request):
    """A request that completes when the test says so."""

    over = False
    __hash__ = MPI.Request.__hash__

    def __eq__(self, other):  # MPI's own: equal to REQUEST_NULL, as it has no handle
        return self is other

    def __ne__(self, other):
        return self is not other

    def Test(self, status=None) -> bool:
        return self.over

    def Cancel(self) -> None:
        self.cancelled = True

    def Wait(self, status=None) -> bool:
        return True


def test_steps_go_as_far_as_they_can_without_waiting():
    first, second, trace = Request(), Request(), []

    def generator():
        trace.append("begun")
        statuses = yield [first, second]
        trace.append(len(statuses))

    steps = Steps(generator())
    assert trace == ["begun"]
    first.over = True
    assert not steps.poll()
    assert steps.requests() == [second]
    second.over = True
    assert steps.poll()
    assert steps.poll()
    assert trace == ["begun", 2]
    assert steps.requests() == []


def test_a_step_counts_from_the_point_in_time_it_waited_for_not_from_when_that_was_noticed():
    begin = time.perf_counter()
    seen = []

    def generator():
        yield [begin - 5.0]
        seen.append(now())
        yield [begin - 3.0, begin - 4.0]
        seen.append(now())

    steps = Steps(generator(), since=begin - 6.0)
    assert steps.poll()
    assert seen == [begin - 5.0, begin - 3.0]
    assert steps.time == begin - 3.0


def test_steps_wait_for_the_steps_inside_of_them_and_know_when_these_are_due():
    request, due = Request(), time.perf_counter() + LATER

    def inner():
        yield [due]

    def outer():
        yield [Steps(inner())]
        yield [request]

    steps = Steps(outer())
    assert not steps.poll()
    assert steps.due() == due
    assert Steps(iter_of(request)).due() is None
    assert Steps(iter_of(Steps(iter_of(request)))).requests() == [request]


def iter_of(*items):
    yield list(items)


def test_an_error_in_a_step_comes_out_of_the_poll_that_met_it():
    def generator():
        yield [0.0]
        raise ValueError("mine")

    steps = Steps(generator())
    with pytest.raises(ValueError, match="mine"):
        steps.poll()


# --- meeting -------------------------------------------------------------------------------------


class Messages:
    """A communicator whose receives complete when the test says so."""

    rank = 0

    def __init__(self):
        self.receives: dict[int, Request] = {}

    def Irecv(self, buffer, source, tag):
        return self.receives.setdefault(source, Request())

    def Isend(self, buffer, dest, tag):
        return Request()

    def Get_attr(self, key):
        return 2**20


def test_a_meeting_is_over_when_everybody_has_come_and_names_who_has_not():
    messages = Messages()
    meeting = Rendezvous(messages, [0, 1, 2], 5, "new_group")
    assert not meeting.poll()
    messages.receives[1].over = True
    assert not meeting.poll()
    assert meeting.missing() == ([2], False, False)
    messages.receives[2].over = True
    assert meeting.poll()


def test_who_leaves_a_meeting_takes_its_receives_back():
    messages = Messages()
    meeting = Rendezvous(messages, [0, 1, 2], 5, "new_group")
    messages.receives[1].over = True
    meeting.poll()
    assert meeting.withdraw()
    assert [hasattr(r, "cancelled") for r in messages.receives.values()] == [False, True]


# --- waiting -------------------------------------------------------------------------------------


class Waits(Waitable):
    """Something to wait for, which is over after some polls."""

    def __init__(self, polls: float = math.inf, leaves: bool = True):
        self.call = Call("recv", (0, 1), peer=1, tag=0)
        self.polls, self.leaves, self.left = polls, leaves, 0

    def poll(self) -> bool:
        self.polls -= 1
        return self.polls < 0

    def missing(self):
        return [1], False, False

    def withdraw(self) -> bool:
        self.left += 1
        if not self.leaves:
            self.polls = 0
        return self.leaves


class World:
    """The world of two ranks as a wait sees it."""

    rank, one_machine, section, stopped = 0, True, "1", False

    def __init__(self, other: dict | None = None, incident: bool = False):
        self._incident, self.stops, self.status = incident, [], self
        self._other = {"rank": 1, "state": "running", **(other or {})}
        self._mine = {"rank": 0, "state": "running"}

    def incident(self):
        return self._incident

    def stopped_by_another(self, call, waitable, waited):
        return CommunicationStopped("rank 1 failed", call)

    def beat(self):
        self._beats = getattr(self, "_beats", 0) + 1

    def beats(self, rank):
        return 9 * getattr(self, "_beats", 0)

    def statuses(self):
        return [self._mine, self._other]

    def waiting(self, waitable, where):
        missing, any_of_them, moving = waitable.missing()
        self._mine = {
            "rank": 0, "state": "waiting", "for": missing, "any": any_of_them, "moving": moving,
            "call": "recv(src=1, tag=0)", "what": "recv", "where": where, "alone": True,
            "wait": 1, "patience": 0,
        }  # fmt: skip
        return self._mine

    def running(self):
        self._mine = {"rank": 0, "state": "running"}

    def begin_incident(self, kind, text, **facts):
        self.stops.append(kind)
        return {"kind": kind}


def test_a_wait_ends_with_the_communication_and_raises_nothing():
    wait_for(Waits(polls=0), LATER)
    wait_for(Waits(polls=500), LATER)
    world = World()
    wait_for(Waits(polls=500), LATER, world)
    assert world.stops == []
    assert world.statuses()[0]["state"] == "running"


def test_a_wait_that_nobody_ends_says_what_did_not_come_at_its_timeout():
    waits, world = Waits(), World()
    with pytest.raises(CommunicationTimeout, match=r"the matching send of rank 1 did not come"):
        wait_for(waits, 0.01, world, "cell line 3")
    assert waits.left == 1
    assert world.stops == ["timeout"]


class Transfer(Waits):
    """Data on their way, which move for a while."""

    def __init__(self, seconds: float, ends: bool):
        super().__init__()
        self.until, self.ends = time.perf_counter() + seconds, ends

    def poll(self) -> bool:
        return self.ends and time.perf_counter() > self.until

    def missing(self):
        return [1], False, True

    def moved(self) -> float:
        return min(time.perf_counter(), self.until)


def test_a_transfer_that_takes_longer_than_the_timeout_is_not_called_a_deadlock():
    wait_for(Transfer(seconds=0.5, ends=True), timeout=0.05)


def test_a_transfer_that_stands_still_is_ended_and_told_apart_from_a_partner_that_did_not_come():
    with pytest.raises(CommunicationTimeout, match=r"on their way, have not moved for 0\.05 s"):
        wait_for(Transfer(seconds=0.1, ends=False), timeout=0.05)


def test_a_timeout_that_is_not_fatal_stops_nobody_else():
    world = World()
    with pytest.raises(CommunicationTimeout, match=r"timeout of 0\.01 s"):
        wait_for(Waits(), 0.01, world, "cell line 3", fatal=False)
    assert world.stops == []


def test_a_wait_that_completes_at_its_timeout_is_a_success():
    waits = Waits(leaves=False)
    wait_for(waits, 0.01)
    assert waits.left == 1


def test_the_error_of_another_rank_ends_the_wait_long_before_its_timeout():
    with pytest.raises(CommunicationStopped, match="rank 1 failed"):
        wait_for(Waits(), LATER, World(incident=True))


def test_a_wait_for_a_rank_that_has_ended_ends_long_before_its_timeout(monkeypatch):
    monkeypatch.setattr(wait_monitor, "SEARCH", 0.03)
    world = World({"state": "ended"})
    with pytest.raises(CommunicationTimeout, match="never comes"):
        wait_for(Waits(), LATER, world, "cell line 3")


# --- progress ------------------------------------------------------------------------------------


class Moves:
    """A communication under way, for the thread that moves it."""

    not_before = 0.0

    def __init__(self, of: object = None, fails: bool = False):
        self.group, self.fails, self.over = of, fails, threading.Event()
        self.call, self.is_over, self.has_future = Call("send", (0, 1)), False, False

    def poll(self) -> bool:
        if self.fails:
            self.is_over = True
            raise ValueError("mine")
        self.over.set()
        return True

    def give_up_if_overdue(self):
        return False

    def expected_until(self):
        return 0.0

    def due(self):
        return None

    def withdraw_receive(self):
        self.taken_back = True

    def withdraw(self):
        self.left = True


@pytest.fixture
def moving():
    made = Progress()
    yield made
    made.stop()


def test_what_nobody_waits_for_is_moved_along_all_the_same(moving):
    failing, works = Moves(fails=True), [Moves(), Moves()]
    for work in (failing, *works):
        moving.watch(work)
    assert all(work.over.wait(30) for work in works)


def test_steps_that_other_ranks_need_are_gone_on_with(moving):
    request = Request()
    steps = Steps(iter_of(request))
    moving.detach("a group", steps.poll)
    request.over = True
    deadline = time.monotonic() + 30
    while not steps.done and time.monotonic() < deadline:
        time.sleep(0.001)
    assert steps.done


def test_the_end_of_a_group_takes_its_receives_back_and_no_others(moving):
    mine = SimpleNamespace(world=World())
    ours, others = Moves(of=mine), Moves(of=object())
    moving.begin(ours)
    moving.begin(others)
    assert moving.works_of(mine) == [ours]
    assert moving.finish(mine)
    assert ours.taken_back
    assert not hasattr(others, "taken_back")


def test_after_an_incident_the_end_of_a_group_waits_for_nobody(moving):
    mine = SimpleNamespace(world=World(incident=True))
    ours = Moves(of=mine)
    moving.begin(ours)
    assert moving.finish(mine)
    assert ours.left


# --- a communication -----------------------------------------------------------------------------


def under_way(*items, finish=None) -> MPIWork:
    group = SimpleNamespace(world=World(), timeout=LATER)
    work = MPIWork(group, Call("send", (0, 1), peer=1, tag=0), [torch.ones(2)], finish)
    work.take_over(Steps(iter_of(*items)))
    return work


def test_a_communication_is_finished_once_whoever_asks():
    request, finished = Request(), []
    work = under_way(request, finish=lambda: finished.append(True))
    assert not work.is_completed()
    request.over = True
    assert work.wait()
    assert work.is_completed()
    assert work.is_success()
    assert finished == [True]
    assert work.call.end >= work.call.start


def test_who_polls_a_request_until_it_is_over_has_waited_for_it():
    request = Request()
    work = under_way(request)
    assert not work.is_completed()
    assert not work.call.waited
    request.over = True
    work.poll()  # the backend's own, on the progress thread
    assert not work.call.waited
    assert work.is_completed()
    assert work.call.waited


def test_a_request_that_ended_by_an_error_was_not_waited_for_by_a_poll():
    def fail():
        raise ValueError("mine")

    work = under_way(0.0, finish=fail)
    assert work.is_completed()
    assert not work.call.waited


def test_a_collective_on_the_short_way_has_the_bytes_of_the_one_before_on_record():
    log, like = Log(), Call("all_reduce", (0, 1), nbytes=8, sent=8, received=8)
    log.add_like(like, 1.0, 2.0, 3.0, 4)
    (call,) = log.since(0)
    assert (call.sent, call.received, call.moved_out, call.waited) == (8, 8, None, True)


def test_an_error_of_a_communication_is_kept_for_who_waits():
    def fail():
        raise ValueError("mine")

    work = under_way(0.0, finish=fail)
    assert work.is_completed()
    assert not work.is_success()
    with pytest.raises(ValueError, match="mine"):
        work.wait()


def test_a_future_completes_without_a_wait():
    request = Request()
    future = under_way(request).get_future()
    assert not future.done()
    request.over = True
    assert future.wait()[0].tolist() == [1.0, 1.0]


def test_a_receive_that_is_given_up_swallows_no_later_message():
    request = Request()
    work = under_way(request)
    work.call.op = "recv"
    assert work.withdraw()
    assert request.cancelled
    assert "was given up" in str(work.exception())


def test_a_communication_that_was_complete_at_once_needs_no_record():
    assert DoneWork().wait()
    assert DoneWork().is_completed()


# --- tensors as MPI sees them --------------------------------------------------------------------


def test_an_empty_tensor_of_numpy_can_be_received_into():
    empty = torch.from_numpy(np.empty((3, 0)))
    memory = tensors.writable(empty, "recv")
    assert memory.shape == (3, 0)
    with pytest.raises(ValueError, match="share their memory"):
        tensors.writable(torch.ones(1).expand(3), "recv")


class Wrapper(torch.Tensor):
    """A tensor that stands for another one."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        pass

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


class Named(torch.Tensor):
    """A plain subclass."""


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_tensor_without_memory_of_its_own_is_refused_with_what_to_pass_instead():
    with pytest.raises(TypeError, match=r"a Wrapper has no memory that MPI could.*plain tensors"):
        arguments.check(Wrapper(torch.ones(2)), "all_reduce")
    for layout in (torch.jagged, torch.strided):
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
        with pytest.raises(TypeError, match=r"all_reduce: a nested tensor.*unbind\(\)"):
            arguments.check(nested, "all_reduce")


def test_parameters_and_plain_subclasses_are_tensors_like_any_other():
    for tensor in (torch.nn.Parameter(torch.ones(2)), torch.ones(2).as_subclass(Named)):
        assert arguments.check(tensor, "all_reduce") is tensor
    empty = torch.ones(0).as_subclass(Named)
    assert arguments.check(empty, "all_reduce") is empty


# --- gradients -----------------------------------------------------------------------------------


def backward_through(tensor: torch.Tensor, what: str = "all_reduce") -> list[str]:
    """The warnings of a backward pass through a tensor that was written in place."""
    arguments.check_writable(tensor, what)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (tensor * 3).sum().backward()
    return [str(warning.message) for warning in caught]


def test_a_wrong_gradient_after_an_in_place_collective_is_warned_of_once_a_line(monkeypatch):
    monkeypatch.setattr(arguments, "warned", set())
    leaf = torch.ones(2, requires_grad=True)
    said = [backward_through(leaf * 2) for _ in range(3)]
    assert [len(texts) for texts in said] == [1, 0, 0]
    assert "all_reduce has written into a tensor" in said[0][0]
    assert len(backward_through(leaf * 2, "broadcast")) == 0  # in the same line of the helper


def test_no_gradient_is_warned_of_that_is_right(monkeypatch):
    monkeypatch.setattr(arguments, "warned", set())
    leaf = torch.ones(2, requires_grad=True)
    assert backward_through(leaf) == []
    with torch.no_grad():
        silent = leaf * 2
        arguments.check_writable(silent, "all_reduce")
    loss = (leaf * 2).sum()
    loss.backward()
    arguments.check_writable(loss, "all_reduce")  # for a log
    assert arguments.warned == set()


# --- reductions ----------------------------------------------------------------------------------


def in_place(dtype: torch.dtype, mine: torch.Tensor, other: torch.Tensor, name: str = "SUM"):
    """Call our op as MPI does, with memory."""
    datatypes.user_function(dtype, name)(
        datatypes.address(other), datatypes.address(mine), MPI.BYTE
    )


def test_an_empty_part_of_a_reduction_of_halves_does_not_end_the_job():
    for dtype in (torch.float16, torch.bfloat16, torch.int8):
        in_place(dtype, torch.empty(0, dtype=dtype), torch.empty(0, dtype=dtype))
    datatypes.check_ops()


def test_an_error_inside_of_an_op_is_raised_by_the_call_not_inside_of_mpi(monkeypatch):
    def fail(mine, other):
        raise MemoryError("no room")

    monkeypatch.setattr(datatypes, "combine", lambda dtype, name: fail)
    in_place(torch.int8, torch.ones(2, dtype=torch.int8), torch.ones(2, dtype=torch.int8))
    with pytest.raises(MemoryError, match="no room"):
        datatypes.check_ops()
    datatypes.check_ops()


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.uint16])
@pytest.mark.parametrize("name", ["SUM", "PRODUCT"])
def test_small_integers_wrap_around_as_in_pytorch_and_never_saturate(dtype, name):
    bound = 2 ** (8 * dtype.itemsize)
    value = torch.iinfo(dtype).max // 4 * 3
    mine, other = (torch.full((70,), value, dtype=dtype) for _ in range(2))
    in_place(dtype, mine, other, name)
    expected = 2 * value if name == "SUM" else value * value
    assert {x % bound for x in mine.tolist()} == {expected % bound}


# --- tags ----------------------------------------------------------------------------------------


def channels(largest: int) -> Channels:
    """The communicators of a group, of an MPI library with this largest tag."""
    return Channels(None, SimpleNamespace(Get_attr=lambda key: largest), (0,), 0)


@pytest.mark.parametrize("largest", [32_767, 524_287, 1_048_575, 8_388_607, 2**31 - 1])
def test_tags_stay_below_the_largest_that_the_mpi_library_has(largest):
    tags = channels(largest)
    numbers = [1, 16_383, 16_384, 2**20, 2**24 + 5, 2**31, largest, largest + 1]
    collectives = {tags.tag_of_collective(n) for n in numbers}
    messages = {tags.tag_of_message(n) for n in numbers}
    assert min(collectives | messages) >= 0
    assert max(collectives | messages) < largest
    assert max(collectives) < min(messages)


def test_thousands_of_messages_may_be_under_way_before_a_tag_comes_again():
    tags = channels(32_767)
    assert len({tags.tag_of_message(n) for n in range(10_000)}) == 10_000


def test_a_collective_is_begun_early_only_where_a_processor_is_idle(monkeypatch):
    # Two ranks of one thread each on two processors: what is moved early delays computing.
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert start_after(cores=2, ranks=2) == START_AFTER_WITHOUT_CORE
    assert start_after(cores=3, ranks=2) == START_AFTER_WITHOUT_CORE
    assert start_after(cores=4, ranks=2) == START_AFTER
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert start_after(cores=8, ranks=2) == START_AFTER_WITHOUT_CORE


def test_processors_that_several_ranks_may_use_count_once(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    assert world_module.cores_of_all(SimpleNamespace(allgather=lambda mine: [mine, {1, 2}])) == 3


def test_every_op_of_pytorch_has_its_name_in_reports_and_choices():
    for name, op in dist.ReduceOp.RedOpType.__members__.items():
        assert arithmetic.op_name(op) == name
        if name != "PREMUL_SUM":  # it is made with a factor
            assert arithmetic.op_name(SimpleNamespace(reduceOp=dist.ReduceOp(op))) == name
    assert arithmetic.op_name(None) == "SUM"


def test_a_call_of_a_packages_own_thread_is_placed_in_the_package():
    folder = Path(torch.__file__).parents[1]
    found = {}
    source = "found['place'] = users_place()"
    code = compile(source, str(folder / "torch/distributed/checkpoint/utils.py"), "exec")
    names = {"found": found, "users_place": errors.users_place}
    thread = threading.Thread(target=exec, args=(code, names))
    thread.start()
    thread.join()
    assert errors.place_text(*found["place"]) == "torch/distributed/checkpoint/utils.py:1"
