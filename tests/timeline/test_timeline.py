"""Timelines of what the ranks communicated: sums, pairs, pictures, traces, clocks."""

from __future__ import annotations

import base64
import json
import re
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import matplotlib.pyplot as plt
import pytest
from lab_tools import ROOT
from matplotlib.colors import to_rgb
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

from utils import cluster, timeline
from utils.figures import alt
from utils.timeline import Timeline, activity, ideal_network, layout, phrases, picture

MS = 1e-3

# --- ranks that run in simulated time ----------------------------------------------------------

LATENCY, BANDWIDTH = 0.2e-3, 1e9  # seconds, bytes per second


@dataclass
class Operation:
    """What a simulated rank asks for. Its record is what the timeline gets."""

    op: str
    group: tuple[int, ...] = ()
    nbytes: int = 0
    peer: int | None = None
    blocking: bool = True
    seconds: float = 0.0
    record: dict = field(default_factory=dict)


def compute(seconds: float) -> Operation:
    return Operation("compute", seconds=seconds)


def wait(operation: Operation) -> Operation:
    return Operation("wait", record=operation.record)


class Simulation:
    """Programs, one generator per rank, that yield operations; messages meet in order."""

    def __init__(self, *programs: Callable[[int], Iterator[Operation]], patience: float = 0.1):
        self.patience = patience
        self.programs = [program(rank) for rank, program in enumerate(programs)]
        self.world = tuple(range(len(programs)))
        self.now = [1000.0 + 0.1e-3 * rank for rank in self.world]
        self.held: list[dict | None] = [None] * len(programs)
        self.reports = [
            {"rank": rank, "begin": self.now[rank], "end": None, "records": []}
            for rank in self.world
        ]
        self.sides: dict[tuple, dict[str, list[dict]]] = defaultdict(lambda: defaultdict(list))
        self.called: dict[tuple, list[dict]] = defaultdict(list)
        self.counts: dict[tuple, int] = defaultdict(int)

    def run(self) -> list[dict]:
        """Until all have ended, or wait for what never comes: then they give up."""
        while any(self._step(rank) for rank in self.world):
            pass
        for rank, record in enumerate(self.held):
            if record is not None:
                self.now[rank] = record["waits"][-1][0] + self.patience
                self._release(rank)
            if self.reports[rank]["end"] is None:
                self.reports[rank]["end"] = self.now[rank]
        return self.reports

    def _step(self, rank: int) -> bool:
        """Let a rank go on. False when it can't."""
        if self.reports[rank]["end"] is not None:
            return False
        record = self.held[rank]
        if record is not None:
            if not record["end"]:
                return False
            self.now[rank] = max(self.now[rank], record["end"])
            self._release(rank)
        operation = next(self.programs[rank], None)
        if operation is None:
            self.reports[rank]["end"] = self.now[rank]
        elif operation.op == "compute":
            self.now[rank] += operation.seconds
        else:
            if operation.op != "wait":
                self._begin(rank, operation)
            if operation.blocking:
                self.held[rank] = operation.record
                operation.record["waits"].append([self.now[rank], 0.0])
        return True

    def _release(self, rank: int) -> None:
        self.held[rank]["waits"][-1][1] = self.now[rank]
        self.held[rank] = None

    def _begin(self, rank: int, operation: Operation) -> None:
        group = operation.group or self.world
        operation.record |= {
            "op": operation.op, "group": list(group), "nbytes": operation.nbytes,
            "shape": [operation.nbytes // 4], "dtype": "float32", "peer": operation.peer,
            "tag": None, "blocking": operation.blocking, "start": self.now[rank],
            "matched": 0.0, "end": 0.0, "waits": [], "where": "cell line 3",
            "message": None, "sequence": None, "sent": operation.nbytes,
            "received": operation.nbytes,
        }  # fmt: skip
        self.reports[rank]["records"].append(operation.record)
        if operation.op in ("send", "recv"):
            self._message(rank, operation.record)
        else:
            self._collective(rank, tuple(group), operation.record)

    def _message(self, rank: int, record: dict) -> None:
        record["tag"] = 0
        ends = (rank, record["peer"]) if record["op"] == "send" else (record["peer"], rank)
        waiting = self.sides[ends]
        waiting[record["op"]].append(record)
        if waiting["send"] and waiting["recv"]:
            pair = [waiting["send"].pop(0), waiting["recv"].pop(0)]
            self.counts[ends[:1]] += 1
            self._meet(pair, LATENCY + pair[0]["nbytes"] / BANDWIDTH)
            for one in pair:
                one["message"] = [ends[0], self.counts[ends[:1]]]

    def _collective(self, rank: int, group: tuple[int, ...], record: dict) -> None:
        self.counts[rank, group] += 1
        record["sequence"] = self.counts[rank, group]
        met = self.called[group, record["sequence"]]
        met.append(record)
        if len(met) == len(group):
            self._meet(met, LATENCY * len(group) + 1.5 * record["nbytes"] / BANDWIDTH)

    @staticmethod
    def _meet(records: list[dict], seconds: float) -> None:
        matched = max(record["start"] for record in records)
        for record in records:
            record["matched"], record["end"] = matched, matched + seconds


def send(peer: int, nbytes: int = 1_000_000, blocking: bool = True) -> Operation:
    return Operation("send", (), nbytes, peer, blocking)


def recv(peer: int, nbytes: int = 1_000_000, blocking: bool = True) -> Operation:
    return Operation("recv", (), nbytes, peer, blocking)


def all_reduce(nbytes: int, blocking: bool = True, group: tuple[int, ...] = ()) -> Operation:
    return Operation("all_reduce", group, nbytes, blocking=blocking)


def simulated(program: Callable, n: int, **options) -> Timeline:
    return Timeline(Simulation(*[program] * n, **options).run())


# --- programs of the course --------------------------------------------------------------------


def ring_all_reduce(n: int):
    def program(rank: int):
        yield compute(0.004 + 0.001 * (rank % 3))
        for _ in range(2 * (n - 1)):
            sending = send((rank + 1) % n, 2_000_000, blocking=False)
            yield sending
            yield recv((rank - 1) % n, 2_000_000)
            yield compute(0.0005)
            yield wait(sending)
        yield compute(0.002)

    return program


def pipeline(n: int, microbatches: int = 8):
    """1F1B, activations and gradients by isend and irecv."""

    def forward(rank: int, pending: list):
        if rank:
            yield recv(rank - 1, 4_000_000)
        yield compute(0.010)
        if rank < n - 1:
            pending.append(send(rank + 1, 4_000_000, blocking=False))
            yield pending[-1]

    def backward(rank: int, pending: list):
        if rank < n - 1:
            receiving = recv(rank + 1, 4_000_000, blocking=False)
            yield receiving
            yield wait(receiving)
        yield compute(0.020)
        if rank:
            pending.append(send(rank - 1, 4_000_000, blocking=False))
            yield pending[-1]

    def program(rank: int):
        pending: list = []
        warmup = min(n - 1 - rank, microbatches)
        for _ in range(warmup):
            yield from forward(rank, pending)
        for _ in range(microbatches - warmup):
            yield from forward(rank, pending)
            yield from backward(rank, pending)
        for _ in range(warmup):
            yield from backward(rank, pending)
        for sending in pending:
            yield wait(sending)

    return program


def data_parallel(rank: int):
    """Two steps: a forward pass, a backward pass with five buckets under way, the optimizer."""
    for _ in range(2):
        yield compute(0.020 + 0.002 * (rank % 4))
        buckets = []
        for nbytes in (400_000, 4_000_000, 8_000_000, 8_000_000, 1_600_000):
            yield compute(0.006)
            buckets.append(all_reduce(nbytes, blocking=False))
            yield buckets[-1]
        for bucket in buckets:
            yield wait(bucket)
        yield compute(0.004)


def parameter_server(n: int, rounds: int = 3):
    def program(rank: int):
        for _ in range(rounds):
            if rank == 0:
                for worker in range(1, n):
                    yield recv(worker, 3_000_000)
                    yield compute(0.001)
                for worker in range(1, n):
                    yield send(worker, 3_000_000)
            else:
                yield compute(0.010 + 0.004 * (rank % 3))
                yield send(0, 3_000_000)
                yield recv(0, 3_000_000)

    return program


def deadlock(n: int):
    """The first two ranks wait for each other, the others for a broadcast that never comes."""

    def program(rank: int):
        yield compute(0.005)
        yield all_reduce(1_600_000)
        yield compute(0.010)
        if rank < 2:
            yield recv(1 - rank, 4_000)
            yield send(1 - rank, 4_000)
        receiving = recv((rank + 1) % n, 800, blocking=False)
        yield receiving
        yield Operation("broadcast", (), 64_000, 0)

    return program


def subgroups(rank: int):
    yield compute(0.003)
    yield all_reduce(800_000)
    yield compute(0.002)
    yield all_reduce(4_000_000, group=(0, 2) if rank % 2 == 0 else (1, 3))
    yield compute(0.001)
    yield Operation("barrier")


def many(rank: int, operations: int = 5000):
    for k in range(operations // 2):
        yield compute(50e-6)
        yield all_reduce(4_000, blocking=k % 3 != 0)
        if k % 7 == 0:
            yield compute(3e-3)
        if rank < 2:
            yield (send if rank == 0 else recv)(1 - rank, 1000)


PROGRAMS = {
    "ring all-reduce": ring_all_reduce,
    "pipeline": pipeline,
    "data parallel": lambda n: data_parallel,
    "parameter server": parameter_server,
    "deadlock": deadlock,
}


def made(rank: int = 0, **fields) -> dict:
    """One record, a finished blocking send of 10 ms by default; fields in place of others."""
    record = {
        "op": "send", "group": [0, 1], "nbytes": 1000, "shape": [250], "dtype": "float32",
        "peer": 1 - rank, "tag": 0, "blocking": True, "start": 10.0, "matched": 10.004,
        "end": 10.010, "waits": [[10.0, 10.010]], "where": "cell line 1", "message": None,
        "sequence": None,
    }  # fmt: skip
    return record | fields


def reported(*records: dict, rank: int = 0, begin: float = 10.0, end: float | None = 10.020):
    return {"rank": rank, "begin": begin, "end": end, "records": list(records)}


def texts(figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def legend(figure) -> set[str]:
    return {text.get_text() for text in figure.legends[0].get_texts()}


# --- sums --------------------------------------------------------------------------------------


def test_seconds_computing_waiting_and_communicating_add_up_to_the_cell():
    (row,) = Timeline([reported(made())]).totals
    assert row["seconds waiting"] == pytest.approx(4 * MS)
    assert row["seconds communicating"] == pytest.approx(6 * MS)
    assert row["seconds computing"] == pytest.approx(10 * MS)
    assert row["seconds hidden"] == 0


def test_communication_behind_compute_counts_as_hidden_and_only_that():
    # Data move from 2 to 9 ms; the thread computes until 6 ms, then waits for it.
    bucket = made(
        blocking=False, matched=10.002, end=10.009, waits=[[10.006, 10.009]], op="all_reduce"
    )
    (row,) = Timeline([reported(bucket)]).totals
    assert row["seconds hidden"] == pytest.approx(4 * MS)
    assert row["seconds computing"] == pytest.approx(17 * MS)


def test_waiting_for_a_bucket_is_not_counted_as_communicating_once_more():
    # The rank waits from 1 ms; its partner comes at 2 ms; data move until 9 ms.
    bucket = made(
        blocking=False, matched=10.002, end=10.009, waits=[[10.001, 10.009]], op="all_reduce"
    )
    (row,) = Timeline([reported(bucket)]).totals
    assert row["seconds communicating"] == 0
    assert row["seconds waiting"] == pytest.approx(8 * MS)
    assert row["seconds waiting for background"] == pytest.approx(7 * MS)


@pytest.mark.parametrize("name", ["pipeline", "data parallel", "deadlock"])
def test_computing_waiting_and_communicating_are_the_cell_with_background_operations(name):
    shown = simulated(PROGRAMS[name](4), 4)
    for lane, row in zip(shown.lanes, shown.totals, strict=True):
        spent = [row[f"seconds {what}"] for what in ("computing", "waiting", "communicating")]
        assert sum(spent) == pytest.approx(lane.end - lane.begin)


def test_two_operations_at_the_same_time_count_once():
    inner = made(start=10.002, matched=10.003, end=10.008, waits=[[10.002, 10.008]])
    (row,) = Timeline([reported(made(), inner)]).totals
    blocked = row["seconds waiting"] + row["seconds communicating"]
    assert blocked == pytest.approx(10 * MS)
    # One of them waits, the other moves data: data move.
    assert row["seconds waiting"] == pytest.approx(3 * MS)


def test_a_blocking_call_blocks_from_its_begin():
    late = made(waits=[[10.003, 10.010]])
    (row,) = Timeline([reported(late)]).totals
    assert row["seconds computing"] == pytest.approx(10 * MS)


def test_bytes_and_messages_are_exact():
    rows = simulated(pipeline(4, microbatches=8), 4).totals
    assert [row["bytes sent"] for row in rows] == [32_000_000, 64_000_000, 64_000_000, 32_000_000]
    assert [row["messages received"] for row in rows] == [8, 16, 16, 8]
    rows = simulated(lambda rank: data_parallel(rank), 4).totals
    assert {row["bytes in collectives"] for row in rows} == {44_000_000}
    assert {row["collectives"] for row in rows} == {10}
    assert {row["bytes sent"] for row in rows} == {0}


def test_what_the_backend_knows_it_moved_counts_as_sent_and_received():
    call = made(op="all_reduce", peer=None, moved_out=1500, moved_in=1400)
    (row,) = Timeline([reported(call)]).totals
    assert (row["bytes sent"], row["bytes received"]) == (1500, 1400)
    assert (row["bytes in collectives"], row["collectives"]) == (0, 1)


def test_what_never_arrived_is_not_counted_as_sent():
    stuck = made(matched=0.0, end=0.0, waits=[[10.0, 10.015]])
    (row,) = Timeline([reported(stuck)]).totals
    assert (row["bytes sent"], row["messages sent"]) == (0, 0)
    assert row["seconds waiting"] == pytest.approx(15 * MS)


def test_the_table_of_totals_reads_in_units():
    shown = repr(simulated(pipeline(4), 4))
    assert re.search(r"bytes sent.*computing.*hidden", shown)
    assert "64 MB" in shown
    assert "240 ms" in shown


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (999.6, "1 kB"), (1_600_000, "1.6 MB"), (2.5e9, "2.5 GB")],
)
def test_sizes_in_words(nbytes, text):
    assert phrases.size(nbytes) == text


# --- one clock ---------------------------------------------------------------------------------


def test_times_count_from_the_first_rank_that_began():
    shown = Timeline([reported(made(start=10.005), begin=10.0), reported(rank=1, begin=9.0)])
    (record,) = shown.records
    assert record["start"] == pytest.approx(1.005)
    assert [lane.begin for lane in shown.lanes] == pytest.approx([1.0, 0.0])


def test_ranks_of_two_machines_meet_on_one_clock():
    far = 86_400.0  # the other machine was started a day earlier
    sent = made(message=[0, 1])
    got = made(1, op="recv", message=[0, 1], start=10 + far, matched=10.004 + far,
               end=10.011 + far, waits=[[10 + far, 10.011 + far]])  # fmt: skip
    reports = [reported(sent), reported(got, rank=1, begin=10 + far, end=10.02 + far)]
    shown = Timeline(reports, offsets=[0.0, far])
    ((send_record, recv_record),) = activity.messages(shown.records)
    assert send_record["start"] == pytest.approx(recv_record["start"])
    assert recv_record["waits"][0] == pytest.approx([0.0, 0.011])


def test_what_never_happened_is_none_not_minus_ten_hours():
    (record,) = Timeline([reported(made(matched=0.0, end=0.0, waits=[[10.0, 0.0]]))]).records
    assert (record["matched"], record["end"], record["waits"]) == (None, None, [[0.0, None]])


def test_a_sender_that_noticed_its_partner_late_was_not_waiting_meanwhile():
    sent = made(message=[0, 1], matched=10.010)
    got = made(1, op="recv", message=[0, 1], start=10.003, matched=10.003)
    first, second = Timeline([reported(sent), reported(got, rank=1)]).records
    assert first["matched"] == pytest.approx(3 * MS)
    assert second["matched"] == pytest.approx(3 * MS)


def test_a_cell_that_still_runs_lasts_until_the_last_event():
    (lane, other) = Timeline([reported(made(), end=None), reported(rank=1, end=10.5)]).lanes
    assert lane.end == other.end == pytest.approx(0.5)


# --- what met what -----------------------------------------------------------------------------


def test_messages_are_paired_by_their_number_not_by_order():
    sends = [made(message=[0, k], start=10 + k * MS) for k in (1, 2)]
    receives = [made(1, op="recv", message=[0, k], start=10.0) for k in (2, 1)]
    shown = Timeline([reported(*sends), reported(*receives, rank=1)])
    pairs = activity.messages(shown.records)
    assert [(a["message"][1], b["message"][1]) for a, b in pairs] == [(1, 1), (2, 2)]
    assert all(a["op"] == "send" and b["op"] == "recv" for a, b in pairs)


def test_a_message_under_way_has_no_arrow_yet():
    sent, got = made(message=[0, 1]), made(1, op="recv", message=[0, 1], end=0.0)
    shown = Timeline([reported(sent), reported(got, rank=1)])
    assert activity.messages(shown.records) == []


def test_a_collective_is_complete_when_every_rank_of_its_group_has_called_it():
    shown = simulated(subgroups, 4)
    met = activity.collectives(shown.records)
    assert sorted((records[0]["op"], len(records)) for records in met) == [
        ("all_reduce", 2), ("all_reduce", 2), ("all_reduce", 4), ("barrier", 4)
    ]  # fmt: skip
    one_missing = [r for r in shown.records if (r["rank"], r["op"]) != (3, "barrier")]
    assert "barrier" not in {records[0]["op"] for records in activity.collectives(one_missing)}


def test_two_groups_of_the_same_ranks_do_not_mix():
    """Both count their collectives from 1."""
    calls = [
        reported(*(made(op="all_reduce", sequence=1, nbytes=n) for n in (8, 16)), rank=rank)
        for rank in (0, 1)
    ]
    met = activity.collectives(Timeline(calls).records)
    assert [[record["nbytes"] for record in records] for records in met] == [[8, 8], [16, 16]]


def test_the_background_takes_as_few_rows_as_it_needs():
    assert activity.rows([(0, 2), (1, 3), (2, 4), (3, 5), (0.5, 1)]) == [0, 1, 0, 1, 1]
    assert activity.rows([]) == []


# --- what is narrower than a pixel ---------------------------------------------------------------


def test_five_thousand_short_operations_become_few_boxes_of_the_same_total():
    parts = [(k, k + 0.25, activity.COMMUNICATING) for k in range(5000)]
    boxes = layout.pieces(parts, pixel=10)
    assert len(boxes) < 200
    area = sum((box.end - box.begin) * (box.high - box.low) for box in boxes)
    assert area == pytest.approx(5000 * 0.25)


def test_a_short_operation_alone_is_still_seen():
    (box,) = layout.pieces([(500.0, 500.001, activity.COMMUNICATING)], pixel=1)
    assert box.end - box.begin >= 1
    assert (box.low, box.high) == (0, 1)


# --- the figure --------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Sockets that an earlier test has left may be collected now.
        warnings.simplefilter("ignore", ResourceWarning)
        yield


@pytest.mark.parametrize("n", [4, 16])
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_pattern_is_drawn_without_a_warning(name, n):
    shown = simulated(PROGRAMS[name](n), n)
    figure = shown.figure()
    figure.canvas.draw()
    assert figure.get_size_inches()[0] == 9
    assert figure.get_size_inches()[1] < 9
    assert plt.get_fignums() == []
    assert figure.axes[0].get_yticklabels()[0].get_text() == "rank 0"


def test_a_notebook_gets_a_png_of_900_pixels():
    data, about = simulated(subgroups, 4)._repr_mimebundle_()
    assert "Timeline of 4 ranks." in about["image/png"]["alt"]
    png = base64.b64decode(data["image/png"])
    assert png.startswith(b"\x89PNG")
    assert int.from_bytes(png[16:20]) == 900


def test_a_figure_is_an_image_in_a_notebook_and_is_shown_once():
    cells = [
        "from utils.timeline import Timeline\n"
        'shown = Timeline([{"rank": 0, "begin": 5.0, "end": 5.1, "records": []}])',
        "shown.figure(until=0.05)",
        "shown",
        "kept = shown.figure()",
    ]
    notebook = new_notebook(cells=[new_code_cell(cell) for cell in cells])
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(ROOT)}}).execute()
    _, figure, timeline_, nothing = notebook.cells
    for cell in (figure, timeline_):
        (output,) = cell.outputs
        assert {"image/png", "text/plain"} <= output.data.keys()
        assert "no communication" in output.metadata["image/png"]["alt"]
    assert nothing.outputs == []


