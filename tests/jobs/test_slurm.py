"""Ranks on a real Slurm cluster: they come up where they should, end with their notebook, and
belong to nobody else.

The cluster lies in namespaces (`slurm_tools`): a login host and two nodes, with students on it.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest
import slurm_tools
from slurm_tools import PREFIX, Cluster

from utils.labs.lab05 import runs

pytestmark = [
    pytest.mark.bare,
    pytest.mark.timeout(600),
]

#: Seconds for what a student does; that a job without a notebook may go on; that it takes to see.
PATIENCE, ORPHANED, SEEN = 240, 60, 60

# A notebook without a browser: its cells run in IPython, one after the other.
NOTEBOOK = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_line_magic("colors", "nocolor")
for cell in json.loads(sys.argv[1]):
    print("----", flush=True)
    shell.run_cell(cell)
print("the end")
"""

START = "from utils import cluster\nranks = cluster.start(4)\nprint(ranks.describe())"
# Each rank imports PyTorch for itself: two are enough where it takes no more.
START_TWO = START.replace("(4)", "(2, nodes=2)")
JOIN = "%%px\nimport torch, torch.distributed as dist\ndist.init_process_group('mpi')"
SUM = """%%px
x = torch.ones(1) * dist.get_rank()
dist.all_reduce(x)
print("sum", x.item())"""
JOBS = "import subprocess\nprint(subprocess.getoutput('squeue -h -o \\'job %T on %N\\''))"


@pytest.fixture(scope="module")
def lab(slurm_cluster: Cluster) -> Cluster:
    return slurm_cluster


@pytest.fixture(autouse=True)
def no_job_left(lab) -> Iterator[None]:
    """Each test finds the cluster empty."""
    yield
    lab.run("scancel", "--partition=lab", check=False)
    slurm_tools.wait_until(lambda: not lab.jobs(), PATIENCE, "the cluster is empty")


def notebook(lab: Cluster, *cells: str, user: str = "student1", **options) -> str:
    """What the cells show."""
    command = ("python", "-c", NOTEBOOK, json.dumps(cells))
    return lab.run(*command, user=user, timeout=PATIENCE, **options)


def in_a_job(lab: Cluster, *cells: str, options: list[str], first: str = "true") -> str:
    """The same, in a notebook that runs as a job with these options of sbatch, after a command."""
    script = Path("/home/student1/notebook.py")
    write(lab, script, NOTEBOOK)
    write(lab, script.with_suffix(".json"), json.dumps(cells))
    run = f'{first}; python {script} "$(cat {script.with_suffix(".json")})"'
    out = script.with_suffix(".out")
    lab.run("rm", "-f", out)
    lab.run("sbatch", *options, f"--output={out}", f"--wrap={run}", user="student1")
    slurm_tools.wait_until(
        lambda: "the end" in lab.run("cat", out, check=False) or not lab.jobs(), PATIENCE, "the end"
    )
    return lab.run("cat", out)


def write(lab: Cluster, path: Path, text: str) -> None:
    lab.run("python", "-c", "import sys; open(sys.argv[1], 'w').write(sys.argv[2])", path, text,
            user="student1")  # fmt: skip


def hosts(shown: str) -> list[str]:
    """The hosts in the table of `describe`."""
    rows = [line.split() for line in shown.splitlines()]
    return [row[1] for row in rows if len(row) > 5 and row[0].isdigit()]


# --- three places, one notebook ---------------------------------------------------------------


def test_from_a_login_node_four_ranks_start_on_two_nodes_and_end_with_their_job(lab):
    shown = notebook(lab, START, JOIN, SUM, JOBS, "ranks.stop()", JOBS)
    assert hosts(shown) == ["node1", "node1", "node2", "node2"]
    assert shown.count("sum 6.0") == 4
    assert "Started with srun: the ranks get a separate job" in shown
    assert "on node[1-2]." in shown
    assert shown.count("job RUNNING on node[1-2]") == 1


WHERE = r"import socket; print(f'program on {socket.gethostname()}\n', end='')"
PROGRAM = f"""
from pathlib import Path
from utils.jobs.program import mpiexec
Path("where.py").write_text({WHERE!r})
mpiexec(4, "where.py")
"""


