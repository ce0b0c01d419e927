"""``ddl-labs COMMAND``: `lab` and `doctor` for everyone, and commands for authors and instructors.

``python -m utils COMMAND`` does the same, unless the current folder has another ``utils``.
"""

from __future__ import annotations

import argparse
import io
import shlex
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from utils.course import CourseError
from utils.jobs import RanksError
from utils.jobs.bench_ranks import add_options as add_bench_options

#: The function of a command; it returns the exit status.
Command = Callable[[argparse.Namespace], int]
ROOT = Path(__file__).resolve().parents[1]
SOLUTIONS = ROOT / "solutions"
#: The extra that installs a module, for top-level modules that students need not have.
EXTRAS = dict.fromkeys(("jinja2", "jsonschema", "latex2mathml", "nbclient"), "course")
EXTRAS |= dict.fromkeys(("nbconvert", "nbformat", "nbgrader", "nbval"), "course")
EXTRAS |= dict.fromkeys(("markdown_it", "pptx", "pylatexenc", "sphinx_revealjs"), "slides")


# --- commands; the docstring of each is its help -------------------------------------------------


def release(options: argparse.Namespace) -> int:
    """Write labs/ from solutions/; with --check, only say what differs."""
    from utils.course import release

    if options.check:
        fine = f"{options.labs.name}/ is what follows from {options.solutions.name}/"
        return _drift(release.drift(options.solutions, options.labs), fine)
    written = release.release(options.solutions, options.labs)
    for path in written:
        print(f"wrote {options.labs.name}/{path.relative_to(options.labs)}")
    if not written:
        print("nothing to write: the student notebooks are up to date")
    return 0


def write_parts(options: argparse.Namespace) -> int:
    """Write the parts of pages that follow from the labs: README's map, and the course plans."""
    from utils.course import about, map, page_parts, plan

    labs = about.labs(SOLUTIONS)
    parts = [page_parts.Part("README.md", "map", map.written(labs)), *plan.parts()]
    if options.check:
        return _drift(page_parts.drift(parts), "all parts of pages follow from the labs")
    for changed in page_parts.write(parts):
        print(f"wrote the {changed}")
    return 0


def _drift(lines: list[str], fine: str) -> int:
    """Print the differences, or `fine` if there are none; return the status."""
    print("\n".join(lines) or fine)
    return 1 if lines else 0


def dist(options: argparse.Namespace) -> int:
    """Write a bundle for students: a zip of the committed files, without solutions.

    course has all labs, afternoon 00, 01 and 03, assignment 00 and 06, debugging 00 and 18.
    """
    from importlib.metadata import version

    from utils.course.student_bundle import BUNDLES, bundle

    path = bundle(ROOT, version("ddl-labs"), options.out, BUNDLES[options.bundle])
    print(f"wrote {path} ({path.stat().st_size / 1e6:.1f} MB)")
    return 0


def student_repo(options: argparse.Namespace) -> int:
    """Write a git repository that students can clone, with no solution in its history.

    Run the command again after a change, and students can pull the new commit.
    """
    from importlib.metadata import version

    from utils.course.student_bundle import Selection, repository

    selection = Selection(models=options.models)
    print(f"{options.folder}: {repository(ROOT, version('ddl-labs'), options.folder, selection)}")
    return 0


def figures(options: argparse.Namespace) -> int:
    """Write every picture of the labs as SVG and PNG, with its description, for slides.

    The command runs the labs, up to two minutes each, and keeps a run until something changes.
    Status 1: a lab did not run to its end, and its pictures are missing.
    """
    from utils.course.pictures import executed_copies, pictures_of, save

    paths = _labs(options)
    done = 0
    for path, nb in executed_copies(paths):
        pictures = list(pictures_of(nb))
        save(pictures, options.out / path.stem)
        print(f"{options.out / path.stem}: {len(pictures)} pictures", flush=True)
        done += 1
    return 0 if done == len(paths) else 1


def pack(options: argparse.Namespace) -> int:
    """Write the instructor's pages: minutes, questions, mistakes, rubrics, pictures.

    The command runs the labs, up to two minutes each, and keeps a run until something changes.
    Status 1: a lab did not run to its end, and its page is missing.
    """
    from utils.course import pack
    from utils.course.about import labs, number_of
    from utils.course.pictures import executed_copies

    paths = _labs(options)
    packs = []
    about = {lab.number: lab for lab in labs(SOLUTIONS)}
    for path, nb in executed_copies(paths):
        packs.append(pack.pack(path, nb, about[number_of(path)]))
        print(f"{path.stem}: {len(packs[-1].pictures)} pictures", flush=True)
    pack.write(packs, options.out)
    print(f"wrote {options.out / 'index.html'}")
    return 0 if len(packs) == len(paths) else 1


