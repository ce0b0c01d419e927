"""Ranks for a notebook: engines that mpiexec starts, processes without MPI, or threads.

    from utils import cluster
    ranks = cluster.start(4)        # now `%%px` runs a cell on four ranks
    ranks.where()                   # which line is each rank on, even when it is stuck inside C?
    ranks.restart()                 # fresh ranks, even after a deadlock or a crash
    ranks.stop()

No rank outlives the kernel, whatever ends the kernel: see `utils.jobs.watchdog`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from IPython import get_ipython

from utils import timeline
from utils.cluster import busy, network_arguments, notebook_words, questions
from utils.cluster.failure import CellFailed, RanksLostError
from utils.cluster.questions import Reply, target_of, texts
from utils.jobs import DeadRankError, NeedsProcesses, RanksError
from utils.jobs.box_plan import BoxPlan
from utils.jobs.mpi_job import Python
from utils.jobs.site import Launcher, find_launcher
from utils.jobs.start_plan import Plan, usable_cores
from utils.jobs.thread_plan import ThreadPlan, plan_of, refuse_on_any_rank

if TYPE_CHECKING:
    import ipyparallel as ipp

    from utils.cluster.running import Running

__all__ = [
    "CellFailed",
    "DeadRankError",
    "Description",
    "Launcher",
    "NeedsProcesses",
    "Ranks",
    "RanksError",
    "RanksLostError",
    "Reply",
    "find_launcher",
    "start",
    "usable_cores",
]

_current: Ranks | None = None

JOIN = 'import torch.distributed as dist\ndist.init_process_group("mpi")'


def start(
    n: int,
    *,
    where: str | None = None,
    threads: int = 1,
    bind: bool | None = None,
    timeout: float = 20.0,
    env: dict[str, str] | None = None,
    launcher: str | None = None,
    partition: str | None = None,
    time: str | int | None = None,
    nodes: int | None = None,
    fault_tolerant: bool = False,
) -> Ranks:
    """Start `n` MPI ranks and make `%%px` run cells on them.

    Older ranks of this kernel are stopped first, so running the cell again gives fresh ranks.

    Args:
        n: number of ranks.
        where: "processes" starts MPI ranks. "here" starts ranks that are threads of this process
            and take turns, which needs no MPI. They show everything but speed, real overlap, and
            processes that die. "boxes" starts processes without MPI, whose messages this process
            carries. None starts the ranks here if this machine has no MPI or can't fork.
            The environment variable DDL_LABS_WHERE has the same values, for all notebooks.
        threads: number of threads of each rank (OMP_NUM_THREADS and similar variables).
        bind: keep each rank on its own cores. With None, this happens if there are enough cores
            (n * threads <= cores) and no other job may use them.
        timeout: seconds that a communication of the backend waits before it reports a deadlock.
        env: further environment variables of the ranks.
        launcher: "mpiexec" starts the ranks here or over the nodes of the present Slurm job;
            "srun" does the same with Slurm's launcher; "slurm" starts them as a separate Slurm
            job. None lets the surroundings or the site decide; `describe` says how, and why.
        partition: partition of the separate Slurm job.
        time: time limit of this job, in minutes or in a form that sbatch understands.
        nodes: number of nodes of this job.
        fault_tolerant: let the other ranks survive when one dies. They communicate again after
            `torch_mpi.survivors.shrink()`, and `%%px` and `ask` then leave out the dead ranks.
            This needs Open MPI 5 on one host.

    Raises:
        TypeError, ValueError: the arguments can't work.
        NeedsProcesses: ranks in this process can't do what the arguments ask for.
        RanksError: there is no usable mpiexec, this process is a rank, Slurm refuses the job, the
            job can never start, or the ranks didn't start within 60 s.
    """
    refuse_on_any_rank()
    notebook_words.use()
    job: dict[str, Any] = {"launcher": launcher, "partition": partition, "time": time}
    job |= {"nodes": nodes, "fault_tolerant": fault_tolerant}
    plan = plan_of(where, n, threads=threads, timeout=timeout, bind=bind, env=env, **job)
    if _current is not None:
        _current.stop()
    ranks = Ranks(plan)
    _say(plan.greeting())
    return ranks


class Ranks:
    """The running ranks of a notebook, made by `start`; a context manager that stops them.

    Attributes:
        n: number of ranks.
        client: ipyparallel's `Client`.
        view: the client's `DirectView` of all ranks.
        notes: sentences that a user should read about this start (root, more ranks than cores).
    """

    def __init__(self, plan: Plan | ThreadPlan | BoxPlan):
        global _current
        self.n = plan.n
        self.notes = plan.notes
        self._plan = plan
        self._owner = os.getpid()
        self._up: Running | None = None
        self._lost: set[str] = set()
        self._bring_up()
        _current = self

    @property
    def have_mpi(self) -> bool:
        """Return whether these ranks are processes of MPI."""
        return isinstance(self._plan, Plan)

    def _bring_up(self) -> None:
        self._up = _start(self._plan)
        from utils.cluster import px

        self.client: ipp.Client = self._up.client
        self.view: ipp.DirectView = self.client[:]
        self.view.block = True
        px.prepare(self)

    def running(self) -> Running:
        """Return the controller, the client and the processes of these ranks.

        Raises:
            RanksError: the ranks were stopped.
        """
        if self._up is None:
            raise RanksError(
                f"these {self.n} ranks were stopped. Run the cell with "
                f"`ranks = cluster.start({self.n})` again, and then the cells below it."
            )
        return self._up

    def restart(self) -> None:
        """Replace all ranks by fresh ranks, even if they are dead or stuck inside MPI.

        The client, its views and `%%px` stay valid. The ranks' variables are lost, so run the
        cells that make them again.

        Raises:
            RanksError: the fresh ranks did not start.
        """
        from utils.cluster import lost_names

        up = self.running()
        self._lost |= lost_names.of_cells(up.folder)
        if not up.replace_ranks():
            # The controller is gone, or it did not notice that the ranks are gone.
            self._up = None
            up.close()
            self._bring_up()
        self.view.targets = self.client.ids
        said = self._plan.greeting(fresh=True)
        _say(f"{said} {lost_names.AFTER_A_RESTART}" if self._lost else said)

    def lost_names(self) -> set[str]:
        """Return the names that cells had made on ranks that `restart` has replaced."""
        return set(self._lost)

    def stop(self) -> None:
        """End the ranks and everything that was started for them; a second call does nothing."""
        global _current
        up = self._up
        if up is None or os.getpid() != self._owner:
            return
        self._up = None
        up.close()
        from utils.cluster import px

        px.retire(self.n)
        if _current is self:
            _current = None

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<Ranks: {self.n} {'up' if self._up else 'stopped'}>"

    def interrupt(self) -> None:
        """Send SIGINT to every rank, as Ctrl-C would.

        A rank inside C, such as in mpi4py's `Recv`, ignores the signal. Call `restart` then.
        """
        self.running().signal("SIGINT")

    def network(
        self,
        speed: str | None = None,
        *,
        latency: float | None = None,
        bandwidth: float | None = None,
        nodes: Sequence[Sequence[int]] | None = None,
        inside: str | None = None,
        inside_latency: float | None = None,
    ) -> None:
        """Slow the ranks' messages down to the speed of a network; `network("off")` ends it.

        Every message, even inside a collective, takes `latency + bytes / bandwidth` and waits for
        the messages before it. A message within a node waits only for others within this node.
        The slow network stays until you change it or restart the ranks.

        Args:
            speed: "1gbit", "100mbit", ...; sets a latency of 50 µs if you give no other latency.
            latency: seconds that every message takes at least, one way.
            bandwidth: bytes per second that each rank can send, and receive.
            nodes: the ranks of each node, such as `[[0, 1], [2, 3]]`. Each rank is in one node, and
                the slow network connects the nodes.
            inside: the speed within a node, such as "10gbit"; by default, this machine's speed.
            inside_latency: seconds within a node; by default, this machine's latency.

        Raises:
            TypeError, ValueError: the arguments make no sense.
        """
        size = len(self.running().living())
        network = network_arguments.parse(
            speed, latency, bandwidth, nodes, inside, inside_latency, size
        )
        values = None if network is None else network.to_dict()
        self.running().use_network(values)
        which = f"a slow network ({network})" if network else "this machine's own network"
        _say(f"The ranks now use {which}.")

    def say_if_busy(self) -> None:
        """Print a line if other programs use so much of the machine that times mislead."""
        shares = self.ask_or_raise("utils.cluster.busy:processor_share")
        if warning := busy.busy_warning(shares):
            print(warning)

    def timeline(self, title: str | None = None, *, simple: bool = False) -> timeline.Timeline:
        """Return a picture of what the ranks did in the last cell, a `utils.timeline.Timeline`.

        The picture also has `.records`, `.totals`, and `.save(path)`.

        Args:
            title: title of the figure.
            simple: show only bars and arrows; "more" has the rest.
        """
        return timeline.of(self, title, simple)

    def ask_or_raise(self, target: str | Callable[..., Any], **kwargs: Any) -> list[Any]:
        """Call `ask` with the same arguments and return the values of its replies.

        Raises:
            RanksError: a rank has no value; the error is the first such rank's.
        """
        replies = self.ask(target, **kwargs)
        for reply in replies:
            if reply.status != "ok":
                kind = DeadRankError if reply.lost else RanksError
                raise kind(f"rank {reply.rank}: {reply.error}")
        return [reply.value for reply in replies]

    def describe(self) -> Description:
        """Return a table of the ranks: where each runs, on what, with which MPI library."""
        up = self.running()
        return Description(up.facts, [*self.notes, *up.notes()])

    def where(self, timeout: float = 2.0) -> None:
        """Print the line that each rank is on, even if the rank is stuck inside C.

        Args:
            timeout: seconds to wait for a rank's stack.
        """
        for line in self.running().where(timeout):
            print(line)

    def ask(
        self,
        target: str | Callable[..., Any],
        *,
        timeout: float = 60.0,
        each: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> list[Reply]:
        """Run a function on every rank and return one Reply per rank, in rank order.

        Each rank calls `function(user_ns, rank=…, **kwargs)` with the namespace of the rank's
        cells. Arguments and results travel as JSON text. An error on a rank is a Reply, never an
        exception here. Dead `fault_tolerant` ranks are left out.

        Args:
            target: a function that a module defines at its top level, or its name as
                "package.module:function", so that the kernel need not import the module.
            timeout: seconds until the ranks that have not answered are interrupted. They are
                interrupted earlier if one rank failed 3 s ago. After the interrupt, `ask` waits
                at most 10 s more for their answers.
            each: one dict per rank, by its number at the start, with arguments that no other rank
                gets, such as the rank's secret.
            kwargs: arguments that every rank gets.

        Raises:
            ValueError: the target or the arguments can't be sent, `each` is not one dict per rank,
                or a name is both in `each` and in kwargs.
            RanksError: the ranks were stopped.
            RanksLostError: a rank could not be stopped, and still runs an earlier cell.
            AskStopped: the user pressed the stop button; it is a KeyboardInterrupt.
        """
        target = target_of(target)
        return self.running().reply(target, texts(self.n, target, kwargs, each), timeout)

    @contextlib.contextmanager
    def apart(self) -> Iterator[questions.Ranks]:
        """Yield as many ranks for a check's own code, such as a reference.

        In grading, an answer could change what the reference gives on the same ranks. So these are
        threads of the kernel, with a process group, if the ranks are in boxes. Otherwise they are
        the same ranks.
        """
        if not isinstance(self._plan, BoxPlan):
            yield self
            return
        up = _start(ThreadPlan(self.n, timeout=self._plan.timeout))
        try:
            up.client[:].execute(JOIN, block=True)
            yield Apart(up)
        finally:
            up.close()


class Apart:
    """Ranks that only answer questions, see `Ranks.apart`."""

    def __init__(self, up: Running):
        self.n = up.n
        self._up = up

    def ask(
        self,
        target: str | Callable[..., Any],
        *,
        timeout: float = 60.0,
        each: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> list[Reply]:
        """Run a function on every rank, as `Ranks.ask` does."""
        target = target_of(target)
        return self._up.reply(target, texts(self.n, target, kwargs, each), timeout)

    def apart(self) -> contextlib.AbstractContextManager[questions.Ranks]:
        """Return these ranks."""
        return contextlib.nullcontext(self)


def _start(plan: Plan | ThreadPlan | BoxPlan) -> Running:
    """Start the ranks of a plan. Only this function knows what kinds of ranks there are."""
    if isinstance(plan, ThreadPlan):
        from utils.cluster.here.thread_ranks import Threads

        return Threads(plan)
    if isinstance(plan, BoxPlan):
        from utils.cluster.boxes.box_ranks import Boxes

        return Boxes(plan)
    # The fork server imports what the ranks need while this process imports ipyparallel.
    python = Python(plan)
    from utils.cluster.ipp_cluster import Processes

    return Processes(plan, python)


class Description:
    """A table of the ranks, as text and HTML; `records` has one dict per rank."""

    def __init__(self, facts: list[dict[str, Any]], notes: list[str]):
        self.notes = notes
        self.records = [
            {
                "rank": fact["rank"],
                "host": fact["host"],
                "cores": _ranges(fact["cores"]),
                "NUMA": _ranges(fact["numa"]),
                "threads": fact["threads"],
                "MPI library": fact["library"],
                "pid": fact["pid"],
            }
            for fact in facts
        ]

    def __repr__(self) -> str:
        return "\n".join([self._table("simple"), *self.notes])

    def _repr_html_(self) -> str:
        return self._table("html") + "".join(f"<p>{note}</p>" for note in self.notes)

    def _table(self, kind: str) -> str:
        from tabulate import tabulate  # here, because this import takes a tenth of a second

        return str(tabulate(self.records, headers="keys", tablefmt=kind))


def _ranges(numbers: list[int]) -> str:
    """Return [0, 1, 2, 5] as "0-2,5"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else f"{p[0]}" for p in parts)


def _say(text: str) -> None:
    if get_ipython() is not None:
        print(text)


@atexit.register
def _stop_at_exit() -> None:
    if _current is not None:
        # The interpreter is going down; the watchdog ends whatever can't be stopped cleanly here.
        with contextlib.suppress(Exception):
            _current.stop()
