"""Checks in stages: the next one is for answers that passed all cases of the one before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from utils.checks.groups import tried
from utils.checks.steps import Step
from utils.checks.task import Report
from utils.cluster.contracts import Ranks
from utils.cluster.reply import Reply


def all_right(
    ranks: Ranks,
    report: Report,
    probe: Callable[..., Any],
    cases: Iterable[dict[str, Any]],
    judge: Callable[[dict[str, Any], Reply], Iterable[Step]],
) -> bool:
    """Ask a probe in one case after the other; return whether all ranks were right in all cases.

    The first case with a problem is the last that is asked. For arguments see
    `Report.judge_cases`.
    """
    for case in cases:
        answers = report.answers(ranks, probe, **case)
        # A list, not a generator: each rank is told what is wrong with its own answer.
        right = [report.follow(answer.rank, judge(case, answer)) for answer in answers]
        if not answers or not all(right):
            return False
    return True


def all_groups_right(
    ranks: Ranks,
    report: Report,
    probe: Callable[..., Any],
    cases: Sequence[dict[str, Any]],
    judge: Callable[[dict[str, Any], list[int], list[Any]], bool],
) -> bool:
    """Ask a probe made by `in_group`; return whether all groups were right in all cases.

    Args:
        judge: of a case, the ranks of a group, and what the probe told on each of them, whether
            all is right. The first group with a problem is the last that is judged.
    """
    judged = 0
    for case, members, values in tried(ranks, report, probe, cases):
        if not judge(case, members, values):
            return False
        judged += 1
    # An answer that raised an error ends the cases early.
    return judged == sum(len(case["partition"] or ["all ranks"]) for case in cases)
