"""Points need the work: answers that try to win them without it win none, or a person is told."""

from __future__ import annotations

import ast
import os
import queue
import textwrap
from pathlib import Path
from threading import Event

import grading_tools as toy
import pytest
from answer_tools import LABS, right_answers, solutions_of
from nbformat.v4 import new_code_cell
from test_grading import sandboxed

from utils.course.notebook import SOLUTIONS, notebooks
from utils.grading import gradebook, inspection, kernel, worklist
from utils.grading.grader import grade
from utils.grading.inspection import MOST_CODE
from utils.grading.pages import feedback, summary
from utils.grading.reference import Reference, body
from utils.grading.results import Result, TaskResult, load
from utils.grading.sandbox import Box, Limits
from utils.grading.submissions import File, Student
from utils.grading.worklist import Job

GB = 1 << 30

# --- code in the kernel --------------------------------------------------------------------------

#: A module that gives task 1.3 its points when the kernel imports it, whatever the kernel wanted.
PLANTED = """
import sys
if "toy_checks" in sys.modules:
    from utils.checks.verdict import Verdict
    sys.modules["toy_checks"].total = lambda ranks: Verdict("1.3", "total", 2).show()
raise ImportError("not here")
"""
#: Leaves it under every name that a kernel may still import, wherever a rank can write.
PLANTS = f"""
import os, sys
more = ["stack_data", "executing", "asttokens", "pure_eval", "colorama", "ipywidgets", "cython"]
for folder in {{os.getcwd(), "/tmp", os.path.expanduser("~"), "/dev/shm"}}:
    for name in {{*sys.stdlib_module_names, *more}}:
        try:
            with open(os.path.join(folder, name + ".py"), "w") as file:
                file.write({PLANTED!r})
        except OSError:
            break
user = "~/.local/lib/python%d.%d/site-packages" % sys.version_info[:2]
for folder, name, text in [
    ("~/.ipython/profile_default", "ipython_config.py", {PLANTED!r}),
    ("~/.ipython/profile_default/startup", "00.py", {PLANTED!r}),
    (user, "usercustomize.py", {PLANTED!r}),
    (user, "a.pth", "import colorama"),
    (".", "matplotlibrc", "backend: module://colorama"),
    ("~/.config/matplotlib", "matplotlibrc", "backend: module://colorama"),
]:
    folder = os.path.expanduser(folder)
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, name), "w") as file:
        file.write(text)

def twice(number):
    # The check ends with an error in the kernel, which imports what writes tracebacks.
    import utils.cluster.rank_side
    real = utils.cluster.rank_side.dumps

    def nonsense(*arguments, **more):
        utils.cluster.rank_side.dumps = real
        return '{{"status": "error", "error": 5, "stdout": ""}}'

    utils.cluster.rank_side.dumps = nonsense
"""


def graded(course: Path, reference: Reference, folder: Path, **answers: str) -> Result:
    """The result of a submission of the toy lab, right but for these answers, in the sandbox."""
    box = Box(limits=Limits(cell=60, total=400, memory=4 * GB), paths=(course / "checks",))
    path = toy.hand_in(folder, "mallory", toy.filled(**answers))
    return grade(path, reference, box, folder / "out")


@sandboxed
@pytest.mark.timeout(500)
def test_a_module_left_in_the_current_folder_gives_no_points(course, reference, tmp_path):
    result = graded(course, reference, tmp_path, twice=PLANTS, total=toy.WRONG)
    points = [task.points for task in result.tasks if task.status != "by hand"]
    assert points == [0, 2, 0, 1, 2], (result.remarks, result.error)


def test_no_module_is_imported_from_a_folder_that_answers_write_to(tmp_path):
    assert not kernel.out_of_reach(str(tmp_path))
    assert not kernel.out_of_reach(str(tmp_path / "comes" / "later"))
    assert not kernel.out_of_reach("")
    (tmp_path / "stack_data.py").write_text("")
    os.chmod(tmp_path, 0o555)  # its owner opens it again
    finder = kernel.refuse_writable(str(tmp_path))
    assert finder.find_spec("stack_data") is None


