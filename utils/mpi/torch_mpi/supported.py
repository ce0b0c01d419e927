"""Which versions of PyTorch the backend works with: those that it is tested with.

Nothing is imported on top, as this is read at the end of every ``import torch``.
"""

# The first and the last minor version. pyproject.toml gives pip the same range.
FIRST, LAST = (2, 13), (2, 15)


class UnsupportedPyTorch(RuntimeError):
    """This PyTorch is older or newer than those that the backend is tested with."""


def refuse_other_pytorch(version: str) -> None:
    """Raise UnsupportedPyTorch where a version such as "2.15.0+cu130" is not in the range."""
    if FIRST <= minor(version) <= LAST:
        return
    first, last, behind = (".".join(map(str, v)) for v in (FIRST, LAST, (LAST[0], LAST[1] + 1)))
    raise UnsupportedPyTorch(
        f"the mpi backend works with PyTorch {first} to {last}, and this is PyTorch {version}: "
        f"pip install 'torch>={first},<{behind}'"
    )


def minor(version: str) -> tuple[int, int]:
    """The first two numbers: (2, 15) of "2.15.0a0+git1234"."""
    first, second = version.split(".")[:2]
    return int(first), int(second)
