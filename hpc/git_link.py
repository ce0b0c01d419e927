"""Makes the link that starts a student's server, brings the course there, and opens a notebook.

python3 hpc/git_link.py HUB REPOSITORY [NOTEBOOK] [--branch BRANCH] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
from urllib.parse import quote, urlencode, urlsplit


def git_link(hub: str, repository: str, notebook: str, branch: str, folder: str) -> str:
    """The link. folder: that the course gets in the home folder; "" for the repository's name.

    Raises ValueError for a hub that is no http(s) URL, or a repository that is neither that nor git://.
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
    parser.add_argument("repository", help="that the nodes can clone without a password")
    parser.add_argument("notebook", nargs="?", default="", help="in the repository; default: none")
    parser.add_argument("--branch", default="main", help="default: main")
    parser.add_argument(
        "--folder", default="", help="in the home folder; default: as the repository"
    )
    told = parser.parse_args()
    try:
        print(git_link(told.hub, told.repository, told.notebook, told.branch, told.folder))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
