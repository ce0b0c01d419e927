"""Who waits for whom: the explanation that a student reads when the ranks are stuck."""

from __future__ import annotations

import pytest

from torch_mpi import settings
from torch_mpi.protocol.diagnosis import diagnose, find_cycle, first_cause, stuck_ranks
from utils.figures import alt
from utils.figures import waits as waits_pictures


@pytest.fixture(autouse=True)
def in_a_notebook(monkeypatch):
    monkeypatch.setattr(settings, "section", "cell")


def waits(rank, call, *others, any_of=False, **more):
    return {
        "rank": rank, "state": "waiting", "call": call, "what": call, "where": "cell line 3",
        "for": list(others), "any": any_of, "moving": False, "alone": True, "wait": 1,
        "patience": 1, **more,
    }  # fmt: skip


def stopped(status, kind, error="", at=1.0):
    return {**status, "state": "stopped", "kind": kind, "error": error, "at": at}


def has(rank, state):
    return {"rank": rank, "state": state}


def by_rank(*statuses):
    return {status["rank"]: status for status in statuses}


PAIR = waits(0, "recv(src=1, tag=0)", 1), waits(1, "recv(src=0, tag=0)", 0)


def test_two_ranks_that_receive_first_are_a_cycle_and_the_advice_says_so():
    found = diagnose([stopped(PAIR[0], "deadlock", "x"), PAIR[1]])
    assert found.cycle == [0, 1, 0]
    assert found.edges == [(0, 1), (1, 0)]
    assert found.headline.startswith("Deadlock")
    assert found.lines[0] == "rank 0 waits in recv(src=1, tag=0) at cell line 3"
    assert "both receive first" in found.advice
    assert "cycle 0 → 1 → 0" in str(found)


def test_a_rank_that_receives_from_itself_is_told_so_and_has_a_picture():
    child = waits(1, "recv(src=1, tag=0)", 1)
    found = diagnose([waits(0, "recv(src=1, tag=0)", 1), stopped(child, "deadlock", "x")])
    assert found.headline == "Deadlock: rank 1 receives from itself."
    assert found.cycle == []
    assert "check src: here it is the rank's own number" in found.advice
    picture = waits_pictures.picture(found, 2)
    assert "rank 0 waits for rank 1; rank 1 waits for itself" in picture.alt_text
    picture.canvas.draw()


def test_a_rank_that_sends_to_itself_is_named_beside_another_deadlock():
    found = diagnose([*PAIR, stopped(waits(2, "send(dst=2, tag=0)", 2), "deadlock", "x")])
    assert found.headline == "Deadlock: rank 2 sends to itself."
    assert "check dst" in found.advice


def test_a_ring_is_found_from_every_starting_point():
    ring = by_rank(*(waits(r, f"recv(src={(r - 1) % 4}, tag=0)", (r - 1) % 4) for r in range(4)))
    assert find_cycle(ring) == [0, 3, 2, 1, 0]
    assert stuck_ranks(ring) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("statuses", "words"),
    [
        ([waits(0, "send(dst=1, tag=0)", 1), waits(1, "send(dst=0, tag=0)", 0)], "send first"),
        ([waits(0, "recv(src=1, tag=0)", 1), waits(1, "send(dst=0, tag=5)", 0)], "tags differ"),
        ([waits(0, "barrier()", 1), waits(1, "recv(src=0, tag=0)", 0)], "the same order"),
        ([waits(0, "recv(src=1, tag=0)", 1), has(1, "left")], "never sends"),
        ([waits(0, "send(dst=1, tag=0)", 1), has(1, "ended")], "never receives"),
        ([waits(0, "barrier()", 1), has(1, "left")], "did not make this one"),
        ([waits(0, "barrier()", 1), has(1, "running")], "endless loop"),
    ],
)
def test_the_advice_fits_the_mistake(statuses, words):
    statuses[0] = stopped(statuses[0], "timeout", "x")
    assert words in diagnose(statuses).advice


