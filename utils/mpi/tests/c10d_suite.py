"""PyTorch's own tests of its backends, run on the mpi backend.

`python tests/c10d_suite.py -n 2 [-k PATTERN] [--json FILE]` runs every test of PyTorch's class
`DistributedTest._DistTestBase` (it comes with the wheel) on n MPI ranks, and prints what
passed, and by reason what was skipped, failed or hung. Two minutes where nothing fails.

A job of n ranks runs one test after the other, each in a process group of its own. It ends at
the first failure or hang, and the tests after it get a new job. Such a test counts when it was
the first of its job; otherwise it is tried once more as the first one.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
import unittest
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from mpi_jobs import find_mpiexec, kill_tree, mpi_environment

DEADLINE = 240  # seconds without news from any rank: the start, or the longest test
GRACE = 8  # seconds that the other ranks get when a test failed on one
GROUP_TIMEOUT = 30  # seconds; a few tests have their own in PyTorch's table
STATUSES = ("pass", "skip", "fail", "hang")

# Reasons to skip a test that hold for PyTorch's own MPI backend, but not for this one.
UNTRUE = re.compile(
    "to be one of .*'gloo'|Only gloo backend supports timeouts|GLOO Batch Send Recv"
    "|Coalescing manager currently tests with NCCL only|Only Nccl & Gloo backend support Dist"
)
# What PyTorch says where a test needs a GPU, NCCL, a second group of gloo, or even ranks.
NOT_HERE = re.compile(
    "SyncBatchNorm layers only work with GPU|accelerator device when none is available"
    "|cpu backend doesn't support events|have NCCL built in|c10d/init.cpp.* Not implemented"
    "|Found no NVIDIA driver|CUDA driver version is insufficient"
    "|must be divisible by 'group_size=2'"
)
# Tests that prove nothing here, by their names.
LEFT_OUT = {
    r"test_ddp_uneven_inputs$": "it trains a ResNet-50 on large images: minutes on CPUs",
    r"test_ddp_(device|logging_data_gpu)$": "it asks for the number of the rank's GPU",
    r"test_average_parameters$": "it makes a group of nccl on two of the ranks",
    r"monitored_barrier": "PyTorch has monitored_barrier for gloo only",
}


@dataclass
class Outcome:
    """What came of a test: `pass`, `skip`, `fail` or `hang`, why, and how long it took."""

    test: str
    status: str
    reason: str = ""
    seconds: float = 0.0
    detail: str = ""


# --- on every rank ----------------------------------------------------------------------------


def load_suite(n: int) -> types.ModuleType:
    """PyTorch's module of tests, told that mpi can do what gloo and nccl can."""
    os.environ |= {"BACKEND": "mpi", "WORLD_SIZE": str(n), "MASTER_ADDR": "localhost"}
    os.environ["PYTORCH_PRINT_REPRO_ON_FAILURE"] = "0"
    try:
        import expecttest  # noqa: F401
    except ImportError:  # PyTorch's base class inherits from it; these tests use nothing of it
        sys.modules["expecttest"] = types.ModuleType("expecttest")
        sys.modules["expecttest"].TestCase = unittest.TestCase
    from torch.testing._internal import common_distributed

    cases = common_distributed.DistTestCases
    for feature in ("gpu", "cuda", "ddp", "subgroup"):
        cases.backend_feature[feature].add("mpi")
    for unable in cases.skip_collective.values():
        unable.discard("mpi")
    common_distributed.skip_if_no_gpu = lambda test: test
    common_distributed.skip_if_lt_x_gpu = lambda *_, **__: lambda test: test
    from torch.testing._internal.distributed import distributed_test

    distributed_test.init_multigpu_helper = lambda n, _: {rank: [rank] for rank in range(n)}
    return distributed_test


