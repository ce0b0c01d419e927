"""The probes of lab 02, which run on the ranks beside the student's answers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils.data.distributed import DistributedSampler

from utils import data
from utils.checks.groups import in_group
from utils.checks.probe import Results, answer_named, reading_answer, recorded, told


def probe_calls(
    user_ns: dict, *, rank: int, name: str, calls: list, turned: bool = False
) -> list[dict]:
    """Call a function for each (arguments, keywords); return results or errors, and what it used.

    Args:
        turned: whether samplers and data sets return other numbers; see `turned_samples`.
    """
    function = answer_named(user_ns, name)
    answers = []
    results = Results()
    used: list[str] = []
    with contextlib.ExitStack() as patches:
        if turned:
            patches.enter_context(turned_samples())
        for method in ("__init__", "set_epoch", "__iter__"):
            patches.enter_context(_noted(method, used))
        for arguments, named in calls:
            used.clear()
            try:
                result = function(*arguments, **named)
                parts = result if isinstance(result, list | tuple) else ()
                tensors = any(isinstance(part, torch.Tensor) for part in parts)
                answer = {"value": told(result), "tensors": tensors}
            except NotImplementedError:
                raise
            except Exception as error:
                kind = "ValueError" if isinstance(error, ValueError) else type(error).__name__
                answer = {"error": f"{kind}: {error}"}
            else:
                results.add(name, result)
            answers.append(answer | {"used": list(used)})
    return answers


def _noted(name: str, used: list[str]):
    """Record each call of this method of a DistributedSampler."""
    original = getattr(DistributedSampler, name)

    def noting(self, *args: Any, **kwargs: Any) -> Any:
        used.append(name)
        return original(self, *args, **kwargs)

    return mock.patch.object(DistributedSampler, name, noting)


@contextlib.contextmanager
def turned_samples() -> Iterator[None]:
    """Let samplers return their samples in reverse, and data sets return items larger by 3.

    An answer that uses them follows this change, but an answer that makes the numbers itself
    doesn't.
    """
    samples = DistributedSampler.__iter__
    item = data.SimpleDataSet.__getitem__
    with (
        mock.patch.object(
            DistributedSampler, "__iter__", lambda self: iter([*samples(self)][::-1])
        ),
        mock.patch.object(data.SimpleDataSet, "__getitem__", lambda self, k: item(self, k) + 3),
    ):
        yield


@in_group
def probe_same(user_ns: dict, *, rank: int, named: dict, scenarios: list) -> list[dict]:
    """Return what `same_minibatches` returns in this rank's group in each scenario."""
    function = reading_answer(user_ns, "same_minibatches")
    answers = []
    for mine, minibatches in scenarios:
        result, calls = recorded(function, mine, minibatches, **named)
        answers.append({"result": told(result), "calls": calls})
    return answers


@in_group
def probe_mean(user_ns: dict, *, rank: int, named: dict, values: list, n: int) -> dict:
    """Return the mean that `mean_once` computes from this rank's values."""
    function = reading_answer(user_ns, "mean_once")
    mine = torch.tensor(values)
    result, calls = recorded(function, mine, n, **named)
    return {"result": told(result), "tensor": isinstance(result, torch.Tensor), "calls": calls}
