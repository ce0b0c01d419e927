"""The probes of lab 08, which run on the ranks beside the student's answers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from utils.checks.groups import Group, Partition, in_group, keywords
from utils.checks.probe import also_calls, answer_named, numbers, plays_a_part, recorded, told

# -- rules -----------------------------------------------------------------------------------------


def probe_moves(user_ns: dict, *, rank: int, seed: int) -> dict:
    """Call both rules in every case; return the two new ends, and which arguments changed.

    "old" says whether a result uses the memory of an argument or of an earlier result.
    """
    worker, center = (answer_named(user_ns, name) for name in ("move_worker", "move_center"))
    results: dict = {}
    earlier: list[Any] = []
    for case, arguments in move_cases(seed).items():
        changed: set[str] = set()
        old = False
        at_rest = arguments | {"center": arguments["w"], "gradient": 0 * arguments["w"]}
        for given in (arguments | {"eta": 0.0}, at_rest, arguments):
            moved, kinds = [], []
            for function, names in (
                (worker, ["w", "center", "gradient"]),
                (center, ["center", "w"]),
            ):
                copies = {name: given[name].clone() for name in names}
                result = function(*copies.values(), given["eta"], given["rho"])
                old |= any(in_one_memory(result, one) for one in (*copies.values(), *earlier))
                earlier.append(result)
                moved.append(told(result))
                kinds.append(str(getattr(result, "dtype", "")))
                changed |= {name for name in names if not torch.equal(copies[name], given[name])}
        results[case] = {"moved": moved, "kinds": kinds, "changed": sorted(changed), "old": old}
    return results


def in_one_memory(one: Any, other: Any) -> bool:
    """Return whether two results are tensors whose first numbers are in one place."""
    are_tensors = isinstance(one, Tensor) and isinstance(other, Tensor)
    return are_tensors and one.data_ptr() == other.data_ptr()


def move_cases(seed: int) -> dict[str, dict[str, Any]]:
    """Return arguments of the rules, by the name of the case in messages."""
    by_hand = {"w": 5.0, "center": 1.0, "gradient": 3.0}
    fresh: dict[str, Any] = {
        name: start(seed + 7 * k, like=seed) for k, name in enumerate(by_hand, 1)
    }
    chance = random.Random(seed)
    fresh["eta"] = eta = chance.uniform(0.02, 0.22)
    fresh["rho"] = chance.uniform(0.5, 2.5)
    of_one = {name: torch.tensor([number]) for name, number in by_hand.items()}
    return {
        "the example": {**of_one, "eta": 0.1, "rho": 2.0},
        "no gradient": fresh | {"gradient": torch.zeros_like(fresh["w"])},
        "random weights": fresh,
        "α = 0.8": fresh | {"rho": 0.8 / eta},
        "α = 1.3": fresh | {"rho": 1.3 / eta},
    }


# -- runs ------------------------------------------------------------------------------------------


# The tag of messages by which the check itself lets a worker continue.
SIGNAL = 808


@also_calls("barrier")
@plays_a_part("recv", "send")
@in_group
def probe_run(
    user_ns: dict,
    *,
    rank: int,
    group: Group,
    partition: Partition,
    valley: int,
    seed: int,
    name: str,
    steps: int,
    tau: int = 0,
    held: bool = False,
    **last: float,
) -> dict | None:
    """Call an answer from equal weights; if it is a worker, place 0 runs `serve` or the check's.

    Args:
        valley: the seed of this rank's gradient.
        held: whether worker 1's first gradient waits for the last gradient of worker 2.
        last: the last arguments of the answer, in this order.

    Returns:
        See :func:`_called`; None on a rank that is alone if the algorithm needs a master.
    """
    size = dist.get_world_size(group)
    place = dist.get_rank(group)
    together = name in ("local_sgd", "diloco")
    if size == 1 and not together:
        return None
    moves = rates(seed)[:1] if together else rates(seed)

    def play(first: int, valley: int, held: bool) -> dict[str, Any]:
        mine = start(first, like=seed)
        toy = Toy(valley, len(mine), _looks())
        gradient = _held(toy, place, steps, group) if held and size > 2 else toy
        arguments = (mine, gradient, steps, *([tau] if tau else []), *moves, *last.values())
        called = name
        if place == 0 and name.startswith("work"):
            exchanges = (size - 1) * rounds(steps, tau)
            if name == "work_with_momentum":
                return {"order": _served(mine, exchanges, moves, group)}
            called, arguments = "serve", (mine, exchanges, *moves)
        return _called(user_ns, called, arguments, toy, keywords(partition, group))

    before = play(seed + 1, valley + 1, held=False)  # leaves nothing for the next call
    dist.barrier(group=group)  # or a master would serve a worker's second call in its first
    after = play(seed, valley, held)
    if "calls" in before:
        after["calls of a first time"] = before["calls"]
    return after


def _called(
    user_ns: dict, name: str, arguments: tuple, toy: Toy, named: dict[str, Any]
) -> dict[str, Any]:
    """Call an answer with right update rules; return its result, notes and communication."""
    function = answer_named(user_ns, name)
    mine = arguments[0]
    before = mine.clone()
    notes = []

    def note(weights: Any) -> None:
        notes.append(told(weights.detach().clone() if isinstance(weights, Tensor) else weights))

    right = {"move_worker": moved_worker, "move_center": moved_center}
    if name == "diloco":
        right = {"outer_step": moved_outer}
    with mock.patch.dict(user_ns, right):
        result, calls = recorded(function, *arguments, note=note, **named)
    return {
        "result": told(result),
        "notes": notes,
        "at": toy.at,
        "seen": toy.seen,
        "changed": not torch.equal(mine, before),
        "calls": calls,
    }


def _held(toy: Toy, place: int, steps: int, group: Group) -> Callable[[Tensor], Tensor]:
    """Let worker 1 compute its first gradient until worker 2 has computed its last."""
    signal = torch.zeros(1)

    def gradient(w: Tensor) -> Tensor:
        slope = toy(w)
        if place == 1 and len(toy.at) == 1:
            dist.recv(signal, group_src=2, group=group, tag=SIGNAL)
        if place == 2 and len(toy.at) == steps:
            dist.send(signal, group_dst=1, group=group, tag=SIGNAL)
        return slope

    return gradient


def _served(center: Tensor, exchanges: int, moves: tuple[float, float], group: Group) -> list[int]:
    """Serve as a right `serve` does; return the workers in the order in which they came."""
    w = torch.empty_like(center)
    order = []
    for _ in range(exchanges):
        who = dist.recv(w, group=group)
        dist.send(center, dst=who, group=group)
        center = moved_center(center, w, *moves)
        order.append(who)
    return order


def _looks() -> Callable[[], list]:
    """Return a function that counts the sends and receives of this rank from now on."""
    from torch_mpi.record import log

    mark = log.mark()

    def look() -> list:
        calls = [call for call in log.since(mark) if call.tag != SIGNAL]
        return [sum(call.op == op for call in calls) for op in ("send", "recv")]

    return look


# -- what runs start from --------------------------------------------------------------------------


def moved_worker(w: Tensor, center: Tensor, gradient: Tensor, eta: float, rho: float) -> Tensor:
    """Return the worker's weights after equation (1)."""
    return w - eta * (gradient + rho * (w - center))


