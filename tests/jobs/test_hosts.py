"""Several hosts, really: ranks that share no memory and talk TCP over a network of a known speed.

They need namespaces and a network device: docs/test-machines.md says which, and why.
"""

from __future__ import annotations

import functools
import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import hosts_tools
import matplotlib.pyplot as plt
import nbformat
import pytest
import torch
from hosts_switch import FRAMING, Switch
from hosts_tools import LATENCY, RATE, on_hosts

from torch_mpi.protocol import wait_monitor
from utils.jobs.start_plan import Plan
from utils.labs.lab05 import laws, runs
from utils.labs.lab05 import pictures as speedup
from utils.labs.shared import slurm_script
from utils.mpi.benchmark.alpha_beta import AlphaBeta, fit_alpha_beta

pytestmark = [pytest.mark.bare, pytest.mark.timeout(900)]

MESSAGES = Path(__file__).with_name("hosts_messages.py")
# How far the emulated network may be from the real one.
TOLERANCE = 0.25
# A machine that is busy with something else can spoil a measurement, not three of them.
ATTEMPTS = 3


@pytest.fixture(scope="module")
def can_have_hosts() -> None:
    if reason := hosts_tools.reason_against():
        pytest.skip(f"no hosts here: {reason}")


def result_of(done: subprocess.CompletedProcess) -> dict:
    """The JSON object that a command printed."""
    objects = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert objects, f"{done.stdout}\n{done.stderr}"
    return json.loads(objects[-1])


def environment_of_ranks() -> dict[str, str]:
    """What the course sets for every rank, in notebooks and jobs."""
    return Plan(2, bind=False, launcher="mpiexec").environment


# --- the emulated network is the real one ------------------------------------------------------


@dataclass(frozen=True)
class Networks:
    """What messages took over a real network of two hosts, and over the one that it is emulated by.

    The real one was told RATE and LATENCY. MPI alone measures what it is, with the kernel's part:
    `link`; that is what the emulated one was told.
    """

    real: dict
    emulated: dict
    link: AlphaBeta

    def fit(self, network: dict, pattern: str) -> AlphaBeta:
        """α and β of a message: there and back are two."""
        seconds = network[pattern]["seconds"]
        parts = 2 if pattern.endswith("ping_pong") else 1
        return fit_alpha_beta([int(n) for n in seconds], [s / parts for s in seconds.values()])

    def ratios(self, pattern: str) -> list[float]:
        """Emulated over real, of α and of β, or of the time where there is one size only."""
        seconds = [network[pattern]["seconds"] for network in (self.emulated, self.real)]
        if len(seconds[0]) == 1:
            emulated, real = (next(iter(times.values())) for times in seconds)
            return [emulated / real]
        emulated, real = (self.fit(network, pattern) for network in (self.emulated, self.real))
        return [emulated.alpha / real.alpha, emulated.beta / real.beta]

    @property
    def off(self) -> float:
        """The largest difference of the two, as a part of the real one."""
        patterns = ("ping_pong", "ring", "all_reduce")
        return max(abs(ratio - 1) for pattern in patterns for ratio in self.ratios(pattern))


def compare(mpiexec) -> Networks:
    """Time the same messages on both networks."""
    command = ("mpiexec", "-n", "2", "--bind-to", "none", sys.executable, MESSAGES)
    real = result_of(on_hosts(2, *command, timeout=200, env=environment_of_ranks()))
    seconds = real["raw_ping_pong"]["seconds"]
    link = fit_alpha_beta([int(n) for n in seconds], [s / 2 for s in seconds.values()])
    emulated = result_of(mpiexec(2, MESSAGES, "--emulate", link.alpha, link.bandwidth, timeout=200))
    return Networks(real, emulated, link)


@pytest.fixture(scope="module")
def networks(can_have_hosts, mpiexec) -> Networks:
    """The best of some comparisons; the first one that is good enough."""
    if os.geteuid() != 0:
        pytest.skip("not root: without real-time priority the switch would be late")
    found = []
    while len(found) < ATTEMPTS and not any(one.off < TOLERANCE for one in found):
        found.append(compare(mpiexec))
    best = min(found, key=lambda one: one.off)
    print(report(best))
    return best


def report(networks: Networks) -> str:
    """α and 1/β of everything, for a failed test's output and for `pytest -s`."""
    lines = [f"told: {LATENCY * 1e3:.3f} ms, {RATE / 1e6:.1f} Mbit/s"]
    fits = {"MPI alone": networks.link}
    for name, network in (("real", networks.real), ("emulated", networks.emulated)):
        fits |= {f"{p}, {name}": networks.fit(network, p) for p in ("ping_pong", "ring")}
    lines += [
        f"{k}: {f.alpha * 1e3:.3f} ms, {f.bandwidth * 8e-6:.1f} Mbit/s" for k, f in fits.items()
    ]
    return "\n".join(lines)


