"""Grading: submissions → assembled notebooks → sandboxed runs of nbval → gradebook, feedback.

Imports go one way: ``command`` → ``worklist`` → ``grader`` → ``notebook_run`` → ``sandbox``.
All of them use the data of ``submissions``, ``reference``, ``assembly`` and ``results``.
``gradebook`` and ``pages`` write what people read. ``inspection`` adds to a result what a person
should look at. ``plugin`` runs in nbval's process, and the grader reads its records.
``confinement`` is the first program in a rank's sandbox.
"""

import utils.course  # noqa: F401  # first: nbformat is imported in a tenth of the time after it
