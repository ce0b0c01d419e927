"""Commands that the hub runs for itself or as a student."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import Mapping
from pathlib import Path

#: Seconds that a command may take.
PATIENCE = 20.0
#: The command in hpc/sudoers. It has limits, because a student's file may be a pipe or endless.
TAIL = ("timeout", "5", "tail", "-c", "20000")
#: Beginnings of variables that only the hub may have, because some of them are secrets.
OF_THE_HUB = ("JUPYTERHUB_", "JPY_", "CONFIGPROXY_")


class NoAnswer(Exception):
    """A command that failed. The text is the command's error message."""


async def output(
    command: tuple[str, ...], env: Mapping[str, str] | None = None, patience: float = PATIENCE
) -> str:
    """Return a command's output.

    Raises:
        NoAnswer: the command failed.
        OSError: the command can't be started.
        TimeoutError: the command took more than `patience` seconds.
    """
    process = await asyncio.create_subprocess_exec(
        *command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), patience)
    except BaseException:
        if process.returncode is None:
            # The hub can't kill sudo, which runs as root, but sudo's command has its own limit.
            with contextlib.suppress(ProcessLookupError, PermissionError, TimeoutError):
                process.kill()
                await asyncio.wait_for(process.wait(), 1)
        raise
    if process.returncode:
        said = err.decode(errors="replace").strip()
        raise NoAnswer(said or f"{command[0]} ended with status {process.returncode}")
    return out.decode(errors="replace")


def without_secrets(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment that sudo may pass to a student's command: without JUPYTERHUB_*."""
    return {name: value for name, value in env.items() if not name.startswith(OF_THE_HUB)}


async def end_of(path: Path, prefix: tuple[str, ...], env: Mapping[str, str]) -> str:
    """Return the last 20,000 bytes of a student's file, or the reason why they can't be read.

    prefix: the words before a command that run it as the student.
    """
    try:
        return await output((*prefix, *TAIL, str(path)), without_secrets(env))
    except TimeoutError:
        return f"{path} can't be read within {PATIENCE:g} s"
    except (OSError, NoAnswer) as error:
        return f"{path} can't be read: {error}"
