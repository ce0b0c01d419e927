"""What checks, labs and timelines ask of the ranks that a notebook hands them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from utils.cluster.reply import Reply


class Ranks(Protocol):
    """Ranks that answer questions.

    :class:`utils.cluster.Ranks` keeps this contract, and so do the threads that the tests of checks
    use as ranks. A function that needs more, such as ``running()`` or ``view``, names
    :class:`utils.cluster.Ranks` itself.
    """

    @property
    def n(self) -> int:
        """Return the number of ranks."""

    def ask(
        self,
        target: str | Callable[..., Any],
        *,
        timeout: float = 60.0,
        each: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> list[Reply]:
        """Run a function on every rank and return one reply per rank, in rank order.

        Args:
            target: a function of a module, or "package.module:function".
            timeout: seconds until the ranks that have not answered are interrupted.
            each: one dict per rank, with arguments that only this rank gets.
            kwargs: arguments that every rank gets.

        Raises:
            ValueError: the target or the arguments can't be sent.
            RanksError: the ranks were stopped.
        """
