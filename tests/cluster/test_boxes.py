"""Ranks in boxes: real processes without MPI, whose messages the kernel carries."""

from __future__ import annotations

import dataclasses
import math
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import call_tools
import numpy as np
import psutil
import pytest
import torch

from torch_mpi.record import Call, as_dict
from utils import cluster
from utils.checks.probe import also_calls
from utils.checks.task import Report
from utils.cluster import stacks
from utils.cluster.boxes import records, values
from utils.cluster.boxes.box_ranks import Boxes
from utils.cluster.boxes.frames import BrokenFrame
from utils.jobs import DeadRankError, NeedsProcesses, RanksError
from utils.jobs.box_plan import BoxPlan

pytestmark = pytest.mark.timeout(300)


JOIN = """
import os, torch, torch.distributed as dist
dist.init_process_group("mpi")
rank = dist.get_rank()
"""


@pytest.fixture(scope="module")
def started() -> Iterator[cluster.Ranks]:
    with cluster.start(2, where="boxes", env={"PYTHONPATH": str(Path(__file__).parent)}) as ranks:
        yield ranks


@pytest.fixture
def ranks(started: cluster.Ranks) -> cluster.Ranks:
    """Two ranks with a process group, whatever the test before has left."""
    if started.client.ids != [0, 1]:
        started.restart()
    started.view.execute(f"if 'rank' not in globals():\n{textwrap.indent(JOIN, ' ')}", block=True)
    return started


def sums(ranks: cluster.Ranks) -> list[Any]:
    """What an all_reduce of ones gives on each rank."""
    ranks.view.execute("x = torch.ones(3)\ndist.all_reduce(x)", block=True)
    return [tensor.tolist() for tensor in ranks.view.pull("x")]


# --- records ----------------------------------------------------------------------------------


def told(number: Any, **said: Any) -> dict[str, Any]:
    """What a rank says of a message of 8 bytes to rank 1, its call 7."""
    return as_dict(Call("send", (0, 1), 8, peer=1, tag=0, start=1.0)) | {"number": number} | said


KNOWN = {7: Call("send", (0, 1), 8, peer=1, tag=0, number=7, start=2.0)}


def test_a_rank_can_not_say_that_it_sent_more_than_the_kernel_has_carried():
    look = records.Confirmation(KNOWN)
    said = {"steps": [{"calls": [told(7, nbytes=800, sent=800, waited=True)]}], "sum": 3}
    found = look.of(said)
    (call,) = found["steps"][0]["calls"]
    assert (call["op"], call["nbytes"], call["peer"], call["sent"]) == ("send", 8, 1, 0)
    assert (call["waited"], call["start"]) == (True, 1.0), "only the rank knows"
    assert (found["sum"], look.numbers, look.left_out()) == (3, {7}, ())


@pytest.mark.parametrize(
    "calls",
    [
        *([told(8)], [told(None)], [told("7")], [told([7])], [told(-7)], [{"op": "send"}]),
        *([told(7), told(7)], [[told(7)], [told(7)]]),
    ],
    ids=repr,
)
def test_a_call_that_the_kernel_has_not_carried_wins_nothing(calls):
    with pytest.raises(records.ForgedRecord):
        records.Confirmation(KNOWN).of({"calls": calls})


def test_a_record_that_no_list_holds_is_refused_because_nobody_would_notice_that_it_is_not_read():
    with pytest.raises(records.ForgedRecord):
        records.Confirmation(KNOWN).of({"calls": [], "junk": {"7": told(7)}})


def barriers(count: int, **about: Any) -> dict[int, Call]:
    """So many barriers of a rank, one after the other."""
    return {
        k: Call("barrier", (0, 1), start=2.0 * k, end=2.0 * k + 1, number=k, **about)
        for k in range(1, count + 1)
    }


def test_a_few_barriers_need_no_record_because_they_bring_no_data():
    most = records.MOST_BARRIERS
    assert records.Confirmation(barriers(most)).left_out() == ()
    assert records.Confirmation(barriers(most + 1)).left_out() == ("barrier",) * (most + 1)


