"""Checks of generation in lab 17: a cache of keys and values, decode on ranks, and a hand-over."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear

from utils import models
from utils.checks import trials
from utils.checks.comparison import EXACT, Calls, Mistake, inside, made, only, table, waited
from utils.checks.task import Report, Step, communication, facts, task, to_each, value
from utils.checks.trials import Case, GroupAnswer, on
from utils.cluster.questions import Ranks, Reply

from .parts import Cache, part_of
from .probes import (
    DEPTH,
    PIECES,
    WIDTH,
    composed,
    gpt,
    probe_cache,
    probe_hand_over,
    probe_parallel,
    prompts_of,
    saying_zero,
    text_of,
)

BYTES = 8  # of a float64 and of an int64


def greedy(model: models.GPT, prompt: Tensor, new: int) -> Tensor:
    """Return the most probable next tokens, computed without a cache."""
    text = prompt
    for _ in range(new):
        text = torch.cat([text, model(text)[:, -1].argmax(-1, keepdim=True)], 1)
    return text[:, prompt.shape[1] :]


#: What mistakes do in :func:`played`, with the message for each.
ALONE = {
    "positions": "You gave each call's tokens the positions 0, 1, …. The first one is at "
    "cache.length",
    "own": "Your tokens attend only to the tokens of the same call. Attend to all cached ones",
    "later": "Your tokens attend to later tokens of the same call. Pass causal=True",
    "room": "You attended to the whole room, which is empty behind the last token. Pass "
    "keys[:, :end] and values[:, :end]",
    "swapped": "You swapped keys and values. Pass q, keys, values to attend",
    "still": "You never raised cache.length, so each call overwrites the one before. Set it to end",
}
TOGETHER = {
    "part": "You left out the sum over the ranks. all_reduce the product with {} and use it",
    "bias": "You added the bias of {} on each rank, so the sum has it several times. Add it after "
    "the all_reduce",
    "mean": "You took the mean of {} over the ranks. Take the sum",
}
LAYERS = ("out and down", "out", "down")
MODES = ALONE | {f"{k} {of}": said.format(of) for k, said in TOGETHER.items() for of in LAYERS}


#: The last of the mistakes: an answer that gives other logits for equal arguments keeps something.
ONLY_THE_CACHE = Mistake(
    lambda got: got is not None,
    "The logits differ from those before. Read cache.keys, cache.values and cache.length, and keep "
    "nothing else from earlier calls",
)


def played(
    parts: Sequence[models.GPT], pieces: Sequence[Tensor], mode: str = "", place: int = 0
) -> tuple[list[list], Cache]:
    """Return the logits of each piece that a mistake of one rank gives, and the first cache."""
    caches = [Cache(part, len(pieces[0]), 2 + sum(x.shape[1] for x in pieces)) for part in parts]
    logits = []
    end = 0
    for piece in pieces:
        first = end * (mode != "still")
        end = first + piece.shape[1]
        x = parts[0].embedded(piece, first * (mode != "positions"))
        for k, blocks in enumerate(zip(*(part.blocks for part in parts), strict=True)):
            h = blocks[0].norm1(x)
            products = []
            for attention, cache in zip([b.attention for b in blocks], caches, strict=True):
                heads = _attended(attention, cache, k, h, slice(first, end), mode)
                products.append(linear(heads, attention.out.weight))
            x = x + _summed("out", products, blocks[0].attention.out.bias, mode, place)
            h = blocks[0].norm2(x)
            products = [linear(gelu(b.mlp.up(h)), b.mlp.down.weight) for b in blocks]
            x = x + _summed("down", products, blocks[0].mlp.down.bias, mode, place)
        logits.append(parts[0].logits(x).tolist())
    return logits, caches[0]


def _attended(
    attention: models.Attention, cache: Cache, k: int, h: Tensor, new: slice, mode: str
) -> Tensor:
    """Return the heads of one rank's part for new tokens, whose keys and values join the cache."""
    keys = cache.keys[k]
    values = cache.values[k]
    keys[:, new] = attention.k(h)
    values[:, new] = attention.v(h)
    seen = slice(new.start if mode == "own" else 0, None if mode == "room" else new.stop)
    pair = (keys, values)[:: -1 if mode == "swapped" else 1]
    own = attention.q(h), *(t[:, seen] for t in pair)
    return models.attend(*own, attention.head_size, mode != "later")


