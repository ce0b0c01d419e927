"""Puts what :func:`.chunk_trace.watch` noted on each rank into the steps of an all-reduce."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

# How often each rank's number is in a sum; `None` if it isn't a sum of the ranks' numbers.
Counts = tuple[int, ...] | None


@dataclass(frozen=True)
class Cell:
    """The content of some elements on a rank.

    Attributes:
        counts: how often each rank's number is in the sum, or ``None`` if it isn't such a sum.
        moved: whether the numbers belong to other elements.
        buffer: whether the numbers are in a buffer of a rank that only reduces for others.
    """

    counts: Counts
    moved: bool = False
    buffer: bool = False

    @property
    def ranks(self) -> frozenset[int]:
        """Return the ranks whose numbers are in the sum."""
        return frozenset(r for r, count in enumerate(self.counts or ()) if count)


@dataclass(frozen=True)
class Move:
    """Elements that travel in one message.

    Attributes:
        source, to: group ranks.
        chunk: number of the chunk; ``None`` for numbers that don't come from the tensor.
        cell: the content of the message.
        effect: what happens to the receiver's tensor: "added", "copied", "kept" if it doesn't
            change, and "other" if it changes in a different way.
    """

    source: int
    to: int
    chunk: int | None
    cell: Cell
    effect: str = "kept"


# The content of each chunk on each rank, after one step.
State = tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class RingSteps:
    """An all-reduce, step by step.

    Attributes:
        members: global ranks in the order of the group.
        length: number of elements of the tensor.
        bounds: the first element of each chunk, and the length at the end.
        states: ``states[s][r][c]`` is chunk c of rank r after step s; step 0 is the start.
        moves: ``moves[s - 1]`` is what travels in step s.
        amounts: the number of messages in each step, and the number of elements in them.
        notes: sentences about what the picture doesn't show.
    """

    members: tuple[int, ...]
    length: int
    bounds: tuple[int, ...]
    states: tuple[State, ...]
    moves: tuple[tuple[Move, ...], ...]
    amounts: tuple[tuple[int, int], ...] = ()
    notes: tuple[str, ...] = ()


def steps(stories: Sequence[dict | None]) -> RingSteps:
    """Return the stories of all ranks of a group as one sequence of steps.

    A message belongs to the earliest step in which it can arrive: its sender has received what it
    waits for before, and its receiver has asked for the message. The order follows from the
    program and not from clocks, so it is the same in each run.

    Raises:
        ValueError: the stories don't come from one run.
    """
    by_rank = _sorted(stories)
    members = tuple(by_rank[0]["members"])
    length = by_rank[0]["length"]
    coder = _Coder(by_rank[0]["base"], len(members), length)
    messages, lost = _matched(by_rank, coder)
    step_of = _ordered(by_rank, messages)
    numbers = range(1, max(step_of.values(), default=0) + 1)
    rows = [
        [coder.cells(_snapshot(story, step_of, step)) for story in by_rank]
        for step in (0, *numbers)
    ]
    bounds = _bounds(length, itertools.chain(*rows), messages)
    in_step = [_arriving(messages, step_of, step) for step in numbers]
    moves = [list(_moves(row, bounds)) for row in in_step]
    states = _with_buffers(_servers(by_rank), [_state(row, bounds) for row in rows], moves)
    done = [_with_effects(states[step - 1], states[step], moves[step - 1]) for step in numbers]
    amounts = [(len(row), sum(len(message.values) for message in row)) for row in in_step]
    notes = (*lost, *_notes(by_rank))
    return RingSteps(members, length, bounds, tuple(states), tuple(done), tuple(amounts), notes)


def _sorted(stories: Sequence[dict | None]) -> list[dict]:
    by_rank = sorted((story for story in stories if story), key=lambda story: story["rank"])
    ranks = [story["rank"] for story in by_rank]
    if not by_rank or ranks != list(range(len(by_rank[0]["members"]))):
        raise ValueError(
            f"steps got the stories of ranks {ranks}: pass one story of each rank of the group, "
            "all from the same call of watch"
        )
    return by_rank


@dataclass(frozen=True)
class _Coder:
    """Reads which ranks and elements are in a number of :func:`.chunk_trace.watch`."""

    base: int
    size: int
    length: int

    def read(self, value: float) -> tuple[Counts, int | None]:
        """Return counts by rank, and the element; ``None`` if the number doesn't show them."""
        if not 0 <= value < 2**24 or value != int(value):
            return None, None
        above, low = divmod(int(value), self.base**self.size)
        counts = tuple(low // self.base**r % self.base for r in range(self.size))
        total = sum(counts)
        if total == 0:
            return (None if above else counts), None
        square, rest = divmod(above, total)
        place = math.isqrt(square)
        if rest or place**2 != square or not 1 <= place <= self.length:
            return None, None
        return counts, place - 1

    def cells(self, values: Sequence[float]) -> list[Cell]:
        """Return the content of each element of a tensor."""
        read = [self.read(value) for value in values]
        return [Cell(counts, place not in (i, None)) for i, (counts, place) in enumerate(read)]

    def runs(self, values: list[float], places: list[int] | None) -> list[_Run]:
        """Return a message as runs of elements that are next to each other in the tensor."""
        runs: list[_Run] = []
        for k, value in enumerate(values):
            counts, place = self.read(value)
            if place is None and places is not None:
                place = places[k]
            stop = None if place is None else place + 1
            if runs and runs[-1].stop == place and runs[-1].cell.counts == counts:
                runs[-1].stop = stop
            else:
                runs.append(_Run(place, stop, Cell(counts)))
        return runs


@dataclass
class _Run:
    """Elements of a message with equal content; begin and stop are ``None`` outside the tensor."""

    begin: int | None
    stop: int | None
    cell: Cell


# One side of a message: a rank, and the number of the message on this rank.
Side = tuple[int, int]


class _Message(NamedTuple):
    """One message, as its sender and its receiver noted it."""

    sent: Side
    received: Side
    values: list[float]
    runs: list[_Run]


def _matched(stories: list[dict], coder: _Coder) -> tuple[list[_Message], list[str]]:
    """Return each message once, and notes about messages that nobody received."""
    waiting: dict[tuple, list[tuple]] = {}
    for side, record in _records(stories, "send"):
        waiting.setdefault(_key(record, side[0], record["peer"]), []).append((side, record))
    messages = []
    for side, record in _records(stories, "recv"):
        sent = waiting.get(_key(record, record["peer"], side[0]))
        if sent:
            source, other = sent.pop(0)
            places = record["places"] if other["places"] is None else other["places"]
            runs = coder.runs(other["values"], places)
            messages.append(_Message(source, side, other["values"], runs))
    notes = [
        f"rank {to} did not receive {len(left)} message{'s' * (len(left) > 1)} of rank {source}"
        for (_, source, to), left in sorted(waiting.items(), key=str)
        if left
    ]
    return messages, notes


def _key(record: dict, source: int, to: int) -> tuple:
    return (None if record["id"] is None else tuple(record["id"]), source, to)


def _records(stories: list[dict], op: str) -> Iterator[tuple[Side, dict]]:
    for story in stories:
        for number, record in enumerate(story["messages"]):
            if record["op"] == op:
                yield (story["rank"], number), record


def _ordered(stories: list[dict], messages: list[_Message]) -> dict[Side, int]:
    """Return the step of each side of a message."""
    step_of = {side: 1 for message in messages for side in (message.sent, message.received)}
    sender_of = {message.received: message.sent for message in messages}
    # There is a limit, because messages in a circle would wait for each other forever.
    for _ in range(2 * len(messages) + 3):
        before = dict(step_of)
        for story in stories:
            for number in range(len(story["messages"])):
                side = story["rank"], number
                if side in step_of:
                    sent = step_of[sender_of.get(side, side)]
                    step_of[side] = max(step_of[side], sent, _earliest(story, number, step_of))
        if step_of == before:
            break
    return step_of


def _earliest(story: dict, number: int, step_of: dict[Side, int]) -> int:
    """Return the earliest step of a message, given what its rank did before."""
    receives = [record["op"] == "recv" for record in story["messages"]]
    earliest = 1
    for done, begun, _ in story["ends"]:
        if done == number:
            break
        step = step_of.get((story["rank"], done), 0)
        was_over = begun <= number  # when this message started
        if was_over and (receives[done] or not receives[number]):
            earliest = max(earliest, step + 1)
        elif receives[done] and receives[number]:
            earliest = max(earliest, step)
    return earliest


def _snapshot(story: dict, step_of: dict[Side, int], step: int) -> list[float]:
    """Return a rank's tensor after a step, before the rank noticed a message of a later step."""
    if step == 0:
        return story["begin"]
    for number, _, before in story["ends"]:
        if step_of.get((story["rank"], number), 0) > step:
            return before
    return story["end"]


def _bounds(length: int, rows: Iterable[list[Cell]], messages: list[_Message]) -> tuple[int, ...]:
    """Return where chunks begin, and the length; elements of a chunk always travel together."""
    bounds = {0, length}
    for row in rows:
        bounds |= {i for i in range(1, length) if row[i] != row[i - 1]}
    for message in messages:
        bounds |= {end for run in message.runs for end in (run.begin, run.stop)}
    return tuple(sorted(bounds - {None}))


def _arriving(messages: list[_Message], step_of: dict[Side, int], step: int) -> list[_Message]:
    return [message for message in messages if step_of[message.received] == step]


def _state(row: list[list[Cell]], bounds: tuple[int, ...]) -> State:
    """Return the content of each chunk on each rank, from the elements."""
    return tuple(tuple(cells[begin] for begin in bounds[:-1]) for cells in row)


def _moves(messages: list[_Message], bounds: tuple[int, ...]) -> Iterator[Move]:
    """Yield what travels in a step, chunk by chunk."""
    for message in sorted(messages, key=lambda message: (message.sent[0], message.received[0])):
        for run in message.runs:
            chunks: list[int | None] = [None]
            if run.begin is not None:
                chunks = [k for k, i in enumerate(bounds[:-1]) if run.begin <= i < run.stop]
            for chunk in chunks:
                yield Move(message.sent[0], message.received[0], chunk, run.cell)


def _servers(stories: list[dict]) -> set[int]:
    """Return the ranks that only reduce for others and never use their own tensor."""
    return {
        story["rank"]
        for story in stories
        if story["messages"]
        and not any(record["places"] for record in story["messages"])
        and story["begin"] == story["end"]
    }


def _with_buffers(servers: set[int], states: list[State], moves: list[list[Move]]) -> list[State]:
    """Return the states, with the buffers of servers instead of their tensors."""
    for rank in servers:
        buffers = []
        for chunk in range(len(states[0][rank])):
            of_chunk = [[move for move in row if move.chunk == chunk] for row in moves]
            buffers.append(_held(of_chunk, rank, len(states[0])))
        rows = zip(*buffers, strict=True)
        states = [
            (*state[:rank], row, *state[rank + 1 :])
            for state, row in zip(states, rows, strict=True)
        ]
    return states


def _held(moves: list[list[Move]], rank: int, size: int) -> list[Cell]:
    """Return the content of a rank's buffer at the start and after each step, from its moves.

    We know the content when the rank sends it. Before that, the buffer holds the sum of what
    arrived, provided that the rank then sends this sum.
    """
    held: list[Counts] = [(0,) * size]
    known = 0  # the last step in which a message showed the content of the buffer
    for step, row in enumerate(moves, start=1):
        sent = [move.cell.counts for move in row if move.source == rank]
        came = [move.cell.counts for move in row if move.to == rank]
        now = held[-1]
        if sent:
            if now != sent[0]:
                held[known + 1 :] = [None] * (step - 1 - known)
            now = sent[-1]
            known = step
        held.append(_sum([now, *came]))
    return [Cell(counts, buffer=True) for counts in held]


def _sum(parts: list[Counts]) -> Counts:
    """Return the sum of these sums, or ``None`` if not all of them are sums."""
    if None in parts:
        return None
    return tuple(map(sum, zip(*parts, strict=True)))


def _with_effects(before: State, after: State, moves: list[Move]) -> tuple[Move, ...]:
    """Return the moves of a step with their effects on the receiver's tensor."""
    arrived: dict[tuple[int, int | None], list[Counts]] = {}
    for move in moves:
        arrived.setdefault((move.to, move.chunk), []).append(move.cell.counts)

    def effect(move: Move) -> str:
        if move.chunk is None:
            return "kept"
        old = before[move.to][move.chunk]
        new = after[move.to][move.chunk]
        if old == new and new.counts is not None:
            return "kept"
        if new.counts is None or new.moved:
            return "other"
        if new.counts == _sum([old.counts, *arrived[move.to, move.chunk]]):
            return "added"
        return "copied" if new.counts == move.cell.counts else "other"

    return tuple(replace(move, effect=effect(move)) for move in moves)


def _notes(stories: list[dict]) -> list[str]:
    """Return sentences about what the picture doesn't show."""
    notes = []
    for story in stories:
        rank = f"rank {story['rank']}"
        forgotten = sum(not record["over"] for record in story["messages"])
        if forgotten:
            notes.append(f"{rank} did not wait for {forgotten} of its messages")
        if story["unseen"]:
            notes.append(f"{rank} had {story['unseen']} messages that watch could not follow")
        if story["returned"] is not None:
            notes.append(f"{rank} returned a new tensor, but the picture shows the tensor it got")
    others = sorted({name for story in stories for name in story["others"]})
    if others:
        notes.append(f"not drawn: {', '.join(others)}")
    return notes
