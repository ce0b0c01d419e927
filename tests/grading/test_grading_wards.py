"""A friend's name in lab 18 is seen, and nobody's own name is held against its author."""

from __future__ import annotations

import pytest

from utils.course.notebook import SOLUTIONS
from utils.grading.pages import summary
from utils.grading.reference import Reference
from utils.grading.results import Result, TaskResult
from utils.grading.wards import agree, ward_remarks

pytestmark = pytest.mark.quick

LAB = "18_the_clinic"


@pytest.fixture(scope="module")
def clinic() -> Reference:
    return Reference(SOLUTIONS / f"{LAB}.ipynb")


def admitted(student: str, code: str, status: str = "passed") -> Result:
    task = TaskResult("18.6", "your name on the ward", 1, 1.0, status, code=code)
    return Result(student, LAB, "key", "a.ipynb", tasks=[task])


@pytest.mark.parametrize(
    ("student", "name"),
    [
        ("Ada Lovelace", "ada lovelace"),
        ("Ada Lovelace", "LOVELACE, Ada"),
        ("Ada King Lovelace", "Ada Lovelace"),
        ("Ada Lovelace", "A. Lovelace"),
        ("lovelaceada", "Ada Lovelace"),
        ("Ada Lovelace (2)", "Ada Lovelace 1234567"),
        ("Ada Lovelace", "1234567"),
        ("s1234567", "1234567"),
        ("José Núñez", "Jose Nunez"),
        ("Jörg Müßig", "Joerg Muessig"),
        ("Søren Ærø", "Soren Aerø"),
        ("Łukasz Đoković", "Lukasz Dokovic"),
        ("王 小明", "小明王"),
    ],
)
def test_a_students_own_name_is_never_remarked_on(clinic, student, name):
    assert agree(student, name)
    assert ward_remarks([admitted(student, f"my_name = {name!r}")], [clinic]) == {}


@pytest.mark.parametrize("name", ["Bob Dylan", "Ada Byron", "Bob"])
def test_somebody_elses_name_is_remarked_on(clinic, name):
    found = ward_remarks([admitted("Ada Lovelace", f"my_name = {name!r}")], [clinic])
    assert found == {
        "Ada Lovelace": [f"{LAB}, task 18.6: the name is {name!r}, not the student's."]
    }


def test_two_students_with_one_ward_are_both_named(clinic):
    results = [
        admitted("Ada Lovelace", 'my_name = "Ada Lovelace"'),
        admitted("Bob", 'my_name = "ada  lovelace"'),
        admitted("Cleo", "my_name = 77"),
        admitted("Dora", "my_name: int = 77"),
        admitted("Emil", 'my_name = "Emil"'),
    ]
    found = ward_remarks(results, [clinic])
    assert "Bob wrote the same name 'ada lovelace'" in found["Ada Lovelace"][0]
    assert "not the student's" in found["Bob"][0]
    assert "Ada Lovelace wrote the same name" in found["Bob"][1]
    assert "Dora wrote" in found["Cleo"][0]
    assert "Emil" not in found
    page = summary(results, [clinic], found, {})
    assert "Bob wrote the same name" in page[page.index('id="remarks"') :]


def test_a_name_that_is_computed_is_remarked_on_and_an_empty_cell_is_not(clinic):
    results = [admitted("Ada", 'my_name = "B" + "ob"'), admitted("Bob", "# later", "unchanged")]
    assert list(ward_remarks(results, [clinic])) == ["Ada"]
