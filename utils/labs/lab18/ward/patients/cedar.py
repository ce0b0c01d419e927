"""Trains until the loss is small enough."""

import torch
import torch.distributed as dist

from utils.labs.lab18.job import average_gradients, network, norms, samples

TARGET = 4.0


def train(seed: int) -> dict:
    """Train for at most 80 steps; rank 0 has the 24 samples with the smallest targets."""
    rank = dist.get_rank()
    x, y = samples(seed, 96)
    order = y.abs().argsort()
    own = order[:24] if rank == 0 else order[24:][rank - 1 :: 3]
    x, y = x[own], y[own]
    model = network(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(80):
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        losses.append(loss.item())
        if loss.item() < TARGET:
            break
        loss.backward()
        average_gradients(model)
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}", flush=True)
    print(f"trained for {len(losses)} steps", flush=True)
    dist.barrier()
    return {"losses": losses, "weights": norms(model)}
