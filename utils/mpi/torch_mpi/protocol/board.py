"""The board: small notes of every rank that all ranks can read at once, see PROTOCOL.md.

Each rank writes only its own notes, so no lock is needed.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import struct
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable

from ..mpi import MPI
from .interrupts import guard

# The room for a rank's text in bytes, with its length and checksum: its wait and some hundred
# calls. The system provides a page of memory only when a rank first writes to it.
TEXT = 65_536
_HEAD = struct.Struct("<II")
_WORD = struct.Struct("<QQ")
_WORD_TAG = 1
_TEXT_TAG = 2
_END_TAG = 3


class Board:
    """A table of words (64 bits each, zero at first) and one text per rank.

    Attributes:
        words: all words, only for reading. A rank's word is at ``index * size + rank``, so the
            words of all ranks for one index are side by side.
        rows: the same words: a view for each index. A rank may write its own word there if the
            board is ``immediate``.
        immediate: whether all ranks see at once what a rank writes.
    """

    immediate = True

    def __init__(self, communicator: MPI.Intracomm, words: int, text: bool = False):
        self._communicator = communicator
        self.rank, self.size = communicator.rank, communicator.size
        self._text_offset = 8 * words * self.size
        self._length = self._text_offset + (TEXT * self.size if text else 0)
        self._memory = self._map()
        view = memoryview(self._memory)
        self.words: memoryview[int] = view[: self._text_offset].cast("Q")
        starts = range(0, len(self.words), self.size)
        self.rows = [self.words[start : start + self.size] for start in starts]

    def _map(self) -> bytearray | mmap.mmap:
        return bytearray(self._length)

    def place(self, index: int) -> int:
        """Return the position of this rank's word for an index."""
        return index * self.size + self.rank

    def set(self, index: int, value: int) -> None:
        """Write this rank's word; the store is aligned, so readers see the old or the new value."""
        self.rows[index][self.rank] = value

    def of_all(self, index: int) -> list[int]:
        """Return the words of all ranks for an index."""
        return self.rows[index].tolist()

    def of(self, index: int, rank: int) -> int:
        """Return a rank's word for an index."""
        return self.words[index * self.size + rank]

    def refresh(self) -> None:
        """Receive what the others have written, unless all ranks see it at once."""

    def write(self, text: str) -> None:
        """Replace this rank's text; a text that is too long is cut at its end."""
        self._store(self.rank, _packed(text))

    def read(self, rank: int) -> str:
        """Return a rank's text; empty if the rank has written none, or is just writing."""
        start = self._text_offset + rank * TEXT
        length, checksum = _HEAD.unpack_from(self._memory, start)
        start += _HEAD.size
        content = bytes(self._memory[start : start + min(length, TEXT - _HEAD.size)])
        return content.decode() if zlib.crc32(content) == checksum else ""

    def _store(self, rank: int, packed: bytes | bytearray) -> None:
        start = self._text_offset + rank * TEXT
        self._memory[start : start + len(packed)] = packed

    def fence(self) -> None:
        """Have all ranks see what this process has written, and this process what they wrote.

        PROTOCOL.md says why a fence on one side is enough (membarrier(2)).
        """
        if not (_fences and _membarrier(_GLOBAL_EXPEDITED)):
            time.sleep(_STORE_PAUSE)

    def close(self) -> None:
        """Release the memory."""
        for view in (*self.rows, self.words):
            view.release()


class SharedBoard(Board):
    """A board for ranks on one machine, in memory that all of them map."""

    def __init__(self, communicator: MPI.Intracomm, file: int, words: int, text: bool):
        self._file = file
        super().__init__(communicator, words, text)

    def _map(self) -> bytearray | mmap.mmap:
        if self.rank == 0:
            os.ftruncate(self._file, max(self._length, 1))
        self._communicator.Barrier()
        memory = mmap.mmap(self._file, self._length)
        os.close(self._file)
        return memory


