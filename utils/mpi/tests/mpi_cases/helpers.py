"""What the cases share."""

import contextlib

import pytest
import torch
import torch.distributed as dist

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
COMPLEX = [torch.complex64, torch.complex128]
INTEGERS = [
    torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip
EIGHT_BIT_FLOATS = [torch.float8_e4m3fn, torch.float8_e5m2]
ALL = [*FLOATS, *COMPLEX, *INTEGERS, torch.bool, *EIGHT_BIT_FLOATS]


def rank() -> int:
    """This rank."""
    return dist.get_rank()


def size() -> int:
    """The world size."""
    return dist.get_world_size()


def of_rank(r: int, shape=(5,), dtype=torch.float32) -> torch.Tensor:
    """Values that every rank can compute for every other rank; small, so that sums are exact."""
    count = torch.Size(shape).numel()
    values = (torch.arange(count) * 3 + r) % 5 + (0 if dtype is torch.bool else 1)
    return values.reshape(shape).to(torch.float32).to(dtype)


def everybody(shape=(5,), dtype=torch.float32) -> list[torch.Tensor]:
    """:func:`of_rank` of all ranks."""
    return [of_rank(r, shape, dtype) for r in range(size())]


def same(got: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    """Bit for bit, with both sides in the message."""
    alike = got.dtype == expected.dtype and got.shape == expected.shape
    if not alike or not bytes_of(got) == bytes_of(expected):
        raise AssertionError(f"{what}: rank {rank()} got {got}, expected {expected}")


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The elements as bytes; 8-bit floats have no ``==``."""
    row = tensor.detach().resolve_conj().contiguous().view(-1).view(torch.uint8)
    return row.numpy().tobytes()


@contextlib.contextmanager
def refused(kind: type[Exception], *words: str):
    """The block must raise ``kind``, and the message must hold the words."""
    with pytest.raises(kind) as caught:
        yield
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in the message: {caught.value}"
