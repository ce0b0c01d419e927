"""The labelled set: how it judges a report, its proofs, and the faults that only it has."""

from __future__ import annotations

import importlib
import re

import pytest
import torch
from places import ROOT

from benchmarks import diagnosis_page
from benchmarks.diagnosis_score import TOOLS, found, run
from benchmarks.labelled import PAIRS
from benchmarks.labelled.judge import GLOO, RECORDER, Trial, judged, marked_lines
from benchmarks.labelled.programs import KINDS, Pair
from benchmarks.labelled.proof import proven, script, shows
from torch_mpi.errors import CommunicationError
from torch_mpi.group.seals import Seal
from torch_mpi.protocol.program_end import leftovers, leftovers_in_words
from torch_mpi.record import Call

NAMES = [pair.name for pair in PAIRS]
#: Faults that no other test has: what runs through by luck, and what is left behind.
BY_LUCK = [p for p in PAIRS if p.kind in ("buffer and wait", "buffering hazard")]
LEFT = [p for p in PAIRS if p.kind == "unmatched at the end"]
PROVEN = [p for p in PAIRS if p.proof]
SILENT = [p for p in PAIRS if p.instead]
OURS = TOOLS["mpi"]


def named(name: str) -> Pair:
    return next(pair for pair in PAIRS if pair.name == name)


def test_the_set_is_in_pairs_of_all_classes_and_each_wrong_program_has_a_marked_line():
    assert len(set(NAMES)) == len(NAMES) >= 60
    assert {pair.kind for pair in PAIRS} == set(KINDS)
    for pair in PAIRS:
        assert marked_lines(pair.text(right=False)), pair.name
        assert not marked_lines(pair.text(right=True)), pair.name
        assert pair.text(right=False) != pair.text(right=True)
        assert bool(pair.says) != bool(pair.instead), f"{pair.name} needs one of the two"
        for right in (False, True):
            compile(pair.text(right), pair.name, "exec")
        for words in pair.says:
            assert not re.search(words, ""), f"{pair.name}: every report has {words!r}"


def told(pair: Pair, right: bool, err: str, status: int = 1) -> Trial:
    return judged(pair, right, status, err, 0.5)


def test_a_report_counts_only_with_a_rank_the_line_and_what_is_wrong():
    pair = named("both receive first")
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


def test_a_wrong_program_that_the_backend_cannot_see_counts_as_not_found():
    pair = SILENT[0]
    silent, loud = told(pair, False, "", 0), told(pair, False, "rank 0 at program.py:1", 1)
    assert silent.is_as_labelled
    assert not silent.is_good
    assert not loud.is_as_labelled
    assert not loud.is_good, "no words of the label say what is wrong"


@pytest.mark.parametrize(
    ("reading", "whole", "lacking"),
    [
        (
            GLOO,
            '[rank0]:   File "/tmp/program.py", line {line}, in <module>\n'
            "[rank0]: RuntimeError: [Rank 0]: Ranks 1 failed to pass monitoredBarrier in 4000 ms",
            "failed to pass monitoredBarrier",
        ),
        (
            RECORDER,
            "Not all ranks joining collective, sequence number: 1\nmissing ranks: {{1}}\n"
            "collective stack trace: \n barrier at /torch/distributed_c10d.py:9\n"
            "<module> at /tmp/program.py:{line}",
            "missing ranks",
        ),
    ],
    ids=["gloo", "recorder"],
)
def test_the_reports_of_pytorchs_tools_are_read_in_their_own_words(reading, whole, lacking):
    pair = named("a barrier on one rank only")
    (line,) = marked_lines(pair.text(right=False))
    text = whole.format(line=line)
    assert judged(pair, False, 1, text, 0.5, reading).is_good
    assert not judged(pair, False, 1, text.replace(lacking, "?"), 0.5, reading).is_good
    assert not judged(pair, False, 1, whole.format(line=line + 1), 0.5, reading).is_good
    late = "[rank0]: RuntimeError: Timed out waiting 4000ms for recv operation to complete"
    assert not judged(pair, False, 1, late, 0.5, reading).named_class


@pytest.mark.parametrize("pair", BY_LUCK + LEFT, ids=lambda pair: pair.name.replace(" ", "-"))
def test_a_fault_that_runs_through_by_luck_is_told_and_its_right_twin_is_not(pair):
    for right in (False, True):
        trial = run(pair, right, OURS)
        assert trial.is_good, trial.text or "nothing was said"


@pytest.mark.often
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name.replace(" ", "-"))
def test_every_program_of_the_set_is_told_apart(pair):
    wrong, right = (run(pair, right, OURS) for right in (False, True))
    assert wrong.reported != bool(pair.instead), wrong.text or "nothing was said"
    assert not right.reported, right.text


# -- programs whose calls match -----------------------------------------------------------------


def test_a_wrong_program_without_wrong_calls_misbehaves_and_its_right_twin_does_not(mpiexec):
    done = mpiexec(2, script(PROVEN))
    assert proven(PROVEN, done.stdout) == {pair.name: True for pair in PROVEN}
    # Of all of them, the backend reports one: the list of requests.
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("Left behind: rank 1 never waited for isend")


def test_each_manner_of_a_proof_needs_what_it_says():
    assert shows("differ", [1, 2], [1, 1])
    assert not shows("differ", [1, 2], [1, 2])
    assert shows("equal", [1, 1], [1, 2])
    assert not shows("equal", [1, 1], [1, 1])
    assert shows("other", [2, 2], [1, 1])
    assert not shows("other", [1, 1], [1, 1])
    assert not shows("other", [1, 2], [1, 1])
    assert shows("more", [1, 3], [2, 2])
    assert not shows("more", [2, 2], [2, 2])
    with pytest.raises(ValueError, match="is not a manner"):
        shows("less", [1], [2])


