"""Checks of lab 17: a step's cost, stages of unequal layers, a batching policy; imports the others.

A policy is judged on a simulated server against `admitted`, with requests that are new in each run.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from utils.checks import trials
from utils.checks.comparison import EXACT, inside, is_number, messages, only, table, waited
from utils.checks.groups import Partition
from utils.checks.model import use_model as use_model
from utils.checks.task import Report, Step, communication, facts, task, to_each, value
from utils.checks.trials import Case, GroupAnswer, on
from utils.cluster.questions import Ranks, Reply

from .generation import BYTES, of_size
from .generation import cached_generation as cached_generation
from .generation import hand_over as hand_over
from .generation import parallel_decode as parallel_decode
from .parts import Chain
from .probes import (
    SHAPES,
    WIDTH,
    WORKLOADS,
    counts_of,
    gpt,
    probe_balance,
    probe_policy,
    probe_serve,
    text_of,
)
from .requests import Request, Server, arrivals, broken, goodput, simulate

# -- 17.2: the roofline -----------------------------------------------------------------------


@task("17.2", "prefill and decode on the roofline", points=2)
def step_cost(ranks: Ranks, report: Report) -> None:
    """Judge FLOPs and bytes of steps, and the batch from which compute limits decode."""
    draw = random.Random(report.seed)
    steps = [(1000, 3, 8, 5, 2, 7), (790_528, 4, 128, 1, 1, 64), (640, 2, 16, 3, 11, 11)]
    cases = [_step(*of) for of in steps]
    cases += [_step(*(draw.randint(2, 99) for _ in range(6))) for _ in range(3)]
    while len(cases) < 14:
        sizes = draw.randint(10**5, 10**8), draw.randint(2, 40), 64, draw.randint(10, 500)
        more = _batch(*sizes, 10 ** draw.uniform(11, 14), 10 ** draw.uniform(11, 12))
        cases += [case for case in more if case.right is not None]
    # A batch of thousands; and a text's cache takes longer to read than the text to compute.
    many = (10**8, 10, 64, 100, 3.383e14, 1e12)
    never = (10**6, 10, 4096, 100_000, 2e13, 1e12)
    cases += [*_batch(*many), *_batch(*never), *itertools.starmap(_edge, EDGES)]
    trials.judge_calls(ranks, report, cases)


#: Weights, peak, bandwidth, and the batch, for a text of one token and one block of width 1: a text
#: that gains nothing; both times equal; a little above 12; very many; FLOPs of which attention
#: needs half; a gain of less than a nanosecond.
EDGES = (
    (2, 8.0, 8.0, None),
    (4, 8.0, 8.0, 4),
    (6002, 12_008 / 251, 8.0, 13),
    (400, 804 / 1.001, 8.0, 200_000),
    (2, 5.0, 8.0, 2),
    (10_000, 67e12, 3e12, 46),
)


def _edge(weights: int, peak: float, bandwidth: float, right: int | None) -> Case:
    """Return a case at the edge of what can be computed."""
    arguments = [weights, 1, 1, 1, peak, bandwidth]
    return Case("compute_bound_from", arguments, right, (), "a batch")


def _step(weights: int, depth: int, width: int, batch: int, new: int, context: int) -> Case:
    products = 2 * weights * batch * new
    attention = 4 * depth * width * batch * new * context
    cache = 8 * depth * width * batch * context
    flops = products + attention
    nbytes = 4 * weights + cache
    of_flops = {
        "You counted a product and its sum as one FLOP. Count two": flops / 2,
        "You counted one FLOP for each weight. Count two": flops - products / 2,
        "You left out the attention. Add its two products": products,
        "You counted the attention of one block. Multiply by depth": products + attention / depth,
        "You counted one of the attention's two products": products + attention / 2,
    }
    of_bytes = {
        "You left out the cache. Add the bytes of keys and values": 4 * weights,
        "You counted keys or values, but not both": 4 * weights + cache / 2,
        "You counted numbers. A float32 has 4 bytes": nbytes / 4,
        "You read the weights for each text, but texts share them": 4 * batch * weights + cache,
        "You counted the cache of one text. Each has its own": 4 * weights + cache / batch,
        "You read only the new tokens' keys and values": 4 * weights + cache * new / context,
    }
    wrong = {said: [of, nbytes] for said, of in of_flops.items()}
    wrong |= {said: [flops, of] for said, of in of_bytes.items()}
    arguments = [weights, depth, width, batch, new, context]
    return Case(
        "step_cost",
        arguments,
        [flops, nbytes],
        table(wrong),
        "(FLOPs, bytes)",
        "weights depth width batch new context",
    )


def _batch(weights: int, depth: int, width: int, context: int, *machine: float) -> list[Case]:
    """Return a case for a machine's peak and bandwidth; no case if it shows no mistake well."""
    reading, each = (count / machine[1] for count in (4 * weights, 8 * depth * width * context))
    computing = (2 * weights + 4 * depth * width * context) / machine[0]
    exact = reading / (computing - each)
    alone = math.ceil(reading / computing)
    if computing > each and not (alone < int(exact) < 10_000 and 0.05 < exact % 1 < 0.95):
        return []
    right = math.ceil(exact) if computing > each else None
    wrong = {"You left out the caches. Each text has its own": alone}
    wrong["Memory still limits this batch. Add one"] = math.floor(exact)
    if right is None:
        wrong = {"Each further text adds more reading than computing. Return None": is_number}
    mistakes = table({said: of for said, of in wrong.items() if of != right})
    arguments = [weights, depth, width, context, *machine]
    return [Case("compute_bound_from", arguments, right, mistakes, "a batch")]


