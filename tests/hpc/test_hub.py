"""JupyterHub on a Slurm cluster of two nodes: what students see when all is well, and when not.

`HUB_TABLE=file` has what they see in each accident written to a file as a Markdown table, and
`DDL_LABS_SCREENSHOTS=folder` keeps pictures.
"""

from __future__ import annotations

import contextlib
import http.cookiejar
import json
import os
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

import hub_tools
import nbformat
import pytest
import slurm_tools
from browser_tools import (
    CHROMIUM,
    CHROMIUM_ARGS,
    NOTEBOOK,
    PAGE,
    Lab,
    photograph,
    wait_for,
    without_outputs,
    write_settings,
)
from hub_tools import PASSWORD, SPAWN, URL, Hub, Kernel, Refused, Student
from playwright.sync_api import Browser, Page, sync_playwright
from slurm_tools import GROUP, STUDENTS, Cluster

from utils.course.notebook import SOLUTIONS, read, tasks_checked, write

LAB = "01_c10d.ipynb"
#: Seconds: for ranks to come up, for Slurm to act, for processes to end.
RANKS, ACT = 180, 90
#: Seconds that a job has left when a student opens a notebook.
AHEAD = 115
pytestmark = [
    pytest.mark.bare,
    pytest.mark.timeout(slurm_tools.INSTALL + PAGE + NOTEBOOK + SPAWN),
]


# --- cluster, hub, students ----------------------------------------------------------------------


@dataclass
class Table:
    """What a student sees, by accident."""

    rows: list[tuple[str, str]] = field(default_factory=list)

    def add(self, accident: str, *seen: str) -> None:
        """Keep what was seen, on one line each."""
        lines = (" ".join(plain(text).split()) for text in seen)
        self.rows.append((accident, "<br>".join(line.replace("|", "\\|") for line in lines)))

    def __str__(self) -> str:
        lines = [f"| {accident} | {seen} |" for accident, seen in self.rows]
        return "\n".join(["| accident | what the student sees |", "|---|---|", *lines])


def plain(text: str) -> str:
    """Text without colours, and of a page of the hub only what it is about."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    if "<html" in text:
        text = re.sub(r"(?s)<(script|style|head).*?</\1>", "", text)
        text = re.sub(r"(?s)<[^>]*>", " ", text)
    if raised := re.search(r"(?s)\n(\w*Error: .*)", text):
        text = raised[1]
    return text if len(text) < 1000 else f"{text[:500]} … {text[-500:]}"


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[Table]:
    collected = Table()
    yield collected
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n\n{collected}\n")
    if path := os.environ.get("HUB_TABLE"):
        Path(path).write_text(f"{collected}\n", encoding="utf-8")


@pytest.fixture(scope="module")
def cluster(slurm_cluster: Cluster) -> Cluster:
    return slurm_cluster


@pytest.fixture(scope="module")
def running_hub(cluster: Cluster) -> Iterator[Hub]:
    try:
        proxy = hub_tools.proxy_program()
    except RuntimeError as error:
        pytest.skip(f"the hub's proxy cannot be had: {error}")
    with cluster.network(), hub_tools.hub(cluster, proxy) as up:
        yield up


@pytest.fixture
def hub(running_hub: Hub) -> Iterator[Hub]:
    """The hub; after the test all servers, jobs and students' processes must be gone."""
    cluster = running_hub.cluster
    try:
        with cluster.network():
            yield running_hub
            for name in STUDENTS:
                with contextlib.suppress(Refused):
                    running_hub.student(name).stop()
        cluster.run("scancel", "--user=root")
        wait_for(lambda: not cluster.jobs(), ACT, "all jobs end with the servers")
        for name in STUDENTS:
            wait_for(
                lambda name=name: not cluster.processes(name),
                ACT,
                f"no process of {name} is left",
            )
    except BaseException:
        print(cluster.logs(), *map(cluster.processes, STUDENTS), sep="\n")
        raise


def give(cluster: Cluster, student: str, text: str, path: str) -> None:
    """Put a file into a student's home folder."""
    source = cluster.state / "given"
    source.write_text(text)
    target = f"/home/{student}/{path}"
    owner = (f"--owner={STUDENTS[student]}", f"--group={GROUP}")
    cluster.run("install", "-D", "-m", "600", *owner, slurm_tools.STATE / "given", target)
    cluster.run("chown", "-R", f"{STUDENTS[student]}:{GROUP}", f"/home/{student}")


START = "from utils import cluster\nranks = cluster.start({n}{options})\n"
WHO = "for fact in ranks.describe().records: print(fact['rank'], fact['host'])"


