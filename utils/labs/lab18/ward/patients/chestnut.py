"""Trains, and looks at the activations of the hidden layer."""

import torch
import torch.distributed as dist

from utils.labs.lab18.job import average_gradients, network, norms, samples


def train(seed: int) -> dict:
    """Train for 16 steps; at the end, report how strongly the hidden units are saturated."""
    rank = dist.get_rank()
    x, y = (part.chunk(4)[rank] for part in samples(seed, 512))
    model = network(seed, width=128)
    seen: list[torch.Tensor] = []
    model[1].register_forward_hook(lambda layer, inputs, output: seen.append(output.detach()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(16):
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        average_gradients(model)
        optimizer.step()
        losses.append(loss.item())
        if step % 5 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    saturated = (seen[-1].abs() > 0.5).float().mean()
    return {"losses": losses, "saturated": saturated.item(), "weights": norms(model)}
