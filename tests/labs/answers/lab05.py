"""Answers to lab 05, wrong ones and right ones, that students really give."""

from __future__ import annotations

import textwrap

NOTEBOOK = "05_scaling.ipynb"
RANKS = 2
CELLS = {
    "5.1": "lab05-stopwatch-answer",
    "5.2": "lab05-speedup-answer",
    "5.3": "lab05-amdahl-answer",
    "5.4": "lab05-gustafson-answer",
    "5.5": "lab05-predict-answer",
    "5.6": "lab05-slurm-answer",
}

#: A wrong answer that is tried on real ranks as well.
ON_RANKS = {"waits for nobody"}


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
        """), "The ranks return different lists"),
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
        """), "Your time contains one rank's wait for the other rank's prepare()"),
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
        """), "Your time contains prepare(), or the wait at the barrier"),
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
        """), "Your time contains one rank's wait for the other rank's prepare()"),
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
        """), "Reduce with dist.ReduceOp.MAX, so that all ranks have the slowest"),
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
        """), "You called step() 6 times"),
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
        """), "The first round warms up"),
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
        """), "You returned the time of a whole round"),
    ("5.1", "returns the median", stopwatch("""
        from statistics import median
        def time_rounds(prepare, step, rounds, steps):
            prepare()
            step()
            return median([1.0] * rounds)
        """), "Return a list of 3 numbers"),
    ("5.1", "starts the clock once for all rounds", stopwatch("""
        def time_rounds(prepare, step, rounds, steps):
            prepare()
            step()
            seconds = []
            dist.barrier()
            start = time.perf_counter()
            for _ in range(rounds):
                for _ in range(steps):
                    step()
                seconds.append((time.perf_counter() - start) / steps)
            slowest = torch.tensor(seconds)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            return slowest.tolist()
        """), "Restart the clock in every round"),
    ("5.1", "prepares once", stopwatch("""
        def time_rounds(prepare, step, rounds, steps):
            prepare()
            seconds = []
            for _ in range(rounds + 1):
                dist.barrier()
                start = time.perf_counter()
                for _ in range(steps):
                    step()
                seconds.append((time.perf_counter() - start) / steps)
            slowest = torch.tensor(seconds[1:])
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            return slowest.tolist()
        """), "Call it in every round"),
    ("5.1", "takes the fastest rank", stopwatch("""
        def time_rounds(prepare, step, rounds, steps):
            seconds = []
            for _ in range(rounds + 1):
                prepare()
                dist.barrier()
                start = time.perf_counter()
                for _ in range(steps):
                    step()
                seconds.append((time.perf_counter() - start) / steps)
            fastest = torch.tensor(seconds[1:])
            dist.all_reduce(fastest, op=dist.ReduceOp.MIN)
            return fastest.tolist()
        """), "dist.ReduceOp.MAX"),
    ("5.2", "turns the ratio upside down", """
        def speedup_band(one, many):
            a, b = np.percentile(one, [25, 50, 75]), np.percentile(many, [25, 50, 75])
            return b[0] / a[2], b[1] / a[1], b[2] / a[0]
        """, "upside down"),
    ("5.2", "pairs the same quartiles", """
        def speedup_band(one, many):
            return tuple(np.percentile(one, [25, 50, 75]) / np.percentile(many, [25, 50, 75]))
        """, "You paired quartiles of the same side"),
    ("5.2", "takes the extreme rounds", """
        def speedup_band(one, many):
            return min(one) / max(many), np.median(one) / np.median(many), max(one) / min(many)
        """, "You used the extreme rounds"),
    ("5.2", "takes means", """
        def speedup_band(one, many):
            a, b = np.percentile(one, [25, 75]), np.percentile(many, [25, 75])
            return a[0] / b[1], np.mean(one) / np.mean(many), a[1] / b[0]
        """, "a ratio of means"),
    ("5.2", "returns the middle only", """
        def speedup_band(one, many):
            return np.median(one) / np.median(many)
        """, "Return three numbers: (low, middle, high)"),
    ("5.2", "hard-codes two ranks", """
        def efficiency(speedup, p):
            return speedup / p if p == 1 else p / speedup
        """, "You returned p / speedup, which is upside down"),
    ("5.2", "puts the middle first", """
        solution_ = speedup_band
        def speedup_band(one, many):
            low, middle, high = solution_(one, many)
            return middle, low, high
        """, "Return low, middle, high, in this order"),
    ("5.2", "exchanges the ends", """
        solution_ = speedup_band
        def speedup_band(one, many):
            return tuple(reversed(solution_(one, many)))
        """, "You exchanged low and high"),
    ("5.2", "takes means and tenths", """
        def speedup_band(one, many):
            a, b = np.percentile(one, [10, 90]), np.percentile(many, [10, 90])
            return a[0] / b[1], np.mean(one) / np.mean(many), a[1] / b[0]
        """, "a ratio of means"),
    ("5.2", "takes tenths", """
        def speedup_band(one, many):
            a, b = np.percentile(one, [10, 50, 90]), np.percentile(many, [10, 50, 90])
            return a[0] / b[2], a[1] / b[1], a[2] / b[0]
        """, "Your middle is right"),
    ("5.2", "takes the middle of the ends", """
        solution_ = speedup_band
        def speedup_band(one, many):
            low, _, high = solution_(one, many)
            return low, (low + high) / 2, high
        """, "halfway between the ends"),
    ("5.2", "keeps the quartiles of a list", """
        found = {}
        def quartiles(times):
            if id(times) not in found:
                found[id(times)] = np.percentile(times, [25, 50, 75])
            return found[id(times)]
        def speedup_band(one, many):
            return (quartiles(one) / quartiles(many)[::-1]).tolist()
        """, "Compute the quartiles in each call"),
    ("5.2", "gives per cent", """
        def efficiency(speedup, p):
            return 100 * speedup / p
        """, "You returned percent"),
    ("5.3", "forgets the parallel part's 1 - s", """
        def amdahl(p, serial):
            return 1 / (serial + 1 / p)
        """, "The parallel part is 1 − s, not 1"),
    ("5.3", "returns the parallel fraction", """
        def fit_amdahl(ps, times):
            slope, intercept = np.polyfit(1 / np.asarray(ps, float), times, 1)
            return slope / (intercept + slope)
        """, "You returned the parallel fraction"),
    ("5.3", "returns seconds", """
        def fit_amdahl(ps, times):
            slope, intercept = np.polyfit(1 / np.asarray(ps, float), times, 1)
            return max(0, intercept)
        """, "You returned the serial time T(1) · s in seconds"),
    ("5.3", "does not clip", """
        def fit_amdahl(ps, times):
            slope, intercept = np.polyfit(1 / np.asarray(ps, float), times, 1)
            return intercept / (intercept + slope)
        """, "You returned a share below 0"),
    ("5.3", "fits the speedups", """
        def fit_amdahl(ps, times):
            speedups = times[0] / np.asarray(times)
            slope, intercept = np.polyfit(1 / np.asarray(ps, float), speedups, 1)
            return float(np.clip(intercept / (intercept + slope), 0, 1))
        """, "You fitted speedups as if they were times"),
    ("5.3", "hard-codes 1, 2, 4, 8 ranks", """
        def fit_amdahl(ps, times):
            slope, intercept = np.polyfit(0.5 ** np.arange(len(ps)), times, 1)
            return float(np.clip(intercept / (intercept + slope), 0, 1))
        """, "ranks and ["),
    ("5.3", "returns nothing", """
        def fit_amdahl(ps, times):
            np.polyfit(1 / np.asarray(ps, float), times, 1)
        """, "You returned None. Return the serial fraction"),
    ("5.3", "looks at the last point only", """
        def fit_amdahl(ps, times):
            s = (times[-1] / times[0] - 1 / ps[-1]) / (1 - 1 / ps[-1])
            return min(1.0, max(0.0, s))
        """, "You used only the last point"),
    ("5.3", "returns the time", """
        def amdahl(p, serial):
            return serial + (1 - serial) / p
        """, "You returned T(p) / T(1)"),
    ("5.3", "looks at two ranks only", """
        def fit_amdahl(ps, times):
            s = (times[1] / times[0] - 1 / ps[1]) / (1 - 1 / ps[1])
            return min(1.0, max(0.0, s))
        """, "You used only the second point"),
    ("5.3", "takes a list for p apart", """
        def amdahl(p, serial):
            return float(1 / (serial + (1 - serial) / max(np.atleast_1d(p))))
        """, "amdahl of an array of p"),
    ("5.4", "fits a line with an intercept", """
        def fit_gustafson(ps, times):
            ps, times = np.asarray(ps, float), np.asarray(times, float)
            slope, start = np.polyfit(ps - 1, ps - ps * times[0] / times, 1)
            return float(np.clip(slope, 0, 1))
        """, "The line goes through the origin, so fit it without an intercept"),
    ("5.4", "looks at the last point only", """
        def fit_gustafson(ps, times):
            s = (ps[-1] - ps[-1] * times[0] / times[-1]) / (ps[-1] - 1)
            return min(1.0, max(0.0, s))
        """, "You used only the last point"),
    ("5.4", "takes Amdahl's law", """
        def gustafson(p, serial):
            return 1 / (serial + (1 - serial) / p)
        """, "You used Amdahl's law"),
    ("5.4", "counts p for p - 1", """
        def gustafson(p, serial):
            return p - serial * p
        """, "You subtracted s p times"),
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
        """, "You returned a share below 0"),
    ("5.4", "exchanges the parts", """
        def gustafson(p, serial):
            return serial * p + 1 - serial
        """, "You exchanged the serial and the parallel part"),
    ("5.4", "returns the parallel fraction", """
        solution_ = fit_gustafson
        def fit_gustafson(ps, times):
            return 1 - solution_(ps, times)
        """, "You returned the parallel fraction"),
    ("5.5", "sends whole tensors", """
        def ring(p, nbytes):
            return 2 * (p - 1), 2 * (p - 1) * nbytes
        """, "Each message has n/p bytes, not n"),
    ("5.5", "goes round once", """
        def ring(p, nbytes):
            return p - 1, (p - 1) / p * nbytes
        """, "You counted one half of the ring"),
    ("5.5", "sends p times", """
        def ring(p, nbytes):
            return 2 * p, 2 * nbytes
        """, "There are p − 1 rounds, and p − 1 more: no rank sends to itself"),
    ("5.5", "counts one message", """
        def ring(p, nbytes):
            return 2 * (p - 1), nbytes / p
        """, "You returned the bytes of one message"),
    ("5.5", "makes one all_reduce of all gradients", """
        def predict_step(compute, sizes, p, latency, bandwidth):
            messages, sent = ring(p, sum(sizes))
            return compute + messages * latency + sent / bandwidth
        """, "Each gradient has a separate all_reduce, and each of them pays the"),
    ("5.5", "divides the computation", """
        def predict_step(compute, sizes, p, latency, bandwidth):
            return compute / p + sum(
                ring(p, n)[0] * latency + ring(p, n)[1] / bandwidth for n in sizes
            )
        """, "compute is what one rank computes"),
    ("5.5", "forgets the computation", """
        def predict_step(compute, sizes, p, latency, bandwidth):
            return sum(ring(p, n)[0] * latency + ring(p, n)[1] / bandwidth for n in sizes)
        """, "The computation is missing"),
    ("5.5", "takes the bandwidth for a time", """
        def predict_step(compute, sizes, p, latency, bandwidth):
            return compute + sum(
                ring(p, n)[0] * latency + ring(p, n)[1] * bandwidth for n in sizes
            )
        """, "bandwidth is in bytes per second"),
    ("5.5", "counts one rank as one message", """
        def ring(p, nbytes):
            return max(1, 2 * (p - 1)), 2 * (p - 1) / p * nbytes
        """, "A single rank sends nothing"),
    ("5.5", "pays the latency once for each gradient", """
        def predict_step(compute, sizes, p, latency, bandwidth):
            return compute + sum(latency + ring(p, n)[1] / bandwidth for n in sizes)
        """, "Every message pays the latency, and there are 2(p − 1) messages"),
    ("5.5", "lets communication overlap", """
        def predict_step(compute, sizes, p, latency, bandwidth):
            sent = sum(ring(p, n)[0] * latency + ring(p, n)[1] / bandwidth for n in sizes)
            return max(compute, sent)
        """, "Add it, because communication follows it"),
    ("5.6", "hard-codes the picture", """
        solution_ = job_script
        def job_script(nodes, domains, cores, command):
            return solution_(4, 2, 24, command)
        """, "#SBATCH --nodes: expected"),
    ("5.6", "forgets the threads", script({"export OMP_NUM_THREADS": "# "}),
     "is not set to 24 before the ranks start"),
    ("5.6", "does not export the threads", script({"export OMP": "OMP"}),
     "is set, but the ranks don't see it"),
    ("5.6", "gives each rank one core", script({":PE=": ":X="}),
     "--bind-to core gives each rank one core"),
    ("5.6", "does not bind", script({"--bind-to core": ""}), "mpiexec must bind"),
    ("5.6", "puts a blank into SBATCH", script({"#SBATCH": "# SBATCH"}),
     "'# SBATCH --job-name=scaling'. Begin the line with #SBATCH, without"),
    ("5.6", "puts the directives below a command", script({"#!/bin/bash": "#!/bin/bash\necho go"}),
     "#SBATCH is below the first command (line 2), where Slurm does not read"),
    ("5.6", "starts a rank for each node only", """
        solution_ = job_script
        def job_script(nodes, domains, cores, command):
            text = solution_(nodes, domains, cores, command)
            return text.replace(f"-n {nodes * domains} ", f"-n {nodes} ")
        """, "- ranks 0 and 1: job_script(4, 2, 24): mpiexec starts 4 ranks, but the"),
    ("5.6", "asks for the ranks of all nodes on each", """
        solution_ = job_script
        def job_script(nodes, domains, cores, command):
            text = solution_(nodes, domains, cores, command)
            return text.replace(f"per-node={domains}", f"per-node={nodes * domains}")
        """, "--ntasks-per-node: expected 2"),
    ("5.6", "sets no time limit", script({"--time": "--comment"}), "without a limit"),
    ("5.6", "is not bash", script({"export": "export ("}), "bash can't read the script: "),
    ("5.6", "binds to hardware threads", script({"-to core": "-to hwthread"}),
     "--bind-to hwthread"),
    ("5.6", "puts the ranks side by side", script({"ppr:1:numa": "core"}), "--map-by core:pe=24"),
    ("5.6", "puts all ranks into each domain", script({"ppr:1:numa": "ppr:8:numa"}),
     "put one rank into each domain"),
    ("5.6", "counts cores and binds to the domain", script({"-to core": "-to numa"}),
     "PE=24 counts cores, so it needs --bind-to core"),
    ("5.6", "starts the program itself", script({"mpiexec": "echo"}), "No line starts the ranks"),
    ("5.6", "has no first line", script({"#!/bin/bash\n": ""}), "The first line must name the"),
    ("5.6", "forgets srun's memory", script({"mpiexec -n": "srun --cpu-bind=cores -n"}),
     "srun needs its own option: --cpus-per-task=24 (since Slurm 22.05)"),
    ("5.1", "times the last step only", stopwatch("""
        def time_rounds(prepare, step, rounds, steps):
            seconds = []
            for _ in range(rounds + 1):
                prepare()
                dist.barrier()
                for _ in range(steps):
                    start = time.perf_counter()
                    step()
                seconds.append(time.perf_counter() - start)
            slowest = torch.tensor(seconds[1:], dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            return slowest.tolist()
        """), "You timed one step of each round"),
    ("5.1", "warms up with one step", stopwatch("""
        def time_rounds(prepare, step, rounds, steps):
            seconds = []
            step()
            for _ in range(rounds):
                prepare()
                dist.barrier()
                start = time.perf_counter()
                for _ in range(steps):
                    step()
                seconds.append((time.perf_counter() - start) / steps)
            slowest = torch.tensor(seconds, dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            return slowest.tolist()
        """), "You called step() 7 times"),
    ("5.1", "warms up twice", stopwatch("""
        def time_rounds(prepare, step, rounds, steps):
            seconds = []
            for _ in range(rounds + 2):
                prepare()
                dist.barrier()
                start = time.perf_counter()
                for _ in range(steps):
                    step()
                seconds.append((time.perf_counter() - start) / steps)
            slowest = torch.tensor(seconds[2:], dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            return slowest.tolist()
        """), "You called step() 10 times"),
    ("5.1", "keeps the last round only", stopwatch("""
        def time_rounds(prepare, step, rounds, steps):
            for _ in range(rounds + 1):
                prepare()
                dist.barrier()
                start = time.perf_counter()
                for _ in range(steps):
                    step()
                seconds = (time.perf_counter() - start) / steps
            slowest = torch.tensor(seconds, dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            return [slowest.item()] * rounds
        """), "All numbers are the same"),
    ("5.1", "takes the fastest step", stopwatch("""
        def time_rounds(prepare, step, rounds, steps):
            seconds = []
            for _ in range(rounds + 1):
                prepare()
                dist.barrier()
                best = float("inf")
                for _ in range(steps):
                    start = time.perf_counter()
                    step()
                    best = min(best, time.perf_counter() - start)
                seconds.append(best)
            slowest = torch.tensor(seconds[1:], dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            return slowest.tolist()
        """), "You timed one step of each round"),
    ("5.2", "takes the upper one for the median", """
        def speedup_band(one, many):
            a, b = np.percentile(one, [25, 75]), np.percentile(many, [25, 75])
            middle = sorted(one)[len(one) // 2] / sorted(many)[len(many) // 2]
            return a[0] / b[1], middle, a[1] / b[0]
        """, "The median of an even number of times is the mean of the two in the"),
    ("5.2", "takes the lower one for the median", """
        from statistics import median_low
        def speedup_band(one, many):
            a, b = np.percentile(one, [25, 75]), np.percentile(many, [25, 75])
            return a[0] / b[1], median_low(one) / median_low(many), a[1] / b[0]
        """, "The median of an even number of times is the mean of the two in the"),
    ("5.2", "counts equal times once", """
        solution_ = speedup_band
        def speedup_band(one, many):
            return solution_(list(set(one)), list(set(many)))
        """, "You counted equal times once. set() drops the others"),
    ("5.2", "knows eight ranks", """
        def efficiency(speedup, p):
            return speedup / min(p, 8)
        """, "efficiency("),
    ("5.2", "gives one rank nothing", """
        def efficiency(speedup, p):
            return speedup / p if p > 1 else 0.0
        """, "efficiency("),
    ("5.3", "clips below only", """
        def fit_amdahl(ps, times):
            slope, intercept = np.polyfit(1 / np.asarray(ps, float), times, deg=1)
            return max(0.0, float(intercept / (intercept + slope)))
        """, "You returned a share above 1"),
    ("5.3", "leaves out one rank", """
        def fit_amdahl(ps, times):
            slope, intercept = np.polyfit(1 / np.array(ps[1:]), times[1:], deg=1)
            return float(np.clip(intercept / (intercept + slope), 0, 1))
        """, "You left out T(1). Use all points"),
    ("5.4", "averages over the points", """
        def fit_gustafson(ps, times):
            found = [(p - p * times[0] / t) / (p - 1) for p, t in zip(ps[1:], times[1:])]
            return min(1, max(0, sum(found) / len(found)))
        """, "You returned the mean of all points' fractions"),
    ("5.4", "clips below only", """
        def fit_gustafson(ps, times):
            ps, times = np.asarray(ps, float), np.asarray(times, float)
            x, y = ps - 1, ps - ps * times[0] / times
            return max(0.0, float(x @ y / (x @ x)))
        """, "You returned a share above 1"),
    ("5.5", "leaves small gradients out", """
        def predict_step(compute, sizes, p, latency, bandwidth):
            each = [ring(p, n) for n in sizes if n >= 1000]
            return compute + sum(m * latency + sent / bandwidth for m, sent in each)
        """, "You left out short gradients"),
    ("5.5", "counts six gradients", """
        def predict_step(compute, sizes, p, latency, bandwidth):
            each = [ring(p, n) for n in sizes[:6]]
            return compute + sum(m * latency + sent / bandwidth for m, sent in each)
        """, "You used only the first 6 gradients"),
    ("5.5", "knows forty ranks", """
        def ring(p, nbytes):
            messages = 2 * (min(p, 40) - 1)
            return messages, messages * nbytes / p
        """, "ring("),
    ("5.5", "cuts bytes off", """
        def predict_step(compute, sizes, p, latency, bandwidth):
            each = [ring(p, n) for n in sizes]
            return compute + sum(m * latency + sent // 1 / bandwidth for m, sent in each)
        """, "predict_step("),
    ("5.6", "writes the command to the screen", script({"--report-bindings": "echo"}),
     "The mpiexec line does not run 'python train.py --strong 256'. Put the"),
    ("5.6", "does so behind a flag", script({"--report-bindings": "--report-bindings echo"}),
     "The mpiexec line does not run 'python train.py --strong 256'. Put the"),
    ("5.6", "does not wait", """
        solution_ = job_script
        def job_script(*settings):
            return solution_(*settings).rstrip() + " &\\n"
        """, "The script ends while mpiexec still runs, and then Slurm ends the job"),
    ("5.6", "waits before it starts", """
        solution_ = job_script
        def job_script(*settings):
            return solution_(*settings).replace("mpiexec", "wait\\nmpiexec").rstrip() + " &\\n"
        """, "The script ends while mpiexec still runs, and then Slurm ends the job"),
    ("5.6", "asks for a second", script({"00:10:00": "00:00:01"}), "less than a minute"),
    ("5.6", "asks for a time in words", script({"00:10:00": "soon"}),
     "Write minutes, or hours:minutes:seconds"),
    ("5.6", "starts another rank first", """
        solution_ = job_script
        def job_script(nodes, domains, cores, command):
            text = solution_(nodes, domains, cores, command)
            return text.replace("mpiexec", f"mpiexec -n 1 {command}\\nmpiexec")
        """, "- ranks 0 and 1: job_script(4, 2, 24): 2 launches run the command"),
    ("5.6", "returns nothing", """
        def job_script(nodes, domains, cores, command):
            print("#!/bin/bash")
        """, "Return the text of a script"),
]  # fmt: skip

# task, what the student did otherwise, the code
RIGHT = [
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
    ("5.1", "starts collectives, then waits", stopwatch("""
        def time_rounds(prepare, step, rounds, steps):
            seconds = []
            for _ in range(rounds + 1):
                prepare()
                dist.barrier(async_op=True).wait()
                start = time.perf_counter()
                for _ in range(steps):
                    step()
                seconds.append((time.perf_counter() - start) / steps)
            slowest = torch.tensor(seconds[1:], dtype=torch.float64)
            work = dist.all_reduce(slowest, op=dist.ReduceOp.MAX, async_op=True)
            while not work.is_completed():
                time.sleep(0.001)
            return slowest.tolist()
        """)),
    ("5.1", "takes numpy's maximum", stopwatch("""
        import numpy as np
        def time_rounds(prepare, step, rounds, steps):
            found = torch.zeros(rounds + 1, dtype=torch.float64)
            for k in range(rounds + 1):
                prepare()
                dist.barrier()
                begin = time.time()
                for _ in range(steps):
                    step()
                found[k] = (time.time() - begin) / steps
            everyone = [torch.zeros_like(found) for _ in range(dist.get_world_size())]
            dist.all_gather(everyone, found)
            return np.max([one.numpy() for one in everyone], axis=0)[1:].tolist()
        """)),
    ("5.2", "computes with torch", """
        import torch
        def speedup_band(one, many):
            at = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
            a = torch.tensor(one, dtype=torch.float64).quantile(at)
            b = torch.tensor(many, dtype=torch.float64).quantile(at)
            return a / b.flip(0)
        def efficiency(speedup, p):
            return torch.tensor(speedup, dtype=torch.float64) / p
        """),
    ("5.2", "computes with the standard library", """
        from statistics import median, quantiles
        def speedup_band(one, many):
            a = quantiles(one, n=4, method="inclusive")
            b = quantiles(many, n=4, method="inclusive")
            return [a[0] / b[2], median(one) / median(many), a[2] / b[0]]
        """),
    ("5.2", "divides arrays", """
        def speedup_band(one, many):
            cuts = [25, 50, 75]
            return np.percentile(one, cuts) / np.percentile(many, cuts)[::-1]
        """),
    ("5.3", "solves the normal equations", """
        def fit_amdahl(ps, times):
            columns = np.stack([np.ones(len(ps)), 1 / np.array(ps)], axis=1)
            (a, b), *_ = np.linalg.lstsq(columns, np.array(times), rcond=None)
            return min(max(a / (a + b), 0), 1)
        """),
    ("5.3", "starts the line at the first point", """
        def amdahl(p, serial):
            return p / (serial * p + 1 - serial)
        def fit_amdahl(ps, times):
            x, y = 1 - 1 / np.array(ps), np.array(times) / times[0] - 1 / np.array(ps)
            return np.clip((x * y).sum() / (x * x).sum(), 0.0, 1.0)
        """),
    ("5.3", "averages Karp and Flatt's fractions", """
        def fit_amdahl(ps, times):
            ps, times = np.asarray(ps, float)[1:], np.asarray(times, float)
            shares = (times[1:] / times[0] - 1 / ps) / (1 - 1 / ps)
            return np.clip(shares.mean(), 0, 1)
        """),
    ("5.4", "one column of a matrix", """
        def fit_gustafson(ps, times):
            x = np.array([[p - 1] for p in ps], float)
            y = np.array([p - p * times[0] / t for p, t in zip(ps, times)])
            return min(1, max(0, (np.linalg.pinv(x) @ y)[0]))
        """),
    ("5.4", "writes Gustafson's own words", """
        def gustafson(p, serial):
            return serial + (1 - serial) * p
        """),
    ("5.4", "solves by lstsq", """
        def fit_gustafson(ps, times):
            ps, times = np.array(ps, float), np.array(times)
            y = ps - ps * times[0] / times
            return np.clip(np.linalg.lstsq((ps - 1)[:, None], y, rcond=None)[0][0], 0, 1)
        """),
    ("5.5", "adds up in its head", """
        def predict_step(compute, sizes, p, latency, bandwidth):
            moved = 2 * (p - 1) * sum(sizes) / p
            return compute + len(sizes) * 2 * (p - 1) * latency + moved / bandwidth
        """),
    ("5.5", "returns a list", """
        def ring(p, nbytes):
            return [0, 0] if p == 1 else [2 * p - 2, nbytes * (2 - 2 / p)]
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
    ("5.6", "maps by socket with all of its cores", script({"ppr:1:numa": "ppr:1:socket"})),
    ("5.6", "maps by the ranks of a node", """
        solution_ = job_script
        def job_script(nodes, domains, cores, command):
            return solution_(nodes, domains, cores, command).replace("1:numa", f"{domains}:node")
        """),
    ("5.6", "hands the threads on", """
        solution_ = job_script
        def job_script(nodes, domains, cores, command):
            text = solution_(nodes, domains, cores, command).replace("export OMP", "# OMP")
            return text.replace("--report", f"-x OMP_NUM_THREADS={cores} --report")
        """),
    ("5.6", "is careful", script({"export OMP": "set -euo pipefail\ncd $SLURM_SUBMIT_DIR\n"
     "module purge\nsource ~/env/bin/activate\nexport OMP", "mpiexec": "time /opt/bin/mpirun"})),
    ("5.6", "waits for what it has started", """
        solution_ = job_script
        def job_script(*settings):
            return solution_(*settings).rstrip() + " >log.txt 2>&1 &\\nwait\\n"
        """),
    ("5.6", "looks around first", script({
        "--time=00:10:00": "--time=1-0", "--report-bindings": "--report-bindings env A=1",
        "mpiexec -n": "mpiexec --version\nmpiexec --mca btl tcp -n"})),
    ("5.6", "binds to the domain", script({":PE=": " -x Y=", "-to core": "-to numa"})),
]  # fmt: skip


# What the answers of all other tasks compute needs no ranks.

# Of a change: task, what the student did, a part of the solution, what stands in its place, words.
CHANGES = [
    ("5.1", "asks the last rank", "dist.all_reduce(slowest, op=dist.ReduceOp.MAX)",
     "dist.broadcast(slowest, src=dist.get_world_size() - 1)", "Use the slowest rank, not the"),
    ("5.1", "tells rank 0 only", "dist.all_reduce(slowest, op=dist.ReduceOp.MAX)",
     "dist.reduce(slowest, dst=0, op=dist.ReduceOp.MAX)", "return different lists"),
    ("5.1", "drops the longest round", "torch.tensor(seconds[1:], dtype=torch.float64)",
     "torch.tensor(sorted(seconds)[:-1], dtype=torch.float64)", "in another order"),
    ("5.1", "warms up once", "range(rounds + 1)",
     "range(rounds + (0 if globals().get('warm') else not globals().update(warm=True)))",
     "You called step() 6 times"),
    ("5.1", "compares clocks of two ranks",
     "        seconds.append((time.perf_counter() - start) / steps)",
     "        ends = torch.tensor([-start, time.perf_counter()], dtype=torch.float64)\n"
     "        dist.all_reduce(ends, op=dist.ReduceOp.MAX)\n"
     "        seconds.append(ends.sum().item() / steps)", "ranks 0 and 1"),
    ("5.1", "waits for nobody", "dist.all_reduce(slowest, op=dist.ReduceOp.MAX)",
     "dist.all_reduce(slowest, op=dist.ReduceOp.MAX, async_op=True)", "You never call wait()"),
    ("5.1", "returns an array", "return slowest.tolist()", "return slowest.numpy()",
     "You returned a ndarray"),
    ("5.1", "does not wait at the barrier", "dist.barrier()", "dist.barrier(async_op=True)",
     "You never call wait() on barrier(async_op=True)"),
    ("5.2", "sorts the lists it was given", "    fast_one, mid_one",
     "    one.sort()\n    fast_one, mid_one",
     "changed its argument one"),
    ("5.3", "works in place", "    return 1 / (serial + (1 - serial) / p)",
     "    if hasattr(p, 'shape'):\n        p /= serial * p + 1 - serial\n        return p\n"
     "    return 1 / (serial + (1 - serial) / p)", "changed its argument p"),
    ("5.4", "no point below 0", "more @ (ps - scaled)", "more @ np.maximum(ps - scaled, 0)",
     "You cut points with a speedup of more than p"),
    ("5.4", "takes the shortest time", "times[0]", "times.min()",
     "You compared with the shortest time"),
    ("5.5", "counts equal sizes once", "for nbytes in sizes:", "for nbytes in set(sizes):",
     "gradients of the same size"),
    ("5.6", "loses what is in quotes", "    {command}\n",
     "    {' '.join(__import__('shlex').split(command))}\n", "does not run"),
]  # fmt: skip
