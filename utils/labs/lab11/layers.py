"""Training a model layer by layer, with weights that are stored elsewhere.

:class:`Layers` computes a step of a multilayer perceptron in **pieces**. Each piece needs the
weights of one layer, and keeps none of them. :func:`step_on` moves weights between the host's
memory and a device, on CUDA with pinned memory and separate streams.

Source: J. Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training" (2021).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer


def rows_of(model: nn.Module) -> list[Tensor]:
    """Return copies of each linear layer's weights in one row, the weight before the bias."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    return [torch.cat([q.detach().reshape(-1) for q in layer.parameters()]) for layer in layers]


class Layers:
    """One step of an MLP with ReLU, in pieces.

    Args:
        sizes: features in, hidden features …, classes.
        x: the minibatch, [m, sizes[0]]; labels: int64 [m].
        seconds: how long each layer's forward sleeps, as if a separate device computed; its
            backward sleeps twice as long.

    Attributes:
        order: the layer of each piece: forward 0, 1, …, the last one, and backward down to 0. The
            piece in the middle is forward, loss and backward of the last layer.
        loss: the mean over the minibatch, after the piece in the middle.
    """

    def __init__(self, sizes: Sequence[int], x: Tensor, labels: Tensor, seconds: float = 0.0):
        last = len(sizes) - 2
        self.sizes = tuple(sizes)
        self.labels = labels
        self.seconds = seconds
        self.order = [*range(last), *range(last, -1, -1)]
        self.inputs = [x]
        self.gradient = self.loss = None
        self.dtype = x.dtype

    def length(self, n: int) -> int:
        """Return how many weights piece n has."""
        i = self.order[n]
        return (self.sizes[i] + 1) * self.sizes[i + 1]

    def work(self, n: int, row: Tensor) -> Tensor | None:
        """Compute piece n with the weights of its layer, a row of ``length(n)`` numbers.

        Returns:
            In backward, the gradient of these weights, a row of the same length; otherwise
            ``None``. Nothing keeps ``row``.
        """
        i = self.order[n]
        last = len(self.sizes) - 2
        cut = self.sizes[i] * self.sizes[i + 1]
        weight = row[:cut].view(self.sizes[i + 1], self.sizes[i])
        if self.seconds:
            time.sleep(self.seconds * ((n <= last) + 2 * (n >= last)))
        if n <= last:
            y = functional.linear(self.inputs[i], weight, row[cut:])
            if i < last:
                self.inputs.append(y.relu_())
                return None
            y.requires_grad_()
            with torch.enable_grad():
                loss = functional.cross_entropy(y, self.labels)
            (self.gradient,) = torch.autograd.grad(loss, y)
            self.loss = loss.item()
        x = self.inputs.pop()
        gradients = torch.empty_like(row)
        torch.mm(self.gradient.t(), x, out=gradients[:cut].view_as(weight))
        torch.sum(self.gradient, 0, out=gradients[cut:])
        self.gradient = (self.gradient @ weight).mul_(x > 0) if i else None
        return gradients


def step_on(
    device: torch.device | str,
    weights: Sequence[Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
    layers: Layers,
) -> float:
    """Take one step: weights and optimizers in the host's memory, forward and backward on a device.

    While a layer computes, the next layer's weights are copied. An optimizer works on the host as
    soon as its layer's gradient is there, while the device computes. On CUDA, copies use separate
    streams and pinned memory, because otherwise a copy would wait for the device.

    Args:
        device: "cuda" or "cpu". On the CPU nothing overlaps.
        weights: for each layer a row on the host with ``requires_grad``; updated in place.
        optimizers: for each layer one, for its row.
        layers: the step; its minibatch is on the device.

    Returns:
        The loss.
    """
    bus = _Bus(torch.device(device))
    pieces = len(layers.order)
    down = None  # the pending gradient: its row on the host, its event, its layer
    coming = bus.to_device(weights[layers.order[0]].detach())
    for n in range(pieces):
        row = bus.arrived(*coming)
        if n + 1 < pieces:
            coming = bus.to_device(weights[layers.order[n + 1]].detach())
        gradient = layers.work(n, row)
        if down is not None:
            _update(bus, *down, weights, optimizers)
        down = None if gradient is None else (*bus.to_host(gradient), layers.order[n])
    _update(bus, *down, weights, optimizers)
    return layers.loss


def _update(
    bus: _Bus,
    gradient: Tensor,
    event: torch.cuda.Event | None,
    i: int,
    weights: Sequence[Tensor],
    optimizers: Sequence[Optimizer],
) -> None:
    bus.wait(event)
    weights[i].grad = gradient
    optimizers[i].step()
    weights[i].grad = None


class _Bus:
    """Copies rows in both directions, in the background if the device is CUDA."""

    def __init__(self, device: torch.device):
        self.device = device
        self.cuda = device.type == "cuda"
        self.up = torch.cuda.Stream(device) if self.cuda else None
        self.back = torch.cuda.Stream(device) if self.cuda else None

    def to_device(self, row: Tensor) -> tuple[Tensor, object]:
        if not self.cuda:
            return row.clone(), None
        with torch.cuda.stream(self.up):
            there = row.pin_memory().to(self.device, non_blocking=True)
            return there, self.up.record_event()

    def arrived(self, row: Tensor, event: torch.cuda.Event | None) -> Tensor:
        """Return the row, ready for the computation that follows."""
        if self.cuda:
            now = torch.cuda.current_stream(self.device)
            now.wait_event(event)
            row.record_stream(now)
        return row

    def to_host(self, row: Tensor) -> tuple[Tensor, object]:
        if not self.cuda:
            return row, None
        self.back.wait_stream(torch.cuda.current_stream(self.device))
        here = torch.empty(row.shape, dtype=row.dtype, pin_memory=True)
        with torch.cuda.stream(self.back):
            here.copy_(row, non_blocking=True)
            row.record_stream(self.back)
            return here, self.back.record_event()

    def wait(self, event: torch.cuda.Event | None) -> None:
        if event is not None:
            event.synchronize()
