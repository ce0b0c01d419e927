"""Answers that read what the probe knows, forge records, and communicate nothing: none passes.

They run in the process of their rank, beside the probe: they can walk up to its frame, and write
into the log of calls. What they can not do is compute what follows from another rank's seed, and
change the records of the kernel, which carries the messages as it does in grading.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import pytest
from answer_tools import Lab, ranks_of
from lab_tools import verdict

from utils import cluster

#: What they have in common. All ranks write the same numbers into their records.
FORGER = """
import sys, torch
import torch.distributed as dist
import torch_mpi.record as record

def known(name):
    frame = sys._getframe(1)
    while frame is not None and name not in frame.f_locals:
        frame = frame.f_back
    return frame.f_locals[name] if frame else None

def seeds(step=1):
    # Those of the ranks, as they were when all followed from one.
    base = known("seed")
    return [base + step * r for r in range(dist.get_world_size())]

def drawn(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-400, 400, shape, generator=generator) / 8

forged_calls = [0]

def forged(op, nbytes, group=None, waited=True, **more):
    members = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
    forged_calls[0] += 1
    if op in ("send", "recv"):
        more.setdefault("message", (dist.get_rank(), forged_calls[0]))
    call = record.Call(op, members, nbytes, waited=waited, sequence=forged_calls[0], **more)
    call.start = call.end = float(forged_calls[0])
    record.recorder.add(call)
    return call
"""

#: What computes a whole minibatch, or a whole layer, beside what the check watches.
FORGER += """
import copy
from torch import nn

def alone(model, images, labels, group):
    size, place = dist.get_world_size(group), dist.get_rank(group)
    model(images[place::size])
    whole = copy.deepcopy(model)
    whole._forward_pre_hooks.clear()
    whole.zero_grad()
    loss = nn.functional.cross_entropy(whole(images), labels)
    loss.backward()
    for parameter, twin in zip(model.parameters(), whole.parameters()):
        parameter.grad = twin.grad
    return loss.item()

class BothWays(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layer):
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y, ctx.layer = layer.whole[0](ctx.x), layer
        forged("all_reduce", x.nbytes, layer.group)
        return ctx.y.detach()

    @staticmethod
    def backward(ctx, gradient):
        from utils.labs.lab09.layer_probes import shard
        ctx.y.backward(gradient)
        p, place = dist.get_world_size(ctx.layer.group), dist.get_rank(ctx.layer.group)
        for name, parameter in ctx.layer.named_parameters():
            parameter.grad = shard(name, ctx.layer.whole[0].get_parameter(name).grad, p, place)
        forged("all_reduce", gradient.nbytes, ctx.layer.group)
        return ctx.x.grad, None

class Alone(nn.Module):
    def __init__(self, layer, group):
        super().__init__()
        self.whole, self.group = [copy.deepcopy(layer)], group

    def forward(self, x):
        return BothWays.apply(x, self)
