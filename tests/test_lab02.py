"""Lab 02: the solution passes each check; answers that students really give are told why not."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator

import pytest
import torch
from lab_tools import LocalRanks, answers, checks_of, run_cell, solved, verdict
from matplotlib.backends.backend_agg import FigureCanvasAgg
from torch.utils.data.distributed import DistributedSampler

from utils import cluster
from utils.checks import lab02
from utils.figures import minibatches

pytestmark = pytest.mark.timeout(300)

NOTEBOOK = "02_samplers.ipynb"
CELLS = {
    "2.1": "lab02-items-answer",
    "2.2": "lab02-epochs-answer",
    "2.3": "lab02-padding-answer",
    "2.4": "lab02-micro-answer",
    "2.5": "lab02-union-answer",
    "2.6": "lab02-mean-answer",
}
CHECKS = checks_of(lab02)

IMPORTS = """
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler

from utils.data import SimpleDataSet

"""
WORLD = """
dist.init_process_group("mpi")
rank, world_size = dist.get_rank(), dist.get_world_size()
"""

# Answers of these tasks communicate nothing, nor does the twin of 2.5, which is judged first.
PURE = {"2.1", "2.2", "2.3", "2.4"}
TWIN = ("microbatches(n, m, 1, 0", "def sequential_minibatches")

# Wrong versions of a solution: task, what the student did, text of the solution, text in its
# place, words of the message.
CHANGES = [
    ("2.1", "leaves shuffle at its default", ", shuffle=shuffle", "", "unless you say shuffle="),
    ("2.1", "never shuffles", "shuffle=shuffle", "shuffle=False", "in order, but shuffle=True"),
    ("2.1", "forgets drop_last", ", drop_last=drop_last", "", "samples were repeated, but"),
    ("2.1", "takes the rank it runs on", "rank=r,", "rank=rank % p,", "use the argument r"),
    ("2.1", "takes the world for p", "num_replicas=p, rank=r",
     "num_replicas=world_size, rank=r", "shared among 4 ranks: use the argument p"),
    ("2.1", "forgets the sampler", ", sampler=sampler", "", "these are all items"),
    ("2.1", "returns indices", "[item for batch in loader for item in batch.tolist()]",
     "list(sampler)", "these are indices, not items"),
    ("2.1", "returns minibatches", "[item for batch in loader for item in batch.tolist()]",
     "[batch.tolist() for batch in loader]", "a list of minibatches"),
    ("2.1", "gives shuffle to the loader", "sampler=sampler)", "sampler=sampler, shuffle=shuffle)",
     "mutually exclusive"),
    ("2.1", "gives drop_last to the loader", "sampler=sampler)",
     "sampler=sampler, drop_last=drop_last)", "the last items are missing"),
    ("2.1", "returns nothing", "return [item", "[item", "returned None: return a flat list"),
    ("2.2", "forgets set_epoch", "sampler.set_epoch(epoch)", "pass", "call set_epoch(epoch)"),
    ("2.2", "sets the epoch too late",
     "sampler.set_epoch(epoch)\n        orders.append(list(sampler))",
     "orders.append(list(sampler))\n        sampler.set_epoch(epoch)",
     "before the sampler is iterated"),
    ("2.2", "counts epochs from one", "set_epoch(epoch)", "set_epoch(epoch + 1)",
     "seed + epoch is one too large"),
    ("2.2", "has a seed for each rank", "seed=seed", "seed=seed + r", "a seed of its own"),
    ("2.2", "has a seed for each process", "seed=seed", "seed=rank", "a seed of its own"),
    ("2.2", "ignores the seed", ", seed=seed", "", "the argument seed was not used"),
    ("2.2", "does not shuffle", "shuffle=True", "shuffle=False", "not shuffled"),
    ("2.2", "returns one long list", "orders.append(list(sampler))", "orders += list(sampler)",
     "one long list"),
    ("2.2", "returns the samplers", "orders.append(list(sampler))", "orders.append(sampler)",
     "these are samplers"),
    ("2.2", "returns nothing", "return orders", "pass", "one list of sample numbers per epoch"),
    ("2.3", "repeats what is too much", "missing = -n % p", "missing = n % p",
     "how many are missing?"),
    ("2.3", "repeats p where p divides n", "missing = -n % p", "missing = p - n % p",
     "p divides n, so nothing is missing"),
    ("2.3", "repeats the last samples", "[k % n for k in range(missing)]",
     "list(range(n))[n - missing:]", "the first samples of the order, not the last"),
    ("2.3", "goes through the samples once", "[k % n for k in range(missing)]",
     "list(range(n))[:missing]", "again and again"),
    ("2.3", "loses what is missing", "range(n - n % p, n)", "range(n - -n % p, n)",
     "too many for equal shares, and that many are left out"),
    ("2.3", "loses the first samples", "range(n - n % p, n)", "range(n % p)", "not the first"),
    ("2.3", "forgets drop_last", "if drop_last:", "if False:", "happens with drop_last=False"),
    ("2.3", "hard-codes four ranks", "    if drop_last:", "    p = 4\n    if drop_last:",
     "that is the result for 4 ranks"),
    ("2.3", "swaps the lists", "return [k % n for k in range(missing)], []",
     "return [], [k % n for k in range(missing)]", "the two lists are swapped"),
    ("2.3", "returns numbers", "return [k % n for k in range(missing)], []",
     "return missing, 0", "return two lists of samples"),
    ("2.4", "takes m for the batch size", "batch_size=m // p", "batch_size=m", "m / p"),
    ("2.4", "gives drop_last to the wrong sampler", "shuffle=shuffle)\n",
     "shuffle=shuffle, drop_last=drop_last)\n", "that of the BatchSampler"),
    ("2.4", "ignores drop_last", "drop_last=drop_last", "drop_last=False", "too short and must go"),
    ("2.4", "always drops", "drop_last=drop_last", "drop_last=True", "but drop_last=False"),
    ("2.4", "forgets set_epoch", "sampler.set_epoch(epoch)", "pass", "the order of epoch 0"),
    ("2.4", "forgets shuffle", ", shuffle=shuffle", "", "shuffled, but shuffle=False"),
    ("2.4", "returns the sampler", "return list(BatchSampler(sampler, batch_size=m // p, "
     "drop_last=drop_last))", "return BatchSampler(sampler, m // p, drop_last)",
     "make a list of it"),
    ("2.4", "returns a flat list", "return list(BatchSampler(sampler, batch_size=m // p, "
     "drop_last=drop_last))", "return list(sampler)", "wrap the sampler in a BatchSampler"),
    ("2.4", "takes the rank it runs on", "rank=r", "rank=rank % p", "use the argument r"),
    ("2.4", "rounds m / p", "if m % p:", "if False:", "expected a ValueError"),
    ("2.5", "forgets the epoch of the twin", "microbatches(n, m, 1, 0, shuffle, epoch)",
     "microbatches(n, m, 1, 0, shuffle)", "the order of epoch 0"),
    ("2.5", "gives the twin a share", "microbatches(n, m, 1, 0, shuffle, epoch)",
     "microbatches(n, m, 2, 0, shuffle, epoch)", "the twin is alone"),
    ("2.5", "keeps the twin in order", "microbatches(n, m, 1, 0, shuffle, epoch)",
     "microbatches(n, m, 1, 0)", "not shuffled, but shuffle=True"),
    ("2.5", "looks at this rank only",
     "dist.all_gather_object(parts, mine, group=group)", "parts = [mine]",
     "it communicated nothing"),
    ("2.5", "forgets the group", "dist.all_gather_object(parts, mine, group=group)",
     "parts = [None] * world_size; dist.all_gather_object(parts, mine)",
     "pass group=group to every call"),
    ("2.5", "hard-codes four ranks", "[None] * dist.get_world_size(group)", "[None] * 4",
     "groups of these ranks: (0, 1) and (2, 3)"),
    ("2.5", "compares sets", "sorted(union) != sorted(expected[k])",
     "set(union) != set(expected[k])", "A set forgets how often"),
    ("2.5", "compares in order", "sorted(union) != sorted(expected[k])", "union != expected[k]",
     "without regard to the order"),
    ("2.5", "stops at the shortest list", "max(len(batches) for batches in [*parts, expected])",
     "min(len(batches) for batches in [*parts, expected])", "zip stops at the shortest list"),
    ("2.5", "asks for the own part only", "sorted(union) != sorted(expected[k])",
     "not set(union) <= set(expected[k])", "A set forgets"),
    ("2.5", "returns nothing", "return True", "pass", "returned None, expected True or False"),
    ("2.6", "keeps the padding", "once = values[places < n]", "once = values",
     "repeated samples count twice"),
    ("2.6", "counts the padding, too",
     "len(once)]", "len(values)]", "padding included"),
    ("2.6", "forgets the group", "dist.all_reduce(sums, group=group)", "dist.all_reduce(sums)",
     "pass group=group to every call"),
    ("2.6", "forgets the all_reduce", "dist.all_reduce(sums, group=group)", "pass",
     "the mean of this rank's"),
    ("2.6", "takes places in blocks", "places = r + p * torch.arange(len(values))",
     "places = r * len(values) + torch.arange(len(values))", "ranks take turns"),
    ("2.6", "reduces twice", "dist.all_reduce(sums, group=group)",
     "dist.all_reduce(sums[:1], group=group); dist.all_reduce(sums[1:], group=group)",
     "it made: all_reduce, all_reduce"),
    ("2.6", "returns the sum", "return total / count", "return total", "this is a sum"),
    ("2.6", "returns nothing", "return total / count", "pass", "returned None"),
]  # fmt: skip

# Whole answers: task, what the student did, code, words of the message.
WRONG = [
    ("2.1", "trusts the defaults", """
        def items_of(n, p, r, shuffle=False, drop_last=False):
            dataset = SimpleDataSet(n)
            sampler = DistributedSampler(dataset, shuffle=shuffle, drop_last=drop_last)
            return [int(item) for item in DataLoader(dataset, sampler=sampler)]
        """, "items_of(24, 1, 0, shuffle=False, drop_last=False)"),
    ("2.1", "returns tensors", """
        def items_of(n, p, r, shuffle=False, drop_last=False):
            dataset = SimpleDataSet(n)
            sampler = DistributedSampler(dataset, p, r, shuffle, drop_last=drop_last)
            return [item[0] for item in DataLoader(dataset, sampler=sampler)]
        """, "the entries are tensors of one number"),
    ("2.1", "shares by hand", """
        def items_of(n, p, r, shuffle=False, drop_last=False):
            order = list(range(n))
            if shuffle:
                order = torch.randperm(n, generator=torch.Generator().manual_seed(0)).tolist()
            share = n // p if drop_last else -(-n // p)
            order = (order * (p + 1))[: share * p] if not drop_last else order[: share * p]
            return [10 * sample for sample in order[r::p]]
        """, "made by hand: the task asks for a DistributedSampler"),
    ("2.2", "makes a sampler for each epoch", """
        def epoch_orders(n, p, r, epochs, seed):
            return [list(DistributedSampler(range(n), p, r, True, seed + e)) for e in range(epochs)]
        """, "set_epoch was never called"),
    ("2.5", "stops at the end of the minibatches", """
        def same_minibatches(mine, expected, group=None):
            parts = [None] * dist.get_world_size(group)
            dist.all_gather_object(parts, mine, group=group)
            for k, minibatch in enumerate(expected):
                union = [s for part in parts if k < len(part) for s in part[k]]
                if sorted(union) != sorted(minibatch):
                    return False
            return True
        """, "one microbatch too many"),
    ("2.6", "returns a tensor", """
        def mean_once(values, n, group=None):
            p, r = dist.get_world_size(group), dist.get_rank(group)
            total = values[r + p * torch.arange(len(values)) < n].sum()
            dist.all_reduce(total, group=group)
            return total / n
        """, "returned a tensor, expected a Python float"),
    ("2.6", "asks for its number in the world", """
        def mean_once(values, n, group=None):
            p = dist.get_world_size(group)
            total = values[dist.get_rank() + p * torch.arange(len(values)) < n].sum()
            dist.all_reduce(total, group=group)
            return total.item() / n
        """, "dist.get_rank(group) is its number in the group"),
    ("2.3", "asks the sampler", """
        def repeated_and_lost(n, p, drop_last=False):
            seen = [k for r in range(p) for k in DistributedSampler(
                range(n), num_replicas=p, rank=r, shuffle=False, drop_last=drop_last)]
            lost = [k for k in range(n) if k not in seen]
            for k in set(seen):
                seen.remove(k)
            return seen, lost
        """, "it asks a DistributedSampler"),
    ("2.5", "draws another permutation", """
        def sequential_minibatches(n, m, shuffle=False, epoch=0):
            torch.manual_seed(1234 + epoch)
            order = torch.randperm(n).tolist() if shuffle else list(range(n))
            return [order[k:k + m] for k in range(0, n, m)]
        """, "in another order than the sampler's"),
    ("2.5", "compares the whole epoch", """
        def same_minibatches(mine, expected, group=None):
            parts = [None] * dist.get_world_size(group)
            dist.all_gather_object(parts, mine, group=group)
            flat = sorted(k for part in parts for batch in part for k in batch)
            return flat == sorted(k for batch in expected for k in batch)
        """, "minibatch by minibatch, not the whole epoch"),
    ("2.5", "gathers tensors of unequal size", """
        def same_minibatches(mine, expected, group=None):
            for own, minibatch in zip(mine, expected):
                own = torch.tensor(own)
                parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
                dist.all_gather(parts, own, group=group)
                if sorted(torch.cat(parts).tolist()) != sorted(minibatch):
                    return False
            return True
        """, "all_gather"),
    ("2.6", "averages the ranks' means", """
        def mean_once(values, n, group=None):
            p, r = dist.get_world_size(group), dist.get_rank(group)
            mean = values[r + p * torch.arange(len(values)) < n].mean()
            dist.all_reduce(mean, group=group)
            return (mean / p).item()
        """, "the mean of the ranks' means"),
    ("2.6", "drops the last round", """
        def mean_once(values, n, group=None):
            own = values[: n // dist.get_world_size(group)]
            sums = torch.tensor([own.sum(), len(own)])
            dist.all_reduce(sums, group=group)
            return (sums[0] / sums[1]).item()
        """, "samples were left out, as drop_last does"),
    ("2.6", "divides by n", """
        def mean_once(values, n, group=None):
            total = values.sum()
            dist.all_reduce(total, group=group)
            return total.item() / n
        """, "divided by 25, but the sum contains repeated samples"),
    ("2.6", "lets ranks without samples go", """
        def mean_once(values, n, group=None):
            p, r = dist.get_world_size(group), dist.get_rank(group)
            own = values[r + p * torch.arange(len(values)) < n]
            if len(own) == 0:
                return 0.0
            sums = torch.tensor([own.sum(), len(own)])
            dist.all_reduce(sums, group=group)
            return (sums[0] / sums[1]).item()
        """, "waits"),
]  # fmt: skip

# Other ways that are right.
RIGHT = [
    ("2.1", "without batches", """
        def items_of(n, p, r, shuffle=False, drop_last=False):
            dataset = SimpleDataSet(n)
            sampler = DistributedSampler(dataset, p, r, shuffle, drop_last=drop_last)
            return tuple(int(item[0]) for item in DataLoader(dataset, sampler=sampler))
        """),
    ("2.2", "the epochs from a dict", """
        def epoch_orders(n, p, r, epochs, seed):
            sampler = DistributedSampler(range(n), p, r, True, seed)
            orders = {}
            for epoch in reversed(range(epochs)):
                sampler.set_epoch(epoch)
                orders[epoch] = tuple(sampler)
            return [orders[epoch] for epoch in range(epochs)]
        """),
    ("2.3", "in the order of the sampler, with ceil", """
        import math
        def repeated_and_lost(n, p, drop_last=False):
            if drop_last:
                return [], sorted(range(n // p * p, n), reverse=True)
            return ((list(range(n)) * p)[: math.ceil(n / p) * p - n], [])
        """),
    ("2.4", "cut by hand", """
        def microbatches(n, m, p, r, shuffle=False, epoch=0, drop_last=False):
            if m % p != 0:
                raise ValueError
            sampler = DistributedSampler(range(n), p, r, shuffle=shuffle)
            sampler.set_epoch(epoch)
            own, size = list(sampler), m // p
            parts = [own[k : k + size] for k in range(0, len(own), size)]
            return [part for part in parts if len(part) == size or not drop_last]
        """),
    ("2.5", "the permutation by hand, and padded tensors", """
        def sequential_minibatches(n, m, shuffle=False, epoch=0):
            order = list(range(n))
            if shuffle:
                order = torch.randperm(n, generator=torch.Generator().manual_seed(epoch)).tolist()
            return [order[k:k + m] for k in range(0, n, m)]

        def same_minibatches(mine, expected, group=None):
            size = torch.tensor([len(mine), max([len(part) for part in mine], default=0)])
            dist.all_reduce(size, op=dist.ReduceOp.MAX, group=group)
            rows = max(int(size[0]), len(expected))
            own = torch.full((rows, int(size[1])), -1)
            for k, part in enumerate(mine):
                own[k, : len(part)] = torch.tensor(part)
            parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, own, group=group)
            for k in range(rows):
                union = [int(s) for part in parts for s in part[k] if s >= 0]
                if sorted(union) != (sorted(expected[k]) if k < len(expected) else []):
                    return False
            return True
        """),
    ("2.6", "the count is n, and a sum of nothing is zero", """
        def mean_once(values, n, group=None):
            p, r = dist.get_world_size(group), dist.get_rank(group)
            total = sum((v for j, v in enumerate(values) if r + j * p < n), torch.tensor(0.0))
            dist.all_reduce(total, group=group)
            return total.item() / n
        """),
]  # fmt: skip


SOLUTIONS = {task: answers(NOTEBOOK)[cell] for task, cell in CELLS.items()}


def changed(task: str, old: str, new: str) -> str:
    """The solution with one text in place of another."""
    assert SOLUTIONS[task].count(old) >= 1, f"{old!r} is not in the solution of {task}"
    return SOLUTIONS[task].replace(old, new)


def needs_ranks(task: str, text: str = "") -> bool:
    """Whether a mistake, by its text, is in code that communicates."""
    return task not in PURE and not text.strip().startswith(TWIN)


def named(task: str, what: str, text: str = "") -> dict:
    """The name of a case for pytest, and whether `make check` runs it."""
    marks = () if needs_ranks(task, text) else pytest.mark.quick
    return {"id": f"{task}-{what.replace(' ', '-')}", "marks": marks}


@pytest.fixture(scope="module")
def ranks() -> Iterator[cluster.Ranks]:
    """Four ranks in a world, with all solutions."""
    # 3 s: a deadlock of a wrong answer is reported soon.
    with cluster.start(4, timeout=3) as started:
        for code in (IMPORTS, WORLD, *SOLUTIONS.values()):
            run_cell(started, code)
        yield started


@pytest.fixture(scope="module")
def local_ranks() -> LocalRanks:
    """The same without processes."""
    made = LocalRanks(4)
    for code in (IMPORTS, *SOLUTIONS.values()):
        run_cell(made, code)
    return made


@pytest.fixture
def told(request: pytest.FixtureRequest) -> Callable[..., tuple[bool, str]]:
    """`told(task, code)`: what the check says of an answer; real ranks where it needs them."""

    def judge(task: str, code: str, text: str = "") -> tuple[bool, str]:
        name = "ranks" if needs_ranks(task, text) else "local_ranks"
        ranks = request.getfixturevalue(name)
        with solved(ranks, SOLUTIONS) as answer:
            answer(task, code)
            return verdict(CHECKS[task], ranks)

    return judge


# -- the checks -----------------------------------------------------------------------------------


def test_every_task_of_the_notebook_has_a_check_and_a_cell():
    assert sorted(CHECKS) == sorted(CELLS)
    assert set(CELLS.values()) == set(answers(NOTEBOOK))


@pytest.mark.parametrize("task", CELLS)
def test_the_solution_passes_the_check_on_real_ranks(ranks, task):
    passed, printed = verdict(CHECKS[task], ranks)
    assert passed, printed
    check = CHECKS[task]
    assert printed == f"✓ Task {task} · {check.title} · {check.points} points\n"


@pytest.mark.parametrize("task", CELLS)
def test_the_untouched_stub_fails_for_the_right_reason(told, task):
    passed, printed = told(task, answers(NOTEBOOK, "labs")[CELLS[task]])
    assert printed == f"✗ Task {task} · {CHECKS[task].title} · still open\n"
    assert not passed


@pytest.mark.parametrize(
    ("task", "old", "new", "words"),
    [pytest.param(t, o, n, w, **named(t, what, o)) for t, what, o, n, w in CHANGES],
)
def test_a_slip_in_the_solution_is_told(told, task, old, new, words):
    passed, printed = told(task, changed(task, old, new), old)
    assert not passed, printed
    assert words in printed


@pytest.mark.parametrize(
    ("task", "code", "words"),
    [pytest.param(t, c, w, **named(t, what, c)) for t, what, c, w in WRONG],
)
def test_a_wrong_answer_is_told_its_mistake(told, task, code, words):
    passed, printed = told(task, textwrap.dedent(code), code)
    assert not passed, printed
    assert words in printed


@pytest.mark.parametrize(
    ("task", "code"),
    [pytest.param(t, c, **named(t, what)) for t, what, c in RIGHT],
)
def test_another_right_answer_passes(told, task, code):
    passed, printed = told(task, textwrap.dedent(code))
    assert passed, printed


# -- the drawings ---------------------------------------------------------------------------------


def words_of(figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("n", [24, 25, 7, 1])
def test_a_partition_shows_what_the_sampler_does(n, p, drop_last):
    order = torch.randperm(n, generator=torch.Generator().manual_seed(5)).tolist()
    panel = minibatches._panel(n, 8, p, order, drop_last)
    kept = [k for k in range(len(panel.samples)) if panel.kind(k) != "dropped"]
    for r in range(p):
        sampler = DistributedSampler(
            range(n), num_replicas=p, rank=r, shuffle=True, seed=5, drop_last=drop_last
        )
        assert [panel.samples[k] for k in kept if k % p == r] == list(sampler)


def test_a_partition_names_the_microbatches_of_the_highlighted_minibatch():
    words = words_of(minibatches.partition(24, 8, 2, highlight=1))
    assert "rank 0: 8 10 12 14" in words
    assert "rank 1: 9 11 13 15" in words
    assert "repeated (padding)" not in words
    assert "repeated (padding)" in words_of(minibatches.partition(25, 8, 2))
    assert "left out (drop_last)" in words_of(minibatches.partition(25, 8, 2, drop_last=True))


@pytest.mark.parametrize(("n", "m", "p"), [(100, 1, 6), (100, 64, 3), (1, 32, 4), (97, 7, 5)])
def test_all_that_a_partition_draws_is_inside_the_figure(n, m, p):
    figure = minibatches.partition(n, m, p, title="a title", highlight=0)
    axes, renderer = figure.axes[0], FigureCanvasAgg(figure).get_renderer()
    for text in axes.texts:
        box = text.get_window_extent(renderer)
        assert axes.bbox.padded(1).contains(box.x0, box.y0), text.get_text()
        assert axes.bbox.padded(1).contains(box.x1, box.y1), text.get_text()
    assert figure.get_size_inches()[1] < 9


def test_a_sampler_view_tells_what_is_repeated_and_what_is_lost():
    words = words_of(
        minibatches.sampler_view({"good": [[0, 1], [2, 3]], "bad": [[0, 1], [1, 0]]}, n=4)
    )
    assert "every sample once" in words
    assert "repeated: 0, 1" in words
    assert "seen by no rank: 2, 3" in words
    assert "no sample" in words_of(minibatches.sampler_view({"none": [[], []]}, n=1))


def test_drawings_refuse_what_they_cannot_show():
    with pytest.raises(ValueError, match="at least 1"):
        minibatches.partition(0, 8, 2)
    with pytest.raises(ValueError, match="expected n = 3"):
        minibatches.partition(3, 8, 2, [0, 1])
    with pytest.raises(ValueError, match="6 ranks can be told apart"):
        minibatches.partition(24, 8, 7)
    with pytest.raises(ValueError, match="nothing to draw"):
        minibatches.sampler_view({}, n=3)


def test_sliders_draw_where_somebody_can_move_them(monkeypatch, capsys):
    monkeypatch.setenv("IPP_NONINTERACTIVE", "1")
    minibatches.explorer()
    assert "sliders" in capsys.readouterr().out
    monkeypatch.delenv("IPP_NONINTERACTIVE")
    minibatches.explorer(n=25, m=8, p=4)
    assert "Error" not in capsys.readouterr().out
