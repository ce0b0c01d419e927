"""A Slurm cluster of two nodes on this machine, which dies with its command.

    python tests/hpc/slurm_tools.py srun -N2 hostname               # as root, on the login host
    python tests/hpc/slurm_tools.py --user student1 bash             # as a student
    python tests/hpc/slurm_tools.py --user student1 --utils utils python -m utils doctor

Three hosts in namespaces of their own: `login` (slurmctld, and a hub if a test starts one), `node1`
and `node2`. Each has its own processes, network interface and /tmp, as machines have; they share
/home and /srv, as a cluster does. The machine's /etc, ports and processes are not touched.

    login  10.77.0.1    node1  10.77.0.11    node2  10.77.0.12
    /srv/ddl-labs       the environment that hpc/install.sh made, read-only
    /srv/cluster        logs and state: a folder of the caller's
    /home/student1, /home/student2; `hub`, as whom the hub runs, may use sudo as hpc/sudoers says
    /etc                a copy, in which a test may write; /opt and /var/lib are empty

It takes root, Debian's packages in PACKAGES, and a kernel that allows namespaces; `why_not` says
what is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs
import psutil
from filelock import FileLock

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    *("slurmctld", "slurmd", "slurm-client", "munge", "libpmix-dev", "iproute2"),
    *("python3-venv", "util-linux", "sudo"),
)
PROGRAMS = (
    *("slurmctld", "slurmd", "sbatch", "munged", "ip", "unshare", "nsenter", "setpriv"),
    "sudo",
)
NODES = {"node1": "10.77.0.11", "node2": "10.77.0.12"}
LOGIN = "10.77.0.1"
STUDENTS = {"student1": 20001, "student2": 20002}
GROUP = 20000
#: Number, group and home folder of each; as `hub` the hub runs.
USERS = {name: (number, GROUP, f"/home/{name}") for name, number in STUDENTS.items()}
USERS |= {"hub": (990, 990, "/srv/cluster/hub")}
SHARED = Path("/srv")
INSTALLED, STATE, COURSE = SHARED / "ddl-labs", SHARED / "cluster", SHARED / "course"
PREFIX = INSTALLED / "current"
PATH = f"{PREFIX}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
#: Seconds: for the cluster to come up, and for an environment to be installed.
CLUSTER, INSTALL = 90, 900
#: CPUs that a node claims to have, whatever this machine has.
CPUS = 6

#: Lines of hpc/site.toml, by their beginnings, and what this cluster has in their place.
SETTINGS = {
    "prefix = ": f'prefix = "{INSTALLED}"',
    "runtime_dir = ": f'runtime_dir = "{STATE}/hub"',
    "authenticator = ": 'authenticator = "shared-password"',
    "bind_url = ": f'bind_url = "http://{LOGIN}:8000"',
    "connect_ip = ": f'connect_ip = "{LOGIN}"',
    "starts_at_once = ": "starts_at_once = 20",
    "partitions = ": 'partitions = ["lab", "gpu"]',
}

#: Folders that the hosts have for themselves, empty at first.
PRIVATE = ("/home", "/srv", "/run", "/opt", "/var/lib")

#: What pip says where there is no package index.
OFFLINE = re.compile("Could not find a version|No matching distribution|Failed to establish")

SLURM_CONF = f"""\
ClusterName=lab
SlurmctldHost=login({LOGIN})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
StateSaveLocation={STATE}/state
SlurmdSpoolDir=/run/slurmd-%n
SlurmctldPidFile={STATE}/slurmctld.pid
SlurmdPidFile={STATE}/slurmd-%n.pid
SlurmctldLogFile={STATE}/slurmctld.log
SlurmdLogFile={STATE}/slurmd-%n.log
# No cgroups, which a container may not let us make.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
SwitchType=switch/none
GresTypes=gpu
MpiDefault=none
ReturnToService=2
KillWait=2
SlurmdTimeout=10
SchedulerParameters=sched_interval=1,batch_sched_delay=0
"""
PARTITIONS = """\
PartitionName=lab Nodes=ALL Default=YES MaxTime=240 State=UP
PartitionName=gpu Nodes=node2 MaxTime=60 State=UP
"""
GPU = {"node2": "Gres=gpu:1"}


# --- may it run here? ----------------------------------------------------------------------------


def why_not() -> str | None:
    """What keeps the cluster from running on this machine; None if nothing does."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a Slurm cluster in namespaces takes Linux, and root"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return (
            f"no {', '.join(missing)}: apt-get install --no-install-recommends {' '.join(PACKAGES)}"
        )
    if not list(Path("/usr/lib").glob("*/pmix*/lib/libpmix.so")):
        return "Slurm finds no libpmix.so: apt-get install libpmix-dev"
    probe = "ip link add lab0 type bridge && mount -t tmpfs none /srv"
    tried = subprocess.run(
        ["unshare", *NAMESPACES, "sh", "-c", probe], capture_output=True, text=True, timeout=60
    )
    if tried.returncode:
        return f"namespaces are not allowed here: {tried.stderr.strip()}"
    return None


