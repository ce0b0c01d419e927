"""The slow network on request: what it takes, and that it keeps what it promises."""

from __future__ import annotations

import json
import math
import time
from types import SimpleNamespace

import pytest

from torch_mpi import network as network_module
from torch_mpi.group import algorithms
from torch_mpi.group.step_runner import Steps
from torch_mpi.network import Link, Network, Wire
from utils.cluster.network_arguments import USUAL_LATENCY, parse
from utils.mpi.benchmark.alpha_beta import fit_alpha_beta

LATER = 9999.0  # seconds: a wait for it would end by the time limit of the test

SWEEP = """
import json, sys, threading, time
import torch, torch.distributed as dist
from torch_mpi.network import Network, link
dist.init_process_group("mpi")
rank = dist.get_rank()
for _ in range(5):  # a call that is well known when the network changes
    dist.all_reduce(torch.zeros(1))
link.set(Network(latency=50e-3, bandwidth=1.25e6))
link.calibrate(dist.group.WORLD)
sizes = [4, 1024, 16384, 65536, 262144]

def ping_pong(tensor):
    for act in (dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send):
        act(tensor, 1 - rank)

def seconds(call, nbytes, parts):
    tensor, best = torch.zeros(nbytes // 4), 1e9
    for _ in range(5):
        dist.barrier()
        start = time.perf_counter()
        call(tensor)
        best = min(best, (time.perf_counter() - start) / parts)
    return best

def two_messages(tensors, order):  # of rank 1, in the order in which rank 0 asks for them
    dist.barrier()
    start = time.perf_counter()
    works = [dist.isend(tensors[tag], 0, tag=tag) for tag in (0, 1)] if rank == 1 else []
    dist.barrier()
    if rank == 0:
        works = [dist.irecv(tensors[tag], 1, tag=tag) for tag in order]
    for work in works:
        work.wait()
    return time.perf_counter() - start

pair = [torch.zeros(65536), torch.zeros(65536)]
link.set(Network(latency=1e-3, bandwidth=1.25e6))
orders = [min(two_messages(pair, order) for _ in range(3)) for order in ((0, 1), (1, 0))]
link.set(Network(latency=50e-3, bandwidth=1.25e6))
known = seconds(lambda tensor: [dist.all_reduce(tensor) for _ in range(5)], 4, 5)
times = [seconds(ping_pong, n, 2) for n in sizes]
# In the background: the rank computes, and does nothing for the message, until it has arrived.
dist.barrier()
arrived = threading.Event()
work = dist.all_reduce(torch.zeros(65536), async_op=True)
work.get_future().then(lambda _: arrived.set())
start = time.perf_counter()
while not arrived.is_set() and time.perf_counter() - start < 30:
    sum(range(1000))
done = arrived.is_set()
if rank == 0:
    print(json.dumps({"sizes": sizes, "times": times, "known": known, "done": done,
                      "orders": orders}))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def sweep(mpiexec):
    for line in mpiexec(2, SWEEP).stdout.splitlines():
        if line.startswith("{"):
            return json.loads(line)
    raise AssertionError("no result was printed")


def test_a_sweep_gives_back_the_latency_and_the_bandwidth_that_were_set(sweep):
    fit = fit_alpha_beta(sweep["sizes"], sweep["times"])
    assert fit.alpha == pytest.approx(50e-3, rel=0.1)
    assert fit.bandwidth == pytest.approx(1.25e6, rel=0.1)


def test_a_call_that_was_made_on_the_fast_network_is_slow_on_the_slow_one(sweep):
    # A rank may leave the barrier up to one latency after the others: the first call is then short.
    assert sweep["known"] >= 4 / 5 * 50e-3


def test_two_messages_take_as_long_as_their_bytes_whichever_is_asked_for_first(sweep):
    # With the link given away as they are asked for, it would be twice as long.
    model = 2 * 262_144 / 1.25e6
    assert max(sweep["orders"]) / model < 1.4


def test_an_async_operation_goes_on_while_the_rank_computes(sweep):
    assert sweep["done"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"speed": "1gbit"}, Network(USUAL_LATENCY, 125e6)),
        ({"speed": "100 Mbit/s"}, Network(USUAL_LATENCY, 12.5e6)),
        ({"speed": "2.5gbit", "latency": 0.001}, Network(0.001, 312.5e6)),
        ({"latency": 1e-3}, Network(1e-3, math.inf)),
        ({"bandwidth": 125e6}, Network(0.0, 125e6)),
        ({"speed": "off"}, None),
        ({}, None),
    ],
)
def test_speeds_are_understood_as_people_write_them(arguments, expected):
    assert parse(**arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"speed": "fast"}, ValueError, "1gbit"),
        ({"speed": "1gbit", "bandwidth": 1e6}, ValueError, "sets it twice"),
        ({"latency": -1e-3}, ValueError, "negative"),
        ({"latency": math.inf}, ValueError, "lets no message arrive"),
        ({"bandwidth": 0}, ValueError, "lets no message arrive"),
        ({"latency": "50 us"}, TypeError, "number"),
        ({"bandwidth": math.nan}, ValueError, "negative"),
        ({"speed": "1gbit", "inside": "10gbit"}, ValueError, "needs nodes"),
        ({"nodes": [[0], [1]]}, ValueError, "needs a speed"),
        ({"speed": "1gbit", "nodes": [0, 1]}, TypeError, "not a list of lists"),
        ({"speed": "1gbit", "nodes": [[0], []]}, TypeError, "not a list of lists"),
        ({"speed": "1gbit", "nodes": "01"}, TypeError, "not a list of lists"),
        ({"speed": "1gbit", "nodes": [[0.0], [1]]}, TypeError, "whole numbers"),
        ({"speed": "1gbit", "nodes": [[0, 1], [1]]}, ValueError, "rank 1 is listed twice"),
        ({"speed": "1gbit", "nodes": [[0], [2]], "size": 2}, ValueError, "there is no rank 2"),
        ({"speed": "1gbit", "nodes": [[0], [2]], "size": 3}, ValueError, "rank 1 is in no node"),
        ({"speed": "1gbit", "nodes": [[0, 1]], "inside": "fast"}, ValueError, "inside='fast'"),
        (
            {"speed": "1gbit", "nodes": [[0, 1]], "inside_latency": -1.0},
            ValueError,
            "inside_latency=-1.0 is negative",
        ),
    ],
)
def test_a_network_that_cannot_be_is_refused_in_words(arguments, error, words):
    with pytest.raises(error, match=words):
        parse(**arguments)


def test_nodes_have_another_network_inside_and_survive_the_way_to_the_ranks():
    network = parse("1gbit", nodes=[[0, 1], [2, 3]], inside="10gbit", size=4)
    assert network.between(0, 1) == network.between(3, 2) == Network(0.0, 1.25e9)
    assert network.between(1, 2) is network
    assert (network.latency, network.bandwidth) == (USUAL_LATENCY, 125e6)
    assert Network.from_dict(json.loads(json.dumps(network.to_dict()))) == network
    assert str(network) == (
        "1 Gbit/s, 50 µs between the nodes [0, 1], [2, 3]; inside each node 10 Gbit/s, 0 µs"
    )
    assert str(Network(5e-3, 12.5e6)) == "100 Mbit/s, 5 ms"
    bare = parse("1gbit", nodes=[range(2), range(2, 4)], size=4)
    assert bare.between(0, 1) is None
    assert str(bare).endswith("; inside each node this machine's own network")


def test_a_rank_has_a_link_for_each_of_its_two_networks():
    link = Link()
    link.set(parse("8mbit", nodes=[[0, 1], [2]], inside="80mbit"))
    inside, outside = link.wire(0, 1), link.wire(0, 2)
    assert link.wire(0, 1) is inside is not outside
    assert outside.sends(1_000_000, at=10.0)[0] == 11.0
    assert inside.sends(1_000_000, at=10.0)[0] == 10.1
    assert outside.sends(1_000_000, at=10.0)[0] == 12.0
    link.set(parse("8mbit", nodes=[[0, 1], [2]]))
    assert link.wire(0, 1) is None


NODES = """
import json, time
import torch, torch.distributed as dist
from torch_mpi.network import link
from utils.cluster.network_arguments import parse
dist.init_process_group("mpi")
rank = dist.get_rank()