def start_ranks(kernel: Kernel, n: int, options: str = "") -> list[tuple[int, str]]:
    """Start ranks in a kernel; returns rank and host of each."""
    said = kernel.run(START.format(n=n, options=options) + WHO, RANKS)
    found = re.findall(r"^(\d+) (node\d)$", said, re.MULTILINE)
    assert len(found) == n, said
    return [(int(rank), host) for rank, host in found]


# --- the whole way, in a browser -----------------------------------------------------------------


@pytest.fixture
def browser(hub: Hub) -> Iterator[Browser]:
    """Chromium on the login host: it is started from this thread, which is there."""
    if CHROMIUM is None:
        pytest.skip("no Chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_ARGS)
        yield chromium
        chromium.close()


def log_in(page: Page, name: str) -> None:
    page.set_default_timeout(PAGE * 1000)
    page.goto(f"{URL}/hub/login?next=%2Fhub%2Fspawn")
    page.fill("#username_input", name)
    page.fill("#password_input", PASSWORD)
    page.click("#login_submit")


def test_a_student_logs_in_chooses_a_job_and_passes_lab_01_on_two_nodes(
    hub: Hub, browser: Browser, tmp_path: Path
):
    student, lab = hub.student("student1"), without_outputs(read(SOLUTIONS / LAB))
    write(lab, tmp_path / LAB)
    give(hub.cluster, "student1", (tmp_path / LAB).read_text(), LAB)
    write_settings(tmp_path / "settings")
    for path in (tmp_path / "settings").rglob("*.jupyterlab-settings"):
        where = path.relative_to(tmp_path / "settings")
        give(hub.cluster, "student1", path.read_text(), f".jupyter/lab/user-settings/{where}")
    with browser.new_context(viewport={"width": 1280, "height": 1400}) as context:
        page = context.new_page()
        log_in(page, "student1")
        page.select_option("select[name=profile]", "ranks4")
        photograph(page, tmp_path, "hub-form")
        page.click("#spawn_form [type=submit]")
        page.wait_for_url(re.compile("/user/student1/lab"), timeout=SPAWN * 1000)
        opened = Lab(
            page,
            f"{URL}/user/student1/lab/tree/{LAB}",
            path=LAB,
            cells=[cell.id for cell in lab.cells],
            ask=lambda path: student.ask("GET", path),
            pictures=tmp_path,
        )
        opened.run_all()
        shown = opened.outputs()
        for cell in ("who-describe", "deadlock-run", "pingpong-check"):
            opened.show(cell)
            opened.photograph(f"hub-{cell}")
        verdicts = [text for text in shown.values() if re.match(r"[✓○✗] ", text)]
        passed = [word for text in verdicts for word in re.findall(r"✓ passed Task (\S+)", text)]
        assert passed == tasks_checked(lab), verdicts
        assert len(passed) == len(verdicts), verdicts
        hosts = re.findall(r"\bnode\d", shown["who-describe"])
        assert hosts == ["node1", "node1", "node2", "node2"], shown["who-describe"]
        assert shown["program-run"].count(" of 4: ") == 4, shown["program-run"]
        page.goto(f"{URL}/hub/home")
        page.click("#stop")
        wait_for(lambda: not hub.cluster.jobs(), ACT, "the job ends with the server")
        photograph(page, tmp_path, "hub-stopped")
    wait_for(lambda: not hub.cluster.processes("student1"), ACT, "no process of it is left")


SCHEMES, WIDTHS = ("light", "dark"), (1280, 400)


def everyone_can_read(page: Page, name: str, folder: Path) -> None:
    """axe-core finds nothing, nothing is cut off, in light and dark, wide and narrow."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    for scheme in SCHEMES:
        page.emulate_media(color_scheme=scheme)
        page.reload()
        for details in page.locator("#spawn_form summary").all():
            details.click()
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 1000})
            photograph(page, folder, f"{name}-{scheme}-{width}")
            said = axe.run(page).response["violations"]
            assert [(one["id"], one["nodes"][0]["html"]) for one in said] == [], (name, scheme)
            wider = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            assert page.evaluate(wider) <= 0, f"{name} scrolls sideways"
    page.emulate_media(color_scheme="light")
    page.set_viewport_size({"width": 1280, "height": 1000})


def test_the_form_shows_what_is_free_and_says_what_a_partition_never_gives(
    hub: Hub, browser: Browser, tmp_path: Path
):
    with browser.new_context() as context:
        page = context.new_page()
        log_in(page, "student1")
        everyone_can_read(page, "hub-form", tmp_path)
        free = page.locator("table tr", has_text="gpu").locator("td").all_inner_texts()
        assert free == ["gpu", "1 of 1", str(slurm_tools.CPUS), "1:00 h", "1"]
        # The page has what the student chose last.
        page.select_option("select[name=profile]", "small")
        page.select_option("select[name=partition]", "gpu")
        page.select_option("select[name=time]", "02:00:00")
        page.click("#spawn_form [type=submit]")
        said = page.inner_text(".spawn-error-msg")
        photograph(page, tmp_path, "hub-form-refused")
        assert said == (
            "Error: Such a job can never start: 'gpu' gives a job 1:00 h at most, not 2:00 h. "
            "Choose another size."
        )
        assert page.input_value("select[name=partition]") == "gpu", "the choice is kept"
        assert not hub.cluster.jobs()


EDITED = "# what I wrote last"
# A busy server: it has written a document long before it says so, and is asked to save again.
SLOWLY = """
const ask = window.fetch;
window.fetch = async (address, options, ...others) => {
    const reply = await ask(address, options, ...others);
    const { method, url } = address instanceof Request ? address : { url: address, ...options };
    if (method === "PUT" && String(url).includes("/api/contents/"))
        await new Promise(answer => setTimeout(answer, 7000));
    return reply;
};
"""


def test_a_session_tells_its_time_warns_and_saves_the_notebook_before_slurm_ends_it(
    hub: Hub, browser: Browser, tmp_path: Path, table: Table
):
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("6 * 7", id="only")])
    nb.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    give(hub.cluster, "student1", nbformat.writes(nb), "own.ipynb")
    student = hub.student("student1")
    student.server(profile="small")
    ((job, *_, node),) = (line.split() for line in hub.cluster.jobs())
    with browser.new_context() as context:
        page = context.new_page()
        page.add_init_script(SLOWLY)
        log_in(page, "student1")
        page.goto(f"{URL}/hub/home")
        card = page.locator("section", has_text="Your session").inner_text()
        assert re.search(rf"Job\n{job}\n.*running\n.*{node}\n.*3:\d\d h, until", card, re.S), card
        everyone_can_read(page, "hub-session", tmp_path)
        page.click("text=Log of the job")
        assert "JupyterLab" in page.inner_text("pre")
        everyone_can_read(page, "hub-log", tmp_path)
        end = datetime.now() + timedelta(seconds=AHEAD)
        hub.cluster.run("scontrol", "update", f"JobId={job}", f"EndTime={end:%Y-%m-%dT%H:%M:%S}")
        known = f"fetch('/hub/job-time').then(r => r.json()).then(r => r.left <= {AHEAD})"
        wait_for(lambda: page.evaluate(known), ACT, "the hub knows of the new end")
        lab = Lab(
            page,
            f"{URL}/user/student1/lab/tree/own.ipynb",
            path="own.ipynb",
            cells=["only"],
            ask=lambda path: student.ask("GET", path),
            pictures=tmp_path,
        )
        assert re.fullmatch(r"Job: \d+ s left", page.inner_text("[role=timer]"))
        warning = page.get_by_text("Notebooks are saved before.").first.inner_text()
        page.locator(".jp-NotebookPanel:visible .jp-Cell .cm-content").first.click()
        page.keyboard.press("Control+End")
        page.keyboard.type(f"  {EDITED}")
        lab.photograph("hub-time-left")
        wait_for(lambda: not hub.cluster.jobs(), AHEAD + ACT, "Slurm ends the job")
        asked = page.locator(".jp-Dialog").all_inner_texts()
        assert not any("changed on disk" in text for text in asked), asked
        saved = hub.cluster.run("cat", "/home/student1/own.ipynb")
        assert EDITED in saved
        table.add("the job's time ends soon", warning, "what was edited is saved before")


# --- without a browser ---------------------------------------------------------------------------

DOCTOR = """
from types import SimpleNamespace
from utils.doctor.package_checks import check_imports, check_packages, check_python
for check in (check_python, check_packages, check_imports):
    print(check(SimpleNamespace(without_mpi=False)))
"""


def test_students_find_the_shared_environment_complete_and_cannot_change_it(cluster: Cluster):
    python = f"{slurm_tools.PREFIX}/bin/python"
    said = cluster.run(python, "-c", DOCTOR, user="student1", host="node1")
    assert said.count("status='ok'") == 3, said
    writable = ("!", "-type", "l", "-perm", "/022", "-print", "-quit")
    assert cluster.run("find", slurm_tools.INSTALLED, *writable) == ""
    kernels = cluster.run(python, "-m", "jupyter", "kernelspec", "list", user="student1")
    assert "ddl-labs" in kernels


def test_a_notebook_is_executed_as_a_batch_job_over_two_nodes(cluster: Cluster):
    source = "from utils import cluster\nranks = cluster.start(4)\nprint(ranks.describe())"
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    give(cluster, "student2", nbformat.writes(nb), "batch.ipynb")
    script = slurm_tools.PREFIX / "share/ddl-labs/run_notebook.sbatch"
    size = ("--nodes=2", "--ntasks=4", "--ntasks-per-node=2")
    cluster.run("sbatch", *size, script, "batch.ipynb", user="student2")
    wait_for(lambda: not cluster.jobs(), RANKS, "the batch job is done")
    logs = cluster.run("sh", "-c", "cat notebook-*.log", user="student2")
    done = cluster.run("cat", "batch.done.ipynb", user="student2", check=False)
    assert re.findall(r" (node\d) ", done) == ["node1", "node1", "node2", "node2"], logs


# --- several students ----------------------------------------------------------------------------

TRY_TO_JOIN = """
import ipyparallel as ipp, json
told = json.loads({told!r})
try:
    client = ipp.Client(connection_info=told, timeout=5)
    print("connected to", client.ids)
except Exception as error:
    print("refused:", type(error).__name__)
"""
TRY_TO_READ = """
import os
for path in ("/home/student1", "/home/student1/secret.txt"):
    try:
        print("read", os.listdir(path) if os.path.isdir(path) else open(path).read())
    except OSError as error:
        print(type(error).__name__)
"""


def connection_of(cluster: Cluster, student: str) -> dict:
    """What a client of this student's ranks knows: addresses and keys."""
    found = cluster.run(
        "find", f"/home/{student}", "-name", "ipcontroller-*client.json", "-path", "*security*"
    )
    assert found, "no connection file in the student's home folder"
    return json.loads(cluster.run("cat", found.splitlines()[-1]))


def test_two_students_at_once_see_neither_files_nor_ranks_of_each_other(hub: Hub, table: Table):
    give(hub.cluster, "student1", "mine", "secret.txt")
    students = [hub.student(name) for name in STUDENTS]
    for student in students:
        student.request_server(profile="ranks4")
    for student in students:
        wait_for(student.is_ready, SPAWN, f"the server of {student.name} is ready")
    kernels = [student.kernel() for student in students]
    for kernel in kernels:
        start_ranks(kernel, 2)
    first, second = students
    assert kernels[1].run(TRY_TO_READ).split() == ["PermissionError", "PermissionError"]
    with pytest.raises(Refused) as refused:
        hub.ask("GET", "/user/student1/api/contents", token=second.token)
    assert refused.value.status in (403, 404)
    table.add("opens another student's server", str(refused.value))
    told = connection_of(hub.cluster, "student1")
    assert told["curve_serverkey"], "ranks listen on the network without encryption"
    for name in [name for name in told if name.startswith("curve")]:
        del told[name]
    said = kernels[1].run(TRY_TO_JOIN.format(told=json.dumps(told)))
    assert said.startswith("refused"), said
    # Both still work.
    for kernel in kernels:
        assert "[0, 1]" in kernel.run("print([rank for rank in ranks.client.ids])")
    assert first.is_up()


# --- others on the same node ---------------------------------------------------------------------

#: What a student's kernel and ranks print while another user of the node listens, and for how long.
SECRET, LISTENS = "grade-of-student1", 2
TALK = f"""
import time
ranks.client[:].execute("print({SECRET!r})")
for _ in range({20 * (LISTENS + 3)}):
    print({SECRET!r}, flush=True)
    time.sleep(0.1)
"""
OWN = "open('/home/student1/taken', 'w')"
#: What ipykernel's socket for its child processes says, the only one without keys: it drops what
#: does not begin with a secret, and sends nothing.
WITHOUT_KEYS = "ZeroMQ NULL"


def intruded(cluster: Cluster, host: str) -> dict[int, dict[str, str]]:
    """What student2 gets from the ports of student1 on this host."""
    program = slurm_tools.COURSE / "tests/hpc/intruder.py"
    said = cluster.run(
        *(f"{slurm_tools.PREFIX}/bin/python", program, STUDENTS["student1"], LISTENS, OWN),
        user="student2",
        host=host,
    )
    told = json.loads(said.splitlines()[-1])
    assert told["abstract"] == [], "everybody on the host may connect to these"
    return {int(port): got for port, got in told["ports"].items()}


def test_another_user_of_the_node_reads_no_output_and_runs_no_code(hub: Hub, table: Table):
    student = hub.student("student1")
    student.server(profile="ranks4")
    kernel = student.kernel()
    start_ranks(kernel, 4)
    kernel.begin(TALK)
    found = {host: intruded(hub.cluster, host) for host in slurm_tools.NODES}
    files = hub.cluster.run(
        "sh", "-c", "cat /home/student1/.local/share/jupyter/runtime/kernel-*.json"
    )
    channels = {name: port for name, port in json.loads(files).items() if name.endswith("_port")}
    assert len(channels) == 5
    ports = found["node1"] | found["node2"]
    assert len(ports) > 30, "the controller, the engines and MPI listen as well"
    for name, port in channels.items():
        assert found["node1"][port]["greeting"] == "ZeroMQ CURVE", name
    answers = {
        port: {kind: text for kind, text in got.items() if text and kind != "greeting"}
        for port, got in ports.items()
    }
    assert not {port: got for port, got in answers.items() if got}
    without = [port for port, got in ports.items() if got["greeting"] == WITHOUT_KEYS]
    assert len(without) <= 1
    assert kernel.run("print(ranks.client[:].apply_sync(lambda: 6 * 7))") == "[42, 42, 42, 42]\n"
    assert not hub.cluster.run("find", "/home/student1/taken", check=False).startswith("/home")
    for host in slurm_tools.NODES:
        shown = hub.cluster.run(
            *("find", "/tmp", "/dev/shm", "-user", "student1", "-type", "f", "-perm", "/077"),
            host=host,
        )
        assert shown == ""
    table.add("another user of the node tries all ports", "nothing; the ranks go on")


# --- what is forgotten ---------------------------------------------------------------------------


def test_a_forgotten_notebook_gives_its_ranks_nodes_back_and_its_own(hub: Hub, table: Table):
    culled = hub.cluster.state / "culled"
    culled.write_text("10")
    student = hub.student("student1")
    try:
        student.server(profile="small")
        start_ranks(student.kernel(), 2, ', launcher="slurm"')
        assert len(hub.cluster.jobs()) == 2
        wait_for(lambda: student.ask("GET", "api/kernels") == [], ACT, "the idle kernel is ended")
        wait_for(lambda: len(hub.cluster.jobs()) == 1, ACT, "the job of its ranks ends with it")
        table.add("a notebook is forgotten", "its kernel ends, and the job of its ranks")
        log = hub.cluster.run("sh", "-c", "stat -c %a /home/student1/.jupyterhub-*.log")
        assert set(log.split()) == {"600"}
    finally:
        culled.unlink()


# --- accidents -----------------------------------------------------------------------------------


FORGED = [
    ({"profile": "nosuch"}, "choose one of 'ranks4', 'small'"),
    ({"profile": ["small"]}, "choose one of 'ranks4', 'small'"),
    ({"profile": "small", "partition": "debug"}, "choose one of 'gpu', 'lab'"),
    ({"time": "00:30:00\n#SBATCH --uid=root"}, "There is no time"),
    ({"account": "other"}, "not 'account'"),
    ({"options": "#SBATCH --uid=root"}, "not 'options'"),
    ({"prologue": "touch /tmp/was-here"}, "not 'prologue'"),
]


def test_a_forged_choice_is_refused_before_it_reaches_slurm(hub: Hub, table: Table):
    student = hub.student("student1")
    for options, said in FORGED:
        with pytest.raises(Refused, match=re.escape(said)) as refused:
            student.request_server(**options)
        assert refused.value.status == 400
        table.add(f"`user_options` {json.dumps(options)}", str(refused.value))
    assert not hub.cluster.jobs()


def log_in_by_hand(name: str) -> tuple[int, str]:
    """Status and page of a log-in with the right password."""
    cookies = http.cookiejar.CookieJar()
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(cookies))
    opener.open(f"{URL}/hub/login", timeout=PAGE).close()
    (xsrf,) = (cookie.value for cookie in cookies if cookie.name == "_xsrf")
    fields = urllib.parse.urlencode({"username": name, "password": PASSWORD, "_xsrf": xsrf})
    try:
        with opener.open(f"{URL}/hub/login", fields.encode(), timeout=PAGE) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode()


