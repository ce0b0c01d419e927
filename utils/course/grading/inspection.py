"""Inspection of answers: what they use beyond their task, and whether they are too small for it.

The rule is an allow-list. An answer may use what the stubs and the solutions of its lab use,
ordinary builtin functions, and modules that only compute. :mod:`.suspicion` runs this module in a
process with limits, because a student's code may be as long and as nested as the student likes.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import json
import re
import resource
import symtable
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

#: Limits of the process that inspects: bytes of memory, seconds of CPU time.
MEMORY, SECONDS = 2 << 30, 30
#: Modules that compute and do nothing else.
COMPUTING = {
    *("__future__", "collections", "collections.abc", "contextlib", "copy", "dataclasses"),
    *("datetime", "functools"),
    *("hashlib", "heapq", "itertools", "math", "random", "statistics", "time", "typing"),
    *("numpy", "numpy.linalg", "numpy.random", "torch", "torch.autograd", "torch.distributed"),
    *("torch.futures", "torch.linalg", "torch.nn", "torch.nn.functional", "torch.nn.utils"),
    *("torch.optim", "torch.random"),
}
#: Packages by which ranks communicate unseen, or reach what judges them. Given cells show some of
#: them; an answer may use one only if a stub or a solution of the lab does.
CHANNELS = re.compile(
    r"(fcntl|gc|logging|mpi4py|os|shutil|signal|sys|threading|torch\.distributed|torch\.nn\.parallel"
    r"|torch_mpi|unittest|utils|warnings)(\.|$)"
)
#: Collectives and groups, which are for the labs whose stubs or solutions have one. A key-value
#: store is for no answer: no check sees what goes through it.
COLLECTIVES = re.compile(r"torch\.distributed\.(all_|broadcast|gather|reduce|scatter)\w*")
GROUPS = re.compile(r"torch\.distributed\.(new_|split_|init_)\w*")
STORED = re.compile(r"torch\.distributed\.(\w*Store|rendezvous)")
#: Builtin functions that run text, open files, or change what has a name.
NOT_ORDINARY = {
    *("exec", "eval", "compile", "globals", "locals", "vars", "dir", "setattr", "delattr"),
    *("open", "input", "help", "breakpoint", "exit", "quit"),
}
#: Attributes that read or write files.
STORES = {
    *("save", "savez", "savez_compressed", "savetxt", "load", "loadtxt", "genfromtxt", "tofile"),
    *("fromfile", "from_file", "memmap", "dump", "DataSource", "fromregex"),
}
#: Attributes that give frames, communicate through a process group itself, or run annotations.
INNER = re.compile(
    r"(gi|cr|ag|tb)_\w+|f_(back|globals|locals|builtins|code|trace)|get_type_hints|ForwardRef"
    r"|singledispatch\w*|all(reduce|gather|toall)\w*|broadcast(_coalesced)?|reduce_scatter|send"
)
#: Functions that change what a module does from then on.
SETTERS = re.compile(r"(set|use)_\w+|seterr\w*|(get|set)(_rng_)?state|seed|manual_seed")
DUNDER = re.compile(r"__\w+__")
#: Functions that find an attribute by its name.
ASKING = {"getattr", "hasattr"}
#: Methods with two underscores that a class needs, and classes that it may inherit from.
METHODS = re.compile(r"__(init|call|len|getitem|iter|next|enter|exit|repr|str|post_init)__")
BASES = {"object", "Exception", "ValueError", "RuntimeError", "torch.nn.Module"}
#: Names of modules that are ordinary methods and functions as well; modules that no file has.
WORDS = {
    *("array", "chunk", "copy", "datetime", "queue", "random", "select", "signal", "time"),
    "trace",
}
NATIVE = {"torch.ops", "torch.classes"}
#: IPython's lines, and those of them that change nothing.
MAGIC = re.compile(r"^[ \t]*[!%]", re.MULTILINE)
HARMLESS = re.compile(r"^%timeit\s+(?!-)|^%time\s+|^%(?:matplotlib|precision|pprint)\b.*", re.M)
#: By these an answer can recognize the call of a check that looks at something else.
TELLING = {"dtype", "element_size", "itemsize", "nbytes", "is_floating_point", "unique", "float64"}
#: The smallest right answer of another form has 0.43 of its solution's nodes (tests/answers).
LEAST_SHARE = 0.35
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def parsed(source: str) -> ast.Module | None:
    """Return the tree of a cell; None if it is not Python, or is too deep to be read."""
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        tree = ast.parse(HARMLESS.sub("", source))
        scopes(tree)  # a name that is both global and nonlocal is an error, too
        return tree


def imported(tree: ast.AST) -> dict[str, str]:
    """Return the real name of everything that a source imports, by the name that it has there."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                found[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom):
            found |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    return found