NAMESPACES = ("--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child")


# --- the environment of the students -------------------------------------------------------------


def environment(base_python: str = "/usr/bin/python3") -> Path:
    """The folder to be mounted at INSTALLED; hpc/install.sh fills it at first.

    It lies in the user's cache, under a name that changes with the packages; `utils` in it is
    covered by the clone's own. Raises RuntimeError with the last lines of install.sh.
    """
    version = subprocess.run([base_python, "--version"], capture_output=True, timeout=60).stdout
    packages = ("pyproject.toml", ".ci/constraints.txt", "hpc/requirements.txt")
    name = f"hpc-v2-{digest(version, [ROOT / path for path in packages])}"
    given = (ROOT / folder for folder in ("hpc", "utils/cluster/jupyterlab"))
    files = (path for folder in given for path in folder.rglob("*.*") if path.suffix != ".pyc")
    settings = digest(version, sorted(files))
    folder = platformdirs.user_cache_path("ddl-labs") / name
    folder.mkdir(parents=True, exist_ok=True)
    done = folder.with_name(f"{name}.done")
    with FileLock(folder.with_name(f"{name}.lock")):
        if not done.exists():
            install(folder, "--python", base_python, "--mpi", "wheel", "--no-compile")
        elif done.read_text() != settings:
            install(folder, "--only-settings")
        done.write_text(settings)
    return folder


def needed() -> Path:
    """For fixtures: `environment`; skips, with the reason, where there can be no cluster."""
    import pytest  # the sandbox runs this file too, and has no use for it

    if reason := why_not():
        pytest.skip(reason)
    try:
        return environment()
    except RuntimeError as error:
        if OFFLINE.search(str(error)):
            pytest.skip(f"the packages of hpc/install.sh cannot be had: {error}")
        raise


def digest(salt: bytes, files: list[Path]) -> str:
    """A short text that changes with the content of the files."""
    content = b"\0".join([salt, *(path.read_bytes() for path in files)])
    return hashlib.sha256(content).hexdigest()[:12]


def install(folder: Path, *options: str) -> None:
    """Run hpc/install.sh so that it sees `folder` as INSTALLED."""
    script = (
        f"mount -t tmpfs -o mode=755 none {SHARED} && mkdir {INSTALLED} && "
        f'mount --bind "$1" {INSTALLED} && shift && exec "$@"'
    )
    command = ["unshare", "--mount", "bash", "-c", script, "install", folder]
    done = subprocess.run(
        [*command, ROOT / "hpc/install.sh", "--prefix", INSTALLED, *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=INSTALL,
    )
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-15:])
        raise RuntimeError(f"hpc/install.sh failed with status {done.returncode}:\n{tail}")


# --- inside: three hosts -------------------------------------------------------------------------


def sh(*words: object) -> None:
    """Run a command of the set-up; a failure ends the sandbox."""
    subprocess.run(list(map(str, words)), check=True)


def inside(options: dict[str, Any]) -> int:
    """Process 1 of the sandbox: set everything up, run the command, reap what is orphaned."""
    keep = visible_folders(options)
    make_filesystems(keep, options["env"], options["state"])
    make_users()
    make_network()
    start_slurm(keep)
    (STATE / "ready").touch()
    return reap_until_end(as_user(options["command"], options["user"], options["cwd"]))


