"""Small training loops of every scheme of the course, for measuring how good forecasts are.

    mpiexec -n 4 python schemes.py FOLDER [--networks own 1e-3:40e6] [--schemes ddp pipeline]

Computing is `time.sleep`, so that 16 ranks don't compete for two cores. Each scheme runs on each
network. Rank 0 writes the recorded runs into FOLDER, and `results-P.json` with the measured seconds
of a step. A network is `own`, which means the network that MPI finds, or LATENCY:BANDWIDTH, which
the backend emulates.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI

from torch_mpi.network import Network, link
from torch_mpi.record import log
from utils.timeline import activity, cell_log, recording

SIZE = int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))
SCHEMES: dict[str, Callable[[Job], None]] = {}


def compute(milliseconds: float) -> None:
    """Compute for a known time."""
    time.sleep(milliseconds / 1e3)


def tensor(kilobytes: float) -> torch.Tensor:
    """Return a tensor of so many bytes."""
    return torch.zeros(int(kilobytes * 250))


class Job:
    """A rank's view of the ranks: its number, and the groups of a mesh with rows of two ranks."""

    def __init__(self) -> None:
        self.rank, self.p = dist.get_rank(), dist.get_world_size()
        self.row, self.column = (
            self._group([[k, k + 1] for k in range(0, self.p - 1, 2)]),
            self._group([list(range(k, self.p, 2)) for k in range(2)]),
        )

    def _group(self, all_groups: list[list[int]]) -> dist.ProcessGroup | None:
        made = [dist.new_group(ranks) for ranks in all_groups]
        mine = [k for k, ranks in enumerate(all_groups) if self.rank in ranks]
        return made[mine[0]] if mine else None

    def pass_on(self, kilobytes: float) -> list[dist.Work]:
        """Begin to pass a tensor to the next rank of a ring, and to receive one."""
        here = dist.irecv(tensor(kilobytes), (self.rank - 1) % self.p)
        return [dist.isend(tensor(kilobytes), (self.rank + 1) % self.p), here]


def scheme(step: Callable[[Job], None]) -> Callable[[Job], None]:
    """Enter a scheme's step into the table of all schemes."""
    SCHEMES[step.__name__] = step
    return step


# --- the schemes -----------------------------------------------------------------------------


@scheme
def parameters(job: Job) -> None:
    """Lab 03: an all_reduce for each parameter, after the backward pass."""
    compute(30)
    for kilobytes in (400, 4, 200, 1, 100, 0.4):
        dist.all_reduce(tensor(kilobytes))


@scheme
def ddp(job: Job) -> None:
    """Lab 04: buckets are reduced while the backward pass goes on."""
    compute(10)
    pending = []
    for _ in range(4):
        compute(10)
        pending.append(dist.all_reduce(tensor(200), async_op=True))
    for work in pending:
        work.wait()
    compute(4)


@scheme
def ring(job: Job) -> None:
    """Lab 06: an all-reduce by hand, as messages on a ring."""
    compute(30)
    for _ in range(2 * (job.p - 1)):
        for work in job.pass_on(800 / job.p):
            work.wait()


@scheme
def server(job: Job) -> None:
    """Lab 07: workers push gradients to rank 0 and get the weights; all workers wait."""
    if job.rank:
        compute(30)
        dist.send(tensor(200), 0)
        dist.recv(tensor(200), 0)
        return
    for worker in range(1, job.p):
        dist.recv(tensor(200), worker)
        compute(1)
    for work in [dist.isend(tensor(200), worker) for worker in range(1, job.p)]:
        work.wait()


@scheme
def hogwild(job: Job) -> None:
    """Lab 07: the server answers whoever comes first; workers differ in speed."""
    if job.rank:
        compute(30 + 12 * job.rank)
        dist.send(tensor(200), 0)
        dist.recv(tensor(200), 0)
        return
    for _ in range(1, job.p):
        worker = dist.recv(tensor(200))
        compute(2)
        dist.send(tensor(200), worker)


@scheme
def elastic(job: Job) -> None:
    """Lab 08: four local steps, then an all_reduce of the differences from the center."""
    for _ in range(4):
        compute(10)
    dist.all_reduce(tensor(600))


