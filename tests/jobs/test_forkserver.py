"""A rank from the fork server is to a user what a process of its own would be; nothing is left."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from forkserver_tools import (
    PORTRAIT,
    is_gone,
    plain_command,
    portrait,
    server_of,
    stub_command,
    wait_until,
)
from mpi_jobs import find_mpiexec, mpi_environment

from utils.jobs.forkserver import client, stub

pytestmark = [
    pytest.mark.skipif(bool(client.unsupported()), reason=client.unsupported() or "supported"),
    pytest.mark.timeout(180),
]


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """Of jobs. Servers that start in it leave out PyTorch's compiler, which no test here needs."""
    return mpi_environment() | {client.LATER_VARIABLE: "never"}


@pytest.fixture(scope="module")
def lease(environment: dict[str, str]) -> Iterator[client.Lease]:
    found = client.lease(environment, find_mpiexec())
    yield found
    found.connection.close()


@pytest.fixture
def temporary_folder(monkeypatch) -> Iterator[Path]:
    """A temporary folder of the test's own; a short name, as sockets are to lie in it."""
    with tempfile.TemporaryDirectory(prefix="fs", dir="/tmp") as folder:
        monkeypatch.setattr("tempfile.tempdir", folder)
        yield Path(folder)


@pytest.fixture
def own_lease(environment, temporary_folder) -> Iterator[client.Lease]:
    """A server for this test alone."""
    found = client.lease(environment, find_mpiexec())
    yield found
    found.connection.close()
    wait_until(lambda: not found.path.exists(), "the server's end")


def settings(lease: client.Lease, environment: dict[str, str]) -> dict[str, str]:
    """The environment in which mpiexec starts ranks."""
    return environment | lease.settings


def both(lease, environment, *words, **options) -> tuple[dict, dict]:
    """The portraits of a program: forked, and as a process of its own."""
    env = settings(lease, environment) | options.pop("env", {})
    return tuple(
        portrait(command, env=env, **options)
        for command in (stub_command(lease, *words), plain_command(*words))
    )


def both_ended(lease, environment, *words, **options) -> list[subprocess.CompletedProcess]:
    """How a program ends: forked, and as a process of its own."""
    return [
        subprocess.run(
            command,
            env=settings(lease, environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            **options,
        )
        for command in (stub_command(lease, *words), plain_command(*words))
    ]


def differences(one: dict, other: dict) -> dict:
    return {
        name: (one.get(name), other.get(name))
        for name in one.keys() | other.keys()
        if one.get(name) != other.get(name)
    }


# --- nothing differs ---------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["script", "-c", "-m"])
def test_a_program_sees_what_it_would_see_as_an_ordinary_process(
    form, lease, environment, tmp_path
):
    (tmp_path / "portrait.py").write_text(PORTRAIT)
    words = {
        "script": ["portrait.py", "--lr", "0.1"],
        "-c": ["-c", PORTRAIT, "a"],
        "-m": ["-m", "portrait", "a b"],
    }[form]
    forked, plain = both(
        lease,
        environment,
        *words,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert "DDL_LABS_NOT_FORKED" not in forked["environment"], forked["environment"]
    assert differences(forked, plain) == {}


def test_umask_limits_signals_descriptors_and_priority_of_the_job_reach_the_rank(
    lease, environment, tmp_path
):
    text = tmp_path / "input.txt"
    text.write_text("first\nsecond\n")
    read_end, write_end = os.pipe()

    def as_a_job_would() -> None:
        os.umask(0o027)
        os.nice(3)
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})

    try:
        portraits = []
        for command in (stub_command(lease, "-c", PORTRAIT), plain_command("-c", PORTRAIT)):
            with text.open() as stdin:
                stdin.readline()
                portraits.append(
                    portrait(
                        command,
                        env=settings(lease, environment) | {"ODD": "\udcff", "TZ": "Asia/Tokyo"},
                        stdin=stdin,
                        pass_fds=[read_end],
                        preexec_fn=as_a_job_would,
                        start_new_session=True,
                    )
                )
    finally:
        os.close(read_end)
        os.close(write_end)
    assert "DDL_LABS_NOT_FORKED" not in portraits[0]["environment"]
    assert portraits[0]["status"]["Umask"] == "0027"
    assert str(read_end) in portraits[0]["descriptors"]
    assert differences(*portraits) == {}


