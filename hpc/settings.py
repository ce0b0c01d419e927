"""Read site.toml, and say in words what is wrong with it.

`python3 settings.py FILE` prints the site's lines for the beginning of each job.
"""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any


class SettingsError(SystemExit):
    """A mistake in site.toml. The text names the value, and says what it should be."""


@dataclass(frozen=True)
class Slurm:
    """Section [slurm]."""

    partition: str
    account: str
    options: list[str]
    setup: list[str]
    data: str

    @property
    def first_lines(self) -> list[str]:
        """Return a job's first shell lines, which install.sh appends to etc/ddl-labs/job.sh."""
        root = [f"export FASHION_MNIST_ROOT={shlex.quote(self.data)}"] if self.data else []
        return [*self.setup, *root]


@dataclass(frozen=True)
class Hub:
    """Section [hub], whose values site.toml explains."""

    bind_url: str
    hub_ip: str
    connect_ip: str
    proxy_api: str
    authenticator: str
    admins: list[str]
    allow_all: bool
    allowed: list[str]
    as_user: str
    start_timeout: int
    starts_at_once: int
    servers_at_most: int
    minimum_uid: int
    idle_server: int
    idle_kernel: int
    runtime_dir: str
    local_config: str


@dataclass(frozen=True)
class Profile:
    """One of [[profiles]]: a job that a student can choose."""

    name: str
    title: str
    partition: str
    time: str
    options: list[str]


@dataclass(frozen=True)
class Form:
    """Section [form]: what a student may change in a job. Each value is a list of choices."""

    partitions: list[str]
    nodes: list[int]
    ranks: list[int]
    times: list[str]
    gpus: list[int]
    accounts: list[str]
    reservations: list[str]
    memory_per_rank: str


@dataclass(frozen=True)
class Site:
    """What jupyterhub_config.py needs from site.toml. prefix: of the students' environments."""

    prefix: str
    slurm: Slurm
    hub: Hub
    profiles: list[Profile]
    form: Form

    @property
    def environment(self) -> str:
        """Return the environment for jobs that start now: a link, which install.sh updates."""
        return f"{self.prefix}/current"


def read(path: Path) -> Site:
    """Return the settings in a file.

    Raises:
        SettingsError: the file can't be read, or one of its values is wrong.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read the site's settings: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path} is not valid TOML: {error}") from None
    for section in ("install", "slurm", "engines", "hub", "profiles", "form"):
        if section not in raw:
            raise SettingsError(f"{path} has no section [{section}]; compare with hpc/site.toml")
    profiles = [
        _checked(Profile, value, f"{path}, profile {number}")
        for number, value in enumerate(raw["profiles"], 1)
    ]
    _check_profiles(profiles, path)
    slurm = _checked(Slurm, raw["slurm"], f"{path}, section [slurm]")
    if slurm.data and not slurm.data.startswith("/"):
        raise SettingsError(
            f"{path}, section [slurm]: data = {slurm.data!r} must be an absolute path, such as "
            '"/data/fashion", which holds FashionMNIST/raw/; or "" for none'
        )
    _check_options(slurm.options, f"{path}, section [slurm]")
    return Site(
        prefix=raw["install"]["prefix"],
        slurm=slurm,
        hub=_checked(Hub, raw["hub"], f"{path}, section [hub]"),
        profiles=profiles,
        form=_form(raw["form"], f"{path}, section [form]"),
    )


def _checked(kind: type, values: dict[str, Any], place: str) -> Any:
    """Return a `kind` of these values, if they are complete, known, and of the right types."""
    known = {field.name: str(field.type) for field in fields(kind)}
    for name in known.keys() - values.keys():
        raise SettingsError(f"{place}: '{name}' is missing; compare with hpc/site.toml")
    for name, value in values.items():
        if name not in known:
            raise SettingsError(f"{place}: '{name}' is unknown; there are {', '.join(known)}")
        expected = known[name].partition("[")[0]
        if type(value).__name__ != expected:
            raise SettingsError(f"{place}: {name} = {value!r} must be of type {expected}")
    return kind(**values)


def _form(values: dict[str, Any], place: str) -> Form:
    form = _checked(Form, values, place)
    patterns = {"times": r"(\d+-)?\d{1,2}:\d\d:\d\d", "memory_per_rank": r"\d+[MG]"}
    for name, value in values.items():
        number = name in ("nodes", "ranks", "gpus")
        pattern = r"[1-9]\d*" if number else patterns.get(name, r"[\w.-]+")
        for each in value if isinstance(value, list) else [value]:
            if type(each) is not (int if number else str) or not re.fullmatch(pattern, str(each)):
                examples = {"times": '"02:00:00"', "memory_per_rank": '"1G"'}
                example = "1" if number else examples.get(name, '"teaching"')
                raise SettingsError(f"{place}: {name}: {each!r} must be such as {example}")
    return form


def _check_profiles(profiles: list[Profile], path: Path) -> None:
    names = [profile.name for profile in profiles]
    if not names or len(set(names)) < len(names):
        raise SettingsError(f"{path}: profiles need names, each another one; they are {names}")
    for profile in profiles:
        if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", profile.name):
            raise SettingsError(f"{path}: profile name {profile.name!r}: use a-z, 0-9, - and _")
        _check_options(profile.options, f"{path}, profile '{profile.name}'")


def _check_options(options: list[str], place: str) -> None:
    for option in options:
        if not re.fullmatch(r"--[^\n]+", option):
            raise SettingsError(
                f'{place}: option {option!r} must be one of sbatch\'s, such as "--nodes=2"'
            )


if __name__ == "__main__":
    print(*read(Path(sys.argv[1])).slurm.first_lines, sep="\n")
