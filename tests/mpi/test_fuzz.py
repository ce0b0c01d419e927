"""The fuzzer of the backend: some of its programs, and that it finds what is broken on purpose."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator

import fuzz
import pytest
import torch
from mpi_fuzz import collectives, faults, jobs, program, shrink, tensors, text
from mpi_fuzz.model import Model

# Programs of each number of ranks; `tests/mpi/fuzz.py` tries as many others as there is time for.
SEEDS = range(1, 8)


@pytest.fixture(scope="module")
def stages() -> Iterator[dict[int, jobs.Stage]]:
    made = {size: jobs.Stage(size) for size in (1, 2, 3, 4)}
    yield made
    for stage in made.values():
        stage.close()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_random_programs_leave_on_every_rank_what_the_model_says(stages, size):
    programs = [program.draw(seed, size) for seed in SEEDS]
    outcomes = stages[size].run(programs)
    said = [f"{o.program['seed']}: {why}" for o in outcomes if (why := faults.wrong(o))]
    assert not said, f"again: python tests/mpi/fuzz.py -n {size} --only SEED --shrink\n{said[0]}"
    assert len(outcomes) == len(programs)


def test_every_planted_fault_is_told_on_every_rank_and_the_next_program_runs(stages):
    programs = []
    for seed, kind in enumerate(faults.KINDS):
        programs += [faults.draw(seed, 3, kind), program.draw(seed, 3, strands=1)]
    outcomes = stages[3].run(programs)
    said = [f"{o.program.get('fault')}: {why}" for o in outcomes if (why := faults.wrong(o))]
    assert not said, said[0]
    assert len(outcomes) == len(programs)


@pytest.mark.parametrize("kind", faults.ENDINGS)
def test_a_script_tells_of_a_rank_that_ends_on_its_own(stages, kind):
    planted = faults.draw_ending(2, 2, kind)
    ended = stages[2].script(planted)
    assert not faults.wrong_ending(planted, ended.status, ended.err)


# -- it finds what is broken ----------------------------------------------------------------------

BROKEN = {
    # From a size on one byte is wrong: as a backend that takes another way for large tensors.
    "backend": """
import torch.distributed as dist
right = dist.all_to_all_single
def wrong(output, *others, **more):
    work = right(output, *others, **more)
    if work is None and output.numel() > 1:
        output.view(-1)[-1:].zero_()
    return work
dist.all_to_all_single = wrong
""",
    "model": """
from mpi_fuzz import collectives
collectives._PLAYS["broadcast"] = lambda *_: None
""",
    "neighbours in memory": """
import torch.distributed as dist
right = dist.recv
def wrong(tensor, *others, **more):
    source = right(tensor, *others, **more)
    if not tensor.is_contiguous() and tensor.dtype != dist.torch.bool:
        tensor._base.view(-1)[:1] += 1
    return source
dist.recv = wrong
""",
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_broken_is_found_and_is_found_again_by_the_seed(stages, monkeypatch, what):
    broken = stages[2]
    monkeypatch.setattr(broken, "prelude", BROKEN[what])
    found = broken.run([program.draw(seed, 2) for seed in range(40)])[-1]
    assert faults.wrong(found).startswith("Wrong: ")
    again = program.draw(found.program["seed"], 2)
    assert shrink.failure(again, broken).startswith("Wrong: ")


def test_a_rank_that_hangs_ends_the_job_and_is_named_with_its_line(stages, monkeypatch):
    prelude = """
from mpi_fuzz import ranks, running
ranks.DEADLINE = 1.0
def hangs(*_):
    while True:
        pass
