"""hpc/README.md, typed as it stands, on a cluster that has nothing of the course, to a green check.

The lines are taken from the page. What stands for something of the site's own, such as a host's
name, is in a table here, and each entry must occur.
"""

from __future__ import annotations

import http.cookiejar
import json
import re
import subprocess
import textwrap
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import hub_tools
import pytest
import slurm_tools
from hub_tools import Hub, Student
from places import ROOT
from slurm_tools import INSTALLED, LOGIN, STATE, Cluster

from utils.course.notebook import SOLUTIONS, read

LAB = "01_c10d.ipynb"
URL, PASSWORD = "http://127.0.0.1:8000", "a password of student1"
#: Seconds: for a block of lines, and for one in which pip installs.
BLOCK, PIP = 120, 900
pytestmark = [pytest.mark.bare, pytest.mark.timeout(2 * PIP)]

#: What the page says, and what it is on this cluster.
HERE = {
    "apt-get install --no-install-recommends git openssl sudo python3-venv nodejs npm": (
        "command -v git openssl sudo node npm"
    ),
    "https://git.example.org/ddl-labs.git": f"{STATE}/repository",
    "editor /etc/ddl-labs/site.toml": (
        f"""sed -i 's/^connect_ip = ""/connect_ip = "{LOGIN}"/' /etc/ddl-labs/site.toml"""
    ),
    "git -C /opt/course pull": (
        "cd /opt/course && echo A new line. >>README.md && "
        "git -c user.name=x -c user.email=x commit --quiet --all --message new"
    ),
    "https://hub.example.org": URL,
    "git://hub.example.org": f"git://{LOGIN}",
}
#: Where pip would take minutes: the packages that the other tests have are linked.
LINKED = {
    "hpc/install.sh --site /etc/ddl-labs/site.toml": (
        f"hpc/install.sh --site /etc/ddl-labs/site.toml --python {STATE}/bin/python --no-compile"
    )
}

# Its pip "installs" by links to the packages of slurm_tools.environment.
PYTHON = f"""#!/bin/bash
[ "$1 $2" = "-m venv" ] || exec /usr/bin/python3 "$@"
linked="$(readlink -f {INSTALLED}/current)" env="${{@: -1}}"
cp -as "$linked/." "$env/"
rm -r "$env"/{{bin,etc/ddl-labs,share/ddl-labs,share/jupyter/kernels}}
rm "$env/etc/ipython/ipcluster_config.py"
rm -r "$env"/lib/python3*/site-packages/pip
cp --remove-destination "$linked/pyvenv.cfg" "$env/pyvenv.cfg"
mkdir "$env/bin"
for file in "$linked"/bin/*; do
    name="$env/bin/${{file##*/}}"
    if head -c 2 "$file" | grep -q '#!'; then
        sed "1s|$linked|$env|" "$file" >"$name" && chmod 755 "$name"
    else
        ln -s "$(readlink -f "$file")" "$name"
    fi
done
pip="$(echo "$env"/lib/python3*/site-packages)/pip"
mkdir "$pip"
echo 'import sys; print("linked, in place of: pip", *sys.argv[1:])' >"$pip/__main__.py"
"""


def blocks(replaced: dict[str, str]) -> list[str]:
    """The page's lines for a shell, a text for each block, with what this cluster has."""
    text = (ROOT / "hpc/README.md").read_text()
    found = re.findall(r"^ *```sh\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    said = "\0".join(textwrap.dedent(block) for block in found)
    for old, new in replaced.items():
        assert old in said, f"hpc/README.md has no line with {old!r} any more"
        said = said.replace(old, new)
    return said.split("\0")


@pytest.fixture
def empty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster that knows its students, and has nothing of the course."""
    env = slurm_tools.needed()
    state = tmp_path_factory.mktemp("readme")
    state.chmod(0o755)
    with slurm_tools.cluster(state, env) as up:
        up.run("sh", "-c", f"userdel hub && rm -r /etc/sudoers.d/ddl-labs {STATE}/hub")
        up.run("sh", "-c", f"echo 'student1:{PASSWORD}' | chpasswd")
        put_repository(state / "repository")
        (state / "bin").mkdir()
        systemctl = (ROOT / "tests/hpc/systemctl_stand_in.py").read_text()
        for name, text in (("python", PYTHON), ("systemctl", systemctl)):
            (state / "bin" / name).write_text(text)
            (state / "bin" / name).chmod(0o755)
        yield up


def put_repository(folder: Path) -> None:
    """This clone as it is, with what is not committed yet."""
    script = f"""
        git ls-files -z -co --exclude-standard | tar --ignore-failed-read --null -T - -c |
            tar -x -C {folder}
        cd {folder}
        git init --quiet --initial-branch=main
        git -c core.compression=0 add .
        git -c user.name=x -c user.email=x commit --quiet --message x
    """
    folder.mkdir()
    subprocess.run(["bash", "-eo", "pipefail", "-c", script], cwd=ROOT, check=True, timeout=BLOCK)


def follow(cluster: Cluster, page: list[str], **variables: str) -> str:
    """Type these blocks; returns what is shown. Root's shell stays in the folder that it is in."""
    path = f"{STATE}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    shown, folder = [], "/root"
    for block in page:
        student = block.startswith("# as a student")
        host = "node1" if "on a node" in block.partition("\n")[0] else "login"
        lines = block if student else f"cd {folder}\n{block}\npwd >{STATE}/folder"
        shown.append(
            cluster.run(
                *("bash", "-eo", "pipefail", "-c", lines),
                user="student1" if student else None,
                host=host,
                timeout=PIP if "install.sh" in block else BLOCK,
                env={"PATH": path} | ({} if student else variables),
            )
        )
        folder = (cluster.state / "folder").read_text().strip()
    return "\n".join(shown)


def log_in(hub: Hub, name: str) -> Student:
    """A student who has logged in with a password."""
    cookies = http.cookiejar.CookieJar()
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(cookies))

    def post(path: str, body: bytes, **headers: str) -> bytes:
        request = urllib.request.Request(f"{hub.url}{path}", body, headers)
        with opener.open(request, timeout=BLOCK) as reply:
            return reply.read()

    def xsrf() -> str:
        return next(cookie.value for cookie in cookies if cookie.name == "_xsrf")

    opener.open(f"{hub.url}/hub/login", timeout=BLOCK).close()
    told = {"username": name, "password": PASSWORD, "_xsrf": xsrf()}
    post("/hub/login", urllib.parse.urlencode(told).encode())
    headers = {"X-XSRFToken": xsrf(), "Content-Type": "application/json"}
    own = post(f"/hub/api/users/{name}/tokens", b"{}", **headers)
    return Student(hub, name, json.loads(own)["token"])


