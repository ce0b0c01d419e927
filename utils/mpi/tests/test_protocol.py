"""The handshake before a collective, in all orders of the ranks' steps: see protocol_model.py."""

from __future__ import annotations

import math

import pytest
from protocol_model import (
    MAX,
    Violation,
    asynchronous,
    blocking,
    explore,
    fast,
    then,
    two_asynchronous,
    wander,
)

from torch_mpi.protocol.board import Board
from torch_mpi.protocol.handshake import Announcements, Handshake, Seen, fingerprint

pytestmark = pytest.mark.quick

STAYS = {"may_leave": False}
# Every kind of call with every other one; who may leave does so at any moment.
PROGRAMS = {
    "both wait": [blocking(), blocking()],
    "both wait, and none leaves": [blocking(**STAYS), blocking(**STAYS)],
    "one waits, one does not": [blocking(), asynchronous()],
    "both on the fast path": [fast(), fast()],
    "both on the fast path, and none leaves": [fast(**STAYS), fast(**STAYS)],
    "one on the fast path": [fast(), blocking()],
    "one on the fast path, one does not wait": [fast(), asynchronous()],
    "different calls": [blocking(), blocking(MAX)],
    "different calls, one on the fast path": [fast(), blocking(MAX)],
    "different calls, both on the fast path": [fast(), fast(MAX)],
    "three, and one may leave": [blocking(), blocking(**STAYS), blocking()],
    "three on the fast path": [fast(), fast(), fast()],
    "three, one with another call": [blocking(), fast(), blocking(MAX)],
    "one after the other": [then(fast(), fast())] * 2,
    "two under way at once": [two_asynchronous(), two_asynchronous()],
    "two under way at once, left last first": [two_asynchronous(), two_asynchronous(True)],
    "two under way at once, and one stays": [two_asynchronous(), two_asynchronous(**STAYS)],
    "two under way at once on three": [two_asynchronous()] * 3,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_order_of_steps_has_a_rank_stuck_or_a_false_alarm(name):
    assert explore(PROGRAMS[name], most=400)
    wander(PROGRAMS[name], seed=1, runs=200)


@pytest.mark.often
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_order_of_steps_at_all_has_a_rank_stuck_or_a_false_alarm(name):
    explore(PROGRAMS[name], most=100_000)
    wander(PROGRAMS[name], seed=2, runs=50_000)


# -- with a safeguard taken out, the model finds what it is for -----------------------------------


def found(programs: list, seed: int = 3) -> str:
    """What breaks in some order. A seed that soon comes to such an order saves seconds."""
    with pytest.raises(Violation) as violation:
        wander(programs, seed=seed, runs=6000)
    return str(violation.value)


def test_two_ranks_that_withdraw_at_once_would_leave_a_third_one_inside_mpi(monkeypatch):
    """Who withdraws has to look for ranks that have begun, not only for ranks that are missing."""

    def replace(self: Announcements, number: int, mine: int, instead: int) -> bool:
        self.board.set(number % 64, instead)
        seen = self.look(number, mine)
        begun = seen.missing == [self.board.rank] and not seen.mismatched
        if begun:
            self.announce(number, mine)
        return not begun

    monkeypatch.setattr(Announcements, "_replace", replace)
    assert "stuck inside MPI" in found([blocking(), blocking(**STAYS), blocking()], seed=8)


def test_without_an_acknowledgement_who_leaves_would_not_know_that_another_rank_has_begun(
    monkeypatch,
):
    monkeypatch.setattr(Announcements, "acknowledge", lambda self, n, mine: Seen([], [], True))
    assert "stuck inside MPI" in found([blocking(**STAYS), blocking()])


def test_without_the_second_look_a_rank_would_begin_what_another_one_has_taken_back(monkeypatch):
    def acknowledge(self: Announcements, number: int, mine: int) -> Seen:
        self.board.set(64, number)
        return Seen([], [], True)

    monkeypatch.setattr(Announcements, "acknowledge", acknowledge)
    assert "stuck inside MPI" in found([blocking(**STAYS), blocking()], seed=10)


def test_without_the_second_look_the_usual_steps_would_begin_what_another_rank_has_taken_back(
    monkeypatch,
):
    def agree(self: Announcements, number: int, mine: int) -> bool:
        board = self.board
        if board.of_all(number % 64) != [mine] * board.size:
            return False
        board.set(64, number)
        return True

    monkeypatch.setattr(Announcements, "agree", agree)
    for other in (blocking(), fast()):
        assert "stuck inside MPI" in found([blocking(**STAYS), other])


def test_without_an_acknowledgement_in_the_usual_steps_who_leaves_would_not_know_of_it(monkeypatch):
    def agree(self: Announcements, number: int, mine: int) -> bool:
        board = self.board
        return board.of_all(number % 64) == [mine] * board.size

    monkeypatch.setattr(Announcements, "agree", agree)
    for other in (blocking(), fast()):
        assert "stuck inside MPI" in found([blocking(**STAYS), other])


def test_without_the_fence_a_store_that_is_still_in_its_buffer_would_be_missed(monkeypatch):
    monkeypatch.setattr("protocol_model.Run.fence", lambda self: None)
    assert Board.fence  # what the model puts its own in place of
    assert "stuck inside MPI" in found([blocking(**STAYS), blocking()])


def test_what_comes_after_a_withdrawn_collective_must_not_begin_on_some_ranks(monkeypatch):
    """The others still have the one before: they wait for it, and cannot take it back."""
    real = Handshake.withdraw

    def without_a_gap(self: Handshake, entry) -> bool:
        done = real(self, entry)
        self._gap = math.inf
        return done

    monkeypatch.setattr(Handshake, "withdraw", without_a_gap)
    assert "P3" in found([two_asynchronous(), two_asynchronous(**STAYS)], seed=5)


def test_what_the_fast_path_could_not_take_back_must_not_be_forgotten(monkeypatch):
    """The others rely on it: the next call goes on with it."""
    monkeypatch.setattr(Handshake, "call", _call_forgetting)
    assert "P2: rank 0 waits for good" in found([fast(**STAYS), asynchronous()])


def _call_forgetting(self, entry) -> None:
    self._promised, self.fast_call = 0, None
    self.announcements.number += 1
    entry.number = self.announcements.number
    entry.mine = fingerprint(entry.number, entry.code, blocking=False)
    self._queue.append(entry)
