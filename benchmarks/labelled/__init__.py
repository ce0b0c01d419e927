"""Right and wrong programs, labelled: how well does a backend tell what is wrong?

`PAIRS` has them in pairs, and `judge` compares a report with the label. Nothing here imports the
course. ``python -m benchmarks.diagnosis_score`` runs the programs on ranks and counts.

The classes follow those of the MPI Bugs Initiative, as far as they apply to ``torch.distributed``:
M. Laurent, E. Saillard, M. Quinson, "The MPI Bugs Initiative: a Framework for MPI Verification
Tools Evaluation" (Correctness 2021). Four more classes are about programs whose calls match.
"""

from .pairs import CALLS
from .trainings import TRAININGS

PAIRS = CALLS + TRAININGS

__all__ = ["PAIRS"]
