"""Fashion-MNIST and the small teaching data sets.

`fashion_mnist()` returns real Fashion-MNIST (Xiao, Rasul, Vollgraf, 2017, arXiv:1708.07747)
from the first of these sources that has it:

1. the folder in the environment variable `FASHION_MNIST_ROOT`, which is never written to,
2. the user's cache,
3. torchvision's download, into the cache,
4. offline: a generated stand-in of the same shape, with a warning.

`InMemoryLoader` makes minibatches of it without touching single samples, and the items of
`SimpleDataSet` show their index. torchvision is imported only when somebody asks for data.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import http.client
import operator
import os
import shutil
import socket
import textwrap
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import filelock
import numpy as np
import platformdirs
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
)

from .torchvision_repair import import_torchvision

if TYPE_CHECKING:
    from torchvision.datasets import FashionMNIST

MEAN, STD = 0.2860, 0.3530  # over all pixels of the training images, pixels in [0, 1]

ROOT_VARIABLE = "FASHION_MNIST_ROOT"


class RawFile(NamedTuple):
    """The size and the hash of an intact raw file."""

    size: int  # bytes
    md5: str


# The unpacked files. torchvision knows only the packed files, which are gone after unpacking.
RAW_FILES = {
    "train-images-idx3-ubyte": RawFile(47_040_016, "f4a8712d7a061bf5bd6d2ca38dc4d50a"),
    "train-labels-idx1-ubyte": RawFile(60_008, "9018921c3c673c538a1fc5bad174d6f9"),
    "t10k-images-idx3-ubyte": RawFile(7_840_016, "8181f5470baa50b63fa0f6fddb340f0a"),
    "t10k-labels-idx1-ubyte": RawFile(10_008, "15d484375f8d13e6eb1aabb0c3f46965"),
}

# Seconds. torchvision sets no timeout, so it would wait forever for a server that falls silent.
SILENCE = 30
LONGEST_DOWNLOAD = 30 * 60
# Ranks that come a little later use the failure of the first rank. Otherwise some ranks would train
# on real data, and some on the stand-in.
SAME_FAILURE_FOR = 30

_DOWNLOAD_FAILURES = (RuntimeError, OSError, EOFError, zlib.error, http.client.HTTPException)

# Why this process uses the stand-in. It keeps the stand-in, because training and test data must
# match.
_standin_because: str | None = None


# --- Fashion-MNIST ----------------------------------------------------------------------------


def fashion_mnist(
    train: bool = True, transform: Callable | Literal["default"] | None = "default"
) -> FashionMNIST:
    """Return Fashion-MNIST: 60,000 training or 10,000 test images of clothes in 10 classes.

    Args:
        train: Return the training images; otherwise the test images.
        transform: Function for each PIL image; "default" is `default_transform()`, None is nothing.

    Returns:
        A `torchvision.datasets.FashionMNIST` with `data` (uint8 [n, 28, 28]), `targets` (int64
        [n]), `classes` (10 names) and `is_standin`. Item i is `(transform(image), int)`, by
        default `(float32 [1, 28, 28], label)`.

    The module's docstring lists the sources. The size and the MD5 of all four files are checked,
    and damaged files in the cache are downloaded again. If several processes need the files, one
    downloads them and the others wait. A process that uses the stand-in (`is_standin`, and a line
    that begins with "!") keeps it until it ends, so that its training and test data match.

    Raises:
        RuntimeError: `FASHION_MNIST_ROOT` is set and has no intact Fashion-MNIST, or another
            process has kept the cache locked for half an hour.
        TypeError: `train` is not a bool, or `transform` is not callable.
    """
    if not isinstance(train, bool):
        raise TypeError(f"train must be True or False, got {train!r}")
    if transform == "default":
        transform = default_transform()
    elif transform is not None and not callable(transform):
        raise TypeError(f'transform must be callable, None or "default", got {transform!r}')

    root = _find_data()
    from . import fashion  # imports torchvision

    if root is None:
        return fashion.StandInFashionMNIST(train, transform)
    return fashion.FashionMNIST(root, train=train, transform=transform)


def default_transform() -> Callable:
    """Return `Compose([ToTensor(), Normalize(0.2860, 0.3530)])`: PIL → float32 [1, 28, 28]."""
    transforms = import_torchvision().transforms
    return transforms.Compose([transforms.ToTensor(), transforms.Normalize((MEAN,), (STD,))])


def cache_folder() -> Path:
    """Return the folder for downloads: the course's folder in the user's cache."""
    return platformdirs.user_cache_path("ddl-labs")


def _find_data() -> Path | None:
    """Return a folder with intact files, in torchvision's layout; None for the stand-in.

    A process that has to use the stand-in prints a warning, once.
    """
    global _standin_because
    folder = os.environ.get(ROOT_VARIABLE)
    if folder:
        root = Path(folder).expanduser()
        _require_intact(root)
        return root
    if _standin_because is None:
        cache = cache_folder()
        try:
            if _damaged(cache):
                _fill(cache)
            return cache
        except _NoDownloadError as failure:
            _standin_because = str(failure)
            print(
                "! NOT Fashion-MNIST: it is not on this machine and could not be downloaded "
                f"({failure}). A GENERATED STAND-IN replaces it: random patterns of the same "
                "shape, so accuracies will differ. Once online, restart the kernel and the ranks, "
                f"or set {ROOT_VARIABLE} to a folder that has the data.",
                flush=True,
            )
    return None


# --- files ------------------------------------------------------------------------------------


def _raw_folder(root: Path) -> Path:
    return root / "FashionMNIST" / "raw"


def _damaged(root: Path) -> dict[str, str]:
    """Return the fault of each damaged raw file under `root`, by name."""
    folder = _raw_folder(root)
    checked = {name: _fault(folder / name, intact) for name, intact in RAW_FILES.items()}
    return {name: fault for name, fault in checked.items() if fault}


def _fault(path: Path, intact: RawFile) -> str | None:
    """Return what is wrong with a file; None for an intact file."""
    try:
        status = path.stat()
        if status.st_size != intact.size:
            return f"has {status.st_size:,} bytes, expected {intact.size:,}"
        md5 = _md5(path, status.st_size, status.st_mtime_ns)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None if md5 == intact.md5 else f"has MD5 {md5}, expected {intact.md5}"


@functools.lru_cache(maxsize=32)
def _md5(path: Path, size: int, modified: int) -> str:
    """Return a file's MD5 in hex; because of size and time, a changed file is read again."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _require_intact(root: Path) -> None:
    """Raise an error with advice if the user's folder has no intact data."""
    damaged = _damaged(root)
    if not damaged:
        return
    folder = _raw_folder(root)
    lines = [f"{ROOT_VARIABLE}={root} has no intact Fashion-MNIST. In {folder}:"]
    for name, fault in damaged.items():
        packed = ". Unpack its .gz" if (folder / f"{name}.gz").exists() else ""
        lines.append(f"  {name} {fault}{packed}")
    lines.append(
        "Nothing is ever downloaded into this folder. Put the four files there "
        f"({', '.join(RAW_FILES)}), or unset {ROOT_VARIABLE} to download them to the cache."
    )
    raise RuntimeError("\n".join(lines))


