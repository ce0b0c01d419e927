"""The options of ``ddl-labs bench``. Imports nothing that is slow."""

from __future__ import annotations

import argparse
import os
import re
from dataclasses import dataclass
from pathlib import Path

OPERATIONS = ("all_reduce", "broadcast", "all_gather", "ping_pong")
TRANSPORTS = ("mpi", "mpi4py", "gloo")
PARTS = (*OPERATIONS, "ddp_step", "epoch", "recording", "import")
PICTURES = (".png", ".pdf", ".svg")

KI, MI = 2**10, 2**20
SIZES = tuple(4**power for power in range(1, 14))  # 4 B … 64 MiB
QUICK_SIZES = (4, KI, 64 * KI, MI, 4 * MI)


@dataclass(frozen=True)
class Settings:
    """What is measured, how often, and where it goes.

    Attributes:
        sizes: bytes of the tensor that each rank contributes.
        rounds: how often everything is measured; the medians of the rounds are reported.
        parts: some of :data:`PARTS`.
        sample: seconds that one sample of an operation is to take.
        steps: training steps of an epoch; ``None``: all of Fashion-MNIST.
        imports: how often PyTorch is imported, each way.
        deadline: seconds after which the ranks are ended.
    """

    sizes: tuple[int, ...]
    rounds: int
    parts: tuple[str, ...]
    sample: float
    steps: int | None
    imports: int
    deadline: float
    json: Path | None
    plot: Path | None

    @classmethod
    def of(cls, options: argparse.Namespace) -> Settings:
        """The settings that these options ask for."""
        quick = options.quick
        return cls(
            sizes=options.sizes or (QUICK_SIZES if quick else SIZES),
            rounds=options.rounds or (2 if quick else 5),
            parts=options.only or PARTS,
            sample=0.003 if quick else 0.02,
            steps=8 if quick else None,
            imports=1 if quick else 5,
            deadline=options.deadline,
            json=options.json,
            plot=options.plot,
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the options of this command."""
    parser.add_argument("-n", type=_positive, metavar="N", help="ranks to start: 2")
    parser.add_argument(
        "--sizes", type=_sizes, metavar="SIZES", help="such as 4,1K,1M: 4 B to 64 MiB, × 4 each"
    )
    parser.add_argument("--rounds", type=_positive, metavar="R", help="medians of R rounds: 5")
    parser.add_argument("--only", type=_parts, metavar="PARTS", help=f"some of {','.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="few sizes, 2 rounds, short epochs")
    parser.add_argument("--json", type=_file, metavar="FILE", help="write every number there")
    parser.add_argument(
        "--plot", type=_picture, metavar="FILE", help="draw the times and bandwidths"
    )
    parser.add_argument(
        "--deadline", type=_positive, default=600, metavar="S", help="end the ranks after: 600 s"
    )


def as_arguments(options: argparse.Namespace) -> list[str]:
    """The same options as words of a command line, for the ranks."""
    words = ["--quick"] if options.quick else []
    for name in ("sizes", "only"):
        if given := getattr(options, name):
            words.append(f"--{name}={','.join(map(str, given))}")
    for name in ("rounds", "json", "plot", "deadline"):
        if given := getattr(options, name):
            words.append(f"--{name}={given}")
    return words


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(sorted({_size(word.strip()) for word in text.split(",")}))


def _size(word: str) -> int:
    match = re.fullmatch(r"(\d+) ?([KMG]?)(?:iB|B)?", word, re.IGNORECASE)
    if not match:
        raise argparse.ArgumentTypeError(f"{word!r} is not a size such as 4, 16K or 64MiB")
    nbytes = int(match[1]) * {"": 1, "K": KI, "M": MI, "G": KI * MI}[match[2].upper()]
    if nbytes < 4 or nbytes % 4:
        raise argparse.ArgumentTypeError(f"{word!r}: float32 takes 4, 8, 12 … bytes")
    return nbytes


def _parts(text: str) -> tuple[str, ...]:
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in PARTS:
            raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(PARTS)}")
    return tuple(part for part in PARTS if part in words)


def _file(text: str) -> Path:
    path = Path(text).absolute()
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r}: no file can be written there")
    return path


def _picture(text: str) -> Path:
    path = _file(text)
    if path.suffix.lower() not in PICTURES:
        raise argparse.ArgumentTypeError(f"{text!r}: the name must end in {' or '.join(PICTURES)}")
    return path
