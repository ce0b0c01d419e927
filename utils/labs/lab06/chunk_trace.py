"""What an all-reduce by hand does, step by step: what travels, and over whom it is summed.

On the ranks, :func:`watch` calls a student's function on a tensor whose numbers tell where they
come from, and notes each message that it sends and receives. In the kernel, :func:`steps` puts the
notes of all ranks in order; :mod:`utils.labs.lab06.chunk_pictures` draws them::

    %%px
    from utils.labs.lab06.chunk_trace import watch
    story = watch(ring_all_reduce, length=14)

    chunks.still(ranks.view["story"])

Element i of rank r begins as ``base**r + (i + 1)**2 * base**p``. In a sum of such numbers, each of
the p lowest digits (to that base) counts how often a rank's number is in it, and what is above them
tells which element it was: also in a message, or in a buffer that nobody has told us of. Squares,
since the elements i − 1, i and i + 1 of three ranks must not look like three times i.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    import torch

# Whole numbers up to here are exact in float32; a number may be summed twice.
_EXACT = 2**24 // 2
_LARGEST_BASE = 16
_POINT_TO_POINT = ("send", "recv")


def watch(function: Callable, length: int = 12, group: Any = None) -> dict:
    """Call ``function(x, group=group)`` on a tensor of ``length`` numbers; return what it did.

    That is plain data. All ranks of the group have to do it. What the function raises is raised.

    Messages are noted that go through ``torch.distributed``: ``isend``, ``irecv``, ``send``,
    ``recv``, ``batch_isend_irecv``.

    Raises:
        ValueError: there are too many ranks or elements to tell them apart.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    from torch_mpi.errors import count_as_library
    from torch_mpi.record import recorder as log

    count_as_library(__file__)  # a deadlock is in the student's line, not in ours
    place, size = dist.get_rank(group), dist.get_world_size(group)
    members = dist.get_process_group_ranks(group or dist.group.WORLD)
    base = base_for(size, length)
    x = torch.tensor([float(first(base, size, place, i)) for i in range(length)])
    watcher = _Watcher(x, members)
    mark = log.mark()
    with contextlib.ExitStack() as stack:
        for name in ("isend", "irecv"):
            noting = watcher.noting(name, getattr(distributed_c10d, name))
            for module in (dist, distributed_c10d):
                stack.enter_context(mock.patch.object(module, name, noting))
        returned = function(x, group=group)
    calls = log.since(mark)
    others = [call.op for call in calls if call.op not in _POINT_TO_POINT]
    unseen = len(calls) - len(others) - len(watcher.requests)
    other = isinstance(returned, torch.Tensor) and returned.data_ptr() != x.data_ptr()
    return {
        "rank": place,
        "members": members,
        "length": length,
        "base": base,
        "messages": [request.plain(members) for request in watcher.requests],
        "ends": watcher.ends,
        "begin": [first(base, size, place, i) for i in range(length)],
        "end": watcher.now(),
        "returned": returned.detach().flatten().tolist() if other else None,
        "others": sorted(set(others)),
        "unseen": max(0, unseen),
    }


def first(base: int, size: int, rank: int, i: int) -> int:
    """What element i of a rank is at the beginning."""
    return base**rank + (i + 1) ** 2 * base**size


def base_for(size: int, length: int) -> int:
    """The largest base in which all sums are exact in float32."""
    if length >= 1:
        for base in range(_LARGEST_BASE, 2, -1):
            if (length**2 + 1) * size * base**size < _EXACT:
                return base
    raise ValueError(
        f"{length} elements on {size} ranks can't be told apart: take 1 to 16 elements and up to 6 "
        "ranks"
    )


