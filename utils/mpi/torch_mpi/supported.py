"""Which versions of PyTorch the backend was tested with.

Nothing is imported on top except ``warnings``, which Python has loaded by then.
"""

import warnings

# The oldest minor version that works, and the newest one that the tests ran with.
FIRST, LAST = (2, 13), (2, 15)


class UnsupportedPyTorch(RuntimeError):
    """This PyTorch is older than the backend needs."""


class UntestedPyTorchWarning(UserWarning):
    """This PyTorch is newer than the versions that the backend was tested with."""


def check_version(version: str) -> None:
    """Raise UnsupportedPyTorch for a version that is too old; warn about one that is too new.

    Args:
        version: PyTorch's version, such as "2.15.0+cu130".
    """
    first, last = (".".join(map(str, one)) for one in (FIRST, LAST))
    if minor(version) < FIRST:
        raise UnsupportedPyTorch(
            f"The mpi backend needs PyTorch {first} or newer, and this is PyTorch {version}. "
            f"Run pip install 'torch>={first}'."
        )
    if minor(version) > LAST and version not in _warned:
        _warned.add(version)
        warnings.warn(
            f"The mpi backend was tested with PyTorch {first} to {last}, and this is PyTorch "
            f"{version}. If something fails, run pip install 'torch<{LAST[0]}.{LAST[1] + 1}'.",
            UntestedPyTorchWarning,
            stacklevel=2,
        )


# The versions that this process has warned about.
_warned: set[str] = set()


def minor(version: str) -> tuple[int, int]:
    """Return the first two numbers: (2, 15) of "2.15.0a0+git1234"."""
    first, second = version.split(".")[:2]
    return int(first), int(second)
