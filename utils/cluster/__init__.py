"""MPI ranks for a notebook: engines of ipyparallel that mpiexec starts.

    from utils import cluster
    ranks = cluster.start(4)        # now `%%px` runs a cell on four MPI ranks
    ranks.where()                   # which line is each rank on, even when it is stuck inside C?
    ranks.restart()                 # fresh ranks, also after a deadlock or a crash
    ranks.stop()

No rank outlives the kernel, whatever ends it: see `utils.jobs.watchdog`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from IPython import get_ipython

from utils import timeline
from utils.cluster import network_arguments, notebook_words
from utils.cluster.failure import CellFailed, RanksLostError
from utils.cluster.questions import Question, Reply, target_of, texts
from utils.jobs import DeadRankError, RanksError
from utils.jobs.mpi_job import Python
from utils.jobs.site import Launcher, find_launcher
from utils.jobs.start_plan import Plan, refuse_on_a_rank, usable_cores

if TYPE_CHECKING:
    import ipyparallel as ipp

    from utils.cluster.ipp_cluster import Running

__all__ = [
    "CellFailed",
    "DeadRankError",
    "Description",
    "Launcher",
    "Ranks",
    "RanksError",
    "RanksLostError",
    "Reply",
    "find_launcher",
    "start",
    "usable_cores",
]

_current: Ranks | None = None

# Below this share of a processor a picture of times may turn over.
_ENOUGH = 0.6


def start(
    n: int,
    *,
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

    Ranks that this kernel already has are stopped first: running the cell again gives fresh ones.

    Args:
        n: number of ranks.
        threads: number of threads of each rank (OMP_NUM_THREADS and its like).
        bind: keep each rank on its own cores; None: if there are enough, n * threads <= cores, and
            no other job may use them.
        timeout: seconds that a communication of the backend waits before it reports a deadlock.
        env: further environment variables of the ranks.
        launcher: "mpiexec", here or over the nodes of the present Slurm job; "srun", the same with
            Slurm's own launcher; "slurm", as a Slurm job of their own. None: chosen by what this
            process runs in, or by the site; `describe` says which one it was, and why.
        partition: of a Slurm job of their own.
        time: limit of this job, in minutes, or as sbatch takes it.
        nodes: number of nodes of this job.
        fault_tolerant: the other ranks survive when one dies, and `torch_mpi.survivors.shrink()`
            has them communicate again; `%%px` and `ask` then leave out the dead ranks. It needs
            Open MPI 5 on one host.

    Raises:
        TypeError, ValueError: the arguments can't work.
        RanksError: there is no usable mpiexec, this process is a rank, Slurm refuses the job, the
            job can never start, or the ranks have not started within 60 s.
    """
    refuse_on_a_rank()
    notebook_words.use()
    plan = Plan(n, threads, bind, timeout, env, launcher, partition, time, nodes, fault_tolerant)
    if _current is not None:
        _current.stop()
    ranks = Ranks(plan)
    _say(f"{n} MPI ranks are up." if n > 1 else "1 MPI rank is up.")
    return ranks