# -- the flight recorder ------------------------------------------------------------------------


def test_torchfrtrace_reads_our_dumps_and_finds_a_rank_that_is_missing():
    pair = named("an asynchronous sum that the others never begin")
    wrong, right = (run(pair, right, TOOLS["recorder"]) for right in (False, True))
    assert wrong.is_good, wrong.text
    assert "missing ranks: {1}" in wrong.text
    assert not right.reported, right.text


def test_a_dump_of_gloo_gets_the_groups_that_torchfrtrace_looks_for(monkeypatch, tmp_path):
    for name, value in (("DUMPS", str(tmp_path)), ("RANKS", "2"), ("TIMEOUT", "4")):
        monkeypatch.setenv(f"LABELLED_{name}", value)
    recorded = importlib.import_module("benchmarks.labelled.recorded")
    monkeypatch.setattr(recorded, "groups", {"0": {"ranks": "[0, 1]"}})
    entries = [{"process_group": ("0", "default_pg")}]
    nameless = {"entries": entries, "pg_config": {"": {"ranks": "[0, 1]"}}}
    assert recorded.complete(nameless) == {"entries": entries, "pg_config": recorded.groups}
    whole = {"entries": entries, "pg_config": {"0": {"ranks": "[0, 1]", "desc": "mine"}}}
    assert recorded.complete(whole) is whole


def test_torchfrtraces_words_for_nothing_are_not_a_report():
    nothing = "No errors found for this collective entry, There could be some other reasons"
    assert found(f"tabulate is not installed. Proceeding without it.\n{nothing}") == ""
    assert found(f"missing ranks: {{1}}\n{nothing}") == "missing ranks: {1}"


# -- the tables ---------------------------------------------------------------------------------


def test_the_table_counts_wrong_ones_reported_and_right_ones_silent():
    pair = PAIRS[0]
    trials = [told(pair, False, "", 0), told(pair, True, "", 0)]
    empty = ["tool", "0 of 1 (0%)", "0 of 1 (0%)", "–", "–"]
    assert diagnosis_page.summary("tool", trials) == empty
    alarms = [told(pair, False, "an error"), told(pair, True, "an error")]
    one = ["tool", "1 of 1 (100%)", "0 of 1 (0%)", "1 of 2 (50%)", "0.5"]
    assert diagnosis_page.summary("tool", alarms) == one
    assert diagnosis_page.classes({"a": trials, "b": alarms}) == [
        [pair.kind, 1, "0 / 0", "1 / 0"],
        ["all", 1, "0 / 0", "1 / 0"],
    ]


def test_the_command_says_what_our_diagnosis_does_not_find():
    trials = [told(pair, right, "", 0) for pair in SILENT for right in (False, True)]
    printed = diagnosis_page.tables({diagnosis_page.OURS: trials})
    for pair in SILENT:
        assert f"- wrong: {pair.name}: not reported. {pair.instead}" in printed


def test_the_page_is_written_between_its_marks(tmp_path):
    trials = [told(pair, right, "an error", 0) for pair in PAIRS for right in (False, True)]
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- measured -->\nold\n<!-- /measured -->\nafter\n")
    for _ in range(2):
        diagnosis_page.write(page, {diagnosis_page.OURS: trials, "b": trials}, 4, 5)
        text = page.read_text()
        assert text.startswith("before\n<!-- measured -->\n")
        assert text.endswith("<!-- /measured -->\nafter\n")
        assert "old" not in text
    page.write_text("no marks")
    with pytest.raises(ValueError, match="Add them"):
        diagnosis_page.around(page)


def test_a_report_on_the_page_keeps_the_program_and_loses_the_harness():
    report = (
        " all_reduce at /home/me/torch/distributed/distributed_c10d.py:3245\n"
        "wrapper at /home/me/torch/distributed/c10d_logger.py:83\n"
        "<module> at /tmp/x1/program.py:21\n_run_code at <frozen runpy>:88\n"
        "main at /home/me/recorded.py:103\n"
        "rank 0 calls barrier() at /tmp/x1/program.py:7, but rank 1 waits at /tmp/x1/program.py:9\n"
    )
    assert diagnosis_page.shortened(report).splitlines() == [
        " all_reduce at torch/distributed/distributed_c10d.py:3245",
        "<module> at program.py:21",
        "rank 0 calls barrier() at program.py:7, but rank 1 waits at program.py:9",
    ]


@pytest.mark.quick
def test_the_published_page_has_all_programs_and_names_those_that_are_not_found():
    text = (ROOT / "docs" / "diagnosis.md").read_text()
    assert f"of {len(PAIRS)} (" in text
    assert all(f"| {pair.name} " in text for pair in SILENT)
    counts = dict(re.findall(r"^\| ([a-z ]+?) +\| +(\d+) \|", text, re.MULTILINE))
    kinds = [pair.kind for pair in PAIRS]
    assert counts == {k: str(kinds.count(k)) for k in KINDS} | {"all": str(len(PAIRS))}


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


@pytest.mark.parametrize("elements", [5, 5_000, 100_003])
@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[-1].add_(1),
        lambda x: x[0].add_(1),
        lambda x: x.copy_(x.flip(0)),
        lambda x: x.copy_(x.roll(2 * 1021)),
        lambda x: x.numpy().sort(),
    ],
    ids=["last", "first", "reversed", "moved", "sorted by NumPy"],
)
def test_a_tensor_that_changes_before_the_wait_breaks_its_seal(elements, change):
    memory = torch.randn(elements)
    seal = Seal(call("send", 1), memory)
    seal.check()
    change(memory)
    with pytest.raises(CommunicationError, match=r"isend\(dst=1.* other values"):
        seal.check()


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
