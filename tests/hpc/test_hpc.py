"""What an administrator is told about mistakes in hpc/, before a student meets them."""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from types import ModuleType
from urllib.parse import parse_qs, urlsplit

import pytest
from places import ROOT

HPC = ROOT / "hpc"
SITE = (HPC / "site.toml").read_text()

pytestmark = pytest.mark.timeout(120)


def module(name: str) -> ModuleType:
    """A file of hpc/, which is no package: the hub puts the folder on its path."""
    before = set(sys.modules)
    sys.path.insert(0, str(HPC))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(HPC))
        for new in set(sys.modules) - before:
            if (HPC / f"{new}.py").exists():
                del sys.modules[new]


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
        ("nodes = [1, 2]", 'nodes = ["2"]', "nodes: '2' must be such as 1"),
        ("nodes = [1, 2]", "nodes = 2", "nodes = 2 must be of type list"),
        ("accounts = []", 'accounts = ["a b"]', "accounts: 'a b' must be such as"),
        ('times = ["00:30:00"', 'times = ["half an hour"', "'half an hour' must be such as"),
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


# --- what runs as a student ----------------------------------------------------------------------


def end_of(log: Path, monkeypatch: pytest.MonkeyPatch, limit: str = "5") -> str:
    commands = module("commands")
    monkeypatch.setattr(commands, "TAIL", (commands.TAIL[0], limit, *commands.TAIL[2:]))
    return asyncio.run(commands.end_of(log, (), {"PATH": "/usr/bin:/bin"}))


def test_no_log_of_a_student_keeps_the_hub_busy_or_fills_it(tmp_path, monkeypatch):
    log = tmp_path / ".jupyterhub-1.log"
    os.mkfifo(log)
    assert "can't be read: timeout ended with status 124" in end_of(log, monkeypatch, "0.2")
    log.unlink()
    log.symlink_to("/dev/zero")
    assert len(end_of(log, monkeypatch)) <= 20_000
    log.unlink()
    with log.open("wb") as file:  # one line of 5 GB, with holes
        file.truncate(5 * 10**9)
        file.seek(0, os.SEEK_END)
        file.write("the last words é".encode("latin-1"))
    text = end_of(log, monkeypatch)
    assert len(text) == 20_000
    assert text.endswith("the last words \N{REPLACEMENT CHARACTER}")
    assert "No such file" in end_of(tmp_path / "nothing.log", monkeypatch)


def test_a_command_that_hangs_is_given_up(tmp_path):
    with pytest.raises(TimeoutError):
        asyncio.run(module("commands").output(("sleep", "60"), patience=0.1))


def test_sudo_lets_pass_what_the_hub_reads_logs_with():
    rules = (HPC / "sudoers").read_text()
    tail = " ".join(module("commands").TAIL)
    assert f"/usr/bin/{tail} /home/*/.jupyterhub-[0-9]*.log" in rules


def test_the_secrets_of_the_hub_reach_no_process_of_a_student(monkeypatch):
    class SlurmSpawner:
        async def run_command(self, cmd, input=None, env=None):
            return env

    stand_ins = {
        "batchspawner": {"SlurmSpawner": SlurmSpawner},
        "batchspawner.batchspawner": {"JobStatus": None},
        "jupyterhub": {},
        "jupyterhub.utils": {"url_path_join": None},
    }
    for name, content in stand_ins.items():
        stand_in = ModuleType(name)
        vars(stand_in).update(content)
        monkeypatch.setitem(sys.modules, name, stand_in)
    for name in ("JUPYTERHUB_CRYPT_KEY", "CONFIGPROXY_AUTH_TOKEN", "JPY_API_TOKEN"):
        monkeypatch.setenv(name, "secret")
    spawner = module("spawner").LabSpawner()
    env = asyncio.run(spawner.run_command("scancel 1"))
    assert env["PATH"]
    assert "secret" not in env.values()
    # A job has what is the student's own, as batchspawner asks for it.
    own = {"JUPYTERHUB_API_TOKEN": "of the student"}
    assert asyncio.run(spawner.run_command("sbatch", env=own)) == own


