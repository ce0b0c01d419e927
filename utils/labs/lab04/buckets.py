"""Buckets by PyTorch's rule, and what mistakes give (4.2)."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from utils.checks.comparison import Mistake, short, table
from utils.checks.probe import reading_answer, recorded, told
from utils.checks.task import Report, Step, task, value
from utils.checks.trials import Results
from utils.cluster.questions import Ranks, Reply
from utils.labs.shared import replicas


def assign(
    sizes: list[int], cap: int, first_cap: int, closes=lambda full, cap, _: full >= cap
) -> list[list[int]]:
    """Return buckets by PyTorch's rule (`dist._compute_bucket_assignment_by_size`).

    Another one: `closes(full, cap, next)`, bytes in the bucket, its cap, bytes of what follows.
    """
    buckets: list[list[int]] = [[]]
    for k, following in enumerate([*sizes[1:], 0][: len(sizes)]):
        buckets[-1].append(k)
        full = sum(sizes[j] for j in buckets[-1])
        if closes(full, first_cap if len(buckets) == 1 else cap, following):
            buckets.append([])
    return buckets if buckets[-1] else buckets[:-1]


def cases(seed: int) -> list[dict]:
    """Return sizes and caps: first those that tell mistakes apart, then random and special ones."""
    draw = random.Random(seed)
    cases = [([40, 100, 100, 300, 300, 40], 400, 120)]
    for _ in range(6):
        sizes = [4 * draw.choice((3, 10, 40, 100, 256)) for _ in range(draw.randint(6, 14))]
        cases.append((sizes, draw.randint(400, 1500), draw.randint(60, 300)))
    cases.append(([100, 100, 200, 200, 300, 50], 400, 200))
    cases += [([40, 900, 40, 40], 400, 1000), ([8], 1000, 1000), ([], 1000, 1000)]
    # DDP's own caps, and many gradients, of any type, in a bucket.
    large = [draw.randint(1, draw.choice((100, 10_000, 2_000_000))) for _ in range(300)]
    cases.append((large, 25 * 2**20, 2**20))
    cases.append((large[::-1], 25 * 2**20, 2**20))  # as many, and other buckets
    cases.append(([draw.randint(1, 40) for _ in range(300)], 4000, 300))
    return [dict(zip(("sizes", "cap", "first_cap"), case, strict=True)) for case in cases]


def _wrong_buckets(case: dict, result: object) -> Iterator[Mistake]:
    def each(change: Callable[[int], int], buckets: list[list[int]]) -> list[list[int]]:
        return [[change(k) for k in bucket] for bucket in buckets]

    sizes = case["sizes"]
    expected = assign(**case)
    last = len(sizes) - 1
    nested = isinstance(result, list) and all(isinstance(bucket, list) for bucket in result)
    yield Mistake(lambda _: not nested, "Return a list of lists of indices")
    yield Mistake(lambda _: [] in result, "An empty bucket never leaves. Leave it out")
    yield Mistake(expected[:-1], "The last bucket is missing. It doesn't have to be full")
    first = case["first_cap"]
    one_cap = assign(**case | {"first_cap": case["cap"]})
    from_the_end = assign(**case | {"sizes": sizes[::-1]})
    backwards = "sizes is in the order in which the gradients become ready. Begin at its beginning"
    closes = {
        (
            "You close a bucket before it becomes too large. DDP adds the gradient first, and "
            "closes the bucket when it holds its cap or more"
        ): lambda full, cap, n: full + n > cap,
        "A bucket that holds exactly its cap is full. Compare with >=": lambda full, cap, _: (
            full > cap
        ),
        (
            "Every gradient has a separate bucket. Collect gradients until the bucket holds its cap"
        ): lambda *_: True,
        "All gradients are in one bucket. Close it when it is full": lambda *_: False,
    }
    yield from table({
        **{text: assign(**case, closes=rule) for text, rule in closes.items()},
        "The first bucket has a different cap, first_cap": one_cap,
        "first_cap is only for the first bucket": assign(**case | {"cap": first}),
        "The last bucket is missing, and you don't use first_cap": one_cap[:-1],
        "The indices in a bucket are in the wrong order": [b[::-1] for b in expected],
        backwards: each(lambda k: last - k, from_the_end),
        backwards + ", and return the buckets in that order": expected[::-1],
        "You returned sizes. Return indices into sizes": each(lambda k: sizes[k], expected),
        "You counted the indices from 1. Count them from 0": each(lambda k: k + 1, expected),
    })
    placed = sorted(str(k) for bucket in result for k in bucket)
    everything = sorted(map(str, range(len(sizes))))
    yield Mistake(lambda _: placed != everything, "Each index must be in exactly one bucket")
    yield from _closed_early(case, result, expected)


def _closed_early(case: dict, result: list[list], expected: list[list[int]]) -> Iterator[Mistake]:
    """Yield which buckets were closed before they had their cap."""
    for k, (bucket, right) in enumerate(zip(result, expected, strict=False)):
        full = sum(case["sizes"][int(j)] for j in bucket)
        cap = case["cap"] if k else case["first_cap"]
        early = full < cap and bucket != right
        yield Mistake(
            lambda _, early=early: early,
            (
                f"You closed bucket {k} at {full} bytes, before it had the {cap} of its cap. "
                "Only the bytes count"
            ),
        )


def probe_assign(user_ns: dict, *, rank: int, cases: list[dict]) -> list:
    """Ask for `assign_buckets` of every case."""
    function = reading_answer(user_ns, "assign_buckets")
    results = Results()
    answers = [function(**copy.deepcopy(case)) for case in cases]
    for result in answers:
        results.add("assign_buckets", result)
    return told(answers)


def probe_real_buckets(user_ns: dict, *, rank: int, widths: list[int], cap: int) -> dict:
    """Return what DDP really reduces in its third step, and what the answer foretells."""
    model = DistributedDataParallel(replicas.net(0, widths), bucket_cap_mb=cap / 2**20)
    images = torch.ones(2, widths[0])
    for _ in range(3):
        model.zero_grad()
        _, calls = recorded(lambda: model(images).sum().backward())
    sizes = [p.nbytes for p in reversed(list(model.parameters()))]
    buckets = reading_answer(user_ns, "assign_buckets")(sizes, cap, cap)
    return {
        "real": [call["nbytes"] for call in calls if call["op"] == "all_reduce"],
        "foretold": [sum(sizes[k] for k in bucket) for bucket in buckets],
    }


@task("4.2", "which gradient travels in which bucket", points=2)
def assign_buckets(ranks: Ranks, report: Report) -> None:
    """Check DDP's own assignment, on random sizes and on a real DDP."""
    drawn: dict[str, Any] = {"cases": cases(report.seed)}
    if not report.judge_cases(ranks, probe_assign, [drawn], _assignment_steps):
        return
    draw = random.Random(report.seed)
    widths = [6, *(draw.choice((8, 20, 32, 50)) for _ in range(5)), 4]
    given = {"widths": widths, "cap": draw.choice((1500, 4000, 7000))}
    for answer in report.answers(ranks, probe_real_buckets, **given):
        buckets = answer.value
        words = "bytes of the buckets of a real DDP"
        report.expect(answer.rank, words, buckets["foretold"], buckets["real"])


def _assignment_steps(case: dict[str, Any], answer: Reply) -> Iterator[Step]:
    """Yield that all gradients are in the right buckets."""
    form = "a list of lists of indices"
    for arguments, result in zip(case["cases"], answer.value, strict=True):
        sizes, cap, first_cap = (arguments[name] for name in ("sizes", "cap", "first_cap"))
        call = f"assign_buckets({short(sizes)}, {cap}, {first_cap})"
        mistakes = _wrong_buckets(arguments, result)
        yield value(result, assign(**arguments), mistakes, what=call, form=form)
