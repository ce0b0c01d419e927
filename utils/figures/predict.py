"""Predict first: a number or a choice that the student commits before an experiment.

A cell before the experiment holds the prediction, so that it stays in the notebook; a cell after it
draws the prediction beside the measurement::

    guess = predict("How many times as fast are two ranks as one?", 1.9, unit="×")
    ...
    guess.beside(measured)

Where the student has not put anything yet stands ``...``. Nothing is graded, and nothing raises.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .charts import chart, finish, legend_beside, name_rows
from .palette import BLUE, GREY, INK, ORANGE
from .shapes import write_beside

NOTHING_YET = "No prediction yet: put it in place of ... and run this cell again."
# Where the largest number is so many times the smallest, the axis is logarithmic.
_WIDE = 30


@dataclass(frozen=True)
class Prediction:
    """What a student expects of an experiment; made by :func:`predict`.

    Attributes:
        question: what will be measured.
        values: by name, "" where there is one only; ``None`` where nothing was predicted.
        unit: of the numbers.
        choices: what can be chosen; empty where numbers are predicted.
    """

    question: str
    values: Mapping[str, float | str | None]
    unit: str = ""
    choices: Sequence[str] = ()

    def beside(self, measured: object, source: str = "measured") -> Figure:
        """Draw the prediction (hollow) and what the run gave (filled).

        Args:
            measured: a number or a choice; or a dict of them, with the names of the prediction.
            source: where the numbers come from, such as "by α–β", if no run has given them.

        Raises:
            ValueError: other names than in the prediction, or no such choice.
        """
        results = dict(measured) if isinstance(measured, Mapping) else {"": measured}
        if results.keys() != self.values.keys():
            raise ValueError(f"measured {list(results)}, but predicted were {list(self.values)}")
        figure, axes = chart(8, 1.7 + 0.45 * len(self.choices or results))
        draw = _draw_choice if self.choices else _draw_numbers
        draw(axes, self, results, source)
        axes.set_title("\n".join(textwrap.wrap(self.question, 80)))
        return finish(figure, f"{self.question} {self._in_words(results, source)}")

    def _in_words(self, results: Mapping[str, float | str], source: str) -> str:
        parts = []
        for name, value in results.items():
            guess = self.values[name]
            expected = "nothing" if guess is None else _shown(guess, self.unit)
            start = f"{name}: " if name else ""
            parts.append(f"{start}predicted: {expected}, {source}: {_shown(value, self.unit)}")
        return "; ".join(parts) + "."


def predict(
    question: str, answer: object, *, unit: str = "", choices: Sequence[str] = ()
) -> Prediction:
    """Note a prediction, and print it.

    Args:
        question: what will be measured, in words.
        answer: a number; one of the choices; or a dict of numbers by name. ``...``: not yet.
        unit: of the numbers.
        choices: what can be chosen.
    """
    answers = dict(answer) if isinstance(answer, Mapping) else {"": answer}
    values: dict[str, float | str | None] = {}
    for name, value in answers.items():
        values[name] = _valid(value, choices)
        if value is not ... and values[name] is None:
            wanted = "one of " + ", ".join(map(repr, choices)) if choices else "a number"
            print(f"{value!r} is no prediction here: expected {wanted}.")
    noted = [
        f"{name}: {_shown(value, unit)}" if name else _shown(value, unit)
        for name, value in values.items()
        if value is not None
    ]
    print(f"Your prediction: {', '.join(noted)}" if noted else NOTHING_YET)
    return Prediction(question, values, unit, tuple(choices))


def _valid(value: object, choices: Sequence[str]) -> float | str | None:
    if choices:
        return value if value in choices else None
    good = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else None


def _shown(value: float | str, unit: str) -> str:
    if isinstance(value, str):
        return value
    number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{number} {unit}".rstrip()


def _draw_numbers(
    axes: Axes, prediction: Prediction, results: Mapping[str, float], source: str
) -> None:
    for row, (name, value) in enumerate(results.items()):
        guess = prediction.values[name]
        if guess is not None:
            axes.plot([guess, value], [row, row], color=GREY, linewidth=1.5, zorder=1)
            _mark(axes, guess, row, "predicted", hollow=True)
            _label(axes, guess, row, prediction.unit, below=True)
        _mark(axes, value, row, source, hollow=False)
        _label(axes, value, row, prediction.unit, below=False)
    guesses = [guess for guess in prediction.values.values() if guess is not None]
    _scale(axes, [*guesses, *results.values()])
    axes.margins(x=0.12)
    name_rows(axes, list(results))
    axes.set_ylim(len(results) - 0.4, -0.6)
    axes.set_xlabel(prediction.unit)
    legend_beside(axes)


def _scale(axes: Axes, numbers: Sequence[float]) -> None:
    """Choose the axis: logarithmic where numbers lie far apart, else from 0 if none is negative."""
    low, high = min(numbers), max(numbers)
    if low <= 0:
        return
    if high > _WIDE * low:
        axes.set_xscale("log")
        return
    axes.set_xlim(0, 1.12 * high)
    if high >= 1000:
        axes.xaxis.set_major_formatter("{x:,.0f}")


def _draw_choice(
    axes: Axes, prediction: Prediction, results: Mapping[str, str], source: str
) -> None:
    choices = prediction.choices
    for name, value in results.items():
        if value not in choices:
            raise ValueError(f"{value!r} is not among the choices {list(choices)}")
        guess = prediction.values[name]
        if guess is not None:
            _mark(axes, 0, choices.index(guess), "predicted", hollow=True)
        _mark(axes, 1, choices.index(value), source, hollow=False)
    axes.set_xlim(-0.6, 1.6)
    axes.set_xticks([0, 1], ["you predicted", "the run"])
    axes.set_yticks(range(len(choices)), choices)
    axes.set_ylim(len(choices) - 0.4, -0.6)
    axes.tick_params(length=0)


def _mark(axes: Axes, x: float, row: int, label: str, *, hollow: bool) -> None:
    color = ORANGE if hollow else BLUE
    look = {"markersize": 10, "markeredgecolor": color, "markeredgewidth": 2, "linestyle": "none"}
    if label not in axes.get_legend_handles_labels()[1]:
        look["label"] = label
    axes.plot(x, row, "D" if hollow else "o", markerfacecolor="none" if hollow else color, **look)


def _label(axes: Axes, x: float, row: int, unit: str, *, below: bool) -> None:
    offset, up = ((0, -11), "top") if below else ((0, 9), "bottom")
    look = {"ha": "center", "va": up, "color": INK, "fontsize": 10}
    write_beside(axes, _shown(x, unit), (x, row), offset, **look)
