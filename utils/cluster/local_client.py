"""ipyparallel's client and views, for ranks to which this process speaks itself.

`%%px` and the labs use ranks by ipyparallel's names. These classes have the names that they use.
"""

from __future__ import annotations

import pickle
import time
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from ipyparallel.client.asyncresult import AsyncResult
from ipyparallel.client.client import ExecuteReply, Metadata
from ipyparallel.client.futures import MessageFuture
from ipyparallel.error import RemoteError

from .rank_shell import Output

# Seconds between two looks for output while a caller waits.
LOOK = 0.02


# --- what a rank is asked for --------------------------------------------------------------------


@dataclass(frozen=True)
class Execute:
    """Run a cell in the rank's IPython."""

    code: str
    silent: bool


@dataclass(frozen=True)
class Ask:
    """Run code of the course on the rank, without IPython."""

    code: str


@dataclass(frozen=True)
class Apply:
    """Call a function of the notebook with the names of the rank."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class Push:
    """Set names on the rank to copies of values: a pickled dict."""

    pickled: bytes


@dataclass(frozen=True)
class Pull:
    """Return a copy of the values of these names or expressions."""

    names: str | list[str]


Request = Execute | Ask | Apply | Push | Pull


# --- the client ----------------------------------------------------------------------------------


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


class LocalClient(ABC):
    """The kernel's connection to the ranks, in the form of `ipyparallel.Client`.

    Attributes:
        ids: the numbers of the ranks that live.
        outstanding: the requests that ranks have not answered, by their ids.
    """

    def __init__(self, ids: Iterable[int]):
        self.ids = list(ids)
        self.outstanding: dict[str, MessageFuture] = {}
        self._messages: deque[tuple[MessageFuture, dict[str, Any]]] = deque()

    def __getitem__(self, key: int | slice | Iterable[int]) -> View:
        if isinstance(key, int):
            return View(self, self.ids[key])
        chosen = self.ids[key] if isinstance(key, slice) else [self.ids[k] for k in key]
        return View(self, chosen)

    def __len__(self) -> int:
        return len(self.ids)

    @abstractmethod
    def send(self, requests: Mapping[int, Request]) -> dict[int, MessageFuture]:
        """Send requests to ranks, all at once; return the answer of each rank, to come."""

    def question_each(self, codes: Mapping[int, str]) -> dict[int, AsyncResult]:
        """Run code of the course on each of these ranks, without IPython; return the results."""
        futures = self.send({rank: Ask(code) for rank, code in codes.items()})
        return {r: Result(self, future, "execute", [r]) for r, future in futures.items()}

    def future(self, rank: int) -> MessageFuture:
        """Return the answer to a new request, to come."""
        future = MessageFuture(uuid.uuid4().hex, header={"msg_type": "execute_request"})
        future.output = Future()
        future.output.metadata = Metadata(
            engine_id=rank, msg_id=future.msg_id, engine_uuid=f"rank {rank}", outputs=[], data={}
        )
        self.outstanding[future.msg_id] = future
        return future

    def answer(self, future: MessageFuture, answer: Any) -> None:
        """Note a rank's answer to a request."""
        if self.outstanding.pop(future.msg_id, None) is not None:
            future.set_result(answer)
            future.output.set_result(None)

    def output(self, future: MessageFuture) -> Output:
        """Return what collects the output for a request."""

        def show(kind: str, content: dict[str, Any]) -> None:
            if future.iopub_callbacks or not future.done():
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
        self.abandon()
        self.ids = []

    def abandon(self, rank: int | None = None) -> None:
        """Answer the requests of a rank that has ended, or of all, as for processes that died."""
        for future in list(self.outstanding.values()):
            number = future.output.metadata["engine_id"]
            if rank in (None, number):
                text = "the rank was ended before its cell was over"
                error = remote_error(number, "EngineError", text, f"EngineError: {text}")
                self.answer(future, error)


class View:
    """Ranks of a client, in the form of ipyparallel's `DirectView`.

    Attributes:
        targets: the ranks' numbers, the number of one rank, or "all".
        block: whether calls wait for their results.
    """

    def __init__(self, client: LocalClient, targets: int | list[int]):
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
        result: Result = view._send(Execute(code, silent), "execute", False)
        if self.block if block is None else block:
            result.get()
        return result

    def apply(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function of the notebook with the names of the ranks."""
        return self._send(Apply(function, args, kwargs), function.__name__, self.block)

    def apply_sync(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Do the same, and return the results."""
        return self._send(Apply(function, args, kwargs), function.__name__, True)

    def apply_async(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Do the same without waiting for the results."""
        return self._send(Apply(function, args, kwargs), function.__name__, False)

    def push(self, names: Mapping[str, Any], block: bool = True) -> Any:
        """Set names on the ranks to copies of these values."""
        return self._send(Push(pickle.dumps(dict(names))), "push", block)

    update = push

    def pull(self, names: str | list[str], block: bool = True) -> Any:
        """Return copies of the values of these names or expressions on the ranks."""
        return self._send(Pull(names), "pull", block)

    get = pull

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


def reply_of(
    future: MessageFuture, count: int, error: tuple[str, str, str] | None
) -> ExecuteReply | RemoteError:
    """Return a rank's answer to a cell.

    Args:
        count: the number of the cell on the rank.
        error: kind, text and traceback; ``None`` if the cell has none.
    """
    metadata = future.output.metadata
    if error is None:
        metadata["status"] = "ok"
        return ExecuteReply(future.msg_id, {"execution_count": count}, metadata)
    told = remote_error(metadata["engine_id"], *error)
    metadata["status"], metadata["error"] = "error", told
    return told


def sorted_by_keys(value: Any) -> Any:
    """Return a dict sorted by its keys, as ipyparallel does; other values unchanged."""
    if type(value) is not dict:
        return value
    try:
        return {key: value[key] for key in sorted(value)}
    except TypeError:  # keys of several types
        return value


def remote_error(rank: int, kind: str, text: str, traceback: str) -> RemoteError:
    """Return the error of a rank in ipyparallel's form."""
    where = {"engine_id": rank, "engine_uuid": f"rank {rank}", "method": "execute"}
    return RemoteError(kind, text, traceback, where)