def scopes(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Return the names that a source looks up outside of functions, and those it binds there."""
    top = symtable.symtable(ast.unparse(tree), "answer", "exec")
    looked_up, tables = {one.get_name() for one in top.get_symbols() if one.is_referenced()}, [top]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        looked_up |= {one.get_name() for one in table.get_symbols() if one.is_global()}
    made = {one.get_name() for one in top.get_symbols() if one.is_assigned() or one.is_imported()}
    return looked_up, made.union(*(n.names for n in ast.walk(tree) if isinstance(n, ast.Global)))


def dotted(node: ast.AST, known: dict[str, str]) -> str:
    """Return `a.b.c`, beginning with the module's real name; "" for other code."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    first = name_of(node)
    return ".".join([known.get(first, first), *reversed(parts)]) if first else ""


def name_of(node: ast.AST | None) -> str:
    """Return a plain name; "" for other code."""
    return node.id if isinstance(node, ast.Name) else ""


def names_in(node: ast.AST) -> set[str]:
    """Return all names in a tree."""
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


@cache
def is_module(name: str) -> bool:
    """Return whether a dotted name is a module, without importing it."""
    first, *rest = name.split(".")
    if name in NATIVE or (rest and rest[-1] in sys.stdlib_module_names - WORDS):
        return True
    try:
        spec = find_spec(first)
    except (ImportError, ValueError):
        return False
    folders = (spec and spec.submodule_search_locations) or ()
    paths = [Path(folder, *rest) for folder in folders]
    inside = any(path.is_dir() or path.with_suffix(".py").is_file() for path in paths)
    return inside or (spec is not None and not rest)


# --- what an answer may use ----------------------------------------------------------------------


class Vocabulary:
    """What some sources use. known: the real names of what they import, and of what was before."""

    def __init__(self, sources: Iterable[str], known: dict[str, str]):
        trees = [tree for source in sources if (tree := parsed(source))]
        nodes = [node for tree in trees for node in ast.walk(tree)]
        self.own = {name: real for tree in trees for name, real in imported(tree).items()}
        self.known = known | self.own
        self.names = {name for tree in trees for names in scopes(tree) for name in names}
        self.keywords = {one.arg for one in nodes if isinstance(one, ast.keyword)}
        self.attributes = {one.attr for one in nodes if isinstance(one, ast.Attribute)}
        self.dotted = {dotted(one, self.known) for one in nodes if isinstance(one, ast.Attribute)}
        classes = [one for one in nodes if isinstance(one, ast.ClassDef)]
        self.bases = {dotted(base, self.known) for one in classes for base in one.bases}
        self.has_class = bool(classes)
        fixed = [
            n for n in nodes if isinstance(n, ast.Assign) and isinstance(n.value, ast.Constant)
        ]
        self.constants = {name for one in fixed for part in one.targets for name in names_in(part)}
        self.keeps = any(kept(tree) for tree in trees)


class Allowed:
    """What an answer may use. task: its stub and solution; lab: all of them; given: other cells."""

    def __init__(self, task: Vocabulary, lab: Vocabulary, given: Vocabulary):
        self.task, self.lab, self.known = task, lab, lab.known
        used = {real for name, real in lab.known.items() if name in lab.names}
        used |= {real.rpartition(".")[0] for real in used if real.startswith("torch.")}
        shown = set(given.known.values()) | {r.rpartition(".")[0] for r in given.known.values()}
        self.modules = COMPUTING | used | {one for one in shown if one and not CHANNELS.match(one)}
        self.modules |= {real.rpartition(".")[0] for real in lab.own.values()} - {""}
        ordinary = {name for name in dir(builtins) if not name.startswith("_")} - NOT_ORDINARY
        self.names = ordinary | lab.names | given.constants
        self.names |= {name for name, real in given.known.items() if self.has(real)}
        self.attributes = lab.attributes | (given.attributes & STORES)
        self.set = {"grad", "data", "requires_grad"} | lab.attributes | given.attributes
        kinds = {COLLECTIVES: lab.dotted, GROUPS: task.dotted, STORED: task.dotted}
        self.hidden = [one for one, used in kinds.items() if not any(map(one.fullmatch, used))]

    def has(self, real: str) -> bool:
        """Return whether a name with this origin is allowed: its innermost module is."""
        while real and real not in self.modules and not is_module(real):
            real = real.rpartition(".")[0]
        return real in self.modules

    def fits(self, whole: str) -> bool:
        """Return whether a dotted name that begins with a module is allowed."""
        hidden = any(one.match(whole) for one in self.hidden)
        return whole in self.lab.dotted or (self.has(whole) and not hidden)

    def is_plain(self, attribute: str) -> bool:
        """Return whether an attribute leads to nothing else: no frame, no module, no file."""
        inner = attribute.startswith("_") or attribute in sys.stdlib_module_names - WORDS
        inner = inner or attribute in STORES or INNER.fullmatch(attribute)
        return attribute in self.attributes or not inner


class Search:
    """Goes through a tree and finds what it uses beyond what is allowed.

    strict: also names, classes and collectives, which only matter in an answer that passed.
    """

    def __init__(self, tree: ast.Module, allowed: Allowed, strict: bool):
        self.tree, self.allowed, self.strict = tree, allowed, strict
        self.looked_up, own = scopes(tree)
        self.foreign = self.looked_up - own - allowed.names
        known = allowed.known | imported(tree)
        self.known = {name: real for name, real in known.items() if name in self.looked_up}
        nodes = list(ast.walk(tree))
        calls = [one for one in nodes if isinstance(one, ast.Call)]
        self.called = {id(one.func) for one in calls}
        asked = [call.args[0] for call in calls if name_of(call.func) in ASKING and call.args]
        self.read = {id(one) for one in asked}
        self.read |= {id(one.value) for one in nodes if isinstance(one, ast.Attribute)}
        self.alone = {id(one.value) for one in nodes if isinstance(one, ast.Expr)}
        classes = [one for one in nodes if isinstance(one, ast.ClassDef)]
        self.in_classes = {id(part) for one in classes for part in ast.walk(one)}

    def found(self) -> list[str]:
        """Return all of it, each once, in order."""
        kinds = {ast.Import: self._import, ast.ImportFrom: self._import, ast.Name: self._of_name}
        kinds |= {ast.Attribute: self._of_attribute, ast.Call: self._of_call}
        kinds |= {ast.Constant: self._of_text, ast.ClassDef: self._of_class}
        kinds |= {
            ast.MatchClass: lambda n: filter(lambda a: not self.allowed.is_plain(a), n.kwd_attrs)
        }
        every = ((kinds.get(type(node)), node) for node in ast.walk(self.tree))
        return list(dict.fromkeys(what for kind, node in every if kind for what in kind(node)))

    def _import(self, node: ast.Import | ast.ImportFrom) -> Iterator[str]:
        inside = f"{node.module or '.'}." if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names:
            whole = f"{inside}{alias.name}"
            plain = self.allowed.is_plain(alias.name) or whole in self.allowed.modules
            if not (plain and self.allowed.fits(whole)) or alias.name == "*":
                yield f"import {whole}"

    def _of_name(self, node: ast.Name) -> Iterator[str]:
        dangerous = self.strict or node.id in NOT_ORDINARY or node.id.startswith("_")
        if dangerous and node.id in self.foreign - {"setattr"}:
            yield node.id
        elif isinstance(node.ctx, ast.Load):
            real = self.known.get(node.id, "")
            value = id(node) not in self.read and is_module(real)
            value = value or (id(node) not in self.called and self._is_asking(node.id, real))
            yield from [f"{node.id} itself"] * value

    @staticmethod
    def _is_asking(name: str, real: str) -> bool:
        """Return whether a function must be called where it is named, with arguments to look at."""
        return name in ASKING | {"setattr", "type"} or bool(GROUPS.match(real))

    def _of_attribute(self, node: ast.Attribute) -> Iterator[str]:
        allowed, whole = self.allowed, dotted(node, self.known)
        first = next((n.id for n in ast.walk(node) if isinstance(n, ast.Name)), "") if whole else ""
        own = id(node) in self.in_classes and name_of(node.value) in {"self", "ctx"}
        own = own and not DUNDER.fullmatch(node.attr)
        said = whole or f".{node.attr}"
        aside = GROUPS.match(whole) and id(node) not in self.called
        if own or (first in self.known and whole in allowed.lab.dotted and not aside):
            return
        if not isinstance(node.ctx, ast.Load):
            changes = first in self.looked_up or node.attr not in allowed.set
            yield from [f"{said} ="] * changes
        elif first not in self.known:
            yield from [said] * (not allowed.is_plain(node.attr))
        else:
            sets = SETTERS.fullmatch(node.attr) and node.attr not in allowed.attributes
            plain = allowed.is_plain(node.attr) or whole == "torch.distributed.send"
            fits = allowed.fits(whole) or (COLLECTIVES.match(whole) and not self.strict)
            fits = fits and not aside
            yield from [said] * (not (fits and plain) or bool(sets))

    def _of_call(self, node: ast.Call) -> Iterator[str]:
        name, asked = name_of(node.func), node.args[1] if len(node.args) > 1 else None
        if GROUPS.match(dotted(node.func, self.known)):
            named = {one.arg or "**" for one in node.keywords} & {"backend", "store", "**"}
            yield from [f"a group with {one}" for one in sorted(named - self.allowed.lab.keywords)]
            yield from ["a group with two arguments"] * (len(node.args) > 1)
        if name in self.allowed.task.names:
            return
        if name in ASKING:
            constant = asked.value if isinstance(asked, ast.Constant) else "_"
            plain = self.allowed.is_plain(str(constant))
            yield from [f"{name} of {ast.unparse(asked)[:40] if asked else '…'}"] * (not plain)
        elif name == "setattr":
            own = name_of(node.args[0] if node.args else None) in {"self", "ctx"}
            yield from [name] * (not own)
        elif name == "type" and len(node.args) > 1:
            yield "type with three arguments"

    def _of_text(self, node: ast.Constant) -> Iterator[str]:
        if isinstance(node.value, str | bytes) and id(node) not in self.alone:
            yield from DUNDER.findall(repr(node.value))

    def _of_class(self, node: ast.ClassDef) -> Iterator[str]:
        kinds = {dotted(base, self.known) or "…" for base in node.bases}
        if (
            self.strict and not self.allowed.task.has_class
        ) or kinds - BASES - self.allowed.lab.bases:
            yield f"class {node.name}({', '.join(sorted(kinds))})"
        for one in node.body:
            made = [getattr(one, "name", ""), *map(name_of, getattr(one, "targets", []))]
            for name in filter(DUNDER.fullmatch, made):
                known = METHODS.fullmatch(name) or name in self.allowed.lab.names
                yield from [f"{node.name}.{name}"] * (not known)


def kept(tree: ast.Module) -> list[str]:
    """Return names in which functions can keep something from one call to the next."""
    found = [name for n in ast.walk(tree) if isinstance(n, ast.Global) for name in n.names]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            given = [one for one in [*node.args.defaults, *node.args.kw_defaults] if one]
            found += [f"the default {ast.unparse(one)[:20]}" for one in given if not is_fixed(one)]
    functions = [node for node in tree.body if isinstance(node, FUNCTIONS)]
    keepers = {"cache", "lru_cache", *(one.name for one in functions)}
    marks = [ast.unparse(mark) for one in functions for mark in one.decorator_list]
    found += [f"@{mark[:20]}" for mark in marks if keepers & set(re.findall(r"\w+", mark))]
    used = {name for function in functions for name in names_in(function)}
    fixed = [one for one in tree.body if isinstance(one, ast.Assign) and is_fixed(one.value)]
    others = [one for one in tree.body if one not in functions and one not in fixed]
    parts = [part for one in others for part in ast.walk(one) if isinstance(part, ast.Name)]
    return found + [n.id for n in parts if isinstance(n.ctx, ast.Store) and n.id in used]


def is_fixed(node: ast.expr) -> bool:
    """Return whether nobody can change what an expression gives."""
    changing = ast.Call | ast.List | ast.Dict | ast.Set | ast.comprehension
    return not any(isinstance(one, changing) for one in ast.walk(node))


# --- answers that are too small ------------------------------------------------------------------


def too_little(tree: ast.Module, stub: ast.Module, model: ast.Module) -> Iterator[str]:
    """Yield why an answer is less, or other, than what could solve its task."""
    mine, handed, models = functions_of(tree), functions_of(stub), functions_of(model)
    others = {
        name_of(t): n.value for n in tree.body if isinstance(n, ast.Assign) for t in n.targets
    }
    for name in sorted(handed.keys() & models.keys()):
        if name in mine:
            yield from too_simple(name, mine[name], models[name])
        elif isinstance(others.get(name), ast.Name | ast.Attribute | ast.Call):
            yield f"it does not define {name}, which is {ast.unparse(others[name])[:40]}"
        elif name not in scopes(tree)[1]:
            yield f"it does not define {name}"
    given = {n for n, real in imported(stub).items() if not is_module(real)} & names_in(model)
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    if unused := sorted(given - names_in(tree) - attributes):
        yield f"it does not use {', '.join(unused)}, which the stub imports"
    if telling := sorted(decides_by(tree) - decides_by(model)):
        yield f"it decides by {', '.join(telling)}"
    size, most = size_of(tree), size_of(model)
    if size < LEAST_SHARE * most:
        yield f"it has {size} syntax nodes, and the solution has {most}"


def decides_by(tree: ast.Module) -> set[str]:
    """Return by which properties of tensors a program chooses what it does."""
    nodes = [one for one in ast.walk(tree) if isinstance(one, ast.If | ast.IfExp | ast.Compare)]
    tests = [getattr(one, "test", one) for one in nodes]
    parts = [part for one in tests for part in ast.walk(one)]
    return {one.attr for one in parts if isinstance(one, ast.Attribute)} & TELLING


def functions_of(tree: ast.Module) -> dict[str, ast.AST]:
    """Return the functions and classes at the top level."""
    return {node.name: node for node in tree.body if isinstance(node, FUNCTIONS)}


def too_simple(name: str, mine: ast.AST, model: ast.AST) -> Iterator[str]:
    """Yield whether a function computes nothing, or ignores an argument that the model's uses."""
    if is_empty(mine) and not is_empty(model):
        yield f"{name} computes nothing"
    elif isinstance(mine, ast.FunctionDef) and isinstance(model, ast.FunctionDef):
        arguments = [[*one.args.posonlyargs, *one.args.args] for one in (mine, model)]
        uses, needed = names_in(mine), names_in(model)
        pairs = [(one.arg, other.arg) for one, other in zip(*arguments, strict=False)]
        if ignored := [one for one, other in pairs if other in needed and one not in uses]:
            yield f"{name} does not use its argument {', '.join(ignored)}"


def is_empty(node: ast.AST) -> bool:
    """Return whether a function only returns constants, or what it was given."""
    working = ast.Call | ast.BinOp | ast.Subscript | ast.Compare | ast.comprehension | ast.IfExp
    return all(isinstance(one, ast.Pass | ast.Expr | ast.Return) for one in node.body) and not any(
        isinstance(part, working) for one in node.body for part in ast.walk(one)
    )


def size_of(tree: ast.AST) -> int:
    """Return how many nodes a program has without its texts."""
    nodes = list(ast.walk(tree))
    texts = [n for n in nodes if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)]
    return len(nodes) - 2 * len(texts)


