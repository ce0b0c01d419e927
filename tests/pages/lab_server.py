"""JupyterLab as `make lab` starts it, on a folder of notebooks, for a user without settings."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from browser_tools import wait_for, write_settings
from mpi_jobs import kill_tree
from places import ROOT
from processes import left_over

#: Seconds: for the server to answer, for the end of processes.
SERVER, GRACE = 120, 60


@dataclass
class Server:
    """A JupyterLab that `make lab` started."""

    url: str
    token: str
    log: Path

    def ask(self, path: str, method: str = "GET") -> Any:
        """Jupyter's REST interface."""
        request = urllib.request.Request(
            f"{self.url}{path}", method=method, headers={"Authorization": f"token {self.token}"}
        )
        with urllib.request.urlopen(request, timeout=10) as reply:
            return json.loads(reply.read() or "null")

    def page(self, path: str) -> str:
        """The address at which JupyterLab opens a notebook."""
        return f"{self.url}lab/tree/{path}?token={self.token}"


@contextlib.contextmanager
def lab_server(home: Path, folder: Path) -> Iterator[Server]:
    """Run `make lab` on a folder; afterwards no kernel and no rank is left.

    home: a folder for the server's log and for settings, instead of the user's.
    """
    # --ServerApp.root_dir is given already, and may be given only once.
    arguments = [
        "--no-browser",
        *(
            f"--{name}.root_dir={folder}"
            for name in ("FileContentsManager", "MappingKernelManager")
        ),
    ]
    log = home / "server.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            ["make", "lab", "PORT=0", f"ARGS={' '.join(arguments)}"],
            cwd=ROOT,
            env=_student_environment(home),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        info = wait_for(lambda: _address(home, process, log), SERVER, "a URL")
        running = Server(info["url"], info["token"], log)
        wait_for(lambda: _answers(running), SERVER, "JupyterLab answers")
        yield running
        running.ask("api/shutdown", "POST")
        process.wait(GRACE)
    finally:
        kill_tree(process)
    # The kernels' ranks, too.
    wait_for(lambda: not left_over(), GRACE, "kernels and ranks end with the server")


def _student_environment(home: Path) -> dict[str, str]:
    """A fresh user's environment: nobody's settings are read or changed."""
    ours = ("PYTEST_", "JUPYTER", "IPYTHON", "XDG_", "MAKE", "MFLAGS", "IPP_")
    env = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    settings = home / "settings"
    write_settings(settings)
    return env | {
        "HOME": str(home),
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(settings),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
    }


def _address(home: Path, process: subprocess.Popen, log: Path) -> dict[str, Any] | None:
    """The server's URL and token, from the file that it writes when it listens."""
    if process.poll() is not None:
        pytest.fail(
            f"`make lab` ended with status {process.returncode}:\n{log.read_text(encoding='utf-8')}"
        )
    for path in (home / "runtime").glob("jpserver-*.json"):
        with contextlib.suppress(ValueError):
            return json.loads(path.read_text())
    return None


def _answers(server: Server) -> bool:
    try:
        return "started" in server.ask("api/status")
    except OSError:
        return False
