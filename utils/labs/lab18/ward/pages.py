"""Show a patient in a notebook: HTML for texts and tables, figures for curves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from utils.figures import CYCLE, rank_color
from utils.figures.charts import chart as axes_of
from utils.figures.charts import finish

from .case import Case

#: The first hint, by the group of a patient.
FIRST = {
    "hangs": "Find out for each rank at which line it is. Then ask why they are not all there.",
    "wrong": "Compare the ranks with each other, then the run with one process. Since which step "
    "do they differ?",
    "slow": "Count before you guess: which calls, bytes or computations does no result need?",
    "memory": "Look at which ranks the memory grows, and whether it grows in each step.",
    "dies": "Find the first rank that went wrong. The others may only have followed.",
    "drifts": "Ask of each number whether it is the same on all ranks, and what it is a mean of.",
}
#: A text with more rows is folded away.
MOST_ROWS = 24
_PRE = (
    "margin:0;padding:6px 10px;font-family:monospace;font-size:12.5px;line-height:1.45;"
    "overflow-x:auto"
)


def ticket(bed: int, case: Case) -> str:
    """Return what a colleague has written about a patient."""
    return (
        f"<h4>Patient {bed} · {case.name}.py · 4 ranks</h4>"
        f"<p><b>Complaint.</b> {escape(case.complaint)}</p>"
    )


def hints(case: Case) -> str:
    """Return three hints, each of them folded away: where to look, what to ask, which function.

    The third one doesn't name the line, because a finding is worth a point, and its tries count.
    """
    third = f"The line that has to change is in the function {case.function}."
    levels = (FIRST[case.group], case.hint, third)
    return "".join(
        folded(f"Hint {level}", f"<p>{escape(hint)}</p>") for level, hint in enumerate(levels, 1)
    )


def numbered(text: str) -> str:
    """Return a program with the numbers of its lines."""
    return "\n".join(f"{k:3}  {line}" for k, line in enumerate(text.splitlines(), start=1))


def listing(text: str) -> str:
    """Return a program with the numbers of its lines, folded away, as HTML."""
    lines = f'<pre style="{_PRE}">{escape(numbered(text))}</pre>'
    return folded(f"The program ({len(text.splitlines())} lines)", lines)


def folded(title: str, html: str, is_open: bool = False) -> str:
    """Return a part that opens when its title is clicked."""
    state = " open" if is_open else ""
    return f"<details{state}><summary><b>{escape(title)}</b></summary>{html}</details>"


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table; numbers are grouped by thousands."""
    top = "".join(f'<th style="text-align:left">{escape(name)}</th>' for name in head)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: Any) -> str:
    side = "left" if isinstance(value, str) else "right"
    words = f"{value:,}" if isinstance(value, int) else escape(str(value))
    return f'<td style="text-align:{side}">{words}</td>'


def _texts(lines: Sequence[str], title: str) -> str:
    body = f'<pre style="{_PRE}">{escape(chr(10).join(lines))}</pre>'
    return folded(title, body, is_open=len(lines) <= MOST_ROWS)


def _log(lines: list[list[Any]], title: str) -> str:
    rows = [f"{at:8.3f} s  rank {rank}  {text}" for at, rank, text in lines]
    last = {rank: text for _, rank, text in lines}
    silent = [rank for rank in range(4) if rank not in last]
    rows += [f"(rank {rank} printed nothing)" for rank in silent]
    return _texts(rows, title)


def _stacks(stacks: dict[str, list[list[Any]]], title: str) -> str:
    rows = []
    for rank, frames in stacks.items():
        rows.append(f"rank {rank}:" if frames else f"rank {rank}: train() has returned")
        rows += [f'  File "{file}", line {line}, in {function}' for file, line, function in frames]
    return folded(title, f'<pre style="{_PRE}">{escape(chr(10).join(rows))}</pre>', is_open=True)


def _flight(calls: list[list[Any]], title: str) -> str:
    rows = [
        [rank, number, f"{group}", operation, ", ".join(map(str, shapes))]
        for rank, number, group, operation, shapes in calls
    ]
    head = ["rank", "number in its group", "ranks of the group", "operation", "tensor"]
    return folded(title, table(head, rows), is_open=True)


def _said(text: str, title: str) -> str:
    return folded(title, f'<pre style="{_PRE}">{escape(text)}</pre>', is_open=True)


def _rows(found: dict[str, Any], title: str) -> str:
    return folded(
        title, table(found["head"], found["rows"]), is_open=len(found["rows"]) <= MOST_ROWS
    )


def _timeline(reports: list[dict[str, Any]], title: str) -> Any:
    from utils.timeline import Timeline

    return Timeline(reports, title=title)


def _curves(curves: dict[str, list[float]], title: str) -> Figure:
    figure, axes = axes_of(6.4, 2.7)
    for (name, losses), color, style in zip(curves.items(), CYCLE, ("-", "--"), strict=False):
        axes.plot(losses, style, color=color, label=name, marker="o", markersize=3)
    _label(axes, title, "step or epoch", "loss")
    return finish(figure)


def _memory(found: dict[str, Any], title: str) -> Figure:
    figure, axes = axes_of(6.4, 3.9)
    for rank, held in found["curves"].items():
        times = [k / max(1, len(held) - 1) for k in range(len(held))]
        color = rank_color(int(rank))
        axes.plot(times, [size / 1e6 for size in held], color=color, label=f"rank {rank}")
    sizes = [f"{count} × {size:,} B, made at line {line}" for count, size, line in found["sizes"]]
    below = "\n".join([f"at the peak, rank {found['rank']} has", *sizes])
    _label(axes, title, f"share of the run\n\n{below}", "MB")
    return finish(figure)


def _label(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=9)


#: By the name of an instrument, its title and the function that shows what it has recorded.
INSTRUMENTS: dict[str, tuple[str, Callable[[Any, str], Any]]] = {
    "log": ("The log of all ranks", _log),
    "stacks": ("The stack of each rank when the job was stopped, innermost call first", _stacks),
    "flight": ("The last calls in the flight recorder of each rank", _flight),
    "report": ("What the backend said", _said),
    "traceback": ("Tracebacks", _said),
    "curves": ("The loss of this run, and of one process", _curves),
    "timeline": ("What the ranks did", _timeline),
    "work": ("The numbers that each function has computed, by rank", _rows),
    "traffic": ("The calls of each line", _rows),
    "returned": ("What each function has returned, in its first call and in its last one", _rows),
    "profile": ("The profile of rank 0", _rows),
    "probe": ("The gradients that the optimizer sees in its second step (norms)", _rows),
    "memory": ("Bytes of tensors", _memory),
}
