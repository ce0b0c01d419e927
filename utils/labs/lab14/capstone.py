"""The capstone: any training scheme on four ranks, two nodes, a slow network, and one death.

An entry is a file with a function ``train(job)``. A notebook runs it like this::

    entry = capstone.run("plain.py", "all-reduce every step")
    print(entry)                # the line of the scoreboard
    capstone.scoreboard()       # all entries so far

On each rank, the entry works with a :class:`utils.labs.lab14.job.Job`.
:mod:`utils.labs.lab14.replay` computes its seconds.
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path

import torch

from utils import data
from utils.cluster.left_out import need_processes
from utils.forecast.machines import Machine
from utils.jobs import mpi_job, python_words
from utils.jobs.start_plan import Plan, refuse_on_a_rank

from .entry_judge import Entry, judged
from .other_machine import places
from .rankings import FILE, Scoreboard, enter, ranked
from .rules import NODES, RANKS, SIZES, TRAIN, Rules

__all__ = ["FILE", "NODES", "RANKS", "SIZES", "Entry", "Rules"]
__all__ += ["check", "elsewhere", "run", "scoreboard"]

NEEDED = (
    "The harness kills one of four ranks, so each is a process. Write your entry and predict its "
    "numbers, and run it on a machine with MPI."
)
#: An entry is ended after so many seconds of this machine.
DEADLINE = 90.0
#: How many characters of the ranks' output are shown, counted from its end.
MOST_PRINTED = 3000


def run(
    script: str | Path,
    name: str,
    scheme: str = "",
    *,
    seed: int | None = None,
    rules: Rules | None = None,
    deadline: float = DEADLINE,
    on_board: bool = True,
    also: Machine | None = None,
) -> Entry:
    """Run an entry on four new ranks, judge it, and put it on the scoreboard.

    The output of its ranks is shown, too.

    Args:
        script: a file with a function ``train(job)``, which every rank calls; it may
            return the model.
        name: the team's name; another run under the same name replaces this line.
        scheme: what the entry does, in a few words.
        seed: draws which rank dies, and when; without a seed, each run draws anew.
        rules: another machine, budget or target.
        deadline: seconds of this machine after which the entry is ended.
        on_board: whether its line goes to the scoreboard.
        also: a second machine, on which the recorded events are played, too.

    Returns:
        What the entry reached and used. If it raises, hangs or submits no weights, its line
        says so.

    Raises:
        FileNotFoundError: the file doesn't exist.
        NeedsProcesses, RanksError: this machine can't start ranks that survive a death.
        MachineError: the second machine has fewer than four devices.
    """
    refuse_on_a_rank()
    if also:
        places(also)
    script, rules = Path(script), rules or Rules()
    if not script.is_file():
        raise FileNotFoundError(f"There is no {script}. Run the cell that writes it")
    need_processes(NEEDED)
    chance = random.Random(seed)
    plan = {"victim": chance.randrange(RANKS)}
    plan["dies_at"] = chance.randint(rules.earliest, rules.latest)
    with tempfile.TemporaryDirectory(prefix="ddl-capstone-") as folder:
        place = Path(folder)
        (place / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
        _write_training_images(place / "train.pt")
        ended = _job(script, place, deadline)
        if ended.out.strip():
            print(ended.out.rstrip()[-MOST_PRINTED:], flush=True)
        entry = judged(place, ended, name=name, scheme=scheme, plan=plan, rules=rules)
    entry = entry.on(also) if also else entry
    if on_board:
        enter(entry)
    return entry


def elsewhere(machine: Machine, *entries: Entry) -> Scoreboard:
    """Return entries with a second score, without running them again.

    Entries that are on the scoreboard get the second score there, too.

    Args:
        machine: such as ``utils.forecast.machine("four-nodes")``.
        entries: from `run`.

    Raises:
        MachineError: the machine has fewer than four devices.
    """
    played = tuple(entry.on(machine) for entry in entries)
    on_board = {entry.name for entry in Scoreboard.read(Path.cwd()).entries}
    for entry in played:
        if entry.name in on_board:
            enter(entry)
    return Scoreboard(ranked(played))


def check(entry: Entry) -> None:
    """Show ✓ or what the entry missed, as the check of task 14.1, which is worth no points."""
    entry.as_verdict().show()


def scoreboard(*folders: str | Path) -> Scoreboard:
    """Return all entries next to this notebook or in these folders; `.picture()` draws them."""
    return Scoreboard.read(*(map(Path, folders) if folders else [Path.cwd()]))


def _write_training_images(path: Path) -> None:
    images = data.fashion_mnist(train=True, transform=None)
    torch.save((images.data[:TRAIN].clone(), images.targets[:TRAIN].clone()), path)


def _job(script: Path, place: Path, deadline: float) -> mpi_job.Ended:
    """Run the entry on its ranks until every process has ended."""
    plan = Plan(RANKS, launcher="mpiexec", fault_tolerant=True)
    words = python_words(
        "from utils.labs.lab14 import job; job.main()", str(script.resolve()), str(place)
    )
    return mpi_job.run_on(plan, words, deadline, writable=[place])
