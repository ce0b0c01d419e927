"""Predict first: a number or a choice that the student commits before an experiment.

A cell before the experiment holds the prediction, so that it stays in the notebook; a cell after it
shows the prediction beside the measurement::

    guess = predict("How many times as fast are two ranks as one?", 1.9, unit="×")
    ...
    guess.beside(measured)

A cell that still has ``...`` as its prediction shows buttons for the choices, or a field for a
number. Nothing is graded, and an open prediction raises no error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real

from . import audience
from .prediction_form import Form
from .prediction_result import Result
from .prediction_words import NOTHING_YET, noted

# What the student chose in this kernel, by question: a cell that is run again still knows it.
_chosen: dict[str, dict[str, float | str | None]] = {}


@dataclass(frozen=True)
class Prediction:
    """What a student expects of an experiment; made by :func:`predict`.

    Attributes:
        question: what will be measured.
        values: by name, "" where there is one only; ``None`` where nothing was predicted.
        unit: of the numbers.
        choices: what can be chosen; empty where numbers are predicted.
        form: its buttons or fields, if the cell shows some.
    """

    question: str
    values: dict[str, float | str | None]
    unit: str = ""
    choices: Sequence[str] = ()
    form: Form | None = field(default=None, repr=False, compare=False)

    def beside(self, measured: object, source: str = "the run") -> None:
        """Show the prediction and what the run gave. From now on the buttons are gone.

        Args:
            measured: a number or a choice; or a dict of them, with the names of the prediction.
            source: what gave these values, such as "the model", if no run did.

        Raises:
            ValueError: other names than in the prediction, or no such choice.
        """
        results = dict(measured) if isinstance(measured, Mapping) else {"": measured}
        if results.keys() != self.values.keys():
            raise ValueError(f"measured {list(results)}, but predicted were {list(self.values)}")
        if self.choices:
            for value in results.values():
                if value not in self.choices:
                    raise ValueError(f"{value!r} is not among the choices {list(self.choices)}")
        if self.form is not None:
            self.form.close()
        Result(self.question, self.values, results, self.unit, self.choices, source).show()


def predict(
    question: str, answer: object, *, unit: str = "", choices: Sequence[str] = ()
) -> Prediction:
    """Note a prediction, and print it; or show buttons or a field for it.

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
    """Return a prediction whose missing values the student gives in a form."""
    earlier = _chosen.get(question, {})
    values |= {name: earlier[name] for name in missing if name in earlier}
    _chosen[question] = values
    form = Form(question, values, unit, choices, missing)
    form.show()
    return Prediction(question, values, unit, tuple(choices), form)


def _valid(value: object, choices: Sequence[str]) -> float | str | None:
    if choices:
        return value if value in choices else None
    good = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else None
