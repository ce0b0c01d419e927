"""An engine of ipyparallel whose nanny is forked, and ends the engine if the controller is gone.

Each engine has a nanny, a process that forwards signals and notifies the controller when the
engine dies. ipyparallel starts the nanny as a new Python, which spends most of a second of CPU on
imports that the engine has already done. With four ranks on two cores, this is a third of their
start-up time, so the nanny is forked instead, before there are threads, sockets or MPI.

An engine notices by itself that the controller is gone, but not while it runs a cell. On hosts
other than the notebook's, nothing else could end the engine then, so its nanny does.
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
from ipykernel.iostream import OutStream
from ipyparallel.engine.app import IPEngine
from ipyparallel.engine.nanny import KernelNanny
from traitlets import Type, default

from utils.cluster import rank_side
from utils.jobs import watchdog

# Seconds without a controller after which the nanny kills its engine.
MOST_SILENCE = 30.0
# Seconds in which the controller must have written its connection file.
WRITING = 20.0


def fork_nanny() -> tuple[BinaryIO, TextIO]:
    """Fork the future nanny; return a pipe for its arguments, and a pipe for its address."""
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
    """Wait for the arguments, serve, and end without running the engine's clean-up."""
    try:
        os.setsid()  # so that Ctrl-C reaches only the engine
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1):
            os.dup2(nothing, stream)
        with arguments:
            known = pickle.load(arguments)
        guard = threading.Thread(target=_end_without_controller, args=(known,), daemon=True)
        guard.start()
        KernelNanny.main(**known, pipe=address)
    except EOFError:
        pass  # the engine ended before it needed a nanny
    finally:
        os._exit(0)


def _end_without_controller(known: dict[str, Any]) -> None:
    """Kill the engine once its controller has not answered for MOST_SILENCE seconds."""
    engine = psutil.Process(known["pid"])
    last = time.monotonic()
    while time.monotonic() - last < MOST_SILENCE:
        if _answers(known["registration_url"]):
            last = time.monotonic()
        time.sleep(MOST_SILENCE / 5)
    with contextlib.suppress(psutil.Error):
        engine.kill()
    # The srun of a separate Slurm job is gone as well, so nothing else would end this job.
    if os.environ.get("SLURM_JOB_NAME") == os.environ.get(watchdog.VARIABLE, ""):
        watchdog.cancel(os.environ["SLURM_JOB_ID"])


def _answers(url: str) -> bool:
    """Return whether anything listens at tcp://host:port."""
    place = urllib.parse.urlsplit(url)
    with contextlib.suppress(OSError), socket.create_connection((place.hostname, place.port), 5):
        return True
    return False


class RankStream(OutStream):
    """A rank's standard output or error, which loses nothing that threads print between cells."""

    def write(self, string: str) -> int:
        """Write a text, or keep it for the next cell if no cell would show it."""
        if rank_side.is_between_cells():
            rank_side.keep_for_next_cell(string)
            return len(string)
        return super().write(string) or 0


class Engine(IPEngine):
    """An :class:`IPEngine` with the nanny that was forked."""

    out_stream_factory = Type(RankStream)
    pipes: tuple[BinaryIO, TextIO]

    @default("work_dir")
    def _where_it_was_started(self) -> str:
        # In a forked rank, ipyparallel was imported in the fork server's folder.
        return os.getcwd()

    @default("max_heartbeat_misses")
    def _for_five_minutes(self) -> int:
        # On a busy machine the controller may be silent for long; the watchdog notices its end.
        return 500

    def load_connection_file(self) -> None:
        """Read the controller's address; try again while its file exists but is incomplete."""
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
        """Send the nanny its arguments; return its address, and the pipe that it watches."""
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
    """Fork the nanny, then run the engine."""
    # When srun is gone, nobody reads the log, so a failed write to it is not worth an error.
    logging.raiseExceptions = False
    Engine.pipes = fork_nanny()
    Engine.launch_instance()
