"""A real notebook kernel to run faulty cells in, and the table of what came of them."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty

from jupyter_client.manager import KernelManager

ROOT = Path(__file__).resolve().parents[2]
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Shown:
    """What a cell showed.

    seconds: until it was over; after the interrupt, where there was one.
    """

    seconds: float = 0.0
    errors: list[tuple[str, str]] = field(default_factory=list)
    streams: str = ""
    is_cleared: bool = False
    pictures: int = 0

    def failed(self) -> bool:
        return bool(self.errors)

    def message(self) -> str:
        """The one error's text."""
        assert len(self.errors) == 1, f"{len(self.errors)} errors instead of one: {self}"
        return self.errors[0][1]

    def everything(self) -> str:
        return "\n".join([self.streams, *(text for _, text in self.errors)])


class NotOver(AssertionError):
    """A cell did not end by its deadline."""


class Notebook:
    """A kernel with the notebook's own ways: cells in, outputs out, a stop button."""

    def __init__(self, environment: dict[str, str | None]):
        env = {k: v for k, v in {**os.environ, **environment}.items() if v is not None}
        self._manager = KernelManager(kernel_name="python3")
        self._manager.start_kernel(env=env, cwd=str(ROOT))
        self._client = self._manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=200)

    def run(
        self,
        code: str,
        timeout: float = 120,
        stop_when: Callable[[], bool] | None = None,
        press: Callable[[], object] | None = None,
    ) -> Shown:
        """Run a cell; with `stop_when`, press the stop button (or `press`) once that is true.

        Raises NotOver for a cell that is not over after `timeout` seconds.
        """
        shown, begin = Shown(), time.monotonic()
        deadline, pressed = begin + timeout, stop_when is None
        message_id = self._client.execute(code)
        while not self._take(message_id, shown):
            if not pressed and stop_when():
                pressed, begin = True, time.monotonic()
                (press or self.interrupt)()
            if time.monotonic() > deadline:
                raise NotOver(f"the cell is not over after {timeout} s:\n{code}\n{shown}")
        shown.seconds = time.monotonic() - begin
        return shown

    def interrupt(self) -> None:
        """Press the stop button."""
        self._manager.interrupt_kernel()

    def _take(self, message_id: str, shown: Shown) -> bool:
        """Take in one message, if there is one; whether the cell is over."""
        try:
            message = self._client.get_iopub_msg(timeout=0.02)
        except Empty:
            return False
        if message["parent_header"].get("msg_id") != message_id:
            return False
        kind, content = message["msg_type"], message["content"]
        if shown.is_cleared and kind in ("stream", "display_data", "execute_result"):
            shown.streams, shown.is_cleared = "", False
        if kind == "clear_output":  # as for the line that says what the ranks do
            shown.is_cleared = True
        elif kind == "stream":
            shown.streams += _ESCAPES.sub("", content["text"])
        elif kind == "error":
            text = _ESCAPES.sub("", "\n".join(content["traceback"]))
            shown.errors.append((content["ename"], text))
        elif kind in ("display_data", "execute_result"):
            shown.pictures += "image/png" in content["data"]
            shown.streams += content["data"].get("text/plain", "") + "\n"
        return kind == "status" and content["execution_state"] == "idle"

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=False)


@contextmanager
def notebook(**environment: str | None) -> Iterator[Notebook]:
    """A kernel that ends with the block."""
    opened = Notebook(environment)
    try:
        yield opened
    finally:
        opened.close()


@dataclass
class Row:
    fault: str
    seconds: float
    first_line: str
    works: str = "no"


class Table:
    """Fault, seconds, first line of the message, whether the next cell works."""

    def __init__(self):
        self.rows: list[Row] = []

    def add(self, fault: str, seconds: float, text: str) -> Row:
        lines = [line.strip() for line in text.splitlines() if line.strip(" -")]
        # A traceback's last line says what it is.
        errors = [line for line in lines if re.match(r"\w+Error: ", line)]
        first = errors[0] if text.startswith("---") and errors else [*lines, "(no error)"][0]
        self.rows.append(Row(fault, seconds, first))
        return self.rows[-1]

    def __str__(self) -> str:
        lines = ["| fault | seconds | the message begins | next cell works |", "|---|---|---|---|"]
        lines += [
            f"| {row.fault} | {row.seconds:.2f} | {row.first_line.replace('|', '/')[:110]} "
            f"| {row.works} |"
            for row in self.rows
        ]
        return "\n".join(lines)
