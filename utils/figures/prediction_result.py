"""A prediction beside the result of the run: a sentence, the choices with marks, or a picture."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from . import forms, prediction_words
from .charts import chart, finish, legend_beside, name_rows
from .palette import GREY, INK
from .prediction_words import shown
from .shapes import write_beside

# If the largest number is more than this many times the smallest, the axis is logarithmic.
_WIDE = 30
YOU = "you"
# Marks of the prediction and of the result, in words and in the picture.
HOLLOW, FILLED = "◇", "●"

_ROW = "display: flex; flex-wrap: wrap; gap: 0.5em; list-style: none; margin: 0 0 0.4em; padding: 0"
_CHOICE = "border: {} currentColor; border-radius: 0.3em; margin: 0; padding: 0.15em 0.6em"
_LINE = '<p style="margin: 0 0 0.4em">{}</p>'


@dataclass(frozen=True)
class Result:
    """The comparison that `Prediction.beside` shows.

    Attributes:
        question: what was measured.
        guesses: the prediction, by name.
        results: numbers or choices, by the same names.
        unit: unit of the numbers.
        choices: the possible choices; empty for numbers.
        source: the source of the results, such as "the run".
    """

    question: str
    guesses: Mapping[str, float | str | None]
    results: Mapping[str, float | str]
    unit: str
    choices: Sequence[str]
    source: str

    def show(self) -> None:
        """Show the result in the notebook; without a notebook, print its words."""
        from IPython import get_ipython
        from IPython.display import display

        words = self.words()
        if get_ipython() is None:
            print(words)
            return
        display({"text/html": self.page(), "text/plain": words}, raw=True)
        if self._is_worth_a_picture():
            figure = self.picture()
            display(figure)
            plt.close(figure)

    def bundle(self) -> dict[str, str]:
        """Return the result by MIME types, with its picture in the HTML."""
        page = self.page()
        if self._is_worth_a_picture():
            figure = self.picture()
            data, _ = forms.bundle(figure)
            plt.close(figure)
            page += f"\n{forms.in_html(data, html.escape(' '.join(self.sentences())))}"
        return {"text/html": page, "text/plain": self.words()}

    def _is_worth_a_picture(self) -> bool:
        """Return whether there is more to compare than one sentence can say."""
        predicted = any(guess is not None for guess in self.guesses.values())
        return not self.choices and len(self.results) > 1 and predicted

    def sentences(self) -> list[str]:
        """Return a sentence for each name, with your prediction and the result of the run."""
        return [
            prediction_words.outcome(name, self.guesses[name], result, self.unit, self.source)
            for name, result in self.results.items()
        ]

    def words(self) -> str:
        """Return the result as text."""
        lines = [self.question]
        for name in self.results if self.choices else ():
            lines += [name] if name else []
            lines += [f"  {choice}  {marks}".rstrip() for choice, marks in self._marked(name)]
        return "\n".join(lines + self.sentences())

    def page(self) -> str:
        """Return the result as HTML, in the colors of the page around it."""
        lines = [_LINE.format(f"<b>{html.escape(self.question)}</b>")]
        for name in self.results if self.choices else ():
            lines += [_LINE.format(html.escape(name))] if name else []
            row = "".join(_choice(*choice) for choice in self._marked(name))
            lines.append(f'<ul role="list" style="{_ROW}">{row}</ul>')
        return "\n".join(lines + [_LINE.format(html.escape(line)) for line in self.sentences()])

    def _marked(self, name: str) -> Iterator[tuple[str, str]]:
        """Yield each choice with its marks."""
        for choice in self.choices:
            marks = [f"{HOLLOW} {YOU}"] if choice == self.guesses[name] else []
            marks += [f"{FILLED} {self.source}"] if choice == self.results[name] else []
            yield choice, "  ".join(marks)

    def picture(self) -> Figure:
        """Return a picture of the numbers, with hollow predictions and filled results."""
        figure, axes = chart(8, 1.3 + 0.45 * len(self.results))
        for row, (name, value) in enumerate(self.results.items()):
            guess = self.guesses[name]
            if guess is not None:
                axes.plot([guess, value], [row, row], color=GREY, linewidth=1.5, zorder=1)
                _mark(axes, guess, row, YOU, hollow=True)
                _label(axes, guess, row, self.unit, below=True)
            _mark(axes, value, row, self.source, hollow=False)
            _label(axes, value, row, self.unit, below=False)
        guesses = [guess for guess in self.guesses.values() if guess is not None]
        _scale(axes, [*guesses, *self.results.values()])
        axes.margins(x=0.12)
        name_rows(axes, list(self.results))
        axes.set_ylim(len(self.results) - 0.4, -0.6)
        unit = f" [{self.unit}]" if self.unit else ""
        axes.set_xlabel(f"prediction, and {self.source}{unit}")
        legend_beside(axes)
        return finish(figure, " ".join([self.question, *self.sentences()]))


def _choice(choice: str, marks: str) -> str:
    """Return a choice in its frame, which is thicker if it has a mark."""
    frame = _CHOICE.format("2px solid" if marks else "1px dotted")
    mark = f" <b>{html.escape(marks)}</b>" if marks else ""
    return f'<li style="{frame}">{html.escape(choice)}{mark}</li>'


def _scale(axes: Axes, numbers: Sequence[float]) -> None:
    """Use a logarithmic axis for a wide range of numbers, else one from 0 if none is negative."""
    low, high = min(numbers), max(numbers)
    if low <= 0:
        return
    if high > _WIDE * low:
        axes.set_xscale("log")
        return
    axes.set_xlim(0, 1.12 * high)
    if high >= 1000:
        axes.xaxis.set_major_formatter("{x:,.0f}")


def _mark(axes: Axes, x: float, row: int, label: str, *, hollow: bool) -> None:
    look = {"markersize": 10, "markeredgecolor": INK, "markeredgewidth": 2, "linestyle": "none"}
    if label not in axes.get_legend_handles_labels()[1]:
        look["label"] = label
    axes.plot(x, row, "D" if hollow else "o", markerfacecolor="none" if hollow else INK, **look)


def _label(axes: Axes, x: float, row: int, unit: str, *, below: bool) -> None:
    offset, up = ((0, -11), "top") if below else ((0, 9), "bottom")
    look = {"ha": "center", "va": up, "color": INK, "fontsize": 10}
    write_beside(axes, shown(x, unit), (x, row), offset, **look)
