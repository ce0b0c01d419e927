"""When data moved, and when backward computed: which share is hidden, and what mistakes give."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import torch
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from utils.checks.groups import group_of
from utils.checks.mistakes import Mistake, is_number, table
from utils.checks.probe import reading_answer, told
from utils.labs.shared import replicas


def union(intervals: list) -> float:
    """Return the seconds that are in at least one interval."""
    total = 0.0
    until = float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def hidden(transfers: list, begin: float, end: float) -> float:
    """Return the share of the time in which data moved that lies between begin and end."""
    moving = union(transfers)
    inside_ = [[max(s, begin), min(e, end)] for s, e in transfers if min(e, end) > max(s, begin)]
    return union(inside_) / moving if moving else 0.0


def cases(seed: int) -> dict[str, list[list[float]]]:
    """Return cases: what is special, and the transfers; backward computes from 100 to 120 s.

    Last what could hide another mistake.
    """
    draw = random.Random(seed)

    def spread(count: int) -> list[list[float]]:
        starts = [draw.uniform(90, 130) for _ in range(count)]
        return [[s, s + draw.uniform(0.5, 20)] for s in starts]

    unordered = [[121.0, 126.0], [103.0, 107.0], [105.0, 110.0]]
    return {
        "one transfer, half of it after backward": [[110.0, 130.0]],
        "two transfers after each other, one of them in the open": [[105.0, 109.0], [121.0, 127.0]],
        "a transfer that is already under way when backward begins": [[98.0, 104.0]],
        "a transfer from before backward until after it": [[90.0, 130.0]],
        "two transfers at the same time": [[102.0, 110.0], [106.0, 118.0], [119.0, 125.0]],
        "a short transfer inside of a long one": [[101.0, 130.0], [103.0, 105.0], [108.0, 112.0]],
        "two transfers that begin together": [[110.0, 128.0], [110.0, 112.0]],
        "transfers that are not in the order of their starts": unordered,
        "all of it after backward": [[120.0, 130.0], [130.0, 140.0]],
        **{f"{count} random transfers": spread(count) for count in (3, 5, 9)},
        "40 short transfers": draw.sample([[90.0 + k, 90.5 + k] for k in range(40)], 40),
        "a transfer of no duration beside another": [[110.0, 110.0], [115.0, 125.0]],
        "no transfer at all": [],
        "a transfer of no duration": [[110.0, 110.0]],
    }


def wrong_shares(transfers: list, result: object, begin: float, end: float) -> Iterator[Mistake]:
    """Yield mistakes that give another share."""
    yield Mistake(lambda _: not is_number(result), "expected a number from 0 to 1")
    share = hidden(transfers, begin, end)
    moving = union(transfers)
    lengths = sum(e - s for s, e in transfers)
    if not lengths:
        yield Mistake(lambda _: True, "where nothing moved, the share is 0")
        return
    clipped = sum(max(0.0, min(e, end) - max(s, begin)) for s, e in transfers)
    cut = "a transfer may be hidden in part: cut it at the end of backward"
    of_backward = share * moving / (end - begin)
    of_span = share * moving / (max(e for _, e in transfers) - min(s for s, _ in transfers))
    cut_at_end = [[s, min(e, end)] for s, e in transfers if s < end]
    total = "time in which two transfers move at once counts once"
    wrong = {
        "as a share, not in percent": 100 * share,
        "these are seconds; divide by all the time in which data moved": share * moving,
        "divided by the length of backward; divide by the time in which data moved": of_backward,
        "this is the share in the open, not the hidden one": 1 - share,
        f"{total}: take the union": clipped / lengths,
        f"hidden {total}, as in the total": clipped / moving,
        f"in the total, {total}": share * moving / lengths,
        f"of the total, take the union, not the span from the first to the last: {total}": of_span,
        cut: union([[s, e] for s, e in transfers if s >= begin and e <= end]) / moving,
        "cut a transfer at the begin of backward, too": union(cut_at_end) / moving,
        f"{cut}.": union([[s, e] for s, e in transfers if s < end]) / moving,
        "a share is never negative: what lies after backward hides nothing": -abs(result),
    }
    yield from table(wrong)


DEEP = (784, *[512] * 8, 10)


def probe_overlap(user_ns: dict, *, rank: int) -> dict | None:
    """Return when data moved in a step of DDP of two ranks over 1 Gbit/s, and the answer's share.

    Whichever rank comes last to the first bucket still has most of its backward before it, so one
    of the two hides something however busy the machine is.
    """
    with group_of([[0, 1]], rank) as pair:
        if pair is None:
            return None
        model = DistributedDataParallel(replicas.net(0, DEEP), process_group=pair, bucket_cap_mb=1)
        images, labels = torch.randn(128, 784), torch.zeros(128, dtype=torch.int64)
        with replicas.network(50e-6, 125e6):
            for _ in range(3):
                step = _timed_backward(model, images, labels)
    share = reading_answer(user_ns, "hidden_share")(**step)
    return step | {"share": replicas.one_number(told(share))}


def _timed_backward(model, images, labels) -> dict:
    """Return transfers of one backward, and the interval in which it computed; seconds."""
    from torch_mpi.record import log

    loss = functional.cross_entropy(model(images), labels)
    mark = log.mark()
    begin = time.perf_counter()
    loss.backward()
    calls = [call for call in log.since(mark) if call.op == "all_reduce"]
    return {
        "transfers": [(call.matched, call.end) for call in calls],
        "begin": begin,
        "end": max(call.start for call in calls),
    }
