"""Checks of lab 08: elastic averaging, round robin and asynchronous, local SGD, DiLoCo.

Every algorithm is run with a gradient that the check knows, and replayed: in the order that the
records of the master tell, where the order is the workers' own business. What likely mistakes lead
to is replayed as well.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from utils.checks.calls import Calls, Rule, inside, made, only, waited
from utils.checks.groups import PARTITIONS, WORLD, Group, in_group, keywords, on, tried
from utils.checks.mistakes import EXACT, TOLERANCE, Mistake, is_number, same, short, table
from utils.checks.model import use_model as use_model
from utils.checks.probe import answer_named, numbers, recorded, told
from utils.checks.task import Report, task, to_each
from utils.cluster.contracts import Ranks
from utils.labs.shared.replicas import Seeds

# A master needs a worker: no groups of one rank.
WITH_A_MASTER = [None, *PARTITIONS[:-1]]
# Of messages by which the check itself tells a worker to go on.
SIGNAL = 808


# -- the rules, and what is made of them ------------------------------------------------------


def moved_worker(w, center, gradient, eta: float, rho: float):
    """Equation (1)."""
    return w - eta * (gradient + rho * (w - center))


def moved_center(center, w, eta: float, rho: float):
    """Equation (2), of one worker."""
    return center + eta * rho * (w - center)


class Toy:
    """A gradient of a valley of its own, with noise that is another one at each call.

    Attributes:
        at: the weights that it was asked at.
        seen: what this rank had communicated by then.
    """

    def __init__(self, seed: int, size: int, look: Callable[[], Any] = lambda: None):
        self.draw, self.size = torch.Generator().manual_seed(seed), size
        self.goal, self.scale = self._random(), 0.5 + self._random().abs() / 4
        self.look, self.at, self.seen = look, [], []

    def __call__(self, w: Tensor) -> Tensor:
        """The gradient at w."""
        self.at.append(w.tolist())
        self.seen.append(self.look())
        return (self.scale * (w - self.goal) + self._random()).to(w.dtype)

    def _random(self) -> Tensor:
        return 4 * torch.randn(self.size, generator=self.draw, dtype=torch.float64)


def start(seed: int, like: int | None = None) -> Tensor:
    """The weights that all ranks begin with: 3 to 40 numbers, in double precision or not.

    like: the seed of other weights, which have the same length and type.
    """
    form = seed if like is None else like
    kind, chance = form % 3, random.Random(form)
    size = chance.randint(*((20, 40), (3, 6), (7, 19))[kind])
    return numbers(seed, size, double=True).to(torch.float64 if kind else torch.float32)


def rates(seed: int, variant: str = "") -> tuple[float, float]:
    """Return η and ρ of a case: of four seeds in a row, each has another mix of small and large."""
    chance = random.Random(seed)
    eta = chance.uniform(*((0.02, 0.08), (0.15, 0.3))[seed % 2])
    alpha = chance.uniform(*((0.1, 0.4), (0.65, 0.8))[seed // 2 % 2])
    if variant == "fixed rates":
        return 0.1, 3.0
    eta = 0.1 if variant == "fixed rate" else eta
    return eta, alpha / eta


def _exact(weights: Tensor) -> float:
    """How far numbers made of these may be apart, after some dozens of steps."""
    return EXACT if weights.dtype == torch.float64 else 10 * TOLERANCE


def _seeds(report: Report, k: int) -> dict:
    """Of case k: the seed of the first weights, and of the valley of each rank, which it knows."""
    return {"seed": report.seed + k, "each": to_each(own=report.seeds(WORLD))}


def _seeds_of(case: dict, members: Sequence[int]) -> Seeds:
    """The seeds of a group."""
    return Seeds(case["seed"], tuple(case["each"][rank]["own"] for rank in members))


def _called(user_ns: dict, name: str, given: tuple, toy: Toy, mine: Tensor, **named) -> dict:
    """Call an answer, with right rules for moving; what it returned, noted and communicated."""
    function, notes, before = answer_named(user_ns, name), [], mine.clone()

    def note(weights: Any) -> None:
        notes.append(told(weights.detach().clone() if isinstance(weights, Tensor) else weights))

    right = {"move_worker": moved_worker, "move_center": moved_center}
    with mock.patch.dict(user_ns, right if name != "diloco" else {"outer_step": moved_outer}):
        if name == "diloco":  # nothing of a call may be left for the next
            first = [copy.deepcopy(one) if one is toy or one is mine else one for one in given]
            function(*first, note=lambda _: None, **named)
        result, calls = recorded(function, *given, note=note, **named)
    return {
        "result": told(result),
        "notes": notes,
        "at": toy.at,
        "seen": toy.seen,
        "changed": not torch.equal(mine, before),
        "calls": [call for call in calls if call["tag"] != SIGNAL],
    }


def _looks() -> Callable[[], list]:
    """A function that tells how many sends and receives this rank has made since now."""
    from torch_mpi.record import log

    mark = log.mark()

    def look() -> list:
        calls = [call for call in log.since(mark) if call.tag != SIGNAL]
        return [sum(call.op == op for call in calls) for op in ("send", "recv")]

    return look


def _noted(expected: list, first: list, what: str) -> Iterator[Mistake]:
    """What goes wrong with notes, rather than with the weights."""
    count = len(expected)
    for said, fits in {
        f"expected {count} notes, one for each {what}: call note(…) there":
            lambda got: len(got) != count,
        f"note(…) comes before the weights have changed; call it after each {what}":
            lambda got: same(got, [first, *expected[:-1]]),
    }.items():  # fmt: skip
        yield Mistake(fits, said)


def _judge_weights(
    report: Report, rank: int, value: dict, expected: dict, wrong: dict[str, dict], each: str
) -> bool:
    """Notes, then the result; what mistakes give is replayed only if there is one."""
    first, notes = expected["first"], expected["notes"]

    def mistakes() -> Iterator[Mistake]:
        yield from table({said: replay()["notes"] for said, replay in wrong.items()})
        yield from _noted(notes, first, each)

    exact = {"tolerance": expected["exact"]}
    what = f"the weights that it has noted, with {expected['rates']}"
    told_notes = {"what": what, "form": "the weights"}
    if not report.judge(rank, value["notes"], notes, mistakes(), **told_notes, **exact):
        return False
    ends = [
        Mistake(first, "these are the weights of the start: return those of the end"),
        Mistake(lambda got: got in notes, "these are earlier weights: return the last ones"),
    ]
    last = notes[-1] if notes else first
    told_result = {"what": "the result", "form": "the weights after the last step"}
    if not report.judge(rank, value["result"], last, ends, **told_result, **exact):
        return False
    said = (
        "the tensor w that it was given has changed: the next run would not begin where this one "
        "did. Make new tensors: w = w - …, or work on w.clone()"
    )
    return report.facts(rank, {said: value["changed"]})


def _sized(case: dict) -> Rule:
    """The rule that each message is the whole of the weights."""
    nbytes = start(case["seed"]).nbytes

    def rule(calls: Calls) -> str | None:
        odd = next((call["nbytes"] for call in calls if call["nbytes"] != nbytes), None)
        return odd and f"a message of {odd} bytes; expected the weights, {nbytes} bytes"

    return rule


# -- 8.1: the rules ---------------------------------------------------------------------------

HAND = {"w": 5.0, "center": 1.0, "gradient": 3.0, "eta": 0.1, "rho": 2.0}


def probe_moves(user_ns: dict, *, rank: int, seed: int) -> dict:
    """Both functions: the step by hand, random weights, and random ones without a gradient."""
    worker, center = (answer_named(user_ns, name) for name in ("move_worker", "move_center"))
    found: dict = {}
    for case, given in _move_cases(seed).items():
        moved, changed, rates = [], set(), (given["eta"], given["rho"])
        for function, names in (
            (worker, ("w", "center", "gradient")),
            (center, ("center", "w")),
        ):
            own = {name: given[name].clone() for name in names}
            moved.append(told(function(*own.values(), *rates)))
            changed |= {name for name in names if not torch.equal(own[name], given[name])}
        found[case] = {"moved": moved, "changed": sorted(changed)}
    return found


def _move_cases(seed: int) -> dict[str, dict]:
    by_hand = {name: torch.tensor([HAND[name]]) for name in ("w", "center", "gradient")}
    names = ("w", "center", "gradient")
    fresh = {name: start(seed + 7 * k, like=seed) for k, name in enumerate(names, 1)}
    chance = random.Random(seed)
    eta = chance.uniform(0.02, 0.22)
    rates = {"eta": eta, "rho": chance.uniform(0.5, 2.5)}
    still = fresh | {"gradient": torch.zeros_like(fresh["w"])}
    return {
        "the step by hand": by_hand | {"eta": HAND["eta"], "rho": HAND["rho"]},
        "no gradient": {name: tensor.clone() for name, tensor in still.items()} | rates,
        "random weights": {name: tensor.clone() for name, tensor in fresh.items()} | rates,
        **{f"α = {alpha}": {name: tensor.clone() for name, tensor in fresh.items()}
           | {"eta": eta, "rho": alpha / eta} for alpha in (0.8, 1.3)},
    }  # fmt: skip


def _wrong_workers(w, center, gradient, eta, rho) -> dict[str, Tensor]:
    new_center, pull = moved_center(center, w, eta, rho), w - center
    return {
        "nothing pulls the worker to the centre: the term ρ(W − W̄) is missing": w - eta * gradient,
        "the pull has the wrong sign, and drives the worker away from the centre: it moves by "
        "−ηρ(W − W̄)": w - eta * (gradient - rho * pull),
        "ρ(W − W̄) is not multiplied by η: both terms are in the bracket":
            w - eta * gradient - rho * pull,
        "the pull is multiplied by η twice: α = ηρ": w - eta * gradient - eta * eta * rho * pull,
        "the pull goes to the centre after it has moved; equation (1) has the old W̄":
            w - eta * (gradient + rho * (w - new_center)),
        "the gradient has the wrong sign: the worker climbs": w - eta * (-gradient + rho * pull),
        "the gradient is missing: only the spring acts": w - eta * rho * pull,
        "the gradient is not multiplied by η": w - gradient - eta * rho * pull,
        "this is the plain average of both": (w + center) / 2,
        "this is the change of the worker; return the new weights":
            -eta * (gradient + rho * pull),
    }  # fmt: skip


def _wrong_centers(w, center, gradient, eta, rho) -> dict[str, Tensor]:
    pull, new = w - center, moved_worker(w, center, gradient, eta, rho)
    return {
        "nothing pulls the centre": center,
        "the centre moves away from the worker: the sign is +ηρ(W − W̄)": center - eta * rho * pull,
        "ρ(W − W̄) is not multiplied by η": center + rho * pull,
        "multiplied by η twice: α = ηρ": center + eta * eta * rho * pull,
        "multiplied by η alone: ρ is missing": center + eta * pull,
        "this follows from the worker's new weights; equation (2) has the old ones, W":
            center + eta * rho * (new - center),
        "the centre descends along the gradient, too. It has no gradient: only the springs move it":
            center - eta * gradient + eta * rho * pull,
        "divided by the number of workers: the sum over the workers is no mean":
            center + eta * rho * pull / 3,
        "this is the plain average of both": (w + center) / 2,
        "this is the change of the centre; return the new centre": eta * rho * pull,
    }  # fmt: skip


@task("8.1", "the two rules", points=2)
def moves(ranks: Ranks, report: Report) -> None:
    """A step by hand; W + W̄ conserved without a gradient; then random weights."""
    seeds = [report.seed + rank for rank in range(ranks.n)]  # so weights of each length and type
    for answer in report.answers(ranks, probe_moves, each=to_each(seed=seeds)):
        cases, rank = _move_cases(seeds[answer.rank]), answer.rank
        by_hand, still, *fresh = (functools.partial(_judge_moves, report, rank, name, given,
                                 answer.value[name]) for name, given in cases.items())  # fmt: skip
        # The step by hand and the sum: each sees what the other does not.
        if by_hand() & still(conserved=True):
            all(judged() for judged in fresh)


def _judge_moves(
    report: Report, rank: int, case: str, given: dict, got: dict, conserved: bool = False
) -> bool:
    """Where `conserved`, not the weights but their sum is judged."""
    said = f"{', '.join(got['changed'])} has changed: return a new tensor, leave arguments alone"
    if not report.facts(rank, {said: got["changed"]}):
        return False
    w, center, eta, rho = (given[name] for name in ("w", "center", "eta", "rho"))
    if conserved:
        before, after = (w + center).tolist(), _sum_of(*got["moved"])
        said = (
            "without a gradient W + W̄ must stay, as what pulls the one pulls the other. It was "
            f"{short(before)}, and is {short(after)}"
        )
        # Where nothing was returned, the step by hand has said so.
        lost = after is not None and not same(after, before)
        return report.facts(rank, {said: lost})
    expected = moved_worker(**given), moved_center(center, w, eta, rho)
    known, right = (_wrong_workers(**given), _wrong_centers(**given)), True
    names = ("move_worker", "move_center")
    ends = ((w - eta * given["gradient"], center - w), (center, w - center))
    for name, moved, want, mistakes, end in zip(
        names, got["moved"], expected, known, ends, strict=True
    ):
        mistakes |= _other_share(moved, *end, eta * rho)
        how = {"what": f"{name}, {case}", "form": "the new weights", "tolerance": _exact(want)}
        said = "this is a single number: return a tensor of the shape of w"
        wrong = [Mistake(is_number, said), *table(mistakes)]
        right &= report.judge(rank, moved, want.tolist(), wrong, **how)
    return right


def _other_share(moved: Any, end: Tensor, distance: Tensor, alpha: float) -> dict[str, list]:
    """The mistake that an end of the spring moves by another share of the distance than α."""
    end, distance = end.double(), distance.double()
    numeric = isinstance(moved, list) and all(map(is_number, moved))
    # Of one number alone, every result is some share.
    if not numeric or not len(moved) == len(end) > 1:
        return {}
    share = (torch.tensor(moved, dtype=torch.float64) - end) @ distance / (distance @ distance)
    said = f"it moves by the share {share:.4g} of the distance, expected α = ηρ = {alpha:.4g}: α "
    return {said + "has no limit, and no value of its own": end + share * distance}


def _sum_of(worker: Any, center: Any) -> list[float] | None:
    rows = (worker, center)
    if not all(isinstance(row, list) for row in rows) or len(worker) != len(center):
        return None
    return [w + c for w, c in zip(*rows, strict=True)]


# -- 8.2: round robin -------------------------------------------------------------------------


@in_group
def probe_round_robin(
    user_ns: dict, *, rank: int, group: Group, partition, own: int, seed: int, steps: int
):
    """`round_robin` from equal weights; nothing on a rank that is alone."""
    if dist.get_world_size(group) == 1:
        return None
    mine, toy = start(seed), Toy(own, len(start(seed)), _looks())
    named = keywords(partition, group)
    return _called(user_ns, "round_robin", (mine, toy, steps, *rates(seed)), toy, mine, **named)


def round_robin_replayed(seeds: Seeds, workers: int, steps: int, variant: str = "") -> list[dict]:
    """Of each place: the weights at first, and those noted."""
    weights, moves = [start(seeds.model)] * (workers + 1), rates(seeds.model, variant)
    toys = [Toy(own, len(weights[0])) for own in seeds.own]
    found = [_begun(seeds) for _ in weights]
    for t in range(steps):
        j = 1 + t % workers
        center, w = weights[0], weights[j]
        new = moved_worker(w, center, toys[j](center if variant == "at center" else w), *moves)
        weights[0] = moved_center(center, new if variant == "new" else w, *moves)
        if variant == "center as worker":
            new = weights[0]
        weights[j] = new
        for place in (0, j):
            found[place]["notes"].append(weights[place].tolist())
    return found


def _begun(seeds: Seeds) -> dict:
    """Of a replay: the weights at first, how exact those are that follow, and no notes yet."""
    first, (eta, rho) = start(seeds.model), rates(seeds.model)
    said = f"η = {eta:.3g}, ρ = {rho:.3g}"
    return {"first": first.tolist(), "exact": _exact(first), "notes": [], "rates": said}


_FIXED = {"fixed rate": "the gradient is multiplied by 0.1, whatever η is: use the argument eta"}
_BOTH_FIXED = _FIXED | {
    "fixed rates": "these are the weights with η = 0.1 and ρ = 3, the numbers of the notebook: use "
    "the arguments eta and rho"
}
_ROUND_ROBIN_MISTAKES = _BOTH_FIXED | {
    "new": "the centre was moved by the worker's new weights. Line 14 has W^j as it was before "
    "line 13: send the old ones",
    "at center": "the gradient is taken at the centre's weights. Line 11 computes it at the "
    "worker's own, W^j",
    "center as worker": "the worker goes on with the centre's weights. It keeps its own: only the "
    "spring pulls it",
}


def _round_robin_hint(case: dict) -> str:
    return (
        f"in {case['steps']} steps; in step t = 0, 1, … the worker's place is 1 + t mod G, and "
        "place 0 is the master. A worker takes part in its own steps only" + _in_a_group(case)
    )


def _in_a_group(case: dict) -> str:
    return (
        ". If it works without a group: every call needs group=group" if case["partition"] else ""
    )


@task("8.2", "round robin, as printed", points=4)
def round_robin(ranks: Ranks, report: Report) -> None:
    """One worker at a time, in turn; the old W^j moves the centre."""
    runs = zip(WITH_A_MASTER, (6, 7, 8, 25), strict=True)
    cases = [{"partition": p, "steps": s} | _seeds(report, k) for k, (p, s) in enumerate(runs)]
    given = (ranks, report, probe_round_robin, cases, _round_robin_hint)
    for case, members, values in tried(*given):
        if len(members) > 1:
            _judge_round_robin(report, case, members, values)


def _judge_round_robin(report: Report, case: dict, members: list[int], values: list) -> None:
    workers, steps = len(members) - 1, case["steps"]
    replay = functools.partial(round_robin_replayed, _seeds_of(case, members), workers, steps)
    expected = replay()
    turns = [1 + t % workers for t in range(steps)]
    for place, (rank, value) in enumerate(zip(members, values, strict=True)):
        mine = turns if place == 0 else [0] * turns.count(place)
        sized = _sized(case)
        rules = (only("send", "recv"), inside(members), _turns(members, mine), sized, waited)
        report.communication(
            rank, value["calls"], *rules, _in_line(place, value, turns.count(place))
        )
    if not report.found:
        for place, (rank, value) in enumerate(zip(members, values, strict=True)):
            wrong = {said: lambda v=name, p=place: replay(v)[p]
                     for name, said in _ROUND_ROBIN_MISTAKES.items()}  # fmt: skip
            what = "update of the centre" if place == 0 else "step of this worker"
            _judge_weights(report, rank, value, expected[place], wrong, what)


def _turns(members: list[int], places: list[int]) -> Rule:
    """The rule that sends and receives are, each in this order, with the ranks at these places."""
    wanted = [members[place] for place in places]

    def rule(calls: Calls) -> str | None:
        for op, word in (("send", "sent to"), ("recv", "received from")):
            got = [call["peer"] for call in calls if call["op"] == op]
            if got != wanted:
                return (
                    f"{on(members)}: {word} the ranks {_row(got)}, expected {_row(wanted)}: one "
                    "message each way in every step of the worker 1 + t mod G"
                )
        return None

    return rule


def _row(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"


def _in_line(place: int, value: dict, times: int) -> Rule:
    """Return the rule that a worker computes ``times`` gradients, between lines 10 and 12."""

    def rule(_: Calls) -> str | None:
        if place and len(value["seen"]) != times:
            return f"this worker computed {len(value['seen'])} gradients, and has {times} turns"
        if place == 0 and value["at"]:
            return "the master computes a gradient: it has no images, only the workers compute"
        for k, (sends, receives) in enumerate(value["seen"]):
            if sends > k:
                return (
                    "W^j is sent before the gradient is computed. That would be faster, but is not "
                    "the algorithm as printed: line 12 comes after line 11"
                )
            if receives <= k:
                return (
                    "the gradient is computed before the centre has come. Line 11 comes after line "
                    "10: a worker begins when it is its turn"
                )
        return None

    return rule


# -- 8.3: asynchronous ------------------------------------------------------------------------


@in_group
def probe_asynchronous(
    user_ns: dict,
    *,
    rank: int,
    group: Group,
    partition,
    own: int,
    seed: int,
    steps: int,
    tau: int,
    held: bool,
):
    """`serve` on place 0, `work` on the others; `held`: the first worker is the last to go on."""
    size, place = dist.get_world_size(group), dist.get_rank(group)
    if size == 1:
        return None
    mine, toy = start(seed), Toy(own, len(start(seed)), _looks())
    named = keywords(partition, group)
    if place == 0:
        exchanges = (size - 1) * -(-steps // tau)
        return _called(user_ns, "serve", (mine, exchanges, *rates(seed)), toy, mine, **named)
    gradient = _held(toy, place, steps, group) if held and size > 2 else toy
    given = (mine, gradient, steps, tau, *rates(seed))
    return _called(user_ns, "work", given, toy, mine, **named)


def _held(toy: Toy, place: int, steps: int, group: Group) -> Callable[[Tensor], Tensor]:
    """Worker 1 computes its first gradient until worker 2 has computed its last."""
    signal = torch.zeros(1)

    def gradient(w: Tensor) -> Tensor:
        found = toy(w)
        if place == 1 and len(toy.at) == 1:
            dist.recv(signal, group_src=2, group=group, tag=SIGNAL)
        if place == 2 and len(toy.at) == steps:
            dist.send(signal, group_dst=1, group=group, tag=SIGNAL)
        return found

    return gradient


def asynchronous_replayed(
    seeds: Seeds, order: Sequence[int], workers: int, steps: int, tau: int, variant: str = "", **mom
) -> list[dict]:
    """As :func:`round_robin_replayed`, where the workers at these places came in this order."""
    center, found = start(seeds.model), []
    runs = [_Worker(seeds, place, steps, tau, variant, **mom) for place in range(1, workers + 1)]
    notes = []
    for place in order:
        run = runs[place - 1]
        run.until_exchange()
        w = run.sends()
        new = moved_center(center, w, *rates(seeds.model, "" if mom else variant))  # 8.4: right
        run.exchange(new if variant == "new center" else center)
        center = new
        notes.append(center.tolist())
    for run in runs:
        run.until_exchange()
    found.append(_begun(seeds) | {"notes": notes})
    return found + [run.found() for run in runs]


class _Worker:
    """A worker that is replayed; with momentum, if there is a `delta`."""

    def __init__(self, seeds, place, steps, tau, variant, delta: float = 0.0):
        self.w, self.k, self.begun = start(seeds.model), 0, _begun(seeds)
        self.toy = Toy(seeds.own[place], len(self.w))
        self.v = self.pull = torch.zeros_like(self.w)
        # The next gradient, where a mistake needs it early.
        self.ready: Tensor | None = None
        self.center, self.notes = self.w, self.begun["notes"]
        self.steps, self.tau, self.variant, self.delta = steps, tau, variant, delta
        self.eta, self.rho = rates(seeds.model, variant)

    def until_exchange(self) -> None:
        """Local steps, until one with an exchange comes."""
        due = self.tau - 1 if self.variant == "late" else 0
        while self.k < self.steps and self.k % self.tau != due:
            self._step(self.rho if self.variant == "every step" else 0.0)

    def sends(self) -> Tensor:
        """What the master gets."""
        if self.variant == "sends ahead":
            return self.w + self.delta * self.v
        if self.variant == "new":
            self.ready = self.toy(self.w + self.delta * self.v)
            return self.w + self.delta * self.v - self.eta * self.ready
        return self.w

    def exchange(self, center: Tensor) -> None:
        """The step with the centre."""
        self.center = center
        rho = 0.0 if self.variant == "no pull" else self.rho
        if self.variant == "replaced":
            self.w = center
            rho = 0.0
        self._step(rho, 0 if self.variant == "pull only" else 1)

    def _step(self, rho: float, sign: int = 1) -> None:
        variant, delta = self.variant, self.delta
        if variant == "forgets v":
            self.v = torch.zeros_like(self.v)
        look = {"no look-ahead": 0.0, "far ahead": 1.0}.get(variant, delta)
        ahead = self.w + look * self.v
        g = self.toy(ahead) if self.ready is None else self.ready
        g = (-sign if variant == "climbs" else sign) * g
        self.ready = None
        share = 1.0 if variant == "whole" and rho else self.eta * rho
        pull = share * ((ahead if variant == "pull ahead" else self.w) - self.center)
        if variant == "kept pull":
            pull = self.pull = pull if rho else self.pull
        old = self.v * (1.0 if variant == "undamped" else delta)
        self.v = old - self.eta * g - (pull if variant == "pull in v" else 0)
        self.w = self.w + self.v - (0 if variant == "pull in v" else pull)
        self.k += 1
        self.notes.append(self.w.tolist())

    def found(self) -> dict:
        """The weights at first, and those noted."""
        return self.begun


_SERVE_MISTAKES = _BOTH_FIXED | {
    "new": "the worker sends its weights after its step; the rule has W as it was before",
}
_WORK_MISTAKES = _BOTH_FIXED | {
    "new center": "the pull goes to a centre that this worker has moved already: the master "
    "answers first, and moves the centre afterwards",
    "no pull": "nothing pulls the worker when it has the centre: move_worker",
    "every step": "the worker is pulled in every step, by a centre that it got earlier; between "
    "two exchanges it descends only",
    "pull only": "in the step with an exchange the gradient is missing: every step descends",
    "late": "the exchange comes in the last of τ steps. It belongs into step 0, τ, 2τ, …: "
    "k % tau == 0",
    "replaced": "the worker takes over the centre's weights. It keeps its own: the spring pulls it",
    "whole": "the pull is the whole distance; it is the share α = ηρ of it",
    "climbs": "the gradient has the wrong sign: the worker climbs",
}


def _asynchronous_hint(case: dict) -> str:
    steps, tau = case["steps"], case["tau"]
    said = f"{steps} steps with τ = {tau}: {-(-steps // tau)} exchanges of each worker"
    if case["held"]:
        said += (
            ". The first worker computed for long, and the others went on: the master takes "
            "whatever comes first, dist.recv without a source"
        )
    return said + _in_a_group(case)


def _asynchronous_cases(report: Report) -> list[dict]:
    runs = [(0, 6, 2, False), (1, 4, 1, True), (2, 7, 3, False), (3, 5, 2, True)]
    runs += [(0, 4, 9, False), (2, 31, 13, False)]
    return [
        {"partition": WITH_A_MASTER[p], "steps": steps, "tau": tau, "held": held}
        | _seeds(report, k)
        for k, (p, steps, tau, held) in enumerate(runs)
    ]


@task("8.3", "asynchronous, every τ steps", points=4)
def asynchronous(ranks: Ranks, report: Report) -> None:
    """The master serves whoever comes; a worker has ⌈steps/τ⌉ exchanges."""
    given = (ranks, report, probe_asynchronous, _asynchronous_cases(report))
    for case, members, values in tried(*given, _asynchronous_hint):
        if len(members) > 1:
            _judge_asynchronous(report, case, members, values)


def _judge_asynchronous(report: Report, case: dict, members: list[int], values: list) -> None:
    steps, tau, workers = case["steps"], case["tau"], len(members) - 1
    each = -(-steps // tau)
    rules = (only("send", "recv"), inside(members), _sized(case), waited)
    calls = values[0]["calls"]
    whole = {rank: each for rank in members[1:]}
    right = report.communication(members[0], calls, *rules, _counts(whole), _any_first(workers))
    for rank, value in zip(members[1:], values[1:], strict=True):
        words = f" in {steps} steps with τ = {tau}"
        right &= report.communication(
            rank, value["calls"], *rules, _counts({members[0]: each}, words)
        )
        right &= _judge_gradients(report, rank, value, steps)
    if not right:
        return
    order = [members.index(call["peer"]) for call in _of(calls, "send")]
    replay = functools.partial(
        asynchronous_replayed, _seeds_of(case, members), order, workers, steps, tau
    )
    expected = replay()
    what = "update of the centre", "step of this worker"
    for place, (rank, value) in enumerate(zip(members, values, strict=True)):
        said = _WORK_MISTAKES if place else _SERVE_MISTAKES | _WORK_MISTAKES
        wrong = {text: lambda v=name, p=place: _tried_replay(replay, v, p, expected)
                 for name, text in said.items()}  # fmt: skip
        _judge_weights(report, rank, value, expected[place], wrong, what[min(place, 1)])


def _tried_replay(replay: Callable, variant: str, place: int, expected: list) -> dict:
    """A replay of a mistake; what looks like the right thing is no mistake."""
    found = replay(variant)[place]
    return {"notes": None} if found["notes"] == expected[place]["notes"] else found


def _of(calls: Calls, op: str) -> Calls:
    return sorted((call for call in calls if call["op"] == op), key=lambda call: call["start"])


def _counts(wanted: dict[int, int], words: str = "") -> Rule:
    """The rule that so many messages went to each rank, and came from it."""

    def rule(calls: Calls) -> str | None:
        for op, word in (("send", "to"), ("recv", "from")):
            for rank, count in wanted.items():
                got = sum(call["op"] == op and call["peer"] == rank for call in calls)
                if got != count:
                    return (
                        f"{got} {op}s {word} rank {rank}{words}, expected {count}: an exchange is "
                        "a message with W to the master, and one with W̄ back"
                    )
            others = {c["peer"] for c in calls if c["op"] == op} - set(wanted)
            if others:
                return f"{op} {word} rank {min(others)}: only master and workers exchange messages"
        return None

    return rule


def _any_first(workers: int) -> Rule:
    """The rule that the master waits for no worker in particular."""

    def rule(calls: Calls) -> str | None:
        fixed = [c for c in _of(calls, "recv") if c["blocking"] and not c["any_source"]]
        if workers < 2 or not fixed:
            return None
        return (
            f"the master waits for rank {fixed[0]['peer']}, while others may be ready: leave out "
            "the source, who = dist.recv(w, group=group) takes what comes first"
        )

    return rule


def _judge_gradients(report: Report, rank: int, value: dict, steps: int) -> bool:
    said = f"computed {len(value['at'])} gradients in {steps} steps: one in each, gradient(w)"
    return report.facts(rank, {said: len(value["at"]) != steps})


# -- 8.4: momentum ----------------------------------------------------------------------------


@in_group
def probe_momentum(
    user_ns: dict,
    *,
    rank: int,
    group: Group,
    partition,
    own: int,
    seed: int,
    steps: int,
    tau: int,
    delta: float,
):
    """`work_with_momentum` beside a right master."""
    size, place = dist.get_world_size(group), dist.get_rank(group)
    if size == 1:
        return None
    mine, toy = start(seed), Toy(own, len(start(seed)), _looks())
    if place == 0:
        exchanges = (size - 1) * -(-steps // tau)
        order = _served(mine, exchanges, rates(seed), group)
        return {"order": order}
    named = keywords(partition, group)
    given = (mine, toy, steps, tau, *rates(seed), delta)
    return _called(user_ns, "work_with_momentum", given, toy, mine, **named)


def _served(center: Tensor, exchanges: int, moves: tuple[float, float], group: Group) -> list[int]:
    """What a right `serve` does; the workers in the order in which they came."""
    w, order = torch.empty_like(center), []
    for _ in range(exchanges):
        who = dist.recv(w, group=group)
        dist.send(center, dst=who, group=group)
        center = moved_center(center, w, *moves)
        order.append(who)
    return order


_MOMENTUM_MISTAKES = _BOTH_FIXED | {
    "no look-ahead": "the gradient is taken at w. Nesterov's momentum takes it ahead, at w + δv",
    "pull in v": "the spring is part of v, which keeps it for the next steps. It pulls w only, "
    "once: w ← w + v − α(w − W̄)",
    "pull ahead": "the spring is measured from w + δv; it is measured from w, which was sent",
    "forgets v": "v is 0 again in every step: keep it from step to step",
    "undamped": "v has all of its old value and the gradient: multiply the old v by δ",
    "far ahead": "the gradient is taken at w + v, expected at w + δv",
    "sends ahead": "the worker sends w + δv; the master needs w",
    "kept pull": "the pull of the last exchange acts in the steps after it, too: between two "
    "exchanges there is no spring",
    "whole": "the pull is the whole distance; it is the share α = ηρ of it",
    "climbs": "the gradient has the wrong sign: the worker climbs. v ← δv − η ΔW",
    "no pull": "nothing pulls the worker when it has the centre",
    "every step": "the worker is pulled in every step; between two exchanges there is no spring",
    "late": "the exchange comes in the last of τ steps. It belongs into step 0, τ, 2τ, …",
    "new": "the worker sends its weights after its step; send them before",
    "replaced": "the worker takes over the centre's weights; it keeps its own",
}


@task("8.4", "EAMSGD: with momentum", points=2)
def momentum(ranks: Ranks, report: Report) -> None:
    """Nesterov's momentum in the worker; the spring stays out of it."""
    draw = random.Random(report.seed).uniform
    runs = [(0, 6, 2, draw(0.4, 0.6)), (2, 5, 1, draw(0.9, 0.95)), (3, 7, 3, draw(0.1, 0.3))]
    runs += [(1, 31, 13, draw(0.6, 0.8))]
    cases = [{"partition": WITH_A_MASTER[p], "steps": steps, "tau": tau, "delta": delta}
             | _seeds(report, k) for k, (p, steps, tau, delta) in enumerate(runs)]  # fmt: skip
    given = (ranks, report, probe_momentum, cases, _hint_of)
    for case, members, values in tried(*given):
        if len(members) > 1:
            _judge_momentum(report, case, members, values)