def gpus_to_cpu() -> contextlib.AbstractContextManager:
    """Put on the CPU what a test puts on the GPU of its rank: most tests of DDP are like that."""
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.overrides import TorchFunctionMode

    class OnCPU(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            kwargs = dict(kwargs or {})
            if func is torch.Tensor.cuda:
                return args[0]
            if func is torch.Tensor.to and is_gpu(*args[1:2]):
                args = (args[0], "cpu", *args[2:])
            if is_gpu(kwargs.get("device")):
                kwargs["device"] = "cpu"
            return func(*args, **kwargs)

    def is_gpu(device: object = None) -> bool:
        names = isinstance(device, str | torch.device)
        return type(device) is int or (names and str(device).startswith("cuda"))

    def make_ddp(self, module, device_ids=None, output_device=None, **options):
        init_ddp(self, module, **options)

    def move(self, *target, **options):
        return move_module(self, *("cpu" if is_gpu(t) else t for t in target), **options)

    init_ddp, move_module = DistributedDataParallel.__init__, torch.nn.Module.to
    torch.nn.Module.to = move
    DistributedDataParallel.__init__ = make_ddp
    for name in ("set_device", "synchronize", "manual_seed"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    torch.cuda.current_device = lambda: 0
    torch.cuda.device = lambda _: contextlib.nullcontext()
    return OnCPU()


def names_of_tests(n: int) -> list[str]:
    """All tests of the suite, in the order of the alphabet."""
    base = load_suite(n).DistributedTest._DistTestBase
    return [name for name in dir(base) if name.startswith("test_")]


def run_on_ranks(folder: Path) -> None:
    """Run the tests of `folder/tests.json` until one fails; called on every rank."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    suite = load_suite(comm.size)
    stacks = open(folder / f"{comm.rank}.stacks", "w", encoding="utf-8")  # noqa: SIM115
    with (
        open(folder / f"{comm.rank}.jsonl", "w", encoding="utf-8", buffering=1) as news,
        gpus_to_cpu(),
    ):
        for name in json.loads((folder / "tests.json").read_text()):
            stacks.seek(0)
            stacks.truncate()
            faulthandler.dump_traceback_later(DEADLINE / 2, file=stacks)
            outcome = run_test(suite, name, folder / name, comm.rank)
            print(json.dumps(asdict(outcome)), file=news)
            if "fail" in comm.allgather(outcome.status):
                MPI.COMM_WORLD.Abort(1)  # what it left under way must not meet the next test


def run_test(suite: types.ModuleType, name: str, folder: Path, rank: int) -> Outcome:
    """Run one test in a process group and an environment of its own."""
    import torch.distributed as dist
    from torch.testing._internal.common_distributed import TEST_SKIPS
    from torch.testing._internal.common_utils import set_rng_seed

    test = type("OnRanks", (suite.TestDistBackend, suite.DistributedTest._DistTestBase), {})(name)
    method = getattr(test, name)
    reasons = [why for pattern, why in LEFT_OUT.items() if re.search(pattern, name)]
    reasons.append(getattr(method, "__unittest_skip_why__", ""))
    if reasons[0] and not UNTRUE.search(reasons[0]):
        return Outcome(name, "skip", reasons[0])
    if os.environ["WORLD_SIZE"] == "2":
        test._init_group_test = needs_three_ranks
    for part in ("barrier", "test_dir", "init_dir"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    environment, start = dict(os.environ), time.perf_counter()
    os.environ["TEMP_DIR"] = str(folder)
    suite.Barrier.barrier_id = 0
    test.rank, test.file_name = rank, str(folder / "init_file")
    outcome = Outcome(name, "pass")
    try:
        seconds = suite.CUSTOM_PG_TIMEOUT.get(name, GROUP_TIMEOUT)
        dist.init_process_group("mpi", timeout=timedelta(seconds=seconds))
        test._barrier()
        set_rng_seed()
        method()
        test._barrier()
        if dist.is_initialized():
            dist.destroy_process_group()
    except unittest.SkipTest as skip:
        outcome = Outcome(name, "skip", str(skip))
    except SystemExit as end:  # how a decorator of the suite says that it skips
        reasons = [skip.message for skip in TEST_SKIPS.values() if skip.exit_code == end.code]
        outcome = Outcome(name, "skip", *reasons) if reasons else Outcome(name, "fail", repr(end))
    except BaseException as error:
        if unable := NOT_HERE.search(str(error)):
            outcome = Outcome(name, "skip", unable[0])
        else:
            outcome = Outcome(name, "fail", first_line(error), detail=traceback.format_exc())
    if dist.is_initialized() and outcome.status == "skip":
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(environment)
    dist.set_debug_level_from_env()
    outcome.seconds = round(time.perf_counter() - start, 2)
    return outcome


def needs_three_ranks(**_) -> None:
    """Stands for the suite's group of ranks 1 and 2 where there is no rank 2."""
    raise unittest.SkipTest("a group of ranks 1 and 2 needs 3 ranks")


def first_line(error: BaseException) -> str:
    """`TypeError: first line of its text [the suite's line]`."""
    text = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:160]
    frames = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in frames if frame.filename.endswith("distributed_test.py")]
    return f"{text} [{frames[-1].line}]" if frames else text


# --- the runner -------------------------------------------------------------------------------


def run(
    names: list[str], n: int, tell: Callable[[Outcome], None] = lambda outcome: None
) -> dict[str, Outcome]:
    """Run tests on n ranks, in as few jobs as their failures allow."""
    waiting, outcomes = list(names), {}
    while waiting:
        done = run_job(waiting, n)
        last = done[-1]
        if last.status in ("fail", "hang") and len(done) > 1:
            done.pop()
        for outcome in done:
            outcomes[outcome.test] = outcome
            tell(outcome)
        waiting = waiting[len(done) :]
    return outcomes


