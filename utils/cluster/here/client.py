"""The kernel's requests to ranks that are threads of this process."""

from __future__ import annotations

import pickle
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ipyparallel.client.futures import MessageFuture

from torch_mpi.lines import text_of
from utils.cluster.local_client import (
    Apply,
    Ask,
    Execute,
    LocalClient,
    Pull,
    Push,
    Request,
    remote_error,
    reply_of,
    sorted_by_keys,
)
from utils.cluster.rank_shell import Output
from utils.cluster.world.shared_ranks import BEFORE_TURN

from .turns import Retired

if TYPE_CHECKING:
    from .rank import Rank
    from .turns import Job, Turns

# What a rank does in its turn; it returns its answer.
Task = Callable[["Rank", MessageFuture], Any]


class Client(LocalClient):
    """The requests to the ranks, which each rank answers in its turn.

    Attributes:
        namespaces: the names of each rank's cells.
    """

    def __init__(self, turns: Turns, ranks: list[Rank]):
        super().__init__(rank.number for rank in ranks)
        self._turns = turns
        self._ranks = ranks
        self.namespaces = [rank.user_ns for rank in ranks]

    def send(self, requests: Mapping[int, Request]) -> dict[int, MessageFuture]:
        """Send requests to ranks, all at once; return the answer of each rank, to come."""
        return self.submit({rank: self._task(request) for rank, request in requests.items()})

    def submit(self, tasks: Mapping[int, Task]) -> dict[int, MessageFuture]:
        """Give tasks to ranks, all at once; return the answer of each rank, to come."""
        futures = {rank: self.future(rank) for rank in tasks}
        self._turns.submit({rank: self._job(rank, tasks[rank], futures[rank]) for rank in tasks})
        return futures

    def become(self, other: Client) -> None:
        """Be the client of the ranks of another client, so that views stay valid."""
        self.abandon()
        self._turns = other._turns
        self._ranks = other._ranks
        self.namespaces = other.namespaces

    def _task(self, request: Request) -> Task:
        def task(rank: Rank, future: MessageFuture) -> Any:
            was_interrupted = self._turns.take_interrupt()
            output = self.output(future)
            if isinstance(request, Execute):
                code = (
                    f"raise KeyboardInterrupt({BEFORE_TURN!r})" if was_interrupted else request.code
                )
                count = rank.shell.run(code, output, request.silent)
                return reply_of(future, count, rank.shell.error)
            if was_interrupted:
                return remote_error(rank.number, KeyboardInterrupt.__name__, BEFORE_TURN, "")
            return called(rank, output, lambda: fulfilled(rank, request))

        return task

    def _job(self, rank: int, task: Task, future: MessageFuture) -> Job:
        def job() -> Callable[[], None]:
            try:
                answer = task(self._ranks[rank], future)
            except Retired:
                raise
            except BaseException as error:  # such as an interrupt at the end of the cell
                kind = type(error).__name__
                text = text_of(error)
                answer = remote_error(rank, kind, text, f"{kind}: {text}".rstrip(": "))
            return lambda: self.answer(future, answer)

        return job


def fulfilled(rank: Rank, request: Ask | Apply | Push | Pull) -> Any:
    """Do what a rank is asked for, and return the result."""
    user_ns = rank.user_ns
    if isinstance(request, Ask):
        return exec(request.code, user_ns)
    if isinstance(request, Push):
        return user_ns.update(pickle.loads(request.pickled))
    if isinstance(request, Pull):
        if isinstance(request.names, str):
            return eval(request.names, user_ns)
        return [eval(name, user_ns) for name in request.names]
    return with_names(request.function, user_ns)(*request.args, **request.kwargs)


def called(rank: Rank, output: Output, function: Callable[[], Any]) -> Any:
    """Call a function on this rank; return a copy of its result, or the error."""
    rank.shell.output = output
    try:
        return sorted_by_keys(pickle.loads(pickle.dumps(function())))
    except Exception as error:
        kind = type(error).__name__
        text = text_of(error)
        return remote_error(rank.number, kind, text, f"{kind}: {text}")


def with_names(function: Callable[..., Any], user_ns: dict[str, Any]) -> Callable[..., Any]:
    """Return a function of the notebook that finds the names of a rank."""
    if getattr(function, "__module__", "") != "__main__" or not hasattr(function, "__code__"):
        return function
    made = types.FunctionType(
        function.__code__,
        user_ns,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made