@pytest.fixture
def quiet(networks) -> Networks:
    """The comparison, unless the machine was too busy to move packets at the speed it was told."""
    link = networks.link
    if link.alpha > LATENCY * (1 + TOLERANCE) or link.bandwidth < RATE / 8 * (1 - TOLERANCE):
        pytest.skip(f"the machine is too busy to compare networks on it:\n{report(networks)}")
    return networks


def test_no_message_crosses_the_real_network_faster_than_its_settings_allow(networks):
    """A busy machine makes messages later, never earlier."""
    assert networks.link.alpha > LATENCY * (1 - TOLERANCE)
    assert networks.link.bandwidth < RATE / 8 * (1 + TOLERANCE)


def test_large_messages_between_hosts_do_not_wait_for_a_permission(quiet):
    """A round trip more from 64 KiB on would be 40 % of the time there."""
    assert quiet.link.max_error < 0.15


@pytest.mark.parametrize("pattern", ["ping_pong", "ring"])
def test_a_laptops_slow_network_has_the_latency_and_bandwidth_of_a_real_one(quiet, pattern):
    assert quiet.ratios(pattern) == pytest.approx([1.0, 1.0], abs=TOLERANCE), report(quiet)


def test_all_reduce_on_a_laptops_slow_network_takes_as_long_as_on_a_real_one(quiet):
    assert quiet.ratios("all_reduce") == pytest.approx([1.0], abs=TOLERANCE)


def test_what_ranks_of_two_hosts_say_to_each_other_went_through_the_network(networks):
    assert networks.real["hosts"] == ["node1", "node2"]
    for pattern in ("raw_ping_pong", "ping_pong", "ring", "all_reduce"):
        counted = networks.real[pattern]
        assert 1.0 <= counted["sent"] / counted["tensors"] < 1.1, pattern


# --- lab 05's script ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lab05(root: Path, tmp_path_factory) -> Path:
    """A folder with what the notebook of lab 05 writes, and images that are easily told apart."""
    folder = tmp_path_factory.mktemp("lab05")
    for cell in nbformat.read(root / "solutions" / "05_scaling.ipynb", as_version=4).cells:
        first, _, rest = cell.source.partition("\n")
        if cell.cell_type == "code" and first.startswith("%%writefile scaling/"):
            (folder / Path(first).name).write_text(rest)
    labels = torch.arange(640) % 10
    images = torch.zeros(640, 28, 28, dtype=torch.uint8)
    images[torch.arange(640), 2 * labels] = 255
    torch.save([(images, labels)] * 2, folder / "images.pt")
    return folder


# Two NUMA domains of one core: each host claims to be such a machine, and this one has the cores.
TWO_DOMAINS = {"HWLOC_SYNTHETIC": "pack:2 numa:1 core:1 pu:1", "HWLOC_THISSYSTEM": "1"}


@pytest.fixture(scope="module")
def lab05_series(can_have_hosts, lab05, root) -> dict[int, dict]:
    """Results of lab 05's batch script on three hosts of two NUMA domains, by rank count."""
    if (os.cpu_count() or 1) < 2:
        pytest.skip("a host of two NUMA domains needs two cores")
    options = ("--data", "images.pt", "--strong", 64, "--rounds", 1, "--steps", 1, "--table", 4)
    script = lab05 / "series.sh"
    script.write_text(slurm_script.series(3, 2, 1, *options))
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = environment_of_ranks() | TWO_DOMAINS | {"PYTHONPATH": os.pathsep.join(paths)}
    done = on_hosts(3, "bash", script, slots=2, timeout=450, env=env, cwd=lab05)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    print(done.stderr)
    return runs.series(lab05 / "results")


def test_lab_05s_series_fills_both_domains_of_a_host_before_the_next_one(lab05_series):
    hosts = {p: [rank["host"] for rank in r["ranks"]] for p, r in lab05_series.items()}
    # The third host is there to be left alone.
    four = ["node1", "node1", "node2", "node2"]
    assert hosts == {p: four[:p] for p in (1, 2, 4)}
    for p, result in lab05_series.items():
        assert [rank["cores"] for rank in result["ranks"]] == ([[0], [1]] * p)[:p]
        assert {rank["threads"] for rank in result["ranks"]} == {1}


