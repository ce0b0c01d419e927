"""The probes of lab 16, which run on the ranks beside the student's answers."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_mpi.record import log
from utils.checks.draws import across, drawn
from utils.checks.groups import Group, in_group
from utils.checks.probe import as_dict, kept, kind_of, reading_answer, recorded, values_of

# -- numbers, and what a rank replies --------------------------------------------------------------


def shown(result: object) -> dict[str, Any]:
    """Return a result for JSON: its kind in words, and its numbers if it is a tensor."""
    if not isinstance(result, Tensor):
        return {"kind": type(result).__name__, "numbers": []}
    return {"kind": kind_in_words(result), "numbers": values_of(result)}


def several(name: str, result: Any, n: int) -> list[dict[str, Any]]:
    """Return the tensors of a tuple for JSON. Raises TypeError: it doesn't have n values."""
    if not isinstance(result, tuple | list) or len(result) != n:
        raise TypeError(f"{name} must return a tuple of {n} values")
    return [shown(one) for one in result]


def kind_in_words(tensor: Tensor) -> str:
    """Return dtype and shape of a tensor."""
    return f"a tensor {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


# -- layouts ---------------------------------------------------------------------------------------


def probe_kind(user_ns: dict, *, rank: int) -> str:
    """Return the type of a layout in words."""
    return kind_of(reading_answer(user_ns, "zigzag")(8, 2))


def probe_spread(user_ns: dict, *, rank: int, seed: int, kv_heads: int, p: int) -> dict[str, Any]:
    """Return repeated KV heads, and the gradient of the heads that were repeated."""
    k = drawn(seed, kv_heads, 3, 2).requires_grad_()
    y, calls = recorded(reading_answer(user_ns, "spread"), k, p)
    reply = {"y": shown(y), "dx": shown(None), "calls": calls}
    if isinstance(y, Tensor) and y.requires_grad:
        y.square().sum().backward()
        reply["dx"] = shown(k.grad)
    return reply


# -- parts of a softmax ----------------------------------------------------------------------------


#: The output, the maximum, and the total of each query.
Part = tuple[Tensor, Tensor, Tensor]

PART_HEADS = 2
QUERIES = 6
PART_SIZE = 4


def part_of(*blocks: tuple[Tensor, Tensor]) -> Part:
    """Return the part of blocks of scores and values: output, maximum and total of each query."""
    scores = torch.cat([scores for scores, _ in blocks], -1)
    maximum = scores.amax(-1, keepdim=True)
    weights = (scores - unit_of(maximum)).exp()
    return weights @ torch.cat([v for _, v in blocks], 1), maximum, weights.sum(-1, keepdim=True)


def unit_of(maximum: Tensor) -> Tensor:
    """Return the number to subtract from scores, which is finite even if no key is seen."""
    return maximum.clamp(min=torch.finfo(maximum.dtype).min)


def drawn_blocks(
    seed: int, factor: float, level: float, apart: float
) -> list[tuple[Tensor, Tensor]]:
    """Return scores and values of two blocks; no query sees the last key, whose value is huge.

    `apart` says how much lower the scores of the second block are.
    """
    blocks = []
    for i, keys in enumerate((6, 4)):
        scores = factor * drawn(seed + i, PART_HEADS, QUERIES, keys) + level - i * apart
        scores[:, [i, 2]] = -torch.inf  # query 0 sees nothing of block 0, query 2 nothing at all
        scores[:, 3, 1:] = -torch.inf
        scores[:, :, -1] = -torch.inf
        v = drawn(seed + 10 + i, PART_HEADS, keys, PART_SIZE)
        v[:, -1] = 1e30
        blocks.append((scores, v))
    return blocks


def probe_softmax(
    user_ns: dict, *, rank: int, seed: int, factor: float, level: float, apart: float
) -> dict[str, Any]:
    """Return the student's parts of two blocks, and combination of our parts."""
    blocks = drawn_blocks(seed, factor, level, apart)
    part, combine = (reading_answer(user_ns, name) for name in ("part", "combine"))

    def all_results() -> list[list[dict[str, Any]]]:
        results = [several("part", part(*block), 3) for block in blocks]
        ours = [part_of(block) for block in blocks]
        return [*results, several("combine", combine(*ours), 3)]

    results, calls = recorded(all_results)
    return {"results": results, "calls": calls}


# -- exchanges of tokens and heads -----------------------------------------------------------------


WIDTH = 3
HEADS = 12  # every size of a group divides it

