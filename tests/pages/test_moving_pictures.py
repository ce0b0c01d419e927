"""The labs' pictures that move, in a real browser: they show what the labs' Python computes."""

from __future__ import annotations

import functools
import math
import re
from itertools import pairwise
from pathlib import Path

import pytest
from browser_tools import photograph
from playwright.sync_api import Browser, Page

from utils.figures.interactive import Interactive
from utils.forecast.run import Call, Run
from utils.labs.lab05 import many_ranks
from utils.labs.lab05 import moving_pictures as lab05
from utils.labs.lab05.forecast import fit_regimes
from utils.labs.lab06 import chunk_pictures
from utils.labs.lab06 import moving_pictures as lab06
from utils.labs.lab07 import moving_pictures as lab07
from utils.labs.lab07.bounded_steps import bounded_run
from utils.labs.lab10 import moving_pictures as lab10
from utils.labs.lab13 import faults
from utils.labs.lab13 import moving_pictures as lab13
from utils.labs.shared import fastest, schedules

SIZES = [4, 64, 2**10, 2**13, 2**16, 2**18, 2**20, 2**21, 2**22]
MOST_DATA = 31_000
#: Seconds within which a picture answers a move of its slider.
ANSWER = 0.3


def direct_story(place: int) -> dict:
    """What a rank of two notes that swaps its whole tensor with the other one."""
    sent = [16.0**place + (i + 1) ** 2 * 256 for i in range(2)]
    came = [16.0 ** (1 - place) + (i + 1) ** 2 * 256 for i in range(2)]
    total = [one + other for one, other in zip(sent, came, strict=True)]
    other = 1 - place
    return {
        "rank": place,
        "members": [0, 1],
        "length": 2,
        "base": 16,
        "messages": [
            {"op": "send", "peer": other, "id": None, "values": sent, "places": [0, 1], "over": 1},
            {"op": "recv", "peer": other, "id": None, "values": came, "places": None, "over": 1},
        ],
        "ends": [[0, 2, sent], [1, 2, sent]],
        "begin": sent,
        "end": total,
        "returned": None,
        "others": [],
        "unseen": 0,
    }


def film() -> Interactive:
    return chunk_pictures.film({"direct": [direct_story(0), direct_story(1)]})


def measured_network() -> Interactive:
    times = [2 * (3e-6 + n / 2 / 2e9) for n in SIZES]
    return lab05.crossover(fit_regimes(SIZES, times, ranks=2))


def recorded_steps() -> Run:
    """Four steps of two ranks, one of which is slower in the third step."""
    calls = tuple(Call("all_reduce", (0, 1), 2_700_000) for _ in range(4))
    events = tuple(
        tuple(
            event
            for k in range(4)
            for seconds in [4e-3 if (rank, k) == (1, 2) else 3e-3]
            for event in (("compute", seconds), ("start", k), ("wait", k))
        )
        for rank in range(2)
    )
    return Run(calls, events, (1.0, 1.0), cores=2)


@functools.cache
def surveyed() -> many_ranks.Survey:
    return many_ranks.survey(recorded_steps())


PICTURES = {
    "crossover-05": measured_network,
    "many-ranks": lambda: lab05.many_ranks(surveyed()),
    "crossover-06": lambda: lab06.crossover(4, alpha=5e-3, bandwidth=12.5e6),
    "film": film,
    "bound": lab07.bound,
    "pipeline": lab10.pipeline,
    "interval": lambda: lab13.interval(save=60, mtbf=44 * 3600),
}


