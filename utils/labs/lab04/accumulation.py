"""Tasks 4.5 and 4.6: accumulate gradients over microbatches, with one communication."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from utils.checks.comparison import Mistake, inside, only, table, waited
from utils.checks.task import Report, Step, communication, facts, task, to_each, value
from utils.checks.trials import EVERYWHERE, WORLD, GroupAnswer, judge_groups, on
from utils.cluster.questions import Ranks
from utils.labs.shared import replicas, small_models
from utils.labs.shared.replicas import ReferenceModel

from .probes import drawn_microbatches, probe_accumulate, reduced_bytes
from .token_probes import drawn_sentences, language_model, probe_tokens

# -- 4.5: microbatches of one size -----------------------------------------------------------------


@task("4.5", "k microbatches, one communication", points=3)
def accumulate(ranks: Ranks, report: Report) -> None:
    """Check that the gradient equals a large batch's, with all_reduces for one backward."""
    ks = ([3, 2], [4, 3], [2, 5], [5, 4], [3, 1])  # 1 comes last, because it accumulates nothing
    given = {"seed": report.seed, "each": to_each(data_seed=report.seeds(WORLD))}
    cases = [
        {"partition": partition, "ks": of_case} | given
        for partition, of_case in zip(EVERYWHERE, ks, strict=True)
    ]
    judge_groups(ranks, report, probe_accumulate, cases, _accumulation_steps)


@functools.lru_cache(64)
def _gradients(model_seed: int, seed: int, k: int) -> list[torch.Tensor]:
    """Return the gradients of a rank's k microbatches."""
    reference = ReferenceModel(small_models.net(model_seed), 1.0)
    return [reference.gradient(*part) for part in drawn_microbatches(seed, k)]


def _accumulation_steps(answer: GroupAnswer) -> Iterator[Step]:
    """Yield steps that judge a rank's gradients after k microbatches, and how it got them."""
    case = answer.case
    members = answer.members
    for k, outcome in zip(case["ks"], answer.value, strict=True):
        where = f"{k} microbatch{'es' * (k != 1)} {on(members)}"
        changed = "You changed the weights. Let accumulate make gradients, and take no step"
        yield facts({changed: outcome["changed"]})
        yield communication(outcome["calls"], inside(members))
        gradients = {r: _gradients(case["seed"], case["each"][r]["data_seed"], k) for r in members}
        expected = (sum(map(sum, gradients.values())) / k / len(members)).tolist()
        likely = _wrong_accumulations(gradients, answer.rank, k)
        mistakes = itertools.chain(likely, replicas.multiple(outcome["gradient"], expected))
        yield value(outcome["gradient"], expected, mistakes, what=where)
        wrong = _wrong_communication(outcome) | _wrong_passes(outcome, k)
        yield facts({f"{where}: {text}": is_so for text, is_so in wrong.items()})


def _wrong_accumulations(
    gradients: dict[int, list[torch.Tensor]], rank: int, k: int
) -> Iterator[Mistake]:
    p = len(gradients)

    def mean_of(part: slice) -> torch.Tensor:
        return sum(sum(of_rank[part]) for of_rank in gradients.values()) / p

    expected = mean_of(slice(None)) / k
    mine = sum(gradients[rank])
    last = mean_of(slice(-1, None))
    last_two = mean_of(slice(-2, None))
    all_but_last = mean_of(slice(0, -1)) if k > 1 else 0 * mine
    first_and_own = mean_of(slice(0, 1)) + sum(gradients[rank][1:])
    zero_grad = "counts. Call zero_grad() before the first one only"
    yield from table({
        f"The gradients are {k} times too large. Divide each microbatch's loss by {k}": (
            expected * k
        ),
        "The gradients are this rank's own mean. Let the last backward communicate": mine / k,
        "The gradients are this rank's own sum. Let the last backward communicate, and divide "
        f"each loss by {k}": mine,
        f"You divided the gradients by {k} twice. Remove one division": expected / k,
        f"You divided by the {p} ranks, but DDP already averages. Remove the division": (
            expected / p
        ),
        f"Only the last microbatch {zero_grad}": last,
        f"Only the last microbatch, with 1/{k}, {zero_grad}": last / k,
        f"Only the last two microbatches {zero_grad.replace('counts', 'count')}": last_two / k,
        "The last microbatch is missing. Run it after no_sync()": all_but_last / k,
        "You communicated the first microbatch. Communicate the last one": first_and_own / k,
        "There are no gradients. Call backward() for each microbatch": 0 * mine,
    })


def _wrong_communication(outcome: dict[str, Any]) -> dict[str, object]:
    """Return what is wrong with the communication if the gradients are right."""
    calls = outcome["calls"]
    times = reduced_bytes(outcome["calls"]) / outcome["nbytes"]
    by_hand = [call["op"] for call in calls if call["blocking"] or call["op"] != "all_reduce"]
    return {
        f"You call {' and '.join(sorted(set(by_hand)))} yourself. Leave communication to DDP, "
        "which averages the gradients in the last backward, after no_sync()": by_hand,
        f"The ranks communicated the gradients' bytes {times:g} times. Run forward and backward "
        "of all but the last microbatch in model.no_sync()": times > 1,
        "The ranks did not communicate the gradients. Run the last backward after no_sync()": (
            times < 1
        ),
        "After the call, the model still doesn't communicate. Use `with model.no_sync():`, which "
        "ends with its block": outcome["quiet"],
    }


