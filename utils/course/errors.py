"""The error of everything that can be said to a person in a message, without a traceback."""

from __future__ import annotations


class CourseError(Exception):
    """A command can't do what it was asked for; the message says why and what to do."""
