"""Check PyTorch's version, and wrap what the backend uses beyond PyTorch's documentation.

A new version of PyTorch may remove any of these names, so :func:`check` runs before the first
process group is made. ``CONTRIBUTING.md`` has the matrix of versions that the tests run on.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import warnings
from collections.abc import Iterable
from types import FrameType
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.constants import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel

from .errors import users_line
from .group.storages import keep_memory_in_use
from .launcher import Announcement

# The oldest minor version that works, and the newest one that the tests ran with.
FIRST = (2, 13)
LAST = (2, 15)
# The versions that this process has warned about.
_warned: set[str] = set()

_C10D = distributed_c10d.__file__
# There are at most this many frames from PyTorch's `send` or `recv` to ours.
_NEAR = 9
_MAKER = "_new_process_group_helper"


class UnsupportedPyTorch(RuntimeError):
    """The error for a PyTorch that is older than the backend needs."""


class UntestedPyTorchWarning(UserWarning):
    """The warning for a PyTorch that is newer than the versions that the tests ran with."""


class IncompatiblePyTorch(RuntimeError):
    """The error for a PyTorch that lacks something that the backend uses."""


def check_version(version: str) -> None:
    """Raise UnsupportedPyTorch for a version that is too old; warn about one that is too new."""
    first = ".".join(map(str, FIRST))
    last = ".".join(map(str, LAST))
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


def minor(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version, such as (2, 15) for "2.15.0a0+git1234"."""
    first, second = version.split(".")[:2]
    return int(first), int(second)


def check() -> None:
    """Raise IncompatiblePyTorch if PyTorch lacks something; the error names it and the version."""
    if missing := [name for name, there in _needed() if not there]:
        raise IncompatiblePyTorch(
            f"PyTorch {torch.__version__} lacks names that the mpi backend uses: "
            f"{', '.join(missing)}. Run pip install 'torch>={FIRST[0]}.{FIRST[1]},"
            f"<{LAST[0]}.{LAST[1] + 1}'."
        )


def _needed() -> Iterable[tuple[str, bool]]:
    c10d = distributed_c10d
    maker = getattr(c10d, _MAKER, None)
    parameters = inspect.signature(maker).parameters if callable(maker) else ()
    yield f"distributed_c10d.{_MAKER}(timeout=…)", "timeout" in parameters
    init = inspect.signature(c10d.init_process_group).parameters
    yield (
        "distributed_c10d.init_process_group(rank=…, world_size=…)",
        {"rank", "world_size"} <= {*init},
    )
    for name in ("send", "recv", "isend", "irecv"):
        yield f"distributed_c10d.{name}", callable(getattr(c10d, name, None))
    yield "autograd._profiler_enabled", callable(getattr(torch.autograd, "_profiler_enabled", None))
    for name in ("_record_function_with_args_enter", "_record_function_with_args_exit"):
        yield f"_C._autograd.{name}", hasattr(torch._C._autograd, name)
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    yield "autograd.Variable._execution_engine.queue_callback", hasattr(engine, "queue_callback")
    hook = getattr(DistributedDataParallel, "_register_builtin_comm_hook", None)
    yield "DistributedDataParallel._register_builtin_comm_hook", callable(hook)
    yield "distributed.ReduceOp.RedOpType", hasattr(torch.distributed.ReduceOp, "RedOpType")


def timeout_of_the_caller() -> float | None:
    """Return the timeout of ``init_process_group`` or ``new_group`` in seconds, from its frame."""
    asked = _locals_of(_MAKER).get("timeout", default_pg_timeout)
    return None if asked in (None, default_pg_timeout) else asked.total_seconds()


def check_request() -> None:
    """Refuse a mixed group, and warn if the program wants PyTorch to check for NaN.

    PyTorch drops the other backends of a mixed group without a word, because an mpi group is a
    whole process group. See docs/pytorch-backend.md in the course.

    Raises:
        ValueError: the program asked for a group such as ``cpu:mpi,cuda:nccl``.
    """
    asked = str(_locals_of(_MAKER).get("backend", "mpi"))
    others = {part.rpartition(":")[2] for part in asked.split(",")} - {"mpi"}
    if others:
        raise ValueError(
            f"You asked for the backend {asked!r}, but mpi can't share a process group with "
            f"{' and '.join(sorted(others))}. Make two groups: init_process_group"
            f"({min(others)!r}), and new_group(backend='mpi') for tensors on the CPU."
        )
    if os.environ.get("TORCH_DIST_NAN_CHECK") == "1":
        warnings.warn(
            "TORCH_DIST_NAN_CHECK=1 has no effect on groups of mpi: PyTorch's check can't see "
            "their calls. Check your tensors with torch.isnan, or use gloo.",
            stacklevel=2,
        )


