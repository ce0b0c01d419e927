"""The kernel's side of a question to the ranks: what it sends to each rank, and the replies.

A rank calls a function of a module (`rank_side.answer`). The function's arguments and its result
travel as JSON text. Labs and checks see the ranks as the protocol :class:`Ranks`, and an answer as
a :class:`Reply`.
"""

from __future__ import annotations

import json
import re
import secrets
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic  # by name, because an answer on a rank inside the kernel may replace it
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import utils
from torch_mpi.lines import wrapped
from utils.cluster.notebook_words import FRESH_RANKS, open_task
from utils.cluster.stop_button import stop_button

if TYPE_CHECKING:
    import ipyparallel as ipp  # slow, so a kernel imports it only when it starts ranks

    from utils.cluster.running import Running

# The name of a whole result in an error.
RESULT = "the result"
# The kind of an error that comes from a rank without a process group.
NO_GROUP = "NoProcessGroup"
# The key of a rank's balance in its reply.
BALANCE = "balance"
# The beginning of the cell that asks a rank; the arguments after it may be the rank's secret.
QUESTION = "__import__('utils.cluster.rank_side', fromlist=['answer']).answer("
# The first line of a cell, instead of its `%%px`. It keeps the student's line numbers, and lets a
# traceback say "Cell In[12]" if the notebook shows [12].
FIRST_LINE = "# %%px of [{}]\n"
NUMBER = re.compile(r"# %%px of \[(\d+)\]")

# Seconds between two looks at all answers; those that the other ranks get once a rank has failed,
# and those that interrupted ranks get.
LOOK = 0.005
AFTER_AN_ERROR = 3.0
AFTER_AN_INTERRUPT = 5.0


class Ranks(Protocol):
    """Ranks that answer questions.

    :class:`utils.cluster.Ranks` keeps this contract for both kinds of ranks. A function that needs
    more, such as ``running()`` or ``view``, takes a :class:`utils.cluster.Ranks` instead.
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
        """Run a function on every rank, as :meth:`utils.cluster.Ranks.ask` does."""

    def apart(self) -> AbstractContextManager[Ranks]:
        """Yield ranks for a check's own code, as :meth:`utils.cluster.Ranks.apart` does."""


class Confirmed(NamedTuple):
    """The value of a reply after a look at the kernel's own records, see :class:`Reply`."""

    value: Any
    records: Sequence[Any] = ()
    unseen: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reply:
    """The answer of one rank.

    Attributes:
        rank: the rank.
        status: "ok"; "error" (the function raised, or the rank died); "silent" (no answer in time).
            If a silent rank could be interrupted, `line` says where it was.
        value: the function's result.
        error: class and text of the error, such as "ZeroDivisionError: division by zero".
        line: the innermost line of a cell on the way to the error, and its code:
            "In[4], line 3, in ring(): dist.recv(x, src=1)".
        stdout: what the function printed.
        balance: how many more messages the rank has sent than received, since the ranks last met.
        unreceived: for each message that the rank sent and no rank received, the message, its
            receiver, and its line. These messages are discarded.
        forged: what is wrong with the records in the value, if the kernel has its own ones.
        records: the lists with records in the value, if the kernel has confirmed them.
        unseen: operations that the rank has called since it was asked, and that its value lacks.
            Only a kernel that carries the ranks' messages knows them.
        kind: the name of the error's class.
        open: number and title of the task whose stub raised the error.
        missing: the name that a NameError is about.
        call: of a communication that failed, the operation, such as "send"; "" if it has none.
        because: of a rank that stopped because another failed, what failed first, in words.
        waited: of a silent rank, seconds until it was interrupted.
        lost: whether the rank is dead or can't communicate again, so that only fresh ranks help.
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
    records: Sequence[Any] = ()
    unseen: tuple[str, ...] = ()
    kind: str = ""
    open: tuple[str, str] | None = None
    missing: str = ""
    call: str | None = None
    because: str = ""
    waited: float = 0.0
    lost: bool = False


class AskStopped(KeyboardInterrupt):
    """The user stopped the ranks while they answered; `replies` has what they had replied."""

    def __init__(self, replies: list[Reply]):
        lines = [f"\n  rank {one.rank} was at {one.line}" for one in replies if one.line]
        super().__init__("".join(["You stopped the ranks.", *lines]))
        self.replies = replies

    def _render_traceback_(self) -> list[str]:
        return wrapped(str(self))


# --- what is sent -----------------------------------------------------------------------------


def target_of(target: str | Callable[..., Any]) -> str:
    """Return "package.module:function", the text by which every rank finds the function.

    Raises:
        ValueError: the ranks could not find the function, or the text has a different form.
    """
    if isinstance(target, str):
        if target.count(":") != 1:
            raise ValueError(f'target must look like "package.module:function", not {target!r}')
        return target
    if reason := _unreachable(target):
        raise ValueError(
            f"{reason}, which ranks can't import. Define the function at the top level of a "
            'module, and pass it or its name as "package.module:function".'
        )
    return f"{target.__module__}:{target.__qualname__}"


def _unreachable(target: object) -> str:
    """Return why ranks can't import the target; "" for a top-level function of a module."""
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
    """Return each rank's keyword arguments as JSON text: the common ones, and the rank's own.

    Raises:
        ValueError: they can't be sent, `each` is not one dict per rank, or a name is in both.
    """
    secret = [{}] * n if each is None else list(each)
    if len(secret) != n or not all(isinstance(names, Mapping) for names in secret):
        raise ValueError(f"each must be a list of {n} dicts, one for each rank, not {secret}")
    if twice := sorted(set[str]().union(*secret) & set(kwargs)):
        raise ValueError(f"{', '.join(twice)} is given to all ranks and in each. Pass it once")
    try:
        return [json.dumps({**kwargs, **names}) for names in secret]
    except TypeError as error:
        raise ValueError(f"the arguments of {target} must be JSON values ({error})") from None


