"""What a reader does on the site: copies, predicts before a result, enlarges, marks labs as read.

Pages are opened as files, too: a student may have the site in a folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from browser_tools import photograph
from nbformat.v4 import new_code_cell, new_notebook, new_output
from places import ROOT
from playwright.sync_api import Page, expect
from site_tools import build, needs_site

from utils.course.notebook import notebooks, read

pytestmark = [needs_site, pytest.mark.usefixtures("modules")]
ASKS = "#forgotten-predict"  # Lab 01: what does rank 0 do if nobody receives?
OUTPUTS = "details[data-waits-for='forgotten-predict']"
SHOWN = "● the run"  # the mark of what happened, among the choices


# --- predictions: reading a cell -----------------------------------------------------------------


def test_a_question_and_its_choices_are_read_from_the_cell():
    from course_site.predictions import form, questions

    (asked,) = questions('WAYS = ["ring", "tree"]\nguess = predict("Faster?", ..., choices=WAYS)')
    assert (asked.text, asked.choices, asked.variable) == ("Faster?", ("ring", "tree"), "guess")
    (asked,) = questions('g = predict("How " "many?", {"a": ..., "b": ...}, unit="ms")')
    assert (asked.text, asked.names, asked.unit) == ("How many?", ["a", "b"], "ms")
    (asked,) = questions("g = predict('q', {'a': ..., 'b': ...}, choices=['x', 'y'])")
    assert form("cell", [asked]).count('class="choices"') == 2
    module = (
        "from utils.labs.lab11 import mix_search\ng = predict('q', ..., choices=mix_search.KINDS)"
    )
    assert "ZeRO-2" in questions(module)[0].choices


def test_choices_that_a_page_cannot_show_are_refused():
    from course_site.predictions import questions

    with pytest.raises(ValueError, match=r"can't read 'sorted\(x\)' of a prediction"):
        questions("guess = predict('q', ..., choices=sorted(x))")


def test_every_prediction_of_the_labs_can_be_made_on_the_site():
    from course_site.predictions import covers, is_prediction, questions

    asked = 0
    for path in notebooks(ROOT / "solutions"):
        cells = read(path).cells
        answered = {asks for some in covers(cells).values() for asks in some}
        for cell in filter(is_prediction, cells):
            assert cell.id in answered, f"{path.name}: {cell.id} has no result"
            asked += len(questions(cell.source))
    assert asked >= 60


def test_a_result_waits_for_its_own_prediction_up_to_the_picture_beside_it():
    from course_site.predictions import covers

    def guess(name: str, variable: str):
        cell = new_code_cell(f"{variable} = predict('q', 1)", id=name)
        cell.metadata.lab = {"predict": True}
        return cell

    nb = new_notebook(
        cells=[
            guess("one", "a"),
            new_code_cell("run()", id="run"),
            guess("two", "b"),
            new_code_cell("a.beside(1)", id="shows-one"),
            new_code_cell("b.beside(2)", id="shows-two"),
        ]
    )
    waits = {"run": ["one"], "two": ["one"], "shows-one": ["one", "two"], "shows-two": ["two"]}
    assert covers(nb.cells) == waits


# --- outputs -------------------------------------------------------------------------------------


def output(**data: str):
    kinds = {"html": "text/html", "png": "image/png", "words": "text/plain"}
    kinds["widget"] = "application/vnd.jupyter.widget-view+json"
    return new_output("display_data", {kinds[kind]: value for kind, value in data.items()})


def test_nobody_reads_what_a_file_keeps_of_a_widget():
    from course_site.lab_pages import page_of

    cell = new_code_cell(
        "x",
        outputs=[
            output(widget="{}", words="Output()"),
            output(widget="{}", words="HBox()", html="<b>3</b>"),
        ],
    )
    nb = new_notebook(cells=[cell])
    (shown,) = page_of(nb, nb).cells
    assert [sorted(each.data) for each in shown.outputs] == [["text/html", "text/plain"]]


def test_a_page_that_can_be_touched_comes_before_the_picture_of_it():
    from course_site.lab_pages import page_of

    touch = output(html="<svg></svg><script>1</script>", png="", words="<Figure>")
    nb = new_notebook(cells=[new_code_cell("x", outputs=[touch])])
    (shown,) = page_of(nb, nb).cells
    assert sorted(shown.outputs[0].data) == ["text/html", "text/plain"]


def test_no_lab_of_the_site_shows_a_widgets_remains(site):
    for path in (site / "labs").glob("[0-9]*.html"):
        text = path.read_text("utf-8")
        for remains in ("Output()", "HBox(children", "VBox(children", "%|          |"):
            assert remains not in text, path.name


# --- without an address --------------------------------------------------------------------------


@pytest.mark.extended
def test_no_link_leads_to_an_address_that_nobody_has_given(tmp_path):
    out = build(tmp_path / "site", "--labs", "00")
    pages = {path: path.read_text("utf-8") for path in out.rglob("*.html")}
    assert len(pages) > 20
    wrong = [path.name for path, text in pages.items() if 'href="https://example.org' in text]
    assert not wrong
    assert "example.org" not in pages[out / "index.html"] + pages[out / "install/index.html"]
    lab = (out / "labs/00_start_here.html").read_text("utf-8")
    assert "Open in Binder" not in lab
    assert "Download the notebook" in lab


# --- in a browser --------------------------------------------------------------------------------


@pytest.fixture(params=["file", "http"])
def root(request, site) -> str:
    """The site's address: a folder, or a host of pages."""
    return site.as_uri() if request.param == "file" else request.getfixturevalue("served")