class _Watcher:
    """Notes the messages of one rank, and what its tensor is each time a message is over."""

    def __init__(self, x: torch.Tensor, members: list[int]):
        self.x, self.members = x, members
        self.requests: list[_Request] = []
        #: In the order in which this rank has noticed: [number of the message, messages begun
        #: so far, x before that].
        self.ends: list[list] = []

    def noting(self, name: str, original: Callable) -> Callable:
        """``isend`` or ``irecv`` that notes what it does."""
        import torch_mpi.record as record

        def begin(tensor, *args, **kwargs):
            log = record.recorder
            mark = log.mark()
            places = self.places(tensor)
            values = tensor.detach().flatten().tolist() if name == "isend" else None
            old = None if places is None else self.x[places].clone()
            work = original(tensor, *args, **kwargs)
            if work is None:
                return None
            call = next((c for c in log.since(mark) if c.op in _POINT_TO_POINT), None)
            request = _Request(self, len(self.requests), work, tensor, call, places, values, old)
            self.requests.append(request)
            return request

        begin.__name__ = name
        return begin

    def places(self, tensor: torch.Tensor) -> list[int] | None:
        """Which elements of x these are; ``None`` for another buffer."""
        import torch

        if tensor.untyped_storage().data_ptr() != self.x.untyped_storage().data_ptr():
            return None
        numbers = torch.arange(len(self.x))
        return (
            torch.as_strided(numbers, tensor.shape, tensor.stride(), tensor.storage_offset())
            .flatten()
            .tolist()
        )

    def now(self) -> list[float]:
        """x, without what may have come already, but nobody has waited for."""
        x = self.x.detach().clone()
        for request in self.requests:
            if request.values is None and request.places is not None:
                x[request.places] = request.old
        return x.tolist()

    def end(self, request: _Request, before: list[float]) -> None:
        """A message is over, and its rank knows."""
        if not request.over:
            request.over = True
            self.ends.append([request.number, len(self.requests), before])
            if request.values is None:
                request.values = request.tensor.detach().flatten().tolist()


class _Request:
    """Stands in for the work of an ``isend`` or ``irecv``."""

    def __init__(self, watcher, number, work, tensor, call, places, values, old):
        self.watcher, self.number, self.work, self.tensor = watcher, number, work, tensor
        self.call, self.places, self.values, self.old = call, places, values, old
        self.sends, self.over = values is not None, False

    def wait(self, *args, **kwargs):
        before = self.watcher.now()
        result = self.work.wait(*args, **kwargs)
        self.watcher.end(self, before)
        return result

    def is_completed(self) -> bool:
        before = self.watcher.now()
        completed = self.work.is_completed()
        if completed:
            self.watcher.end(self, before)
        return completed

    def __getattr__(self, name: str):
        return getattr(self.work, name)

    def plain(self, members: list[int]) -> dict:
        """What is known of it, as plain data."""
        call = self.call
        partner = None if call is None else call.partner
        return {
            "op": "send" if self.sends else "recv",
            "peer": members.index(partner) if partner in members else None,
            "id": None if call is None or call.message is None else list(call.message),
            "values": self.values,
            "places": self.places,
            "over": self.over,
        }