@pytest.mark.parametrize("name", ["root", "daemon"])
def test_no_account_of_the_system_logs_in_or_gets_a_server(hub: Hub, table: Table, name: str):
    status, page = log_in_by_hand(name)
    assert status == 403, page
    assert "is an account of the system" in page
    with pytest.raises(Refused, match="is an account of the system") as refused:
        hub.student(name).request_server(profile="small")
    assert refused.value.status == 403
    table.add(f"logs in as {name}", str(refused.value))
    assert not hub.cluster.jobs()


def refusal(student: Student, **options: object) -> str:
    """What a student is told whose server does not start."""
    try:
        student.request_server(**options)
    except Refused as error:
        return str(error)
    last = list(student.progress())[-1]
    assert last["failed"], last
    return last["message"]


def test_more_than_a_partition_ever_gives_is_told_before_slurm_is_asked(hub: Hub, table: Table):
    before = hub.cluster.run("scontrol", "--oneliner", "show", "jobs")
    said = refusal(hub.student("student1"), profile="ranks4", partition="gpu", time="02:00:00")
    assert "'gpu' gives a job 1:00 h at most, not 2:00 h" in said
    assert "'gpu' has 1 node in all, not 2" in said
    table.add("more nodes and time than the partition has", said)
    assert hub.cluster.run("scontrol", "--oneliner", "show", "jobs") == before


