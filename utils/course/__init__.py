"""Instructors' tools: student notebooks from solutions, execution, lint.

They need the extra ``course`` (``pip install -e '.[course]'``) and no PyTorch.
"""

import sys

# nbformat loads jsonschema, which builds this grammar of web addresses for 1 to 2 s, where it is
# installed. Notebooks are checked without it as well.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]  # None: no such module


class CourseError(Exception):
    """A command can't do what it was asked for; the message says why and what to do."""
