"""The check of task 6.11: how many bytes leave a node in an all-reduce on a tree of links."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from utils.checks.comparison import NO_NUMBER, Mistake
from utils.checks.task import Report, Step, task, value
from utils.checks.trials import probe_calls
from utils.cluster.questions import Ranks

from .costs import judge_each

UPLINKED = ("ring", "scattered ring", "direct", "hierarchical")


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
    more = draw.randint(2, 5), draw.randint(6, 9)
    # Many mistakes lead to the same number if nodes are alone or have one rank.
    shapes = [(15, 3), (24, 4), (48, 8), (more[0] * more[1], more[0]), (7, 1), (5, 5)]
    cases = [[name, p, k, p * draw.randint(100, 9999)] for name in UPLINKED for p, k in shapes]
    calls = [["uplink_bytes", [p, k, n, name]] for name, p, k, n in cases]
    for answer in report.answers(ranks, probe_calls, calls=calls):
        judge_each(report, answer.rank, cases, answer.value, _uplink)


def _uplink(algorithm: str, p: int, k: int, n: int, nbytes: Any) -> Iterator[Step]:
    call = f"uplink_bytes({p}, {k}, {n}, {algorithm!r})"
    expected = counted(algorithm, p, k, n)
    alone = "There is one node, so no message leaves it. Return 0 if p equals k"
    wrong = _wrong_bytes(algorithm, p, k, n) if expected else {alone: lambda _: True}
    mistakes = [NO_NUMBER, *(Mistake(gives, said) for said, gives in wrong.items())]
    yield value(nbytes, expected, mistakes, what=call, form="the bytes that leave one node")


def _wrong_bytes(algorithm: str, p: int, k: int, n: int) -> dict[str, Any]:
    """Return the wrong bytes of an algorithm, by the message for each mistake."""
    true, m = counted(algorithm, p, k, n), p // k
    chunk = "Each message carries a chunk of n/p bytes, not the whole tensor"
    rounds = "Each of the two phases has p − 1 rounds, not p"
    phase = "You counted one of the two phases. Count both"
    rings = 2 * (p - 1) * n
    of_algorithm = {
        "ring": {
            "Only one rank of a node sends to another node. Don't multiply by k": k * true,
            "The ring joins all p ranks, so a chunk is an n/p-th": 2 * (m - 1) * n / m,
            chunk: rings,
            rounds: 2 * n,
        },
        "scattered ring": {
            "In this order, each rank's neighbor is in another node. Multiply by k": rings / p,
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
    return of_algorithm[algorithm] | {
        phase: true / 2,
        "You counted all nodes. Count one node": m * true,
        "You counted what comes in, too. Count what leaves": 2 * true,
        "You counted messages. Count their bytes": true * p / n,
        "You multiplied by 4, but n is in bytes already": 4 * true,
        "Return bytes, not bits": 8 * true,
    }
