"""How ranks are brought up on a cluster: the choice, the words when it can't be, the queue.

Slurm's commands are stand-ins here, which say what the real ones say; tests/jobs/test_slurm.py runs
the real ones.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from utils import cluster
from utils.cluster import RanksError, ipp_cluster
from utils.jobs import session, site, slurm, start_plan
from utils.jobs.start_plan import Plan

ALLOCATION = {
    "SLURM_JOB_ID": "12",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_CPUS_PER_NODE": "2(x2)",
}
SMALL = ALLOCATION | {
    "SLURM_JOB_NODELIST": "node1",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_JOB_CPUS_PER_NODE": "1",
}
PLUGINS = "MPI plugin types are...\n\tpmix\n\tnone\n\tpmi2\nspecific pmix plugin versions: pmix_v4"


class Slurm:
    """Stand-ins for Slurm's commands, first on PATH."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.says("sinfo", "debug\nlab*")
        self.says("srun", PLUGINS)
        self.says("squeue", "")
        self.says("scancel", "")

    def says(self, command: str, text: str, status: int = 0, stream: int = 1) -> None:
        path = self.folder / command
        path.write_text(f"#!/bin/sh\ncat >&{stream} <<'END'\n{text}\nEND\nexit {status}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def nothing(monkeypatch, tmp_path):
    """Neither Slurm nor a site's settings."""
    for name in os.environ:
        if name.startswith(("SLURM_", "DDL_LABS_LAUNCHER")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(slurm, "CONFS", ())
    slurm.mpi_plugins.cache_clear()
    use_settings(monkeypatch, [])
    yield
    site.settings.cache_clear()
    slurm.mpi_plugins.cache_clear()


@pytest.fixture
def commands(nothing, monkeypatch, tmp_path) -> Slurm:
    """A machine that submits to Slurm."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    return Slurm(folder)


def use_settings(monkeypatch, folders: list[Path]) -> None:
    monkeypatch.setattr(site, "SYSTEM_CONFIG_DIRS", [])
    monkeypatch.setattr(site, "ENV_CONFIG_DIRS", list(map(str, folders)))
    site.settings.cache_clear()


def inside(monkeypatch, job: dict[str, str]) -> None:
    for name, value in job.items():
        monkeypatch.setenv(name, value)


# --- the choice -------------------------------------------------------------------------------


def test_on_a_laptop_mpiexec_starts_the_ranks(nothing):
    way = site.decide(4, None, site.settings())
    assert (way.launcher, way.many_hosts, way.own_job) == ("mpiexec", False, False)


def test_slurms_commands_alone_do_not_make_a_cluster(commands, monkeypatch):
    monkeypatch.delenv("SLURM_CONF")
    assert site.decide(4, None, site.settings()).launcher == "mpiexec"
    monkeypatch.setenv("SLURM_CONF", "set")
    commands.says("sinfo", "sinfo: error: Unable to contact slurm controller", 1, stream=2)
    assert site.decide(4, None, site.settings()).launcher == "mpiexec"


def test_from_a_login_node_the_ranks_get_a_job(commands):
    way = site.decide(4, None, site.settings())
    assert (way.launcher, way.many_hosts) == ("slurm", True)
    assert "isn't part of one" in way.reason


def test_a_job_that_is_large_enough_is_used_on_all_its_nodes(commands, monkeypatch):
    inside(monkeypatch, ALLOCATION)
    way = site.decide(4, None, site.settings())
    assert (way.launcher, way.many_hosts) == ("mpiexec", True)
    assert "Slurm job 12 on node[1-2] has 4 CPUs" in way.reason


def test_ranks_that_do_not_fit_into_jupyterlabs_job_get_a_separate_job(commands, monkeypatch):
    inside(monkeypatch, SMALL)
    way = site.decide(4, None, site.settings())
    assert (way.launcher, way.own_job) == ("slurm", True)
    assert "has only 1 of the 4 CPUs needed" in way.reason


@pytest.mark.parametrize(("cpus_here", "bound"), [("2", True), ("1", False)])
def test_ranks_are_not_all_bound_to_the_first_core_of_a_node_that_other_jobs_use(
    commands, monkeypatch, cpus_here, bound
):
    job = SMALL | {"SLURM_CPUS_ON_NODE": cpus_here, "SLURM_JOB_CPUS_PER_NODE": cpus_here}
    inside(monkeypatch, job)
    monkeypatch.setattr(
        start_plan, "usable_cores", lambda: 2
    )  # without cgroups: all that the node has
    assert Plan(1).bind is bound
    assert Plan(1, bind=True).bind


PARTITIONS = "lab*|2|6|4:00:00\nlab*|2|8|4:00:00\nlong|100|64|infinite"


@pytest.mark.parametrize(
    ("asked", "lack"),
    [
        ({"--nodes": "4", "--time": "4:00:00"}, ""),
        ({"--nodes": "5"}, "--nodes=5, but partition lab has only 4"),
        ({"--ntasks-per-node": "2", "--cpus-per-task": "4"}, ""),
        ({"--ntasks-per-node": "2", "--cpus-per-task": "24"}, "48 CPUs on a node"),
        ({"--time": "241"}, "--time=241, but partition lab has a limit of 4:00:00"),
        ({"--time": "1-00:00:00"}, "--time=1-00:00:00, but partition lab has a limit"),
        ({"--time": "9-0", "--partition": "long", "--nodes": "100"}, ""),
        ({"--partition": "gpu"}, "there is no partition 'gpu', only lab, long"),
        ({"--partition": "lab,long", "--nodes": "5"}, ""),
        (
            {"--partition": "lab,long", "--nodes": "101"},
            "; --nodes=101, but partition long",
        ),
    ],
)
def test_a_request_that_the_partition_can_never_satisfy_is_reported_before_it_is_submitted(
    commands, asked, lack
):
    commands.says("sinfo", PARTITIONS)
    assert (lack in slurm.shortfall(asked)) if lack else slurm.shortfall(asked) == ""
    commands.says("sinfo", "slurm_load_partitions: Unable to contact slurm controller", 1)
    assert slurm.shortfall(asked) == ""


def test_a_hidden_partition_can_be_used(commands):
    """Slurm names it to who asks for all, and takes jobs for it."""
    script = f"""#!/bin/sh\nprintf '{PARTITIONS}\n'
case "$*" in *--all*) echo 'private|1|4|1:00:00' ;; esac\n"""
    (commands.folder / "sinfo").write_text(script)
    assert slurm.shortfall({"--partition": "private"}) == ""
    assert "--nodes=2, but partition private" in slurm.shortfall({
        "--partition": "private",
        "--nodes": "2",
    })


def test_a_job_that_can_never_start_is_reported_and_a_waiting_job_is_not(commands):
    commands.says("squeue", "PENDING|PartitionTimeLimit")
    assert "doesn't allow so much time" in slurm.why_never("7")
    for passing in ("Resources", "PartitionConfig"):  # the second one: nodes are down
        commands.says("squeue", f"PENDING|{passing}")
        assert slurm.why_never("7") == ""


def test_a_compute_node_that_may_submit_nothing_is_reported_with_a_remedy(commands, monkeypatch):
    inside(monkeypatch, SMALL)
    said = "srun: error: Unable to allocate resources: Access/permission denied"
    refused = str(slurm.Waiting("ranks").refused(said))
    assert "Access/permission denied" in refused
    assert "start your server in a job that is large enough" in refused


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_ranks_start_on_a_file_system_without_locks(nothing, monkeypatch, tmp_path, number):
    def without(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", without)
    monkeypatch.setattr(session.tempfile, "gettempdir", lambda: str(tmp_path))
    first, second = session.Session(), session.Session()
    assert first.folder != second.folder
    assert first.folder.exists()  # nobody took the other's for a left-over
    for one in (first, second):
        one.close()
    assert not first.folder.exists()


def test_ranks_share_a_small_job_that_can_submit_nothing(nothing, monkeypatch):
    inside(monkeypatch, SMALL)
    assert site.decide(4, None, site.settings()).launcher == "mpiexec"


def test_the_users_launcher_comes_before_the_variable_and_the_variable_before_the_site(
    commands, monkeypatch, tmp_path
):
    (tmp_path / site.CONFIG_FILE).write_text("c.DDLLabs.launcher = 'mpiexec'")
    use_settings(monkeypatch, [tmp_path])
    assert site.decide(4, None, site.settings()).reason == "chosen by the site's settings"
    inside(monkeypatch, ALLOCATION)
    monkeypatch.setenv("DDL_LABS_LAUNCHER", "srun")
    assert site.decide(4, None, site.settings()).launcher == "srun"
    assert site.decide(4, "slurm", site.settings()).launcher == "slurm"


@pytest.mark.parametrize(
    ("launcher", "error", "words"),
    [
        ("pbs", ValueError, "expected one of auto, mpiexec, srun, slurm, not 'pbs'"),
        ("srun", RanksError, "srun works only within a Slurm job"),
        ("slurm", RanksError, "Slurm does not answer here"),
    ],
)
def test_a_launcher_that_can_not_work_is_refused_with_a_reason(nothing, launcher, error, words):
    with pytest.raises(error, match=words.replace("(", r"\(")):
        cluster.start(4, launcher=launcher)


@pytest.mark.parametrize("option", [{"partition": "lab"}, {"time": 5}, {"nodes": 2}])
def test_an_option_for_a_slurm_job_is_an_error_without_such_a_job(nothing, option):
    with pytest.raises(
        ValueError, match=f"{next(iter(option))} needs ranks in a separate Slurm job"
    ):
        cluster.start(4, **option)


@pytest.mark.parametrize(
    ("text", "total"), [("4", 4), ("4(x2)", 8), ("4(x2),2", 10), ("16,4(x3)", 28)]
)
def test_the_cpus_of_a_job_are_counted_on_all_nodes(text, total):
    assert slurm.per_node_sum(text) == total


# --- the command ------------------------------------------------------------------------------


def test_a_separate_job_has_the_options_of_the_user_and_of_the_site(
    commands, monkeypatch, tmp_path
):
    (tmp_path / site.CONFIG_FILE).write_text(
        "c.DDLLabs.partition = 'lab'\nc.DDLLabs.account = 'course'\n"
        "c.DDLLabs.options = ['--constraint=avx2']\n"
    )
    use_settings(monkeypatch, [tmp_path])
    inside(monkeypatch, SMALL)
    plan = Plan(4, threads=2, nodes=2, time="0:20:00")
    for option in (
        *("--mpi=pmix", "--partition=lab", "--account=course", "--time=0:20:00", "--nodes=2"),
        *("--ntasks-per-node=2", "--cpus-per-task=2", "--cpu-bind=cores", "--constraint=avx2"),
    ):
        assert option in plan.mpi_args
    assert "--partition=debug" in Plan(4, partition="debug").mpi_args
    # What was chosen on the hub's page for the server is the ranks', too.
    inside(monkeypatch, {"SBATCH_ACCOUNT": "mine", "SBATCH_RESERVATION": "monday"})
    options = Plan(4).mpi_args
    assert "--account=mine" in options
    assert "--reservation=monday" in options
    assert "--account=course" not in options
    # srun takes the last one: what was chosen, as for the partition and the account.
    (tmp_path / site.CONFIG_FILE).write_text("c.DDLLabs.options = ['--reservation=ddl']\n")
    use_settings(monkeypatch, [tmp_path])
    options = Plan(4).mpi_args
    assert [one for one in options if "reservation" in one][-1] == "--reservation=monday"
    # The job that holds the notebook must not become that of the ranks.
    assert plan.command[0] == "env"
    assert plan.command[-1] == "srun"
    assert {f"--unset={name}" for name in SMALL} <= set(plan.command)
    assert "--unset=SLURM_CONF" not in plan.command


def test_ranks_find_their_programs_although_a_job_exports_only_a_list(commands, monkeypatch):
    inside(monkeypatch, ALLOCATION | {"SLURM_EXPORT_ENV": "HOME,USER"})
    plan = Plan(4)
    assert plan.command[:2] == ["env", "--unset=SLURM_EXPORT_ENV"]
    assert plan.command[-1] == plan.launcher.path


def test_without_pmix_the_user_gets_an_error_instead_of_ranks_that_are_alone(commands):
    commands.says("srun", PLUGINS.replace("\tpmix\n", ""))
    with pytest.raises(RanksError, match="names pmi2, but Open MPI needs pmix"):
        Plan(4)


def test_a_mistake_in_the_sites_file_is_reported_with_the_files_name(
    nothing, monkeypatch, tmp_path
):
    (tmp_path / site.CONFIG_FILE).write_text("c.DDLLabs.launcher = undefined")
    use_settings(monkeypatch, [tmp_path])
    with pytest.raises(RanksError, match=f"{site.CONFIG_FILE}: .*undefined"):
        site.settings()


# --- what Slurm says --------------------------------------------------------------------------


REFUSES = """\
#!/bin/sh
case "$*" in *--mpi=list*) printf "\\tpmix\\n"; exit;; esac
echo "{}" >&2
exit 1
"""


def test_an_unknown_partition_is_an_error_with_a_reason(commands):
    refusal = "srun: error: Unable to allocate resources: Invalid partition name specified"
    (commands.folder / "srun").write_text(REFUSES.format(refusal))
    with pytest.raises(RanksError, match="Invalid partition name specified") as caught:
        cluster.start(2, partition="nosuch")
    assert "Slurm refused the job" in str(caught.value)
    assert "partitions: lab, debug" in str(caught.value)


# A command that waits for ever, as srun does while its job is in the queue.
WAITS = """\
#!/bin/sh
case "$*" in *--mpi=list*) printf "\\tpmix\\n"; exit;; esac
exec sleep 600
"""


def test_a_job_that_can_never_start_is_canceled_at_once_with_a_reason(commands, monkeypatch):
    (commands.folder / "srun").write_text(WAITS)
    commands.says("squeue", "31|PENDING|PartitionTimeLimit|")
    monkeypatch.setattr(slurm, "PERIOD", 0.1)
    with pytest.raises(
        RanksError, match=r"job 31 was canceled, because it could never start: .*so much time"
    ) as caught:
        cluster.start(2, time="1000:00:00")
    assert "partition=, time= or nodes=" in str(caught.value)


def test_waiting_is_shown_with_the_job_and_the_stop_button_cancels_it(
    commands, monkeypatch, capsys, tmp_path
):
    (commands.folder / "srun").write_text(WAITS)
    commands.says("squeue", "31|PENDING|Resources|")
    (commands.folder / "scancel").write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/cancelled\n')
    monkeypatch.setattr(slurm, "PERIOD", 0.1)

    def stop_button(self, text):
        show(self, text)
        raise KeyboardInterrupt

    show = slurm.Waiting._show
    monkeypatch.setattr(slurm.Waiting, "_show", stop_button)
    with pytest.raises(KeyboardInterrupt):
        cluster.start(2)
    said = capsys.readouterr().out
    assert "Slurm job 31 has been waiting in the queue (Resources) for 0:0" in said
    assert said.endswith("Slurm job 31 is canceled.\n")
    assert "--name kernel-" in (tmp_path / "cancelled").read_text()


def test_a_job_has_begun_when_it_runs_and_the_line_is_gone(commands, monkeypatch, capsys):
    monkeypatch.setattr(slurm, "PERIOD", 0.0)
    waiting = slurm.Waiting("a job")
    assert not waiting.begun()
    commands.says("squeue", "31|PENDING|Priority|")
    assert not waiting.begun()
    commands.says("squeue", "31|RUNNING|None|node[1-2]")
    assert waiting.begun()
    assert waiting.job.nodes == "node[1-2]"
    assert capsys.readouterr().out.endswith(" \r")


# --- other hosts ------------------------------------------------------------------------------


def test_connection_files_are_visible_on_all_nodes_but_not_to_other_users(
    nothing, monkeypatch, tmp_path
):
    (tmp_path / site.CONFIG_FILE).write_text(f"c.DDLLabs.shared_folder = {str(tmp_path)!r}")
    use_settings(monkeypatch, [tmp_path])
    base = session.base_folder(shared=True)
    assert base == tmp_path / f"ddl-labs-{os.getuid()}"
    assert stat.S_IMODE(base.stat().st_mode) == 0o700
    base.chmod(0o755)
    with pytest.raises(RanksError, match="only you can open"):
        session.base_folder(shared=True)


def test_a_loopback_name_is_not_an_address_for_other_nodes(nothing, monkeypatch):
    monkeypatch.setattr(ipp_cluster.socket, "gethostbyname", lambda name: "127.0.1.1")
    assert ipp_cluster.reachable_address() == "*"
    monkeypatch.setattr(ipp_cluster.socket, "gethostbyname", lambda name: "10.1.2.3")
    assert ipp_cluster.reachable_address() == "10.1.2.3"


ORPHAN = """
import os, sys, threading, time
sys.argv[0] = "rank"
from utils.cluster import engine
engine.MOST_SILENCE = 1.0
import socket
child = os.fork()
if child == 0:
    time.sleep(600)
listener = socket.create_server(("127.0.0.1", 0))
url = "tcp://127.0.0.1:%d" % listener.getsockname()[1]
threading.Timer(3, listener.close).start()
start = time.monotonic()
engine._end_without_controller({"pid": child, "registration_url": url})
assert time.monotonic() - start > 3, "ended while its controller was there"
assert os.waitpid(child, 0)[1] == 9
print("ended")
"""


def test_an_engine_in_a_long_cell_ends_when_its_notebook_is_gone(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", ORPHAN], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "ended\n", done.stderr
