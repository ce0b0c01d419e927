"""Answers that a person should look at: code that reaches for what judges it.

An answer shares its process with the probe of its check, and can change what that one finds. No
fence holds inside of one Python process, but whoever climbs it needs names that no solution needs:
frames, loaded modules, the recorder, the built-in functions. What is found costs no points; it is
told to the instructor.
"""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator

from IPython.core.inputtransformer2 import TransformerManager

from ..notebook import lab
from .assemble import body
from .reference import Reference, Task
from .results import Result, TaskResult

#: Modules by which code gets hold of its caller, of the checks, of Python itself.
MODULES = {
    *("inspect", "ctypes", "gc", "builtins", "importlib", "imp", "traceback", "ast", "dis"),
    *("code", "codeop", "runpy", "atexit", "unittest", "mmap", "subprocess"),
    *("pickle", "marshal", "dill", "cloudpickle", "copyreg", "pdb", "bdb", "faulthandler"),
    *("pkgutil", "cffi", "cython", "numba", "numpy.ctypeslib", "np.ctypeslib"),
    *("torch.library", "torch.overrides", "torch.utils.cpp_extension"),
    "torch.utils._python_dispatch",
    *("utils.checks", "utils.cluster", "utils.verdict", "utils.course", "utils.jobs"),
    *("IPython", "ipykernel", "ipyparallel"),
}
#: Of torch_mpi, what labs hand out.
ALLOWED = {"torch_mpi.survivors"}
#: Functions that make code or names out of text.
CALLS = {"exec", "eval", "compile", "globals", "locals", "__import__", "breakpoint"}
#: Attributes, and texts by which getattr would find them.
ATTRIBUTES = {
    *("_getframe", "_current_frames", "currentframe", "settrace", "setprofile", "meta_path"),
    *("path_hooks", "f_back", "f_locals", "f_globals", "tb_frame", "gi_frame", "cr_frame"),
    *("ag_frame", "FunctionType", "CodeType", "__setattr__", "__delattr__"),
    *("__globals__", "__builtins__", "__code__", "__closure__", "__subclasses__", "__mro__"),
    *("__bases__", "__traceback__", "__getattribute__", "__loader__", "__spec__"),
    *("attrgetter", "methodcaller", "addaudithook"),
}
#: Methods with which an object equals everything, or is a number when it likes.
METHODS = {
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__index__", "__float__"),
    *("__int__", "__bool__", "__class__", "__torch_function__", "__torch_dispatch__"),
    *("__array__", "tolist"),
}
#: What an answer's classes may not be a kind of: they would be told apart from no number or list.
KINDS = {"int", "float", "complex", "str", "list", "tuple", "dict", "torch.Tensor", "Tensor"}
#: Modules of which an answer may change nothing, as cells of the labs have them.
KNOWN = {"torch", "dist", "np", "numpy", "math", "time", "random", "sys", "os", "json", "F", "nn"}
#: What IPython makes of a line with %: those change nothing.
HARMLESS_MAGICS = {"time", "timeit", "matplotlib", "pprint", "precision"}
#: Longer answers are not stored whole, so that nobody has seen their end.
LONGEST = 20_000
#: How a remark on an answer begins, where it does not stand under such a heading.
LOOK = "look at this answer: "
MOST_NAMED = 6
#: Names of modules that are words as well: texts may be that.
ORDINARY = {"code", "gc", "imp", "inspect", "traceback", "pickle"}


def look(result: Result, reference: Reference) -> list[str]:
    """What a person should look at in a result, a line for each task and for all own cells."""
    own = "cells of the student's own: look at them"
    found = [f"{own}: one {said}" for said in _in(result.own, reference)]
    for task in result.tasks:
        if task.status in {"by hand", "missing", "unchanged"}:
            continue
        found += [f"Task {task.task}: {LOOK}{said}" for said in _of(task, reference)]
    return found


def _in(code: str, reference: Reference) -> Iterator[str]:
    """What there is to say of code, whatever it gave."""
    if names := named(code, checkers(reference)):
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        yield f"names {', '.join(names[:MOST_NAMED])}{more}"
    if len(code) >= LONGEST:
        yield f"has {LONGEST} characters or more, and only so many are kept"


def _of(task: TaskResult, reference: Reference) -> Iterator[str]:
    yield from (f"it {said}" for said in _in(task.code, reference))
    if task.status != "passed":
        return
    if parsed(task.code) is None:
        yield "it passed, and it is nested so deep that nobody can read it"
    about = reference.task(task.task)
    stub = _joined(about, reference, reference.stubs)
    if task.code.split() == stub.split():
        yield "it is as it was handed out, and yet it passed"
        return
    wanted = judged(about, reference)
    if wanted and not wanted & bound(task.code):
        yield f"it passed, and does not define {' or '.join(sorted(wanted))}"