# --- download ---------------------------------------------------------------------------------


class _NoDownloadError(Exception):
    """Fashion-MNIST can't be downloaded; the message says why, in one line."""


def _fill(cache: Path) -> None:
    """Download the missing files, unless another process just did it, or just failed.

    Raises:
        _NoDownloadError: The files can't be downloaded.
        RuntimeError: Another process holds the lock for too long.
    """
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = _locked(cache / "fashion-mnist.lock")
    except filelock.Timeout as late:
        raise RuntimeError(
            f"Another process has been downloading Fashion-MNIST for {LONGEST_DOWNLOAD // 60} "
            f"minutes and holds {late.lock_file}. End this process, or remove the file if there "
            "is no such process, and try again."
        ) from None
    except OSError as error:
        raise _NoDownloadError(_one_line(f"the cache can't be used: {error}")) from error
    try:
        damaged = _damaged(cache)
        if damaged:
            _download_or_note_failure(cache, list(damaged))
    finally:
        lock.release()


def _locked(path: Path) -> filelock.BaseFileLock:
    """Acquire the lock of this file and return it. Raises filelock.Timeout or OSError."""
    try:
        lock = filelock.FileLock(path, timeout=LONGEST_DOWNLOAD)
        lock.acquire()
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
            raise
        # On NFS without lockd, the existence of a file is the lock. (If the system has no flock at
        # all, as on some Lustre, FileLock does the same by itself.)
        lock = filelock.SoftFileLock(f"{path}ed", timeout=LONGEST_DOWNLOAD)
        lock.acquire()
    return lock


