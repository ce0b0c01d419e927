"""Values as JSON and raw bytes, so that they travel in a frame: numbers, texts, lists, tensors, …

Only what is listed here can be made from a frame, so no code of a student runs when it is read.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.distributed import ReduceOp

from torch_mpi.group import arguments, arithmetic, tensors

from .frames import BrokenFrame, Piece

#: Dtypes by their short names. Only these travel: others, such as quantized ones, aren't made of
#: numbers alone, and PyTorch crashes when it makes them from bytes.
DTYPES = {
    name: getattr(torch, name)
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    )
}
#: Most bytes that a frame may claim for tensors whose content it doesn't bring.
MOST_ROOM = 4 * 1024**3
#: Options of PyTorch's calls that a collective reads.
OPTIONS = ("asyncOp", "rootRank")
#: Modules whose dataclasses may travel.
OURS = "utils."
_NUMPY = "biufc"
_PLAIN = (bool, int, float, str, type(None))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor's elements, in order."""
    plain = tensors.readable(tensor)
    if not plain.numel():
        return memoryview(b"")
    # With an array of NumPy, PyTorch would refuse to resize the tensor for good.
    memory: Any = (ctypes.c_char * tensors.nbytes(plain)).from_address(plain.data_ptr())
    memory.owner = plain
    return memoryview(memory).cast("B")


def described(tensor: torch.Tensor) -> dict[str, Any]:
    """Return dtype and shape of a tensor as JSON."""
    return {"dtype": arguments.dtype_name(tensor.dtype), "shape": list(tensor.shape)}


def _shape_and_dtype(about: Mapping[str, Any]) -> tuple[list[int], torch.dtype]:
    shape = about.get("shape")
    dtype = DTYPES.get(about.get("dtype", ""))
    if dtype is None or not isinstance(shape, list):
        raise BrokenFrame(f"there is no tensor {about}")
    if not all(type(n) is int and n >= 0 for n in shape):
        raise BrokenFrame(f"there is no tensor of shape {shape}")
    return shape, dtype


def tensor_of(about: Mapping[str, Any], piece: Piece) -> torch.Tensor:
    """Return the tensor that :func:`described` describes, whose memory is this piece.

    Raises:
        BrokenFrame: the piece has another size.
    """
    shape, dtype = _shape_and_dtype(about)
    if math.prod(shape) * dtype.itemsize != len(piece):
        raise BrokenFrame(f"a tensor {about} can't have {len(piece)} bytes")
    if not len(piece):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(piece, dtype=dtype).reshape(shape)


# --- any value -----------------------------------------------------------------------------------


def packed(value: Any, pieces: list[Piece]) -> Any:
    """Return a value as JSON; raw bytes are added to the pieces.

    Raises:
        TypeError: it has a part that can't travel; the message names its type.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, list):
        return [packed(part, pieces) for part in value]
    for pack in (_packed_bytes, _packed_parts):
        found = pack(value, pieces)
        if found is not None:
            return found
    for kind in (int, float, str):
        if isinstance(value, kind):  # of a subclass, such as an Enum with numbers
            return kind(value)
    raise TypeError(
        f"a rank can't send a {type(value).__name__} to the kernel. Send numbers, texts, tensors, "
        "arrays, or lists, tuples and dicts of them"
    )


def _packed_bytes(value: Any, pieces: list[Piece]) -> dict[str, Any] | None:
    """Return a tensor, an array or bytes as JSON; None for another value."""
    if isinstance(value, torch.Tensor):
        pieces.append(bytes_of(value.detach().cpu()))
        return {"tensor": len(pieces) - 1, **described(value)}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in _NUMPY:
        pieces.append(value.tobytes())
        return {"array": len(pieces) - 1, "dtype": value.dtype.str, "shape": list(value.shape)}
    if isinstance(value, bytes | bytearray):
        pieces.append(value)
        return {"bytes": len(pieces) - 1}
    return None


def _packed_parts(value: Any, pieces: list[Piece]) -> dict[str, Any] | None:
    """Return a value that consists of other values as JSON, if it isn't a list; otherwise None."""
    if type(value) in (tuple, torch.Size):
        return {"tuple": [packed(part, pieces) for part in value]}
    if isinstance(value, set | frozenset):
        return {"set": [packed(part, pieces) for part in value]}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    if type(value).__module__.startswith(OURS) and (names := _fields_of(type(value))):
        fields = {name: getattr(value, name) for name in names}
        name = [type(value).__module__, type(value).__qualname__]
        return {"dataclass": name, "fields": packed(fields, pieces)}
    if isinstance(value, Mapping):
        return {"dict": [[packed(k, pieces), packed(v, pieces)] for k, v in value.items()]}
    return None