def test_barriers_whose_order_could_tell_something_need_a_record():
    assert records.Confirmation(barriers(2, blocking=False)).left_out() == ("barrier",) * 2
    at_once = {k: dataclasses.replace(call, start=1.0) for k, call in barriers(2).items()}
    assert records.Confirmation(at_once).left_out() == ("barrier",) * 2


def test_a_rank_that_goes_on_after_an_error_wins_nothing_because_it_has_read_of_other_ranks(ranks):
    replies = ranks.ask(call_tools.go_on)
    assert all("failed, and it went on" in reply.forged for reply in replies), replies
    ranks.restart()


def test_no_call_is_hidden_between_two_questions(ranks):
    ranks.ask(call_tools.hide_later)
    time.sleep(3)
    assert {reply.unseen for reply in ranks.ask(call_tools.boast)} == {("all_reduce",)}


def test_no_call_is_hidden_behind_many_others(ranks, monkeypatch):
    monkeypatch.setattr("utils.cluster.boxes.rank_state.CAPACITY", 2)
    assert all("more calls" in reply.forged for reply in ranks.ask(call_tools.hide))
    ranks.restart()


@pytest.mark.parametrize(
    "look",
    [
        *(list, len, sorted, lambda calls: calls[0], lambda calls: calls.__radd__([])),
        *(lambda calls: calls.__add__([]), lambda calls: [*calls], lambda calls: set(calls)),
    ],
)
def test_records_know_whether_a_judge_has_looked_into_them(look):
    calls = records.Records([1])
    assert not calls.was_read
    look(calls)
    assert calls.was_read


def test_a_check_reads_what_the_kernel_has_noted_and_what_a_rank_has_left_out(ranks):
    replies = ranks.ask(call_tools.boast, nbytes=10**6, op="send", group=[1], peer=1)
    facts = [
        (one["op"], one["nbytes"], one["group"], one["peer"])
        for (one,) in (reply.value for reply in replies)
    ]
    assert facts == [("all_reduce", 12, [0, 1], None)] * 2
    assert [reply.unseen for reply in replies] == [(), ()]
    assert {reply.unseen for reply in ranks.ask(call_tools.hide)} == {("all_reduce", "all_reduce")}
    for reply in ranks.ask(call_tools.boast, number=10**9):
        assert "which the rank did not make" in reply.forged


def test_a_forged_record_wins_no_points(ranks):
    report = Report()
    assert report.answers(ranks, call_tools.hide, shows=1) == []
    assert "called all_reduce where the check did not look" in report.problems[0].text
    assert report.problems[0].kind == "forged"
    report = Report()
    assert report.answers(ranks, call_tools.hide), "a check that looks at no record has no opinion"
    also_calls("all_reduce")(call_tools.hide)
    assert report.answers(ranks, call_tools.hide, shows=1)


def test_a_tensor_that_would_crash_the_kernel_is_refused():
    for name in ("quint8", "qint32", "quint4x2", "bits8", "no_dtype"):
        with pytest.raises(BrokenFrame):
            values.tensor_of({"dtype": name, "shape": [4]}, bytearray(4))
    for name, dtype in values.DTYPES.items():
        piece = bytearray(4 * dtype.itemsize)
        assert values.tensor_of({"dtype": name, "shape": [4]}, piece).dtype == dtype


# --- values -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Foreign:
    """A dataclass that is not the course's."""

    number: int


