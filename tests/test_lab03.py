"""Checks of lab 03: the solutions pass, stubs and the likely mistakes fail and are told why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lab_tools import checks_of, verdict

from utils import cluster
from utils.checks import lab03
from utils.course.notebook import lab, read
from utils.course.release import is_solution, stub

pytestmark = pytest.mark.timeout(300)

NOTEBOOK = Path(__file__).resolve().parents[1] / "solutions" / "03_data_parallel.ipynb"

ANSWERS = {
    lab(cell)["task"]: cell
    for cell in read(NOTEBOOK).cells
    if cell.cell_type == "code" and is_solution(cell)
}
CHECKS = checks_of(lab03)

JOIN = """
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from utils import data, models

if dist.is_initialized():
    dist.destroy_process_group()
dist.init_process_group("mpi")
rank = dist.get_rank()
pair = dist.new_group([0, 1])
"""

# In place of Fashion-MNIST and the three epochs: small histories of a model that was trained.
RUN = """
from types import SimpleNamespace

class Small(torch.utils.data.Dataset):
    def __init__(self, n, seed):
        random = torch.Generator().manual_seed(seed)
        self.targets = torch.randint(0, 10, (n,), generator=random)
        self.data = torch.randint(0, 60, (n, 28, 28), generator=random, dtype=torch.uint8)
        self.data[torch.arange(n), self.targets] += 150
    def __len__(self):
        return len(self.targets)

data.fashion_mnist = lambda train=True: Small(648 if train else 200, int(train))
train_data, test_data = data.fashion_mnist(), data.fashion_mnist(train=False)

def minibatches(epoch, size=64):
    order = torch.Generator().manual_seed(epoch)
    return data.InMemoryLoader(train_data, size, shuffle=True, generator=order)
"""
TRAIN = """
if rank == 0:
    sequential_model = models.mlp(seed=0)
    sequential = train_sequential(sequential_model, epochs=3)
if rank in (0, 1):
    parallel_model = models.mlp(seed=0)
    parallel = train_parallel(parallel_model, epochs=3, group=pair)
"""


def code_of(source: str) -> str:
    """A cell's code, without the line that sends it to the ranks."""
    return source.removeprefix("%%px\n")


def solution(task: str) -> str:
    """The solution of a task."""
    return code_of(ANSWERS[task].source)


def student_code(task: str) -> str:
    """The cell with the stub in place of the solution."""
    before, _, rest = solution(task).partition("    ### BEGIN SOLUTION\n")
    _, _, after = rest.partition("    ### END SOLUTION\n")
    return before + "    " + stub(ANSWERS[task]) + "\n" + after


@pytest.fixture(scope="module")
def ranks() -> Iterator[cluster.Ranks]:
    """Four ranks in a world, with all solutions."""
    with cluster.start(4) as up:
        up.view.execute(JOIN)
        for task in ("3.1", "3.2", "3.3", "3.4", "3.6", "3.5"):
            up.view.execute(solution(task))
        yield up


@pytest.fixture
def answer(ranks: cluster.Ranks) -> Iterator[Callable[[str, str], None]]:
    """`answer(task, code)` defines an answer on all ranks; the solution is back afterwards."""
    replaced = []

    def define(task: str, code: str) -> None:
        replaced.append(task)
        ranks.view.execute(code)

    yield define
    for task in replaced:
        ranks.view.execute(solution(task))


def fails(task: str, ranks: cluster.Ranks) -> str:
    """What the check prints while it fails."""
    passed, printed = verdict(CHECKS[task], ranks)
    print(printed)
    assert not passed
    assert printed.startswith(f"✗ Task {task}")
    return printed


# --- right answers, and none ------------------------------------------------------------------


@pytest.mark.parametrize("task", ["3.1", "3.2", "3.3", "3.4", "3.6"])
def test_the_solution_passes(task, ranks, capsys):
    CHECKS[task](ranks)
    check = CHECKS[task]
    assert capsys.readouterr().out == f"✓ Task {task} · {check.title} · {check.points} points\n"