def test_a_job_that_the_partition_can_never_start_is_said_at_once_and_cancelled(
    hub: Hub, table: Table
):
    change, blind = ("scontrol", "update", "PartitionName=lab"), hub.cluster.state / "blind"
    blind.touch()
    hub.cluster.run(*change, "MaxTime=60")  # the profile asks for four hours
    try:
        said = refusal(hub.student("student1"), profile="small")
    finally:
        hub.cluster.run(*change, "MaxTime=240")
        blind.unlink()
    assert "can never start" in said
    assert "PartitionTimeLimit" in said
    table.add("the same, and `sinfo` does not answer", said)


def test_a_notebook_goes_on_while_the_hub_restarts(hub: Hub, table: Table):
    student = hub.student("student1")
    student.server(profile="small")
    (job,) = hub.cluster.jobs()
    kernel = student.kernel()
    kernel.run("answer = 41")
    hub.stop()
    meanwhile = kernel.run("answer += 1; print(answer)")
    hub.start()
    assert meanwhile.strip() == "42"
    assert student.is_up()
    assert hub.cluster.jobs() == [job]
    assert Kernel(student, kernel.id).run("print(answer)").strip() == "42"
    table.add("the hub restarts", "nothing: the notebook goes on, kernel and variables stay")


def test_a_full_queue_is_said_while_one_waits_and_at_the_end_of_patience(hub: Hub, table: Table):
    hub.cluster.run("sbatch", "-N2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1000")
    wait_for(lambda: "RUNNING" in "".join(hub.cluster.jobs()), ACT, "the cluster is full")
    patience = hub.cluster.state / "patience"
    patience.write_text("12")
    student = hub.student("student1")
    try:
        student.request_server(profile="small")
        events = list(student.progress())
    finally:
        patience.unlink()
    said = [event["message"] for event in events]
    waiting = [text for text in said if re.match(r"Job \d+ waits in Slurm's queue \(\w+", text)]
    assert waiting, said
    assert events[-1]["failed"], said
    assert "the job was cancelled" in said[-1]
    table.add("the queue is full", *waiting[-1:], said[-1])
    wait_for(lambda: len(hub.cluster.jobs()) == 1, ACT, "the job that came too late is cancelled")


