"""Explain an incident from the ranks' statuses (``status.Status``); no torch or MPI is needed."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .. import settings

if TYPE_CHECKING:
    from .status import Status

# Kinds of errors that begin on the rank itself, so that it may be the first cause.
CAUSES = ("raised", "died", "mismatch", "deadlock", "timeout", "interrupted")
GONE = ("left", "ended", "dead")
#: The advice begins with these words.
ADVICE = "What to try"
# Verbs of ranks that another rank's failure stopped: for one rank, and for several in one line.
_OF_STOPPED = {"was stopped": "were stopped", "waits in": "wait in"}


@dataclass
class Diagnosis:
    """An explanation of an incident for a person.

    Attributes:
        headline: one sentence.
        lines: one for each rank, in rank order. Ranks that another rank's failure stopped in the
            same call share a line.
        cycle: ranks that wait for each other; the first one is repeated at the end.
        advice: what to try; may be empty.
        edges: pairs ``(rank, the rank it waits for)``.
    """

    headline: str
    lines: list[str]
    cycle: list[int] = field(default_factory=list)
    advice: str = ""
    edges: list[tuple[int, int]] = field(default_factory=list)

    def __str__(self) -> str:
        parts = [self.headline, *(f"  {line}" for line in self.lines)]
        if self.cycle:
            parts.append(f"  cycle {arrows(self.cycle)}")
        if self.advice:
            parts.append(f"  {ADVICE}: {self.advice}")
        return "\n".join(parts)


def diagnose(statuses: Iterable[Status]) -> Diagnosis:
    """Explain an incident, from the statuses of all ranks."""
    by_rank = {s["rank"]: s for s in sorted(statuses, key=lambda status: status["rank"])}
    cause = first_cause(by_rank.values())
    stuck = not cause or cause["kind"] in ("deadlock", "timeout")
    # A rank that waits for itself is a cycle, too, but the headline explains it better.
    cycle = find_cycle(by_rank) if stuck and not waits_for_itself(by_rank) else []
    waits = [status for status in by_rank.values() if _is_wait(status)]
    edges = [(s["rank"], other) for s in waits for other in s["for"] if other in by_rank]
    lines = [line(s) for s in by_rank.values()] if stuck else _lines_of_stopped(by_rank)
    advice = _advice(by_rank, cycle, cause)
    return Diagnosis(_headline(cause, cycle, by_rank), lines, cycle, advice, edges)


def first_cause(statuses: Iterable[Status]) -> Status | None:
    """Return the status of the rank that failed first, and not because of another rank."""
    failed = [s for s in statuses if s.get("kind") in CAUSES]
    # If a rank failed, it is the cause, and not a rank that the user interrupted.
    failed = [s for s in failed if s["kind"] != "interrupted"] or failed
    return min(failed, key=lambda s: s["at"], default=None)


def stuck_ranks(by_rank: dict[int, Status]) -> set[int]:
    """Return the ranks that can never go on, because they wait for ranks that are gone or stuck.

    PROTOCOL.md defines the set. See Knapp, "Deadlock detection in distributed databases" (1987),
    section 2, for the AND and the OR model.
    """
    gone = {rank for rank, status in by_rank.items() if status["state"] in GONE}
    stuck = {rank for rank, status in by_rank.items() if _may_be_stuck(status)}
    while True:
        hopeless = stuck | gone
        freed = set()
        for rank in stuck:
            needed = [other in hopeless for other in by_rank[rank]["for"]]
            if not (all(needed) if by_rank[rank]["any"] else any(needed)):
                freed.add(rank)
        if not freed:
            return stuck
        stuck -= freed


def find_cycle(by_rank: dict[int, Status]) -> list[int]:
    """Return a cycle of waits, with its first rank again at the end; empty if there is none."""
    for start in sorted(by_rank):
        path: list[int] = []
        rank = start
        while rank in by_rank and rank not in path and _needs_all(by_rank[rank]):
            path.append(rank)
            ahead = [r for r in by_rank[rank]["for"] if _needs_all(by_rank.get(r, {}))]
            if not ahead:
                break
            rank = start if start in ahead else ahead[0]
        else:
            if rank in path:
                return [*path[path.index(rank) :], rank]
    return []


def waits_for_itself(by_rank: dict[int, Status]) -> list[Status]:
    """Return the statuses of the ranks that send to themselves or receive from themselves."""
    waits = (status for status in by_rank.values() if _needs_all(status))
    return [status for status in waits if status["rank"] in status["for"]]


def _lines_of_stopped(by_rank: dict[int, Status]) -> list[str]:
    """Return a line for each rank; ranks that were stopped in the same call share one."""
    lines: dict[str, list[int]] = {}
    for rank, status in by_rank.items():
        text = line(status)
        what = text.removeprefix(f"rank {rank} ")
        lines.setdefault(what if what.startswith(tuple(_OF_STOPPED)) else text, []).append(rank)
    return [_said_of(ranks, text) for text, ranks in lines.items()]


def _said_of(ranks: list[int], text: str) -> str:
    """Return a line about these ranks; ``text`` is the line, or its part after the rank."""
    for one, several in _OF_STOPPED.items():
        if text.startswith(one):
            verb = one if len(ranks) == 1 else several
            return f"{names(ranks)} {verb}{text.removeprefix(one)}"
    return text


def line(status: Status) -> str:
    """Return a sentence about one rank."""
    rank = f"rank {status['rank']}"
    where = _at(status)
    if status.get("kind") == "raised":
        return f"{rank} raised {status['error']}{where}"
    if status.get("kind") == "died":
        return f"{rank} died: {status['error']}"
    if status.get("kind") == "interrupted":
        return f"{rank} was interrupted{_in_call(status)}{where}"
    if _is_wait(status):
        return f"{rank} waits in {status['call']}{where}"
    if status["state"] == "left":
        return f"{rank} has left the {settings.section}"
    if status["state"] == "dead":
        return f"{rank} is dead"
    # After an error the program ends, too, but the call that was stopped says more.
    if status["state"] == "stopped" or status.get("kind"):
        return f"{rank} was stopped{_in_call(status)}{where}"
    if status["state"] == "ended":
        return f"{rank} has ended"
    return f"{rank} still computes{where}"


def _in_call(status: Status) -> str:
    return f" in {status['call']}" if status.get("call") else ""


def arrows(ranks: Iterable[int]) -> str:
    """Return a chain of ranks such as ``0 → 1 → 0``."""
    return " → ".join(map(str, ranks))


def names(ranks: Iterable[int]) -> str:
    """Return ``rank 1`` for one rank, and ``ranks 1, 2`` for several."""
    ranks = sorted(ranks)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks))}"


def _is_wait(status: Status) -> bool:
    """Return whether the rank waits for ranks, or waited for ranks when it was stopped."""
    return bool(status.get("for")) and status.get("kind") not in ("raised", "mismatch", "died")


def _needs_all(status: Status) -> bool:
    """Return whether the rank needs certain ranks; one that takes any message is in no cycle."""
    return _is_wait(status) and not _takes_any(status)


def _takes_any(status: Status) -> bool:
    return _is_wait(status) and bool(status.get("any")) and len(status["for"]) > 1


def _may_be_stuck(status: Status) -> bool:
    return status["state"] == "waiting" and status["alone"] and not status["moving"]


def _at(status: Status) -> str:
    return f" at {status['where']}" if status.get("where") else ""


def _headline(cause: Status | None, cycle: list[int], by_rank: dict[int, Status]) -> str:
    if cause is None:
        return "The ranks were stopped."
    if cause["kind"] == "raised":
        return f"{line(cause)}; the others stopped waiting."
    if cause["kind"] == "died":
        return f"{line(cause)}."
    if cause["kind"] == "interrupted":
        return "The ranks were interrupted."
    if cause["kind"] == "mismatch":
        return cause["error"]
    return _headline_of_waits(cycle, by_rank) or cause["error"]


def _headline_of_waits(cycle: list[int], by_rank: dict[int, Status]) -> str:
    """Say which ranks wait for which; return an empty text if no rank is missing."""
    if themselves := waits_for_itself(by_rank):
        return f"Deadlock: {', and '.join(map(_of_itself, themselves))}."
    if cycle:
        return "Deadlock: these ranks wait for each other, and none of them can go on."
    if servers := [rank for rank, status in by_rank.items() if _takes_any(status)]:
        return _headline_of_any(servers, by_rank)
    waiting, missing = _groups(by_rank)
    if not missing:
        return ""
    states = {by_rank[r]["state"] for r in missing if r in by_rank}
    which = ""
    if states in ({"left"}, {"ended"}):
        end = f"left the {settings.section}" if states == {"left"} else "ended"
        which = f", which {_verb(missing, 'has', 'have')} {end}"
    return f"{names(waiting)} {_verb(waiting)} for {names(missing)}{which}."


def _verb(ranks: Sized, singular: str = "waits", plural: str = "wait") -> str:
    return singular if len(ranks) == 1 else plural


def _of_itself(status: Status) -> str:
    """Return a text such as ``rank 2 sends to itself``."""
    sends = status["call"].startswith("send(")
    return f"rank {status['rank']} {'sends to' if sends else 'receives from'} itself"


def _headline_of_any(servers: list[int], by_rank: dict[int, Status]) -> str:
    """Say that some ranks wait for a message from any rank, and no rank sends one."""
    clients = [
        rank
        for rank, status in by_rank.items()
        if _needs_all(status) and set(status["for"]) & set(servers)
    ]
    any_rank = f"a message from any rank, which no rank sends{_where_the_rest_is(by_rank)}."
    if not clients:
        return f"{names(servers)} {_verb(servers)} for {any_rank}"
    wait = f"{names(clients)} {_verb(clients)} for {names(servers)}"
    return f"{wait}, and {names(servers)} {_verb(servers)} for {any_rank}"


def _where_the_rest_is(by_rank: dict[int, Status]) -> str:
    """Return a clause about the ranks that are gone, such as ``; rank 3 has ended``."""
    places = {"left": f"left the {settings.section}", "ended": "ended", "dead": "died"}
    parts = []
    for state, end in places.items():
        if ranks := [r for r, s in by_rank.items() if s["state"] == state and not _is_wait(s)]:
            parts.append(f"; {names(ranks)} {_verb(ranks, 'has', 'have')} {end}")
    return "".join(parts)


def _groups(by_rank: dict[int, Status]) -> tuple[list[int], list[int]]:
    """Return the ranks that wait, and the ranks they wait for that don't wait themselves."""
    waiting = [rank for rank, status in by_rank.items() if _is_wait(status)]
    wanted = sorted({other for rank in waiting for other in by_rank[rank]["for"]})
    return waiting, [rank for rank in wanted if rank not in waiting] or wanted


