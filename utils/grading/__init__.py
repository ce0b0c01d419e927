"""Grading: submissions → assembled notebooks → sandboxed runs of nbval → gradebook, feedback.

Arrows go one way: ``grade_all`` → ``grade_one`` → ``run`` → ``sandbox``; ``submissions``,
``assemble`` and ``results`` are data for all of them; ``plan`` makes jobs of submissions; ``book``,
``explain``, ``similar`` and ``pages`` read results; ``suspicion`` adds to them what a person should
look at, which ``inspection`` finds in a process of its own; ``hold`` keeps a second grader and a
second Ctrl-C away; ``watch`` repeats all of it as a folder fills up. ``launch``, ``kernel`` (with
``imports``) and ``plugin`` run in processes of their own as well.
"""
