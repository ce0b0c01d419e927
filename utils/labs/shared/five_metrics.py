"""The table of the five metrics, with a row for each scheme, which students fill lab by lab.

A lab notes in the student's words what its run has shown, and shows the table so far::

    five_metrics.fill("ring all-reduce", bandwidth=f"each rank sends {sent / n:.2f} n", faults="…")
    five_metrics.table()

The texts are in :data:`FILE` next to the notebook, so that the next lab continues with them.
"""

from __future__ import annotations

import contextlib
import hashlib
import html
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import filelock

#: Next to the notebook, in the folder that its kernel works in.
FILE = "five_metrics.json"
FORMAT = "ddl-labs five metrics 1"

#: The schemes to compare, and the lab that fills in each.
SCHEMES: dict[str, str] = {
    "central all-reduce": "06",
    "ring all-reduce": "06",
    "synchronous server": "07",
    "asynchronous server": "07",
    "Hogwild": "07",
    "elastic averaging": "08",
    "elastic all-reduce": "13",
}

#: The five metrics, and the questions behind them.
METRICS: dict[str, str] = {
    "bandwidth": "bytes that the busiest rank moves in a step",
    "faults": "what happens when a rank is slow, or dies",
    "convergence": "progress per step, and per second",
    "elasticity": "whether ranks can join and leave",
    "ease": "how easy it is to write, and to debug",
}

CAPTION = "The schemes of the course by the five metrics"

# Seconds to wait while another notebook writes the same file.
_PATIENCE = 2.0
# Texts that couldn't be written, by folder. This kernel shows them anyway.
_unwritten: dict[Path, dict[str, dict[str, str]]] = {}

Texts = dict[str, dict[str, str]]


def fill(scheme: str, **texts: object) -> None:
    """Note what a run has shown about a scheme, and leave its other texts as they are.

    Args:
        scheme: one of :data:`SCHEMES`.
        texts: short texts by metric (:data:`METRICS`). ``...`` means not yet, ``""`` deletes.

    Raises:
        ValueError: the scheme or a metric is unknown, or a value isn't a text.
    """
    _require(scheme, texts)
    noted = {name: " ".join(str(text).split()) for name, text in texts.items() if text is not ...}
    row, problem = _noted(Path.cwd(), scheme, noted)
    if noted:
        print(f"{scheme}: noted {', '.join(noted)}.")
    missing = [name for name, text in texts.items() if text is ...]
    if missing:
        kept = [name for name in missing if row.get(name)]
        print(
            f"{scheme}: no text yet for {', '.join(missing)}. Replace ... and run this cell again."
            + f" Texts from before: {', '.join(kept)}." * bool(kept)
        )
    if problem:
        print(problem)


def _noted(folder: Path, scheme: str, texts: dict[str, str]) -> tuple[dict[str, str], str]:
    """Store texts of a scheme; return all its texts, and what is wrong with the folder's file."""
    with _alone(folder):
        known, problem = _known(folder)
        row = known.setdefault(scheme, {})
        row.update(texts)
        if not texts:
            return row, problem
        if problem:
            problem = f"{problem} {_put_aside(folder / FILE)}"
        failed = _write(folder / FILE, known)
        if failed:
            _unwritten[folder] = known
        else:
            _unwritten.pop(folder, None)
        return row, f"{problem} {failed}".strip()


def table() -> Table:
    """Return the table so far, for the notebook to show."""
    return Table(*_known(Path.cwd()))


@dataclass(frozen=True)
class Table:
    """The table at the time of the call.

    Attributes:
        texts: by scheme and metric.
        problem: why texts may be missing; usually empty.
    """

    texts: Mapping[str, Mapping[str, str]]
    problem: str = ""

    def rows(self) -> list[list[str]]:
        """Return a row for each scheme: its name, then its text for each metric.

        If a scheme has no texts, the first one is the number of its lab.
        """
        rows = []
        for scheme, lab in SCHEMES.items():
            texts = [self.texts.get(scheme, {}).get(name, "") for name in METRICS]
            if not any(texts):
                texts[0] = f"lab {lab}"
            rows.append([scheme, *texts])
        return rows

    def __repr__(self) -> str:
        from tabulate import tabulate  # imported late, because it costs ranks 0.1 s

        widths = [12] + [20] * len(METRICS)
        look = {"tablefmt": "simple_grid", "maxcolwidths": widths, "disable_numparse": True}
        shown = tabulate(self.rows(), headers=["scheme", *METRICS], **look)
        return f"{shown}\n{self.problem}" if self.problem else shown

    def _repr_html_(self) -> str:
        """Return a table with named rows and columns, which a narrow page scrolls in a box."""
        heads = [
            f"<b>{html.escape(name)}</b><br>{html.escape(asks)}" for name, asks in METRICS.items()
        ]
        lines = [_row("<b>scheme</b>", heads, "col")]
        for scheme, *texts in self.rows():
            lines.append(_row(f"<b>{html.escape(scheme)}</b>", map(html.escape, texts)))
        head, *body = lines
        shown = (
            f'<div role="region" aria-label="{CAPTION}" tabindex="0" style="overflow-x: auto">'
            f'<table style="min-width: 52em; border-collapse: collapse">'
            f'<caption style="text-align: left">{CAPTION}</caption>'
            f"<thead>{head}</thead><tbody>{''.join(body)}</tbody></table></div>"
        )
        return shown + (f"<p>{html.escape(self.problem)}</p>" if self.problem else "")


