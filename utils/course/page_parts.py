"""Parts of pages that a program writes, between two comments that name the part.

A part called "map" is between the lines ``<!-- map: `make release` writes this -->`` and
``<!-- end of the map -->``. All other lines of the page are their authors'.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .files import write_text
from .notebook import ROOT, NotebookError


@dataclass(frozen=True)
class Part:
    """A part of a page.

    Attributes:
        page: The page's path in the repository.
        name: The name in the two comments.
        text: What is between them.
    """

    page: str
    name: str
    text: str

    def put_into(self, page: str) -> str:
        """Return a page's text with this part written anew.

        Raises:
            NotebookError: The two comments are not there, once each and in order.
        """
        begin, end = f"<!-- {self.name}: `make release` writes this -->", _end(self.name)
        if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
            raise NotebookError(f"{self.page} needs a line {begin} and after it one {end}")
        before, _, rest = page.partition(begin)
        return f"{before}{begin}\n\n{self.text}\n\n{end}{rest.partition(end)[2]}"


def _end(name: str) -> str:
    return f"<!-- end of the {name} -->"


def write(parts: Iterable[Part], root: Path = ROOT) -> list[str]:
    """Write parts into their pages; return the names of those that have changed."""
    changed = []
    for part in parts:
        path = root / part.page
        before = path.read_text("utf-8")
        if (after := part.put_into(before)) != before:
            write_text(path, after)
            changed.append(f"{part.name} in {part.page}")
    return changed


def drift(parts: Iterable[Part], root: Path = ROOT) -> list[str]:
    """Return a line for each part that differs from what its page says."""
    return [
        f"{part.page}: the {part.name} differs from what the labs say: make release"
        for part in parts
        if part.put_into(text := (root / part.page).read_text("utf-8")) != text
    ]
