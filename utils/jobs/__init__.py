"""A job of ranks as processes, and the errors of ranks that can't be had."""


class RanksError(RuntimeError):
    """The ranks can't be started or used; the message says why and what to do."""

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows: the message says it all, the frames are ours."""
        return [f"RanksError: {self}"]


class DeadRankError(RanksError):
    """A rank that was asked is dead, or can't communicate any more: only fresh ranks help."""