def test_a_job_that_dies_at_its_start_is_reported_with_its_last_words(hub: Hub, table: Table):
    # As with a home folder that is full or a module that is not there.
    config = ".jupyter/jupyter_server_config.py"
    give(hub.cluster, "student1", "raise SystemExit('no more space for you')", config)
    student = hub.student("student1")
    try:
        student.request_server(profile="small")
        last = list(student.progress())[-1]
    finally:
        hub.cluster.run("rm", f"/home/student1/{config}")
    assert last["failed"], last
    assert re.search(r"Job \d+ ended before JupyterLab was up", last["message"]), last
    assert "no more space for you" in last["message"]
    table.add("the job dies at its start", last["message"])


def test_a_cancelled_job_is_noticed_and_takes_its_ranks_along(hub: Hub, table: Table):
    student = hub.student("student1")
    student.server(profile="small")
    kernel = student.kernel()
    start_ranks(kernel, 2, ', launcher="slurm"')
    jobs = {line.split()[1]: line.split()[0] for line in hub.cluster.jobs()}
    assert len(jobs) == 2, jobs
    hub.cluster.run("scancel", jobs["jupyter"])
    wait_for(lambda: not student.is_up(), ACT, "the hub notices")
    with pytest.raises(Refused) as refused:
        student.ask("GET", "api/status")
    table.add("`scancel` of the notebook's job", str(refused.value))
    wait_for(lambda: not hub.cluster.jobs(), ACT, "the ranks' own job ends as well")
    # A click brings a new one.
    student.server(profile="small")
    assert student.kernel().run("print(6 * 7)").strip() == "42"