@pytest.mark.extended
def test_thread_pools_have_the_size_that_the_job_requests(lease, environment):
    code = (
        "import json, torch, ctypes, numpy as np, os\n"
        "np.ones((64, 64)) @ np.ones((64, 64)); torch.ones(300, 300) @ torch.ones(300, 300)\n"
        "libs = {l.split()[-1] for l in open('/proc/self/maps') if 'openblas' in l}\n"
        "n = [ctypes.CDLL(l).scipy_openblas_get_num_threads64_() for l in sorted(libs)]\n"
        "assert 'DDL_LABS_NOT_FORKED' not in os.environ, os.environ['DDL_LABS_NOT_FORKED']\n"
        "print(json.dumps([torch.get_num_threads(), n]))"
    )
    for said in (
        {"OMP_NUM_THREADS": "2"},
        {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "2"},
        {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "2"},
    ):
        forked, plain = both(lease, environment, "-c", code, env=said)
        assert forked == plain, said


@pytest.mark.extended
def test_pytorch_checks_as_much_as_the_job_requests(lease, environment):
    code = (
        "import json, os, torch.distributed as dist\n"
        "print(json.dumps([str(dist.get_debug_level()), 'DDL_LABS_NOT_FORKED' in os.environ]))"
    )
    for level in ("OFF", "INFO", "DETAIL"):
        said = {"TORCH_DISTRIBUTED_DEBUG": level}
        forked, plain = both(lease, environment, "-c", code, env=said)
        assert forked == [f"DebugLevel.{level}", False]
        assert plain[0] == forked[0]


