"""The error of ranks that can't be had, for all modules that bring them up."""


class RanksError(RuntimeError):
    """The ranks can't be started or used; the message says why and what to do."""
