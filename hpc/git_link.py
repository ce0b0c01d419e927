"""Make the link that starts a student's server, brings the course there, and opens a notebook.

python3 hpc/git_link.py HUB REPOSITORY [NOTEBOOK] [--branch BRANCH] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
from urllib.parse import quote, urlencode, urlsplit


def git_link(hub: str, repository: str, notebook: str, branch: str, folder: str) -> str:
    """Return the link.

    folder: the course's folder in the student's home folder; "" for the repository's name.

    Raises:
        ValueError: the hub isn't an http(s) URL, or the repository isn't an http(s) or git:// URL.
    """
    for what, url in (("hub", hub), ("repository", repository)):
        schemes = ("http", "https") if what == "hub" else ("http", "https", "git")
        if urlsplit(url).scheme not in schemes or not urlsplit(url).netloc:
            raise ValueError(
                f"the {what} must be a URL such as https://hub.example.org, not {url!r}"
            )
    folder = folder or repository.rstrip("/").rsplit("/", 1)[-1].removesuffix(".git")
    wanted = {
        "repo": repository,
        "branch": branch,
        "targetPath": folder,
        "urlpath": f"lab/tree/{quote(f'{folder}/{notebook}')}" if notebook else "lab",
    }
    return f"{hub.rstrip('/')}/hub/user-redirect/git-pull?{urlencode(wanted)}"


def main() -> None:
    """Print the link for the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("hub", help="such as https://hub.example.org")
    parser.add_argument("repository", help="a URL that the nodes can clone without a password")
    parser.add_argument(
        "notebook", nargs="?", default="", help="its path in the repository; default: none"
    )
    parser.add_argument("--branch", default="main", help="default: main")
    parser.add_argument(
        "--folder", default="", help="its name in the home folder; default: the repository's name"
    )
    told = parser.parse_args()
    try:
        print(git_link(told.hub, told.repository, told.notebook, told.branch, told.folder))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
