#!/usr/bin/python3
"""Stands in for systemctl where there is no systemd: starts what units of hpc/systemd say.

systemctl enable --now UNIT… starts a service as its user, with its environment, folder and umask;
it writes to the folder of the cluster's logs. All else of a service manager is left out.
"""

import os
import pwd
import re
import shlex
import subprocess
import sys
from pathlib import Path

LOGS = Path("/srv/cluster")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def start(name: str) -> None:
    """Start the service of this unit."""
    text = (
        Path("/etc/systemd/system", f"{name}.service")
        .read_text(encoding="utf-8")
        .replace("\\\n", " ")
    )
    unit = dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))
    who = pwd.getpwnam(unit["User"])
    lines = [unit.get("Environment", "")]
    if "EnvironmentFile" in unit:
        lines += Path(unit["EnvironmentFile"]).read_text(encoding="utf-8").splitlines()
    told = dict(line.split("=", 1) for line in lines if line)
    with (LOGS / f"{name}.log").open("w") as log:
        subprocess.Popen(
            shlex.split(unit["ExecStart"]),
            env={"PATH": PATH, "USER": who.pw_name, "HOME": who.pw_dir} | told,
            user=who.pw_uid,
            group=who.pw_gid,
            extra_groups=os.getgrouplist(who.pw_name, who.pw_gid),
            cwd=unit.get("WorkingDirectory", "/"),
            umask=int(unit.get("UMask", "0022"), 8),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


if __name__ == "__main__":
    if sys.argv[1:3] == ["enable", "--now"]:
        for unit in sys.argv[3:]:
            start(unit)
    elif sys.argv[1:] != ["daemon-reload"]:
        sys.exit(f"this stand-in for systemctl does not know {sys.argv[1:]}")