def visible_folders(options: dict[str, Any]) -> list[str]:
    """Folders that the sandbox's own would cover, and that the command may need."""
    cache = str(platformdirs.user_cache_path("ddl-labs"))
    wanted = [str(ROOT), sys.prefix, sys.base_prefix, cache, options["cwd"]]
    covered = tuple(f"{folder}/" for folder in ("/tmp", *PRIVATE))
    return [path for path in dict.fromkeys(wanted) if path.startswith(covered)]


def make_filesystems(keep: list[str], env: str, state: str) -> None:
    """Private /tmp, /dev/shm, /home and /run, and what all hosts share below /srv."""
    sh("mount", "--make-rprivate", "/")
    sh("mount", "-t", "proc", "proc", "/proc")
    own_env, own_state, own_root = (opened(path) for path in (env, state, ROOT))
    kept = [(opened(path), path) for path in keep]
    for folder in PRIVATE:
        sh("mount", "-t", "tmpfs", "-o", "mode=755", "none", folder)
    sh("cp", "-a", "/etc", "/run/etc")
    sh("mount", "--bind", "/run/etc", "/etc")
    for handle, path in kept:
        if not path.startswith("/tmp/"):
            bind(handle, path)
    fresh_host_filesystems(keep)
    bind(own_env, INSTALLED)
    bind(own_state, STATE)
    bind(own_root, COURSE)
    # The clone's own files in place of those that were installed from it.
    for folder in ("utils", "utils/mpi/torch_mpi"):
        for installed in PREFIX.glob(f"lib/python3*/site-packages/{Path(folder).name}"):
            sh("mount", "--bind", COURSE / folder, installed)
    sh(
        "mount",
        "--bind",
        COURSE / "hpc/ipcluster_config.py",
        PREFIX / "etc/ipython/ipcluster_config.py",
    )
    for name in ("site.toml", "job.sh"):
        sh("mount", "--bind", STATE / name, PREFIX / "etc/ddl-labs" / name)
    for folder in (INSTALLED, COURSE):
        sh("mount", "-o", "remount,bind,ro", folder)


def opened(folder: Path | str) -> int:
    """A handle by which a folder can be mounted when something covers its name."""
    return os.open(folder, os.O_PATH)


def bind(handle: int, target: Path | str) -> None:
    """Show an opened folder at another place, too."""
    Path(target).mkdir(parents=True, exist_ok=True)
    # The program `mount` would look the link up, and take a name that is covered by now.
    ms_bind, libc = 4096, ctypes.CDLL(None, use_errno=True)
    if libc.mount(f"/proc/self/fd/{handle}".encode(), os.fsencode(target), None, ms_bind, None):
        raise OSError(ctypes.get_errno(), f"cannot mount at {target}")


def fresh_host_filesystems(keep: list[str]) -> None:
    """What every host has for itself, but for some folders of /tmp that all see."""
    kept = [(opened(path), path) for path in keep if path.startswith("/tmp/")]
    for folder in ("/tmp", "/dev/shm"):
        sh("mount", "-t", "tmpfs", "-o", "mode=1777", "none", folder)
    for handle, path in kept:
        bind(handle, path)


def make_users() -> None:
    """Accounts without a password; `hub` may use sudo as hpc/sudoers says."""
    lines = {"passwd": "", "shadow": "", "group": f"students:x:{GROUP}:\nhub:x:990:\n"}
    for name, (number, group, home) in USERS.items():
        lines["passwd"] += f"{name}:x:{number}:{group}::{home}:/bin/bash\n"
        lines["shadow"] += f"{name}:*:20000::::::\n"
        Path(home).mkdir(mode=0o700)
        os.chown(home, number, group)
    for file, added in lines.items():
        with Path("/etc", file).open("a", encoding="utf-8") as known:
            known.write(added)
    sh("install", "-m", "440", COURSE / "hpc/sudoers", "/etc/sudoers.d/ddl-labs")


