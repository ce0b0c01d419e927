"""Inspects answers that passed their checks, and finds answers that a person should look at.

An answer runs in the same process as the probe of its check, so it can deceive the check. A remark
costs no points; the instructor reads it in the summary and in the gradebook.

The inspection uses an allow-list of words. An answer may use the words of its lab's stubs and
solutions, and public words of tensors, of Python's types, and of modules that only compute. An
allow-list finds even forgeries that we haven't thought of. Answers that are too small are found,
too. :func:`look` runs :func:`main` in a separate process with limits of time and memory, because a
student's code may be arbitrarily long and nested. No other module of grading is imported there.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib.util
import json
import re
import resource
import subprocess
import symtable
import sys
import textwrap
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .reference import Reference
    from .results import Result

#: The beginning of a remark on an answer, left out below a heading that says the same.
LOOK = "look at this answer: "
#: Characters of an answer that are kept, and so inspected.
MOST_CODE = 20_000
#: Statuses of results without an answer that a program could read.
UNREAD = {"by hand", "missing", "unchanged", "not graded"}
#: Seconds until an inspection is stopped. It needs less than one, but a machine may be busy.
DEADLINE = 90.0
INSPECT = "from utils.grading.inspection import main\nmain()"
#: Limits of the inspecting process: bytes of memory, seconds of CPU time.
MEMORY = 2 << 30
SECONDS = 30
#: Types and modules that only compute, and modules for the answers of a lab that uses `os`.
TYPES = list, dict, set, str, bytes, float, re.Match
COMPUTING = "__future__ collections collections.abc contextlib copy datetime functools hashlib"
COMPUTING += " bisect decimal fractions itertools math numpy random re statistics time typing"
FILES = {"io", "os", "pathlib", "tempfile"}
#: PyTorch's words are read from its files, because importing it would be slower than inspecting.
DECLARING = "_C/__init__.pyi _C/_Var*.pyi _tensor.py return_types.pyi functional.py linalg/*.py"
DECLARING += " nn/functional.py nn/[mu]*s/*.py nn/parameter.py optim/*.py autograd/grad_mode.py"
DECLARED = re.compile(r'^(?: {4})?(?:def |class |")?(\w+)(?:\(|: [^,\n]*$| = _add|",$)', re.M)
OTHERS = (
    "AVG GradBucket GroupMember MAX MIN NON_GROUP_MEMBER P2POp ReduceOp SUM WORLD autograd barrier "
    "batch_isend_irecv functional futures get_process_group_ranks get_rank get_world_size group "
    "hexdigest inf irecv is_completed isend linalg nn now optim random recv result send then "
    "tobytes total_seconds utils value wait"
)
#: Public words that open files, change settings, run annotations, store state or communicate.
SPECIAL = re.compile(
    r"_|all_|broadcast|cache|dump|fromregex|gather|get_state|init_process|new_\w*group|reduce|save"
    r"|scatter|set(_|err|buf)|share_|single|update_w|(load|lru_cache|open|wraps)$"
    r"|.*(ctypes|file|hints|memmap|rng_state|seed|txt)"
)
#: If a lab uses one word of a family, its answers may use the whole family.
FAMILIES = re.compile(r"(all_|broadcast|gather|reduce|scatter)\w*"), re.compile(r"new_\w*group\w*")
#: Builtin functions that run text, open files or find names. ASKING may do so in a plain call.
REACHING = {"compile", "delattr", "dir", "eval", "exec", "globals", "locals", "open", "vars"}
REACHING |= {"breakpoint", "exit", "help", "input", "quit"}
ASKING = {"getattr", "setattr", "type"}
BUILTINS = {name for name in dir(builtins) if name[0] != "_"} - REACHING - ASKING
#: Special methods and base classes that every class may use.
DUNDER = re.compile(r"__\w+__")
METHODS = {"__init__", "__call__", "__len__", "__iter__"}
BASES = {"object", "Exception", "nn.Module", "torch.nn.Module"}
#: Lines for IPython, and magics among them that change nothing.
MAGIC = re.compile(r"^[ \t]*[!%]", re.MULTILINE)
HARMLESS = re.compile(r"^%timeit\s+(?!-)|^%time\s+|^%(?:matplotlib|precision|pprint)\b.*", re.M)
#: With these words an answer can recognize which call a check judges.
TELLING = {"dtype", "element_size", "itemsize", "nbytes", "is_floating_point", "unique", "float64"}
#: The smallest alternative right answer has 0.43 of its solution's nodes (tests/labs/answers).
LEAST_SHARE = 0.35
DEFINING = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
CHANGING = ast.Call | ast.List | ast.Dict | ast.Set | ast.comprehension | ast.For
WORKING = ast.Call | ast.BinOp | ast.Subscript | ast.Compare | ast.comprehension | ast.IfExp


# --- a submission, and the process that inspects it ----------------------------------------------


def look(result: Result, reference: Reference) -> list[str]:
    """Return remarks on what a person should look at in a result, one line each."""
    lines = list(_forgeries(result))
    codes = {task.task: task.code for task in result.tasks if task.status not in UNREAD}
    if not any(result.task(number).points for number in codes):
        return lines
    codes["own"] = result.own
    for part, code in codes.items():
        if len(code) >= MOST_CODE:
            lines.append(f"{_head(part)}only the first {MOST_CODE} characters are kept")
    remarks = _inspected(codes, result, reference)
    if remarks is None:
        return [*lines, "look at this submission: its code is too long or nested for an inspection"]
    return lines + [f"{_head(part)}{text}" for part, texts in remarks.items() for text in texts]


def _head(part: str) -> str:
    if part == "own":
        return "look at the student's own cells: "
    return f"Task {part}: {LOOK}"


def _forgeries(result: Result) -> Iterator[str]:
    for task in result.tasks:
        for problem in task.problems:
            if problem.get("kind") == "forged":
                yield f"Task {task.task}: {LOOK}its check found a forgery: {problem['text']}"


def _inspected(
    codes: dict[str, str], result: Result, reference: Reference
) -> dict[str, list[str]] | None:
    """Return the remarks on each part of a submission; None if the inspection didn't finish."""
    answers: dict[str, dict[str, Any]] = {
        "own": {"code": codes["own"], "passed": False, "stub": "", "model": ""}
    }
    for task in reference.tasks.values():
        if not task.by_hand:
            answers[task.number] = {
                "code": codes.get(task.number, ""),
                "passed": task.number in codes and bool(result.task(task.number).points),
                "stub": task.stub,
                "model": task.model,
            }
    lab = {"answers": answers, "provided": reference.provided}
    text = json.dumps({"parts": list(codes), "lab": lab})
    with contextlib.suppress(subprocess.SubprocessError, OSError, ValueError):
        command = [sys.executable, "-P", "-c", INSPECT]  # -P: don't import from the current folder
        done = subprocess.run(
            command, input=text, timeout=DEADLINE, capture_output=True, check=True, encoding="utf-8"
        )
        return dict(json.loads(done.stdout))
    return None