class Ranks:
    """MPI ranks in use; a context manager that stops them. Made by `start`.

    Attributes:
        n: number of ranks.
        client: ipyparallel's `Client`.
        view: its `DirectView` of all ranks.
        notes: what a user should know about this start (root, more ranks than cores).
    """

    def __init__(self, plan: Plan):
        global _current
        self.n = plan.n
        self.notes = plan.notes
        self._plan = plan
        self._owner = os.getpid()
        self._up: Running | None = None
        self._lost: set[str] = set()
        self._bring_up()
        _current = self

    def _bring_up(self) -> None:
        # The fork server imports what the ranks need while this process imports ipyparallel.
        python = Python(self._plan)
        from utils.cluster import px
        from utils.cluster.ipp_cluster import Running

        self._up = Running(self._plan, python)
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
                f"`ranks = cluster.start({self.n})` again, and those below it."
            )
        return self._up

    def restart(self) -> None:
        """Replace all ranks by fresh ones, even if they are dead or stuck inside MPI.

        The client, its views and `%%px` stay valid. What the ranks knew is gone, so rerun the
        cells that set them up.

        Raises:
            RanksError: the fresh ranks did not start.
        """
        from utils.cluster import lost_names

        up = self.running()
        self._lost |= lost_names.of_cells(up.folder)
        if not up.replace_ranks():
            # The controller is gone, or did not notice that the ranks are.
            self._up = None
            up.close()
            self._bring_up()
        self.view.targets = self.client.ids
        up_again = f"{self.n} fresh MPI ranks are up." if self.n > 1 else "A fresh MPI rank is up."
        _say(f"{up_again} {lost_names.AFTER_A_RESTART}" if self._lost else up_again)

    def lost_names(self) -> set[str]:
        """Return the names that cells had made on ranks that `restart` has replaced."""
        return set(self._lost)

    def stop(self) -> None:
        """End the ranks and everything that was started for them. Quiet; twice is once."""
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

        A rank that waits inside C, in mpi4py's `Recv` say, does not notice: `restart` helps.
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
        """Slow the ranks' communications down to a network's; `network("off")` ends it.

        Every message, even inside a collective, takes `latency + bytes / bandwidth`, and waits for
        the messages before it; within a node, for the messages within the node. The network holds
        until it is changed, or the ranks are restarted.

        Args:
            speed: "1gbit", "100mbit", ...; the latency is then 50 µs, if no other is given.
            latency: seconds that every message takes at least, one way.
            bandwidth: bytes per second that each rank can send, and receive.
            nodes: the ranks of each node, such as `[[0, 1], [2, 3]]`: the network is then the one
                between them, and each rank is in one node.
            inside: the speed within a node, such as "10gbit"; without it, this machine's.
            inside_latency: seconds, within a node; without it, this machine's.

        Raises:
            TypeError, ValueError: the arguments make no sense.
        """
        size = len(self.running().living())
        network = network_arguments.parse(
            speed, latency, bandwidth, nodes, inside, inside_latency, size
        )
        values = None if network is None else network.to_dict()
        self.ask_or_raise("utils.cluster.rank_side:use_network", network=values)
        _say(f"The network: {network or 'that of this machine'}.")

    def say_if_busy(self) -> None:
        """Print a line if other programs take so much of the machine that times mislead."""
        shares = self.ask_or_raise("utils.cluster.rank_side:processor_share")
        if warning := busy_warning(shares):
            print(warning)

    def timeline(self, title: str | None = None) -> timeline.Timeline:
        """Return a picture of what the ranks did in the last cell, a `utils.timeline.Timeline`.

        It also has `.records`, `.totals`, and `.save(path)`.

        Args:
            title: of the figure.
        """
        return timeline.of(self, title)

    def ask_or_raise(self, target: str | Callable[..., Any], **kwargs: Any) -> list[Any]:
        """Return the values of `ask`, whose arguments this method takes.

        Raises:
            RanksError: a rank has no value; it is the first such rank's error.
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
        """Print for each rank the line it is on, even if it is stuck inside C.

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
        exception here. Of `fault_tolerant` ranks, only those that live are asked.

        Args:
            target: a function that a module defines at its top level, or its name as
                "package.module:function", which spares the kernel the import.
            timeout: seconds until the ranks that have not answered are interrupted. They are
                interrupted earlier if one rank failed 3 s ago. With what they say then, `ask`
                takes at most 10 s more.
            each: one dict per rank, by its number at the start, of arguments that no other rank
                gets: a rank's own secret.
            kwargs: arguments that every rank gets.

        Raises:
            ValueError: the target or the arguments can't be sent, `each` is not one dict per rank,
                or a name is both in `each` and in kwargs.
            RanksError: the ranks were stopped.
        """
        target = target_of(target)
        arguments = texts(self.n, target, kwargs, each)
        up = self.running()
        replies = Question(up, target, arguments, of_ours=False).answers(timeout)
        if any(reply.status != "ok" for reply in replies):
            up.meet_again()
            return replies
        left = up.unreceived([reply.balance for reply in replies])
        return [replace(reply, unreceived=left.get(reply.rank, ())) for reply in replies]


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
        from tabulate import tabulate  # a tenth of a second that `import cluster` need not take

        return str(tabulate(self.records, headers="keys", tablefmt=kind))


def busy_warning(shares: Sequence[float]) -> str:
    """Return what to say of the ranks' shares of a processor; "" on a quiet machine."""
    share = min(shares)
    if share >= _ENOUGH:
        return ""
    return (
        f"This machine is busy: a rank gets a processor for {100 * share:.0f} % of the time that "
        "it asks for. Times that were measured now can mislead. When less is going on, run the "
        "cell that measures again, and then this one."
    )


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
        # The interpreter is going down; what can't be stopped cleanly is the watchdog's.
        with contextlib.suppress(Exception):
            _current.stop()


# Signals are sent by name, as ranks may run on another system than the kernel; the name must exist.
assert hasattr(signal, "SIGUSR1"), "the course needs Linux or macOS (on Windows: WSL)"
