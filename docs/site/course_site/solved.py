"""Which outputs of a lab come from its solution, so that the stub on the page can't print them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from nbformat import NotebookNode

from utils.course.cell_names import names_of


def outputs_of_solution(cells: Sequence[NotebookNode], answers: Collection[str]) -> set[str]:
    """Return the ids of the cells whose outputs need the solution, directly or not.

    A cell needs the solution if it is an answer or a check, if it uses a name that such a cell
    binds or a file that an answer writes, or if it asks the ranks after such a cell has run there.

    Args:
        cells: the cells of the solution.
        answers: ids of the cells that students write.
    """
    found: set[str] = set()
    names: set[str] = set()
    files: set[str] = set()
    on_ranks = False
    for cell in (cell for cell in cells if cell.cell_type == "code"):
        if cell.id in answers and cell.source.startswith("%%writefile "):
            files.add(cell.source.split()[1])  # the stub is written, too, but fails when it runs
            continue
        own = names_of(cell.source)
        uses = own.needed | own.later
        needs = cell.id in answers or bool(cell.metadata.get("lab", {}).get("check"))
        needs = needs or bool(uses & names) or (on_ranks and "ranks" in uses)
        needs = needs or any(file in cell.source for file in files)
        if cell.source.startswith("%%px"):
            on_ranks = needs
        if needs:
            found.add(cell.id)
        names = names | (own.bound - _imported(cell.source)) if needs else names - own.bound
    return found


def _imported(source: str) -> frozenset[str]:
    """Return the names that a source imports, which a stub has, too."""
    lines = source.split("\n")
    return names_of(
        "\n".join(line for line in lines if line.startswith(("import ", "from ")))
    ).bound
