"""Import torchvision even if its compiled operators do not fit PyTorch."""

from __future__ import annotations

import functools
import sys
from types import ModuleType

import torch


def import_torchvision() -> ModuleType:
    """Import torchvision even if its compiled operators don't load; return the module.

    A torchvision built for CUDA can't load its operators with a CPU-only PyTorch, so its import
    ends in "operator torchvision::nms does not exist". Data sets and transforms don't need these
    operators, only their declarations. `torchvision.ops.nms` itself still raises an error. For an
    intact torchvision, this is a plain import.

    Raises:
        ImportError, RuntimeError: torchvision is missing, or broken in another way.
    """
    try:
        import torchvision
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        _declare_missing_operators()
        # Modules that the failed import has left behind would not be attributes of the package.
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        import torchvision
    return torchvision


def _declare_missing_operators() -> None:
    """Declare the two operators that torchvision's import looks for, without a kernel."""
    fragment = _torchvision_library()
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            fragment.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


@functools.cache
def _torchvision_library() -> torch.library.Library:
    """Return the handle that keeps the declarations alive as long as this module."""
    return torch.library.Library("torchvision", "FRAGMENT")
