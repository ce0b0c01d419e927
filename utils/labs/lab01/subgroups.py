"""Task 1.6: a sum over a group of ranks, which all ranks have to make together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from utils.checks.comparison import inside, made, only, table
from utils.checks.probe import fingerprint, numbers
from utils.checks.task import Report, Step, communication, facts, task, to_each, value
from utils.cluster.questions import Ranks, Reply

from .probes import probe_even_group, probe_even_sum, probe_forget


@task("1.6", "a collective on a subgroup", points=2, after="1.1")
def sum_over_even_ranks(ranks: Ranks, report: Report) -> None:
    """Check that even ranks have their sum, and that odd ranks keep their tensor."""
    evens = list(range(0, ranks.n, 2))
    if _has_groups(ranks, report, evens):
        case = {"each": to_each(seed=report.seeds(ranks.n)), "evens": evens}
        report.judge_cases(ranks, probe_even_sum, [case], _even_sum_steps)


def _has_groups(ranks: Ranks, report: Report, evens: list[int]) -> bool:
    """Judge each rank's group; return whether all ranks made the right one together."""
    answers = report.answers(ranks, probe_even_group)
    groups = [answer.value for answer in answers]
    wrong = {answer.rank: _wrong_group(answer.rank, answer.value, evens) for answer in answers}
    right = [report.follow(rank, [facts(of_rank)]) for rank, of_rank in wrong.items()]
    counts = [group["count"] for group in groups]
    if len(set(counts)) > 1:
        report.problem(
            f"Ranks 0 to {ranks.n - 1} have made {counts} groups, but every rank must call "
            "dist.new_group for each group, even if it isn't a member. The check has deleted "
            "even_ranks: correct its cell, and run it again"
        )
        report.answers(ranks, probe_forget, count=max(counts))
        return False
    if not answers or not all(right):
        return False
    return report.follow(None, [facts(_groups_of_one_call(groups))])


def _wrong_group(rank: int, group: dict[str, Any], evens: list[int]) -> dict[str, bool]:
    """Return what is wrong with the group that this rank made."""
    members = group["ranks"]
    kind = group["kind"]
    expected = evens if rank in evens else []
    is_now = "nothing" if kind == "NoneType" else f"a {kind}"
    consists_of = f"the ranks {members}" if members else "other ranks than this one"
    return {
        f"even_ranks is {is_now} on this rank. Call dist.new_group({evens}) on every rank, even "
        "if it isn't a member": members is None,
        f"even_ranks consists of {consists_of}. Call dist.new_group({evens})": members != expected,
    }


def _groups_of_one_call(groups: list[dict[str, Any]]) -> dict[str, bool]:
    """Return whether the ranks gave different members in the call that made even_ranks."""
    names = {group["name"] for group in groups if group["ranks"]}
    made_by_rank = [group["groups"] for group in groups]
    if not all(names) or not all(known and all(known.values()) for known in made_by_rank):
        raise ValueError("a group without a name or a member, or a rank without a group")
    of_one_call = {tuple(known[name]) for known in made_by_rank for name in names & known.keys()}
    different = len(of_one_call) > 1
    groups_made = " and ".join(map(str, sorted(of_one_call)))
    return {
        f"In one call of dist.new_group, the ranks made different groups, {groups_made}. Let all "
        "ranks call it with the same ranks": different,
    }


def _even_sum_steps(case: dict[str, Any], answer: Reply) -> Iterator[Step]:
    """Yield steps that judge `sum_over_even_ranks` in the student's group and in a new one."""
    rank = answer.rank
    evens = case["evens"]
    outcome = answer.value
    is_member = rank in evens
    calls = outcome["calls"]
    yield facts({
        "This rank calls a collective of a group without belonging to it, and PyTorch only "
        "warns. Let only members call it": outcome["warned"],
        "Your function makes a group in each call. Make the group once, outside, and use the "
        "argument group": outcome["made inside"],
        "You didn't use the argument group. Call all_reduce(tensor, group=group)": not outcome.get(
            "used"
        ),
    })
    if is_member:
        yield communication(calls, inside(evens), only("all_reduce"), made("all_reduce", 1))
    else:
        yield facts({
            f"This rank calls {call['op']}, but it isn't a member of the group. Let only members "
            "call it": True
            for call in calls
        })
    seeds = [given["seed"] for given in case["each"]]
    yield _right_sum([numbers(seed, 5) for seed in seeds], answer, evens)
    others = [numbers(seed, 2, 3, double=True) for seed in seeds]
    right = sum(others[r] for r in evens) if is_member else others[rank]
    of_float32 = "Your result is right for float32[5], but wrong for float64[2, 3]"
    wrong_kind = f"{of_float32}. Keep the tensor's dtype and shape"
    yield facts({wrong_kind: outcome["other"] != fingerprint(right)})
    times = made("all_reduce", int(is_member), " in another group of these ranks")
    yield communication(outcome["calls again"], only("all_reduce"), times)


def _right_sum(tensors: list[torch.Tensor], answer: Reply, evens: list[int]) -> Step:
    """Return a step that compares the tensor with the even ranks' sum, or with the old one."""
    unchanged = tensors[answer.rank]
    expected = sum(tensors[r] for r in evens) if answer.rank in evens else unchanged
    mistakes = table({
        "The tensor is unchanged. all_reduce writes into the tensor that you pass": unchanged,
        "You returned the sum over all ranks. Pass group=group": sum(tensors),
    })
    what = "the tensor afterwards"
    return value(answer.value["tensor"], expected.tolist(), mistakes, what=what)
