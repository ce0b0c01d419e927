"""Buttons for the choices of a prediction, or a field for each number.

The buttons are widgets, which reach the kernel. A script beside them (``scripts/prediction.js``)
lets the keyboard alone suffice: the form has the focus when its cell has run, and Enter commits the
prediction and goes on to the next cell.
"""

from __future__ import annotations

import functools
import html
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .prediction_words import ASKED, NOT_MADE, NOTHING_YET, UNASKED, noted, number_in

if TYPE_CHECKING:
    import ipywidgets
    from IPython.display import DisplayHandle

_PLACEHOLDER = "a number, then Enter"
_SCRIPT = Path(__file__).with_name("scripts") / "prediction.js"
#: The class of the element that has the buttons, for the script.
_CLASS = "ddl-prediction"
_EMPTY = {"text/plain": "", "text/html": ""}


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
        self._missing = missing
        self._line = ipywidgets.HTML()
        # The outputs that show the form, each with the script beside it.
        self._shown: list[tuple[DisplayHandle, DisplayHandle]] = []
        self._result: Callable[[], dict[str, str]] | None = None
        rows = [row for name in missing for row in self._rows(name, choices)]
        title = ipywidgets.HTML(f"<b>{html.escape(question)}</b>")
        self.box = ipywidgets.VBox([title, *rows, self._line])
        self.box.add_class(_CLASS)
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
            of_unit = f" in {self._unit}" if self._unit else ""
            self._line.value = (
                f"“{html.escape(change['new'])}” is not a number{of_unit}. Write one like 1.5."
            )
            return
        self._values[name] = number
        self._tell()

    def _tell(self) -> None:
        said = noted(self._values, self._unit)
        if said and self.is_open():
            said += f". Still open: {', '.join(self._open())}"
        self._line.value = f'<span role="status">{html.escape(said)}</span>' if said else ""
        if self._result is not None and not self.is_open():
            self.close()

    def is_open(self) -> bool:
        """Return whether a value is missing."""
        return bool(self._open())

    def _open(self) -> list[str]:
        return [name for name in self._missing if self._values[name] is None]

    def show(self) -> None:
        """Show the form below its cell; a page without widgets shows an instruction instead."""
        self._show(self.box)

    def ask_first(self, result: Callable[[], dict[str, str]]) -> None:
        """Show the form again, where a result comes later, which replaces it after the prediction.

        Args:
            result: returns the result by MIME types.
        """
        import ipywidgets

        self._result = result
        words = ipywidgets.HTML(html.escape(ASKED))
        skip = ipywidgets.Button(description=UNASKED, layout={"width": "auto"})
        skip.add_class("ddl-skip")
        skip.on_click(lambda _: self.close())
        self._show(ipywidgets.VBox([words, self.box, skip]))

    def _show(self, box: ipywidgets.Box) -> None:
        from IPython.display import display

        data = box._repr_mimebundle_() | {"text/plain": NOTHING_YET}
        form = display(data, raw=True, display_id=True)
        script = _SCRIPT.read_text(encoding="utf-8").replace("SHOWN", str(int(1000 * time.time())))
        keys = {"text/html": f"<script>\n{script}</script>", "text/plain": ""}
        self._shown.append((form, display(keys, raw=True, display_id=True)))

    def close(self) -> None:
        """Replace the form by a line with the prediction, because a notebook can store it."""
        said: dict[str, Any] = {"text/plain": noted(self._values, self._unit) or NOT_MADE}
        if not self._shown:
            return
        # A result replaces the form that was shown last.
        last = said if self._result is None else self._result()
        instead = [*[said] * (len(self._shown) - 1), last]
        for (form, script), data in zip(self._shown, instead, strict=True):
            form.update(data, raw=True)
            script.update(_EMPTY, raw=True)
        self._shown = []
        self._result = None
        self.box.close_all()
