"""Pictures that answer, in a real browser: from a file, without network, kernel or even scripts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from browser_tools import photograph
from test_timeline import compute, made, pipeline, recv, reported, send, simulated

from utils import figures
from utils.figures.interactive import Interactive
from utils.timeline import Timeline

LANES, STATUS = "svg.ddl-timeline", ".ddl-status"
#: The pixels of the ranks' names.
NAMES = 66

#: The axis in the browser, to wait for its change.
AXIS = (
    f"[...document.querySelectorAll('{LANES} text')].map(t => t.textContent)"
    ".filter(t => /^[\\d.]+$/.test(t)).join()"
)


def two_ranks() -> Timeline:
    """Rank 0 computes 10 ms and sends; rank 1 waits for it."""

    def program(rank: int):
        if rank == 0:
            yield compute(0.010)
            yield send(1, 4_000_000)
        else:
            yield recv(0, 4_000_000)
            yield compute(0.010)

    shown = simulated(program, 2)
    for record in shown.records:
        record["where"] = "cell line 7"
    return shown


@pytest.fixture
def opened(chromium, tmp_path) -> Iterator[Callable]:
    """`opened(page's text)`: a page of its own, from a file, whose errors fail the test."""
    faults: list[str] = []
    contexts = []

    def open_page(text: str, width: int = 1000, **options):
        path = tmp_path / "picture.html"
        path.write_text(text, encoding="utf-8")
        context = chromium.new_context(viewport={"width": width, "height": 800}, **options)
        contexts.append(context)
        context.set_default_timeout(10_000)
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda said: faults.append(said.text) if said.type == "error" else None)
        page.on("request", lambda asked: faults.append(asked.url) if "http" in asked.url else None)
        page.goto(path.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert faults == []


def point_at(page, share: float, rank: int, piece: int = 0) -> None:
    """Move the mouse to a share of the lanes' width, in the lane of one of two ranks."""
    lanes = page.locator(LANES).nth(piece)
    box = lanes.bounding_box()
    name = page.locator(f"{LANES} text", has_text=re.compile(f"^rank {rank}$"))
    lane = name.nth(piece).bounding_box()
    x = box["x"] + NAMES + share * (box["width"] - NAMES - 12)
    page.mouse.move(x, lane["y"] + lane["height"] / 2)


def axis(page) -> list[str]:
    """The numbers at the axis, which tell what part of the cell is seen."""
    texts = page.locator(f"{LANES} text").all_text_contents()
    return [text for text in texts if re.fullmatch(r"[\d.]+", text)]


def test_pointing_at_a_bar_says_its_call_its_line_and_its_times(opened):
    page = opened(two_ranks().interactive().html())
    point_at(page, 0.2, rank=1)
    said = page.locator(STATUS)
    said.filter(has_text="Rank 1").wait_for()
    text = said.inner_text()
    assert "Rank 1: recv 4 MB from rank 0, cell line 7." in text
    assert re.search(r"waiting for rank 0 \d+(\.\d+)? ms, communicating [\d.]+ ms", text)


def test_pointing_at_the_gap_says_how_long_the_rank_computes(opened):
    page = opened(two_ranks().interactive().html())
    point_at(page, 0.2, rank=0)
    page.locator(STATUS).filter(has_text="Rank 0: computing for 10 ms").wait_for()


def test_a_click_follows_the_message_to_its_other_end_and_shows_both(opened):
    page = opened(two_ranks().interactive().html())
    point_at(page, 0.2, rank=1)
    page.mouse.down()
    page.mouse.up()
    page.locator(STATUS).filter(has_text="Rank 0: send 4 MB to rank 1").wait_for()
    page.locator(".ddl-mark").nth(1).wait_for()
    assert page.locator(".ddl-mark").count() == 2
    assert page.locator("line.ddl-followed").count() == 1


def test_the_keyboard_alone_walks_follows_zooms_and_ends(opened):
    page = opened(two_ranks().interactive().html())
    for _ in range(3):
        page.keyboard.press("Tab")  # the three buttons come first
    page.keyboard.press("Tab")
    said = page.locator(STATUS)
    said.filter(has_text="Enter follows the message").wait_for()
    page.keyboard.press("ArrowRight")
    said.filter(has_text="Rank 0: send 4 MB to rank 1").wait_for()
    page.keyboard.press("ArrowDown")
    said.filter(has_text="Rank 1: recv 4 MB from rank 0").wait_for()
    page.keyboard.press("Enter")
    said.filter(has_text="Rank 0: send").wait_for()
    before = axis(page)
    page.keyboard.press("+")
    page.wait_for_function(f"(before) => {AXIS} !== before", arg=",".join(before))
    page.keyboard.press("0")
    page.wait_for_function(f"(before) => {AXIS} === before", arg=",".join(before))
    page.keyboard.press("Escape")
    said.filter(has_text="Point at a bar").wait_for()
    assert page.evaluate("document.activeElement === document.body"), "Escape leaves the picture"


@pytest.mark.parametrize("way", ["button", "wheel"])
def test_a_button_and_the_wheel_zoom_and_reset_comes_back(opened, way):
    page = opened(two_ranks().interactive().html())
    page.locator(f"{LANES} > g > rect").first.wait_for()
    before = ",".join(axis(page))
    if way == "button":
        page.get_by_role("button", name="Zoom in").click()
    else:
        point_at(page, 0.5, rank=0)
        page.keyboard.down("Control")
        page.mouse.wheel(0, -600)
        page.keyboard.up("Control")
    page.wait_for_function(f"(before) => {AXIS} !== before", arg=before)
    page.get_by_role("button", name="Reset").click()
    page.wait_for_function(f"(before) => {AXIS} === before", arg=before)


