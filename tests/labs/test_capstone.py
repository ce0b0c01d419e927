"""The capstone's harness: the clock, the counts, the judge, the scoreboard; and real entries."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mpi_jobs import find_mpiexec

from torch_mpi.library import is_open_mpi, version
from torch_mpi.network import Network
from utils import models
from utils.course.notebook import SOLUTIONS, read
from utils.figures import alt
from utils.forecast import Level, Machine, MachineError, machine
from utils.jobs.mpi_job import LATE, Ended
from utils.labs.lab14 import capstone, entry_judge, rankings
from utils.labs.lab14 import pictures as drawings
from utils.labs.lab14.entry_judge import Entry, accuracy, judged
from utils.labs.lab14.other_machine import LEAST, TreeClock, of_gradient, places
from utils.labs.lab14.replay import lost, replay, traffic
from utils.labs.lab14.rules import SIZES, TEST, Rules

#: 1 s for an image; 2 s between the nodes and 100 bytes a second; nothing inside.
SLOW = Rules(per_sample=1.0, between=Network(2.0, 100.0), inside=Network(0.0, 1e12), notice=10.0)

# --- the clock -----------------------------------------------------------------------------------


def ends(traces: dict, rules: Rules = SLOW) -> dict[int, float]:
    return {rank: round(seconds, 6) for rank, seconds in replay(traces, rules).end.items()}


@pytest.mark.quick
def test_a_message_leaves_when_its_sender_is_there_and_is_waited_for():
    traces = {0: [["work", 5, "a"], ["send", 4, 2, 300]], 2: [["recv", 4, 0, 300]]}
    assert ends(traces) == {0: 8, 2: 10}
    late = {2: [["work", 50, "a"], ["recv", 4, 0, 300]]}
    assert ends(traces | late) == {0: 8, 2: 50}


@pytest.mark.quick
def test_within_a_node_the_other_network_is_taken():
    assert ends({0: [["send", 4, 1, 300]], 1: [["recv", 4, 0, 300]]}) == {0: 0, 1: 0}


@pytest.mark.quick
def test_what_comes_in_at_the_same_time_comes_in_one_after_the_other():
    sends = {rank: [["send", 4, 0, 300]] for rank in (2, 3)}
    assert ends(sends | {0: [["recv", 4, 2, 300], ["recv", 4, 3, 300]]})[0] == 8
    assert ends(sends | {0: [["recv", 4, 3, 300], ["recv", 4, 2, 300]]})[0] == 8


@pytest.mark.quick
def test_the_order_in_which_ranks_are_gone_through_does_not_count():
    traces = {
        r: [["work", r, "a"], ["send", 4, (r + 1) % 4, 100], ["recv", 4, (r - 1) % 4, 100]]
        for r in range(4)
    }
    backwards = dict(reversed(traces.items()))
    assert ends(traces) == ends(backwards) == {0: 6, 1: 2, 2: 4, 3: 4}


@pytest.mark.quick
def test_those_that_live_go_on_together_a_while_after_the_death():
    traces = {
        0: [["work", 1, "a"], ["send", 4, 2, 100], ["shrunk"], ["work", 1, "a"], ["show", "x"]],
        1: [["work", 3, "a"], ["shrunk"]],
        2: [["work", 7, "a"], ["died"]],
        3: [["work", 5, "a"], ["shrunk"]],
    }
    clock = replay(traces, SLOW)
    assert clock.died == 7
    assert clock.end == {0: 18, 1: 17, 2: 7, 3: 17}
    assert clock.shown == [(18, 0, "x")]


@pytest.mark.quick
def test_the_weights_that_a_rank_shows_last_stay_the_last_ones_whatever_their_files_are_called():
    traces = {0: [["show", "shown-0-9"], ["show", "shown-0-10"]], 1: [], 2: [], 3: []}
    files = [file for _, _, file in replay(traces, SLOW).shown]
    assert files == ["shown-0-9", "shown-0-10"]


@pytest.mark.quick
def test_a_message_of_before_the_death_is_not_taken_for_one_of_after():
    # Ranks 0 and 1 are one node: rank 2 here has sent twice, once to nobody.
    traces = {
        0: [["shrunk"], ["recv", 3, 2, 100]],
        1: [["died"]],
        2: [
            ["send", 4, 0, 100],
            ["work", 20, "a"],
            ["shrunk"],
            ["work", 5, "a"],
            ["send", 3, 0, 100],
        ],
    }
    assert ends(traces)[0] == 1 + 20 + 10 + 5 + 1 + 2


@pytest.mark.quick
def test_a_message_whose_sending_nobody_noted_stops_nothing():
    assert ends({0: [["recv", 4, 2, 300], ["work", 4, "a"]], 2: []}) == {0: 4, 2: 0}


# --- what is counted -----------------------------------------------------------------------------


@pytest.mark.quick
def test_messages_and_bytes_of_each_pair_are_added_up():
    traces = {
        0: [["send", 4, 2, 300], ["send", 4, 2, 50], ["send", 4, 1, 7]],
        2: [["recv", 4, 0, 9]],
    }
    assert traffic(traces) == {(0, 2): (2, 350), (0, 1): (1, 7)}


STEPS = [["work", 8, "a"], ["send", 4, 1, 1], ["work", 8, "b"], ["send", 4, 1, 1]]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("dead", "alive", "images"),
    [
        # Who lives takes step b again: both have computed it in vain.
        ([*STEPS[:3], ["died"]], [*STEPS[:3], ["shrunk"], ["work", 8, "b"]], 16),
        # Back to the beginning.
        ([*STEPS, ["died"]], [*STEPS, ["shrunk"], ["work", 8, "a"]], 32),
        # It goes on from weights of its own: only what the dead rank has told nobody is lost.
        ([*STEPS, ["work", 8, "c"], ["died"]], [*STEPS, ["shrunk"], ["work", 8, "z"]], 8),
        ([*STEPS, ["died"]], [*STEPS, ["shrunk"], ["work", 8, "z"]], 0),
        # Nobody computes any more.
        ([["work", 8, "a"], ["died"]], [["work", 8, "a"], ["shrunk"]], 8),
    ],
)
def test_what_is_lost_is_seen_by_the_weights_that_are_gone_back_to(dead, alive, images):
    assert lost({0: dead, 1: alive}) == images


# --- the judge -----------------------------------------------------------------------------------


@pytest.fixture
def standin_images(monkeypatch):
    """Test images that weights of zero, and a bias for class 3, name right in one case of ten."""
    labels = torch.arange(TEST) % 10
    monkeypatch.setattr(entry_judge, "_kept", [(torch.zeros(TEST, 1, 28, 28), labels)])


def weights(**changes) -> dict:
    found = {name: torch.zeros_like(t) for name, t in models.mlp(0, SIZES).state_dict().items()}
    return found | changes


@pytest.mark.quick
def test_the_accuracy_is_that_of_the_weights(tmp_path: Path, standin_images):
    torch.save(weights(), tmp_path / "w.pt")
    assert accuracy(tmp_path / "w.pt") == pytest.approx(0.1)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("submitted", "words"),
    [
        ("99 %", "submitted <class 'str'> instead of the weights layers.1.weight"),
        ({}, "submitted nothing instead of the weights"),
        ({"w": torch.ones(3)}, "submitted w instead of the weights"),
        (weights(**{"layers.3.bias": torch.zeros(9)}), "layers.3.bias of shape [9], expected [10]"),
        (weights(**{"layers.3.bias": torch.full((10,), torch.nan)}), "the training diverged"),
    ],
)
def test_weights_that_are_none_are_named(tmp_path, standin_images, submitted, words):
    torch.save(submitted, tmp_path / "w.pt")
    with pytest.raises(ValueError, match=r"The (entry|weights)") as error:
        accuracy(tmp_path / "w.pt")
    assert words in str(error.value)


def is_work(event: list) -> bool:
    return event[0] == "work"


def left_behind(folder: Path, traces: dict, how: str = "done", words: str = "") -> Path:
    for rank, events in traces.items():
        told = {"how": "died" if ["died"] in events else how, "words": words, "events": events}
        (folder / f"rank-{rank}.json").write_text(json.dumps(told))
        computed = [f"{count} {seen}\n" for kind, count, seen in filter(is_work, events)]
        (folder / f"device-{rank}.txt").write_text("".join(computed))
    torch.save(weights(), folder / "x")
    return folder


SURVIVED = {
    0: [["work", 1, "a"], ["send", 4, 2, 100], ["shrunk"], ["work", 1, "a"], ["show", "x"]],
    1: [["shrunk"]],
    2: [["work", 7, "a"], ["died"]],
    3: [["shrunk"]],
}


def judge_of(folder: Path, rules: Rules, ended: Ended | None = None) -> Entry:
    ended, plan = ended or Ended(0, "", "", 3.0), {"victim": 2}
    return judged(folder, ended, name="toy", scheme="a scheme", plan=plan, rules=rules)


@pytest.mark.quick
def test_a_line_says_what_was_reached_and_used(tmp_path, standin_images):
    entry = judge_of(left_behind(tmp_path, SURVIVED), replace(SLOW, target=0.1, seconds=18.5))
    assert entry.within, entry.exceeded
    assert (entry.seconds, entry.slow_bytes, entry.slow_messages, entry.lost) == (18, 100, 1, 8)
    line = str(entry).splitlines()[-1]
    assert line.split("  ")[0] == "toy"
    assert "10.0 %" in line
    assert "within budget" in line
    assert str(entry.as_verdict()) == "✓ Task 14.1 · your entry · 0 points"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("rules", "missed"),
    [
        ({"target": 0.2, "seconds": 99}, "accuracy 10.0 < 20 %"),
        ({"target": 0.1, "seconds": 5}, "seconds 18.0 > 5"),
        ({"target": 0.1, "seconds": 99, "slow_bytes": 99}, "bytes 0.0 > 9.9e-05 MB"),
    ],
)
def test_a_line_says_what_was_missed(tmp_path, standin_images, rules, missed):
    entry = judge_of(left_behind(tmp_path, SURVIVED), replace(SLOW, **rules))
    assert entry.exceeded == (missed,)
    assert str(entry).endswith(f"missed: {missed}")
    assert f"- missed: {missed}" in str(entry.as_verdict())


@pytest.mark.quick
def test_who_is_done_before_the_death_is_not_within_the_budget(tmp_path, standin_images):
    traces = {0: [["work", 5, "a"], ["show", "x"]], **{r: [] for r in (1, 2, 3)}}
    entry = judge_of(left_behind(tmp_path, traces), replace(SLOW, target=0.1, seconds=99))
    assert entry.exceeded == ("failure (the entry ended after 5.0 s, before the rank died)",)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("traces", "how", "words", "status", "problem"),
    [
        (
            SURVIVED,
            "raised",
            "line 3: KeyError: 'x'",
            1,
            "Rank 0 raised an error in line 3: KeyError: 'x'",
        ),
        (SURVIVED, "raised", "TypeError: no train", 1, "TypeError: no train"),
        (SURVIVED, "done", "", LATE, "The entry was not done after 3 s of this machine"),
        ({0: [], 2: [["died"]]}, "done", "", 1, "Rank 1 ended early: Killed"),
        (
            {r: [] for r in range(4)},
            "done",
            "",
            0,
            "The entry submitted no weights. Call job.show(model)",
        ),
    ],
)
def test_an_entry_that_cannot_be_judged_has_a_line_that_says_why(
    tmp_path, traces, how, words, status, problem
):
    ended = Ended(status, "", "something\nKilled\n", 3.0)
    entry = judge_of(left_behind(tmp_path, traces, how, words), SLOW, ended)
    assert entry.problem == problem
    assert not entry.within
    assert str(entry).endswith(problem)


@pytest.mark.quick
def test_a_stub_is_still_open():
    entry = Entry("a", problem="Rank 0 raised an error in line 2", is_open=True)
    assert str(entry.as_verdict()) == "✗ Task 14.1 · your entry · still open"


# --- the scoreboard ------------------------------------------------------------------------------


@pytest.fixture
def three(tmp_path: Path) -> Path:
    curve = ((1.0, 0.5), (2.5, 0.81))
    rankings.enter(Entry("raised", problem="KeyError"), tmp_path)
    rankings.enter(
        Entry("slow", accuracy=0.81, seconds=9.0, curve=curve, slow_bytes=10**6), tmp_path
    )
    rankings.enter(
        Entry("fast", accuracy=0.81, seconds=2.5, curve=curve, slow_bytes=10**6), tmp_path
    )
    return tmp_path


@pytest.mark.quick
def test_the_best_is_on_top_and_a_name_stands_there_once(three: Path):
    names = [entry.name for entry in rankings.Scoreboard.read(three).entries]
    assert names == ["fast", "slow", "raised"]
    rankings.enter(Entry("fast", accuracy=0.7, exceeded=("accuracy",)), three)
    names = [entry.name for entry in rankings.Scoreboard.read(three).entries]
    assert names == ["slow", "fast", "raised"]
    through_files = Entry("files", accuracy=0.9, seconds=1.0, curve=((1.0, 0.9),), slow_bytes=172)
    assert through_files.verdict == "within budget, with hardly a byte between the nodes: " + (
        "how do they agree?"
    )
    assert "slow" in repr(rankings.Scoreboard.read(three))
    assert "<table>" in rankings.Scoreboard.read(three)._repr_html_()


@pytest.mark.quick
def test_boards_of_teams_are_read_together_and_a_broken_file_is_kept(
    three, tmp_path_factory, capsys
):
    other = tmp_path_factory.mktemp("other")
    (other / rankings.FILE).write_text("{")
    both = rankings.Scoreboard.read(three, other)
    assert len(both.entries) == 3
    assert both.problem == "scoreboard.json could not be read."
    rankings.enter(Entry("new"), other)
    assert "scoreboard.broken" in capsys.readouterr().out
    assert (other / "scoreboard.broken").read_text() == "{"
    assert [entry.name for entry in rankings.Scoreboard.read(other).entries] == ["new"]


@pytest.mark.quick
def test_the_pictures_say_what_they_show(three: Path):
    said = alt.describe(rankings.Scoreboard.read(three).picture())
    assert "fast: 81.0 %, 1.0 MB, target after 2.5 s" in said
    assert "raised" not in said
    assert "No entry has submitted weights" in alt.describe(drawings.entries([], Rules()))
    assert "20 Mbit/s" in alt.describe(drawings.machine(Rules()))


# --- a second machine ----------------------------------------------------------------------------

#: As SLOW, but the two ranks of a node share its link to the other node.
SHARED_LINK = Machine(
    "toy", machine("four-nodes").device, (Level("node", 2, 0, 1e12), Level("switch", 2, 2.0, 100.0))
)


def ends_on(traces: dict, where: Machine = SHARED_LINK) -> dict[int, float]:
    clock = replay(traces, SLOW, TreeClock(traces, SLOW, where))
    return {rank: round(seconds, 6) for rank, seconds in clock.end.items()}


@pytest.mark.quick
def test_two_ranks_of_a_node_wait_for_each_other_at_the_link_that_they_share():
    traces = {
        0: [["send", 4, 2, 300]],
        1: [["send", 4, 3, 300]],
        2: [["recv", 4, 0, 300]],
        3: [["recv", 4, 1, 300]],
    }
    assert ends(traces) == {0: 3, 1: 3, 2: 5, 3: 5}
    assert ends_on(traces) == {0: 3, 1: 6, 2: 5, 3: 8}


@pytest.mark.quick
def test_a_shared_link_serves_the_earlier_message_first_whichever_rank_is_played_first():
    traces = {
        0: [["work", 10, "a"], ["send", 4, 2, 300]],
        1: [["work", 1, "a"], ["send", 4, 3, 300]],
        2: [["recv", 4, 0, 300]],
        3: [["recv", 4, 1, 300]],
    }
    backwards = dict(reversed(traces.items()))
    assert ends_on(traces) == ends_on(backwards) == {0: 13, 1: 4, 2: 15, 3: 6}


@pytest.mark.quick
def test_the_ranks_are_two_and_two_on_a_machine_that_has_two_nodes():
    assert places(machine("four-nodes")) == places(machine("nvl72")) == [0, 1, 2, 3]
    assert places(machine("rack-nvlink")) == [0, 1, 8, 9]
    with pytest.raises(MachineError, match="Choose a machine with at least 4"):
        places(machine("laptop").with_level("laptop", units=3))


@pytest.mark.quick
def test_a_gpu_needs_a_least_time_for_a_gradient_and_a_core_the_time_of_the_rules():
    core, gpu = machine("four-nodes").device, machine("rack-nvlink").device
    assert of_gradient(core, 32, Rules()) == pytest.approx(0.032)
    assert of_gradient(gpu, 32, Rules()) == LEAST
    assert of_gradient(gpu, 10**8, Rules()) > 0.1


@pytest.mark.quick
def test_a_line_has_a_second_score_only_if_somebody_asks_for_it(
    tmp_path, standin_images, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    entry = judge_of(left_behind(tmp_path, SURVIVED), replace(SLOW, target=0.1, seconds=18.5))
    rankings.enter(entry)
    before = (tmp_path / rankings.FILE).read_text()
    assert "elsewhere" not in str(entry) + repr(capstone.scoreboard()) + before
    raised = Entry("raised", problem="KeyError")
    board = capstone.elsewhere(SHARED_LINK, entry, raised)
    (there, unchanged), (stored,) = board.entries, capstone.scoreboard().entries
    assert there == stored == entry.on(SHARED_LINK)
    assert unchanged == raised
    # The death decides on both machines: it comes after 7 s, and costs 10 s, and an image is 1 s.
    assert (there.elsewhere, there.elsewhere_seconds, there.seconds) == ("toy", 18, 18)
    assert there.elsewhere_curve == ((18, pytest.approx(0.1)),)
    assert "toy 18.00" in str(stored)
    assert "toy" in repr(board)
    assert "toy: 18 s, and 18 s on toy" in alt.describe(board.both_machines())


@pytest.mark.quick
def test_a_scoreboard_from_before_the_second_score_is_still_read(three: Path):
    path = three / rankings.FILE
    assert "elsewhere" not in path.read_text()
    assert [entry.elsewhere for entry in rankings.Scoreboard.read(three).entries] == [""] * 3
    second = {"elsewhere": "four-nodes", "elsewhere_curve": ((1.0, 0.5),)}
    rankings.enter(Entry("never", curve=((2.0, 0.5),), **second), three)
    board = rankings.Scoreboard.read(three)
    assert "four-nodes –" in board._repr_html_()
    assert "never: target not reached, and target not reached" in alt.describe(
        board.both_machines()
    )
    nobody = rankings.Scoreboard(board.entries[:1]).both_machines()
    assert "No entry has a second score" in alt.describe(nobody)


@pytest.mark.quick
def test_a_machine_that_is_too_small_is_refused_before_the_entry_runs(tmp_path):
    script = tmp_path / "own.py"
    script.write_text("")
    with pytest.raises(MachineError):
        capstone.run(script, "own", also=machine("laptop").with_level("laptop", units=1))


# --- real entries --------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch) -> Path:
    launcher = find_mpiexec()
    if launcher is None or not is_open_mpi(version(launcher)):
        pytest.skip("ULFM takes Open MPI")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(folder: Path, cell_id: str, **changes: str) -> Path:
    """The file that a cell of the notebook writes, with some words changed."""
    nb = read(SOLUTIONS / "14_capstone.ipynb")
    source = next(cell.source for cell in nb.cells if cell.id == cell_id).partition("\n")[2]
    for old, new in changes.values():
        assert old in source
        source = source.replace(old, new)
    path = folder / f"{cell_id}.py"
    path.write_text(source, encoding="utf-8")
    return path


SMALL = Rules(target=0.3, seconds=9.0, slow_bytes=4_000_000, earliest=200, latest=900)


@pytest.mark.extended
def test_the_notebooks_entries_on_real_ranks(here: Path):
    """The baseline misses the bytes, the model's entry is within the budget; both survive."""
    script = written(here, "repair-write", steps=("step < 240", "step < 40"))
    plain = capstone.run(script, "plain", seed=1, rules=SMALL)
    script = written(here, "entry-answer", steps=("steps, tau = 240", "steps, tau = 80"))
    model = capstone.run(script, "model", seed=2, rules=SMALL)
    n = 4 * sum(p.numel() for p in models.mlp(0, SIZES).parameters())

    assert plain.problem == ""
    # Two arrows of a ring of four carry 1.5 n a step, two of a ring of three 4/3 n.
    assert 40 * 2 * 4 / 3 * n < plain.slow_bytes < 41 * 2 * 3 / 2 * n
    assert [text.split()[0] for text in plain.exceeded] == ["bytes"]
    assert plain.lost == 96

    assert model.within, model.verdict
    # Four rounds of 2 n, one of them again, and small change.
    assert 8 * n <= model.slow_bytes < 10.1 * n
    assert model.seconds < plain.curve[-1][0]
    assert 0 < model.lost <= 4 * 20 * 32
    assert [entry.name for entry in capstone.scoreboard().entries] == ["model", "plain"]