def main() -> None:
    """Read a submission as JSON from standard input; write the remarks on its parts."""
    for limit, most in ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_CPU, SECONDS)):
        with contextlib.suppress(OSError, ValueError):  # macOS does not limit memory
            resource.setrlimit(limit, (most, most))
    asked = json.load(sys.stdin)
    json.dump({part: list(inspect(part, **asked["lab"])) for part in asked["parts"]}, sys.stdout)


# --- syntax trees --------------------------------------------------------------------------------


@cache
def parsed(source: str) -> ast.Module | None:
    """Return the syntax tree of a cell; None if it is not Python, or is too deeply nested."""
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        tree = ast.parse(HARMLESS.sub("", source))
        scopes(tree)  # raises an error for a name that is both global and nonlocal
        return tree
    return None


def trusted(source: str) -> ast.Module:
    """Return the syntax tree of a stub or a solution. Raises ValueError if it is not Python."""
    tree = parsed(source)
    if tree is None:
        raise ValueError(f"the lab's own source is not Python: {source[:80]}")
    return tree


def every(kind: type | UnionType, *trees: ast.AST) -> list[Any]:
    """Return all nodes of a kind in some trees."""
    return [node for tree in trees for node in ast.walk(tree) if isinstance(node, kind)]


def words(kind: type, *trees: ast.AST) -> set[str]:
    """Return all names (kind ast.Name), or all names of attributes (ast.Attribute)."""
    return {getattr(node, "attr", None) or node.id for node in every(kind, *trees)}


def functions_of(tree: ast.Module) -> dict[str, Any]:
    """Return the functions, classes and lambdas at the top level."""
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    lambdas = [node for node in assigned if isinstance(node.value, ast.Lambda)]
    functions: dict[str, Any] = {ast.unparse(node.targets[0]): node.value for node in lambdas}
    return functions | {node.name: node for node in tree.body if isinstance(node, DEFINING)}


