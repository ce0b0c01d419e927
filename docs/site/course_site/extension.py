"""What the site adds to Sphinx; each module says what it does."""

from __future__ import annotations

from sphinx.application import Sphinx

from . import accessible, api, glossary, launch, lexer, links, maths, sequences


def setup(app: Sphinx) -> dict:
    """Register all of it."""
    for module in (accessible, api, glossary, launch, lexer, links, maths, sequences):
        module.setup(app)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