def _download_or_note_failure(cache: Path, names: list[str]) -> None:
    """Download, and write down a failure, so that the waiting ranks find it."""
    note = cache / "fashion-mnist.failed"
    with contextlib.suppress(OSError):
        if time.time() - note.stat().st_mtime < SAME_FAILURE_FOR:
            raise _NoDownloadError(note.read_text(encoding="utf-8"))
    try:
        _download(cache, names)
    except _DOWNLOAD_FAILURES as error:
        reason = _one_line(str(error) or type(error).__name__)
        with contextlib.suppress(OSError):  # a full disk may be the reason
            note.write_text(reason, encoding="utf-8")
        raise _NoDownloadError(reason) from error
    with contextlib.suppress(OSError):
        note.unlink()


def _download(cache: Path, names: list[str]) -> None:
    """Download the named files into a folder beside the cache, and move intact files into it.

    So readers never see half a file, and good files stay. If an attempt is killed, the next
    attempt uses the files that were complete.
    """
    incoming = cache / "incoming"
    staged = _raw_folder(incoming)
    staged.mkdir(parents=True, exist_ok=True)
    try:
        _run_torchvision_download(incoming, names)
    except _DOWNLOAD_FAILURES:
        if not any(staged.glob("*.gz")):
            raise  # no server answered, so a second try would only cost time
        _run_torchvision_download(incoming, names)
    for name in names:
        fault = _fault(staged / name, RAW_FILES[name])
        if fault:
            raise RuntimeError(f"downloaded file {name} {fault}")
    _raw_folder(cache).mkdir(parents=True, exist_ok=True)
    for name in names:
        (staged / name).replace(_raw_folder(cache) / name)
    shutil.rmtree(incoming, ignore_errors=True)


def _run_torchvision_download(root: Path, names: list[str]) -> None:
    """Run torchvision's download of the named files; intact packed files are kept."""
    fashion_mnist_class = import_torchvision().datasets.FashionMNIST
    downloader = fashion_mnist_class.__new__(fashion_mnist_class)  # __init__ would load as well
    downloader.root = str(root)
    downloader.resources = [
        resource for resource in fashion_mnist_class.resources if Path(resource[0]).stem in names
    ]
    # torchvision believes that any file with the right name is complete, even half a file.
    for name in RAW_FILES:
        (_raw_folder(root) / name).unlink(missing_ok=True)
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(SILENCE)
    try:
        downloader.download()
    finally:
        socket.setdefaulttimeout(before)


def _one_line(text: str) -> str:
    return textwrap.shorten(text, 240, placeholder=" …")


# --- minibatches ------------------------------------------------------------------------------


