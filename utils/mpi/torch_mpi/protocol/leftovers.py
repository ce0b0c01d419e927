"""What a program leaves behind at its end: messages nobody received, calls nobody waited for.

Both are errors that run through by luck (MPI 4.1, sections 3.7.3 and 11.2.2: every request has to
be completed, every message received). The lowest rank that has seen something tells of all ranks,
on stderr; the exit status stays. A rank that has nothing to tell waits for nobody.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..errors import is_packaged
from ..record import Call, recorder
from . import diagnosis

if TYPE_CHECKING:
    from .status import Leftovers
    from .world import World

# How long the teller waits for the others to end: as long as they may be late without a failure.
PATIENCE = 3.0  # seconds
# Kinds of leftovers that are told; of how many messages a rank says where they went.
_MOST, _MESSAGES = 6, 300


def of_rank(calls: Sequence[Call], balance: int) -> Leftovers:
    """What this rank has to tell at its end, for its status.

    Args:
        calls: all of the program's, as far as they are known.
        balance: how many more messages it has sent than received.
    """
    told: Leftovers = {}
    if unwaited := Counter(_never_waited(call) for call in calls if _is_never_waited(call)):
        told["unwaited"] = unwaited.most_common(_MOST)
    messages = [(call, call.message) for call in calls if call.message is not None]
    if len(messages) > _MESSAGES:
        told["many"] = True
    else:
        if sent := [
            (*_key(call, message), call.partner, call.describe(), call.where)
            for call, message in messages
            if call.op == "send" and call.partner is not None
        ]:
            told["sent"] = sent
        if received := [_key(call, message) for call, message in messages if call.op == "recv"]:
            told["received"] = received
    # Messages alone are nothing: somebody else's balance tells whether one is left.
    told["teller"], told["balance"] = bool(unwaited) or balance > 0, balance
    return told


def _key(call: Call, message: tuple[int, int]) -> tuple[str, int, int]:
    sender, number = message
    return ".".join(map(str, call.group)), sender, number


def _is_never_waited(call: Call) -> bool:
    mine = call.place is not None and not is_packaged(call.place[0])
    return mine and not call.blocking and not call.waited


def _never_waited(call: Call) -> str:
    verb = {"send": "isend", "recv": "irecv"}.get(call.op)
    name = call.name().replace(call.op, verb, 1) if verb else call.name()
    return f"{name} at {call.where}"


def in_words(by_rank: Mapping[int, Leftovers]) -> list[str]:
    """A line for each kind of leftover, from what :func:`of_rank` gave on each rank."""
    lines = []
    unwaited: dict[tuple[str, int], list[int]] = defaultdict(list)
    for rank, told in by_rank.items():
        for text, times in told.get("unwaited", ()):
            unwaited[text, times].append(rank)
    for (text, times), ranks in unwaited.items():
        often = f", {times} times" if times > 1 else ""
        lines.append(
            f"{diagnosis.names(ranks)}: nobody waited for {text}{often}. Keep what it returns, and "
            "call wait() on it before its tensor is used again."
        )
    left = sum(told.get("balance", 0) for told in by_rank.values())
    if left > 0 and any(told.get("many") for told in by_rank.values()):
        lines.append(f"{left} of very many messages: nobody received them.")
    elif left > 0:
        lines += _unreceived(by_rank)
    return lines[:_MOST]


def _unreceived(by_rank: Mapping[int, Leftovers]) -> list[str]:
    received = Counter(tuple(key) for told in by_rank.values() for key in told.get("received", ()))
    found: Counter[tuple[int, int, str, str]] = Counter()
    for rank, told in by_rank.items():
        for *key, to, what, where in told.get("sent", ()):
            if received[tuple(key)]:
                received[tuple(key)] -= 1
            else:
                found[rank, to, what, where] += 1
    return [
        f"rank {rank}: nobody received its {what} at {where}{f', {n} times' if n > 1 else ''}. "
        f"Rank {to} ended without a fitting receive."
        for (rank, to, what, where), n in found.items()
    ]


def tell(world: World) -> None:
    """At the end of a rank's program: note what it leaves, and tell of all ranks if it is to."""
    mine = of_rank(recorder.since(0), world.balance() + world.groups.balance_of_closed)
    world.ended(leaves=mine)
    if not mine["teller"]:
        return
    deadline = time.monotonic() + PATIENCE
    statuses = world.statuses()
    while any(status["state"] != "ended" for status in statuses):
        if time.monotonic() > deadline or world.incident():
            return  # not a program that ends well: what went wrong is told elsewhere
        time.sleep(2e-3)
        statuses = world.statuses()
    by_rank = {status["rank"]: status.get("leaves", {}) for status in statuses}
    if world.rank == min(rank for rank, told in by_rank.items() if told.get("teller")):
        for line in in_words(by_rank):
            print(f"Left behind: {line}", file=sys.stderr, flush=True)
