"""Several hosts on this machine: runs a command on the first of them, and ends with its status.

    unshare --net --mount … python hosts_sandbox.py --hosts 2 --rate 1e8 --latency 2e-3 \
        --room EMPTY_FOLDER -- mpiexec -n 2 python train.py

A host is a set of namespaces: a network device and address, a name, shared memory of its own. It
has no ssh: mpiexec is given the agent below, which enters the namespaces instead. All this lives
in the namespaces of `unshare`, and dies with them; needs iproute2, hostname and util-linux.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from hosts_switch import MTU, Switch, in_time, open_device

_NAMESPACES = ("--net", "--uts", "--ipc", "--mount")
_NET = "10.77.0"

# What the first process of a host does; it says `up` when the others may enter.
_INIT = """
hostname "$1"
mount -t tmpfs -o size=1g tmpfs /dev/shm
ip link set lo up
echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6
# Others, such as bbr, estimate the rate and pace themselves: that would be measured, too.
echo reno > /proc/sys/net/ipv4/tcp_congestion_control
echo up
exec sleep infinity
"""

# In place of ssh: agent HOST COMMAND. The hosts share this machine's cores: each gets one.
_AGENT = """#!/bin/sh
host=$1; shift
read -r pid core < "$(dirname "$0")/$host"
exec nsenter --target "$pid" {namespaces} taskset -c "$core" sh -c "cd '$PWD'; $*"
"""


@dataclass(frozen=True)
class Host:
    """A host: its name, address, and the process in whose namespaces it is."""

    name: str
    address: str
    pid: int


def start_host(number: int) -> Host:
    """Make the namespaces of host `number` (from 1)."""
    name = f"node{number}"
    command = ["unshare", *_NAMESPACES, "sh", "-ec", _INIT, "sh", name]
    first = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    if first.stdout.readline() != b"up\n":
        sys.exit(f"hosts_sandbox: {name} did not come up")
    return Host(name, f"{_NET}.{number}", first.pid)


def plug_in(host: Host) -> int:
    """Give the host its network device; the switch's end of it."""
    name, enter = f"tun-{host.name}", ("nsenter", "--target", str(host.pid), "--net")
    device = open_device(name)
    _ip("link", "set", name, "netns", str(host.pid), "name", "eth0")
    _ip("addr", "add", f"{host.address}/24", "dev", "eth0", enter=enter)
    _ip("link", "set", "eth0", "mtu", str(MTU), "txqueuelen", "5000", "up", enter=enter)
    return device


def _ip(*arguments: str, enter: tuple[str, ...] = ()) -> None:
    subprocess.run([*enter, "ip", *arguments], check=True)


def name_hosts(room: Path, number: int) -> None:
    """All hosts find each other by name; this machine's own /etc/hosts is only covered."""
    lines = [f"{_NET}.{k} node{k}" for k in range(1, number + 1)]
    (room / "etc-hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
    subprocess.run(["mount", "--bind", room / "etc-hosts", "/etc/hosts"], check=True)


def tell_mpiexec(room: Path, hosts: list[Host], slots: int) -> dict[str, str]:
    """Variables with which mpiexec knows the hosts, as on a cluster where the admin did that."""
    cores = sorted(os.sched_getaffinity(0))
    for k, host in enumerate(hosts):
        (room / host.name).write_text(f"{host.pid} {cores[k % len(cores)]}\n")
    agent, hostfile = room / "agent", room / "hostfile"
    agent.write_text(_AGENT.format(namespaces=" ".join(_NAMESPACES)))
    agent.chmod(0o755)
    hostfile.write_text("".join(f"{host.name} slots={slots}\n" for host in hosts))
    return {
        "PRTE_MCA_plm_ssh_agent": str(agent),
        "PRTE_MCA_prte_default_hostfile": str(hostfile),
        "TMPDIR": str(room),
    }


def main() -> int:
    """Bring the hosts up, run the command, be the switch until it is done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, required=True)
    parser.add_argument("--slots", type=int, default=1, help="ranks that a host takes")
    parser.add_argument("--rate", type=float, required=True, help="bits per second")
    parser.add_argument("--latency", type=float, required=True, help="seconds, one way")
    parser.add_argument("--room", type=Path, required=True, help="an empty folder")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    name_hosts(options.room, options.hosts)
    hosts = [start_host(k + 1) for k in range(options.hosts)]
    devices = [plug_in(host) for host in hosts]
    environment = os.environ | tell_mpiexec(options.room, hosts, options.slots)
    agent = environment["PRTE_MCA_plm_ssh_agent"]
    if not in_time():
        print("hosts_sandbox: no real-time priority; messages will take longer", file=sys.stderr)
    process = subprocess.Popen([agent, "node1", shlex.join(options.command)], env=environment)
    Switch(devices, options.rate, options.latency).run(until=os.pidfd_open(process.pid))
    return process.wait()


if __name__ == "__main__":
    sys.exit(main())