def imported(*trees: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield for each import the name that it binds and the full name of what it imports."""
    for node in every(ast.Import | ast.ImportFrom, *trees):
        module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for one in node.names:
            yield one.asname or one.name.partition(".")[0], f"{module}{one.name}"


def bases_of(*trees: ast.AST) -> set[str]:
    """Return the base classes of the classes in some trees, as text."""
    return {ast.unparse(base) for node in every(ast.ClassDef, *trees) for base in node.bases}


@cache
def scopes(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Return the global names that a source looks up, and the global names that it binds."""
    looked_up = set()
    bound = set()
    tables = [top := symtable.symtable(ast.unparse(tree), "answer", "exec")]
    for table in tables:
        tables += table.get_children()
        for symbol in table.get_symbols():
            if table is not top and not symbol.is_global():
                continue
            if table is not top or symbol.is_referenced():
                looked_up.add(symbol.get_name())
            if symbol.is_assigned() or symbol.is_imported():
                bound.add(symbol.get_name())
    return looked_up, bound


def public(*owners: object) -> set[str]:
    """Return the words of modules and types, without the modules that they import."""
    members = [pair for owner in owners for pair in vars(owner).items()]
    return {word for word, value in members if type(value) is not type(ast)}


@cache
def ordinary() -> set[str]:
    """Return the public words of Python's types, of modules that compute, and of tensors."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("torch")
    files = [f for pattern in DECLARING.split() for f in Path(spec.origin).parent.glob(pattern)]
    texts = [file.read_text(encoding="utf-8") for file in files]
    known = {*OTHERS.split(), *(word for text in texts for word in DECLARED.findall(text))}
    known |= public(*TYPES, *map(importlib.import_module, COMPUTING.split()))
    return {word for word in known if not SPECIAL.match(word)}


class Allowed:
    """The words, modules and names that the answers of a lab may use.

    Only an answer that has not passed may use the names and collectives of the provided cells.

    Args:
        sources: The lab's stubs and solutions.
        provided: The other cells that the lab runs on the ranks.
        classes: Whether an answer may define classes.
    """

    def __init__(self, sources: list[str], provided: list[str], passed: bool, classes: bool):
        answers = list(filter(None, map(parsed, sources)))
        cells = list(filter(None, map(parsed, provided)))
        used = answers if passed else answers + cells
        imports = list(imported(*cells, *answers))
        self.classes = classes
        self.bases = BASES | bases_of(*answers)
        self.names = METHODS.union(*(names for tree in used for names in scopes(tree)))
        self._allow_modules(imports)
        self._allow_words(every(ast.Attribute, *answers, *cells), words(ast.Attribute, *used))
        self.families = [family for family in FAMILIES if not passed or self._has_one_of(family)]
        self.names |= BUILTINS | {name for name, real in imports if self.imports(real)}

    def _allow_modules(self, imports: list[tuple[str, str]]) -> None:
        """Allow what the lab imports, and the modules that it imports from."""
        reals = {real for name, real in imports if name in self.names}
        self.modules = reals | {real.rpartition(".")[0] for real in reals} - {""}
        self.modules |= {"torch", "torch.distributed", *COMPUTING.split()}

    def _allow_words(self, attributes: list[ast.Attribute], used: set[str]) -> None:
        """Allow the attributes of the lab's cells; a special one only if it is `used`."""
        self.settable = {node.attr for node in attributes if isinstance(node.ctx, ast.Store)}
        self.settable |= {"grad", "data", "requires_grad"}
        plain = {node.attr for node in attributes if not SPECIAL.match(node.attr)}
        self.words = plain.union(ordinary(), used, *(name.split(".") for name in self.modules))
        if "os" in self.modules:
            self.modules |= FILES
            self.words |= {"load", "save"} | public(*map(importlib.import_module, FILES))

    def _has_one_of(self, family: re.Pattern[str]) -> bool:
        return any(map(family.fullmatch, self.words))

    def has(self, word: str) -> bool:
        """Return whether an answer may use an attribute."""
        return word in self.words or any(family.fullmatch(word) for family in self.families)

    def imports(self, real: str) -> bool:
        """Return whether an answer may import something."""
        module, _, word = real.rpartition(".")
        return real in self.modules or (module in self.modules and self.has(word))


def foreign(tree: ast.Module, allowed: Allowed) -> Iterator[str]:
    """Yield everything in a source that is not allowed, as text."""
    looked_up, bound = scopes(tree)
    calls = every(ast.Call, tree)
    plain = {id(call.func) for call in calls if asks_plainly(call, allowed)}
    yield from (f"import {real}" for _, real in imported(tree) if not allowed.imports(real))
    yield from sorted(looked_up - allowed.names - (bound - REACHING) - ASKING)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            text = foreign_attribute(node, allowed, looked_up)
        elif isinstance(node, ast.Name) and id(node) in plain:
            text = ""
        else:
            text = foreign_name(node, allowed)
        if text:
            yield text[-60:]
    yield from sorted(set(DUNDER.findall(ast.unparse(tree))) - allowed.names - allowed.words)


def foreign_attribute(node: ast.Attribute, allowed: Allowed, looked_up: set[str]) -> str:
    """Return an attribute as text if it is not allowed; "" if it is."""
    text = ast.unparse(node)
    match node:
        case ast.Attribute(ast.Name("self" | "ctx"), word) if allowed.classes and word[0] != "_":
            return ""
        case ast.Attribute(ast.Call(ast.Attribute(_, "Generator")), "manual_seed"):
            return ""
        case ast.Attribute(owner, "format" | "format_map"):
            # A field such as {0.gi_frame} reads attributes of the argument.
            fits = isinstance(owner, ast.Constant) and not re.search(
                r"\{[^{}]*[.\[][^{}]*\}", re.sub(r":[^{}]*\}", "}", str(owner.value))
            )
        case ast.Attribute(_, word, ast.Load()):
            fits = allowed.has(word)
        case ast.Attribute(owner, word):
            fits = word in allowed.settable and not words(ast.Name, owner) & looked_up
            text = f"{text} ="
    return "" if fits else text


def foreign_name(node: ast.AST, allowed: Allowed) -> str:
    """Return a name, a class or a pattern as text if it is not allowed; "" if it is."""
    match node:
        case ast.Name(name) if name in ASKING - allowed.names:
            return name
        case ast.ClassDef(name, bases):
            texts = [ast.unparse(base) for base in bases]
            fits = allowed.classes and set(texts) <= allowed.bases
            return "" if fits else f"class {name}({', '.join(texts)})"
        case ast.MatchClass(kwd_attrs=names):
            return "" if all(map(allowed.has, names)) else ", ".join(names)
    return ""


def asks_plainly(call: ast.Call, allowed: Allowed) -> bool:
    """Return whether a call of type, getattr or setattr plainly shows that it is allowed."""
    match call.func, call.args:
        case (ast.Name("type"), [one]) if not isinstance(one, ast.Starred):
            return True
        case ast.Name("getattr"), [ast.Name(owner), ast.Constant(str(word)), *_]:
            return (allowed.classes and owner == "self") or allowed.has(word)
        case ast.Name("setattr"), [ast.Name("self" | "ctx"), *_]:
            return allowed.classes
    return False


def kept(tree: ast.Module) -> Iterator[str]:
    """Yield names in which functions can store something from one call to the next."""
    yield from (name for node in every(ast.Global, tree) for name in node.names)
    yield from kept_in_signatures(tree)
    others = [n for n in tree.body if not isinstance(n, DEFINING) and every(CHANGING, n)]
    stored = [node.id for node in every(ast.Name, *others) if isinstance(node.ctx, ast.Store)]
    used = words(ast.Name, *functions_of(tree).values())
    yield from (name for name in stored if name in used)


def kept_in_signatures(tree: ast.Module) -> Iterator[str]:
    """Yield mutable defaults, and decorators that the answer defines itself."""
    signatures = every(ast.arguments, tree)
    defaults = [value for one in signatures for value in one.defaults + one.kw_defaults if value]
    changing = [value for value in defaults if every(CHANGING, value)]
    yield from (f"the default {ast.unparse(value)[:20]}" for value in changing)
    yield from (f"@{ast.unparse(mark)[:20]}" for mark in own_decorators(tree))


def own_decorators(tree: ast.Module) -> list[ast.expr]:
    """Return the decorators that the answer defines itself."""
    marks = [mark for node in every(DEFINING, tree) for mark in node.decorator_list]
    return [mark for mark in marks if words(ast.Name, mark) & functions_of(tree).keys()]


def too_little(tree: ast.Module, stub: ast.Module, model: ast.Module) -> Iterator[str]:
    """Yield signs that an answer is too little to solve its task, or solves a different one."""
    mine = functions_of(tree)
    models = functions_of(model)
    for name in sorted(functions_of(stub).keys() & models.keys()):
        if name not in mine:
            yield f"it does not define {name}"
        elif every(WORKING, models[name]) and not every(WORKING, mine[name]):
            yield f"{name} computes nothing"
        elif unused := unused_arguments(mine[name], models[name]):
            yield f"{name} does not use its argument {', '.join(unused)}"
    if telling := sorted((deciding_words(tree) - deciding_words(model)) & TELLING):
        yield f"it makes decisions by {', '.join(telling)}"
    size = size_of(tree)
    model_size = size_of(model)
    if size < LEAST_SHARE * model_size:
        yield f"it has {size} syntax nodes, and the solution has {model_size}"


def unused_arguments(function: Any, model: Any) -> list[str]:
    """Return the arguments that a function does not use although the solution uses them."""
    if not isinstance(model, ast.FunctionDef) or isinstance(function, ast.ClassDef):
        return []
    pairs = zip(function.args.args, model.args.args, strict=False)
    needed = [mine.arg for mine, other in pairs if other.arg in words(ast.Name, model)]
    return [name for name in needed if name not in words(ast.Name, function)]


def deciding_words(tree: ast.Module) -> set[str]:
    """Return the attributes in a program's conditions."""
    choices = every(ast.If | ast.IfExp | ast.Compare, tree)
    return words(ast.Attribute, *(getattr(node, "test", node) for node in choices))


def size_of(tree: ast.AST) -> int:
    """Return how many nodes a program has without docstrings and other constant statements."""
    texts = [one for one in every(ast.Expr, tree) if isinstance(one.value, ast.Constant)]
    return len(every(ast.AST, tree)) - 2 * len(texts)


def with_helpers(tree: ast.Module, others: list[dict[str, Any]]) -> ast.Module:
    """Return an answer together with the code in other cells that it uses or that replaces it.

    Names that the other cell's solution defines, too, belong to the other answer: no helpers.
    """
    parts = [(getattr(parsed(one["code"]), "body", ()), trusted(one["model"])) for one in others]
    nodes = [
        (node, scopes(ast.Module([node], []))[1] - scopes(model)[1])
        for body, model in parts
        for node in body
    ]
    while True:
        wanted = set().union(*scopes(tree))
        more = [node for node, names in nodes if names & wanted and node not in tree.body]
        if not more:
            return tree
        tree = ast.Module(tree.body + more, [])


def inspect(part: str, answers: dict[str, dict[str, Any]], provided: list[str]) -> Iterator[str]:
    """Yield remarks on the answer to a task, or on the student's own cells ("own").

    Args:
        part: The task's number, or "own".
        answers: For each part its code, stub, model (the solution), and whether it passed.
        provided: The code that the lab itself runs on the ranks.
    """
    about = answers[part]
    passed = about["passed"]
    tree = parsed(about["code"])
    if MAGIC.search(HARMLESS.sub("", about["code"])):
        yield "it uses a line that begins with ! or %"
    elif passed and about["code"].split() == about["stub"].split():
        yield "it is still the stub, but its check passed"
    elif passed and not tree:
        yield "it can't be read as Python"
    elif tree:
        yield from program_remarks(tree, part, answers, provided)


def program_remarks(
    tree: ast.Module, part: str, answers: dict[str, dict[str, Any]], provided: list[str]
) -> Iterator[str]:
    """Yield remarks on the program in an answer, see `inspect`."""
    stub = trusted(answers[part]["stub"])
    model = trusted(answers[part]["model"])
    passed = answers[part]["passed"]
    sources = [each[key] for each in answers.values() for key in ("stub", "model")]
    classes = not passed or bool(every(ast.ClassDef, stub, model))
    allowed = Allowed(sources, provided, passed, classes)
    if passed:
        tree = with_helpers(tree, [each for key, each in answers.items() if key != part])
    if names := dict.fromkeys(foreign(tree, allowed)):
        yield f"it uses {listed(names)}, which the task does not need"
    if passed:
        yield from too_little(tree, stub, model)
        yield from keeping(tree, stub, model)


def keeping(tree: ast.Module, stub: ast.Module, model: ast.Module) -> Iterator[str]:
    """Yield a remark if an answer can store something between calls, unlike stub and solution."""
    may_keep = any(kept(stub)) or any(kept(model))
    if not may_keep and (names := dict.fromkeys(kept(tree))):
        yield f"it can store something between two calls, in {listed(names)}"


def listed(names: Iterable[str]) -> str:
    """Return names as text, shortened to 200 characters."""
    return textwrap.shorten(", ".join(names), 200, placeholder=" and more")
