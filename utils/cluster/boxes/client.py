"""The kernel's requests to ranks that are processes with a socket."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

from ipyparallel.client.futures import MessageFuture

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

from . import values
from .carrier import Carrier
from .frames import BrokenFrame, Frame, Frames, Piece


class Client(LocalClient):
    """The requests to the ranks, and what comes back.

    Args:
        frames: the connection to each rank.
        carrier: learns which ranks have something to do.
    """

    def __init__(self, frames: Sequence[Frames], carrier: Carrier):
        super().__init__(range(len(frames)))
        self._frames = frames
        self._carrier = carrier
        self._open: dict[str, tuple[int, Request]] = {}

    def send(self, requests: Mapping[int, Request]) -> dict[int, MessageFuture]:
        """Send requests to ranks, all at once; return the answer of each rank, to come."""
        futures = {rank: self.future(rank) for rank in requests}
        self._carrier.begin_requests(rank for rank in requests if rank in self.ids)
        for rank, request in requests.items():
            future = futures[rank]
            self._open[future.msg_id] = rank, request
            kind, fields, pieces = _as_frame(request)
            try:
                if rank not in self.ids:
                    raise ConnectionError
                self._frames[rank].send(kind, fields | {"request": future.msg_id}, pieces)
            except OSError:
                self.abandon(rank)
        return futures

    def become(self, other: Client) -> None:
        """Be the client of the ranks of another client, so that views stay valid."""
        self.abandon()
        self.ids = other.ids
        self._frames = other._frames
        self._carrier = other._carrier
        self._open.clear()

    def take(self, rank: int, frame: Frame) -> bool:
        """Take a frame with output or with an answer; return False for others.

        Raises:
            BrokenFrame: this rank was not asked for it.
        """
        if frame.kind not in ("output", "done"):
            return False
        number = str(frame.fields.get("request"))
        asked, request = self._open.get(number, (None, None))
        future = self.outstanding.get(number)
        if asked != rank or request is None or future is None:
            if frame.kind == "output":
                return True  # of a thread, after the end of its cell
            raise BrokenFrame(f"rank {rank} answers what it was not asked")
        try:
            if frame.kind == "output":
                self._take_output(future, frame)
            else:
                self._take_answer(rank, future, request, frame)
        except Exception as error:  # whatever it brings, only this rank must suffer from it
            raise BrokenFrame(f"a frame {frame.kind} can't be understood: {error!r}") from error
        return True

    def _take_output(self, future: MessageFuture, frame: Frame) -> None:
        output = self.output(future)
        kind = frame.fields["kind"]
        content = values.unpacked(frame.fields["shown"], frame.pieces)
        if kind == "stream":
            output.write("stderr" if content["name"] == "stderr" else "stdout", content["text"])
        elif kind == "clear_output":
            output.clear(bool(content["wait"]))
        elif kind == "execute_result":
            output.result(content)
        else:
            output.display(content, kind == "update_display_data")

    def _take_answer(
        self, rank: int, future: MessageFuture, request: Request, frame: Frame
    ) -> None:
        told = frame.fields
        future.output.metadata["data"] |= values.unpacked(told["data"], frame.pieces)
        error = told.get("error")
        if isinstance(request, Execute):
            kind, text, traceback = error or ("", "", "")
            shown = (str(kind), str(text), str(traceback)) if error else None
            answer: Any = reply_of(future, int(told.get("count", 0)), shown)
        elif error:
            answer = remote_error(rank, *map(str, error))
        else:
            answer = sorted_by_keys(values.unpacked(told["value"], frame.pieces))
        del self._open[future.msg_id]
        self._carrier.end_request(rank)
        self.answer(future, answer)


def _as_frame(request: Request) -> tuple[str, dict[str, Any], list[Piece]]:
    """Return kind, fields and pieces of the frame for a request."""
    if isinstance(request, Execute):
        return "execute", {"code": request.code, "silent": request.silent}, []
    if isinstance(request, Ask):
        return "ask", {"code": request.code}, []
    if isinstance(request, Push):
        return "push", {}, [request.pickled]
    if isinstance(request, Pull):
        return "pull", {"names": request.names}, []
    assert isinstance(request, Apply)
    from ipyparallel.serialize import can

    args = [can(value) for value in request.args]
    kwargs = {name: can(value) for name, value in request.kwargs.items()}
    return "apply", {}, [pickle.dumps((can(request.function), args, kwargs))]
