"""Links from a page to files that aren't pages: the site makes them lead to the repository.

Without a public repository such links would lead nowhere, so the site shows only their words.
"""

from __future__ import annotations

import posixpath

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

from .address import ROOT, in_repository, is_placeholder


class ToRepository(SphinxPostTransform):
    """A transform that resolves links to files of the repository, and leaves the others to MyST."""

    default_priority = 8  # before MyST's, which is 9 and warns of links that it can't resolve

    def run(self, **kwargs) -> None:
        """Replace the links of one page."""
        for node in list(self.document.findall(pending_xref)):
            if node["reftype"] != "myst" or not (path := self._path(node)):
                continue
            if is_placeholder():
                node.replace_self(node.children)
            else:
                url = in_repository(path, folder=(ROOT / path).is_dir())
                node.replace_self(nodes.reference("", "", *node.children, refuri=url))

    def _path(self, node: pending_xref) -> str:
        """Return a link's path in the repository; "" if it doesn't exist or is only an anchor."""
        target = node["reftarget"].partition("#")[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(self.env.docname), target))
        known = target and not path.startswith("..") and (ROOT / path).exists()
        return path if known else ""


def setup(app: Sphinx) -> None:
    """Register the transform."""
    app.add_post_transform(ToRepository)