# -- 17.4: stages of unequal layers -----------------------------------------------------------


def slowest(costs: Sequence[float], counts: Sequence[int]) -> float:
    """Return the time of the slowest stage."""
    ends = list(itertools.accumulate(counts, initial=0))
    return max(sum(costs[first:end]) for first, end in itertools.pairwise(ends))


def optimum(costs: Sequence[float], p: int) -> float:
    """Return the time of the slowest stage of the best cut into p stages, none of them empty."""
    sums = list(itertools.accumulate(costs, initial=0))

    @functools.cache
    def best(n: int, stages: int) -> float:  # for the first n layers
        cuts = range(stages - 1, n) if stages > 1 else ()
        return min((max(best(k, stages - 1), sums[n] - sums[k]) for k in cuts), default=sums[n])

    return best(len(costs), p)


@task("17.4", "balance the stages", points=2)
def balanced_stages(ranks: Ranks, report: Report) -> None:
    """Compare the slowest stage with the optimum; equally good cuts pass."""
    draw = random.Random(report.seed)
    cases = [[[0.0, 1.0, 1.0, 1.0, 1.0, 4.25], 3], [[3, 1, 1, 1], 2], [[2, 2, 2, 5], 4]]
    cases += [[[1, 1, 1, 9, 1], 2], [[5], 1], [[0, 0, 7, 0], 2], [[4, 4, 4, 4, 5, 5], 3]]
    cases += [[[500, 4, 497, 1], 2]]  # the second best cut is less than 1 % slower
    cases += [[[0, 0, 0], 2], [[0, 0, 5, 5], 3], [10 * [10] + 100 * [0.1], 2]]
    cases += [[[10**12 + k for k in (0, 5, 1, 7, 2, 9)], 3], [[0.6, 0.7, 0.1, 0.2, 0.6, 0.7], 3]]
    lengths = [(draw.randint(6, 14), draw.randint(2, 5)) for _ in range(12)] + [(110, 12)]
    drawn = [[[draw.randint(1, 80) / 8 for _ in range(n)], p] for n, p in lengths]
    # In small units, 0.001 isn't little.
    cases += [*drawn, *([[cost * 2.0**-20 for cost in costs], p] for costs, p in drawn[:2])]
    cases.append([[draw.uniform(1, 10) for _ in range(40)], 4])
    for answer in report.answers(ranks, probe_balance, cases=cases):
        judged = itertools.starmap(_balanced, zip(cases, answer.value, strict=True))
        report.follow(answer.rank, itertools.chain.from_iterable(judged))


def _balanced(case: list, counts: Any) -> Iterator[Step]:
    costs, p = case
    n = len(costs)
    call = f"balance({costs if n < 15 else f'[{n} costs]'}, {p})"
    whole = isinstance(counts, list) and all(type(count) is int for count in counts)
    form = "Return a list with the number of layers of each stage"
    yield facts({f"{call} returned {str(counts)[:60]}. {form}": not whole})
    yield facts({
        f"{call}: You returned where stages end. {form}": counts == sorted(counts)
        and counts[-1:] == [n] != counts,
        f"{call}: You returned {len(counts)} stages, expected {p}": len(counts) != p,
        f"{call}: A stage has no layer. Give each at least one": min(counts, default=0) < 1,
        f"{call}: Your stages have {sum(counts)} layers, expected {n}": sum(counts) != n,
    })
    best = optimum(costs, p)
    got = slowest(costs, counts)
    equal = counts == [len(part) for part in torch.arange(n).tensor_split(p)]
    reason = "You counted layers, but their times differ. " * equal
    yield facts({
        f"{call}: Your slowest stage takes {got:g}, and {best:g} is possible with other cuts. "
        f"{reason}Minimize the slowest stage's time": got > best * (1 + 1e-9)
    })


