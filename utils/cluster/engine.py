"""An engine of ipyparallel whose nanny is a fork of it, and ends it when the controller is gone.

Each engine has a nanny, a process that passes signals on and tells the controller when the engine
dies. ipyparallel starts it as a new Python, which imports for most of a second of CPU what the
engine has imported already: with four ranks on two cores, a third of the time until they are up.

The fork is made first of all, before there are threads, sockets or MPI.

An engine notices by itself that the controller is gone, but not while it runs a cell. On other
hosts than the notebook's nothing else could end it then: the nanny does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import socket
import threading
import time
import urllib.parse
from typing import Any, BinaryIO, TextIO

import psutil
from ipyparallel.engine.app import IPEngine
from ipyparallel.engine.nanny import KernelNanny
from traitlets import default

from utils.jobs import watchdog

# Seconds without a controller after which an engine is of no use to anyone.
MOST_SILENCE = 30.0
# Seconds that the controller takes at most to write its connection file.
WRITING = 20.0


def fork_nanny() -> tuple[BinaryIO, TextIO]:
    """Fork the future nanny; return a pipe for its arguments, and one for its address."""
    arguments_out, arguments_in = os.pipe()
    address_out, address_in = os.pipe()
    if os.fork() == 0:
        os.close(arguments_in)
        os.close(address_out)
        _be_nanny(os.fdopen(arguments_out, "rb"), os.fdopen(address_in, "w", buffering=1))
    os.close(arguments_out)
    os.close(address_in)
    return os.fdopen(arguments_in, "wb"), os.fdopen(address_out)


def _be_nanny(arguments: BinaryIO, address: TextIO) -> None:
    """Wait for the arguments, serve, and end without any clean-up of the engine's."""
    try:
        os.setsid()  # a Ctrl-C is for the engine
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1):
            os.dup2(nothing, stream)
        with arguments:
            known = pickle.load(arguments)
        guard = threading.Thread(target=_end_without_controller, args=(known,), daemon=True)
        guard.start()
        KernelNanny.main(**known, pipe=address)
    except EOFError:
        pass  # the engine ended before it had a use for a nanny
    finally:
        os._exit(0)


def _end_without_controller(known: dict[str, Any]) -> None:
    """Kill the engine when its controller has not been there for a while."""
    engine = psutil.Process(known["pid"])
    last = time.monotonic()
    while time.monotonic() - last < MOST_SILENCE:
        if _answers(known["registration_url"]):
            last = time.monotonic()
        time.sleep(MOST_SILENCE / 5)
    with contextlib.suppress(psutil.Error):
        engine.kill()
    # The srun that asked for a job of the ranks' own is gone as well: nothing else would end it.
    if os.environ.get("SLURM_JOB_NAME") == os.environ.get(watchdog.VARIABLE, ""):
        watchdog.cancel(os.environ["SLURM_JOB_ID"])


def _answers(url: str) -> bool:
    """Return whether anything listens at tcp://host:port."""
    place = urllib.parse.urlsplit(url)
    with contextlib.suppress(OSError), socket.create_connection((place.hostname, place.port), 5):
        return True
    return False


class Engine(IPEngine):
    """An :class:`IPEngine` with the nanny that was forked."""

    pipes: tuple[BinaryIO, TextIO]

    @default("work_dir")
    def _where_it_was_started(self) -> str:
        # Not where ipyparallel was imported: in a forked rank, that is the fork server's folder.
        return os.getcwd()

    @default("max_heartbeat_misses")
    def _for_five_minutes(self) -> int:
        # On a crowded machine the controller may be silent for long; a watchdog sees its end.
        return 500

    def load_connection_file(self) -> None:
        """Read where the controller is. Its file may be there, and not be written yet."""
        deadline = time.monotonic() + WRITING
        while True:
            try:
                super().load_connection_file()
                return
            except ValueError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def start_nanny(self, control_url: str) -> tuple[str, TextIO]:
        """Tell the nanny whom it serves; return its address, and the pipe that it watches."""
        arguments, address = self.pipes
        config = type(self.config)()
        config.Session = self.config.Session
        known = {
            "pid": os.getpid(),
            "engine_id": self.id,
            "identity": self.bident,
            "control_url": control_url,
            "curve_serverkey": self.curve_serverkey,
            "curve_secretkey": self.curve_secretkey,
            "curve_publickey": self.curve_publickey,
            "registration_url": self.registration_url,
            "config": config,
        }
        with arguments:
            pickle.dump(known, arguments)
        url = address.readline().strip()
        if not url:
            raise RuntimeError("the engine's nanny failed to start")
        return url, address


def main() -> None:
    """Fork the nanny, then be an engine."""
    # When srun is gone, nobody reads the log any more: that is no news for the student.
    logging.raiseExceptions = False
    Engine.pipes = fork_nanny()
    Engine.launch_instance()