@pytest.mark.parametrize("task", ["3.1", "3.2", "3.3", "3.4", "3.6"])
def test_the_stub_fails_for_being_a_stub(task, ranks, answer):
    answer(task, student_code(task))
    assert fails(task, ranks) == f"✗ Task {task} · {CHECKS[task].title} · still open\n"


def test_titles_and_points_are_those_of_the_notebook():
    for task, check in CHECKS.items():
        about = lab(ANSWERS[task])
        assert (check.number, check.title, check.points) == (task, about["title"], about["points"])


def test_another_way_to_compare_replicas_passes(ranks, answer):
    answer(
        "3.6",
        """
def replicas_in_sync(model, group=None):
    bits = torch.cat([p.detach().reshape(-1).view(torch.int32) for p in model.parameters()])
    low, high = bits.clone(), bits.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
    return torch.equal(low, high)
""",
    )
    lab03.replicas_in_sync(ranks)


def test_a_contiguous_part_passes(ranks, answer):
    answer(
        "3.4",
        """
def train_step(model, optimizer, images, labels, group=None):
    p, r = dist.get_world_size(group), dist.get_rank(group)
    images, labels, n = images.tensor_split(p)[r], labels.tensor_split(p)[r], len(labels)
    optimizer.zero_grad()
    loss = cross_entropy(model(images), labels, reduction="sum") / n
    loss.backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=group)
    optimizer.step()
    loss = loss.detach()
    dist.all_reduce(loss, group=group)
    return loss.item()
""",
    )
    lab03.train_step(ranks)


# --- mistakes ---------------------------------------------------------------------------------

AVERAGE = """
def average_gradients(model, group=None):
    for parameter in model.parameters():
        if parameter.grad is not None:
            {0}
"""
WEIGHTED = """
def average_gradients_weighted(model, samples, group=None):
    total = torch.tensor(float(samples))
    {0}
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad *= {1}
            dist.all_reduce(parameter.grad{2})
"""
TOTAL = "dist.all_reduce(total, group=group)"
METRICS = """
def global_metrics(loss_sum, correct, count, group=None):
    {0}
"""

# Wrong versions of a solution: (task, text in the solution, text in its place, what is said).
CHANGES = [
    ("3.4", "average_gradients_weighted(model, samples, group)", "pass", "went its own way"),
    (
        "3.4",
        "average_gradients_weighted(model, samples, group)",
        "average_gradients(model, group)",
        "a mean of the ranks' means",
    ),
    ("3.4", "optimizer.zero_grad()", "pass", "optimizer.zero_grad()"),
    ("3.4", "optimizer.step()", "pass", "the replica has not moved"),
    ("3.4", "return loss", "return loss_sum.item() / max(samples, 1)", "that of this rank's part"),
    ("3.4", "return loss", "pass", "returned NoneType"),
    ("3.4", "images[part], labels[part]", "images, labels", "computes the whole minibatch"),
    (
        "3.4",
        "slice(dist.get_rank(group), None, dist.get_world_size(group))",
        "slice(dist.get_rank(), None, dist.get_world_size())",
        "each sample must be on one rank, once",
    ),
    ("3.4", "loss_sum.item(), 0", "(loss_sum / samples).item() * samples, 0", "0 / 0"),
    ("3.4", "global_metrics(loss_sum.item(), 0, samples, group)",
     "global_metrics(loss_sum.item(), 0, samples)", "pass group=group"),
    ("3.4", "optimizer.zero_grad()", "if samples == 0: return 0.0\n    optimizer.zero_grad()",
     "never come"),
    ("3.6", "torch.equal(bits, reference)",
     "torch.allclose(parameter, reference.view(torch.float32))", "last bit"),
    ("3.6", "dist.all_reduce(different, op=dist.ReduceOp.MAX, group=group)", "pass",
     "Expected False, got True"),
    ("3.6", "reference = bits.clone()", "reference = bits", "compare with a copy"),
    ("3.6", "return different.item() == 0", "return different == 0", "expected True or False"),
    ("3.6", ".view(torch.int32)", ".clone()", "NaN"),
]  # fmt: skip

