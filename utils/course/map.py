"""The map of the course: a picture of its labs, and paths through it, from the labs' metadata.

``ddl-labs map`` writes ``docs/map.svg`` and the part of README.md between two comments. The same
labs give the same bytes: letters are drawn as paths, with the font that comes with matplotlib.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, PathPatch
from matplotlib.path import Path as Curve

from utils.figures import BLUE, GREEN, GREY, INK, ORANGE, PAPER, PINK, SKY

from .about import PARTS, About
from .notebook import ROOT, NotebookError

PICTURE = Path("docs") / "map.svg"
BEGIN, END = "<!-- map: `make release` writes this -->", "<!-- end of the map -->"

#: Paths through the course: name, what for, and the labs, meeting by meeting.
PATHS: Mapping[str, tuple[str, Sequence[Sequence[str]]]] = {
    "One afternoon": ("from messages to data-parallel training", [["00", "01", "03"]]),
    "Four weeks": (
        "every idea that a cluster lives on, one meeting a week",
        [["00", "01", "02"], ["03", "04"], ["06", "07"], ["10", "13"]],
    ),
}
WHOLE = "The whole course"

_COLOURS = dict(zip(PARTS, (BLUE, ORANGE, GREEN, PINK, SKY), strict=True))
#: Inches: of a box, and from one to the next.
_WIDE, _HIGH, _ACROSS, _DOWN = 1.36, 0.6, 1.52, 1.0
#: Inches above the first row, for the names of the parts.
_HEAD = 0.65
#: Settings with which the same drawing is the same bytes, in the house's look.
_FIXED: dict[Any, Any] = {
    "svg.fonttype": "path",
    "svg.hashsalt": "ddl-labs",
    "font.family": ["DejaVu Sans"],
    "font.size": 10,
    "text.color": INK,
    "path.simplify": False,
}


# --- what is written ---------------------------------------------------------------------------


def write(labs: Sequence[About], root: Path = ROOT) -> list[Path]:
    """Write picture and README's part; the files that changed."""
    changed = []
    for path, text in _wanted(labs, root).items():
        if not path.exists() or path.read_bytes() != text.encode():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="\n")
            changed.append(path)
    return changed


def drift(labs: Sequence[About], root: Path = ROOT) -> list[str]:
    """What does not follow from the labs' metadata, a line each."""
    return [
        f"{path.relative_to(root)}: differs from what the labs' metadata give: make release"
        for path, text in _wanted(labs, root).items()
        if not path.exists() or path.read_bytes() != text.encode()
    ]


def _wanted(labs: Sequence[About], root: Path) -> dict[Path, str]:
    readme = root / "README.md"
    return {root / PICTURE: picture(labs), readme: with_part(readme.read_text("utf-8"), labs)}


def with_part(text: str, labs: Sequence[About]) -> str:
    """README's text with its part about the map written anew.

    Raises:
        NotebookError: the two comments are not there, once each.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise NotebookError(f"README.md needs a line {BEGIN} and after it one {END}")
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{part(labs)}{END}{rest.partition(END)[2]}"


def part(labs: Sequence[About]) -> str:
    """What README.md says: the picture with its words, and the paths with their hours."""
    lines = [
        f"![{in_words(labs)}]({PICTURE.as_posix()})",
        "",
        "| path | what for | labs | hours |",
        "|---|---|---|---|",
    ]
    for path in paths(labs):
        lines.append(f"| {path.name} | {path.aim} | {path.labs} | {hours(path.minutes)} |")
    return "\n".join(["", *lines, "", ""])


def in_words(labs: Sequence[About]) -> str:
    """The picture in words, for those who don't see it."""
    said = []
    for name in PARTS:
        inside = [lab for lab in labs if lab.part == name]
        if inside:
            said.append(f"{name}: {', '.join(map(_with_parents, inside))}.")
    return "Map of the course. " + " ".join(said)


def _with_parents(lab: About) -> str:
    after = f" (after {' and '.join(lab.builds_on)})" if lab.builds_on else ""
    return f"{lab.number} {lab.title}{after}"


# --- paths -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Route:
    """A path through the course: name, what for, its labs in words, minutes, numbers."""

    name: str
    aim: str
    labs: str
    minutes: int
    numbers: tuple[str, ...]


