"""Checks of the ward: the student's name, the findings, and whether the repaired programs work.

The kernel compares a finding with the patient's case, and starts no program. A repaired program
runs on the lab's ranks with a fresh seed, and so does the program with the reference's repair.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from utils.checks import score
from utils.checks.comparison import same
from utils.checks.task import Check, Report, Step, facts, task, value
from utils.cluster.questions import Ranks, Reply

from .probes import probe_answer, probe_name, probe_ready, probe_reference, probe_repair
from .ward import program
from .ward.case import ALL, text_of
from .ward.case import Case as Patient
from .ward.cases import CASES
from .ward.drawing import BEDS, drawn
from .ward.evidence import waiting_lines
from .ward.kinds import KINDS
from .ward.view import Ward
from .ward.view import classes as classes
from .ward.view import shared_file as shared_file

#: Seconds that a repaired program may take.
PATIENCE = 20.0
#: Results may differ by this share, because another right repair may add in another order.
NEAR = 1e-4
#: A repaired program may need so many times as much as with the reference's repair. One more
#: tensor at the peak isn't a leak.
SLACK = {"peak": 1.6}
OTHER_SLACK = 1.25
#: It may make so many more calls, for example for a barrier at the end.
MORE_CALLS = 2
FORM = '{"rank": 2, "line": 17, "kind": "skipped call"}'
LONGEST_NAME = 100


# -- whose ward it is -------------------------------------------------------------------------


@task("18.6", "your name on the ward", points=1)
def admission(ranks: Ranks, report: Report) -> None:
    """Check that all ranks have one name or number."""
    answers = report.answers(ranks, probe_name)
    for answer in answers:
        report.follow(answer.rank, name_steps(answer.value))
    if not report.found and len({str(answer.value) for answer in answers}) > 1:
        report.problem("The ranks have different names. Write one name for all ranks")


def name_steps(name: Any) -> Iterator[Step]:
    """Yield what has to be right about a name."""
    is_number = isinstance(name, int) and not isinstance(name, bool)
    type_name = name[0] if isinstance(name, list) else type(name).__name__
    yield facts({
        f"my_name is a {type_name}. Write your name as a string, or your number": (
            not isinstance(name, str) and not is_number
        ),
        "my_name has no letter or digit. Write your name or your number": (_is_blank(name)),
        f"my_name is longer than {LONGEST_NAME} characters. Write a shorter one": (
            len(str(name)) > LONGEST_NAME
        ),
    })


def _is_blank(name: Any) -> bool:
    return not re.search(r"\w", str(name))


def admit(ranks: Ranks) -> Ward:
    """Return the ward of the student whose name the ranks know.

    Raises:
        NameError: the ranks know no name.
        ValueError: the name is empty.
    """
    reply = ranks.ask(probe_name)[0]
    if reply.status != "ok":
        raise NameError(f"{reply.error}. Then run this cell again.")
    if _is_blank(reply.value):
        raise ValueError(
            "my_name has no letter or digit. Write your name, and run this cell again."
        )
    ward = Ward(reply.value)
    ward.greet()
    return ward


def board() -> None:
    """Print which patients are solved, as far as the checks have run since the kernel began."""
    done = score.passed(score.room_of(__name__))
    found = [f"18.{5 + 2 * bed}" in done for bed in range(1, BEDS + 1)]
    cured = [f"18.{6 + 2 * bed}" in done for bed in range(1, BEDS + 1)]
    both = sum(map(min, found, cured))
    print("patient  " + "".join(f"{bed:4}" for bed in range(1, BEDS + 1)))
    for name, marks in (("finding", found), ("repair", cured)):
        print(f"{name:9}" + "".join("   ✓" if mark else "   ·" for mark in marks))
    print(f"{both} of {BEDS} patients are solved: found and repaired")


# -- what was found ---------------------------------------------------------------------------


def judge_finding(ranks: Ranks, report: Report, bed: int) -> None:
    """Compare a finding with the case of the patient in this bed."""
    answers = report.answers(ranks, probe_answer, answer=f"finding_{bed}")
    if not answers:
        return
    if len({str(answer.value) for answer in answers}) > 1:
        report.problem("The ranks have different findings. Write one finding for all ranks")
        return
    told_of = answers[0].value
    for problem in finding_problems(CASES[drawn(told_of["name"])[bed - 1]], told_of["answer"]):
        report.problem(problem)


def finding_problems(case: Patient, finding: Any) -> Iterator[str]:
    """Yield what is wrong with a finding, without giving the right one away."""
    if not isinstance(finding, dict) or set(finding) != {"rank", "line", "kind"}:
        yield f"A finding has a rank, a line and a kind, such as {FORM}"
        return
    yield from _rank_problems(case, finding["rank"])
    yield from _line_problems(case, finding["line"])
    yield from _kind_problems(case, finding["kind"])


def _rank_problems(case: Patient, rank: Any) -> Iterator[str]:
    is_number = isinstance(rank, int) and not isinstance(rank, bool)
    if rank != ALL and not (is_number and 0 <= rank < 4):
        yield f'The rank is {rank!r}. Write a number from 0 to 3, or "all"'
    elif rank not in case.ranks:
        yield _wrong_rank(case, rank)


def _wrong_rank(case: Patient, rank: int | str) -> str:
    if rank == ALL:
        return 'Not all ranks do the same here. Find the one that differs, and write it, not "all"'
    if ALL in case.ranks:
        return f"Rank {rank} alone is not at fault. Which ranks run the line that has to change?"
    if case.group == "hangs":
        return f"Rank {rank} is not the one at fault. A rank that waits is often only a victim"
    return f"Rank {rank} is not the one at fault. Compare what each rank does at this line"


def _line_problems(case: Patient, line: Any) -> Iterator[str]:
    lines = text_of(case.name).splitlines()
    if isinstance(line, bool) or not isinstance(line, int):
        yield f"The line is {line!r}. Write its number"
    elif not 1 <= line <= len(lines):
        yield f"The program has the lines 1 to {len(lines)}, and you wrote {line}"
    elif line in case.lines:
        return
    elif not (code := lines[line - 1].strip()):
        yield f"Line {line} is empty. Write the line that has to change"
    elif line in waiting_lines(case.name):
        yield f"Line {line} is where ranks wait, and not why they wait. {case.hint}"
    else:
        yield f"Line {line}, `{code}`, is not the cause. {case.hint}"


def _kind_problems(case: Patient, kind: Any) -> Iterator[str]:
    if not isinstance(kind, str) or kind not in KINDS:
        yield f"{kind!r} is none of the classes. lab18.classes() lists them"
    elif kind not in case.kinds:
        yield (
            f'"{kind}" means: {KINDS[kind]} The cause is of another kind. Name the mistake in the '
            f"line that has to change"
        )


# -- whether it is repaired -------------------------------------------------------------------


def judge_repair(ranks: Ranks, report: Report, bed: int) -> None:
    """Run the repaired program of the patient in this bed, and compare it with the reference's."""
    names = report.answers(ranks, probe_name)
    if not names:
        return
    judge_case(ranks, report, CASES[drawn(names[0].value)[bed - 1]], f"repair_{bed}")