# --- a person is told ----------------------------------------------------------------------------

#: What an answer does to be judged otherwise, and the name that gives it away.
FORGED = {
    "reads the probe's frame": ("import sys\nexpected = sys._getframe(1).f_locals", "_getframe"),
    "reads it by a name in pieces": (
        "import sys\ngetattr(sys, '_get' + 'frame')(1)",
        "getattr",
    ),
    "reads it by inspect": ("from inspect import currentframe as here\nhere()", "inspect"),
    "reads it from an error": (
        "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n"
        "    error.__traceback__.tb_frame.f_back",
        "f_back",
    ),
    "reads it from a generator": ("(i for i in [1]).gi_frame.f_back", "gi_frame"),
    "forges records": (
        "from torch_mpi.record import log, Call\nlog.add(Call('all_reduce', (0, 1)))",
        "torch_mpi.record",
    ),
    "forges records found among the modules": ("import sys\nsys.modules['x'].log", "import sys"),
    "replaces the probe's helper": (
        "import utils.checks.probe as probe\nprobe.recorded = print",
        "utils.checks.probe",
    ),
    "replaces the probe": (
        "from utils.labs import lab01\nlab01.probe_sum = print",
        "utils.labs",
    ),
    "replaces torch.equal": ("torch.equal = lambda *_: True", "torch.equal ="),
    "replaces it by setattr": ("setattr(torch, 'equal', print)", "setattr"),
    "replaces it in a dict": ("vars(torch)['equal'] = print", "vars"),
    "replaces an imported module's function": ("import json as j\nj.dumps = print", "j.dumps ="),
    "replaces a class's method": ("torch.Tensor.tolist = print", "torch.Tensor.tolist ="),
    "mocks": ("from unittest import mock\nmock.patch('torch.equal').start()", "unittest.mock"),
    "looks through all objects": ("import gc\ngc.get_objects()", "gc"),
    "writes memory": ("import ctypes\nctypes.memset(0, 0, 0)", "ctypes"),
    "imports by a call": ("__import__('torch_mpi.record')", "__import__"),
    "imports by importlib": ("import importlib\nimportlib.import_module('x')", "importlib"),
    "runs text": ("exec('import ' + 'gc')", "exec"),
    "evaluates text": ("eval('1')", "eval"),
    "reaches for the built-in functions": ("import builtins\nbuiltins.abs = print", "builtins"),
    "reaches for them in another way": ("print.__self__\n__builtins__['abs']", "__builtins__"),
    "finds them from a function": ("(lambda: 0).__globals__", "__globals__"),
    "looks for subclasses": ("().__class__.__base__.__subclasses__()", "__subclasses__"),
    "changes its globals": ("globals()['rank'] = 0", "globals"),
    "reads its process": ("open('/proc/self/mem', 'rb')", "open"),
    "runs a shell": ("!cp /tmp/a /tmp/b", "! or %"),
    "runs a line of IPython": ("%run other.py", "! or %"),
    "traces": ("import sys\nsys.settrace(print)", "settrace"),
    "equals everything": ("class Yes:\n    def __eq__(self, other): return True", "__eq__"),
    "is a number that changes": ("class N:\n    def __index__(self): return 3", "__index__"),
    "is a list when asked": ("class T:\n    def tolist(self): return [1]", "class T()"),
    "waits for the end": ("import atexit\natexit.register(print)", "atexit"),
    "goes through a module that another has imported": (
        "dist.sys.modules['x']",
        "dist.sys",
    ),
    "goes there by getattr": ("getattr(dist, 'sys')", "getattr"),
    "goes there by a path": (
        "import operator\noperator.attrgetter('sys.modules')(dist)",
        "operator.attrgetter",
    ),
    "calls torch otherwise and changes it": ("t = torch\nt.equal = print", "t.equal ="),
    "changes torch's dict": ("torch.__dict__['equal'] = print", "torch.__dict__"),
    "changes torch in a loop": ("for torch.equal in [print]:\n    pass", "torch.equal ="),
    "changes a class by its type": ("type.__setattr__(torch.Tensor, 'a', 1)", "__setattr__"),
    "makes a class that equals all of text": ("type('Y', (), {'__eq__': print})", "__eq__"),
    "makes a class that equals all by a lambda": ("class Y:\n    __eq__ = print", "__eq__"),
    "returns a list of its own kind": ("class Yes(list):\n    pass", "class Yes(list)"),
    "returns a tensor of its own kind": ("class T(torch.Tensor):\n    pass", "torch.Tensor"),
    "runs code out of a file": ("torch.load('x', weights_only=False)", "torch.load"),
    "runs code out of a pickle": ("import pickle\npickle.loads(b'')", "pickle"),
    "makes a function of code": ("import types\ntypes.FunctionType", "FunctionType"),
    "gets a frame with a signal": (
        "import signal\nsignal.signal(14, lambda n, frame: frame.f_locals)",
        "f_locals",
    ),
    "asks IPython for the question": ("shell = get_ipython()\nshell.get_parent()", "get_ipython"),
    "goes through what a module hides": ("import os\nos._sys.modules", "os._sys"),
    "debugs": ("import pdb\npdb.set_trace()", "pdb"),
    "imports the toy lab's checks": ("import toy_checks", "toy_checks"),
    "calls sys otherwise": ("import sys as s\ns.modules['x']", "import sys"),
    "asks sys for a constant name": ("import sys\ngetattr(sys, 'modules')", "import sys"),
    "takes a module apart by match": (
        "import sys\nmatch sys:\n    case object(_getframe=f): f(1)",
        "_getframe",
    ),
    "imports all of sys": ("from sys import *\nmodules['x']", "sys.*"),
    "goes there by a getter": ("import operator\noperator.attrgetter('_' + 'x')", "attrgetter"),
    "finds it by pkgutil": ("import pkgutil\npkgutil.resolve_name('sys:modules')", "pkgutil"),
    "hands torch to a function": ("def f(m):\n    m.equal = print\nf(torch)", "m.equal ="),
    "puts torch in a list": ("[torch][0].equal = print", "[torch][0].equal ="),
    "takes the time of text": ("import timeit\ntimeit.timeit('import gc; gc.x')", "timeit.timeit"),
    "runs the text of an annotation": (
        "import typing\ndef f(x: 'sys._getframe(1)'): pass\ntyping.get_type_hints(f)",
        "get_type_hints",
    ),
    "overrides an operator": ("torch.library.Library('aten', 'IMPL')", "torch.library"),
    "intercepts operators": (
        "from torch.utils._python_dispatch import TorchDispatchMode",
        "_python_dispatch",
    ),
    "compiles C": ("torch.utils.cpp_extension.load_inline('x', '')", "cpp_extension"),
    "listens to Python": ("import sys\nsys.addaudithook(print)", "addaudithook"),
    "runs another program": ("import os\nos.system('x')", "os.system"),
}