@scheme
def tensor_parallel(job: Job) -> None:
    """Lab 09: the ranks share each layer, and add up its activations. The work is shared."""
    for _ in range(4):
        compute(40 / job.p)
        dist.all_reduce(tensor(200))


@scheme
def experts(job: Job) -> None:
    """Lab 09: tokens go to their experts and back; the router's gradient is reduced."""
    for _ in range(2):
        compute(8)
        dist.all_to_all_single(tensor(400), tensor(400))
        compute(12)
        dist.all_to_all_single(tensor(400), tensor(400))
    dist.all_reduce(tensor(40))


def stage(job: Job, warm: int) -> None:
    """Run a stage of a pipeline, with so many forward passes before the first backward pass."""
    first, last, sent, batches = job.rank == 0, job.rank == job.p - 1, [], 6

    def forward() -> None:
        if not first:
            dist.recv(tensor(160), job.rank - 1)
        compute(5)
        if not last:
            sent.append(dist.isend(tensor(160), job.rank + 1))

    def backward() -> None:
        if not last:
            dist.recv(tensor(160), job.rank + 1)
        compute(9)
        if not first:
            sent.append(dist.isend(tensor(160), job.rank - 1))

    for _ in range(warm):
        forward()
    for _ in range(batches - warm):
        forward()
        backward()
    for _ in range(warm):
        backward()
    for work in sent:
        work.wait()


@scheme
def gpipe(job: Job) -> None:
    """Lab 10: all forward passes, then all backward passes."""
    stage(job, warm=6)


@scheme
def one_f_one_b(job: Job) -> None:
    """Lab 10: a forward pass, a backward pass."""
    stage(job, warm=job.p - 1 - job.rank)


@scheme
def mesh(job: Job) -> None:
    """Lab 11: data × tensor parallel, on a mesh with rows of two ranks."""
    for _ in range(3):
        compute(8)
        dist.all_reduce(tensor(160), group=job.row)
    dist.all_reduce(tensor(400), group=job.column)


@scheme
def pipeline_and_data(job: Job) -> None:
    """Lab 11: pipelines of two stages, and an all_reduce of each stage over all pipelines."""
    second, sent = job.rank % 2, []
    for _ in range(3):
        if second:
            dist.recv(tensor(160), job.rank - 1)
            compute(14)
            sent.append(dist.isend(tensor(160), job.rank - 1))
        else:
            compute(5)
            sent.append(dist.isend(tensor(160), job.rank + 1))
    for _ in range(0 if second else 3):
        dist.recv(tensor(160), job.rank + 1)
        compute(9)
    for work in sent:
        work.wait()
    dist.all_reduce(tensor(400), group=job.column)