def test_lab_05s_series_times_both_ways_and_several_hosts_pay_for_the_network(lab05_series):
    for p, result in lab05_series.items():
        assert [row["strategy"] for row in result["cases"]] == ["by hand", "DDP"]
        # 670 000 gradients, of which 2 (hosts - 1) / hosts leave each host, and 100 Mbit/s.
        hosts = -(-p // 2)
        least = 2 * (hosts - 1) / hosts * 4 * 670_000 * 8 / RATE
        for row in result["cases"]:
            assert row["step"][0] > least
        if hosts > 1:
            assert result["table"][0]["seconds"][0] > LATENCY


def test_lab_05s_plots_draw_the_series(lab05_series):
    figure, axes = plt.subplots()
    one = runs.rounds_of(lab05_series[1], "by hand", 64, what="compute")
    bands = {
        p: laws.speedup_band(one, runs.rounds_of(result, "DDP", 64))
        for p, result in lab05_series.items()
    }
    speedup.speedup(axes, {"DDP": bands}, limit=bands)
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "2", "4"]
    assert (
        0
        <= laws.fit_amdahl({
            p: runs.rounds_of(r, "by hand", 64) for p, r in lab05_series.items()
        }).serial
        <= 1
    )
    plt.close(figure)


# --- planning for sockets that are not here ----------------------------------------------------

TWO_SOCKETS = "pack:2 numa:1 l3:1 core:{cores} pu:2"


@functools.cache
def job_script():
    """The solution of task 5.6."""
    folder = Path(__file__).resolve().parents[2] / "solutions"
    for cell in nbformat.read(folder / "05_scaling.ipynb", as_version=4).cells:
        if cell.id == "slurm-answer":
            names: dict = {}
            exec(cell.source.partition("\n")[2], names)
            return names["job_script"]
    raise AssertionError("lab 05 has no cell slurm-answer")


def taught(nodes: int, cores: int) -> tuple[int, list[str]]:
    """Ranks, and mpiexec's options, in lab 05's job script for nodes of two sockets."""
    script = job_script()(nodes, 2, cores, "true").replace("\\\n", " ")
    (line,) = (line for line in script.splitlines() if line.startswith("mpiexec"))
    words = shlex.split(line)
    assert words[1] == "-n"
    return int(words[2]), words[3 : words.index("--report-bindings")]


@pytest.mark.parametrize("cores", [4, 24])
def test_the_taught_placement_fills_both_sockets_with_one_rank_each(cores):
    ranks, options = taught(1, cores)
    plan = runs.rehearse(TWO_SOCKETS.format(cores=cores), ranks, *options)
    if not plan:
        pytest.skip("this mpiexec is not Open MPI's")
    assert plan == {
        0: f"package[0][core:L0-{cores - 1}]",
        1: f"package[1][core:L{cores}-{2 * cores - 1}]",
    }


REHEARSAL = """
import json, sys
from utils.labs.lab05 import runs
print(json.dumps(runs.rehearse(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])))
"""


def test_the_taught_placement_fills_the_sockets_of_several_hosts(can_have_hosts, root):
    ranks, options = taught(2, 4)
    command = (sys.executable, "-c", REHEARSAL, TWO_SOCKETS.format(cores=4), ranks, *options)
    done = on_hosts(2, *command, slots=8, cwd=root, timeout=120)
    sockets = ["package[0][core:L0-3]", "package[1][core:L4-7]"]
    assert list(result_of(done).values()) == sockets * 2


# --- parts -------------------------------------------------------------------------------------


def test_the_switch_holds_a_packet_back_by_latency_and_size():
    switch = Switch([3, 4, 5], rate=8e6, latency=0.5)
    nbytes = 1_000_000 - FRAMING
    assert switch.arrival(10.0, 0, 1, nbytes) == pytest.approx(11.5)
    assert switch.arrival(10.0, 0, 2, nbytes) == pytest.approx(12.5)  # behind it, on the way up
    assert switch.arrival(10.0, 2, 1, nbytes) == pytest.approx(12.5)  # behind it, on the way down
    assert switch.arrival(10.0, 1, 0, nbytes) == pytest.approx(11.5)  # the other direction


class _World:
    stopped = False

    def __init__(self, one_machine: bool):
        self.one_machine = one_machine

    def incident(self) -> bool:
        return False


class _Message(wait_monitor.Waitable):
    """Comes at the 60th look."""

    call = SimpleNamespace(nbytes=0)
    looks = 0

    def poll(self) -> bool:
        self.looks += 1
        return self.looks > 60


@pytest.mark.parametrize(("one_machine", "longest"), [(True, 200e-6), (False, 20e-6)])
def test_a_wait_for_another_machine_does_not_oversleep_the_message(
    monkeypatch, one_machine, longest
):
    pauses = []
    monkeypatch.setattr(wait_monitor, "SPIN", 0.0)
    monkeypatch.setattr(wait_monitor, "_sleep", lambda pause, due: pauses.append(pause))
    wait_monitor.wait_for(_Message(), 60.0, _World(one_machine))
    assert max(pauses) == pytest.approx(longest)
