"""The tables of `diagnosis_score`, and the part of docs/diagnosis.md that it writes."""

from __future__ import annotations

import os
import re
import statistics
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from tabulate import tabulate

from benchmarks.labelled.judge import NAME, Trial
from benchmarks.labelled.programs import KINDS, PRELUDE, Pair

#: The trials of each tool, by the tool's title; `OURS` is the title of our backend.
Trials = dict[str, list[Trial]]

OURS = "our diagnosis"
HEADS = ("tool", "reported", "rank, line, mistake named", "precision", "s")
#: The command writes what is between these lines of a page.
BEGIN, END = "<!-- measured -->\n", "<!-- /measured -->\n"
#: The programs whose reports the page shows side by side.
SHOWN = (
    "a last batch that is smaller",
    "the checkpoint of rank 0 has a barrier",
    "a barrier between send and receive",
)
#: A frame of `torchfrtrace` that is neither the program's nor the call's; a message of mpiexec.
FRAME = re.compile(
    rf"^ ?[\w<>]+ at (?!.*(?:{NAME}|distributed_c10d\.py):\d+$).*:\d+\n?", re.MULTILINE
)
MPIEXEC = re.compile(r"^-{60,}\n.*?^-{60,}\n?", re.MULTILINE | re.DOTALL)


def tables(trials: Trials) -> str:
    """Return what the command prints, as Markdown."""
    parts = [
        tabulate([summary(title, each) for title, each in trials.items()], HEADS, "github"),
        tabulate(classes(trials), ("class", "programs", *trials), "github"),
    ]
    for title, each in trials.items():
        failed = [trial for trial in each if not trial.is_good]
        lines = [f"- {_side(t)}: {t.pair.name}: {_how(t)}{_advice(title, t)}" for t in failed]
        parts += [f"Not found, or not well, by {title}:\n\n" + "\n".join(lines)] if lines else []
    return "\n\n".join(parts)


def _advice(title: str, trial: Trial) -> str:
    return f". {trial.pair.instead}" if title == OURS and trial.pair.instead else ""


# --- tables ---------------------------------------------------------------------------------------


def summary(title: str, trials: Iterable[Trial]) -> list[object]:
    """Return a row: recall in two senses, precision, and the median seconds until a report."""
    trials = list(trials)
    wrong = [trial for trial in trials if not trial.right]
    reports = [trial for trial in trials if trial.reported]
    told = [trial for trial in reports if not trial.right]
    seconds = f"{statistics.median(trial.seconds for trial in told):.1f}" if told else "–"
    return [
        title,
        _share(len(told), len(wrong)),
        _share(sum(trial.is_good for trial in wrong), len(wrong)),
        _share(len(told), len(reports)),
        seconds,
    ]


def classes(trials: Trials) -> list[list[object]]:
    """Return a row per class, with each tool's reports and good reports of the wrong programs."""
    wrong = {title: [t for t in each if not t.right] for title, each in trials.items()}
    kinds = {trial.pair.kind for each in wrong.values() for trial in each}
    rows = [_row(kind, {kind}, wrong) for kind in KINDS if kind in kinds]
    return [*rows, _row("all", set(KINDS), wrong)]


def _row(name: str, kinds: set[str], wrong: Mapping[str, list[Trial]]) -> list[object]:
    members = [[t for t in each if t.pair.kind in kinds] for each in wrong.values()]
    cells = [f"{sum(t.reported for t in m)} / {sum(t.is_good for t in m)}" for m in members]
    return [name, len(members[0]), *cells]


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({part / whole:.0%})" if whole else "–"


def _side(trial: Trial) -> str:
    return "right" if trial.right else "wrong"


def _how(trial: Trial) -> str:
    if trial.right:
        return "reported, although it is right"
    if not trial.reported:
        return "not reported"
    parts = (("rank and line", trial.named_rank_and_line), ("what is wrong", trial.named_class))
    return f"the report lacks {' and '.join(part for part, named in parts if not named)}"


# --- the page -------------------------------------------------------------------------------------


