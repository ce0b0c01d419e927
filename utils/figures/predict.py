"""Predictions: a number or a choice to which the student commits before an experiment.

A cell before the experiment has the prediction, so that it stays in the notebook. A cell after the
experiment shows the prediction beside the measurement::

    guess = predict("How many times as fast are two ranks as one?", 1.9, unit="×")
    ...
    guess.beside(measured)

A cell that still has ``...`` as its prediction shows buttons for the choices, or a field for a
number. If the student has left them open, the cell after the experiment shows them once more, and
the result only afterwards. Nothing is graded, and an open prediction raises no error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real

from . import audience
from .prediction_form import Form
from .prediction_result import Result
from .prediction_words import NOT_MADE, NOTHING_YET, noted

# The student's choices in this kernel, by question, so that a cell that is run again knows them.
_chosen: dict[str, dict[str, float | str | None]] = {}
# The questions whose result cell has run. Afterwards, their cells show no buttons any more.
_answered: set[str] = set()


@dataclass(frozen=True)
class Prediction:
    """A student's expectation of an experiment; made by :func:`predict`.

    Attributes:
        question: what will be measured.
        values: predictions by name, "" if there is only one; ``None`` if nothing was predicted.
        unit: unit of the numbers.
        choices: the possible choices; empty if numbers are predicted.
        form: the buttons or fields, if the cell shows some.
    """

    question: str
    values: dict[str, float | str | None]
    unit: str = ""
    choices: Sequence[str] = ()
    form: Form | None = field(default=None, repr=False, compare=False)

    def beside(self, measured: object, source: str = "the run") -> None:
        """Show the prediction and the result of the run, and remove the buttons.

        If the student has not predicted yet, the buttons come here first, once for each question.

        Args:
            measured: a number or a choice; or a dict of them, with the names of the prediction.
            source: the source of these values, such as "the model", if they aren't from a run.

        Raises:
            ValueError: the names differ from the prediction, or there is no such choice.
        """
        results = dict(measured) if isinstance(measured, Mapping) else {"": measured}
        if results.keys() != self.values.keys():
            raise ValueError(f"{list(results)} was measured, but {list(self.values)} predicted")
        if self.choices:
            for value in results.values():
                if value not in self.choices:
                    raise ValueError(f"{value!r} is not among the choices {list(self.choices)}")
        result = Result(self.question, self.values, results, self.unit, self.choices, source)
        if self.form is not None and self.form.is_open() and self.question not in _answered:
            self.form.ask_first(result.bundle)
        else:
            if self.form is not None:
                self.form.close()
            result.show()
        _answered.add(self.question)


def predict(
    question: str, answer: object, *, unit: str = "", choices: Sequence[str] = ()
) -> Prediction:
    """Record a prediction and print it, or show buttons or a field for it.

    Args:
        question: what will be measured, in words.
        answer: a number, one of the choices, or a dict of numbers by name; ``...`` if it is open.
        unit: unit of the numbers.
        choices: the possible choices.
    """
    answers = dict(answer) if isinstance(answer, Mapping) else {"": answer}
    values: dict[str, float | str | None] = {}
    for name, value in answers.items():
        values[name] = _valid(value, choices)
        if value is not ... and values[name] is None:
            wanted = "one of " + ", ".join(map(repr, choices)) if choices else "a number"
            print(f"{value!r} is not a prediction for this question. Give {wanted}.")
    missing = [name for name, value in answers.items() if value is ...]
    if missing and audience.is_present():
        return _asked(question, values, unit, choices, missing)
    print(noted(values, unit) or NOTHING_YET)
    return Prediction(question, values, unit, tuple(choices))


def _asked(
    question: str,
    values: dict[str, float | str | None],
    unit: str,
    choices: Sequence[str],
    missing: Sequence[str],
) -> Prediction:
    """Return a prediction with a form in which the student gives the missing values."""
    earlier = _chosen.get(question, {})
    values |= {name: earlier[name] for name in missing if name in earlier}
    _chosen[question] = values
    if question in _answered:
        print(noted(values, unit) or NOT_MADE)
        return Prediction(question, values, unit, tuple(choices))
    form = Form(question, values, unit, choices, missing)
    form.show()
    return Prediction(question, values, unit, tuple(choices), form)


def _valid(value: object, choices: Sequence[str]) -> float | str | None:
    if choices:
        return value if value in choices else None
    good = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else None
