"""A run on an ideal network: made-up records with known answers."""

from __future__ import annotations

import pytest
from test_timeline import (
    BANDWIDTH,
    LATENCY,
    PROGRAMS,
    Simulation,
    all_reduce,
    compute,
    made,
    pipeline,
    recv,
    reported,
    send,
    simulated,
    subgroups,
    texts,
    wait,
)

from utils.figures import alt
from utils.timeline import Timeline, ideal_network

MS = 1e-3
# The simulated ranks begin 0.1 ms after each other.
SKEW = 0.1 * MS


# --- an ideal network ----------------------------------------------------------------------------


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (4, 8), (3, 1)])
def test_a_pipeline_on_an_ideal_network_is_as_long_as_its_formula_says(stages, microbatches):
    """1F1B: (m + p − 1) · (forward + backward), whatever its messages cost."""
    shown = simulated(pipeline(stages, microbatches), stages)
    expected = (microbatches + stages - 1) * 30 * MS
    assert shown.ideal == pytest.approx(expected, abs=stages * SKEW)
    assert shown.ideal < ideal_network.measured(shown.lanes)


def test_a_chain_of_messages_costs_what_its_ranks_compute_one_after_the_other():
    def program(rank: int):
        if rank:
            yield recv(rank - 1, 50_000_000)
        yield compute((rank + 1) * 10 * MS)
        if rank < 3:
            yield send(rank + 1, 50_000_000)

    shown = simulated(program, 4)
    assert shown.ideal == pytest.approx(100 * MS, abs=3 * SKEW)
    took = 100 * MS + 3 * (LATENCY + 50_000_000 / BANDWIDTH)
    assert ideal_network.measured(shown.lanes) == pytest.approx(took, abs=3 * SKEW)


def test_no_network_makes_up_for_a_straggler():
    """Rank 3 computes three times as long: each step is as long as its."""

    def program(rank: int):
        for _ in range(5):
            yield compute(30 * MS if rank == 3 else 10 * MS)
            yield all_reduce(4_000_000)

    shown = simulated(program, 4)
    assert shown.ideal == pytest.approx(5 * 30 * MS, abs=4 * SKEW)
    assert shown.totals[0]["seconds waiting"] == pytest.approx(5 * 20 * MS, abs=4 * SKEW)


def test_stragglers_that_take_turns_cost_the_sum_of_the_slowest_ones():
    def program(rank: int):
        for step in range(4):
            yield compute(25 * MS if rank == step else 10 * MS)
            yield all_reduce(4_000_000)

    assert simulated(program, 4).ideal == pytest.approx(4 * 25 * MS, abs=5 * SKEW)


def test_ranks_that_only_get_what_others_send_early_wait_for_nobody():
    def program(rank: int):
        if rank == 0:
            yield send(1, 100_000_000, blocking=False)
            yield compute(10 * MS)
        else:
            yield compute(40 * MS)
            yield recv(0, 100_000_000)

    shown = simulated(program, 2)
    assert shown.ideal == pytest.approx(40 * MS, abs=2 * SKEW)


def test_a_sender_does_not_wait_for_a_receiver_that_is_late():
    """Over a real network a large message is sent only when its receiver is there."""

    def program(rank: int):
        if rank == 0:
            yield send(1, 100_000_000)
            yield compute(30 * MS)
        else:
            yield compute(40 * MS)
            yield recv(0, 100_000_000)

    shown = simulated(program, 2)
    assert ideal_network.measured(shown.lanes) > 170 * MS
    assert shown.ideal == pytest.approx(40 * MS, abs=2 * SKEW)


def test_an_overlapped_all_reduce_counts_only_where_it_was_not_hidden():
    """Three background all_reduces of 60 ms; each rank computes 20 ms, then waits for them."""
    nbytes = 40_000_000

    def program(rank: int):
        works = []
        for _ in range(3):
            yield compute(5 * MS)
            works.append(all_reduce(nbytes, blocking=False))
            yield works[-1]
        yield compute((5 + 7 * rank) * MS)
        for work in works:
            yield wait(work)

    shown = simulated(program, 2)
    assert ideal_network.measured(shown.lanes) > 70 * MS
    # The last call comes after 15 ms; rank 1, which computes longest, ends with its own work.
    assert shown.ideal == pytest.approx((15 + 12) * MS, abs=2 * SKEW)


