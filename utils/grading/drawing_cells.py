"""Cells that only draw: a grading run leaves them out.

They take time, and some fetch what students computed into the kernel. Only a cell of the kernel
whose every call is known to draw counts, and only if no later cell needs a name that it binds.
"""

from __future__ import annotations

import ast

from nbformat import NotebookNode

from utils.course.notebook import lab

#: Names that calls may begin with, besides those that the cell itself makes.
DRAWING = {"figures", "plt", "np", "numpy", "matplotlib", "torch", "data_frame"}
IMPORTS = {"matplotlib", "numpy", "torch", "math"}
BUILTINS = {
    *("print", "range", "len", "enumerate", "zip", "sorted", "min", "max", "sum", "abs", "round"),
    *("float", "int", "str", "list", "dict", "tuple", "set", "slice", "map", "reversed"),
}
#: What may be asked of the ranks: nothing that changes them.
READS = {"timeline", "describe", "client"}
#: Methods that draw, whatever their object is called: of a prediction.
METHODS = {"beside"}


def drawings(nb: NotebookNode) -> set[str]:
    """Ids of the cells that can be left out."""
    needed: set[str] = set()
    found = set()
    for cell in reversed(nb.cells):
        if cell.cell_type != "code":
            continue
        tree = _parsed(cell.source)
        if tree is None:
            if not cell.source.startswith("%%px"):
                needed |= _words(cell.source)
            continue
        if _only_draws(cell, tree) and not (_bound(tree) & needed):
            found.add(cell.id)
        else:
            needed |= _needed(tree)
    return found


def _parsed(source: str) -> ast.Module | None:
    """The cell's Python; None for a cell with magics, whose effects are unknown."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):
        return None


def _words(source: str) -> set[str]:
    return {word for word in source.replace("{", " ").replace("}", " ").split()}


def _only_draws(cell: NotebookNode, tree: ast.Module) -> bool:
    about = cell.metadata.get("nbgrader", {})
    if lab(cell) or about.get("solution") or about.get("grade") or not tree.body:
        return False
    if "raises-exception" in cell.metadata.get("tags", []):
        return False
    own = _bound(tree) - _imported(tree)
    asked = _asked_of_a_rank(tree)
    return (
        _imports_only_drawing(tree)
        and all(_harmless(node, own) for node in ast.walk(tree) if node not in asked)
        and all(_reads_ranks_only(node) for node in ast.walk(tree))
        and "ranks" not in own
    )


def _imports_only_drawing(tree: ast.Module) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or "."]
        else:
            continue
        if any(name.partition(".")[0] not in IMPORTS for name in modules):
            return False
    return True


def _imported(tree: ast.AST) -> set[str]:
    return {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }


def _root(node: ast.expr) -> str | None:
    """The name that an expression such as a.b[0].c() begins with."""
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute | ast.Subscript | ast.Starred):
            node = node.value
        elif isinstance(node, ast.Call):
            node = node.func
        else:
            return ""  # of a literal or an operation: its own parts are looked at as well
    return node.id


def _asked_of_a_rank(tree: ast.AST) -> set[ast.AST]:
    """What a rank computes for a picture, by functions of students, each of which has its check."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    sent = [
        function
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr == "apply_sync"
        for function in call.args
        if isinstance(function, ast.Lambda)
    ]
    return {node for function in sent for node in ast.walk(function)}


def _harmless(node: ast.AST, own: set[str]) -> bool:
    if not isinstance(node, ast.Call):
        return True
    if isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
        return True
    root = _root(node.func)
    return root == "" or root in DRAWING | BUILTINS | own | {"ranks"}


def _reads_ranks_only(node: ast.AST) -> bool:
    """No call of ranks.restart() and its like."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return node.value.id != "ranks" or node.attr in READS
    return True


def _bound(tree: ast.AST) -> set[str]:
    names = _imported(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
    return names


def _needed(tree: ast.Module) -> set[str]:
    """Names that a cell takes from earlier cells: used in it before it has bound them itself."""
    needed: set[str] = set()
    own: set[str] = set()
    for statement in tree.body:
        needed |= _loaded(statement) - own - _targets(statement)
        own |= _bound(statement)
    return needed


def _loaded(tree: ast.AST) -> set[str]:
    return {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }


def _targets(statement: ast.stmt) -> set[str]:
    """What loops and functions inside of a statement bind before they use it."""
    names: set[str] = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.For | ast.comprehension):
            names |= {one.id for one in ast.walk(node.target) if isinstance(one, ast.Name)}
        elif isinstance(node, ast.arg):
            names.add(node.arg)
    return names
