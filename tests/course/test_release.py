"""Student notebooks follow from solutions, exactly."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from utils.__main__ import main
from utils.checks.model import unpack
from utils.course import release, student_bundle
from utils.course.notebook import (
    LABS,
    ROOT,
    SOLUTIONS,
    NotebookError,
    dumps,
    is_solution,
    notebooks,
    read,
)

SOLVED = """\
%%px
def exchange(rank):
    ### BEGIN SOLUTION
    answer = 42
    return answer
    ### END SOLUTION
"""
CHECK = """\
print("visible")
### BEGIN HIDDEN TESTS
assert secret() == 7
### END HIDDEN TESTS
"""


def graded(grade_id: str, **changes) -> dict:
    base = {"schema_version": 3, "grade_id": grade_id, "solution": False, "grade": False}
    return base | {"locked": False, "task": False} | changes


def task_cell(source: str = SOLVED, **changes):
    metadata = {
        "nbgrader": graded("exchange", solution=True),
        "lab": {"task": "1.2", "title": 'blocking "send" and recv', "points": 2},
        "execution": {"iopub.execute_input": "2026-01-01T00:00:00Z"},
        "collapsed": True,
    } | changes
    output = new_output("stream", name="stdout", text="secret output\n")
    cell = new_code_cell(source, id="exchange", metadata=metadata, outputs=[output])
    cell.execution_count = 3
    return cell


def check_cell():
    metadata = {
        "nbgrader": graded("exchange-check", grade=True, locked=True, points=2),
        "lab": {"task": "1.2", "check": True},
        "tags": ["nbval-check-output"],
    }
    return new_code_cell(CHECK, id="exchange-check", metadata=metadata)


def explain_cell():
    metadata = {
        "nbgrader": graded("why", solution=True, grade=True, points=1),
        "lab": {"task": "1.3", "title": "why it hangs", "points": 1},
    }
    return new_markdown_cell("Because nobody sends.", id="why", metadata=metadata)


def solution(*cells):
    metadata = {
        "kernelspec": {"display_name": "my env", "language": "python", "name": "python3"},
        "language_info": {"name": "python", "version": "3.11.7", "pygments_lexer": "ipython3"},
        "widgets": {},
        "lab": {"number": 1},
    }
    intro = new_markdown_cell("# Lab 1", id="intro")
    return new_notebook(cells=[intro, *cells], metadata=metadata)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A solutions folder with one lab, and an empty labs folder."""
    solutions, labs = tmp_path / "solutions", tmp_path / "labs"
    solutions.mkdir()
    labs.mkdir()
    text = dumps(solution(task_cell(), check_cell(), explain_cell()))
    (solutions / "01_toy.ipynb").write_text(text, encoding="utf-8")
    return solutions, labs


@pytest.fixture
def lab(folders) -> nbformat.NotebookNode:
    """The student notebook of that lab."""
    release.release(*folders)
    return read(folders[1] / "01_toy.ipynb")


def cell(nb, cell_id: str):
    return next(cell for cell in nb.cells if cell.id == cell_id)


@pytest.mark.parametrize("name", ["cheat_sheet.md", "glossary.md"])
def test_students_read_the_page_that_the_authors_edit(name):
    assert (LABS / name).read_bytes() == (SOLUTIONS / name).read_bytes()


def test_the_stub_stands_where_the_solution_was(lab):
    assert cell(lab, "exchange").source == (
        "%%px\n"
        "def exchange(rank):\n"
        '    raise NotImplementedError("Task 1.2: blocking \\"send\\" and recv")\n'
    )


def test_the_stub_raises_and_names_the_task(lab):
    body = cell(lab, "exchange").source.removeprefix("%%px\n")
    names: dict = {}
    exec(body, names)
    with pytest.raises(NotImplementedError, match=re.escape('Task 1.2: blocking "send" and recv')):
        names["exchange"](0)