def test_a_server_that_takes_any_message_is_in_no_cycle_with_those_that_wait_for_it():
    """Stale synchronous training, when a worker has left: nobody "receives first"."""
    server = stopped(waits(0, "recv(src=any, tag=0)", 1, 2, 3, any_of=True), "timeout", "x")
    workers = [waits(r, "recv(src=0, tag=0)", 0) for r in (1, 2)]
    found = diagnose([server, *workers, has(3, "left")])
    assert found.cycle == []
    assert found.headline == (
        "ranks 1, 2 wait for rank 0, and rank 0 waits for a message from any rank, which no rank "
        "sends; rank 3 has left the cell."
    )
    assert "who still sends" in found.advice
    assert found.edges == [(0, 1), (0, 2), (0, 3), (1, 0), (2, 0)]


def test_two_ranks_that_take_any_message_of_each_other_are_a_cycle():
    pair = [waits(r, "recv(src=any, tag=0)", 1 - r, any_of=True) for r in range(2)]
    assert find_cycle(by_rank(*pair)) == [0, 1, 0]


def test_the_advice_about_a_pipeline_names_the_rank_that_left_and_no_victim():
    chain = [waits(0, "recv(src=3, tag=0)", 3), waits(1, "recv(src=2, tag=0)", 2)]
    chain += [has(2, "left"), waits(3, "recv(src=1, tag=0)", 1)]
    chain = [stopped(chain[0], "deadlock", "x"), chain[1], chain[2], stopped(chain[3], "followed")]
    assert "rank 2 never sends" in diagnose(chain).advice


def test_a_message_that_went_to_the_wrong_neighbour_is_the_advice():
    """All have sent: "let one of them send first" would be wrong."""
    ring = [
        waits(r, f"recv(src={(r - 1) % 4}, tag=0)", (r - 1) % 4,
              sent=[((r - 1) % 4, 0, 1)], received=[])
        for r in range(4)
    ]  # fmt: skip
    ring[0] = stopped(ring[0], "deadlock", "x")
    advice = diagnose(ring).advice
    assert "rank 3 has sent a message to rank 2, which did not receive it" in advice
    assert "and rank 0 waits for one" in advice


def test_a_message_that_was_received_is_not_called_astray():
    first = waits(0, "recv(src=1, tag=0)", 1, sent=[(1, 0, 1)], received=[])
    second = waits(1, "recv(src=0, tag=0)", 0, sent=[], received=[(0, 1)])
    advice = diagnose([stopped(first, "deadlock", "x"), second]).advice
    assert "both receive first" in advice


def test_a_rank_that_left_too_early_is_the_advice_and_not_those_who_wait_for_its_sender():
    server = waits(0, "send(dst=2, tag=0)", 2, sent=[(2, 0, 1)], received=[])
    worker = waits(1, "recv(src=0, tag=0)", 0, sent=[], received=[])
    left = has(2, "left") | {"sent": [], "received": []}
    advice = diagnose([stopped(server, "deadlock", "x"), worker, left]).advice
    assert "rank 2 never receives this message" in advice


def test_of_a_message_whose_receiver_does_not_tell_nothing_is_claimed():
    first = waits(0, "recv(src=1, tag=0)", 1, sent=[], received=[])
    second = waits(1, "recv(src=0, tag=0)", 0, sent=[(2, 0, 1)], received=[])
    advice = diagnose([stopped(first, "deadlock", "x"), second, has(2, "left")]).advice
    assert "both receive first" in advice


def test_a_message_with_another_tag_is_the_advice():
    receiver = waits(0, "recv(src=1, tag=0)", 1, sent=[], received=[])
    sender = {**has(1, "left"), "sent": [(0, 7, 3)], "received": []}
    advice = diagnose([stopped(receiver, "timeout", "x"), sender]).advice
    assert advice == (
        "rank 1 has sent its message to rank 0 with tag=7, and rank 0 waits for one with tag=0."
    )