# -- in the kernel: all ranks together ------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """What some elements of a rank are.

    Attributes:
        counts: by rank, how often its number is in the sum; ``None``: no sum of the ranks' numbers.
        moved: the numbers are those of other elements.
        buffer: it is not in the tensor, but in a buffer of a rank whose tensor takes no part.
    """

    counts: tuple[int, ...] | None
    moved: bool = False
    buffer: bool = False

    @property
    def ranks(self) -> frozenset[int]:
        """Whose numbers are in it."""
        return frozenset(r for r, count in enumerate(self.counts or ()) if count)


@dataclass(frozen=True)
class Move:
    """Elements that travel in one message.

    Attributes:
        source, to: places in the group.
        chunk: number of the chunk; ``None``: other numbers than those of the tensor.
        cell: what was sent.
        effect: at the receiver: "added", "copied", "kept" where its tensor stays as it is; "other"
            where that changes in another way.
    """

    source: int
    to: int
    chunk: int | None
    cell: Cell
    effect: str = "kept"


@dataclass(frozen=True)
class RingSteps:
    """An all-reduce, step by step.

    Attributes:
        members: global ranks in the order of the group.
        length: of the tensor.
        bounds: where the chunks begin, and the length at the end.
        states: ``states[s][r][c]``: chunk c of rank r after step s; 0 is the beginning.
        moves: ``moves[s - 1]``: what travels in step s.
        amounts: how many messages there are in each step, and elements in them.
        notes: what the picture does not show, in words.
    """

    members: tuple[int, ...]
    length: int
    bounds: tuple[int, ...]
    states: tuple[tuple[tuple[Cell, ...], ...], ...]
    moves: tuple[tuple[Move, ...], ...]
    amounts: tuple[tuple[int, int], ...] = ()
    notes: tuple[str, ...] = ()

    def ranks_in(self, step: int, rank: int) -> list[list[int]]:
        """Over whom each chunk of a rank is summed after a step."""
        return [sorted(cell.ranks) for cell in self.states[step][rank]]


@dataclass
class _Message:
    """One message, from both sides."""

    source: int
    to: int
    values: list[float] | None
    places: list[int] | None
    step: int = 0
    runs: list[tuple[int | None, Cell, int]] = field(default_factory=list)


def steps(stories: Sequence[dict | None]) -> RingSteps:
    """The stories of all ranks of a group, in one order.

    A message belongs to the first step in which it can be there: its sender has what it waits for
    beforehand, and its receiver has asked for it. Clocks play no part: the order is that of the
    program, the same in each run.

    Raises:
        ValueError: these are not the stories of one run.
    """
    told = [copy.deepcopy(story) for story in stories if story]
    told.sort(key=lambda story: story["rank"])
    if not told or [s["rank"] for s in told] != list(range(len(told[0]["members"]))):
        raise ValueError(
            "a story of each rank of the group is needed, of the same call of watch: got those of "
            f"ranks {[story['rank'] for story in told]}"
        )
    coder = _Coder(told[0]["base"], len(told), told[0]["length"])
    messages, notes = _matched(told)
    step_of = _ordered(told, messages)
    last = max(step_of.values(), default=0)
    numbers = [[_snapshot(story, step_of, s) for story in told] for s in range(last + 1)]
    cells = [[coder.cells(one) for one in row] for row in numbers]
    for message in messages:
        message.runs = coder.runs(message.values, message.places)
    bounds = _bounds(coder.length, cells, messages)
    states = tuple(
        tuple(tuple(one[begin] for begin in bounds[:-1]) for one in row) for row in cells
    )
    in_step = [[m for m in messages if m.step == s] for s in range(1, last + 1)]
    moves = [
        [
            move
            for message in sorted(row, key=lambda m: (m.source, m.to))
            for move in _moves(message, bounds)
        ]
        for row in in_step
    ]
    states = _with_buffers(told, states, moves)
    done = [_with_effects(states, s, row) for s, row in enumerate(moves, start=1)]
    return RingSteps(
        tuple(told[0]["members"]),
        coder.length,
        bounds,
        states,
        tuple(done),
        tuple((len(row), sum(len(m.values or ()) for m in row)) for row in in_step),
        tuple(notes + _notes(told)),
    )


class _Coder:
    """Reads the numbers of :func:`watch`."""

    def __init__(self, base: int, size: int, length: int):
        self.base, self.size, self.length = base, size, length

    def read(self, value: float) -> tuple[tuple[int, ...] | None, int | None]:
        """Counts by rank, and the element; ``None`` where the number tells neither."""
        if not 0 <= value < 2**24 or value != int(value):
            return None, None
        above, low = divmod(int(value), self.base**self.size)
        counts = tuple(low // self.base**r % self.base for r in range(self.size))
        total = sum(counts)
        if total == 0:
            return ((0,) * self.size if above == 0 else None), None
        square, rest = divmod(above, total)
        place = math.isqrt(square)
        if rest or place**2 != square or not 1 <= place <= self.length:
            return None, None
        return counts, place - 1

    def cells(self, values: Sequence[float]) -> list[Cell]:
        """What each element of a tensor is."""
        found = []
        for i, value in enumerate(values):
            counts, place = self.read(value)
            found.append(Cell(counts, moved=place not in (i, None)))
        return found

    def runs(self, values, places) -> list[tuple[int | None, Cell, int]]:
        """A message in parts: first element, what it is, how many follow each other."""
        runs: list[tuple[int | None, Cell, int]] = []
        for k, value in enumerate(values or ()):
            counts, place = self.read(value)
            if place is None and places is not None:
                place = places[k]
            cell = Cell(counts)
            if runs:
                begin, before, n = runs[-1]
                follows = place is None if begin is None else place == begin + n
                if follows and cell == before:
                    runs[-1] = (begin, before, n + 1)
                    continue
            runs.append((place, cell, 1))
        return runs


def _matched(told: list[dict]) -> tuple[list[_Message], list[str]]:
    """Each message once; both sides get its number under "message"."""
    waiting: dict[tuple, list[dict]] = {}
    messages, notes = [], []
    for story in told:
        for one in story["messages"]:
            one["message"] = None
            if one["op"] == "send":
                waiting.setdefault(_key(one, story["rank"], one["peer"]), []).append(one)
    for story in told:
        for one in story["messages"]:
            if one["op"] != "recv":
                continue
            sent = waiting.get(_key(one, one["peer"], story["rank"]), [])
            if sent and one["peer"] is not None:
                other = sent.pop(0)
                one["message"] = other["message"] = len(messages)
                places = other["places"] if other["places"] is not None else one["places"]
                messages.append(_Message(one["peer"], story["rank"], other["values"], places))
    for (_, source, to), left in sorted(waiting.items(), key=str):
        if left:
            notes.append(f"{len(left)} × rank {source} → rank {to}: sent, but not received")
    return messages, notes


def _key(one: dict, source: int | None, to: int | None) -> tuple:
    return (None if one["id"] is None else tuple(one["id"]), source, to)


def _ordered(told: list[dict], messages: list[_Message]) -> dict[tuple[int, int], int]:
    """The step of each send and each receive, by rank and number; sets those of the messages."""
    sent, got = [1] * len(messages), [1] * len(messages)
    of = {
        (story["rank"], k): one
        for story in told
        for k, one in enumerate(story["messages"])
        if one["message"] is not None
    }
    changed, rounds = True, 0
    while changed and rounds <= 2 * len(messages) + 2:
        changed, rounds = False, rounds + 1
        for story in told:
            for k, step in _lower_limits(story, of, sent, got):
                one = of[story["rank"], k]
                steps_of = sent if one["op"] == "send" else got
                m = one["message"]
                if one["op"] == "recv":
                    step = max(step, sent[m])
                if step > steps_of[m]:
                    steps_of[m], changed = step, True
    for m, message in enumerate(messages):
        message.step = got[m]
    return {key: (sent if one["op"] == "send" else got)[one["message"]] for key, one in of.items()}


def _lower_limits(story, of, sent, got) -> Iterator[tuple[int, int]]:
    """Each message of a rank, and the first step that what the rank did before leaves it."""
    rank = story["rank"]
    ends = [(k, begun) for k, begun, _ in story["ends"] if (rank, k) in of]
    for k, one in enumerate(story["messages"]):
        if (rank, k) not in of:
            continue
        step = 1
        for done, begun in ends:
            other = of[rank, done]
            before = begun <= k  # it was over when this one began
            if done == k:
                break
            if other["op"] == "recv":
                if before:
                    step = max(step, got[other["message"]] + 1)
                elif one["op"] == "recv":
                    step = max(step, got[other["message"]])
            elif before and one["op"] == "send":
                step = max(step, sent[other["message"]] + 1)
        yield k, step


def _snapshot(story: dict, step_of: dict, step: int) -> list[float]:
    """A rank's tensor after a step: as it was before it noticed anything of a later one."""
    if step == 0:
        return story["begin"]
    for k, _, before in story["ends"]:
        if step_of.get((story["rank"], k), 0) > step:
            return before
    return story["end"]