# -- 17.5: a pipeline without backward --------------------------------------------------------

PARTITIONS: tuple[Partition, ...] = ([[0, 1, 3], [2]], [[1, 2], [0, 3]], [[0, 1, 2, 3]], None)


@task("17.5", "a pipeline without backward", points=3)
def served(ranks: Ranks, report: Report) -> None:
    """Compare logits with the whole model, and judge messages and their order."""
    each = to_each(seed=report.seeds(trials.WORLD))
    # The second partition comes twice, with another cut of the layers.
    turns = [(one, False) for one in PARTITIONS] + [(PARTITIONS[1], True)]
    cases = [{"partition": one, "turned": turned, "each": each} for one, turned in turns]
    trials.judge_groups(ranks, report, probe_serve, cases, _served)


def _served(answer: GroupAnswer) -> Iterator[Step]:
    members = answer.members
    place = answer.place
    result = answer.value
    where = on(members)
    p = len(members)
    m = len(SHAPES)
    wanted = [("recv", members[place - 1])] * m if place else []
    wanted += [("send", members[place + 1])] * m if place < p - 1 else []
    rules = only("send", "recv"), inside(members), messages(*wanted, in_order=False), waited
    yield communication(result["calls"], *rules)
    nbytes = {samples * tokens * WIDTH * BYTES for samples, tokens in SHAPES}
    yield of_size(result["calls"], nbytes)
    seeds = [answer.case["each"][rank]["seed"] for rank in members]
    x = [text_of(seeds[0] + k, *shape) for k, shape in enumerate(SHAPES)]
    first = 0
    for seed, count in zip(seeds, counts_of(p, answer.case["turned"]), strict=True):
        x = [Chain(gpt(seed)).run(first, first + count, one) for one in x]
        first += count
    right = [one.tolist() for one in x] if place == p - 1 else []
    form = "a list of logits, or [] except on the last stage"
    yield value(result["logits"], right, what=where, form=form, tolerance=EXACT)
    yield facts({
        f"{where}: Your stage ran {result['worked']} microbatches, expected {m}. Call chain.run "
        "once for each": result["worked"] != m,
        f"{where}: You sent microbatches after later ones were done, so the next stage waits. Send "
        "each one at once": result["late"],
        f"{where}: You received several microbatches before you began, so your stage waits. Begin "
        "with the first one": result["hoards"],
    })


# -- 17.6: continuous batching ----------------------------------------------------------------

ENOUGH = 0.9  # of the goodput that `admitted` reaches


def admitted(now: float, waiting: list, running: list, server: Server) -> list[Request]:
    """Return the requests that our own policy lets join: as many as fit, in order of arrival."""
    joining: list[Request] = []
    seconds = server.base + server.decode * len(running)
    for request in waiting[: server.slots - len(running)]:
        seconds += server.prefill * request.prompt
        if running and seconds > server.gap:
            break
        joining.append(request)
    return joining


@task("17.6", "continuous batching", points=3)
def batching(ranks: Ranks, report: Report) -> None:
    """Compare the goodput with our own policy's, for requests that nobody knows in advance."""
    cases = [{"workload": name, "seed": report.seed + k} for k, name in enumerate(WORKLOADS)]
    report.judge_cases(ranks, probe_policy, cases, _policy)


def as_decided(joins: list) -> Callable[..., list[Request]]:
    """Return the policy that lets the same requests join as another one did, see `probe_policy`."""
    numbers = dict(joins)
    count = itertools.count()

    def admit(now: float, waiting: list, running: list, server: Server) -> list[Request]:
        by_number = {one.number: one for one in waiting}
        return [by_number[number] for number in numbers.get(next(count), ())]

    return admit


def _policy(case: dict[str, Any], answer: Reply) -> Iterator[Step]:
    server, load = WORKLOADS[case["workload"]]
    right = goodput(simulate(admitted, server, arrivals(case["seed"], **load)), server)
    outcomes = simulate(as_decided(answer.value), server, arrivals(case["seed"], **load))
    got = goodput(outcomes, server)
    late, slow = broken(outcomes, server)
    advice = "Let fewer prompt tokens join while texts are running"
    if late > slow:
        advice = "Let requests join while others run, and even a long prompt when nobody runs"
    yield facts({
        f"{case['workload']}: Your goodput is {got:.2f} requests per second, and {right:.2f} are "
        f"possible, because {late} users waited too long for their first token and {slow} for a "
        f"later one. {advice}": not got >= ENOUGH * right
    })
