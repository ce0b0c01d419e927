"""Lectures: a deck of slides for each lab, as one HTML file and as PowerPoint.

* :mod:`.deck` has the slides and their blocks, which know no format.
* :mod:`.reading` makes a deck of a text in ``docs/lectures`` and a lab's solution.
* :mod:`.page` writes a deck as HTML, and :mod:`.presentation` as PowerPoint.

The room isn't in the students' zip.
"""
