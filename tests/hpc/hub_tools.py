"""JupyterHub on the cluster of slurm_tools: hub, proxy, and a student's view by REST."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import platformdirs
import websocket
from filelock import FileLock
from slurm_tools import COURSE, LOGIN, PREFIX, ROOT, STATE, Cluster, wait_until

URL = f"http://{LOGIN}:8000"
TOKEN, PASSWORD = secrets.token_hex(16), secrets.token_hex(8)
#: Seconds: for a service to answer, for a server to be there, for an npm package.
SERVICE, SPAWN, NPM = 120, 180, 300


def proxy_program() -> Path:
    """The configurable-http-proxy of hpc/package.json, installed into the user's cache once.

    Beside it, `npm`, lies what npm needs to install it again without a network. Raises RuntimeError
    where npm is missing or fails.
    """
    if shutil.which("npm") is None:
        raise RuntimeError("no npm: apt-get install nodejs npm")
    wanted = json.loads((ROOT / "hpc/package.json").read_text())["dependencies"]
    ((name, version),) = wanted.items()
    folder = platformdirs.user_cache_path("ddl-labs") / f"{name}-{version}-v2"
    folder.parent.mkdir(parents=True, exist_ok=True)
    program = folder / "node_modules/.bin" / name
    with FileLock(folder.with_suffix(".lock")):
        if not program.exists():
            done = subprocess.run(
                ["bash", "-ec", readme_lines().replace("/opt/hub-proxy", shlex.quote(str(folder)))],
                cwd=ROOT,
                env=os.environ | {"npm_config_cache": str(folder / "npm")},
                capture_output=True,
                text=True,
                timeout=NPM,
            )
            if done.returncode:
                raise RuntimeError(f"npm failed: {done.stderr[-400:]}")
    return program


def readme_lines() -> str:
    """What hpc/README.md tells an administrator to type for the proxy."""
    text = (ROOT / "hpc/README.md").read_text()
    lines = [line.strip() for line in text.splitlines() if line.endswith("# the proxy")]
    assert len(lines) == 2, (
        f"hpc/README.md must have two lines that end with '# the proxy': {lines}"
    )
    return "\n".join(lines)


class Refused(Exception):
    """The hub or a server answered with an error. status: of HTTP. Its text is the message."""

    def __init__(self, status: int, text: str):
        super().__init__(text)
        self.status = status


@dataclass
class Hub:
    """A hub, which is not root, and its proxy on the login host. Made by `hub`."""

    cluster: Cluster
    log: Path
    env: dict[str, str]
    started: list[subprocess.Popen] = field(default_factory=list)
    url: str = URL

    def start(self) -> None:
        """Start the hub, and wait until it answers."""
        with self.log.open("a") as log:
            config = COURSE / "tests/hpc/hub_config.py"
            self.started.append(
                self.cluster.popen(
                    *(f"{PREFIX}/bin/jupyterhub", "-f", config),
                    user="hub",
                    env=self.env,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd="/",
                )
            )
        wait_until(self.answers, SERVICE, "the hub answers")

    def answers(self) -> bool:
        if self.started and self.started[-1].poll() is not None:
            raise RuntimeError(f"the hub ended:\n{self.log.read_text()[-3000:]}")
        with contextlib.suppress(OSError, Refused):
            return "version" in self.ask("GET", "/hub/api/")
        return False

    def stop(self) -> None:
        """End the hub as a service manager would; proxy and jobs stay."""
        process = self.started.pop()
        self.cluster.run("kill", self.cluster.run("cat", self.env["HUB_TEST_PID_FILE"]))
        process.wait(SERVICE)

    def ask(self, method: str, path: str, body: Any = None, token: str = TOKEN) -> Any:
        """A request to hub or server; raises Refused."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, method=method)
        request.add_header("Authorization", f"token {token}")
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                text = reply.read().decode()
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            with contextlib.suppress(ValueError, KeyError, TypeError):
                text = json.loads(text)["message"]
            raise Refused(error.code, text) from None
        return json.loads(text) if text.strip() else None

    def student(self, name: str) -> Student:
        """A user of the hub, with a token of the user's own."""
        with contextlib.suppress(Refused):
            self.ask("POST", f"/hub/api/users/{name}")
        token = self.ask("POST", f"/hub/api/users/{name}/tokens", {"note": "tests"})["token"]
        return Student(self, name, token)


