"""Record README.md's moving picture: run its scenes in JupyterLab, photograph them, write a GIF.

python docs/film/record.py [-o .github]     # or `make film`
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from PIL import Image
from playwright.sync_api import Locator, sync_playwright

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
HELPERS = ("tests", "tests/pages", "utils/mpi/tests")
sys.path[:0] = [str(HERE), str(ROOT), *(str(ROOT / folder) for folder in HELPERS)]

from browser_tools import CHROMIUM, CHROMIUM_ARGS, ERROR, Lab, wait_for  # noqa: E402
from lab_server import lab_server  # noqa: E402
from picture import save_gif, with_caption  # noqa: E402
from processes import SESSION, SESSION_VARIABLE  # noqa: E402
from scenes import SCENES, Scene, notebook, words  # noqa: E402

from utils.course.notebook import LABS, write  # noqa: E402

FILM = "course.gif"
NOTEBOOK, FIRST_LAB = "ranks.ipynb", "00_start_here.ipynb"
#: Pixels: the width of the picture, and the height of the window. And how much larger than usual
#: the text is. The picture is as high as its highest scene, so that nothing is cut off.
WIDTH, WINDOW, SCALE = 960, 1200, 1.125
#: Pixels below the last cell: the border of a chosen cell.
BORDER = 4
#: Seconds for one cell on a busy machine, and milliseconds between two looks at the page.
CELL, LOOK = 120, 250
SLIDER = '[role="slider"], input[type="range"]'
# The cursor would blink, and the buttons of a cell hide what is below them.
STILLNESS = ".cm-cursorLayer, .jp-Toolbar.jp-cell-toolbar, .jp-cell-toolbar { display: none; }"


class Stage:
    """A notebook that is open in a browser, run cell by cell and photographed."""

    def __init__(self, lab: Lab):
        self.lab, self.page = lab, lab.page
        self.panel = self.page.locator(".jp-NotebookPanel:visible .jp-WindowedPanel-outer")
        self.page.add_style_tag(content=STILLNESS)
        self._fit()

    def _fit(self) -> None:
        """Make the window so wide that the notebook in it has the width of the picture."""
        self.width = round(WIDTH / SCALE)
        for _ in range(3):
            beside = self.page.viewport_size["width"] - self.panel.bounding_box()["width"]
            self.page.set_viewport_size({"width": round(self.width + beside), "height": WINDOW})
            self.page.wait_for_timeout(LOOK)

    def cell(self, name: str) -> Locator:
        """Return the cell with this id."""
        return self.panel.locator(".jp-Cell").nth(self.lab.cells.index(name))

    def start(self, name: str) -> None:
        """Begin to run a cell."""
        self.cell(name).evaluate("cell => { cell.style.visibility = 'visible'; }")
        self.cell(name).locator(".cm-content").click()
        self.page.keyboard.press("Control+Enter")
        self.page.mouse.move(0, 0)
        wait_for(lambda: self._prompt(name), CELL, f"cell {name} begins")

    def finish(self, name: str, fails: bool) -> None:
        """Wait until the cell has run.

        Raises:
            RuntimeError: The cell failed although it should not, or the other way round.
        """
        wait_for(
            lambda: self._prompt(name).isdigit() and self.lab.ready(), CELL, f"cell {name} ends"
        )
        error = self.lab.outputs(ERROR).get(name, "")
        if bool(error) != fails:
            raise RuntimeError(
                f"cell {name}: {error or 'it did not fail, and its scene needs that'}"
            )

    def _prompt(self, name: str) -> str:
        return self.lab.prompts()[self.lab.cells.index(name)].strip("[]: ")

    def show(self, names: tuple[str, ...]) -> None:
        """Show these cells alone, at the upper end of the notebook."""
        for name in self.lab.cells:
            style = "visible" if name in names else "hidden"
            self.cell(name).evaluate(f"cell => {{ cell.style.visibility = '{style}'; }}")
        self.cell(names[0]).evaluate("cell => cell.scrollIntoView({block: 'start'})")

    def photograph(self, names: tuple[str, ...]) -> Image.Image:
        """Return a picture of the cells, as soon as nothing moves any more.

        Raises:
            RuntimeError: They don't fit into the window.
        """
        before = b""
        while True:
            panel, first = self.panel.bounding_box(), self.cell(names[0]).bounding_box()
            last = self.cell(names[-1]).bounding_box()
            bottom = last["y"] + last["height"] + BORDER
            if bottom > panel["y"] + panel["height"]:
                raise RuntimeError(f"cells {names} are higher than {WINDOW} pixels")
            area = {"x": panel["x"], "y": first["y"], "width": self.width}
            now = self.page.screenshot(clip={**area, "height": bottom - first["y"]})
            if now == before:
                break
            before = now
            self.page.wait_for_timeout(LOOK)
        picture = Image.open(io.BytesIO(now)).convert("RGB")
        return picture.resize((WIDTH, picture.height))  # a pixel less or more by rounding

    def steps(self, names: tuple[str, ...]) -> Iterator[Image.Image]:
        """Yield a photograph for each position of the slider below the last cell."""
        slider = self.cell(names[-1]).locator(SLIDER).first
        slider.wait_for()
        end = int(float(slider.get_attribute("aria-valuemax") or slider.get_attribute("max") or 0))
        slider.focus()
        self.page.keyboard.press("Home")
        for step in range(end + 1):
            if step:
                self.page.keyboard.press("ArrowRight")
                self.page.wait_for_timeout(LOOK)
            yield self.photograph(names)


#: Photographs, each with the seconds for which it is shown.
Shots = list[tuple[Image.Image, float]]


def record(stage: Stage) -> dict[Scene, Shots]:
    """Run the notebook; return the photographs of each scene."""
    film: dict[Scene, Shots] = {}
    for name in stage.lab.cells:
        stage.start(name)
        scene = next((scene for scene in SCENES if scene.cells[-1] == name), None)
        shots: Shots = []
        if scene and scene.running:
            stage.show(scene.cells)
            shots.append((stage.photograph(scene.cells), scene.running))
        stage.finish(name, fails=bool(scene and scene.fails))
        if scene:
            stage.show(scene.cells)
            steps = stage.steps(scene.cells) if scene.has_slider else [None]
            pictures = [step or stage.photograph(scene.cells) for step in steps]
            seconds = [scene.seconds] * (len(pictures) - 1) + [scene.last or scene.seconds]
            film[scene] = [*shots, *zip(pictures, seconds, strict=True)]
    return film


def recorded(home: Path) -> dict[Scene, Shots]:
    """Start JupyterLab and a browser, and record all scenes."""
    folder = home / "course"
    folder.mkdir()
    scenes = notebook()
    write(scenes, folder / NOTEBOOK)
    shutil.copy(LABS / FIRST_LAB, folder)  # `make lab` opens it first
    with lab_server(home, folder) as server, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_ARGS)
        page = browser.new_page(viewport={"width": 1500, "height": 800}, device_scale_factor=SCALE)
        page.emulate_media(color_scheme="light", reduced_motion="reduce")
        lab = Lab(
            page,
            server.page(NOTEBOOK),
            path=NOTEBOOK,
            cells=[cell.id for cell in scenes.cells],
            ask=server.ask,
            pictures=home,
        )
        film = record(Stage(lab))
        browser.close()
    return film


def main() -> int:
    """Write the moving picture; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-o", "--out", type=Path, default=ROOT / ".github", help=".github")
    out = parser.parse_args().out
    if CHROMIUM is None:
        print("Chromium is not installed: apt-get install chromium", file=sys.stderr)
        return 2
    os.environ[SESSION_VARIABLE] = SESSION  # so that `lab_server` finds what is left over
    with tempfile.TemporaryDirectory() as home:
        film = recorded(Path(home))
    height = max(shot.height for shots in film.values() for shot, _ in shots)
    seconds = [time for scene in SCENES for _, time in film[scene]]
    pictures = [
        with_caption(shot, scene.caption, height) for scene in SCENES for shot, _ in film[scene]
    ]
    save_gif(pictures, seconds, out / FILM)
    size = (out / FILM).stat().st_size
    print(f"{out / FILM}: {len(pictures)} pictures, {sum(seconds):.1f} s, {size / 1e6:.2f} MB")
    print(f"Its description in README.md must be:\n{words()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
