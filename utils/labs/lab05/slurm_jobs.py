"""Task 5.6: a job script that asks Slurm for what it uses, and uses what it asks for."""

from __future__ import annotations

import random
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

from utils.checks.comparison import short
from utils.checks.task import Report, Step, Wrong, none_of, task
from utils.cluster.questions import Ranks, Reply
from utils.labs.shared import slurm_script

from .probes import probe_script


@task("5.6", "a Slurm job script", points=3)
def job_script(ranks: Ranks, report: Report) -> None:
    """Check that a script asks for what it uses, and uses what it asks for."""
    chance = random.Random(report.seed)
    command = f"python train.py --strong {chance.randrange(100, 999)} --out 'my  run.json'"
    other = chance.choice((3, 5, 6)), chance.choice((1, 4)), chance.randrange(5, 33), command
    settings = [(4, 2, 24, "python train.py --strong 256"), other]
    for answer in report.answers(ranks, probe_script, settings=settings):
        report.follow(answer.rank, _scripts(answer, settings))


def _scripts(answer: Reply, settings: Sequence[tuple]) -> Iterator[Step]:
    """Yield the step for the script of each setting, which reports all of its problems."""
    for script, setting in zip(answer.value, settings, strict=True):
        yield none_of(
            Wrong(f"job_script{setting[:3]}: {text}", answer.rank)
            for text in _script_problems(script, *setting)
        )


def _script_problems(
    script: dict, nodes: int, domains: int, cores: int, command: str
) -> Iterator[str]:
    text = script["text"]
    if not isinstance(text, str):
        yield f"You returned {short(text)}. Return the text of a script"
        return
    lines = text.replace("\\\n", " ").splitlines()
    if not lines or not lines[0].startswith("#!"):
        yield "The first line must name the program that reads the script: #!/bin/bash"
    if script["said"]:
        yield f"bash can't read the script: {script['said']}"
        return
    commands = [k for k, line in enumerate(lines) if line.strip() and line[0] != "#"]
    yield from _misplaced_requests(lines, commands)
    asked = slurm_script.request(lines[: commands[0]] if commands else lines)
    yield from _request_problems(asked, nodes, domains, cores)
    if not script["launches"]:
        yield "No line starts the ranks. Add one with mpiexec or srun"
        return
    yield from _launch_problems(script, nodes * domains, domains, cores, command)


def _misplaced_requests(lines: list[str], commands: list[int]) -> Iterator[str]:
    """Yield the `#SBATCH` lines that Slurm doesn't read; `commands` numbers the other lines."""
    for k, line in enumerate(lines):
        if re.match(r"\s*#\s+SBATCH|\s+#SBATCH", line):
            yield (
                f"Slurm doesn't read line {k + 1}, {line.strip()!r}. Begin the line with #SBATCH, "
                "without blanks"
            )
        elif line.startswith("#SBATCH") and commands and k > commands[0]:
            first = f"the first command (line {commands[0] + 1})"
            yield f"#SBATCH is below {first}, where Slurm does not read it. Move it up"


def _launch_problems(
    script: dict, ranks: int, domains: int, cores: int, command: str
) -> Iterator[str]:
    running = [words for words in script["launches"] if _starts(shlex.split(command), words)]
    launcher, threads, *words = (running or script["launches"])[-1]
    options = slurm_script.options(words)
    if exported := re.search(r"OMP_NUM_THREADS=(\S+)", " ".join(words)):  # mpiexec -x
        threads = exported[1]
    number = options.get("--ntasks", str(ranks))
    unset = f"is not set to {cores} before the ranks start. Export it"
    if "OMP_NUM_THREADS=" in script["text"]:
        unset = "is set, but the ranks don't see it. Export it"
    yield from _so({
        (
            f"The {launcher} line does not run {command!r}. Put the command right after the "
            f"options of {launcher}"
        ): not running,
        f"{len(running)} launches run the command. Run it once": len(running) > 1,
        (
            f"The script ends while {launcher} still runs, and then Slurm ends the job. Leave "
            "out the & after the command"
        ): script["left"],
        f"OMP_NUM_THREADS {unset}": not threads,
        f"OMP_NUM_THREADS={threads}, but a rank has {cores} cores": threads not in ("", str(cores)),
        f"{launcher} starts {number or '?'} ranks, but the request has {ranks}": number
        != str(ranks),
    })
    placement = _srun_facts if launcher == "srun" else _mpiexec_facts
    yield from _so(placement(options, script["text"], domains, cores))[:1]