WRONG = [
    ("3.1", AVERAGE.format("dist.all_reduce(parameter.grad, group=group)"), "are the sum over 4"),
    ("3.1", AVERAGE.format("parameter.grad /= dist.get_world_size(group)"), "never summed"),
    (
        "3.1",
        AVERAGE.format(
            "dist.all_reduce(parameter.grad, group=group); parameter.grad /= dist.get_world_size()"
        ),
        "the size of the world; this group has 2 ranks",
    ),
    (
        "3.1",
        AVERAGE.format("dist.all_reduce(parameter.grad); parameter.grad /= dist.get_world_size()"),
        "pass group=group",
    ),
    (
        "3.1",
        AVERAGE.format("dist.all_reduce(parameter.grad, group=group); parameter.grad /= 64"),
        "look at the divisor",
    ),
    (
        "3.1",
        AVERAGE.format(
            "dist.all_reduce(parameter.data, group=group); "
            "parameter.data /= dist.get_world_size(group)"
        ),
        "not the values",
    ),
    (
        "3.1",
        """
def average_gradients(model, group=None):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= dist.get_world_size(group)
""",
        "at cell line 3",
    ),
    (
        "3.1",
        AVERAGE.format(
            "p = dist.get_world_size(group); "
            "every = [torch.empty_like(parameter.grad) for _ in range(p)]; "
            "dist.all_gather(every, parameter.grad, group=group); "
            "parameter.grad = sum(every) / len(every)"
        ),
        "uses all_gather",
    ),
    (
        "3.1",
        "def average_gradients(model, group=None):\n"
        "    if dist.get_rank(group) == 0:\n"
        "        return\n" + solution("3.1").split("\n", 1)[1],
        "never come",
    ),
    ("3.2", WEIGHTED.format(TOTAL, "1 / dist.get_world_size(group)", ", group=group"),
     "mean of the ranks' means"),
    ("3.2", WEIGHTED.format(TOTAL, "samples", ", group=group"), "never divided"),
    ("3.2", WEIGHTED.format(TOTAL, "samples / dist.get_world_size(group)", ", group=group"),
     "divide by the samples of all"),
    ("3.2", WEIGHTED.format("dist.all_reduce(total)", "samples / total", ", group=group"),
     "divided by the samples of the whole world"),
    ("3.2", WEIGHTED.format("dist.all_reduce(total)", "samples / total", ""),
     "this is the average over the whole world"),
    (
        "3.3",
        METRICS.format(
            "m = torch.tensor([loss_sum / max(count, 1), correct / max(count, 1)]); "
            "dist.all_reduce(m, group=group); m /= dist.get_world_size(group); return m.tolist()"
        ),
        "means of the ranks' means",
    ),
    (
        "3.3",
        METRICS.format(
            "t = [torch.tensor(float(v)) for v in (loss_sum, correct, count)]; "
            "[dist.all_reduce(v, group=group) for v in t]; return t[0] / t[2], t[1] / t[2]"
        ),
        "it made: all_reduce, all_reduce, all_reduce",
    ),
    (
        "3.3",
        METRICS.format(
            "t = torch.tensor([loss_sum, correct, count]); dist.all_reduce(t); "
            "return t[0] / t[2], t[1] / t[2]"
        ),
        "means of the whole world",
    ),
    (
        "3.3",
        METRICS.format(
            "t = torch.tensor([loss_sum, correct, count]); dist.all_reduce(t, group=group); "
            "return t[1] / t[2], t[0] / t[2]"
        ),
        "swapped",
    ),
    (
        "3.3",
        METRICS.format("return loss_sum / max(count, 1), correct / max(count, 1)"),
        "this rank's own means",
    ),
    ("3.6", "def replicas_in_sync(model, group=None):\n    return True\n", "Expected False"),
    (
        "3.6",
        """
def replicas_in_sync(model, group=None):
    total = sum(p.detach().double().sum() for p in model.parameters())
    low, high = total.clone(), total.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
    return bool(low == high)
""",
        "swapped",
    ),
]  # fmt: skip
WRONG += [
    (task, solution(task).replace(right, wrong), said) for task, right, wrong, said in CHANGES
]