def test_ranks_of_other_groups_do_not_wait_for_each_other():
    def program(rank: int):
        group = (0, 1) if rank < 2 else (2, 3)
        yield compute((10, 20, 30, 70)[rank] * MS)
        yield all_reduce(1_000_000, group=group)
        yield compute(5 * MS)

    shown = simulated(program, 4)
    assert shown.ideal == pytest.approx(75 * MS, abs=4 * SKEW)
    alone = Timeline([Simulation(*[program] * 4).run()[rank] for rank in (0, 1)])
    assert alone.ideal == pytest.approx(25 * MS, abs=2 * SKEW)


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "deadlock"])
@pytest.mark.parametrize("n", [2, 5])
def test_an_ideal_network_is_never_slower_and_never_faster_than_the_busiest_rank(name, n):
    shown = simulated(PROGRAMS[name](n), n)
    busiest = max(row["seconds computing"] for row in shown.totals)
    assert busiest - 1e-9 <= shown.ideal <= ideal_network.measured(shown.lanes) + 1e-9


def test_a_deadlock_has_no_end_on_an_ideal_network_either():
    shown = simulated(PROGRAMS["deadlock"](4), 4)
    assert shown.ideal is None
    assert "Does not end on an ideal network either." in shown.alt_text
    assert any(text.startswith("does not end") for text in texts(shown.figure()))


def test_a_message_that_was_sent_before_the_cell_is_there_at_once():
    got = made(1, op="recv", message=[0, 7], start=10.005, matched=10.01, end=10.015,
               waits=[[10.005, 10.015]])  # fmt: skip
    shown = Timeline([reported(), reported(got, rank=1)])
    assert shown.ideal == pytest.approx(20 * MS), "rank 0 computes for 20 ms"
    (lane,) = Timeline([reported(got, rank=1)]).lanes
    assert ideal_network.seconds([lane]) == pytest.approx(10 * MS)


def test_a_wait_that_was_given_up_is_no_end_of_its_operation():
    """`work.wait(timeout)` raised after 2 ms; then it computed 10 ms and waited once more."""
    waits = [[10.0, 10.002], [10.012, 10.018]]
    background = made(
        op="all_reduce", peer=None, sequence=1, blocking=False, end=10.018, waits=waits
    )
    late = made(op="all_reduce", peer=None, sequence=1, start=10.016, matched=10.016, end=10.018,
                waits=[[10.016, 10.018]])  # fmt: skip
    shown = Timeline([reported(background), reported(late, rank=1)])
    # Rank 1 calls after 16 ms; rank 0 waits for that, and computes 2 ms more.
    assert shown.ideal == pytest.approx(18 * MS)


def test_a_message_that_is_sent_late_is_late_on_an_ideal_network_too():
    """Rank 1 waits from 5 on for what rank 0 sends after 100 s."""
    sent = made(op="send", peer=1, message=[0, 1], start=110.0, matched=110.0, end=110.0,
                waits=[[110.0, 110.0]])  # fmt: skip
    got = made(1, op="recv", message=[0, 1], start=15.0, matched=110.0, end=110.0,
               waits=[[15.0, 110.0]])  # fmt: skip
    shown = Timeline([reported(sent, end=111.0), reported(got, rank=1, end=111.0)])
    assert shown.ideal == pytest.approx(101)
    assert ideal_network.measured(shown.lanes) == pytest.approx(101)


