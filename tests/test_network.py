"""The slow network on request: what it takes, and that it keeps what it promises."""

from __future__ import annotations

import json
import math

import pytest

from torch_mpi.network import USUAL_LATENCY, Link, Network
from utils.scaling import fit_alpha_beta

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
    print(json.dumps({"sizes": sizes, "times": times, "known": known, "done": done}))
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
    assert Network.parse(**arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"speed": "fast"}, ValueError, "1gbit"),
        ({"speed": "1gbit", "bandwidth": 1e6}, ValueError, "one of the two"),
        ({"latency": -1e-3}, ValueError, "negative"),
        ({"latency": math.inf}, ValueError, "nothing would ever arrive"),
        ({"bandwidth": 0}, ValueError, "nothing would ever arrive"),
        ({"latency": "50 us"}, TypeError, "number"),
        ({"bandwidth": math.nan}, ValueError, "negative"),
    ],
)
def test_a_network_that_cannot_be_is_refused_in_words(arguments, error, words):
    with pytest.raises(error, match=words):
        Network.parse(**arguments)


def test_messages_of_a_rank_leave_one_after_the_other():
    link = Link()
    link.set(Network(latency=0.5, bandwidth=100.0))
    gone, arrives = zip(*(link.sends(100, at=10.0) for _ in range(3)), strict=True)
    assert gone == (11.0, 12.0, 13.0)
    assert arrives == (11.5, 12.5, 13.5)


def test_messages_from_two_ranks_share_the_receivers_link():
    link = Link()
    link.set(Network(latency=0.5, bandwidth=100.0))
    assert link.receives(100, 11.5) == 11.5
    assert link.receives(100, 11.5) == 12.5
