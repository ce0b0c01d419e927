"""A recorded cell as a run that another machine can replay."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from test_timeline import (
    BANDWIDTH,
    LATENCY,
    Operation,
    Simulation,
    all_reduce,
    compute,
    data_parallel,
    deadlock,
    pipeline,
    ring_all_reduce,
    simulated,
    subgroups,
)

from utils.forecast import Run, RunError, flat, forecast, machine
from utils.timeline import Timeline, ideal_network

MS = 1e-3


def network(latency: float = LATENCY, bandwidth: float = BANDWIDTH):
    device = dataclasses.replace(machine("laptop").device, gap=0.0)
    return flat(latency, bandwidth, device=device)


@pytest.mark.parametrize("program", [pipeline(4), ring_all_reduce(4)], ids=["pipeline", "ring"])
def test_a_replay_on_the_recorded_network_takes_as_long_as_the_recording(program):
    shown = simulated(program, 4)
    told = shown.on(network(), jitter=0)
    # The recorded messages began when both ranks had called; the replayed ones begin when sent.
    assert told.steps.sum() == pytest.approx(ideal_network.measured(shown.lanes), rel=0.05)


@pytest.mark.parametrize("program", [pipeline(4), ring_all_reduce(4), data_parallel, subgroups])
def test_a_replay_on_a_perfect_network_takes_as_long_as_on_the_ideal_one(program):
    shown = simulated(program, 4)
    told = shown.on(network(0.0, 1e15), jitter=0)
    assert told.steps.sum() == pytest.approx(shown.ideal, abs=1 * MS)


def test_a_slower_network_is_never_faster():
    shown = simulated(pipeline(4), 4)
    seconds = [shown.on(network(1e-3, rate), jitter=0).steps.sum() for rate in (1e6, 1e7, 1e8, 1e9)]
    assert all(slow > fast for slow, fast in itertools.pairwise(seconds))


def test_a_run_knows_its_steps_and_how_much_they_differ():
    def program(rank: int):
        for step in range(6):
            yield compute((10 + step % 2) * MS)
            yield all_reduce(1_000_000)
            yield all_reduce(1_000_000)

    run = simulated(program, 2).run("two all-reduces per step")
    assert run.steps == 6, "the computing tells that two equal calls belong together"
    assert simulated(program, 2).run(steps=12).steps == 12
    run = simulated(data_parallel, 4).run()
    assert (run.steps, run.alike, run.jitter) == (2, True, None)
    # What follows the first step's last call comes before the second step's first call.
    assert run.computing(0) == pytest.approx([50 * MS, 58 * MS])


def test_a_broadcast_begins_with_its_root_and_counts_the_bytes_of_the_tensor():
    def program(rank: int):
        yield Operation("broadcast", (), 64_000, 2)

    (call,) = simulated(program, 4).run().calls
    assert (call.op, call.group, call.nbytes) == ("broadcast", (2, 3, 0, 1), 64_000)


def test_a_run_that_ended_in_an_error_or_never_ends_has_no_forecast():
    reports = Simulation(*[data_parallel] * 4).run()
    reports[2] = {"rank": 2, "error": "ValueError: no data"}
    with pytest.raises(RunError, match=r"Rank 2 did not report its cell \(ValueError: no data\)"):
        Timeline(reports).on(machine("cluster"), 64)
    with pytest.raises(RunError, match="waits for a call that never ends"):
        simulated(deadlock(4), 4).on(machine("cluster"))


def test_an_operation_without_a_model_is_named():
    def program(rank: int):
        yield Operation("monitored_barrier_of_the_future")

    with pytest.raises(RunError, match="monitored_barrier_of_the_future"):
        simulated(program, 2).run()


def test_cpu_time_counts_only_if_the_ranks_shared_cores():
    reports = Simulation(*[data_parallel] * 4).run()
    for report in reports:
        report |= {"cpu": 54 * MS, "cores": 2}
    run = Timeline(reports).run()
    assert run.crowded
    assert run.shares == pytest.approx([0.5, 0.482, 0.466, 0.45], rel=0.01)
    assert not Timeline([{**report, "cores": 8} for report in reports]).run().crowded


def test_a_run_can_be_saved_and_forecast_without_ranks(tmp_path):
    simulated(data_parallel, 4).run("DDP").save(tmp_path / "run.json")
    run = Run.load(tmp_path / "run.json")
    told = forecast(run, machine("cluster"), 1024)
    assert told.ranks == 1024
    assert "1,024" in repr(told)
