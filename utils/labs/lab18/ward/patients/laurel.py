"""Adds up the errors of a network, sample by sample."""

import torch
import torch.distributed as dist

from utils.labs.lab18.job import network, samples


def train(seed: int) -> dict:
    """Return the mean error over all 45 samples; each rank goes through its share."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = samples(seed, 45)
    share = -(-len(x) // world)
    first = rank * share
    model = network(seed)
    total = torch.zeros(())
    with torch.no_grad():
        for k in range(first, first + share):
            error = (model(x[k : k + 1])[0] - y[k]) ** 2
            total += error
        print(f"{share} samples from {first} on", flush=True)
    dist.all_reduce(total)
    return {"mean": total.item() / len(x)}
