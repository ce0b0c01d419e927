"""A line below a long-running cell that says what each rank is doing. It leaves no output."""

from __future__ import annotations

import html
import json
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.display import clear_output, display

from torch_mpi.protocol.diagnosis import names
from utils.cluster import rank_notes

if TYPE_CHECKING:
    from IPython.display import DisplayHandle

# Seconds before the line appears, and between two updates.
AFTER = 2.0
EVERY = 1.0
# The line names at most this many different lines of a cell.
MOST_LINES = 3
# Longest note of a rank, and longest name of a call, in characters.
MOST_OF_A_NOTE, MOST_OF_A_NAME = 1000, 40

_MUTED = '<span style="color: var(--jp-ui-font-color2, GrayText)">{}</span>'


class LiveLine:
    """The line below one cell, shown only if somebody is present.

    Args:
        folder: the folder in which the ranks write their notes.
        ranks: the present number of each rank, by its number at the start.
    """

    def __init__(self, folder: Path, ranks: Mapping[int, int]):
        self._ranks = ranks
        self._began = time.monotonic()
        from utils.figures import audience  # with matplotlib, which takes 0.3 s

        self._next = self._began + AFTER if audience.is_present() else float("inf")
        self._files = {rank: rank_notes.path_of(folder, rank) for rank in ranks}
        # A note of an earlier cell must not count. Clocks of other hosts may differ, so a note is
        # new if its file's time has changed, whatever the time is.
        self._old = {rank: _changed(file) for rank, file in self._files.items()}
        self._shown: DisplayHandle | None = None

    def look(self, busy: Collection[int]) -> None:
        """Show or update the line if it is time to; `busy` are the ranks that run the cell."""
        now = time.monotonic()
        if now < self._next or not busy:
            return
        self._next = now + EVERY
        text = self.text(now - self._began, busy)
        data = {"text/plain": text, "text/html": _MUTED.format(html.escape(text))}
        if self._shown is None:
            self._shown = display(data, raw=True, display_id=True)
        else:
            self._shown.update(data, raw=True)

    def text(self, seconds: float, busy: Collection[int]) -> str:
        """Return the line after so many seconds."""
        notes = {rank: self._note(rank) for rank in sorted(busy)}
        waits = {rank: note["waits"] for rank, note in notes.items() if note.get("waits")}
        lines = {rank: note.get("line") for rank, note in notes.items() if rank not in waits}
        parts = [f"{seconds:.0f} s", *self._computing(lines)]
        for call, ranks in _groups(waits):
            parts.append(f"{self._who(ranks, 'is waiting', 'are waiting')} in {call}")
        if done := [rank for rank in self._ranks if rank not in busy]:
            parts.append(self._who(done, "is done", "are done"))
        return " · ".join(parts)

    def _computing(self, lines: Mapping[int, int | None]) -> Iterator[str]:
        """Yield which ranks are computing in which line; in many lines, only which ranks."""
        if len(set(lines.values())) > MOST_LINES:
            lines = dict.fromkeys(lines)
        for line, ranks in _groups(lines):
            where = f", line {line}" if line else ""
            yield f"{self._who(ranks, 'is computing', 'are computing')}{where}"

    def _who(self, ranks: list[int], one: str, many: str) -> str:
        own = [self._ranks[rank] for rank in ranks]
        return f"{names(own)} {one if len(own) == 1 else many}"

    def _note(self, rank: int) -> dict[str, Any]:
        """Return what a rank noted in this cell; {} if there is no complete note yet."""
        file = self._files[rank]
        if _changed(file) == self._old[rank]:
            return {}
        try:
            with file.open(encoding="utf-8", errors="replace") as opened:
                note = json.loads(opened.read(MOST_OF_A_NOTE))
            line, waits = note["line"], note["waits"]
        except (OSError, ValueError, TypeError, KeyError):
            return {}
        return {
            "line": line if isinstance(line, int) else None,
            "waits": waits[:MOST_OF_A_NAME] if isinstance(waits, str) else None,
        }

    def remove(self, more: bool) -> bool:
        """Clear the cell's output if the line is in it, and return whether it was.

        Args:
            more: whether the caller now shows other output. The line then stays until this output
                comes, so that nothing flickers.
        """
        if self._shown is None:
            return False
        self._shown = None
        clear_output(wait=more)
        return True


def _groups(values: Mapping[int, Any]) -> list[tuple[Any, list[int]]]:
    """Return each value with the ranks that have it, in the order of their first ranks."""
    found: dict[Any, list[int]] = {}
    for rank, value in values.items():
        found.setdefault(value, []).append(rank)
    return list(found.items())


def _changed(file: Path) -> int:
    """Return when a file was last written, in nanoseconds; 0 if it doesn't exist."""
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0
