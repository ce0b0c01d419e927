"""Lab 01 in JupyterLab, in a real browser, served by `make lab`: what a student sees."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, kill_tree, left_over
from nbformat import NotebookNode
from playwright.sync_api import Browser, Page, sync_playwright

from utils.course.notebook import LABS, SOLUTIONS, read, tasks_checked, write

LAB = "01_c10d.ipynb"
#: Seconds: for the server to answer, for a page, for a whole notebook, for the end of processes.
SERVER, PAGE, NOTEBOOK, GRACE = 120, 120, 400, 60
SCREENSHOTS = "DDL_LABS_SCREENSHOTS"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
CHROMIUM_ARGS = [
    *("--no-sandbox", "--headless=new", "--disable-gpu", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--no-first-run"),
]
# Cells out of sight are in the page too; no question about news, which would cover the notebook.
SETTINGS = {
    "notebook-extension/tracker": {"windowingMode": "none"},
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}

pytestmark = [
    pytest.mark.timeout(PAGE + NOTEBOOK + 60),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium"),
]


def wait_for(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """The condition's first true value; fails the test at the deadline."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"not within {seconds} s: {what}")
        time.sleep(0.1)
    return value


# --- the server ----------------------------------------------------------------------------------


@dataclass
class Server:
    """A JupyterLab that `make lab` started."""

    url: str
    token: str
    log: Path

    def ask(self, path: str, method: str = "GET") -> Any:
        """Jupyter's REST interface."""
        request = urllib.request.Request(
            f"{self.url}{path}", method=method, headers={"Authorization": f"token {self.token}"}
        )
        with urllib.request.urlopen(request, timeout=10) as reply:
            return json.loads(reply.read() or "null")


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


def student_environment(home: Path) -> dict[str, str]:
    """A fresh user's environment: nobody's settings are read or changed."""
    ours = ("PYTEST_", "JUPYTER", "IPYTHON", "XDG_", "MAKE", "MFLAGS", "IPP_")
    env = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    settings = home / "settings"
    for name, content in SETTINGS.items():
        path = settings / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    return env | {
        "HOME": str(home),
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(settings),
    }


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`make lab` on a folder with fresh copies of the lab, "student" and "solution"."""
    require_environment()
    home = tmp_path_factory.mktemp("home")
    folder = home / "course"
    for name, source in {"student": LABS, "solution": SOLUTIONS}.items():
        (folder / name).mkdir(parents=True)
        write(without_outputs(read(source / LAB)), folder / name / LAB)
    token = secrets.token_hex(16)
    # --ServerApp.root_dir is given already, and may be given only once.
    arguments = [
        *("--no-browser", f"--IdentityProvider.token={token}"),
        *(
            f"--{name}.root_dir={folder}"
            for name in ("FileContentsManager", "MappingKernelManager")
        ),
    ]
    log = home / "server.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            ["make", "lab", "PORT=0", f"ARGS={' '.join(arguments)}"],
            cwd=ROOT,
            env=student_environment(home),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    running = None
    try:
        running = Server(wait_for(lambda: address(home, process, log), SERVER, "a URL"), token, log)
        wait_for(lambda: answers(running), SERVER, "JupyterLab answers")
        yield running
        running.ask("api/shutdown", "POST")
        process.wait(GRACE)
    finally:
        kill_tree(process)
    # The kernels' ranks, too.
    wait_for(lambda: not left_over(), GRACE, "kernels and ranks end with the server")


def without_outputs(nb: NotebookNode) -> NotebookNode:
    for cell in nb.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return nb


def address(home: Path, process: subprocess.Popen, log: Path) -> str | None:
    """The server's URL, from the file that it writes when it listens."""
    if process.poll() is not None:
        pytest.fail(f"`make lab` ended with status {process.returncode}:\n{log.read_text()}")
    for path in (home / "runtime").glob("jpserver-*.json"):
        with contextlib.suppress(ValueError):
            return json.loads(path.read_text())["url"]
    return None


def answers(server: Server) -> bool:
    try:
        return "started" in server.ask("api/status")
    except OSError:
        return False


# --- the page ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(server: Server) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_ARGS)
        yield chromium
        chromium.close()


