"""The core of the backend without ranks: who has come, what is written, when a wait ends.

What takes real messages is in tests/mpi_cases. Here one process plays all ranks.
"""

from __future__ import annotations

import math
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from mpi4py import MPI

from torch_mpi import board as board_module
from torch_mpi import waiting
from torch_mpi.arrivals import DEPTH, EVERY, NUMBER, WORDS, Arrivals, Sight, signature, word
from torch_mpi.board import TEXT, Board, MessageBoard
from torch_mpi.errors import CommunicationStopped, CommunicationTimeout
from torch_mpi.meeting import Meeting
from torch_mpi.progress import Progress
from torch_mpi.record import Call
from torch_mpi.steps import Steps, now
from torch_mpi.waiting import wait_for
from torch_mpi.work import DoneWork, MPIWork

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
    kinds = [type(board_module.make(MPI.COMM_SELF, one, 3)) for one in (True, False)]
    monkeypatch.setenv("MPI_BACKEND_BOARD", "messages")
    kinds.append(type(board_module.make(MPI.COMM_SELF, True, 3)))
    assert kinds == [board_module.SharedBoard, MessageBoard, MessageBoard]


# --- who has come ------------------------------------------------------------------------------


def group(size: int) -> list[Arrivals]:
    return [Arrivals(board) for board in boards(size, text=False)]


SUM, MAX = signature(("all_reduce", "SUM", 4)), signature(("all_reduce", "MAX", 4))


def test_a_collective_begins_when_all_ranks_have_come_with_the_same_call():
    ranks = group(3)
    mine = word(1, SUM, direct=True)
    for rank in ranks[:2]:
        rank.come(1, mine)
    assert ranks[0].look(1, mine) == Sight(missing=[2], odd=[], direct=False)
    ranks[2].come(1, mine)
    assert [rank.look(1, mine) for rank in ranks] == [Sight([], [], True)] * 3


def test_another_call_is_seen_by_all_and_is_not_taken_for_a_missing_rank():
    ranks = group(3)
    words = [word(1, code, direct=True) for code in (SUM, MAX, SUM)]
    for rank, mine in zip(ranks, words, strict=True):
        rank.come(1, mine)
    assert ranks[0].look(1, words[0]) == Sight([], [1], True)
    assert ranks[1].look(1, words[1]) == Sight([], [0, 2], True)


def test_blocking_and_asynchronous_calls_of_one_collective_belong_together():
    ranks = group(2)
    words = [word(1, SUM, direct) for direct in (True, False)]
    for rank, mine in zip(ranks, words, strict=True):
        rank.come(1, mine)
    assert [r.look(1, m) for r, m in zip(ranks, words, strict=True)] == [Sight([], [], False)] * 2


def test_a_rank_that_takes_its_call_back_is_missing_again():
    one, two = group(2)
    mine = word(1, SUM, direct=True)
    one.come(1, mine)
    two.come(1, mine)
    two.withdraw(1)
    assert one.look(1, mine).missing == [1]


def test_an_old_word_in_the_same_place_is_not_taken_for_an_arrival():
    one, two = group(2)
    two.come(1, word(1, SUM, direct=True))
    later = word(1 + DEPTH, SUM, direct=True)
    one.come(1 + DEPTH, later)
    assert one.look(1 + DEPTH, later).missing == [1]


def test_a_rank_that_is_far_ahead_waits_for_the_slowest():
    fast, slow = group(2)
    assert fast.may_come(DEPTH)
    assert not fast.may_come(DEPTH + 1)
    fast.started(EVERY)
    assert not fast.may_come(DEPTH + 1)
    slow.started(EVERY)
    assert fast.may_come(DEPTH + EVERY)
    assert not fast.may_come(DEPTH + EVERY + 1)


