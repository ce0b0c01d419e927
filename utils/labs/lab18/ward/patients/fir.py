"""Trains with PyTorch's DistributedSampler."""

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from utils.labs.lab18.job import average_gradients, network, norms, samples


def train(seed: int) -> dict:
    """Train for four epochs, each of them in a new order."""
    x, y = samples(seed, 64)
    everything = TensorDataset(torch.arange(64), x, y)
    sampler = DistributedSampler(everything, shuffle=True, seed=seed)
    loader = DataLoader(everything, batch_size=4, sampler=sampler)
    model = network(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for epoch in range(4):
        for step, (numbers, inputs, targets) in enumerate(loader):
            optimizer.zero_grad()
            loss = ((model(inputs) - targets) ** 2).mean()
            loss.backward()
            average_gradients(model)
            optimizer.step()
            if step == 0:
                print(f"epoch {epoch} begins with samples {numbers.tolist()}", flush=True)
        with torch.no_grad():
            losses.append(((model(x) - y) ** 2).mean().item())
    return {"losses": losses, "weights": norms(model)}
