"""The site: it is built without a warning, every link leads somewhere, everyone can read it.

What a browser has to judge (contrast, names, landmarks, width) is left to axe-core.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import pytest
from browser_tools import photograph
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from places import ROOT
from site_tools import REPOSITORY, needs_site

from utils.course.notebook import notebooks, read

pytestmark = [needs_site, pytest.mark.usefixtures("modules")]
README = b"# Read me\n\nIt is short.\n\nThe end.\n\n## The labs\n"
#: A button or a fold has the name that its reader sees. By default, axe leaves this rule out.
VISIBLE_NAMES = {"rules": {"label-content-name-mismatch": {"enabled": True}}}
#: One page of each kind; `-m often` takes all pages.
KINDS = (
    *("index.html", "labs/index.html", "labs/01_c10d.html", "labs/glossary.html", "api.html"),
    *("api/utils.cluster.html", "search.html?q=staleness", "utils/mpi/PROTOCOL.html"),
    *("README.html", "install/index.html", "reference.html", "genindex.html"),
)


# --- links -------------------------------------------------------------------------------------


class Page(HTMLParser):
    """What a page links to, what can be linked to on it, and its pictures' words.

    links: of `href` and `src`. names: ids. pictures: (src, alt). hidden: texts within `details`.
    """

    def __init__(self, text: str):
        super().__init__()
        self.links: list[str] = []
        self.names: set[str] = set()
        self.pictures: list[tuple[str, str]] = []
        self.hidden, self.shown = "", ""
        self._depth = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        given = {key: value or "" for key, value in attrs}
        self.links += [given[key] for key in ("href", "src") if key in given]
        self.names |= {given[key] for key in ("id", "name") if key in given}
        if tag == "img":
            self.pictures.append((given["src"], given.get("alt", "")))
        self._depth += tag == "details"

    def handle_endtag(self, tag: str) -> None:
        self._depth -= tag == "details"

    def handle_data(self, data: str) -> None:
        if self._depth:
            self.hidden += data
        else:
            self.shown += data


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Page]:
    """All pages by their path on the site."""
    found = {path.relative_to(site).as_posix(): path for path in site.rglob("*.html")}
    own = {name: path for name, path in found.items() if not name.startswith("_")}
    return {name: Page(path.read_text("utf-8")) for name, path in own.items()}


def dead_links(pages: dict[str, Page], site: Path) -> Iterator[str]:
    """Links to no file, and to no place on a page."""
    for name, page in pages.items():
        for link in page.links:
            target = urlsplit(urljoin(f"http://site/{name}", link))
            if target.netloc != "site":
                continue
            path = unquote(target.path).lstrip("/") or "index.html"
            if not (site / path).is_file():
                yield f"{name}: {link}: no such file"
            elif target.fragment and unquote(target.fragment) not in pages[path].names:
                yield f"{name}: {link}: no such place"


def test_no_link_of_the_site_leads_nowhere(pages, site, labs):
    assert sum(len(page.links) for page in pages.values()) > 70 * (55 + len(labs))
    assert list(dead_links(pages, site)) == []


def test_a_dead_link_is_found(site):
    text = '<a href="nowhere.html">a</a><a href="#no">b</a><a href="#yes" id="yes">c</a>'
    text += '<img src="x.png">'
    found = list(dead_links({"index.html": Page(text)}, site))
    assert [line.split(": ")[1] for line in found] == ["nowhere.html", "#no", "x.png"]


def test_no_page_loads_anything_from_elsewhere(site):
    """A reader's address goes to nobody, and the site works on a network without a way out."""
    loads = re.compile(r'<(?:script|img|iframe)[^>]* src="https?:|<link[^>]* href="https?:')
    assert not [path.name for path in site.rglob("*.html") if loads.search(path.read_text("utf-8"))]


def test_every_lab_has_a_page_that_the_map_and_the_list_lead_to(pages, labs):
    names = {path.stem for path in labs}
    assert {f"labs/{name}.html" for name in names} <= set(pages["index.html"].links)
    assert {f"{name}.html" for name in names} <= set(pages["labs/index.html"].links)
    assert all(f"labs/{name}.html" in pages for name in names)


