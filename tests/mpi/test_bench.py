"""`ddl-labs bench`: every promised number, once; clear errors; nothing left running."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys

import psutil
import pytest
from mpi_jobs import run_tree
from processes import RANK_VARIABLES

from utils.__main__ import main
from utils.mpi.benchmark import KI, MI, OPERATIONS, TRANSPORTS
from utils.mpi.benchmark.tables import complete, duration, remarks, size, text

DEADLINE = 400  # of a run that takes 15 s where nobody else works
pytestmark = pytest.mark.timeout(DEADLINE + 30)
COMMAND = [sys.executable, "-m", "utils", "bench"]
QUICK_SIZES = (4, KI, 64 * KI, MI, 4 * MI)
RATIOS = ("mpi/mpi4py", "gloo/mpi")


def shell_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}


def bench(*options: object, cwd, check: bool = True) -> subprocess.CompletedProcess:
    """Run the command from a plain shell."""
    command = [*COMMAND, *map(str, options)]
    done = run_tree(command, timeout=DEADLINE, env=shell_environment(), cwd=cwd)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="module")
def quick(folder) -> subprocess.CompletedProcess:
    """All of it at 2 ranks; the file by a relative name, as a user gives it."""
    return bench("--quick", "--json", "found.json", cwd=folder)


@pytest.fixture(scope="module")
def found(quick, folder) -> dict:
    return json.loads((folder / "found.json").read_text())


def numbers(value) -> list[float]:
    """Every number in a JSON value."""
    if isinstance(value, dict):
        return [n for inner in value.values() for n in numbers(inner)]
    if isinstance(value, list):
        return [n for inner in value for n in numbers(inner)]
    return [value] if isinstance(value, int | float) else []


# --- a run at 2 ranks --------------------------------------------------------------------------


def test_every_operation_size_and_transport_is_in_the_json_with_its_rounds(found):
    measured = [(row["name"], row["bytes"]) for row in found["operations"]]
    assert measured == [(name, nbytes) for name in OPERATIONS for nbytes in QUICK_SIZES]
    for row in found["operations"]:
        assert set(row["seconds"]) == set(row["rounds"]) == set(TRANSPORTS)
        assert {len(times) for times in row["rounds"].values()} == {found["rounds"]}
        assert min(row["seconds"].values()) > 0
        assert min(row["repetitions"].values()) >= 2
        assert row["mpi/mpi4py"] == row["seconds"]["mpi"] / row["seconds"]["mpi4py"]
        assert row["gloo/mpi"] == row["seconds"]["gloo"] / row["seconds"]["mpi"]


def test_every_fit_has_latency_bandwidth_and_error(found):
    fitted = {(fit["operation"], fit["transport"], fit["regime"]) for fit in found["fits"]}
    assert {(name, where) for name, where, _ in fitted} == {
        (name, where) for name in OPERATIONS for where in TRANSPORTS
    }
    for fit in found["fits"]:
        assert fit["alpha"] >= 0
        assert fit["beta"] >= 0
        assert 0 <= fit["error"] <= fit["max_error"]
        assert fit["bandwidth"] is None or fit["bandwidth"] > 0


def test_no_number_in_the_json_is_infinite_or_nan(found):
    assert all(map(math.isfinite, numbers(found)))


def test_the_machine_is_named_so_that_two_results_can_be_compared(found):
    (host,) = found["hosts"]
    assert (found["ranks"], found["threads"], host["ranks"]) == (2, 1, 2)
    assert host["name"]
    assert host["cpus"] >= 1
    assert found["versions"].keys() >= {"python", "torch", "mpi4py", "mpi"}


def test_each_table_is_printed_once_and_not_by_every_rank(quick):
    lines = quick.stdout.splitlines()
    assert lines[0].startswith("2 ranks on ")
    assert "load average" in lines[0]
    for name in OPERATIONS:
        assert sum(line.split()[:2] == [name, "mpi"] for line in lines) == 1
    for begin in ("2 ranks on", "α + n·β", "mpi is slower than gloo:"):
        assert sum(line.startswith(begin) for line in lines) == 1
    assert max(map(len, lines[4:-3])) <= 110, "the tables fit a terminal"


def test_the_table_has_the_numbers_of_the_json(quick, found):
    first = found["operations"][0]
    (line, *_) = re.findall(r"^4 B .*$", quick.stdout, re.MULTILINE)
    assert [duration(first["seconds"][name]) for name in TRANSPORTS] == re.findall(
        r"[\d.]+ \w?s", line
    )
    assert line.split()[-2:] == [f"{first[ratio]:.2f}" for ratio in RATIOS]


# --- other ways to run -------------------------------------------------------------------------


def test_three_ranks_on_fewer_cores_finish_and_are_warned(folder):
    done = bench(
        *("-n", 3, "--quick", "--rounds", 1, "--sizes", "4,1M"),
        *("--json", folder / "three.json"),
        cwd=folder,
    )
    three = json.loads((folder / "three.json").read_text())
    assert done.stdout.startswith("3 ranks on ")
    assert {len(row["seconds"]) for row in three["operations"]} == {3}
    assert all(map(math.isfinite, numbers(three)))
    if three["hosts"][0]["cpus"] < 3:
        assert "Warning: 3 ranks share" in done.stdout


def test_under_mpiexec_the_ranks_that_exist_are_used(mpiexec, folder):
    done = mpiexec(
        2, "from utils.__main__ import main; import sys; sys.exit(main(sys.argv[1:]))",
        *("bench", "--quick", "--rounds", 1, "--sizes", "4,1K", "--only", "ping_pong"),
        timeout=DEADLINE, cwd=folder,
    )  # fmt: skip
    assert done.stdout.count("2 ranks on ") == 1
    assert done.stdout.count("ping_pong  ") == 1


def test_a_transport_that_computes_nothing_is_not_praised_as_fast(mpiexec):
    done = mpiexec(
        2,
        "import torch.distributed as dist\n"
        "dist.all_reduce = lambda tensor, group: None\n"
        "from utils.__main__ import main\n"
        "main(['bench', '--quick', '--only=all_reduce', '--sizes=4'])",
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode
    assert "all_reduce on mpi: rank 0 got wrong values" in done.stderr
    assert "mpi/mpi4py" not in done.stdout


def test_a_run_past_its_deadline_ends_and_says_where_it_was(folder):
    done = bench("--deadline", 1, "--only=all_reduce", cwd=folder, check=False)
    assert done.returncode
    assert "Timeout (0:00:01)!" in done.stderr
    assert "measurement.py" in done.stderr


def test_ending_the_command_ends_its_ranks(folder):
    process = subprocess.Popen(
        [*COMMAND, "--only=all_reduce"], cwd=folder, env=shell_environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert process.stdout.readline().startswith("2 ranks on ")
        ranks = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
        assert len(ranks) >= 3
        assert not psutil.wait_procs(ranks, timeout=10)[1]
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        process.wait(30)
        process.stdout.close()


# --- options -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--sizes", "4,five"], "'five' is not a size such as 4, 16K or 64MiB"),
        (["--sizes", "6"], "is not a multiple of 4 bytes"),
        (["--sizes", "0"], "is not a multiple of 4 bytes"),
        (["--sizes", ""], "'' is not a size"),
        (["--rounds", "0"], "'0' is not a whole number of at least 1"),
        (["-n", "two"], "'two' is not a whole number"),
        (["--only", "allreduce"], "'allreduce' is not one of all_reduce, broadcast"),
        (["--json", "no/such/folder/x.json"], "is not a file that you can write"),
        (["--deadline", "-1"], "'-1' is not a whole number"),
    ],
)
def test_a_bad_option_is_refused_with_the_reason_before_anything_is_measured(options, said, capsys):
    with pytest.raises(SystemExit) as status:
        main(["bench", *options])
    assert status.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["-n", "1"], "one rank has no partner to talk to"),
        (["-n", "1000"], "at most 64 ranks"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, said, capsys, monkeypatch):
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert main(["bench", *options]) == 2
    assert said in capsys.readouterr().err


# --- report ------------------------------------------------------------------------------------


def row(name: str, nbytes: int, mpi: float, mpi4py: float, gloo: float) -> dict:
    seconds = {"mpi": mpi, "mpi4py": mpi4py, "gloo": gloo}
    ratios = {"mpi/mpi4py": mpi / mpi4py, "gloo/mpi": gloo / mpi}
    return {"name": name, "bytes": nbytes, "seconds": seconds, **ratios}


def test_every_size_where_mpi_does_badly_is_named_and_no_other():
    rows = [
        row("all_reduce", 4, 9e-6, 3e-6, 50e-6),  # 6 µs over
        row("all_reduce", 1024, 90e-6, 3e-6, 50e-6),  # slower than gloo
        row("all_reduce", 2**20, 1.04e-3, 1e-3, 2e-3),  # 4 %
        row("broadcast", 4, 7e-6, 3e-6, 50e-6),  # 4 µs over
        row("broadcast", 2**22, 1.1e-3, 1e-3, 1e-3),  # 10 %, slower than gloo
    ]
    slower, large, small = remarks(rows)
    assert slower == "mpi is slower than gloo: all_reduce 1 KiB; broadcast 4 MiB"
    assert large.endswith("from 1 MiB: broadcast 4 MiB")
    assert small.endswith("at 4 B: all_reduce 4 B")


def test_where_mpi_does_well_everywhere_it_says_nowhere():
    assert all(line.endswith(": nowhere") for line in remarks([row("x", 4, 2e-6, 2e-6, 9e-6)]))


def test_small_middle_and_large_messages_are_fitted_apart():
    sizes = [4**power for power in range(1, 14)]
    rows = [row("x", n, t := 1e-6 + n / (5e9 if n < 2**20 else 1e9), t, t) for n in sizes]
    found = {"operations": rows}
    complete(found)
    on_mpi = {fit["regime"]: fit for fit in found["fits"] if fit["transport"] == "mpi"}
    assert on_mpi["≤ 1 KiB"]["alpha"] == pytest.approx(1e-6)
    assert on_mpi["1 KiB … 1 MiB"]["bandwidth"] == pytest.approx(5e9)
    assert on_mpi["≥ 1 MiB"]["bandwidth"] == pytest.approx(1e9)


def test_a_report_of_one_size_has_no_empty_table_of_fits():
    found = {"operations": [row("all_reduce", 4, 2e-6, 2e-6, 9e-6)], "rounds": 2}
    complete(found)
    assert text(found).count("---\n") == 1
    assert "α" not in text(found)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (3e-9, "0.00 µs"),
        (2.314e-6, "2.31 µs"),
        (0.04816, "48.2 ms"),
        (1.5, "1.50 s"),
        (123.4, "123 s"),
    ],
)
def test_times_have_three_digits_and_a_unit(seconds, said):
    assert duration(seconds) == said


def test_sizes_are_written_as_powers_of_two():
    assert [size(n) for n in (4, 1024, 2**26, 1500)] == ["4 B", "1 KiB", "64 MiB", "1500 B"]