def _summed(layer: str, products: list[Tensor], bias: Tensor, mode: str, place: int) -> Tensor:
    """Return the sum of the ranks' products and the bias, as a rank with a mistake adds them."""
    kind = mode.split()[0] if layer in mode.split() else ""
    total = products[place] if kind == "part" else sum(products)
    p = len(products)
    return total / p ** (kind == "mean") + bias * p ** (kind == "bias")


def likely(modes: dict, k: int, parts: Sequence, pieces: Sequence, place: int = 0):
    """Yield mistakes in the logits of piece k, computed only if something is wrong."""
    for mode, said in modes.items():
        yield Mistake(played(parts, pieces, mode, place)[0][k], said)


# -- 17.1: the cache --------------------------------------------------------------------------


@task("17.1", "a cache of keys and values", points=3)
def cached_generation(ranks: Ranks, report: Report) -> None:
    """Compare logits, cached tensors and tokens with the model that computes the whole text."""
    shapes = ((2, [5, 1, 3, 1], 6), (1, [1, 1, 1], 1), (3, [4, 4], 2), (2, [17, 2], 6))
    cases = [
        {"seed": seed, "samples": samples, "pieces": pieces, "new": new}
        for seed, (samples, pieces, new) in zip(report.seeds(4), shapes, strict=True)
    ]
    report.judge_cases(ranks, probe_cache, cases, _cached)


def _cached(case: dict[str, Any], answer: Reply) -> Iterator[Step]:
    model = gpt(case["seed"])
    pieces = case["pieces"]
    text = text_of(case["seed"], case["samples"], sum(pieces))
    parts, right = (of.split(pieces, 1) for of in (text, model(text)))
    yield communication(answer.value["calls"], only())
    steps = zip(answer.value["steps"], right, strict=True)
    for k, ((logits, length, rows, calls), expected) in enumerate(steps):
        end = sum(pieces[: k + 1])
        where = f"call {k + 1} of forward_cached, with {pieces[k]} tokens"
        yield logits_are(logits, expected, likely(ALONE, k, [model], parts), where)
        yield facts({
            f"{where}: cache.length is {length}, expected {end}. Set it to end": length != end,
            f"{where}: You computed {rows:g} tokens of each text so far, expected {end}. Compute "
            "only the new tokens": rows > end,
            # Two layers note each pass, and the list of notes begins with a 0.
            f"{where}: You ran the blocks several times. Run all new tokens of all texts through "
            "them in one pass": calls > 1 + 2 * (k + 1),
        })
    where = f"the last {pieces[-1]} tokens once more, with a copy of the cache"
    yield logits_are(answer.value["again"], right[-1], iter([ONLY_THE_CACHE]), where)
    cache = played([model], [text])[1]
    both = [t[:, : sum(pieces)].tolist() for t in cache.keys + cache.values]
    yield value(answer.value["cached"], both, what="cache.keys and cache.values", tolerance=EXACT)
    yield facts({
        "You made new tensors for the cache, which copies all of it in each step. Write the new "
        "keys and values into cache.keys[k] and cache.values[k]": answer.value["moved"]
    })
    prompts = prompts_of(case["seed"], case["samples"], pieces)
    for prompt, generated in zip(prompts, answer.value["generated"], strict=True):
        yield from _generated(model, prompt, case["new"], *generated)
    other = saying_zero(case["seed"] + 1, prompts[0])
    where = "generate with another model and the first prompt (keep nothing from earlier calls)"
    yield tokens_are(answer.value["of another"], other, prompts[0], case["new"], where)
    yield facts({
        "You changed the model's weights. Leave them as they are": answer.value["changed"],
    })


def _generated(
    model: models.GPT, prompt: Tensor, new: int, tokens: Any, rows: float, first: list
) -> Iterator[Step]:
    """Judge new tokens, how many tokens were computed, and how many of them in the first call."""
    n = prompt.shape[1]
    where = f"generate(model, prompt of shape {list(prompt.shape)}, {new})"
    yield tokens_are(tokens, model, prompt, new, where)
    yield facts({
        f"{where}: You computed {rows:g} tokens of each text, expected {n + new - 1}. Prefill once "
        "and then compute one token in each step": rows > n + new - 1,
        f"{where}: Your first step computed {_in_words(first)}. Compute the whole prompt of all "
        f"texts in one step, {_in_words([prompt.shape])}": first != [[*prompt.shape]],
    })


