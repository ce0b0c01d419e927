"""Trains on samples of which some have no target (nan)."""

import torch
import torch.distributed as dist

from utils.labs.lab18.job import network, norms, samples


def train(seed: int) -> dict:
    """Train for six steps of four samples a rank; the loss is a mean over all known targets."""
    rank = dist.get_rank()
    x, y = samples(seed, 96)
    y[52:57] = float("nan")
    model = network(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(6):
        start = 24 * rank + 4 * step
        known = ~y[start : start + 4].isnan()
        if not known.any():
            continue
        inputs, targets = x[start : start + 4][known], y[start : start + 4][known]
        optimizer.zero_grad()
        loss = ((model(inputs) - targets) ** 2).sum()
        loss.backward()
        count = known.sum()
        dist.all_reduce(count)
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= count
        optimizer.step()
        losses.append(loss.item())
        print(f"step {step}: {int(count)} known targets", flush=True)
    return {"losses": losses, "weights": norms(model)}
