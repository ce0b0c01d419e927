"""Grading: submissions → assembled notebooks → sandboxed runs of nbval → gradebook, feedback.

Arrows go one way: ``grade_all`` → ``grade_one`` → ``run`` → ``sandbox``; ``submissions``,
``assemble`` and ``results`` are data for all of them; ``book``, ``explain``, ``similar`` and
``pages`` read results. ``launch``, ``kernel`` and ``plugin`` run in processes of their own.
"""