@pytest.mark.parametrize(("task", "code", "said"), WRONG, ids=[f"{w[0]}-{w[2]}" for w in WRONG])
def test_a_likely_mistake_is_named(task, code, said, ranks, answer):
    assert code != solution(task)
    answer(task, code)
    assert said in fails(task, ranks)


def test_after_a_wrong_answer_the_solution_passes(ranks, capsys):
    for task in ("3.1", "3.4"):
        CHECKS[task](ranks)


# --- the whole run ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(ranks: cluster.Ranks) -> cluster.Ranks:
    """Ranks 0 and 1 have trained both ways, on a small data set."""
    sources = {cell.id: code_of(cell.source) for cell in read(NOTEBOOK).cells}
    ranks.view.execute(RUN)
    ranks.view.execute(sources["twin-train"].partition("if rank == 0:")[0])
    ranks.view.execute(TRAIN)
    return ranks


def test_the_run_of_the_solution_passes(trained, capsys):
    lab03.same_result(trained)
    assert capsys.readouterr().out.startswith("✓ Task 3.5 · the same result")


TRAIN_AGAIN = TRAIN.partition("if rank in (0, 1):")[2].strip()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("del parallel", "NameError"),
        ("parallel = parallel['loss']", "must be a dict"),
        ("parallel['accuracy'][-1] = 0.123", "accuracy in the history is 0.1230"),
        ("parallel['loss'].pop()", "numbers of losses"),
        ("parallel['loss'][0] += 0.01", "the very first step"),
        ("parallel['loss'][1:] = [x + 1e-4 for x in parallel['loss'][1:]]", "the losses of step 1"),
        ("parallel['loss'][12:] = [x + 0.1 for x in parallel['loss'][12:]]", "epoch 1: the losses"),
        ("parallel['test_loss'][0] += 0.1 * rank", "differs between ranks 0 and 1"),
        (
            "parallel_model.layers[1].weight.data[0, 0] += 1e-7 + rank * 1e-3",
            "the replicas are not in sync",
        ),
        ("parallel_model = models.mlp(seed=3)", "on all test images"),
    ],
)
def test_a_run_that_is_not_the_same_is_refused(change, said, trained):
    keep = "import copy; kept = copy.deepcopy((parallel, parallel_model))"
    trained.client[[0, 1]].execute(f"{keep}\n{change}", block=True)
    try:
        assert said in fails("3.5", trained)
    finally:
        trained.client[[0, 1]].execute("parallel, parallel_model = kept", block=True)


@pytest.mark.parametrize("rate", [0.1, 0.4])
def test_a_run_with_another_learning_rate_is_refused(trained, rate):
    pair = trained.client[[0, 1]]
    names = "train_parallel, parallel, parallel_model"
    other = code_of(ANSWERS["3.5"].source).replace("lr=0.2", f"lr={rate}")
    pair.execute(f"kept = {names}\n{other}\n{TRAIN}", block=True)
    try:
        assert "Is the learning rate the twin's?" in fails("3.5", trained)
    finally:
        pair.execute(f"{names} = kept", block=True)


def test_a_run_on_one_rank_is_refused(trained):
    from_records = "from torch_mpi.record import log; kept_calls = list(log._calls)"
    trained.view.execute(f"{from_records}; log._calls.clear()")
    try:
        assert "need as many all_reduces" in fails("3.5", trained)
    finally:
        trained.view.execute("log._calls.extend(kept_calls)")