class MessageBoard(Board):
    """A board for ranks on several machines, on which a rank sends what it writes to all others.

    The communicator belongs to the board, which frees it when all ranks have closed the board.
    """

    immediate = False

    def __init__(self, communicator: MPI.Intracomm, words: int, text: bool):
        super().__init__(communicator, words, text)
        self._lock = threading.Lock()
        self._under_way: list[tuple[MPI.Request, bytes]] = []
        self._open = set(range(self.size)) - {self.rank}

    def set(self, index: int, value: int) -> None:  # noqa: D102
        super().set(index, value)
        self._send(_WORD.pack(self.place(index), value), _WORD_TAG)

    def write(self, text: str) -> None:  # noqa: D102
        packed = _packed(text)
        self._store(self.rank, packed)
        self._send(packed, _TEXT_TAG)

    def _send(self, data: bytes, tag: int) -> None:
        with guard, self._lock:
            self._under_way = [pair for pair in self._under_way if not pair[0].Test()]
            self._under_way += [
                (self._communicator.Isend(data, peer, tag), data)
                for peer in range(self.size)
                if peer != self.rank
            ]

    def refresh(self) -> None:  # noqa: D102
        with guard:
            if not self._lock.acquire(blocking=False):
                return  # another thread does it
            try:
                self._take_in()
            finally:
                self._lock.release()

    def _take_in(self) -> None:
        status = MPI.Status()
        while (message := self._communicator.Improbe(status=status)) is not None:
            data = bytearray(status.Get_count(MPI.BYTE))
            message.Recv(data)
            if status.tag == _END_TAG:
                self._open.discard(status.source)
            elif status.tag == _WORD_TAG:
                place, value = _WORD.unpack(data)
                self.words[place] = value
            else:
                self._store(status.source, data)

    def close(self) -> None:
        """Announce that this rank writes nothing more; see :func:`free_closed`."""
        self._send(b"", _END_TAG)
        _closed.append(self)

    def free(self) -> bool:
        """Free the communicator if all ranks have closed the board; return whether it is free."""
        with self._lock:
            self._take_in()
            self._under_way = [pair for pair in self._under_way if not pair[0].Test()]
        if self._open or self._under_way:
            return False
        super().close()
        self._communicator.Free()
        return True


# Boards of messages that this rank has closed, but that other ranks may still use.
_closed: list[MessageBoard] = []


def free_closed() -> None:
    """Free the communicators of the boards that all their ranks have closed."""
    _closed[:] = [board for board in _closed if not board.free()]


def make(
    communicator: MPI.Intracomm,
    another: Callable[[], MPI.Intracomm],
    one_machine: bool,
    words: int,
    text: bool = False,
) -> Board:
    """Make a board for the ranks of a communicator, all of which call this.

    Args:
        another: makes another communicator of the same ranks, if the board needs its own.
        one_machine: whether all ranks share memory; ``MPI_BACKEND_BOARD=messages`` overrides it.
    """
    free_closed()
    if one_machine and os.environ.get("MPI_BACKEND_BOARD") != "messages":
        file = _common_file(communicator)
        if file is not None:
            return SharedBoard(communicator, file, words, text)
    return MessageBoard(another(), words, text)


def _common_file(communicator: MPI.Intracomm) -> int | None:
    """Return a file without a name that every rank has open, or ``None`` on all ranks."""
    room = bytearray(os.pathconf("/", "PC_PATH_MAX"))
    file = None
    if communicator.rank == 0:
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        with contextlib.suppress(OSError):
            file, name = tempfile.mkstemp(prefix="mpi-board-", dir=folder)
            room[: len(name)] = os.fsencode(name)
    # mpi4py's `allreduce` of objects would make another communicator in its first call.
    communicator.Bcast([room, MPI.BYTE])
    path = bytes(room).rstrip(b"\0")
    if path and file is None:
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDWR)
    everywhere = bytearray([file is not None])
    communicator.Allreduce(MPI.IN_PLACE, [everywhere, MPI.BYTE], MPI.BAND)
    if communicator.rank == 0 and path:
        os.unlink(path)
    if everywhere[0]:
        return file
    if file is not None:
        os.close(file)
    return None


def _packed(text: str) -> bytes:
    content = text.encode()[: TEXT - _HEAD.size]
    return _HEAD.pack(len(content), zlib.crc32(content)) + content


# -- fences, see Board.fence --------------------------------------------------------------------

_SYSTEM_CALLS = {"x86_64": 324, "aarch64": 283, "riscv64": 283, "ppc64le": 365, "s390x": 356}
_GLOBAL_EXPEDITED = 2
_REGISTER_GLOBAL_EXPEDITED = 4
# Without that system call a pause is enough: a processor delays a store by less than 1 µs.
_STORE_PAUSE = 1e-3  # seconds

_fences = False


def _membarrier(command: int) -> bool:
    number = _SYSTEM_CALLS.get(platform.machine())
    if number is None or not sys.platform.startswith("linux"):
        return False
    return bool(ctypes.CDLL(None, use_errno=True).syscall(number, command, 0) == 0)


def use_fences(base: MPI.Intracomm) -> None:
    """Use the system's fences if all ranks can take part in them; all ranks call this."""
    global _fences
    _fences = base.allreduce(_membarrier(_REGISTER_GLOBAL_EXPEDITED), MPI.LAND)
