"""The thirty patients of lab 18: each one is sick, its repairs help, and its evidence is its own.

They run on ranks that are threads of this process, as the answers of the other labs do.
"""

from __future__ import annotations

import difflib
import inspect
import itertools
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace

import matplotlib.pyplot as plt
import pytest
from lab_tools import run_cell
from local_ranks import LocalRanks

from utils import cluster
from utils.checks import score
from utils.checks.task import Report
from utils.labs.lab18 import ward_checks
from utils.labs.lab18.ward import assignment, evidence, pages, parts, program, view
from utils.labs.lab18.ward.case import DRAWN, Case, repair_of
from utils.labs.lab18.ward.cases import CASES
from utils.labs.lab18.ward.kinds import KINDS
from utils.labs.lab18.ward.tries import Tries

each_patient = pytest.mark.parametrize("name", sorted(CASES))
STUDENTS = ["Ada Lovelace", "Grace Hopper", "Alan Turing", "4711", 4712]
#: Bytes of all evidence together, because it is in every copy of the course.
MOST_BYTES = 400_000


@pytest.fixture(scope="module")
def ranks() -> Iterator[LocalRanks]:
    with LocalRanks(4) as ranks:
        ranks.run("import torch.distributed as dist\ndist.init_process_group('mpi')")
        yield ranks


def problems(ranks: LocalRanks | cluster.Ranks, name: str, repair: dict, seed: int) -> str:
    """What the check says of a repair; "" if it passes."""
    report = Report(seed)
    run_cell(ranks, f"repair_1 = {repair!r}")
    ward_checks.judge_case(ranks, report, CASES[name], "repair_1")
    return "\n".join(problem.text for problem in report.problems)


def repaired() -> list:
    """Patients and seeds, for pytest: `make test` tries each fourth patient, with one seed."""
    names = sorted(CASES)
    first = [
        pytest.param(name, 4, marks=pytest.mark.rest if k % 15 else ())
        for k, name in enumerate(names)
    ]
    others = itertools.product(names, (5, 66, 777))
    return [*first, *(pytest.param(*one, marks=pytest.mark.extended) for one in others)]


@pytest.mark.parametrize(("name", "seed"), repaired())
def test_a_sick_program_does_not_pass_and_each_repaired_one_does(ranks, name, seed, monkeypatch):
    first = CASES[name].text.splitlines()[0]
    # With one seed in about ten, all ranks of `cedar` leave the loop in the same step.
    assert problems(ranks, name, {1: first}, seed), "nothing is wrong with the program"
    monkeypatch.setattr(ward_checks, "RUNS", 1)
    for repair in CASES[name].repairs:
        assert not problems(ranks, name, dict(repair), seed)


@pytest.fixture(scope="module")
def real() -> Iterator[cluster.Ranks]:
    """Ranks that are processes. They stay the same from one patient to the next."""
    with cluster.start(4, timeout=3) as ranks:
        run_cell(ranks, "import torch.distributed as dist\ndist.init_process_group('mpi')")
        yield ranks


@pytest.mark.extended
@each_patient
def test_a_sick_program_leaves_real_ranks_usable(real, name):
    assert problems(real, name, {1: '"""Sick."""'}, 11)
    assert not problems(real, name, dict(CASES[name].repairs[0]), 12)


@pytest.mark.quick
def test_a_ward_is_the_same_for_each_spelling_and_has_patients_of_each_group():
    assert len(CASES) == 30
    wards = [assignment.patients_of(name) for name in STUDENTS]
    for ward in wards:
        assert len(set(ward)) == assignment.BEDS == 12
        assert Counter(CASES[name].group for name in ward) == DRAWN
    assert len({tuple(ward) for ward in wards}) == len(STUDENTS)
    assert assignment.patients_of("  ada  LOVELACE ") == wards[0]
    assert assignment.patients_of(4711) == wards[3], "a number is the same as its digits"