# --- the answers ------------------------------------------------------------------------------


class Question:
    """One call on every rank, and the JSON lines that come back.

    Attributes:
        was_stopped: whether the user pressed the stop button while it waited.

    Args:
        up: the running ranks.
        target: "package.module:function".
        arguments: JSON text for each rank, by its number at the start. A rank gets only its text.
        ranks: the ranks to ask, by default all living ranks.
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
        self._up = up
        self._ranks = sorted(up.living() if ranks is None else ranks)
        # A student's code can print anything except for this.
        self._token = f"<{secrets.token_hex(16)}>"
        self._replies: dict[int, Reply] = {}
        self._interrupted = False
        self.was_stopped = False
        self._cells = {
            rank: f"{QUESTION}{target!r}, {arguments[rank]!r}, {rank}, {self._token!r}, {of_ours})"
            for rank in self._ranks
        }
        self._results: dict[int, ipp.AsyncResult] = {}
        up.expect(target.partition(":")[0], of_ours)
        self._send(self._ranks)

    def _send(self, ranks: Iterable[int]) -> None:
        """Send the question to these ranks, of which some may be dead."""
        # Silent, so that a question doesn't count in the student's `Out[0:3]`.
        sent = self._up.send({rank: self._cells[rank] for rank in ranks})
        self._results |= sent
        self._replies |= {rank: dead(rank) for rank in ranks if rank not in sent}

    def answers(self, timeout: float) -> list[Reply]:
        """Wait for the answers, as `Ranks.ask` promises, and return them."""
        began = monotonic()
        with stop_button() as presses:
            self._collect(timeout, presses, until_error=True)
            waited = monotonic() - began
            if self._waiting():
                self._interrupt()
                self._collect(AFTER_AN_INTERRUPT, [])
        self.was_stopped = bool(presses)
        for rank in self._waiting():
            late = f"the call did not return within {timeout:g} s"
            self._replies[rank] = Reply(rank, "silent", error=late)
        return [
            replace(reply, waited=waited) if reply.status == "silent" else reply
            for _, reply in sorted(self._replies.items())
        ]

    def busy(self) -> set[int]:
        """Return the ranks whose call has not returned, although it was interrupted."""
        return {rank for rank, result in self._results.items() if not result.ready()}

    def _waiting(self) -> list[int]:
        return [rank for rank in self._ranks if rank not in self._replies]

    def _interrupt(self) -> None:
        self._interrupted = True
        self._up.signal("SIGINT", self._waiting())

    def _collect(self, timeout: float, presses: list[int], until_error: bool = False) -> None:
        deadline = monotonic() + timeout
        while self._waiting() and monotonic() < deadline and not presses:
            over = self._up.over()
            for rank in self._waiting():
                if self._was_aborted(rank):
                    self._send([rank])
                elif self._results[rank].ready():
                    self._replies[rank] = self._read(rank)
                    if until_error and self._replies[rank].status == "error":
                        deadline = min(deadline, monotonic() + AFTER_AN_ERROR)
                elif over:
                    self._replies[rank] = dead(rank)
            for rank in self._waiting()[:1]:
                self._results[rank].wait(LOOK)

    def _was_aborted(self, rank: int) -> bool:
        """Return whether the rank has not begun: after an error, it discards what has just come."""
        result = self._results[rank]
        if not result.ready():
            return False
        import ipyparallel as ipp

        return isinstance(result.exception(), ipp.error.TaskAborted)

    def _read(self, rank: int) -> Reply:
        result = self._results[rank]
        # The result may arrive before the output.
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
            reply = Reply(rank, forged=self._confirm(rank, answer), **answer)
        except (ValueError, TypeError, KeyError):  # an answer printed this, not rank_side
            return Reply(rank, "error", error="the rank's reply was cut off")
        if self._interrupted and reply.kind == "KeyboardInterrupt":
            return replace(reply, status="silent")
        return reply

    def _confirm(self, rank: int, answer: dict[str, Any]) -> str:
        """Put the kernel's own records into an answer; return a sign of forgery, or ""."""
        if answer.get("status") != "ok":
            return ""
        try:
            answer |= self._up.confirmed(rank, answer.get("value"))._asdict()
        except ValueError as error:
            return str(error)
        return ""

    def _without_answer(self, rank: int, result: ipp.AsyncResult) -> Reply:
        import ipyparallel as ipp

        error = result.exception()
        if isinstance(error, ipp.error.EngineError) or rank not in self._up.client.ids:
            return dead(rank)
        if isinstance(error, ipp.error.RemoteError):
            if self._interrupted and error.ename == "KeyboardInterrupt":
                before = "the rank was interrupted before it answered"
                return Reply(rank, "silent", error=before, kind=error.ename)
            return Reply(rank, "error", error=f"{error.ename}: {error.evalue}")
        return Reply(rank, "error", error=f"the rank printed no reply ({error or 'and no error'})")


