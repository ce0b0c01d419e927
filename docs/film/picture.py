"""From photographs to one moving picture: captions, one palette, and a GIF that GitHub shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from utils.figures import INK, PAPER

FONT = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans-Bold.ttf"
#: Pixels: height of the caption above a photograph, of its letters, of the frame around both.
CAPTION, LETTERS, FRAME = 52, 20, 1
#: A GIF has 256 colors, one of which says "as before". So many of the others are exact.
COLORS, EXACT = 255, 24


def with_caption(photograph: Image.Image, caption: str, height: int) -> Image.Image:
    """Return the photograph with the words above it, and with paper below it up to a height."""
    width = photograph.width
    picture = Image.new("RGB", (width, height + CAPTION), PAPER)
    picture.paste(photograph, (0, CAPTION))
    draw = ImageDraw.Draw(picture)
    draw.rectangle((0, 0, width, CAPTION), fill=INK)
    font = ImageFont.truetype(str(FONT), LETTERS)
    if draw.textlength(caption, font) > width - CAPTION:
        raise ValueError(f"a caption is too long for {width} pixels: {caption!r}")
    draw.text((CAPTION / 2, CAPTION / 2), caption, fill=PAPER, font=font, anchor="lm")
    draw.rectangle((0, 0, width - 1, height + CAPTION - 1), outline=INK, width=FRAME)
    return picture


def save_gif(pictures: Sequence[Image.Image], seconds: Sequence[float], target: Path) -> None:
    """Write pictures as a GIF that plays forever, each shown for so many seconds."""
    palette = _common_palette(pictures)
    frames = [_with_palette(each, palette) for each in pictures]
    look = {"duration": [round(1000 * each) for each in seconds], "loop": 0, "optimize": True}
    frames[0].save(target, save_all=True, append_images=frames[1:], **look)


def _common_palette(pictures: Sequence[Image.Image]) -> np.ndarray:
    """Return the colors of all pictures together, so that nothing flickers between two.

    The most common colors are exact. Among the others, rare colors count almost as much as common
    ones, because a green sign is small and must stay green.
    """
    counts: Counter[tuple[int, ...]] = Counter()
    for picture in pictures:
        for count, color in picture.getcolors(picture.width * picture.height):
            counts[color] += count
    exact = [color for color, _ in counts.most_common(EXACT)]
    weighed = [color for color, count in counts.items() for _ in range(count.bit_length())]
    sheet = Image.new("RGB", (len(weighed), 1))
    sheet.putdata(weighed)
    others = sheet.quantize(colors=COLORS - len(exact), method=Image.Quantize.MEDIANCUT)
    return np.array([*exact, *np.reshape(others.getpalette(), (-1, 3))])


def _with_palette(picture: Image.Image, palette: np.ndarray) -> Image.Image:
    """Return the picture in the nearest colors; Pillow's own search makes white a little grey."""
    pixels = np.asarray(picture).reshape(-1, 3) @ (1 << 16, 1 << 8, 1)
    colors, where = np.unique(pixels, return_inverse=True)
    parts = np.stack([colors >> 16, colors >> 8 & 255, colors & 255], axis=-1)
    nearest = ((parts[:, None] - palette) ** 2).sum(axis=-1).argmin(axis=1)
    frame = Image.fromarray(nearest[where].astype(np.uint8).reshape(picture.size[::-1]))
    frame.putpalette(palette.astype(np.uint8).tobytes())
    return frame