# --- a submission --------------------------------------------------------------------------------


def inspect(number: str, answers: dict[str, dict], given: list[str], own: str) -> list[str]:
    """Return what there is to say of one answer, or of the student's own cells ("own").

    Args:
        number: the task.
        answers: code, stub, model (the solution) and passed of each task of the lab.
        given: sources of the cells that the lab itself runs on the ranks.
        own: the code of the student's own cells.
    """
    about = answers.get(number, {"code": own, "stub": "", "model": "", "passed": False})
    code, stub, model, strict = (about[key] for key in ("code", "stub", "model", "passed"))
    shown = Vocabulary(given, {})
    every = Vocabulary(
        [one[key] for one in answers.values() for key in ("stub", "model")], shown.known
    )
    allowed = Allowed(Vocabulary([stub, model], every.known), every, shown)
    others = {one["code"]: one["model"] for task, one in answers.items() if task != number}
    found = ["a line that begins with ! or %"] if MAGIC.search(HARMLESS.sub("", code)) else []
    said, tree = [], parsed(code)
    if strict and code.split() == stub.split():
        return ["it is as it was handed out"]
    if strict and tree is None and not found:
        return ["it can't be read as Python"]
    if tree and strict:
        tree = with_helpers(tree, own, others)
        said += too_little(tree, parsed(stub), parsed(model))
        if names := [] if allowed.task.keeps else kept(tree):
            said.append(f"it can keep something between two calls, in {named(names)}")
    found += Search(tree, allowed, strict).found() if tree else []
    return [f"it uses {named(found)}, which the task does not need"] * bool(found) + said


