"""Lab 05: the solutions pass each check; answers that students really give do not."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator

import pytest
from lab_tools import LocalRanks, answers, checks_of, run_cell, solved, verdict

from utils import cluster
from utils.checks import lab05

pytestmark = pytest.mark.timeout(300)

NOTEBOOK = "05_scaling.ipynb"
CELLS = {
    "5.1": "lab05-stopwatch-answer",
    "5.2": "lab05-speedup-answer",
    "5.3": "lab05-amdahl-answer",
    "5.4": "lab05-gustafson-answer",
    "5.5": "lab05-predict-answer",
    "5.6": "lab05-slurm-answer",
}
CHECKS = checks_of(lab05)
SOLUTIONS = {task: answers(NOTEBOOK)[cell] for task, cell in CELLS.items()}


def stopwatch(body: str) -> str:
    """A `time_rounds` with this body; `one(prepare, step, steps)` is a timed round."""
    return "import time\nimport torch\nimport torch.distributed as dist\n" + textwrap.dedent(body)


def script(replace: dict[str, str]) -> str:
    """The solution of 5.6 with words replaced in the text that it returns."""
    lines = [
        "solution_ = job_script",
        "def job_script(*settings):",
        "    text = solution_(*settings)",
    ]
    lines += [f"    text = text.replace({old!r}, {new!r})" for old, new in replace.items()]
    return "\n".join([*lines, "    return text"])


# task, what the student did, the code, words of the message
WRONG = [
    ("5.1", "uses no barrier", stopwatch("""
        def time_rounds(prepare, step, rounds, steps):
            seconds = []
            for _ in range(rounds + 1):
                prepare()
                start = time.perf_counter()
                for _ in range(steps):
                    step()
                seconds.append((time.perf_counter() - start) / steps)
            slowest = torch.tensor(seconds[1:])
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            return slowest.tolist()
        """), "a barrier belongs between prepare() and the start of the clock"),
    ("5.1", "starts the clock before the barrier", stopwatch("""
        def time_rounds(prepare, step, rounds, steps):
            seconds = []
            for _ in range(rounds + 1):
                prepare()
                start = time.perf_counter()
                dist.barrier()
                for _ in range(steps):
                    step()
                seconds.append((time.perf_counter() - start) / steps)
            slowest = torch.tensor(seconds[1:])
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            return slowest.tolist()
        """), "start the clock after the barrier"),
    ("5.1", "puts the barrier before prepare", stopwatch("""
        def time_rounds(prepare, step, rounds, steps):
            seconds = []
            for _ in range(rounds + 1):
                dist.barrier()
                prepare()
                start = time.perf_counter()
                for _ in range(steps):
                    step()
                seconds.append((time.perf_counter() - start) / steps)
            slowest = torch.tensor(seconds[1:])
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            return slowest.tolist()
        """), "a barrier belongs between prepare() and the start of the clock"),
    ("5.1", "keeps its own rank's times", stopwatch("""
        def time_rounds(prepare, step, rounds, steps):
            seconds = []
            for _ in range(rounds + 1):
                prepare()
                dist.barrier()
                start = time.perf_counter()
                for _ in range(steps):
                    step()
                seconds.append((time.perf_counter() - start) / steps)
            return seconds[1:]
        """), "all have the slowest rank's"),
    ("5.1", "takes the mean of the ranks", stopwatch("""
        def time_rounds(prepare, step, rounds, steps):
            seconds = []
            for _ in range(rounds + 1):
                prepare()
                dist.barrier()
                start = time.perf_counter()
                for _ in range(steps):
                    step()
                seconds.append((time.perf_counter() - start) / steps)
            mean = torch.tensor(seconds[1:])
            dist.all_reduce(mean)
            return (mean / dist.get_world_size()).tolist()
        """), "not the mean, the sum or the fastest of the ranks"),
    ("5.1", "does not warm up", stopwatch("""
        def time_rounds(prepare, step, rounds, steps):
            seconds = []
            for _ in range(rounds):
                prepare()
                dist.barrier()
                start = time.perf_counter()
                for _ in range(steps):
                    step()
                seconds.append((time.perf_counter() - start) / steps)
            slowest = torch.tensor(seconds)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            return slowest.tolist()
        """), "one round before them that warms up"),
    ("5.1", "keeps the round that warms up", stopwatch("""
        def time_rounds(prepare, step, rounds, steps):
            seconds = []
            for _ in range(rounds + 1):
                prepare()
                dist.barrier()
                start = time.perf_counter()
                for _ in range(steps):
                    step()
                seconds.append((time.perf_counter() - start) / steps)
            slowest = torch.tensor(seconds)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            return slowest.tolist()
        """), "the first round warms up and is not in the list"),
    ("5.1", "forgets to divide by the steps", stopwatch("""
        def time_rounds(prepare, step, rounds, steps):
            seconds = []
            for _ in range(rounds + 1):
                prepare()
                dist.barrier()
                start = time.perf_counter()
                for _ in range(steps):
                    step()
                seconds.append(time.perf_counter() - start)
            slowest = torch.tensor(seconds[1:])
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            return slowest.tolist()
        """), "divide by the steps in it"),
    ("5.1", "returns the median", stopwatch("""
        from statistics import median
        def time_rounds(prepare, step, rounds, steps):
            prepare()
            step()
            return median([1.0] * rounds)
        """), "return a list of 3 numbers"),
    ("5.2", "turns the ratio upside down", """
        def speedup_band(one, many):
            a, b = np.percentile(one, [25, 50, 75]), np.percentile(many, [25, 50, 75])
            return b[0] / a[2], b[1] / a[1], b[2] / a[0]
        """, "upside down"),
    ("5.2", "pairs the same quartiles", """
        def speedup_band(one, many):
            return tuple(np.percentile(one, [25, 50, 75]) / np.percentile(many, [25, 50, 75]))
        """, "pair slow with fast"),
    ("5.2", "takes the extreme rounds", """
        def speedup_band(one, many):
            return min(one) / max(many), np.median(one) / np.median(many), max(one) / min(many)
        """, "the extreme rounds, not the quartiles"),
    ("5.2", "takes means", """
        def speedup_band(one, many):
            a, b = np.percentile(one, [25, 75]), np.percentile(many, [25, 75])
            return a[0] / b[1], np.mean(one) / np.mean(many), a[1] / b[0]
        """, "a ratio of means"),
    ("5.2", "returns the middle only", """
        def speedup_band(one, many):
            return np.median(one) / np.median(many)
        """, "return three numbers: (low, middle, high)"),
    ("5.2", "hard-codes two ranks", """
        def efficiency(speedup, p):
            return speedup / p if p == 1 else p / speedup
        """, "that is p / speedup"),
    ("5.3", "forgets the parallel part's 1 - s", """
        def amdahl(p, serial):
            return 1 / (serial + 1 / p)
        """, "the parallel part is 1 − s, not 1"),
    ("5.3", "returns the parallel fraction", """
        def fit_amdahl(ps, times):
            slope, intercept = np.polyfit(1 / np.asarray(ps, float), times, 1)
            return slope / (intercept + slope)
        """, "that is the parallel fraction"),
    ("5.3", "returns seconds", """
        def fit_amdahl(ps, times):
            slope, intercept = np.polyfit(1 / np.asarray(ps, float), times, 1)
            return max(0, intercept)
        """, "in seconds: divide by T(1)"),
    ("5.3", "does not clip", """
        def fit_amdahl(ps, times):
            slope, intercept = np.polyfit(1 / np.asarray(ps, float), times, 1)
            return intercept / (intercept + slope)
        """, "that is below 0"),
    ("5.3", "fits the speedups", """
        def fit_amdahl(ps, times):
            speedups = times[0] / np.asarray(times)
            slope, intercept = np.polyfit(1 / np.asarray(ps, float), speedups, 1)
            return float(np.clip(intercept / (intercept + slope), 0, 1))
        """, "fitted as if they were times"),
    ("5.3", "hard-codes 1, 2, 4, 8 ranks", """
        def fit_amdahl(ps, times):
            slope, intercept = np.polyfit([1, 1/2, 1/4, 1/8, 1/16], times, 1)
            return float(np.clip(intercept / (intercept + slope), 0, 1))
        """, "s: expected 0."),
    ("5.3", "returns nothing", """
        def fit_amdahl(ps, times):
            np.polyfit(1 / np.asarray(ps, float), times, 1)
        """, "returned None: return the serial fraction"),
    ("5.3", "looks at the last point only", """
        def fit_amdahl(ps, times):
            s = (times[-1] / times[0] - 1 / ps[-1]) / (1 - 1 / ps[-1])
            return min(1.0, max(0.0, s))
        """, "what the last point alone says"),
    ("5.4", "fits a line with an intercept", """
        def fit_gustafson(ps, times):
            ps, times = np.asarray(ps, float), np.asarray(times, float)
            slope, start = np.polyfit(ps - 1, ps - ps * times[0] / times, 1)
            return float(np.clip(slope, 0, 1))
        """, "the line goes through the origin"),
    ("5.4", "looks at the last point only", """
        def fit_gustafson(ps, times):
            s = (ps[-1] - ps[-1] * times[0] / times[-1]) / (ps[-1] - 1)
            return min(1.0, max(0.0, s))
        """, "what the last point alone says"),
    ("5.4", "takes Amdahl's law", """
        def gustafson(p, serial):
            return 1 / (serial + (1 - serial) / p)
        """, "that is Amdahl's law"),
    ("5.4", "counts p for p - 1", """
        def gustafson(p, serial):
            return p - serial * p
        """, "s counts p − 1 times"),
    ("5.4", "forgets that more work was done", """
        def fit_gustafson(ps, times):
            ps, times = np.asarray(ps, float), np.asarray(times, float)
            x, y = ps - 1, ps - times[0] / times
            return float(np.clip(x @ y / (x @ x), 0, 1))
        """, "p ranks do p times the work"),
    ("5.4", "takes Amdahl's fit", """
        def fit_gustafson(ps, times):
            slope, intercept = np.polyfit(1 / np.asarray(ps, float), times, 1)
            return float(np.clip(intercept / (intercept + slope), 0, 1))
        """, "p ranks do p times the work"),
    ("5.4", "does not clip", """
        def fit_gustafson(ps, times):
            ps, times = np.asarray(ps, float), np.asarray(times, float)
            x, y = ps - 1, ps - ps * times[0] / times
            return float(x @ y / (x @ x))
        """, "that is below 0"),
    ("5.5", "sends whole tensors", """
        def ring(p, nbytes):
            return 2 * (p - 1), 2 * (p - 1) * nbytes
        """, "each message has n/p bytes, not n"),
    ("5.5", "goes round once", """
        def ring(p, nbytes):
            return p - 1, (p - 1) / p * nbytes
        """, "the sums still have to be passed on"),
    ("5.5", "sends p times", """
        def ring(p, nbytes):
            return 2 * p, 2 * nbytes
        """, "nobody sends to itself"),
    ("5.5", "counts one message", """
        def ring(p, nbytes):
            return 2 * (p - 1), nbytes / p
        """, "give the bytes of all"),
    ("5.5", "makes one all_reduce of all gradients", """
        def predict_step(compute, sizes, p, latency, bandwidth):
            messages, sent = ring(p, sum(sizes))
            return compute + messages * latency + sent / bandwidth
        """, "each gradient's all_reduce of its own"),
    ("5.5", "divides the computation", """
        def predict_step(compute, sizes, p, latency, bandwidth):
            return compute / p + sum(
                ring(p, n)[0] * latency + ring(p, n)[1] / bandwidth for n in sizes
            )
        """, "do not divide it by p"),
    ("5.5", "forgets the computation", """
        def predict_step(compute, sizes, p, latency, bandwidth):
            return sum(ring(p, n)[0] * latency + ring(p, n)[1] / bandwidth for n in sizes)
        """, "the computation is missing"),
    ("5.5", "takes the bandwidth for a time", """
        def predict_step(compute, sizes, p, latency, bandwidth):
            return compute + sum(
                ring(p, n)[0] * latency + ring(p, n)[1] * bandwidth for n in sizes
            )
        """, "divide by it"),
    ("5.6", "hard-codes the picture", """
        solution_ = job_script
        def job_script(nodes, domains, cores, command):
            return solution_(4, 2, 24, command)
        """, "#SBATCH --nodes: expected"),
    ("5.6", "forgets the threads", script({"export OMP_NUM_THREADS": "# "}),
     "OMP_NUM_THREADS is not set"),
    ("5.6", "does not export the threads", script({"export OMP": "OMP"}), "but not exported"),
    ("5.6", "gives each rank one core", script({":PE=": ":X="}),
     "--bind-to core gives each rank one core"),
    ("5.6", "does not bind", script({"--bind-to core": ""}), "mpiexec must bind"),
    ("5.6", "puts a blank into SBATCH", script({"#SBATCH": "# SBATCH"}),
     "Slurm wants #SBATCH first, without blanks"),
    ("5.6", "puts the directives below a command", script({"#!/bin/bash": "#!/bin/bash\necho go"}),
     "#SBATCH below the first command"),
    ("5.6", "starts a rank for each node only", """
        solution_ = job_script
        def job_script(nodes, domains, cores, command):
            text = solution_(nodes, domains, cores, command)
            return text.replace(f"-n {nodes * domains} ", f"-n {nodes} ")
        """, "starts 4 ranks, the request has 8"),
    ("5.6", "asks for the ranks of all nodes on each", """
        solution_ = job_script
        def job_script(nodes, domains, cores, command):
            text = solution_(nodes, domains, cores, command)
            return text.replace(f"per-node={domains}", f"per-node={nodes * domains}")
        """, "--ntasks-per-node: expected 2"),
    ("5.6", "sets no time limit", script({"--time": "--comment"}), "without a limit"),
    ("5.6", "is not bash", script({"export": "export ("}), "bash can't read it"),
    ("5.6", "returns nothing", """
        def job_script(nodes, domains, cores, command):
            print("#!/bin/bash")
        """, "return the text of a script, got None"),
]  # fmt: skip

# task, what the student did otherwise, the code
ALSO_RIGHT = [
    ("5.1", "lets a second barrier stop the clock", stopwatch("""
        from time import monotonic
        def one(prepare, step, steps):
            prepare()
            dist.barrier()
            start = monotonic()
            for _ in range(steps):
                step()
            dist.barrier()
            return (monotonic() - start) / steps
        def time_rounds(prepare, step, rounds, steps):
            one(prepare, step, steps)
            return [one(prepare, step, steps) for _ in range(rounds)]
        """)),
    ("5.1", "gathers all times", stopwatch("""
        def time_rounds(prepare, step, rounds, steps):
            seconds = []
            for k in range(rounds + 1):
                prepare()
                dist.all_reduce(torch.zeros(1))
                start = time.perf_counter_ns()
                for _ in range(steps):
                    step()
                mine = (time.perf_counter_ns() - start) / 1e9 / steps
                everyone = [None] * dist.get_world_size()
                dist.all_gather_object(everyone, mine)
                if k:
                    seconds.append(max(everyone))
            return seconds
        """)),
    ("5.3", "averages Karp and Flatt's fractions", """
        def fit_amdahl(ps, times):
            ps, times = np.asarray(ps, float)[1:], np.asarray(times, float)
            shares = (times[1:] / times[0] - 1 / ps) / (1 - 1 / ps)
            return max(0.0, shares.mean())
        """),
    ("5.4", "averages over the points", """
        def fit_gustafson(ps, times):
            found = [(p - p * times[0] / t) / (p - 1) for p, t in zip(ps[1:], times[1:])]
            return min(1, max(0, sum(found) / len(found)))
        """),
    ("5.5", "counts message by message", """
        def ring(p, nbytes):
            parts = [nbytes / p for phase in range(2) for step in range(p - 1)]
            return len(parts), sum(parts)
        """),
    ("5.6", "uses srun and Slurm's variables", """
        def job_script(nodes, domains, cores, command):
            return f'''#!/usr/bin/env bash
        #SBATCH -N {nodes} --ntasks-per-node {domains}  # one for each domain
        #SBATCH -c {cores} -t 10
        #SBATCH --ntasks={nodes * domains}
        module load openmpi
        export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
        srun --mpi=pmix --cpus-per-task=$SLURM_CPUS_PER_TASK --cpu-bind=cores {command}
        '''.replace("\\n        ", "\\n")
        """),
    ("5.6", "binds to the socket, as on the lab sheet", script(
        {" --map-by ppr:1:numa:PE=": " -x Y=", "-to core": "-to socket"})),
    ("5.6", "asks for the ranks of all nodes", """
        solution_ = job_script
        def job_script(nodes, domains, cores, command):
            text = solution_(nodes, domains, cores, command)
            return text.replace(f"--ntasks-per-node={domains}", f"--ntasks={nodes * domains}")
        """),
    ("5.6", "computes with variables of the shell", """
        solution_ = job_script
        def job_script(nodes, domains, cores, command):
            text = solution_(nodes, domains, cores, command)
            text = text.replace("export OMP", f"RANKS=$(( {nodes} * {domains} ))\\nexport OMP")
            text = text.replace(f"mpiexec -n {nodes * domains}", "mpiexec -n ${RANKS}")
            return text.replace(f"PE={cores}", "PE=$SLURM_CPUS_PER_TASK")
        """),
    ("5.6", "binds to the domain", script({":PE=": " -x Y=", "-to core": "-to numa"})),
]  # fmt: skip


# What the answers of all other tasks compute needs no ranks.
COMMUNICATES = {"5.1"}


def named(task: str, what: str) -> dict:
    """The name of a case for pytest, and whether `make check` runs it."""
    marks = () if task in COMMUNICATES else pytest.mark.quick
    return {"id": f"{task}-{what.replace(' ', '-')}", "marks": marks}


@pytest.fixture(scope="module")
def ranks() -> Iterator[cluster.Ranks]:
    """Two ranks with all solutions."""
    # 2 s: a deadlock of a wrong answer is reported soon.
    with cluster.start(2, timeout=2) as started:
        for code in SOLUTIONS.values():
            run_cell(started, code)
        yield started


@pytest.fixture(scope="module")
def local_ranks() -> LocalRanks:
    """The same without processes; nor is there a stopwatch."""
    made = LocalRanks(2)
    for task in CELLS.keys() - COMMUNICATES:
        run_cell(made, SOLUTIONS[task])
    return made


@pytest.fixture
def told(request: pytest.FixtureRequest) -> Callable[..., tuple[bool, str]]:
    """`told(task, code)`: what the check says of an answer; real ranks where it needs them."""

    def judge(task: str, code: str) -> tuple[bool, str]:
        ranks = request.getfixturevalue("ranks" if task in COMMUNICATES else "local_ranks")
        with solved(ranks, SOLUTIONS) as answer:
            answer(task, code)
            return verdict(CHECKS[task], ranks)

    return judge


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
def test_the_solution_passes_the_check_each_time(request, task):
    ranks = request.getfixturevalue("ranks" if task in COMMUNICATES else "local_ranks")
    for _ in range(3):  # with other inputs
        passed, printed = verdict(CHECKS[task], ranks)
        assert passed, printed


@pytest.mark.parametrize("task", CELLS)
def test_the_untouched_stub_fails_for_the_right_reason(told, task):
    passed, printed = told(task, answers(NOTEBOOK, "labs")[CELLS[task]])
    assert not passed
    assert printed == f"✗ Task {task} · {CHECKS[task].title} · still open\n"


@pytest.mark.parametrize(
    ("task", "code", "words"),
    [pytest.param(t, c, w, **named(t, what)) for t, what, c, w in WRONG],
)
def test_a_wrong_answer_is_told_its_mistake(told, task, code, words):
    passed, printed = told(task, textwrap.dedent(code))
    print(printed)
    assert not passed, printed
    assert words in printed


@pytest.mark.parametrize(
    ("task", "code"),
    [pytest.param(t, c, **named(t, what)) for t, what, c in ALSO_RIGHT],
)
def test_another_right_answer_passes(told, task, code):
    passed, printed = told(task, textwrap.dedent(code))
    assert passed, printed