class Shown:
    """A picture that is open in a browser, without network and without a kernel."""

    def __init__(self, page: Page, file: Path, picture: Interactive):
        self.page = page
        self.errors: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda line: self.errors.append(line.text))
        picture.save(file)
        page.goto(file.as_uri())
        self.wait_for_words()

    def wait_for_words(self) -> None:
        self.page.wait_for_function("document.querySelector('.ddl-status').textContent !== ''")

    def set(self, label: str, value: float, log: bool = False) -> None:
        """Move a slider."""
        self.page.get_by_label(label, exact=True).fill(repr(math.log10(value) if log else value))

    def said(self) -> str:
        assert self.errors == []
        return self.page.locator(".ddl-status").inner_text()

    def titles(self) -> list[str]:
        """What the parts of the drawing are called."""
        return self.page.locator("svg title").all_text_contents()


@pytest.fixture
def show(chromium: Browser, tmp_path: Path):
    pages = []

    def open_one(picture: Interactive, width: int = 900, **options) -> Shown:
        pages.append(chromium.new_page(viewport={"width": width, "height": 800}, **options))
        return Shown(pages[-1], tmp_path / "picture.html", picture)

    yield open_one
    for page in pages:
        page.close()


# --- the same numbers as in Python ----------------------------------------------------------------


def in_bytes(words: str) -> float:
    number, unit = words.split()
    return float(number) * {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]


@pytest.mark.parametrize(
    ("ranks", "alpha", "bandwidth"),
    [(4, 5e-3, 12.5e6), (64, 1e-5, 1e9), (63, 1e-4, 1e10), (2, 1e-6, 1e8)],
)
@pytest.mark.parametrize("links", ["between all pairs", "few"])
def test_the_crossover_is_where_the_labs_formulas_meet(show, ranks, alpha, bandwidth, links):
    shown = show(PICTURES["crossover-06"]())
    shown.set("Ranks p", ranks)
    shown.set("Latency α", alpha, log=True)
    shown.set("Bandwidth 1/β", bandwidth, log=True)
    shown.page.get_by_text(links, exact=True).click()
    costs = {name: lab06.cost_of(name)(ranks) for name in lab06.ALGORITHMS}
    costs["halving"] = lab06.halving_doubling(ranks)
    left_out = lab06.ALL_PAIRS if links == "few" else set()
    costs = {name: cost for name, cost in costs.items() if cost and name not in left_out}
    expected = fastest.fastest(costs, alpha, bandwidth)
    expected = [(name, begin) for name, begin in expected if begin <= fastest.SIZES[1]]
    words = shown.said()
    assert words.startswith(f"On {ranks} ranks the fastest is {expected[0][0]}")
    crossovers = [in_bytes(one) for one in re.findall(r"up to ([\d.e+]+ \w+)", words)]
    assert crossovers == pytest.approx([begin for _, begin in expected[1:]], rel=6e-3)
    for name, _ in expected[1:]:
        assert f", then {name}" in words


def test_the_fastest_is_the_one_with_the_shortest_time_at_each_size():
    for p in fastest.RANKS:
        costs = {name: lab06.cost_of(name)(p) for name in lab06.ALGORITHMS}
        best = fastest.fastest(costs, 1e-4, 1e8)
        ends = [*(begin for _, begin in best), 1e12]
        for (name, _), (begin, end) in zip(best, pairwise(ends), strict=True):
            size = (begin + end) / 2
            times = {each: cost.seconds(size, 1e-4, 1e8) for each, cost in costs.items()}
            assert times[name] == pytest.approx(min(times.values()))


def test_lab_05_begins_with_the_network_that_was_measured(show):
    shown = show(measured_network())
    assert "3 µs" in shown.page.locator("output").nth(2).inner_text()
    assert "2 GB/s" in shown.page.locator("output").nth(3).inner_text()
    # 3 (α + nβ) = 14 (α + nβ/8)
    meets = 11 * 3e-6 * 2e9 / (3 - 14 / 8)
    words = shown.said()
    assert words.startswith("On 8 ranks the fastest is recursive doubling up to")
    (crossover,) = re.findall(r"up to ([\d.]+ kB), then ring", words)
    assert in_bytes(crossover) == pytest.approx(meets, rel=0.02)