@pytest.mark.parametrize(
    ("times", "words"), [(1, "inside an `if rank"), (11, "for the 11th time, and rank 1 less")]
)
def test_one_step_more_than_the_others_is_told_from_a_call_on_some_ranks(times, words):
    late = stopped(waits(0, "all_reduce(SUM)", 1, times=times), "timeout", "x")
    assert words in diagnose([late, has(1, "left")]).advice


def test_the_first_rank_to_fail_is_the_cause_and_who_followed_is_not():
    followed = stopped(waits(0, "barrier()", 1), "followed", at=0.5)
    first = stopped(has(1, "running"), "raised", "ValueError: no", at=2.0)
    later = stopped(has(2, "running"), "raised", "KeyError: 1", at=3.0)
    assert first_cause([followed, later, first])["rank"] == 1
    text = str(diagnose([followed, first, later]))
    assert text.startswith("rank 1 raised ValueError: no")


def test_a_stop_button_is_no_cause_when_a_rank_had_failed():
    button = stopped(has(0, "running"), "interrupted", at=1.0)
    failed = stopped(has(1, "running"), "timeout", at=2.0)
    assert first_cause([button, failed])["rank"] == 1


def test_a_rank_that_computes_is_never_taken_for_stuck_nor_those_that_wait_for_it():
    ranks = by_rank(waits(0, "recv(src=1, tag=0)", 1), has(1, "running"))
    assert stuck_ranks(ranks) == set()


def test_data_on_their_way_and_other_threads_keep_a_rank_from_counting_as_stuck():
    for freed in ({"moving": True}, {"alone": False}):
        ranks = by_rank(waits(0, "recv(src=1, tag=0)", 1, **freed), PAIR[1])
        assert stuck_ranks(ranks) == set()


def test_a_receive_from_any_rank_is_stuck_only_when_no_rank_can_send():
    server = waits(0, "recv(src=any, tag=0)", 1, 2, any_of=True)
    assert stuck_ranks(by_rank(server, has(1, "left"), has(2, "running"))) == set()
    assert stuck_ranks(by_rank(server, has(1, "left"), has(2, "left"))) == {0}


def test_who_waits_for_a_stuck_rank_is_stuck_too():
    ranks = by_rank(*PAIR, waits(2, "barrier()", 0, 1))
    assert stuck_ranks(ranks) == {0, 1, 2}


@pytest.mark.parametrize("size", [2, 4, 16])
def test_the_picture_says_in_words_who_waits_for_whom_for_any_number_of_ranks(size):
    found = diagnose([waits(r, "barrier()", (r + 1) % size) for r in range(size)])
    said = alt.describe(waits_pictures.picture(found, size))
    assert said.startswith(f"A circle for each of {size} ranks, an arrow for each wait: rank 0")
    assert f"rank {size - 1} waits for rank 0" in said


def test_a_rank_whose_program_ended_after_a_mismatch_is_told_by_what_it_called():
    calls = [{**has(r, "running"), "call": "all_reduce(SUM)", "where": "a.py:3"} for r in (0, 1)]
    calls = [stopped(call, "mismatch", "different calls") for call in calls]
    ended = {**calls[0], "state": "ended"}
    assert diagnose([ended, calls[1]]).lines == [
        "ranks 0, 1 were stopped in all_reduce(SUM) at a.py:3",
    ]


def test_the_ranks_that_another_rank_stopped_in_the_same_call_share_a_line():
    failed = stopped(has(1, "running"), "raised", "ValueError: no", at=0.0)
    followed = [stopped(waits(r, "barrier()", 1), "followed") for r in (0, 2)]
    elsewhere = stopped(waits(3, "recv(src=1, tag=0)", 1), "followed")
    found = diagnose([failed, *followed, elsewhere])
    assert found.lines == [
        "ranks 0, 2 wait in barrier() at cell line 3",
        "rank 1 raised ValueError: no",
        "rank 3 waits in recv(src=1, tag=0) at cell line 3",
    ]
    assert found.edges == [(0, 1), (2, 1), (3, 1)]