# Options of mpiexec and srun that have no value, and options that have two.
_FLAGS = re.compile(
    r"--?(report-bindings|oversubscribe|nooversubscribe|display-map|tag-output|display-allocation|"
    r"timestamp-output|use-hwthread-cpus|allow-run-as-root|exclusive|label|unbuffered|overlap|"
    r"kill-on-bad-exit|no-kill|pty|nolocal|verbose|quiet|[vqluQOKkV])$"
)
_PAIRS = re.compile(r"--?(mca|gmca|prtemca|pmixmca)$")


def _starts(command: list[str], launch: list[str]) -> bool:
    """Return whether a launch starts this command on each rank."""
    words = launch[2:]
    while words and words[0].startswith("-"):
        name = words.pop(0)
        values = 2 if _PAIRS.match(name) else int(not ("=" in name or _FLAGS.match(name)))
        attached = re.match(r"-([a-zA-Z]\d|p[a-z])", name)  # -N4, -plab
        del words[: 0 if attached else values]
    while words and (words[0] == "env" or re.match(r"\w+=", words[0])):
        del words[0]
    return words[: len(command)] == command


def _so(wrong: Mapping[str, object]) -> list[str]:
    return [text for text, is_so in wrong.items() if is_so]


def _request_problems(asked: dict[str, str], nodes: int, domains: int, cores: int) -> Iterator[str]:
    ranks = str(nodes * domains)
    wanted = {
        "--nodes": (nodes, "all nodes"),
        "--ntasks-per-node": (domains, "one rank per NUMA domain of a node"),
        "--cpus-per-task": (cores, "all cores of a domain"),
    }
    if "--ntasks-per-node" not in asked and asked.get("--ntasks") == ranks:
        del wanted["--ntasks-per-node"]  # Slurm then divides the ranks equally among the nodes
    for name, (count, words) in wanted.items():
        if name not in asked:
            yield f"#SBATCH {name}={count} is missing. Add it to get {words}"
        elif asked[name] != str(count):
            yield f"#SBATCH {name}: expected {count} ({words}), got {asked[name] or 'nothing'}"
    if asked.get("--ntasks", ranks) != ranks:
        yield (
            f"#SBATCH --ntasks={asked['--ntasks']} contradicts {nodes} nodes × {domains} ranks. "
            f"Ask for {ranks}"
        )
    yield from _limit_problems(asked.get("--time", ""))


def _limit_problems(limit: str) -> Iterator[str]:
    minutes = slurm_script.minutes(limit) if limit else None
    if not limit:
        yield "#SBATCH --time=… is missing. Add it: many clusters refuse a job without a limit"
    elif minutes is None:
        yield f"Slurm can't read --time={limit}. Write minutes, or hours:minutes:seconds"
    elif minutes < 1:
        yield f"#SBATCH --time={limit} is less than a minute. Give the training more time"


def _mpiexec_facts(options: dict, text: str, domains: int, cores: int) -> dict[str, object]:
    """Return what mpiexec's options place wrongly; `.runs.rehearse` would show the same."""
    bind = options.get("--bind-to", "none")
    by = options.get("--map-by", "").lower()
    each, place = re.match(r"(?:ppr:(\d+):)?(\w*)", by).groups()
    pe = re.search(r":pe=(\d+)", by)
    pe = pe[1] if pe else options.get("--cpus-per-proc", "")
    of_rank = f"{pe} cores" if pe else "one core"
    by_domain = ("numa", "socket", "package", "l3cache")
    # Without --map-by, Open MPI goes from package to package by default.
    spread = bind == "core" or place in by_domain or (not by and bind in by_domain)
    at_once = {"node": domains}.get(place, 1)
    return {
        "mpiexec must bind the ranks: --bind-to core (or numa)": bind == "none",
        "--bind-to hwthread binds to parts of cores. Use --bind-to core": bind == "hwthread",
        f"--map-by {by}: put one rank into each domain, {domains} on a node": int(each or 0)
        not in (0, at_once),
        f"--map-by {by} puts ranks next to each other. Put one into each domain: ppr:1:numa": place
        in ("core", "hwthread"),
        f"PE={pe} counts cores, so it needs --bind-to core": pe and bind != "core",
        (
            f"--bind-to core gives each rank {of_rank}, for {cores} threads. --map-by "
            f"ppr:1:numa:PE={cores} gives it {cores}"
        ): bind == "core" and (pe or "1") != str(cores),
        "--map-by ppr:1:numa is missing, so two ranks may be in the same domain": not spread,
    }


def _srun_facts(options: dict, text: str, domains: int, cores: int) -> dict[str, object]:
    """Return the options that srun still needs."""
    told_again = options.get("--cpus-per-task") == str(cores) or "SRUN_CPUS_PER_TASK=" in text
    unbound = options.get("--cpu-bind", "none") in ("", "none", "no")
    return {
        f"srun needs its own option: --cpus-per-task={cores} (since Slurm 22.05)": not told_again,
        "srun must bind the ranks: --cpu-bind=cores": unbound,
    }