def _bounds(length: int, cells, messages: list[_Message]) -> tuple[int, ...]:
    """Chunks: elements that always have the same fate."""
    bounds = {0, length}
    for row in cells:
        for one in row:
            bounds |= {i for i in range(1, length) if one[i] != one[i - 1]}
    for message in messages:
        for begin, _, n in message.runs:
            if begin is not None:
                bounds |= {begin, begin + n}
    return tuple(sorted(bounds))


def _moves(message: _Message, bounds: tuple[int, ...]) -> Iterator[Move]:
    for begin, cell, n in message.runs:
        if begin is None:
            yield Move(message.source, message.to, None, cell)
            continue
        for chunk, place in enumerate(bounds[:-1]):
            if begin <= place < begin + n:
                yield Move(message.source, message.to, chunk, cell)


def _with_buffers(told: list[dict], states, moves: list[list[Move]]):
    """The states; of ranks that only reduce for others, what they have in their buffers.

    Such a rank's tensor takes no part. What it has is known when it sends it. Before that it has
    the sum of what came, if that is what it then sends.
    """
    servers = {
        story["rank"]
        for story in told
        if story["messages"]
        and not any(one["places"] for one in story["messages"])
        and story["begin"] == story["end"]
    }
    if not servers:
        return states
    held = {
        (r, c): _held(moves, r, c, len(told)) for r in servers for c in range(len(states[0][0]))
    }
    return tuple(
        tuple(
            tuple(held[r, c][s] if r in servers else cell for c, cell in enumerate(row))
            for r, row in enumerate(rows)
        )
        for s, rows in enumerate(states)
    )


