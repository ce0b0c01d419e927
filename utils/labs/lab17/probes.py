"""The probes of lab 17, which run on the ranks beside the student's answers."""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from utils import models
from utils.checks.clock import ends_within
from utils.checks.groups import Group, in_group
from utils.checks.probe import answer_named, in_double, number, reading_answer, recorded, told
from utils.labs.shared.small_models import weights_of

from .parts import Cache, Chain, part_of
from .requests import Server, arrivals, simulate

# -- generation ------------------------------------------------------------------------------------


DEPTH = 2
WIDTH = 20


@functools.lru_cache(maxsize=16)
def gpt(seed: int) -> models.GPT:
    """Return a small model in double precision, with weights so large that its tokens vary."""
    sizes = {"depth": DEPTH, "width": WIDTH, "heads": 5, "hidden": 22, "tokens": 24}
    model = in_double(models.gpt(seed, **sizes)).requires_grad_(False)
    for parameter in model.parameters():
        parameter.mul_(4)
    return model


def text_of(seed: int, samples: int, tokens: int) -> Tensor:
    """Return random bytes, int64 [samples, tokens]."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (samples, tokens), generator=draw)


def probe_cache(user_ns: dict, *, rank: int, seed: int, samples: int, pieces: list, new: int):
    """Run a text through the model piece by piece, and generate; count the tokens computed."""
    model = gpt(seed)
    before = weights_of(model)
    text = text_of(seed, samples, sum(pieces))
    cache = Cache(model, samples, sum(pieces) + 2)
    rows = [0.0]
    passes = []
    mlp = model.blocks[-1].mlp
    hooks = [
        layer.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[:2].numel() / 2))
        for layer in (mlp, model.blocks[-1].attention.k)
    ]
    hooks.append(mlp.register_forward_pre_hook(lambda _, args: passes.append([*args[0].shape[:2]])))
    forward = reading_answer(user_ns, "forward_cached", changes=(2,))
    room = [tensor.data_ptr() for tensor in cache.keys + cache.values]
    steps = [
        (*recorded(forward, model, piece, cache), cache.length, sum(rows) / samples, len(rows))
        for piece in text.split(pieces, 1)
    ]
    whole = cache.length == text.shape[1] >= sum(rows) / samples
    last = text[:, -pieces[-1] :]
    again = told(forward(model, last, copied(cache, -pieces[-1]))) if whole else None
    generate = reading_answer(user_ns, "generate")
    generated = []
    prompts = prompts_of(seed, samples, pieces)
    for prompt in prompts:
        rows[:] = [0.0]
        passes[:] = []
        tokens, calls = recorded(generate, model, prompt, new)
        generated.append([told_tokens(tokens), sum(rows) / samples, passes[:1]])
    for hook in hooks:
        hook.remove()
    of_another = told_tokens(generate(saying_zero(seed + 1, prompts[0]), prompts[0], new))
    return {
        "steps": [[told(logits), number(length), *counts] for logits, _, length, *counts in steps],
        "again": again,
        "of another": of_another,
        "cached": told([t[:, : sum(pieces)] for t in cache.keys + cache.values]),
        "moved": room != [tensor.data_ptr() for tensor in cache.keys + cache.values],
        "generated": generated,
        "calls": sum((of for _, of, *_ in steps), calls),
        "changed": not torch.equal(before, weights_of(model)),
    }


def copied(cache: Cache, more: int) -> Cache:
    """Return a cache with copies of the tensors, in which so many tokens more are filled."""
    other = object.__new__(Cache)  # without what an answer may have added to the cache
    other.keys, other.values = ([t.clone() for t in of] for of in (cache.keys, cache.values))
    other.length = cache.length + more
    return other


def saying_zero(seed: int, prompt: Tensor) -> models.GPT:
    """Return a model whose next token for the first text of the prompt is byte 0, as any other."""
    model = copy.deepcopy(gpt(seed))
    best = int(model(prompt)[0, -1].argmax())
    model.head.weight[[0, best]] = model.head.weight[[best, 0]]
    return model


def prompts_of(seed: int, samples: int, pieces: list[int]) -> tuple[Tensor, Tensor]:
    """Return two prompts of the same shape, which are continued one after the other."""
    text = text_of(seed, samples, sum(pieces))[:, : pieces[0]]
    return text, 255 - text


def told_tokens(result: Any) -> Any:
    """Return tokens for JSON, and a text for tokens that aren't int64."""
    wrong = isinstance(result, Tensor) and result.dtype != torch.int64
    return f"a tensor of {result.dtype}" if wrong else told(result)


@functools.lru_cache(maxsize=4)
def composed(common: int, seeds: tuple[int, ...]) -> models.GPT:
    """Return a model with one seed per part, so that a rank with one seed knows one part."""
    parts = [part_of(gpt(seed), place, len(seeds)) for place, seed in enumerate(seeds)]
    whole = part_of(gpt(common), 0, 1)  # a copy
    for name, parameter in whole.blocks.named_parameters():
        if "norm" not in name and not name.endswith(("out.bias", "down.bias")):
            dim = int(name.endswith(("out.weight", "down.weight")))
            parameter.copy_(torch.cat([part.blocks.get_parameter(name) for part in parts], dim))
    return whole


#: Tokens of a text that `parallel_step` gets at once.
PIECES = (5, 1, 2)