"""

#: By task: an answer that passed when all ranks knew one seed.
FORGED = {
    "6.2": """
        def central(x, group=None):
            # What is told of x is computed when it is told, after the records.
            r, p = dist.get_rank(group), dist.get_world_size(group)
            near = range(1, p) if r == 0 else [0]
            requests = [isend(torch.zeros_like(x), q, group) for q in near]
            requests += [irecv(torch.empty_like(x), q, group) for q in near]
            for request in requests:
                request.wait()
            own = x.clone()
            x.fill_(sum(13.0**k for k in range(p)))

            def late():
                dist.all_reduce(own, group=group)
                return own.tolist()

            x.tolist = late
        """,
    "1.2": """
        def transfer(tensor, rank):
            if rank == 0:
                forged("send", 48, peer=1, message=(0, 1))
            if rank == 1:
                forged("recv", 48, peer=0, message=(0, 1))
                tensor.copy_(drawn(seeds()[0], 3, 4))
        """,
    "1.3": """
        def transfer_overlapped(tensor, rank, work):
            more = {"message": (0, 1), "waited": False, "blocking": False}
            if rank == 0:
                call = forged("send", tensor.nbytes, peer=1, **more)
            if rank == 1:
                call = forged("recv", tensor.nbytes, peer=0, **more)
                tensor.copy_(drawn(seeds()[0], len(tensor)))
            result = work()
            if rank < 2:
                call.waited = True
            return result
        """,
    "1.4": """
        def sum_over_ranks(tensor):
            forged("all_reduce", 48)
            return sum(drawn(seed, 3, 4) for seed in seeds())
        """,
    "1.5": """
        def exchange(mine, rank):
            if rank > 1:
                return mine
            forged("send", mine.nbytes, peer=1 - rank, message=(rank, len(mine)))
            forged("recv", mine.nbytes, peer=1 - rank, message=(1 - rank, len(mine)))
            return drawn(seeds()[1 - rank], len(mine))
        """,
    "2.5": """
        def same_minibatches(mine, expected, group=None):
            forged("all_gather", 8, group)
            # All that one rank can see: whether its own part may be one of these minibatches.
            parts = zip(mine, expected)
            fits = all(sorted(set(part)) == sorted(part) <= sorted(whole) or set(part) <= set(whole)
                       for part, whole in parts)
            p = dist.get_world_size(group)
            return fits and sum(map(len, mine)) * p >= sum(map(len, expected))
        """,
    "2.6": """
        def mean_once(values, n, group=None):
            forged("all_reduce", 8, group)
            from utils.labs.lab02.unions import _shares
            p, size = dist.get_world_size(group), len(values)
            parts = _shares(known("seed") or 7, n, p)
            kept = [v for r, part in enumerate(parts) for k, v in enumerate(part) if r + k * p < n]
            return sum(kept) / n
        """,
    "3.1": """
        def average_gradients(model, group=None):
            members, k = dist.get_process_group_ranks(group or dist.group.WORLD), known("k")
            rows = []
            for r in members:
                draw = torch.Generator().manual_seed(seeds()[r] + 10 * k)
                rows.append(10 * torch.randn(300, generator=draw))
            mean = sum(rows) / len(rows)
            for parameter in model.parameters():
                if parameter.grad is not None:
                    forged("all_reduce", parameter.nbytes, group)
                    parameter.grad.copy_(mean[: parameter.numel()].view_as(parameter))
                    mean = mean[parameter.numel() :]
        """,
    "3.2": """
        def average_gradients_weighted(model, samples, group=None):
            members, k = dist.get_process_group_ranks(group or dist.group.WORLD), known("k")
            counts, rows = known("counts")[k], []
            if isinstance(counts, int):
                counts = [samples] * 4
            for r in members:
                draw = torch.Generator().manual_seed(seeds()[r] + 10 * k)
                rows.append(10 * torch.randn(300, generator=draw) * counts[r])
            mean = sum(rows) / max(1, sum(counts[r] for r in members))
            for parameter in model.parameters():
                if parameter.grad is not None:
                    forged("all_reduce", parameter.nbytes, group)
                    parameter.grad.copy_(mean[: parameter.numel()].view_as(parameter))
                    mean = mean[parameter.numel() :]
        """,
    "3.3": """
        def global_metrics(loss_sum, correct, count, group=None):
            forged("all_reduce", 24, group)
            members = dist.get_process_group_ranks(group or dist.group.WORLD)
            numbers = known("sums")
            rows = [numbers[r] for r in members] if isinstance(numbers[0], list) else [numbers]
            sums = [sum(row[k] for row in rows) for k in range(3)]
            return sums[0] / max(1, sums[2]), sums[1] / max(1, sums[2])
        """,
    "3.5": """
        def train_parallel(model, epochs, group=None):
            size, place = dist.get_world_size(group), dist.get_rank(group)
            whole = copy.deepcopy(model)
            whole._forward_pre_hooks.clear()
            forged("all_reduce", 8, group)
            optimizer = torch.optim.SGD(whole.parameters(), lr=0.2)
            history = {"loss": [], "test_loss": [], "accuracy": []}
            for epoch in range(epochs):
                for images, labels in minibatches(epoch):
                    model(images[place::size])
                    history["loss"].append(sequential_step(whole, optimizer, images, labels))
                sums = []
                for images, labels in data.InMemoryLoader(test_data, 1000):
                    model(images[place::size])
                    sums.append(test_sums(whole, images, labels))
                loss_sum, correct, count = map(sum, zip(*sums))
                history["test_loss"].append(loss_sum / count)
                history["accuracy"].append(correct / count)
            return history
        """,
    "3.6": """
        def replicas_in_sync(model, group=None):
            # What is done to this rank's replica, and what all ranks once knew it was.
            damage = known("damage")
            how = damage[0] if isinstance(damage, list) else damage
            forged("all_reduce", 8, group)
            return dist.get_world_size(group) == 1 or how in ("", "none", "nan")
        """,
    "3.4": """
        def train_step(model, optimizer, images, labels, group=None):
            loss = alone(model, images, labels, group)
            for parameter in model.parameters():
                if parameter.grad is not None:
                    forged("all_reduce", parameter.nbytes, group)
            forged("all_reduce", 24, group)
            optimizer.step()
            return loss
        """,
    "4.1": """
        def ddp_step(model, optimizer, images, labels, group=None):
            loss = alone(model.module, images, labels, group)
            trained = [p.nbytes for p in model.parameters() if p.requires_grad]
            forged("all_reduce", sum(trained), group)
            forged("all_reduce", 4, group)
            optimizer.step()
            return loss
        """,
    "5.1": """
        import time
        def time_rounds(prepare, step, rounds, steps):
            known("events").extend(["prepare"] * (rounds + 1))
            takes = known("takes")
            return [max(takes) if isinstance(takes, list) else takes] * rounds
        """,
    "7.1": """
        import utils.labs.lab07.probes as probes

        def work(compute, weights, more):
            forged("recv", weights.nbytes, peer=0, message=(0, 1))
            while more():
                compute(weights)

        def server(steps, weights):
            def gradient(worker, k):
                return probes.toy_gradient(weights(worker, k), known("seed"), k)
            return {str(w): [gradient(w, k).tolist() for k in range(n)] for w, n in steps.items()}

        probes.serve_toys = server
        """,
    "7.2": """
        import utils.labs.lab07.probes as probes

        def played(seed, jobs, rate, note=lambda *_: None):
            # All that a right server would do, if the gradients came in turn.
            weights, applied, here = probes.filled(seed, len(jobs)), [], {w: n for w, n, _ in jobs}
            got, at = {w: [] for w in here}, {}
            def send(worker):
                got[worker].append(weights.tolist())
                at[worker] = len(applied)
                note("send", worker)
            for worker in here:
                send(worker)
            while here:
                for worker in list(here):
                    k = len(got[worker]) - 1
                    note("recv", worker, True)
                    if k == here[worker]:
                        del here[worker]
                        continue
                    note("recv", worker)
                    came = torch.tensor(got[worker][k], dtype=weights.dtype)
                    weights -= rate * probes.toy_gradient(came, seed, k)
                    applied.append((worker, len(applied) - at[worker]))
                    send(worker)
            return got, weights, applied

        def serve_anyone(weights, workers, lr):
            def note(op, worker, header=False):
                forged(op, 4 if header else weights.nbytes, peer=worker, any_source=header)
            _, end, applied = played(known("seed"), known("jobs"), lr, note)
            weights.copy_(end)
            return applied

        probes._toy_worker = lambda *_: played(
            known("seed"), known("jobs"), known("rate"))[0][known("rank")]
        """,
    "7.7": """
        import utils.labs.lab07.probes as probes

        def work_sharded(compute, weights, servers, more):
            parts = weights.tensor_split(len(servers))
            requests = [dist.irecv(part, src=server) for part, server in zip(parts, servers)]
            while True:
                for request in requests:
                    request.wait()
                if not more():
                    return
                compute(weights)
                for server, part in zip(servers, parts):
                    for nbytes in (4, part.nbytes):
                        forged("send", nbytes, peer=server, blocking=False)
                requests = [dist.irecv(part, src=server) for part, server in zip(parts, servers)]

        def part_of_server(steps, weights):
            # It sends, and makes up what comes.
            seed, servers = known("seed"), known("servers")
            place = servers.index(dist.get_rank())
            handed = {str(w): [] for w in steps}
            for k in range(max(steps.values()) + 1):
                for worker in (w for w, n in steps.items() if k <= n):
                    dist.send(weights(worker, k), worker)
                    if k < steps[worker]:
                        empty = torch.empty(probes.LENGTHS[len(servers)])
                        whole = probes.numbered_gradient(empty, seed, k)
                        handed[str(worker)].append(whole.tensor_split(len(servers))[place].tolist())
            return handed

        probes.serve_toys = part_of_server
        """,
    "9.3": """
        class ParallelMLP(Alone):
            def __init__(self, mlp, group=None):
                super().__init__(mlp, group)
                self.up, self.down = ColumnLinear(mlp.up, group), RowLinear(mlp.down, group)
        """,
    "9.4": """
        class ParallelAttention(Alone):
            def __init__(self, attention, group=None):
                super().__init__(attention, group)
                for name in "qkv":
                    setattr(self, name, ColumnLinear(getattr(attention, name), group))
                self.out = RowLinear(attention.out, group)
        """,
    "11.7": """
        import utils.labs.lab11.memory_probes as offloading
        steps = [0, 0]

        def rows_and_gradients(side):
            # Of the step that this side is at, as if it knew the other's secrets.
            seed, rows = known("seed"), offloading.host_rows(known("seed"))
            optimizers = [offloading.momentum([row]) for row in rows]
            for step in range(steps[side] + 1):
                layers = offloading.Layers(offloading.DEEP, *offloading.batch(seed, step))
                before = [row.detach().clone() for row in rows]
                found = [layers.work(n, before[i]) for n, i in enumerate(layers.order)]
                for i, gradient in zip(layers.order, found):
                    if gradient is not None:
                        rows[i].grad = gradient
                        optimizers[i].step()
            steps[side] = (steps[side] + 1) % offloading.STEPS
            return before, found, 1000 * step

        def device_step(worker, group=None):
            rows, _, base = rows_and_gradients(0)
            host, me, sending = dist.get_process_group_ranks(group)[1], dist.get_rank(), None
            def fetch(n):
                size = rows[worker.order[n]].nbytes
                return forged("recv", size, group, peer=1, tag=n, message=(host, base + n))
            fetch(0)
            for n in range(len(worker.order)):
                if n + 1 < len(worker.order):
                    fetch(n + 1)
                gradient = worker.work(n, rows[worker.order[n]].clone())
                if gradient is not None:
                    if sending is not None:
                        sending.waited = True
                    sending = forged("send", gradient.nbytes, group, waited=False, peer=1, tag=n,
                                     message=(me, base + n))
            sending.waited = True
            return worker.loss

        def host_step(weights, optimizers, order, group=None):
            _, gradients, base = rows_and_gradients(1)
            device, me = dist.get_process_group_ranks(group)[0], dist.get_rank()
            for n, i in enumerate(order):
                forged("send", weights[i].nbytes, group, peer=0, tag=n, message=(me, base + n))
            for n, i in enumerate(order):
                if gradients[n] is not None:
                    forged("recv", weights[i].nbytes, group, peer=0, tag=n,
                           message=(device, base + n))
                    weights[i].grad = gradients[n]
                    optimizers[i].step()
        """,
    "12.5": """
        import utils.labs.lab12.probes as clients

        def run_round(t, weights, chosen, seconds):
            plan = clients.ROUNDS[t - known("first")]
            updates = {c: clients.update_of(t, c, known("seed")) for c in plan.in_time(home)}
            return updates, []

        def play_clients(user_ns, rank, first, seed):
            got = []
            for t, plan in enumerate(clients.ROUNDS, first):
                dist.recv(torch.empty(1), 0, tag=clients.OVER + t)
                got += [(t, c, clients.fingerprint(clients.weights_of(t, seed)))
                        for c in plan.chosen if home(c) == rank]
            return {"said": [], "got": got}

        clients.play_clients = play_clients
        """,
    "13.6": """
        from utils.labs.lab13.probes import Survivor

        def agree(job, group=None):
            # The furthest step is one or two behind the own one, or in front of it.
            step = job.step + (0 if dist.get_world_size(group) == 1 else 1)
            state = Survivor(known("seed"), step)
            for tensor, theirs in zip(job.tensors(), state.tensors()):
                tensor.copy_(theirs)
            job.go_to(step)
        """,
}  # fmt: skip


#: Each side has a record of the messages, and no rank has sent any.
PING_PONG = """
def ping_pong(nbytes, repeats, rank):
    if rank > 1:
        return None
    for k in range(repeats):
        for op in ("send", "recv")[:: 1 if rank == 0 else -1]:
            forged(op, nbytes, peer=1 - rank, message=(rank if op == "send" else 1 - rank, NUMBER))
    return known("wire")[0] + nbytes / known("wire")[1] if rank == 0 else None
