"""Grading runs each cell that an answer needs, and no other example."""

from __future__ import annotations

import pytest
from nbformat.v4 import new_code_cell

from utils.course.cell_names import names_of, not_needed


@pytest.mark.parametrize(
    ("source", "needed", "later", "bound"),
    [
        ("%%px\nx = y + 1", "y", "", "x"),
        ("x = x + 1", "x", "", "x"),
        ("x += 1", "x", "", "x"),
        ("y = 2\nx = y", "", "", "x y"),
        ("for i in items:\n    use(i)", "items use", "", "i"),
        ("def f(a):\n    return a + b", "", "b", "f"),
        ("def f():\n    return g()\ndef g(): ...", "", "", "f g"),
        ("class A(B):\n    def f(self):\n        return c", "B", "c", "A"),
        ("import a.b\nfrom c import d as e", "", "", "a e"),
        ("with open(p) as file:\n    file.read()", "open p", "", "file"),
        ("[k for k in keys]", "keys", "", ""),
        ("!ls\n%time x = 1\ny = z", "z", "", "y"),
        ("%%writefile a.py\nx = y", "", "", ""),
    ],
)
def test_the_names_of_a_cell_are_found(source, needed, later, bound):
    found = names_of(source)
    assert found.needed == set(needed.split())
    assert found.later == set(later.split())
    assert found.bound == set(bound.split())


@pytest.mark.parametrize(
    "source",
    [
        *("x = (", "def f(x, x): ...", "x = 1\nglobal x", "nonlocal x", "[x := 1 for x in y]"),
        *("x = " + " + ".join("x" * 5_000), "x = " + "-" * 100_000 + "x", "x = '\0'"),
    ],
    ids=lambda source: source[:20],
)
def test_a_mistake_in_a_cell_costs_only_this_cell_and_its_words_may_be_needed(source):
    found = names_of(source)
    assert "x" in found.needed | found.bound


def left_out(*sources: str, names: str = "") -> str:
    """The numbers of the cells that are left out if the last cell is kept."""
    cells = [new_code_cell(source, id=str(k)) for k, source in enumerate(sources)]
    return "".join(sorted(not_needed(cells, {cells[-1].id}, set(names.split()))))


def test_only_what_an_answer_needs_directly_or_not_is_run():
    assert left_out("a = 1", "b = a", "c = 2", "print(c)", "use(b)") == "23"


def test_a_name_that_a_probe_looks_up_is_there():
    assert left_out("a = 1", "b = 2", "use()", names="b") == "0"


def test_what_a_function_calls_may_be_defined_below_it():
    assert left_out("def f():\n    return g()", "def g(): ...", "h = 1", "f()") == "2"


def test_the_latest_and_each_earlier_value_of_a_name_is_computed():
    assert left_out("x = 1", "y = 2", "x = x + 1", "use(x)") == "1"


def test_a_cell_that_would_take_minutes_to_analyze_is_taken_as_words():
    assert names_of("%%px\n" + "a\n" * 50_000) == (frozenset({"px", "a"}), frozenset(), frozenset())