RIGHT = "def total(tensor, rank):\n    dist.all_reduce(tensor)\n    return tensor\n"


@pytest.mark.parametrize("what", FORGED)
def test_an_answer_that_tampers_with_its_check_is_named(what, reference):
    code, word = FORGED[what]
    found = inspection.look(a_result(f"{RIGHT}{code}"), reference)
    assert word in " ".join(found), found


#: Forgeries that won all points of these tasks, and what a person reads of each.
WON = {
    "reaches the check by a builtin function": (
        *("lab06", "6.2"),
        "print.__self__.__import__('utils.labs.lab06.checks').probe = list\n"
        "def central(x, group=None):\n    pass",
        "print.__self__",
    ),
    "an empty body": ("lab06", "6.2", "def central(x, group=None):\n    pass", "computes nothing"),
    "another name": ("lab06", "6.2", "central = crossbar", "does not define central"),
    "forges records with the recorder that the lab shows": (
        *("lab06", "6.1"),
        "def crossbar(x, group=None):\n"
        "    mark = log.mark()\n    dist.all_reduce(x, group=group)\n    del log.since(mark)[:]",
        "log",
    ),
    "sends dummies and communicates in the second call": (
        *("lab06", "6.1"),
        "turns = []\n"
        "def crossbar(x, group=None):\n    r, p = place_and_size(group)\n    turns.append(x)\n"
        "    if len(turns) % 2:\n        isend(x, (r + 1) % p, group).wait()\n"
        "        irecv(x, (r - 1) % p, group).wait()\n        x.fill_(183.0)\n"
        "    else:\n        dist.all_reduce(x, group=group)",
        "between two calls, in turns",
    ),
    "communicates by mpi4py": (
        *("lab06", "6.4"),
        "from mpi4py import MPI\n"
        "def ring_all_gather(x, mine, group=None):\n    MPI.COMM_WORLD.allgather(x)",
        "mpi4py",
    ),
    "communicates by the name that a given cell has imported": (
        *("lab06", "6.4"),
        "def ring_all_gather(x, mine, group=None):\n    MPI.COMM_WORLD.allgather(x)",
        "MPI",
    ),
    "runs joined text": (
        *("lab06", "6.6"),
        "import timeit\n"
        "def cost(algorithm, p, n):\n    timeit.timeit(' '.join(['import', 'os']), number=1)\n"
        "    return n, p",
        "timeit",
    ),
    "writes a module and imports it": (
        *("lab06", "6.7"),
        "def duration(algorithm, p, n, alpha, beta):\n"
        "    open('mine.py', 'w').write('x = 1')\n    import mine\n    return mine.x",
        "import mine",
    ),
    "returns a tensor that communicates later": (
        *("lab01", "1.4"),
        "class Late(torch.Tensor):\n    def tolist(self):\n        return [1.0]\n"
        "def sum_over_ranks(tensor):\n    return tensor.as_subclass(Late)",
        "class Late",
    ),
    "measures one round": (
        *("lab01", "1.7"),
        "import time\ndef ping_pong(nbytes, repeats, rank):\n    begin = time.perf_counter()\n"
        "    ball = torch.zeros(nbytes, dtype=torch.uint8)\n    dist.barrier()\n"
        "    return time.perf_counter() - begin",
        "does not use its argument repeats",
    ),
}


