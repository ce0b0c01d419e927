"""ipyparallel's client and views, for ranks that are threads of this process.

`%%px` and the labs use ranks by ipyparallel's names. These classes have the names that they use.
"""

from __future__ import annotations

import pickle
import time
import types
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from ipyparallel.client.asyncresult import AsyncResult
from ipyparallel.client.client import ExecuteReply, Metadata
from ipyparallel.client.futures import MessageFuture
from ipyparallel.error import RemoteError

from torch_mpi.lines import text_of
from utils.cluster.world.shared_ranks import BEFORE_TURN

from .shell import Output
from .turns import Retired

if TYPE_CHECKING:
    from .rank import Rank
    from .turns import Job, Turns

# What a rank does for a request; it returns the result, and raises nothing.
Request = Callable[["Rank", MessageFuture], Any]
# Seconds between two looks for output while a caller waits.
LOOK = 0.02


class Result(AsyncResult):
    """An `AsyncResult` that shows the ranks' output in the thread that waits for it."""

    def wait(self, timeout: float | None = -1, return_when: str | None = None) -> Any:
        """Wait for the result, see `AsyncResult.wait`."""
        forever = timeout is None or timeout < 0
        end = None if forever else time.monotonic() + (timeout or 0)
        while True:
            self._client.deliver()
            left = LOOK if end is None else min(LOOK, end - time.monotonic())
            if self._ready_event.wait(max(left, 0)) or (end is not None and left <= 0):
                break
        self._client.deliver()
        return super().wait(0, return_when)

    def wait_for_output(self, timeout: float | None = -1) -> Any:
        """Wait until the output is complete, see `AsyncResult.wait_for_output`."""
        complete = super().wait_for_output(timeout)
        self._client.deliver()
        return complete


