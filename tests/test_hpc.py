"""What an administrator is told about mistakes in hpc/, before a student meets them."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from urllib.parse import parse_qs, urlsplit

import pytest
from conftest import ROOT

HPC = ROOT / "hpc"
SITE = (HPC / "site.toml").read_text()

pytestmark = pytest.mark.timeout(120)


def module(name: str) -> ModuleType:
    """A file of hpc/, which is no package: the hub puts the folder on its path."""
    spec = importlib.util.spec_from_file_location(name, HPC / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[name] = loaded
    try:
        spec.loader.exec_module(loaded)
    finally:
        del sys.modules[name]
    return loaded


# --- site.toml -----------------------------------------------------------------------------------


def test_the_settings_that_come_with_the_course_can_be_used_as_they_are():
    site = module("settings").read(HPC / "site.toml")
    assert [profile.name for profile in site.profiles] == ["small", "ranks4"]
    assert site.prefix.startswith("/")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[hub]", "[hubb]", "no section [hub]"),
        (
            "start_timeout = 300",
            'start_timeout = "300"',
            "start_timeout = '300' must be of type int",
        ),
        ("allow_all = true", "", "'allow_all' is missing"),
        ("allow_all = true", "allow_al = true\nallow_all = true", "'allow_al' is unknown"),
        ('name = "small"', 'name = "ranks4"', "profiles need names, each another one"),
        ('name = "small"', 'name = "a b"', "profile name 'a b'"),
        ('"--cpus-per-task=1"', '"-c1"', "option '-c1' must be one of sbatch's"),
        ("[hub]", "[hub", "is not valid TOML"),
        ('data = ""', 'data = "fashion"', "data = 'fashion' must be an absolute path"),
        ("options = []", 'options = ["-A x"]', "section [slurm]: option '-A x' must be one of"),
    ],
)
def test_a_mistake_in_the_settings_is_named_with_its_place(tmp_path, old, new, said):
    assert old in SITE
    wrong = tmp_path / "site.toml"
    wrong.write_text(SITE.replace(old, new, 1))
    settings = module("settings")
    with pytest.raises(settings.SettingsError) as error:
        settings.read(wrong)
    assert said in str(error.value)
    assert str(wrong) in str(error.value)


def test_settings_that_are_not_there_are_said_to_be_missing(tmp_path):
    settings = module("settings")
    with pytest.raises(settings.SettingsError, match="cannot read the site's settings"):
        settings.read(tmp_path / "nowhere.toml")


# --- the queue -----------------------------------------------------------------------------------

# Stands in for squeue: writes down each call, and knows 100 jobs.
SQUEUE = """
echo call >>"$0"
[ ! -e "$0.down" ] || { echo "Unable to contact slurm controller" >&2; exit 1; }
for job in $(seq 100); do echo "$job|PENDING|Resources|N/A|"; done
"""


def counting_squeue(folder: Path) -> tuple[tuple[str, ...], Path]:
    calls = folder / "calls"
    calls.touch()
    return ("sh", "-c", SQUEUE, str(calls)), calls


def test_a_hundred_students_who_wait_together_cost_one_squeue_in_each_period(tmp_path):
    job_queue = module("job_queue")
    command, calls = counting_squeue(tmp_path)
    looks, period = 10, 0.5

    async def student(queue, number: int) -> None:
        for _ in range(looks):
            assert (await queue.job(str(number))).reason == "Resources"
            await asyncio.sleep(0.1)

    async def everyone() -> None:
        queue = job_queue.Queue(period=period, command=command)
        await asyncio.gather(*(student(queue, number) for number in range(1, 101)))

    start = time.monotonic()
    asyncio.run(everyone())
    seconds = time.monotonic() - start
    made = len(calls.read_text().splitlines())
    print(f"{100 * looks} looks of 100 students in {seconds:.1f} s: {made} calls of squeue")
    assert 2 <= made <= seconds / period + 1


def test_a_job_that_was_just_submitted_is_not_called_gone_by_an_older_answer(tmp_path):
    job_queue = module("job_queue")
    now = [100.0]
    command, calls = counting_squeue(tmp_path)

    async def look() -> None:
        queue = job_queue.Queue(period=0.2, command=command, clock=lambda: now[0])
        assert await queue.job("7") is not None
        now[0] += 0.1
        assert await queue.job("7") is not None
        assert await queue.job("7", since=now[0]) is not None

    asyncio.run(look())
    assert len(calls.read_text().splitlines()) == 2


def test_a_slurm_that_does_not_answer_is_asked_less_and_less_and_nobody_is_called_gone(tmp_path):
    job_queue = module("job_queue")
    now = [100.0]
    command, calls = counting_squeue(tmp_path)
    down = Path(f"{calls}.down")
    down.touch()

    async def look() -> None:
        queue = job_queue.Queue(period=2, command=command, clock=lambda: now[0])
        for _ in range(60):
            with pytest.raises(job_queue.NoAnswer, match="Unable to contact"):
                await queue.job("7")
            now[0] += 1
        down.unlink()
        now[0] += 60
        assert (await queue.job("7")).state == "PENDING"

    asyncio.run(look())
    # After 0, 2, 6, 14 and 30 s, and at the end.
    assert len(calls.read_text().splitlines()) == 6


# --- install.sh ----------------------------------------------------------------------------------


def install(*options: object, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", HPC / "install.sh", *map(str, options)],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "/usr/bin:/bin"} | variables,
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--prefx", "/opt/x"], "'--prefx' is not an option"),
        (["--prefix"], "--prefix wants a value"),
        (["--prefix", "opt/x"], "must be an absolute path"),
        (["--mpi", "mpich"], "must be 'wheel'"),
        (["--torch", "CPU wheel"], "torch 'CPU wheel' must be a name of PyTorch's index"),
        (["--python", "/nowhere/python3"], "Python 3.11 or later is needed"),
        (["--site", "/nowhere/site.toml"], "cannot read the settings"),
    ],
)
def test_the_installer_refuses_what_cannot_work_before_it_writes(tmp_path, options, said):
    wanted = [] if "--prefix" in options else ["--prefix", tmp_path / "env"]
    wanted += [] if "--python" in options else ["--python", sys.executable]
    done = install(*wanted, *options)
    assert done.returncode == 1
    assert said in done.stderr, done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "env").exists()


def test_settings_alone_need_an_environment_that_is_there(tmp_path):
    (tmp_path / ".ddl-labs").touch()
    done = install("--prefix", tmp_path, "--python", sys.executable, "--only-settings")
    assert done.returncode == 1
    assert "no environment in" in done.stderr


# Stands in for a Python with a package index: its pip installs nothing, or fails.
PYTHON = f"""#!/bin/sh
case "$*" in
"- "* | *settings.py*) exec {sys.executable} "$@" ;;
"-m venv "*)
    for env; do :; done
    mkdir -p "$env/bin" && cp "$0" "$env/bin/python" && echo "$*" >"$env/asked" ;;
