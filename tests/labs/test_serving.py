"""What the checks of lab 17 compare with is right."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from utils.labs.lab17 import checks, generation, parts, probes, requests


@pytest.mark.parametrize("seed", range(20))
def test_the_optimum_of_a_cut_is_the_best_of_all_cuts(seed):
    draw = random.Random(seed)
    n = draw.randint(1, 9)
    p = draw.randint(1, n)
    costs = [draw.randint(0, 40) / 8 for _ in range(n)]
    cuts = [(0, *inner, n) for inner in itertools.combinations(range(1, n), p - 1)]
    counts = [[b - a for a, b in itertools.pairwise(ends)] for ends in cuts]
    assert checks.optimum(costs, p) == min(checks.slowest(costs, of) for of in counts)


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_the_parts_of_a_model_add_up_to_it(p):
    model = probes.composed(5, tuple(range(p)))
    text = probes.text_of(7, 2, 9)
    of_ranks = [parts.part_of(model, place, p) for place in range(p)]
    logits, _ = generation.played(of_ranks, text.split([4, 1, 3, 1], 1))
    found = torch.cat([torch.tensor(of, dtype=torch.float64) for of in logits], 1)
    assert (found - model(text)).abs().max() < 1e-11


@pytest.mark.parametrize("mode", list(generation.MODES))
def test_each_mistake_gives_other_logits(mode):
    model = probes.gpt(3)
    of_ranks = [parts.part_of(model, place, 2) for place in range(2)]
    pieces = probes.text_of(7, 2, 9).split([4, 1, 4], 1)
    right, wrong = (generation.played(of_ranks, pieces, name)[0] for name in ("", mode))
    assert right != wrong


@pytest.mark.parametrize("workload", list(probes.WORKLOADS))
def test_our_policy_keeps_every_promise_about_the_gap(workload):
    server, load = probes.WORKLOADS[workload]
    outcomes = requests.simulate(checks.admitted, server, requests.arrivals(1, **load))
    late, slow = requests.broken(outcomes, server)
    assert slow == 0
    assert requests.goodput(outcomes, server) == pytest.approx(load["rate"] * (1 - late / 200))
    assert 200 - late <= sum(one.slot >= 0 for one in outcomes)
    assert max(one.slot for one in outcomes) < server.slots


def test_texts_of_a_batch_get_their_tokens_step_by_step():
    server = requests.Server(base=1, decode=0.5, prefill=0.1, slots=2, first=9, gap=9)
    ask = [requests.Outcome(requests.Request(k, 0.0, 10), new) for k, new in enumerate((1, 3, 1))]
    requests.simulate(checks.admitted, server, ask)
    # Two join and get their first token at 1 + 20 · 0.1. The third one takes the slot of the first,
    # and its prefill makes the second one wait.
    assert [(one.first, one.end) for one in ask] == [(3.0, 3.0), (3.0, 7.0), (5.5, 5.5)]
    assert [one.longest for one in ask] == [0.0, 2.5, 0.0]
    assert [one.slot for one in ask] == [0, 1, 0]
