"""What a rank prints and shows, below the cell that runs it.

Each piece has its place there: a stream has one place, and each thing that is displayed has two, as
a label stands before it. After ``clear_output()`` the next pieces take the first places again.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from IPython.display import publish_display_data

#: What a carriage return overwrites, as ipyparallel has it.
_OVERWRITTEN = re.compile(r".*\r(?=[^\n])")
#: The text at a place which has been cleared.
NOTHING = {"text/plain": ""}


class RankOutput:
    """What one rank shows below a cell.

    Args:
        rank: the rank.
        key: a name of this run of the cell on this rank.
        show_result: shows the value of the cell's last line.
    """

    def __init__(self, rank: int, key: str, show_result: Callable[[dict[str, Any]], None]):
        self._rank, self._key = rank, key
        self._show_result = show_result
        self._texts: dict[str, str] = {}
        self._places: dict[str, int] = {}  # of streams, and of displays that may change
        self._used = self._made = 0
        self._clears = False

    def show(self, message: dict[str, Any]) -> None:
        """Show a message of Jupyter; an error is not shown, because it comes once for all ranks."""
        kind, content = message["header"]["msg_type"], message["content"]
        if kind == "clear_output":
            self._clears = True
            if not content.get("wait"):
                self._clear()
        elif kind == "stream":
            self._clear()
            self._print(content["name"], content["text"])
        elif kind in ("display_data", "update_display_data"):
            self._clear()
            self._display(content, kind == "update_display_data")
        elif kind == "execute_result":
            self._clear()
            self._show_result(message)

    def _print(self, name: str, text: str) -> None:
        self._texts[name] = _OVERWRITTEN.sub("", self._texts.get(name, "") + text)
        if name not in self._places:
            self._places[name] = self._next()
        self._put(self._places[name], {"text/plain": f"[{name}:{self._rank}] {self._texts[name]}"})

    def _display(self, content: dict[str, Any], update: bool) -> None:
        name = (content.get("transient") or {}).get("display_id", "")
        if update and name not in self._places:
            return
        if not update:
            self._put(self._next(), {"text/plain": f"[output:{self._rank}]"})
            self._places[name] = self._next()
        metadata = {**(content.get("metadata") or {}), "engine": self._rank}
        self._put(self._places[name], content["data"], metadata)

    def _next(self) -> int:
        self._used += 1
        return self._used - 1

    def _put(
        self, place: int, data: dict[str, Any], metadata: dict[str, Any] | None = None
    ) -> None:
        is_there, self._made = place < self._made, max(self._made, place + 1)
        where = {"display_id": f"{self._key}-{place}"}
        publish_display_data(data, metadata or {}, transient=where, update=is_there)

    def _clear(self) -> None:
        if not self._clears:
            return
        for place in range(self._used):
            self._put(place, NOTHING)
        self._clears, self._used = False, 0
        self._texts, self._places = {}, {}