class InMemoryLoader:
    """A loader that takes minibatches from the data set's tensors, faster than `DataLoader`.

    Yields `(images float32 [m, 1, h, w], labels int64 [m])`, normalized. `DataLoader` opens,
    converts and normalizes samples one at a time in Python, but here a minibatch is one lookup.
    The images stay uint8 in memory (47 MB instead of 188 MB) until they are yielded.

    With the same arguments as `DataLoader(dataset, …)`, it gives the same samples in the same
    order, from the same draws of the same random generators. The pixels agree up to
    floating-point noise (below 1e-6). Each epoch iterates over the sampler again, so that
    `sampler.set_epoch(e)` takes effect.

    Args:
        dataset: a data set with `data` uint8 [n, h, w] and `targets` [n], such as
            `fashion_mnist()`, or a `Subset` of it. Its transform may be `default_transform()`,
            another ToTensor with or without Normalize, or None for the default.
        batch_size: samples per minibatch, m.
        sampler: indices in order, such as a `DistributedSampler`; excludes `shuffle`.
        shuffle: use another random order in each epoch.
        generator: draws this order; None is the global generator.
        drop_last: leave out a last minibatch with fewer than m samples.
        batch_sampler: lists of indices, instead of all these arguments except the generator.

    `len()` is the number of minibatches.

    Raises:
        TypeError, ValueError: the arguments contradict each other, or only `DataLoader` can
            handle the data set or the transform.
        IndexError: (while iterating) the sampler gave an index outside the data set.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int = 64,
        sampler: Sampler | Iterable[int] | None = None,
        shuffle: bool = False,
        generator: torch.Generator | None = None,
        drop_last: bool = False,
        batch_sampler: Sampler[list[int]] | Iterable[list[int]] | None = None,
    ) -> None:
        if sampler is not None and shuffle:
            raise ValueError("give a sampler or shuffle=True, not both: the sampler sets the order")
        if batch_sampler is not None and (sampler is not None or shuffle or drop_last):
            raise ValueError("batch_sampler excludes sampler, shuffle and drop_last")
        self._images, self._labels, transform = _tensors(dataset)
        self._scale, self._shift = _scale_and_shift(transform)
        self.dataset = dataset
        self.generator = generator
        if batch_sampler is None:
            if shuffle:
                sampler = RandomSampler(dataset, generator=generator)
            elif sampler is None:
                sampler = SequentialSampler(dataset)
            batch_sampler = BatchSampler(sampler, batch_size, drop_last)
        self.batch_sampler = batch_sampler
        self.sampler = sampler
        self.batch_size = getattr(batch_sampler, "batch_size", None)
        self.drop_last = getattr(batch_sampler, "drop_last", False)

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        batches = iter(self.batch_sampler)
        # DataLoader draws a seed for its workers here, even without workers. The same draw keeps
        # the generator in step, so the order and later dropout masks are the same.
        torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        return map(self._minibatch, batches)

    def _minibatch(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """Return the samples with these indices."""
        # NumPy, because torch.tensor() takes four times as long for a list.
        rows = torch.from_numpy(np.asarray(indices))
        try:
            pixels = self._images.index_select(0, rows)
            labels = self._labels.index_select(0, rows)
        except IndexError:
            raise IndexError(
                f"the sampler gave indices from {rows.min()} to {rows.max()}, but "
                f"the data set has only 0 to {len(self._images) - 1}"
            ) from None
        # shift + scale · pixel converts and normalizes in one pass over memory.
        return torch.add(self._shift, pixels, alpha=self._scale), labels


def _tensors(dataset: Dataset) -> tuple[Tensor, Tensor, Callable | None]:
    """Return a data set's images uint8 [n, 1, h, w], labels int64 [n], and transform."""
    if isinstance(dataset, Subset):
        images, labels, transform = _tensors(dataset.dataset)
        rows = torch.as_tensor(dataset.indices, dtype=torch.int64)
        return images[rows], labels[rows], transform
    images = getattr(dataset, "data", None)
    labels = getattr(dataset, "targets", None)
    if not isinstance(images, Tensor) or images.dtype != torch.uint8 or images.dim() != 3:
        raise TypeError(
            f"{type(dataset).__name__} has no `data` tensor uint8 [n, h, w] to make minibatches "
            "from; use torch.utils.data.DataLoader"
        )
    if not isinstance(labels, Tensor) or labels.shape != images.shape[:1]:
        raise TypeError(
            f"{type(dataset).__name__} needs `targets`, a tensor of {len(images)} labels"
        )
    if getattr(dataset, "target_transform", None) is not None:
        raise ValueError("InMemoryLoader can't apply a target_transform; use DataLoader")
    return images.unsqueeze(1), labels.to(torch.int64), getattr(dataset, "transform", None)


def _scale_and_shift(transform: Callable | None) -> tuple[float, Tensor]:
    """Return scale and shift (0-d float32) that turn pixels 0…255 into `transform`'s values."""
    mean, std = MEAN, STD
    if transform is not None:
        transforms = import_torchvision().transforms
        steps = getattr(transform, "transforms", [transform])
        kinds = [type(step) for step in steps]
        if kinds == [transforms.ToTensor]:
            mean, std = 0.0, 1.0
        elif kinds == [transforms.ToTensor, transforms.Normalize] and len(steps[1].mean) == 1:
            mean, std = float(steps[1].mean[0]), float(steps[1].std[0])
        else:
            raise ValueError(
                f"InMemoryLoader can only do ToTensor and Normalize, not {transform}. "
                "Use DataLoader for other transforms"
            )
    return 1 / (255 * std), torch.tensor(-mean / std)


class SimpleDataSet(Dataset):
    """A data set of `n` items; item i is 10·i, so that you can see which items a sampler picked.

    Args:
        n: Number of items, at least 1.

    Raises:
        TypeError, ValueError: `n` is not a positive integer.
        IndexError: (item) i is not in 0 … n - 1. Negative indices don't count from the end,
            because only a wrong sampler gives them.
    """

    def __init__(self, n: int) -> None:
        if isinstance(n, bool) or not hasattr(n, "__index__"):
            raise TypeError(f"n must be an integer, got {n!r}")
        self.n = operator.index(n)
        if self.n < 1:
            raise ValueError(f"n must be at least 1, got {n}")

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        index = operator.index(index)
        if not 0 <= index < self.n:
            raise IndexError(f"index {index} is out of range: items are 0 to {self.n - 1}")
        return 10 * index
