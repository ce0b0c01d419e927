"""The first screen of README.md says what is true, and its lines to copy work."""

from __future__ import annotations

import re
import tomllib
from urllib.parse import urlsplit

import pytest
from PIL import Image, ImageChops, ImageSequence

from utils.course import about, effort, map
from utils.course.notebook import LABS, ROOT, notebooks, read
from utils.figures import RED

README = (ROOT / "README.md").read_text("utf-8")
FIRST_SCREEN = README[: README.index("<!-- map:")]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def test_the_lines_to_copy_clone_the_repository_that_the_project_names():
    url = PROJECT["urls"]["Repository"]
    lines = [f"git clone {url}", f"cd {urlsplit(url).path.rpartition('/')[2]}", "make lab"]
    assert "```sh\n" + "\n".join(lines) + "\n```" in FIRST_SCREEN
    assert FIRST_SCREEN.count(url) == (2 if "example.org" in url else 1), "say that it's not public"


def test_the_first_screen_has_no_address_that_leads_nowhere():
    others = re.findall(r"\]\((https?://[^)]+)\)", FIRST_SCREEN)
    assert not [url for url in others if "example.org" in url or "OWNER" in url]
    assert "OWNER/COURSE" not in README


def test_the_promise_counts_the_notebooks_and_the_hours_that_there_are():
    labs = about.labs()
    assert f"{len(notebooks(LABS))} notebooks" in FIRST_SCREEN
    (whole,) = [path for path in map.paths(labs) if path.name == map.WHOLE]
    assert f"the whole course {map.hours(whole.minutes)} hours" in FIRST_SCREEN
    assert f"The first lab takes {labs[0].minutes} minutes" in FIRST_SCREEN
    assert max(lab.minutes for lab in labs) <= 2 * effort.SESSION
    assert f"one or two sessions of at most {effort.SESSION} minutes" in FIRST_SCREEN


def test_every_task_has_the_three_hints_that_the_first_screen_promises():
    promised = "a nudge, the picture or formula, the shape of the code"
    assert promised in FIRST_SCREEN
    for path in notebooks(LABS):
        text = "\n".join(cell.source for cell in read(path).cells)
        tasks = len(set(re.findall(r"\*\*Task (\d+\.\d+)", text)))
        for level, name in enumerate(promised.split(", "), 1):
            hints = text.count(f"<summary>Hint {level} · {name}</summary>")
            assert hints >= tasks, f"{path.name}: {tasks} tasks, {hints} hints of level {level}"


# --- the moving picture --------------------------------------------------------------------------

FILM = ROOT / ".github" / "course.gif"


@pytest.fixture
def scenes(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "film"))
    import scenes

    return scenes


def test_those_who_dont_see_the_moving_picture_read_what_it_shows(scenes):
    assert f"![{scenes.words()}](.github/{FILM.name})" in FIRST_SCREEN


def test_the_moving_picture_loads_fast_ends_soon_and_is_readable():
    assert FILM.stat().st_size < 3e6
    with Image.open(FILM) as film:
        assert 900 <= film.width <= 1000
        assert film.is_animated
        assert sum(frame.info["duration"] for frame in ImageSequence.Iterator(film)) <= 8000
        assert film.info["loop"] == 0, "it plays on"


def test_what_is_seen_where_nothing_moves_is_the_deadlock_with_its_red_arrows():
    first = Image.open(FILM).convert("RGB")
    difference = ImageChops.difference(first, Image.new("RGB", first.size, RED))
    red, green, blue = difference.split()
    farthest = ImageChops.lighter(ImageChops.lighter(red, green), blue)
    assert sum(farthest.histogram()[:8]) > 200, "pixels in the color of a cycle of waits"


def test_every_cell_of_the_moving_picture_is_there(scenes):
    names = [cell.id for cell in scenes.notebook().cells]
    assert [name for scene in scenes.SCENES for name in scene.cells if name not in names] == []
    ends = [scene.cells[-1] for scene in scenes.SCENES]
    assert len({*ends}) == len(ends), "each scene ends with a cell of its own"


def test_a_caption_that_is_cut_off_is_refused(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "film"))
    from picture import with_caption

    with pytest.raises(ValueError, match="too long for 200 pixels: 'Two ranks"):
        with_caption(
            Image.new("RGB", (200, 50)), "Two ranks deadlock, and the rest is cut off.", 50
        )
