"""Grading: submissions → assembled notebooks → sandboxed runs of nbval → gradebook, feedback.

Imports go one way: ``command`` → ``worklist`` → ``grader`` → ``notebook_run`` → ``sandbox``.
All of them use the data of ``submissions``, ``reference``, ``assembly`` and ``results``.
``gradebook`` and ``pages`` write what people read. ``inspection`` runs in a separate process and
adds to a result what a person should look at. ``kernel`` and ``plugin`` run in separate processes,
too, and the grader reads the plugin's records.
"""

import utils.course  # noqa: F401  # first: nbformat is imported in a tenth of the time after it