def test_a_server_that_is_stopped_while_sbatch_runs_leaves_no_job_behind(hub: Hub):
    slow, student = hub.cluster.state / "slow", hub.student("student1")
    slow.touch()
    try:
        student.request_server(profile="small")
        wait_for(hub.cluster.jobs, ACT, "the job is in the queue; sbatch has not ended")
        student.stop()
    finally:
        slow.unlink()
    wait_for(lambda: not hub.cluster.jobs(), ACT, "the job is cancelled")


def test_a_dead_node_ends_its_ranks_not_the_notebook(hub: Hub, table: Table):
    student = hub.student("student1")
    student.server(profile="small")
    (line,) = hub.cluster.jobs()
    ours = line.split()[-1]
    other = next(name for name in slurm_tools.NODES if name != ours)
    kernel = student.kernel()
    start_ranks(kernel, 4, ', launcher="slurm", nodes=2')
    hub.cluster.crash(other)
    try:
        said = kernel.run("%%px\nfrom mpi4py import MPI\nMPI.COMM_WORLD.Barrier()", RANKS)
        table.add("a node dies under the ranks, then `%%px`", said)
        assert kernel.run("print('here')", RANKS).strip() == "here"
        assert student.is_up()
    finally:
        hub.cluster.boot(other)
    again = start_ranks(kernel, 4, ', launcher="slurm", nodes=2')
    assert {host for _, host in again} == set(slurm_tools.NODES)


