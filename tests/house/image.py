"""The Dockerfile's steps in a root file system, where there is no container engine.

    mmdebstrap --variant=minbase bookworm root        # stands for FROM debian:bookworm-slim
    python tests/house/image.py root                        # all steps, then lab 00 as its user
    python tests/house/image.py root --only 'ddl-labs doctor'

It takes root, bubblewrap and a network. A step sees `root`, /proc, a small /dev with 64 MB of
shared memory, which is what Docker and Binder give, and the variables of ENV. `--bind` and `--env`
add what pip needs to know of the machine. What an engine does besides (layers, its network, its
entry point) is not tried.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SHARED_MEMORY = 64 * 2**20
SOLUTION = "00_start_here.ipynb"
# The image has no solutions, and nbval is not in the students' environment.
LAB_00 = (
    "make -C .. .venv/.grade >/dev/null && IPP_NONINTERACTIVE=1 "
    f"python -m pytest -q -p no:cacheprovider -c ../pyproject.toml --nbval /tmp/{SOLUTION}"
)


def copied() -> list[str]:
    """What `COPY .` takes: the repository's files without those that .dockerignore names."""
    ignored = (ROOT / ".dockerignore").read_text().split()
    files = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", "."]
        + [f":(exclude,glob){pattern}" for pattern in ignored],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    return files.split("\0")[:-1]


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """The instructions of a Dockerfile in order, as (name, rest of the line)."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for line in re.sub(r"\\\n\s*", " ", lines).splitlines():
        if line.strip():
            name, _, rest = line.strip().partition(" ")
            yield name, rest.strip()


@dataclass
class Image:
    """What the instructions have set so far.

    Attributes:
        root: the file system. bind, env: what each step sees of this machine.
        command: what a container runs, from CMD.
    """

    root: Path
    bind: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=lambda: {"PATH": PATH})
    arguments: dict[str, str] = field(default_factory=dict)
    user: str = "0"
    folder: str = "/"
    command: list[str] = field(default_factory=list)

    def follow(self, text: str, *, run: bool) -> None:
        """Follow a Dockerfile; with ``run``, also its RUN and COPY."""
        for name, rest in instructions(text):
            step = getattr(self, f"_{name.lower()}", None)
            if step is None:
                raise ValueError(f"the Dockerfile has {name}, which image.py does not know")
            if run or name not in {"RUN", "COPY"}:
                step(rest)

    def sh(self, command: str) -> None:
        """Run a command as a RUN or a container would; raises CalledProcessError."""
        box = ["bwrap", "--bind", str(self.root), "/", "--proc", "/proc", "--dev", "/dev"]
        box += ["--size", str(SHARED_MEMORY), "--tmpfs", "/dev/shm", "--cap-add", "ALL"]
        box += ["--ro-bind", "/etc/resolv.conf", "/etc/resolv.conf"]
        for path in self.bind:
            box += ["--ro-bind", path, path]
        box += ["--unshare-pid", "--unshare-ipc", "--die-with-parent", "--clearenv"]
        for name, value in (self.env | self.variables).items():
            box += ["--setenv", name, value]
        groups = ["--clear-groups", "--no-new-privs"] if self.user != "0" else ["--keep-groups"]
        user = ["setpriv", f"--reuid={self.user}", f"--regid={self.user}", *groups]
        begin = time.monotonic()
        print(f"+ [{self.user}] {command}", flush=True)
        subprocess.run([*box, "--chdir", self.folder, "--", *user, "sh", "-c", command], check=True)
        print(f"  {time.monotonic() - begin:.0f} s", flush=True)

    def _expand(self, text: str) -> str:
        known = self.arguments | self.variables
        return re.sub(r"\$\{(\w+)\}", lambda found: known[found[1]], text)

    def _from(self, rest: str) -> None:
        """The first one is `root`; others go on from the stage before."""

    def _expose(self, rest: str) -> None:
        int(rest)

    def _arg(self, rest: str) -> None:
        name, _, value = rest.partition("=")
        self.arguments[name] = value

    def _env(self, rest: str) -> None:
        for word in shlex.split(rest):
            name, _, value = word.partition("=")
            self.variables[name] = self._expand(value)

    def _user(self, rest: str) -> None:
        self.user = self._expand(rest)

    def _workdir(self, rest: str) -> None:
        self.folder = self._expand(rest)

    def _run(self, rest: str) -> None:
        self.sh("; ".join([*(f"{n}={v}" for n, v in self.arguments.items()), rest]))

    def _copy(self, rest: str) -> None:
        owner, source, target = rest.split()
        if source != ".":
            raise ValueError(f"COPY {rest}: tests/house/image.py copies the repository only")
        user = self._expand(owner.removeprefix("--chown="))
        place = self.root / self._expand(target).lstrip("/")
        place.mkdir(parents=True, exist_ok=True)
        pack = subprocess.run(
            ["tar", "-c", "--null", "-T", "-"], cwd=ROOT, input="\0".join(copied()).encode(),
            stdout=subprocess.PIPE, check=True,
        )  # fmt: skip
        subprocess.run(["tar", "-x", "-C", str(place)], input=pack.stdout, check=True)
        subprocess.run(["chown", "-R", user, str(place)], check=True)

    def _cmd(self, rest: str) -> None:
        self.command = json.loads(rest)


def main() -> int:
    """Build, and run lab 00; the exit status of what failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("root", type=Path, help="a root file system of the Dockerfile's FROM")
    parser.add_argument("--only", metavar="COMMAND", help="build nothing: run this as its user")
    parser.add_argument("--bind", action="append", default=[], metavar="PATH", help="read-only")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    given = parser.parse_args()
    env = dict(word.split("=", 1) for word in given.env)
    image = Image(given.root.resolve(), given.bind, env)
    try:
        image.follow((ROOT / "Dockerfile").read_text(), run=not given.only)
        if given.only:
            image.sh(given.only)
        else:
            solution = image.root / "tmp" / SOLUTION
            shutil.copy(ROOT / "solutions" / SOLUTION, solution)
            image.sh(LAB_00)
            solution.unlink()
    except subprocess.CalledProcessError as error:
        return error.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