def test_the_bars_say_how_much_and_whom_they_wait_for():
    def program(rank: int):
        yield compute(0.010 * rank)
        yield all_reduce(8_000_000)
        yield (send if rank == 0 else recv)(1 - rank, 20_000_000)

    figure = simulated(program, 2).figure()
    said = texts(figure)
    assert said.count("all_reduce 8 MB") == 2
    assert {
        "all_reduce waits for rank 1", "send 20 MB to rank 1", "recv 20 MB from rank 0"
    } <= set(said)  # fmt: skip
    assert {"message", "collective: all are there"} <= legend(figure)


@pytest.mark.parametrize("op", ["all_gather", "broadcast", "reduce_scatter", "all_to_all"])
def test_a_bar_with_little_room_says_which_operation_rather_than_how_many_bytes(op):
    assert phrases.labels(made(op=op, peer=None)) == [f"{op} 1 kB", op]


def test_an_isend_is_not_called_a_send():
    assert phrases.labels(made(blocking=False))[-1] == "isend"
    assert phrases.labels(made(op="recv", blocking=False))[-1] == "irecv"


def test_a_thread_that_waits_for_a_bucket_says_for_which():
    def program(rank: int):
        bucket = all_reduce(20_000_000, blocking=False)
        yield bucket
        yield compute(0.010)
        yield wait(bucket)

    figure = simulated(program, 2).figure()
    assert texts(figure).count("waits for all_reduce 20 MB") == 2
    assert "exposed: waiting for the background" in legend(figure)
    # Data move below, in the background: the thread itself is never drawn as communicating.
    thread, _ = layout.Page(9, 0, 1, (True, True)).thread(0)
    (bars,) = (c for c in figure.axes[0].collections if c.get_label() == activity.COMMUNICATING)
    assert thread not in {path.vertices[0][1] for path in bars.get_paths()}


