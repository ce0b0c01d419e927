"""The code of probes, which are processes with a deadline: imports, the MPI library, two ranks."""

from __future__ import annotations

import collections
import contextlib
import importlib
import importlib.metadata
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from utils.doctor.finding import one_line

# Control characters mark the facts, because ranks and MPI libraries print into the same stream.
MARK = "\x02doctor "


def tell(**facts: Any) -> None:
    """Pass facts to the doctor, in one write, so that ranks don't mix their lines."""
    sys.stdout.write(f"{MARK}{json.dumps(facts)}\x03\n")
    sys.stdout.flush()


def tell_about(*parts: str) -> None:
    """Report the facts of each part, or its error; a failed part doesn't stop the other parts."""
    for part in parts:
        try:
            facts = PARTS[part]()
        except Exception as failure:
            facts = {"error": one_line(failure)}
        tell(**{part: facts})


def tell_of_url(url: str) -> None:
    """Report whether the server has this file, without downloading it."""
    import urllib.request

    request = urllib.request.Request(url, method="HEAD")
    with urllib.request.urlopen(request):  # the probe has the deadline
        tell(server={})


def tell_on_rank() -> None:
    """Report about MPI's world, then about a process group of PyTorch; runs on two ranks."""
    from mpi4py import MPI

    levels = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
    names = {getattr(MPI, f"THREAD_{level}"): f"MPI_THREAD_{level}" for level in levels}
    tell(world={"size": MPI.COMM_WORLD.size, "thread_level": names[MPI.Query_thread()]})
    if MPI.COMM_WORLD.size > 1:
        tell_about("all_reduce")


def _torch_facts() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    facts = {"version": torch.__version__, "distributed": dist.is_available(), "backend": None}
    if dist.is_available():
        # The probe of the backend finds out whether MPI works in a process.
        if dist.is_mpi_available.__module__.startswith("torch_mpi."):
            facts["backend"] = "course"
        elif dist.is_mpi_available():
            facts["backend"] = "built in"
    return facts


def _torchvision_facts() -> dict[str, Any]:
    from utils.data import torchvision_repair

    torchvision = torchvision_repair.import_torchvision()
    declared = torchvision_repair._torchvision_library.cache_info().currsize
    return {"version": torchvision.__version__, "operators": not declared}


def _data_facts() -> dict[str, Any]:
    import utils.data
    from utils.data.torchvision_repair import import_torchvision

    folder = os.environ.get(utils.data.ROOT_VARIABLE)
    root = Path(folder).expanduser() if folder else utils.data.cache_folder()
    source = import_torchvision().datasets.FashionMNIST
    return {
        "given": bool(folder),
        "root": str(root),
        "damaged": utils.data._damaged(root),
        "url": source.mirrors[0] + source.resources[-1][0],
    }


def _jupyterlab_facts() -> dict[str, Any]:
    # jsonschema, which JupyterLab loads, would need 2 s to build this grammar of web addresses.
    sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]  # None hides it
    import jupyterlab
    from jupyter_client.kernelspec import KernelSpecManager

    kernel = KernelSpecManager().get_kernel_spec("python3").argv[0]
    return {"version": jupyterlab.__version__, "kernel": kernel}


def _ipyparallel_facts() -> dict[str, Any]:
    import ipyparallel
    from jupyter_core.paths import jupyter_config_path, jupyter_path
    from jupyter_server.extension.config import ExtensionConfigManager
    from jupyterlab_server.config import get_federated_extensions, get_page_config

    configured = ExtensionConfigManager(read_config_path=jupyter_config_path())
    server = configured.get_jpserver_extensions().get("ipyparallel", False)
    name = "ipyparallel-labextension"
    folders = jupyter_path("labextensions")
    off = get_page_config(folders).get("disabledExtensions", [])
    lab = name in get_federated_extensions(folders) and name not in off
    return {"version": ipyparallel.__version__, "server": bool(server), "lab": lab}


def _nbval_facts() -> dict[str, Any]:
    importlib.import_module("nbval.plugin")
    return {"version": importlib.metadata.version("nbval")}


def _library_facts() -> dict[str, Any]:
    import mpi4py

    mpi4py.rc.initialize = False  # login nodes of some sites forbid MPI_Init
    from mpi4py import MPI

    name, version = MPI.get_vendor()
    paths = []
    with contextlib.suppress(OSError):  # not every system has this file
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
        paths = re.findall(r"\S*/libmpi(?:ch)?(?:_\w+)?\.so[\d.]*$", maps, re.MULTILINE)
    path = paths[0] if paths else None
    return {"name": f"{name} {'.'.join(map(str, version))}", "path": path}


def _all_reduce_facts() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("mpi")
    number = torch.tensor(dist.get_rank() + 1.0)
    dist.all_reduce(number)
    dist.destroy_process_group()
    return {"value": number.item()}


#: The parts of each probe, which need the same imports, and the function that finds their facts.
PROBES = (
    {"torch": _torch_facts, "torchvision": _torchvision_facts, "data": _data_facts},
    {"jupyterlab": _jupyterlab_facts, "ipyparallel": _ipyparallel_facts, "nbval": _nbval_facts},
    {"library": _library_facts},
    {"all_reduce": _all_reduce_facts},
)
PARTS = collections.ChainMap(*PROBES)