def judge_case(ranks: Ranks, report: Report, case: Patient, answer: str) -> None:
    """Run a patient's program with the repair of this name, and compare with the reference's."""
    sick = text_of(case.name)
    if not report.answers(ranks, probe_ready, answer=answer, text=sick, name=case.name):
        return
    asked = {
        "name": case.name,
        "seed": report.seed % 100_000,
        "limits": case.limits,
        "arguments": case.arguments,
    }
    with ranks.apart() as others:
        rights = [
            report.answers(others, probe_reference, text=program.repaired(sick, repair), **asked)
            for repair in case.repairs
        ]
    if not all(rights):
        return
    answers = report.answers(
        ranks, probe_repair, patience=PATIENCE, answer=answer, text=sick, **asked
    )
    if not answers:
        late = f", and the check stopped it after {PATIENCE:.0f} s"
        endless = "KeyboardInterrupt" in report.kinds
        report.begin_with(f"Your repaired program did not come to its end{late if endless else ''}")
        return
    most = {key: max(needs(right)[key] for right in rights[0]) for key in case.limits}
    for answer, right in zip(answers, _nearest(answers, rights), strict=True):
        report.follow(answer.rank, repair_steps(answer, right.value, most))


def _nearest(answers: list[Reply], rights: list[list[Reply]]) -> list[Reply]:
    """Return the reference's repair that has the results of the answer; the first if none has."""

    def is_same(right: list[Reply]) -> bool:
        pairs = zip(answers, right, strict=True)
        return all(_fits(a.value["result"], r.value["result"]) for a, r in pairs)

    return next(filter(is_same, rights), rights[0])