def test_a_wait_for_an_irecv_is_told_from_a_blocking_recv():
    waits = made(op="recv", blocking=False)
    assert phrases.awaits(waits) == ["waits for irecv 1 kB", "waits for irecv"]
    assert {state for *_, state in activity.held(waits, 10.0, 10.01)} == {
        activity.WAITING, activity.AWAITING
    }  # fmt: skip


def eager(**received) -> Timeline:
    """A send of 1 ms whose receiver came 4 ms later; ``received``: instead of its record's."""
    sent = made(message=[0, 1], end=10.001, matched=10.001, waits=[[10.0, 10.001]])
    got = made(1, op="recv", message=[0, 1], start=10.005, matched=10.005) | received
    return Timeline([reported(sent), reported(got, rank=1)])


def test_an_eager_send_did_not_wait_and_is_explained():
    shown = eager()
    assert shown.totals[0]["seconds waiting"] == 0
    assert shown.totals[0]["seconds communicating"] == pytest.approx(1 * MS)
    assert "eager send: over before its receiver came" in legend(shown.figure())
    assert "message" not in legend(shown.figure())


def test_an_eager_send_that_nobody_received_is_explained_as_well():
    shown = eager(message=[0, 2])
    assert "eager send: over before its receiver came" in legend(shown.figure())
    assert "1 send over before the receiver came" in shown.alt_text


