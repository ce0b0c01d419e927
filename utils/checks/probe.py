"""The tools of checks on the ranks: find the student's functions, and record what they send."""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from torch_mpi.record import as_dict, log
from utils.cluster.notebook_words import number_of
from utils.cluster.questions import plain

if TYPE_CHECKING:
    import torch
    from torch import nn

Probe = TypeVar("Probe", bound=Callable[..., Any])

# Collectives that no rank leaves before all ranks have called them.
TOGETHER = ("barrier", "all_reduce", "all_gather", "all_gather_into_tensor", "all_to_all")


def answer_named(user_ns: dict[str, Any], name: str) -> Any:
    """Return what the student defined as `name` on this rank.

    Raises:
        NameError: the name isn't defined; the message gives advice.
    """
    if name not in user_ns:
        said = f"{name} is not defined on this rank. Run the cell that defines it"
        raise NameError(said, name=name)
    return user_ns[name]


class ArgumentChanged(Exception):
    """An answer changed an argument that its task only reads."""


def reading_answer(
    user_ns: dict[str, Any], name: str, *, changes: tuple[int, ...] = ()
) -> Callable[..., Any]:
    """Return the student's function with a guard that it doesn't change its arguments.

    The guard compares tensors, arrays, lists, sets and dicts before and after each call, at any
    depth. It ignores modules, generators and other objects.

    Args:
        changes: positions of the arguments that the task wants changed, from 0.

    Raises:
        NameError: there is no such function.
        ArgumentChanged: raised by the returned function; the message names the argument.
    """
    function = answer_named(user_ns, name)

    @functools.wraps(function)
    def reading(*args: Any, **kwargs: Any) -> Any:
        arguments: dict[int | str, Any] = dict(enumerate(args))
        arguments.update(kwargs)
        before = {key: _trace(value) for key, value in arguments.items() if key not in changes}
        result = function(*args, **kwargs)
        for key, trace in before.items():
            if [trace] != [_trace(arguments[key])]:  # in lists, as NaN is not equal to itself
                which = _parameter(function, key)
                raise ArgumentChanged(f"{name} changed its argument {which}. Work on a copy of it")
        return result

    return reading


def _parameter(function: Callable[..., Any], key: int | str) -> str:
    """Return the student's name for an argument that was passed by position or by name."""
    if isinstance(key, str):
        return key
    names = list(inspect.signature(function).parameters)
    return names[key] if key < len(names) else f"number {key + 1}"


def _trace(value: Any) -> Any:
    """Return a value that is equal as long as `value` isn't changed; other objects themselves."""
    import torch

    if isinstance(value, torch.Tensor):
        return fingerprint(value)
    numpy = sys.modules.get("numpy")  # if nobody has imported NumPy, no value is an array
    if numpy is not None and isinstance(value, numpy.ndarray):
        return value.tobytes()
    if isinstance(value, dict):
        return [(key, _trace(one)) for key, one in value.items()]
    if isinstance(value, list | tuple):
        return [_trace(one) for one in value]
    return set(value) if isinstance(value, set) else value


def kind_of(value: Any) -> str:
    """Return the type of a result in words: "list of int", "Tensor", "float"."""
    if isinstance(value, list | tuple | set):
        inner = sorted({type(one).__name__ for one in value})
        return f"{type(value).__name__} of {' and '.join(inner) or 'nothing'}"
    return type(value).__name__


def definitions(user_ns: dict[str, Any], *, rank: int, names: list[str]) -> dict[str, Any]:
    """Return what this rank knows about these functions.

    Returns:
        `functions`: by the name of each function that exists, a digest of its code and the number
        of its cell, or None.
    """
    functions = {
        name: user_ns[name] for name in names if isinstance(user_ns.get(name), types.FunctionType)
    }
    known = {
        name: [digest(function), number_of(function.__code__.co_filename)]
        for name, function in functions.items()
    }
    return {"functions": known}


def digest(function: types.FunctionType) -> str:
    """Return a digest that is equal for functions with equal code, even from different cells."""
    return hashlib.sha256(repr(_code(function.__code__)).encode()).hexdigest()


