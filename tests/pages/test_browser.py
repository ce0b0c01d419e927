"""JupyterLab in a real browser, served by `make lab`: how it opens, and a student in lab 01."""

from __future__ import annotations

import functools
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browser_tools import (
    CHROMIUM,
    CHROMIUM_ARGS,
    ERROR,
    NOTEBOOK,
    PAGE,
    Lab,
    photograph,
    wait_for,
    without_outputs,
)
from lab_server import GRACE, Server, lab_server
from places import ROOT
from playwright.sync_api import Browser, sync_playwright
from processes import left_over

from utils.course.notebook import LABS, SOLUTIONS, read, tasks_checked, write

LAB, FIRST_LAB = "01_c10d.ipynb", "00_start_here.ipynb"

pytestmark = [
    pytest.mark.bare,
    pytest.mark.timeout(PAGE + NOTEBOOK + 60),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium"),
]


# --- the server ----------------------------------------------------------------------------------


def require_environment() -> None:
    """Skip where `make lab` would first build or repair .venv, for minutes."""
    stamp = ROOT / ".venv" / ".env"
    sources = [ROOT / "pyproject.toml", ROOT / ".ci" / "constraints.txt"]
    if Path(sys.prefix) != ROOT / ".venv" or not stamp.exists():
        pytest.skip("these tests run in the environment that `make env` builds")
    if stamp.stat().st_mtime < max(source.stat().st_mtime for source in sources):
        pytest.skip("`make lab` would first bring .venv up to date: run `make env`")
    if shutil.which("make") is None:
        pytest.skip("no make")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`make lab` on a folder of labs, with fresh copies of one, "student" and "solution"."""
    require_environment()
    home = tmp_path_factory.mktemp("home")
    folder = home / "course"
    folder.mkdir()
    for source in LABS.glob("[01]*.ipynb"):
        shutil.copy(source, folder)
    for name, source in {"student": LABS, "solution": SOLUTIONS}.items():
        (folder / name).mkdir(parents=True)
        write(without_outputs(read(source / LAB)), folder / name / LAB)
    with lab_server(home, folder) as running:
        yield running


# --- the page ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(server: Server) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_ARGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def open_lab(browser: Browser, server: Server, tmp_path_factory) -> Iterator[Callable[[str], Lab]]:
    """`open_lab("student/01_c10d.ipynb")`: a page; that before it is closed, its kernel ends."""
    pictures = tmp_path_factory.mktemp("pictures")

    def open_path(path: str) -> Lab:
        leave()
        return Lab(
            context.new_page(),
            server.page(path),
            path=path,
            cells=[cell.id for cell in read(server.log.parent / "course" / path).cells],
            ask=server.ask,
            pictures=pictures,
        )

    def leave() -> None:
        for page in context.pages:
            page.close()
        leave_no_kernel(server)

    with browser.new_context(viewport={"width": 1280, "height": 1400}) as context:
        yield open_path
        leave()


def leave_no_kernel(server: Server) -> None:
    """End all kernels, and wait until their ranks are gone."""
    for session in server.ask("api/sessions"):
        server.ask(f"api/sessions/{session['id']}", "DELETE")
    wait_for(lambda: not left_over(), GRACE, "kernel and ranks end with the session")


@pytest.fixture
def fresh_page(server: Server) -> Iterator[None]:
    """A page as JupyterLab first shows it; afterwards the next page is one again."""
    (saved,) = (server.log.parent / "workspaces").iterdir()
    first = saved.read_text()
    yield
    leave_no_kernel(server)
    saved.write_text(first)


@pytest.fixture(scope="module")
def untouched(open_lab) -> Lab:
    """The lab as students get it, opened; for the tests before another one is."""
    return open_lab(f"student/{LAB}")


#: What JupyterLab shows in red: an error, and what goes to standard error.

#: Cells in which every rank prints something.
ALL_RANKS = (
    "hello-answer",
    "send-run",
    "reduce-run",
    "deadlock-where",
    "exchange-run",
    "group-run",
    "practice-batch",
)


def test_the_address_that_make_lab_prints_opens_lab_00_beside_the_names_of_all_labs(
    browser, server, fresh_page, tmp_path
):
    (printed,) = set(re.findall(r"http://127\.0\.0\.1:\S+", server.log.read_text()))
    labs = {path.name for path in (server.log.parent / "course").glob("*.ipynb")}
    for width, height in ((1440, 900), (1280, 800)):
        with browser.new_context(viewport={"width": width, "height": height}) as context:
            page = context.new_page()
            page.set_default_timeout(PAGE * 1000)
            page.goto(printed)
            page.get_by_role("heading", name="00 · Start here").wait_for()
            files = page.locator(".jp-DirListing-itemText")
            files.filter(has_text="14_capstone.ipynb").wait_for()
            cut = files.evaluate_all("all => all.filter(e => e.scrollWidth > e.clientWidth).length")
            assert labs <= {*files.all_inner_texts()}
            assert not cut, f"at {width} pixels {cut} names end in dots"
            photograph(page, tmp_path, f"make-lab-{width}")
            assert page.locator(".jp-NotebookPanel:visible").bounding_box()["width"] > 0.7 * width


def test_a_lab_opens_with_its_contents_one_click_away_and_only_the_courses_tabs(untouched):
    page = untouched.page
    tabs = page.locator(".jp-SideBar .lm-TabBar-tab")
    assert {tab["id"] for tab in tabs.evaluate_all("all => all.map(e => e.dataset)")} == {
        *("filebrowser", "jp-running-sessions", "table-of-contents", "jp-property-inspector")
    }
    for words in ("Would you like to get notified", "Validate", "Nbgrader", "Formgrader"):
        assert not page.get_by_text(words, exact=False).count(), words
    contents = page.locator(".jp-TableOfContents:visible")
    assert not contents.count()
    page.locator('[data-id="table-of-contents"]').click()
    contents.get_by_text("1.5 · A deadlock, on purpose").wait_for()


def test_a_student_finds_the_line_that_a_report_names_without_counting(untouched):
    cell = untouched.page.locator(".jp-NotebookPanel:visible .jp-CodeCell").first
    lines = read(LABS / LAB).cells[untouched.cells.index("ranks-up")].source.splitlines()
    shown = cell.locator(".cm-lineNumbers .cm-gutterElement:visible").all_inner_texts()
    assert [number for number in shown if number.strip()] == [
        str(number) for number in range(1, len(lines) + 1)
    ]


def test_no_other_user_of_the_machine_can_read_what_a_kernel_prints(untouched, server):
    (file,) = (server.log.parent / "runtime").glob("kernel-*.json")
    assert json.loads(file.read_text())["curve_secretkey"]
    assert file.stat().st_mode & 0o077 == 0


def test_an_untouched_lab_stops_at_the_first_task_and_says_which(untouched):
    lab = untouched
    lab.run_all()
    try:
        red = lab.outputs(ERROR)
        assert list(red) == ["hello-answer"], red
        said = [
            "○ Task 1.1 is still open. Write it in this cell.",
            'To continue without it, run: lab01.use_model(ranks, "1.1")',
        ]
        assert [line.strip() for line in red["hello-answer"].splitlines()] == said
        assert "hello-check" not in lab.outputs(), "cells after the error were run"
    finally:
        lab.show("hello-answer")
        lab.photograph("student-hello-answer")


def test_all_checks_of_the_solution_pass_in_the_browser(open_lab):
    lab = open_lab(f"solution/{LAB}")
    lab.run_all()
    try:
        seen = lab.outputs()
        verdicts = [text for text in seen.values() if re.match(r"[✓○✗] ", text)]
        passed = [word for text in verdicts for word in re.findall(r"✓ passed Task (\S+)", text)]
        assert passed == tasks_checked(read(SOLUTIONS / LAB)), lab.outputs(ERROR)
        assert len(passed) == len(verdicts) == 7
        assert "1 of 17 points · next: Task 1.2" in verdicts[0]
        assert "17 of 17 points · every task has passed" in verdicts[-1]
        assert sorted(re.findall(r"Hello from rank \d of \d over mpi", seen["hello-answer"])) == [
            f"Hello from rank {rank} of 4 over mpi" for rank in range(4)
        ]
        # Streamed in the order of arrival, and none is lost.
        for cell in ALL_RANKS:
            prefixes = sorted(re.findall(r"\[stdout:\d\]", seen.get(cell, "")))
            assert prefixes == [f"[stdout:{rank}]" for rank in range(4)], (cell, seen.get(cell))
        reported = ["refill-run", "deadlock-run", "eager-run"]
        assert list(lab.outputs(ERROR)) == reported, lab.outputs(ERROR)
        explained = seen["deadlock-run"]
        assert explained.count("Deadlock: these ranks wait for each other") == 1, explained
        assert "cycle 0 → 1 → 0" in explained
        place = f"In{lab.prompt('deadlock-define')}, line 6"
        for rank in (0, 1):
            call = f"recv(src={1 - rank}, tag=0)"
            said = f"rank {rank} waits in {call} at {place}, in polite_exchange()"
            assert explained.count(said) == 1, explained
        assert explained.count(f"{place}: dist.recv(theirs, src=partner)") == 1, explained
        pictures = lab.all("img", "all => all.map(i => i.naturalWidth)")
        assert len(pictures) >= 12, len(pictures)
        assert all(pictures), "an image does not load"
        assert lab.all(".ddl-interactive", "all => all.length") >= 4, "a timeline does not show"
    finally:
        for cell in (
            "ranks-up",
            "forgotten-run",
            "deadlock-run",
            "pingpong-check",
            "eager-picture",
        ):
            lab.show(cell)
            lab.photograph(f"solution-{cell}")


#: Whether the focus is in the form of a prediction; the number of the active cell.
IN_FORM = "() => !!document.activeElement?.closest('.ddl-prediction')"
ACTIVE = "cells => cells.findIndex(cell => cell.classList.contains('jp-mod-active'))"


def until(lab: Lab, first: str, last: str) -> None:
    """Press Shift+Enter from one cell to another, which has run then."""
    lab.show(first)
    at = lab.page.locator(".jp-NotebookPanel:visible .jp-Cell").nth(lab.cells.index(first))
    at.locator(".jp-InputPrompt").click()
    for _ in lab.cells[lab.cells.index(first) : lab.cells.index(last) + 1]:
        lab.page.keyboard.press("Shift+Enter")
    wait_for(lambda: lab.prompt(last).strip("[]").isdigit(), NOTEBOOK, f"{last} has run")


def test_a_student_predicts_and_goes_on_with_the_keyboard_alone(open_lab):
    """Without this, Shift+Enter does nothing after a prediction was typed, or after a click."""
    lab = open_lab(FIRST_LAB)
    page = lab.page
    until(lab, "ranks-up", "predict-worlds")
    wait_for(lambda: page.evaluate(IN_FORM), PAGE, "the form has the focus")
    page.keyboard.type("7")
    page.keyboard.press("Shift+Enter")
    wait_for(lambda: lab.prompt("worlds-ranks").strip("[]").isdigit(), PAGE, "the next cell runs")
    until(lab, "worlds-kernel", "worlds-picture")
    assert "You predicted 7. The run gave 2." in lab.outputs()["worlds-picture"]
    assert not lab.all(".ddl-prediction", "all => all.length"), "the form is still there"


def test_a_student_who_skips_a_prediction_is_asked_before_the_result(open_lab):
    lab = open_lab(FIRST_LAB)
    page = lab.page
    until(lab, "ranks-up", "predict-worlds")
    wait_for(lambda: page.evaluate(IN_FORM), PAGE, "the form has the focus")
    until(lab, "worlds-ranks", "worlds-picture")
    wait_for(lambda: page.evaluate(IN_FORM), PAGE, "the form has the focus again")
    assert "The run gave" not in lab.outputs()["worlds-picture"]
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    assert page.evaluate(IN_FORM), "the notebook would take the correction for its own keys"
    page.keyboard.type("3")
    page.keyboard.press("Enter")
    wait_for(
        lambda: "You predicted 3. The run gave 2." in lab.outputs()["worlds-picture"],
        PAGE,
        "the result",
    )


def test_after_a_click_into_a_timeline_the_keys_belong_to_the_notebook(open_lab):
    lab = open_lab(f"solution/{LAB}")
    page = lab.page
    until(lab, "ranks-up", "send-picture")
    picture = page.locator(".jp-NotebookPanel:visible svg.ddl-timeline").first
    picture.scroll_into_view_if_needed()
    for key in ("ArrowDown", "Shift+Enter"):
        picture.click(position={"x": 200, "y": 20})
        next_cell = lab.all(".jp-Cell", ACTIVE) + 1
        page.keyboard.press(key)
        reached = functools.partial(is_active, lab, next_cell)
        wait_for(reached, PAGE, f"{key} goes on to the next cell")


def is_active(lab: Lab, number: int) -> bool:
    return lab.all(".jp-Cell", ACTIVE) == number


#: For a prediction and the first text behind its result: their distance in pixels, and what one
#: sees of the text.
BELOW = """(cells, [asked, told]) => [
    cells[told].getBoundingClientRect().top - cells[asked].getBoundingClientRect().top,
    cells[told].innerText.trim(),
]"""
#: Texts behind a result that go on without telling it.
GO_ON = {
    *("eager-times-text", "sweep-text", "stopwatch-task", "robin-hints", "outer-hints"),
    *("slow-step-text", "entry-hints", "roof-task", "share-hints", "map-hints"),
}


@pytest.mark.parametrize("name", sorted(path.name for path in LABS.glob("[01]*.ipynb")))
def test_no_answer_stands_on_the_screen_below_its_prediction(name, browser, server):
    cells = read(server.log.parent / "course" / name).cells
    wide = {"width": 1440, "height": 900}
    told = {}
    with browser.new_context(viewport=wide) as context:
        page = context.new_page()
        page.set_default_timeout(PAGE * 1000)
        page.goto(server.page(name))
        shown = page.locator(".jp-NotebookPanel:visible .jp-Cell")
        wait_for(lambda: shown.count() == len(cells), PAGE, "all cells are there")
        page.wait_for_timeout(500)  # until formulas and pictures have their height
        for asked, below in pairs_of(cells):
            away, words = shown.evaluate_all(BELOW, [asked, below])
            begins = ("Show what happened", "Hint 1", "##")
            is_folded = words.startswith(begins) or cells[below].source.startswith("#")
            if away < wide["height"] and not is_folded and cells[below].id not in GO_ON:
                told[cells[asked].id] = cells[below].id, words[:60]
    assert not told
    leave_no_kernel(server)


def pairs_of(cells: list) -> Iterator[tuple[int, int]]:
    """Return the place of each prediction, and of the first text behind its result."""
    for k, cell in enumerate(cells):
        name = re.search(r"^(\w+) = predict\(", cell.source, re.MULTILINE)
        if cell.cell_type == "code" and name:
            later = range(k + 1, len(cells))
            result = next(j for j in later if f"{name[1]}.beside(" in cells[j].source)
            texts = (j for j in range(result, len(cells)) if cells[j].cell_type == "markdown")
            if (below := next(texts, None)) is not None:
                yield k, below
