"""Python imports this file at its start if its folder is on PYTHONPATH; see ``__init__.py``."""

import importlib.util
import sys
from pathlib import Path

if "without_mpi" not in sys.modules:
    _spec = importlib.util.spec_from_file_location(
        "without_mpi", Path(__file__).with_name("__init__.py")
    )
    _module = importlib.util.module_from_spec(_spec)
    sys.modules["without_mpi"] = _module
    _spec.loader.exec_module(_module)
    _module.apply()
