"""What a rank prints and shows, below the cell that runs it.

Each piece has its place there: a stream has one place, and each thing that is displayed has two, as
a label stands before it. After ``clear_output()`` the next pieces take the first places again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from IPython.display import publish_display_data

#: Seconds for which a cell's first output waits for the output of ranks with lower numbers.
HOLD = 0.06
#: The text at a place which has been cleared.
NOTHING = {"text/plain": ""}


class RankOutput:
    """What one rank shows below a cell.

    Args:
        rank: the rank.
        key: a name of this run of the cell on this rank.
        metadata: ipyparallel's, which has all that came so far.
        show_result: shows the value of the cell's last line.
    """

    def __init__(
        self, rank: int, key: str, metadata: Any, show_result: Callable[[dict[str, Any]], None]
    ):
        self._rank, self._key, self._metadata = rank, key, metadata
        self._show_result = show_result
        self._shown: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}  # by place
        self._result: dict[str, Any] | None = None
        self._cleared: dict[str, int] = {}  # where the text begins that came after the last clear
        self._places: dict[str, int] = {}  # of streams, and of displays that may change
        self._used = 0
        self._clears = False

    def show(self, message: dict[str, Any]) -> None:
        """Show a message of Jupyter; an error is not shown, because it comes once for all ranks."""
        kind, content = message["header"]["msg_type"], message["content"]
        if kind == "stream":
            self._clear()
            self._print(content["name"])
        elif kind == "clear_output":
            self._clears, self._cleared = True, content.get("after") or self._lengths()
            if not content.get("wait"):
                self._clear()
        elif kind in ("display_data", "update_display_data"):
            self._clear()
            self._display(content, kind == "update_display_data")
        elif kind == "execute_result":
            self._clear()
            self._result = message
            self._show_result(message)

    def show_again(self) -> None:
        """Show the output once more, after the whole cell has been cleared."""
        shown, self._shown = self._shown, {}
        for place, (data, metadata) in shown.items():
            if data is not NOTHING:
                self._put(place, data, metadata)
        if self._result is not None:
            self._show_result(self._result)

    def _lengths(self) -> dict[str, int]:
        return {name: len(self._metadata[name] or "") for name in ("stdout", "stderr")}

    def _print(self, name: str) -> None:
        text = self._metadata[name][self._cleared.get(name, 0) :]
        if name not in self._places:
            self._places[name] = self._next()
        self._put(self._places[name], {"text/plain": f"[{name}:{self._rank}] {text}"})

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
        is_there = place in self._shown
        self._shown[place] = data, metadata or {}
        where = {"display_id": f"{self._key}-{place}"}
        publish_display_data(data, metadata or {}, transient=where, update=is_there)

    def _clear(self) -> None:
        if not self._clears:
            return
        for place in range(self._used):
            self._put(place, NOTHING)
        self._clears, self._used, self._result = False, 0, None
        self._places = {}


class RankOrder:
    """What ranks print at the beginning of a cell, in the order of the ranks.

    Args:
        ranks: how many ranks run the cell.
        show: shows a message, given its rank and what else came with it.
    """

    def __init__(self, ranks: int, show: Callable[..., None]):
        self._ranks, self._show = ranks, show
        self._held: list[tuple[Any, ...]] | None = []  # None when messages are shown at once
        # A message may come while a timer's thread shows the earlier ones.
        self._lock = threading.RLock()

    def add(self, rank: int, *message: Any) -> None:
        """Show a message, or hold it for a moment."""
        with self._lock:
            if self._held is None:
                self._show(rank, *message)
                return
            self._held.append((rank, *message))
            if len({held[0] for held in self._held}) == self._ranks:
                self.release()
            elif len(self._held) == 1:
                timer = threading.Timer(HOLD, self.release)
                timer.daemon = True
                timer.start()

    def release(self) -> None:
        """Show what is held, and from now on each message at once."""
        with self._lock:
            held, self._held = self._held or [], None
            for message in sorted(held, key=lambda each: each[0]):
                self._show(*message)
