"""The check of task 6.11: how many bytes leave a node in an all-reduce on a tree of links."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from utils.checks.comparison import NO_NUMBER, Mistake, is_number
from utils.checks.task import Report, Step, task, value
from utils.cluster.questions import Ranks

from .costs import judge_each
from .probes import probe_bytes, uplink_call

UPLINKED = ("ring", "scattered ring", "direct", "hierarchical")
# `told` writes an object that JSON doesn't know as <its type>.
TEXT = Mistake(
    lambda v: isinstance(v, str) and not v.startswith("<"),
    "You returned text. Return only the number, without a unit",
)


def messages(algorithm: str, p: int, k: int) -> Iterator[tuple[int, int]]:
    """Yield sender and receiver of each message with an n/p-th of the tensor, for p ranks.

    A hierarchical all-reduce has more messages in its nodes of k ranks, which leave no node.
    """
    ranks = range(p)
    if algorithm == "direct":
        for _ in range(2):
            yield from ((r, other) for r in ranks for other in ranks if other != r)
        return
    # The hierarchical all-reduce has k rings, which join the ranks of equal place in their nodes.
    step, rounds = (k, 2 * (p // k - 1)) if algorithm == "hierarchical" else (1, 2 * (p - 1))
    for _ in range(rounds):
        yield from ((r, (r + step) % p) for r in ranks)


def counted(algorithm: str, p: int, k: int, n: int) -> int:
    """Return the bytes that leave node 0, from the messages themselves."""
    m = p // k

    def node(rank: int) -> int:
        return rank % m if algorithm == "scattered ring" else rank // k

    ends = ((node(source), node(target)) for source, target in messages(algorithm, p, k))
    return sum(source == 0 != target for source, target in ends) * n // p


@task("6.11", "bonus: bytes on the uplink", points=2)
def uplink_bytes(ranks: Ranks, report: Report) -> None:
    """Compare the bytes that leave a node with counted messages."""
    draw = random.Random(report.seed)
    more, half = (draw.randint(2, 5), draw.randint(6, 9)), draw.randint(3, 7)
    # Many mistakes lead to the same number if there are two nodes, or one, or one rank in each.
    shapes = [(15, 3), (24, 4), (48, 8), (more[0] * more[1], more[0]), (2 * half, half)]
    shapes += [(7, 1), (5, 5)]
    # So many bytes that a number of gigabytes is not rounded to 0.
    cases = [[name, p, k, p * draw.randint(20, 99) * 10**6] for name in UPLINKED for p, k in shapes]
    cases += [[name, 24, k, 24 * 10**8] for name in UPLINKED for k in (4, 8)]
    calls = [[p, k, n, name] for name, p, k, n in cases]
    for answer in report.answers(ranks, probe_bytes, calls=calls):
        judge_each(report, answer.rank, cases, answer.value, _uplink)


def _uplink(algorithm: str, p: int, k: int, n: int, nbytes: Any) -> Iterator[Step]:
    expected = counted(algorithm, p, k, n)
    alone = "There is one node, so no message leaves it. Return 0 if p equals k"
    wrong = _wrong_bytes(algorithm, p, k, n) if expected else {alone: lambda _: True}
    mistakes = [TEXT, NO_NUMBER, *(Mistake(gives, said) for said, gives in wrong.items())]
    yield value(
        nbytes,
        expected,
        mistakes,
        what=uplink_call(p, k, n, algorithm),
        form="the bytes that leave one node",
    )


def _wrong_bytes(algorithm: str, p: int, k: int, n: int) -> dict[str, Any]:
    """Return the wrong bytes of an algorithm, by the message for each mistake."""
    true, m = counted(algorithm, p, k, n), p // k
    chunk = "Each message carries a chunk of n/p bytes, not the whole tensor"
    rounds = "Each of the two phases has p − 1 rounds, not p"
    phase = "You counted one of the two phases. Count both"
    rings = 2 * (p - 1) * n
    both = "There are two nodes. Count once what one of them sends, and not what it receives"
    twice = {
        "You counted all nodes. Count one node": m * true,
        "You counted what comes in, too. Count what leaves": 2 * true,
    }
    of_algorithm = {
        "ring": {
            "Only one rank of a node sends to another node. Don't multiply by k": k * true,
            "The ring joins all p ranks, so a chunk is an n/p-th": 2 * (m - 1) * n / m,
            chunk: rings,
            rounds: 2 * n,
        },
        "scattered ring": {
            "In this order, each rank's neighbor is in another node. Multiply by k": rings / p,
            "All k ranks of a node send to another node, not k − 1": (k - 1) * rings / p,
            chunk: k * rings,
            rounds: 2 * k * n,
        },
        "direct": {
            "Messages to the k − 1 ranks of the same node don't leave it": k * rings / p,
            "You counted one rank. All k ranks of a node send to other nodes": true / k,
            chunk: p * true,
        },
        "hierarchical": {
            "A ring between nodes joins p/k ranks, one of each node, not p": rings / p,
            "You counted one of the k rings between the nodes. Count all of them": true / k,
            "Each ring between the nodes has only an n/k-th of the tensor": k * true,
            "Messages inside a node don't leave it": true + 2 * (k - 1) * n,
            "A ring of m ranks has m − 1 rounds in each phase, not m": 2 * n,
        },
    }
    return (
        of_algorithm[algorithm]
        | ({both: 2 * true} if m == 2 else twice)
        | {
            phase: true / 2,
            "You counted messages. Count their bytes": true * p / n,
            "You multiplied by 4, but n is in bytes already": 4 * true,
            "Return bytes, not bits": 8 * true,
            "Return bytes, not gigabytes": lambda v: _is_in_units(v, true, 1e9, 2**30),
            "Return bytes, not megabytes": lambda v: _is_in_units(v, true, 1e6, 2**20),
        }
    )


def _is_in_units(result: Any, nbytes: float, *units: float) -> bool:
    """Return whether a result is the bytes in one of these units, with two or more decimals."""
    return is_number(result) and any(abs(result - nbytes / unit) < 0.0051 for unit in units)