def test_a_send_whose_receiver_was_there_is_not_called_eager():
    assert not eager(start=10.0005).records[0]["eager"]
    sent = made(message=[0, 1], end=10.001)
    shown = Timeline([reported(sent), {"rank": 1, "error": "dead"}])
    assert not shown.records[0]["eager"], "a rank that does not answer may have received it"


def test_labels_drop_out_where_there_is_no_room():
    (note,) = texts(simulated(many, 4).figure())
    assert note.startswith("on an ideal network")


def test_a_deadlock_is_marked_on_every_rank_that_is_stuck():
    figure = simulated(deadlock(4), 4).figure()
    said = texts(figure)
    assert "✗ never matched: recv 4 kB from rank 1" in said
    assert said.count("✗ never matched: broadcast 64 kB") == 2
    assert "partner never came" in legend(figure)
    assert "partner never came" not in legend(simulated(subgroups, 4).figure())


def test_a_transfer_that_never_ended_is_told_from_one_that_never_began():
    half = made(end=0.0, waits=[[10.0, 0.0]])
    assert any("never finished" in text for text in texts(Timeline([reported(half)]).figure()))


def test_only_what_is_in_the_picture_is_in_the_legend():
    assert legend(Timeline([reported()]).figure()) == {"computing"}


def test_a_cell_that_communicates_nothing_has_a_figure_that_says_so():
    figure = Timeline([reported(), reported(rank=1)]).figure()
    assert "nothing was communicated" in [text.get_text() for text in figure.texts]


