"""Sums gradients in two levels: first in pairs of ranks, then between the leaders of the pairs."""

import torch
import torch.distributed as dist

from utils.labs.lab18.job import network, norms, samples


def train(seed: int) -> dict:
    """Train for five steps on a quarter of the samples for each rank."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    leaders = dist.new_group([0, 2])
    pair, leader = pairs[rank // 2], rank - rank % 2
    x, y = (part.chunk(4)[rank] for part in samples(seed, 64))
    model = network(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(5):
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        dist.reduce(gradient, dst=leader, group=pair)
        if rank == leader:
            dist.barrier()
            dist.all_reduce(gradient, group=leaders)
        dist.broadcast(gradient, src=leader, group=pair)
        start = 0
        for p in model.parameters():
            p.grad = gradient[start : start + p.numel()].view_as(p) / 4
            start += p.numel()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}", flush=True)
    return {"loss": loss.item(), "weights": norms(model)}
