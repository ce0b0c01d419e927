"""Refuses to be built on Windows, before anything is downloaded: pip and uv show these words."""

from __future__ import annotations

import sys

from hatchling.metadata.plugin.interface import MetadataHookInterface


class RefuseWindows(MetadataHookInterface):
    """Changes nothing in what pyproject.toml says."""

    def update(self, metadata: dict) -> None:
        """Raises RuntimeError on Windows, which has no Open MPI."""
        if sys.platform == "win32":
            raise RuntimeError(
                "the labs need Linux or macOS: there is no Open MPI for Windows. In Windows use "
                "WSL, see docs/install-wsl.md"
            )