def test_an_authors_prediction_is_not_shown_to_students():
    source = """\
first = predict("Wie lange? µs", -1.5e-3, unit="s")
many = figures.predict(
    "how fast?",
    {"2 ranks": 1.9, "4 ranks": 2 * 1.5},
)
which = predict("which?", "rank 1", choices=["rank 0", "rank 1"])
"""
    cell = new_code_cell(source, id="guess", metadata={"lab": {"predict": True}})
    student = release.student_version(new_notebook(cells=[cell]), "x.ipynb").cells[0].source
    assert (
        student
        == """\
first = predict("Wie lange? µs", ..., unit="s")
many = figures.predict(
    "how fast?",
    {"2 ranks": ..., "4 ranks": ...},
)
which = predict("which?", ..., choices=["rank 0", "rank 1"])
"""
    )


FILLED = """\
five_metrics.fill(
    "ring all-reduce",
    bandwidth=f"{sent / n:.2f} n",
    faults="ein Rang fällt aus: alle warten",
    convergence="exact, "
    "as with one rank",
    elasticity=("none" + "!"), ease=...,
)
"""


def test_an_authors_judgement_is_not_shown_to_students_but_what_they_measured_is():
    cell = new_code_cell(FILLED, id="five", metadata={"lab": {"predict": True}})
    student = release.student_version(new_notebook(cells=[cell]), "x.ipynb").cells[0].source
    assert (
        student
        == """\
five_metrics.fill(
    "ring all-reduce",
    bandwidth=f"{sent / n:.2f} n",
    faults=...,
    convergence=...,
    elasticity=(...), ease=...,
)
"""
    )
    compile(student, "cell", "exec")


def test_a_text_that_says_nothing_measured_is_not_saved_by_the_letter_f():
    cell = new_code_cell(
        'five_metrics.fill("Hogwild", ease=f"secret {1 / 2}", faults="s" + f"{x}")',
        id="five",
        metadata={"lab": {"predict": True}},
    )
    student = release.student_version(new_notebook(cells=[cell]), "x.ipynb").cells[0].source
    assert student == 'five_metrics.fill("Hogwild", ease=..., faults=...)'


@pytest.mark.parametrize(
    ("source", "metadata", "words"),
    [
        ('predict("q", 2)', {}, 'add "lab": {"predict": true}'),
        ("x = 3", {"lab": {"predict": True}}, "without a call of predict"),
        (FILLED, {}, 'shows texts of five_metrics.fill to students: add "lab": {"predict": true}'),
        (
            'five_metrics.fill("Hogwild", **texts)',
            {"lab": {"predict": True}},
            "passes texts to five_metrics.fill by **",
        ),
    ],
)
def test_a_prediction_that_would_slip_through_the_release_is_refused(source, metadata, words):
    cell = new_code_cell(source, id="guess", metadata=metadata)
    with pytest.raises(release.MarkupError, match=re.escape(words)):
        release.student_version(new_notebook(cells=[cell]), "x.ipynb")


def test_a_cell_may_have_several_regions():
    source = "### BEGIN SOLUTION\na = 1\n### END SOLUTION\nkept\n" * 2
    nb = release.student_version(solution(task_cell(source)), "toy")
    lines = cell(nb, "exchange").source.splitlines()
    assert [line[:5] for line in lines] == ["raise", "kept", "raise", "kept"]


def test_hidden_tests_answers_and_outputs_are_gone(lab):
    text = dumps(lab)
    for secret in ("answer = 42", "secret", "nobody sends", "BEGIN", "END"):
        assert secret not in text
    assert cell(lab, "exchange-check").source == 'print("visible")\n'
    assert cell(lab, "why").source == release.TEXT_STUB
    assert all(not cell.outputs and cell.execution_count is None for cell in code_cells(lab))


def code_cells(nb):
    return [cell for cell in nb.cells if cell.cell_type == "code"]


