"""Grading: submissions → assembled notebooks → sandboxed runs of nbval → gradebook, feedback.

Arrows go one way: ``command`` → ``worklist`` → ``grader`` → ``notebook_run`` → ``sandbox``.
``submissions``, ``assembly`` and ``results`` are data for all of them. ``publication`` writes what
people read: ``gradebook`` and ``pages``, for which ``answer_states`` and ``similarity`` read
results. ``inspection`` adds to results what a person should look at, which it finds in a process of
its own. ``kernel`` and ``plugin``, whose records the grader reads, run in processes of their own as
well.
"""