# --- what can be chosen --------------------------------------------------------------------------

SINFO = """\
lab*|up|4:00:00|1-2|idle|2|6|8000|0/12/0/12|(null)
lab*|up|4:00:00|1-2|mix|1|8|16000|3/5/0/8|gpu:a100:2(S:0-1),nvme:1
lab*|up|4:00:00|1-2|down*|1|6|8000|0/0/6/6|(null)
night|down|infinite|1-infinite|idle|2|6|8000|0/12/0/12|(null)
"""


def test_what_is_free_is_added_up_over_the_nodes_of_a_partition():
    known = module("partitions").parsed(SINFO)
    lab, night = known["lab"], known["night"]
    assert (lab.default, lab.up, lab.minutes, lab.most_nodes) == (True, True, 240, 2)
    assert (lab.nodes, lab.free_nodes, lab.free_cores) == (4, 2, 17)
    assert (lab.cores, lab.memory, lab.gpus) == (8, 16000, 2)
    assert (night.default, night.up, night.minutes) == (False, False, float("inf"))


@pytest.mark.parametrize(
    ("time", "minutes"),
    [("30", 30), ("30:30", 30.5), ("4:00:00", 240), ("1-12", 2160), ("1-12:30:00", 2190)],
)
def test_slurms_notations_of_a_time_are_read_as_sbatch_does(time, minutes):
    assert module("partitions").minutes(time) == minutes


@pytest.mark.parametrize(
    ("options", "time", "said"),
    [
        (["--nodes=2", "--ntasks=4"], "04:00:00", ""),
        (["--nodes=1-2"], "1", ""),
        (["--nodes=1"], "04:00:01", "'lab' gives a job 4:00 h at most"),
        (["--nodes=3"], "1", "'lab' gives a job 2 nodes at most, not 3"),
        (["--ntasks=9"], "1", "a node of 'lab' has 8 cores at most, not 9"),
        (["--ntasks=4", "--cpus-per-task=3"], "1", "8 cores at most, not 12"),
        (["--mem=16G"], "1", "16000 MB of memory, not 16384"),
        (["--gres=gpu:a100:4"], "1", "a node of 'lab' has 2 GPUs at most, not 4"),
        (["--gpus-per-node=3"], "1", "a node of 'lab' has 2 GPUs at most, not 3"),
    ],
)
def test_what_a_partition_can_never_give_is_said_with_both_numbers(options, time, said):
    partitions, choices = module("partitions"), module("choices")
    told = choices.Request("", "", time, options, {}).impossible(partitions.parsed(SINFO))
    assert said in told
    assert bool(said) == bool(told)


@pytest.mark.parametrize(
    ("partition", "said"),
    [
        ("night", ["'night' is closed"]),
        ("lab,night", []),
        ("night,lab", []),
        ("small,night", ["'small' has 1 node in all, not 2", "'night' is closed"]),
        ("hidden", []),
        ("night,hidden", []),
    ],
)
def test_a_start_is_refused_only_where_no_partition_of_the_job_can_ever_give_it(partition, said):
    partitions, choices = module("partitions"), module("choices")
    known = partitions.parsed(f"{SINFO}small|up|1:00:00|1-2|idle|1|2|8000|0/2/0/2|(null)")
    wanted = choices.Request(partition, "", "1", ["--nodes=2"], {})
    assert wanted.impossible({}) == "", "Slurm's silence stops nobody"
    told = wanted.impossible(known)
    assert bool(told) == bool(said)
    for text in said:
        assert text in told


def test_partitions_of_students_alone_are_asked_for_as_well():
    # The hub's user is in no AllowGroups.
    assert "--all" in module("partitions").COMMAND


