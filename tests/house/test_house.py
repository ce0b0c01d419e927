"""The house: one list of dependencies, one environment; execution and lint of notebooks."""

from __future__ import annotations

import ast
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml
from matplotlib.figure import Figure
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version
from scheduling import group_of

from utils.__main__ import main, parser
from utils.course import about, execute, lint
from utils.course.about import PARTS
from utils.course.notebook import NotebookError, dumps, read
from utils.figures import forms
from utils.jobs import open_labs

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ENVIRONMENT = yaml.safe_load((ROOT / "environment.yml").read_text())
MAKEFILE = (ROOT / "Makefile").read_text()

# --- dependencies ------------------------------------------------------------------------------


def direct() -> dict[str, Requirement]:
    """Every dependency that pyproject.toml names, extras included, by canonical name."""
    texts = [*PROJECT["dependencies"]]
    for extra in PROJECT["optional-dependencies"].values():
        texts += extra
    found = [Requirement(text) for text in texts]
    named = {canonicalize_name(one.name): one for one in found}
    return {name: one for name, one in named.items() if name != PROJECT["name"]}


def pins() -> dict[str, str]:
    """What .ci/constraints.txt pins."""
    lines = (ROOT / ".ci" / "constraints.txt").read_text().splitlines()
    stripped = [line.partition("#")[0].strip() for line in lines]
    return dict(line.split("==") for line in stripped if line)


def conda(name: str) -> str | None:
    """environment.yml's entry for a conda package."""
    entries = [one for one in ENVIRONMENT["dependencies"] if isinstance(one, str)]
    return next((one for one in entries if re.split("[=<> ]", one)[0] == name), None)


def pip_lines() -> list[str]:
    """What environment.yml gives to pip."""
    entries = [one for one in ENVIRONMENT["dependencies"] if isinstance(one, dict)]
    assert len(entries) == 1
    return entries[0]["pip"]


def of_a_lab_only() -> set[str]:
    """What an extra names that students may do without, and so do the tests."""
    return {Requirement(text).name for text in PROJECT["optional-dependencies"]["federated"]}


def test_every_direct_dependency_is_pinned():
    assert set(direct()) <= {canonicalize_name(name) for name in pins()}


@pytest.mark.parametrize("name", sorted(direct()))
def test_the_pin_lies_in_the_range(name):
    version = {canonicalize_name(key): value for key, value in pins().items()}[name]
    assert direct()[name].specifier.contains(version)


def test_the_tests_run_on_the_pinned_versions():
    """`make test` keeps the PyTorch that `make env TORCH=…` installed: then that may differ."""
    asked_for = ROOT / ".venv" / ".torch"
    other = asked_for.exists() and asked_for.read_text().strip() != "tested"
    free = {"torch", "torchvision"} if other else set()
    free |= {name for name in of_a_lab_only() if importlib.util.find_spec(name) is None}
    differing = {
        name: installed
        for name, version in pins().items()
        if name not in free
        and Version(installed := importlib.metadata.version(name)).public != version
    }
    assert not differing


def test_conda_installs_only_python_and_pip():
    entries = [one for one in ENVIRONMENT["dependencies"] if isinstance(one, str)]
    assert {re.split("[=<> ]", one)[0] for one in entries} == {"python", "pip"}
    assert ENVIRONMENT["channels"] == ["conda-forge"]


def test_conda_python_is_one_that_the_project_allows():
    version = conda("python").removeprefix("python").lstrip("=")
    assert SpecifierSet(PROJECT["requires-python"]).contains(f"{version}.0")


def test_conda_make_and_pip_install_the_same():
    """requirements.txt has the versions and the index, the same as make: see test_install.py."""
    extras = dict(re.findall(r"^\$\(VENV\)/\.(\w+): EXTRAS = ?(\S*)$", MAKEFILE, re.MULTILINE))
    assert extras == {
        "env": "",
        "grade": "[course]",
        "site": "[site]",
        "slides": "[slides]",
        "test": "[test]",
    }
    assert set(PROJECT["optional-dependencies"]) >= {"course", "site", "test"}
    assert pip_lines() == ["-r requirements.txt", f"-e .{extras['test']}"]


def test_windows_users_read_how_it_goes_without_make(house):
    done = make(house, "env", OS="Windows_NT")
    assert done.returncode
    assert ".venv\\Scripts\\python -m utils lab" in done.stderr
    (page,) = re.findall(r"See (docs/[\w-]+\.md)", done.stderr)
    assert (ROOT / page).exists()
    assert not (house / ".venv").exists()


