"""What the check cells call: one module per lab.

`from utils.checks import lab03` gives a module that is loaded when it is first used, with PyTorch:
a notebook's first cell need not wait for that.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    """A lab's module, not yet loaded; as in the documentation of `importlib.util.LazyLoader`."""
    full = f"{__name__}.{name}"
    spec = importlib.util.find_spec(full) if name.startswith("lab") else None
    if spec is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = sys.modules[full] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    globals()[name] = module
    return module