class Client:
    """The kernel's connection to the ranks, in the form of `ipyparallel.Client`.

    Attributes:
        ids: the ranks' numbers.
        outstanding: the requests that ranks have not answered, by their ids.
        namespaces: the names of each rank's cells.
    """

    def __init__(self, turns: Turns, ranks: list[Rank]):
        self._turns, self._ranks = turns, ranks
        self.ids = [rank.number for rank in ranks]
        self.namespaces = [rank.user_ns for rank in ranks]
        self.outstanding: dict[str, MessageFuture] = {}
        self._messages: deque[tuple[MessageFuture, dict[str, Any]]] = deque()

    def __getitem__(self, key: int | slice | Iterable[int]) -> View:
        if isinstance(key, int):
            return View(self, self.ids[key])
        chosen = self.ids[key] if isinstance(key, slice) else [self.ids[k] for k in key]
        return View(self, chosen)

    def __len__(self) -> int:
        return len(self.ids)

    def send(self, requests: Mapping[int, Request]) -> dict[int, MessageFuture]:
        """Send requests to ranks, all at once; return the answer of each rank, to come."""
        futures = {rank: self._future(rank) for rank in requests}
        jobs = {rank: self._job(rank, requests[rank], futures[rank]) for rank in requests}
        self._turns.submit(jobs)
        return futures

    def question_each(self, codes: Mapping[int, str]) -> dict[int, AsyncResult]:
        """Run code of the course on each of these ranks, without IPython; return the results."""

        def of(code: str) -> Request:
            def request(rank: Rank, future: MessageFuture) -> Any:
                if self.interrupted_before():
                    return remote_error(rank.number, KeyboardInterrupt.__name__, BEFORE_TURN, "")
                return call(rank, self.output(future), lambda: exec(code, rank.user_ns), (), {})

            return request

        futures = self.send({rank: of(code) for rank, code in codes.items()})
        return {r: Result(self, future, "execute", [r]) for r, future in futures.items()}

    def interrupted_before(self) -> bool:
        """Return whether the rank that runs was interrupted before it began its cell."""
        return self._turns.take_interrupt()

    def become(self, other: Client) -> None:
        """Be the client of the ranks of another client, so that views stay valid."""
        self._abandon()
        self._turns, self._ranks = other._turns, other._ranks
        self.namespaces = other.namespaces

    def _future(self, rank: int) -> MessageFuture:
        future = MessageFuture(uuid.uuid4().hex, header={"msg_type": "execute_request"})
        future.output = Future()
        future.output.metadata = Metadata(
            engine_id=rank, msg_id=future.msg_id, engine_uuid=f"rank {rank}", outputs=[], data={}
        )
        self.outstanding[future.msg_id] = future
        return future

    def _job(self, rank: int, request: Request, future: MessageFuture) -> Job:
        def job() -> Callable[[], None]:
            try:
                answer = request(self._ranks[rank], future)
            except Retired:
                raise
            except BaseException as error:  # such as an interrupt at the end of the cell
                kind, text = type(error).__name__, text_of(error)
                answer = remote_error(rank, kind, text, f"{kind}: {text}".rstrip(": "))

            def report() -> None:
                self.outstanding.pop(future.msg_id, None)
                future.set_result(answer)
                future.output.set_result(None)

            return report

        return job

    def output(self, future: MessageFuture) -> Output:
        """Return what collects the output for a request."""

        def show(kind: str, content: dict[str, Any]) -> None:
            if future.iopub_callbacks:
                header = {"msg_type": kind}
                parent = {"msg_id": future.msg_id}
                message = {"header": header, "parent_header": parent, "content": content}
                self._messages.append((future, message))

        return Output(future.output.metadata, show)

    def deliver(self) -> None:
        """Show the output that has come, in the thread that calls this."""
        waiting: list[tuple[MessageFuture, dict[str, Any]]] = []
        while self._messages:
            future, message = self._messages.popleft()
            if waiting and (before := waiting[-1])[0] is future and _continue(before[1], message):
                before[1]["content"]["text"] += message["content"]["text"]
            else:
                waiting.append((future, message))
        for future, message in waiting:
            for callback in list(future.iopub_callbacks):
                callback(message)

    def _unwrap_exception(self, content: Mapping[str, Any]) -> RemoteError:
        kind, text = str(content["ename"]), str(content["evalue"])
        return remote_error(content["engine_info"]["engine_id"], kind, text, "")

    def close(self) -> None:
        """Forget the ranks."""
        self._abandon()
        self.ids = []

    def _abandon(self) -> None:
        """Answer the requests of ranks that have ended, as for processes that have died."""
        while self.outstanding:
            _, future = self.outstanding.popitem()
            text = "the rank was ended before its cell was over"
            rank = future.output.metadata["engine_id"]
            future.set_result(remote_error(rank, "EngineError", text, f"EngineError: {text}"))
            future.output.set_result(None)