def test_a_lane_without_communication_says_so_and_only_that():
    figure = Timeline([reported(made()), reported(rank=1)]).figure()
    assert texts(figure).count("no communication") == 1
    part = Timeline([reported(made())]).figure(since=0.015, until=0.02)
    assert "no communication in this part" in texts(part)


def test_a_lane_whose_cell_was_over_at_once_says_so_beside_its_bar():
    figure = Timeline([reported(made()), reported(rank=1, end=10.0001)]).figure()
    (said,) = (t for t in figure.axes[0].texts if t.get_text() == "no communication")
    assert said.xy[0] == pytest.approx(0.1)


def test_a_rank_that_does_not_answer_keeps_its_lane():
    shown = Timeline([reported(made()), {"rank": 1, "error": "the rank is dead"}])
    assert "no answer: the rank is dead" in texts(shown.figure())
    assert "rank 1: the rank is dead" in repr(shown)
    assert shown.totals[1]["seconds computing"] == 0


def test_no_rank_answers():
    shown = Timeline([{"rank": rank, "error": "silent"} for rank in (0, 1)])
    shown.figure().canvas.draw()
    assert shown.records == []


def test_a_rank_without_records_is_seen_computing():
    figure = Timeline([reported(made()), reported(rank=1)]).figure()
    (bars,) = (c for c in figure.axes[0].collections if c.get_label() == "computing")
    assert len(bars.get_paths()) == 2