def test_in_a_job_with_room_mpiexec_spreads_the_ranks_over_its_nodes(lab):
    shown = in_a_job(lab, START, JOIN, SUM, JOBS, PROGRAM, options=["-N2", "--ntasks-per-node=2"])
    assert hosts(shown) == ["node1", "node1", "node2", "node2"]
    # A program beside them reaches both nodes, too.
    assert sorted(re.findall(r"^program on (\w+)$", shown, re.MULTILINE)) == hosts(shown), shown
    assert shown.count("sum 6.0") == 4
    assert "Started with mpiexec: Slurm job" in shown
    assert shown.count("job RUNNING") == 1


def test_in_a_job_the_user_can_choose_slurms_launcher(lab):
    start = START.replace("(4)", '(2, launcher="srun")')
    shown = in_a_job(lab, start, JOIN, SUM, options=["-N2", "--ntasks-per-node=1"])
    assert sorted(hosts(shown)) == ["node1", "node2"]
    assert shown.count("sum 1.0") == 2


def test_from_a_small_job_with_jupyterlab_the_ranks_get_a_separate_job(lab):
    start = START.replace("(4)", "(2)")
    shown = in_a_job(lab, start, JOIN, SUM, JOBS, options=["-n1"])
    assert len(hosts(shown)) == 2
    assert shown.count("sum 1.0") == 2
    assert "has only 1 of the 2 CPUs needed" in shown
    assert shown.count("job RUNNING") == 2


# As JupyterLab's panel "IPython Parallel" does.
PLAIN = """
import ipyparallel as ipp, logging
cluster = ipp.Cluster(n=2, log_level=logging.ERROR)
client = cluster.start_and_connect_sync()
def who():
    import os
    from mpi4py import MPI
    world = MPI.COMM_WORLD
    return f"{world.rank} of {world.size}, {os.environ['SLURM_OVERLAP']}"
print("engines:", *client[:].apply_sync(who), sep=" | ")
client.close()
cluster.stop_cluster_sync()
"""


def test_engines_of_plain_ipyparallel_are_ranks_of_one_world_in_a_job_with_the_sites_setup(lab):
    shown = notebook(lab, PLAIN)
    assert "engines: | 0 of 2, 1 | 1 of 2, 1" in shown, shown


# The cores that a rank may run on, and a program that mpiexec starts beside it.
CORES = "print('rank:', ranks.describe().records[0]['cores'], subprocess.getoutput("
CORES += "'mpiexec -n 1 grep Cpus_allowed_list /proc/self/status'))"


def test_two_jobs_on_a_node_without_cgroups_are_not_both_on_its_first_core(lab):
    # A job of one CPU, on a node that has more, and nothing keeps the job to one of them.
    if len(os.sched_getaffinity(0)) == 1:
        pytest.skip("this machine has one core")
    shown = in_a_job(lab, "import subprocess", START.replace("(4)", "(1)"), CORES,
                     options=["-n1"], first=f". {PREFIX}/etc/ddl-labs/job.sh")  # fmt: skip
    everywhere = lab.run("sed", "-n", "s/Cpus_allowed_list:\t//p", "/proc/self/status")
    assert re.search(rf"rank: {everywhere} Cpus_allowed_list:\s+{everywhere}\n", shown), shown


# Stands in for a site's rule, which refuses after it has read what is asked for.
NOT_HERE = """#!/bin/sh
case "$*" in *--mpi=list*) exec /tmp/srun.real "$@" ;; esac
echo "srun: error: Unable to allocate resources: Access/permission denied" >&2
exit 1
"""


def test_if_compute_nodes_may_submit_nothing_the_error_names_the_other_profile(lab):
    for host in slurm_tools.NODES:
        forbid = f"cp /usr/bin/srun /tmp/srun.real && printf %s '{NOT_HERE}' >/tmp/srun"
        lab.run("sh", "-c", f"{forbid} && chmod 755 /tmp/srun", host=host)
        lab.run("mount", "--bind", "/tmp/srun", "/usr/bin/srun", host=host)
    try:
        shown = in_a_job(lab, START.replace("(4)", "(2)"), options=["-n1"])
        assert "Access/permission denied" in shown, shown
        assert "start your server in a job that is large enough" in shown
    finally:
        for host in slurm_tools.NODES:
            # Lazily: what is still running holds the file, and the next test needs the real one.
            lab.run("umount", "--lazy", "/usr/bin/srun", host=host)


