"""What an answer has communicated and returned, compared with what its task asks for.

A rule is made from what a task asks for. It gets the calls of one rank, as
:func:`utils.checks.probe.as_dict` has them, and returns what is wrong, or ``None``::

    broken(calls, only("all_reduce"), inside(members), made("all_reduce", 1))

The first rule that is broken is told: what comes after it follows from that, as a rule.

A task also lists the mistakes that students make: what each of them gives, and what to say then::

    Mistake(total / n, "this is the mean: the task asks for the sum")
    Mistake(is_nested, "this is a list of lists: make one flat list of it")

The first one that fits is told; without one, what was expected and what came. What to say is what
is wrong, why, and what to try, in that order, and begins in small letters, as it may follow on
something else.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Calls = Sequence[dict[str, Any]]
Rule = Callable[[Calls], str | None]

POINT_TO_POINT = ("send", "recv")
# What probes call the lists of records that they return.
RECORDS = ("calls", "calls again", "forward", "backward")
# What a record of any call has, by :func:`utils.checks.probe.as_dict`, and the types of it.
FIELDS = {
    **{"op": str, "group": list, "nbytes": int, "blocking": bool, "waited": bool},
    **{"any_source": bool, "sent": int, "received": int},
    **{"start": float | int, "matched": float | int, "end": float | int},
}
# Collectives of which every rank has a tensor of the same size.
SAME_SIZE = ("all_reduce", "broadcast", "reduce")
# Collectives that no rank leaves before all have come.
TOGETHER = ("barrier", "all_reduce", "all_gather", "all_gather_into_tensor", "all_to_all")
DISAGREE = "the records of the ranks do not agree"


def broken(calls: Calls, *rules: Rule) -> str | None:
    """Return what the first broken rule says; `None` if the calls keep all rules."""
    return next((said for rule in rules if (said := rule(calls))), None)


def only(*ops: str) -> Rule:
    """Return the rule that a rank makes no other operations."""

    def rule(calls: Calls) -> str | None:
        others = sorted({call["op"] for call in calls} - set(ops))
        if not others:
            return None
        return f"uses {', '.join(others)}; this task is about {' and '.join(ops)} only"

    return rule


def made(op: str, times: int | Iterable[int], why: str = "") -> Rule:
    """Return the rule that a rank calls an operation so many times."""
    allowed = [times] if isinstance(times, int) else list(times)

    def rule(calls: Calls) -> str | None:
        count = sum(call["op"] == op for call in calls)
        if count in allowed:
            return None
        wanted = " or ".join(map(str, allowed))
        return f"expected {wanted} {op}{'s' * (allowed != [1])}{why}, it made {count}"

    return rule


def some(members: Sequence[int]) -> Rule:
    """Return the rule that a rank that is not alone communicates."""

    def rule(calls: Calls) -> str | None:
        if calls or len(members) == 1:
            return None
        return (
            "makes no communication, although the result follows from what the other ranks of the "
            "group have"
        )

    return rule


def inside(members: Sequence[int]) -> Rule:
    """Return the rule that all calls are in the group of these ranks."""

    def rule(calls: Calls) -> str | None:
        for call in calls:
            if call["group"] != list(members):
                return (
                    f"{call['op']} on the ranks {call['group']}, but the argument group was that "
                    f"of ranks {list(members)}: pass group=group to every call"
                )
        return None

    return rule


def messages(*wanted: tuple[str, int], in_order: bool = True) -> Rule:
    """Return the rule of these messages, such as ("send", 1): operation and other global rank."""

    def rule(calls: Calls) -> str | None:
        passed = [(call["op"], call["peer"]) for call in calls if call["op"] in POINT_TO_POINT]
        order = list if in_order else sorted
        if order(passed) == order(wanted):
            return None
        return f"expected {in_words(wanted)}, it made {in_words(passed)}"

    return rule


def in_words(pairs: Iterable[tuple[str, int]]) -> str:
    """Return messages in words: "send to rank 1, recv from rank 0"."""
    words = [f"{op} {'to' if op == 'send' else 'from'} rank {peer}" for op, peer in pairs]
    return ", ".join(words) or "no message"


def blocking(wanted: bool) -> Rule:
    """Return the rule that messages use `send` and `recv`, or, if not, `isend` and `irecv`."""

    def rule(calls: Calls) -> str | None:
        for call in calls:
            if call["op"] in POINT_TO_POINT and call["blocking"] != wanted:
                plain, started = call["op"], f"i{call['op']}"
                used, asked = (started, plain) if wanted else (plain, started)
                return f"uses dist.{used}; this task asks for dist.{asked}"
        return None

    return rule


def waited(calls: Calls) -> str | None:
    """Return what is wrong if a rank has not waited for a work that it started."""
    call = next((call for call in calls if not call["waited"]), None)
    if call is None:
        return None
    name = f"{call['op']}(async_op=True)"
    if call["op"] in POINT_TO_POINT:
        name = f"the request of i{call['op']} (rank {call['peer']})"
    return (
        f"nobody called wait() on {name}: the tensor may be read or overwritten before the "
        "communication is complete"
    )


# -- what several ranks have recorded -------------------------------------------------------------


def disagreement(replies: Mapping[int, Any]) -> str | None:
    """Return what one rank's records say and another's do not; `None` if they agree.

    Each message is recorded by its sender and by its receiver, with as many bytes; a collective is
    recorded by all ranks of its group, under the same number.

    Args:
        told: of each rank what its probe returned. Records are the lists in it that have a name of
            :data:`RECORDS`, however deep. A rank without such a list is not compared: there it is
            the check itself that communicates with the others.
    """
    lists_of = {rank: list(_lists(value)) for rank, value in replies.items()}
    calls = {rank: list(itertools.chain(*lists)) for rank, lists in lists_of.items() if lists}
    return _messages_differ(calls) or _collectives_differ(calls)


def forgery(rank: int, value: Any) -> str | None:
    """Return what the backend never records, from a rank's reply; ``None`` if there is nothing.

    The backend fills in every field, numbers all messages and collectives, and does not end a call
    before it begins.
    """
    for call in itertools.chain(*_lists(value)):
        if not isinstance(call, dict):
            return f"a record is {call!r}"
        for name, kind in FIELDS.items():
            if not isinstance(call.get(name), kind):
                return f"the record of {call.get('op', 'a call')} has no {name}"
        if rank not in call["group"]:
            return f"the record of {call['op']} is of the ranks {call['group']}"
        number = "message" if call["op"] in POINT_TO_POINT else "sequence"
        # A receive learns the number of its message when that comes.
        if not call.get(number) and (call["end"] or call["op"] != "recv"):
            return f"the record of {call['op']} has no {number} number"
        if call["end"] and not call["start"] <= call["end"]:
            return f"the record of {call['op']} ends before it begins"
    return None


def _lists(value: Any) -> Iterator[list[Any]]:
    """Yield the lists of records in a probe's result; a list of lists has one for each step."""
    if isinstance(value, list):
        for inner in value if value and isinstance(value[0], dict | list) else ():
            yield from _lists(inner)
    for name, inner in value.items() if isinstance(value, dict) else ():
        if name not in RECORDS:
            yield from _lists(inner)
        elif isinstance(inner, list):
            steps = inner if inner and all(isinstance(step, list) for step in inner) else [inner]
            yield from steps


