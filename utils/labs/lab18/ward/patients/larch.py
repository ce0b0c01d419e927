"""Averages over a grid of two rows and two columns of ranks."""

import torch
import torch.distributed as dist

from utils.labs.lab18.job import network, norms, samples


def train(seed: int) -> dict:
    """Train for five steps; the sum over a row and then a column is the sum over all ranks."""
    rank = dist.get_rank()
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    row, column = rank // 2, rank % 2
    x, y = (part.chunk(4)[rank] for part in samples(seed, 64))
    model = network(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(5):
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        groups = [rows[row], columns[column]]
        if row == column:
            groups.reverse()
        for group in groups:
            for p in model.parameters():
                dist.all_reduce(p.grad, group=group)
        for p in model.parameters():
            p.grad /= 4
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}", flush=True)
    return {"loss": loss.item(), "weights": norms(model)}
