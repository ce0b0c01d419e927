"""The labelled set: what it says of a report, and the faults that only it has."""

from __future__ import annotations

import re

import pytest
import torch

from torch_mpi.errors import CommunicationError
from torch_mpi.group.messages import Seal
from torch_mpi.protocol.program_end import leftovers, leftovers_in_words
from torch_mpi.record import Call
from utils.jobs.diagnosis_score import rows, run
from utils.mpi.labelled import PAIRS
from utils.mpi.labelled.judge import Trial, judged, marked_lines
from utils.mpi.labelled.programs import KINDS, Pair

NAMES = [pair.name for pair in PAIRS]
#: Faults that no other test has: what runs through by luck, and what is left behind.
BY_LUCK = [p for p in PAIRS if p.kind in ("buffer and wait", "buffering hazard")]
LEFT = [p for p in PAIRS if p.kind == "unmatched at the end"]


def test_the_set_is_in_pairs_of_all_classes_and_each_wrong_program_has_a_marked_line():
    assert len(set(NAMES)) == len(NAMES) >= 30
    assert {pair.kind for pair in PAIRS} == set(KINDS)
    for pair in PAIRS:
        assert marked_lines(pair.text(right=False)), pair.name
        assert not marked_lines(pair.text(right=True)), pair.name
        assert pair.text(right=False) != pair.text(right=True)
        assert pair.says, pair.name
        for right in (False, True):
            compile(pair.text(right), pair.name, "exec")
        for words in pair.says:
            assert not re.search(words, ""), f"{pair.name}: every report has {words!r}"


def told(pair: Pair, right: bool, err: str, status: int = 1) -> Trial:
    return judged(pair, right, status, err, 0.5)


def test_a_report_counts_only_with_a_rank_the_line_and_what_is_wrong():
    pair = next(p for p in PAIRS if p.name == "both receive first")
    line = min(marked_lines(pair.text(right=False)))
    whole = f"Deadlock: rank 0 waits at program.py:{line}\n  cycle 0 → 1 → 0"
    for text, good in (
        (whole, True),
        (whole.replace(f":{line}", f":{line + 1}"), False),
        (whole.replace("rank 0", "it"), False),
        (whole.replace("Deadlock", "Timeout"), False),
        ("", False),
    ):
        assert told(pair, False, text).is_good is good, text
    assert told(pair, True, "", 0).is_good
    assert not told(pair, True, "", 1).is_good
    assert not told(pair, True, "a warning", 0).is_good


def test_the_table_counts_wrong_ones_reported_and_right_ones_silent():
    pair = PAIRS[0]
    trials = [told(pair, False, "", 0), told(pair, True, "", 0)]
    assert rows(trials)[-1] == ["all", 1, 0, 0, "1 of 1", "0.5"]


@pytest.mark.parametrize("pair", BY_LUCK + LEFT, ids=lambda pair: pair.name.replace(" ", "-"))
def test_a_fault_that_runs_through_by_luck_is_told_and_its_right_twin_is_not(pair):
    for right in (False, True):
        trial = run(pair, right, "mpi")
        assert trial.is_good, trial.text or "nothing was said"


@pytest.mark.often
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name.replace(" ", "-"))
def test_every_program_of_the_set_is_told_apart(pair):
    wrong, right = (run(pair, right, "mpi") for right in (False, True))
    assert wrong.reported, "nothing was said"
    assert not right.reported, right.text


# -- what is left behind, without ranks ---------------------------------------------------------


def call(op: str, number: int | None = None, **more) -> Call:
    place = ("/home/me/train.py", 7, "<module>")
    message = None if number is None else (0, number)
    peer = 1 if op == "send" else 0
    made = Call(op, (0, 1), 8, (2,), "float32", peer, 0, place=place, message=message, **more)
    made.end = 1.0
    return made


def test_a_message_that_was_received_is_not_told_however_many_look_alike():
    sender = leftovers([call("send", n) for n in (1, 2, 3)], 3)
    receiver = leftovers([call("recv", n) for n in (1, 3)], -2)
    assert sender["teller"]
    assert not receiver["teller"], "it waits for the others at its end"
    (line,) = leftovers_in_words({0: sender, 1: receiver})
    assert line.startswith("rank 1 never received rank 0's send(dst=1, tag=0)")
    assert "train.py:7" in line
    receiver = leftovers([call("recv", n) for n in (1, 2, 3)], -3)
    assert leftovers_in_words({0: sender, 1: receiver}) == []


def test_where_a_rank_cannot_list_its_messages_none_is_called_unreceived():
    sender = leftovers([call("send", n) for n in range(5)], 5)
    receiver = leftovers([call("recv", n) for n in range(4)] * 100, -4)
    assert leftovers_in_words({0: sender, 1: receiver}) == [
        "no rank received 1 of the messages, and there were too many to list them. "
        "Count the sends and the receives of each rank."
    ]


def test_only_the_users_own_calls_count_as_never_waited_for():
    inside = call("all_reduce", blocking=False)
    inside.place = (torch.nn.__file__, 3, "backward")
    waited = call("all_reduce", blocking=False, waited=True)
    blocking = call("all_reduce", blocking=True)
    assert not leftovers([inside, waited, blocking], 0)["teller"]
    told = leftovers([call("recv", 1, blocking=False)] * 3, -3)
    (line,) = leftovers_in_words({0: told, 1: told})
    assert line.startswith("ranks 0, 1 never waited for irecv(src=0, tag=0) at train.py:7, 3 times")


def test_a_tensor_that_changes_before_the_wait_breaks_its_seal():
    memory = torch.ones(5)
    seal = Seal(memory)
    seal.check(call("send", 1))
    memory[3] = 2
    with pytest.raises(CommunicationError, match=r"isend\(dst=1.* was changed before wait\(\)"):
        seal.check(call("send", 1))


SECOND_TIME = """
import torch, torch.distributed as dist
dist.init_process_group("mpi")
tensor = torch.ones(3)
dist.all_reduce(tensor)  # from the second one on it takes the fast path
dist.all_reduce(tensor) if dist.get_rank() else dist.barrier()
"""


def test_both_sides_of_a_mismatch_are_named_when_one_is_on_the_fast_path(mpiexec):
    done = mpiexec(2, SECOND_TIME, check=False)
    assert "rank 0 calls barrier() at" in done.stderr
    assert "but rank 1 calls all_reduce(SUM) of float32[3] (12 bytes) at" in done.stderr
