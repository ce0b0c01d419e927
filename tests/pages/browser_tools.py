"""JupyterLab in a real browser: a notebook that is open, run and photographed."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nbformat import NotebookNode
from playwright.sync_api import Page

#: Seconds: for a page, for a whole notebook; that nothing happens when the notebook has ended.
PAGE, NOTEBOOK, QUIET = 120, 400, 3
#: What errors are shown as.
ERROR = "application/vnd.jupyter.stderr"
SCREENSHOTS = "DDL_LABS_SCREENSHOTS"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
CHROMIUM_ARGS = [
    *("--no-sandbox", "--headless=new", "--disable-gpu", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--no-first-run"),
]
# Cells out of sight are in the page too.
SETTINGS = {"notebook-extension/tracker": {"windowingMode": "none"}}


def write_settings(folder: Path) -> None:
    """JupyterLab's settings for a test, into a folder of user settings."""
    for name, content in SETTINGS.items():
        path = folder / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))


def wait_for(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """The condition's first true value; fails the test at the deadline."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"not within {seconds} s: {what}")
        time.sleep(0.1)
    return value


def without_outputs(nb: NotebookNode) -> NotebookNode:
    """The notebook as it was before it was executed."""
    for cell in nb.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return nb


def photograph(page: Page, folder: Path, name: str) -> None:
    """Take a picture of what is visible; keep it where DDL_LABS_SCREENSHOTS says, too."""
    folders = [folder]
    if os.environ.get(SCREENSHOTS):
        folders.append(Path(os.environ[SCREENSHOTS]))
    for each in folders:
        each.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=each / f"{name}.png")


class Lab:
    """A notebook that is open in JupyterLab.

    url: of the page. path: of the notebook on the server. cells: their ids. ask: the server's REST
    interface, as `ask("api/sessions")`. pictures: folder for `photograph`.
    """

    def __init__(
        self,
        page: Page,
        url: str,
        *,
        path: str,
        cells: list[str],
        ask: Callable[[str], Any],
        pictures: Path,
    ):
        self.page, self.path, self.cells = page, path, cells
        self.ask, self.pictures = ask, pictures
        page.set_default_timeout(PAGE * 1000)
        page.goto(url)
        page.locator(".jp-NotebookPanel:visible .jp-Cell").nth(len(self.cells) - 1).wait_for(
            state="attached"
        )
        wait_for(self.ready, PAGE, "a kernel that is connected and idle")

    def kernel(self) -> dict:
        """What the server knows about this notebook's kernel; the page may say idle too early."""
        sessions = self.ask("api/sessions")
        return next((s["kernel"] for s in sessions if s["path"] == self.path), {})

    def ready(self) -> bool:
        kernel = self.kernel()
        return kernel.get("execution_state") == "idle" and kernel["connections"] > 0

    def run_all(self) -> None:
        """Run → Run All Cells; wait until the kernel has done them all."""
        self.page.locator(".lm-MenuBar-itemLabel", has_text="Run").first.click()
        self.page.get_by_text("Run All Cells", exact=True).click()
        quiet_since = None

        def quiet() -> bool:
            # Between two cells the kernel is idle for a moment, and the next one not marked yet.
            nonlocal quiet_since
            quiet_since = (quiet_since or time.monotonic()) if self.finished() else None
            return quiet_since is not None and time.monotonic() - quiet_since > QUIET

        wait_for(quiet, NOTEBOOK, "the notebook's run ends")

    def finished(self) -> bool:
        # A cell that is running or in the queue shows [*]. After an error the others stay empty.
        prompts = [prompt.strip("[]: ") for prompt in self.prompts()]
        ended = all(map(str.isdigit, prompts)) or bool(self.outputs(ERROR))
        return ended and "*" not in prompts and self.ready()

    def prompts(self) -> list[str]:
        return self.all(".jp-InputPrompt", "e => e.map(p => p.textContent)")

    def prompt(self, cell: str) -> str:
        """What stands beside a cell that was run, such as [28]."""
        at = self.page.locator(".jp-NotebookPanel:visible .jp-Cell").nth(self.cells.index(cell))
        return at.locator(".jp-InputPrompt").inner_text().strip(": ")

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
        photograph(self.page, self.pictures, name)
