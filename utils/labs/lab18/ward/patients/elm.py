"""Trains on minibatches that the ranks take in turn."""

import torch
import torch.distributed as dist

from utils.labs.lab18.job import average_gradients, network, norms, samples


def train(seed: int) -> dict:
    """Train for one epoch; batch 0 goes to rank 0, batch 1 to rank 1, and so on."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = samples(seed, 144)
    batches = list(zip(x.split(8), y.split(8), strict=True))
    own = batches[rank::world]
    model = network(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step, (inputs, targets) in enumerate(own):
        optimizer.zero_grad()
        loss = ((model(inputs) - targets) ** 2).mean()
        loss.backward()
        average_gradients(model)
        optimizer.step()
        losses.append(loss.item())
        print(f"step {step}: loss {loss.item():.4f}", flush=True)
    print(f"epoch is over after {len(losses)} steps", flush=True)
    dist.barrier()
    return {"losses": losses, "weights": norms(model)}
