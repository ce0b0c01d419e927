"""Checks of the ward: the student's name, the findings, and whether the repaired programs work.

The kernel compares a finding with the patient's case, and starts no program. A repaired program
runs on the lab's ranks with a fresh seed, and so does the program with the reference's repair.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from typing import Any

from utils.checks import score
from utils.checks.comparison import same
from utils.checks.task import Check, Report, Step, facts, task, value
from utils.cluster.questions import Ranks, Reply

from .probes import probe_answer, probe_name, probe_ready, probe_reference, probe_repair
from .ward.assignment import BEDS, patients_of
from .ward.case import ALL
from .ward.case import Case as Patient
from .ward.cases import CASES
from .ward.evidence import waiting_lines
from .ward.kinds import KINDS
from .ward.program import repaired
from .ward.tries import TRIES
from .ward.view import Ward
from .ward.view import classes as classes

#: Seconds that a repaired program may take.
PATIENCE = 20.0
#: Results may differ by this share, because another right repair may add in another order.
NEAR = 1e-4
#: A repaired program may need so many times as much as with the reference's repair. One more
#: tensor at the peak isn't a leak.
SLACK = {"peak": 1.6}
OTHER_SLACK = 1.25
#: A repaired program runs with so many fresh seeds, because a wrong one may be right by luck.
RUNS = 3
#: It may make so many more calls, for example for a barrier at the end of each run.
MORE_CALLS = 2 * RUNS
ALONE = (
    "Some ranks create more groups than others. All ranks must call new_group equally often, even "
    "if they aren't in the group"
)
HASTY = (
    "The optimizer makes a step while a call in the background may still change the gradients. "
    "Wait for all calls first"
)
RACES = (
    "The program reads or changes a tensor while a call in the background may still change it. "
    "Wait for the call first"
)
BACKGROUND = "A call in the background is still not waited for. Wait for each one of them"
#: A finding has so many parts; words for a wrong finding by how many of its parts are right.
PARTS = 3
RIGHT = (
    "None of rank, line and kind is",
    "One of rank, line and kind is",
    "Two of rank, line and kind are",
)
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
    if TRIES.admit(reply.value):  # the other ward's patients are solved, and not these
        room = score.room_of(__name__)
        score.forget(room, [number for bed in range(1, BEDS + 1) for number in _tasks_of(bed)])
    ward = Ward(reply.value)
    ward.greet()
    return ward


def _tasks_of(bed: int) -> tuple[str, str]:
    """Return the numbers of a patient's tasks: the finding and the repair."""
    return f"18.{5 + 2 * bed}", f"18.{6 + 2 * bed}"


def board(ward: Ward) -> None:
    """Print which patients are solved and how many tries their findings took, in this kernel."""
    done = score.passed(score.room_of(__name__))
    beds = range(1, BEDS + 1)
    found, cured = zip(
        *([number in done for number in _tasks_of(bed)] for bed in beds), strict=True
    )
    tries = [TRIES.of(ward.name, bed) for bed in beds]
    print("patient  " + "".join(f"{bed:4}" for bed in beds))
    for name, marks in (("finding", found), ("repair", cured)):
        print(f"{name:9}" + "".join("   ✓" if mark else "   ·" for mark in marks))
    print("tries    " + "".join(f"{of.found_at or of.tries or '·':>4}" for of in tries))
    both = sum(map(min, found, cured))
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
    name = answers[0].value["name"]
    finding = answers[0].value["answer"]
    case = CASES[patients_of(name)[bed - 1]]
    if problems := list(form_problems(case, finding)):
        for problem in problems:
            report.problem(problem)
    else:
        judge_try(report, case, name, bed, finding)


def judge_try(
    report: Report, case: Patient, name: object, bed: int, finding: dict[str, Any]
) -> None:
    """Judge a finding of the right form, and count the try; in a pause, only say how long it is."""
    of = TRIES.of(name, bed)
    if seconds := TRIES.pause(name, bed, finding):
        report.note = f"try {of.tries}"
        report.problem(
            f"{of.wrong} findings of this patient were wrong, so look at the evidence. The check "
            f"judges another finding in {seconds} s"
        )
        return
    right = parts_right(case, finding)
    report.note = f"try {TRIES.note(name, bed, finding, right == PARTS)}"
    if right < PARTS:
        report.problem(f"{RIGHT[right]} right. {advice(case, finding)}")


def parts_right(case: Patient, finding: dict[str, Any]) -> int:
    """Return how many of rank, line and kind are right."""
    pairs = (("rank", case.ranks), ("line", case.lines), ("kind", case.kinds))
    return sum(finding[key] in rights for key, rights in pairs)