def moved_center(center: Tensor, w: Tensor, eta: float, rho: float) -> Tensor:
    """Return the center after equation (2) with one worker."""
    return center + eta * rho * (w - center)


def moved_outer(
    center: Tensor, pseudo_gradient: Tensor, velocity: Tensor, rate: float, momentum: float
) -> tuple[Tensor, Tensor]:
    """Return center and velocity after a step of ``torch.optim.SGD(…, nesterov=True)``."""
    v = momentum * velocity + pseudo_gradient
    return center - rate * (pseudo_gradient + momentum * v), v


class Toy:
    """The gradient of one rank's loss, a valley, with different noise in each call.

    Attributes:
        at: the weights of each call.
        seen: what this rank had communicated before each call.
    """

    def __init__(self, seed: int, size: int, look: Callable[[], Any] = lambda: None):
        self.draw = torch.Generator().manual_seed(seed)
        self.size = size
        self.goal = self._random()
        self.scale = 0.5 + self._random().abs() / 4
        self.look = look
        self.at: list[list[float]] = []
        self.seen: list[Any] = []

    def __call__(self, w: Tensor) -> Tensor:
        """Return the gradient at w."""
        self.at.append(w.tolist())
        self.seen.append(self.look())
        return (self.scale * (w - self.goal) + self._random()).to(w.dtype)

    def _random(self) -> Tensor:
        return 4 * torch.randn(self.size, generator=self.draw, dtype=torch.float64)


def start(seed: int, like: int | None = None) -> Tensor:
    """Return the first weights of all ranks: 3 to 40 numbers in float32 or float64.

    Args:
        like: the seed of other weights with the same length and dtype.
    """
    form = seed if like is None else like
    kind = form % 3
    size = random.Random(form).randint(*((20, 40), (3, 6), (7, 19))[kind])
    return numbers(seed, size, double=True).to(torch.float64 if kind else torch.float32)


def rates(seed: int) -> tuple[float, float]:
    """Return η and ρ of a case; four seeds in a row give the four mixes of small and large."""
    chance = random.Random(seed)
    eta = chance.uniform(*((0.02, 0.08), (0.15, 0.3))[seed % 2])
    alpha = chance.uniform(*((0.1, 0.4), (0.65, 0.8))[seed // 2 % 2])
    return eta, alpha / eta


def rounds(steps: int, tau: int) -> int:
    """Return the number of rounds of τ steps; the last one may be shorter."""
    return -(-steps // tau)


# -- outer steps -----------------------------------------------------------------------------------


def probe_outer(user_ns: dict, *, rank: int, seed: int) -> dict:
    """Call `outer_step` with three kinds of rates and momenta."""
    function = answer_named(user_ns, "outer_step")
    results, kinds = [], []
    changed = old = False
    for *tensors, rate, mom in outer_cases(seed):
        before = [tensor.clone() for tensor in tensors]
        moved = function(*tensors, rate, mom)
        if not isinstance(moved, tuple | list) or len(moved) != 2:
            return {"form": type(moved).__name__}
        results.append([told(tensor) for tensor in moved])
        kinds.append([str(getattr(tensor, "dtype", "")) for tensor in moved])
        changed |= not all(map(torch.equal, before, tensors))
        old |= any(in_one_memory(one, tensor) for one in moved for tensor in tensors)
    return {"moved": results, "kinds": kinds, "changed": changed, "old": old}


def outer_cases(seed: int) -> list[tuple]:
    """Return arguments of `outer_step`: center, pseudo-gradient, velocity, rate, momentum."""
    center, gradient, velocity = (start(seed + k, like=seed) for k in (1, 2, 3))
    draw = random.Random(seed).uniform
    return [
        (center, gradient, torch.zeros_like(center), 1.0, 0.0),
        (center, gradient, velocity, draw(0.3, 0.6), draw(0.9, 0.97)),
        (center, gradient, velocity.clone(), draw(1.0, 1.5), draw(0.1, 0.5)),
    ]