def unpacked(json: Any, pieces: Sequence[Piece]) -> Any:
    """Return the value that :func:`packed` has packed.

    Raises:
        BrokenFrame: it is no such value.
    """
    if type(json) in _PLAIN:
        return json
    if isinstance(json, list):
        return [unpacked(part, pieces) for part in json]
    for name, make in _MAKERS.items():
        if name in json:
            try:
                return make(json, json[name], pieces)
            except (ArithmeticError, LookupError, TypeError, ValueError) as error:
                raise BrokenFrame(f"a frame has no {name}: {error}") from None
    raise BrokenFrame(f"a frame has an unknown value: {[*json]}")


def _array(about: Mapping[str, Any], index: Any, pieces: Sequence[Piece]) -> Any:
    dtype = np.dtype(about["dtype"])
    if dtype.kind not in _NUMPY:
        raise ValueError(f"an array of {dtype}")
    array: Any = np.frombuffer(pieces[index], dtype).reshape(about["shape"])
    return array if about["shape"] else array[()]


def _fields_of(kind: type) -> list[str]:
    """Return the names of the fields of a dataclass or of a named tuple; [] for other classes."""
    if dataclasses.is_dataclass(kind):
        return [one.name for one in dataclasses.fields(kind)]
    return list(kind._fields) if issubclass(kind, tuple) and hasattr(kind, "_fields") else []


def _dataclass(about: Mapping[str, Any], name: Any, pieces: Sequence[Piece]) -> Any:
    """Return a dataclass of the course that this process has imported."""
    module, kind = name
    made = getattr(sys.modules[module], kind) if module.startswith(OURS) else None
    if not isinstance(made, type) or not _fields_of(made):
        raise ValueError(f"{module}.{kind} is no dataclass of the course")
    return made(**unpacked(about["fields"], pieces))


_MAKERS: dict[str, Callable[[Mapping[str, Any], Any, Sequence[Piece]], Any]] = {
    "tensor": lambda about, index, pieces: tensor_of(about, pieces[index]),
    "array": _array,
    "bytes": lambda about, index, pieces: bytes(pieces[index]),
    "tuple": lambda about, parts, pieces: tuple(unpacked(part, pieces) for part in parts),
    "set": lambda about, parts, pieces: {unpacked(part, pieces) for part in parts},
    "dataclass": _dataclass,
    "range": lambda about, parts, pieces: range(*parts),
    "dict": lambda about, pairs, pieces: {
        unpacked(key, pieces): unpacked(value, pieces) for key, value in pairs
    },
}


# --- the arguments of a collective ----------------------------------------------------------------


class _PremulSum:
    """PyTorch's ``PREMUL_SUM``. The rank has already multiplied its elements by the factor."""

    op = ReduceOp.PREMUL_SUM

    def __getstate__(self) -> tuple[object, float]:
        return self.op, 1.0


def described_arguments(given: Any) -> Any:
    """Return the arguments of a process group's method as JSON, with tensors without elements."""
    if isinstance(given, torch.Tensor):
        return described(given)
    if isinstance(given, list | tuple):
        return [described_arguments(part) for part in given]
    if type(given) in _PLAIN:
        return given
    options = {name: getattr(given, name) for name in OPTIONS if hasattr(given, name)}
    if hasattr(given, "reduceOp") or isinstance(given, ReduceOp | ReduceOp.RedOpType):
        options["reduceOp"] = arithmetic.op_name(given)
    return {"options": options}


def arguments_of(json: Any) -> list[Any]:
    """Return the arguments that :func:`described_arguments` describes; the tensors are zeros.

    Raises:
        BrokenFrame: they are no such arguments.
    """
    room = [MOST_ROOM]
    try:
        return [_argument(part, room) for part in json]
    except (AttributeError, LookupError, TypeError) as error:
        raise BrokenFrame(f"a frame has no arguments of a collective: {error}") from None


def _argument(json: Any, room: list[int]) -> Any:
    if type(json) in _PLAIN:
        return json
    if isinstance(json, list):
        return [_argument(part, room) for part in json]
    if "shape" in json:
        shape, dtype = _shape_and_dtype(json)
        room[0] -= math.prod(shape) * dtype.itemsize
        if room[0] < 0:
            raise BrokenFrame(f"the tensors of a call have more than {MOST_ROOM} bytes")
        return torch.zeros(shape, dtype=dtype)
    told = json["options"]
    options = SimpleNamespace(asyncOp=bool(told.get("asyncOp", True)))
    if "rootRank" in told:
        options.rootRank = int(told["rootRank"])
    if name := told.get("reduceOp"):
        is_premul = name == "PREMUL_SUM"
        options.reduceOp = _PremulSum() if is_premul else ReduceOp.RedOpType.__members__[name]
    return options
