"""Trains, and validates in batches."""

import torch
import torch.distributed as dist

from utils.labs.lab18.job import average_gradients, network, norms, samples


def train(seed: int) -> dict:
    """Train for ten epochs; the validation loss is the mean over all 90 validation samples."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = (part.chunk(world)[rank] for part in samples(seed, 64))
    unseen_x, unseen_y = (part.chunk(world)[rank] for part in samples(seed + 1, 90))
    model = network(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    validation = []
    for epoch in range(10):
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        average_gradients(model)
        optimizer.step()
        with torch.no_grad():
            errors = (model(unseen_x) - unseen_y) ** 2
        mean = errors.mean()
        dist.all_reduce(mean)
        validation.append(mean.item() / world)
        if epoch in (0, 9):
            print(f"epoch {epoch}: {errors.numel()} samples, {errors.mean():.4f}", flush=True)
    return {"losses": validation, "weights": norms(model)}
