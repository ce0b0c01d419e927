"""Plans ranks that are threads of the kernel: checks the arguments, and says what they can't do."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

from utils.jobs import NeedsProcesses, RanksError, box_plan
from utils.jobs.box_plan import BoxPlan
from utils.jobs.start_plan import (
    MOST_RANKS,
    ON_A_RANK,
    Plan,
    check_count,
    check_timeout,
    refuse_on_a_rank,
)

#: Decides for every `cluster.start` without `where`: one of :data:`PLACES`.
VARIABLE = "DDL_LABS_WHERE"
PLACES = ("here", "processes", "boxes")


def is_rank_here() -> bool:
    """Return whether the caller is a rank inside the kernel. Such ranks replace this function."""
    return False


def refuse_on_any_rank() -> None:
    """Raise RanksError if the caller is a rank already, in this process or as a process."""
    if is_rank_here() or box_plan.MARK in os.environ:
        raise RanksError(ON_A_RANK.format("a rank"))
    refuse_on_a_rank()


class ThreadPlan:
    """A plan to start ranks inside this process.

    Attributes:
        n, threads, timeout: the arguments of `cluster.start`.
        notes: sentences for the user.
    """

    def __init__(self, n: int, threads: int = 1, timeout: float = 20.0, **processes: Any):
        check_count("n", n, "the number of ranks", "start(2)")
        check_count("threads", threads, "the threads of each rank", "start(2, threads=1)")
        check_timeout(timeout)
        if n > MOST_RANKS:
            raise ValueError(f"n={n}: at most {MOST_RANKS} ranks can run inside the kernel")
        if asked := sorted(name for name, value in processes.items() if value):
            raise NeedsProcesses(
                f"{', '.join(asked)} needs ranks that are processes, and these ranks are threads "
                f"of the kernel ({self.reason()}). Leave it out, or leave out this cell."
            )
        self.n, self.threads, self.timeout = n, threads, timeout
        self.fault_tolerant = False
        self.notes = [self.what()]

    def greeting(self, fresh: bool = False) -> str:
        """Return what a notebook says when the ranks have started."""
        which = "fresh " * fresh
        begin = f"{self.n} {which}ranks have" if self.n > 1 else f"1 {which}rank has"
        return f"{begin} started. {self.what()}"

    @staticmethod
    def reason() -> str:
        """Return why there are threads instead of processes."""
        return missing() or "as you asked"

    def what(self) -> str:
        """Return one sentence on what these ranks are, and one on what they can't show."""
        if self.n == 1:
            return f"It is a thread of this kernel ({self.reason()}). It can't show speed."
        return (
            f"They are threads of this kernel that take turns ({self.reason()}). They can't show "
            "speed, real overlap, or a process that dies. Their clock charges each message a time."
        )


def plan_of(where: str | None, n: int, **options: Any) -> Plan | ThreadPlan | BoxPlan:
    """Return a plan for ranks of the chosen kind, with these arguments of `cluster.start`."""
    plans: dict[str, Callable[..., Plan | ThreadPlan | BoxPlan]] = {
        "here": ThreadPlan,
        "processes": Plan,
        "boxes": BoxPlan,
    }
    return plans[chosen(where)](n, **options)


def missing() -> str:
    """Return why this machine can't start ranks as processes; "" if nothing is known to lack."""
    if not hasattr(os, "fork"):
        return "this system can't fork processes"
    if importlib.util.find_spec("mpi4py") is None:
        return "there is no MPI here"
    return ""


def chosen(where: str | None) -> str:
    """Return which kind of ranks to start.

    Raises:
        ValueError: there is no such place.
    """
    place = where or os.environ.get(VARIABLE) or ("here" if missing() else "processes")
    if place not in PLACES:
        name = f"where={where!r}" if where else f"{VARIABLE}={place}"
        raise ValueError(
            f'{name}: ranks can run as "processes", "here" or in "boxes". Choose one of them'
        )
    return place


def is_chosen(where: str | None) -> bool:
    """Return whether a program's ranks run inside one process; boxes are for notebooks only."""
    place = chosen(where)
    return place == "here" or (place == "boxes" and bool(missing()))