def slides(options: argparse.Namespace) -> int:
    """Write the slides of every lecture as HTML and as PowerPoint, from the stored outputs."""
    from utils.course import notebook
    from utils.course.lectures import page, presentation, reading

    options.out.mkdir(parents=True, exist_ok=True)
    labs = {path.stem: path for path in _labs(options)}
    for path in [path for path in reading.lectures() if path.stem in labs]:
        deck = reading.read(path, notebook.read(labs[path.stem]))
        (options.out / f"{deck.name}.html").write_text(page.page(deck), encoding="utf-8")
        (options.out / f"{deck.name}.pptx").write_bytes(presentation.presentation(deck))
        print(f"{options.out / deck.name}: {len(deck.slides)} slides, {deck.minutes:g} minutes")
    return 0


def run(options: argparse.Namespace) -> int:
    """Execute notebooks from top to bottom; print one line for each."""
    from utils.course.execute import execute

    failed = 0
    for path in _labs(options):
        result = execute(path, store=options.store, only_new=options.new, timeout=options.timeout)
        print(result, flush=True)
        failed += not result.ok
    return 1 if failed else 0


def _labs(options: argparse.Namespace) -> list[Path]:
    """Return the notebooks that the user named, or else all solutions.

    The user names a lab by a path, a number or a name, as in grading.
    """
    from utils.course.notebook import NotebookError, is_named, notebooks

    solutions = notebooks(SOLUTIONS)

    def named(name: Path) -> Path:
        if name.is_file():
            return name
        return next((path for path in solutions if is_named(str(name), path)), name)

    paths = [named(name) for name in options.notebooks]
    if missing := [str(path) for path in paths if not path.is_file()]:
        raise NotebookError(f"there is no notebook {', '.join(missing)}")
    if not paths and not solutions:
        raise NotebookError(f"there is no notebook in {SOLUTIONS}")
    return paths or solutions


def lint(options: argparse.Namespace) -> int:
    """Check markers, ids and outputs of the notebooks, and the prose of all files."""
    from utils.course import prose
    from utils.course.lint import lint
    from utils.course.notebook import LABS, notebooks

    problems = [*lint(), *prose.problems()]
    for problem in problems:
        print(problem)
    count = len(notebooks(SOLUTIONS)) + len(notebooks(LABS))
    print(f"{count} notebooks, {len(problems)} problems", file=sys.stderr)
    return 1 if problems else 0


def grade(options: argparse.Namespace) -> int:
    """Grade a folder or zip of submissions: write gradebook, feedback and summary.

    Status 0: all were graded. Status 1: some could not be graded. Status 130: Ctrl-C stopped it.
    """
    from utils.grading.command import main
    from utils.grading.grading_options import GradingOptions

    return main(GradingOptions.from_arguments(options, options.line))


def gradescope(options: argparse.Namespace) -> int:
    """Write the zip of an autograder for Gradescope, for each lab that you name."""
    from utils.grading.gradescope import build

    for path in _labs(options):
        zipped = build(path, options.out)
        print(f"wrote {zipped} ({zipped.stat().st_size / 1e6:.1f} MB)")
    return 0


def statistics(options: argparse.Namespace) -> int:
    """Write a notebook about the class, without names, into the results folder.

    If the notebook exists, it is run again, with all changes that you made in it. With --mistakes,
    print instead how many students met each mistake that the checks can name.
    """
    from utils.grading import statistics

    if not options.mistakes:
        return statistics.main(options.results)
    from utils.grading import named_mistakes

    found = statistics.read(options.results)
    print(named_mistakes.table(found, found.labs))
    return 0


def rerun(options: argparse.Namespace) -> int:
    """Run a notebook of a result again, in the sandbox, because it has a student's code.

    Status 0: every check passed. Status 1: a check did not pass.
    """
    from utils.grading.grading_options import SandboxOptions
    from utils.grading.notebook_run import rerun as main

    return main(options.notebook, SandboxOptions.from_arguments(options))


def bench(options: argparse.Namespace) -> int:
    """Measure communication on this machine with mpi, mpi4py and gloo."""
    from utils.jobs.bench_ranks import main

    return main(options)


def forecast(options: argparse.Namespace) -> int:
    """Say what a recorded run would do on another machine with more ranks.

    Status 0: there is an answer. Status 2: there is none, and the message says why.
    """
    from utils.forecast.command import main

    return main(options)


def lab(options: argparse.Namespace) -> int:
    """Open the labs in JupyterLab; all other words, such as --port=8899, are for JupyterLab."""
    from utils.jobs.open_labs import main

    return main(options.others)


def doctor(options: argparse.Namespace) -> int:
    """Find what on this machine would keep the labs from running, and say what helps.

    Status 0: the labs run, maybe with warnings. Status 1: you have to repair something.
    """
    from utils.doctor import main

    return main(options.json, options.timeout)


