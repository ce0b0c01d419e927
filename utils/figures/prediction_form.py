"""Buttons for the choices of a prediction, or a field for each number."""

from __future__ import annotations

import functools
import html
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from .prediction_words import NOTHING_YET, noted, number_in

if TYPE_CHECKING:
    import ipywidgets
    from IPython.display import DisplayHandle

_PLACEHOLDER = "a number, then Enter"


class Form:
    """The buttons or fields of one prediction. A click or Enter changes the values.

    Args:
        question: what will be measured.
        values: values of the prediction, by name; the form changes this dict.
        unit: unit of the numbers.
        choices: the choices, with a button for each; without choices, there is a number field.
        missing: names that get buttons or a field.
    """

    def __init__(
        self,
        question: str,
        values: dict[str, float | str | None],
        unit: str,
        choices: Sequence[str],
        missing: Sequence[str],
    ):
        import ipywidgets  # here, because it is slow, and only needed if somebody is present

        self._values = values
        self._unit = unit
        self._line = ipywidgets.HTML()
        self._handle: DisplayHandle | None = None
        rows = [row for name in missing for row in self._rows(name, choices)]
        title = ipywidgets.HTML(f"<b>{html.escape(question)}</b>")
        self.box = ipywidgets.VBox([title, *rows, self._line])
        self._tell()

    def _rows(self, name: str, choices: Sequence[str]) -> Iterator[ipywidgets.Widget]:
        import ipywidgets

        if not choices:
            yield self._field(name)
            return
        if name:
            yield ipywidgets.Label(name)
        buttons = [
            ipywidgets.Button(description=choice, tooltip=choice, layout={"width": "auto"})
            for choice in choices
        ]
        for button in buttons:
            button.on_click(functools.partial(self._choose, name, buttons))
        self._mark(name, buttons)
        yield ipywidgets.HBox(buttons, layout={"flex_flow": "row wrap"})

    def _field(self, name: str) -> ipywidgets.HBox:
        import ipywidgets

        value = self._values[name]
        field = ipywidgets.Text(
            value="" if value is None else f"{value:g}",
            placeholder=_PLACEHOLDER,
            description=name or "Your number",
            continuous_update=False,
            style={"description_width": "initial"},
        )
        field.observe(functools.partial(self._type, name), "value")
        return ipywidgets.HBox([field, ipywidgets.Label(self._unit)])

    def _choose(
        self, name: str, buttons: Sequence[ipywidgets.Button], chosen: ipywidgets.Button
    ) -> None:
        self._values[name] = chosen.description
        self._mark(name, buttons)
        self._tell()

    def _mark(self, name: str, buttons: Sequence[ipywidgets.Button]) -> None:
        """Put a check mark on the latest choice."""
        for button in buttons:
            button.icon = "check" if button.description == self._values[name] else ""

    def _type(self, name: str, change: dict[str, str]) -> None:
        number = number_in(change["new"], self._unit)
        if number is None and change["new"].strip():
            self._line.value = (
                f"“{html.escape(change['new'])}” is not a number. Write one like 1.5."
            )
            return
        self._values[name] = number
        self._tell()

    def _tell(self) -> None:
        said = noted(self._values, self._unit)
        self._line.value = f'<span role="status">{html.escape(said)}</span>' if said else ""

    def show(self) -> None:
        """Show the form below its cell; a page without widgets shows an instruction instead."""
        from IPython.display import display

        data = self.box._repr_mimebundle_() | {"text/plain": NOTHING_YET}
        self._handle = display(data, raw=True, display_id=True)

    def close(self) -> None:
        """Replace the form by a line with the prediction, because a notebook can store it."""
        if self._handle is None:
            return
        said = noted(self._values, self._unit) or NOTHING_YET
        self._handle.update({"text/plain": said}, raw=True)
        self._handle = None
        self.box.close_all()
