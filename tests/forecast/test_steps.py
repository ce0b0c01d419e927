"""Which calls of a recorded run make a step, and which algorithms the course's backend chooses."""

from __future__ import annotations

import dataclasses

import pytest

from torch_mpi.group import algorithms, reductions
from utils.forecast import Run, collectives, flat, forecast
from utils.forecast.run import COMPUTE, START, WAIT, Call, Event
from utils.timeline import recording

pytestmark = pytest.mark.quick

NETWORK = flat(4e-3, 20e6)


def run(steps: list[list[float]], nbytes: int = 200_000, ranks: int = 2) -> Run:
    """Return a run that computes for the given seconds before each of its equal calls."""
    computing = [seconds for step in steps for seconds in step]
    calls = tuple(Call("all_reduce", tuple(range(ranks)), nbytes) for _ in computing)
    events: list[Event] = []
    for number, seconds in enumerate(computing):
        events += [(COMPUTE, seconds), (START, number), (WAIT, number)]
    made = Run(calls, (tuple(events),) * ranks)
    return dataclasses.replace(made, steps=recording.steps_of(made))


def test_a_step_of_equal_calls_is_told_from_several_steps_by_its_computing():
    assert run([[30e-3, 1e-3, 1e-3, 2e-3]] * 5).steps == 5
    assert run([[30e-3]] * 5).steps == 5
    assert run([[10e-3, 10e-3]] * 5).steps == 10


def test_one_disturbed_step_changes_neither_the_steps_nor_their_spread():
    noisy = [[30e-3 + 1e-4 * (k % 3)] for k in range(12)]
    noisy[7] = [160e-3]
    assert run(noisy).steps == 12
    assert run(noisy).jitter < 0.01
    steps = [[30e-3, 1e-3, 1e-3, 2e-3] for _ in range(6)]
    steps[3][2] = 130e-3
    assert run(steps).steps == 6


@pytest.mark.parametrize("reduced", ["reduce_scatter", "all_reduce"])
def test_weights_that_are_gathered_from_shards_do_not_grow_with_the_ranks(reduced):
    calls = (Call(reduced, (0, 1), 640_000), Call("all_gather", (0, 1), 640_000))
    events = ((COMPUTE, 0.03), (START, 0), (WAIT, 0), (START, 1), (WAIT, 1))
    seconds = forecast(Run(calls, (events,) * 2), NETWORK, 16, algorithm="ring").seconds
    rounds = 15 if reduced == "reduce_scatter" else 30
    assert seconds == pytest.approx(0.03 + (rounds + 15) * (4e-3 + 40e3 / 20e6))


def test_the_emulated_network_and_the_forecast_choose_the_same_algorithms():
    small = collectives.LIBRARIES["emulated"]["all_reduce"][0]["bytes"]
    large = collectives.LIBRARIES["open mpi"]["all_reduce"][0]["bytes"]
    assert (small, large + 1) == (algorithms.SMALL, reductions.RING_FROM)
    for nbytes, rounds in ((algorithms.SMALL, 2), (algorithms.SMALL * 2, 6)):
        told = forecast(run([[1e-3]] * 4, nbytes, 4), NETWORK)
        part = nbytes if rounds == 2 else nbytes / 4
        assert told.seconds == pytest.approx(1e-3 + rounds * (4e-3 + part / 20e6))


def test_buckets_that_are_pending_together_wait_for_bytes_and_not_for_latencies():
    calls = tuple(Call("all_reduce", (0, 1), nbytes) for nbytes in (200_000, 300_000))
    events = ((COMPUTE, 0.03), (START, 0), (START, 1), (WAIT, 0), (WAIT, 1))
    recorded = Run(calls, (events,) * 2)
    together = forecast(recorded, NETWORK).seconds
    one_by_one = forecast(recorded, NETWORK, algorithm="ring").seconds
    assert one_by_one - together == pytest.approx(2 * 4e-3)