def shards(job: Job, gradients: float, weights: float) -> None:
    compute(30)
    part = torch.zeros(tensor(gradients).numel() // job.p)
    dist.reduce_scatter_single(part, torch.zeros(part.numel() * job.p))
    compute(4)
    part = torch.zeros(tensor(weights).numel() // job.p)
    dist.all_gather_single(torch.zeros(part.numel() * job.p), part)


@scheme
def zero(job: Job) -> None:
    """Lab 11: gradients are reduced to shards, and the weights are gathered."""
    shards(job, 640, 640)


@scheme
def zero_mixed(job: Job) -> None:
    """Labs 11 and 15: as `zero`, with weights in half the precision of the gradients."""
    shards(job, 640, 320)


@scheme
def fsdp(job: Job) -> None:
    """Lab 11: the next layer's weights are gathered while the present layer computes."""

    def gather() -> dist.Work:
        return dist.all_gather_single(tensor(320), tensor(320 / job.p), async_op=True)

    coming = gather()
    for layer in range(3):
        coming.wait()
        coming = gather() if layer < 2 else None
        compute(12)
    pending = []
    for _ in range(3):
        compute(12)
        whole, part = tensor(320), tensor(320 / job.p)
        pending.append(dist.reduce_scatter_single(part, whole, async_op=True))
    for work in pending:
        work.wait()


@scheme
def federated(job: Job) -> None:
    """Lab 12: a round: weights to all clients, local steps, and the weights back."""
    weights = tensor(200)
    dist.broadcast(weights, 0)
    compute(50)
    dist.gather(weights, [tensor(200) for _ in range(job.p)] if job.rank == 0 else None)


@scheme
def checkpoint(job: Job) -> None:
    """Lab 13: steps, then rank 0 writes a checkpoint, and all ranks wait in a barrier."""
    for _ in range(2):
        compute(12)
        dist.all_reduce(tensor(200))
    if job.rank == 0:
        compute(15)
    dist.barrier()


@scheme
def ring_attention(job: Job) -> None:
    """Lab 16: keys and values go around a ring while the ranks compute."""
    for _ in range(2):
        for _ in range(job.p - 1):
            pending = job.pass_on(240)
            compute(5)
            for work in pending:
                work.wait()
        compute(5)


@scheme
def all_to_all_attention(job: Job) -> None:
    """Lab 16: all_to_all from a part of the sequence to a part of the heads, and back."""
    for _ in range(3):
        dist.all_to_all_single(tensor(480), tensor(480))
    compute(30)
    dist.all_to_all_single(tensor(480), tensor(480))


# --- recording -------------------------------------------------------------------------------


def meet() -> None:
    """Wait for all ranks, and leave the core to the ranks that still work."""
    request = MPI.COMM_WORLD.Ibarrier()
    while not request.Test():
        time.sleep(1e-3)


def record(job: Job, name: str, steps: int) -> tuple[list[float], float, recording.Run] | None:
    """Run a scheme; return, on rank 0, the seconds of each step, the load, and the run.

    The load is the CPU time of all ranks by the time of all cores. Near 1, the machine was too
    small for so many ranks.
    """
    step = SCHEMES[name]
    step(job)  # a warm-up
    meet()
    mark, begin, used = log.mark(), time.perf_counter(), time.process_time()
    ends = []
    for _ in range(steps):
        step(job)
        ends.append(time.perf_counter())
    report = {
        "rank": job.rank,
        "begin": begin,
        "end": ends[-1],
        "cpu": 0.0,  # unknown: a rank that sleeps has a core
        "records": [cell_log.as_record(call) for call in log.since(mark)],
    }
    used = time.process_time() - used
    meet()  # otherwise a quick worker of `hogwild` begins the next round in this one
    told = MPI.COMM_WORLD.gather((report, begin, ends, used))
    if told is None:
        return None
    reports, begins, every, uses = zip(*told, strict=True)
    last = np.array(every).max(axis=0)
    seconds = np.diff(last, prepend=max(begins)).tolist()
    load = sum(uses) / (last[-1] - max(begins)) / (os.cpu_count() or 1)
    lanes = activity.lanes(list(reports), [0.0] * job.p)
    return seconds, load, recording.run(lanes, title=name)


def network(text: str) -> Network | None:
    """Return the network that a word of the command line names."""
    return None if text == "own" else Network(*map(float, text.split(":")))


def main() -> None:
    """Run the schemes on the networks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--networks", nargs="+", default=["own"])
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES), choices=list(SCHEMES))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    dist.init_process_group("mpi")
    job, results = Job(), []
    for text in options.networks:
        link.set(network(text))
        if link.network:
            link.calibrate(dist.group.WORLD)
        for name in options.schemes:
            rounds = [record(job, name, options.steps) for _ in range(options.rounds)]
            if job.rank:
                continue
            rounds.sort(key=lambda one: statistics.median(one[0]))
            seconds, load, run = rounds[len(rounds) // 2]
            path = options.folder / f"{name}-{job.p}-{text.replace(':', '-')}.json"
            run.save(path)
            results.append({
                "scheme": name,
                "ranks": job.p,
                "network": text,
                "steps": options.steps,
                "seconds": statistics.median(seconds),
                "rounds": [statistics.median(one[0]) for one in rounds],
                "load": load,
                "run": path.name,
            })
    link.set(None)
    if job.rank == 0:
        (options.folder / f"results-{job.p}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