#: What an entry may not do, as statements about a job and its model, and what refuses each of them.
CHEATS = {
    "images that count as one": ("job.gradient(model, job.batch(0, 90)[None])", "TypeError"),
    "a network of its own": ("job.gradient(nn.Linear(784, 10), job.batch(0, 8))", "TypeError"),
    "an image that isn't there": ("job.gradient(model, torch.tensor([12000]))", "ValueError"),
    "no image": ("job.gradient(model, torch.tensor([], dtype=torch.int64))", "ValueError"),
    "the images": ("job.images", "AttributeError"),
    "the device's pixels": ("model(torch.zeros(8, 1, 28, 28))", "TypeError"),
    "the test images": ("data.fashion_mnist(train=False)", "PermissionError"),
    "the training images of the disk": ("data.fashion_mnist(train=True)", "PermissionError"),
    "weights that were submitted, once more": (
        "job.show(model); job._shown = 0; job.show(model)",
        "FileExistsError",
    ),
}
CHEATER = """
import torch
import torch.distributed as dist
from torch import nn
from utils import data

def train(job):
    model, cheats = job.model(), CHEATS
    for name, (code, _) in cheats.items():
        try:
            exec(compile(code, __file__, "exec"), globals() | {"job": job, "model": model})
        except Exception as refusal:
            job.rank or print(f"{name}: {type(refusal).__name__}: {refusal}", flush=True)
    class Hidden(torch.Tensor):
        def __len__(self):
            return 0 if self.dim() and self.shape[0] == 100 else 1
    for number in range(12):
        model(job.batch(number, 100).as_subclass(Hidden))  # without job.gradient it counts, too
    dist.barrier()
"""


