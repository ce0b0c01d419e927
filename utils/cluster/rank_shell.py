"""The IPython of one rank that is a thread: it runs the rank's cells, and keeps their output."""

from __future__ import annotations

import atexit
import functools
import types
from collections.abc import Callable
from typing import Any, Literal

from ipykernel.compiler import XCachingCompiler
from ipyparallel.client.client import Metadata
from IPython.core.async_helpers import _should_be_async
from IPython.core.builtin_trap import BuiltinTrap
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from traitlets import Any as AnyTrait
from traitlets import Type
from traitlets.config import Config

from torch_mpi.lines import sayable, text_of
from utils.jobs import NeedsProcesses

ENDS_ALL = "would end this kernel, because all its ranks are threads of one process"
#: Is called with each piece of output, in the form of a message of Jupyter.
Show = Callable[[str, dict[str, Any]], None]


class Output:
    """What one cell of a rank prints and shows, collected in ipyparallel's metadata.

    Args:
        metadata: gets the output.
        show: gets each piece as it comes.
    """

    def __init__(self, metadata: Metadata, show: Show):
        self.metadata, self._show = metadata, show

    def write(self, name: str, text: str) -> None:
        """Add text to ``stdout`` or ``stderr``."""
        text = sayable(text)
        self.metadata[name] += text
        self._show("stream", {"name": name, "text": text})

    def display(self, content: dict[str, Any], update: bool = False) -> None:
        """Add something that was displayed, or show it in the place of what it updates."""
        if not update:
            self.metadata["outputs"].append(content)
        self._show("update_display_data" if update else "display_data", content)

    def clear(self, wait: bool) -> None:
        """Clear what was shown, now or with the next piece."""
        after = {name: len(self.metadata[name]) for name in ("stdout", "stderr")}
        self._show("clear_output", {"wait": wait, "after": after})

    def result(self, content: dict[str, Any]) -> None:
        """Set the value of the cell's last line."""
        self.metadata["execute_result"] = content
        self._show("execute_result", content)


class Stream:
    """A rank's standard output or error, which goes to the output of the present cell."""

    encoding, errors, closed = "utf-8", "replace", False

    def __init__(self, name: str, output: Callable[[], Output]):
        self._name, self._output = name, output

    def write(self, text: str) -> int:
        """Write text; return its length."""
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        self._output().write(self._name, text)
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Do nothing: nothing is kept back."""

    def isatty(self) -> bool:
        """Return False."""
        return False

    def writable(self) -> bool:
        """Return True."""
        return True


class _Publisher(DisplayPublisher):
    """Keeps what a cell displays."""

    shell: RankShell

    def publish(
        self,
        data: Any,
        metadata: Any = None,
        *_: Any,
        transient: Any = None,
        update: bool = False,
        **__: Any,
    ) -> None:
        content = {"data": data, "metadata": metadata or {}, "transient": transient or {}}
        self.shell.output.display(content, update)

    def clear_output(self, wait: bool = False) -> None:
        self.shell.output.clear(wait)


class _Hook(DisplayHook):
    """Keeps the value of a cell's last line, as an engine sends it."""

    shell: RankShell
    content: dict[str, Any]

    def start_displayhook(self) -> None:
        self.content = {}

    def write_output_prompt(self) -> None:
        self.content["execution_count"] = self.prompt_count

    def write_format_data(
        self, format_dict: dict[str, Any], md_dict: dict[str, Any] | None = None
    ) -> None:
        self.content |= {"data": format_dict, "metadata": md_dict or {}}

    def finish_displayhook(self) -> None:
        if self.content.get("data"):
            self.shell.output.result(self.content)


class _NoTrap(BuiltinTrap):
    """Leaves the builtins as they are."""

    def __enter__(self) -> _NoTrap:
        return self

    def __exit__(self, *error: object) -> Literal[False]:
        return False


# All ranks run the same cells, so each cell is looked at once.
_awaits = functools.lru_cache(maxsize=64)(_should_be_async)


class RankShell(InteractiveShell):
    """An IPython that leaves the process as it is, because the kernel has its own.

    Attributes:
        output: of the present cell.
        error: of the present cell: kind, text, traceback; ``None`` if it has none.
    """

    compiler_class = Type(XCachingCompiler)
    display_pub_class = Type(_Publisher)
    displayhook_class = Type(_Hook)
    data_pub = AnyTrait()
    output: Output
    error: tuple[str, str, str] | None = None

    def __init__(self) -> None:
        config = Config()
        config.HistoryManager.enabled = False
        super().__init__(config=config)  # type: ignore[no-untyped-call]
        atexit.unregister(self.atexit_operations)
        self.data_pub = types.SimpleNamespace(publish_data=self._publish_data)

    def init_sys_modules(self) -> None:
        """Leave ``__main__`` to the kernel: a rank has its own only during its turn."""

    def init_builtins(self) -> None:
        """Leave the builtins as they are."""
        self.builtin_trap = _NoTrap(shell=self)

    def init_virtualenv(self) -> None:
        """Leave the path as it is."""

    def ask_exit(self) -> None:
        """Refuse ``exit()`` and ``quit()``: a thread can't end without its process.

        Raises:
            NeedsProcesses: always.
        """
        raise NeedsProcesses(f"exit() {ENDS_ALL}")

    def should_run_async(self, raw_cell: str, **read: Any) -> bool:
        """Return whether a cell awaits something."""
        is_read = self.autoawait and read.get("preprocessing_exc_tuple") is None
        return is_read and _awaits(read["transformed_cell"])

    def enable_gui(self, gui: str | None = None) -> None:
        """Do nothing: ranks have no windows."""

    def _publish_data(self, data: dict[str, Any]) -> None:
        self.output.metadata["data"] |= data

    def _showtraceback(self, kind: type, error: BaseException, lines: list[str]) -> None:
        self.error = (kind.__name__, text_of(error), "\n".join(lines))

    def run(self, code: str, output: Output, silent: bool) -> int:
        """Run a cell, keep its error in :attr:`error`, and return its number."""
        self.output, self.error = output, None
        result = self.run_cell(code, not silent, silent)  # type: ignore[no-untyped-call]
        if self.error is None and (error := result.error_before_exec or result.error_in_exec):
            self.error = (type(error).__name__, text_of(error), "")
        return self.execution_count - (not silent)