def test_ids_and_metadata_stay_and_volatile_metadata_goes(lab):
    assert [cell.id for cell in lab.cells] == ["intro", "exchange", "exchange-check", "why"]
    before, after = task_cell().metadata, cell(lab, "exchange").metadata
    assert after == {
        "nbgrader": before["nbgrader"],
        "lab": before["lab"],
        "deletable": False,
    }
    assert cell(lab, "exchange-check").metadata["tags"] == ["nbval-check-output"]
    assert cell(lab, "exchange-check").metadata["editable"] is False
    assert lab.metadata == {
        "kernelspec": {
            "display_name": "Python 3 (ipykernel)",
            "language": "python",
            "name": "python3",
        },
        "language_info": {"name": "python"},
        "lab": {"number": 1},
    }


def test_the_bytes_are_the_same_each_time(folders):
    solutions, labs = folders
    target = labs / "01_toy.ipynb"
    models = labs / ".models"
    assert release.release(solutions, labs) == [
        target,
        models / "01_toy",
        models / "minutes_01.json",
    ]
    first = target.read_bytes()
    assert release.release(solutions, labs) == []
    target.unlink()
    release.release(solutions, labs)
    assert target.read_bytes() == first
    assert first.endswith(b"}\n")
    assert not first.endswith(b"\n\n")
    assert b'\n "cells"' in first


def test_the_models_answers_lie_beside_the_labs_and_nobody_reads_one_by_accident(folders):
    solutions, labs = folders
    release.release(solutions, labs)
    text = (labs / ".models" / "01_toy").read_text()
    assert "answer" not in text
    assert unpack(text) == {"1.2": [SOLVED]}
    (labs / ".models" / "01_toy").write_text("another\n")
    assert release.drift(solutions, labs) == [
        ".models/01_toy: differs from its solution: run make release"
    ]


def test_the_bytes_do_not_depend_on_who_ran_the_solution_last(folders):
    solutions, labs = folders
    release.release(solutions, labs)
    nb = solution(task_cell(), check_cell(), explain_cell())
    nb.metadata["language_info"]["version"] = "3.13.1"
    cell(nb, "exchange").metadata["execution"] = {"iopub.status.busy": "another day"}
    cell(nb, "exchange").outputs = []
    (solutions / "01_toy.ipynb").write_text(dumps(nb), encoding="utf-8")
    assert release.drift(solutions, labs) == []


def test_every_changed_byte_is_drift(folders):
    solutions, labs = folders
    release.release(solutions, labs)
    target = labs / "01_toy.ipynb"
    text = target.read_bytes()
    assert release.drift(solutions, labs) == []
    for changed in (text + b"\n", text[:-1], text.replace(b"\n", b"\r\n"), text[:60] + text[61:]):
        target.write_bytes(changed)
        assert release.drift(solutions, labs) == [
            "01_toy.ipynb: differs from its solution: run make release"
        ]
    target.unlink()
    assert release.drift(solutions, labs) == ["01_toy.ipynb: is not released yet: run make release"]


def test_a_lab_without_a_solution_is_drift_and_other_notebooks_are_not(folders):
    solutions, labs = folders
    release.release(solutions, labs)
    shutil.copy(labs / "01_toy.ipynb", labs / "02_old.ipynb")
    shutil.copy(labs / "01_toy.ipynb", labs / "Untitled.ipynb")
    assert release.drift(solutions, labs) == [
        "02_old.ipynb: has no solution: delete it, or add one"
    ]


def test_a_solution_in_error_stops_the_release_before_anything_is_written(folders):
    solutions, labs = folders
    bad = dumps(solution(task_cell("### BEGIN SOLUTION\n1")))
    (solutions / "02_bad.ipynb").write_text(bad, encoding="utf-8")
    with pytest.raises(release.MarkupError):
        release.release(solutions, labs)
    assert list(labs.iterdir()) == []