def asked_of_pytorch() -> Announcement | None:
    """Return the rank and the world size that the program gave to PyTorch; ``None`` without any.

    ``init_process_group("mpi", rank=…, world_size=…)`` only warns that it ignores them, so this
    function reads them from its frame. For ``new_group``, it asks the default group.
    """
    if arguments := _locals_of("init_process_group"):
        source = "Your call of init_process_group"
        numbers = [arguments.get("world_size", -1), arguments.get("rank", -1)]
    elif dist.is_initialized() and "mpi" not in dist.get_backend():
        source = "The default process group"
        numbers = [dist.get_world_size(), dist.get_rank()]
    else:
        return None
    size, rank = (None if number in (None, -1) else number for number in numbers)
    return None if size is None and rank is None else Announcement(source, size, rank)


def _frame_of(name: str, nearest: int) -> FrameType | None:
    """Return the frame of PyTorch's function ``name``, if it is among the ``nearest`` callers."""
    frame = sys._getframe(1)
    while frame is not None and nearest:
        if frame.f_code.co_name == name and frame.f_code.co_filename == _C10D:
            return frame
        frame = frame.f_back
        nearest -= 1
    return None


def _locals_of(name: str) -> dict:
    frame = _frame_of(name, sys.maxsize)
    return {} if frame is None else frame.f_locals


def is_called_by(name: str) -> bool:
    """Return whether PyTorch's blocking ``name`` made this call of ``isend`` or ``irecv``."""
    return _frame_of(name, _NEAR) is not None


def adapt_pytorch() -> None:
    """Change what PyTorch does for this backend's groups, before the first one is made."""
    leave_out_flight_recorder()
    run_builtin_hooks_in_python()
    name_lines_of_outsiders()
    keep_memory_in_use()


def leave_out_flight_recorder() -> None:
    """Keep PyTorch 2.15 from attaching its flight recorder to this backend's groups.

    The recorder hooks into the C++ methods of ``ProcessGroup``, which this backend's groups replace
    in Python and never call. PyTorch leaves out the backends whose names are in the set.
    ``flight_recorder.py`` writes dumps in the recorder's format.
    """
    names = getattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", None)
    if isinstance(names, set):
        names.add("mpi")


def run_builtin_hooks_in_python() -> None:
    """Let DDP's built-in communication hooks run in Python on this backend's groups.

    The built-in hooks are written in C++, and expect a future that only a process group in C++
    makes. So they end in an internal assertion of PyTorch. The hooks in Python send the same.
    """
    builtin = DistributedDataParallel._register_builtin_comm_hook
    if hasattr(builtin, "__wrapped__"):
        return

    @functools.wraps(builtin)
    def register(self: DistributedDataParallel, comm_hook_type: dist.BuiltinCommHookType) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        if dist.get_backend(self.process_group) != "mpi":
            builtin(self, comm_hook_type)
            return
        compress = comm_hook_type == dist.BuiltinCommHookType.FP16_COMPRESS
        hook = default_hooks.fp16_compress_hook if compress else default_hooks.allreduce_hook
        self.register_comm_hook(self.process_group, hook)

    DistributedDataParallel._register_builtin_comm_hook = register


def name_lines_of_outsiders() -> None:
    """Let PyTorch's warning about a call on a group without this rank name the user's line."""
    if hasattr(distributed_c10d._warn_not_in_group, "__wrapped__"):
        return

    @functools.wraps(distributed_c10d._warn_not_in_group)
    def warn(op_name: str) -> None:
        warnings.warn(
            f"rank {dist.get_rank()} calls {op_name} at {users_line()}, but does not belong to the "
            "given group, so nothing happens on this rank. Call it only on the group's ranks.",
            stacklevel=4,
        )

    distributed_c10d._warn_not_in_group = warn


class _NoStore(dist.Store):
    """What other backends find in a world that MPI has connected: an error that says what to do.

    PyTorch puts an empty store there, whose methods end in an internal assertion.
    """

    def _refuse(self, *_: object) -> NoReturn:
        raise RuntimeError(
            "this needs a store in which ranks leave their addresses, and a world that began with "
            'init_process_group("mpi") has none. A group of another backend, such as "gloo", is '
            "not possible in it: leave backend=… out, and the new group uses mpi. To use gloo, "
            'begin with it: torchrun program.py, with init_process_group("gloo").'
        )

    set = get = add = wait = check = compare_set = append = multi_get = multi_set = _refuse
    delete_key = num_keys = queue_push = queue_pop = _refuse


# PyTorch's C++ finds the methods only as long as this object lives.
no_store = _NoStore()


def analyzer_knows_any_backend() -> bool:
    """Return whether ``torchfrtrace`` reads calls of any backend, and receives from any rank."""
    return minor(torch.__version__) >= (2, 15)


def never_compile(*classes: type) -> None:
    """Have torch.compile call these methods as they are: it cannot trace into a process group."""
    from torch._C._dynamo import eval_frame

    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    for method in (m for c in classes for m in vars(c).values() if inspect.isfunction(m)):
        eval_frame.set_code_exec_strategy(method.__code__, skip)  # for calls from C++
        method._torchdynamo_disable = True
        method._torchdynamo_disable_msg = "the mpi backend runs as it is"
