"""The comparison of an answer's communication and result with what its task asks for.

A rule states a requirement of a task. It gets the calls of one rank, as
:func:`utils.checks.probe.as_dict` makes them, and returns a text about the problem, or ``None``::

    broken(calls, only("all_reduce"), inside(members), made("all_reduce", 1))

A report names only the first broken rule, because later problems often follow from the first one.

A task also lists the mistakes that students make: the result of each mistake, and its text::

    Mistake(total / n, "You returned the mean. The task asks for the sum")
    Mistake(is_nested, "You returned a list of lists. Make one flat list of it")

The report has the text of the first mistake that fits, and of others with the same result. Without
one, it says what was expected and what the answer gave. A text says what is wrong, why, and what to
try, in this order. It has no final period, because the expected value may follow.
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


def broken(calls: Calls, *rules: Rule) -> str | None:
    """Return the text of the first broken rule; `None` if the calls keep all rules."""
    return next((said for rule in rules if (said := rule(calls))), None)


def only(*ops: str) -> Rule:
    """Return the rule that a rank makes no other operations."""

    def rule(calls: Calls) -> str | None:
        others = sorted({call["op"] for call in calls} - set(ops))
        if not others:
            return None
        allowed = f"Use only {' and '.join(ops)} here" if ops else "Communicate nothing here"
        return f"You call {', '.join(others)}. {allowed}"

    return rule


def made(op: str, times: int | Iterable[int], why: str = "") -> Rule:
    """Return the rule that a rank calls an operation this many times."""
    allowed = [times] if isinstance(times, int) else list(times)

    def rule(calls: Calls) -> str | None:
        count = sum(call["op"] == op for call in calls)
        if count in allowed:
            return None
        wanted = " or ".join(str(n or "no") for n in allowed)
        calls_of = "call of" if allowed in ([0], [1]) else "calls of"
        return f"Expected {wanted} {calls_of} {op}{why}, but your code made {count or 'none'}"

    return rule


def some(members: Sequence[int]) -> Rule:
    """Return the rule that a rank communicates, unless it is alone in its group."""

    def rule(calls: Calls) -> str | None:
        if calls or len(members) == 1:
            return None
        return (
            "You communicate nothing, although the result depends on the other ranks of the "
            "group. Exchange their data first"
        )

    return rule


def inside(members: Sequence[int]) -> Rule:
    """Return the rule that all calls are in the group of these ranks."""

    def rule(calls: Calls) -> str | None:
        for call in calls:
            if call["group"] != list(members):
                return (
                    f"You call {call['op']} on the ranks {call['group']}, but the argument group "
                    f"has the ranks {list(members)}. Pass group=group to every call"
                )
        return None

    return rule


def messages(*wanted: tuple[str, int], in_order: bool = True) -> Rule:
    """Return the rule that a rank makes these messages, such as ("send", 1) to send to rank 1."""

    def rule(calls: Calls) -> str | None:
        passed = [(call["op"], call["peer"]) for call in calls if call["op"] in POINT_TO_POINT]
        order = list if in_order else sorted
        if order(passed) == order(wanted):
            return None
        return f"Expected {in_words(wanted)}, but your code made {in_words(passed)}"

    return rule


def in_words(pairs: Iterable[tuple[str, int]]) -> str:
    """Return messages in words: "send to rank 1, recv from rank 0"."""
    words = [f"{op} {'to' if op == 'send' else 'from'} rank {peer}" for op, peer in pairs]
    return ", ".join(words) or "no message"


def blocking(wanted: bool) -> Rule:
    """Return the rule that messages use `send` and `recv`; if not wanted, `isend` and `irecv`."""

    def rule(calls: Calls) -> str | None:
        for call in calls:
            if call["op"] in POINT_TO_POINT and call["blocking"] != wanted:
                plain, started = call["op"], f"i{call['op']}"
                used, asked = (started, plain) if wanted else (plain, started)
                return f"You call dist.{used}, but this task asks for dist.{asked}"
        return None

    return rule


def waited(calls: Calls) -> str | None:
    """Return a text if a rank has not waited for a work that it started."""
    call = next((call for call in calls if not call["waited"]), None)
    if call is None:
        return None
    name = f"{call['op']}(async_op=True)"
    if call["op"] in POINT_TO_POINT:
        name = f"the work of i{call['op']} (rank {call['peer']})"
    return (
        f"You never call wait() on {name}, so the tensor may be used before the communication is "
        "complete. Call wait() first"
    )


# -- what an answer has returned -------------------------------------------------------------------

#: How far two numbers may be apart, relative to the expected number.
TOLERANCE = 1e-5
#: The same for double precision, which a number that passed through float32 misses.
EXACT = 1e-10
#: Most mistakes with the same result that a text names.
MOST_ALIKE = 3
#: Most characters of a list that is shown completely.
_WHOLE = 60


@dataclass(frozen=True)
class Mistake:
    """A mistake that students make.

    Attributes:
        gives: the result that it leads to, or a function that recognizes this result.
        said: the text that the student reads.
    """

    gives: Any | Callable[[Any], bool]
    said: str

    def fits(self, result: Any, tolerance: float = TOLERANCE) -> bool:
        """Return whether this mistake gives the result."""
        if callable(self.gives):
            return bool(self.gives(result))
        return same(result, self.gives, tolerance)


#: The mistake if :func:`utils.checks.probe.number` found something else than a number.
NO_NUMBER = Mistake(
    lambda v: isinstance(v, str), "Return one number, not a tensor or a list. Use tensor.item()"
)


def table(wrong: Mapping[str, Any]) -> list[Mistake]:
    """Return mistakes from a mapping of texts to results; a result may be a tensor."""
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
    """Return a text about a wrong result, and the kind of the problem; `None` for a right result.

    Args:
        result, expected: values of JSON.
        mistakes: known mistakes, of which the first that fits is used, and all others that give
            the same result. They are computed only if something is wrong.
        form: the result that the task asks for, in words; used if the answer returned nothing.

    Returns:
        The text, and "mistake" for a known mistake, or "value".
    """
    if same(result, expected, tolerance):
        return None
    if result is None and form:
        return f"You returned None. Return {form}", "mistake"
    if said := _what_fits(result, mistakes, tolerance):
        stop = "" if said.endswith(("?", ".")) else "."
        return f"{said}{stop} {difference(result, expected, tolerance)}", "mistake"
    if same(result, expected):
        said = "Right to six digits only. Did you compute something in float32? Keep the dtype "
        return said + "of the arguments", "mistake"
    text = difference(result, expected, tolerance)
    return text[0].lower() + text[1:], "value"


def _what_fits(result: Any, mistakes: Iterable[Mistake], tolerance: float) -> str:
    """Return the text of the first mistake that fits; "" if none does.

    For some numbers, other mistakes give the same result. Then the text has theirs, too, because
    nobody can know which of them was made.
    """
    alike: list[str] = []
    for mistake in _as_far_as_possible(mistakes, alike):
        is_function = callable(mistake.gives)
        if (alike and is_function) or not mistake.fits(result, tolerance):
            continue
        if is_function:
            return mistake.said
        if mistake.said not in alike:
            alike.append(mistake.said)
    return ". Or: ".join(alike[:MOST_ALIKE])


def _as_far_as_possible(mistakes: Iterable[Mistake], alike: list[str]) -> Iterator[Mistake]:
    """Yield mistakes until there are some alike, and one can't be computed from this result."""
    try:
        yield from mistakes
    except (ArithmeticError, LookupError, TypeError, ValueError):
        if not alike:
            raise