# What a second notebook does; its ranks have an mpiexec of their own.
BESIDE = f"""
import subprocess, sys
second = [sys.executable, "-c", {NOTEBOOK!r}, {json.dumps([START, "print(*ranks.client.ids)"])!r}]
said = subprocess.run(second, capture_output=True, text=True).stdout
print("second:", said.replace("the end", ""))
"""


def test_two_notebooks_share_one_job_over_two_nodes_and_ranks_restart_there(lab):
    cells = (START, BESIDE, "ranks.restart()", JOIN, SUM)
    shown = in_a_job(lab, *cells, options=["-N2", "--ntasks-per-node=2"])
    assert hosts(shown)[:8] == ["node1", "node1", "node2", "node2"] * 2, shown
    assert re.search(r"second: .*?4 MPI ranks have started.*?0 1 2 3", shown, re.DOTALL), shown
    assert "4 fresh MPI ranks have started." in shown
    assert shown.count("sum 6.0") == 4


# --- what goes wrong --------------------------------------------------------------------------


def test_a_deadlock_over_two_hosts_is_explained_and_the_next_cell_works(lab):
    wait = "%%px\nother = (mpi_rank + 2) % 4\ndist.recv(torch.zeros(1), src=other)"
    shown = notebook(lab, START, JOIN, wait, SUM)
    assert "both receive first" in shown, shown
    assert shown.count("sum 6.0") == 4


def test_a_rank_that_dies_on_another_node_is_named_and_restart_gives_fresh_ones(lab):
    die = "%%px\nimport os, time\nif mpi_rank == 1:\n    os._exit(3)\ntime.sleep(600)"
    shown = notebook(lab, START_TWO, die, "ranks.restart()", JOIN, SUM)
    assert {"node1", "node2"} <= set(hosts(shown))
    assert "rank 1 died (its process ended with status 3)" in shown, shown
    assert "2 fresh MPI ranks have started." in shown
    assert shown.count("sum 1.0") == 2


def test_a_job_that_was_canceled_from_outside_is_reported(lab):
    # Slurm takes a moment to end a job, in which the ranks could still answer. The first cell
    # after it may find them dying, the second one finds them dead: both say why.
    cancel = (
        "import time; subprocess.run(['scancel', '--user=student1'])\n"
        "while subprocess.getoutput('squeue -h -u student1'): time.sleep(0.1)"
    )
    shown = notebook(
        lab, START, JOIN, "import subprocess", cancel, SUM, SUM, "ranks.restart()", JOIN, SUM
    )
    assert shown.count("Slurm ended the ranks: their job was cancelled") == 2, shown
    assert "4 fresh MPI ranks have started." in shown
    assert shown.count("sum 6.0") == 4


WAIT_AND_STOP = """
import os, signal, subprocess, threading, time
def stop_button():
    while "PENDING" not in subprocess.getoutput("squeue -h -o '%u %T'"):
        time.sleep(0.2)
    time.sleep(5)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=stop_button).start()
"""


def test_a_full_queue_is_shown_and_the_stop_button_cancels_the_job(lab):
    lab.run("sbatch", "-N2", "--exclusive", "--wrap=sleep 600", user="student2")
    slurm_tools.wait_until(lambda: any("RUNNING" in job for job in lab.jobs()), SEEN, "it is full")
    shown = notebook(lab, WAIT_AND_STOP, START, JOBS.replace("squeue", "squeue --user=student1"))
    assert "waiting in the queue (Resources)" in shown or "(Priority)" in shown, shown
    assert "KeyboardInterrupt" in shown
    assert "is canceled." in shown
    assert "job PENDING" not in shown


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ('partition="nosuch"', "Slurm refused the job of the ranks: Invalid partition"),
        ('time="3000:00:00"', "the partition doesn't allow so much time"),
        ("nodes=4", "could never start|Slurm refused"),
    ],
)
def test_an_impossible_job_is_an_error_with_a_reason(lab, options, words):
    shown = notebook(lab, START.replace("(4)", f"(4, {options})"))
    assert any(word in shown for word in words.split("|")), shown
    assert not lab.jobs()


# --- nothing outlives its notebook ------------------------------------------------------------

BUSY = "%%px --noblock\nwhile True:\n    pass"


