"""Schedules of pipelines as data, and their drawings."""

from __future__ import annotations

import pytest

from utils.labs.lab10 import pictures as drawings
from utils.labs.shared import schedules

SIZES = [(p, m) for p in range(1, 5) for m in range(1, 9)]


@pytest.mark.parametrize("kind", [schedules.gpipe, schedules.one_f_one_b])
def test_the_bubble_of_a_flushed_schedule_is_that_of_the_formula(kind):
    for p, m in SIZES:
        schedule = kind(p, m)
        assert schedules.faults(schedule) is None
        spans, done = schedules.planned(schedule)
        assert done == [2 * m] * p
        assert schedules.idle(spans) == pytest.approx((p - 1) / (m + p - 1))


def test_1f1b_holds_as_many_microbatches_as_there_are_stages_behind():
    for p, m in SIZES:
        assert schedules.held(schedules.gpipe(p, m)) == [m] * p
        assert schedules.held(schedules.one_f_one_b(p, m)) == [min(m, p - s) for s in range(p)]


def test_a_schedule_as_text_and_back():
    schedule = schedules.one_f_one_b(3, 4)
    assert schedules.parse(schedules.written(schedule)) == schedule
    assert schedules.parse("\nF0 B0  # the only one\n\n") == [[("F", 0), ("B", 0)]]
    with pytest.raises(ValueError, match=r"stage 1: 'G0' is not an action. Write F2 or B2"):
        schedules.parse("F0 B0\nF0 G0")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("F0 B0\nB0 F0", "stage 0 waits with B0 for B0 of stage 1; stage 1 waits with B0 for F0"),
        ("F0 B0\nF0", "stage 1: B0 is missing"),
        ("F0 F0 B0", "stage 0: F0 is there twice"),
        ("F1 B1", "stage 0: F0 is missing"),
    ],
)
def test_what_is_wrong_with_a_schedule_is_said(text, said, capsys):
    assert said in schedules.faults(schedules.parse(text))
    schedules.look_at(text, limit=1)
    assert capsys.readouterr().out.startswith("✗ ")


def test_a_schedule_beyond_the_limit_is_told(capsys):
    schedules.look_at(schedules.written(schedules.gpipe(4, 4)), limit=3)
    printed = capsys.readouterr().out
    assert "legal and complete: 4 stages, 4 microbatches, length 21" in printed
    assert "✗ in flight at most: [4, 4, 4, 4], but 3 are allowed" in printed
    schedules.look_at(schedules.written(schedules.one_f_one_b(3, 4)), limit=3)
    assert "✓ in flight at most: [3, 2, 1]" in capsys.readouterr().out


def test_the_best_known_schedule_is_legal_within_its_memory_and_as_short_as_can_be(capsys):
    best = schedules.parse(schedules.BEST)
    assert max(schedules.held(best)) == 3
    assert max(end for *_, end in schedules.planned(best)[0]) == 30
    schedules.look_at(schedules.BEST, limit=3)
    assert "✓ as small as the best known: 0.400" in capsys.readouterr().out
    schedules.look_at(schedules.written(schedules.one_f_one_b(4, 6)), limit=3)
    assert "→ the best known: 0.400" in capsys.readouterr().out  # 1F1B holds 4: no way to win


@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 3), (4, 6), (4, 8)])
def test_with_late_weights_the_bubble_is_a_third_of_that_of_1f1b(p, m):
    spans = schedules.zero_bubble(p, m)
    assert len(spans) == 3 * p * m
    assert max(end for *_, end in spans) == 3 * m + p - 1  # 1F1B: 3 (m + p − 1)
    by = {tuple(span[:3]): span[3:] for span in spans}
    for (s, kind, k), (start, _) in by.items():
        needed = {"F": (s - 1, "F", k), "I": (s + 1, "I", k), "W": (s, "I", k)}[kind]
        if kind == "I" and s == p - 1:
            needed = (s, "F", k)
        assert needed not in by or by[needed][1] <= start


def test_a_gantt_chart_tells_lanes_and_bubbles():
    spans, _ = schedules.planned(schedules.gpipe(2, 2))
    later = [[s, kind, k, a + 50, e + 50] for s, kind, k, a, e in spans]
    figure = drawings.gantt({"planned": spans, "measured": later}, "ms")
    assert figure.alt_text == (
        "planned: 9 ms, bubble 0.33. stage 0 F0 F1 B1 B0; stage 1 F0 F1 B1 B0. "
        "measured: 9 ms, bubble 0.33. stage 0 F0 F1 B1 B0; stage 1 F0 F1 B1 B0."
    )
    with pytest.raises(ValueError, match="measured: There is nothing to draw"):
        drawings.gantt({"planned": spans, "measured": []})


def test_versions_and_placed_layers_are_told_in_words():
    figure = drawings.versions([[0, 0, 1], [0, 1, 2]])
    assert figure.alt_text.endswith("Stage 0: 0, 0, 1. Stage 1: 0, 1, 2")
    said = drawings.placed(["784 → 128", "128 → 10"], stages=2).alt_text
    assert said.startswith("2 layers in a row on 2 ranks: 784 → 128, 128 → 10.")
