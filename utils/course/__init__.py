"""Instructors' tools: student notebooks from solutions, execution, lint.

They need the extra ``course`` (``pip install -e '.[course]'``), but not PyTorch.
"""

import sys

# nbformat loads jsonschema, which would need 1 to 2 s to build this grammar of web addresses.
# Notebooks can be checked without the grammar.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]  # None hides the module


class CourseError(Exception):
    """A command can't do what the user wants; the message says why and what to do."""