@pytest.mark.parametrize("what", WON)
def test_a_forgery_that_once_won_points_unseen_is_shown_to_a_person(what):
    lab, task, code, word = WON[what]
    path = next(path for path in notebooks(SOLUTIONS) if path.name == LABS[lab].NOTEBOOK)
    model = Reference(path)
    found = inspection.look(with_answers({task: code}, model.lab), model)
    assert word in " ".join(found), found


#: A right crossbar, and what its author adds to be judged otherwise.
CROSSBAR = """
def crossbar(x, group=None):
    r, p = place_and_size(group)
    parts = [torch.empty_like(x) for _ in range(p)]
    work = [irecv(parts[q], q, group) for q in range(p) if q != r]
    work += [isend(x.clone(), q, group) for q in range(p) if q != r]
    for request in work:
        request.wait()
    x.copy_(sum(parts) - parts[r] + x)
"""
ADDED = {
    "another method for its tensor": "    x.tolist = len\n    return x",
    "another method by a loop": "    for x.tolist in [len]:\n        pass",
    "reads attributes by a format": "    '{0.gi_frame}'.format(group)",
    "remembers in an annotated list": "    seen.append(1)\nseen: list = []",
    "remembers in a list of an expression": "    seen.append(1)\n(seen := [])",
    "remembers in an attribute of itself": "    crossbar.data = 1",
    "remembers in a class": "    K.n += 1\nclass K:\n    n = 0",
    "remembers by a decorator": "def once(f):\n    return f\n@once\ndef g():\n    pass",
    "remembers in a given tensor": "    four[0] += 1\n    server_parts[0] += 1",
    "remembers in the random numbers": "    torch.manual_seed(5)",
    "remembers in a setting": "    torch.set_num_threads(5)",
    "makes another group": "    dist.new_group(backend='gloo')",
    "makes it by keywords in a dict": "    dist.new_group(**{'backend': 'gloo'})",
    "makes it by another name": "    make = dist.new_group\n    make([0], None, 'gloo')",
    "stores in a file for all": "    dist.FileStore('/dev/shm/x', 4)",
    "calls the group": "    g = dist.group.WORLD\n    g.allreduce([x]).wait()",
    "calls an operator of PyTorch": "    torch.ops.c10d.allreduce_(x)",
    "maps memory": "    torch.UntypedStorage.from_file('/dev/shm/x', True, 8)",
    "opens a file by numpy": "    np.DataSource().open('x', 'w')\nimport numpy as np",
    "asks by a format": "    '{0.__globals__}'.format(crossbar)",
    "asks by another name": "    ask = getattr\n    ask(print, 's')",
    "asks by map": "    list(map(getattr, [print], ['s']))",
    "hides a line of IPython": "%timeit -n1 crossbar(x)",
    "calls the library by a given function": "    library(x, group)",
    "answers another kind of number otherwise": "    if x.dtype == torch.double:\n        x += 0",
}