def _judge_momentum(report: Report, case: dict, members: list[int], values: list) -> None:
    steps, tau, workers = case["steps"], case["tau"], len(members) - 1
    order = [members.index(rank) for rank in values[0]["order"]]
    given = (_seeds_of(case, members), order, workers, steps, tau)
    replay = functools.partial(asynchronous_replayed, *given, delta=case["delta"])
    expected = replay()
    counts = _counts({members[0]: -(-steps // tau)}, f" in {steps} steps with τ = {tau}")
    rules = (only("send", "recv"), inside(members), _sized(case), waited, counts)
    for place in range(1, workers + 1):
        rank, value = members[place], values[place]
        if not report.communication(rank, value["calls"], *rules):
            continue
        if _judge_gradients(report, rank, value, steps):
            wrong = {text: lambda v=name, p=place: _tried_replay(replay, v, p, expected)
                     for name, text in _MOMENTUM_MISTAKES.items()}  # fmt: skip
            _judge_weights(report, rank, value, expected[place], wrong, "step of this worker")


def _hint_of(case: dict) -> str:
    return _asynchronous_hint(case | {"held": False})


# -- 8.5: local SGD ---------------------------------------------------------------------------


@in_group
def probe_local(
    user_ns: dict, *, rank: int, group: Group, partition, own: int, seed: int, steps: int, tau: int
):
    """`local_sgd` on all ranks of a group."""
    mine, toy = start(seed), Toy(own, len(start(seed)))
    named = keywords(partition, group)
    return _called(
        user_ns, "local_sgd", (mine, toy, steps, tau, rates(seed)[0]), toy, mine, **named
    )


def local_replayed(
    seeds: Seeds, size: int, steps: int, tau: int, variant: str = "", rate=1.0, mom=0.0
) -> list[dict]:
    """Rounds of τ local steps, each followed by an outer step; see :func:`moved_outer`."""
    first, (eta, _) = start(seeds.model), rates(seeds.model, variant)
    toys = [Toy(own, len(first)) for own in seeds.own]
    centers, velocities = [first] * size, [torch.zeros_like(first)] * size
    locals_ = list(centers)
    notes: list[list] = [[] for _ in toys]
    for begin in range(0, steps, tau):
        if begin + tau > steps and variant == "forgets the rest":
            break
        length = tau if variant == "whole last round" else min(tau, steps - begin)
        if variant == "early":
            length = min(tau, begin + 1)
        for left in reversed(range(length)):
            slopes = [toy(w) for toy, w in zip(toys, locals_, strict=True)]
            if variant == "gradients" and not left:
                slopes = [sum(slopes) / size] * size
            locals_ = [w - eta * slope for w, slope in zip(locals_, slopes, strict=True)]
        if variant == "aliased":
            centers = list(locals_)
        own = [c - w for c, w in zip(centers, locals_, strict=True)]
        mean = sum(own) / size
        means = {
            "sum": [mean * size] * size,
            "world": [mean * size / WORLD] * size,
            "own": own,
            "sign": [-mean] * size,
            "over tau": [mean / tau] * size,
            "inner rate": [mean * eta] * size,
            "summed weights": [c - sum(locals_) for c in centers],
        }.get(variant, [mean] * size)
        for place in range(size):
            given = (centers[place], means[place], velocities[place], rate, mom)
            centers[place], velocities[place] = moved_outer(*given, variant=variant)
            if variant in ("sum of weights", "over the world"):
                centers[place] = sum(locals_) / (WORLD if variant == "over the world" else 1)
            local = variant in ("gradients", "notes local")
            notes[place].append((locals_ if local else centers)[place].tolist())
        if variant not in ("not reset", "gradients"):
            locals_ = list(centers)
    said = f"η = {rates(seeds.model)[0]:.3g}" + f", rate {rate:.3g}, momentum {mom:.3g}" * (mom > 0)
    return [_begun(seeds) | {"notes": noted, "rates": said} for noted in notes]


_LOCAL_MISTAKES = _FIXED | {
    "over the world": f"divided by {WORLD}, the size of the world: dist.get_world_size(group)",
    "gradients": "a gradient is averaged in the last step of a round, and not the weights: they "
    "differ between the ranks. all_reduce the weights, after the step",
    "sum of weights": "these are sums over the ranks: divide by the size of the group",
    "own": "these are this rank's own weights: all_reduce writes into the tensor that it is given, "
    "so go on with that one",
    "not reset": "the average was made, but the rank goes on from its own weights: go on from the "
    "average",
    "early": "the weights are averaged after the first of τ steps: count the steps from 1, "
    "k % tau == 0",
    "forgets the rest": "the last round is missing: where τ does not divide the steps, it is "
    "shorter",
    "whole last round": "the last round has τ steps, and there are more than `steps` of them: it "
    "has what is left",
}


def _rounds(steps: int, tau: int) -> int:
    return -(-steps // tau)


def _round_cases(report: Report, more: Sequence[dict] = ()) -> list[dict]:
    runs = [(None, 6, 2), *((p, s, t) for p, (s, t) in zip(
        PARTITIONS, ((7, 3), (31, 13), (5, 1), (3, 5)), strict=True))]  # fmt: skip
    return [{"partition": p, "steps": s, "tau": t} | (more[k] if more else {}) | _seeds(report, k)
            for k, (p, s, t) in enumerate(runs)]  # fmt: skip


def _rounds_hint(case: dict) -> str:
    steps, tau = case["steps"], case["tau"]
    return f"{steps} steps with τ = {tau}: {_rounds(steps, tau)} all_reduces"


def _judge_rounds(
    report: Report, case: dict, members: list[int], values: list, said: dict, **outer: float
) -> None:
    """Each round: τ steps, one all_reduce of the weights, and where that leads."""
    steps, tau, size = case["steps"], case["tau"], len(members)
    replay = functools.partial(local_replayed, _seeds_of(case, members), size, steps, tau, **outer)
    expected, count = replay(), _rounds(steps, tau)
    why = f" in {steps} steps with τ = {tau}: one after every τ steps, and one at the end"
    sized, rounds = _sized(case), made("all_reduce", count, why)
    rules = (only("all_reduce"), inside(members), rounds, sized, waited)
    for place, (rank, value) in enumerate(zip(members, values, strict=True)):
        if not report.communication(rank, value["calls"], *rules):
            continue
        if not _judge_gradients(report, rank, value, steps):
            continue
        wrong = {text: lambda v=name, p=place: _tried_replay(replay, v, p, expected)
                 for name, text in said.items()}  # fmt: skip
        _judge_weights(report, rank, value, expected[place], wrong, "all_reduce")


@task("8.5", "local SGD", points=2)
def local_sgd(ranks: Ranks, report: Report) -> None:
    """τ steps of its own on each rank, then the mean of the weights."""
    cases = _round_cases(report)
    given = (ranks, report, probe_local, cases, _rounds_hint)
    for case, members, values in tried(*given):
        _judge_rounds(report, case, members, values, _LOCAL_MISTAKES)


# -- 8.6: DiLoCo ------------------------------------------------------------------------------


def moved_outer(center, pseudo_gradient, velocity, rate: float, momentum: float, variant: str = ""):
    """A step of ``torch.optim.SGD(…, nesterov=True)``: the new centre and velocity."""
    v = momentum * velocity + pseudo_gradient
    if variant == "forgets v":
        v = pseudo_gradient * 1.0
        return center - rate * (pseudo_gradient + momentum * v), v
    if variant == "heavy ball":
        return center - rate * v, v
    if variant == "averages":
        return center - pseudo_gradient, v
    if variant == "fixed outer":
        v = 0.9 * velocity + pseudo_gradient
        return center - 0.7 * (pseudo_gradient + 0.9 * v), v
    return center - rate * (pseudo_gradient + momentum * v), v


def probe_outer(user_ns: dict, *, rank: int, seed: int) -> dict:
    """`outer_step` with rates and momenta of three kinds."""
    function, found, changed = answer_named(user_ns, "outer_step"), [], False
    for center, gradient, velocity, *rates in _outer_cases(seed):
        before = center.clone(), gradient.clone(), velocity.clone()
        moved = function(center, gradient, velocity, *rates)
        if not isinstance(moved, tuple | list) or len(moved) != 2:
            return {"form": type(moved).__name__}
        found.append([told(tensor) for tensor in moved])
        now = (center, gradient, velocity)
        changed |= not all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
    return {"moved": found, "changed": changed}


def _outer_cases(seed: int) -> list[tuple]:
    center, gradient, velocity = (start(seed + k, like=seed) for k in (1, 2, 3))
    draw = random.Random(seed).uniform
    zero = torch.zeros_like(center)
    return [
        (center, gradient, zero, 1.0, 0.0),
        (center, gradient, velocity, draw(0.3, 0.6), draw(0.9, 0.97)),
        (center, gradient, velocity.clone(), draw(1.0, 1.5), draw(0.1, 0.5)),
    ]


@in_group
def probe_diloco(
    user_ns: dict, *, rank: int, group: Group, partition, own, seed, steps, tau, rate, mom
):  # fmt: skip
    """`diloco` on all ranks of a group, with a right outer step."""
    mine, toy = start(seed), Toy(own, len(start(seed)))
    named = keywords(partition, group)
    given = (mine, toy, steps, tau, rates(seed)[0], rate, mom)
    return _called(user_ns, "diloco", given, toy, mine, **named)


_OUTER_MISTAKES = {
    "heavy ball": "this is heavy-ball momentum: Nesterov's step is along g + μv, with the new v; "
    "first v ← μv + g",
    "forgets v": "the old velocity is not used: v ← μv + g",
    "averages": "the outer rate and the momentum are not used",
}
_DILOCO_MISTAKES = {
    "sign": "the centre moves away from the workers. The pseudo-gradient is W̄ − Wⁱ, and the outer "
    "step descends along it",
    "sum": "the pseudo-gradients were summed; DiLoCo takes their mean: divide by the size of the "
    "group",
    "world": f"divided by {WORLD}, the size of the world: dist.get_world_size(group)",
    "own": "each rank has used its own pseudo-gradient: all_reduce writes into the tensor that it "
    "is given, so use that one",
    "not reset": "the ranks go on from their own weights after an outer step. In DiLoCo they go on "
    "from the centre",
    "over tau": "divided by τ: the pseudo-gradient is what τ steps have changed, as it is",
    "inner rate": "multiplied by η: the outer step has a rate of its own",
    "summed weights": "W was summed over the ranks before it was taken from the centre: sum the "
    "differences W̄ − Wⁱ, and divide by the size of the group",
    "aliased": "the pseudo-gradients are zero: w is the same tensor as the centre, and w -= … "
    "changes both. w = w - … makes a new one",
    "notes local": "these are the weights of this rank before the outer step: note the centre",
    "fixed outer": "these are the weights with rate 0.7 and momentum 0.9, the numbers of the "
    "notebook: use the arguments rate and momentum",
    "averages": "the outer step is a plain average: use outer_step with rate and momentum",
    "forgets v": "the velocity is 0 again in each round: keep it from round to round",
} | {name: _LOCAL_MISTAKES[name] for name in ("forgets the rest", "whole last round", "fixed rate")}


@task("8.6", "DiLoCo", points=4)
def diloco(ranks: Ranks, report: Report) -> None:
    """Nesterov's outer step, and rounds of local steps from the centre."""
    seeds = [report.seed + rank for rank in range(ranks.n)]
    for answer in report.answers(ranks, probe_outer, each=to_each(seed=seeds)):
        _judge_outer(report, answer.rank, answer.value, _outer_cases(seeds[answer.rank]))
    if report.found:
        return
    draw = random.Random(report.seed).uniform
    small, large = ((0.3, 0.6), (0.1, 0.4)), ((0.75, 1.2), (0.7, 0.97))
    kinds = (large, small, (small[0], large[1]), (large[0], small[1]), large)
    outer = [{"rate": draw(*rate), "mom": draw(*mom)} for rate, mom in kinds]
    cases = _round_cases(report, outer)
    given = (ranks, report, probe_diloco, cases, _rounds_hint)
    for case, members, values in tried(*given):
        outer = {"rate": case["rate"], "mom": case["mom"]}
        _judge_rounds(report, case, members, values, _DILOCO_MISTAKES, **outer)


def _judge_outer(report: Report, rank: int, value: dict, cases: list[tuple]) -> None:
    if "form" in value:
        form = f"outer_step returned {value['form']}, expected two tensors: return center, velocity"
        report.problem(form, rank)
        return
    for (center, g, v, rate, mom), got in zip(cases, value["moved"], strict=True):
        expected = [tensor.tolist() for tensor in moved_outer(center, g, v, rate, mom)]
        wrong = {
            said: [t.tolist() for t in moved_outer(center, g, v, rate, mom, name)]
            for name, said in _OUTER_MISTAKES.items()
        } | {
            "the step goes the wrong way: center − rate · (…)":
                [(2 * center - torch.tensor(expected[0])).tolist(), expected[1]],
            "the outer rate is part of the velocity: v ← μv + g, without it":
                [expected[0], (mom * v + rate * g).tolist()],
            "these are velocity and centre: return center, velocity": expected[::-1],
            "the velocity comes back unchanged: return the new one": [expected[0], v.tolist()],
        }  # fmt: skip
        wrong = {said: gives for said, gives in wrong.items() if not same(gives, expected)}
        how = {"what": f"outer_step, rate {rate:.3g}, momentum {mom:.3g}", "form": "two tensors"}
        how["tolerance"] = _exact(center)
        if not report.judge(rank, got, expected, table(wrong), **how):
            return
    said = "outer_step changes a tensor that it was given: make new ones"
    report.facts(rank, {said: value["changed"]})