def make_network() -> None:
    """A bridge that only these hosts know."""
    addresses = {"login": LOGIN} | NODES
    lines = [f"{address} {name}" for name, address in addresses.items()]
    Path("/etc/hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]), encoding="utf-8")
    sh("hostname", "login")
    sh("ip", "link", "set", "lo", "up")
    sh("ip", "link", "add", "lab0", "type", "bridge")
    sh("ip", "address", "add", f"{LOGIN}/24", "dev", "lab0")
    sh("ip", "link", "set", "lab0", "up")


def start_slurm(keep: list[str]) -> None:
    """munged and slurmctld here, slurmd on each node; returns when both nodes are idle."""
    nodes = "".join(
        f"NodeName={name} NodeAddr={address} CPUs={CPUS} Sockets=1 CoresPerSocket={CPUS} "
        f"ThreadsPerCore=1 RealMemory=8000 {GPU.get(name, '')} State=UNKNOWN\n"
        for name, address in NODES.items()
    )
    Path("/etc/slurm").mkdir(exist_ok=True)
    Path("/etc/slurm/slurm.conf").write_text(SLURM_CONF + nodes + PARTITIONS, encoding="utf-8")
    # A card of which there is nothing but a name.
    Path("/etc/slurm/gres.conf").write_text(
        "NodeName=node2 Name=gpu File=/dev/null\n", encoding="utf-8"
    )
    (STATE / "state").mkdir()
    key = STATE / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    Path("/run/munge").mkdir()
    files = {"key-file": key, "log-file": STATE / "munged.log"}
    files |= {"pid-file": STATE / "munged.pid", "seed-file": STATE / "munge.seed"}
    sh("munged", "--force", *(f"--{name}={path}" for name, path in files.items()))
    sh("slurmctld")
    for name, address in NODES.items():
        start_node(name, address, keep)
    wait_until(nodes_are_idle, CLUSTER, "both nodes are idle")


def start_node(name: str, address: str, keep: list[str]) -> None:
    """A host: processes, interface, name, /tmp and /dev/shm of its own, and slurmd."""
    Path(f"/run/slurmd-{name}").mkdir(exist_ok=True)
    command = ["unshare", *NAMESPACES, "--mount-proc", sys.executable, __file__, "--node", name]
    log = (STATE / f"{name}.log").open("a")
    host = subprocess.Popen(
        [*command, *keep], stdin=subprocess.PIPE, stdout=log, stderr=log, cwd="/"
    )
    nodes_own = wait_until(lambda: children(host.pid), 30, f"{name} has a process")[0]
    # A node that was switched off may still have its end of the wire.
    wait_until(lambda: not has_link(f"to-{name}"), 30, f"the old wire to {name} is gone")
    sh("ip", "link", "add", f"to-{name}", "type", "veth", "peer", "eth0", "netns", nodes_own)
    sh("ip", "link", "set", f"to-{name}", "master", "lab0", "up")
    # From here on the host may go on.
    host.stdin.write(address.encode() + b"\n")
    host.stdin.close()


def has_link(name: str) -> bool:
    return subprocess.run(["ip", "link", "show", name], capture_output=True).returncode == 0


def node(name: str, *keep: str) -> int:
    """Process 1 of a node."""
    address = sys.stdin.readline().strip()
    sh("hostname", name)
    sh("ip", "link", "set", "lo", "up")
    sh("ip", "address", "add", f"{address}/24", "dev", "eth0")
    sh("ip", "link", "set", "eth0", "up")
    fresh_host_filesystems(list(keep))
    # It writes a log of its own.
    quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    return reap_until_end(subprocess.Popen(["slurmd", "-D", "-N", name], **quiet))


def children(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children()]


def nodes_are_idle() -> bool:
    told = subprocess.run(
        ["sinfo", "-h", "-p", "lab", "-t", "idle", "-o", "%D"], capture_output=True, text=True
    )
    return told.stdout.strip() == str(len(NODES))


def reap_until_end(process: subprocess.Popen) -> int:
    """The process's exit status; meanwhile, as process 1 must, reap all orphans."""
    while True:
        pid, status = os.wait()
        if pid == process.pid:
            return os.waitstatus_to_exitcode(status) & 0xFF


def wait_until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """The condition's first true value. Raises TimeoutError that names what was waited for."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds} s: {what}")
        time.sleep(0.1)
    return value


# --- users ---------------------------------------------------------------------------------------


def user_environment(user: str | None) -> dict[str, str]:
    """What a login shell would set, and nothing of the caller's but the terminal."""
    name = user or "root"
    home = USERS[user][2] if user else "/root"
    kept = {key: os.environ[key] for key in ("TERM", "LANG") if key in os.environ}
    return {"HOME": home, "USER": name, "LOGNAME": name, "SHELL": "/bin/bash", "PATH": PATH} | kept


def as_user(command: list[str], user: str | None, cwd: str) -> subprocess.Popen:
    """Start a command as a student, in the home folder; as root, in the caller's folder."""
    if user is None:
        return subprocess.Popen(command, env=os.environ | user_environment(None), cwd=cwd)
    number, group, home = USERS[user]
    return subprocess.Popen(
        command, env=user_environment(user), cwd=home, user=number, group=group, extra_groups=[]
    )


def site_settings() -> str:
    """hpc/site.toml, with this cluster's values."""
    text = (ROOT / "hpc/site.toml").read_text()
    for old, new in SETTINGS.items():
        if text.count(old) != 1:
            raise ValueError(f"hpc/site.toml must have one line that begins with {old!r}")
        text = re.sub(rf"^{re.escape(old)}.*", lambda _, new=new: new, text, flags=re.MULTILINE)
    return text


def write_settings(state: Path, text: str) -> None:
    """Make this the cluster's site.toml, with what install.sh makes of it."""
    settings = state / "site.toml"
    settings.write_text(text)
    lines = subprocess.check_output([sys.executable, ROOT / "hpc/settings.py", settings], text=True)
    (state / "job.sh").write_text((ROOT / "hpc/slurm/job.sh").read_text() + lines)


# --- outside -------------------------------------------------------------------------------------


@dataclass
class Cluster:
    """The sandbox, seen from outside. Made by `cluster`."""

    process: subprocess.Popen
    state: Path

    @property
    def login(self) -> int:
        """Process 1 of the login host, as this machine numbers it."""
        return children(self.process.pid)[0]

    def host(self, name: str) -> int:
        """Process 1 of a host, as this machine numbers it."""
        if name == "login":
            return self.login
        for process in psutil.Process(self.login).children(recursive=True):
            if process.cmdline()[2:4] == ["--node", name]:
                return process.pid
        raise LookupError(f"{name} is down")

    def run(
        self,
        *command: object,
        user: str | None = None,
        host: str = "login",
        timeout: float = 120,
        check: bool = True,
        env: dict[str, str] | None = None,
    ) -> str:
        """Run a command on a host. Returns its output, stripped; raises AssertionError with it."""
        done = subprocess.run(
            self.words(command, user, host, env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
        if check and done.returncode:
            raise AssertionError(f"{command} on {host}: status {done.returncode}\n{done.stdout}")
        return done.stdout.strip()

    def popen(self, *command: object, user: str | None = None, host: str = "login", **options):
        """The same, without waiting; `options` go to subprocess.Popen."""
        env = options.pop("env", None)
        return subprocess.Popen(
            self.words(command, user, host, env), stdin=subprocess.DEVNULL, **options
        )

    def words(self, command, user, host, env) -> list[str]:
        variables = user_environment(user) | (env or {})
        enter = ["nsenter", f"--target={self.host(host)}", "--all"]
        if user is not None:
            number, group, home = USERS[user]
            enter.append(f"--wdns={home}")
            enter += ["setpriv", f"--reuid={number}", f"--regid={group}", "--clear-groups"]
        return [
            *enter,
            "env",
            "-i",
            *(f"{key}={value}" for key, value in variables.items()),
            *map(str, command),
        ]

    @contextlib.contextmanager
    def network(self) -> Iterator[None]:
        """In this thread, and in what it starts, connections are made from the login host."""
        libc = ctypes.CDLL(None, use_errno=True)
        with (
            open("/proc/thread-self/ns/net", encoding="utf-8") as ours,
            open(f"/proc/{self.login}/ns/net", encoding="utf-8") as theirs,
        ):
            enter_network(libc, theirs.fileno())
            try:
                yield
            finally:
                enter_network(libc, ours.fileno())

    def crash(self, name: str) -> None:
        """Switch a node off."""
        os.kill(self.host(name), signal.SIGKILL)

    def boot(self, name: str) -> None:
        """Switch a node on again; returns when Slurm gives it jobs."""
        keep = json.dumps(visible_folders({"cwd": "/"}))
        self.run(sys.executable, __file__, "--boot", name, keep, timeout=CLUSTER)
        seen = []

        def is_back() -> bool:
            seen.append(self.run("sinfo", "-h", "-p", "lab", "-n", name, "-o", "%T"))
            return seen[-1] in ("idle", "mixed", "allocated")

        try:
            wait_until(is_back, 2 * CLUSTER, f"{name} is back")
        except TimeoutError as late:
            states = "\n".join([*dict.fromkeys(seen), self.run("sinfo", "-N", "-l"), *self.jobs()])
            raise TimeoutError(f"{late}\n{states}\n{self.logs()}") from None

    def jobs(self) -> list[str]:
        """One line for each job that is not over: id, name, user, state, reason, nodes."""
        return self.run("squeue", "-h", "-o", "%i %j %u %T %r %N").splitlines()

    def processes(self, user: str) -> list[str]:
        """Command lines of a student's processes, on all hosts."""
        return self.run("ps", "-o", "pid=,args=", "-u", user, check=False).splitlines()

    def logs(self, lines: int = 15) -> str:
        """The last lines of every log, for an error's text."""
        return "\n".join(
            f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
            for path in sorted(self.state.glob("*.log"))
        )


def enter_network(libc: ctypes.CDLL, number: int) -> None:
    clone_newnet = 0x40000000
    if libc.setns(number, clone_newnet):
        raise OSError(ctypes.get_errno(), "setns")


def start(
    command: list[str], *, env: Path, state: Path, user: str | None = None, **options
) -> subprocess.Popen:
    """A sandbox that runs the command with Slurm up; `options` go to subprocess.Popen."""
    told = {"command": command, "user": user, "env": str(env), "state": str(state)}
    told["cwd"] = os.getcwd()
    write_settings(state, site_settings())
    words = ["unshare", *NAMESPACES, sys.executable, __file__, "--inside", json.dumps(told)]
    # The sandbox ends with whoever started it, also when that is killed.
    return subprocess.Popen(["setpriv", "--pdeathsig=KILL", *words], **options)


@contextlib.contextmanager
def cluster(state: Path, env: Path | None = None) -> Iterator[Cluster]:
    """A cluster for tests, with logs in `state`. Raises RuntimeError if it does not come up."""
    log = (state / "sandbox.log").open("w")
    process = start(
        ["sleep", "infinity"],
        env=env or environment(),
        state=state,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    up = Cluster(process, state)
    try:
        wait_until(
            lambda: (state / "ready").exists() or process.poll() is not None,
            CLUSTER + 30,
            "Slurm is up",
        )
        if process.poll() is not None:
            raise RuntimeError(f"the cluster did not come up:\n{up.logs()}")
        yield up
    finally:
        process.kill()
        process.wait(30)
        log.close()


# --- the command line ----------------------------------------------------------------------------


def main() -> int:
    """Run a command in a fresh cluster."""
    if sys.argv[1:2] == ["--inside"]:
        return inside(json.loads(sys.argv[2]))
    if sys.argv[1:2] == ["--node"]:
        return node(*sys.argv[2:])
    if sys.argv[1:2] == ["--boot"]:
        start_node(sys.argv[2], NODES[sys.argv[2]], json.loads(sys.argv[3]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--user", choices=STUDENTS, help="who runs the command (default: root)")
    parser.add_argument("--state", type=Path, help="folder that keeps Slurm's logs")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND…")
    arguments = parser.parse_args()
    if not arguments.command:
        parser.error("no COMMAND given, such as: srun -N2 hostname")
    if reason := why_not():
        parser.exit(3, f"{reason}\n")
    env = environment()
    with tempfile.TemporaryDirectory() as folder:
        state = arguments.state or Path(folder)
        state.mkdir(parents=True, exist_ok=True)
        process = start(arguments.command, env=env, state=state.resolve(), user=arguments.user)
        try:
            return process.wait()
        finally:
            process.kill()


if __name__ == "__main__":
    sys.exit(main())
