"""The words of errors, which say the same of ranks of MPI and of ranks that are threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..record import Call
from . import diagnosis
from .status import Side, Status

_ORDER = "All ranks of a group have to make the same collective calls in the same order."
_THREADS = (
    "Two threads make their calls in no fixed order, so give each thread its own group with "
    "dist.new_group()."
)


def of_collectives(sides: Mapping[int, Side | None]) -> str:
    """Return the text for collectives that do not match, from the call of each rank."""
    text = f"{', but '.join(_side(rank, sides[rank]) for rank in sorted(sides))}. {_ORDER}"
    if any(side and side["thread"] for side in sides.values()):
        text += f" {_THREADS}"
    return text


def _side(rank: int, side: Side | None) -> str:
    if not side:
        return f"rank {rank} makes another call"
    where = f" at {side['where']}" if side["where"] else ""
    thread = f" on its thread {side['thread']}" if side["thread"] else ""
    return f"rank {rank} calls {side['what']}{where}{thread}"


def of_message(
    sender: int, dtype: str, shape: Sequence[int], nbytes: int, receiver: int, call: Call
) -> str:
    """Return the text for a message of another dtype or size than its receiver expects.

    Args:
        sender, receiver: global ranks.
        dtype, shape, nbytes: what was sent.
        call: the receive.
    """
    where = f" at {call.where}" if call.where else ""
    return (
        f"rank {sender} sent {dtype}{list(shape)} ({nbytes} bytes, tag={call.tag}), but rank "
        f"{receiver} receives {call.dtype}{list(call.shape)} ({call.nbytes} bytes){where}. Sender "
        f"and receiver must agree on dtype and number of elements."
    )


def of_part(call: Call, source: int, sent: int, rank: int, expected: int) -> str:
    """Return the text for a part of a collective that has another size than its place.

    Args:
        source, rank: global ranks of the two sides.
        sent, expected: bytes.
    """
    return (
        f"{call.describe()}: rank {source} sent {sent} bytes, rank {rank} expects {expected}. "
        f"Compare what rank {source} sends to rank {rank} with what rank {rank} receives from rank "
        f"{source}: shapes or split sizes must fit."
    )


def partner(call: Call, missing: list[int], any_of_them: bool) -> str:
    """Return for whom or what a communication waits."""
    if call.op in ("send", "recv"):
        verb = "receive" if call.op == "send" else "send"
        peer = "any rank" if any_of_them else f"rank {call.partner}"
        return f"the matching {verb} of {peer}"
    return diagnosis.names(missing) if missing else "its end"


def of_wait(rank: int, call: Call, where: str, missing: str) -> str:
    """Return the text for a rank that waits for what does not come, as `missing` says."""
    return f"rank {rank} waits in {call.describe()} at {where}, and {missing}"


def is_late(call: Call, missing: list[int], any_of_them: bool, timeout: float) -> str:
    """Return that what a communication waits for has not come within so many seconds."""
    who = partner(call, missing, any_of_them)
    return f"{who} did not come within the timeout of {timeout:g} s."


def never_comes(call: Call, missing: list[int], any_of_them: bool) -> str:
    """Return that what a communication waits for certainly never comes."""
    several = call.op not in ("send", "recv") and len(missing) > 1
    return partner(call, missing, any_of_them) + (" never come." if several else " never comes.")


def of_stop(
    rank: int, name: str, where: str, waited: bool, cause: Status | None, advice: str = ""
) -> str:
    """Return the text for a rank that stops because of another rank.

    Args:
        rank: the rank that stops.
        name: its communication, in words.
        where: the line of it.
        waited: whether the rank had begun the communication.
        cause: the status of the rank that failed first, if it is known.
        advice: what to do if that rank has died.
    """
    doing = f"stopped waiting in {name}" if waited else f"did not begin {name}"
    return f"rank {rank} {doing} at {where}, because {reason(cause, advice)}"


def reason(cause: Status | None, advice: str = "") -> str:
    """Return why ranks stop: what failed first, by the status of its rank, if it is known."""
    if cause is None:
        return "another rank had stopped."
    if cause["kind"] in ("raised", "interrupted"):
        return f"{diagnosis.line(cause)}."
    if cause["kind"] == "died":
        return f"{diagnosis.line(cause)}. {advice}"
    # A mismatch has no text yet while its rank still waits for the other side's description.
    return cause["error"] or f"rank {cause['rank']} found that the calls of the ranks differ."