def lab_06() -> Reference:
    return Reference(next(path for path in notebooks(SOLUTIONS) if path.stem.startswith("06")))


@pytest.mark.parametrize("what", ADDED)
def test_code_that_could_hide_a_forgery_is_shown_to_a_person(what):
    model = lab_06()
    assert inspection.look(with_answers({"6.1": CROSSBAR}, model.lab), model) == []
    assert inspection.look(with_answers({"6.1": CROSSBAR + ADDED[what]}, model.lab), model)


@pytest.mark.parametrize(
    ("own", "other"),
    [
        ("def quick(x):\n    dist.all_reduce(x)", ""),
        ("", "def quick(x):\n    dist.all_reduce(x)"),
        ("def irecv(t, p, g=None):\n    dist.all_reduce(t)\n    return dist.irecv(t, g)", ""),
        ("def crossbar(x, group=None):\n    dist.all_reduce(x, group=group)", ""),
    ],
    ids=["in an own cell", "in another task's cell", "instead of the lab's", "instead of its own"],
)
def test_a_helper_that_communicates_elsewhere_is_inspected_with_the_answer_that_uses_it(own, other):
    model = lab_06()
    code = CROSSBAR + "    if x.dtype == torch.float64:\n        quick(x)\n"
    result = with_answers({"6.1": code if "quick" in own + other else CROSSBAR}, model.lab)
    result.own = own
    if other:
        result.tasks.append(TaskResult("6.2", "central", 2, 0.0, "wrong", code=other))
    assert "Task 6.1" in " ".join(inspection.look(result, model))


def test_a_forgery_that_a_check_has_found_is_shown_to_a_person(reference):
    result = a_result(RIGHT)
    result.tasks[0].status, result.tasks[0].points = "wrong", 0.0
    result.tasks[0].problems = [{"text": "a record that no call has made", "kind": "forged"}]
    (said,) = inspection.look(result, reference)
    assert "Task 1.3" in said
    assert "a record that no call has made" in said


@pytest.mark.parametrize(
    "code",
    [
        "for time in [1]:\n    print(time)\nx = getattr(torch, 'float16')\nhasattr(dist, 'x')",
        "%time total(torch.ones(3), 0)\n%matplotlib inline",
        "import math\nclock = math.pi\ntotal(torch.ones(3).copy_(torch.zeros(3)), 0)",
    ],
)
def test_ordinary_code_gets_no_remark(code, reference):
    assert inspection.look(a_result(f"{RIGHT}{code}"), reference) == []


