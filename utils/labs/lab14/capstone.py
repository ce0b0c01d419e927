"""The capstone: any training scheme on four ranks, two nodes, a slow network, and one death.

In a notebook, with an entry in a file that has a function ``train(job)``::

    entry = capstone.run("plain.py", "all-reduce every step")
    print(entry)                # the line of the scoreboard
    capstone.scoreboard()       # all entries so far

What a rank of an entry works with: :class:`utils.labs.lab14.job.Job`. How its seconds are found:
:mod:`utils.labs.lab14.replay`.
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path

import torch

from utils import data
from utils.jobs import mpi_job, python_words
from utils.jobs.start_plan import Plan, refuse_on_a_rank

from .entry_judge import Entry, judged
from .rankings import FILE, Scoreboard, enter
from .rules import NODES, RANKS, SIZES, TRAIN, Rules

__all__ = ["FILE", "NODES", "RANKS", "SIZES", "Entry", "Rules", "check", "run", "scoreboard"]

#: Seconds of this machine after which an entry is ended.
DEADLINE = 90.0
#: Letters of what the ranks print that are shown, the last ones.
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
) -> Entry:
    """Run an entry on four ranks of its own, judge it, and put it on the scoreboard.

    What its ranks print is shown, too.

    Args:
        script: file with a function ``train(job)``, which every rank calls; it may
            return the model.
        name: whose entry it is; another run under the same name takes its place.
        scheme: what it does, in a few words.
        seed: draws who dies, and when; without it, other ones each time.
        rules: another machine, budget or target.
        deadline: seconds of this machine.
        on_board: whether its line goes to the scoreboard.

    Returns:
        What it reached and used. An entry that raises, hangs or hands in no weights has a line
        that says so.

    Raises:
        FileNotFoundError: there is no such file.
        RanksError: this machine cannot start ranks of which others survive the death.
    """
    refuse_on_a_rank()
    script, rules = Path(script), rules or Rules()
    if not script.is_file():
        raise FileNotFoundError(f"there is no {script}: run the cell that writes it")
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
    if on_board:
        enter(entry)
    return entry


def check(entry: Entry) -> None:
    """Show ✓, or what the entry has missed, as the check of task 14.1; it is worth no points."""
    entry.as_verdict().show()


def scoreboard(*folders: str | Path) -> Scoreboard:
    """Return all entries beside this notebook or in these folders; `.picture()` draws them."""
    return Scoreboard.read(*(map(Path, folders) if folders else [Path.cwd()]))


def _write_training_images(path: Path) -> None:
    images = data.fashion_mnist(train=True, transform=None)
    torch.save((images.data[:TRAIN].clone(), images.targets[:TRAIN].clone()), path)


def _job(script: Path, place: Path, deadline: float) -> mpi_job.Ended:
    """Run the entry on its ranks, from the start to the end of every process."""
    plan = Plan(RANKS, launcher="mpiexec", fault_tolerant=True)
    words = python_words(
        "from utils.labs.lab14 import job; job.main()", str(script.resolve()), str(place)
    )
    return mpi_job.run_on(plan, words, deadline)