def test_two_ranks_that_set_no_seed_have_different_random_numbers(lease, environment):
    code = (
        "import json, os, random, uuid, tempfile, numpy, torch\n"
        "assert 'DDL_LABS_NOT_FORKED' not in os.environ\n"
        "print(json.dumps([random.random(), numpy.random.rand(), str(uuid.uuid4()),\n"
        "  next(tempfile._get_candidate_names()), torch.rand(1).item()]))"
    )
    env = settings(lease, environment)
    first, second = (portrait(stub_command(lease, "-c", code), env=env) for _ in range(2))
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_a_tracebacks_text_shows_only_the_program(lease, environment, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("def f():\n    return 1 / 0\nf()\n")
    texts = both_ended(lease, environment, script)
    assert texts[0].stderr == texts[1].stderr
    assert "ZeroDivisionError" in texts[0].stderr
    assert [done.returncode for done in texts] == [1, 1]


ENDS = {
    "falls off the end": "print('x')",
    "sys.exit(3)": "import sys; sys.exit(3)",
    "sys.exit(text)": "import sys; sys.exit('what went wrong')",
    "os._exit(7)": "import os; os._exit(7)",
    "an error": "raise ValueError('mine')",
    "atexit": "import atexit, threading\natexit.register(print, 'last')\n"
    "threading.Thread(target=print, args=('thread',)).start()",
    "kill -9": "import os; os.kill(os.getpid(), 9)",
    "a segmentation fault": "import ctypes; ctypes.string_at(0)",
    "abort": "import os; os.abort()",
    "KeyboardInterrupt": "import atexit; atexit.register(print, 'bye'); raise KeyboardInterrupt",
    "a destructor": "class A:\n    def __del__(self):\n        print('end')\na = A(); b = [a]",
    "a destructor in a cycle": "class A:\n    def __del__(self):\n        print('gone')\n"
    "a = A(); a.me = a",
    "sys.exit(True) in a thread": "import threading, sys\n"
    "t = threading.Thread(target=sys.exit, args=(5,)); t.start(); t.join()",
    "sys.exit(300)": "import sys; sys.exit(300)",
    "sys.exit(-1)": "import sys; sys.exit(-1)",
    "output of C": "import ctypes; ctypes.CDLL(None).printf(b'from C, no line end')",
    "a daemon thread": "import threading, time\n"
    "threading.Thread(target=time.sleep, args=(99,), daemon=True).start(); print('end')",
    "unflushed output": "import sys; sys.stdout.write('no line end')",
    "no such module": "import nothing_of_this_name",
}


@pytest.mark.parametrize("code", ENDS.values(), ids=ENDS)
def test_exit_status_signal_and_last_words_come_from_the_rank(code, lease, environment):
    ended = both_ended(lease, environment, "-c", code)
    seen = [(done.returncode, done.stdout, done.stderr) for done in ended]
    assert seen[0] == seen[1]


def test_a_script_that_is_not_there_gives_pythons_own_error(lease, environment, tmp_path):
    for words in (["no.py"], ["-m", "no_such_module"], ["-X", "dev", "-c", "print(1)"]):
        told = both_ended(lease, environment, *words, cwd=tmp_path)
        assert told[0].returncode == told[1].returncode
        assert told[0].stderr == told[1].stderr
        assert told[0].stdout == told[1].stdout


def test_a_segmentation_fault_is_reported_by_mpiexec_with_rank_and_signal(mpiexec):
    code = (
        "from mpi4py import MPI\nimport ctypes, os\n"
        "assert 'DDL_LABS_NOT_FORKED' not in os.environ, os.environ['DDL_LABS_NOT_FORKED']\n"
        "MPI.COMM_WORLD.Barrier()\n"
        "if MPI.COMM_WORLD.rank == 1:\n    ctypes.string_at(0)\n"
        "MPI.COMM_WORLD.Barrier()"
    )
    done = mpiexec(2, code, check=False)
    assert done.returncode != 0
    assert "rank 1" in done.stderr
    assert "signal 11" in done.stderr


# --- signals -------------------------------------------------------------------------------------

SLEEPER = (
    "import os, signal, sys, time\n"
    "for n in (signal.SIGUSR1, signal.SIGUSR2):\n"
    "    signal.signal(n, lambda n, f: print('got', n, flush=True))\n"
    "print(os.getpid(), os.getppid(), flush=True)\n"
    "while True:\n    time.sleep(0.1)"
)


@pytest.fixture
def sleeper(lease, environment) -> Iterator[tuple[subprocess.Popen, int, int]]:
    """A rank that sleeps: its stub, its own process id, its keeper's."""
    yield from sleeping(lease, environment)


def sleeping(lease, environment):
    process = subprocess.Popen(
        stub_command(lease, "-c", SLEEPER),
        env=settings(lease, environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    rank, keeper = map(int, process.stdout.readline().split())
    assert rank != process.pid
    yield process, rank, keeper
    process.kill()
    process.communicate(timeout=30)
    wait_until(lambda: is_gone(rank) and is_gone(keeper), "the end of rank and keeper")


def test_signals_to_the_stub_reach_the_rank(sleeper):
    process, _, _ = sleeper
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        process.send_signal(number)
        assert process.stdout.readline() == f"got {int(number)}\n"


def test_ctrl_c_raises_keyboard_interrupt_in_the_rank(sleeper):
    process, rank, _ = sleeper
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert process.returncode == -signal.SIGINT
    assert is_gone(rank)


def test_a_rank_is_alone_in_its_process_group(sleeper):
    _, rank, keeper = sleeper
    assert os.getpgid(rank) == rank != os.getpgid(keeper)


def test_the_system_shows_the_environment_and_the_command_of_the_rank(lease, environment):
    marked = environment | {"DDL_LABS_RANKS": "kernel-x-1"}
    for _, rank, _ in sleeping(lease, marked):
        process = psutil.Process(rank)
        assert process.environ()["DDL_LABS_RANKS"] == "kernel-x-1"
        assert process.cmdline()[1] == "-c"
        assert "forkserver" not in " ".join(process.cmdline())


# --- kill -9, one after the other ----------------------------------------------------------------


def test_when_the_stub_is_killed_the_rank_ends(sleeper):
    process, rank, keeper = sleeper
    process.kill()
    wait_until(lambda: is_gone(rank) and is_gone(keeper), "the end of rank and keeper")


def test_when_the_keeper_is_killed_rank_and_stub_end(sleeper):
    process, rank, keeper = sleeper
    os.kill(keeper, signal.SIGKILL)
    wait_until(lambda: is_gone(rank), "the rank's end")
    assert process.wait(30) == -signal.SIGKILL


def test_when_the_rank_is_killed_the_stub_ends_by_the_same_signal(sleeper):
    process, rank, keeper = sleeper
    os.kill(rank, signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL
    wait_until(lambda: is_gone(keeper), "the keeper's end")


def test_when_the_server_is_killed_ranks_survive_and_the_next_lease_starts_a_new_server(
    own_lease, environment
):
    for process, rank, _ in sleeping(own_lease, environment):
        old = server_of(own_lease)
        old.kill()
        old.wait(30)
        process.send_signal(signal.SIGUSR1)
        assert process.stdout.readline() == f"got {int(signal.SIGUSR1)}\n"
        again = client.lease(environment, find_mpiexec())
        assert again.path == own_lease.path
        code = "import os; print(os.environ.get('DDL_LABS_NOT_FORKED'))"
        env = settings(again, environment)
        done = subprocess.run(
            stub_command(again, "-c", code), env=env, capture_output=True, text=True, check=True
        )
        assert done.stdout == "None\n"
        assert not is_gone(rank)
        again.connection.close()


def test_without_a_server_the_stub_becomes_the_program_and_says_why(environment, tmp_path):
    code = "import os; print(os.environ['DDL_LABS_NOT_FORKED'])"
    command = [sys.executable, "-I", "-S", stub.__file__, str(tmp_path / "none"), "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "did not answer" in done.stdout


def test_a_stub_that_lost_patience_runs_the_program_and_no_rank_is_forked_for_it(
    own_lease, environment, tmp_path
):
    server = server_of(own_lease)
    env = settings(own_lease, environment)
    assert portrait(stub_command(own_lease, "-c", "print(1)"), env=env) == 1
    server.suspend()
    try:
        code = "import sys; open(sys.argv[1], 'a').write('ran\\n'); print(2)"
        hasty = f"import runpy; ns = runpy.run_path({stub.__file__!r}); "
        hasty += "ns['main'].__globals__['PATIENCE'] = 0.2; "
        hasty += (
            f"ns['main']({str(own_lease.path)!r}, ['-c', {code!r}, {str(tmp_path / 'runs')!r}])"
        )
        assert portrait([sys.executable, "-I", "-S", "-c", hasty], env=env) == 2
    finally:
        server.resume()
    # What comes after it in the line is served after it.
    assert portrait(stub_command(own_lease, "-c", "print(3)"), env=env) == 3
    assert (tmp_path / "runs").read_text() == "ran\n"


def test_when_a_kernel_is_killed_its_server_ends_unless_another_kernel_uses_it(
    own_lease, environment, temporary_folder
):
    holder = (
        "import sys, tempfile; tempfile.tempdir = sys.argv[1]\n"
        "import os; from utils.jobs.forkserver import client\n"
        "lease = client.lease(dict(os.environ), sys.argv[2]); print('held', flush=True)\n"
        "sys.stdin.read()"
    )

    def kernel() -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-c", holder, str(temporary_folder), find_mpiexec()],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout.readline() == "held\n"
        return process

    server = server_of(own_lease)
    first, second = kernel(), kernel()
    for process in (first, second):
        process.kill()
        process.communicate()
    # This test holds a lease itself.
    assert portrait(stub_command(own_lease, "-c", "print(1)"), env=settings(own_lease, environment))
    assert not is_gone(server.pid)
    own_lease.connection.close()
    wait_until(lambda: is_gone(server.pid), "the server's end")
    assert not own_lease.path.exists()


def test_a_lease_that_was_given_back_leaves_the_server_for_the_next_start(own_lease, environment):
    server = server_of(own_lease)
    own_lease.close()
    again = client.lease(environment, find_mpiexec())
    assert server_of(again).pid == server.pid
    again.connection.close()
    wait_until(lambda: is_gone(server.pid), "the server's end")


def test_a_server_whose_folder_was_removed_ends(own_lease):
    server = server_of(own_lease)
    own_lease.close()
    shutil.rmtree(own_lease.path.parent)
    wait_until(lambda: is_gone(server.pid), "the server's end")


def test_the_server_that_make_lab_warms_ends_with_jupyterlab(environment, temporary_folder):
    """A shell stands for JupyterLab, whose child holds the lease."""
    warm = f"{sys.executable} -m utils.jobs.warm_up & exec sleep 999"
    env = environment | {"TMPDIR": str(temporary_folder)}
    lab = subprocess.Popen(["/bin/sh", "-c", warm], env=env, start_new_session=True)
    try:
        base = temporary_folder / f"ddl-labs-{os.getuid()}"
        wait_until(lambda: any(base.glob("fork-*/socket")), "a server")
    finally:
        lab.kill()
        lab.wait()
    wait_until(lambda: not any(base.glob("fork-*")), "the server's end")


# --- who gets what -------------------------------------------------------------------------------


def test_only_its_owner_can_talk_to_the_server(lease):
    folder = lease.path.parent
    for one in (folder, folder.parent):
        assert stat.S_IMODE(one.stat().st_mode) == 0o700
        assert one.stat().st_uid == os.getuid()


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root, to be another user")
def test_another_user_who_reaches_the_socket_is_refused(own_lease, temporary_folder):
    opened = [own_lease.path, own_lease.path.parent, own_lease.path.parents[1], temporary_folder]
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in opened}
    try:
        for path in opened:
            path.chmod(0o777)
        code = (
            "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])\n"
            "s.settimeout(30); print(s.recv(1))"
        )
        done = subprocess.run(
            ["/usr/bin/env", "python3", "-I", "-S", "-c", code, str(own_lease.path)],
            user=65534,
            group=65534,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if "Permission denied" in done.stderr and "python" in done.stderr:
            pytest.skip("no Python that another user can run")
        assert done.stdout == "b''\n" or "Connection reset" in done.stderr, done.stderr
    finally:
        for path, mode in modes.items():
            path.chmod(mode)


def test_nonsense_on_the_socket_does_not_stop_the_server(own_lease, environment):
    for words in (b"", b"\xff" * 8, b"\0" * 7 + b"\x05hello", b"x"):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(own_lease.path))
            connection.sendall(words)
    env = settings(own_lease, environment)
    code = "import json, os; print(json.dumps(os.environ.get('DDL_LABS_NOT_FORKED')))"
    assert portrait(stub_command(own_lease, "-c", code), env=env) is None


def test_the_server_has_one_thread_and_no_mpi_whatever_it_forked(lease, environment):
    env = settings(lease, environment)
    portrait(stub_command(lease, "-c", PORTRAIT), env=env)
    server = server_of(lease)
    assert len(os.listdir(f"/proc/{server.pid}/task")) == 1
    maps = Path(f"/proc/{server.pid}/maps").read_text(encoding="utf-8")
    assert "libmpi.so" not in maps
    assert "libcuda.so" not in maps


REASONS = {
    "the variable LD_LIBRARY_PATH differs": {"env": {"LD_LIBRARY_PATH": "/nowhere"}},
    "the variable PYTHONDEVMODE differs": {"env": {"PYTHONDEVMODE": "1"}},
    "OMP_NUM_THREADS is not set": {"env": {"OMP_NUM_THREADS": ""}},
    "threads is not a single number": {"env": {"OMP_NUM_THREADS": "2,2"}},
}


@pytest.mark.parametrize("reason", REASONS)
def test_a_rank_that_a_fork_can_not_become_is_an_ordinary_process_and_says_why(
    reason, lease, environment
):
    env = settings(lease, environment) | REASONS[reason]["env"]
    code = "import json, os; print(json.dumps(os.environ['DDL_LABS_NOT_FORKED']))"
    assert reason in portrait(stub_command(lease, "-c", code), env=env)


@pytest.mark.parametrize("name", ["utils.py", "numpy.py", "tqdm"])
def test_a_module_of_the_users_with_the_name_of_a_preloaded_one_is_imported(
    name, lease, environment, tmp_path
):
    stem = name.partition(".")[0]
    module = tmp_path / name
    if name == stem:
        module.mkdir()
        module /= "__init__.py"
    module.write_text("mine = 'mine'\n")
    script = tmp_path / "train.py"
    script.write_text(f"import json, {stem}; print(json.dumps({stem}.mine))")
    assert portrait(stub_command(lease, script), env=settings(lease, environment)) == "mine"


def test_a_changed_file_of_the_course_needs_a_new_server(environment, tmp_path, monkeypatch):
    before = client.key(environment, "mpiexec")
    assert client.key(environment, "mpiexec") == before
    assert client.key(environment, "/opt/mpi/bin/mpiexec") != before
    assert client.key(environment | {"LD_PRELOAD": "x.so"}, "mpiexec") != before
    assert client.key(environment | {"OMP_NUM_THREADS": "7"}, "mpiexec") == before
    (tmp_path / "new.py").write_text("")
    monkeypatch.setattr(client.torch_mpi, "__file__", str(tmp_path / "__init__.py"))
    assert client.key(environment, "mpiexec") != before


def test_the_user_and_the_system_can_turn_the_fork_server_off(environment, monkeypatch):
    assert client.why_not(environment) == ""
    assert "DDL_LABS_FORK_SERVER" in client.why_not(environment | {client.VARIABLE: "off"})
    client.unsupported.cache_clear()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "darwin" in client.why_not(environment)
    client.unsupported.cache_clear()


def test_a_server_that_nobody_uses_ends_itself(environment, temporary_folder, monkeypatch):
    """With the real process, and five minutes made short."""
    code = (
        "import sys; from utils.jobs.forkserver import server\n"
        "server.IDLE, server.PRELOADED, server.PRELOADED_LATER = 0.1, (), ()\nserver.main()"
    )
    monkeypatch.setattr(client, "SERVER", ("-c", code))
    lease = client.lease(environment, find_mpiexec())
    lease.close()
    wait_until(lambda: not lease.path.exists(), "the server's end")


def test_the_notebook_shows_whether_the_ranks_were_forked_and_why_not(monkeypatch):
    from utils import cluster

    with cluster.start(2) as ranks:
        assert "forked from a process" in repr(ranks.describe())
        command = cluster.Ranks.running(ranks)._python.command
        assert command[0] == sys.executable
    monkeypatch.setenv(client.VARIABLE, "off")
    with cluster.start(2) as ranks:
        said = repr(ranks.describe())
        assert "Each rank is a separate Python process: DDL_LABS_FORK_SERVER is off." in said


def test_the_ranks_of_a_notebook_are_in_its_folder_and_see_its_variables(tmp_path, monkeypatch):
    from utils import cluster

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OF_THE_NOTEBOOK", "yes")
    with cluster.start(2, env={"OF_THE_RANKS": "yes"}) as ranks:
        assert "forked from a process" in repr(ranks.describe())
        ranks.view.execute("import os", block=True)
        assert ranks.view["os.getcwd()"] == [str(tmp_path)] * 2
        seen = "os.environ['OF_THE_NOTEBOOK'] + os.environ['OF_THE_RANKS']"
        assert ranks.view[seen] == ["yesyes"] * 2


def test_an_error_of_the_server_is_in_its_log_and_the_rank_runs(
    environment, temporary_folder, monkeypatch
):
    monkeypatch.setattr(client, "SERVER", ("-c", "raise SystemExit('no memory')"))
    lease = client.lease(environment, find_mpiexec())
    code = "import json, os; print(json.dumps(os.environ['DDL_LABS_NOT_FORKED']))"
    reason = portrait(stub_command(lease, "-c", code), env=settings(lease, environment))
    assert "fork server" in reason
    assert "no memory" in (lease.path.parent / "log").read_text()
    assert "timed out" not in reason
    assert json.loads((lease.path.parent / client.SETTINGS).read_text()) == lease.settings
    lease.connection.close()
