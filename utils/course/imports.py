"""Follow imports without importing anything: which files does a module need?

Only modules of `utils` and of the backend, `torch_mpi`, are followed. An import inside a function
counts. An import below ``if TYPE_CHECKING:`` doesn't count, because it never runs.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

#: The folder of each package that is followed, from the course's folder on.
PACKAGES = {"utils": Path("utils"), "torch_mpi": Path("utils", "mpi", "torch_mpi")}


def closure(modules: Iterable[str], root: Path) -> dict[str, Path]:
    """Return the files of modules and of all modules that these import, directly or not.

    The files of the packages above a module are among them, because Python runs these first.

    Args:
        modules: full names, such as ``utils.labs.lab06.probes``.
        root: the folder that has the folder `utils`.

    Returns:
        The file of each module, by the module's full name.

    Raises:
        ModuleNotFoundError: one of these modules is in neither package.
    """
    found: dict[str, Path] = {}
    todo = list(modules)
    for module in todo:
        if file_of(module, root) is None:
            raise ModuleNotFoundError(f"{root} has no module {module}", name=module)
    while todo:
        module = todo.pop()
        file = file_of(module, root)
        if file is not None and module not in found:
            found[module] = file
            todo += imported(module, root)
    return dict(sorted(found.items()))


def file_of(module: str, root: Path) -> Path | None:
    """Return the file of a module or package of ours; None for any other name."""
    top, *inner = module.split(".")
    if top not in PACKAGES:
        return None
    path = Path(root, PACKAGES[top], *inner)
    files = (path / "__init__.py", path.with_name(f"{path.name}.py"))
    return next((file for file in files if file.is_file()), None)


@functools.cache
def imported(module: str, root: Path) -> frozenset[str]:
    """Return the modules of ours that a module imports itself, and the packages above them all."""
    file = file_of(module, root)
    if file is None:
        return frozenset()
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    names = {module}
    for node in _running(ast.parse(file.read_text(encoding="utf-8"))):
        names |= set(_named(node, package))
    above = {
        ".".join(name.split(".")[:length])
        for name in names
        for length in range(1, name.count(".") + 2)
    }
    return frozenset(name for name in above if file_of(name, root) and name != module)


def _running(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a tree, without the blocks that only a type checker reads."""
    todo = [tree]
    while todo:
        node = todo.pop()
        yield node
        if isinstance(node, ast.If) and _is_for_types(node.test):
            todo += node.orelse
        elif not isinstance(node, ast.expr):  # no import is inside an expression
            todo += ast.iter_child_nodes(node)


def _is_for_types(test: ast.expr) -> bool:
    """Return whether a condition is ``TYPE_CHECKING`` or ``typing.TYPE_CHECKING``."""
    return "TYPE_CHECKING" in (getattr(test, "id", ""), getattr(test, "attr", ""))


def _named(node: ast.AST, package: str) -> Iterator[str]:
    """Yield the names that may be modules in an import statement; `package` is the module's."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parts = package.split(".")
            base = ".".join([*parts[: len(parts) - node.level + 1], *base.split(".")]).strip(".")
        yield base
        yield from (f"{base}.{alias.name}" for alias in node.names)