def _wrong_passes(outcome: dict[str, Any], k: int) -> dict[str, object]:
    """Return what is wrong with the forwards and backwards of k microbatches."""
    forwards, backwards = (outcome["passes"].count(kind) for kind in ("forward", "backward"))
    counts = (forwards, backwards) != (k, k)
    return {
        "You sent all microbatches through the model as one large batch, which needs the memory "
        "that you want to save. Call forward once for each microbatch": forwards < k,
        f"You called backward {backwards} times for {k} forwards, so the forwards keep memory "
        "that you want to save. Call backward() after each forward": backwards < k,
        f"You called forward {forwards} times and backward {backwards} times for {k} "
        "microbatches. Call each of them once per microbatch": counts,
        "You called forward before the backward of the previous microbatch, which needs the "
        "memory that you want to save. Call backward() after each forward": (
            outcome["passes"] != ["forward", "backward"] * k
        ),
        "DDP didn't communicate in the last backward only. Call the DDP model, not model.module, "
        "and make the last call after no_sync()": outcome["called"] != [False] * (k - 1) + [True],
    }


# -- 4.6: microbatches with different numbers of tokens --------------------------------------------


@task("4.6", "a mean over tokens", points=3)
def accumulate_tokens(ranks: Ranks, report: Report) -> None:
    """Check the gradient of the mean over all tokens, and one number reduced before backward.

    In each case but the last one, a rank has no token that counts.
    """
    draw = random.Random(report.seed)
    seeds = report.seeds(WORLD)
    # First all ranks have equally many microbatches, so that no mistake looks like a mismatch.
    equal = [[3] * WORLD, [4] * WORLD]
    other = [[draw.sample(range(1, 5), WORLD) for _ in range(2)] for _ in EVERYWHERE]
    cases = []
    for partition, ks in zip((EVERYWHERE[0], *EVERYWHERE), (equal, *other), strict=True):
        empty = draw.randrange(WORLD) if partition else None
        own = {
            "data_seed": seeds,
            "ks": list(map(list, zip(*ks, strict=True))),
            "empty": [rank == empty for rank in range(WORLD)],
        }
        awkward = partition == EVERYWHERE[2]
        given = {"seed": report.seed, "awkward": awkward, "each": to_each(**own)}
        cases.append({"partition": partition} | given)
    judge_groups(ranks, report, probe_tokens, cases, _token_steps, hint=_without_tokens)


def _without_tokens(case: dict[str, Any]) -> str:
    """Return which rank of a case has no token that counts; "" if all have some."""
    empty = [rank for rank, given in enumerate(case["each"]) if given["empty"]]
    if not empty:
        return ""
    return (
        f"In this trial no token counts on rank {empty[0]}. It still needs a forward and a "
        "backward, because the other ranks wait for its gradients"
    )


class Tokens(NamedTuple):
    """What a rank's microbatches add to the mean over tokens.

    Attributes:
        sums: for each microbatch the gradient of the sum over its tokens.
        counts: for each microbatch the number of its tokens.
        positions: for each microbatch the number of tokens and of padded positions.
    """

    sums: list[torch.Tensor]
    counts: list[int]
    positions: list[int]

    @property
    def sum(self) -> torch.Tensor:
        """Return the gradient of the sum over all tokens of the rank."""
        return torch.stack(self.sums).sum(0)

    def mean_of_means(self) -> torch.Tensor:
        """Return the mean over the microbatches of the mean gradient of each."""
        pairs = zip(self.sums, self.counts, strict=True)
        return torch.stack([g / max(1, n) for g, n in pairs]).mean(0)