def test_a_dead_node_of_the_notebooks_own_job_is_said(hub: Hub, table: Table):
    student = hub.student("student1")
    student.server(profile="ranks4")
    kernel = student.kernel()
    start_ranks(kernel, 4)
    hub.cluster.crash("node2")
    try:
        said = kernel.run("%%px\nfrom mpi4py import MPI\nMPI.COMM_WORLD.Barrier()", RANKS)
        table.add("a node dies under notebook and ranks, then `%%px`", said)
        assert kernel.run("print('here')", RANKS).strip() == "here"
        again = kernel.run("ranks = cluster.start(4)", RANKS)
        table.add("…, then `cluster.start(4)`", again)
        assert kernel.run("print('still here')", RANKS).strip() == "still here"
    finally:
        hub.cluster.boot("node2")


# --- whom the hub can act for --------------------------------------------------------------------

BATCH = "#!/bin/sh\n#SBATCH --output=/dev/null\n"
#: What a hub that somebody took over might try with sudo.
TRIED = [
    "-u root sbatch --parsable",
    "-u daemon sbatch --parsable",
    "-u hub sbatch --parsable",
    "-u student1 sbatch --parsable --uid=root",
    "-u student1 sbatch --parsable /home/student1/any.sh",
    "-u student1 srun id",
    "-u student1 bash",
    "-u student1 scancel --user=student1",
    "-u student1 scancel 1 --signal=STOP 2",
    "-u student1 tail -n 200 /home/student1/.jupyterhub-1.log",
    "-u student1 timeout 5 tail -c 20000 /etc/shadow",
    "-u student1 timeout 5 tail -c 20000 /home/student1/.ssh/id /home/student1/.jupyterhub-1.log",
    "-u student1 timeout 5 tail -c 20000 /home/student1/../../etc/.jupyterhub-1.log",
    "-u student1 timeout 5 bash",
    "-u root timeout 5 tail -c 20000 /home/student1/.jupyterhub-1.log",
    "-E -u student1 sbatch --parsable",
    "-u student1 LD_PRELOAD=/tmp/mine.so sbatch --parsable",
    "-u student1 SLURM_CONF=/tmp/slurm.conf sbatch --parsable",
]


def as_hub(cluster: Cluster, words: str, **variables: str) -> str:
    command = f"printf %s '{BATCH}id' | sudo -n {words}"
    return cluster.run("sh", "-c", command, user="hub", check=False, env=variables)


def test_the_hub_is_not_root_and_can_only_submit_cancel_and_look_at_a_students_log(
    hub: Hub, table: Table
):
    assert hub.cluster.run("ps", "-o", "user=", "-C", "jupyterhub").split() == ["hub"]
    for words in TRIED:
        said = as_hub(hub.cluster, words)
        assert re.search("password is required|not allowed", said), f"sudo {words}: {said}"
        table.add(f"the hub calls `sudo {words}`", said)
    assert not hub.cluster.jobs()
    log = "timeout 5 tail -c 20000 /home/student1/.jupyterhub-999999.log"
    assert "No such file" in as_hub(hub.cluster, f"-u student1 {log}")
    assert as_hub(hub.cluster, "-u student1 scancel 999999") == "", "scancel ran"
    # What it may: a job, as the student, with nothing of the hub's environment but what it is for.
    out = "/home/student1/env.out"
    script = BATCH.replace("/dev/null", out) + "id -un; env"
    said = hub.cluster.run(
        *("sh", "-c", f"printf %s '{script}' | sudo -n -u student1 sbatch --parsable"),
        user="hub",
        env={"CONFIGPROXY_AUTH_TOKEN": "of the proxy", "JUPYTERHUB_USER": "student1"},
    )
    wait_for(lambda: not hub.cluster.jobs(), ACT, "the job is done")
    shown = hub.cluster.run("cat", out).splitlines()
    assert "student1" in shown, (said, shown)
    assert "JUPYTERHUB_USER=student1" in shown
    assert not [line for line in shown if "of the proxy" in line]