def seconds(peer, nbytes=125_000):  # of a message to rank 0 and back
    tensor, best = torch.zeros(nbytes // 4), 1e9
    for _ in range(5):
        dist.barrier()
        start = time.perf_counter()
        if rank == 0:
            dist.send(tensor, peer)
            dist.recv(tensor, peer)
        elif rank == peer:
            dist.recv(tensor, 0)
            dist.send(tensor, 0)
        best = min(best, time.perf_counter() - start)
    return best

told = []
for inside in (None, "50mbit"):
    link.set(parse("10mbit", nodes=[[0, 1], [2]], inside=inside, size=3))
    total = torch.full((5,), float(rank + 1))
    dist.all_reduce(total)
    told.append([seconds(1), seconds(2), total.tolist()])
if rank == 0:
    print(json.dumps(told))
dist.destroy_process_group()
"""


def test_messages_within_a_node_are_fast_and_those_between_nodes_slow(mpiexec):
    done = mpiexec(3, NODES)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("[[")]
    own, emulated = json.loads(line)
    assert own[2] == emulated[2] == [6.0] * 5
    assert own[1] / own[0] > 10
    assert emulated[1] / emulated[0] == pytest.approx(5, rel=0.3)


def a_wire() -> Wire:
    """0.5 s, 100 bytes per second."""
    link = Link()
    link.set(Network(latency=0.5, bandwidth=100.0))
    return link.wire(0, 1)


def test_messages_of_a_rank_leave_one_after_the_other():
    wire = a_wire()
    gone, arrives = zip(*(wire.sends(100, at=10.0) for _ in range(3)), strict=True)
    assert gone == (11.0, 12.0, 13.0)
    assert arrives == (11.5, 12.5, 13.5)


def test_messages_from_two_ranks_share_the_receivers_link():
    wire = a_wire()
    arrivals = [wire.receives(100, 11.5), wire.receives(100, 11.5)]
    assert [arrival.due() for arrival in arrivals] == [11.5, 12.5]


def test_messages_take_the_receivers_link_in_the_order_in_which_they_come_not_are_noticed():
    wire = a_wire()
    last, first, middle = (wire.receives(100, told) for told in (13.5, 11.5, 12.5))
    assert [arrival.due() for arrival in (first, middle, last)] == [11.5, 12.5, 13.5]


def test_a_message_that_is_noticed_late_puts_off_those_behind_it():
    wire = a_wire()
    behind = wire.receives(100, 12.0)
    later = wire.receives(100, 20.0)
    assert behind.due() == 12.0
    before = wire.receives(100, 11.5)
    assert [arrival.due() for arrival in (before, behind, later)] == [11.5, 12.5, 20.0]


def test_what_came_in_long_ago_does_not_wait_for_what_came_later():
    # A server asks for the message of one worker, then for that of another, which was there before.
    wire = a_wire()
    wire.receives(100, 50.0)
    assert wire.receives(100, 11.5).due() == 11.5


def test_a_link_is_never_faster_than_its_bandwidth_however_many_messages_come(monkeypatch):
    monkeypatch.setattr(network_module, "REMEMBERED", 8)
    wire = a_wire()
    arrivals = [wire.receives(100, 11.5 + k % 3) for k in range(30)]
    assert max(arrival.due() for arrival in arrivals) == 11.5 + 29


def waits_for(arrival):
    yield [arrival]


def test_a_step_waits_until_a_message_is_here_also_when_that_is_put_off():
    wire, begin = a_wire(), time.perf_counter()
    here, awaited = wire.receives(100, begin - 2.0), wire.receives(100, begin + LATER)
    steps = Steps(waits_for(here), since=begin - 6.0)
    assert steps.poll()
    assert steps.time == begin - 2.0
    steps = Steps(waits_for(awaited))
    assert steps.due() == begin + LATER
    wire.receives(1000, begin + LATER - 0.5)
    assert steps.due() > begin + LATER
    assert not steps.poll()


def order_of_exchange(rank: int, size: int) -> tuple[list[int], list[int]]:
    """To whom a rank sends in an all_to_all, and from whom it receives, in order."""
    sent, received = [], []
    team = SimpleNamespace(
        rank=rank,
        size=size,
        send=lambda peer, memory: sent.append(peer),
        receive=lambda peer, memory: received.append(peer),
    )
    others = [(peer, None) for peer in range(size) if peer != rank]
    next(algorithms.exchange(team, others, others, sizes_agree=True))
    return sent, received


def test_in_an_all_to_all_no_two_ranks_send_to_the_same_one_at_a_time():
    orders = [order_of_exchange(rank, 4) for rank in range(4)]
    for turn in range(3):
        assert sorted(sent[turn] for sent, _ in orders) == [0, 1, 2, 3]
        for rank, (sent, _) in enumerate(orders):
            assert orders[sent[turn]][1][turn] == rank