def test_what_isn_t_a_minibatch_is_refused_and_images_count_however_they_are_used(
    here: Path, capsys
):
    (here / "cheater.py").write_text(CHEATER.replace("CHEATS", repr(CHEATS)))
    entry = capstone.run("cheater.py", "cheater", rules=SMALL)
    lines = [line.split(": ", 2) for line in capsys.readouterr().out.splitlines()]
    refused = {name: kind for name, kind, _ in lines if name in CHEATS}
    assert refused == {name: kind for name, (_, kind) in CHEATS.items()}
    # The victim dies after its images, which only the device has seen.
    assert "died" in entry.problem


def left_by_rank_0(folder: Path, computed: str) -> dict:
    """Leave what a rank with one gradient leaves, and return further arguments of `judged`."""
    events = [["work", 24, "a"], ["show", "w.pt"]]
    told = {"how": "done", "words": "", "events": events}
    (folder / "rank-0.json").write_text(json.dumps(told))
    for rank in (1, 2, 3):
        (folder / f"rank-{rank}.json").write_text(json.dumps(told | {"events": []}))
    (folder / "device-0.txt").write_text(computed)
    torch.save(weights(**{"layers.3.bias": torch.zeros(10)}), folder / "w.pt")
    return {"name": "x", "scheme": "", "plan": {"victim": 1}, "rules": Rules(target=0.05)}