running.completed = hangs
"""
    monkeypatch.setattr(stages[2], "prelude", prelude)
    found = stages[2].run([program.draw(seed, 2) for seed in range(5)])[-1]
    why = faults.wrong(found)
    assert why.startswith("Ended: ")
    assert 'File "program.py", line' in why


# -- without ranks --------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("size", [1, 4])
def test_a_seed_gives_one_program_whose_text_and_model_can_be_made(size):
    for seed in range(12):
        drawn = program.draw(seed, size)
        assert drawn == program.draw(seed, size) == json.loads(json.dumps(drawn))
        compile(text.python(drawn, "tests"), text.NAME, "exec")
        Model(drawn, size - 1)
    assert program.draw(1, size) != program.draw(2, size)


@pytest.mark.quick
def test_the_programs_have_every_collective_dtype_reduction_layout_and_kind_of_message():
    steps = [s for seed in range(400) for s in program.draw(seed, 3)["steps"]]
    done = {s["do"] for s in steps}
    assert done >= {*collectives.NAMES, "new_group", "wait", "send", "recv", "isend", "irecv"}
    assert done >= {"recv_any", "irecv_any", "batch", "all_gather_object", "object_message"}
    drawn = {(s["dtype"], s["op"]) for s in steps if s["do"] in collectives.CALLS and "op" in s}
    assert drawn >= {(d, op) for d, ops in collectives.REDUCED.items() for op in ops}
    assert {s["dtype"] for s in steps if "dtype" in s} >= set(tensors.MOVED)
    specs = [spec for step in steps for spec in shrink.specs(step)]
    assert {s["layout"] for s in specs if "layout" in s} == {*tensors.WRITABLE, "expanded"}
    assert any("same" in s for s in specs)
    assert any("part" in s for s in specs)
    assert any("step" in s for s in specs)


@pytest.mark.quick
@pytest.mark.parametrize("layout", [*tensors.WRITABLE, "expanded"])
def test_a_layout_changes_where_the_values_lie_and_not_the_values(layout):
    for dtype in tensors.MOVED:
        for shape in ([], [0], [1], [4], [3, 2], [3, 0]):
            plain = tensors.tensor(5, 1, shape, dtype)
            got = tensors.tensor(5, 1, shape, dtype, layout)
            want = plain if layout != "expanded" or not shape else plain[:1].expand(shape)
            assert got.shape == want.shape
            assert got.tolist() == want.tolist()


@pytest.mark.quick
def test_the_model_reduces_as_it_is_done_by_hand():
    def reduced(op, *rows, dtype="int8"):
        made = [torch.tensor(row, dtype=getattr(torch, dtype)) for row in rows]
        return collectives.reduced(made, op, 0.5).tolist()

    assert reduced("SUM", [100, 1], [100, 2]) == [-56, 3]
    assert reduced("PRODUCT", [3, 20], [5, 20]) == [15, -112]
    assert reduced("BXOR", [3, 1], [5, 1]) == [6, 0]
    assert reduced("MAX", [255, 1], [3, 2], dtype="uint8") == [255, 2]
    assert reduced("SUM", [True, False], [True, False], dtype="bool") == [True, False]
    assert reduced("AVG", [12.0], [24.0], dtype="bfloat16") == [18.0]
    assert reduced("PREMUL_SUM", [2.0], [4.0], dtype="float32") == [3.0]


@pytest.mark.quick
def test_the_model_moves_as_it_is_done_by_hand():
    rows = [[torch.tensor([r * 10 + k for k in range(3)]), None] for r in range(2)]
    rows[0][1], rows[1][1] = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    step = {"do": "all_to_all_single", "members": [0, 1]}
    step["splits"] = [[[1, 2], [1, 2]], [[2, 1], [2, 1]]]
    collectives.play(step, rows)
    assert [r[1].tolist() for r in rows] == [[0, 10, 11], [1, 2, 12]]
    lists = [[torch.tensor([1, 2, 3, 4]), torch.zeros(2, dtype=torch.int64)] for _ in range(2)]
    step = {"do": "reduce_scatter_tensor", "members": [0, 1], "op": "SUM"}
    collectives.play(step, lists)
    assert [x[1].tolist() for x in lists] == [[2, 4], [6, 8]]


def outcome(planted: dict, **more) -> jobs.Outcome:
    """As the backend would tell of a collective that another rank does not call."""
    line = min(faults.lines_of(planted))
    words = f"rank 0 calls a, but rank {planted['fault']['rank']} calls b at program.py:{line}"
    cause = {"error": "CommunicationMismatch", "text": words, "where": "", "seconds": 0.1}
    stopped = {"error": "CommunicationStopped", "text": "", "where": "", "seconds": 0.1}
    return jobs.Outcome(planted, [cause | more, stopped, stopped])


@pytest.mark.quick
def test_a_report_of_a_fault_counts_only_with_class_rank_line_and_in_time():
    planted = faults.draw(3, 3, "another op")
    assert faults.wrong(outcome(planted)) == ""
    assert faults.wrong(outcome(planted, error="")).startswith("Class: no error")
    assert faults.wrong(outcome(planted, error="RuntimeError")).startswith("Class: RuntimeError")
    assert faults.wrong(outcome(planted, error="CommunicationTimeout")).startswith("Class: ")
    assert faults.wrong(outcome(planted, seconds=99.0)).startswith("Late: ")
    assert faults.wrong(outcome(planted, text="something")).startswith("Rank: ")
    words = outcome(planted).ranks[0]["text"].partition(" at ")[0]
    assert faults.wrong(outcome(planted, text=words)).startswith("Line: ")
    assert faults.wrong(jobs.Outcome(planted, [], "a hang")).startswith("Ended: ")


@pytest.mark.quick
def test_an_error_in_a_program_without_a_fault_is_a_false_alarm():
    drawn = program.draw(1, 3)
    fine = {"error": "", "text": "", "where": "", "seconds": 0.1}
    assert faults.wrong(jobs.Outcome(drawn, [fine] * 3)) == ""
    alarm = fine | {"error": "CommunicationTimeout", "rank": 1}
    assert faults.wrong(jobs.Outcome(drawn, [alarm])).startswith("CommunicationTimeout: on rank 1")


class Imagined:
    """A stage on which a program fails for its steps of one kind."""

    def __init__(self, do: str):
        self.do, self.runs = do, 0

    def run(self, programs: list[dict]) -> list[jobs.Outcome]:
        self.runs += 1
        (drawn,) = programs
        error = "Wrong" if any(s["do"] == self.do for s in drawn["steps"]) else ""
        return [jobs.Outcome(drawn, [{"error": error, "text": "", "rank": 0, "seconds": 0.0}])]


@pytest.mark.quick
def test_a_failing_program_is_cut_down_to_the_call_that_fails():
    drawn = next(
        p for seed in range(99) for p in [program.draw(seed, 3, strands=14)]
        if any(s["do"] == "scatter" and s["group"] for s in p["steps"])
    )  # fmt: skip
    before = copy.deepcopy(drawn)
    left, why = shrink.shrunk(drawn, Imagined("scatter"))
    assert drawn == before
    assert why.startswith("Wrong")
    kinds = [s["do"] for s in left["steps"]]
    assert kinds.count("scatter") == 1
    assert set(kinds) <= {"scatter", "wait", "new_group"}
    assert all(
        s.get("layout", "plain") == "plain" for st in left["steps"] for s in shrink.specs(st)
    )
    compile(text.python(left, "tests"), text.NAME, "exec")
    Model(left, 0)


@pytest.mark.quick
def test_a_program_that_goes_wrong_is_printed_with_the_command_that_runs_it(capsys, monkeypatch):
    monkeypatch.setattr(fuzz.jobs, "stage", lambda size: _Closed(Imagined("barrier")))
    monkeypatch.setattr(fuzz, "IN_A_JOB", 1)
    assert fuzz.main(["-n", "2", "--minutes", "0.5", "--most", "1"]) == 1
    said = capsys.readouterr().out
    (seed,) = [line.split()[2] for line in said.splitlines() if line.startswith("WRONG")]
    assert f"python tests/mpi/fuzz.py -n 2 --only {seed} --shrink" in said
    assert fuzz.main(["-n", "2", "--only", seed, "--shrink"]) == 1
    assert "dist.barrier(" in capsys.readouterr().out


class _Closed:
    """A stage as `jobs.stage` gives it."""

    jobs = 0

    def __init__(self, stage):
        self.stage = stage
        stage.jobs = 0

    def __enter__(self):
        return self.stage

    def __exit__(self, *_):
        pass