class Lab:
    """A notebook that is open in JupyterLab."""

    def __init__(self, page: Page, server: Server, path: str, tmp_path: Path):
        self.page, self.server, self.path, self.tmp_path = page, server, path, tmp_path
        self.cells = [cell.id for cell in read(server.log.parent / "course" / path).cells]
        page.set_default_timeout(PAGE * 1000)
        page.goto(f"{server.url}lab/tree/{path}?token={server.token}")
        page.locator(".jp-NotebookPanel:visible .jp-Cell").nth(len(self.cells) - 1).wait_for(
            state="attached"
        )
        wait_for(self.ready, PAGE, "a kernel that is connected and idle")

    def kernel(self) -> dict:
        """What the server knows about this notebook's kernel; the page may say idle too early."""
        sessions = self.server.ask("api/sessions")
        return next((s["kernel"] for s in sessions if s["path"] == self.path), {})

    def ready(self) -> bool:
        kernel = self.kernel()
        return kernel.get("execution_state") == "idle" and kernel["connections"] > 0

    def run_all(self) -> None:
        """Run → Run All Cells; wait until the kernel has done them all."""
        self.page.locator(".lm-MenuBar-itemLabel", has_text="Run").first.click()
        self.page.get_by_text("Run All Cells", exact=True).click()
        wait_for(self.finished, NOTEBOOK, "the notebook's run ends")

    def finished(self) -> bool:
        # A cell that is running or in the queue shows [*]. The last one that ran has a number.
        prompts = self.prompts()
        return (
            "[*]:" not in prompts
            and any(prompt.strip("[]: ").isdigit() for prompt in prompts)
            and self.ready()
        )

    def prompts(self) -> list[str]:
        return self.all(".jp-InputPrompt", "e => e.map(p => p.textContent)")

    def all(self, selector: str, function: str) -> Any:
        """Apply JavaScript to all matching elements of the notebook that is in front."""
        return self.page.eval_on_selector_all(f".jp-NotebookPanel:visible {selector}", function)

    def outputs(self, mime: str = "") -> dict[str, str]:
        """What the page shows below each cell that has output, by cell id."""
        chosen = f'[data-mime-type="{mime}"]' if mime else ""
        texts = self.all(
            ".jp-Cell",
            "cells => cells.map(c => [...c.querySelectorAll('.jp-OutputArea-output"
            f"{chosen}')].map(o => o.innerText).join('\\n'))",
        )
        assert len(texts) == len(self.cells)
        return {cell: text for cell, text in zip(self.cells, texts, strict=True) if text.strip()}

    def show(self, cell: str) -> None:
        """Scroll to a cell."""
        at = self.page.locator(".jp-NotebookPanel:visible .jp-Cell").nth(self.cells.index(cell))
        at.evaluate("element => element.scrollIntoView({block: 'center'})")

    def photograph(self, name: str) -> None:
        """Take a picture of what is visible; keep it where DDL_LABS_SCREENSHOTS says."""
        folders = [self.tmp_path]
        if os.environ.get(SCREENSHOTS):
            folders.append(Path(os.environ[SCREENSHOTS]))
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=folder / f"{name}.png")


@pytest.fixture
def open_lab(browser: Browser, server: Server, tmp_path: Path) -> Iterator[Callable[[str], Lab]]:
    """`open_lab("student/01_c10d.ipynb")`: a page of its own; its kernel ends with the test."""
    with browser.new_context(viewport={"width": 1280, "height": 1400}) as context:
        yield lambda path: Lab(context.new_page(), server, path, tmp_path)
    for session in server.ask("api/sessions"):
        server.ask(f"api/sessions/{session['id']}", "DELETE")
    wait_for(lambda: not left_over(), GRACE, "kernel and ranks end with the session")


#: What JupyterLab shows in red: an error, and what goes to standard error.
RED = "application/vnd.jupyter.stderr"
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


def test_all_checks_of_the_solution_pass_in_the_browser(open_lab):
    lab = open_lab(f"solution/{LAB}")
    lab.run_all()
    try:
        seen = lab.outputs()
        lines = [line for text in seen.values() for line in text.splitlines()]
        passed = [line.split()[2] for line in lines if line.startswith("✓ Task ")]
        assert passed == tasks_checked(read(SOLUTIONS / LAB))
        assert len(passed) == 7
        assert not [line for line in lines if line.startswith("✗")]
        assert sorted(re.findall(r"Hello from rank \d of \d over mpi", seen["hello-answer"])) == [
            f"Hello from rank {rank} of 4 over mpi" for rank in range(4)
        ]
        # Streamed in the order of arrival, and none is lost.
        for cell in ALL_RANKS:
            prefixes = sorted(re.findall(r"\[stdout:\d\]", seen.get(cell, "")))
            assert prefixes == [f"[stdout:{rank}]" for rank in range(4)], (cell, seen.get(cell))
        assert list(lab.outputs(RED)) == ["deadlock-run"], lab.outputs(RED)
        explained = seen["deadlock-run"]
        assert explained.count("Deadlock: these ranks wait for each other") == 1, explained
        assert "cycle 0 → 1 → 0" in explained
        for rank in (0, 1):
            said = f"rank {rank} waits in recv(src={1 - rank}, tag=0) at cell line 5"
            assert explained.count(said) == 1, explained
        pictures = lab.all("img", "all => all.map(i => i.naturalWidth)")
        assert len(pictures) >= 10
        assert all(pictures), "an image does not load"
    finally:
        for cell in ("ranks-up", "deadlock-run", "pingpong-check"):
            lab.show(cell)
            lab.photograph(f"solution-{cell}")


def test_an_untouched_lab_stops_at_the_first_task_and_says_which(open_lab):
    lab = open_lab(f"student/{LAB}")
    lab.run_all()
    try:
        red = lab.outputs(RED)
        assert list(red) == ["hello-answer"], red
        said = "NotImplementedError: Task 1.1: hello from every rank"
        assert red["hello-answer"].count(said) == 1, "once for all: " + red["hello-answer"]
        assert "The same on ranks 0, 1, 2, 3." in red["hello-answer"]
        assert "hello-check" not in lab.outputs(), "cells after the error were run"
    finally:
        lab.show("hello-answer")
        lab.photograph("student-hello-answer")
