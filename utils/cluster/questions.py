"""A question to the ranks, in the kernel: what is sent to each rank, and what it replies.

A rank calls a function of a module (`rank_side.answer`). Its arguments and its result travel as
JSON text. Labs and checks see the ranks as the protocol :class:`Ranks`, and answers as
:class:`Reply`.
"""

from __future__ import annotations

import json
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Protocol

from utils.cluster.notebook_words import open_task

if TYPE_CHECKING:
    import ipyparallel as ipp  # costs time, so a kernel imports it only when it starts ranks

    from utils.cluster.ipp_cluster import Running

# What an error calls the whole of a result.
RESULT = "the result"
# The name under which a rank tells its balance.
BALANCE = "balance"
# How the cell begins that asks a rank; what follows are arguments, which may be its secret.
QUESTION = "__import__('utils.cluster.rank_side', fromlist=['answer']).answer("
# The first line of a cell, in place of its `%%px`: lines count as the student sees them, and a
# traceback says "Cell In[12]" where the notebook shows [12].
FIRST_LINE = "# %%px of [{}]\n"
NUMBER = re.compile(r"# %%px of \[(\d+)\]")

# Seconds that other ranks get once one has failed, and that interrupted ranks get.
AFTER_AN_ERROR = 3.0
AFTER_AN_INTERRUPT = 5.0


