"""Frames between the kernel and a rank: JSON and raw bytes, each with its length.

A rank runs a student's code, so the kernel unpickles nothing that comes from it.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_mpi.protocol.interrupts import guard

#: Most bytes of a frame's JSON, most pieces of raw bytes, and most bytes of all pieces.
MOST_JSON = 64 * 1024**2
MOST_PIECES = 100_000
MOST_BYTES = 4 * 1024**3
#: A small frame is sent as one piece.
SMALL = 64 * 1024
#: Seconds that the other side gets to take a part of a frame.
PATIENCE = 60

_HEAD = struct.Struct("!II")  # bytes of JSON, pieces
_LENGTH = struct.Struct("!Q")  # bytes of a piece

Piece = bytes | bytearray | memoryview


class BrokenFrame(ValueError):
    """The other side has sent something that isn't a frame, or is too large."""


@dataclass
class Frame:
    """What one side has sent.

    Attributes:
        kind: what it is, such as "call".
        fields: the rest of its JSON.
        pieces: raw bytes.
    """

    kind: str
    fields: dict[str, Any]
    pieces: Sequence[Piece] = field(default_factory=list)


class Frames:
    """One end of the connection between the kernel and a rank. Threads may send at the same time.

    Args:
        end: the connected socket.
    """

    def __init__(self, end: socket.socket):
        self._end = end
        self._file: Any = end.makefile("rb", buffering=1 << 16)
        self._sending = threading.Lock()

    def limit_sends(self) -> None:
        """Let :meth:`send` fail if the other side takes nothing for :data:`PATIENCE` seconds."""
        if hasattr(socket, "SO_SNDTIMEO"):
            timeval = struct.pack("@ll", PATIENCE, 0)
            self._end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)

    def send(self, kind: str, fields: dict[str, Any], pieces: Sequence[Piece] = ()) -> None:
        """Send a frame.

        Raises:
            OSError: the other side is gone, or takes nothing.
            TypeError, ValueError: the fields are no JSON.
        """
        text = json.dumps([kind, fields]).encode()
        lengths = b"".join(_LENGTH.pack(len(piece)) for piece in pieces)
        head = _HEAD.pack(len(text), len(pieces)) + lengths + text
        if sum(map(len, pieces)) <= SMALL:
            head = b"".join([head, *pieces])
            pieces = ()
        with guard, self._sending:
            self._end.sendall(head)
            for piece in pieces:
                self._end.sendall(piece)

    def receive(self) -> Frame | None:
        """Wait for a frame and return it; ``None`` if the other side has closed its end.

        Raises:
            BrokenFrame: what came is no frame, or is above a limit.
            OSError: the connection was lost.
        """
        head = self._file.read(_HEAD.size)
        if not head:
            return None
        length, count = _HEAD.unpack(self._whole(head, _HEAD.size))
        if length > MOST_JSON or count > MOST_PIECES:
            raise BrokenFrame(f"a frame has {length} bytes of JSON and {count} pieces")
        sizes = [_LENGTH.unpack(self._read(_LENGTH.size))[0] for _ in range(count)]
        if sum(sizes) > MOST_BYTES:
            raise BrokenFrame(f"a frame has {sum(sizes)} bytes")
        kind, fields = self._parsed(self._read(length))
        return Frame(kind, fields, [self._read_piece(size) for size in sizes])

    def close(self) -> None:
        """Close this end."""
        with contextlib.suppress(OSError):  # the other side was first
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()

    def _parsed(self, text: bytes) -> tuple[str, dict[str, Any]]:
        try:
            kind, fields = json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise BrokenFrame(f"the JSON of a frame can't be read: {error}") from None
        if not isinstance(kind, str) or not isinstance(fields, dict):
            raise BrokenFrame("the JSON of a frame isn't a list of its kind and its fields")
        return kind, fields

    def _read(self, size: int) -> bytes:
        return self._whole(self._file.read(size), size)

    def _read_piece(self, size: int) -> bytearray:
        """Return bytes that a tensor may use as its memory."""
        piece = bytearray(size)
        rest = memoryview(piece)
        while rest:
            count = self._file.readinto(rest)
            if not count:
                raise BrokenFrame("the connection ended within a frame")
            rest = rest[count:]
        return piece

    @staticmethod
    def _whole(read: bytes, size: int) -> bytes:
        if len(read) != size:
            raise BrokenFrame("the connection ended within a frame")
        return read
