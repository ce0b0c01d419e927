"""How far forecasts can be trusted: they are compared with what the same programs take.

    python tests/forecast/trust.py [--output table.md] [--without-hosts]

Each scheme of `schemes.py` runs on several networks and with several numbers of ranks. A forecast
from each recorded run is compared with each other measurement. The script needs about 8 minutes.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
if __name__ == "__main__":
    sys.path += [str(ROOT / "utils/mpi/tests"), str(ROOT / "tests/jobs")]

import hosts_tools  # noqa: E402
from mpi_jobs import find_mpiexec, run_ranks  # noqa: E402

from utils.forecast import ForecastError, Machine, Run, flat, forecast  # noqa: E402
from utils.jobs.start_plan import Plan  # noqa: E402

PROGRAM = HERE / "schemes.py"
OWN, QUICK, SLOW, HOSTS = "own", "1e-3:40e6", "4e-3:20e6", "hosts"
#: The schemes in which one of several groups grows.
MESHES = ("mesh", "pipeline_and_data")
ALIKE = (
    *("parameters", "ddp", "elastic", "tensor_parallel", "experts", "zero", "zero_mixed", "fsdp"),
    *("federated", "checkpoint", "all_to_all_attention"),
)
MESSAGES = ("ring", "server", "hogwild", "gpipe", "one_f_one_b", "ring_attention")
ON_HOSTS = ("parameters", "ddp", "zero", "mesh", "gpipe", "server", "federated")
# Each TCP segment of 1,448 bytes is a packet of 1,538 bytes on the link.
PAYLOAD = 1448 / 1538

#: Starts a Python program on so many ranks: `start(ranks, program, *arguments, timeout=seconds)`.
Start = Callable[..., subprocess.CompletedProcess]


@dataclass(frozen=True)
class Measured:
    """A scheme that ran.

    Attributes:
        scheme, ranks, network: what ran, and where.
        steps: of the program.
        seconds: of a step, without the disturbances by other programs.
        run: the recording.
        load: share of the cores that the ranks used.
    """

    scheme: str
    ranks: int
    network: str
    steps: int
    seconds: float
    run: Run
    load: float


@dataclass(frozen=True)
class Row:
    """A comparison of a forecast with a measurement.

    Attributes:
        recorded, measured: the runs.
        predicted: seconds of a step, with the library's algorithms.
        usual: the same with the fastest algorithms, if nobody names the library.
        expected: the relative error that the forecast expects.
    """

    recorded: Measured
    measured: Measured
    predicted: float
    usual: float
    expected: float

    @property
    def kind(self) -> str:
        """Return what makes the forecast difficult."""
        where = "hosts" if self.measured.network == HOSTS else "emulated"
        if self.recorded.ranks != self.measured.ranks:
            return f"growth, {where}"
        return f"{'messages' if self.recorded.scheme in MESSAGES else 'replay'}, {where}"

    @property
    def error(self) -> float:
        """Return the relative error; it is positive if the forecast is too slow."""
        return self.predicted / self.measured.seconds - 1

    @property
    def usual_error(self) -> float:
        """Return the relative error of the forecast with the fastest algorithms."""
        return self.usual / self.measured.seconds - 1

    @property
    def in_band(self) -> bool:
        """Return whether the measured time is in the expected range."""
        return (
            1 / (1 + self.expected) <= self.predicted / self.measured.seconds <= 1 + self.expected
        )


def to(network: str) -> Machine:
    """Return the network as a machine."""
    if network == HOSTS:
        hosts = flat(hosts_tools.LATENCY, hosts_tools.RATE / 8 * PAYLOAD)
        return replace(hosts, library="open mpi")
    latency, bandwidth = map(float, network.split(":"))
    return flat(latency, bandwidth)


def measure(
    start: Start,
    ranks: int,
    networks: Iterable[str],
    schemes: Iterable[str],
    *,
    steps: int = 5,
    rounds: int = 3,
    timeout: float = 240,
) -> list[Measured]:
    """Run schemes with some ranks on each of the networks."""
    with tempfile.TemporaryDirectory() as name:
        words = ("--networks", *networks, "--schemes", *schemes)
        start(ranks, PROGRAM, name, *words, "--steps", steps, "--rounds", rounds, timeout=timeout)
        found = json.loads((Path(name) / f"results-{ranks}.json").read_text())
        return [
            Measured(
                one["scheme"],
                ranks,
                one["network"],
                one["steps"],
                min(one["rounds"]),
                Run.load(Path(name) / one["run"]),
                one["load"],
            )
            for one in found
        ]


def on_hosts(ranks: int, program: Path, *arguments: object, timeout: float) -> object:
    """Start a program on as many hosts as ranks, as `measure` needs it."""
    command = ("mpiexec", "-n", ranks, "--bind-to", "none", sys.executable, program, *arguments)
    environment = Plan(2, bind=False, launcher="mpiexec").environment | {"PYTHONPATH": str(ROOT)}
    done = hosts_tools.on_hosts(ranks, *command, timeout=timeout, env=environment)
    if done.returncode:
        raise RuntimeError(f"{ranks} hosts failed:\n{done.stdout}\n{done.stderr}")
    return done


def measure_on_hosts(hosts: int, schemes: Iterable[str], **options: int) -> list[Measured]:
    """Run schemes on real hosts, with a rank on each."""
    found = measure(on_hosts, hosts, [OWN], schemes, **options)
    return [replace(one, network=HOSTS) for one in found]


def compare(recorded: Measured, measured: Measured) -> Row:
    """Forecast a measurement from a recorded run.

    Raises:
        ForecastError: there is no forecast.
    """
    grow = None
    if recorded.ranks != measured.ranks:
        columns = recorded.scheme in MESHES
        grow = tuple(range(0, recorded.ranks, 2)) if columns else None

    def told(machine: Machine) -> tuple[float, float]:
        made = forecast(
            recorded.run,
            machine,
            measured.ranks,
            grow=grow,
            strong=recorded.scheme == "tensor_parallel",
        )
        # The forecast may count the program's steps differently.
        return made.seconds * recorded.run.steps / recorded.steps, made.error

    there = to(measured.network)
    predicted, expected = told(there)
    return Row(recorded, measured, predicted, told(replace(there, library=""))[0], expected)


def rows(found: list[Measured]) -> tuple[list[Row], list[str]]:
    """Return all comparisons that make sense, and the refusals of forecasts."""
    made, refused = [], []
    for measured in found:
        for recorded in found:
            if recorded.scheme != measured.scheme or measured.network == OWN:
                continue
            same = recorded.ranks == measured.ranks
            grows = recorded.ranks < measured.ranks
            if not (grows or (same and recorded.network != measured.network)):
                continue
            if grows and recorded.network not in (OWN, measured.network):
                continue
            if HOSTS == recorded.network != measured.network:
                continue
            try:
                made.append(compare(recorded, measured))
            except ForecastError as error:
                refused.append(
                    f"{recorded.scheme}, {recorded.ranks} → {measured.ranks} ranks: {error}"
                )
    return made, refused


def all_rows(start: Start, hosts: bool) -> tuple[list[Row], list[str]]:
    """Measure everything."""
    found = measure(start, 2, [OWN, QUICK, SLOW], (*ALIKE, *MESSAGES))
    found += measure(start, 4, [OWN, QUICK, SLOW], (*ALIKE, *MESHES, *MESSAGES))
    found += measure(start, 8, [SLOW], (*ALIKE, *MESHES))
    found += measure(start, 16, [SLOW], (*ALIKE, *MESHES), steps=4, rounds=2)
    if hosts:
        two = [name for name in ON_HOSTS if name not in MESHES]
        found += measure_on_hosts(2, two, steps=4, rounds=2)
        found += measure_on_hosts(4, ON_HOSTS, steps=4, rounds=2)
    return rows(found)


def table(made: list[Row]) -> str:
    """Return all comparisons as a table in Markdown."""
    lines = [
        "| scheme | kind | recorded | ranks | network | measured | forecast | error | usual "
        "| load |",
        "|---|---|---|--:|---|--:|--:|--:|--:|--:|",
    ]
    for row in sorted(made, key=lambda row: (row.kind, row.measured.scheme, row.measured.ranks)):
        recorded, measured = row.recorded, row.measured
        lines.append(
            f"| {measured.scheme} | {row.kind} | {recorded.ranks} on {recorded.network} "
            f"| {measured.ranks} | {measured.network} | {measured.seconds * 1e3:.1f} ms "
            f"| {row.predicted * 1e3:.1f} ms | {row.error:+.1%} | {row.usual_error:+.1%} "
            f"| {measured.load:.0%} |"
        )
    return "\n".join(lines)


def summary(made: list[Row]) -> str:
    """Return the median and the worst error of each kind as a table in Markdown."""
    lines = [
        "| kind | rows | median | 80 % below | worst | in the band | usual median | usual worst |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for kind in [*sorted({row.kind for row in made}), ""]:
        some = [row for row in made if kind in ("", row.kind)]
        off = sorted(abs(row.error) for row in some)
        usual = [abs(row.usual_error) for row in some]
        lines.append(
            f"| {kind or 'all'} | {len(some)} | {statistics.median(off):.1%} "
            f"| {off[int(0.8 * (len(off) - 1))]:.1%} | {off[-1]:.1%} "
            f"| {statistics.mean(row.in_band for row in some):.0%} "
            f"| {statistics.median(usual):.1%} | {max(usual):.1%} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="a file for the tables")
    parser.add_argument("--without-hosts", action="store_true")
    options = parser.parse_args()
    reason = "" if options.without_hosts else hosts_tools.reason_against()
    if reason:
        print(f"no hosts: {reason}", file=sys.stderr)
    start = functools.partial(run_ranks, find_mpiexec(), [sys.executable])
    made, refused = all_rows(start, not options.without_hosts and not reason)
    text = "\n\n".join([table(made), summary(made), *sorted(set(refused))])
    print(text)
    if options.output:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
