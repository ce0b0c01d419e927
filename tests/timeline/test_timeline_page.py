"""What a page gets of a timeline: calls, messages, sums, and how large all that is."""

from __future__ import annotations

import json
import re

import pytest
from test_timeline import (
    PROGRAMS,
    made,
    many,
    pipeline,
    reported,
    ring_all_reduce,
    simulated,
)

from utils.figures import forms
from utils.figures.interactive import HTML
from utils.timeline import Timeline, activity, page_data

RANK, KIND, ROW, START, MATCHED, END = range(6)
#: Bytes of a notebook's output besides its still picture.
MOST_BYTES = 61_000


def data_of(shown: Timeline) -> dict:
    return page_data.page_data(shown.title, shown.lanes, shown.totals)


def test_the_page_knows_every_calls_operation_bytes_partner_line_and_times():
    call = made(op="send", nbytes=2_000_000, peer=1, group=[0, 1], where="cell line 3",
                start=10.002, matched=10.005, end=10.009, waits=[[10.002, 10.009]])  # fmt: skip
    data = data_of(Timeline([reported(call), reported(rank=1)]))
    ((*fields,),) = data["calls"]
    assert (fields[RANK], fields[ROW]) == (0, -1)
    assert data["kinds"][fields[KIND]] == ["send", 2_000_000, 1, "cell line 3"]
    assert (fields[START], fields[MATCHED], fields[END]) == (2000, 3000, 7000)


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_the_page_has_all_calls_and_messages_of_every_pattern(name):
    shown = simulated(PROGRAMS[name](4), 4)
    data = data_of(shown)
    if len(shown.records) <= page_data.MOST_CALLS:
        assert len(data["calls"]) == len(shown.records)
        assert len(data["messages"]) == len(activity.messages(shown.records))
        assert data["left"] == 0
        assert data["together"] == []
    for send, recv, _ in data["messages"]:
        sender, receiver = data["calls"][send], data["calls"][recv]
        assert data["kinds"][sender[KIND]][2] == receiver[RANK]
        assert data["kinds"][receiver[KIND]][2] == sender[RANK]
    for met in data["collectives"]:
        assert len({data["calls"][k][RANK] for k in met}) == len(met)


def test_what_never_ended_has_no_end_on_the_page():
    calls = data_of(simulated(PROGRAMS["deadlock"](4), 4))["calls"]
    assert any(call[END] == -1 for call in calls)


def test_of_many_calls_the_page_has_the_longest_and_says_how_many_are_left():
    shown = simulated(many, 4)
    data = data_of(shown)
    assert len(data["calls"]) == page_data.MOST_CALLS
    assert data["left"] == len(shown.records) - page_data.MOST_CALLS
    for lane in shown.lanes:
        lasting = sorted(record["end"] - record["start"] for record in lane.records)
        kept = [call[END] / 1e6 for call in data["calls"] if call[RANK] == lane.rank]
        assert len(kept) == page_data.MOST_CALLS / 4
        assert min(kept) >= lasting[-len(kept)] - 1e-6
    assert {part[0] for part in data["together"]} == {0, 1, 2, 3}
    assert len(data["together"]) <= 4 * page_data.COLUMNS


@pytest.mark.parametrize("name", [*sorted(PROGRAMS), "many"])
def test_an_output_takes_few_bytes_of_a_notebook_however_much_happened(name):
    data, _ = simulated((PROGRAMS | {"many": lambda n: many})[name](4), 4)._repr_mimebundle_()
    still = len(data[forms.PNG])
    assert len(data[HTML].encode()) - still <= MOST_BYTES
    assert len(data["text/plain"]) < 4000


def test_a_notebook_gets_the_timeline_its_still_picture_and_the_table():
    shown = simulated(pipeline(4), 4)
    data, metadata = shown._repr_mimebundle_()
    assert data["text/plain"] == repr(shown)
    assert metadata[forms.PNG]["alt"] == shown.alt_text
    assert shown.title in data[HTML]


def test_the_sums_on_the_page_are_those_of_the_timeline_without_columns_of_zeros():
    heads, *rows = data_of(simulated(ring_all_reduce(4), 4))["sums"]
    assert "sent" in heads
    assert "in collectives" not in heads
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]


def test_a_part_begins_with_what_was_asked_for_on_the_page_and_in_the_figure():
    shown = simulated(pipeline(4), 4)
    part = shown.part(since=0.1, until=0.2)
    (view,) = re.findall(r'"view":(\[[^\]]*\])', part._repr_mimebundle_()[0][HTML])
    assert json.loads(view) == [100_000, 200_000]
    low, high = part.figure().axes[0].get_xlim()
    assert (low, high) == pytest.approx((100, 200), abs=2)
    assert shown._part == (None, None)
    assert part.totals == shown.totals


def test_a_rank_that_did_not_answer_is_on_the_page():
    data = data_of(Timeline([reported(), {"rank": 1, "error": "dead"}]))
    assert [lane[3] for lane in data["lanes"]] == ["", "dead"]
