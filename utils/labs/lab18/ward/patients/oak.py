"""Trains, and validates after each epoch."""

import torch
import torch.distributed as dist

from utils.labs.lab18.job import average_gradients, network, norms, samples


def train(seed: int) -> dict:
    """Train for six epochs; each rank validates its share of the 80 validation samples."""
    rank = dist.get_rank()
    x, y = (part.chunk(4)[rank] for part in samples(seed, 64))
    unseen_x, unseen_y = (part.chunk(4)[rank] for part in samples(seed + 1, 80))
    model = network(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    validation = []
    for epoch in range(6):
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        average_gradients(model)
        optimizer.step()
        with torch.no_grad():
            errors = (model(unseen_x) - unseen_y) ** 2
        mean = errors.sum() / errors.numel()
        validation.append(mean.item())
        print(f"epoch {epoch}: validation loss {validation[-1]:.4f}", flush=True)
    return {"losses": validation, "weights": norms(model)}
