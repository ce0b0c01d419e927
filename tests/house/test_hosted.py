"""What runs elsewhere: hosted CI, the container image, Codespaces, Binder, a release."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from image import Image, copied, instructions
from places import ROOT

from utils.jobs import open_labs

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
DOCKERFILE = (ROOT / "Dockerfile").read_text()
DEVCONTAINER = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
FIRST_LAB = "00_start_here.ipynb"


# --- hosted CI -----------------------------------------------------------------------------------


def test_a_workflow_with_a_mistake_is_not_found_out_at_a_push():
    program = shutil.which("actionlint")
    if not program:
        pytest.skip("no actionlint on PATH; hosted CI's job `lint` has it")
    files = [*WORKFLOWS, ROOT / "docs" / "classroom.yml"]
    done = subprocess.run(
        [program, "-no-color", *files], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def jobs() -> list[tuple[str, dict]]:
    return [
        (f"{path.name}: {name}", job)
        for path in WORKFLOWS
        for name, job in yaml.safe_load(path.read_text())["jobs"].items()
    ]


def test_a_job_of_hosted_ci_calls_targets_that_the_makefile_has():
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    called = set()
    for name, job in jobs():
        for step in job["steps"]:
            for words in re.findall(r"^\s*make ([^\n]*)", step.get("run", ""), re.MULTILINE):
                targets = {word for word in words.split() if "=" not in word and '"' not in word}
                assert targets <= {*phony}, (name, targets)
                called |= targets
    assert {"lint", "release-check", "test-all", "check", "smoke", "backend", "image"} <= called


def test_no_workflow_may_write_more_than_its_job_needs_and_none_runs_for_hours():
    for path in WORKFLOWS:
        text = yaml.safe_load(path.read_text())
        assert text["permissions"] == {"contents": "read"}, path.name
    for name, job in jobs():
        assert job.get("timeout-minutes", 360) <= 90 or name.endswith(": tag"), name


# --- a release -----------------------------------------------------------------------------------


def in_a_copy(folder: Path, *files: str) -> Path:
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


def test_the_notes_of_a_release_are_what_the_changelog_says_of_it_and_no_more(tmp_path):
    copy = in_a_copy(tmp_path, ".ci/notes", "pyproject.toml")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    log = ["## Unreleased", "- next", f"## {version} · 2026-01-31", "- this", "## 0.0.9", "- old"]
    (copy / "CHANGELOG.md").write_text("\n\n".join(["# Changelog", *log]))

    def notes(*words: str) -> subprocess.CompletedProcess:
        return subprocess.run([copy / ".ci/notes", *words], capture_output=True, text=True)

    assert notes().stdout.split() == ["-", "this"]
    assert notes(f"v{version}").stdout == notes().stdout
    missing = notes("v9.9.9")
    assert missing.returncode
    assert "CHANGELOG.md has no section '## 9.9.9'" in missing.stderr


def test_the_newest_pytorch_is_tried_although_the_ranges_do_not_allow_it_yet(tmp_path):
    copy = in_a_copy(tmp_path, ".ci/newest", "pyproject.toml")
    (copy / "Makefile").write_text("smoke:\n\t@echo smoke with $(TORCH)\n")
    env = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    run = {"cwd": copy, "env": env, "capture_output": True, "text": True, "timeout": 60}
    done = subprocess.run([copy / ".ci/newest", "3.1.4"], **run)
    assert done.stdout.splitlines()[-1] == "smoke with 3.1.4", done.stderr
    assert '"torch>=2.13"' in (copy / "pyproject.toml").read_text()
    again = subprocess.run([copy / ".ci/newest", "3.1.4"], **run)
    assert again.returncode
    assert "does not say its range of PyTorch as it did" in again.stderr


# --- without installing --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def image() -> Image:
    """What the Dockerfile sets; no step is run. `python tests/house/image.py` runs them."""
    found = Image(Path("/nowhere"))
    found.follow(DOCKERFILE, run=False)
    return found


def test_a_container_runs_as_an_ordinary_user_in_the_folder_of_the_labs(image):
    assert image.user == "1000"
    assert image.variables["HOME"] == "/home/student"
    assert image.folder == "/home/student/ddl-labs/labs"
    assert image.variables["PATH"].startswith("/home/student/ddl-labs/.venv/bin:")
    assert (ROOT / "utils/cluster/jupyterlab").is_dir()
    assert image.variables["JUPYTER_CONFIG_PATH"].endswith("/ddl-labs/utils/cluster/jupyterlab")


def test_a_container_opens_jupyterlab_on_the_first_lab_for_whoever_has_its_port(image):
    assert image.command[:4] == ["make", "-C", "..", "lab"]
    assert image.command[-1] == "ARGS=--no-browser --ip=0.0.0.0", "make lab opens the first lab"
    assert f"--LabApp.default_url=/lab/tree/{FIRST_LAB}" == open_labs.FIRST_LAB
    assert (ROOT / "labs" / FIRST_LAB).exists()
    ports = [rest for name, rest in instructions(DOCKERFILE) if name == "EXPOSE"]
    assert f"PORT={ports[0]}" in image.command


def test_students_find_no_solution_in_the_image_and_all_that_its_steps_name():
    files = copied()
    assert not [name for name in files if name.startswith(("solutions/", "tests/"))]
    assert not {path.name for path in (ROOT / "solutions").glob("*.ipynb")} & {
        Path(name).name for name in files if not name.startswith("labs/")
    }
    assert {f"labs/{FIRST_LAB}", "Makefile", ".ci/constraints.txt", "hpc/requirements.txt"} <= {
        *files
    }


def test_no_environment_and_no_history_of_this_machine_goes_into_the_image():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {".git", ".venv", "**/__pycache__"} <= {*ignored}


def test_binder_finds_what_it_gives_and_what_it_starts(image):
    """It passes NB_USER and NB_UID, and starts jupyterhub-singleuser as that user."""
    given = {rest.partition("=")[0] for name, rest in instructions(DOCKERFILE) if name == "ARG"}
    assert given == {"NB_USER", "NB_UID"}
    hub = (ROOT / "hpc" / "requirements.txt").read_text()
    assert re.search(r"^jupyterhub==", hub, re.MULTILINE)
    assert "grep '^jupyterhub=='" in DOCKERFILE
    assert not (ROOT / "binder").exists(), "Binder would look there instead"
    assert f"urlpath=lab/tree/{FIRST_LAB}" in (ROOT / "docs/install.md").read_text()


def test_codespaces_builds_a_stage_that_is_there_and_opens_the_first_lab(image):
    build = DEVCONTAINER["build"]
    stages = [rest.split()[-1] for name, rest in instructions(DOCKERFILE) if name == "FROM"]
    assert build["target"] in stages
    assert (ROOT / ".devcontainer" / build["dockerfile"]).resolve() == ROOT / "Dockerfile"
    assert image.arguments["NB_USER"] == DEVCONTAINER["remoteUser"]
    assert DEVCONTAINER["postCreateCommand"] == "make env"
    started = DEVCONTAINER["postAttachCommand"]
    assert started == f"make lab PORT={DEVCONTAINER['forwardPorts'][0]} ARGS=--no-browser"


def test_an_instruction_that_the_sandbox_does_not_know_is_named():
    with pytest.raises(ValueError, match="ADD, which"):
        Image(Path("/nowhere")).follow("FROM x\nADD a b\n", run=False)
