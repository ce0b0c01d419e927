"""Commands that the hub runs, for itself or as a student."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import Mapping
from pathlib import Path

#: Seconds for an answer.
PATIENCE = 20.0
#: As hpc/sudoers has it: a student's file may be a pipe, or have no end.
TAIL = ("timeout", "5", "tail", "-c", "20000")
#: Variables of the hub alone: among them are its secrets.
OF_THE_HUB = ("JUPYTERHUB_", "JPY_", "CONFIGPROXY_")


class NoAnswer(Exception):
    """A command failed; the text is what it said."""


async def output(
    command: tuple[str, ...], env: Mapping[str, str] | None = None, patience: float = PATIENCE
) -> str:
    """What the command writes. Raises NoAnswer, OSError, and TimeoutError after `patience` s."""
    process = await asyncio.create_subprocess_exec(
        *command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), patience)
    except BaseException:
        if process.returncode is None:
            # A sudo is root's; what it started has a limit of its own.
            with contextlib.suppress(ProcessLookupError, PermissionError, TimeoutError):
                process.kill()
                await asyncio.wait_for(process.wait(), 1)
        raise
    if process.returncode:
        said = err.decode(errors="replace").strip()
        raise NoAnswer(said or f"{command[0]} ended with status {process.returncode}")
    return out.decode(errors="replace")


def without_secrets(env: Mapping[str, str]) -> dict[str, str]:
    """The hub's environment for what runs as a student: sudo would hand JUPYTERHUB_* on."""
    return {name: value for name, value in env.items() if not name.startswith(OF_THE_HUB)}


async def end_of(path: Path, prefix: tuple[str, ...], env: Mapping[str, str]) -> str:
    """The last 20,000 bytes of a student's file, or why they can't be read.

    prefix: what runs a command as the student.
    """
    try:
        return await output((*prefix, *TAIL, str(path)), without_secrets(env))
    except TimeoutError:
        return f"{path} can't be read within {PATIENCE:g} s"
    except (OSError, NoAnswer) as error:
        return f"{path} can't be read: {error}"
