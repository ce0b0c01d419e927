"""Old names of modules that have moved: each works for one more version, and warns.

A notebook that was copied before the move says ``from utils.checks import lab06``. Python looks
for the old name everywhere else first, so a module of that name would win.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

#: What notebooks and settings imported, by the name that it had.
MOVED = {
    **{f"utils.checks.lab{number:02}": f"utils.labs.lab{number:02}" for number in range(14)},
    "utils.capstone": "utils.labs.lab14.capstone",
    "utils.deadline": "utils.checks.clock",
    "utils.faults": "utils.labs.lab13.faults",
    "utils.figures.allreduce": "utils.labs.lab06.pictures",
    "utils.figures.capstone": "utils.labs.lab14.pictures",
    "utils.figures.chunks": "utils.labs.lab06.chunk_pictures",
    "utils.figures.elastic": "utils.labs.lab08.pictures",
    "utils.figures.faults": "utils.labs.lab13.pictures",
    "utils.figures.federated": "utils.labs.lab12.pictures",
    "utils.figures.hybrid": "utils.labs.lab11.pictures",
    "utils.figures.minibatches": "utils.labs.shared.minibatch_pictures",
    "utils.figures.partitions": "utils.labs.lab09.pictures",
    "utils.figures.replicas": "utils.labs.lab04.pictures",
    "utils.figures.schedules": "utils.labs.lab10.pictures",
    "utils.figures.speedup": "utils.labs.lab05.pictures",
    "utils.figures.staleness": "utils.labs.lab07.pictures",
    "utils.five_metrics": "utils.labs.shared.five_metrics",
    "utils.memory": "utils.labs.shared.memory",
    "utils.limited": "utils.labs.lab11.memory_limit",
    "utils.mixes": "utils.labs.lab11.mix_search",
    "utils.no_ranks": "utils.cluster.no_ranks",
    "utils.offload": "utils.labs.lab11.layers",
    "utils.pipeline": "utils.labs.lab11.pipeline",
    "utils.scaling.batch": "utils.labs.shared.slurm_script",
    "utils.scaling.forecast": "utils.labs.lab05.forecast",
    "utils.scaling.laws": "utils.labs.lab05.laws",
    "utils.scaling.runs": "utils.labs.lab05.runs",
    "utils.schedules": "utils.labs.shared.schedules",
    "utils.timeline.chunks": "utils.labs.lab06.chunk_trace",
}


#: Packages of which nothing is left but old names; each is empty, and its modules are in `MOVED`.
PACKAGES = ("utils.scaling",)


class MovedModules(MetaPathFinder, Loader):
    """Finds a module that has moved, once no other finder knows its old name."""

    def find_spec(self, fullname: str, path: object = None, target: object = None):
        """Return a spec for an old name, ``None`` for any other."""
        if fullname in MOVED or fullname in PACKAGES:
            return ModuleSpec(fullname, self, is_package=fullname in PACKAGES)
        return None

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python make an empty module, which `exec_module` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        """Put the module of the new name into the place of the old one, and warn."""
        if module.__name__ in PACKAGES:
            return
        old = module.__name__
        new = MOVED[old]
        warnings.warn(
            f"{old} has moved: import {new} instead. The old name goes in the next version.",
            FutureWarning,
            stacklevel=2,
        )
        sys.modules[old] = importlib.import_module(new)


def install() -> None:
    """Have this process find old names, after all others; a second call changes nothing."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(MovedModules())