def _advice(by_rank: dict[int, Status], cycle: list[int], cause: Status | None) -> str:
    if cause and cause["kind"] in ("raised", "died", "mismatch"):
        # The other ranks wait for the rank that failed, or for each other: nothing to explain.
        return ""
    if themselves := waits_for_itself(by_rank):
        argument = "dst" if themselves[0]["call"].startswith("send(") else "src"
        return (
            f"check {argument}: here it is the rank's own number. In a group, {argument} is a rank "
            f"of the world, and group_{argument} counts within the group."
        )
    if astray := _astray(by_rank):
        return astray
    if cycle:
        return _advice_for_cycle([by_rank[rank] for rank in cycle[:-1]])
    if any(_takes_any(status) for status in by_rank.values()):
        return (
            "a server has to know who still sends. Let each worker announce that it is done, and "
            "let the server answer the waiting workers before it receives again."
        )
    return _advice_for_waits(by_rank)


def _advice_for_waits(by_rank: dict[int, Status]) -> str:
    running: Status = {"state": "running"}
    waits = [(status, r) for status in filter(_is_wait, by_rank.values()) for r in status["for"]]
    # A rank that waits is a victim, so the ranks at which chains of waits end come first.
    for status, other in sorted(waits, key=lambda wait: _is_wait(by_rank.get(wait[1], running))):
        if advice := _advice_for_pair(status, by_rank.get(other, running), other):
            return advice
    return ""