class View:
    """Ranks of a client, in the form of ipyparallel's `DirectView`.

    Attributes:
        targets: the ranks' numbers, the number of one rank, or "all".
        block: whether calls wait for their results.
    """

    def __init__(self, client: Client, targets: int | list[int]):
        self.client = client
        self.targets: int | list[int] | str = targets
        self.block = False

    def _send(self, request: Request, name: str, block: bool) -> Any:
        one = isinstance(self.targets, int)
        targets = self.client.ids if self.targets == "all" else self.targets
        numbers = [targets] if isinstance(targets, int) else list(map(int, targets))
        futures = self.client.send(dict.fromkeys(numbers, request))
        children = list(futures.values())
        result = Result(self.client, children[0] if one else children, fname=name, targets=numbers)
        return result.get() if block else result

    def execute(
        self, code: str, silent: bool = True, targets: Any = None, block: bool | None = None
    ) -> Result:
        """Run a cell on the ranks; return its result, with `block` after it has come."""
        view = self if targets is None else self.client[targets]

        def request(rank: Rank, future: MessageFuture) -> Any:
            stopped = self.client.interrupted_before()
            run = f"raise KeyboardInterrupt({BEFORE_TURN!r})" if stopped else code
            return execute(rank, future, self.client.output(future), run, silent)

        result: Result = view._send(request, "execute", False)
        if self.block if block is None else block:
            result.get()
        return result

    def apply(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function of the notebook with the names of the ranks."""
        return self._apply(function, args, kwargs, self.block)

    def apply_sync(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Do the same, and return the results."""
        return self._apply(function, args, kwargs, True)

    def apply_async(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Do the same without waiting for the results."""
        return self._apply(function, args, kwargs, False)

    def _apply(self, function: Callable[..., Any], args: Any, kwargs: Any, block: bool) -> Any:
        def request(rank: Rank, future: MessageFuture) -> Any:
            return call(rank, self.client.output(future), function, args, kwargs)

        return self._send(request, function.__name__, block)

    def push(self, names: Mapping[str, Any], block: bool = True) -> Any:
        """Set names on the ranks to copies of these values."""
        sent = pickle.dumps(dict(names))

        def put(user_ns: dict[str, Any]) -> None:
            user_ns.update(pickle.loads(sent))

        return self._in_namespace(put, "push", block)

    update = push

    def pull(self, names: str | list[str], block: bool = True) -> Any:
        """Return copies of the values of these names or expressions on the ranks."""

        def take(user_ns: dict[str, Any]) -> Any:
            wanted = [names] if isinstance(names, str) else names
            values = [eval(name, user_ns) for name in wanted]
            return values[0] if isinstance(names, str) else values

        return self._in_namespace(take, "pull", block)

    get = pull

    def _in_namespace(
        self, function: Callable[[dict[str, Any]], Any], name: str, block: bool
    ) -> Any:
        def request(rank: Rank, future: MessageFuture) -> Any:
            return call(rank, self.client.output(future), lambda: function(rank.user_ns), (), {})

        return self._send(request, name, block)

    def __getitem__(self, name: str) -> Any:
        return self.pull(name, block=True)

    def __setitem__(self, name: str, value: Any) -> None:
        self.push({name: value}, block=True)


def _continue(before: dict[str, Any], message: dict[str, Any]) -> bool:
    """Return whether a message has more text of the same stream: a browser draws each message."""
    names = [one["content"].get("name") for one in (before, message)]
    return all(one["header"]["msg_type"] == "stream" for one in (before, message)) and (
        names[0] == names[1]
    )


def execute(rank: Rank, future: MessageFuture, output: Output, code: str, silent: bool) -> Any:
    """Run a cell on this rank; return an `ExecuteReply` or the error."""
    count = rank.shell.run(code, output, silent)
    metadata = future.output.metadata
    if rank.shell.error is None:
        metadata["status"] = "ok"
        return ExecuteReply(future.msg_id, {"execution_count": count}, metadata)
    error = remote_error(rank.number, *rank.shell.error)
    metadata["status"], metadata["error"] = "error", error
    return error


def call(
    rank: Rank,
    output: Output,
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
) -> Any:
    """Call a function on this rank; return a copy of its result, or the error."""
    rank.shell.output = output
    try:
        value = _with_names_of(rank, function)(*args, **kwargs)
        return _sorted(pickle.loads(pickle.dumps(value)))
    except Exception as error:
        kind, text = type(error).__name__, text_of(error)
        return remote_error(rank.number, kind, text, f"{kind}: {text}")


def _sorted(value: Any) -> Any:
    """Return a dict sorted by its keys, as ipyparallel does; other values unchanged."""
    if type(value) is not dict:
        return value
    try:
        return {key: value[key] for key in sorted(value)}
    except TypeError:  # keys of several types
        return value


def _with_names_of(rank: Rank, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of the notebook that finds the names of the rank."""
    if getattr(function, "__module__", "") != "__main__" or not hasattr(function, "__code__"):
        return function
    made = types.FunctionType(
        function.__code__,
        rank.user_ns,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def remote_error(rank: int, kind: str, text: str, traceback: str) -> RemoteError:
    """Return the error of a rank in ipyparallel's form."""
    where = {"engine_id": rank, "engine_uuid": f"rank {rank}", "method": "execute"}
    return RemoteError(kind, text, traceback, where)
