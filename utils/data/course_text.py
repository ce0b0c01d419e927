"""The text on which the language models of labs 15 to 17 train: the course's own words."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

FILE = Path(__file__).with_name("course_text.txt")
#: The share of the text, at its end, that no model trains on.
HELD_OUT = 0.1


class Text(NamedTuple):
    """The bytes of a text, uint8: those to train on, and those to test with."""

    train: Tensor
    test: Tensor


def course_text() -> Text:
    """Return the Markdown of labs 00 to 14, as it was in November 2026, in two parts.

    The file doesn't follow later changes of the labs, so that results can be repeated. It has
    431,340 bytes, and the last tenth of them is for tests.
    """
    text = torch.frombuffer(bytearray(FILE.read_bytes()), dtype=torch.uint8)
    cut = int(len(text) * (1 - HELD_OUT))
    return Text(text[:cut], text[cut:])


def windows(text: Tensor, samples: int, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return bytes int64 [samples, tokens] from random places, and the byte after each of them.

    Args:
        text: uint8 of more than `tokens` bytes.
        seed: for the places; the same seed gives the same windows on every rank.

    Raises:
        ValueError: the text is too short.
    """
    if len(text) <= tokens:
        raise ValueError(f"A text of {len(text)} bytes has no {tokens} bytes and the next one.")
    draw = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - tokens, (samples, 1), generator=draw)
    window = text[starts + torch.arange(tokens + 1)].long()
    return window[:, :-1], window[:, 1:]
