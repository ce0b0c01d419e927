"""What each rank runs: everything is measured on all of them, rank 0 reports."""

from __future__ import annotations

import faulthandler
import functools
import sys
import traceback
from dataclasses import asdict

import torch
import torch.distributed as dist
from mpi4py import MPI

from . import costs, deliver, machine, report, training, transports
from .measure import Case, Clock, measure
from .options import OPERATIONS, Settings
from .transports import Transports

#: Seconds after which a communication that finds no partner gives up.
TIMEOUT = 60.0


def main(settings: Settings, n: int | None) -> int:
    """Measure and report; the exit status. An error on one rank ends all of them."""
    # Says where each rank was, and ends it.
    faulthandler.dump_traceback_later(settings.deadline, exit=True)
    try:
        comm = MPI.COMM_WORLD.Dup()  # the backend has messages of its own on its communicators
        if problem := _problem(comm.size, n):
            if comm.rank == 0:
                print(f"bench: {problem}", file=sys.stderr)
            return 2
        found = _measure_all(settings, comm)
        if comm.rank == 0:
            deliver.deliver(found, settings)
        Clock(comm).slowest(0)  # the others sleep while rank 0 draws
        dist.destroy_process_group()
        return 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _problem(size: int, n: int | None) -> str | None:
    if size < 2:
        return "one rank has nobody to talk to: start it with mpiexec -n 2, or without mpiexec"
    if n not in (None, size):
        return f"-n {n} is for a plain shell: this job has {size} ranks already"
    return None


def _measure_all(settings: Settings, comm: MPI.Comm) -> dict:
    """All numbers, as the JSON file has them; complete on rank 0."""
    torch.set_num_threads(1)
    clock = Clock(comm)
    hosts = machine.hosts(clock)  # before anything of ours keeps a core busy
    found = {
        "ranks": comm.size,
        "threads": torch.get_num_threads(),
        "hosts": [asdict(host) for host in hosts],
        "warnings": machine.warnings(hosts),
        "versions": machine.versions(),
        "rounds": settings.rounds,
    }
    if comm.rank == 0:
        print(report.heading(found), flush=True)  # the rest takes minutes
    world = Transports.connect(comm, TIMEOUT)
    cases = _operations(settings, world)
    measure(cases, settings.rounds, clock)
    return found | {
        "operations": [_numbers(case) for case in cases],
        "training": training.describe(comm.size),
        **{case.name: _numbers(case) for case in _others(settings, world, clock)},
        "import": _imports(settings, clock),
    }


def _operations(settings: Settings, world: Transports) -> list[Case]:
    cases = []
    for name in (name for name in OPERATIONS if name in settings.parts):
        for nbytes in settings.sizes:
            if name == "all_gather" and nbytes * world.comm.size > transports.MOST_GATHERED:
                continue
            prepare = functools.partial(getattr(transports, name), world, nbytes // 4)
            unit = 0.5 if name == "ping_pong" else 1.0
            cases.append(Case(name, prepare, settings.sample, nbytes, unit))
    return cases


def _others(settings: Settings, world: Transports, clock: Clock) -> list[Case]:
    """The measured cases apart from the operations."""
    cases = []
    if "ddp_step" in settings.parts:
        cases.append(training.step_case(world, 15 * settings.sample))
    measure(cases, settings.rounds, clock)
    if "recording" in settings.parts:
        cases.append(costs.recording_case(world, settings.sample))
        # Its fastest rounds are compared, so it takes many.
        measure(cases[-1:], 4 * settings.rounds, clock)
    if "epoch" in settings.parts:
        cases.append(training.epoch_case(world, settings.steps or training.EPOCH_STEPS))
        # The other ranks' idle time is long: not more rounds than a median needs.
        measure(cases[-1:], min(settings.rounds, 3), clock)
    return cases


def _numbers(case: Case) -> dict:
    return {
        "name": case.name,
        "bytes": case.nbytes,
        "repetitions": case.repetitions,
        "rounds": case.rounds,
        "seconds": case.medians(),
    }


def _imports(settings: Settings, clock: Clock) -> dict | None:
    """Rank 0 imports PyTorch in fresh processes, while the others sleep."""
    if "import" not in settings.parts:
        return None
    rounds = costs.import_seconds(settings.imports) if clock.comm.rank == 0 else {}
    clock.slowest(0)
    return {"rounds": rounds, "seconds": costs.medians(rounds)}