#: Each operator's collective, its conjugate, and the shape of its input from sizes and group rank.
OPERATORS = {
    "gather_tokens": ("all_gather", "scatter_sums", lambda n, r: (n[r], WIDTH)),
    "scatter_sums": ("reduce_scatter", "gather_tokens", lambda n, r: (sum(n), WIDTH)),
    "heads_of": ("all_to_all", "tokens_of", lambda n, r: (HEADS, n[r], WIDTH)),
    "tokens_of": ("all_to_all", "heads_of", lambda n, r: (HEADS // len(n), sum(n), WIDTH)),
}
#: The function without autograd that each operator is made of.
FUNCTIONS = dict(zip(OPERATORS, ("gathered", "scattered", "to_heads", "to_tokens"), strict=True))


def upstream_of(seed: int, shape: Sequence[int], place: int, p: int) -> Tensor:
    """Return the gradient that comes in; in a group of three, that of the last rank is zero."""
    return across(drawn(seed + 1, *shape)) * (not (p == 3 and place == 2))


@in_group
def probe_operators(
    user_ns: dict,
    *,
    rank: int,
    group: Group,
    named: dict[str, Any],
    seed: int,
    sizes: list[int],
    names: list[str],
    common: int,
) -> dict:
    """Run operators forward and backward; between the two, call them with another group."""
    p = dist.get_world_size(group)
    place = dist.get_rank(group)
    replies = {}
    for name in names:
        _, conjugate, shape = OPERATORS[name]
        function = reading_answer(user_ns, name)
        x = across(drawn(seed, *shape(sizes[:p], place))).requires_grad_()
        y, forward = recorded(function, x, sizes[:p], **named)
        more = kept(
            name, y, lambda f=function, x=x: recorded(f, x.detach() + 1, sizes[:p], **named)[1]
        )
        _, others = recorded(function, drawn(seed + 2, *shape(sizes, rank)), sizes, None)
        upstream = upstream_of(seed, OPERATORS[conjugate][2](sizes[:p], place), place, p)
        by_itself = reading_answer(user_ns, FUNCTIONS[name])
        alone, last = recorded(by_itself, x.detach(), sizes[:p], group)
        reply = {"y": shown(y), "alone": shown(alone), "dx": shown(None)}
        reply["others"] = more + others + last
        reply |= {"forward": forward, "backward": []}
        if isinstance(y, Tensor) and y.shape == upstream.shape and y.requires_grad:
            before = upstream.clone()
            _, backward = recorded(y.backward, upstream)
            changed = not torch.equal(before, upstream)
            reply |= {"dx": shown(x.grad), "backward": backward, "changed": changed}
        replies[name] = reply
    return replies


# -- rings -----------------------------------------------------------------------------------------

#: A block of one token is already too long for an eager message, so a send waits for its receiver.
RING_HEADS = 2
RING_SIZE = 160


def scores_of(q: Tensor, k: Tensor, common: int, place: int, s: int) -> Tensor:
    """Return negative scores, different in each block; some queries see nothing of a block."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(RING_SIZE)
    scores = scores + drawn(common + 97 * s + place, 1, q.shape[1], k.shape[1]) - 9
    if (place + s) % 3 == 1:
        scores[:, 0] = -torch.inf
    return scores


def _attend(q: Tensor, k: Tensor, v: Tensor, *which: int) -> Part:
    return part_of((scores_of(q, k, *which), v))


def attend_back(q: Tensor, k: Tensor, v: Tensor, *which: int) -> Part:
    """Return made-up gradients of q, k and v, which are different for each pair of ranks."""
    weights = scores_of(q, k, *which).clamp(min=-10)
    dk = weights.transpose(-2, -1) @ q
    return weights @ v, dk, dk * (which[1] + 2) + v


class Watch:
    """A function for blocks that notes what the ring gives it, and what was sent by then."""

    def __init__(self, function: Callable[..., Part], common: int, place: int) -> None:
        self.function = function
        self.which = (common, place)
        self.mark = log.mark()
        self.notes: list[dict[str, Any]] = []
        self._storages: list[weakref.ref] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, s: int) -> Part:
        """Return what the function makes of a block, and note the call."""
        sends = [call for call in log.since(self.mark) if call.op == "send" and not call.waited]
        storage = k.untyped_storage()
        earlier = [ref() for ref in self._storages[1:]]  # the first block is the rank's own
        self._storages.append(weakref.ref(storage))
        self.notes.append({
            "s": s,
            "key": float(k.flatten()[0]),
            "pending": sum(call.nbytes for call in sends),
            "kept": sum(one is not None and one is not storage for one in earlier),
        })
        return self.function(q, k, v, *self.which, int(s))


@in_group
def probe_ring(
    user_ns: dict,
    *,
    rank: int,
    group: Group,
    named: dict[str, Any],
    seed: int,
    common: int,
    sizes: list[int],
    back: bool,
) -> dict[str, Any]:
    """Run a ring forward or backward, and `pass_on` alone."""
    p = dist.get_world_size(group)
    place = dist.get_rank(group)
    q, k, v = drawn(seed, 3, RING_HEADS, sizes[place], RING_SIZE)
    name = "ring_backward" if back else "ring_forward"
    watch = Watch(attend_back if back else _attend, common, place)
    function = reading_answer(user_ns, name)
    result, calls = recorded(function, q, k, v, sizes[:p], watch, **named)
    reply = {"result": several(name, result, 3), "calls": calls, "notes": watch.notes}
    if back:
        return reply
    mark = log.mark()
    block = torch.stack([k, v])
    answer = reading_answer(user_ns, "pass_on")(block, sizes[(place - 1) % p], **named)
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise TypeError("pass_on must return two values, the arriving tensor and a list of works")
    early = any(call.waited for call in log.since(mark))
    for work in answer[1]:
        work.wait()
    again = [as_dict(call) for call in log.since(mark)]
    reply |= {"arriving": shown(answer[0]), "same": p > 1 and answer[0] is block}
    return reply | {"early": early, "calls again": again}


def drawn_block(seed: int, level: float) -> list[Tensor]:
    """Return the arguments of `block_gradients`; a query doesn't see all keys.

    Scores and their log-sum-exp are near the level, and float64 has no number as large as e^1000.
    """
    shapes = (
        (3, RING_SIZE),
        (5, RING_SIZE),
        (5, RING_SIZE),
        (3, 5),
        (3, 1),
        (3, RING_SIZE),
        (3, 1),
    )
    tensors = [drawn(seed + i, RING_HEADS, *shape) for i, shape in enumerate(shapes)]
    tensors[3][:, 0, 2:] = -torch.inf
    tensors[3] += level
    tensors[4] += level
    return tensors


def probe_block(user_ns: dict, *, rank: int, seed: int, level: float) -> dict[str, Any]:
    """Return the gradients of one block."""
    block = drawn_block(seed, level)
    result, calls = recorded(reading_answer(user_ns, "block_gradients"), *block)
    return {"result": several("block_gradients", result, 3), "calls": calls}