def paths(labs: Sequence[About]) -> list[Route]:
    """The paths through these labs, the whole course last.

    Raises:
        NotebookError: a path names a lab that is not there.
    """
    minutes = {lab.number: lab.minutes for lab in labs}
    found = []
    for name, (aim, meetings) in PATHS.items():
        numbers = tuple(number for meeting in meetings for number in meeting)
        if missing := [number for number in numbers if number not in minutes]:
            raise NotebookError(
                f"utils/course/map.py: the path {name!r} names lab {', '.join(missing)}, "
                "which does not exist"
            )
        said = " · ".join(", ".join(meeting) for meeting in meetings)
        found.append(Route(name, aim, said, sum(minutes[n] for n in numbers), numbers))
    numbers = tuple(minutes)
    said = f"{numbers[0]} to {numbers[-1]}"
    aim = "in any order that follows the arrows"
    return [*found, Route(WHOLE, aim, said, sum(minutes.values()), numbers)]


def hours(minutes: int) -> str:
    """Half hours, as a person would say them: 3, 12½."""
    halves = round(minutes / 30)
    return f"{halves // 2 or ''}{'½' if halves % 2 else ''}"


# --- where each lab stands ---------------------------------------------------------------------


def depths(labs: Iterable[About]) -> dict[str, int]:
    """How many labs stand one after the other above each, by number."""
    found: dict[str, int] = {}
    for lab in labs:  # by number, and each builds on earlier ones only
        found[lab.number] = max((found[other] + 1 for other in lab.builds_on), default=0)
    return found


def places(labs: Sequence[About]) -> dict[str, tuple[int, int]]:
    """Column and row of each lab, by number.

    A part has columns of its own: a lab stands below one of its part that it builds on, if nothing
    does so yet, else it begins another column. The last part is a row below all the others.
    """
    row = depths(labs)
    found: dict[str, tuple[int, int]] = {}
    columns = 0
    for name in PARTS[:-1]:
        ends: list[str] = []
        for lab in (lab for lab in labs if lab.part == name):
            above = next((k for k, end in enumerate(ends) if end in lab.builds_on), len(ends))
            ends[above : above + 1] = [lab.number]
            found[lab.number] = (columns + above, row[lab.number])
        columns += len(ends)
    last = max((place[1] for place in found.values()), default=0) + 1
    for column, lab in enumerate(lab for lab in labs if lab.part == PARTS[-1]):
        found[lab.number] = (column, last)
    return found


# --- the drawing -------------------------------------------------------------------------------


def picture(labs: Sequence[About]) -> str:
    """The map as SVG."""
    boxes, width, height = _boxes(labs)
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_FIXED)
        figure = Figure(figsize=(width, height), facecolor=PAPER)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, width), ylim=(height, 0))
        axes.set_axis_off()
        for lab in labs:
            for other in lab.builds_on:
                _draw_edge(axes, boxes[other], boxes[lab.number])
        for lab in labs:
            _draw_lab(axes, boxes[lab.number], lab, paths(labs))
        for name in PARTS[:-1]:
            _draw_heading(axes, name, [boxes[lab.number] for lab in labs if lab.part == name])
        _draw_legend(axes, paths(labs), 0.3 + 2 * _ACROSS)
        file = io.StringIO()
        FigureCanvasSVG(figure).print_svg(file, metadata={"Date": None, "Title": in_words(labs)})
    return re.sub(r"[ \t]+$", "", file.getvalue(), flags=re.MULTILINE)


def frames(labs: Sequence[About]) -> dict[str, tuple[float, float, float, float]]:
    """Where each lab's box is, by number: left, top, width, height as shares of the picture's."""
    boxes, width, height = _boxes(labs)
    return {
        number: (
            (box.x - box.wide / 2) / width,
            box.top / height,
            box.wide / width,
            _HIGH / height,
        )
        for number, box in boxes.items()
    }


def _boxes(labs: Sequence[About]) -> tuple[dict[str, _Box], float, float]:
    """The boxes by number, and the picture's width and height in inches."""
    at = places(labs)
    columns = 1 + max(column for column, _ in at.values())
    rows = 1 + max(row for _, row in at.values())
    boxes = {lab.number: _Box.of(lab, at, columns) for lab in labs}
    return boxes, columns * _ACROSS + 0.2, _HEAD + rows * _DOWN - (_DOWN - _HIGH) + 0.15


@dataclass(frozen=True)
class _Box:
    """Where a lab is drawn: middle and size, in inches, y downwards."""

    x: float
    y: float
    wide: float

    @classmethod
    def of(cls, lab: About, at: Mapping[str, tuple[int, int]], columns: int) -> _Box:
        column, row = at[lab.number]
        y = _HEAD + row * _DOWN + _HIGH / 2
        if lab.part == PARTS[-1]:  # across all the columns, whatever it builds on
            share = columns / sum(at[other][1] == row for other in at)
            return cls(0.1 + (column + 0.5) * share * _ACROSS, y, share * _ACROSS - 0.16)
        return cls(0.1 + (column + 0.5) * _ACROSS, y, _WIDE)

    @property
    def top(self) -> float:
        return self.y - _HIGH / 2

    @property
    def bottom(self) -> float:
        return self.y + _HIGH / 2

    def reach(self, x: float) -> float:
        """The place on its upper edge that is the nearest to x."""
        inside = self.wide / 2 - _WIDE / 2
        return min(max(x, self.x - inside), self.x + inside)


