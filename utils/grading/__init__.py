"""Grading: submissions → assembled notebooks → sandboxed runs of nbval → gradebook, feedback.

Arrows go one way: ``command`` → ``worklist`` → ``grader`` → ``notebook_run`` → ``sandbox``.
``submissions``, ``reference``, ``assembly`` and ``results`` are data for all of them.
``gradebook`` and ``pages`` write what people read. ``inspection`` adds to results what a person
should look at, which it finds in a process of its own. ``kernel`` and ``plugin``, whose records the
grader reads, run in processes of their own as well.
"""
