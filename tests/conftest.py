"""Fixtures that all tests share: MPI runs with a deadline, and a watch over left-over processes."""

from __future__ import annotations

import compileall
import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import processor_time
import psutil
import pytest
import room_tests
import slurm_tools
from mpi_jobs import PYTHON_OF_RANKS, find_mpiexec, mpi_environment, run_ranks
from places import ROOT
from processes import (
    FORK_SERVER,
    RUN_VARIABLE,
    SESSION,
    SESSION_VARIABLE,
    environment_of,
    left_over,
)
from scheduling import LONGEST, QUICK, RANKS, Share, group_of, is_extended

from utils.jobs.forkserver import client

#: The clock of a run that has several processes for its tests.
CLOCK = pytest.StashKey[processor_time.ProcessorTime]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what `make test-room` and the budgets of processor time need."""
    group = parser.getgroup("course")
    group.addoption("--room", help="only the tests that a change in this room can break")
    group.addoption("--share", help="2/3: the second third of the tests that are shared out")
    group.addoption("--budget", choices=processor_time.BUDGETS, help="whose budget the run has")


def pytest_configure(config: pytest.Config) -> None:
    """Mark the session, so that every process it starts can be told from others'."""
    os.environ[SESSION_VARIABLE] = SESSION
    config.stash[PYTHON_OF_RANKS] = python_of_ranks  # for the backend's own tests, too
    if not is_worker(config):
        os.environ[RUN_VARIABLE] = SESSION
        # Students of the cluster, sandboxes and PYTHONDONTWRITEBYTECODE may not write it, and would
        # compile the course again in each of their processes, for half a second.
        compileall.compile_dir(ROOT / "utils", quiet=2)
        if config.getoption("numprocesses", None) and (clock := processor_time.begin()):
            config.stash[CLOCK] = clock
    # Processes of pytest-xdist ignore Ctrl-C, and what they start would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log) -> object | None:
    """For `--dist loadgroup`: by group_of, as pytest-xdist 3.8 finds no marks in pytest 9.2."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return ByGroup(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is quick or extended; begin with the groups that others would wait for."""
    for item in items:
        if item.path.stem in QUICK and not RANKS & set(item.fixturenames):
            item.add_marker(pytest.mark.quick)
        quick = item.get_closest_marker("quick") is not None
        if is_extended(item.path.stem, item.fixturenames, quick):
            item.add_marker(pytest.mark.extended)
    if room := config.getoption("room"):
        try:
            kept, others = room_tests.divided(items, room)
        except room_tests.UnknownRoomError as error:
            raise pytest.UsageError(str(error)) from None
        _keep(config, items, kept, others)
    if text := config.getoption("share"):
        try:
            share = Share.read(text)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None
        parts: tuple[list[pytest.Item], list[pytest.Item]] = ([], [])
        for item in items:
            parts[share.has(item.nodeid, item.get_closest_marker("rest") is not None)].append(item)
        _keep(config, items, parts[True], parts[False])
    order = {group: place for place, group in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(group_of(item.nodeid), len(order)))


def _keep(
    config: pytest.Config,
    items: list[pytest.Item],
    kept: list[pytest.Item],
    others: list[pytest.Item],
) -> None:
    """Run only some of the items, and count the others as deselected."""
    config.hook.pytest_deselected(items=others)
    items[:] = kept


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Let the processor time from now on count for this test."""
    processor_time.name_test(item.nodeid)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say who used the processor, and which tests `--reruns` gave another chance."""
    config = terminalreporter.config
    if clock := config.stash.get(CLOCK, None):
        clock.stop()
        terminalreporter.section("processor time: pytest, kernels, launchers, ranks")
        run = config.getoption("budget") or ""
        for line in processor_time.table(clock.by_test, run, clock.slowness):
            terminalreporter.line(line, yellow="ABOVE" in line)
        if path := os.environ.get("TIME_TABLE"):
            rows = (f"{seconds:.2f}\t{test}\n" for test, seconds in clock.by_test.most_common())
            Path(path).write_text("".join(rows), encoding="utf-8")
    if config.getoption("reruns", None):
        _tell_reruns(terminalreporter)