def _held(moves: list[list[Move]], rank: int, chunk: int, size: int) -> list[Cell]:
    """What a rank's buffer for a chunk is, at the beginning and after each step."""
    found: list[tuple[int, ...] | None] = [(0,) * size]
    begun = 1  # the first step that no message sent has confirmed yet
    for step, row in enumerate(moves, start=1):
        here = [move for move in row if move.chunk == chunk]
        for move in here:
            if move.source == rank:
                if begun < step and found[-1] != move.cell.counts:
                    found[begun:step] = [None] * (step - begun)
                found[step:] = [move.cell.counts]
                begun = step + 1
        if len(found) == step:
            found.append(found[-1])
        came = [move.cell.counts for move in here if move.to == rank]
        parts = [found[step], *came]
        if came:
            known = None not in parts
            found[step] = tuple(map(sum, zip(*parts, strict=True))) if known else None
    return [Cell(counts, buffer=True) for counts in found]


def _with_effects(states, step: int, moves: list[Move]) -> tuple[Move, ...]:
    """The moves of a step with what they did to the receiver's tensor."""
    arrived: dict[tuple[int, int], list[Cell]] = {}
    for move in moves:
        if move.chunk is not None:
            arrived.setdefault((move.to, move.chunk), []).append(move.cell)
    found = []
    for move in moves:
        effect = "kept"
        if move.chunk is not None:
            before, after = (states[s][move.to][move.chunk] for s in (step - 1, step))
            came = arrived[move.to, move.chunk]
            if after.counts is None or before != after:
                effect = _effect(before, after, move.cell, came)
        found.append(Move(move.source, move.to, move.chunk, move.cell, effect))
    return tuple(found)


def _effect(before: Cell, after: Cell, sent: Cell, came: Sequence[Cell]) -> str:
    parts = [cell.counts for cell in (before, *came)]
    if after.counts is None or after.moved:
        return "other"
    if None not in parts and after.counts == tuple(map(sum, zip(*parts, strict=True))):
        return "added"
    return "copied" if after.counts == sent.counts else "other"


def _notes(told: list[dict]) -> list[str]:
    notes = []
    for story in told:
        forgotten = sum(not one["over"] for one in story["messages"])
        if forgotten:
            notes.append(f"rank {story['rank']} did not wait for {forgotten} of its messages")
        if story["unseen"]:
            notes.append(
                f"rank {story['rank']} had {story['unseen']} messages that could not be followed"
            )
        if story["returned"] is not None:
            notes.append(
                f"rank {story['rank']} returned another tensor; the picture shows the one it got"
            )
    others = sorted({name for story in told for name in story["others"]})
    if others:
        notes.append(f"not drawn: {', '.join(others)}")
    return notes