def test_a_wait_that_a_transfer_has_hidden_counts_on_an_ideal_network():
    """A transfer of 50 s hides 50 of the 51 s that rank 2 computes before it sends."""
    first = made(op="send", peer=1, message=[0, 1], start=10.0, matched=10.0, end=60.0,
                 waits=[[10.0, 60.0]])  # fmt: skip
    late = made(2, op="send", peer=1, message=[2, 1], start=61.0, matched=61.0, end=61.0,
                waits=[[61.0, 61.0]])  # fmt: skip
    got = [
        made(1, op="recv", peer=0, message=[0, 1], start=10.0, matched=10.0, end=60.0,
             waits=[[10.0, 60.0]]),
        made(1, op="recv", peer=2, message=[2, 1], start=60.0, matched=61.0, end=61.0,
             waits=[[60.0, 61.0]]),
    ]  # fmt: skip
    lanes = Timeline([
        reported(first, end=62.0),
        reported(*got, rank=1, end=62.0),
        reported(late, rank=2, end=62.0),
    ]).lanes  # fmt: skip
    assert ideal_network.seconds(lanes) == pytest.approx(52)


def test_a_sender_runs_ahead_on_an_ideal_network():
    """Ten times, rank 0 computes 1 s and sends by rendezvous to rank 1, which computes 9 s."""

    def sent(k: int) -> dict:
        begin, end = 11.0 + 10 * k, 20.0 + 10 * k
        return made(op="send", peer=1, message=[0, k + 1], start=begin, matched=end - 1, end=end,
                    waits=[[begin, end]])  # fmt: skip

    def got(k: int) -> dict:
        begin, end = 19.0 + 10 * k, 20.0 + 10 * k
        return made(1, op="recv", message=[0, k + 1], start=begin, matched=begin, end=end,
                    waits=[[begin, end]])  # fmt: skip

    shown = Timeline([
        reported(*map(sent, range(10)), end=110.0),
        reported(*map(got, range(10)), rank=1, end=110.0),
    ])  # fmt: skip
    assert shown.ideal == pytest.approx(90)
    assert ideal_network.measured(shown.lanes) == pytest.approx(100)


def test_a_run_whose_main_thread_waits_for_what_another_one_asks_for_has_an_end():
    """Rank 0 waits from 0 to 10; its other thread sends at 2 what rank 1 answers 5 s later."""
    asked = made(op="send", peer=1, message=[0, 1], start=12.0, matched=12.0, end=13.0,
                 waits=[[12.0, 13.0]])  # fmt: skip
    answered = made(op="recv", peer=1, message=[1, 1], start=10.0, matched=18.0, end=20.0,
                    waits=[[10.0, 20.0]])  # fmt: skip
    got = made(1, op="recv", message=[0, 1], start=10.0, matched=12.0, end=13.0,
               waits=[[10.0, 13.0]])  # fmt: skip
    reply = made(1, op="send", peer=0, message=[1, 1], start=18.0, matched=18.0, end=20.0,
                 waits=[[18.0, 20.0]])  # fmt: skip
    shown = Timeline([reported(asked, answered, end=22.0), reported(got, reply, rank=1, end=22.0)])
    assert shown.ideal == pytest.approx(7), "5 s of rank 1, then 2 s of rank 0"


def test_what_a_rank_that_does_not_answer_would_have_done_is_left_out():
    shown = Timeline([reported(), {"rank": 1, "error": "dead"}])
    assert shown.ideal == pytest.approx(20 * MS)
    assert Timeline([{"rank": 0, "error": "dead"}]).ideal is None


def test_the_picture_and_its_words_say_how_long_the_run_takes_on_an_ideal_network():
    shown = simulated(pipeline(4), 4)
    figure = shown.figure()
    figure.canvas.draw()
    assert "on an ideal network 330 ms of 410 ms" in texts(figure)
    assert "On an ideal network 330 ms of 410 ms." in alt.describe(figure)
    assert not any("ideal" in text for text in texts(Timeline([reported()]).figure()))


@pytest.mark.parametrize("length", [20, 60, 75, 95])
def test_the_number_is_below_the_title_and_above_the_lanes(length):
    shown = simulated(subgroups, 4)
    shown.title = ("a title that goes on and on " * 9)[:length]
    axes = shown.figure().axes[0]
    axes.figure.canvas.draw()
    (note,) = (text for text in axes.texts if "ideal" in text.get_text())
    title, box = axes._left_title.get_window_extent(), note.get_window_extent()
    assert axes.get_window_extent().y1 < box.y0 < box.y1 <= title.y0
    assert title.y1 < axes.figure.bbox.y1
