"""Grading: submissions → assembled notebooks → sandboxed runs of nbval → gradebook, feedback.

Arrows go one way: ``command`` → ``pool`` → ``grader`` → ``notebook_run`` → ``sandbox``.
``submissions``, ``assembly`` and ``results`` are data for all of them. ``worklist`` makes jobs of
submissions, and ``roster`` knows who was to be graded. ``publication`` writes what people read:
``gradebook``, ``written_answers``, and pages (``feedback``, ``summary``, ``result_pages``), for
which ``answer_states``, ``problems`` and ``similarity`` read results. ``suspicion`` adds to
results what a person should look at, which ``inspection`` finds in a process of its own. ``lock``
keeps a second grader away, and ``interrupts`` a second Ctrl-C; ``watch`` repeats all of it as a
folder fills up. ``launch``, ``kernel`` (with ``import_guard``) and ``plugin``, whose ``records``
the grader reads, run in processes of their own as well.
"""