REGION = "### BEGIN SOLUTION\n1\n### END SOLUTION"
BAD_CELLS = {
    "no end": (task_cell("### BEGIN SOLUTION\n1"), "markers are BEGIN:"),
    "no begin": (task_cell("1\n### END SOLUTION"), "markers are END:"),
    "nested": (
        task_cell("### BEGIN SOLUTION\n### BEGIN SOLUTION\n### END SOLUTION"),
        "regions don't nest",
    ),
    "hidden, no end": (
        task_cell(f"{REGION}\n### BEGIN HIDDEN TESTS"),
        "every '### BEGIN HIDDEN TESTS' needs one '### END HIDDEN TESTS'",
    ),
    "no nbgrader metadata": (
        new_code_cell(REGION, id="exchange"),
        "has a solution region, but isn't a solution cell: add the nbgrader metadata",
    ),
    "no region": (task_cell("pass"), "solution cell without a region"),
    "no title": (task_cell(REGION, lab={"task": "1.2"}), "lab metadata has no title"),
    "no task": (task_cell(REGION, lab={"title": "x"}), "lab metadata has no task"),
    "no grade_id": (
        task_cell(REGION, nbgrader=graded("", solution=True)),
        "nbgrader metadata has no grade_id",
    ),
    "no points": (
        task_cell(REGION, nbgrader=graded("exchange", solution=True, grade=True)),
        "does not have points",
    ),
    "old schema": (
        task_cell(REGION, nbgrader=graded("exchange", solution=True, schema_version=1)),
        "nbgrader refuses its metadata",
    ),
    "hidden tests in the open": (
        new_code_cell("### BEGIN HIDDEN TESTS\n1\n### END HIDDEN TESTS", id="exchange"),
        "has hidden tests, but isn't a grade cell",
    ),
    "check without task": (
        new_code_cell("1", id="exchange", metadata={"lab": {"check": True}}),
        "is a check without a task",
    ),
}


@pytest.mark.parametrize("case", BAD_CELLS)
def test_bad_markup_is_refused_with_notebook_cell_and_cure(case):
    bad, message = BAD_CELLS[case]
    with pytest.raises(release.MarkupError) as caught:
        release.student_version(solution(bad), "01_toy.ipynb")
    text = str(caught.value)
    assert text.startswith("01_toy.ipynb: cell 'exchange': ")
    assert message in text


def test_two_cells_with_one_grade_id_are_refused():
    twin = task_cell()
    twin.id = "twin"
    with pytest.raises(release.MarkupError, match=r"cells 'exchange', 'twin': all have the grade"):
        release.student_version(solution(task_cell(), twin), "01_toy.ipynb")


def test_all_problems_are_told_at_once():
    second = new_code_cell(REGION, id="second")
    with pytest.raises(release.MarkupError) as caught:
        release.student_version(solution(task_cell("pass"), second), "01_toy.ipynb")
    assert len(str(caught.value).splitlines()) == 2


def stored(tmp_path: Path, change) -> Path:
    content = json.loads(dumps(solution(task_cell(), check_cell())))
    change(content)
    path = tmp_path / "01_toy.ipynb"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda nb: nb["cells"][1].pop("id"), "cell number 1 has no id"),
        (lambda nb: nb["cells"][2].update(id="exchange"), "share the id 'exchange'"),
        (lambda nb: nb.update(nbformat_minor=4), r"has the format 4\.4, but only 4\.5 has ids"),
        (lambda nb: nb["cells"][1].pop("outputs"), "is not a valid notebook"),
    ],
)
def test_a_notebook_that_nbformat_would_silently_repair_is_refused(tmp_path, change, message):
    with pytest.raises(NotebookError, match=message):
        read(stored(tmp_path, change))


def test_a_file_that_is_no_notebook_is_refused(tmp_path):
    (tmp_path / "01_toy.ipynb").write_text("<html>")
    with pytest.raises(NotebookError, match=r"01_toy\.ipynb is not a notebook"):
        read(tmp_path / "01_toy.ipynb")