def _code(code: types.CodeType) -> tuple[Any, ...]:
    constants = [_code(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts]
    return code.co_code, code.co_names, code.co_varnames, constants


def told(value: Any) -> Any:
    """Return the value in the types of JSON; `<TypeName>` if JSON has no such type."""
    return plain(value, other=lambda one: f"<{type(one).__name__}>")


def values_of(value: Any) -> Any:
    """Return a tensor's numbers in a row; None unchanged; `<TypeName>` for another value.

    A tensor that an answer returns may have methods by the answer. So here, and wherever a probe
    reads numbers, the methods are those of the class.
    """
    import torch

    if isinstance(value, torch.Tensor):
        return torch.Tensor.detach(value).reshape(-1).tolist()
    return None if value is None else f"<{type(value).__name__}>"


def number(value: Any) -> Any:
    """Return a number or None unchanged, and `<Tensor>` even for a tensor with one entry."""
    return value if value is None or isinstance(value, int | float) else f"<{type(value).__name__}>"


class ResultChanged(Exception):
    """A call of an answer changed the object that an earlier call had returned."""


def kept(name: str, result: Any, again: Callable[[], Any]) -> Any:
    """Return the result of ``again``, which calls the answer ``name`` another time.

    Raises:
        ResultChanged: this call changed the result of the earlier call.
    """
    before = _trace(result)
    later = again()
    if [before] != [_trace(result)]:
        raise ResultChanged(
            f"{name} changed what its earlier call had returned. Make a new result in each call"
        )
    return later


def also_calls(*operations: str) -> Callable[[Probe], Probe]:
    """Mark a probe that makes calls beside those that it records, such as those of DDP's start.

    If the kernel carries the ranks' messages, a check refuses all other calls that no record shows.
    """
    return _marked("beside", operations)


def plays_a_part(*operations: str) -> Callable[[Probe], Probe]:
    """Mark a probe that on some ranks doesn't call the answer, but is its partner in messages.

    These operations need no records on a rank whose reply has none. A rank that calls the answer
    reports its calls, and so has to report all of them.
    """
    return _marked("part", operations)


def _marked(name: str, operations: tuple[str, ...]) -> Callable[[Probe], Probe]:
    """Return a decorator that gives a probe these operations as an attribute."""

    def mark(probe: Probe) -> Probe:
        vars(probe)[name] = operations
        return probe

    return mark


def recorded(
    function: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[Any, list[dict[str, Any]]]:
    """Call a function; return its result and its communication, as records for JSON."""
    mark = log.mark()
    result = function(*args, **kwargs)
    return result, [as_dict(call) for call in log.since(mark)]


def fingerprint(value: Any) -> str:
    """Return a digest of a tensor's bits, dtype and shape; `<TypeName>` for another value.

    A rank sends the digest of a long tensor. Only the kernel knows the right digest.
    """
    import torch

    if not isinstance(value, torch.Tensor):
        return f"<{type(value).__name__}>"
    # The method of the class, because an answer may have given this tensor another method.
    row = torch.Tensor.detach(value).cpu().reshape(-1).contiguous().view(torch.uint8)
    about = f"{value.dtype} {list(value.shape)} ".encode()
    return hashlib.sha256(about + torch.Tensor.numpy(row).tobytes()).hexdigest()


def numbers(
    seed: int, *shape: int, low: int = -50, high: int = 50, double: bool = False
) -> torch.Tensor:
    """Return multiples of 1/8 as float32, whose sums are exact; the same seed gives the same.

    In double precision, the numbers have digits that float32 would lose.
    """
    import torch  # here, because a kernel's checks that only compare numbers don't need it

    generator = torch.Generator().manual_seed(seed)
    row = torch.randint(8 * low, 8 * high, shape, generator=generator) / 8
    return row.double() * (1 + 2.0**-26) if double else row


def in_double(module: nn.Module) -> nn.Module:
    """Return the module in double precision, with digits that float32 would lose."""
    import torch

    module = module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1 + 2.0**-26)
    return module


def probe_calls(user_ns: dict[str, Any], *, rank: int, calls: list[Any]) -> list[Any]:
    """Return the results of functions, one call (name, arguments) after the other.

    Raises:
        ValueError: a function returned the same list or dict object as in another call.
    """
    returned = []
    results = Results()
    for name, arguments in calls:
        function = reading_answer(user_ns, name)
        result = function(*arguments)
        returned.append(told(result))
        if results.add(name, result):
            results.add(name, function(*arguments))
    return returned


class Results:
    """The objects that functions have returned, so that none is returned a second time."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}  # alive, so ids differ

    def add(self, name: str, result: Any) -> list[list[Any] | dict[Any, Any]]:
        """Return the parts of a result that can be changed: the result itself, or its entries.

        Raises:
            ValueError: an earlier call has returned one of these objects.
        """
        parts = result if isinstance(result, list | tuple) else ()
        parts_made = [part for part in (result, *parts) if isinstance(part, list | dict)]
        shared = next((part for part in parts_made if id(part) in self._seen), None)
        if shared is not None:
            kind = type(shared).__name__
            raise ValueError(
                f"{name} returned the same {kind} in two calls, so changing one changes the other. "
                f"Make a new {kind} in each call"
            )
        self._seen |= {id(part): part for part in parts_made}
        return parts_made
