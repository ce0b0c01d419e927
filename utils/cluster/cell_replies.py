"""A rank's reply to a cell comes, whatever the cell awaited, printed, returned or asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from torch_mpi.lines import sayable
from utils.jobs import RanksError


def packing(pack: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """Return a function that packs messages even if a text in them can't be encoded."""

    def packed(message: Any) -> bytes:
        try:
            return pack(message)
        except UnicodeEncodeError:
            return pack(_sayable(message))

    return packed


def _sayable(value: Any) -> Any:
    if isinstance(value, str):
        return sayable(value)
    if isinstance(value, dict):
        return {_sayable(key): _sayable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_sayable(item) for item in value]
    return value


def run_to_the_end(cell: Coroutine[Any, Any, Any]) -> Any:
    """Run a cell that awaits in a separate event loop, until its code has ended.

    In the engine's own loop, the engine would send no reply before the next request comes.
    """
    engines = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        return asyncio.run(cell)
    finally:
        asyncio._set_running_loop(engines)


def refuse_breakpoint(*_: object, **__: object) -> NoReturn:
    """Raise RanksError in the place of ``breakpoint()``, which would wait for a keyboard."""
    raise RanksError(
        "breakpoint() needs a keyboard, and a rank has none. Print what you want to see on the "
        "rank, or call the function in a cell without %%px, where the debugger works."
    )


def refuse_input(*_: object, **__: object) -> NoReturn:
    """Raise RanksError in the place of ``input()``, and of what calls it, such as a debugger."""
    raise RanksError("a rank can't ask you for input. Set a variable in the cell instead")


def print_help(shell: object, data: Any, **_: object) -> None:
    """Print what ``name?`` shows, because a rank has no pager."""
    print(data["text/plain"] if isinstance(data, dict) else data)