def test_the_wheel_alone_scrolls_the_page_and_not_the_timeline(opened):
    text = two_ranks().interactive().html()
    page = opened(text.replace("</main>", "<div style='height: 3000px'></div></main>"))
    before = axis(page)
    point_at(page, 0.5, rank=0)
    page.mouse.wheel(0, 200)
    page.wait_for_function("() => window.scrollY > 100")
    assert axis(page) == before


def test_dragging_moves_a_part(opened):
    page = opened(two_ranks().part(since=0.004, until=0.008).interactive().html())
    page.locator(f"{LANES} > g > rect").first.wait_for()
    before = ",".join(axis(page))
    point_at(page, 0.3, rank=0)
    page.mouse.down()
    point_at(page, 0.7, rank=0)
    page.mouse.up()
    page.wait_for_function(f"(before) => {AXIS} !== before", arg=before)
    page.get_by_role("button", name="Whole cell").click()
    page.locator(f"{LANES} text", has_text=re.compile(r"^0$")).wait_for()


def test_two_timelines_on_a_page_leave_each_other_alone(opened):
    one, other = two_ranks().interactive(), two_ranks().interactive()
    page = opened(one.html().replace("</main>", f"{other.piece()}</main>"))
    point_at(page, 0.2, rank=1, piece=1)
    page.locator(STATUS).nth(1).filter(has_text="Rank 1: recv").wait_for()
    assert "Point at a bar" in page.locator(STATUS).nth(0).inner_text()


def test_without_scripts_the_still_picture_is_there_with_its_words(opened):
    shown = two_ranks()
    page = opened(shown.interactive().html(), java_script_enabled=False)
    (image,) = page.locator(".ddl-interactive img").all()
    assert image.get_attribute("alt") == shown.alt_text
    assert image.bounding_box()["width"] > 800
    assert page.locator(LANES).count() == 0


def test_a_script_that_fails_leaves_the_still_picture(chromium, tmp_path):
    script = tmp_path / "broken.js"
    script.write_text("root.append('half'); data.missing.more;\n")
    figure, _ = figures.chart(4, 2)
    (tmp_path / "broken.html").write_text(Interactive(script, {}, figure, "A picture.").html())
    page = chromium.new_page()
    page.goto((tmp_path / "broken.html").as_uri())
    assert page.locator("img[alt='A picture.']").count() == 1
    assert "half" not in page.locator("main").inner_text()
    page.close()


def everything() -> Timeline:
    """A rank that is stuck, one that doesn't answer, background operations, and a collective."""
    stuck = made(0, op="recv", start=10.001, matched=None, end=None, waits=[[10.001, None]])
    return Timeline([reported(stuck), {"rank": 1, "error": "it is dead"}])


@pytest.mark.parametrize(("scheme", "width"), [("light", 1000), ("dark", 400)])
def test_everyone_can_read_and_use_interactive_timelines(opened, tmp_path, scheme, width):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    pieces = [simulated(pipeline(4), 4), everything()]
    text = pieces[0].interactive().html()
    text = text.replace("</main>", f"{pieces[1].interactive().piece()}</main>")
    page = opened(text, width, color_scheme=scheme)
    page.locator(f"{LANES} > g > rect").first.wait_for()
    photograph(page, tmp_path, f"timelines-{scheme}-{width}")
    said = axe.run(page).response["violations"]
    assert [(one["id"], one["nodes"][0]["html"]) for one in said] == []
    wider = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(wider) <= 0


def test_a_dark_page_has_light_words_on_a_dark_ground(opened):
    page = opened(two_ranks().interactive().html(), color_scheme="dark")
    ground, ink = page.locator(".ddl-interactive").evaluate(
        "e => [getComputedStyle(e).backgroundColor, getComputedStyle(e).color]"
    )
    assert sum(map(int, re.findall(r"\d+", ground)[:3])) < 200
    assert sum(map(int, re.findall(r"\d+", ink)[:3])) > 500


def test_a_slider_a_choice_and_a_button_tell_the_script_what_the_reader_did(opened, tmp_path):
    script = tmp_path / "controls.js"
    script.write_text(
        'const line = ddl.status("");\n'
        'const size = ddl.slider({ label: "size", min: 1e3, max: 1e9, value: 1e6, log: true,\n'
        "  format: ddl.bytes }, (value) => line.say(ddl.bytes(value)));\n"
        'const net = ddl.choice({ label: "network", options: ["fast", ["slow", "1 Mbit/s"]] },\n'
        "  (value) => line.say(value));\n"
        "const show = (share) => line.say(`at ${share}`);\n"
        'const play = ddl.button("Play", () => ddl.animate(5, show));\n'
        "root.append(ddl.controls(size, net, play), line);\n"
    )
    figure, _ = figures.chart(4, 2)
    page = opened(Interactive(script, {}, figure, "Controls.").html(), reduced_motion="reduce")
    slider = page.get_by_label("size")
    assert slider.get_attribute("aria-valuetext") == "1 MB"
    slider.press("End")
    page.locator(STATUS).filter(has_text="1 GB").wait_for()
    page.get_by_text("1 Mbit/s").click()
    page.locator(STATUS).filter(has_text="slow").wait_for()
    # A reader who asked for less motion sees the end at once.
    page.get_by_role("button", name="Play").click()
    page.locator(STATUS).filter(has_text=re.compile("^at 1$")).wait_for()
