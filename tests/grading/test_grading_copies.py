"""Copies are found although a line was added, split or renamed, and honest answers stay unnamed."""

from __future__ import annotations

import ast
import itertools
import textwrap

import grading_tools as toy
import pytest
from answer_tools import LABS, solutions_of
from test_grading_attacks import lab_06, with_answers

from utils.course.notebook import SOLUTIONS, notebooks
from utils.grading.copies import OWN_CELLS, Alike, code_parts, copies, groups, near
from utils.grading.pages import summary
from utils.grading.reference import Reference, body

pytestmark = pytest.mark.quick

MINE = """def total(tensor, rank):
    count = dist.get_world_size()
    parts = [torch.empty_like(tensor) for _ in range(count)]
    dist.all_gather(parts, tensor)
    total = torch.zeros_like(tensor)
    for part in parts:
        total = total + part
    return total"""
#: What hides a copy from a comparison of whole programs.
EDITS = {
    "other names": MINE.replace("part", "piece").replace("count", "p"),
    "a comment and a docstring": MINE.replace(
        "\n    count", '\n    """Add."""\n    # p\n    count'
    ),
    "one more pass": MINE.replace("for part in parts:\n", "for part in parts:\n        pass\n"),
    "one more line": MINE.replace("    return", "    print(rank)\n    return"),
    "a line split in two": MINE.replace(
        "    parts = [torch.empty_like(tensor) for _ in range(count)]",
        "    numbers = range(count)\n    parts = [torch.empty_like(tensor) for _ in numbers]",
    ),
    "two lines exchanged": MINE.replace("    dist.all_gather(parts, tensor)\n", "").replace(
        "    for part", "    dist.all_gather(parts, tensor)\n    for part"
    ),
    "a type": MINE.replace("rank)", "rank: int) -> torch.Tensor"),
}
OTHER = """def total(tensor, rank):
    result = tensor.clone()
    buffer = torch.empty_like(tensor)
    for shift in range(1, dist.get_world_size()):
        request = dist.isend(tensor, (rank + shift) % dist.get_world_size())
        dist.recv(buffer, (rank - shift) % dist.get_world_size())
        request.wait()
        result += buffer
    return result"""


def a_class(**codes: str) -> list:
    return [with_answers({"1.3": code}, toy.LAB, name) for name, code in codes.items()]


@pytest.mark.parametrize("edit", EDITS)
def test_a_copy_with_an_edit_is_found(reference, edit):
    assert ast.parse(EDITS[edit])
    results = a_class(Ada=MINE, Bob=EDITS[edit], Cleo=OTHER)
    assert groups(results, [reference]) == [Alike(("Ada", "Bob"), ["1.3"])]


def test_the_same_own_cells_are_named(reference):
    results = a_class(Ada=MINE, Bob=OTHER, Cleo="pass")
    results[0].own = f"import math\n\n\n{OTHER}"
    results[2].own = f"x = 1\n{OTHER.replace('buffer', 'room')}"
    assert groups(results, [reference]) == [Alike(("Ada", "Cleo"), [OWN_CELLS])]


def test_short_answers_and_answers_near_the_model_are_not_near_each_other(reference):
    short = "def total(tensor, rank):\n    dist.reduce(tensor, 0)\n    return tensor"
    assert groups(a_class(Ada=short, Bob=short), [reference]) == []
    model = toy.indented(*toy.ANSWERS["swap"][3:])
    more = model.replace("return", "print(rank)\n    return")
    assert groups(a_class(Ada=model, Bob=more, Cleo=model), [reference]) == []
    assert copies(a_class(Ada=model), [reference]) == [], "four lines that many students find"


def test_written_answers_with_one_other_word_are_found(reference):
    text = (
        "Each rank waits in its send until somebody receives, so no rank ever gets to its receive."
    )
    results = a_class(Ada=text, Bob=text.replace("somebody", "anybody"), Cleo=toy.MODEL_TEXT)
    for result in results:
        result.tasks[0].status = "by hand"
    assert groups(results, [reference]) == [Alike(("Ada", "Bob"), ["1.3"])]


def test_a_text_that_is_no_python_is_compared_too(reference):
    broken = f"{MINE}\n    return ("
    results = a_class(Ada=broken, Bob=f"# mine\n{broken}")
    assert [one.students for one in groups(results, [reference])] == [("Ada", "Bob")]


# --- copies of the solution ----------------------------------------------------------------------


def renamed(code: str) -> str:
    """The same program with other names of arguments and variables, without comments."""
    tree = ast.parse(code)
    arguments = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.arg = f"my_{node.arg}"
        elif isinstance(node, ast.Name) and node.id in arguments:
            node.id = f"my_{node.id}"
    return ast.unparse(tree)


@pytest.mark.parametrize("added", ["", "\n    pass\n", "\n    done = True\n"])
def test_a_renamed_copy_of_the_published_solution_is_shown_to_a_person(added):
    all_reduce = lab_06()
    models = {task: body(code) for task, code in solutions_of("lab06").items()}
    copied = {task: renamed(code) + added for task, code in models.items()}
    found = copies([with_answers(copied, all_reduce.lab)], [all_reduce])
    assert [one.students for one in found] == [("Mallory",)]
    assert {"6.1", "6.2", "6.8", "6.9"} <= set(found[0].tasks)
    page = summary([with_answers(copied, all_reduce.lab)], [all_reduce], {}, {"Mallory": "m"})
    assert "6.1, 6.2" in page.partition("Near the published solution")[2]


@pytest.mark.parametrize("name", LABS)
def test_no_right_answer_of_another_form_counts_as_a_copy(name):
    """Neither of the solution nor of another student's answer."""
    path = next(path for path in notebooks(SOLUTIONS) if path.name == LABS[name].NOTEBOOK)
    reference = Reference(path)
    answers = [(task, body(textwrap.dedent(code))) for task, _, code in LABS[name].RIGHT]
    results = [
        with_answers({task: code}, path.stem, f"student {number}")
        for number, (task, code) in enumerate(answers)
    ]
    assert copies(results, [reference]) == []
    assert groups(results, [reference]) == []


def test_a_copied_text_is_shown_to_a_person(reference):
    result = with_answers({"1.A": f"**{toy.MODEL_TEXT.upper()}**"}, toy.LAB)
    result.tasks[0].status = "by hand"
    assert [one.tasks for one in copies([result], [reference])] == [["1.A"]]


def test_a_class_of_three_hundred_is_compared_in_seconds(reference):
    ways = [
        MINE.replace("    return", f"    x = {n}\n    y = x + {n}\n    return") for n in range(20)
    ]
    codes = {f"student {number}": ways[number % 20] for number in range(300)}
    (found,) = groups(a_class(**codes), [reference])
    assert len(found.students) == 300
    pairs = itertools.combinations(map(code_parts, (MINE, OTHER)), 2)
    assert not any(itertools.starmap(near, pairs))
