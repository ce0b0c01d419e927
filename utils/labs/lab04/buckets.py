"""Task 4.2: buckets by PyTorch's rule, and the results of mistakes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from utils.checks.comparison import Mistake, short, table
from utils.checks.task import Report, Step, task, value
from utils.cluster.questions import Ranks, Reply

from .probes import probe_assign, probe_real_buckets


def assign(
    sizes: list[int],
    cap: int,
    first_cap: int,
    closes: Callable[[int, int, int], bool] = lambda full, cap, _: full >= cap,
) -> list[list[int]]:
    """Return buckets by PyTorch's rule (`dist._compute_bucket_assignment_by_size`).

    A mistake has another rule `closes`: bytes in the bucket, its cap, bytes of the next gradient.
    """
    buckets: list[list[int]] = [[]]
    for k, following in enumerate([*sizes[1:], 0][: len(sizes)]):
        buckets[-1].append(k)
        full = sum(sizes[j] for j in buckets[-1])
        if closes(full, first_cap if len(buckets) == 1 else cap, following):
            buckets.append([])
    return buckets if buckets[-1] else buckets[:-1]


def cases(seed: int) -> list[dict]:
    """Return sizes and caps; the first ones distinguish mistakes, then come random and special."""
    draw = random.Random(seed)
    cases = [([40, 100, 100, 300, 300, 40], 400, 120)]
    for _ in range(6):
        sizes = [4 * draw.choice((3, 10, 40, 100, 256)) for _ in range(draw.randint(6, 14))]
        cases.append((sizes, draw.randint(400, 1500), draw.randint(60, 300)))
    cases.append(([100, 100, 200, 200, 300, 50], 400, 200))
    cases += [([40, 900, 40, 40], 400, 1000), ([8], 1000, 1000), ([], 1000, 1000)]
    cases.append(([100, 100, 400, 4], 400, 200))  # one small gradient is left
    # With DDP's own caps, a bucket holds many gradients.
    large = [draw.randint(1, draw.choice((100, 10_000, 2_000_000))) for _ in range(300)]
    cases.append((large, 25 * 2**20, 2**20))
    cases.append((large[::-1], 25 * 2**20, 2**20))  # the same number, but other buckets
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
    yield Mistake(lambda _: [] in result, "You returned an empty bucket. Leave it out")
    yield Mistake(expected[:-1], "The last bucket is missing. Return it even if it isn't full")
    first = case["first_cap"]
    one_cap = assign(**case | {"first_cap": case["cap"]})
    from_the_end = assign(**case | {"sizes": sizes[::-1]})
    backwards = (
        "You began at the end, but sizes is in the order in which gradients become ready. Begin at "
        "its beginning"
    )
    closes = {
        "You close a bucket before it becomes too large. Add the gradient first, as DDP does, "
        "and close the bucket when it holds its cap or more": lambda full, cap, n: full + n > cap,
        "You left a bucket open that holds exactly its cap. Compare with >=": lambda full, cap, _: (
            full > cap
        ),
        "You made a bucket for every gradient. Fill it until it holds its cap": lambda *_: True,
        "You put all gradients into one bucket. Close it when it is full": lambda *_: False,
    }
    yield from table({
        **{text: assign(**case, closes=rule) for text, rule in closes.items()},
        "You gave the first bucket the cap of the others. Use first_cap for it": one_cap,
        "You used first_cap for all. Use it once": assign(**case | {"cap": first}),
        "The last bucket is missing, and you didn't use first_cap. Return all buckets, and use "
        "first_cap for the first": one_cap[:-1],
        "A bucket's indices are in the wrong order. Sort them": [b[::-1] for b in expected],
        backwards: each(lambda k: last - k, from_the_end),
        backwards + ", and return the buckets in that order": expected[::-1],
        "You returned sizes. Return indices into sizes": each(lambda k: sizes[k], expected),
        "You counted the indices from 1. Count them from 0": each(lambda k: k + 1, expected),
    })
    placed = sorted(str(k) for bucket in result for k in bucket)
    everything = sorted(map(str, range(len(sizes))))
    yield Mistake(
        lambda _: placed != everything,
        "Some indices are missing, or in several buckets. Put each index into exactly one bucket",
    )
    yield from _closed_early(case, result, expected)


def _closed_early(case: dict, result: list[list], expected: list[list[int]]) -> Iterator[Mistake]:
    """Yield a mistake for each bucket that was closed before it held its cap."""
    for k, (bucket, right) in enumerate(zip(result, expected, strict=False)):
        full = sum(case["sizes"][int(j)] for j in bucket)
        cap = case["cap"] if k else case["first_cap"]
        early = full < cap and bucket != right
        yield Mistake(
            lambda _, early=early: early,
            f"You closed bucket {k} at {full} bytes, before it had the {cap} bytes of its cap. "
            "Count only the bytes",
        )


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
        as_in_ddp = value(buckets["predicted"], buckets["real"], what=words)
        report.follow(answer.rank, [as_in_ddp])


def _assignment_steps(case: dict[str, Any], answer: Reply) -> Iterator[Step]:
    """Yield steps that compare the buckets of each case with the right ones."""
    form = "a list of lists of indices"
    for arguments, result in zip(case["cases"], answer.value, strict=True):
        sizes, cap, first_cap = (arguments[name] for name in ("sizes", "cap", "first_cap"))
        call = f"assign_buckets({short(sizes)}, {cap}, {first_cap})"
        mistakes = _wrong_buckets(arguments, result)
        yield value(result, assign(**arguments), mistakes, what=call, form=form)