def with_helpers(tree: ast.Module, own: str, others: dict[str, str]) -> ast.Module:
    """Return an answer with the definitions from other cells that it uses, or that replace its own.

    Args:
        tree: the answer.
        own: the student's own cells.
        others: the answers to other tasks, each with its solution; what the solution binds as well
            is the other task's.
    """
    nodes = [(node, set()) for node in (parsed(own) or tree).body if parsed(own)]
    for code, model in others.items():
        theirs = scopes(parsed(model) or ast.Module([], []))[1]
        nodes += [(node, theirs) for node in getattr(parsed(code), "body", [])]
    defined = [(node, scopes(ast.Module([node], []))[1] - theirs) for node, theirs in nodes]
    whole = ast.Module([*tree.body], [])
    while True:
        wanted = set().union(*scopes(whole))
        more = [one for one in defined if one[1] & wanted and one[0] not in whole.body]
        if not more:
            return whole
        whole.body += [node for node, _ in more]


def named(names: list[str], most: int = 6) -> str:
    """Return the first names as text, and how many more there are."""
    names = list(dict.fromkeys(names))
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def main() -> None:
    """Read a submission as JSON from standard input; write what there is to say of its parts."""
    for limit, most in ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_CPU, SECONDS)):
        with contextlib.suppress(OSError, ValueError):  # macOS does not limit memory
            resource.setrlimit(limit, (most, most))
    asked = json.load(sys.stdin)
    json.dump({part: inspect(part, **asked["lab"]) for part in asked["parts"]}, sys.stdout)