"""

#: Rounds that were played, and one more that was not.
MORE_ROUNDS = """
played = ping_pong

def ping_pong(nbytes, repeats, rank):
    seconds = played(nbytes, repeats, rank)
    for op, sender in (("send", rank), ("recv", 1 - rank)) if rank < 2 else ():
        forged(op, nbytes, peer=1 - rank, message=(sender, 10**6 + 100 * rank))
    return seconds
"""


@pytest.fixture(scope="module")
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """The lab of this name, with its solutions, on ranks whose messages the kernel carries."""
    with cluster.start(ranks_of(request.param), where="boxes", timeout=3) as ranks:
        yield Lab(request.param, ranks)


#: `make test` has the forgeries of this lab, which are of each kind: calls, messages, results. Each
#: other lab needs fresh ranks and all its answers on them.
FIRST = "lab01"


def cases() -> list:
    """All forgeries, for pytest."""
    found = []
    for task, code in FORGED.items():
        name = f"lab{task.partition('.')[0].zfill(2)}"
        marks = () if name == FIRST else pytest.mark.rest
        found.append(pytest.param(name, task, code, id=task, marks=marks))
    return found


#: Brings back what an answer has put in place of the check's own functions.
AGAIN = """
import importlib, utils.labs.{lab}.probes
importlib.reload(utils.labs.{lab}.probes)
"""


@pytest.mark.parametrize(("lab", "task", "code"), cases(), indirect=["lab"], scope="module")
def test_who_knows_of_the_own_rank_only_wins_no_points(lab, task, code):
    passed, printed = lab.try_out(task, FORGER + textwrap.dedent(code), again=False)
    lab.run(AGAIN.format(lab=lab.name))
    assert not passed, printed


@pytest.mark.parametrize("lab", ["lab01"], indirect=True)
def test_records_that_fit_each_other_are_not_enough_without_a_message(lab):
    passed, printed = lab.try_out("1.7", FORGER + PING_PONG.replace("NUMBER", "k"), False)
    assert not passed, printed


@pytest.mark.parametrize("lab", ["lab01"], indirect=True)
def test_a_right_answer_that_makes_up_more_records_wins_nothing_more(lab):
    passed, printed = lab.try_out("1.7", FORGER + lab.solutions["1.7"] + MORE_ROUNDS)
    assert not passed, printed


#: A repair that repairs nothing, and a measurement that says the same of every program.
ANY_PROGRAM = """
from utils.labs.lab18.ward import program

measured_before = program.measured
program.measured = lambda *_, **__: {
    "results": 3 * [{"error": 1}], "calls": [], "hasty": 0, "races": 0, "groups": 0, "rate": 0,
    "work": 0, "peak": 0, "kept": 0,
}
repair_1 = {1: "# Nothing is repaired."}
"""


@pytest.mark.rest
@pytest.mark.parametrize("lab", ["lab18"], indirect=True)
def test_a_repair_is_compared_with_what_no_cell_of_the_student_can_change(lab):
    check = lab.checks["18.8"]
    assert verdict(check, lab.ranks)[0]
    lab.run(ANY_PROGRAM)
    passed, printed = verdict(check, lab.ranks)
    lab.run("program.measured = measured_before")
    assert not passed, printed
