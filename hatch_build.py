"""Refuses to be built on Windows, in words that pip and uv show."""

from __future__ import annotations

import sys

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class RefuseWindows(BuildHookInterface):
    """Changes nothing in what is built."""

    def initialize(self, version: str, build_data: dict) -> None:
        """Raises RuntimeError on Windows, which has no Open MPI."""
        if sys.platform == "win32":
            raise RuntimeError(
                "the labs need Linux or macOS: there is no Open MPI for Windows. In Windows use "
                "WSL, see docs/install-wsl.md"
            )