def test_links_to_files_that_are_no_pages_lead_to_the_repository(pages):
    assert f"{REPOSITORY}/blob/main/utils/models.py" in pages["README.html"].links
    assert f"{REPOSITORY}/tree/main/utils/checks" in pages["README.html"].links


# --- labs ----------------------------------------------------------------------------------------


def test_a_page_keeps_the_answers_folded_and_shows_what_they_give(pages):
    page = pages["labs/01_c10d.html"]
    assert 'raise NotImplementedError("Task 1.2: blocking send and recv")' in page.shown
    assert re.search(r"✓ (passed )?Task 1\.2", page.shown)
    assert "The solution" in page.hidden
    assert "SOLUTION" not in page.shown + page.hidden, "markers are for authors"
    assert page.shown.count("Write your answer here") == page.hidden.count("A model answer")


def test_every_picture_of_a_lab_is_told_in_words(pages, labs):
    told = {name: page.pictures for name, page in pages.items() if name.startswith("labs/")}
    assert sum(map(len, told.values())) > 11 * len(labs)
    assert not [(name, src) for name, all_ in told.items() for src, alt in all_ if len(alt) < 20]


def test_the_notebook_to_download_is_the_students(site, labs):
    for path in labs:
        assert (site / "labs" / path.name).read_bytes() == path.read_bytes()


def picture(alt: str):
    return new_output(
        "display_data",
        {"image/png": "", "text/plain": "<Figure>"},
        metadata={"image/png": {"alt": alt}},
    )


@pytest.fixture
def only_a_readme(monkeypatch):
    """Reading all notebooks takes seconds, and tells nothing about the folders."""
    from course_site import build

    monkeypatch.setattr(build, "_files", lambda _: [("README.md", README)])
    monkeypatch.setattr(build.overview, "parts", lambda *_: {"map": ""})
    monkeypatch.setattr(build, "all_labs", lambda: [])
    monkeypatch.setattr(build.api, "listed", lambda: "")
    return build


@pytest.mark.parametrize("mine", ["web", "web-pages"])
@pytest.mark.parametrize("clean", [True, False])
def test_no_build_removes_somebodys_files(tmp_path, monkeypatch, only_a_readme, mine, clean):
    monkeypatch.setattr("sphinx.cmd.build.main", lambda _: 0)
    out, thesis = tmp_path / "web", tmp_path / mine / "thesis.tex"
    thesis.parent.mkdir()
    thesis.write_text("three years")
    options = ["-o", str(out), *(["--clean"] if clean else [])]
    if clean or mine == "web-pages":
        with pytest.raises(SystemExit, match=f"{mine}: nothing was removed"):
            only_a_readme.main(options)
    else:
        assert only_a_readme.main(options) == 0
    assert thesis.exists()


def test_a_clean_build_removes_what_an_earlier_one_has_made(tmp_path, monkeypatch, only_a_readme):
    out, old = tmp_path / "web", tmp_path / "web-pages" / "old.md"

    def sphinx(_):
        out.mkdir()
        (out / "objects.inv").touch()
        return 0

    monkeypatch.setattr("sphinx.cmd.build.main", sphinx)
    assert only_a_readme.main(["-o", str(out)]) == 0
    old.touch()
    assert only_a_readme.main(["-o", str(out), "--clean"]) == 0
    assert not old.exists()
    assert (tmp_path / "web-pages" / "README.md").exists()


