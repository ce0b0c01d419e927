"""Answers that students really give: wrong ones are told their mistake, right ones pass.

All of them run on ranks that are threads of this process. After one that left something behind (an
error, a deadlock, messages, names) the solution must pass again; the right answers of a lab come
after all of its wrong ones, on the same ranks. Checks draw from a seed, so that a test has one
result; ``recorded_verdicts.py --seeds 200`` finds words that depend on the draw.
``ANSWERS_TABLE=table.md`` writes how many there are of each task, what became of them, and the
message that each wrong answer gets.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from answer_tools import (
    LABS,
    Lab,
    ranks_of,
    right_answers,
    seeded,
    solutions_of,
    tasks_of_ranks_here,
    wrong_answers,
)
from ipyparallel.error import RemoteError
from lab_tools import LONG, answers, verdict
from local_ranks import LocalRanks
from tabulate import tabulate

from utils.checks import comparison
from utils.checks.comparison import TOLERANCE, same

#: Of each task. Points for a task that has fewer would be given for too little.
FEWEST_WRONG, FEWEST_RIGHT = 8, 3

#: Tasks whose answers give no floating-point numbers, or leave them where no wrapper finds them.
WITHOUT_NUMBERS = {
    *("0.1", "1.1", "3.6", "4.4", "4.7", "5.6", "7.4", "7.7", "9.3", "9.4", "9.8", "10.7"),
    *("11.4", "11.5", "12.1", "13.3", "15.8", "17.7"),
    *(f"18.{number}" for number in range(6, 31)),  # the ward's answers are dicts
}
#: Makes nan of what a function returns, or, where that is nothing, of what it has filled.
NAN = """
import torch

def spoilt(function):
    def call(*args, **kwargs):
        result = function(*args, **kwargs)
        filled = [x for x in args if isinstance(x, torch.Tensor) and not x.requires_grad]
        filled += [p.grad for x in args if isinstance(x, torch.nn.Module) for p in x.parameters()]
        for x in filled if result is None else ():
            if x is not None and x.dtype.is_floating_point:
                x.fill_(float("nan"))
        return nan_of(result)
    return call

def nan_of(value):
    if isinstance(value, tuple | list):
        return type(value)(map(nan_of, value))
    if isinstance(value, dict):
        return {key: nan_of(one) for key, one in value.items()}
    if isinstance(value, torch.Tensor) and not value.dtype.is_floating_point:
        return value
    exact = value is None or isinstance(value, bool | str)
    return value if exact or not hasattr(value, "__mul__") else value * float("nan")
"""

#: Texts of mistakes that are computed from a result: a right one gives the right value.
OF_THE_RESULT = {
    "Every gradient is N times what it should be. Check the divisor",
    "You moved by a share of N.N of the distance. Use α = ηρ, here N.N",
}

# Of each task: wrong ones that were named, and accepted; right ones that passed.
counted: dict[str, list[int]] = {}
# Of each task: what the student did, and the first problem that the check names.
messages: dict[str, dict[str, str]] = {}


@pytest.fixture(scope="module")
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """The lab of this name, with its solutions; one at a time, as tests of a lab come together."""
    with LocalRanks(ranks_of(request.param)) as ranks:
        yield Lab(request.param, ranks)


@pytest.fixture(autouse=True)
def same_draws(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let checks draw the same numbers in every run; ``ANSWERS_SEED=2`` draws others."""
    with seeded(f"{os.environ.get('ANSWERS_SEED', '1')} {request.node.name}"):
        yield


@pytest.fixture(scope="module", autouse=True)
def table() -> Iterator[None]:
    """Write what became of the answers, and all messages, into the file that the variable names."""
    yield
    if path := os.environ.get("ANSWERS_TABLE"):
        rows = [[task, *counts, example(task)] for task, counts in sorted(counted.items())]
        heads = ["task", "wrong", "accepted", "told their mistake", "right", "pass", "a message"]
        with Path(path).open(
            "a", encoding="utf-8"
        ) as file:  # one table for each process of pytest-xdist
            file.write(tabulate(rows, heads, "github") + "\n\n")
            for task, said in sorted(messages.items()):
                lines = [f"- **{about}:** {message}" for about, message in said.items()]
                file.write("\n".join([f"## Messages of task {task}", "", *lines]) + "\n\n")


def example(task: str) -> str:
    """Return the message of the first wrong answer to a task; "" if none was tried."""
    return next(iter(messages.get(task, {}).values()), "")


def first_problem(printed: str) -> str:
    """Return the first problem of a printed verdict, on one line and for a table of Markdown."""
    lines = printed.splitlines()
    first = next((k for k, line in enumerate(lines) if line.startswith("  - ")), 0)
    more = next((k for k in range(first + 1, len(lines)) if lines[k].startswith("  - ")), None)
    return " ".join(" ".join(lines[first:more]).removeprefix("  - ").split()).replace("|", r"\|")


#: `make test` tries one of so many answers of a kind to a task, and always the first. `make
#: test-room` of the lab tries all, and so does `make test-all`.
EVERY = {"wrong": 8, "right": 4}


def cases(kind: str) -> list:
    """All answers of a kind, for pytest; `make check` runs the first wrong one of each task."""
    found = []
    quick = set()
    seen: Counter[str] = Counter()
    for name, tables in LABS.items():
        of_kind = wrong_answers if kind == "wrong" else right_answers
        of_lab = of_kind(tables, solutions_of(name))
        for task, what, *rest in of_lab:
            if (kind == "right" and task in real(tables)) or what in only_on_ranks(tables):
                continue
            first = kind == "wrong" and task not in quick
            marks = [pytest.mark.quick] if first else []
            if seen[task] % EVERY[kind]:
                marks = [pytest.mark.rest]
            quick.add(task)
            seen[task] += 1
            answer = f"{task}-{what.replace(' ', '-')}"
            found.append(pytest.param(name, task, *rest, id=answer, marks=marks))
    return found