def up_and_busy(lab: Cluster):
    """A notebook whose ranks are in an endless loop."""
    cells = (START_TWO, BUSY, "print('busy', flush=True)\nimport time\ntime.sleep(600)")
    process = lab.popen(
        "python", "-u", "-c", NOTEBOOK, json.dumps(cells), user="student1",
        stdout=(lab.state / "busy.out").open("w"),
    )  # fmt: skip
    slurm_tools.wait_until(
        lambda: "\nbusy" in (lab.state / "busy.out").read_text(), PATIENCE, "the ranks are busy"
    )
    return process


def gone(lab: Cluster) -> Callable[[], bool]:
    return lambda: not any("student1" in job for job in lab.jobs())


def test_killing_a_kernel_cancels_its_job(lab):
    process = up_and_busy(lab)
    pids = lab.run("pgrep", "-u", "student1", "-f", "python -u -c").split()
    lab.run("kill", "-9", *pids)
    start = time.monotonic()
    slurm_tools.wait_until(gone(lab), ORPHANED + SEEN, "the job is gone")
    assert time.monotonic() - start < ORPHANED
    process.wait(SEEN)


# --- nobody else's ----------------------------------------------------------------------------

SNOOP = """
import contextlib, json, os, pathlib, socket, sys, zmq
from jupyter_client.session import Session
known = json.loads(sys.argv[1])
context = zmq.Context()
heard = []
for port in known["ports"]:
    for kind in (zmq.DEALER, zmq.SUB):
        link = context.socket(kind)
        link.sndtimeo = 300  # a port that is none of zmq's may hang up on it
        if kind == zmq.SUB:
            link.subscribe(b"")
        link.connect(f"tcp://{known['host']}:{port}")
        if kind == zmq.DEALER:
            with contextlib.suppress(zmq.Again):
                Session(key=b"").send(link, "connection_request", content={})
        if link.poll(300):
            heard.append((port, link.recv_multipart()))
        link.close(0)
try:
    pathlib.Path(known["folder"]).iterdir().__next__()
    heard.append("files")
except PermissionError:
    pass
print("heard", heard, flush=True)
os._exit(0)  # zmq may wait for good for what no one takes
"""
TELL = """
import json, psutil, os, pathlib
room = ranks.running()._session.folder
ports = sorted({c.laddr.port for p in psutil.process_iter() if p.uids().real == os.getuid()
                for c in p.net_connections("tcp") if c.status == "LISTEN"})
files = list(room.rglob("ipcontroller*.json"))
keys = [json.loads(path.read_text())["curve_serverkey"] for path in files]
modes = [oct(path.stat().st_mode & 0o777) for path in files]
print("told", json.dumps({"ports": ports, "folder": str(room), "keys": keys, "modes": modes}))
import sys, time
sys.stdout.flush()
time.sleep(600)
"""


def test_another_user_can_neither_connect_nor_read_nor_see_a_key(lab):
    process = lab.popen(
        "python", "-u", "-c", NOTEBOOK, json.dumps([START, TELL]), user="student1",
        stdout=(lab.state / "told.out").open("w"),
    )  # fmt: skip

    def told() -> list[str]:
        lines = (lab.state / "told.out").read_text().splitlines()
        return [line.removeprefix("told ") for line in lines if line.startswith("told ")]

    known = json.loads(slurm_tools.wait_until(told, PATIENCE, "the ranks are up")[0])
    assert known["modes"]
    assert set(known["modes"]) == {"0o600"}
    assert len(known["ports"]) > 3
    about = json.dumps({"host": "login", "ports": known["ports"], "folder": known["folder"]})
    assert lab.run("python", "-c", SNOOP, about, user="student2", timeout=PATIENCE) == "heard []"
    assert len(known["keys"][0]) == 40
    assert known["keys"][0] not in "\n".join(lab.processes("student1"))
    process.kill()
    pids = lab.run("pgrep", "-u", "student1", "-f", "python -u -c").split()
    lab.run("kill", "-9", *pids)
    slurm_tools.wait_until(gone(lab), ORPHANED + SEEN, "the job is gone")


# --- lab 05 on the cluster --------------------------------------------------------------------

RUN_NOTEBOOK = PREFIX / "share/ddl-labs/run_notebook.sbatch"
LAB_05 = "solutions/05_scaling.ipynb"
IMAGES = """
import torch
torch.manual_seed(0)
def some(n):
    return torch.randint(256, (n, 28, 28), dtype=torch.uint8), torch.arange(n) % 10
torch.save([some(640), some(80)], "scaling/images.pt")
"""
# What is before the cell that makes the batch script: a small cluster, and little to do.
BEFORE_IT = """
import shlex
from pathlib import Path
from utils.labs.shared import slurm_script
folder, NODES, DOMAINS, CORES = Path("scaling"), 2, 1, 2
common = ("--strong", 128, "--weak", 64, "--steps", 2)
"""