"-m pip "*) echo "$*"; exit "${{PIP_FAILS:-0}}" ;;
esac
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    stub = tmp_path / "python"
    stub.write_text(PYTHON)
    stub.chmod(0o755)
    return stub


def versions(prefix: Path) -> list[str]:
    return sorted(path.name for path in (prefix / "versions").iterdir())


def test_an_installation_into_a_folder_with_somebodys_work_leaves_it_as_it_is(tmp_path, python):
    work = tmp_path / "opt/thesis.tex"
    work.parent.mkdir()
    work.write_text("years of it")
    for options in ([], ["--only-settings"], ["--rollback"]):
        done = install("--prefix", work.parent, "--python", python, *options)
        assert done.returncode == 1
        assert f"'{work.parent}' is not empty" in done.stderr
        assert "Name a new or an empty folder" in done.stderr
    assert list(work.parent.iterdir()) == [work]
    assert work.read_text() == "years of it"


def test_an_update_leaves_running_jobs_their_version_and_a_rollback_brings_it_back(
    tmp_path, python
):
    prefix = tmp_path / "opt/ddl-labs"
    told = ("--prefix", prefix, "--python", python)
    seen = []
    for _ in range(2):
        done = install(*told)
        assert done.returncode == 0, done.stderr
        seen.append((prefix / "current").resolve())
    first, second = seen
    assert first != second
    assert (first / "bin/python").exists()
    script = (second / "share/ddl-labs/run_notebook.sbatch").read_text()
    assert f"{prefix}/current" in script
    assert "rollback" in done.stdout
    for expected in (first, second):
        done = install(*told, "--rollback")
        assert done.returncode == 0, done.stderr
        assert (prefix / "current").resolve() == expected
    assert versions(prefix) == sorted([first.name, second.name])


def test_an_update_that_fails_changes_nothing_for_students(tmp_path, python):
    told = ("--prefix", tmp_path / "opt", "--python", python)
    assert install(*told).returncode == 0
    before = (tmp_path / "opt/current").resolve()
    done = install(*told, PIP_FAILS="1")
    assert done.returncode == 1
    assert (tmp_path / "opt/current").resolve() == before
    assert versions(tmp_path / "opt") == [before.name]
    done = install(*told, "--rollback")
    assert done.returncode == 1
    assert "no version before this one" in done.stderr


