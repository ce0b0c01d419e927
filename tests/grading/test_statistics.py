"""A class in numbers: what was counted, and that nobody is named."""

from __future__ import annotations

import nbformat
import pytest

from utils.__main__ import main
from utils.figures import alt
from utils.grading import class_pictures as classes
from utils.grading import named_mistakes, statistics
from utils.grading.results import Result, TaskResult, save

LAB = "01_toy"


def wrong(*problems: tuple[str, str], task: str = "1.1", status: str = "wrong") -> TaskResult:
    data = [{"text": text, "kind": kind, "ranks": [0, 1]} for text, kind in problems]
    said = "\n".join([f"✗ Task {task} · swap", *(f"  - {text}" for text, _ in problems)])
    return TaskResult(task, "swap", 2, 0.0, status, said=said, problems=data)


RIGHT = TaskResult("1.1", "swap", 2, 2.0, "passed", said="✓ Task 1.1 · swap · 2 points")
READ = TaskResult("1.A", "explain: why", 2, 1.0, "by hand")
SUM = ("this is the sum over 4 ranks", "mistake")


@pytest.fixture
def folder(tmp_path):
    """Seven students: one right, five wrong, one who could not be graded."""
    answers = {
        "Ada": RIGHT,
        "Bea": wrong(SUM),
        "Cy": wrong(("this is the sum over 3 ranks", "mistake"), ("rank 0 waits", "communication")),
        "Dan": wrong(SUM, SUM),
        "Eve": TaskResult("1.1", "swap", 2, 0.0, "wrong", said="✗ Task 1.1 · swap · still open"),
        "Fay": TaskResult("1.1", "swap", 2, 0.0, "hung", note="no end within 60 s"),
    }
    for name, answer in answers.items():
        result = Result(name, LAB, "key", file="a.ipynb", tasks=[answer, READ])
        save(result, tmp_path / "students" / name / LAB / "result.json")
    spoilt = Result("Gus", LAB, "key", file="a.ipynb", error="killed")
    save(spoilt, tmp_path / "students" / "Gus" / LAB / "result.json")
    return tmp_path


def test_each_mistake_counts_once_for_each_student_whatever_the_numbers_in_it(folder):
    found = statistics.read(folder)
    assert (found.students, found.left_out, found.labs) == (6, 1, [LAB])
    first, *others = found.mistakes(LAB, "1.1", most=9)
    assert (first.students, first.kind) == (3, "mistake")
    assert first.share == 3 / 5
    assert {one.text: one.kind for one in others} == {
        "rank 0 waits": "communication",
        "still open": "open",
        "no end within 60 s": "",
    }
    assert found.mistakes(LAB, "1.1", most=1) == [first]


def test_tasks_and_points_count_all_graded_students(folder):
    found = statistics.read(folder)
    swap, why = found.tasks(LAB)
    assert swap.states == {"good": 1, "bad": 4, "stuck": 1}
    assert (why.states, why.answers) == ({"hand": 6}, 6)
    assert found.shares(LAB) == [0.25] * 5 + [0.75]


def test_results_of_an_older_version_of_a_lab_count_in_the_tasks_that_they_have(folder):
    old = Result("Hal", LAB, "key", file="a.ipynb", tasks=[wrong(SUM, task="1.9")])
    save(old, folder / "students" / "Hal" / LAB / "result.json")
    found = statistics.read(folder)
    assert [task.number for task in found.tasks(LAB)] == ["1.1", "1.A", "1.9"]
    assert [one.students for one in found.mistakes(LAB, "1.1", most=1)] == [3]
    assert [one.students for one in found.mistakes(LAB, "1.9")] == [1]


def test_the_pictures_say_what_they_show_and_name_nobody(folder):
    found = statistics.read(folder)
    pictures = [
        classes.points(found),
        classes.tasks(found.tasks(LAB)),
        classes.mistakes(found.mistakes(LAB, "1.1")),
    ]
    said = [alt.describe(one) for one in pictures]
    assert (
        said[0]
        == "01_toy: number of students in each tenth of the points: 0, 0, 5, 0, 0, 0, 0, 1, 0, 0."
    )
    assert "1.1 swap: 1 passed, 4 wrong, 1 hung, or ended the run" in said[1]
    assert "1.1: this is the sum over 4 ranks: 3." in said[2]
    assert not any(name in " ".join(said) for name in ("Ada", "Bea", "Cy", "Dan", "Eve", "Fay"))
    assert classes.mistakes([]) is None


def test_every_state_and_kind_has_its_own_name_and_look():
    from utils.grading.results import KIND_LABELS

    assert set(classes.STATES) == set(KIND_LABELS)
    looks = [(color, hatch) for _, color, hatch in classes.STATES.values()]
    assert len(set(looks)) == len(looks)
    kinds = [(color, hatch) for _, color, hatch in classes.KINDS.values()]
    assert len(set(kinds)) == len(kinds)


def test_the_notebook_is_written_once_and_later_changes_are_kept(folder, monkeypatch):
    assert main(["statistics", str(folder)]) == 0
    path = folder / "statistics.ipynb"
    nb = nbformat.read(path, as_version=4)
    shown = [o for c in nb.cells for o in c.get("outputs", []) if "image/png" in o.get("data", {})]
    assert len(shown) == 3
    assert all(one.metadata["image/png"]["alt"] for one in shown)
    nb.cells[-1].source = "print('my own')"
    nbformat.write(nb, path)
    ran = []
    monkeypatch.setattr(statistics, "run_cells", lambda nb, *_: ran.append(nb.cells[-1].source))
    assert main(["statistics", str(folder)]) == 0
    assert ran == ["print('my own')"]


def test_a_folder_without_results_is_an_error_that_names_the_right_folder(tmp_path, capsys):
    assert main(["statistics", str(tmp_path)]) == 2
    assert "Name the folder that `ddl-labs grade" in capsys.readouterr().err


def test_each_named_mistake_is_listed_with_its_students_and_those_that_nobody_met_too(
    tmp_path, capsys
):
    """Without the list, nobody knows which mistakes of the checks no student makes."""
    lab = "06_allreduce_from_scratch"
    known = named_mistakes.sentences(lab)
    chosen = next(sentence for sentence in known if "…" in sentence.text.strip("…"))
    told = chosen.text.replace("…", "17")
    for name, answer in {"Ada": wrong((told, "mistake")), "Bea": wrong((told, "mistake"))}.items():
        result = Result(name, lab, "key", file="a.ipynb", tasks=[answer])
        save(result, tmp_path / "students" / name / lab / "result.json")
    often, never = named_mistakes.met(statistics.read(tmp_path), lab)
    assert (2, "1.1", chosen) in often
    assert {chosen.place} <= {each.sentence.place for each in often}
    assert len(never) > 50
    assert chosen not in never
    assert main(["statistics", str(tmp_path), "--mistakes"]) == 0
    printed = capsys.readouterr().out
    assert f"{len(often)} named mistakes were met, {len(never)} never" in printed
    assert "Ada" not in printed