# --- Makefile ----------------------------------------------------------------------------------


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """The Makefile alone, with a pyproject.toml, in a folder without an environment."""
    if shutil.which("make") is None:
        pytest.skip("no make")
    (tmp_path / ".ci").mkdir()
    for name in ("Makefile", "pyproject.toml", ".ci/constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def make(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    """Run make without the settings of the make that may have started the tests."""
    hidden = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS", "TORCH", "MAKEOVERRIDES"}
    env = {key: value for key, value in os.environ.items() if key not in hidden} | variables
    return subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=200,
    )


def fake_python(folder: Path, body: str) -> str:
    """A stand-in for an interpreter that answers as the shell text says."""
    path = folder / "fake-python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_make_alone_lists_every_target(house):
    (house / "solutions").mkdir()  # by which authors are told from students
    listed = re.findall(r"^  make (\S+)", make(house).stdout, re.MULTILINE)
    phony = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[1].split()
    assert listed == [name for name in phony if name != "FORCE"]


def test_make_check_runs_nothing_that_is_there_on_demand():
    """Its own `-m` replaces the one of pyproject.toml. An expression of marks is one of Python."""
    expression = re.search(r"-m '(quick[^']+)'", MAKEFILE)[1]
    marks = {"quick": True, "often": False, "extended": False}
    assert eval(expression, marks)
    assert not eval(expression, marks | {"often": True})


def test_make_test_leaves_out_only_what_make_test_all_runs_or_what_is_there_on_demand():
    common, course = (re.search(rf"^{n} = (.+)$", MAKEFILE, re.M)[1] for n in ("COMMON", "COURSE"))
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    on_demand = re.search(r"-m '([^']+)'", options["addopts"])[1]
    assert common == f"{on_demand} and not extended"
    assert course == "$(COMMON) and not rest"


def test_an_old_python_is_refused(house):
    old = fake_python(house, 'case "$1" in --version) echo Python 3.9.2;; *) exit 1;; esac')
    done = make(house, "env", f"PYTHON={old}")
    assert done.returncode
    assert "Python 3.11 or later is needed" in done.stderr
    assert "Python 3.9.2" in done.stderr
    assert not (house / ".venv").exists()


def test_a_python_that_is_not_there_is_named(house):
    done = make(house, "env", "PYTHON=no-such-python")
    assert "'no-such-python' is not there" in done.stderr


def test_a_python_without_venv_is_refused(house):
    bare = fake_python(house, 'case "$2" in *ensurepip*) exit 1;; esac')
    done = make(house, "env", f"PYTHON={bare}")
    assert "python3-venv" in done.stderr
    assert not (house / ".venv").exists()


@pytest.fixture
def pretended(house: Path) -> tuple[Path, Path]:
    """A house whose environment is a script that writes down what pip was asked for."""
    log = house / "log"
    make_venv = "rm -rf .venv; mkdir -p .venv/bin; cp fake-python .venv/bin/python"
    write_down = f'echo "$@" >> {log}'
    fake_python(house, f'case "$1 $2" in -c*) ;; *venv) {make_venv};; *) {write_down};; esac')
    return house, log


def asked(log: Path) -> list[str]:
    """The pip calls since the last look."""
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    log.unlink(missing_ok=True)
    return [line for line in lines if line.startswith("-m pip")]


def test_the_environment_is_built_once(pretended):
    house, log = pretended
    python = f"PYTHON={house / 'fake-python'}"
    assert make(house, "env", python).returncode == 0
    (call,) = asked(log)
    assert "-e . -c .venv/.constraints.txt" in call
    constraints = (house / ".venv/.constraints.txt").read_text()
    assert constraints == (ROOT / ".ci/constraints.txt").read_text()
    assert make(house, "env", python).returncode == 0
    assert asked(log) == []
    os.utime(house / "pyproject.toml")
    make(house, "env", python)
    assert len(asked(log)) == 1


def test_the_choice_of_wheels_is_kept_and_a_new_one_replaces_pytorch(pretended):
    house, log = pretended
    python = f"PYTHON={house / 'fake-python'}"

    def called() -> list[str]:
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return [re.sub(" (-c|--constraints) .*", "", line) for line in lines]

    install = "-m pip install --disable-pip-version-check -e "
    remove = "-m pip uninstall -q -y torch torchvision"
    make(house, "env", python)
    assert called() == ["-P utils/doctor/wheels.py --index cpu", install + "."]
    for asked in ("pypi", "", "https://mirror.example/whl/cu130", "cpu"):
        given = f"TORCH_INDEX={asked}"
        if asked:  # without a name it is the package index, as before
            assert make(house, "env", python, given).returncode == 0
            assert called() == [remove, f"-P utils/doctor/wheels.py --index {asked}", install + "."]
        assert "PyTorch: tested, wheels: " in make(house, "env", python, given).stdout
        assert called() == []
        make(house, "grade-asked", python)
        assert called() == []
    make(house, "env", python, "TORCH_INDEX=pypi")
    called()
    make(house, "test-env", python)  # nobody says it again
    assert called() == ["-P utils/doctor/wheels.py --index pypi", install + ".[test]"]


def test_another_pytorch_and_back(pretended):
    house, log = pretended
    python = f"PYTHON={house / 'fake-python'}"
    make(house, "env", python)
    asked(log)
    make(house, "env", python, "TORCH=2.15.0")
    assert len(asked(log)) == 1
    constraints = (house / ".venv/.constraints.txt").read_text().splitlines()
    assert "torch==2.15.0" in constraints
    assert not [line for line in constraints if re.match("torchvision|torch==2.13", line)]
    make(house, "env", python, "TORCH=2.15.0")
    make(house, "lint", python)  # keeps it: installs the test extra, with the same PyTorch
    calls = asked(log)
    assert sum("-m pip" in call for call in calls) == 1
    assert "torch==2.15.0" in (house / ".venv/.constraints.txt").read_text()
    make(house, "env", python)
    assert len(asked(log)) == 1
    assert "torch==2.15.0" not in (house / ".venv/.constraints.txt").read_text()


def test_a_copied_environment_is_built_again(pretended):
    house, log = pretended
    python = f"PYTHON={house / 'fake-python'}"
    make(house, "env", python)
    asked(log)
    (house / ".venv/.home").write_text("/elsewhere\n")
    make(house, "env", python)
    assert len(asked(log)) == 1


@pytest.fixture
def with_bwrap(pretended) -> tuple[Path, Path, dict[str, str]]:
    """A house with a ddl-labs that writes to the log; variables by which bubblewrap is there."""
    house, log = pretended
    tools = house / "tools"
    tools.mkdir()
    (tools / "bwrap").symlink_to("/bin/true")
    python = house / "fake-python"
    venv = "mkdir -p .venv/bin; cp fake-python .venv/bin/python"
    labs = f"printf '#!/bin/sh\\necho ddl-labs \"$@\" >> {log}\\n' > .venv/bin/ddl-labs"
    made = f"{venv}; {labs}; chmod +x .venv/bin/ddl-labs"
    python.write_text(python.read_text().replace(venv, made))
    (house / "in").mkdir()
    return house, log, {"PATH": f"{tools}:{os.environ['PATH']}"}


def test_one_command_grades_on_a_machine_that_has_nothing_yet(with_bwrap):
    house, log, env = with_bwrap
    given = [f"PYTHON={house / 'fake-python'}", "SUBMISSIONS=in", "RESULTS=my out", "ARGS=-j 2"]
    done = make(house, "grade", *given, **env)
    assert done.returncode == 0, done.stderr
    lines = log.read_text().splitlines()
    assert [line for line in lines if "-e .[course]" in line]
    assert lines[-1] == "ddl-labs grade in -o my out -j 2"
    asked(log)
    make(house, "grade", *given, **env)
    assert asked(log) == [], "what is there is not installed again"


def test_who_has_the_tests_environment_installs_nothing_to_grade(with_bwrap):
    house, log, env = with_bwrap
    python = f"PYTHON={house / 'fake-python'}"
    make(house, "test-env", python, **env)
    assert len(asked(log)) == 1
    assert make(house, "grade", python, "SUBMISSIONS=in", "RESULTS=out", **env).returncode == 0
    assert asked(log) == []


def test_who_has_an_environment_for_students_gets_what_grading_needs(with_bwrap):
    house, log, env = with_bwrap
    python = f"PYTHON={house / 'fake-python'}"
    make(house, "env", python, **env)
    asked(log)
    make(house, "grade", python, "SUBMISSIONS=in", "RESULTS=out", **env)
    (call,) = asked(log)
    assert "-e .[course]" in call


@pytest.fixture(params=[True, False], ids=["Linux and macOS", "Windows"])
def opened(request, tmp_path, monkeypatch) -> Callable[..., list[str]]:
    """`opened("--port=8899")`: the words that `python -m utils lab` says to JupyterLab."""
    said: list[list[str]] = []

    class Server(contextlib.nullcontext):
        def __init__(self, command, env):
            super().__init__(self)
            said.append(command)

        def wait(self) -> int:
            return 0

    def become(program, command, environment):
        said.append(command)
        raise SystemExit(0)  # execve does not return

    monkeypatch.setenv("JUPYTERLAB_WORKSPACES_DIR", str(tmp_path))
    monkeypatch.setattr(open_labs, "POSIX", request.param)
    monkeypatch.setattr(open_labs, "_warm_up", lambda _: None)
    monkeypatch.setattr(open_labs.subprocess, "Popen", Server)
    monkeypatch.setattr(open_labs.os, "execve", become)

    def start(*arguments: str) -> list[str]:
        with contextlib.suppress(SystemExit):
            assert main(["lab", *arguments]) == 0
        return said[-1]

    return start


FIRST_LAB = "--LabApp.default_url=/lab/tree/00_start_here.ipynb"


def test_lab_opens_lab_00_until_jupyterlab_has_been_used_and_then_what_was_open(tmp_path, opened):
    assert FIRST_LAB in opened()
    assert FIRST_LAB in opened(), "nobody has looked at it yet"
    (saved,) = tmp_path.iterdir()
    saved.write_text(saved.read_text().replace('"widgets": []', '"widgets": ["notebook:01"]'))
    before = saved.read_text()
    assert not [word for word in opened() if "default_url" in word]
    assert saved.read_text() == before, "the user's layout is kept"


def test_lab_gives_jupyterlab_all_other_words(opened):
    words = opened("--port=8899", "--no-browser", "--ip=0.0.0.0")
    assert {"--port=8899", "--no-browser", "--ip=0.0.0.0", FIRST_LAB} <= {*words}


def test_lab_opens_the_page_that_the_user_asks_for(opened):
    """JupyterLab ends with an error if an option is given twice."""
    words = opened("--LabApp.default_url=/lab/tree/01_c10d.ipynb")
    assert [word for word in words if "default_url" in word] == [
        "--LabApp.default_url=/lab/tree/01_c10d.ipynb"
    ]


def test_make_lab_says_the_port_and_the_words_of_args_to_utils_lab(pretended):
    house, log = pretended
    python = f"PYTHON={house / 'fake-python'}"
    done = make(house, "lab", python, "PORT=8899", "ARGS=--no-browser --ip=0.0.0.0")
    assert done.returncode == 0, done.stderr
    said = log.read_text(encoding="utf-8").splitlines()
    assert "-m utils lab --port=8899 --no-browser --ip=0.0.0.0" in said


@pytest.fixture
def without_bwrap(house) -> dict[str, str]:
    """Variables by which there is all that make needs, and no bubblewrap."""
    tools = house / "few"
    tools.mkdir()
    for name in ("sh", "cat", "cmp", "echo", "rm", "mkdir", "cp", "awk"):
        (tools / name).symlink_to(shutil.which(name))
    return {"PATH": f"{tools}"}


def test_what_only_the_administrator_can_install_is_said_before_anything_is_built(
    house, without_bwrap
):
    (house / "in").mkdir()
    made = shutil.which("make")
    given = [made, "--no-print-directory", "grade", "SUBMISSIONS=in", "RESULTS=out"]
    about = {"cwd": house, "env": without_bwrap, "capture_output": True, "text": True}
    done = subprocess.run(given, **about, timeout=60, check=False)
    assert done.returncode
    assert "apt-get install bubblewrap" in done.stderr
    assert not (house / ".venv").exists()
    done = subprocess.run([*given, "ARGS=--no-sandbox"], **about, timeout=60, check=False)
    assert "bubblewrap" not in done.stderr


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "make grade SUBMISSIONS=submissions.zip RESULTS=results"),
        (["SUBMISSIONS=in"], "where to?"),
        (["SUBMISSIONS=not-there", "RESULTS=out"], "'not-there' is not there"),
    ],
)
def test_grading_without_submissions_says_how_it_is_asked_for(house, given, said):
    done = make(house, "grade", *given)
    assert done.returncode
    assert said in done.stderr
    assert not (house / ".venv").exists()


def test_no_file_names_this_machine_or_a_registry():
    """Absolute paths and package indexes have no place in what users get."""
    home = re.compile(rf"{re.escape(str(ROOT))}|/(opt|root)/|https?://\S+/(simple|whl)\b")
    for name in (
        "Makefile",
        "environment.yml",
        "pyproject.toml",
        ".ci/run",
        ".ci/bare",
        ".ci/constraints.txt",
        "requirements.txt",
        ".ci/newest",
        ".devcontainer/devcontainer.json",
        "Dockerfile",
        "utils/mpi/pyproject.toml",
        *(str(path.relative_to(ROOT)) for path in (ROOT / ".github/workflows").iterdir()),
    ):
        text = (ROOT / name).read_text().replace("https://download.pytorch.org/whl/cpu", "")
        assert not home.search(text), name


# --- the tests themselves ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("test", "group"),
    [
        ("test_solutions.py::test_nbval[05_scaling]", "05_scaling"),
        ("test_solutions.py::test_an_altered_output", "test_solutions"),
        ("test_mpi_backend.py::test_backend[point_to_point-4-a_case]", "mpi-4"),
        ("test_mpi_backend.py::test_backend[slow_network-4-a_case]", "mpi-4"),
        ("test_mpi_backend.py::test_backend[message_board-3-a_case]", "message_board-3"),
        ("test_c10d_suite.py::test_a_user_can_rely_on[barrier-2]", "c10d-2"),
        ("test_hub.py::test_a", "slurm"),
        ("test_slurm.py::test_b[one]", "slurm"),
        ("test_lab03.py::test_c[3.1-a-2]", "test_lab03"),
        ("test_answers.py::test_a_wrong_answer[3.1-divides-by-2]", "answers-3"),
        ("test_answers.py::test_every_task[lab03]", "answers-3"),
        ("test_answers.py::test_the_solution_passes[10.2]", "answers-10"),
        ("test_answers_on_ranks.py::test_a_wrong_answer[3.1-a]", "on-ranks-3"),
    ],
)
def test_what_shares_ranks_runs_in_one_process_and_labs_are_shared_out(test, group):
    assert group_of(f"tests/{test}") == group


@pytest.mark.extended
def test_the_tests_of_a_group_run_in_one_process():
    command = [sys.executable, "-m", "pytest", "-v", "-n", "2", "--dist", "loadgroup"]
    files = ["tests/hpc/test_hpc.py", "tests/mpi/test_diagnosis.py"]
    done = subprocess.run(
        [*command, *files], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    places = set(re.findall(r"^\[(gw\d)\].* (tests/\w+/\w+\.py)", done.stdout, re.MULTILINE))
    assert sorted(file for _, file in places) == sorted(files), done.stdout


# --- execution ---------------------------------------------------------------------------------


def notebook(tmp_path: Path, *cells, **metadata) -> Path:
    """A notebook file; strings become code cells c1, c2 …"""
    made = [
        new_code_cell(cell, id=f"c{index}") if isinstance(cell, str) else cell
        for index, cell in enumerate(cells, 1)
    ]
    path = tmp_path / "01_toy.ipynb"
    text = dumps(new_notebook(cells=made, metadata=metadata))
    path.write_text(text, encoding="utf-8")
    return path


def check(source: str, task: str = "1.1", **metadata):
    about = {"lab": {"task": task, "check": True}, **metadata}
    return new_code_cell(source, id=f"check-{task.replace('.', '-')}", metadata=about)


def test_checks_are_counted(tmp_path):
    path = notebook(
        tmp_path,
        "x = 1",
        check("print('✓ Task 1.1: one')\nprint('  ✓ Task 9 is not at the start')"),
        check("print('\\x1b[32m✓ Task 1.2\\x1b[0m two')", "1.2"),
        check("print('✗ Task 1.3: three')", "1.3"),
    )
    result = execute.execute(path, timeout=200)
    assert (result.name, result.passed, result.failed) == ("01_toy.ipynb", 2, 1)
    assert result.error is None
    assert not result.ok
    assert "2 of 3 checks passed" in str(result)


def test_a_silent_check_fails_and_old_outputs_do_not_count(tmp_path):
    silent = check("x = 1")
    silent.outputs = [new_output("stream", name="stdout", text="✓ Task 1.1\n")]
    result = execute.execute(notebook(tmp_path, silent), timeout=200)
    assert (result.passed, result.failed, result.ok) == (0, 1, False)
    assert "the check of task 1.1 printed no '✓ Task' line" in result.error


def test_a_lab_is_run_by_its_number(monkeypatch, capsys, tmp_path):
    notebook(tmp_path, "x = 1").rename(tmp_path / "03_toy.ipynb")
    ran, result = [], execute.Result("03_toy.ipynb", 1.0, 1, 0)
    monkeypatch.setattr(execute, "execute", lambda path, **_: ran.append(path.name) or result)

    def status_of(name: str) -> int:
        options = parser().parse_args(["run", name])
        monkeypatch.setattr("utils.__main__.SOLUTIONS", tmp_path)
        return options.command(options)

    assert [status_of(n) for n in ("03", "03_toy", str(tmp_path / "03_toy.ipynb"))] == [0, 0, 0]
    assert ran == ["03_toy.ipynb"] * 3
    with pytest.raises(NotebookError, match="there is no notebook 04"):
        status_of("04")


def test_an_exception_names_its_cell_and_is_allowed_where_tagged(tmp_path):
    allowed = new_code_cell("1 / 0", id="boom", metadata={"tags": ["raises-exception"]})
    assert execute.execute(notebook(tmp_path, allowed, "x = 1"), timeout=200).ok
    result = execute.execute(notebook(tmp_path, allowed, "{}['key']", "x = 1"), timeout=200)
    assert result.error == "cell 'c2': KeyError: 'key'"
    assert not result.ok


def test_a_cell_that_hangs_ends_at_its_time_and_leaves_nothing(tmp_path):
    source = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],\n"
        "                         start_new_session=True)\n"
        "open('pid', 'w').write(str(child.pid))\n"
        "time.sleep(600)"
    )
    path = notebook(tmp_path, "1", source)
    saved = execute.GRACE
    execute.GRACE = 0.5
    try:
        result = execute.execute(path, timeout=3)
    finally:
        execute.GRACE = saved
    assert result.error == "cell 'c2': still running after 3 s"
    assert result.seconds < 40
    child = int((tmp_path / "pid").read_text())
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_a_kernel_that_dies_is_told(tmp_path):
    result = execute.execute(notebook(tmp_path, "import os; os._exit(0)"), timeout=200)
    assert result.error == "cell 'c1': the kernel died"


def test_the_kernel_is_this_python_in_the_notebooks_folder_and_not_interactive(tmp_path):
    source = "import os, sys; print(sys.prefix, os.getcwd(), os.environ['IPP_NONINTERACTIVE'])"
    path = notebook(tmp_path, source)
    assert execute.execute(path, store=True, timeout=200).ok
    (output,) = read(path).cells[0].outputs
    assert output.text.split() == [sys.prefix, str(tmp_path), "1"]


def test_a_new_cell_gets_outputs_and_the_measured_numbers_of_the_others_stay(tmp_path):
    path = notebook(tmp_path, "import time; print(time.time_ns())")
    assert execute.execute(path, store=True, timeout=200).ok
    nb = read(path)
    before = nb.cells[0].outputs[0].text
    nb.cells.append(new_code_cell("print('new')", id="c2"))
    path.write_text(dumps(nb), encoding="utf-8")
    assert execute.execute(path, store=True, only_new=True, timeout=200).ok
    assert [cell.outputs[0].text for cell in read(path).cells] == [before, "new\n"]


def test_a_stored_notebook_has_the_same_bytes_each_time(tmp_path):
    source = (
        "import sys, time\n"
        "print('out'); print('err', file=sys.stderr); print('out', flush=True); time.sleep(.1)\n"
        "get_ipython().display_pub.publish({'text/plain': 'x'}, {'when': time.time()})\n"
        "1 + 1"
    )
    path = notebook(tmp_path, new_markdown_cell("text", id="words"), source)
    assert execute.execute(path, store=True, timeout=200).ok
    first = path.read_bytes()
    assert execute.execute(path, store=True, timeout=200).ok
    assert path.read_bytes() == first
    nb = json.loads(first)
    assert [cell["id"] for cell in nb["cells"]] == ["words", "c2"]
    assert (nb["nbformat"], nb["nbformat_minor"]) == (4, 5)
    assert nb["cells"][1]["execution_count"] == 1
    assert nb["cells"][1]["metadata"] == {}
    assert all(not output.get("metadata") for output in nb["cells"][1]["outputs"])
    assert nb["metadata"]["language_info"] == {"name": "python"}


def test_a_failed_run_is_not_stored(tmp_path):
    path = notebook(tmp_path, "1 / 0")
    before = path.read_bytes()
    assert not execute.execute(path, store=True, timeout=200).ok
    assert path.read_bytes() == before


def test_another_environments_kernel_is_refused(tmp_path, monkeypatch):
    spec = tmp_path / "kernels" / "python3"
    spec.mkdir(parents=True)
    argv = ["/usr/bin/env", "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    text = json.dumps({"argv": argv, "display_name": "other", "language": "python"})
    (spec / "kernel.json").write_text(text)
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    with pytest.raises(execute.KernelError, match="starts /usr/bin/env instead of"):
        execute.require_kernel()


# --- lint --------------------------------------------------------------------------------------


#: What a lab says about itself, to tools and to readers.
ABOUT = {"title": "Toy", "part": PARTS[0], "minutes": 30, "ranks": 2, "builds_on": []}
TITLE = new_markdown_cell("# 01 · Toy: a lab\n\n| 30 minutes | 2 | none |", id="title")


def linted(tmp_path: Path, *cells, folder: str = "solutions") -> list[str]:
    """What lint says about one notebook, without the notebook's name."""
    (tmp_path / "solutions").mkdir()
    (tmp_path / "labs").mkdir()
    notebook(tmp_path / folder, TITLE, *cells, lab=ABOUT)
    found = lint.lint(tmp_path / "solutions", tmp_path / "labs")
    return [text.removeprefix(f"{folder}/01_toy.ipynb: ") for text in found]


def ran(source: str = "1", cell_id: str = "ring-task", outputs=(), **metadata):
    cell = new_code_cell(source, id=cell_id, outputs=list(outputs), metadata=metadata)
    cell.execution_count = 1
    return cell


def test_a_good_solution_has_no_problems(tmp_path):
    good = ran("# NBVAL_IGNORE_OUTPUT\n1", tags=["nbval-skip", "raises-exception", "remove-cell"])
    assert linted(tmp_path, new_markdown_cell("# nbval", id="words"), good) == []


PARTED = """# 01 · Toy: a lab

| part | time | ranks | points |
|---|---|---|---|
| core path | 30 minutes | 2 | 3 |
| *Go further* | 20 minutes | the same | 2, and 1 for explanations |
"""


def answer(cell_id: str, points: int, kind=new_code_cell):
    """An answer cell of a solution, worth so many points."""
    about = {"nbgrader": {"solution": True}, "lab": {"points": points}}
    return kind("1", id=cell_id, metadata=about)


def parted(title: str = PARTED, **metadata) -> list[str]:
    """What lint says about a lab of a core path and a part to go further."""
    cells = [
        new_markdown_cell(title, id="title"),
        answer("ring", 3),
        new_markdown_cell("## Go further\n\nNow halve it.", id="further"),
        answer("halving", 2),
        answer("why", 1, new_markdown_cell),
    ]
    nb = new_notebook(cells=cells, metadata={"lab": ABOUT | {"further": 20} | metadata})
    return list(about.problems_of(nb, "01", {"01"}))


def test_a_lab_with_a_core_path_and_more_to_go_further_has_no_problems():
    assert parted() == []


@pytest.mark.parametrize(
    ("title", "metadata", "says"),
    [
        (PARTED.replace("Toy: a lab", "Toy: " + 2310 * "a "), {}, "its core path takes about 34"),
        (PARTED.replace("20 minutes", "25 minutes"), {}, "| *Go further* | 20 minutes |"),
        (PARTED.replace("the same | 2", "the same | 3"), {}, "2, and 1 for explanations |"),
        (PARTED.replace("| 2 | 3 |", "| 2 | 6 |"), {}, "says '6' points, its tasks give '3'"),
        (PARTED, {"further": 0}, "its further are 0"),
    ],
)
def test_a_student_reads_how_long_each_part_takes_and_what_it_is_worth(title, metadata, says):
    assert says in "\n".join(parted(title, **metadata))


def test_a_part_to_go_further_needs_its_minutes():
    nb = new_notebook(
        cells=[TITLE, new_markdown_cell("## Go further", id="further")], metadata={"lab": ABOUT}
    )
    (problem,) = about.problems_of(nb, "01", {"01"})
    assert "1 cells begin with '## Go further'" in problem


def test_lines_of_code_that_are_too_wide_are_found(tmp_path):
    wide = ran(f"%%px\nx = 1\n# {'w' * 85}\n# {'w' * 84}")
    words = new_markdown_cell("w" * 200, id="words")
    (problem,) = linted(tmp_path, words, wide)
    assert problem == "cell 'ring-task': line 3 has 87 columns, more than 86: break it"


def test_items_that_an_editor_has_joined_to_a_paragraph_are_found():
    text = "Write it. - A rank sends. - It waits.\n\n- An item\n- Another one"
    cell = new_markdown_cell(text, id="ring-task")
    (problem,) = lint.list_problems(cell)
    assert problem.startswith("'it. - A' looks like an item inside a paragraph")
    assert not [*lint.list_problems(new_markdown_cell("- An item\n- p - 1 ranks", id="x"))]


@pytest.mark.parametrize(
    ("source", "guess"),
    [
        ("# NBVAL_IGNORE_OUTPT", "NBVAL_IGNORE_OUTPUT"),
        ("%%px\n#nbval_skip", "NBVAL_SKIP"),
        ("x = 1  # NBVAL_SKIP", "NBVAL_SKIP"),
        ("# NBVAL_RAISE_EXCEPTION", "NBVAL_RAISES_EXCEPTION"),
        ("# NBVAL_CHECK_OUTPUT please", "NBVAL_CHECK_OUTPUT"),
    ],
)
def test_markers_that_nbval_would_ignore_are_found(tmp_path, source, guess):
    (problem,) = linted(tmp_path, ran(source))
    assert problem.startswith("cell 'ring-task': nbval ignores")
    assert f"'# {guess}'" in problem


@pytest.mark.parametrize(
    ("tag", "guess"),
    [
        ("nbval-ignore_output", "nbval-ignore-output"),
        ("nbval-ignore-outputs", "nbval-ignore-output"),
        ("NBVAL_SKIP", "nbval-skip"),
        ("raise-exception", "raises-exception"),
        ("nbval-quux", "nbval-"),
    ],
)
def test_tags_that_nbval_would_ignore_are_found(tmp_path, tag, guess):
    (problem,) = linted(tmp_path, ran(tags=[tag]))
    assert f"nbval ignores the tag '{tag}'" in problem
    assert guess in problem.partition("mean")[2]


@pytest.mark.parametrize("cell_id", ["1f0a9c3b", "3d3e4f5a-aaaa-bbbb-cccc-0123456789ab"])
def test_ids_that_an_editor_made_up_are_found(tmp_path, cell_id):
    (problem,) = linted(tmp_path, ran(cell_id=cell_id))
    assert "an editor made up this id" in problem


def test_ids_that_are_no_words_are_found(tmp_path):
    (problem,) = linted(tmp_path, ran(cell_id="Ring_Task"))
    assert "small letters" in problem


def test_cells_that_were_not_executed_are_found(tmp_path):
    (problem,) = linted(tmp_path, new_code_cell("1", id="ring-task"))
    assert "was never executed" in problem


def test_outputs_of_one_execution_are_found(tmp_path):
    output = new_output("execute_result", {"text/plain": "1"}, metadata={"started": "12:00"})
    found = linted(tmp_path, ran(outputs=[output]), ran(cell_id="second", execution={"x": "12:00"}))
    assert len(found) == 2
    assert all("times or ids of one execution" in problem for problem in found)


def test_outputs_that_name_this_machine_are_found(tmp_path):
    output = new_output("stream", text=f"File {ROOT}/utils/cluster.py, line 3\n")
    (problem,) = linted(tmp_path, ran(outputs=[output]))
    assert "a folder of this machine" in problem


@pytest.mark.parametrize(
    "about", [{}, {"image/png": {"alt": "Figure 1"}}, {"image/svg+xml": {"alt": "a ring of ranks"}}]
)
def test_a_picture_that_says_nothing_to_who_does_not_see_it_is_found(tmp_path, about):
    shown = new_output("display_data", {"image/png": "aGVsbG8=", "text/plain": "x"}, metadata=about)
    (problem,) = linted(tmp_path, ran(outputs=[shown]))
    assert "'ring-task': shows a picture without alternative text" in problem


@pytest.mark.parametrize(("inches", "count"), [(8.9, 0), (9.2, 1)])
def test_a_picture_that_a_page_would_scale_down_is_found(tmp_path, inches, count):
    figure = Figure(figsize=(inches, 1))
    figure.alt_text = "A picture without anything."
    data, about = forms.bundle(figure)
    found = linted(tmp_path, ran(outputs=[new_output("display_data", data, metadata=about)]))
    assert len(found) == count
    assert all("draw it in at most 9 inches" in problem for problem in found)


@pytest.mark.parametrize("tag", ["![](a.png)", "![map](a.png)", "<img src='a.png'>"])
def test_a_picture_in_a_text_that_says_nothing_is_found(tmp_path, tag):
    (problem,) = linted(tmp_path, new_markdown_cell(f"See {tag}", id="words"))
    assert "'words': shows a picture" in problem


def test_pictures_with_words_are_no_problem(tmp_path):
    about = {"image/png": {"alt": "A ring of four ranks."}}
    shown = new_output("display_data", {"image/png": "aGVsbG8=", "text/plain": "x"}, metadata=about)
    text = "![Four ranks in a ring](a.png) <img src='b.png' alt='a ring'>"
    assert linted(tmp_path, new_markdown_cell(text, id="words"), ran(outputs=[shown])) == []


def test_labs_with_outputs_or_solutions_are_found(tmp_path):
    cell = ran("### BEGIN SOLUTION\n1\n### END SOLUTION")
    found = linted(tmp_path, cell, folder="labs")
    assert [problem.partition(": run make")[0] for problem in found] == [
        "cell 'ring-task': has outputs of an execution",
        "cell 'ring-task': shows a solution or a hidden test",
    ]


def test_a_broken_notebook_is_a_problem_not_a_crash(tmp_path):
    (tmp_path / "solutions").mkdir()
    (tmp_path / "solutions" / "01_toy.ipynb").write_text("{")
    (problem,) = lint.lint(tmp_path / "solutions", tmp_path / "labs")
    assert problem.startswith("solutions/01_toy.ipynb is not a notebook")


@pytest.mark.parametrize(
    ("about", "said"),
    [
        (None, "the notebook's metadata don't say what the lab is: add "),
        ({"minutes": ...}, "its lab metadata lack minutes: write "),
        ({"minuts": 3, "ranks": ...}, "lack ranks and have minuts, which nobody reads"),
        ({"builds_on": ["07"]}, "builds on '07', but there is no such lab: there are 01"),
        ({"builds_on": ["01"]}, "builds on 01, which does not come before it"),
        ({"builds_on": "00"}, "its builds_on is '00': a list such as"),
        ({"part": "Elsewhere"}, "its part is 'Elsewhere': one of Data parallel, "),
        ({"minutes": "30"}, "its minutes are '30': a whole number"),
        (
            {"minutes": 45},
            "its metadata say 45 minutes, its title cell 30 minutes: they must agree",
        ),
        ({"ranks": 4}, "its metadata say 4 ranks, its title cell 2: they must agree"),
        ({"title": "To"}, "say '# 01 · To', its title cell '# 01 · Toy: a lab': they must agree"),
    ],
)
def test_a_lab_that_does_not_say_what_it_is_is_found(tmp_path, about, said):
    changed = {key: value for key, value in (ABOUT | (about or {})).items() if value is not ...}
    (tmp_path / "solutions").mkdir()
    (tmp_path / "labs").mkdir()
    notebook(tmp_path / "solutions", TITLE, **({} if about is None else {"lab": changed}))
    (problem,) = lint.lint(tmp_path / "solutions", tmp_path / "labs")
    assert problem.startswith("solutions/01_toy.ipynb: ")
    assert said in problem


def test_this_repositorys_notebooks_are_clean():
    assert lint.lint() == []


def test_the_readme_offers_every_lab_with_its_title_and_time():
    row = r"^\| \[(?P<title>.*)\]\(labs/(?P<file>.*)\) \|.*\| (?P<time>[\d +]+) min"
    lengths = {lab.number: lab.length for lab in about.labs()}
    rows = {m["file"]: m for m in re.finditer(row, (ROOT / "README.md").read_text(), re.MULTILINE)}
    for path in sorted((ROOT / "labs").glob("[0-9]*.ipynb")):
        assert path.name in rows, f"a student does not find {path.name} in README.md"
        first = read(path).cells[0].source
        assert first.startswith(f"# {rows[path.name]['title']}"), path.name
        assert rows[path.name]["time"] == lengths[about.number_of(path)], path.name


def test_commands_need_no_pytorch_and_name_the_missing_extra():
    """`python -m utils` in a Python without the extra `course` says what to install."""
    code = (
        "import sys\n"
        "for name in ('jsonschema', 'nbformat', 'torch'): sys.modules[name] = None\n"
        "from utils.__main__ import main\n"
        "raise SystemExit(main(['release', '--check']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 2
    assert "pip install -e '.[course]'" in done.stderr


# --- the backend's layers ---------------------------------------------------------------------

BACKEND = ROOT / "utils" / "mpi" / "torch_mpi"


def _imported_by(path: Path) -> set[str]:
    """Absolute names of the modules that a file of the backend imports on top."""
    here = ["torch_mpi", *path.relative_to(BACKEND).parent.parts]
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = [*here[: len(here) - node.level + 1]] if node.level else []
            base += node.module.split(".") if node.module else []
            names |= {".".join([*base, alias.name]) for alias in node.names}
    return names


def test_the_protocol_can_be_read_without_the_group_and_without_torch():
    """Its arrows point down: who changes the handshake needs to know nothing of tensors."""
    for path in (BACKEND / "protocol").glob("*.py"):
        bad = {n for n in _imported_by(path) if n.startswith(("torch.", "torch_mpi.group"))}
        bad |= _imported_by(path) & {"torch", "utils"}
        assert not bad, (path.name, bad)