def _astray(by_rank: dict[int, Status]) -> str:
    """Return advice about a message that its sender sent elsewhere; empty if there is none."""
    for status in filter(_needs_all, by_rank.values()):
        if status["call"].startswith("recv("):
            for sender in status["for"]:
                if advice := _advice_for_astray(sender, status, by_rank):
                    return advice
    return ""


def _advice_for_astray(sender: int, status: Status, by_rank: dict[int, Status]) -> str:
    rank = status["rank"]
    for to, tag, number in by_rank.get(sender, {}).get("sent", ()):
        received = by_rank.get(to, {}).get("received")
        if received is None or [sender, number] in map(list, received):
            continue
        if by_rank[to]["state"] in GONE and by_rank[sender].get("for") == [to]:
            continue  # the sender itself waits for a rank that has left
        if to == rank and f"tag={tag})" not in status["call"]:
            return (
                f"rank {sender} has sent its message to rank {rank} with tag={tag}, and "
                f"rank {rank} waits for one with tag={_tags(status)}."
            )
        if to != rank:
            return (
                f"rank {sender} has sent a message to rank {to}, which did not receive it, "
                f"and rank {rank} waits for one: check to whom rank {sender} sends, and "
                f"from whom rank {rank} receives."
            )
    return ""


def _advice_for_cycle(members: list[Status]) -> str:
    calls = {status["call"].partition("(")[0] for status in members}
    who = "both" if len(members) == 2 else "all"
    if calls == {"recv"}:
        return (
            f"{who} receive first. If each receives from the right rank, let one of them send "
            "first, or use isend and irecv."
        )
    if calls == {"send"}:
        return (
            f"{who} send first, and a large message waits until it is received. If each sends to "
            "the right rank, let one of them receive first, or use isend and irecv."
        )
    if calls <= {"send", "recv"} and len(members) == 2 and _tags(members[0]) != _tags(members[1]):
        tags = f"{_tags(members[0])} and {_tags(members[1])}"
        return f"the tags differ ({tags}), so the receive does not take the message."
    return (
        "the ranks wait in different calls. Check which ranks take part in each call, then give "
        "every rank the same order."
    )