def test_the_command_line(folders, capsys):
    where = ["--solutions", str(folders[0]), "--labs", str(folders[1])]
    assert main(["release", "--check", *where]) == 1
    assert "01_toy.ipynb: is not released yet" in capsys.readouterr().out
    assert main(["release", *where]) == 0
    assert "wrote labs/01_toy.ipynb" in capsys.readouterr().out
    assert main(["release", "--check", *where]) == 0
    (folders[0] / "01_toy.ipynb").write_text(dumps(solution(task_cell("pass"))))
    assert main(["release", *where]) == 2
    assert "cell 'exchange'" in capsys.readouterr().err


# --- this repository's labs --------------------------------------------------------------------


def test_this_repository_has_labs():
    assert notebooks(SOLUTIONS), "solutions/ has no NN_name.ipynb"


@pytest.mark.parametrize("path", notebooks(SOLUTIONS), ids=lambda path: path.name)
def test_the_lab_follows_from_its_solution(path: Path):
    lab = LABS / path.name
    assert lab.exists(), "run 'make release'"
    assert lab.read_bytes() == release.student_text(read(path), path.name).encode(), (
        "run 'make release'"
    )


def test_no_lab_is_without_a_solution():
    assert {path.name for path in notebooks(LABS)} <= {path.name for path in notebooks(SOLUTIONS)}