def _draw_edge(axes: Axes, above: _Box, below: _Box) -> None:
    """An arrow down, across in the gap above the lower box, and down."""
    x, end = below.reach(above.x), below.top - 0.1
    # Each column crosses at a height of its own, so that no two arrows lie upon each other.
    across = below.top - (_DOWN - _HIGH) * (0.82 - 0.1 * (above.x // _ACROSS) % 0.6)
    bend = math.copysign(min(0.1, abs(x - above.x) / 2), x - above.x)
    corners = [(above.x, above.bottom), (above.x, across - abs(bend)), (above.x, across)]
    corners += [(above.x + bend, across), (x - bend, across), (x, across)]
    corners += [(x, across + abs(bend)), (x, end)]
    codes = [Curve.MOVETO, Curve.LINETO, Curve.CURVE3, Curve.CURVE3]
    codes += [Curve.LINETO, Curve.CURVE3, Curve.CURVE3, Curve.LINETO]
    style = {"edgecolor": GREY, "facecolor": "none", "linewidth": 1.3}
    axes.add_patch(PathPatch(Curve(corners, codes), **style, zorder=1))
    tip = [(x - 0.055, end), (x + 0.055, end), (x, end + 0.1), (x - 0.055, end)]
    axes.add_patch(PathPatch(Curve(tip), facecolor=GREY, edgecolor="none", zorder=1))


def _draw_lab(axes: Axes, box: _Box, lab: About, routes: Sequence[Route]) -> None:
    where = (box.x - box.wide / 2 + 0.04, box.top + 0.04)
    style = "round,pad=0.04,rounding_size=0.08"
    for colour, alpha, width in ((PAPER, 1, 0), (_COLOURS[lab.part], 0.2, 0), ("none", 1, 1.4)):
        axes.add_patch(
            FancyBboxPatch(
                where,
                box.wide - 0.08,
                _HIGH - 0.08,
                boxstyle=style,
                facecolor=colour,
                edgecolor=_COLOURS[lab.part] if width else "none",
                linewidth=width,
                alpha=alpha,
                zorder=2,
            )
        )
    words = textwrap.wrap(f"{lab.number} · {lab.title}", 17 if box.wide <= _WIDE else 80)
    text: dict[str, Any] = {"ha": "center", "va": "center", "zorder": 3}
    axes.text(box.x, box.y - 0.09, "\n".join(words), weight="bold", fontsize=8.5, **text)
    ranks = f"{lab.minutes} min · {lab.ranks} ranks"
    axes.text(box.x, box.bottom - 0.11, ranks, fontsize=7.5, **text)
    own = [k for k, route in enumerate(routes[:-1]) if lab.number in route.numbers]
    for k in own:
        _draw_mark(
            axes, k, box.x + box.wide / 2 - 0.1 - 0.17 * (len(own) - 1 - own.index(k)), box.top
        )


#: How the paths are marked, in their order: shapes as well as colours.
_MARKS = (("o", INK), ("D", INK), ("^", INK))


def _draw_mark(axes: Axes, path: int, x: float, y: float) -> None:
    shape, colour = _MARKS[path]
    axes.plot(x, y, shape, markersize=6.5, color=colour, markeredgecolor=PAPER, zorder=4)


def _draw_heading(axes: Axes, name: str, boxes: Sequence[_Box]) -> None:
    """The part's name above its columns, on a line of its colour."""
    if not boxes:
        return
    left = min(box.x for box in boxes) - _WIDE / 2
    right = max(box.x for box in boxes) + _WIDE / 2
    words = textwrap.fill(name, 14 if right - left < 1.5 * _WIDE else 60)
    axes.text(left, _HEAD - 0.18, words, ha="left", va="bottom", fontsize=9.5, weight="bold")
    axes.plot([left, right], [_HEAD - 0.12] * 2, color=_COLOURS[name], linewidth=3)


def _draw_legend(axes: Axes, routes: Sequence[Route], x: float) -> None:
    for k, route in enumerate(routes):
        y = _HEAD + 0.25 + 0.25 * k
        if route.name != WHOLE:
            _draw_mark(axes, k, x, y)
        axes.text(x + 0.18, y, f"{route.name}: {hours(route.minutes)} hours", va="center")
    y += 0.25
    axes.text(x, y, "→", ha="center", va="center", color=GREY, weight="bold")
    axes.text(x + 0.18, y, "helps to know before", va="center")