def difference(result: Any, expected: Any, tolerance: float = TOLERANCE) -> str:
    """Return both values in words; for long lists, only the first entry that differs."""
    long = len(str(expected)) > _WHOLE or len(str(result)) > _WHOLE
    if not (long and isinstance(expected, list) and isinstance(result, list)):
        return "Expected {}, got {}".format(*_apart(expected, result))
    pairs = itertools.zip_longest(expected, result, fillvalue="nothing")
    k, (e, g) = next((k, pair) for k, pair in enumerate(pairs) if not same(*pair[::-1], tolerance))
    return "Entry {}: expected {}, got {}".format(k, *_apart(e, g, _WHOLE))


def _apart(expected: Any, result: Any, most: int = 160) -> tuple[str, str]:
    """Return texts of two values that show their difference.

    If six digits don't show it, the texts have all digits. If long texts begin equally, they start
    near the difference.
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
    """Return whether two values are equal; numbers may differ by the tolerance, nan never fits."""
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
    """Return whether both are numbers that differ by at most the tolerance; not for infinity."""
    if not (is_number(result) and is_number(expected)):
        return False
    try:
        apart = abs(result - expected)
        return math.isfinite(expected) and bool(apart <= tolerance * max(1.0, abs(expected)))
    except OverflowError:  # an integer that no float holds
        return False


def is_number(value: Any) -> bool:
    """Return whether a value is a number, but not a bool and not nan."""
    if isinstance(value, float):
        return not math.isnan(value)
    return isinstance(value, int) and not isinstance(value, bool)


def short(value: Any, most: int = 160) -> str:
    """Return a value for a message, with rounded numbers; a long text is cut."""
    return _cut(str(_rounded(value, 6)), most)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _rounded(value: Any, digits: int) -> Any:
    if isinstance(value, float):
        if value.is_integer() and 1e6 <= abs(value) < 1e15:
            return int(value)  # keep all digits of a count of bytes, such as 2097152
        return float(f"{value:.{digits}g}")
    if isinstance(value, list | tuple):
        return [_rounded(v, digits) for v in value]
    return value