def lab_05(lab, root) -> dict[str, str]:
    """The notebook's cells; what it writes lies in the student's folder `scaling`."""
    cells = {cell.id: cell.source for cell in nbformat.read(root / LAB_05, as_version=4).cells}
    lab.run("mkdir", "-p", "/home/student1/scaling", user="student1")
    for name in ("timing.py", "train.py"):
        (source,) = (s for s in cells.values() if s.startswith(f"%%writefile scaling/{name}\n"))
        write(lab, Path("/home/student1/scaling", name), source.partition("\n")[2])
    lab.run("python", "-c", IMAGES, user="student1")
    return cells


def test_the_script_of_lab_05_runs_from_a_bare_shell_on_the_copied_folder_alone(lab, root):
    cells = lab_05(lab, root)
    lab.run(PREFIX / "bin/python", "-c", BEFORE_IT + cells["slurm-submit"], user="student1")
    # To another account, with nothing but that folder; a login there knows nothing of the course.
    there = Path("/home/student2/scaling")
    lab.run("cp", "-r", "/home/student1/scaling", there)
    lab.run("chown", "-R", "student2:students", there)
    told = lab.run("bash", "-lc", f"cd {there} && sbatch series.sh", user="student2",
                   env={"PATH": "/usr/bin:/bin"})  # fmt: skip
    slurm_tools.wait_until(lambda: not lab.jobs(), PATIENCE, "the job is done")
    said = lab.run("cat", there / f"scaling-{told.split()[-1]}.out")
    read = (
        "import json; from utils.labs.lab05 import runs; "
        "print(json.dumps(runs.series('scaling/results')))"
    )
    found = json.loads(lab.run("python", "-c", read, user="student2"))
    results = {int(p): result for p, result in found.items()}
    hosts_of = {p: [rank["host"] for rank in result["ranks"]] for p, result in results.items()}
    assert hosts_of == {1: ["node1"], 2: ["node1", "node2"]}, said
    for p, result in results.items():
        assert {rank["threads"] for rank in result["ranks"]} == {2}
        for strategy in ("by hand", "DDP"):
            for case in ((128, "strong"), (64, "weak")):
                assert all(t > 0 for t in runs.rounds_of(result, strategy, *case)), (p, case)


IN_A_BATCH_NOTEBOOK = """
import os, subprocess
from utils.labs.lab05 import runs
options = "--data scaling/images.pt --strong 128 --weak 64 --rounds 2 --steps 2".split()
timed = runs.run("scaling/train.py", *options, job=runs.Job(ranks=4))
print("measured on", *sorted(rank["host"] for rank in timed.result["ranks"]))
print("by hand:", *sorted(subprocess.getoutput("mpiexec -n 4 hostname").split()))
print("setup said", os.environ.get("OF_THE_SETUP"))
print("data in", *ranks.view.apply_sync(lambda: __import__("os").environ["FASHION_MNIST_ROOT"]))
"""
# As module systems do: it reads a variable that is not set.
SETUP = 'export PMIX_MCA_psec=native OF_THE_SETUP="loaded$NOT_SET"'


@pytest.fixture
def setup_of_the_site(lab) -> Iterator[None]:
    """`setup` of site.toml is SETUP, and `data` a folder with a blank in its name."""
    before = slurm_tools.site_settings()
    changed = re.sub("^setup = .*", f"setup = [{SETUP!r}]", before, flags=re.MULTILINE)
    changed = changed.replace('data = ""', 'data = "/srv/the data"', 1)
    slurm_tools.write_settings(lab.state, changed)
    yield
    slurm_tools.write_settings(lab.state, before)


