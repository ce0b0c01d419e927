"""What an administrator is told about mistakes in hpc/, before a student meets them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
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


# --- install.sh ----------------------------------------------------------------------------------


def install(*options: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", HPC / "install.sh", *map(str, options)],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "/usr/bin:/bin"},
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--prefx", "/opt/x"], "'--prefx' is not an option"),
        (["--prefix"], "--prefix wants a value"),
        (["--prefix", "opt/x"], "must be an absolute path"),
        (["--mpi", "mpich"], "must be 'wheel'"),
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
    done = install("--prefix", tmp_path, "--python", sys.executable, "--only-settings")
    assert done.returncode == 1
    assert "no environment in" in done.stderr


def test_the_installer_explains_its_options():
    done = install("--help")
    assert done.returncode == 0
    for option in ("--site", "--prefix", "--python", "--mpi", "--only-settings", "--no-compile"):
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
