"""Modules of the course that a rank gets from the kernel, because its sandbox doesn't hold them.

A sandbox holds no probe. The kernel gives the modules of a probe when it asks it. So an answer to
one task can't import what the probes of later tasks need, such as a rule that the task asks for.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import types
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .kernel_link import KernelLink


class KernelModules(importlib.abc.MetaPathFinder):
    """Finds the modules that the kernel gives.

    Args:
        kernel: the connection to the kernel.
    """

    def __init__(self, kernel: KernelLink):
        self._kernel = kernel

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        """Return how to load a module; ``None`` if the kernel doesn't give it."""
        if not name.startswith("utils."):
            return None
        given = self._kernel.ask("module", name)
        if given is None:
            return None
        file, text = given
        is_package = file.endswith("__init__.py")
        spec = importlib.util.spec_from_loader(
            name, GivenModule(text), origin=file, is_package=is_package
        )
        if spec is not None:
            spec.has_location = True
        return spec


class GivenModule(importlib.abc.Loader):
    """A module whose source the kernel has given."""

    def __init__(self, text: str):
        self._text = text

    def exec_module(self, module: types.ModuleType) -> None:
        """Run the module."""
        exec(compile(self._text, str(module.__file__), "exec"), vars(module))