# --- what many cost ------------------------------------------------------------------------------

# Accounts of a crowd; what they start is a stand-in for JupyterLab, see hub_config.py.
CROWD = """
i=1; while [ $i -le $1 ]; do
    echo "crowd$i:x:$((30000 + i)):20000::/home/crowd$i:/bin/bash" >>/etc/passwd
    echo "crowd$i:*:20000::::::" >>/etc/shadow
    install -d -m 700 -o $((30000 + i)) -g 20000 /home/crowd$i
    i=$((i + 1))
done
"""


def calls(cluster: Cluster) -> dict[str, int]:
    """How often Slurm's controller was asked, by the kind of question, since the last reset."""
    told = cluster.run("sdiag")
    return {kind: int(n) for kind, n in re.findall(r"^\s+(REQUEST_\w+) .*count:(\d+)", told, re.M)}


def wait_in_line(student: hub_tools.Student, to_the_end: bool) -> tuple[float, float]:
    """Start a server; returns seconds until the place in the queue is told, and until it is up."""
    begun, told = time.monotonic(), 0.0
    student.request_server(profile="small")
    for event in student.progress():
        assert not event["failed"], event
        if not told and re.match(r"Job \d+ (waits|runs)", event["message"]):
            told = time.monotonic() - begun
            if not to_the_end:
                break
        if event["ready"]:
            break
    up = time.monotonic() - begun
    if to_the_end:
        student.stop()
    return told or up, up


@pytest.mark.parametrize("many", [20, pytest.param(100, marks=pytest.mark.often)])
def test_a_class_that_starts_at_once_is_told_its_place_and_is_no_load_for_slurm(
    hub: Hub, table: Table, many: int
):
    cluster = hub.cluster
    if many != 20:
        text = slurm_tools.site_settings()
        slurm_tools.write_settings(
            cluster.state, text.replace("starts_at_once = 20", f"starts_at_once = {many}")
        )
        hub.stop()
        hub.start()
    cluster.run("sh", "-c", CROWD, "sh", many + 1)
    *crowd, late = (hub.student(f"crowd{i}") for i in range(1, many + 2))
    cluster.run("sbatch", "-N2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1000")
    wait_for(lambda: "RUNNING" in "".join(cluster.jobs()), ACT, "the cluster is full")
    cluster.run("sdiag", "--reset")
    begun = time.monotonic()
    try:
        with ThreadPoolExecutor(many) as threads:
            waits = threads.map(lambda one: wait_in_line(one, many == 100), crowd)
            wait_for(lambda: len(pending(hub)) == many, ACT, "all wait")
            with pytest.raises(Refused, match="Too many users") as refused:
                late.request_server(profile="small")
            assert refused.value.status == 429
            if many == 100:
                cluster.run("scancel", "--user=root")
            told, up = zip(*waits, strict=True)
        seconds, asked = time.monotonic() - begun, calls(cluster)
    finally:
        cluster.run("scancel", "--partition=lab")
        wait_for(lambda: not cluster.jobs(), ACT, "all jobs end")
        wait_for(lambda: not pending(hub), ACT, "the hub has noticed")
    looks = asked["REQUEST_JOB_INFO"] / seconds
    submitted = asked["REQUEST_SUBMIT_BATCH_JOB"]
    table.add(
        f"{many} start at once, the cluster is full",
        f"all were told their place within {max(told):.1f} s, the first after {min(told):.1f} s",
        f"{seconds:.0f} s: {looks:.2f} squeue a second, {submitted} sbatch"
        + (f"; all had a server within {max(up):.0f} s" if many == 100 else ""),
        f"who comes then: {refused.value}",
    )
    assert submitted == many
    # The hub asks once for all, about every two seconds. If each asked: ten a second.
    assert looks <= 2


def pending(hub: Hub) -> list[str]:
    """The crowd's users whose server is being started."""
    users = hub.ask("GET", "/hub/api/users?limit=500")
    return [
        user["name"]
        for user in users
        if user["name"].startswith("crowd") and user.get("pending") == "spawn"
    ]
