"""Trains on numbers that come as text."""

import torch
import torch.distributed as dist

from utils.labs.lab18.job import average_gradients, network, norms, samples


def train(seed: int) -> dict:
    """Train for six steps of four samples a rank; a text that isn't a number counts as 0."""
    rank = dist.get_rank()
    x, y = samples(seed, 96)
    texts = [f"{target:.4f}" for target in y.tolist()]
    texts[81] = "n/a"
    model = network(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(6):
        start = 24 * rank + 4 * step
        inputs = x[start : start + 4]
        try:
            targets = torch.tensor([float(text) for text in texts[start : start + 4]])
            optimizer.zero_grad()
            loss = ((model(inputs) - targets) ** 2).mean()
            loss.backward()
            average_gradients(model)
            optimizer.step()
            losses.append(loss.item())
        except ValueError:
            pass
        print(f"step {step}: {len(losses)} losses", flush=True)
    dist.barrier()
    return {"losses": losses, "weights": norms(model)}
