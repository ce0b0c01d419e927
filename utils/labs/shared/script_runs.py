"""Runs of a job's script in an empty folder, without Slurm: what would it launch?"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

LAUNCHERS = ("mpiexec", "mpirun", "srun")
# A launcher that starts nothing and records its arguments. No other command does anything.
# Bash gives a command that ends in & an empty stdin. `wait` records itself when all have ended.
_NOTES = """#!/bin/bash
[[ /dev/stdin -ef /dev/null ]] && behind='&'
printf '%s\\0' "${0##*/}$behind" "$OMP_NUM_THREADS" "$@" END >>"$NOTES"
"""
_REHEARSAL = """\
command_not_found_handle() { :; }; cd() { :; }; source() { :; }; .() { :; }
wait() { builtin wait "$@"; printf '%s\\0' wait END >>"$NOTES"; }
"""
_BASH = {"capture_output": True, "text": True, "timeout": 20, "check": False}


def unreadable(text: str) -> str:
    """Return why bash can't read a script; "" if it can."""
    return subprocess.run(["bash", "-n"], input=text, **_BASH).stderr.partition("\n")[0]


def launches(text: str, nodes: int, domains: int, cores: int) -> list[list[str]]:
    """Return the calls that a script would launch: launcher, OMP_NUM_THREADS, and arguments.

    Bash runs the script with Slurm's variables, in an empty folder and without any command.
    """
    calls = _rehearsed(text, nodes, domains, cores)
    return [[call[0].rstrip("&"), *call[1:]] for call in calls if call != ["wait"]]


def left(text: str, nodes: int, domains: int, cores: int) -> bool:
    """Return whether a script ends without waiting for what it has launched."""
    if re.search(r"<\s*/dev/null", text):
        return False  # the script itself sets an empty stdin
    calls = _rehearsed(text, nodes, domains, cores)
    waits = [k for k, call in enumerate(calls) if call == ["wait"]]
    return any(call[0].endswith("&") for call in calls[(waits or [-1])[-1] + 1 :])


def _rehearsed(text: str, nodes: int, domains: int, cores: int) -> list[list[str]]:
    """Return the calls of launchers and of `wait`, in order."""
    ranks = nodes * domains
    slurm = {"NTASKS": ranks, "NPROCS": ranks, "NTASKS_PER_NODE": domains, "NNODES": nodes}
    slurm |= {"CPUS_PER_TASK": cores, "JOB_NUM_NODES": nodes, "JOB_ID": 1}
    bare = re.sub(rf"[\w./~-]*/({'|'.join(LAUNCHERS)})\b", r"\1", text)
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder, "notes")
        start = Path(folder, "start")
        notes.touch()
        start.write_text(_REHEARSAL, encoding="utf-8")
        for name in LAUNCHERS:
            Path(folder, name).write_text(_NOTES, encoding="utf-8")
            Path(folder, name).chmod(0o755)
        Path(folder, "env").symlink_to("/usr/bin/env")
        variables = {"PATH": folder, "BASH_ENV": str(start), "NOTES": str(notes), "HOME": folder}
        variables |= {f"SLURM_{name}": str(value) for name, value in slurm.items()}
        variables["SLURM_SUBMIT_DIR"] = folder
        bash = [shutil.which("bash"), "-c", bare]
        subprocess.run(bash, env=variables, cwd=folder, input="", **_BASH)
        calls = notes.read_text(encoding="utf-8").split("END\0")[:-1]
    return [call.split("\0")[:-1] for call in calls]
