"""Try each task's solution on ranks inside the kernel, and write the table of docs/ranks-here.md.

    python tests/labs/ranks_here.py                  # try, and write the table into the page
    python tests/labs/ranks_here.py lab01 -o a.json  # only try these labs

No rank may open a socket while this runs: ranks inside the kernel are threads that share memory.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
import threading
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), *(str(TESTS / room) for room in ("labs", "checks"))]

from answer_tools import LABS, Lab, ranks_of, seeded  # noqa: E402
from lab_tools import verdict  # noqa: E402
from local_ranks import LocalRanks  # noqa: E402
from tabulate import tabulate  # noqa: E402

PAGE = TESTS.parent / "docs" / "ranks-here.md"
BEGIN, END = "<!-- tasks: python tests/labs/ranks_here.py writes this -->", "<!-- end of tasks -->"
#: Tasks without a table of answers, by lab. Each of them needs processes.
WITHOUT_ANSWERS = {"lab14": ["14.1"]}
#: Why a task needs ranks that are processes.
NEEDS_PROCESSES = {
    "14.1": "the harness kills one of four ranks",
}


def tasks() -> dict[str, list[str]]:
    """Return the numbers of all tasks, by lab."""
    of_labs = {name: list(tables.CELLS) for name, tables in LABS.items()}
    return dict(sorted((of_labs | WITHOUT_ANSWERS).items()))


def tried(name: str) -> dict[str, str]:
    """Return what the check says of each solution of a lab; "" if it passes."""
    with LocalRanks(ranks_of(name)) as ranks:
        lab = Lab(name, ranks)
        said = {}
        for task, check in lab.checks.items():
            with seeded(f"1 {task}"):
                passed, printed = verdict(check, ranks)
            said[task] = "" if passed else printed
        return said


def table() -> str:
    """Return the table of all tasks, and the list of those that need processes."""
    rows = []
    for lab, numbers in tasks().items():
        need = [number for number in numbers if number in NEEDS_PROCESSES]
        title = re.search(r"^# (.*?)(?::.*)?$", _first_line(lab[3:]), re.M)[1]
        rows.append([title, len(numbers), len(numbers) - len(need), ", ".join(need) or "none"])
    total = sum(row[1] for row in rows), sum(row[2] for row in rows)
    rows.append(["all labs", *total, total[0] - total[1]])
    text = tabulate(rows, ["lab", "tasks", "pass here", "need processes"], "github")
    return text + "\n\n" + "\n".join(f"- **{n}**: {why}." for n, why in NEEDS_PROCESSES.items())


def _first_line(number: str) -> str:
    path = next((TESTS.parent / "solutions").glob(f"{number}_*.ipynb"))
    return "".join(json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"])


def with_table(page: str) -> str:
    """Return the page with the present table."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}"


def forbid_sockets() -> list[str]:
    """Refuse each socket that a rank opens, and return the list of what was refused."""
    opened: list[str] = []

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "socket.__new__" and threading.current_thread().name.startswith("rank "):
            opened.append(threading.current_thread().name)
            raise PermissionError("a rank inside the kernel opens a socket")

    sys.addaudithook(hook)
    return opened


def main() -> int:
    """Try the solutions; status 1 if one fails that the page says passes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("labs", nargs="*", choices=[[], *LABS])
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    opened = forbid_sockets()
    said = {task: text for lab in options.labs or LABS for task, text in tried(lab).items()}
    failed = {task: text for task, text in said.items() if text and task not in NEEDS_PROCESSES}
    mpi = importlib.util.find_spec("mpi4py") is not None
    print(*failed.values(), sep="\n")
    print(f"{len(said)} tasks, {len(said) - len(failed)} pass, MPI is {'' if mpi else 'not '}here")
    if options.output:
        found = {"passed": sorted(said.keys() - failed.keys()), "mpi": mpi, "sockets": opened}
        options.output.write_text(json.dumps(found | {"failed": failed}), encoding="utf-8")
    elif not options.labs:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return bool(failed or opened)


if __name__ == "__main__":
    sys.exit(main())