# --- the bundle for students ---------------------------------------------------------------------


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The course as it is committed here, in a clone of its own."""
    subprocess.run(["git", "clone", "-q", SOLUTIONS.parent, tmp_path / "clone"], check=True)
    return tmp_path / "clone"


def test_the_students_bundle_runs_and_holds_no_solution_and_nothing_uncommitted(clone, tmp_path):
    (clone / "labs" / "my notes.ipynb").write_text("a student's")  # ignored by nobody
    with pytest.raises(NotebookError, match=r"not committed, such as .*my notes"):
        student_bundle.bundle(clone, "1.0", tmp_path / "dist")
    (clone / "labs" / "my notes.ipynb").unlink()
    path = student_bundle.bundle(clone, "1.0", tmp_path / "dist")
    first = path.read_bytes()
    assert student_bundle.bundle(clone, "1.0", tmp_path / "dist").read_bytes() == first

    with zipfile.ZipFile(path) as archive:
        archive.extractall(tmp_path)
    course = tmp_path / "ddl-labs-1.0"
    assert {found.name for found in course.iterdir()} == {
        *("labs", "utils", "docs", ".ci", ".github", ".gitignore"),
        *("LICENSE", "Makefile", "README.md", "AGENTS.md", "environment.yml"),
        *("pyproject.toml", "requirements.txt", "uv.lock"),
    }
    assert not list(links_to_nothing(course))
    assert "authors" not in (course / "README.md").read_text()
    assert len(list(course.glob("labs/*.ipynb"))) == len(notebooks(SOLUTIONS))
    assert not (course / "utils" / "grading").exists()
    assert not (course / "utils" / "course" / "lectures").exists()
    assert (course / "AGENTS.md").read_bytes() == (course / "labs" / "AGENTS.md").read_bytes()
    assert not [found for found in course.rglob("*.ipynb") if "BEGIN SOLUTION" in found.read_text()]
    program = (
        "from utils import cluster, data; from utils.labs import lab01; print(cluster.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=course, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(str(course))
    help = [sys.executable, "-m", "utils", "--help"]
    told = subprocess.run(help, cwd=course, check=True, capture_output=True, text=True)
    commands = set(re.findall(r"^    ([a-z]+)", told.stdout, re.MULTILINE))
    assert {"lab", "doctor", "bench"} <= commands
    assert not commands & {"grade", "rerun", "statistics"}
    subprocess.run(["make", "-n", "lab"], cwd=course, check=True, capture_output=True)
    told = subprocess.run(["make", "help"], cwd=course, check=True, capture_output=True, text=True)
    assert re.findall(r"^  make ([a-z-]+)", told.stdout, re.MULTILINE) == [
        *("help", "env", "lab", "clean")
    ]


@pytest.mark.parametrize(("name", "labs"), [("afternoon", 3), ("assignment", 2), ("debugging", 2)])
def test_a_small_bundle_has_its_labs_and_no_link_to_another_one(clone, tmp_path, name, labs):
    path = student_bundle.bundle(clone, "1.0", tmp_path / "dist", student_bundle.BUNDLES[name])
    assert path.stat().st_size < 5e6
    with zipfile.ZipFile(path) as archive:
        archive.extractall(tmp_path)
    course = tmp_path / f"ddl-labs-{name}-1.0"
    notebooks_there = sorted(course.glob("labs/*.ipynb"))
    assert len(notebooks_there) == labs
    assert len(list(course.glob("utils/labs/lab*"))) == labs
    assert not list(links_to_nothing(course))
    linked = {
        target
        for lab in notebooks_there
        for target in re.findall(r"\]\((\d\d_\w+\.ipynb)", lab.read_text())
    }
    assert linked <= {lab.name for lab in notebooks_there}
    program = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
    names = [f"utils.labs.lab{lab.name[:2]}" for lab in notebooks_there]
    subprocess.run([sys.executable, "-c", program, *names], cwd=course, check=True)


def test_students_can_clone_a_repository_whose_history_has_no_solution(clone, tmp_path):
    target = tmp_path / "for students"
    selection = student_bundle.Selection(models=False)
    assert student_bundle.repository(clone, "1.0", target, selection).endswith("Labs, version 1.0")
    again = student_bundle.repository(clone, "1.0", target, selection)
    assert again == "nothing has changed since the last commit"

    (clone / "labs" / "AGENTS.md").write_text("Be kind.\n")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", clone]
    subprocess.run([*git, "commit", "-qam", "rules"], check=True)
    student_bundle.repository(clone, "1.1", target, selection)

    subprocess.run(["git", "clone", "-q", target, tmp_path / "student"], check=True)
    log = ["git", "-C", tmp_path / "student", "log", "-p", "--format=%s"]
    labs = [*log, "--", "*.ipynb"]
    history = subprocess.run(labs, check=True, capture_output=True, text=True).stdout
    assert "NotImplementedError" in history
    assert "BEGIN SOLUTION" not in history
    files = subprocess.run([*log, "--name-only"], check=True, capture_output=True, text=True).stdout
    assert "Labs, version 1.1" in files
    assert not re.search(r"^(solutions|tests|utils/grading)/", files, re.MULTILINE)
    assert set(re.findall(r"^labs/\.models/(.*)$", files, re.MULTILINE)) == {
        f"minutes_{path.name[:2]}.json" for path in notebooks(SOLUTIONS)
    }


def test_a_folder_with_files_is_not_made_into_a_repository(clone, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("Years of work.")
    with pytest.raises(NotebookError, match="isn't empty"):
        student_bundle.repository(clone, "1.0", tmp_path / "mine", student_bundle.Selection())


def test_rules_for_assistants_hold_no_answer_and_name_every_step_of_the_ladder():
    texts = {path: path.read_text() for path in (LABS / "AGENTS.md", ROOT / "docs/assistants.md")}
    for path in notebooks(SOLUTIONS):
        for cell in filter(is_solution, read(path).cells):
            lines = {line.strip() for line in cell.source.splitlines() if len(line.strip()) > 20}
            assert not [line for line in lines for text in texts.values() if line in text]
    rules = texts[LABS / "AGENTS.md"]
    assert [f"hint {k}" in rules for k in (1, 2, 3)] == [True] * 3
    assert rules.count('\n| "') == 10, "ten requests, each with a reaction"


def links_to_nothing(course: Path):
    """Links and pictures of the bundle's pages to files that it does not have."""
    for page in (course / "README.md", *course.glob("docs/*.md"), *course.glob("labs/*.md")):
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            if "://" not in target and not (page.parent / target).exists():
                yield f"{page.relative_to(course)}: {target}"


def test_a_bundle_of_what_is_no_clone_says_so(tmp_path):
    with pytest.raises(NotebookError, match="in a git clone"):
        student_bundle.bundle(tmp_path, "1.0", tmp_path / "dist")
