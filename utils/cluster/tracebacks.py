"""How a notebook shows errors of some kinds: IPython keeps one function for all of them."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

Error = TypeVar("Error", bound=BaseException)

_ways: dict[type[BaseException], Callable[[Any, Any], BaseException | None]] = {}


def show_errors(
    shell: Any, kind: type[Error], show: Callable[[Any, Error], BaseException | None]
) -> None:
    """Have ``show(shell, error)`` decide from now on what is shown of errors of this kind.

    It returns the error to show: the same one, with its frames, or another one, without frames;
    ``None`` shows nothing.
    """
    _ways[kind] = show
    shell.set_custom_exc(tuple(_ways), _handle)


def _handle(
    shell: Any,
    kind: type[BaseException],
    error: BaseException,
    traceback: TracebackType,
    tb_offset: int | None = None,
) -> None:
    show = next(way for of, way in _ways.items() if isinstance(error, of))
    shown = show(shell, error)
    if shown is error:
        shell.showtraceback((kind, error, traceback), tb_offset=tb_offset)
    elif shown is not None:
        shell.showtraceback((type(shown), shown, None))
