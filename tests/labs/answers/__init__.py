"""What students answer: a module for each lab, read by ``test_answers.py``.

``NOTEBOOK`` is its file, ``CELLS`` says in which cell each task is answered, ``BEFORE`` is run on
every rank before the solutions. ``RANKS`` is how many there are; 4 where it is missing.
``ON_RANKS`` names wrong answers that ``test_answers_on_ranks.py`` tries on real ranks, besides the
first of each task. ``ONLY_ON_RANKS`` names those that can be tried nowhere else.

``WRONG``: (task, what the student did, the code, words of what the check says).
``CHANGES``: (task, what the student did, text of the solution, text in its place, words).
``RIGHT``: (task, what is different, the code).
``CHANGES_THAT_ARE_RIGHT``: (task, what is different, text of the solution, text in its place).

``AFTER``: by task, what is run after its answer. ``SLOW``: tasks whose check takes a second; there
the solution is not tried again after each wrong answer. ``REAL``: tasks of which a right answer
needs real ranks. ``HINTED_BY_THE_ROOM``: tasks whose hints are not in the notebook, because each
student has others.
"""