def test_the_figure_of_the_same_program_is_always_of_the_same_size():
    """A notebook's outputs are compared: they must not depend on how operations overlap."""
    sizes = {
        tuple(Timeline([reported(*(made(blocking=False, start=10 + k * step) for k in range(6)))])
              .figure().get_size_inches())
        for step in (0.0, 1e-4, 2e-3)
    }  # fmt: skip
    assert len(sizes) == 1


def test_a_lane_without_background_operations_has_no_empty_room_below_it():
    page = layout.Page(9, 0, 1, (True, False, False))
    high = [bottom - top for top, bottom in map(page.band, range(3))]
    assert high[1] == high[2] < 0.6 * high[0]


def test_zoom_shows_what_was_asked_for():
    shown = simulated(data_parallel, 4)
    axes = shown.figure(since=0.030, until=0.050).axes[0]
    low, high = axes.get_xlim()
    assert low == pytest.approx(30, abs=0.5)
    assert high == pytest.approx(50, abs=0.5)
    with pytest.raises(ValueError, match="must be less than"):
        shown.figure(since=0.05, until=0.03)


def test_a_closer_look_gives_the_background_fewer_and_higher_rows():
    crowd = [made(blocking=False, start=10 + k * MS / 10, waits=[]) for k in range(8)]
    alone = made(blocking=False, start=10.015, matched=10.0152, end=10.019, waits=[])
    reports = [reported(*crowd, alone)]
    assert "isend 1 kB to rank 1" not in texts(Timeline(reports).figure())
    assert "isend 1 kB to rank 1" in texts(Timeline(reports).figure(since=0.012, until=0.02))


def test_the_pictures_words_tell_what_each_rank_did():
    said = alt.describe(simulated(pipeline(4), 4).figure())
    assert said.startswith(
        "What the ranks communicated. Timeline of 4 ranks. Rank 0: computing 240 ms"
    )
    assert "8 isend, 8 irecv on rank 0" in said
    assert "for the background" in said


def test_the_pictures_words_name_a_deadlock_and_a_silent_rank():
    said = simulated(deadlock(4), 4).alt_text
    assert "Rank 0: recv 4 kB from rank 1 never matched." in said
    assert "Rank 1: no answer." in Timeline([reported(), {"rank": 1, "error": "x"}]).alt_text


def test_ranks_that_do_nothing_do_not_pull_the_mean_down():
    busy, idle = reported(made()), [reported(rank=rank, end=10.001) for rank in (1, 2)]
    said = phrases.means(Timeline([busy, *idle]).totals)
    assert said == (
        "mean of the 1 that communicate: computing 10 ms, waiting 4 ms, communicating 6 ms"
    )
    assert phrases.means(Timeline(idle).totals) == "mean of the ranks: computing 1 ms"


def test_the_pictures_words_are_few_for_many_ranks():
    assert len(simulated(data_parallel, 32).alt_text) < alt.MOST


@pytest.mark.parametrize(("seconds", "unit"), [(5.0, "s"), (0.05, "ms"), (5e-5, "µs")])
def test_the_axis_has_the_unit_that_suits(seconds, unit):
    axes = simulated(lambda rank: iter([compute(seconds)]), 2).figure().axes[0]
    assert axes.get_xlabel() == f"time since the cell began [{unit}]"


def test_communication_after_a_long_import_is_not_squeezed_into_a_pixel():
    def program(rank: int):
        yield compute(2.0)
        yield all_reduce(400_000)

    shown = simulated(program, 2)
    axes = shown.figure().axes[0]
    assert "after the cell began" in axes.get_xlabel()
    assert "all_reduce 400 kB" in texts(shown.figure())
    assert shown.figure(since=0).axes[0].get_xlim()[1] > 2