def _in_words(first: Sequence[Sequence[int]]) -> str:
    """Return what a step computed: texts, and tokens of each."""
    return " and ".join(f"{texts} × {tokens} tokens" for texts, tokens in first) or "nothing"


def logits_are(result: Any, right: Tensor, mistakes: Iterator[Mistake], where: str) -> Step:
    """Return the step that a result has these logits, in double precision."""
    name = {"what": f"{where}: the logits", "form": "logits"}
    return value(result, right.tolist(), mistakes, **name, tolerance=EXACT)


def tokens_are(result: Any, model: models.GPT, prompt: Tensor, new: int, where: str) -> Step:
    """Return the step that a result has the new tokens of a prompt."""
    tokens = greedy(model, prompt, new)
    wrong = {
        "You returned the prompt, too. Return only the new tokens": torch.cat([prompt, tokens], 1),
        "You left out the first new token, which the prompt's last logits give": tokens[:, 1:],
        "You returned one token too few": tokens[:, :-1],
        "You returned too many tokens": lambda got: [of[:new] for of in got] == tokens.tolist(),
    }
    return value(result, tokens.tolist(), table(wrong), what=where, form="the new tokens")


# -- 17.3: heads and columns on several ranks -------------------------------------------------


@task("17.3", "decode on several ranks", points=4)
def parallel_decode(ranks: Ranks, report: Report) -> None:
    """Compare logits with the model that isn't split, count all_reduces, and judge latencies."""
    each = to_each(seed=report.seeds(trials.WORLD))
    cases = [{"partition": one, "common": report.seed, "each": each} for one in trials.EVERYWHERE]
    if trials.judge_groups(ranks, report, probe_parallel, cases, _parallel):
        draw = random.Random(report.seed)
        network = 10 ** draw.uniform(-5, -2.5), 10 ** draw.uniform(6, 10)
        sizes = [
            (draw.uniform(0.02, 0.3), draw.randint(3, 40), 512 * p, p)
            for p in (*range(1, 9), 12, 13, 64)
        ]
        trials.judge_calls(ranks, report, [_latency(*of, *network) for of in sizes])


def _parallel(answer: GroupAnswer) -> Iterator[Step]:
    p = len(answer.members)
    seeds = [answer.case["each"][rank]["seed"] for rank in answer.members]
    whole = composed(answer.case["common"], tuple(seeds))
    parts = [part_of(whole, place, p) for place in range(p)]
    text = text_of(answer.case["common"], 2, sum(PIECES))
    pieces = text.split(PIECES, 1)
    right = whole(text).split(PIECES, 1)
    times = [2 * DEPTH] if p > 1 else [0, 2 * DEPTH]
    steps = zip(answer.value["calls"][:-1], answer.value["logits"], right, strict=True)
    yield facts({
        "You changed the weights of your part of the model. Leave them as they are": answer.value[
            "changed"
        ],
        "You made new tensors for the cache. Write into cache.keys[k] and cache.values[k]": (
            answer.value["moved"]
        ),
    })
    for k, (calls, logits, expected) in enumerate(steps):
        where = f"{('prefill', 'decode', 'two more tokens')[k]} {on(answer.members)}"
        count = made("all_reduce", times, f" in {where} (two for each of {DEPTH} blocks)")
        yield communication(calls, only("all_reduce"), inside(answer.members), count, waited)
        yield of_size(calls, {pieces[k].numel() * WIDTH * BYTES})
        yield logits_are(logits, expected, likely(MODES, k, parts, pieces, answer.place), where)
        length = answer.value["lengths"][k]
        end = sum(piece.shape[1] for piece in pieces[: k + 1])
        yield facts({
            f"{where}: cache.length is {length}, expected {end}. Raise it by the number of new "
            "tokens": length != end
        })
    where = f"the last two tokens once more, with a copy of the cache {on(answer.members)}"
    again = made("all_reduce", times, f" for {where}")
    rules = only("all_reduce"), inside(answer.members), again, waited
    yield communication(answer.value["calls"][-1], *rules)
    yield logits_are(answer.value["again"], right[-1], iter([ONLY_THE_CACHE]), where)