def test_a_page_is_made_of_both_notebooks():
    from course_site.lab_pages import page_of

    def cells(code: str, words: str, guess: str, *outputs):
        return [
            new_code_cell(code, id="task", outputs=[*outputs[:1]]),
            new_markdown_cell(words, id="why"),
            new_code_cell(f"predict('', {guess})", id="guess", metadata={"lab": {"predict": True}}),
            new_code_cell(
                "draw()",
                id="pictures",
                metadata={"jupyter": {"source_hidden": True}},
                outputs=[*outputs[1:]],
            ),
        ]

    done = new_output("stream", text="done")
    answer = "### BEGIN SOLUTION\nx = 1\n### END SOLUTION"
    solution = new_notebook(
        cells=cells(answer, "Because.", "3", done, picture("one"), picture("two"))
    )
    solution.cells.append(new_markdown_cell("Ask the class.", id="for-instructors"))
    student = new_notebook(cells=cells("raise", "Write.", "..."))
    page = page_of(solution, student).cells
    lines = [cell.source.splitlines()[0] for cell in page]
    fold = '<details class="answer"><summary>A model answer</summary>'
    assert lines == ["raise", "x = 1", "Write.", fold, "predict('', ...)", "draw()"]
    by_id = {cell.id: cell for cell in page}
    assert not by_id["task"].outputs
    assert by_id["task-solution"].outputs == [done]
    assert by_id["task-solution"].metadata["site"]["fold"] == "The solution"
    assert by_id["pictures"].metadata["site"]["fold"] == "The code of this picture"
    assert by_id["pictures"].metadata["site"]["pictures"] == ["one", "two"]


def test_nobody_takes_the_output_of_the_solution_for_the_stubs(pages):
    """A stub prints nothing, so the page says whose output is below it, and below its check."""
    from course_site.solved import outputs_of_solution

    given = ["%%px\nsize = 3", "%%px\nprint(size)", "ranks.timeline()"]
    solved = [
        "%%px\ndef ring(x): ...",
        "%%px\ntotal = ring(size)",
        "ranks.timeline()",
        "print(total)",
    ]
    sources = [*given, *solved, "%%px\ntotal = 0", "%%px\nprint(total)"]
    cells = [new_code_cell(source, id=str(k)) for k, source in enumerate(sources)]
    assert outputs_of_solution(cells, {"3"}) == {"3", "4", "5", "6"}
    assert pages["labs/01_c10d.html"].shown.count("Output of the solution") > 20


# --- words ---------------------------------------------------------------------------------------


def test_every_word_of_the_glossary_can_be_linked_to(pages):
    from course_site.glossary import entries

    found = entries((ROOT / "labs/glossary.md").read_text("utf-8"))
    assert len(found) > 100
    terms = [name for name in pages["labs/glossary.html"].names if name.startswith("term-")]
    assert len(terms) == sum(len(entry.words) for entry in found)


def test_a_row_of_the_glossary_that_would_be_lost_is_refused():
    from course_site.glossary import entries

    with pytest.raises(ValueError, match=r"'\| \*\*word\*\* \| meaning \[01\] \|' is wanted"):
        entries("| **rank** | A process. |")


def test_a_word_is_linked_where_it_first_stands_in_a_lab(pages):
    links = pages["labs/01_c10d.html"].links
    for word in ("all_reduce", "deadlock", "rank"):
        assert links.count(f"glossary.html#term-{word}") == 1, word
    assert not [link for link in links if "staleness" in link], "lab 07 brings it"


def test_the_cheat_sheet_has_every_call_of_the_labs():
    sheet = (ROOT / "labs/cheat_sheet.md").read_text("utf-8")
    used = set()
    for path in notebooks(ROOT / "solutions"):
        code = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "code")
        used |= set(re.findall(r"\bdist\.([a-z]\w*)\(", code))
    assert len(used) > 20
    assert not {name for name in used if f"dist.{name}(" not in sheet}


# --- addresses -----------------------------------------------------------------------------------


@pytest.fixture
def address(monkeypatch):
    """The module that knows the repository, with what the environment says now."""
    from course_site import address

    monkeypatch.delenv("DDL_LABS_BRANCH", raising=False)
    address.repository.cache_clear()
    yield address
    address.repository.cache_clear()


def test_the_repository_is_one_setting(address, monkeypatch):
    monkeypatch.delenv("DDL_LABS_REPOSITORY", raising=False)
    assert address.repository().startswith("https://")
    address.repository.cache_clear()
    monkeypatch.setenv("DDL_LABS_REPOSITORY", f"{REPOSITORY}.git")
    assert address.in_repository("labs") == f"{REPOSITORY}/blob/main/labs"
    assert not address.is_placeholder()
    binder = "https://mybinder.org/v2/gh/school/ddl-labs/main?urlpath=lab/tree/01_c10d.ipynb"
    assert address.in_binder("labs/01_c10d.ipynb") == binder