# --- the command line ----------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line; each command has its function as `command`."""
    top = argparse.ArgumentParser(
        prog="ddl-labs",
        description="The commands of the labs: lab and doctor, and those of authors.",
    )
    commands = top.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, function: Command, **how: bool) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=function.__doc__, description=function.__doc__, **how)
        sub.set_defaults(command=function)
        return sub

    sub = add("release", release)
    _add_check(sub)
    sub.add_argument("--solutions", type=Path, default=SOLUTIONS, metavar="FOLDER")
    sub.add_argument("--labs", type=Path, default=ROOT / "labs", metavar="FOLDER")
    _add_check(add("map", write_parts))
    sub = add("dist", dist)
    bundles = ("course", "afternoon", "assignment", "debugging")
    sub.add_argument("bundle", nargs="?", choices=bundles, default="course")
    _add_out(sub, "dist")
    sub = add("student-repo", student_repo)
    sub.add_argument("folder", type=Path, metavar="FOLDER", help="a new folder, or one made before")
    text = "with the packed answers that `use_model` reads, which a student could unpack"
    sub.add_argument("--models", action="store_true", help=text)
    for name, function in (("figures", figures), ("pack", pack)):
        sub = add(name, function)
        _add_notebooks(sub)
        _add_out(sub, f"build/{name}")
    if find_spec("utils.course.lectures"):  # the students' zip doesn't have it
        sub = add("slides", slides)
        _add_notebooks(sub)
        _add_out(sub, "build/slides")
    sub = add("run", run)
    _add_notebooks(sub)
    sub.add_argument("--store", action="store_true", help="keep the outputs in the notebook")
    text = "with --store: keep only the outputs of cells that were never executed"
    sub.add_argument("--new", action="store_true", help=text)
    sub.add_argument("--timeout", type=float, default=120, metavar="S", help="for each cell: 120")
    add("lint", lint)
    if find_spec("utils.grading"):  # the students' zip doesn't have it
        from utils.grading import grading_options

        grading_options.add_options(add("grade", grade), ROOT)
        grading_options.add_rerun_options(add("rerun", rerun))
        sub = add("gradescope", gradescope)
        _add_notebooks(sub)
        _add_out(sub, "dist")
        sub = add("statistics", statistics)
        sub.add_argument("results", type=Path, metavar="RESULTS", help="what `grade -o` wrote")
        text = "list each mistake that the checks name, and how many students met it"
        sub.add_argument("--mistakes", action="store_true", help=text)
    add("lab", lab, allow_abbrev=False)
    sub = add("doctor", doctor)
    sub.add_argument("--json", action="store_true", help="print the report as JSON")
    sub.add_argument("--timeout", type=float, default=60, metavar="S", help="for each probe: 60")
    add_bench_options(add("bench", bench))
    _add_forecast(add("forecast", forecast))
    return top


def _add_forecast(sub: argparse.ArgumentParser) -> None:
    # Here and not in utils.forecast, because importing NumPy would slow every command down.
    what = "what ranks.timeline().run().save(RUN) wrote; without RUN, the course's example"
    sub.add_argument("run", type=Path, nargs="?", metavar="RUN", help=what)
    sub.add_argument("--machine", default="cluster", help="a name of the catalog; 'list' shows it")
    sub.add_argument("--machines", type=Path, metavar="FILE", help="your machines, as TOML")
    sub.add_argument("--ranks", type=int, metavar="N", help="all devices of the machine")
    sub.add_argument("--grow", metavar="0,2", help="the recorded ranks of the group that grows")
    sub.add_argument("--strong", action="store_true", help="the ranks share the recorded work")
    sub.add_argument("--steps", type=int, default=100_000, metavar="N", help="of the training")


def _add_check(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--check", action="store_true", help="write nothing; status 1 on drift")


def _add_out(sub: argparse.ArgumentParser, folder: str) -> None:
    default = ROOT / folder
    sub.add_argument("-o", "--out", type=Path, default=default, metavar="FOLDER", help=f"{folder}/")


def _add_notebooks(sub: argparse.ArgumentParser) -> None:
    help = "a file, or a lab: 01, 01_c10d"
    sub.add_argument("notebooks", type=Path, nargs="*", metavar="NOTEBOOK", help=help)


def _write_utf8() -> None:
    """Let Windows write the signs ✓ and → to files and pipes, too, not only to its terminal."""
    for stream in (sys.stdout, sys.stderr):
        if sys.platform == "win32" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return its exit status."""
    _write_utf8()
    options, options.others = parser().parse_known_args(arguments)
    if options.others and options.command is not lab:
        parser().error(f"unrecognized arguments: {' '.join(options.others)}")
    options.line = shlex.join(["ddl-labs", *(sys.argv[1:] if arguments is None else arguments)])
    try:
        command: Command = options.command
        return command(options)
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        print(
            f"this command needs {error.name}. Install it with the extra '{extra}':\n"
            f"  pip install -e '.[{extra}]' -c .ci/constraints.txt",
            file=sys.stderr,
        )
        return 2
    except (CourseError, RanksError) as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