def judged(task: Task, reference: Reference) -> set[str]:
    """Functions and classes that the solution of a task defines, and the stub as well."""
    model = _joined(task, reference, {c.id: c.source for c in reference.answer_cells.values()})
    stub = _joined(task, reference, reference.stubs)
    return _defined(model) & _defined(stub)


def _joined(task: Task, reference: Reference, sources: dict[str, str]) -> str:
    """The answer cells of a task as one text."""
    cells = [reference.answer_cells[grade_id] for grade_id in task.answers]
    return "\n\n".join(body(sources[cell.id]) for cell in cells)


# --- what a source names -------------------------------------------------------------------------


def checkers(reference: Reference) -> frozenset[str]:
    """The modules whose functions check cells call."""
    cells = [cell.source for cell in reference.nb.cells if lab(cell).get("check")]
    return frozenset(m[1] for source in cells if (m := re.match(r"(\w+)\.", source)))


def named(source: str, more: frozenset[str] = frozenset()) -> list[str]:
    """What no answer needs and this one names, in the order in which it does.

    more: names of modules that none needs, besides those known here.
    """
    tree = parsed(source)
    if tree is None:
        words = sorted(MODULES - {"code", "gc", "ast"} | ATTRIBUTES)
        pattern = rf"(?<![\w.])(?:{'|'.join(map(re.escape, words))})(?!\w)"
        return list(dict.fromkeys(re.findall(pattern, source)))
    modules = _modules(tree)
    found = [name for node in ast.walk(tree) for name in _reach(node, modules)]
    found += _handed_on(tree, modules)
    if any(isinstance(one, ast.Name) and one.id == "get_ipython" for one in _no_magics(tree)):
        found.append("get_ipython")
    found += sorted({name for node in ast.walk(tree) for name in _imported(node)} & more)
    return list(dict.fromkeys(found))


def parsed(source: str) -> ast.Module | None:
    """The tree of a cell, its magics made calls as IPython does; None where there is none."""
    try:
        return ast.parse(TransformerManager().transform_cell(source))
    except (SyntaxError, ValueError, RecursionError, MemoryError, tokenize.TokenError):
        return None


def _modules(tree: ast.AST) -> dict[str, str]:
    """What modules are called in a source, and what they are."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and _changes(node)}
    names |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    found = {name: name for name in KNOWN - names}
    for node in ast.walk(tree):
        for alias in node.names if isinstance(node, ast.Import) else ():
            first = alias.name.partition(".")[0]
            found[alias.asname or first] = alias.name if alias.asname else first
    return found


def _changes(node: ast.Name | ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store | ast.Del)


def _handed_on(tree: ast.AST, modules: dict[str, str]) -> Iterator[str]:
    """Modules that are values themselves: given to a function, called otherwise, put in a list."""
    plain = {
        id(part)
        for node in ast.walk(tree)
        for part in (
            [node.value]
            if isinstance(node, ast.Attribute)
            else node.args[:1]
            if isinstance(node, ast.Call) and _dotted(node.func) in {"getattr", "hasattr"}
            else []
        )
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in modules and id(node) not in plain:
            yield f"{node.id} itself"


def _reach(node: ast.AST, modules: dict[str, str]) -> Iterator[str]:
    """What one node of the tree reaches for."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if _forbidden(alias.name))
    elif isinstance(node, ast.ImportFrom):
        yield from _from(node)
    elif isinstance(node, ast.Attribute):
        yield from _attribute(node, modules)
    elif isinstance(node, ast.Name) and node.id in CALLS | {"__builtins__", "__loader__"}:
        yield node.id
    elif isinstance(node, ast.Call):
        yield from _call(node, modules)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from _text(node.value)
    elif isinstance(node, ast.ClassDef):
        yield from _methods(node)
    elif isinstance(node, ast.MatchClass):
        yield from (name for name in node.kwd_attrs if name in ATTRIBUTES | {"modules"})
    elif isinstance(node, ast.keyword) and node.arg == "weights_only":
        yield "weights_only"


def _forbidden(module: str) -> bool:
    if module.partition(".")[0] == "torch_mpi":
        return module not in ALLOWED
    parts = module.split(".")
    return any(".".join(parts[: k + 1]) in MODULES for k in range(len(parts)))


def _from(node: ast.ImportFrom) -> Iterator[str]:
    """Of `from a import b`: a, else a.b."""
    for alias in node.names:
        whole = f"{node.module or '.'}.{alias.name}"
        if whole in ALLOWED or node.module in ALLOWED:
            continue
        forbidden = _forbidden(node.module or "") or _forbidden(whole)
        if forbidden or alias.name in ATTRIBUTES or whole in {"sys.modules", "sys.path", "sys.*"}:
            yield whole