def _messages_differ(calls: Mapping[int, Calls]) -> str | None:
    """Return which message one rank has recorded, and the other has not."""
    sent, received = (
        {
            _message(call, *((rank, call["peer"]) if op == "send" else (call["peer"], rank)))
            for rank, of_rank in calls.items()
            for call in of_rank
            if call["op"] == op and call["peer"] in calls
        }
        for op in POINT_TO_POINT
    )
    unmatched = {
        "rank {1} has received {2} bytes of rank {0}, which rank {0} has not sent": received - sent,
        "rank {0} has sent {2} bytes to rank {1}, which rank {1} has not received": sent - received,
    }
    for words, of_one_side in unmatched.items():
        if of_one_side:
            _, _, source, to, nbytes = min(of_one_side, key=str)
            return f"{DISAGREE}: {words.format(source, to, nbytes)}"
    return None


def _message(call: dict[str, Any], source: int, to: int) -> tuple[Any, ...]:
    """Return what both sides know of a message."""
    return tuple(call["group"]), str(call["message"]), source, to, call["nbytes"]


def _collectives_differ(calls: Mapping[int, Calls]) -> str | None:
    """Return which collective only some ranks of its group have recorded."""
    made: dict[tuple[int, ...], dict[int, set[tuple[Any, ...]]]] = {}
    for rank, of_rank in calls.items():
        for call in of_rank:
            if call["op"] not in POINT_TO_POINT:
                members = tuple(call["group"])
                each = made.setdefault(members, {r: set() for r in members if r in calls})
                nbytes = call["nbytes"] if call["op"] in SAME_SIZE else None
                each.setdefault(rank, set()).add((call["sequence"], call["op"], nbytes))
    for each in made.values():
        for rank, other in itertools.permutations(each, 2):
            if lacking := each[rank] - each[other]:
                _, op, _ = min(lacking, key=str)
                return (
                    f"{DISAGREE}: rank {rank} has called {op}, and rank {other}, of the same "
                    "group, has not called the same"
                )
    return None


# -- what an answer has returned -------------------------------------------------------------------

#: How far two numbers may be apart, as a share of the expected one.
TOLERANCE = 1e-5
#: The same for double precision: what has passed through float32 is further off.
EXACT = 1e-10
#: Letters of a list that is shown whole.
_WHOLE = 60


@dataclass(frozen=True)
class Mistake:
    """One that students make.

    Attributes:
        gives: the result that it leads to; or a function that recognises it.
        said: what its author is told.
    """

    gives: Any | Callable[[Any], bool]
    said: str

    def fits(self, result: Any, tolerance: float = TOLERANCE) -> bool:
        """Return whether this mistake gives the result."""
        if callable(self.gives):
            return bool(self.gives(result))
        return same(result, self.gives, tolerance)