def test_five_thousand_operations_are_drawn_in_two_seconds():
    reports = Simulation(*[lambda rank: many(rank, 1700)] * 4).run()
    start = time.process_time()
    shown = Timeline(reports)
    figure = shown.figure()
    figure.canvas.draw()
    assert time.process_time() - start < 2
    assert len(shown.records) > 5000
    boxes = sum(len(c.get_paths()) for c in figure.axes[0].collections)
    assert boxes < 10_000
    assert len(figure.axes[0].get_children()) < 60


def test_states_are_told_apart_without_colours():
    """By brightness (relative luminance), or one of them has a texture."""
    looks = list(picture.LOOK.values())
    for k, (face, _, hatch) in enumerate(looks):
        for other, edge, other_hatch in looks[k + 1 :]:
            darker, lighter = sorted(
                sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), to_rgb(color), strict=True))
                for color in (face, other)
            )
            # Background operations have rows and an outline of their own.
            outlined = edge != "none"
            assert hatch != other_hatch or lighter - darker > 0.25 or outlined


# --- the trace ---------------------------------------------------------------------------------


def events_of(shown: Timeline, folder) -> list[dict]:
    shown.save(folder / "trace.json")
    return json.loads((folder / "trace.json").read_text())["traceEvents"]


def assert_valid(events: list[dict]) -> None:
    """The rules of the Trace Event Format for the kinds of events that a timeline has."""
    assert {event["ph"] for event in events} <= {"X", "M", "s", "f"}
    for event in events:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["name"]
        assert event["ts"] >= 0
        assert event["ph"] != "X" or event["dur"] >= 0
    names = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    tracks = defaultdict(list)
    for event in events:
        assert event["ph"] == "M" or (event["pid"], event["tid"]) in names
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["dur"]))
    for spans in tracks.values():
        assert_nested(spans)
    assert_flows_bind(events)


def assert_nested(spans: list[tuple[float, float]]) -> None:
    """Events of a track lie beside or inside each other."""
    open_ends: list[float] = []
    for start, duration in sorted(spans, key=lambda span: (span[0], -span[1])):
        while open_ends and open_ends[-1] <= start + 1e-4:
            open_ends.pop()
        assert not open_ends or start + duration <= open_ends[-1] + 1e-4
        open_ends.append(start + duration)


def assert_flows_bind(events: list[dict]) -> None:
    """Each start has one end, later, and both lie in an operation of their track."""
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) + len(ends) == sum(e["ph"] in "sf" for e in events)
    operations = defaultdict(list)
    for e in events:
        if e.get("cat") == "communication":
            operations[e["pid"], e["tid"]].append((e["ts"], e["ts"] + e["dur"]))
    for key, start in starts.items():
        end = ends[key]
        assert (start["name"], start["cat"]) == (end["name"], end["cat"])
        assert start["ts"] <= end["ts"]
        for one in (start, end):
            spans = operations[one["pid"], one["tid"]]
            assert any(a - 1e-4 <= one["ts"] <= b + 1e-4 for a, b in spans)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_trace_follows_the_rules_of_its_format(name, tmp_path):
    events = events_of(simulated(PROGRAMS[name](4), 4), tmp_path)
    assert_valid(events)
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {rank: f"rank {rank}" for rank in range(4)}


def test_the_trace_has_a_flow_per_message_and_says_what_it_was(tmp_path):
    events = events_of(simulated(pipeline(4), 4), tmp_path)
    assert sum(e["ph"] == "s" for e in events) == 48
    (first, *_) = (e for e in events if e["name"] == "send")
    assert first["args"] == {
        "bytes": 4_000_000, "shape": [1_000_000], "dtype": "float32", "group": [0, 1, 2, 3],
        "peer": 1, "tag": 0, "line": "cell line 3", "finished": True,
    }  # fmt: skip
    tracks = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert tracks >= {"computing thread", "in the background 1", "in the background 2"}


def test_operations_of_a_track_of_the_trace_do_not_overlap_when_waits_do(tmp_path):
    crossing = made(start=10.005, matched=10.006, end=10.015, waits=[[10.005, 10.015]])
    assert_valid(events_of(Timeline([reported(made(), crossing)]), tmp_path))


def test_a_deadlock_is_in_the_trace(tmp_path):
    events = events_of(simulated(deadlock(4), 4), tmp_path)
    assert sum(e["name"] == "never matched" for e in events) == 6
    assert {e["args"]["finished"] for e in events if e.get("cat") == "communication"} == {
        True, False
    }  # fmt: skip


def test_the_trace_of_nothing_is_a_trace(tmp_path):
    assert_valid(events_of(Timeline([reported(), {"rank": 1, "error": "dead"}]), tmp_path))


# --- clocks ------------------------------------------------------------------------------------