def run_job(names: list[str], n: int) -> list[Outcome]:
    """What came of the first tests of `names`: up to the first that failed, or all."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "tests.json").write_text(json.dumps(names))
        with open(folder / "output.txt", "w", encoding="utf-8") as output:
            process = subprocess.Popen(
                [
                    *(find_mpiexec(), "-n", str(n), "--bind-to", "none"),
                    *(sys.executable, __file__, "--on-ranks", folder),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=mpi_environment(),
                start_new_session=True,
            )
            try:
                wait_for(process, folder, n)
                ended = process.poll() is not None
            finally:
                kill_tree(process)
        ranks = [read_news(folder, rank) for rank in range(n)]
        done = []
        for name in names:
            outcome = verdict(name, [rank.get(name) for rank in ranks], ended, folder)
            done.append(outcome)
            if outcome.status in ("fail", "hang"):
                break
        return done


def wait_for(process: subprocess.Popen, folder: Path, n: int) -> None:
    """Return when the job is over, or when its ranks have had no news for too long."""
    seen, last = -1, time.monotonic()
    while process.poll() is None:
        time.sleep(0.1)
        news = [o for rank in range(n) for o in read_news(folder, rank).values()]
        if len(news) > seen:
            seen, last = len(news), time.monotonic()
        failed = any(outcome.status == "fail" for outcome in news)
        if time.monotonic() - last > (GRACE if failed else DEADLINE):
            return


def read_news(folder: Path, rank: int) -> dict[str, Outcome]:
    """The outcomes that a rank has reported so far."""
    path = folder / f"{rank}.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    outcomes = [Outcome(**json.loads(line)) for line in lines if line.endswith("\n")]
    return {outcome.test: outcome for outcome in outcomes}


def verdict(name: str, ranks: list[Outcome | None], ended: bool, folder: Path) -> Outcome:
    """One outcome of those of all ranks; a rank that has none died or hangs."""
    failed = [f"rank {r}: {o.detail or o.reason}" for r, o in enumerate(ranks) if is_failure(o)]
    seconds = max((outcome.seconds for outcome in ranks if outcome), default=0.0)
    if failed:
        reason = next(outcome.reason for outcome in ranks if is_failure(outcome))
        return Outcome(name, "fail", reason, seconds, "\n".join(failed))
    if None in ranks:
        tail = (folder / "output.txt").read_text(errors="replace")[-3000:]
        if ended:
            return Outcome(name, "fail", "a rank died", seconds, tail)
        stacks = [path.read_text() for path in sorted(folder.glob("*.stacks"))]
        return Outcome(name, "hang", f"{DEADLINE} s without news", seconds, "\n".join(stacks))
    if len({outcome.status for outcome in ranks}) > 1:
        return Outcome(name, "fail", f"ranks disagree: {[o.status for o in ranks]}", seconds)
    return Outcome(name, ranks[0].status, ranks[0].reason, seconds)


def is_failure(outcome: Outcome | None) -> bool:
    """Did the test fail on that rank?"""
    return outcome is not None and outcome.status == "fail"


def summary(outcomes: list[Outcome]) -> str:
    """A table of all that did not pass, grouped by status and reason."""
    groups = defaultdict(list)
    for outcome in outcomes:
        groups[outcome.status, outcome.reason].append(outcome.test)
    lines = []
    for status in ("skip", "hang", "fail"):
        mine = sorted((g for g in groups.items() if g[0][0] == status), key=lambda g: -len(g[1]))
        for (_, reason), tests in mine:
            lines.append(f"{status} {len(tests):3}  {reason}")
            if status != "skip":
                lines += [f"            {test}" for test in tests]
    counts = [f"{status} {sum(o.status == status for o in outcomes)}" for status in STATUSES]
    return "\n".join([*lines, ", ".join(counts)])


def main() -> None:
    """Run what the command line asks for; the exit status is 1 when a test failed or hung."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", type=int, default=2, help="ranks")
    parser.add_argument("-k", default="", metavar="PATTERN", help="regular expression for names")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all outcomes there")
    parser.add_argument("--on-ranks", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.on_ranks:
        run_on_ranks(given.on_ranks)
        return
    # Ended from outside, the ranks have to end too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    names = [name for name in names_of_tests(given.n) if re.search(given.k, name)]
    outcomes = []

    def tell(outcome: Outcome) -> None:
        outcomes.append(outcome)
        place = f"{len(outcomes)}/{len(names)}"
        print(f"{place:8} {outcome.status} {outcome.seconds:6.1f} s  {outcome.test}", flush=True)
        if given.json:
            given.json.write_text(json.dumps([asdict(o) for o in outcomes], indent=1))

    run(names, given.n, tell)
    print(summary(outcomes))
    sys.exit(any(outcome.status in ("fail", "hang") for outcome in outcomes))


if __name__ == "__main__":
    main()