@pytest.mark.quick
def test_weights_of_an_earlier_training_are_refused(tmp_path, standin_images):
    found = left_by_rank_0(tmp_path, "24 a\n")
    assert judged(tmp_path, Ended(0, "", "", 1.0), **found).problem == ""
    entry_judge._kept[0] = (entry_judge._kept[0][0], torch.zeros(TEST, dtype=torch.int64))
    entry = judged(tmp_path, Ended(0, "", "", 1.0), **found)
    assert entry.problem.startswith(
        "The weights reached 100.0 % when all ranks together had computed gradients of 24 images. "
        "The harness knows no training that gets there with fewer than 3,500"
    )


@pytest.mark.quick
@pytest.mark.parametrize("computed", ["24 a\n1000 b\n", "1000 a\n", "24 b\n", ""])
def test_a_rank_that_hides_images_from_its_record_is_told_by_its_device(
    tmp_path, standin_images, computed
):
    found = left_by_rank_0(tmp_path, computed)
    entry = judged(tmp_path, Ended(0, "", "", 1.0), **found)
    assert entry.problem.startswith("Rank 0 recorded gradients of 24 images, and its device ")


@pytest.mark.quick
def test_entries_of_nearly_the_same_seconds_are_ranked_by_bytes_and_zero_seconds_are_reached():
    def entry(name: str, seconds: float | None, mb: float, **more) -> Entry:
        return Entry(name, seconds=seconds, slow_bytes=int(1e6 * mb), lost=0, **more)

    never = entry("never", None, 0.1, exceeded=("accuracy",))
    entries = [entry("a", 7.68, 6.5), entry("b", 7.74, 1.7), entry("c", 0.0, 1.0), never,
               entry("d", 8.2, 0.1)]  # fmt: skip
    assert [one.name for one in rankings.ranked(entries)] == ["c", "b", "a", "d", "never"]


STUCK = """
import time

def train(job):
    while True:
        time.sleep(1)
"""


def test_an_entry_that_hangs_is_ended(here: Path):
    (here / "stuck.py").write_text(STUCK)
    entry = capstone.run("stuck.py", "stuck", deadline=8)
    assert entry.problem.startswith("The entry was not done after ")
    with pytest.raises(FileNotFoundError, match=r"There is no other\.py"):
        capstone.run("other.py", "other")