SHIFTED = """
import json, time
from mpi4py import MPI
from utils.timeline import clocks

comm = clocks.duplicate(MPI.COMM_WORLD, timeout=10)
shift = 1000.5 * comm.rank * (-1) ** comm.rank
clock = lambda: time.perf_counter() + shift
shifted = [(one.seconds, one.error) for one in clocks.measure(comm, clock=clock, timeout=10)]
offsets = clocks.offsets(comm, clock=clock, timeout=10)
same = clocks.offsets(comm, timeout=10)
told = comm.gather({"shifted": shifted, "offsets": offsets, "same": same})
if comm.rank == 0:
    print("TOLD", json.dumps(told), flush=True)
"""


@pytest.mark.parametrize("n", [1, 2, 4])
def test_shifted_clocks_are_found_out_within_the_error_that_is_promised(mpiexec, n):
    done = mpiexec(n, SHIFTED, timeout=200)
    told = json.loads(re.search(r"^TOLD (.*)$", done.stdout, re.MULTILINE)[1])
    assert all(one == told[0] for one in told), "every rank gets the same list"
    for rank, (seconds, error) in enumerate(told[0]["shifted"]):
        assert abs(seconds - 1000.5 * rank * (-1) ** rank) <= error + 1e-9
        assert error < 0.05
    assert told[0]["offsets"] == pytest.approx(
        [1000.5 * rank * (-1) ** rank for rank in range(n)], abs=0.05
    )
    assert told[0]["same"] == [0.0] * n, "one machine has one clock"


ABSENT = """
import time
from mpi4py import MPI
from utils.timeline import clocks

comm = MPI.COMM_WORLD.Dup()
start = time.monotonic()
if comm.rank < 2:
    try:
        clocks.offsets(comm, timeout=0.5)
    except TimeoutError as error:
        print("GAVE UP", round(time.monotonic() - start, 1), error, flush=True)
MPI.COMM_WORLD.Barrier()
"""


def test_clocks_are_given_up_when_a_rank_does_not_take_part(mpiexec):
    done = mpiexec(3, ABSENT, timeout=200)
    seconds = [float(s) for s in re.findall(r"GAVE UP (\S+)", done.stdout)]
    assert len(seconds) == 2
    assert max(seconds) < 5


# --- real ranks --------------------------------------------------------------------------------

PREPARE = """
import time, torch, torch.distributed as dist
dist.init_process_group("mpi")
rank = dist.get_rank()
"""
COMMUNICATE = """
tensor = torch.ones(250_000)
time.sleep(0.2 * rank)
dist.all_reduce(tensor)
work = dist.all_reduce(tensor, async_op=True)
time.sleep(0.02)
work.wait()
if rank == 0:
    dist.send(tensor, dst=1, tag=7)
else:
    dist.recv(tensor, src=0, tag=7)
"""


@pytest.fixture(scope="module")
def ranks() -> Iterator[cluster.Ranks]:
    with warnings.catch_warnings(), cluster.start(2) as up:
        warnings.simplefilter("default")
        run(up, PREPARE)
        yield up


def run(up: cluster.Ranks, code: str) -> None:
    up.view.execute(code, silent=False, block=True)


@pytest.fixture
def shown(ranks) -> Timeline:
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        run(ranks, COMMUNICATE)
        return timeline.of(ranks, "two ranks")


def test_real_ranks_tell_what_they_communicated(shown):
    assert [[r["op"] for r in lane.records] for lane in shown.lanes] == [
        ["all_reduce", "all_reduce", "send"], ["all_reduce", "all_reduce", "recv"]
    ]  # fmt: skip
    first, second = shown.totals
    # The message, and what the large all_reduce in the background moved: half of it, twice.
    assert (first["bytes sent"], first["messages sent"]) == (2_000_000, 1)
    assert (second["bytes received"], second["messages received"]) == (2_000_000, 1)
    assert first["seconds waiting"] > 0.05, "rank 1 came 200 ms later"
    assert all(record["where"].startswith("cell line") for record in shown.records)


def test_real_messages_and_collectives_are_paired(shown):
    ((sent, got),) = activity.messages(shown.records)
    assert (sent["rank"], got["rank"], sent["tag"]) == (0, 1, 7)
    assert [len(met) for met in activity.collectives(shown.records)] == [2, 2]


def test_real_ranks_make_a_figure_and_a_trace(shown, tmp_path):
    figure = shown.figure()
    figure.canvas.draw()
    assert figure.axes[0].get_title(loc="left") == "two ranks"
    assert_valid(events_of(shown, tmp_path))


SLOW = """
for _ in range(3):
    dist.all_reduce(tensor)
"""


def test_a_real_run_on_a_slow_network_is_told_how_long_it_would_take_without(ranks, shown):
    """1 MB of each rank's goes over a link of 100 Mbit/s: 80 ms, three times."""
    assert 0.2 < shown.ideal < ideal_network.measured(shown.lanes), "rank 1 sleeps 200 ms at first"
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        ranks.network("100mbit")
        run(ranks, SLOW)
        slow = timeline.of(ranks)
        ranks.network("off")
    assert ideal_network.measured(slow.lanes) - slow.ideal > 0.2


def test_a_timeline_is_of_the_last_cell_however_often_it_is_asked_for(ranks, shown):
    again = timeline.of(ranks)
    assert len(again.records) == len(shown.records) == 6
    run(ranks, "x = 1")
    assert timeline.of(ranks).records == []
