"""Checks of lab 16: bytes of an attention, zigzag, and which way sends less; imports the others."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import Any

import torch

from utils.checks.comparison import only, table
from utils.checks.draws import drawn
from utils.checks.model import use_model as use_model
from utils.checks.task import Report, Step, communication, facts, task
from utils.checks.trials import Case, judge_calls
from utils.cluster.questions import Ranks, Reply

from .exchanges import head_exchange as head_exchange
from .exchanges import token_operators as token_operators
from .probes import probe_kind, probe_spread
from .replies import alike
from .rings import ring_backward as ring_backward
from .rings import ring_forward as ring_forward
from .softmax_parts import online_softmax as online_softmax


@task("16.1", "what attention keeps", points=2)
def attention_memory(ranks: Ranks, report: Report) -> None:
    """Judge the bytes of one attention, and of the fullest rank in two ways."""
    k = 3 * (report.seed % 7)
    cases = [_bytes(100, 80, 3, 16), _bytes(30 + k, 7, 3, 5), _bytes(1, 4096 + k, 32, 128)]
    cases.append(_bytes(5, 0, 3, 4))
    rest = [(1022, 4, 16, 4), (64, 1, 4, 1), (131072, 32, 128, 64), (129, 2, 8, 128), (5, 16, 8, 4)]
    rest += [(10 + k, heads, 8, 3) for heads in (2, 5)]  # a third of a token, so round() is wrong
    judge_calls(ranks, report, cases + [_rank_bytes(*sizes) for sizes in rest])


def _kept(queries: int, keys: int, heads: int, size: int) -> int:
    return 4 * heads * (2 * (queries + keys) * size + queries * keys)


def _bytes(queries: int, keys: int, heads: int, size: int) -> Case:
    right = _kept(queries, keys, heads, size)
    square = 4 * heads * queries * keys
    rows = right - square
    more = keys - queries
    wrong = {
        "You counted numbers. A float32 has 4 bytes": right // 4,
        "You counted 2 bytes per number. A float32 has 4 bytes": right // 2,
        "You counted 8 bytes per number. A float32 has 4 bytes": right * 2,
        "You counted one head. Each head has its own tensors": right // heads,
        "You left out the probabilities": rows,
        "You counted the probabilities only. Add q, k, v and the output": square,
        "You counted the probabilities of one head only": rows + square // heads,
        "You left out the output, which is as large as q": right - 4 * heads * queries * size,
        "Your output is as large as v. It is as large as q": right + 4 * heads * size * more,
        "You left out k or v": right - 4 * heads * keys * size,
        "You counted the scores, too. They are gone after forward": right + square,
    }
    return Case(
        "attention_bytes",
        [queries, keys, heads, size],
        right,
        table(wrong),
        "bytes",
        "queries keys heads size",
    )


def _rank_bytes(tokens: int, heads: int, size: int, p: int) -> Case:
    def pair(own: int, keys: int) -> list[int]:
        return [_kept(own, keys, heads, size), _kept(own, own, heads, size)]

    all_keys, one_block = right = pair(-(-tokens // p), tokens)
    share = _kept(tokens, tokens, heads, size) // p
    wrong = {
        "You rounded down. The rank with the most tokens has one more": pair(tokens // p, tokens),
        "You added a token although p divides the tokens": pair(tokens // p + 1, tokens),
        "You divided all bytes by p, but each rank has all of k and v": [share, one_block],
        "You swapped the two numbers. First come all keys": [one_block, all_keys],
    }
    return Case(
        "rank_bytes",
        [tokens, heads, size, p],
        right,
        table(wrong),
        "two numbers",
        "tokens heads size p",
    )


@task("16.6", "a zigzag order", points=2)
def zigzag_order(ranks: Ranks, report: Report) -> None:
    """Judge layouts, and what is visible between the ranks of several layouts."""
    k = report.seed % 5
    cases = [
        _zigzag(*sizes) for sizes in ((16, 4), (23 + k, 4), (13, 4), (7, 1), (8, 4), (13 + k, 3))
    ]
    layouts = _pieces(20 + k, 3), [[0, 1, 2, 3], [4, 5], [6]], [[0, 3, 7], [1, 2, 9], [4, 8]]
    pairs = [(mine, theirs) for layout in layouts for mine in layout for theirs in layout]
    if judge_calls(ranks, report, cases + [_visible(*pair) for pair in pairs]):
        text = "zigzag(8, 2): You returned tensors. Return lists of positions, by .tolist()"
        for answer in report.answers(ranks, probe_kind):
            report.follow(answer.rank, [facts({text: "Tensor" in answer.value})])


def _cut(tokens: int, n: int) -> list[list[int]]:
    return [piece.tolist() for piece in torch.arange(tokens).tensor_split(n)]


def _pieces(tokens: int, p: int) -> list[list[int]]:
    pieces = _cut(tokens, 2 * p)
    return [pieces[r] + pieces[2 * p - 1 - r] for r in range(p)]


def _zigzag(tokens: int, p: int) -> Case:
    pieces = _cut(tokens, 2 * p)
    right = _pieces(tokens, p)
    striped = [list(range(r, tokens, p)) for r in range(p)]
    late = [pieces[2 * p - 1 - r] + pieces[r] for r in range(p)]
    same_end = [pieces[r] + pieces[p + r] for r in range(p)]
    wrong = {
        "You kept the tokens in order. Give each rank an early and a late piece": _cut(tokens, p),
        "You gave every p-th token to a rank. Cut 2 p pieces": striped,
        "You combined the pieces r and p + r. Combine r and 2 p − 1 − r": same_end,
        "You put the late piece first. Return sorted positions": late,
    }
    return Case("zigzag", [tokens, p], right, table(wrong), "a list of positions for each rank")


def _visible(mine: list[int], theirs: list[int]) -> Case:
    left = bisect.bisect_left
    right = bisect.bisect_right
    first = left(mine, theirs[0])
    last = right(theirs, mine[-1])
    n = len(theirs)
    wrong = {
        "You swapped the two numbers": [last, first],
        "You skip nothing. Count what the mask hides": [0, n],
        "A query sees its own key, so use <= for the keys": [first, left(theirs, mine[-1])],
        "A query sees its own key, so use < for the queries": [right(mine, theirs[0]), last],
        "You counted hidden keys. Count the keys to keep": [first, n - last],
        "You counted visible queries. Count the queries to skip": [len(mine) - first, last],
        "You looked at the first query. The last sees the most": [first, right(theirs, mine[0])],
        "You looked at the last key. The first is seen the most": [left(mine, theirs[-1]), last],
    }
    return Case("visible", [mine, theirs], [first, last], table(wrong), "(first, last)")


@task("16.8", "which way wins", points=2)
def which_way(ranks: Ranks, report: Report) -> None:
    """Judge repeated KV heads, and the bytes that a rank sends in both ways."""
    sizes = ((2, 4), (4, 4), (1, 3), (8, 2), (3, 6), (1, 1), (3, 12))
    spreads = [{"seed": report.seed, "kv_heads": kv_heads, "p": p} for kv_heads, p in sizes]
    if not report.judge_cases(ranks, probe_spread, spreads, _spread):
        return
    k = 12 * (1 + report.seed % 9)
    shapes = [(2 * k, 32, 2, 16, 8), (8 * k, 6, 6, 5, 2), (5 * k, 12, 1, 4, 3), (k, 8, 4, 2, 1)]
    shapes += [(4 * k, 8, 2, 3, 8)]  # the KV heads and ranks of the first shape
    pairs = [(way, *shape) for shape in shapes for way in ("ring", "ulysses")]
    judge_calls(ranks, report, [_traffic(*pair) for pair in pairs])


def _spread(case: dict[str, Any], answer: Reply) -> Iterator[Step]:
    kv_heads = case["kv_heads"]
    p = case["p"]
    k = drawn(case["seed"], kv_heads, 3, 2).requires_grad_()
    times = max(1, p // kv_heads)
    right = k.repeat_interleave(times, 0)
    right.square().sum().backward()
    where = f"spread, {kv_heads} KV heads for {p} ranks"
    yield communication(answer.value["calls"], only())
    text = "You repeated the whole list: a, b, a, b. Put copies side by side"
    yield from alike(answer.value["y"], right, {text: k.repeat(times, 1, 1)}, where)
    yield from alike(answer.value["dx"], k.grad, {}, f"{where}: gradient of the heads")


def _traffic(name: str, tokens: int, heads: int, kv_heads: int, size: int, p: int) -> Case:
    each = 4 * tokens // p * size
    block = 2 * kv_heads * each
    most = max(kv_heads, p)
    right = (p - 1) * block
    wrong = {
        "You sent heads queries' worth. Keys and values have kv_heads": (p - 1) * 2 * heads * each,
        "You counted p rounds. The blocks move p − 1 times": p * block,
        "You have half of the bytes. Values travel, too, and a float32 has 4 bytes": right // 2,
        "You repeated the KV heads, but only Ulysses needs that": (p - 1) * 2 * most * each,
        "You counted one round only. A rank sends in p − 1 rounds": block,
    }
    if name == "ulysses":
        rows = 2 * (heads + most) * each
        few = 2 * (heads + kv_heads) * each * (p - 1) // p
        right = rows * (p - 1) // p
        wrong = {
            "You counted a rank's part for itself. It isn't sent": rows,
            "You forgot to repeat the KV heads. Each rank needs one": few,
            "You forgot the way back of the output": (heads + 2 * most) * each * (p - 1) // p,
            "You counted keys or values only": (2 * heads + most) * each * (p - 1) // p,
            "You counted heads for keys and values, too": 4 * heads * each * (p - 1) // p,
        }
    wrong |= {
        "You counted the whole sequence. A rank has its tokens only": right * p,
        "You counted numbers. A float32 has 4 bytes": right // 4,
    }
    return Case(
        f"{name}_traffic",
        [tokens, heads, kv_heads, size, p],
        right,
        table(wrong),
        "bytes",
        "tokens heads kv_heads size p",
    )