@pytest.mark.quick
@each_patient
def test_a_student_sees_evidence_of_this_very_program(name):
    found = evidence.evidence(name)  # raises if the program has another text
    case = CASES[name]
    assert set(found) == {"digest", *case.instruments}
    for instrument in case.instruments:
        title, draw = pages.INSTRUMENTS[instrument]
        assert draw(found[instrument], title) is not None
    plt.close("all")
    lines = case.text.splitlines()
    assert evidence.waiting_lines(name) <= set(range(1, len(lines) + 1))


@pytest.mark.quick
@each_patient
def test_a_right_finding_passes_whichever_of_the_right_ones_it_is(name):
    case = CASES[name]
    lines = case.text.splitlines()
    assert set(case.kinds) <= set(KINDS)
    for rank in case.ranks:
        for line in case.lines:
            assert lines[line - 1].strip()
            for kind in case.kinds:
                finding = {"rank": rank, "line": line, "kind": kind}
                assert not list(ward_checks.form_problems(case, finding))
                assert ward_checks.parts_right(case, finding) == 3


def told(case: Case, clock: list[float], **change: object) -> tuple[str, str]:
    """Return the note and the problem about a finding, at this time of the clock."""
    report = Report()
    finding = case.finding | change
    ward_checks.judge_try(report, case, "Ada", 1, finding)
    return report.note, "".join(problem.text for problem in report.problems)


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """A clock that a test sets, and no tries so far."""
    now = [0.0]
    monkeypatch.setattr(ward_checks, "TRIES", Tries(lambda: now[0]))
    return now


@pytest.mark.quick
@each_patient
def test_a_message_on_a_wrong_finding_does_not_tell_which_part_is_wrong(name, clock):
    case = CASES[name]
    rank = next((rank for rank in (0, 1, 2, 3) if rank not in case.ranks), None)
    kind = next(kind for kind in KINDS if kind not in case.kinds)
    changes = [{"line": 1}, {"kind": kind}, *([{"rank": rank}] if rank is not None else [])]
    words = {told(case, clock, **change)[1] for change in changes}
    assert len(words) == 1
    assert "Two of rank, line and kind are right" in words.pop()
    assert told(case, clock) == (f"try {len(changes) + 1}", "")


@pytest.mark.quick
def test_from_the_fourth_wrong_finding_on_a_bed_has_pauses(clock):
    case = CASES["oak"]
    for line in (1, 3, 4, 5):
        assert "right" in told(case, clock, line=line)[1]
    assert "judges another finding in 30 s" in told(case, clock)[1]
    assert told(case, clock, line=5)[0] == "try 4", "the same finding again is no try"
    clock[0] += 29.5
    assert "in 1 s" in told(case, clock)[1]
    clock[0] += 1
    assert told(case, clock, line=7)[0] == "try 5"
    assert "in 60 s" in told(case, clock)[1]
    clock[0] += 61
    assert told(case, clock) == ("try 6", "")
    assert ward_checks.TRIES.of("Ada", 1).found_at == 6
    assert ward_checks.TRIES.of("Ada", 2).tries == 0
    assert told(case, clock, line=8)[0] == "try 6", "what was found stays found"


@pytest.mark.quick
def test_another_name_begins_without_the_points_of_the_first_ones_patients(clock, monkeypatch):
    monkeypatch.setattr(score, "_passed", {"a": {"18.5", "18.7", "18.30"}})
    monkeypatch.setattr(score, "room_of", lambda module: "a")
    monkeypatch.setattr(ward_checks.Ward, "greet", lambda ward: None)
    for name, left in (("Ada", 3), ("Ada", 3), ("Bob", 1)):
        reply = SimpleNamespace(status="ok", value=name)
        ward_checks.admit(SimpleNamespace(ask=lambda probe, reply=reply: [reply]))
        assert len(score.passed("a")) == left