def test_the_form_shows_each_partition_of_a_list(tmp_path):
    text = SITE.replace('partition = ""                 #', 'partition = "lab,night"  #', 1)
    (tmp_path / "site.toml").write_text(text)
    site = module("settings").read(tmp_path / "site.toml")
    assert site.slurm.partition == "lab,night"
    known = module("partitions").parsed(SINFO)
    form = module("pages").form(site, module("choices").offered(site), known, {})
    assert "<td>lab</td>" in form
    assert "<td>night (closed)</td>" in form


def site_with(tmp_path: Path, **form: str):
    """The settings as they come, with other lines in [form]."""
    text = SITE
    for name, value in form.items():
        text = text.replace(f"{name} = []", f"{name} = {value}")
    (tmp_path / "site.toml").write_text(text)
    return module("settings").read(tmp_path / "site.toml")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"profile": "nosuch"}, "choose one of 'ranks4', 'small'"),
        ({"profile": ["small"]}, "There is no profile ['small']"),
        ({"nodes": True}, "There is no nodes True"),
        ({"nodes": "2\n#SBATCH --uid=root"}, "choose one of '1', '2'"),
        ({"time": "100:00:00"}, "There is no time '100:00:00'"),
        ({"account": "other"}, "There is no account 'other': choose one of 'mine'"),
        ({"partition": "gpu"}, "not 'partition'"),
        ({"options": "--uid=root"}, "not 'options'"),
    ],
)
def test_nothing_but_the_sites_choices_gets_into_a_job(tmp_path, options, said):
    choices = module("choices")
    with pytest.raises(choices.Refused) as refused:
        choices.checked(site_with(tmp_path, accounts='["mine"]'), options)
    assert said in str(refused.value)


def test_a_job_of_another_size_has_memory_for_its_ranks_and_ranks_follow_it(tmp_path):
    choices = module("choices")
    site = site_with(tmp_path, accounts='["mine"]', reservations='["monday"]')
    chosen = {"profile": "ranks4", "ranks": 4, "time": "01:00:00", "gpus": "1", "nodes": ""}
    chosen |= {"account": "mine", "reservation": "monday"}
    job = choices.request(site, choices.checked(site, chosen))
    assert (job.account, job.time) == ("mine", "01:00:00")
    assert sorted(job.options) == [
        "--gres=gpu:1",
        "--mem=5120M",
        "--nodes=2",
        "--ntasks-per-node=4",
        "--ntasks=8",
        "--reservation=monday",
    ]
    assert job.exports == {"SBATCH_ACCOUNT": "mine", "SBATCH_RESERVATION": "monday"}
    plain = choices.request(site, choices.checked(site, {}))
    assert plain.options == site.profiles[0].options


@pytest.mark.parametrize(
    ("site", "profile", "ranks", "expected"),
    [
        ('["--mem=4G"]', '"--mem=3G"', 4, ["--mem=5120M"]),
        ('["--mem=4G"]', "", 4, ["--mem=6144M"]),
        ("[]", '"--mem=0"', 4, ["--mem=0"]),
        ("[]", '"--mem=512M"', 1, ["--mem=1024M"]),
        ("[]", "", 4, []),
    ],
)
def test_another_number_of_ranks_keeps_the_memory_that_was_asked_for(
    tmp_path, site, profile, ranks, expected
):
    text = SITE.replace("options = []", f"options = {site}", 1)
    old = '"--ntasks-per-node=2", "--mem=3G"'
    assert old in text
    new = f'"--ntasks-per-node=2", {profile}'
    (tmp_path / "site.toml").write_text(text.replace(old, new, 1))
    settings, choices = module("settings").read(tmp_path / "site.toml"), module("choices")
    chosen = choices.checked(settings, {"profile": "ranks4", "ranks": ranks})
    options = choices.request(settings, chosen).options
    assert [option for option in options if option.startswith("--mem")] == expected