@pytest.mark.parametrize("bound", [0, 1, 4, math.inf])
@pytest.mark.parametrize("factor", [1, 2.5, 8])
def test_workers_compute_and_wait_as_by_the_labs_rule(show, bound, factor):
    steps, until = (20, 22, 25, 23), 600
    shown = show(lab07.bound(steps, slow=2, until=until))
    shown.set("Bound s", min(bound, lab07.BOUNDS[-1]))
    shown.set("Rank 3 slower by", factor)
    taken = [step * (factor if k == 2 else 1) for k, step in enumerate(steps)]
    run = bounded_run(taken, bound, until)
    assert sorted(shown.titles()) == sorted(
        f"rank {bar.worker + 1} {'waits' if bar.waits else 'computes'}: "
        f"{bar.begin:g} to {bar.end:g} ms"
        for bar in run.bars
    )
    words = shown.said()
    assert f"the largest staleness is {max(run.staleness)} update" in words
    rate = len(run.staleness) / (until / 1000)
    assert float(words.split(" gradients")[0]) == pytest.approx(rate, abs=0.5)


@pytest.mark.parametrize(("p", "m"), [(2, 1), (4, 6), (8, 16)])
@pytest.mark.parametrize("name", lab10.PLANS)
def test_the_pipelines_chart_is_the_plan_of_the_schedule(show, name, p, m):
    shown = show(lab10.pipeline())
    shown.page.get_by_text(name, exact=True).click()
    shown.set("Stages", p)
    shown.set("Microbatches", m)
    words = {kind: words for kind, (_, words) in lab10.KINDS.items()}
    spans = lab10.PLANS[name].spans(p, m)
    assert sorted(shown.titles()) == sorted(
        f"stage {stage}, {words[kind]}, microbatch {k}: {start} to {end}"
        for stage, kind, k, start, end in spans
    )
    assert f"the bubble is {100 * schedules.idle(spans):.0f} %" in shown.said()


def test_a_stage_holds_as_many_microbatches_as_the_lab_counts():
    for p in lab10.STAGES:
        for m in lab10.MICROBATCHES:
            for name, schedule in (("GPipe", schedules.gpipe), ("1F1B", schedules.one_f_one_b)):
                spans = lab10.PLANS[name].spans(p, m)
                assert lab10.held_in(spans) == schedules.held(schedule(p, m))


@pytest.mark.parametrize(
    ("save", "mtbf", "restart"),
    [(60, 44 * 3600, 600), (3, 3e4, 1200), (600, 1200, 30), (3600, 1200, 30)],
)
def test_the_best_interval_and_its_overhead_are_those_of_the_labs_formulas(
    show, save, mtbf, restart
):
    shown = show(lab13.interval(save=60, mtbf=44 * 3600))
    for label, value in (("MTBF", mtbf), ("Time of a save", save), ("Time of a restart", restart)):
        shown.set(label, value, log=True)
    shown.set("Your interval", 600, log=True)
    found = re.findall(r"every ([\d.]+) (\w+), ([\d.]+) %", shown.said())
    units = {"s": 1, "min": 60, "h": 3600, "d": 86_400}
    intervals = [math.sqrt(2 * save * mtbf), faults.daly(save, mtbf), 600]
    assert [float(n) * units[unit] for n, unit, _ in found[:2]] == pytest.approx(
        intervals[:2], rel=6e-3
    )
    for (*_, share), interval in zip(found, intervals, strict=True):
        expected = 100 * faults.overhead(interval, save, restart, mtbf)
        assert float(share) == pytest.approx(expected, rel=6e-3)


