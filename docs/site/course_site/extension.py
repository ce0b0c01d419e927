"""The list of modules that extend Sphinx for the site."""

from __future__ import annotations

from sphinx.application import Sphinx

from . import accessible, api, glossary, launch, lexer, links, maths, sequences


def setup(app: Sphinx) -> dict:
    """Register each module with Sphinx."""
    for module in (accessible, api, glossary, launch, lexer, links, maths, sequences):
        module.setup(app)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