def of_size(calls: Calls, allowed: set[int]) -> Step:
    """Return the step that each call has one of these sizes."""
    nbytes = next((call["nbytes"] for call in calls if call["nbytes"] not in allowed), None)
    said = f"You communicate {nbytes} bytes at once, expected {min(allowed)}. Send the "
    said += "activations of the new tokens, in the dtype of the model"
    return facts({said: nbytes is not None}, "communication")


def _latency(compute: float, depth: int, nbytes: int, p: int, latency: float, rate: float) -> Case:
    rounds = math.ceil(math.log2(p))
    message = latency + nbytes / rate
    right = compute / p + 2 * depth * rounds * message
    wrong = {
        "You counted one round for each all_reduce": compute / p + 2 * depth * message,
        "You counted one all_reduce per block. There are two": right - depth * rounds * message,
        "You counted p − 1 rounds": compute / p + 2 * depth * (p - 1) * message,
        "Round log2(p) up": compute / p + 2 * depth * math.log2(p) * message,
        "You counted one block. Multiply by depth": compute / p + 2 * rounds * message,
        "You left out the communication": compute / p,
        "You left out the latency": right - 2 * depth * rounds * latency,
        "You left out the bytes": right - 2 * depth * rounds * nbytes / rate,
        "You did not split the compute time. Divide it by p": right + compute - compute / p,
    }
    wrong = {said: of for said, of in wrong.items() if abs(of - right) > 1e-4 * right}
    arguments = [compute, depth, nbytes, p, latency, rate]
    return Case("decode_seconds", arguments, right, table(wrong), "seconds")


# -- 17.7: prefill on one rank, decode on another ---------------------------------------------


@task("17.7", "bonus task: hand the cache to another rank", points=3)
def hand_over(ranks: Ranks, report: Report) -> None:
    """Compare tokens with one rank's, and judge who sends what."""
    each = to_each(seed=report.seeds(trials.WORLD))
    cases = [
        {"partition": one, "common": report.seed, "each": each, "shape": [1 + k % 3, 7 - k]}
        | {"new": 5 - k}
        for k, one in enumerate(trials.EVERYWHERE)
    ]
    trials.judge_groups(ranks, report, probe_hand_over, cases, _handed_over)


def _handed_over(answer: GroupAnswer) -> Iterator[Step]:
    samples, n = answer.case["shape"]
    new = answer.case["new"]
    members = answer.members
    where = on(answer.members)
    calls = answer.value["calls"]
    is_end = len(members) > 1 and answer.rank in (members[0], members[-1])
    yield communication(calls, only("send", "recv"), inside(members), waited)
    token = 2 * DEPTH * samples * WIDTH * BYTES
    first = samples * BYTES
    nbytes = sum(call["nbytes"] for call in calls)
    expected = (n * token + first) * is_end
    packed = is_end and not any(call["dtype"] == "int64" for call in calls)
    reason = {
        (n + new - 1) * token + first: "You sent the whole room of the cache. ",
        n * token // 2 + first: "You sent only half of these bytes: keys or values, or float32. ",
    }.get(nbytes, "")
    yield facts({
        f"{where}: Your messages have {nbytes} bytes on this rank, expected {expected}. {reason}"
        "Send the filled part of the cache and the first new token": nbytes != expected,
        f"{where}: No message has the dtype int64. Send the first new token in a message by "
        "itself, as int64": packed,
    })
    rows = n * (answer.rank == members[0]) + (new - 1) * (answer.rank == members[-1])
    yield facts({
        f"{where}: Rank {answer.rank} computed {answer.value['rows']} tokens of each text, "
        f"expected {rows}. The first rank computes the prompt, and the last one the other tokens": (
            answer.value["rows"] > rows
        )
    })
    if answer.rank == members[-1]:
        prompt = text_of(answer.case["each"][members[0]]["seed"], samples, n)
        model = gpt(answer.case["common"])
        yield tokens_are(answer.value["tokens"], model, prompt, new, f"tokens {where}")
    else:
        said = f"{where}: You returned tokens on rank {answer.rank}. Return None there"
        yield facts({said: answer.value["tokens"] is not None})