# --- many ranks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", many_ranks.LINKS)
def test_the_step_on_many_ranks_is_the_one_that_the_labs_python_computes(show, name):
    survey = surveyed()
    shown = show(lab05.many_ranks(survey))
    shown.page.get_by_text(name, exact=True).first.click()
    for k, spine, size in ((0, 1, 1), (4, 4, 100), (10, 4, 100), (12, 16, 1000)):
        shown.set("Ranks", k)
        shown.set("Oversubscription", many_ranks.SPINES.index(spine))
        shown.set("Weights and speed", many_ranks.SIZES.index(size))
        point = survey.points[name, spine, size][k]
        seconds, unit = re.search(r"takes ([\d.]+) (\w+) ", shown.said()).groups()
        scale = {"s": 1, "ms": 1e-3, "µs": 1e-6}[unit]
        assert float(seconds) * scale == pytest.approx(survey.step[k] + point.seconds, rel=6e-3)
        efficiency = 100 * survey.efficiencies(name, size, spine)[k]
        told = float(re.search(r"efficiency is (\d+) %", shown.said())[1])
        assert told == pytest.approx(efficiency, abs=0.51)
        if point.algorithm:
            assert f"{point.algorithm} all-reduce" in shown.said()


def test_the_picture_of_many_ranks_answers_a_move_in_time(show):
    shown = show(lab05.many_ranks(surveyed()))
    seconds = shown.page.evaluate("""async () => {
        const slider = document.querySelector("input[type=range]");
        const times = [];
        for (let k = 0; k <= Number(slider.max); k += 1) {
            const begin = performance.now();
            slider.value = k;
            slider.dispatchEvent(new Event("input", { bubbles: true }));
            await new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)));
            times.push((performance.now() - begin) / 1000);
        }
        return times;
    }""")
    assert sorted(seconds)[len(seconds) // 2] < ANSWER
    assert shown.said()


# --- the film ------------------------------------------------------------------------------------


def test_the_film_shows_a_chunk_as_complete_once_it_is_the_sum_over_all(show):
    shown = show(film())
    assert "direct: 0 of 2 cells complete" in shown.said()
    shown.page.get_by_role("button", name="Step").click()
    assert "Round 1 of 1. direct: 2 of 2 cells complete" in shown.said()
    shown.page.get_by_role("button", name="Back").click()
    assert "Round 0 of 1" in shown.said()


def test_the_film_plays_to_its_end_for_readers_who_asked_for_less_motion_too(show):
    shown = show(film(), reduced_motion="reduce")
    assert "Round 0 of 1" in shown.said(), "nothing moves by itself"
    shown.page.get_by_role("button", name="Play").click()
    shown.page.wait_for_function(
        "document.querySelector('.ddl-status').textContent.startsWith('Round 1')"
    )
    shown.page.get_by_role("button", name="Play").wait_for()


# --- for everyone --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_that_moves_is_small(name):
    picture = PICTURES[name]().piece()
    data = re.search(r"start\(document.currentScript.parentElement, (.*), \(root,", picture)[1]
    assert len(data.encode()) <= MOST_DATA


@pytest.mark.parametrize(("width", "scheme"), [(400, "dark"), (400, "light"), (1440, "light")])
@pytest.mark.parametrize("name", PICTURES)
def test_everyone_can_read_a_picture_that_moves(show, tmp_path, name, width, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    shown = show(PICTURES[name](), width=width, color_scheme=scheme)
    photograph(shown.page, tmp_path, f"moving-{name}-{width}-{scheme}")
    found = axe.run(shown.page).response["violations"]
    assert [(one["id"], one["nodes"][0]["html"]) for one in found] == []
    wider = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert shown.page.evaluate(wider) <= 0, "the page scrolls sideways"
    assert shown.errors == []


@pytest.mark.parametrize("name", PICTURES)
def test_the_arrow_keys_move_each_slider(show, name):
    shown = show(PICTURES[name]())
    sliders = shown.page.locator("input[type=range]")
    for k in range(sliders.count()):
        before = sliders.nth(k).input_value()
        sliders.nth(k).focus()
        shown.page.keyboard.press("ArrowRight")
        shown.page.keyboard.press("ArrowRight")
        if sliders.nth(k).input_value() == before:
            shown.page.keyboard.press("ArrowLeft")
        assert sliders.nth(k).input_value() != before
        shown.said()