def clone(student: Student, link: str) -> None:
    """What JupyterLab does with the link that the page gives students."""
    wanted = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(link).query))
    asked = {"repo": wanted["repo"], "branch": wanted["branch"], "targetpath": wanted["targetPath"]}
    request = urllib.request.Request(
        f"{student.hub.url}/user/{student.name}/git-pull/api?{urllib.parse.urlencode(asked)}",
        headers={"Authorization": f"token {student.token}"},
    )
    with urllib.request.urlopen(request, timeout=BLOCK) as reply:
        said = reply.read().decode()
    assert '"phase": "finished"' in said, said


@pytest.mark.parametrize("packages", ["linked", pytest.param("by pip", marks=pytest.mark.often)])
def test_who_types_what_the_page_says_gets_a_hub_on_which_a_student_passes_a_check(
    empty: Cluster, packages: str
):
    try:
        npm = hub_tools.proxy_program().parents[2] / "npm"
    except RuntimeError as error:
        pytest.skip(f"the hub's proxy cannot be had: {error}")
    variables = {"npm_config_cache": str(npm), "npm_config_offline": "true"}
    if packages == "by pip":
        variables["PIP_ARGS"] = f"--no-index --find-links {wheels(empty.state)}"
    page = blocks(HERE | (LINKED if packages == "linked" else {}))
    shown = follow(empty, page, **variables)
    assert sorted(re.findall(r"\d of 4", shown)) == [f"{rank} of 4" for rank in range(4)], shown
    assert "sudoers.d/ddl-labs: parsed OK" in shown, shown
    (link,) = re.findall(rf"^{URL}/hub/user-redirect/git-pull\?.*$", shown, re.MULTILINE)
    with empty.network():
        hub = Hub(empty, empty.state / "ddl-hub.log", {}, url=URL)
        slurm_tools.wait_until(hub.answers, hub_tools.SERVICE, "the hub answers")
        assert empty.run("ps", "-o", "user=", "-C", "jupyterhub") == "hub"
        student = log_in(hub, "student1")
        student.server()
        clone(student, link)
        solved = {cell.id: cell.source for cell in read(SOLUTIONS / LAB).cells}
        folders = {entry["name"] for entry in student.ask("GET", "api/contents/labs")["content"]}
        assert "labs" in folders
        assert "solutions" not in folders
        page = student.ask("GET", "api/contents/labs/README.md")["content"]
        assert page.endswith("A new line.\n"), "students have the second version"
        got = student.ask("GET", f"api/contents/labs/labs/{LAB}")["content"]["cells"]
        assert "hello-check" in [cell["id"] for cell in got]
        kernel = student.kernel()
        said = [kernel.run(solved[cell]) for cell in ("ranks-up", "hello-answer", "hello-check")]
        assert "✓ Task 1.1" in said[-1], said
        student.stop()


def wheels(state: Path) -> Path:
    """What pip needs where there is no index, as the page says."""
    folder = state / "wheels"
    subprocess.run(
        ["/usr/bin/python3", "-m", "pip", "download", "--quiet", "hatchling", ROOT,
         "-r", ROOT / "hpc/requirements.txt", "-c", ROOT / ".ci/constraints.txt", "-d", folder],
        check=True, timeout=PIP,
    )  # fmt: skip
    return STATE / "wheels"