def dead(rank: int) -> Reply:
    """Return the reply of a rank whose process is gone."""
    error = "the rank is dead (killed, os._exit, a crash inside C, or out of memory)."
    return Reply(rank, "error", error=f"{error} {FRESH_RANKS}", lost=True)


def unreceived(message: dict[str, Any]) -> str:
    """Return what the sender of a message did and should do, if no rank received the message."""
    where = f" at {message['where']}" if message["where"] else ""
    return (
        f"sent {message['what']} to rank {message['to']}{where}, and no rank has received it, so "
        f"it was discarded. Add the missing recv, or give it the same tag."
    )


# --- what a rank puts into its answer ---------------------------------------------------------


def about(error: BaseException, text: str) -> dict[str, Any]:
    """Return what a reply says about an error in addition to its text, as JSON values.

    Args:
        error: the exception that a rank raised.
        text: the exception's message, or a replacement if the student's class can't show it.
    """
    kind = type(error).__name__
    missing = error.name if isinstance(error, NameError) else None
    opened = open_task(kind, text)
    return {
        "kind": NO_GROUP if _lacks_group(error) else kind,
        "open": opened,
        "missing": missing or "",
    }


def _lacks_group(error: BaseException) -> bool:
    """Return whether PyTorch or the course raised an error of Python without a process group."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or distributed.is_initialized():
        return False
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    ours = (str(Path(distributed.__file__ or "").parent), str(Path(utils.__file__).parent))
    return type(error).__module__ == "builtins" and bool(files) and files[-1].startswith(ours)


_PLAIN = {bool, int, float, str, type(None)}


def plain(value: Any, name: str = RESULT, other: Callable[[Any], str] | None = None) -> Any:
    """Return a result in the types of JSON, so that a check compares numbers of any kind.

    Tensors and arrays become lists of their elements (or a number, if they have no dimension).
    Tuples, ranges, sets and lists become lists, and NumPy numbers become Python numbers.

    Args:
        name: the name of the result in an error.
        other: makes a text of a value that JSON can't represent, instead of the error.

    Raises:
        TypeError: JSON can't represent the result; the message names the part and its type.
    """
    if isinstance(value, bool | int | float | str | None):
        return value
    if isinstance(value, Mapping):
        return {
            _key(key, name): plain(item, _part(name, key), other) for key, item in value.items()
        }
    if isinstance(value, list | tuple | range):
        return [
            # Most results are long lists of numbers, whose parts need no names.
            item if type(item) in _PLAIN else plain(item, _part(name, k), other)
            for k, item in enumerate(value)
        ]
    if isinstance(value, set | frozenset):
        return [plain(item, name, other) for item in sorted(value, key=repr)]
    if kind := _kind_of_array(value):
        # The method of the class, because an answer may have given this tensor another method.
        return plain(kind.tolist(value), name, other)
    if other is not None:
        return other(value)
    raise TypeError(f"{name} is {_in_words(value)}")


def _kind_of_array(value: Any) -> Any:
    """Return the class of the value, if it is a known kind of array; ``None`` otherwise.

    A `tolist` alone is not enough, because a student's class could then choose what a check sees.
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
    raise TypeError(f"{name} has the key {key!r}. Use strings or numbers as keys")


def _in_words(value: Any) -> str:
    """Say what a value that JSON can't represent is, and give advice."""
    kind = type(value).__name__
    if callable(value) and hasattr(value, "__name__") and not isinstance(value, type):
        call = f"{value.__name__}()"
        return f"the function {value.__name__} itself. Call the function: {call}"
    article = "an" if kind[0].lower() in "aeiou" else "a"
    return f"{article} {kind}. Use numbers, strings, or lists of them"
