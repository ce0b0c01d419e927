"""``python -m utils lab``: opens the labs in JupyterLab, on every system.

JupyterLab finds the course's settings in `utils/cluster/jupyterlab`, and looks at first as
`workspace.json` there says. What a user changes afterwards is kept.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from utils.jobs import POSIX, ROOT, RanksError

SETTINGS = ROOT / "utils" / "cluster" / "jupyterlab"
LABS = ROOT / "labs"
#: The file in which JupyterLab keeps the workspace that it opens by default.
WORKSPACE = "default-37a8.jupyterlab-workspace"
FIRST_LAB = "--LabApp.default_url=/lab/tree/00_start_here.ipynb"


def main(arguments: Sequence[str]) -> int:
    """Run JupyterLab until it ends; return its exit status.

    Args:
        arguments: words for JupyterLab, such as "--port=8899".

    Raises:
        RanksError: this installation has no labs.
    """
    if not LABS.is_dir():
        raise RanksError(f"There is no folder {LABS}. Run this command in a clone of the course.")
    environment = os.environ | _variables()
    command = [sys.executable, "-P", "-m", "jupyterlab", f"--ServerApp.root_dir={LABS}"]
    if POSIX and os.geteuid() == 0:
        print("You are root: starting JupyterLab with --allow-root.", flush=True)
        command.append("--allow-root")
    if _is_new(Path(environment["JUPYTERLAB_WORKSPACES_DIR"])) and not any(
        "default_url" in word
        for word in arguments  # JupyterLab accepts an option only once
    ):
        command.append(FIRST_LAB)
    command += arguments
    if POSIX:
        _warm_up(environment)
        os.execve(sys.executable, command, environment)
    with subprocess.Popen(command, env=environment) as server:
        while True:
            with contextlib.suppress(KeyboardInterrupt):  # JupyterLab gets Ctrl-C, too
                return server.wait()


def _variables() -> dict[str, str]:
    """Return what JupyterLab needs: its settings, its workspaces, and this Python's programs."""

    def before(folder: Path, variable: str) -> str:
        return os.pathsep.join(filter(None, [str(folder), os.environ.get(variable)]))

    workspaces = Path(sys.prefix, "workspaces")
    return {
        "JUPYTERLAB_WORKSPACES_DIR": os.environ.get("JUPYTERLAB_WORKSPACES_DIR", str(workspaces)),
        "JUPYTER_CONFIG_PATH": before(SETTINGS, "JUPYTER_CONFIG_PATH"),
        "PATH": before(Path(sys.executable).parent, "PATH"),
    }


def _is_new(folder: Path) -> bool:
    """Lay out a workspace if there is none; return whether JupyterLab has not changed it yet."""
    folder.mkdir(parents=True, exist_ok=True)
    workspace, layout = folder / WORKSPACE, SETTINGS / "workspace.json"
    if not workspace.exists():
        shutil.copy(layout, workspace)
    return workspace.read_bytes() == layout.read_bytes()


def _warm_up(environment: dict[str, str]) -> None:
    """Start the fork server, whose parent this process stays when it becomes JupyterLab."""
    command = [sys.executable, "-m", "utils.jobs.warm_up"]
    quiet = subprocess.DEVNULL
    subprocess.Popen(command, cwd=ROOT, env=environment, stdout=quiet, stderr=quiet)
