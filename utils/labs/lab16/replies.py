"""What the checks of lab 16 share: cases, and comparisons of tensors that ranks reply."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from utils.checks.comparison import EXACT, Mistake
from utils.checks.probe import values_of
from utils.checks.task import Report, Step, facts, to_each, value
from utils.checks.trials import EVERYWHERE, WORLD

from .probes import kind_in_words

Tensors = Sequence[Tensor]


def cases(report: Report, **more: Any) -> list[dict[str, Any]]:
    """Return a case for each partition, with unequal sizes; only a rank itself knows its seed."""
    sizes = random.Random(report.seed).sample(range(1, 7), WORLD - 1)
    sizes.append(sizes[-1])  # so that an arriving block fits into the one that leaves
    more |= {"each": to_each(seed=report.seeds(WORLD)), "sizes": sizes, "common": report.seed}
    return [{"partition": partition} | more for partition in EVERYWHERE]


def lengths(case: dict[str, Any]) -> str:
    """Return what is said beside an error: the lengths of a case."""
    return f"every rank has its own length: a group of p ranks has the first p of {case['sizes']}"


def alike(
    reply: dict[str, Any], expected: Tensor, wrong: Mapping[str, Tensor], where: str
) -> Iterator[Step]:
    """Yield the steps for shape, dtype and numbers; `wrong` has what mistakes give, by texts."""
    got = reply["kind"]
    text = f"{where}: You returned {got}, expected {kind_in_words(expected)}"
    yield facts({text: got != kind_in_words(expected)})
    said = "You have nan in the result. Is it infinity over infinity, or -inf - (-inf)?"
    mistakes = [Mistake(lambda numbers: any(x != x for x in numbers), said)]
    mistakes += [Mistake(values_of(tensor), text) for text, tensor in wrong.items()]
    yield value(reply["numbers"], values_of(expected), mistakes, what=where, tolerance=EXACT)


def all_alike(
    replies: list, names: Sequence[str], right: Tensors, wrong: Mapping[str, Tensors], where: str
) -> Iterator[Step]:
    """Yield the steps of `alike` for each tensor of a tuple; a mistake gives such a tuple, too."""
    for i, name in enumerate(names):
        mistakes = {text: gives[i] for text, gives in wrong.items()}
        yield from alike(replies[i], right[i], mistakes, f"{where}: {name}")
