"""An engine of ipyparallel whose nanny is a fork of it.

Each engine has a nanny, a process that passes signals on and tells the controller when the engine
dies. ipyparallel starts it as a new Python, which imports for most of a second of CPU what the
engine has imported already: with four ranks on two cores, a third of the time until they are up.

The fork is made first of all, before there are threads, sockets or MPI.
"""

from __future__ import annotations

import os
import pickle
import sys
from typing import BinaryIO, TextIO

from ipyparallel.engine.app import IPEngine
from ipyparallel.engine.nanny import KernelNanny


def fork_nanny() -> tuple[BinaryIO, TextIO]:
    """Fork the future nanny. Returns a pipe for its arguments, and one for its address."""
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
            KernelNanny.main(**pickle.load(arguments), pipe=address)
    except EOFError:
        pass  # the engine ended before it had a use for a nanny
    finally:
        os._exit(0)


class Engine(IPEngine):
    """:class:`IPEngine` with the nanny that was forked."""

    pipes: tuple[BinaryIO, TextIO]

    def start_nanny(self, control_url: str) -> tuple[str, TextIO]:
        """Tell the nanny whom it serves.

        Returns:
            Its address, and the pipe whose end tells it that the engine has died.
        """
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
    Engine.pipes = fork_nanny()
    Engine.launch_instance()


if __name__ == "__main__":
    sys.exit(main())
