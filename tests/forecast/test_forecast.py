"""Forecasts: prices of collectives, replays, what they cost to compute, and what they refuse."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from places import ROOT

from utils.forecast import (
    Machine,
    MachineError,
    Run,
    RunError,
    ScaleError,
    Work,
    catalog,
    collectives,
    flat,
    forecast,
    load,
    machine,
)
from utils.forecast.run import COMPUTE, START, WAIT, Call
from utils.labs.lab06.costs import true_duration

pytestmark = pytest.mark.quick

ALPHA, RATE = 1e-3, 1e8


def world(ranks: int) -> np.ndarray:
    return np.arange(ranks, dtype=np.int64)[None]


def small(latency: float = 1e-3) -> Machine:
    """Nodes of four devices, racks of two nodes; each level is ten times slower than the lower."""
    whole = machine("cluster").with_level("node", units=4).with_level("rack", units=2)
    whole = whole.with_level(units=4)
    levels = tuple(
        dataclasses.replace(
            level, latency=latency, bandwidth=rate, lane=math.inf, oversubscription=1.0
        )
        for level, rate in zip(whole.levels, (1e9, 1e8, 1e7), strict=True)
    )
    return dataclasses.replace(whole, levels=levels, device=flat(0, 1).device)


# --- prices --------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [2, 3, 4, 8, 33, 1024])
@pytest.mark.parametrize("name", ["central", "ring", "direct"])
def test_on_a_flat_network_an_all_reduce_costs_what_lab_06_teaches(name, p):
    price = collectives.price(flat(ALPHA, RATE), "all_reduce", world(p), 4e6, name)
    assert price.seconds == pytest.approx(true_duration(name, p, 4e6, ALPHA, 1 / RATE))


def by_hand(tree: Machine, sources: np.ndarray, targets: np.ndarray, nbytes: float) -> float:
    """The time of messages that start together: each link's bytes are counted one by one."""
    loads: dict[tuple, float] = {}
    latency = 0.0
    for source, target in zip(sources, targets, strict=True):
        below = 1
        for level, size in zip(tree.levels, tree.sizes, strict=True):
            if source // below == target // below:
                break
            for way, end in (("up", source), ("down", target)):
                key = (level.name, way, end // below)
                loads[key] = loads.get(key, 0.0) + nbytes / level.link
            if source // size == target // size:
                latency = max(latency, level.latency)
            below = size
    return latency + max(loads.values())


@pytest.mark.parametrize("groups", [world(32), world(32).reshape(8, 4), world(32).reshape(4, 8).T])
def test_a_collective_costs_what_its_messages_cost(groups):
    """Direct exchange is priced by counting members; here every message is counted."""
    tree, groups = small(), np.ascontiguousarray(groups)
    tree = dataclasses.replace(tree, device=dataclasses.replace(tree.device, gap=0.0))
    pairs = [pair for group in groups for pair in itertools.permutations(group, 2)]
    expected = by_hand(tree, *np.array(pairs).T, nbytes=1e6 / groups.shape[1])
    assert collectives.price(tree, "all_to_all", groups, 1e6).seconds == pytest.approx(expected)
    ring = np.roll(groups, -1, axis=1)
    p = groups.shape[1]
    expected = 2 * (p - 1) * by_hand(tree, groups.ravel(), ring.ravel(), 1e6 / p)
    price = collectives.price(tree, "all_reduce", groups, 1e6, "ring")
    assert price.seconds == pytest.approx(expected)


def test_groups_that_use_the_same_uplink_at_the_same_time_share_it():
    alone = np.array([[0, 4]])
    beside = np.array([[0, 4], [1, 5], [2, 6], [3, 7]])
    one, four = (collectives.price(small(0.0), "all_to_all", g, 8e6) for g in (alone, beside))
    assert four.seconds == pytest.approx(4 * one.seconds, rel=1e-3)


def test_an_oversubscribed_uplink_slows_a_ring_down_by_its_factor():
    before = collectives.price(small(0.0), "all_reduce", world(32), 1e8, "ring").seconds
    tree = small(0.0).with_level(oversubscription=4.0)
    after = collectives.price(tree, "all_reduce", world(32), 1e8, "ring").seconds
    assert after == pytest.approx(4 * before, rel=1e-3)


def test_small_tensors_take_few_rounds_and_large_tensors_take_few_bytes():
    cluster = machine("cluster")
    names = [collectives.price(cluster, "all_reduce", world(1024), n).algorithm for n in (4, 1e9)]
    assert names == ["recursive doubling", "hierarchical"]


@pytest.mark.parametrize("name", list(collectives.ALL_REDUCE))
@pytest.mark.parametrize("p", [1, 2, 3, 5, 8, 32])
def test_every_algorithm_has_a_price_that_grows_with_the_tensor(name, p):
    if name.startswith("hierarchical") and p < 8:
        return
    few, many = (
        collectives.price(small(), "all_reduce", world(p), n, name).seconds for n in (1e3, 1e9)
    )
    assert 0 <= few <= many
    assert (few < many) == (p > 1)


# --- replays -------------------------------------------------------------------------------------


def ddp(ranks: int, steps: int = 4, computing: float = 10e-3, nbytes: int = 1_000_000) -> Run:
    """Two buckets per step: the first one is reduced while the second part is computed."""
    calls = tuple(Call("all_reduce", tuple(range(ranks)), nbytes) for _ in range(2 * steps))

    def events() -> Iterator[tuple[str, float]]:
        for step in range(steps):
            first, second = 2 * step, 2 * step + 1
            yield from [(COMPUTE, computing / 2), (START, first), (COMPUTE, computing / 2)]
            yield from [(START, second), (WAIT, first), (WAIT, second)]

    return Run(calls, (tuple(events()),) * ranks, steps=steps)


def test_buckets_wait_for_each_other_on_the_network():
    told = forecast(ddp(4), flat(ALPHA, RATE), algorithm="ring")
    bucket = told.calls[0][1].seconds
    assert bucket == pytest.approx(true_duration("ring", 4, 1e6, ALPHA, 1 / RATE))
    assert told.seconds == pytest.approx(5e-3 + 2 * bucket)
    assert told.steps.shape == (4,)


def spread(run: Run, replicas: int) -> Run:
    """The same run with every rank written out, for a world of many tiles."""
    size = run.ranks
    calls, numbers = [], {}
    for k, call in enumerate(run.calls):
        whole = len(call.group) == size and call.op != "message"
        for replica in range(replicas):
            group = tuple(rank + replica * size for rank in call.group)
            if whole and replica:
                numbers[k, replica] = numbers[k, 0]
                continue
            numbers[k, replica] = len(calls)
            group = tuple(range(size * replicas)) if whole else group
            calls.append(Call(call.op, group, call.nbytes))
    events = tuple(
        tuple((kind, value if kind == COMPUTE else numbers[value, replica]) for kind, value in rank)
        for replica in range(replicas)
        for rank in run.events
    )
    return Run(tuple(calls), events, steps=run.steps)


def grid() -> Run:
    """Two stages of two ranks: messages along the pipeline, an all_reduce in each stage and over
    all ranks."""
    calls = (
        Call("message", (0, 2), 400_000),
        Call("message", (1, 3), 400_000),
        Call("all_reduce", (0, 1), 1_000_000),
        Call("all_reduce", (2, 3), 1_000_000),
        Call("all_reduce", (0, 1, 2, 3), 4_000),
    )
    first = [(COMPUTE, 0.01), (START, 0), (WAIT, 0), (START, 2), (WAIT, 2), (START, 4), (WAIT, 4)]
    other = [(START, 0), (WAIT, 0), (COMPUTE, 0.02), (START, 3), (WAIT, 3), (START, 4), (WAIT, 4)]
    message = {0: 1}

    def second(events: list) -> tuple:
        return tuple((k, message.get(v, v) if k != COMPUTE else 1.1 * v) for k, v in events)

    return Run(calls, (tuple(first), second(first), tuple(other), second(other)))


@pytest.mark.parametrize("replicas", [1, 2, 8])
@pytest.mark.parametrize("run", [ddp(4), grid()], ids=["ddp", "grid"])
def test_a_folded_replay_takes_as_long_as_one_in_which_every_rank_is_played(run, replicas):
    tree = small()
    folded = forecast(run, tree, 4 * replicas, grow=(0, 1, 2, 3))
    written_out = forecast(spread(run, replicas), tree, 4 * replicas)
    assert folded.seconds == pytest.approx(written_out.seconds, rel=1e-9)


def test_a_group_grows_with_its_parallel_groups_and_the_others_stay():
    told = forecast(grid(), small(), 8, grow=(0, 1))
    seconds = {call.group: price.seconds for call, price, _ in told.calls}
    axis = np.array([[0, 1, 4, 5], [2, 3, 6, 7]])
    grown = collectives.price(small(), "all_reduce", axis, 1e6)
    assert seconds[0, 1] == seconds[2, 3] == pytest.approx(grown.seconds)


def test_a_nodes_link_carries_the_messages_of_all_its_devices_at_once():
    """Each device has an adapter of its own, so two messages to another node need no more time."""
    calls = (Call("message", (0, 2), 25_000_000), Call("message", (1, 3), 25_000_000))

    def seconds(name: str) -> float:
        events = (((START, n), (WAIT, n)) for n in (0, 1, 0, 1))
        tree = machine(name).with_level("node", units=2)
        return forecast(Run(calls, tuple(events)), tree).seconds

    assert seconds("rack-nvlink") == pytest.approx(1e-3, rel=0.01)
    assert seconds("rack-pcie") == pytest.approx(2e-3, rel=0.01)


def test_a_straggler_slows_every_rank_down():
    quick = forecast(ddp(4), flat(ALPHA, RATE), 64)
    slow = forecast(ddp(4), flat(ALPHA, RATE), 64, slow={17: 3.0})
    assert slow.seconds == pytest.approx(quick.seconds + 10e-3, rel=0.01)


def test_more_ranks_wait_longer_for_the_slowest_of_them():
    few, many = (forecast(ddp(4), flat(0, 1e12), n, jitter=0.1).seconds for n in (4, 1024))
    assert 1.05 < few / 10e-3 < 1.2
    assert 1.3 < many / 10e-3 < 1.5
    assert forecast(ddp(4), flat(0, 1e12), 4, jitter=0.0).seconds == pytest.approx(10e-3, rel=1e-3)


def test_strong_scaling_shares_the_work_and_weak_scaling_does_not():
    weak = forecast(ddp(4), flat(0, 1e12), 16).computing
    strong = forecast(ddp(4), flat(0, 1e12), 16, strong=True).computing
    assert weak == pytest.approx(10e-3)
    assert strong == pytest.approx(2.5e-3)


def test_two_numbers_scale_the_computing_and_give_the_mfu():
    device = machine("cluster").device
    work = Work(flops=device.speed * 2e-3, nbytes=1.0)
    told = forecast(ddp(4), machine("cluster"), 4, work=work)
    assert told.computing == pytest.approx(2e-3)
    assert told.mfu == pytest.approx(work.flops / told.seconds / device.flops)
    by_memory = forecast(ddp(4), machine("cluster"), work=Work(1.0, device.bandwidth * 3e-3))
    assert by_memory.computing == pytest.approx(3e-3)


def test_ranks_that_shared_cores_count_in_cpu_time():
    run = dataclasses.replace(ddp(4), shares=(0.5,) * 4, cores=2)
    assert forecast(run, flat(0, 1e12)).computing == pytest.approx(5e-3)
    assert forecast(run, flat(0, 1e12), computing="wall").computing == pytest.approx(10e-3)
    assert forecast(run, flat(0, 1e12)).error > forecast(ddp(4), flat(0, 1e12)).error


def test_the_expected_error_grows_with_the_distance_from_what_was_recorded():
    errors = [forecast(ddp(4), machine("cluster"), n).error for n in (4, 64, 1024)]
    assert errors == sorted(errors)
    assert errors[0] < errors[2]


def test_the_ranks_of_a_run_whose_ranks_are_alike_can_be_any_number():
    seconds = [forecast(ddp(4), flat(ALPHA, RATE), n).seconds for n in (1, 2, 3, 6, 100)]
    assert seconds == sorted(seconds)
    assert seconds[0] == pytest.approx(10e-3)


def test_a_training_s_cost_follows_from_the_seconds_of_a_step():
    told = forecast(ddp(4), machine("cluster"), 1024)
    cost = told.cost(steps=1_000_000)
    device = told.machine.device
    assert cost.hours == pytest.approx(1e6 * told.seconds / 3600 / cost.share)
    assert cost.device_hours == pytest.approx(1024 * cost.hours)
    assert cost.kwh == pytest.approx(cost.device_hours * device.watts / 1000)
    assert cost.failures == pytest.approx(cost.device_hours / device.mtbf)
    between = device.mtbf * 3600 / 1024
    assert cost.interval == pytest.approx(math.sqrt(2 * 60 * between))
    assert 0.5 < cost.share < 1


# --- how long it takes ---------------------------------------------------------------------------


def test_thousands_of_ranks_are_played_in_seconds_and_little_memory(tmp_path):
    ddp(4, steps=25).save(tmp_path / "run.json")
    code = (
        "import time, tracemalloc\n"
        "tracemalloc.start()\n"
        "from utils.forecast import Run, forecast, machine\n"
        f"run = Run.load({str(tmp_path / 'run.json')!r})\n"
        "big = machine('cluster').with_level('spine', units=128)\n"
        "begin = time.process_time()\n"
        "forecast(run, big, 4096, jitter=0.1)\n"
        "print(time.process_time() - begin)\n"
        "print(tracemalloc.get_traced_memory()[1] / 1e6)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    seconds, megabytes = map(float, done.stdout.split())
    assert seconds < 10
    assert megabytes < 500


# --- what has no answer --------------------------------------------------------------------------


def test_a_machine_without_enough_devices_says_how_many_it_has():
    with pytest.raises(MachineError, match=r"'rack-nvlink' has 32 devices, .* 64 ranks\. Choose"):
        forecast(ddp(4), machine("rack-nvlink"), 64)


@pytest.mark.parametrize("ranks", [0, -4])
def test_a_number_of_ranks_below_one_is_refused(ranks):
    with pytest.raises(MachineError, match="at least 1"):
        forecast(ddp(4), machine("cluster"), ranks)


def test_an_impossible_level_is_refused():
    with pytest.raises(MachineError, match=r"'cluster' has no level 'row', but node, rack, spine"):
        machine("cluster").with_level("row", units=2)
    with pytest.raises(MachineError, match=r"oversubscription=0\.5 is impossible"):
        machine("cluster").with_level(oversubscription=0.5)


def test_an_unknown_machine_is_answered_with_the_names_of_the_catalog():
    with pytest.raises(MachineError, match="Choose one of: laptop, four-nodes"):
        machine("frontier")


def test_a_run_with_several_groups_asks_which_one_grows():
    with pytest.raises(ScaleError, match=r"uses the groups \(0, 1\).*Name the group"):
        forecast(grid(), machine("cluster"), 64)
    with pytest.raises(ScaleError, match=r"No collective uses the group \(0, 3\)"):
        forecast(grid(), machine("cluster"), 64, grow=(0, 3))
    with pytest.raises(ScaleError, match="multiples of its 4 ranks only, not to 66"):
        forecast(grid(), machine("cluster"), 66, grow=(0, 1))


def test_messages_alone_do_not_say_how_a_run_grows_but_it_can_be_replayed_as_it_is():
    calls = (Call("message", (0, 1), 1_000_000),)
    run = Run(calls, (((START, 0), (WAIT, 0)), ((START, 0), (WAIT, 0))))
    with pytest.raises(ScaleError, match="has messages and no collectives, so it can't grow"):
        forecast(run, machine("cluster"), 4)
    told = forecast(run, flat(ALPHA, RATE))
    assert told.seconds == pytest.approx(ALPHA + 1e6 / RATE)


def test_an_empty_run_and_a_run_that_never_ends_are_refused():
    with pytest.raises(RunError, match="The run is empty"):
        forecast(Run((), ()), machine("cluster"))
    run = Run((Call("barrier", (0, 1), 0),), (((START, 0), (WAIT, 0)), ((COMPUTE, 1.0),)))
    with pytest.raises(RunError, match="another rank never starts"):
        forecast(run, machine("cluster"))


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"format": 9}', '{"format": 1, "calls": [], "events": [[["fly", 1]]]}'],
)
def test_a_file_that_holds_no_run_is_named(tmp_path, text):
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(RunError, match=r"run\.json"):
        Run.load(path)


def test_a_saved_run_is_the_same_run(tmp_path):
    run = dataclasses.replace(grid(), shares=(1.0, 0.5, 1.0, 1.0), cores=2, title="a grid")
    run.save(tmp_path / "run.json")
    assert Run.load(tmp_path / "run.json") == run
    assert "time" not in json.loads((tmp_path / "run.json").read_text())


def test_every_machine_of_the_catalog_has_sources_and_a_description():
    for name, one in catalog().items():
        assert one.sources, name
        assert str(one).startswith(name)
        assert all(level.link > 0 and level.latency > 0 for level in one.levels)


def test_a_file_of_machines_with_a_mistake_is_named(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("[machines.mine]\ndevice = 'tpu'\nlevels = []\n")
    with pytest.raises(MachineError, match="does not describe machines"):
        load(path)