VALUES = [
    *(None, True, 3, -1.5, math.inf, "text\ud800", [1, [2.0]], (1, (2,)), {3, 4}, range(1, 9, 2)),
    *({"a": 1, 2: (3,)}, b"\x00\xff", np.arange(6).reshape(2, 3), np.float32(1.5)),
    *(torch.arange(6).reshape(2, 3), torch.tensor(2.0), torch.empty(0, 3), torch.tensor([True])),
    *(torch.ones(2, dtype=torch.bfloat16), torch.tensor([1 + 2j]), torch.ones(3, 2).T),
    *(
        stacks.Frame("a.py", 3, "f"),
        torch.arange(8)[::2][:1],
        torch.tensor([1 + 2j]).conj(),
        torch.arange(4.0)[1:3],
    ),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_comes_back_from_a_rank_as_it_was(value):
    pieces: list[Any] = []
    back = values.unpacked(values.packed(value, pieces), [bytearray(piece) for piece in pieces])
    assert type(back) is type(value)
    if isinstance(value, torch.Tensor):
        assert back.dtype == value.dtype
        assert back.shape == value.shape
        assert torch.equal(back, value)
    else:
        assert np.array_equal(back, value) if isinstance(value, np.ndarray) else back == value


@pytest.mark.parametrize("value", [object(), print, torch.nn.Linear(1, 1), Foreign(1), [object()]])
def test_a_value_that_would_need_code_to_be_read_is_refused_with_its_type(value):
    kind = type(value[0] if isinstance(value, list) else value).__name__
    with pytest.raises(TypeError, match=kind):
        values.packed(value, [])


@pytest.mark.parametrize(
    "frame",
    [
        {"tensor": 0, "dtype": "float32", "shape": [3]},
        {"tensor": 5, "dtype": "float32", "shape": [1]},
        {"tensor": 0, "dtype": "object", "shape": [1]},
        {"tensor": 0, "dtype": "float32", "shape": [-1]},
        {"tensor": 0, "dtype": "float32", "shape": 1},
        {"array": 0, "dtype": "O", "shape": [1]},
        {"array": 0, "dtype": "<f4", "shape": [7]},
        {"dataclass": ["os", "stat_result"], "fields": {"dict": []}},
        {"dataclass": ["utils.cluster", "Ranks"], "fields": {"dict": []}},
        {"range": ["a"]},
        {"dict": [[1]]},
        {"pickle": 0},
        {},
    ],
    ids=str,
)
def test_a_value_that_no_rank_of_ours_would_send_is_refused(frame):
    with pytest.raises(BrokenFrame):
        values.unpacked(frame, [bytearray(4)])


def test_the_tensors_of_a_call_may_not_claim_more_than_memory():
    huge = {"dtype": "float32", "shape": [2**40]}
    with pytest.raises(BrokenFrame):
        values.arguments_of([huge])
    many = [{"dtype": "float32", "shape": [2**29]}] * 3
    with pytest.raises(BrokenFrame):
        values.arguments_of([many])


# --- a rank that breaks its connection ---------------------------------------------------------


#: What a hostile cell writes into its socket, which is the only one that it has.
SOCKET = (
    "import os, socket, struct\n"
    "for number in map(int, os.listdir('/proc/self/fd')):\n"
    "    try:\n        end = socket.socket(fileno=os.dup(number))\n"
    "        if end.family == socket.AF_UNIX: break\n"
    "    except OSError:\n        pass\n"
)
BROKEN = {
    "noise": "end.sendall(os.urandom(4096))",
    "a length that is too large": "end.sendall(struct.pack('!II', 2**32 - 1, 0))",
    "too many pieces": "end.sendall(struct.pack('!II', 2, 2**32 - 1) + b'{}')",
    "a piece that is too large": "end.sendall(struct.pack('!IIQ', 2, 1, 2**63) + b'{}')",
    "no JSON": "end.sendall(struct.pack('!II', 3, 0) + b'abc')",
    "deep JSON": "end.sendall(struct.pack('!II', 200000, 0) + b'[' * 200000)",
    "a pickle": "import pickle\ntext = pickle.dumps(print)\n"
    "end.sendall(struct.pack('!II', len(text), 0) + text)",
    "an unknown frame": "text = b'[\"become\", {}]'\n"
    "end.sendall(struct.pack('!II', len(text), 0) + text)",
    "a call in a group that is not there": 'text = b\'["call", {"group": 9, "number": 1, '
    '"blocking": true, "place": null}]\'\nend.sendall(struct.pack(\'!II\', len(text), 0) + text)',
    "a message to a rank that is not there": 'text = b\'["call", {"group": 0, "number": 99, '
    '"blocking": true, "place": null, "send": 99, "tag": 0, "limit": null, "others": [], '
    '"thread": 0, "tensor": {"dtype": "float32", "shape": [1]}}]\'\n'
    "end.sendall(struct.pack('!IIQ', len(text), 1, 4) + text + bytes(4))",
    "an answer to nothing": 'text = b\'["done", {"request": "none"}]\'\n'
    "end.sendall(struct.pack('!II', len(text), 0) + text)",
    "a question that there is not": 'text = b\'["ask", {"number": 1, "method": "__init__", '
    "\"arguments\": []}]'\nend.sendall(struct.pack('!II', len(text), 0) + text)",
    "half a frame, then the end": "end.sendall(struct.pack('!II', 100, 0) + b'{')\nos._exit(0)",
}


#: `make test` tries these two; the others differ only in what is broken.
FIRST = ("a pickle", "a message to a rank that is not there")


@pytest.mark.parametrize(
    "attack",
    [name if name in FIRST else pytest.param(name, marks=pytest.mark.extended) for name in BROKEN],
)
def test_a_rank_that_breaks_its_connection_is_lost_and_harms_no_other(ranks, attack):
    code = f"{SOCKET}{BROKEN[attack]}\nimport time\ntime.sleep(30)"
    ranks.client[1].execute(code, block=False)
    deadline = time.monotonic() + 20
    while 1 in ranks.client.ids and time.monotonic() < deadline:
        time.sleep(0.02)
    assert ranks.client.ids == [0]
    assert ranks.client[0].pull("rank") == 0
    with pytest.raises(DeadRankError, match="rank 1: the rank is dead"):
        ranks.ask_or_raise("utils.cluster.busy:processor_share")


def test_fresh_ranks_work_after_a_broken_connection(ranks):
    ranks.client[1].execute(f"{SOCKET}{BROKEN['a pickle']}", block=False)
    ranks.restart()
    ranks.view.execute(JOIN, block=True)
    assert sums(ranks) == [[2.0] * 3] * 2


def test_a_rank_that_waits_for_a_dead_one_is_told_so(ranks):
    code = "if rank == 1: os.kill(os.getpid(), 9)\ndist.recv(torch.zeros(1), 1)"
    with pytest.raises(Exception, match="rank 1 died: signal 9"):
        ranks.view.execute(code, block=False).get(timeout=30)


def test_no_process_outlives_its_ranks():
    up = Boxes(BoxPlan(1))
    pids = [fact["pid"] for fact in up.facts]
    up.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_start_that_asks_for_what_only_mpi_has_is_refused():
    with pytest.raises(NeedsProcesses, match="launcher needs ranks of MPI"):
        cluster.start(2, where="boxes", launcher="mpiexec")
    with pytest.raises(ValueError, match="where='box'"):
        cluster.start(2, where="box")


def test_a_rank_that_has_begun_more_receives_hears_why_the_first_one_failed(ranks):
    """It sent all calls before it heard of the error, so none of them came after the error."""
    code = (
        "x = torch.ones(3)\n"
        "if rank == 0:\n    dist.all_reduce(torch.ones(4))\n"
        "else:\n    import time\n    time.sleep(0.5)\n"
        "    works = [dist.irecv(torch.zeros(1), 0, tag=k) for k in range(4)]\n"
        "    works[-1].wait()"
    )
    ranks.client[1].execute("dist.all_reduce(torch.ones(3))\n", block=False)
    with pytest.raises(Exception, match="rank 0") as caught:
        ranks.view.execute(code, block=True)
    assert "came to begin anew" not in str(caught.value)
    ranks.restart()


def test_a_rank_can_start_no_ranks(ranks):
    code = "from utils import cluster\ncluster.start(2)"
    with pytest.raises(Exception, match="already runs on a rank"):
        ranks.client[0].execute(code, block=True)
    with pytest.raises(Exception, match="mpi4py can't reach these ranks"):
        ranks.client[0].execute("import mpi4py", block=True)
    assert issubclass(RanksError, RuntimeError)
