"""The probes of lab 06, which run on the ranks beside the student's answers.

An answer runs twice. In the first run, the digits of each element count how often it holds the part
of each rank (:func:`counting`). In the second run, the numbers are random and have double precision
(:func:`noise`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist

from utils.checks.groups import Group, Partition, group_of, in_group, keywords
from utils.checks.probe import answer_named, reading_answer, recorded, told

# -- tensors, and what a rank replies about them ---------------------------------------------------


# These lengths are divisible, not divisible, shorter than the group, and long.
SHORT = (8, 5, 1, 203)
# Bytes of an element in each of the two runs.
ELEMENTS = {"calls": 4, "calls again": 8}

# The base of the counting numbers. It is odd, so that half of such a number isn't another one, and
# float32 holds its sixth power exactly.
BASE = 13
# A rank reports at most so many stretches of equal elements.
STRETCHES = 6


def counting(place: int, length: int) -> torch.Tensor:
    """Return the tensor of a place: in a sum of such tensors, digit q counts place q."""
    return torch.full((length,), float(BASE**place))


def noise(seed: int, length: int) -> torch.Tensor:
    """Return random numbers in double precision from a rank's own seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, dtype=torch.float64, generator=generator)


def stretches(x: torch.Tensor) -> list[list]:
    """Return start, stop and value of each stretch of equal elements."""
    values, lengths = torch.unique_consecutive(x, return_counts=True)
    ends = lengths.cumsum(0)
    columns = (ends - lengths).tolist(), ends.tolist(), values.tolist()
    return [list(stretch) for stretch in zip(*columns, strict=True)][:STRETCHES]


def parts(place: int, seed: int) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    """Return a function that makes a rank's two tensors of a given length."""
    return lambda length: (counting(place, length), noise(seed, length))


def contents(x: torch.Tensor, y: torch.Tensor, *_: Any) -> dict[str, Any]:
    """Return what a rank replies about its two sums."""
    # We read copies, because an answer may have replaced methods of the tensors themselves.
    x, y = (torch.Tensor.clone(tensor) for tensor in (x, y))
    bits = hashlib.sha256(y.numpy().tobytes()).hexdigest()
    return {"sum": stretches(x), "noise": y, "bits": bits}


def replies(
    function: Callable[..., Any],
    partition: Partition,
    group: Group,
    lengths: Iterable[int],
    tensors: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
    *more: Any,
    reply: Callable[..., dict[str, Any]] = contents,
) -> list[dict[str, Any]]:
    """Call a function with two tensors of each length; return what the rank replies about them.

    The function gets a second tensor on the same memory, so only what it writes in place counts.

    Args:
        group: the group whose ranks begin each run together.
        tensors: returns the two tensors of a given length.
        reply: makes the reply from the two tensors and the two results.
    """
    answers = []
    for length in lengths:
        both = tensors(length)
        runs = []
        for tensor in both:
            dist.barrier(group=group)
            runs.append(recorded(function, tensor[:], *more, **keywords(partition, group)))
        results, records = zip(*runs, strict=True)
        answers.append(reply(*both, *results) | dict(zip(ELEMENTS, records, strict=True)))
    return answers


# -- all-reduces -----------------------------------------------------------------------------------


@in_group
def probe_all_reduce(
    user_ns: dict,
    *,
    rank: int,
    group: Group,
    partition: Partition,
    seed: int,
    name: str,
    lengths: list[int],
) -> list[dict]:
    """Call the function of this name on tensors of several lengths."""
    tensors = parts(dist.get_rank(group), seed)
    return replies(answer_named(user_ns, name), partition, group, lengths, tensors)


@in_group
def probe_whole(
    user_ns: dict, *, rank: int, group: Group, partition: Partition, seed: int, name: str
) -> dict:
    """Call the function of this name on large whole numbers, and on small ones in bfloat16."""
    function = answer_named(user_ns, name)
    both = large_numbers(seed), small_numbers(seed)
    calls = []
    for x in both:
        _, made = recorded(function, x[:], **keywords(partition, group))
        calls += made
    large, small = (x.tolist() for x in both)
    return {"sum": large, "small": small, "calls": calls}


def large_numbers(seed: int) -> torch.Tensor:
    """Return whole numbers from a rank's seed, so large that floats lose their last digits."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2**57, 2**58, SHORT[:1], generator=generator)


def small_numbers(seed: int) -> torch.Tensor:
    """Return whole numbers from a rank's seed, so small that bfloat16 holds their sums."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 10, SHORT[:1], generator=generator).bfloat16()


def peers_across(machines: list[list[int]]) -> list[list[int]]:
    """Return groups of the ranks that have the same place on their machines."""
    return [list(members) for members in zip(*machines, strict=True)]


@in_group
def probe_hierarchical(
    user_ns: dict, *, rank: int, seed: int, lengths: list[int], machines: list, **_: Any
) -> list[dict]:
    """Return the results for several lengths, with a group for each of these machines."""
    function = answer_named(user_ns, "hierarchical")
    with group_of(machines, rank) as node, group_of(peers_across(machines), rank) as peers:
        return replies(function, None, None, lengths, parts(rank, seed), node, peers)


# -- rings -----------------------------------------------------------------------------------------


def chunk_lengths(length: int, size: int) -> list[int]:
    """Return the lengths of the chunks ``x.tensor_split(size)``."""
    return [len(part) for part in torch.empty(length).tensor_split(size)]


