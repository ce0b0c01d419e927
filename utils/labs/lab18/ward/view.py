"""The ward of one student: twelve patients, each with a complaint, a program and evidence."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
from IPython.display import display

from . import pages
from .assignment import BEDS, patients_of
from .case import Case
from .cases import CASES
from .evidence import evidence
from .kinds import KINDS


class Ward:
    """The patients of a student.

    Args:
        name: the student's name or number, by which the patients are drawn.

    Attributes:
        patients: the names of the patients' programs, by bed; the first bed is number 1.
    """

    def __init__(self, name: object):
        self.name = name
        self.patients = patients_of(name)

    def greet(self) -> None:
        """Print whose ward it is, and who is in it."""
        print(f"The ward of {self.name} has {BEDS} patients:")
        print(", ".join(f"{bed} {name}" for bed, name in enumerate(self.patients, start=1)))

    def case(self, bed: int) -> Case:
        """Return the case in a bed.

        Raises:
            ValueError: there is no such bed.
        """
        if bed not in range(1, BEDS + 1):
            raise ValueError(f"There is no bed {bed}. Use a number from 1 to {BEDS}.")
        return CASES[self.patients[bed - 1]]

    def show(self, bed: int) -> None:
        """Show a patient: what a colleague has seen, the evidence, and the folded program."""
        case = self.case(bed)
        found = evidence(case.name)
        _show(pages.ticket(bed, case), f"Patient {bed} · {case.name}.py\n{case.complaint}")
        for instrument in case.instruments:
            title, draw = pages.INSTRUMENTS[instrument]
            shown = draw(found[instrument], title)
            if isinstance(shown, str):
                _show(shown, title)
            else:
                display(shown)
                plt.close("all")  # or the cell shows its figures once more at its end
        _show(pages.listing(case.text), pages.numbered(case.text))
        _show(pages.hints(case), "Three hints are folded away here.")


def classes() -> None:
    """Show the classes of which a finding names one."""
    rows = [[f'"{name}"', meaning] for name, meaning in KINDS.items()]
    words = "\n".join(f"{name}: {meaning}" for name, meaning in rows)
    _show(pages.table(["kind", "what it means"], rows), words)


def _show(html: str, plain: str) -> None:
    bundle: dict[str, Any] = {"text/html": html, "text/plain": plain}
    display(bundle, raw=True)
