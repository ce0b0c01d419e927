"""What has happened, and what must not."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from .cells import Cell
from .census import Census


@dataclass
class Finding:
    """Something that must not be.

    Attributes:
        number, cell: when; `None` where it is about no single cell.
        what: in words. shown: what the notebook showed. stacks: of ranks that hang.
    """

    number: int
    cell: Cell | None
    what: str
    shown: str = ""
    stacks: str = ""

    def __str__(self) -> str:
        name = f": {self.cell.kind}, {self.cell.name}" if self.cell else ""
        parts = [f"### cell {self.number}{name}\n{self.what}"]
        if self.cell:
            parts.append(f"--- its text ({self.cell.act or 'nothing happened to it'})")
            parts.append(self.cell.text.rstrip())
        for title, text in (("it showed", self.shown[-6000:]), ("stacks", self.stacks)):
            if text:
                parts += [f"--- {title}", text.rstrip()]
        return "\n".join(parts)


@dataclass
class Record:
    """What happened so far.

    Attributes:
        cells, errors: how many by name, by the beginning of the message.
        restarts, notebooks: how often there were fresh ones.
        censuses: in their order; each tells of which ranks it is.
        slowest: of a cell that failed until the next one is over: seconds, number, name.
        findings: what must not be.
    """

    cells: Counter = field(default_factory=Counter)
    errors: Counter = field(default_factory=Counter)
    restarts: int = 0
    notebooks: int = 0
    censuses: list[Census] = field(default_factory=list)
    slowest: tuple[float, int, str] = (0.0, 0, "")
    findings: list[Finding] = field(default_factory=list)
