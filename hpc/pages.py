"""The parts of the hub's pages that show jobs and partitions, as HTML."""

from __future__ import annotations

from datetime import datetime
from html import escape

from choices import LABELS
from job_queue import Job
from partitions import Partition, clock
from settings import Site

HINTS = {
    "ranks": "Ranks that share the notebook's job.",
    "time": "The job ends then, even in the middle of a cell.",
    "reservation": "Nodes that are kept for a course at some hours.",
}


def form(
    site: Site,
    choices: dict[str, list[str]],
    known: dict[str, Partition],
    chosen: dict[str, str],
) -> str:
    """Return the form: the profiles, a field for each other choice, and a table of free nodes.

    known: Slurm's partitions, of which the table shows those that a student can choose.
    chosen: the choices that are already selected.
    """
    profiles = "".join(
        _option(profile.name, f"{profile.title}, {profile.time}", chosen.get("profile"))
        for profile in site.profiles
    )
    names = {*choices.get("partition", ()), *(p.partition for p in site.profiles)}
    names = {each for name in names for each in (name or site.slurm.partition).split(",")}
    shown = [p for p in known.values() if p.name in names or (p.default and "" in names)]
    if not any(partition.gpus for partition in shown):
        choices = {name: values for name, values in choices.items() if name != "gpus"}
    fields = "".join(_field(name, values, chosen.get(name)) for name, values in choices.items())
    changed = " open" if chosen.keys() - {"profile"} else ""
    return (
        '<label class="form-label" for="profile">Size and time (h:min:s) of the job</label>'
        f'<select class="form-select" id="profile" name="profile">{profiles}</select>'
        + (
            f'<details class="mt-3"{changed}><summary>Change it</summary>'
            f'<div class="row g-3 mt-0">{fields}</div></details>'
            if fields
            else ""
        )
        + free(shown)
    )


def _field(name: str, values: list[str], chosen: str | None) -> str:
    options = _option("", "as above", chosen) + "".join(
        _option(value, value, chosen) for value in values
    )
    hint, described = "", ""
    if name in HINTS:
        hint = f'<div class="form-text" id="{name}-hint">{HINTS[name]}</div>'
        described = f' aria-describedby="{name}-hint"'
    return (
        f'<div class="col-sm-6"><label class="form-label" for="{name}">{LABELS[name]}</label>'
        f'<select class="form-select" id="{name}" name="{name}"{described}>{options}</select>'
        f"{hint}</div>"
    )


def _option(value: str, text: str, chosen: str | None) -> str:
    selected = " selected" if value == chosen else ""
    return f'<option value="{escape(value)}"{selected}>{escape(text)}</option>'


def free(partitions: list[Partition]) -> str:
    """Return a table of what is free in each partition, or "" if Slurm didn't answer."""
    if not partitions:
        return ""
    gpus = any(partition.gpus for partition in partitions)
    head = ["Partition", "Free nodes", "Free cores", "Longest job"] + ["GPUs per node"] * gpus
    rows = [
        [
            escape(each.name) + ("" if each.up else " (closed)"),
            f"{each.free_nodes} of {each.nodes}",
            str(each.free_cores),
            clock(each.minutes),
            *([str(each.gpus)] if gpus else []),
        ]
        for each in partitions
    ]
    titles = "".join(f'<th scope="col">{title}</th>' for title in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        '<div class="table-responsive mt-3" tabindex="0" role="region" aria-label="Free now">'
        '<table class="table table-sm mb-0"><caption class="caption-top">Free now</caption>'
        f"<thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def card(number: str, job: Job, log: str, now: datetime) -> str:
    """Return the card of a session: the job's number, state, nodes, time left and log."""
    rows = {"Job": escape(number), "State": escape(job.state.lower())}
    if job.nodes:
        rows["Nodes"] = escape(job.nodes)
    left = job.seconds_left(now)
    if job.state == "RUNNING" and left is not None:
        end = datetime.fromisoformat(job.end)
        day = end.strftime("%H:%M") if end.date() == now.date() else end.strftime("%d %b, %H:%M")
        rows["Time left"] = f"{clock(left / 60)}, until {day}"
    elif job.reason not in ("", "None"):
        rows["Waits for"] = escape(job.reason)
    lines = "".join(
        f'<dt class="col-5">{name}</dt><dd class="col-7 mb-1">{text}</dd>'
        for name, text in rows.items()
    )
    return (
        '<div class="container"><section class="card mx-auto my-4" style="max-width: 26rem" '
        'aria-labelledby="session">'
        '<h2 class="card-header h5 mb-0" id="session">Your session</h2><div class="card-body">'
        f'<dl class="row mb-2">{lines}</dl>'
        f'<a href="{escape(log)}">Log of the job</a></div></section></div>'
    )


def linked(text: str, address: str, name: str) -> str:
    """Return a text with a link after it."""
    return f'{escape(text)} <a href="{escape(address)}">{escape(name)}</a>'