#: What a task that asks for a number gets told of :func:`utils.checks.probe.number`.
NO_NUMBER = Mistake(
    lambda v: isinstance(v, str), "return one number, not a tensor or a list: .item()"
)


def table(wrong: Mapping[str, Any]) -> list[Mistake]:
    """Return mistakes from a mapping of words to results; a result may be a tensor."""
    return [
        Mistake(gives.tolist() if hasattr(gives, "tolist") else gives, said)
        for said, gives in wrong.items()
    ]


def one_of(*results: Any) -> Callable[[Any], bool]:
    """Return a function that recognizes several results of the same mistake."""
    return lambda got: any(same(got, result) for result in results)


def recognise(
    result: Any,
    expected: Any,
    mistakes: Iterable[Mistake] = (),
    *,
    form: str = "",
    tolerance: float = TOLERANCE,
) -> tuple[str, str] | None:
    """Return what is wrong with a result, and of which kind it is; `None` for a right one.

    Args:
        result, expected: values of JSON.
        mistakes: the first that fits is told. They are made only if something is wrong.
        form: what has to be returned, in words; told where nothing was.

    Returns:
        The words, and "mistake" for a known one, or "value".
    """
    if same(result, expected, tolerance):
        return None
    if result is None and form:
        return f"returned None: return {form}", "mistake"
    for mistake in mistakes:
        if mistake.fits(result, tolerance):
            stop = "" if mistake.said.endswith(("?", ".")) else "."
            return f"{mistake.said}{stop} {difference(result, expected, tolerance)}", "mistake"
    if same(result, expected):
        said = "right to six digits only: was something computed in float32? Keep the type of what "
        return said + "was given", "mistake"
    text = difference(result, expected, tolerance)
    return text[0].lower() + text[1:], "value"


def difference(result: Any, expected: Any, tolerance: float = TOLERANCE) -> str:
    """Return both values in words; of long lists, the first entry that differs."""
    long = len(str(expected)) > _WHOLE or len(str(result)) > _WHOLE
    if not (long and isinstance(expected, list) and isinstance(result, list)):
        return "Expected {}, got {}".format(*_apart(expected, result))
    pairs = itertools.zip_longest(expected, result, fillvalue="nothing")
    k, (e, g) = next((k, pair) for k, pair in enumerate(pairs) if not same(*pair[::-1], tolerance))
    return "Entry {}: expected {}, got {}".format(k, *_apart(e, g, _WHOLE))


def _apart(expected: Any, result: Any, most: int = 160) -> tuple[str, str]:
    """Return texts of two values that show their difference.

    If six digits don't tell them apart, all digits do; if their beginnings are equal, they begin
    where they differ.
    """
    for digits in (6, 17):
        texts = [str(_rounded(value, digits)) for value in (expected, result)]
        if texts[0] != texts[1]:
            break
    pairs = enumerate(zip(*texts, strict=False))
    differ = next((k for k, (one, other) in pairs if one != other), 0)
    begin = differ - 20 if differ > most - 20 else 0
    first, second = (f"…{text[begin:]}" if begin else text for text in texts)
    return _cut(first, most), _cut(second, most)


def same(result: Any, expected: Any, tolerance: float = TOLERANCE) -> bool:
    """Return whether values are equal: numbers within a relative tolerance; nan equals nothing."""
    if isinstance(expected, dict):
        if not isinstance(result, dict) or result.keys() != expected.keys():
            return False
        return same([result[key] for key in expected], list(expected.values()), tolerance)
    if isinstance(expected, list | tuple):
        if not isinstance(result, list | tuple) or len(result) != len(expected):
            return False
        return all(same(*pair, tolerance) for pair in zip(result, expected, strict=True))
    if isinstance(expected, bool | None) or isinstance(result, bool):
        return result is expected
    return bool(result == expected) or _near(result, expected, tolerance)


def _near(result: Any, expected: Any, tolerance: float) -> bool:
    """Return whether these are near numbers; every number is within a share of infinity."""
    if not (is_number(result) and is_number(expected)):
        return False
    try:
        apart = abs(result - expected)
        return math.isfinite(expected) and bool(apart <= tolerance * max(1.0, abs(expected)))
    except OverflowError:  # an integer that no float holds
        return False


def is_number(value: Any) -> bool:
    """Return whether a value is a number; a truth value is not, and nan is not."""
    if isinstance(value, float):
        return not math.isnan(value)
    return isinstance(value, int) and not isinstance(value, bool)


def short(value: Any, most: int = 160, digits: int = 6) -> str:
    """Return a value for a message, with rounded numbers; a long text is cut."""
    return _cut(str(_rounded(value, digits)), most)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _rounded(value: Any, digits: int) -> Any:
    if isinstance(value, float):
        if value.is_integer() and 1e6 <= abs(value) < 1e15:
            return int(value)  # a count of bytes, such as 2097152, has no digit to lose
        return float(f"{value:.{digits}g}")
    if isinstance(value, list | tuple):
        return [_rounded(v, digits) for v in value]
    return value