def around(page: Path) -> tuple[str, str]:
    """Return what a page has before and after its measured part.

    Raises:
        ValueError: the page has no such part.
    """
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} needs the lines {BEGIN.strip()} and {END.strip()}. Add them")
    return before, after


def write(page: Path, trials: Trials, patience: float, minutes: float) -> None:
    """Replace the measured part of a page; `trials` has our backend first, the recorder last.

    Raises:
        ValueError: the page has no such part.
    """
    before, after = around(page)
    measured = "\n\n".join(_measured(trials, patience, minutes))
    page.write_text(f"{before}{BEGIN}\n{measured}\n\n{END}{after}", encoding="utf-8")


def _measured(trials: Trials, patience: float, minutes: float) -> list[str]:
    ours, *_ = trials.values()
    missed = [trial for trial in ours if not trial.right and not trial.reported]
    rows = [[t.pair.kind, t.pair.name, t.pair.instead or "not reported"] for t in missed]
    return [
        _text(
            f"We measured with PyTorch {torch.__version__.partition('+')[0]} on {os.cpu_count()} "
            f"cores. The command took {minutes:.1f} minutes. With each tool, a call may wait for "
            f"{patience:.0f} s. If the median is longer, at least half of the reports came only "
            "after this timeout."
        ),
        tabulate([summary(title, each) for title, each in trials.items()], HEADS, "github"),
        "## Class by class",
        _text(
            "Each cell has two numbers: how many wrong programs the tool reports, and how many of "
            "these reports name a rank, a marked line, and the mistake."
        ),
        tabulate(classes(trials), ("class", "programs", *trials), "github"),
        *_false_alarms(trials),
        "## What our diagnosis does not find",
        _text(
            f"Our diagnosis is silent about {len(missed)} wrong programs, because all their calls "
            "match. The last column says how you can find the mistake."
        ),
        tabulate(rows, ("class", "program", "how to find the mistake"), "github"),
        _only_others(trials),
        "## Three reports side by side",
        *(part for name in SHOWN for part in _reports(name, trials)),
    ]


def _text(words: str) -> str:
    return textwrap.fill(words, 100)


def _false_alarms(trials: Trials) -> list[str]:
    lines = [
        f"- {title}: *{trial.pair.name}*"
        for title, each in trials.items()
        for trial in each
        if trial.right and trial.reported
    ]
    if not lines:
        return ["No tool reports a right program."]
    return ["A tool reports these pairs' right programs, too:", "\n".join(lines)]


def _only_others(trials: Trials) -> str:
    """Say which wrong programs only another tool reports."""
    told = [{t.pair.name for t in each if t.reported and not t.right} for each in trials.values()]
    names = sorted(set().union(*told[1:]) - told[0])
    if names:
        return _text(f"Only another tool reports these programs: {', '.join(names)}.")
    return _text("The two other tools don't report these programs either.")


def _reports(name: str, trials: Trials) -> list[str]:
    """Return a wrong program, our report, and what ``torchfrtrace`` prints."""
    ours, *_, recorder = trials.values()
    mine, theirs = (
        next(trial for trial in each if trial.pair.name == name and not trial.right)
        for each in (ours, recorder)
    )
    return [
        f"### {name[0].upper()}{name[1:]}",
        _block(numbered(mine.pair), "text"),
        f"Our report, after {mine.seconds:.1f} s:",
        _block(shortened(mine.text), "text"),
        f"The output of `torchfrtrace`, after {theirs.seconds:.1f} s:",
        _block(shortened(theirs.text), "text"),
    ]


def numbered(pair: Pair) -> str:
    """Return a wrong program with the numbers of its lines, without the prelude."""
    lines = enumerate(pair.text(right=False).splitlines(), 1)
    return "\n".join(f"{k:3} {line}" for k, line in lines if k > PRELUDE.count("\n"))


def shortened(report: str) -> str:
    """Return a report without temporary folders, frames of the harness, and mpiexec's words."""
    text = MPIEXEC.sub("", FRAME.sub("", report))
    return re.sub(r"/\S+/(?=torch/|program\.py)", "", text).strip("\n")


def _block(text: str, language: str) -> str:
    return f"```{language}\n{text}\n```"