def chunk(k: int, length: int, size: int) -> slice:
    """Return the slice of x that is ``x.tensor_split(size)[k]``."""
    lengths = chunk_lengths(length, size)
    return slice(sum(lengths[:k]), sum(lengths[: k + 1]))


@in_group
def probe_reduce_scatter(
    user_ns: dict, *, rank: int, group: Group, partition: Partition, seed: int, lengths: list[int]
) -> list[dict]:
    """Return what the answer returned, and what each chunk contains afterward."""
    size = dist.get_world_size(group)

    def reply(x: torch.Tensor, y: torch.Tensor, mine: Any, again: Any) -> dict[str, Any]:
        return {
            "mine": told(mine),
            "kind": type(mine).__name__,
            "chunks": [stretches(x[chunk(k, len(x), size)]) for k in range(size)],
            "again": again if isinstance(again, int) and 0 <= again < size else None,
            "noise": y,
        }

    function = answer_named(user_ns, "ring_reduce_scatter")
    tensors = parts(dist.get_rank(group), seed)
    return replies(function, partition, group, lengths, tensors, reply=reply)


def own_chunk(k: int, length: int, size: int, seed: int) -> torch.Tensor:
    """Return what chunk k must contain after the all-gather, from the seed of its first rank."""
    part = chunk(k, length, size)  # all numbers are exact in float32
    return 1.0 + torch.arange(part.start, part.stop) + 20_000 * (k + 1 + 8 * (seed % 100))


OLD = -1.0


@in_group
def probe_all_gather(
    user_ns: dict,
    *,
    rank: int,
    group: Group,
    partition: Partition,
    seed: int,
    lengths: list[int],
    ahead: int,
) -> list[dict]:
    """Return all chunks after the all-gather, before which this rank has only one."""
    size = dist.get_world_size(group)
    mine = (dist.get_rank(group) + ahead) % size

    def tensors(length: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.full((length,), OLD)
        x[chunk(mine, length, size)] = own_chunk(mine, length, size, seed)
        return x, x.double() / 3  # float32 does not hold it

    def reply(x: torch.Tensor, double: torch.Tensor, *_: Any) -> dict[str, Any]:
        return {"mine": mine, "x": x, "alike": torch.equal(double, x.double() / 3)}

    function = answer_named(user_ns, "ring_all_gather")
    return replies(function, partition, group, lengths, tensors, mine, reply=reply)


# -- dedicated reducers ----------------------------------------------------------------------------


# The content of a reducer's x, which must not be added.
REDUCERS_OWN = 0.5


@in_group
def probe_server(
    user_ns: dict,
    *,
    rank: int,
    group: Group,
    partition: Partition,
    seed: int,
    lengths: list[int],
    pieces: int,
    workers: dict[str, int],
    patient: bool,
) -> list[dict]:
    """Return what each rank has and sent; if `patient`, the check's own workers work."""
    function = answer_named(user_ns, "reduction_server")
    place = dist.get_rank(group)
    many = workers[str(dist.get_world_size(group))]
    tensors = parts(place, seed) if place < many else _reducers_own
    if patient and place < many:
        function = patient_worker
    return replies(function, partition, group, lengths, tensors, many, pieces)


def _reducers_own(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((length,), REDUCERS_OWN), torch.full((length,), math.nan).double()


def patient_worker(x: torch.Tensor, workers: int, pieces: int, group: Group = None) -> None:
    """Work as in 6.8, but send the next pieces only when the last results are back."""
    # A reducer that keeps all results until the last piece has arrived never gets this piece.
    place = dist.get_rank(group)
    reducers = dist.get_world_size(group) - workers
    parts_of_x = x.tensor_split(reducers * pieces)
    for piece in range(pieces):
        requests = []
        for j in range(reducers):
            turn = (j + place) % reducers
            part = parts_of_x[piece * reducers + turn]
            at = {"group": group, "group_peer": workers + turn}
            requests.append(dist.P2POp(dist.isend, part.clone(), **at))
            requests.append(dist.P2POp(dist.irecv, part, **at))
        for request in dist.batch_isend_irecv(requests):
            request.wait()


# -- formulas --------------------------------------------------------------------------------------


def probe_durations(user_ns: dict, *, rank: int, cases: list, networks: list) -> dict:
    """Return what `duration` and `crossover` return."""
    duration, crossover = (answer_named(user_ns, name) for name in ("duration", "crossover"))
    return {
        "duration": [told(duration(*case)) for case in cases],
        "crossover": [_finite(crossover(*network)) for network in networks],
    }


def _finite(value: object) -> object:
    """Return a number for JSON, which has no infinity."""
    return "inf" if isinstance(value, float) and math.isinf(value) and value > 0 else told(value)


def probe_bytes(user_ns: dict[str, Any], *, rank: int, calls: list[Any]) -> list[Any]:
    """Return the results of `uplink_bytes`, of which exact numbers become floats.

    Raises:
        ArithmeticError: the answer's own error, with the call that it comes from.
    """
    function, results = reading_answer(user_ns, "uplink_bytes"), []
    for arguments in calls:
        try:
            result = function(*arguments)
        except ArithmeticError as error:
            error.args = (f"{error}, in {uplink_call(*arguments)}",)
            raise
        results.append(float(result) if isinstance(result, Fraction | Decimal) else told(result))
    return results


def uplink_call(p: int, k: int, n: int, algorithm: str) -> str:
    """Return a call of the student's function, for a message."""
    return f"uplink_bytes({p}, {k}, {n}, {algorithm!r})"