def real(tables: ModuleType) -> set[str]:
    """Tasks of which a right answer needs real ranks: see ``test_answers_on_ranks.py``."""
    return getattr(tables, "REAL", set())


def only_on_ranks(tables: ModuleType) -> set[str]:
    """Names of wrong answers that ranks in one process can't tell from right ones."""
    return getattr(tables, "ONLY_ON_RANKS", set())


def each(names: str, values: list) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(names, values, indirect=["lab"], scope="module")


def count(task: str, *columns: int) -> None:
    counts = counted.setdefault(task, [0] * 5)
    for column in columns:
        counts[column] += 1


@pytest.mark.quick
@each("lab", [pytest.param(name, id=name) for name in LABS])
def test_every_task_of_the_notebook_has_a_check_a_cell_and_enough_answers(lab):
    tables = lab.tables
    assert sorted(lab.checks) == sorted(tables.CELLS)
    assert set(tables.CELLS.values()) == set(answers(tables.NOTEBOOK))
    wrong = [task for task, *_ in wrong_answers(tables, lab.solutions)]
    right = [task for task, *_ in right_answers(tables, lab.solutions)]
    few = [t for t in tables.CELLS if wrong.count(t) < FEWEST_WRONG]
    few += [t for t in tables.CELLS if right.count(t) + 1 < FEWEST_RIGHT]
    assert not few, f"tasks with fewer than {FEWEST_WRONG} wrong or {FEWEST_RIGHT} right answers"


@pytest.fixture
def mistakes(monkeypatch: pytest.MonkeyPatch) -> tuple[set[str], set[str]]:
    """Texts of all mistakes that a check knows, and of those with another value than a right one.

    A text that a check computes from a result has no value.
    """
    recognise = comparison.recognise
    known: set[str] = set()
    shown: set[str] = set()

    def watching(result, expected, mistakes=(), *, form="", tolerance=TOLERANCE):
        mistakes = list(mistakes)
        for mistake in mistakes:
            if callable(mistake.gives):
                continue
            text = re.sub(r"\d+", "N", mistake.said)  # such as the number of ranks in a group
            known.add(text)
            if not same(mistake.gives, expected, tolerance):
                shown.add(text)
        return recognise(result, expected, mistakes, form=form, tolerance=tolerance)

    monkeypatch.setattr(comparison, "recognise", watching)
    return known, shown


# `make check` runs it, and `make test` meets the solutions in the notebooks.
@pytest.mark.rest
@pytest.mark.quick
@each("lab, task", tasks_of_ranks_here())
def test_the_solution_passes_and_each_known_mistake_has_another_value(lab, task, mistakes):
    """If a mistake gives the expected value for all numbers that a check draws, it passes."""
    passed, printed = verdict(lab.checks[task], lab.ranks)
    known, shown = mistakes
    assert passed, printed
    assert known - shown <= OF_THE_RESULT
    check = lab.checks[task]
    points = f"{check.points} point{'s' * (check.points != 1)}"
    assert printed == f"✓ Task {task} · {check.title} · {points}\n"
    count(task, 3, 4)


def stubs() -> list:
    """All tasks, for pytest; those whose stubs nbval meets in `make test` are of the rest."""
    return [
        pytest.param(
            name, task, id=task, marks=() if tables.NOTEBOOK[:-6] in LONG else pytest.mark.rest
        )
        for name, tables in LABS.items()
        for task in tables.CELLS
    ]


@each("lab, task", stubs())
def test_an_answer_that_was_not_begun_is_still_open(lab, task):
    stub = lab.stub(task)
    if not lab.is_function(task):
        with pytest.raises(RemoteError, match=f"NotImplementedError: Task {task}: "):
            lab.run(stub)
        lab.solve(task)
        return
    passed, printed = lab.try_out(task, stub, again=False if task in real(lab.tables) else None)
    assert not passed
    assert printed == f"✗ Task {task} · {lab.checks[task].title} · still open\n"


@each("lab, task, code, words", cases("wrong"))
def test_a_wrong_answer_is_told_its_mistake(lab, task, code, words, request):
    count(task, 0)
    slow = getattr(lab.tables, "SLOW", set()) | real(lab.tables)
    passed, printed = lab.try_out(task, code, again=False if task in slow else None)
    count(task, *([1] if passed else [2] if words in printed else []))
    about = request.node.callspec.id.partition("-")[2].replace("-", " ")
    messages.setdefault(task, {})[about] = first_problem(printed)
    assert not passed, "accepted"
    assert words in printed, printed


@each("lab, task", [one for one in tasks_of_ranks_here() if one.id not in WITHOUT_NUMBERS])
def test_nan_passes_nowhere(lab, task):
    names = re.findall(r"^def (\w+)", lab.solutions[task], re.MULTILINE)
    spoilt = "".join(f"{name} = spoilt({name})\n" for name in names)
    passed, _ = lab.try_out(task, lab.solutions[task] + NAN + spoilt, again=False)
    assert not passed, "refuse NaN; or add the task to WITHOUT_NUMBERS, if its answer has none"


@each("lab, task, code", cases("right"))
def test_another_right_answer_passes(lab, task, code):
    count(task, 3)
    passed, printed = lab.try_out(task, code, again=False)
    count(task, *([4] if passed else []))
    assert passed, printed