@pytest.mark.parametrize(
    ("torch", "index", "pinned", "seen"),
    [
        ("", False, True, False),
        ("cpu", True, True, False),
        ("cu128", True, True, False),
        ("site", False, False, True),
    ],
)
def test_a_site_says_which_pytorch_it_wants(tmp_path, python, torch, index, pinned, seen):
    site = tmp_path / "site.toml"
    site.write_text(SITE.replace('torch = ""', f'torch = "{torch}"', 1))
    prefix = tmp_path / "opt"
    done = install("--site", site, "--prefix", prefix, "--python", python)
    assert done.returncode == 0, done.stderr
    (asked,) = (line for line in done.stdout.splitlines() if line.startswith("-m pip install"))
    url = f"--extra-index-url https://download.pytorch.org/whl/{torch}"
    assert (url in asked) is index
    pins = (prefix / "current/constraints.txt").read_text()
    assert ("\ntorch==" in pins) is pinned
    assert "\nnumpy==" in pins
    assert ("--system-site-packages" in (prefix / "current/asked").read_text()) is seen


def test_what_each_job_begins_with_is_written_once_with_setup_and_data(tmp_path, python):
    site = tmp_path / "site.toml"
    setup = '["module load openmpi/5.0", "export A=1"]'
    text = SITE.replace('setup = ["export PMIX_MCA_psec=native"]', f"setup = {setup}", 1)
    site.write_text(text.replace('data = ""', 'data = "/srv/the data"', 1))
    prefix = tmp_path / "opt"
    done = install("--site", site, "--prefix", prefix, "--python", python)
    assert done.returncode == 0, done.stderr
    lines = (prefix / "current/etc/ddl-labs/job.sh").read_text().splitlines()
    assert lines[-3:] == [
        "module load openmpi/5.0",
        "export A=1",
        "export FASHION_MNIST_ROOT='/srv/the data'",
    ]
    assert "export SLURM_OVERLAP=1" in lines
    for script in HPC.rglob("*.sbatch"):
        if script.name != "server.sbatch":  # there it is in the prologue of jupyterhub_config.py
            assert re.search(r"^\. .*job[._]sh", script.read_text(), re.MULTILINE), script
    site.write_text(text.replace("options = []", 'options = ["-q"]', 1))
    done = install("--site", site, "--prefix", prefix, "--python", python)
    assert done.returncode == 1
    assert "section [slurm]: option '-q' must be one of sbatch's" in done.stderr
    assert len(versions(prefix)) == 1


def test_the_installer_explains_its_options():
    done = install("--help")
    assert done.returncode == 0
    for option in (
        "--site",
        "--prefix",
        "--python",
        "--mpi",
        "--torch",
        "--only-settings",
        "--no-compile",
        "--rollback",
    ):
        assert option in done.stdout


# --- the rest ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "script", sorted([*HPC.rglob("*.sh"), *HPC.rglob("*.sbatch")]), ids=lambda p: p.name
)
def test_no_script_has_an_error_of_syntax(script: Path):
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_link_brings_a_student_the_course_and_opens_the_notebook():
    link = module("git_link").git_link(
        "https://hub.example.org/",
        "https://git.example.org/a/course.git",
        "labs/01 x.ipynb",
        "v2",
        "",
    )
    parts = urlsplit(link)
    assert parts.path == "/hub/user-redirect/git-pull"
    wanted = {name: value for name, (value,) in parse_qs(parts.query).items()}
    assert wanted == {
        "repo": "https://git.example.org/a/course.git",
        "branch": "v2",
        "targetPath": "course",
        "urlpath": "lab/tree/course/labs/01%20x.ipynb",
    }


@pytest.mark.parametrize("url", ["git@git.example.org:course.git", "hub.example.org", ""])
def test_a_link_of_no_url_is_refused_with_an_example(url):
    with pytest.raises(ValueError, match=r"must be a URL such as https://hub\.example\.org"):
        module("git_link").git_link("https://hub.example.org", url, "", "main", "")


def test_versions_of_the_hub_are_exact_and_each_has_its_reason():
    lines = (HPC / "requirements.txt").read_text().splitlines()
    for number, line in enumerate(lines):
        if line and not line.startswith("#"):
            assert "==" in line
            assert lines[number - 1].startswith("#"), f"why {line}?"