def _attribute(node: ast.Attribute, modules: dict[str, str]) -> Iterator[str]:
    if node.attr in ATTRIBUTES:
        yield node.attr
    whole = _dotted(node)
    if not whole:
        return
    first, real = whole.partition(".")[0], _real(whole, modules)
    if _forbidden(whole) or _forbidden(real) or _leads_to(real):
        yield whole
    if node.attr == "__dict__" and first in modules:
        yield whole
    if _changes(node) and first in modules:
        yield f"{whole} ="


def _leads_to(whole: str) -> bool:
    """Is it the list of modules, or a module that another one has imported: `dist.sys`?"""
    parts = whole.split(".")
    inner = {*parts[1:]} & (
        {"sys", "_sys"} | {name for name in MODULES if name not in {"code", "gc"}}
    )
    return bool(inner) or whole.startswith(("sys.modules", "sys.path", "os.system", "os.popen"))


def _real(whole: str, modules: dict[str, str]) -> str:
    """A dotted name that begins with what the module is called by itself."""
    first, dot, rest = whole.partition(".")
    return f"{modules.get(first, first)}{dot}{rest}"


def _call(node: ast.Call, modules: dict[str, str]) -> Iterator[str]:
    """A change of a module by setattr, names made of pieces, vars() and IPython's lines."""
    name = _dotted(node.func) or ""
    first = _dotted(node.args[0]) if node.args else None
    of_module = bool(first) and first.partition(".")[0] in modules
    if name in {"setattr", "delattr", "vars", "object.__setattr__"} and of_module:
        yield f"{name}({first}, …)"
    if name == "getattr" and of_module:
        asked = next((a.value for a in node.args[1:2] if isinstance(a, ast.Constant)), "")
        if not asked or _leads_to(f"{_real(first, modules)}.{asked}"):
            yield f"getattr({first}, {asked or '…'})"
    of_shell = isinstance(node.func, ast.Attribute) and _is_shell(node.func.value)
    if of_shell and not _is_harmless_magic(node):
        yield f"get_ipython().{node.func.attr}"


def _is_shell(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and _dotted(node.func) == "get_ipython"


def _is_harmless_magic(node: ast.Call) -> bool:
    """Is it what IPython makes of `%time` and its like?"""
    line = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else ""
    return (
        isinstance(node.func, ast.Attribute)
        and _is_shell(node.func.value)
        and node.func.attr == "run_line_magic"
        and line in HARMLESS_MAGICS
    )


def _no_magics(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those that stand for harmless magics."""
    waiting = [tree]  # no recursion: a student's expression may be as deep as it likes
    while waiting:
        node = waiting.pop()
        if not (isinstance(node, ast.Call) and _is_harmless_magic(node)):
            yield node
            waiting.extend(ast.iter_child_nodes(node))


def _text(text: str) -> Iterator[str]:
    """A text that is such a name, or the path of a process."""
    dunder = {name for name in METHODS if name.startswith("__")}
    words = set(text.split(".")) if re.fullmatch(r"[\w.]+", text) else set()
    if words & (ATTRIBUTES | dunder) or text in {"sys", "sys.modules", *MODULES} - ORDINARY:
        yield repr(text)
    elif text.startswith(("/proc", "torch_mpi", "utils.checks")):
        yield repr(text[:40])
    elif "(" in text or "import" in text:  # code for timeit and its like
        yield from (name for name in named(text) if parsed(text) is not None)


def _methods(node: ast.ClassDef) -> Iterator[str]:
    for base in node.bases:
        if (kind := _dotted(base)) in KINDS:
            yield f"class {node.name}({kind})"
    for one in node.body:
        targets = one.targets if isinstance(one, ast.Assign) else []
        yield from (f"{t.id} =" for t in targets if isinstance(t, ast.Name) and t.id in METHODS)
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and one.name in METHODS:
            yield f"def {one.name}"


def _dotted(node: ast.AST) -> str | None:
    """`a.b.c` of attributes of a name, else None."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def _imported(node: ast.AST) -> Iterator[str]:
    """The first part of the names of imported modules."""
    if isinstance(node, ast.Import):
        yield from (alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield (node.module or "").partition(".")[0]


def bound(source: str) -> set[str]:
    """All names that a source binds, wherever; empty where it is no Python."""
    tree = parsed(source)
    found = set()
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name)
    return found


def _defined(source: str) -> set[str]:
    """Functions and classes at the top level."""
    tree = parsed(source)
    return {node.name for node in tree.body if hasattr(node, "name")} if tree else set()