def _row(name: str, cells: Iterable[str], scope: str = "") -> str:
    """Return a row of the table in HTML.

    Args:
        name: the row's name in HTML.
        cells: the other columns in HTML.
        scope: "col" if the cells are names of columns.
    """
    # Notebooks align cells to the right, which suits numbers, but not texts.
    look = (
        'style="text-align: left; vertical-align: top; font-weight: normal; padding: 0.4em 0.7em; '
        'border-top: 1px solid rgba(128, 128, 128, 0.6)"'
    )
    start, end = (f'<th scope="{scope}" {look}>', "</th>") if scope else (f"<td {look}>", "</td>")
    shown = "".join(f"{start}{cell}{end}" for cell in cells)
    return f'<tr><th scope="{scope or "row"}" {look}>{name}</th>{shown}</tr>'


def _require(scheme: str, texts: Mapping[str, object]) -> None:
    if scheme not in SCHEMES:
        known = ", ".join(map(repr, SCHEMES))
        raise ValueError(f"No scheme is called {scheme!r}. Choose one of {known}")
    unknown = [name for name in texts if name not in METRICS]
    if unknown:
        raise ValueError(f"No metric is called {unknown[0]!r}. Choose one of {', '.join(METRICS)}")
    for name, text in texts.items():
        if text is not ... and not isinstance(text, str):
            raise ValueError(
                f"{name} must be a text, not {type(text).__name__}. Put a number into a text: "
                f'{name}=f"{{number:.2f}} …"'
            )


# -- the file -------------------------------------------------------------------------------------


def _known(folder: Path) -> tuple[Texts, str]:
    """Return the texts of a folder, and what is wrong with its file."""
    known, problem = _read(folder / FILE)
    for scheme, texts in _unwritten.get(folder, {}).items():
        known.setdefault(scheme, {}).update(texts)
    return known, problem


def _read(path: Path) -> tuple[Texts, str]:
    """Return the texts of a file, and what is wrong with it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, ""
    except OSError as error:
        return {}, f"{FILE} can't be read ({error.strerror})."
    except ValueError:
        return {}, f"{FILE} can't be read: it is damaged."
    if isinstance(content, dict) and content.get("format") == FORMAT:
        schemes = content.get("schemes")
        if isinstance(schemes, dict) and all(map(_is_row, schemes.values())):
            return schemes, ""
    return {}, f"{FILE} is another file, not a table of the five metrics."


def _is_row(row: object) -> bool:
    return isinstance(row, dict) and all(isinstance(text, str) for text in row.values())


def _put_aside(path: Path) -> str:
    """Rename a file that isn't a table, and return a sentence about the new name."""
    number = 1
    while (aside := path.with_name(f"{path.stem}.kept-{number}{path.suffix}")).exists():
        number += 1
    try:
        path.rename(aside)
    except OSError as error:
        return f"It could not be renamed either ({error.strerror})."
    return f"It is kept as {aside.name}, and a new table was started."


def _write(path: Path, texts: Texts) -> str:
    """Write so that a reader sees the old file or the new one; return what went wrong, or ""."""
    content = {"format": FORMAT, "schemes": texts}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    if path.exists() and _read(path)[1]:
        return f"The table is not kept, because {FILE} is another file and can't be renamed."
    try:
        temporary.write_text(
            json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8"
        )
        temporary.replace(path)
    except OSError as error:
        return (
            f"The table can't be kept ({FILE}: {error.strerror}). It lasts as long as this kernel."
        )
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    return ""


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let notebooks that write at the same time wait for each other, if the system allows it."""
    name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    lock = filelock.FileLock(Path(tempfile.gettempdir(), f"five-metrics-{name}.lock"))
    try:
        with contextlib.suppress(OSError, NotImplementedError):
            lock.acquire(timeout=_PATIENCE)
        yield
    finally:
        lock.release()
