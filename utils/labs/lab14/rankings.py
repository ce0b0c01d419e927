"""The scoreboard: a file beside the notebook that gathers entries, a table, and a picture."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .entry_judge import Entry, heads
from .rules import Rules

#: Next to the notebook, in the folder that its kernel works in.
FILE = "scoreboard.json"
FORMAT = "ddl-labs scoreboard 1"


def enter(entry: Entry, folder: Path | None = None) -> None:
    """Put an entry on the scoreboard of a folder, and remove an entry with the same name."""
    folder = folder or Path.cwd()
    board = Scoreboard.read(folder)
    kept = [one for one in board.entries if one.name != entry.name]
    stored = {"format": FORMAT, "entries": [_stored(one) for one in (*kept, entry)]}
    path = folder / FILE
    if board.problem:
        path.replace(path.with_suffix(".broken"))
        print(f"{board.problem} It is kept as {path.with_suffix('.broken').name}.")
    temporary = path.with_suffix(".tmp")
    try:
        temporary.write_text(json.dumps(stored, indent=1, ensure_ascii=False), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        print(f"The scoreboard {FILE} could not be written: {error.strerror}.")


def _stored(entry: Entry) -> dict:
    """Return an entry for the file, with the fields of a second score only if it has one."""
    left_out = ("played_on",) if entry.elsewhere else ("played_on", "elsewhere")
    line = asdict(replace(entry, played_on=None))
    return {name: value for name, value in line.items() if not name.startswith(left_out)}


#: An entry counts as equally fast if it is slower than the fastest one by at most this share.
TIE = 0.05


def ranked(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """Return the entries, the best first.

    Entries within the budget come first, by seconds. Among entries that are at most 5 % slower
    than the fastest of them, fewer bytes count, and then fewer lost images. Entries that missed
    something follow in the same order, and last come the entries that couldn't be judged.
    """
    order: list[Entry] = []
    waiting = sorted(entries, key=lambda entry: (*_class(entry), entry.seconds or 0.0))
    while waiting:
        first = waiting[0]
        most = (1 + TIE) * (first.seconds or 0.0)
        of_class = [entry for entry in waiting if _class(entry) == _class(first)]
        tied = [entry for entry in of_class if (entry.seconds or 0.0) <= most]
        order += sorted(
            tied, key=lambda entry: (entry.slow_bytes, entry.lost or 0, entry.seconds or 0.0)
        )
        waiting = waiting[len(tied) :]
    return tuple(order)


def _class(entry: Entry) -> tuple[bool, bool, bool]:
    """Return what counts before the seconds, for example whether there are any seconds."""
    return not entry.within, bool(entry.problem), entry.seconds is None


@dataclass(frozen=True)
class Scoreboard:
    """Entries with the best first; see :func:`ranked`.

    Attributes:
        entries: the entries of the files.
        problem: why some entries may be missing; usually empty.
    """

    entries: tuple[Entry, ...]
    problem: str = ""

    @classmethod
    def read(cls, *folders: Path) -> Scoreboard:
        """Return the scoreboards of several folders as one, for example of all teams."""
        entries: list[Entry] = []
        problem = ""
        for folder in folders:
            try:
                stored = json.loads((folder / FILE).read_text(encoding="utf-8"))
                if stored["format"] != FORMAT:
                    raise ValueError(stored["format"])
                for line in stored["entries"]:
                    line.pop("marks", None)  # of an earlier version
                    lists = {"exceeded": tuple(line.get("exceeded", ()))}
                    for name in ("curve", "elsewhere_curve"):
                        lists[name] = tuple((at, found) for at, found in line.get(name, ()))
                    entries.append(Entry(**{**line, **lists}))
            except FileNotFoundError:
                continue
            except (OSError, ValueError, KeyError, TypeError):
                problem = f"{FILE} could not be read."
        return cls(ranked(entries), problem)

    def __repr__(self) -> str:
        widths = {"name": 16, "scheme": 22, "s elsewhere": 11, "verdict": 36}
        columns = [widths.get(name) for name in heads(self._second)]
        shown = self._table(tablefmt="simple_grid", maxcolwidths=columns)
        return "\n".join([shown, *([self.problem] if self.problem else [])])

    def _repr_html_(self) -> str:
        look = 'style="text-align: left; vertical-align: top"'
        shown = self._table(tablefmt="html")
        shown = shown.replace("<td>", f"<td {look}>").replace("<th>", f'<th scope="col" {look}>')
        return shown + (f"<p>{html.escape(self.problem)}</p>" if self.problem else "")

    @property
    def _second(self) -> bool:
        return any(entry.elsewhere for entry in self.entries)

    def _table(self, **layout: Any) -> str:
        from tabulate import tabulate

        rows = [entry.cells(self._second) for entry in self.entries]
        return tabulate(rows, headers=heads(self._second), disable_numparse=True, **layout)

    def picture(self, rules: Rules | None = None):
        """Draw accuracy over the bytes between the nodes, with the budget as a line."""
        from utils.labs.lab14 import pictures

        return pictures.entries(self.entries, rules or Rules())

    def both_machines(self, rules: Rules | None = None):
        """Draw the seconds on the rules' machine beside those on the second machine."""
        from utils.labs.lab14 import pictures

        return pictures.both_machines(self.entries, rules or Rules())
