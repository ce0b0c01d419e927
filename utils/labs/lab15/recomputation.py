"""The check of task 15.4: a module whose activations are recomputed in backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from utils.checks.comparison import EXACT, Mistake
from utils.checks.task import Report, Step, facts, task, value
from utils.cluster.questions import Ranks

from .probes import both_passes, made, probe_recompute, some_numbers

#: Bytes that an answer may keep in addition to x, for example the state of random numbers.
SLACK = 8_192


def _forgetful(seed: int) -> list[Any]:
    """Return the gradients if backward draws another dropout mask than forward."""
    module, _, x, upstream = made(seed)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed + 1)
        module(x)
        torch.rand(2)  # as between forward and backward in `both_passes`
        module(x).backward(upstream)
    return some_numbers(x.grad, *(q.grad for q in module.parameters()))


@task("15.4", "recompute by hand", points=3)
def recompute(ranks: Ranks, report: Report) -> None:
    """Compare with the module itself, and look at what the function keeps and how it draws."""
    right = both_passes(lambda module, x: module(x), report.seed)
    for answer in report.answers(ranks, probe_recompute, seed=report.seed):
        report.follow(answer.rank, _recomputed(answer.value, right, report.seed))


def _recomputed(result: dict[str, Any], right: dict[str, Any], seed: int) -> Iterator[Step]:
    cut = f"You returned {result['y']}. Return module(x), with a graph back to x"
    yield facts({cut: isinstance(result["y"], str)})
    yield value(result["y"], right["y"], what="result", tolerance=EXACT)
    forwards, calls = result["forwards"], result["calls"]
    yield facts({
        f"You ran the module {forwards} times in forward. Run it once": forwards != 1,
        f"After forward, you keep {result['kept']:,} bytes in addition to x. At most {SLACK:,} are "
        "allowed. Run forward under torch.no_grad(), and keep only x": result["kept"] > SLACK,
        "You ran the module once. Run it again in backward, because its activations are gone": calls
        == 1,
        f"You ran the module {calls} times. Twice is enough: in forward and in backward": calls > 2,
    })
    gradients = result["gradients"], right["gradients"]
    yield value(*gradients, _wrong_gradients(seed), what="gradients", tolerance=EXACT)
    yield facts({
        "You switched the module to eval(), and it stays there. Leave its mode as it is, and set "
        "the state of the random numbers": result["evaluates"],
        "You switched a module to train(), and it stays there. Leave its mode as it is": result[
            "trains"
        ],
    })
    stays = "random numbers after forward and after backward, which stay as without recompute"
    yield value(result["drawn"], right["drawn"], what=stays)
    adds = (
        "gradients after a second backward, which must add to the first. It goes through a "
        "function that calls the module, the module, and another module in eval mode, all open at "
        "once"
    )
    yield value(result["later"], right["later"], what=adds, tolerance=EXACT)
    yield facts({
        "You don't recompute a module in eval mode. Recompute it, too": result["others"][0]
        != 2 * right["others"][0],
        "You don't recompute a module without parameters. Recompute it, too": result["others"][1]
        != 2 * right["others"][1],
    })
    apart = (
        "gradients of two more calls, whose backward runs in the order of their forward; the first "
        "holds a module in train mode and one in eval mode"
    )
    yield value(result["apart"], right["apart"], what=apart, tolerance=EXACT)


def _wrong_gradients(seed: int) -> Iterator[Mistake]:
    yield Mistake(
        lambda got: isinstance(got, list) and bool(got) and got[0] is None,
        "x has no gradient. Recompute with a copy of x that requires a gradient, and return its "
        "gradient from backward",
    )
    yield Mistake(
        lambda got: isinstance(got, list) and None in got,
        "The parameters have no gradient. Recompute under torch.enable_grad(), and call "
        "backward on the new result",
    )
    yield Mistake(
        _forgetful(seed),
        "Backward drew another dropout mask than forward. Keep torch.get_rng_state() before "
        "forward, and set it before you recompute",
    )