#: Right answers of which a person is told, and why: an attack would look the same.
TOLD = {
    ("lab01", "1.1", "by the group"): "a private function",
    ("lab01", "1.7", "with the clock of MPI"): "mpi4py communicates unseen",
    ("lab04", "4.2", "PyTorch's own"): "a private function",
    ("lab04", "4.4", "PyTorch's own"): "another name for a function of PyTorch",
    ("lab04", "4.5", "the switch itself"): "an attribute that functions could remember things in",
    ("lab07", "7.6", "all_reduce for a barrier"): "a collective in a lab of messages",
    ("lab07", "7.7", "receives before it sends"): "a name of a given cell that no solution needs",
    ("lab09", "9.4", "PyTorch's attention"): "getattr with a name that is not in the code",
    ("lab11", "11.8", "more kinds of mixes than the task names"): "the lab's own search",
    ("lab13", "13.3", "place 0 clears the folder first"): "what is in a folder",
    ("lab15", "15.4", "a new Function in each call, try/finally"): "the generator's state",
    ("lab15", "15.4", "a plain class does both runs"): "attributes of a class without a base",
    ("lab15", "15.6", "recursive over the pairs, _foreach_copy_"): "a private function",
    ("lab15", "15.7", "lists of parts, all_to_all, stack, cat"): "a module of differentiable calls",
    ("lab17", "17.4", "recursion with a memory"): "a function that remembers its results",
    ("lab18", "18.4", "from the top"): "a word of events that the lab never says",
    ("lab18", "18.4", "start and stop"): "a word of profilers that the lab never says",
}


def whole(code: str, stub: str, model: str) -> str:
    """An answer with the solution's functions that it leaves as they are."""
    mine, handed = inspection.parsed(code), inspection.functions_of(inspection.parsed(stub))
    there = inspection.scopes(mine)[1]
    functions = inspection.functions_of(inspection.parsed(model))
    rest = [functions[name] for name in functions if name in handed and name not in there]
    return "\n\n".join([code, *map(ast.unparse, rest)])


@pytest.mark.parametrize("lab", LABS)
def test_no_honest_answer_is_held_against_its_author(lab):
    path = next(path for path in notebooks(SOLUTIONS) if path.name == LABS[lab].NOTEBOOK)
    model, told, shares = Reference(path), {}, {}
    for task, what, code in right_answers(LABS[lab], solutions_of(lab)):
        solution = model.tasks[task].model
        stub = model.tasks[task].stub
        code = whole(body(textwrap.dedent(code)), stub, solution)
        sizes = [inspection.size_of(inspection.parsed(one)) for one in (code, solution)]
        shares[task, what] = sizes[0] / sizes[1]
        if found := inspection.look(with_answers({task: code}, model.lab), model):
            told[lab, task, what] = found
    assert told.keys() == {one for one in TOLD if one[0] == lab}, told
    least = min(shares, key=shares.get, default=None)
    print(f"{lab}: {len(told)} of {len(shares)} right answers told; smallest share: {least}")


@pytest.mark.parametrize("path", notebooks(SOLUTIONS), ids=lambda path: path.stem)
def test_no_solution_is_held_against_its_author(path):
    model = Reference(path)
    result = Result("Ada", model.lab, "")
    for task in model.tasks.values():
        cells = [model.answer_cells[grade_id] for grade_id in task.answers]
        one = TaskResult(task.number, task.title, task.points, task.points, "passed")
        one.code = "\n\n".join(body(cell.source) for cell in cells)
        one.status = "by hand" if task.by_hand else "passed"
        result.tasks.append(one)
    assert inspection.look(result, model) == []


def a_result(code: str) -> Result:
    """A result in which task 1.3 of the toy lab passed with this code."""
    result = Result("Mallory", toy.LAB, "")
    result.tasks = [TaskResult("1.3", "total", 2, 2.0, "passed", code=code)]
    return result