def _tell_reruns(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the tests that had another chance: on a quiet machine there are none."""
    again = terminalreporter.stats.get("rerun", [])
    terminalreporter.section(f"failed at first and run again: {len(again)}")
    for report in again:
        crash = getattr(report.longrepr, "reprcrash", None)
        why = crash.message.splitlines()[0] if crash else str(report.longrepr)[-200:]
        terminalreporter.line(f"{report.nodeid} ({report.when}): {why}")


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say which data and which mpiexec the tests use."""
    data = os.environ.get("FASHION_MNIST_ROOT")
    said = f"{data} (FASHION_MNIST_ROOT)" if data else "none given (FASHION_MNIST_ROOT is not set)"
    share = config.getoption("share")
    found = [f"Fashion-MNIST: {said}", f"mpiexec: {find_mpiexec() or 'none found'}"]
    return [*found, f"share {share} of answers, attacks and nbval alone"] if share else found


# --- MPI runs ---------------------------------------------------------------------------------


@functools.cache
def fork_server(launcher: str | None) -> client.Lease | None:
    """The lease of this session on the fork server; None where there can be none."""
    if launcher is None or client.why_not(os.environ):
        return None
    return client.lease(mpi_environment(), launcher)


def python_of_ranks(launcher: str) -> list[str]:
    """What stands for `python` below mpiexec: ranks that have PyTorch imported already."""
    lease = fork_server(launcher)
    return lease.python if lease else [sys.executable]


def is_worker(config: pytest.Config) -> bool:
    """Is this a process of pytest-xdist that runs tests, beside others?"""
    return hasattr(config, "workerinput")


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the fork servers of all tests, once no process runs tests any more."""
    if is_worker(config):
        return
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            ours = environment_of(process).get(RUN_VARIABLE) == SESSION
            if ours and FORK_SERVER in process.cmdline():
                process.terminate()


@pytest.fixture(scope="session")
def mpiexec() -> Callable[..., subprocess.CompletedProcess]:
    """`mpiexec(n, code_or_path, *args, timeout=180, check=True, env=None, cwd=None)`.

    Runs Python on `n` ranks. Returns a CompletedProcess with `stdout` and `stderr` as text;
    asserts exit status 0 unless `check=False`. At the deadline every rank is killed and the
    test fails with what they had printed. `env` adds variables (None as a value removes one).
    """
    launcher = find_mpiexec()
    if launcher is None:
        pytest.skip("no mpiexec: install the extra `mpi`, or a system MPI")

    def run(n: int, code: str | os.PathLike, *args: object, **options):
        return run_ranks(launcher, python_of_ranks(launcher), n, code, *args, **options)

    return run


# --- a Slurm cluster ----------------------------------------------------------------------------


@pytest.fixture(scope="session")
def slurm_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm_tools.Cluster]:
    """Slurm with two nodes, and the environment that hpc/install.sh makes: one for all tests.

    Each test leaves it without jobs and without students' processes.
    """
    env = slurm_tools.needed()
    state = tmp_path_factory.mktemp("slurm")
    state.chmod(0o755)
    with slurm_tools.cluster(state, env) as up:
        yield up


# --- nothing stays behind ---------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_figure_left_open() -> Iterator[None]:
    """Close what a test has drawn: no test depends on the pictures of another."""
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


@pytest.fixture(autouse=True)
def no_tries_at_the_ward() -> Iterator[None]:
    """Forget the tries at findings of lab 18, after which a check would pause."""
    yield
    if tries := sys.modules.get("utils.labs.lab18.ward.tries"):
        tries.TRIES.clear()


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail at the end of the session when a rank, a controller or a launcher still runs."""
    if any(item.get_closest_marker("quick") is None for item in request.session.items):
        # Kernels are killed all the time: without this lease the server would go with each.
        fork_server(find_mpiexec())
    yield
    deadline = time.monotonic() + 5
    while (stragglers := left_over()) and time.monotonic() < deadline:
        time.sleep(0.2)
    lines = []
    for process in stragglers:
        with contextlib.suppress(psutil.Error):
            lines.append(f"  {process.pid}: {' '.join(process.cmdline())[:150]}")
        with contextlib.suppress(psutil.Error):
            process.kill()
    assert not lines, "the tests left processes behind (ended now):\n" + "\n".join(lines)


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root folder."""
    return ROOT


# --- a small lab to grade ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def course(tmp_path_factory) -> Path:
    """A folder with solutions/ and checks/ of the toy lab."""
    import grading_tools as toy

    folder = tmp_path_factory.mktemp("course")
    toy.make_course(folder)
    return folder


@pytest.fixture(scope="module")
def reference(course: Path):
    """The toy lab, as grading sees it."""
    import grading_tools as toy

    from utils.grading.reference import Reference

    return Reference(course / "solutions" / f"{toy.LAB}.ipynb")


@pytest.fixture(scope="module")
def chromium():
    """A browser of the system's."""
    playwright = pytest.importorskip("playwright.sync_api")
    from browser_tools import CHROMIUM, CHROMIUM_ARGS

    if CHROMIUM is None:
        pytest.skip("no Chromium")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_ARGS)
        yield browser
        browser.close()
