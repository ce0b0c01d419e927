"""The device of a rank: a process that has the training images and computes gradients.

A GPU has its own memory, and a program moves weights and gradients to it and from it. In the
capstone, a second process plays the GPU, and only this process has the images. An entry sends it
weights and the numbers of images, and gets the loss and the gradient. The device itself counts the
images of each gradient.

The first message names the file of the device's record. Each other one is the length of a
minibatch, its indices and the weights, as bytes. An answer is the loss and the gradient.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable
from hashlib import blake2b
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from utils import data, models

from .rules import SIZES

#: Bytes of the number of a minibatch's images, at the beginning of a request.
HEAD = 8


class Device:
    """A rank's device, which is started before the rank joins the others.

    Args:
        images: the file with the training images and their labels.
    """

    def __init__(self, images: Path):
        self._link, inside = multiprocessing.Pipe()
        # A fork of a process that has no thread yet. The rank's MPI begins after it.
        self._pid = os.fork()
        if self._pid == 0:
            self._link.close()
            try:
                _serve(inside, images)
            finally:
                os._exit(0)
        inside.close()

    def keep_record(self, path: Path) -> None:
        """Let the device write a line for each gradient from now on; see :func:`recorded`."""
        self._link.send_bytes(os.fsencode(path))

    def compute(self, indices: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean loss of these images, float32 [], and its gradient, float32 [n].

        Args:
            indices: int64 [m], the numbers of the images.
            weights: float32 [n], all parameters of the model one after the other.
        """
        head = len(indices).to_bytes(HEAD, "little")
        self._link.send_bytes(head + _bytes(indices) + _bytes(weights))
        answer = torch.frombuffer(bytearray(self._link.recv_bytes()), dtype=torch.float32)
        return answer[0], answer[1:]

    def close(self) -> None:
        """End the device."""
        self._link.close()
        os.waitpid(self._pid, 0)


def fingerprint(weights: Tensor) -> str:
    """Return 16 hexadecimal digits that tell whether weights are equal to the last bit."""
    return blake2b(_bytes(weights), digest_size=8).hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().numpy().tobytes()


def recorded(path: Path) -> list[tuple[int, str]]:
    """Return the gradients that a device has computed: images, and fingerprints of the weights."""
    lines = map(str.split, path.read_text(encoding="utf-8").splitlines())
    return [(int(count), weights) for count, weights in lines]


def _serve(link: Connection, images: Path) -> None:
    """Answer requests until the rank closes the link or dies."""
    pixels, labels = torch.load(images, weights_only=True)
    shift, scale = -data.MEAN / data.STD, 1 / (255 * data.STD)
    inputs = (shift + scale * pixels.float()).unsqueeze(1)
    model = models.mlp(seed=0, sizes=SIZES)
    with contextlib.suppress(EOFError, ConnectionError):  # the rank has ended, or was killed
        record = Path(os.fsdecode(link.recv_bytes()))
        with record.open("w", encoding="utf-8") as lines:
            while True:
                indices, weights = _request(bytearray(link.recv_bytes()))
                print(len(indices), fingerprint(weights), file=lines, flush=True)
                vector_to_parameters(weights, model.parameters())
                model.zero_grad()
                loss = cross_entropy(model(inputs[indices]), labels[indices])
                loss.backward()
                gradient = parameters_to_vector(p.grad for p in model.parameters())
                link.send_bytes(_bytes(torch.cat([loss.detach().reshape(1), gradient])))


def _request(message: bytearray) -> tuple[Tensor, Tensor]:
    """Return the indices, int64 [m], and the weights, float32 [n], of a request."""
    end = HEAD + 8 * int.from_bytes(message[:HEAD], "little")
    indices = torch.frombuffer(message[HEAD:end], dtype=torch.int64)
    return indices, torch.frombuffer(message[end:], dtype=torch.float32)


class OnDevice(torch.autograd.Function):
    """The loss of a minibatch as a function of the parameters, which the device computes."""

    @staticmethod
    def forward(
        ctx: Any,
        compute: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        indices: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        """Return the loss, float32 []; `compute` gets the indices and the weights."""
        loss, gradient = compute(indices, parameters_to_vector(parameters))
        ctx.save_for_backward(gradient)
        ctx.shapes = [parameter.shape for parameter in parameters]
        return loss

    @staticmethod
    def backward(ctx: Any, by_loss: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of each parameter."""
        (gradient,) = ctx.saved_tensors
        parts = gradient.split([shape.numel() for shape in ctx.shapes])
        pairs = zip(parts, ctx.shapes, strict=True)
        return None, None, *(by_loss * part.view(shape) for part, shape in pairs)


class Model(nn.Module):
    """The capstone's MLP, whose forward pass takes numbers of images and returns their mean loss.

    Its parameters and their names are those of `models.mlp(seed=0, sizes=SIZES)`.

    Args:
        compute: computes the loss and the gradient of a minibatch at given weights.
    """

    def __init__(self, compute: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]):
        super().__init__()
        self.layers = models.mlp(seed=0, sizes=SIZES).layers
        self._compute = compute

    def forward(self, indices: Tensor) -> Tensor:
        """Return the mean cross entropy of these images, float32 []; indices are int64 [m]."""
        return OnDevice.apply(self._compute, indices, *self.parameters())

    def __deepcopy__(self, memo: dict) -> Model:
        """Return a copy that uses the same device."""
        copy = Model(self._compute)
        copy.load_state_dict(self.state_dict())
        return copy