def _fits(result: Any, right: Any) -> bool:
    return same(result, right, NEAR)


def repair_steps(answer: Reply, right: dict[str, Any], most: dict[str, int]) -> Iterator[Step]:
    """Yield what has to be right about a repaired program on one rank.

    Args:
        answer: the reply with what :func:`.ward.program.measured` returned there.
        right: the same of the reference's repair.
        most: how much a rank needs at most with the reference's repair, of what was wasted.
    """
    got, results = answer.value["result"], right["result"]
    wrong_form = "Your repaired program returns another kind of result. Keep its return line"
    yield facts({wrong_form: not isinstance(got, dict) or set(got) != set(results)})
    needed = needs(answer)
    rate, old_rate = needed["rate"], right["rate"]
    yield facts({
        f"Your repaired program has the learning rate {rate:g} instead of {old_rate:g}. Keep the "
        "old one, and repair the gradients": min(rate, old_rate) > 0
        and not math.isclose(rate, old_rate)
    })
    hasty = (
        "The optimizer makes a step while a call in the background may still change the gradients. "
        "Wait for all calls first"
    )
    background = "A call in the background is still not waited for. Wait for each one of them"
    yield facts({hasty: needed["hasty"] > 0, background: needed["unwaited"] > 0})
    for key, expected in results.items():
        yield value(got[key], expected, what=f"it ends, but '{key}' is wrong", tolerance=NEAR)
    for key, bound in most.items():
        allowed = bound + MORE_CALLS if key == "calls" else SLACK.get(key, OTHER_SLACK) * bound
        yield facts({_too_much(key, needed[key], bound): needed[key] > allowed})


def needs(answer: Reply) -> dict[str, Any]:
    """Return what a program needed on a rank, in numbers; what it communicated is in the records.

    Returns:
        A dict with "calls" (communication calls), "bytes" (sent and received), "unwaited" (calls in
        the background that nobody waited for), and "hasty", "rate", "work" and "peak", see
        :func:`.ward.program.measured`.
    """
    calls = answer.value["calls"]
    return answer.value | {
        "calls": len(calls),
        "bytes": sum(call["sent"] + call["received"] for call in calls),
        "unwaited": sum(not call["blocking"] and not call["waited"] for call in calls),
    }


def _too_much(key: str, got: int, bound: int) -> str:
    words = {
        "calls": "communication calls",
        "bytes": "bytes of communication",
        "work": "computed numbers",
        "peak": "bytes of tensors at once",
    }
    return (
        f"The results are right, but a rank still needs {got:,} {words[key]}, and {bound:,} are "
        "enough. Remove the waste"
    )


# -- two tasks for each bed -------------------------------------------------------------------


def _finding_check(bed: int) -> Check:
    @task(f"18.{5 + 2 * bed}", f"patient {bed}: what it has", points=1)
    def finding(ranks: Ranks, report: Report) -> None:
        """Check the finding for one bed."""
        judge_finding(ranks, report, bed)

    return finding


def _repair_check(bed: int) -> Check:
    @task(f"18.{6 + 2 * bed}", f"patient {bed}: the repair", points=1)
    def repair(ranks: Ranks, report: Report) -> None:
        """Check the repair for one bed."""
        judge_repair(ranks, report, bed)

    return repair


(
    finding_1,
    finding_2,
    finding_3,
    finding_4,
    finding_5,
    finding_6,
    finding_7,
    finding_8,
    finding_9,
    finding_10,
    finding_11,
    finding_12,
) = map(_finding_check, range(1, BEDS + 1))
(
    repair_1,
    repair_2,
    repair_3,
    repair_4,
    repair_5,
    repair_6,
    repair_7,
    repair_8,
    repair_9,
    repair_10,
    repair_11,
    repair_12,
) = map(_repair_check, range(1, BEDS + 1))