@functools.lru_cache(64)
def _tokens(model_seed: int, awkward: bool, seed: int, k: int, empty: bool) -> Tokens:
    """Return what the microbatches of a rank add to the mean."""

    def loss_of(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum")

    reference = ReferenceModel(language_model(model_seed, awkward), 1.0, loss_of=loss_of)
    microbatches = drawn_sentences(seed, k, empty)
    return Tokens(
        [reference.gradient(*one) for one in microbatches],
        [int((targets >= 0).sum()) for _, targets in microbatches],
        [targets.numel() for _, targets in microbatches],
    )


def _token_steps(answer: GroupAnswer) -> Iterator[Step]:
    """Yield steps that judge a rank's gradients after each call, and how it got them."""
    case, members = answer.case, answer.members
    for number, outcome in enumerate(answer.value):
        each = {r: case["each"][r] for r in members}
        parts = {
            r: _tokens(
                case["seed"],
                case["awkward"],
                given["data_seed"],
                given["ks"][number],
                given["empty"],
            )
            for r, given in each.items()
        }
        mine = parts[answer.rank]
        k = len(mine.counts)
        where = f"{k} microbatch{'es' * (k != 1)} {on(members)}"
        yield facts({
            "You changed the weights. Let accumulate_tokens make gradients, and take no step": (
                outcome["changed"]
            ),
            small_models.SWITCHED: outcome["switched"],
        })
        yield communication(outcome["calls"], only("all_reduce"), inside(members))
        count, got = _count(parts), outcome["gradient"]
        expected = (sum(of.sum for of in parts.values()) / max(1, count)).tolist()
        multiples = replicas.multiple(got, expected) if count else ()
        mistakes = itertools.chain(_wrong_token_means(parts, answer.rank), multiples)
        yield value(got, expected, mistakes, what=where)
        yield communication(outcome["calls"][: outcome["early"]], waited)
        wrong = _wrong_count(outcome, len(members))
        late = outcome | {"calls": outcome["calls"][outcome["early"] :]}
        wrong |= _wrong_communication(late) | _wrong_passes(outcome, _passes(outcome, mine))
        broadcasts = outcome["broadcasts"] > 2 * (number > 0)
        wrong["You call broadcast. Use one all_reduce for the number of tokens"] = broadcasts
        yield facts({f"{where}: {text}": is_so for text, is_so in wrong.items()})


def _passes(outcome: dict[str, Any], mine: Tokens) -> int:
    """Return how many forwards a rank needs: it may leave out microbatches without tokens."""
    full = sum(count > 0 for count in mine.counts)
    return min(max(full, 1, outcome["passes"].count("forward")), len(mine.counts))


def _count(parts: dict[int, Tokens]) -> int:
    """Return the number of tokens that count on all ranks of a group."""
    return sum(sum(of.counts) for of in parts.values())


def _wrong_token_means(parts: dict[int, Tokens], rank: int) -> Iterator[Mistake]:
    p, count, mine = len(parts), _count(parts), parts[rank]
    total = sum(of.sum for of in parts.values())
    nan = (
        "some gradients are nan. A microbatch without tokens has the mean 0 / 0. Sum its losses, "
        "and divide by the number of tokens of all ranks"
        if count
        else "no token counts on any rank, so you divided 0 by 0. Divide by at least 1"
    )
    yield Mistake(lambda row: any(number != number for number in row), nan)
    count = max(1, count)
    own = max(1, sum(mine.counts))
    means = [of.sum / max(1, sum(of.counts)) for of in parts.values()]
    positions = sum(sum(of.positions) for of in parts.values())
    last = sum(of.sums[-1] for of in parts.values())
    wrong = {
        "This is the mean of the microbatches' means, so tokens of short microbatches count "
        'more. Use reduction="sum", and divide by the number of tokens of all ranks': sum(
            of.mean_of_means() for of in parts.values()
        )
        / p,
        "This is the mean of the ranks' means, so tokens of a rank with few of them count more. "
        "Sum the number of tokens over the group": sum(means) / p,
        f"DDP divides by the {p} ranks, so multiply each loss by {p}": total / count / p,
        "You divided by the number of ranks only. Divide each loss by the number of tokens of all "
        "ranks, too": total / p,
        "This is the sum over the tokens. Divide each loss by their number": total,
        "You counted padded positions, too. Count the targets that are not negative": (
            total / positions
        ),
        "The gradients are this rank's own. Let the last backward communicate": (
            mine.sum / count * p
        ),
        "The gradients are this rank's own mean. Let the last backward communicate, and sum the "
        "number of tokens over the group": mine.sum / own,
        f"You multiplied by {p} twice. DDP divides by {p} once": total / count * p,
        "Each rank divided by its own number of tokens, and DDP summed. Sum the number of tokens "
        "over the group": sum(means),
        "Only the last microbatch counts. Call zero_grad() before the first one only": last / count,
        "The last microbatch is missing. Run it after no_sync()": (total - last) / count,
        "The last microbatch is missing, so nothing was communicated. Run it after no_sync()": (
            (mine.sum - mine.sums[-1]) / count * p
        ),
    }
    yield from table(wrong)


def _wrong_count(outcome: dict[str, Any], p: int) -> dict[str, object]:
    """Return what is wrong with how the number of tokens was summed, if the gradients are right."""
    early, late = outcome["calls"][: outcome["early"]], outcome["calls"][outcome["early"] :]
    nbytes = sum(call["nbytes"] for call in early)
    own_late = any(call["blocking"] or call["nbytes"] <= 16 for call in late)
    return {
        "You sum the number of tokens after the first backward, which leaves another pass over "
        "the gradients. Sum it before, and give each loss its weight": own_late and not early,
        "You don't sum the number of tokens over the group. Call all_reduce before the first "
        "backward": p > 1 and not early,
        f"You call all_reduce {len(early)} times before the first backward. Add up the counts of "
        "this rank's microbatches first, and reduce one number": len(early) > 1,
        f"You reduce {nbytes} bytes before the first backward. Reduce one number: how many tokens "
        "count in all microbatches of this rank": nbytes > 8,
        "You call all_reduce again after the first backward. One all_reduce for the number of "
        "tokens is enough, and DDP communicates the gradients": own_late,
    }