def test_lab_05_as_a_batch_notebook_measures_on_both_nodes_beside_its_ranks(
    lab, root, setup_of_the_site
):
    lab_05(lab, root)
    cells = [nbformat.v4.new_code_cell(source) for source in (START, IN_A_BATCH_NOTEBOOK)]
    nb = nbformat.v4.new_notebook(cells=cells)
    write(lab, Path("/home/student1/measure.ipynb"), nbformat.writes(nb))
    size = ("--nodes=2", "--ntasks=4", "--ntasks-per-node=2")
    lab.run("sbatch", *size, RUN_NOTEBOOK, "measure.ipynb", user="student1")
    slurm_tools.wait_until(lambda: not lab.jobs(), PATIENCE, "the job is done")
    done = lab.run("cat", "measure.done.ipynb", user="student1", check=False)
    logs = lab.run("sh", "-c", "cat notebook-*.log", user="student1")
    assert "measured on node1 node1 node2 node2" in done, logs + done
    assert "by hand: node1 node1 node2 node2" in done, logs + done
    assert "setup said loaded" in done, logs + done
    assert f"data in{' /srv/the data' * 4}" in done, logs + done


def test_the_series_of_lab_05_says_that_the_course_is_not_installed(lab, root):
    hand_in = lab_05(lab, root)["slurm-submit"].replace("SUBMIT = False", "SUBMIT = True")
    lab.run(PREFIX / "bin/python", "-c", BEFORE_IT + hand_in, user="student1",
            env={"DDL_LABS_PREFIX": "/opt/elsewhere"})  # fmt: skip
    slurm_tools.wait_until(lambda: not lab.jobs(), PATIENCE, "the job is done")
    said = lab.run("bash", "-c", "cat /home/student1/scaling/scaling-*.out")
    assert "The course is not installed in /opt/elsewhere: DDL_LABS_PREFIX=" in said


def test_a_series_for_more_nodes_than_exist_is_not_submitted(lab, root):
    hand_in = lab_05(lab, root)["slurm-submit"].replace("SUBMIT = False", "SUBMIT = True")
    too_many = f"{BEFORE_IT}\nNODES = 4\n{hand_in}"
    said = lab.run(PREFIX / "bin/python", "-c", too_many, user="student1")
    assert said.endswith(
        "could never start: --nodes=4, but partition lab has only 2. Ask for less."
    )
    assert not lab.jobs()


# --- lab 13: a job that saves and comes back --------------------------------------------------

LAB_13 = "solutions/13_faults.ipynb"
HAND_IN_RESUMABLE = """
from pathlib import Path
from utils.labs.lab13 import faults
from utils.labs.shared import slurm_script
script = Path("resumable/job.sh")
# The first life has 40 s in which the signal may come, the second one need not wait.
command = "train.py run --steps 40 --every 1000 --pause $((SLURM_RESTART_COUNT ? 0 : 1))"
script.write_text(faults.requeued(2, command, time="10"))
print(slurm_script.submit(script))
"""


def test_a_job_whose_time_is_nearly_over_saves_and_continues_in_its_next_life(lab, root):
    cells = nbformat.read(root / LAB_13, as_version=4).cells
    (script,) = (cell.source for cell in cells if cell.id == "script-write")
    lab.run("mkdir", "-p", "/home/student1/resumable", user="student1")
    write(lab, Path("/home/student1/resumable/train.py"), script.partition("\n")[2])
    said = lab.run(PREFIX / "bin/python", "-c", HAND_IN_RESUMABLE, user="student1")
    job = said.split()[-1]
    out = f"/home/student1/resumable/resumable-{job}.out"

    def printed(words: str) -> bool:
        return words in lab.run("cat", out, check=False)

    def waits() -> bool:
        return any("PENDING" in line for line in lab.jobs())

    slurm_tools.wait_until(lambda: printed("life 0: 2 ranks"), PATIENCE, "the job runs")
    # What Slurm does by itself when --signal says so, an hour before or a minute.
    lab.run("scancel", "--batch", "--signal=USR1", job, user="student1")
    slurm_tools.wait_until(waits, PATIENCE, "it is in the queue again")
    # There it would be for two minutes. But a life that begins in the second in which the last
    # one ended is refused: Slurm takes its credential for the old one, "revoked".
    lab.run("scontrol", "update", f"JobId={job}", "StartTime=now+2")
    slurm_tools.wait_until(lambda: printed("life 1: 2 ranks"), PATIENCE, "it runs again")
    slurm_tools.wait_until(lambda: not lab.jobs(), PATIENCE, "the job is done")
    said = lab.run("cat", out)
    saved, resumed = re.search(r"at step (\d+):", said), re.search(r"life 1: .* step (\d+)", said)
    assert 0 < int(saved[1]) == int(resumed[1]) < 40, said
    assert "at step 40" in said