@dataclass
class Student:
    """What one student can do without a browser."""

    hub: Hub
    name: str
    token: str

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """A request to this student's server."""
        return self.hub.ask(method, f"/user/{self.name}/{path}", body, self.token)

    def request_server(self, **options: Any) -> None:
        """Ask for a server with these options, and don't wait. Raises Refused."""
        self.hub.ask("POST", f"/hub/api/users/{self.name}/server", options, self.token)

    def server(self, **options: Any) -> list[str]:
        """Start a server; returns the messages of the progress page, the last one at readiness."""
        self.request_server(**options)
        messages = list(self.progress())
        assert messages[-1]["ready"] is True, messages
        return [message["message"] for message in messages]

    def progress(self) -> Iterator[dict]:
        """The events of the page that waits for the server, until it is ready or has failed."""
        request = urllib.request.Request(
            f"{self.hub.url}/hub/api/users/{self.name}/server/progress"
        )
        request.add_header("Authorization", f"token {self.token}")
        with urllib.request.urlopen(request, timeout=SPAWN) as reply:
            for line in reply:
                if line.startswith(b"data:"):
                    event = {"ready": False, "failed": False} | json.loads(line[5:])
                    yield event
                    if event["ready"] or event["failed"]:
                        return

    def is_up(self) -> bool:
        """Does the hub say that this student's server is there?"""
        return bool(self.hub.ask("GET", f"/hub/api/users/{self.name}", token=self.token)["servers"])

    def is_ready(self) -> bool:
        """Does the hub say that this student's server answers?"""
        servers = self.hub.ask("GET", f"/hub/api/users/{self.name}", token=self.token)["servers"]
        return bool(servers) and servers[""]["ready"]

    def stop(self) -> None:
        """Stop the server and wait until the hub has forgotten it."""
        with contextlib.suppress(Refused):
            self.hub.ask("DELETE", f"/hub/api/users/{self.name}/server", token=self.token)
        wait_until(lambda: not self.is_up(), SERVICE, f"the server of {self.name} is stopped")

    def kernel(self) -> Kernel:
        """A fresh kernel on the student's server."""
        return Kernel(self, self.ask("POST", "api/kernels", {"name": "python3"})["id"])


@dataclass
class Kernel:
    """A kernel behind hub and proxy, over a websocket as a browser has it."""

    student: Student
    id: str

    def __post_init__(self):
        address = self.student.hub.url.replace("http", "ws", 1)
        self._socket = websocket.create_connection(
            f"{address}/user/{self.student.name}/api/kernels/{self.id}/channels",
            header=[f"Authorization: token {self.student.token}"],
            timeout=SERVICE,
        )

    def run(self, code: str, timeout: float = 180) -> str:
        """Run a cell; returns what it shows as text, a traceback too. Raises TimeoutError."""
        number = self.begin(code)
        shown, deadline = [], time.monotonic() + timeout
        while True:
            message = self._receive(deadline, shown)
            if message.get("parent_header", {}).get("msg_id") != number:
                continue
            content = message["content"]
            shown += _text(message["msg_type"], content)
            if message["msg_type"] == "status" and content["execution_state"] == "idle":
                return "".join(shown)

    def begin(self, code: str) -> str:
        """Have a cell run, and don't wait; returns its number."""
        number = secrets.token_hex(8)
        header = {"msg_id": number, "msg_type": "execute_request", "session": self.id}
        header |= {"username": "", "version": "5.3", "date": ""}
        content = {"code": code, "silent": False, "store_history": False, "allow_stdin": False}
        message = {"header": header, "content": content, "channel": "shell"}
        self._socket.send(json.dumps(message | {"parent_header": {}, "metadata": {}}))
        return number

    def _receive(self, deadline: float, shown: list[str]) -> dict:
        self._socket.settimeout(max(0.1, deadline - time.monotonic()))
        try:
            return json.loads(self._socket.recv())
        except websocket.WebSocketTimeoutException:
            raise TimeoutError(f"no end of the cell; so far: {''.join(shown)}") from None

    def close(self) -> None:
        """Close the connection; the kernel lives on."""
        self._socket.close()


def _text(kind: str, content: dict) -> list[str]:
    if kind == "stream":
        return [content["text"]]
    if kind in ("execute_result", "display_data"):
        return [content["data"].get("text/plain", "") + "\n"]
    if kind == "error":
        return ["\n".join(content["traceback"]) + "\n"]
    return []


@contextlib.contextmanager
def hub(cluster: Cluster, proxy: Path) -> Iterator[Hub]:
    """Proxy and hub that answer; call it inside of `cluster.network()`."""
    env = {
        "CONFIGPROXY_AUTH_TOKEN": secrets.token_hex(32),
        "DDL_LABS_SITE": str(STATE / "site.toml"),
        "HUB_TEST_PASSWORD": PASSWORD,
        "HUB_TEST_TOKEN": TOKEN,
        "HUB_TEST_PID_FILE": str(STATE / "hub/hub.pid"),
        "HUB_TEST_PATIENCE": str(STATE / "patience"),
        "HUB_TEST_CULLED": str(STATE / "culled"),
        "HUB_TEST_BLIND": str(STATE / "blind"),
        "HUB_TEST_SLOW": str(STATE / "slow"),
    }
    up = Hub(cluster, cluster.state / "hub.log", env)
    with (cluster.state / "proxy.log").open("w") as log:
        up.started.append(
            cluster.popen(
                *(proxy, f"--ip={LOGIN}", "--port=8000", "--api-ip=127.0.0.1", "--api-port=8001"),
                env=env,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd="/",
            )
        )
    up.start()
    yield up
    # The processes end with the cluster.
