"""Whoever takes over the hub or a student's account gets no further by what root types or runs."""

from __future__ import annotations

import re
import textwrap

import pytest
from places import ROOT

pytestmark = pytest.mark.quick
#: Folders that a user other than root can write, and paths below them.
OF_OTHERS = re.compile(r"/var/lib/ddl-labs(?!-git)|/home/|/tmp\b|~|/dev/shm|/var/tmp")
#: What root may do with such a folder: make it, for its owner, with nothing in it.
HARMLESS = (
    "useradd --system --home-dir /var/lib/ddl-labs --shell /usr/sbin/nologin hub",
    "install -d -m 700 -o hub -g hub /var/lib/ddl-labs",
)


def lines_of_root() -> list[str]:
    """Each line of the page's blocks that an administrator types as root."""
    text = (ROOT / "hpc/README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^ *```(?:sh|bash)\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    found = []
    for block in map(textwrap.dedent, blocks):
        if not block.startswith("# as a student"):
            found += block.replace("\\\n", " ").splitlines()
    return found


def test_root_types_nothing_in_a_folder_that_another_user_can_write():
    bad = [
        line
        for line in lines_of_root()
        if OF_OTHERS.search(line) and line not in HARMLESS and "sudo -u hub" not in line
    ]
    # Standing in the folder runs nothing; the next line of that block is the hub's user's.
    assert bad == ["cd /var/lib/ddl-labs"]


def test_root_gives_no_folder_to_another_user_after_it_was_filled():
    assert not [line for line in lines_of_root() if "chown" in line]


def test_each_service_runs_as_a_user_and_reads_what_only_root_writes():
    for path in sorted((ROOT / "hpc/systemd").glob("*.service")):
        text = path.read_text(encoding="utf-8")
        assert re.search(r"^User=(?!root)\w+$", text, re.MULTILINE), path.name
        for line in re.findall(r"^Exec\w*=(.*)$", text, re.MULTILINE):
            assert not OF_OTHERS.search(line), f"{path.name}: {line}"


def test_the_hub_may_run_nothing_as_root():
    text = (ROOT / "hpc/sudoers").read_text(encoding="utf-8")
    rules = [line for line in text.splitlines() if re.match(r"hub\s+ALL", line)]
    assert rules
    assert all("(%students)" in rule for rule in rules)
