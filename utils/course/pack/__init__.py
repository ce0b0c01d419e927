"""What instructors get: pictures of all labs for slides, and a page for each lab.

One run of every solution (:mod:`.runs`) gives the pictures (:mod:`.pictures`) and the seconds of
each section (:mod:`.sections`). What an instructor wrote stands in cells of the solutions
(:mod:`utils.course.notes`), what students get wrong in ``tests/labs/answers`` (:mod:`.mistakes`).
:mod:`.pages` puts it together.
"""