@in_group
def probe_parallel(
    user_ns: dict, *, rank: int, group: Group, named: dict, seed: int, common: int
) -> dict:
    """Prefill five tokens, decode one, and then two at once, with a part of the model."""
    place = dist.get_rank(group)
    p = dist.get_world_size(group)
    part = part_of(composed(common, (seed,) * p), place, p)
    before = weights_of(part)
    cache = Cache(part, 2, sum(PIECES) + 2)
    begun = [tensor.data_ptr() for tensor in cache.keys + cache.values]
    function = reading_answer(user_ns, "parallel_step", changes=(2,))
    pieces = text_of(common, 2, sum(PIECES)).split(PIECES, 1)
    steps = [
        (*recorded(function, part, piece, cache, **named), number(cache.length)) for piece in pieces
    ]
    logits, calls, lengths = zip(*steps, strict=True)
    last = text_of(common, 2, sum(PIECES))[:, -PIECES[-1] :]
    room = [tensor.data_ptr() for tensor in cache.keys + cache.values]
    again = None
    more = []
    if all(length == sum(PIECES[: k + 1]) for k, length in enumerate(lengths)):
        again, more = recorded(function, part, last, copied(cache, -PIECES[-1]), **named)
    return {
        "logits": told(logits),
        "again": told(again),
        "calls": (*calls, more),
        "lengths": lengths,
        "changed": not torch.equal(before, weights_of(part)),
        "moved": begun != room,
    }


@in_group
def probe_hand_over(
    user_ns: dict, *, rank: int, named: dict, common: int, seed: int, shape: list, new: int
) -> dict:
    """Generate with a prompt that only the first rank knows; count the tokens computed here."""
    function = reading_answer(user_ns, "disaggregated")
    model = copy.deepcopy(gpt(common))
    rows = [0]
    model.blocks[-1].mlp.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[1]))
    tokens, calls = recorded(function, model, text_of(seed, *shape), new, **named)
    return {"tokens": told_tokens(tokens), "calls": calls, "rows": sum(rows)}


# -- stages, chains and policies -------------------------------------------------------------------


def probe_balance(user_ns: dict, *, rank: int, cases: list) -> list:
    """Return the numbers of layers of each stage, for some chains."""
    function = reading_answer(user_ns, "balance")
    with ends_within(20.0, "Don't try all cuts. Use the best cuts of fewer layers and stages"):
        return [told(function(costs, p)) for costs, p in cases]


COUNTS = {"1": [4], "2": [3, 1], "3": [1, 2, 1], "4": [1, 1, 1, 1]}
SHAPES = [(3, 5), (1, 5), (1, 5), (2, 4), (2, 7), (3, 1)]


def counts_of(ranks: int, turned: bool) -> list[int]:
    """Return how many layers each stage of a group of ranks has."""
    return COUNTS[str(ranks)][:: -1 if turned else 1]


@in_group
def probe_serve(
    user_ns: dict, *, rank: int, group: Group, named: dict, seed: int, turned: bool
) -> dict:
    """Run microbatches through a chain, of whose layers and texts this rank knows its own part."""
    from torch_mpi.record import log

    chain = Chain(gpt(seed))
    texts = [text_of(seed + k, *shape) for k, shape in enumerate(SHAPES)]
    counts = counts_of(dist.get_world_size(group), turned)
    mark = log.mark()
    result, calls = recorded(reading_answer(user_ns, "serve"), chain, counts, texts, **named)
    starts = [start for start, _ in chain.marks]
    records = log.since(mark)
    sends = [call.start for call in records if call.op == "send"]
    waits = [call.waits[0][1] for call in records if call.op == "recv" and call.waits]
    return {
        "logits": told(result),
        "calls": calls,
        "worked": len(starts),
        "late": any(start < sent for sent, start in zip(sends, starts[1:], strict=False)),
        "hoards": any(sum(end <= start for end in waits) > k + 2 for k, start in enumerate(starts)),
    }


#: Servers on which policies are judged, with the arguments of `arrivals`.
WORKLOADS: dict[str, tuple[Server, dict[str, Any]]] = {
    "a steady rate": (Server(), {"rate": 6}),
    "a large model": (Server(base=0.09, decode=0.004, first=3, gap=0.2), {"rate": 2, "new": 30}),
    "bursts of ten": (Server(), {"rate": 5, "burst": 10}),
    "long prompts": (Server(first=20), {"rate": 1, "prompt": (200, 1200)}),
    "short prompts": (
        Server(base=0.02, prefill=0.001, first=0.5, gap=0.08),
        {"rate": 12, "prompt": (1, 20), "burst": 24, "new": 9},
    ),
    "few slots": (
        Server(slots=6, decode=0.012, first=4, gap=0.25),
        {"rate": 1.6, "prompt": (20, 200)},
    ),
}


def probe_policy(user_ns: dict, *, rank: int, workload: str, seed: int) -> list:
    """Return what the student's policy decides, from which the kernel computes the goodput.

    Returns:
        The number of each decision that lets requests join, from 0, and the requests' numbers.
    """
    server, load = WORKLOADS[workload]
    admit = answer_named(user_ns, "admit")
    count = itertools.count()
    joins = []

    def noted(*arguments: Any) -> list:
        joining = list(admit(*arguments) or ())
        step = next(count)
        if joining:
            joins.append([step, joining])
        return joining

    with ends_within(20.0, "Let waiting requests join as soon as there is room for them"):
        simulate(noted, server, arrivals(seed, **load))
    return [[step, [one.number for one in joining]] for step, joining in joins]
