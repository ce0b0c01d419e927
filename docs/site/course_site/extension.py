"""The list of modules that extend Sphinx for the site."""

from __future__ import annotations

from sphinx.application import Sphinx

from . import accessible, api, cells, excerpts, glossary, launch, lexer, links, maths, sequences


def setup(app: Sphinx) -> dict:
    """Register each module with Sphinx."""
    looks = (accessible, cells, lexer, maths, sequences)
    for module in (*looks, api, excerpts, glossary, launch, links):
        module.setup(app)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