class Ranks(Protocol):
    """Ranks that answer questions.

    :class:`utils.cluster.Ranks` keeps this contract, and so do the threads that the tests of checks
    use as ranks. A function that needs more, such as ``running()`` or ``view``, names
    :class:`utils.cluster.Ranks` itself.
    """

    @property
    def n(self) -> int:
        """Return the number of ranks."""

    def ask(
        self,
        target: str | Callable[..., Any],
        *,
        timeout: float = 60.0,
        each: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> list[Reply]:
        """Run a function on every rank, as :meth:`utils.cluster.Ranks.ask` says."""


@dataclass(frozen=True)
class Reply:
    """An answer of one rank.

    Attributes:
        rank: the rank.
        status: "ok"; "error" (the function raised, or the rank died); "silent" (no answer in time).
            A rank that was silent and could be interrupted has `error` and `line` of where it was.
        value: the function's result.
        error: class and text of the error, such as "ZeroDivisionError: division by zero".
        line: the innermost line of a cell on the way to the error, and its code:
            "In[4], line 3, in ring(): dist.recv(x, src=1)".
        stdout: what was printed meanwhile.
        balance: how many more messages the rank has sent than received, since the ranks last met.
        unreceived: for each message that the rank sent and no rank received, the message, its
            receiver, and its line. These messages are thrown away.
        forged: signs that the rank's own code did not print this reply; "" without any.
        kind: the name of the error's class.
        open: number and title of the task whose stub raised the error.
        missing: the name that a NameError is about.
        lost: whether the rank is dead or cannot communicate again, so that only fresh ranks help.
    """

    rank: int
    status: str
    value: Any = None
    error: str | None = None
    line: str | None = None
    stdout: str = ""
    balance: int = 0
    unreceived: tuple[str, ...] = ()
    forged: str = ""
    kind: str = ""
    open: tuple[str, str] | None = None
    missing: str = ""
    lost: bool = False


# --- what is sent -----------------------------------------------------------------------------


def target_of(target: str | Callable[..., Any]) -> str:
    """Return "package.module:function", the text by which every rank finds the function.

    Raises:
        ValueError: the ranks could not find the function, or the text has another form.
    """
    if isinstance(target, str):
        if target.count(":") != 1:
            raise ValueError(f'target must look like "package.module:function", not {target!r}')
        return target
    if reason := _unreachable(target):
        raise ValueError(
            f"{reason}, which ranks cannot import; ask expects a function that a module defines at "
            "its top level. Move it to such a module, and pass the function or its name as "
            '"package.module:function".'
        )
    return f"{target.__module__}:{target.__qualname__}"


def _unreachable(target: object) -> str:
    """Return what was given instead of a module's function; "" for a module's function."""
    if isinstance(target, MethodType):
        return f"{target.__qualname__} is a method"
    if not isinstance(target, FunctionType):
        return f"{target!r} is a {type(target).__name__}"
    name = target.__qualname__
    if target.__name__ == "<lambda>":
        return f"{name} is a lambda of {target.__module__}"
    if "<locals>" in name:
        return f"{name} is a function inside another function"
    if "." in name:
        return f"{name} is a method"
    if target.__module__ == "__main__":
        return f"{name} is a function of the notebook or program (__main__)"
    return ""


def texts(
    n: int, target: str, kwargs: Mapping[str, Any], each: Sequence[Mapping[str, Any]] | None
) -> list[str]:
    """Return the keyword arguments of each of n ranks as JSON text: everybody's, and its own.

    Raises:
        ValueError: they can't be sent, `each` is not one dict per rank, or a name is in both.
    """
    secret = [{}] * n if each is None else list(each)
    if len(secret) != n or not all(isinstance(names, Mapping) for names in secret):
        raise ValueError(f"each must be {n} dicts, one of arguments for each rank; it has {secret}")
    if twice := sorted(set[str]().union(*secret) & set(kwargs)):
        raise ValueError(f"{', '.join(twice)} is given to all ranks, and in each: name it once")
    try:
        return [json.dumps({**kwargs, **names}) for names in secret]
    except TypeError as error:
        raise ValueError(f"the arguments of {target} must be JSON values: {error}") from None


# --- the answers ------------------------------------------------------------------------------


class Question:
    """One call on every rank, and the JSON lines that come back.

    Args:
        up: the ranks.
        target: "package.module:function".
        arguments: JSON text for each rank, by its number at the start. A rank is sent only its own.
        ranks: the ranks to ask, by default all that live.
        of_ours: whether the function runs no code of the student.
    """

    def __init__(
        self,
        up: Running,
        target: str,
        arguments: Sequence[str],
        ranks: Iterable[int] | None = None,
        of_ours: bool = True,
    ):
        import ipyparallel as ipp

        self._up = up
        self._ranks = sorted(up.living() if ranks is None else ranks)
        # A student's code can print anything but this.
        self._token = f"<{secrets.token_hex(16)}>"
        self._replies: dict[int, Reply] = {}
        self._results: dict[int, ipp.AsyncResult] = {}
        self._interrupted = False
        for rank in self._ranks:
            cell = f"{target!r}, {arguments[rank]!r}, {rank}, {self._token!r}, {of_ours})"
            try:
                # Silent: a question doesn't count in the student's `Out[0:3]`.
                self._results[rank] = up.client[rank].execute(
                    QUESTION + cell, silent=True, block=False
                )
            except (IndexError, KeyError, ipp.error.IPythonError):
                self._replies[rank] = dead(rank)

    def answers(self, timeout: float) -> list[Reply]:
        """Wait as `Ranks.ask` promises."""
        try:
            self._collect(timeout, until_error=True)
            if self._waiting():
                self._interrupt()
                self._collect(AFTER_AN_INTERRUPT)
        except KeyboardInterrupt:
            # The notebook's stop button: the ranks must not go on either.
            self._interrupt()
            raise
        for rank in self._waiting():
            self._replies[rank] = Reply(rank, "silent", error=f"no answer within {timeout:g} s")
        return [self._replies[rank] for rank in self._ranks]

    def _waiting(self) -> list[int]:
        return [rank for rank in self._ranks if rank not in self._replies]

    def _interrupt(self) -> None:
        self._interrupted = True
        self._up.signal("SIGINT", self._waiting())

    def _collect(self, timeout: float, until_error: bool = False) -> None:
        deadline = time.monotonic() + timeout
        while self._waiting() and time.monotonic() < deadline:
            over = self._up.over()
            for rank in self._waiting():
                if self._results[rank].ready():
                    self._replies[rank] = self._read(rank)
                    if until_error and self._replies[rank].status == "error":
                        deadline = min(deadline, time.monotonic() + AFTER_AN_ERROR)
                elif over:
                    self._replies[rank] = dead(rank)
            time.sleep(0.005)

    def _read(self, rank: int) -> Reply:
        result = self._results[rank]
        # The result may arrive before the output does.
        result.wait_for_output(5)
        text = result.stdout if isinstance(result.stdout, str) else "".join(result.stdout)
        before, mark, after = text.partition(f"\n{self._token}")
        if not mark or not result.successful():
            return self._without_answer(rank, result)
        try:
            answer = json.loads(after.partition("\n")[0])
            answer["stdout"] = before + answer["stdout"]
            if stub := answer.get("open"):
                answer["open"] = tuple(stub)
            forged = self._forged(after, answer["stdout"], answer.pop("late", 0))
            reply = Reply(rank, forged=forged, **answer)
        except (ValueError, TypeError, KeyError):  # what an answer printed, not rank_side
            return Reply(rank, "error", error="its answer was cut off")
        if self._interrupted and reply.kind == "KeyboardInterrupt":
            return replace(reply, status="silent")
        return reply

    def _forged(self, after: str, stdout: str, late: object) -> str:
        """Return a sign of forgery: the token is used once; who knows it has read the question."""
        if self._token in after or self._token in stdout:
            return "two replies came instead of one"
        return "the rank communicated while its result was read" if late else ""

    def _without_answer(self, rank: int, result: ipp.AsyncResult) -> Reply:
        import ipyparallel as ipp

        error = result.exception()
        if isinstance(error, ipp.error.EngineError) or rank not in self._up.client.ids:
            return dead(rank)
        if isinstance(error, ipp.error.RemoteError):
            if self._interrupted and error.ename == "KeyboardInterrupt":
                return Reply(rank, "silent", error="interrupted before it could answer")
            return Reply(rank, "error", error=f"{error.ename}: {error.evalue}")
        return Reply(rank, "error", error=f"no answer was printed ({error or 'no error either'})")


def dead(rank: int) -> Reply:
    """Return the reply of a rank whose process is gone."""
    error = "the rank is dead (killed, os._exit, a crash inside C, out of memory): ranks.restart()"
    return Reply(rank, "error", error=error, lost=True)


def unreceived(message: dict[str, Any]) -> str:
    """Return what the sender of a message is told that nobody has received."""
    where = f" at {message['where']}" if message["where"] else ""
    return (
        f"sent {message['what']} to rank {message['to']}{where}, and no rank has received it: a "
        f"recv is missing, or has another tag. The message was thrown away."
    )


# --- what a rank puts into its answer ---------------------------------------------------------


def about(error: BaseException, text: str) -> dict[str, Any]:
    """Return what a reply says of an error besides its text, as JSON values.

    Args:
        error: what a rank raised.
        text: its message; a student's class may have none that can be shown.
    """
    kind = type(error).__name__
    missing = error.name if isinstance(error, NameError) else None
    return {"kind": kind, "open": open_task(kind, text), "missing": missing or ""}


def plain(value: Any, name: str = RESULT, other: Callable[[Any], str] | None = None) -> Any:
    """Return a result in the types of JSON: a check compares numbers, of whatever kind they were.

    Tensors and arrays become lists of their elements (a number, where they have no dimension);
    tuples, ranges, sets and lists become lists; a NumPy number becomes one of Python.

    Args:
        name: what to call it in an error.
        other: makes a text of what has no such form, instead of the error.

    Raises:
        TypeError: there is no way; says which part of it is of which type.
    """
    if isinstance(value, bool | int | float | str | None):
        return value
    if isinstance(value, Mapping):
        return {
            _key(key, name): plain(item, _part(name, key), other) for key, item in value.items()
        }
    if isinstance(value, list | tuple | range):
        return [plain(item, _part(name, k), other) for k, item in enumerate(value)]
    if isinstance(value, set | frozenset):
        return [plain(item, name, other) for item in sorted(value, key=repr)]
    if kind := _kind_of_array(value):
        # The class's own method: an answer may have given this very tensor another one.
        return plain(kind.tolist(value), name, other)
    if other is not None:
        return other(value)
    raise TypeError(f"{name} is {_in_words(value)}")


def _kind_of_array(value: Any) -> Any:
    """Return Tensor, ndarray, or what else the value is of these kinds; ``None`` for others.

    Not whatever has a `tolist`: a class with one of its own would choose what a check is shown.
    """
    known = (("torch", "Tensor"), ("numpy", "ndarray"), ("numpy", "generic"), ("array", "array"))
    for module, name in known:
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and isinstance(value, kind):
            return kind
    return None


def _part(name: str, key: object) -> str:
    if name == RESULT:
        return key if isinstance(key, str) else f"entry {key} of the result"
    return f"{name}[{key!r}]"


def _key(key: object, name: str) -> str:
    if isinstance(key, str | int | float):
        return str(key)
    raise TypeError(f"{name} has the key {key!r}; expected a text or a number")


def _in_words(value: Any) -> str:
    """Say what a value is that JSON can't hold, and what to do."""
    kind = type(value).__name__
    if callable(value) and hasattr(value, "__name__") and not isinstance(value, type):
        call = f"{value.__name__}()"
        return f"the function {value.__name__} itself: call it, {call}"
    article = "an" if kind[0].lower() in "aeiou" else "a"
    return f"{article} {kind}; expected numbers, texts, or lists of them"