def test_points_for_the_stub_are_shown_to_a_person(reference):
    stub = body(reference.stubs["total-answer"])
    assert "it is still the stub" in inspection.look(a_result(stub), reference)[0]


def test_points_without_the_function_that_was_judged_are_shown_to_a_person(reference):
    found = inspection.look(a_result("import torch\nprint(torch.ones(3))"), reference)
    assert found == ["Task 1.3: look at this answer: it does not define total"]


def test_points_for_unreadable_code_are_shown_to_a_person(reference):
    code = f"def total(tensor, rank):\n    pass\nx = {'1+' * 5000}1\ntorch.equal = print"
    assert "can't be read as Python" in inspection.look(a_result(code), reference)[0]


@pytest.mark.parametrize("setting", ["DEADLINE", "INSPECT"])
def test_an_inspection_that_does_not_finish_is_reported_and_costs_no_grade(
    setting, reference, monkeypatch
):
    monkeypatch.setattr(inspection, setting, {"DEADLINE": 0.01, "INSPECT": "1 / 0"}[setting])
    (said,) = inspection.look(a_result(RIGHT), reference)
    assert "too long or nested for an inspection" in said


def test_an_inspection_has_limits_of_memory_and_time(reference, monkeypatch):
    greedy = "import resource\nfrom utils.grading import inspection\n"
    greedy += "inspection.json.load = lambda _: bytearray(3 << 30)\ninspection.main()"
    monkeypatch.setattr(inspection, "INSPECT", greedy)
    (said,) = inspection.look(a_result(RIGHT), reference)
    assert "too long or nested for an inspection" in said


def test_code_that_is_hidden_after_a_long_answer_is_shown_to_a_person(reference):
    code = "def total(tensor, rank):\n    pass\n" + "#" * MOST_CODE
    assert "only the first" in inspection.look(a_result(code[:MOST_CODE]), reference)[0]


def test_every_graded_submission_is_inspected_and_keeps_its_remarks(
    reference, tmp_path, monkeypatch
):
    monkeypatch.setattr(worklist, "grade", lambda *_, **__: a_result("import gc"))
    path = toy.hand_in(tmp_path, "mallory", "{}")
    job = Job(Student("Mallory"), reference, File(Student("Mallory"), path, "a.ipynb"), tmp_path)
    slots = queue.SimpleQueue()
    slots.put(0)
    worklist.do(job, Box(), slots, Event())
    assert "import gc" in load(tmp_path / "result.json").look[0]


def test_a_forgery_that_hides_in_a_separate_cell_is_shown_to_a_person(
    reference, tmp_path, monkeypatch
):
    nb = toy.filled(total="return forged(tensor)")
    at = nb.cells.index(toy.cell(nb, "twice-answer"))
    nb.cells.insert(at, new_code_cell("%%px\nimport gc\ndef forged(tensor): ..."))
    monkeypatch.setattr("utils.grading.grader.run", toy.Pretended(reference, {}))
    result = grade(toy.hand_in(tmp_path, "mallory", nb), reference, Box(), tmp_path / "out")
    found = inspection.look(result, reference)
    assert "look at the student's own cells: it uses import gc" in " ".join(found)


def test_remarks_for_a_person_are_in_summary_and_gradebook_but_not_in_the_feedback(
    reference,
):
    result = a_result("def total(t, r):\n    import gc")
    result.look = inspection.look(result, reference)
    assert "import gc" in summary([result], [reference], {}, {"Mallory": "m"})
    assert "import gc" in gradebook.gradebook([result])
    assert "look at this" not in feedback("Mallory", [result])


def with_answers(codes: dict[str, str], lab: str, student: str = "Mallory") -> Result:
    """A result in which these tasks passed with this code."""
    tasks = [TaskResult(task, task, 1, 1.0, "passed", code=code) for task, code in codes.items()]
    return Result(student, lab, "", tasks=tasks)
