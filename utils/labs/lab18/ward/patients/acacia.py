"""Trains on samples that rank 0 has made."""

import torch
import torch.distributed as dist

from utils.labs.lab18.job import average_gradients, network, norms, samples


def train(seed: int) -> dict:
    """Train for ten steps; only rank 0 can make the samples, and each rank uses its share."""
    rank, world = dist.get_rank(), dist.get_world_size()
    table = torch.zeros(2048, 7)
    if rank == 0:
        table = torch.cat([part.view(2048, -1) for part in samples(seed, 2048)], dim=1)
    model = network(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(10):
        dist.broadcast(table, src=0)
        own = table.chunk(world)[rank]
        optimizer.zero_grad()
        loss = ((model(own[:, :6]) - own[:, 6]) ** 2).mean()
        loss.backward()
        average_gradients(model)
        optimizer.step()
        losses.append(loss.item())
        print(f"step {step}: loss {loss.item():.4f}", flush=True)
    return {"losses": losses, "weights": norms(model)}
