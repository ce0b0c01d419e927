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
from picture import CAPTION, save_gif, with_caption  # noqa: E402
from processes import SESSION, SESSION_VARIABLE  # noqa: E402
from scenes import SCENES, Scene, notebook, words  # noqa: E402

from utils.course.notebook import LABS, write  # noqa: E402

#: The moving picture, and the first of its frames.
FILM, STILL = "course.gif", "lab01.png"
NOTEBOOK, FIRST_LAB = "ranks.ipynb", "00_start_here.ipynb"
#: Pixels: what the picture measures with its caption. And how much larger than usual its text is.
WIDTH, HEIGHT, SCALE = 960, 640, 1.125
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
        """Make the window so large that the notebook in it has the size of the picture."""
        self.width, self.height = round(WIDTH / SCALE), round((HEIGHT - CAPTION) / SCALE)
        for _ in range(3):
            box, window = self.panel.bounding_box(), self.page.viewport_size
            self.page.set_viewport_size({
                "width": round(window["width"] + self.width - box["width"]),
                "height": round(window["height"] + self.height - box["height"]),
            })
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

    def frame(self, names: tuple[str, ...]) -> None:
        """Show these cells alone: from the first one on, or up to the last one if they are long."""
        for name in self.lab.cells:
            style = "visible" if name in names else "hidden"
            self.cell(name).evaluate(f"cell => {{ cell.style.visibility = '{style}'; }}")
        self.cell(names[0]).evaluate("cell => cell.scrollIntoView({block: 'start'})")
        last, panel = self.cell(names[-1]).bounding_box(), self.panel.bounding_box()
        if last["y"] + last["height"] > panel["y"] + panel["height"]:
            self.cell(names[-1]).evaluate("cell => cell.scrollIntoView({block: 'end'})")

    def photograph(self) -> Image.Image:
        """Return what is visible of the notebook, as soon as nothing moves any more."""
        box = self.panel.bounding_box()
        clip = {"x": box["x"], "y": box["y"], "width": self.width, "height": self.height}
        before = b""
        while (now := self.page.screenshot(clip=clip)) != before:
            before = now
            self.page.wait_for_timeout(LOOK)
        picture = Image.open(io.BytesIO(now)).convert("RGB")
        return picture.resize((WIDTH, HEIGHT - CAPTION))  # a pixel less or more by rounding

    def steps(self, name: str) -> Iterator[Image.Image]:
        """Yield a photograph for each position of the slider below a cell."""
        slider = self.cell(name).locator(SLIDER).first
        slider.wait_for()
        end = int(float(slider.get_attribute("aria-valuemax") or slider.get_attribute("max") or 0))
        slider.focus()
        self.page.keyboard.press("Home")
        for step in range(end + 1):
            if step:
                self.page.keyboard.press("ArrowRight")
                self.page.wait_for_timeout(LOOK)
            yield self.photograph()


def record(stage: Stage) -> dict[Scene, list[tuple[Image.Image, float]]]:
    """Run the notebook; return the pictures of each scene, each with its seconds."""
    film: dict[Scene, list[tuple[Image.Image, float]]] = {}
    for name in stage.lab.cells:
        stage.start(name)
        scene = next((scene for scene in SCENES if scene.cells[-1] == name), None)
        shots = []
        if scene and scene.running:
            stage.frame(scene.cells)
            shots.append((stage.photograph(), scene.running))
        stage.finish(name, fails=bool(scene and scene.fails))
        if scene:
            stage.frame(scene.cells)
            pictures = [*stage.steps(name)] if scene.has_slider else [stage.photograph()]
            seconds = [scene.seconds] * (len(pictures) - 1) + [scene.last or scene.seconds]
            shots += zip(pictures, seconds, strict=True)
            film[scene] = [(with_caption(shot, scene.caption), time) for shot, time in shots]
    return film


def recorded(home: Path) -> dict[Scene, list[tuple[Image.Image, float]]]:
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
    """Write the moving picture and its first frame; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-o", "--out", type=Path, default=ROOT / ".github", help=".github")
    out = parser.parse_args().out
    if CHROMIUM is None:
        print("Chromium is not installed: apt-get install chromium", file=sys.stderr)
        return 2
    os.environ[SESSION_VARIABLE] = SESSION  # so that `lab_server` finds what is left over
    with tempfile.TemporaryDirectory() as home:
        film = recorded(Path(home))
    shots = [shot for scene in SCENES for shot in film[scene]]
    pictures, seconds = [picture for picture, _ in shots], [time for _, time in shots]
    pictures[0].save(out / STILL, optimize=True)
    save_gif(pictures, seconds, out / FILM)
    size = (out / FILM).stat().st_size
    print(f"{out / FILM}: {len(shots)} pictures, {sum(seconds):.1f} s, {size / 1e6:.2f} MB")
    print(f"Its description in README.md must be:\n{words()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