def test_binder_gets_repositories_of_other_hosts_too(address, monkeypatch):
    monkeypatch.setenv("DDL_LABS_REPOSITORY", "https://git.example.org/a/b")
    assert address.in_binder("x.ipynb").startswith(
        "https://mybinder.org/v2/git/https%3A%2F%2Fgit.example.org%2Fa%2Fb/main?"
    )
    assert address.is_placeholder()


def test_an_address_that_is_none_is_refused(address, monkeypatch):
    monkeypatch.setenv("DDL_LABS_REPOSITORY", "school/ddl-labs")
    with pytest.raises(ValueError, match="must be a URL such as https://github"):
        address.repository()


# --- diagrams and the reference ------------------------------------------------------------------


def test_diagrams_are_drawn_without_scripts(pages):
    text = pages["utils/mpi/PROTOCOL.html"].shown
    assert "rank A to the board: announce: write fingerprint of 7" in text
    assert "sequenceDiagram" not in text


def test_a_diagram_that_cannot_be_drawn_is_refused():
    from course_site.sequences import drawn

    for line in ("activate A", "A->>A: looks; waits"):
        with pytest.raises(ValueError, match=f"can't draw: '{line}'"):
            drawn(f"sequenceDiagram\nparticipant A as a\n{line}")


def test_the_reference_reads_docstrings_as_the_course_writes_them(pages):
    page = pages["api/utils.cluster.html"]
    assert "utils.cluster.start" in page.names
    assert "seconds that a communication of the backend waits" in page.shown
    assert "timeout: seconds" not in page.shown, "a list of definitions, not a line of text"


# --- in a browser --------------------------------------------------------------------------------


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 400)])
def test_everyone_can_read_every_kind_of_page(served, chromium, tmp_path, scheme, width):
    assert_readable(KINDS, served, chromium, tmp_path, scheme, width)


@pytest.mark.often
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everyone_can_read_every_page(pages, served, chromium, tmp_path, scheme, width):
    assert_readable(sorted(pages), served, chromium, tmp_path, scheme, width)


def assert_readable(names, served, chromium, folder, scheme, width) -> None:
    """Pages without violations of axe's rules, and no wider than the window."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    for name in names:
        page.goto(f"{served}/{name}")
        if name.startswith("search.html?"):  # without a question there are no results
            page.locator("#search-results li").first.wait_for()
        photograph(page, folder, f"site-{Path(urlsplit(name).path).stem}-{scheme}-{width}")
        said = axe.run(page, options=VISIBLE_NAMES).response["violations"]
        assert [(one["id"], one["nodes"][0]["html"]) for one in said] == [], name
        wider = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert page.evaluate(wider) <= 0, f"{name} scrolls sideways"
    page.close()


def test_a_lab_opens_in_the_readers_hub_by_keyboard(served, chromium):
    from course_site.launch import git_link

    hub = "https://hub.school.example"
    wanted = git_link(hub, REPOSITORY, "labs/01_c10d.ipynb", "main", "")
    context = chromium.new_context()
    page = context.new_page()
    page.route(f"{hub}/**", lambda route: route.fulfill(body="the hub"))
    for told in (f"{hub}/hub/home", ""):  # the second time the browser knows it
        page.goto(f"{served}/labs/01_c10d.html")
        page.locator("h1 + p + .launch").get_by_role("button", name="Open in my hub").focus()
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "hub-address"
        page.keyboard.type(told)
        page.keyboard.press("Enter")
        page.wait_for_url(f"{hub}/**")
        assert page.url == wanted
    context.close()


def test_a_lab_of_the_map_is_reached_by_keyboard(served, chromium):
    page = chromium.new_page()
    page.goto(f"{served}/index.html")
    page.get_by_role("link", name="03 · Data parallel: 160 minutes, 4 ranks").focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**/labs/03_data_parallel.html")
    page.close()