def advice(case: Patient, finding: dict[str, Any]) -> str:
    """Return what to look at; the words are the same whichever part of the finding is wrong."""
    if finding["line"] in waiting_lines(case.name) - {*case.lines}:
        return f"Ranks wait at line {finding['line']}, and why they wait is elsewhere. {case.hint}"
    return case.hint


def form_problems(case: Patient, finding: Any) -> Iterator[str]:
    """Yield why a finding can't be judged."""
    if not isinstance(finding, dict) or set(finding) != {"rank", "line", "kind"}:
        yield f"A finding has a rank, a line and a kind, such as {FORM}"
        return
    rank = finding["rank"]
    line = finding["line"]
    kind = finding["kind"]
    if rank != ALL and not (_is_number(rank) and 0 <= rank < 4):
        yield f'The rank is {rank!r}. Write a number from 0 to 3, or "all"'
    lines = case.text.splitlines()
    if not _is_number(line):
        yield f"The line is {line!r}. Write its number"
    elif not 1 <= line <= len(lines):
        yield f"The program has the lines 1 to {len(lines)}, and you wrote {line}"
    elif not lines[line - 1].strip():
        yield f"Line {line} is empty. Write the line that has to change"
    if not isinstance(kind, str) or kind not in KINDS:
        yield f"{kind!r} is none of the classes. lab18.classes() lists them"


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# -- whether it is repaired -------------------------------------------------------------------


def judge_repair(ranks: Ranks, report: Report, bed: int) -> None:
    """Run the repaired program of the patient in this bed, and compare it with the reference's."""
    names = report.answers(ranks, probe_name)
    if not names:
        return
    judge_case(ranks, report, CASES[patients_of(names[0].value)[bed - 1]], f"repair_{bed}")


def judge_case(ranks: Ranks, report: Report, case: Patient, answer: str) -> None:
    """Run a patient's program with the repair of this name, and compare with the reference's."""
    if not report.answers(ranks, probe_ready, answer=answer, text=case.text, name=case.name):
        return
    asked = {
        "name": case.name,
        "seeds": random.Random(report.seed).sample(range(100_000), RUNS),
        "limits": case.limits,
        "arguments": case.arguments,
    }
    with ranks.apart() as others:
        rights = [
            report.answers(others, probe_reference, text=repaired(case.text, repair), **asked)
            for repair in case.repairs
        ]
    if not all(rights):
        return
    answers = report.answers(
        ranks, probe_repair, patience=PATIENCE, answer=answer, text=case.text, **asked
    )
    if not answers:
        late = f", and the check stopped it after {PATIENCE:.0f} s"
        endless = "KeyboardInterrupt" in report.kinds
        report.begin_with(f"Your repaired program did not come to its end{late if endless else ''}")
        return
    if len({reply.value["groups"] for reply in answers}) > 1:
        report.problem(ALONE)
        return
    most = {key: max(needs(right)[key] for right in rights[0]) for key in case.limits}
    for answer, right in zip(answers, _nearest(answers, rights), strict=True):
        report.follow(answer.rank, repair_steps(answer, right.value, most))


def _nearest(answers: list[Reply], rights: list[list[Reply]]) -> list[Reply]:
    """Return the reference's repair that has the results of the answer; the first if none has."""

    def is_same(right: list[Reply]) -> bool:
        pairs = zip(answers, right, strict=True)
        return all(_fits(a.value["results"], r.value["results"]) for a, r in pairs)

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
    both = list(zip(answer.value["results"], right["results"], strict=True))
    wrong_form = "Your repaired program returns another kind of result. Keep its return line"
    is_form = all(isinstance(got, dict) and set(got) == set(results) for got, results in both)
    yield facts({wrong_form: not is_form})
    needed = needs(answer)
    rate = needed["rate"]
    old_rate = right["rate"]
    yield facts({
        f"Your repaired program has the learning rate {rate:g} instead of {old_rate:g}. Keep the "
        "old one, and repair the gradients": min(rate, old_rate) > 0
        and not math.isclose(rate, old_rate)
    })
    yield facts({
        HASTY: needed["hasty"] > 0,
        RACES: needed["races"] > 0,
        BACKGROUND: needed["unwaited"] > 0,
    })
    for got, results in both:
        for key, expected in results.items():
            yield value(got[key], expected, what=f"it ends, but '{key}' is wrong", tolerance=NEAR)
    for key, bound in most.items():
        more = MORE_CALLS if key == "calls" else (SLACK.get(key, OTHER_SLACK) - 1) * bound
        yield facts({_too_much(key, needed[key], bound): needed[key] > bound + more})


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
        "kept": "bytes that its names refer to",
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
