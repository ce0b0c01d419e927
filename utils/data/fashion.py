"""The two data set classes behind `utils.data.fashion_mnist`: the real one and the stand-in.

They have a separate module, because they derive from torchvision's classes, which are imported only
when somebody asks for data. Both classes are at module level, so that a fresh process that
unpickles a data set imports torchvision through the repair in `utils.data`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable

import torch

from .torchvision_repair import import_torchvision

_datasets = import_torchvision().datasets

SAMPLES = {True: 60_000, False: 10_000}  # train, test
SIDE = 28
CLASSES = 10
LOOKS = 10  # different patterns that belong to one class
REACH = 2  # pixels that a pattern may be off center, to each side
NOISE = 30  # gray levels
HEAVIEST = 66  # most of another class's pattern, in 128ths; at 64 the classes look the same
BLUR = 5  # pixels
# Gray levels above GROUND are multiplied by GAIN. Half of the pixels are black, and mean and
# standard deviation are close to Fashion-MNIST's, so that the default normalization suits both.
GROUND = 147
GAIN = 20


class _Loaded:
    """Images and labels in memory."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor):
        # A tensor that PyTorch has not allocated itself can't be copied on write.
        self.images, self.labels = images.clone(), labels


_loaded: weakref.WeakValueDictionary[tuple, _Loaded] = weakref.WeakValueDictionary()
_uses: weakref.WeakKeyDictionary[object, _Loaded] = weakref.WeakKeyDictionary()


def _shared(
    user: object, key: tuple, load: Callable[[], tuple[torch.Tensor, torch.Tensor]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images and labels of a data set, which several ranks of one process may have.

    They share the memory of the images until one of them writes to it.

    Args:
        user: the data set; as long as one lives, the images stay loaded.
        key: names the images.
        load: returns them.
    """
    loaded = _loaded.get(key) or _Loaded(*load())
    _loaded[key] = _uses[user] = loaded
    # Copy on write is not documented by PyTorch, so its absence costs only memory.
    copy = getattr(torch, "_lazy_clone", torch.clone)
    return copy(loaded.images), loaded.labels.clone()


class FashionMNIST(_datasets.FashionMNIST):
    """torchvision's `FashionMNIST` with `is_standin = False`; its files have been checked."""

    is_standin = False

    def _load_data(self) -> tuple[torch.Tensor, torch.Tensor]:
        return _shared(self, (self.raw_folder, self.train), super()._load_data)

    def _check_legacy_exist(self) -> bool:
        # torchvision would prefer a `processed/` folder of old versions, which nobody has checked.
        return False


class StandInFashionMNIST(_datasets.FashionMNIST):
    """Generated patterns with the shape and the API of `FashionMNIST`; `is_standin = True`.

    `data` is uint8 [n, 28, 28], `targets` int64 [n], `classes` Fashion-MNIST's ten names, item
    i is `(transform(PIL image), int)`. `n` is 60,000 (train) or 10,000 (test) unless given.
    The same arguments give the same bytes on every rank.
    """

    is_standin = True

    def __init__(
        self, train: bool = True, transform: Callable | None = None, n: int | None = None
    ) -> None:
        super(_datasets.MNIST, self).__init__("(generated)", transform=transform)
        self.train = train
        size = n or SAMPLES[train]
        made = functools.partial(draw, size, seed=2 - train)
        self.data, self.targets = _shared(self, ("(generated)", train, size), made)

    def _check_exists(self) -> bool:
        return True


def draw(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `n` generated samples: images uint8 [n, 28, 28] and labels int64 [n].

    A sample is a pattern of its class, off center and darkened, with noise and a share of another
    class's pattern. If both patterns have the same weight, the classes can't be distinguished, so
    accuracy stays below 100 %.

    All arithmetic uses integers, because all ranks must have the same bytes, and floating-point
    rounding may depend on the processor and on the number of threads.
    """
    bank = _patterns()
    per_class = len(bank) // CLASSES
    random = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=random)

    noise = integers(-NOISE, NOISE + 1, 4_096, SIDE * SIDE).to(torch.int16)
    labels = integers(0, CLASSES, n)
    mine = labels * per_class + integers(0, per_class, n)
    strangers = (labels + integers(1, CLASSES, n)) % CLASSES
    other = strangers * per_class + integers(0, per_class, n)
    weight = integers(0, HEAVIEST + 1, n, 1).to(torch.int16)
    light = integers(100, 129, n, 1).to(torch.int16)
    grain = integers(0, len(noise), n)

    images = torch.empty((n, SIDE * SIDE), dtype=torch.uint8)
    # The parts fit into the cache. No product exceeds 128 · 255, which fits into int16.
    for rows in torch.arange(n).split(1_000):
        part = bank[mine[rows]].mul_(128 - weight[rows])
        part += bank[other[rows]].mul_(weight[rows])
        part = part.bitwise_right_shift_(7).mul_(light[rows]).bitwise_right_shift_(7)
        images[rows] = part.add_(noise[grain[rows]]).clamp_(0, 255).to(torch.uint8)
    return images.view(n, SIDE, SIDE), labels


def _patterns() -> torch.Tensor:
    """Return each look of each class in each position: int16 [classes · looks · positions, 784]."""
    random = torch.Generator().manual_seed(0)
    positions = 2 * REACH + 1
    side = SIDE + positions - 1
    blocks = torch.randint(0, 256, (CLASSES * LOOKS, 10, 10), generator=random)
    canvas = blocks.repeat_interleave(4, 1).repeat_interleave(4, 2)  # 40 × 40 pixels
    # Integer means over a square make soft edges.
    for axis in (1, 2):
        canvas = canvas.unfold(axis, BLUR, 1).sum(-1)
    canvas = canvas[:, :side, :side] // BLUR**2
    shapes = ((canvas - GROUND) * GAIN).clamp(0, 255).to(torch.int16)
    windows = shapes.unfold(1, SIDE, 1).unfold(2, SIDE, 1)  # [patterns, positions ×2, 28, 28]
    return windows.reshape(-1, SIDE * SIDE).contiguous()