@pytest.mark.quick
def test_a_loop_over_all_findings_takes_hours(clock):
    for case in CASES.values():
        begin, guesses = clock[0], 0
        for line in range(1, case.lines[0]):
            if not case.text.splitlines()[line - 1].strip():
                continue
            finding = {"rank": case.ranks[0], "line": line, "kind": case.kinds[0]}
            clock[0] += ward_checks.TRIES.pause("Loop", case.name, finding)
            ward_checks.TRIES.note("Loop", case.name, finding, is_right=line in case.lines)
            guesses += 1
        assert clock[0] - begin > 60 * guesses or guesses < 20


@pytest.mark.quick
@each_patient
def test_a_program_is_long_and_gives_nothing_away(name):
    case = CASES[name]
    lines = case.text.splitlines()
    assert 100 <= len(lines) <= 200
    assert max(map(len, lines)) <= 100
    assert "#" not in case.text, "a comment would have to say what is wrong, or lie"
    told = f"{case.text} {case.complaint}".lower()
    assert not [kind for kind in case.kinds if kind in told]
    for repair in case.repairs:
        compile(program.repaired(case.text, repair), name, "exec")


@pytest.mark.quick
def test_two_programs_differ_in_more_than_what_is_wrong():
    for one, other in itertools.combinations(CASES.values(), 2):
        pair = [[line for line in case.text.splitlines() if line] for case in (one, other)]
        same = difflib.SequenceMatcher(None, *pair, autojunk=False).ratio()
        assert same < 0.6, (one.name, other.name, same)


@pytest.mark.quick
def test_each_form_of_a_part_is_in_a_program():
    everything = "\n".join(case.text for case in CASES.values())
    for name, part in parts.parts().items():
        assert not [form for form, text in part.forms.items() if text not in everything], name


@pytest.mark.quick
@pytest.mark.parametrize(
    ("diff", "repair"),
    [
        (["  a", "- b", "  c"], {11: ""}),
        (["  a", "- b", "+ x", "+ y", "  c"], {11: "x\ny"}),
        (["- a", "- b", "+ x"], {10: "x", 11: ""}),
        (["  a", "+ x", "  b", "- c", "+ y"], {10: "a\nx", 12: "y"}),
        (["- a", "+ x", "  b", "+ y"], {10: "x", 11: "b\ny"}),
    ],
)
def test_a_repair_is_read_from_a_diff(diff, repair):
    assert repair_of(diff, first=10) == repair


@pytest.mark.quick
def test_the_evidence_is_small_enough_for_every_copy_of_the_course():
    files = list(evidence.FOLDER.glob("*.json"))
    assert {path.stem for path in files} == set(CASES)
    assert sum(path.stat().st_size for path in files) < MOST_BYTES


@pytest.mark.quick
def test_a_bed_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="There is no bed 13"):
        view.Ward("Ada").case(13)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("repair", "words"),
    [
        ({}, "A repair is a dict"),
        ({99: ""}, "Line 99 is not in the program"),
        ({True: ""}, "has the key True"),
        ({1: 2}, "Write it as a string"),
        ({line: "pass" for line in range(1, 20)}, "changes a lot"),
    ],
)
def test_a_repair_in_another_form_is_refused_in_words(repair, words):
    with pytest.raises(program.RepairError, match=words):
        program.repaired("\n" * 30, repair)


@pytest.mark.quick
def test_a_line_can_be_deleted_replaced_and_followed_by_others():
    text = "a\nb\n\nc\n"
    assert program.repaired(text, {1: "", 2: "x\ny"}) == "x\ny\n\nc\n"


@pytest.mark.quick
def test_the_checks_of_all_beds_have_names():
    for bed in range(1, assignment.BEDS + 1):
        for kind, number in (("finding", 5 + 2 * bed), ("repair", 6 + 2 * bed)):
            assert getattr(ward_checks, f"{kind}_{bed}").number == f"18.{number}"
    assert inspect.getdoc(ward_checks.admission)