def _advice_for_pair(status: Status, other: Status, rank: int) -> str:
    call = status["call"].partition("(")[0]
    if other["state"] in GONE or other.get("kind") == "followed":
        if call in ("send", "recv"):
            misses = "sends" if call == "recv" else "receives"
            return (
                f"rank {rank} never {misses} this message: check the rank, the tag, and on which "
                f"side of an `if rank == …` the {'send' if call == 'recv' else 'recv'} is."
            )
        if status.get("times", 1) > 1:
            return (
                f"every rank of the group has to make the same collective calls; rank "
                f"{status['rank']} makes this one for the {_ordinal(status['times'])} time, and "
                f"rank {rank} less often. Does one rank take an extra step, or is the call inside "
                f"an `if rank == …`?"
            )
        return (
            f"every rank of the group has to make the same collective calls in the same order; "
            f"rank {rank} did not make this one. Is the call inside an `if rank == …`?"
        )
    if other["state"] == "running" or other.get("kind") == "interrupted":
        return (
            f"rank {rank} still computes: is it in an endless loop, or does it need longer than "
            f"the timeout?"
        )
    return ""


def _ordinal(number: int) -> str:
    """Return a number as ``1st``, ``2nd`` or ``11th``."""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ending}"


def _tags(status: Status) -> str:
    return status["call"].partition("tag=")[2].rstrip(")")