def test_the_form_can_be_used_while_slurm_does_not_answer(tmp_path):
    site = site_with(tmp_path)
    offered = module("choices").offered(site)
    pages, known = module("pages"), module("partitions").parsed(SINFO)
    silent = pages.form(site, offered, {}, {})
    assert 'name="profile"' in silent
    assert "Free now" not in silent
    assert 'name="gpus"' not in silent, "nobody knows of a GPU"
    told = pages.form(site, offered, known, {"nodes": "2"})
    assert '<option value="2" selected>' in told
    assert "2 of 4" in told
    assert 'name="gpus"' in told
    assert "night" not in told, "no profile and no choice leads there"


def test_a_session_says_how_much_time_is_left_and_a_waiting_one_what_for():
    job_queue, pages = module("job_queue"), module("pages")
    now = datetime(2026, 1, 5, 22, 30)
    job = job_queue.Job("RUNNING", "None", "", "n1", "2026-01-06T00:35:00", "n[1-2]")
    card = pages.card("7", job, "/log", now)
    for text in ("running", "n[1-2]", "2:05 h, until 06 Jan, 00:35", 'href="/log"'):
        assert text in card
    waits = pages.card("7", job_queue.Job("PENDING", "Resources", "N/A", "", "N/A"), "", now)
    assert "Resources" in waits
    assert "Time left" not in waits


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


# Stands in for a Python with a package index: its pip installs nothing or PIP_BRINGS, or fails.
PYTHON = f"""#!/bin/sh
case "$*" in
"- "* | *settings.py*) exec {sys.executable} "$@" ;;
"-m venv "*)
    for env; do :; done
    mkdir -p "$env/bin" && cp "$0" "$env/bin/python" && echo "$*" >"$env/asked" ;;
"-m pip "*)
    echo "$*"
    [ -z "$PIP_BRINGS" ] || mkdir -p "${{0%/bin/*}}/lib/python3.12/site-packages/$PIP_BRINGS"
    exit "${{PIP_FAILS:-0}}" ;;
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
    pins = (prefix / "current/etc/ddl-labs/constraints.txt").read_text()
    assert ("\ntorch==" in pins) is pinned
    assert "\nnumpy==" in pins
    assert ("--system-site-packages" in (prefix / "current/asked").read_text()) is seen


def test_a_site_that_wants_its_own_pytorch_does_not_get_another_one_unnoticed(tmp_path, python):
    """pip brings its own where the site's is missing, or one that the course does not go with."""
    told = ("--prefix", tmp_path / "opt", "--python", python)
    assert install(*told, "--torch", "site", PIP_BRINGS="torchvision").returncode == 0
    assert install(*told, PIP_BRINGS="torch").returncode == 0
    before = (tmp_path / "opt/current").resolve()
    done = install(*told, "--torch", "site", PIP_BRINGS="torch")
    assert done.returncode == 1
    assert f"'{python}' has no PyTorch that the course goes with" in done.stderr
    assert "The course wants torch>=" in done.stderr
    assert (tmp_path / "opt/current").resolve() == before
    assert len(versions(tmp_path / "opt")) == 2, "what was half made is gone"


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


@pytest.mark.parametrize(("cores", "unbound"), [(4, True), (8, False)])
def test_ranks_are_bound_by_the_nodes_cores_whatever_threads_a_student_wants(
    tmp_path, cores, unbound
):
    # As coreutils' nproc: it says 1 with OMP_NUM_THREADS=1.
    (tmp_path / "nproc").write_text("#!/bin/sh\necho ${OMP_THREAD_LIMIT:-${OMP_NUM_THREADS:-8}}\n")
    (tmp_path / "lscpu").write_text("#!/bin/sh\necho 'Thread(s) per core: 1'\n")
    for stand_in in tmp_path.iterdir():
        stand_in.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", f". {HPC}/slurm/job.sh; env"],
        capture_output=True, text=True, timeout=60, check=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_CPUS_ON_NODE": str(cores),
             "OMP_NUM_THREADS": "1", "OMP_THREAD_LIMIT": "1"},
    )  # fmt: skip
    assert ("PRTE_MCA_hwloc_default_binding_policy=none" in done.stdout) is unbound


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
