"""The site of the course for tests: built once in a process, and served as a host of pages does."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from places import ROOT

SITE = ROOT / "docs/site"
BUILD = SITE / "course_site/build.py"
REPOSITORY = "https://github.com/school/ddl-labs"
NEEDED = ("sphinx", "myst_nb", "pydata_sphinx_theme", "sphinx_copybutton")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
needs_site = pytest.mark.skipif(
    bool(MISSING), reason=f"no {', '.join(MISSING)}: pip install -e '.[site]'"
)


def build(out: Path, *options: str, repository: str = "") -> Path:
    """Build the site into a folder. A warning fails the build.

    options: of build.py. repository: its public address; "": nobody has given one.
    """
    env = {**os.environ, "DDL_LABS_REPOSITORY": repository}
    command = [sys.executable, str(BUILD), "-o", str(out), *options]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files, and says nothing."""

    def log_message(self, *arguments) -> None:
        pass


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Yield the address of a folder's files, as a host of pages gives it."""
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