@pytest.fixture
def reader(chromium) -> Iterator[Page]:
    """A page of a reader whom the browser does not know yet; scripts must not fail."""
    context = chromium.new_context()
    page = context.new_page()
    failed: list[str] = []
    page.on("pageerror", lambda error: failed.append(str(error)))
    yield page
    context.close()
    assert failed == []


def test_a_command_is_copied_and_an_output_has_no_button(served, chromium):
    context = chromium.new_context(permissions=["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.goto(f"{served}/install/index.html")
    page.locator(".copybtn").first.focus()
    page.keyboard.press("Enter")
    expect(page.locator(".copybtn.success")).to_be_visible()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == "git clone https://github.com/school/ddl-labs\ncd ddl-labs\nmake lab"
    page.goto(f"{served}/labs/01_c10d.html")
    assert page.locator(".cell_input .copybtn").count() > 50
    assert page.locator(".cell_output .copybtn").count() == 0
    context.close()


def test_a_result_is_covered_until_the_reader_has_chosen_and_stays_open(root, reader, tmp_path):
    reader.goto(f"{root}/labs/01_c10d.html")
    result = reader.locator(OUTPUTS).get_by_text(SHOWN)
    expect(result).to_be_hidden()
    expect(reader.get_by_text("Rank 0 continued.")).to_be_hidden()
    photograph(reader, tmp_path, "site-prediction-covered")
    reader.locator(ASKS).get_by_role("button", name="it waits").focus()
    reader.keyboard.press("Enter")
    expect(result).to_be_visible()
    reader.locator("details.outcome > summary", has_text="Show what happened").first.click()
    expect(reader.get_by_text("Rank 0 continued.")).to_be_visible()
    said = "You chose “it waits”."
    expect(reader.locator(ASKS).get_by_role("status")).to_contain_text(said)
    expect(reader.locator(f"{OUTPUTS} .your-choice:visible")).to_contain_text(said)
    reader.reload()
    expect(result).to_be_visible()
    chosen = reader.locator(ASKS).get_by_role("button", name="it waits")
    expect(chosen).to_have_attribute("aria-pressed", "true")


def test_numbers_are_predicted_and_can_be_hidden_again(root, reader):
    reader.goto(f"{root}/labs/03_data_parallel.html")
    asks = reader.locator("#speed-predict")
    result = reader.locator("details[data-waits-for='speed-predict'] img").last
    expect(result).to_be_hidden()
    asks.get_by_label("minibatch of 64").fill("0.5")
    asks.get_by_label("minibatch of 512").fill("1.5")
    reader.keyboard.press("Enter")
    expect(result).to_be_visible()
    said = "You chose minibatch of 64: 0.5 ×; minibatch of 512: 1.5 ×."
    expect(asks.get_by_role("status")).to_contain_text(said)
    asks.get_by_role("button", name="Hide the result again").click()
    expect(result).to_be_hidden()
    expect(asks.get_by_label("minibatch of 64")).to_be_focused()
    reader.reload()
    expect(result).to_be_hidden()
    expect(asks.get_by_label("minibatch of 64")).to_have_value("")


def test_without_scripts_a_result_opens_and_on_paper_all_is_open_and_whole(served, chromium):
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{served}/labs/01_c10d.html")
    expect(page.locator(ASKS)).to_be_hidden()
    result = page.locator(OUTPUTS).get_by_text(SHOWN)
    expect(result).to_be_hidden()
    page.emulate_media(media="print")
    expect(result).to_be_visible()
    expect(page.get_by_text("Rank 0 continued.")).to_be_visible()
    navigation = "nav, header, button, .launch, .prev-next-footer"
    assert page.locator(navigation).filter(visible=True).count() == 0
    boxes = page.locator("article :is(pre, img, table, svg, .admonition)").filter(visible=True)
    assert boxes.count() > 100
    breaks = "all => [...new Set(all.map(each => getComputedStyle(each).breakInside))]"
    assert boxes.evaluate_all(breaks) == ["avoid"]
    page.emulate_media(media="screen")
    page.locator(f"{OUTPUTS} summary").last.click()
    expect(result).to_be_visible()
    context.close()


def test_a_search_finds_the_lab_and_shows_the_text_around_the_word(root, reader):
    reader.goto(f"{root}/search.html?q=deadlock")
    results = reader.locator("#search-results li")
    word = results.filter(has=reader.locator("a[href$='#term-deadlock']"))
    expect(word).to_contain_text("ranks wait for each other")
    lab = results.filter(has=reader.locator("a[href='labs/01_c10d.html']"))
    expect(lab.locator(".context .highlighted").first).to_have_text(re.compile("deadlock", re.I))


def test_a_picture_opens_large_and_the_reader_is_back_where_he_was(root, reader, tmp_path):
    reader.set_viewport_size({"width": 400, "height": 900})
    reader.goto(f"{root}/labs/04_ddp.html")
    button = reader.get_by_role("button", name="Enlarge the picture").first
    small = reader.locator(".can-enlarge img").first
    button.press("Enter")
    large = reader.get_by_role("dialog").get_by_role("img")
    expect(large).to_be_visible()
    assert large.get_attribute("alt") == small.get_attribute("alt")
    assert large.bounding_box()["width"] > 1.5 * small.bounding_box()["width"]
    photograph(reader, tmp_path, "site-picture-enlarged")
    reader.keyboard.press("Escape")
    expect(large).to_be_hidden()
    expect(button).to_be_focused()
    small.click()
    expect(large).to_be_visible()
    reader.get_by_role("button", name="Close").click()
    expect(large).to_be_hidden()


def test_a_moving_picture_can_be_paused_and_begins_still_for_readers_who_want_that(root, reader):
    moving, still = reader.locator(".moving img"), reader.locator(".moving canvas")
    reader.set_viewport_size({"width": 1440, "height": 900})
    reader.goto(f"{root}/index.html")
    expect(reader.locator("h1 + p + p.start")).to_be_in_viewport()
    expect(moving).to_be_in_viewport()
    reader.get_by_role("button", name="Pause").press("Enter")
    expect(moving).to_be_hidden()
    expect(still).to_be_visible()
    reader.emulate_media(reduced_motion="reduce")
    reader.reload()
    expect(still).to_have_attribute("aria-label", moving.get_attribute("alt"))
    expect(moving).to_be_hidden()
    reader.get_by_role("button", name="Play").click()
    expect(moving).to_be_visible()


def test_the_front_page_is_the_head_of_the_readme(site):
    text = re.sub(r"<[^>]+>", "", (site / "index.html").read_text("utf-8"))
    assert "git clone https://github.com/school/ddl-labs" in text
    assert "is a placeholder until" not in text, "this site has an address"
    assert text.index("For your class") < text.index("The map")


def test_the_reference_leads_to_every_name_of_a_module(site):
    text = (site / "api.html").read_text("utf-8")
    for name in ("cluster.html#utils.cluster.start", "figures.predict.html#utils.figures.predict"):
        assert f'href="api/utils.{name}' in text


def test_a_lab_is_marked_where_its_page_ends_or_by_the_button(root, reader):
    reader.goto(f"{root}/labs/02_samplers.html")
    lab = reader.locator("nav.bd-docs-nav a").filter(has_text="02 · Samplers")
    button = reader.locator(".end-of-lab button")
    expect(button).to_have_text("Mark as read")
    expect(lab.locator(".is-read")).to_have_count(0)
    button.scroll_into_view_if_needed()
    expect(lab.locator(".is-read")).to_have_text("✓, read")
    reader.goto(f"{root}/labs/index.html")
    expect(reader.locator("dt .is-read")).to_have_count(1)
    reader.goto(f"{root}/index.html")
    expect(reader.locator(".course-map .is-read")).to_have_count(1)
    reader.goto(f"{root}/labs/02_samplers.html")
    button.press("Enter")
    expect(button).to_have_text("Mark as read")
    expect(lab.locator(".is-read")).to_have_count(0)


def test_the_sidebar_has_the_name_of_its_part(served, reader):
    for page, name in (("labs/01_c10d", "Labs"), ("api/utils.cluster", "Reference")):
        reader.goto(f"{served}/{page}.html")
        navigation = reader.get_by_role("navigation", name=name)
        expect(navigation.get_by_role("heading")).to_have_text(name)


@pytest.mark.parametrize(("scheme", "width"), [("light", 1440), ("dark", 400)])
def test_everyone_can_use_what_a_reader_opens(served, chromium, tmp_path, scheme, width):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    page.goto(f"{served}/labs/01_c10d.html")
    page.locator(ASKS).get_by_role("button", name="it waits").click()
    page.locator(".end-of-lab").scroll_into_view_if_needed()
    photograph(page, tmp_path, f"site-read-{scheme}-{width}")
    page.get_by_role("button", name="Enlarge the picture").first.click()
    photograph(page, tmp_path, f"site-dialog-{scheme}-{width}")
    said = axe.run(page).response["violations"]
    page.keyboard.press("Escape")
    said += axe.run(page).response["violations"]
    assert [(one["id"], one["nodes"][0]["html"]) for one in said] == []
    context.close()