def test_the_number_of_a_collective_may_outgrow_its_bits():
    one, two = group(2)
    number = NUMBER + 5
    mine = word(number, SUM, direct=False)
    two.come(number, mine)
    one.come(number, mine)
    assert one.look(number, mine) == Sight([], [], False)
    assert mine < 2**64


def test_a_signature_is_the_same_in_every_process():
    # hash() of a text is not: a rank would find that all others call something else.
    assert SUM == 3_200_499_962_049
    assert SUM != MAX


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
    meeting = Meeting(messages, [0, 1, 2], 5, "new_group")
    assert not meeting.poll()
    messages.receives[1].over = True
    assert not meeting.poll()
    assert meeting.missing() == ([2], False, False)
    messages.receives[2].over = True
    assert meeting.poll()


def test_who_leaves_a_meeting_takes_its_receives_back():
    messages = Messages()
    meeting = Meeting(messages, [0, 1, 2], 5, "new_group")
    messages.receives[1].over = True
    meeting.poll()
    assert meeting.leave()
    assert [hasattr(r, "cancelled") for r in messages.receives.values()] == [False, True]


# --- waiting -------------------------------------------------------------------------------------


class Waits:
    """Something to wait for, which is over after some polls."""

    def __init__(self, polls: float = math.inf, leaves: bool = True):
        self.call = Call("recv", (0, 1), peer=1, tag=0)
        self.polls, self.leaves, self.left = polls, leaves, 0

    def poll(self) -> bool:
        self.polls -= 1
        return self.polls < 0

    def missing(self):
        return [1], False, False

    def due(self):
        return None

    def leave(self) -> bool:
        self.left += 1
        if not self.leaves:
            self.polls = 0
        return self.leaves


class World:
    """The world of two ranks as a wait sees it."""

    rank, one_machine, cell, stopped = 0, True, "1", False

    def __init__(self, other: dict | None = None, incident: bool = False):
        self._incident, self.stops = incident, []
        self._other = {"rank": 1, "state": "running", **(other or {})}
        self._mine = {"rank": 0, "state": "running"}

    def incident(self):
        return self._incident

    def follow(self, call, waitable, waited):
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

    def stop(self, kind, text, **facts):
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
    monkeypatch.setattr(waiting, "SEARCH", 0.03)
    world = World({"state": "ended"})
    with pytest.raises(CommunicationTimeout, match="never comes"):
        wait_for(Waits(), LATER, world, "cell line 3")


# --- progress ------------------------------------------------------------------------------------


class Moves:
    """A communication under way, for the thread that moves it."""

    def __init__(self, of: object = None, fails: bool = False):
        self.group, self.fails, self.over = of, fails, threading.Event()
        self.call, self.is_over, self._future = Call("send", (0, 1)), False, None

    def poll(self) -> bool:
        if self.fails:
            self.is_over = True
            raise ValueError("mine")
        self.over.set()
        return True

    def expire(self):
        return False

    def expected_until(self):
        return 0.0

    def due(self):
        return None

    def take_back(self):
        self.taken_back = True

    def leave(self):
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
    moving.adopt(steps)
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
    assert moving.drain(mine)
    assert ours.taken_back
    assert not hasattr(others, "taken_back")


def test_after_an_incident_the_end_of_a_group_waits_for_nobody(moving):
    mine = SimpleNamespace(world=World(incident=True))
    ours = Moves(of=mine)
    moving.begin(ours)
    assert moving.drain(mine)
    assert ours.left


# --- a communication -----------------------------------------------------------------------------


def under_way(*items, finish=None) -> MPIWork:
    group = SimpleNamespace(world=World(), timeout=LATER)
    work = MPIWork(group, Call("send", (0, 1), peer=1, tag=0), [torch.ones(2)], finish)
    work.follow(Steps(iter_of(*items)))
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
    assert work.leave()
    assert request.cancelled
    assert "was given up" in str(work.exception())


def test_a_communication_that_was_complete_at_once_needs_no_record():
    assert DoneWork().wait()
    assert DoneWork().is_completed()
