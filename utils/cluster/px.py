"""A ``%%px`` that always returns, with one explanation instead of one traceback per rank.

`prepare` installs it in the notebook, with everything else that `cluster.start` changes there.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import re
import sys
import threading
from collections.abc import Callable, Iterator
from time import monotonic  # by name, because a rank inside the kernel may replace it
from typing import TYPE_CHECKING, Any

import ipyparallel as ipp
from ipyparallel.client.asyncresult import AsyncResult
from ipyparallel.client.client import ExecuteReply
from ipyparallel.client.magics import ParallelMagics, exec_args, output_args
from ipyparallel.error import CompositeError, RemoteError
from IPython import get_ipython
from IPython.core import magic_arguments
from IPython.core.error import UsageError

from torch_mpi.lines import wrapped
from torch_mpi.protocol.diagnosis import names
from utils.cluster import left_out, lost_names
from utils.cluster.failure import CellLeftOut, Outcome, RanksLostError, ended_by_slurm
from utils.cluster.live_line import LiveLine
from utils.cluster.notebook_words import (
    FRESH_RANKS,
    explained,
    open_task,
    running_cell,
    show_errors,
    shown_as,
    stopped_here,
)
from utils.cluster.questions import BALANCE, FIRST_LINE
from utils.cluster.rank_output import RankOrder, RankOutput
from utils.cluster.stop_button import stop_button
from utils.jobs import RanksError

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from utils.cluster import Ranks

# Seconds that the other ranks get to end by themselves once a rank has failed, that an interrupted
# rank gets to return, and that pending output gets to arrive.
AFTER_AN_ERROR = 4.0
AFTER_AN_INTERRUPT = 1.0
# An interrupt can be lost, because a rank that has not begun the cell ignores it, and Python drops
# a KeyboardInterrupt inside a finalizer.
INTERRUPTS = 2
FOR_OUTPUT = 1.0
# Seconds in which the controller may still report which rank of an ended job died.
ON_ITS_WAY = 1.0

_HELP = re.compile(r"\?{1,2}[\w.%]+|[\w.%]+\?{1,2}|help\([\w.]*\)")
_MISSING = re.compile(r"name '(\w+)' is not defined")


class RanksMagics(ParallelMagics):
    """ipyparallel's magics for the ranks of a notebook."""

    def __init__(self, shell: InteractiveShell, ranks: Ranks):
        super().__init__(shell, ranks.view)
        self.ranks = ranks
        self._seen_over: float | None = None
        # The source of each cell by its number; "" if two different sources had the same number.
        self._cells: dict[int, str] = {}
        self._limit: float | None = None
        self._asks_for_help = False  # so all ranks say the same
        self._alone = False  # whether a cell shows only the output of its ranks

    @magic_arguments.magic_arguments()
    @exec_args
    @output_args
    @magic_arguments.argument("--local", action="store_const", const=True)
    @magic_arguments.argument(
        "--timeout",
        type=float,
        help="seconds that a communication of this cell waits before it reports a deadlock",
    )
    def cell_px(self, line: str = "", cell: str = "") -> Any:
        """Run the cell on the ranks, as ipyparallel does, if need be with its own ``--timeout``."""
        given = magic_arguments.parse_argstring(self.cell_px, line)
        self._limit = given.timeout
        self._asks_for_help = bool(_HELP.fullmatch(cell.strip()))
        if self._limit is not None and not 0 < self._limit < math.inf:
            raise UsageError(f"%%px --timeout {self._limit:g}: give finite seconds above 0")
        whole = running_cell(self.shell)
        self._alone = whole.lstrip().startswith("%%px") and "--local" not in line
        try:
            return super().cell_px(line, self._numbered(cell))
        finally:
            self._limit = None
            self._alone = False

    def _numbered(self, cell: str) -> str:
        """Return the cell with a first line, instead of its magic, that has the cell's number."""
        if cell.startswith("%%"):  # another magic, which must stay in the first line
            return cell
        # Newer versions of IPython increase execution_count before a cell runs, so don't use it.
        number = len(self.shell.history_manager.input_hist_raw) - 1
        sent = FIRST_LINE.format(number) + cell
        self._cells[number] = sent if self._cells.get(number, sent) == sent else ""
        return sent

    def parallel_execute(
        self,
        cell: str,
        block: bool | None = None,
        groupby: str = "type",
        save_name: str | None = None,
        stream_output: bool | None = None,
        progress_after: float | None = None,
        signal_on_interrupt: int | None = None,
    ) -> AsyncResult | None:
        """Run a cell on the ranks.

        Raises:
            CellFailed: the cell failed on a rank, was interrupted, or has dead ranks.
        """
        self._refuse_without_ranks()
        self.ranks.running().refuse_if_stuck()
        self._limit_next_cell()
        if not (self.view.block if block is None else block):
            return super().parallel_execute(cell, block=False, save_name=save_name)
        stream = self.stream_output if stream_output is None else stream_output
        stream = stream and not _is_captured()
        live = self._live_line() if self._alone else None
        with stop_button() as presses, contextlib.ExitStack() as streaming:
            with nothing_sent_yet(self.ranks.client):
                result = super().parallel_execute(cell, block=False, save_name=save_name)
                outputs = streaming.enter_context(self._streamed(result)) if stream else {}
            self._wait(result, presses, live)
            if presses:
                self._interrupt(result)
            result.wait_for_output(FOR_OUTPUT)
            streaming.close()
            if live is not None and live.remove(more=_has_output(result)):
                for output in outputs.values():
                    output.show_again()
            if not stream:
                self._show(result, groupby)
            self._raise_if_failed(result, cell, bool(presses))
        self._tell_of_unreceived(result)
        return None

    def _limit_next_cell(self) -> None:
        """Tell the ranks how many seconds the cell may take, if it says so."""
        if self._limit is not None:
            here = "__import__('utils.cluster.rank_side', fromlist=['limit_next_cell'])"
            self.view.execute(f"{here}.limit_next_cell({self._limit})", silent=True, block=False)

    @contextlib.contextmanager
    def _streamed(self, result: AsyncResult) -> Iterator[dict[int, RankOutput]]:
        """Stream what ranks print, without tracebacks, because one traceback comes at the end.

        Yields:
            What each rank has shown in this notebook, by its number.
        """
        show = result._iopub_streaming_output_callback
        outputs: dict[int, RankOutput] = {}
        first = min(result._targets)
        in_notebook = getattr(self.shell, "kernel", None) is not None
        begun = False  # before, ipyparallel repeats what has come; but all of it is still to come

        def take(rank: int, future: Any, message: dict[str, Any]) -> None:
            if not begun or message["header"]["msg_type"] == "error":
                return
            if self._asks_for_help and rank != first:
                return
            order.add(rank, future, message)

        def show_output(rank: int, future: Any, message: dict[str, Any]) -> None:
            if not in_notebook:
                show(rank, future, message)
                return
            if rank not in outputs:
                key = f"{future.msg_id}-{id(outputs)}"
                result_of = functools.partial(show, rank, future)
                outputs[rank] = RankOutput(rank, key, future.output.metadata, result_of)
            outputs[rank].show(message)

        order = RankOrder(len(result._targets), show_output)
        result._iopub_streaming_output_callback = take
        with result.stream_output():
            begun = True
            try:
                yield outputs
            finally:
                order.release()

    def _live_line(self) -> LiveLine:
        """Return the line that says what the ranks are doing while this cell runs."""
        up = self.ranks.running()
        targets = self.view.targets
        asked = set(targets) if isinstance(targets, list) else {targets}
        own = {rank: number for number, rank in enumerate(up.living()) if rank in asked}
        return LiveLine(up.folder, own)

    def _tell_of_unreceived(self, result: AsyncResult) -> None:
        data = [answer.output.metadata["data"] or {} for _, answer in _answers(result)]
        left = self.ranks.running().unreceived([values.get(BALANCE, 0) for values in data])
        for rank, messages in sorted(left.items()):
            for message in messages:
                print("\n".join(wrapped(f"rank {rank} {message}")))

    def _refuse_without_ranks(self) -> None:
        dead = set(range(self.ranks.n)) - set(self.ranks.client.ids)
        if dead and self.ranks.running().fault_tolerant:
            targets = self.view.targets
            asked = set(targets) if isinstance(targets, list) else {targets}
            if not asked <= dead:
                self.view.targets = sorted(asked - dead)
                return
            dead = asked
        if dead:
            verb = "is" if len(dead) == 1 else "are"
            # The ranks may have died while no cell ran, so nothing has said yet why.
            why = ended_by_slurm(self.ranks.running().job_state())
            text = why or f"{names(dead)} {verb} dead."
            raise RanksLostError(f"{text} {FRESH_RANKS}")

    def _show(self, result: AsyncResult, groupby: str) -> None:
        """Show what was printed, even by ranks that are not done."""
        if result.ready():
            result.display_outputs(groupby)
            return
        for rank, answer in _answers(result):
            for name in ("stdout", "stderr"):
                if text := answer.output.metadata[name]:
                    print(f"[{name}:{rank}]\n{text.rstrip()}")

    def _wait(self, result: AsyncResult, presses: list[int], live: LiveLine | None) -> None:
        """Wait until all ranks are done or the user stops the cell; not long if a rank failed."""
        failed_at = None
        while self._pending(result) and not self._all_dead() and not presses:
            result.wait(0.05 if failed_at is None else 0.02)
            if live is not None:
                live.look(self._pending(result))
            if failed_at is None and self._errors(result):
                failed_at = monotonic()
            if failed_at is not None and monotonic() - failed_at > AFTER_AN_ERROR:
                self._interrupt(result)
                return

    def _all_dead(self) -> bool:
        """Return whether all ranks have ended and no answer of a rank can still arrive."""
        if not self.ranks.running().over():
            self._seen_over = None
        elif self._seen_over is None:
            self._seen_over = monotonic()
        return self._seen_over is not None and monotonic() - self._seen_over > ON_ITS_WAY

    def _interrupt(self, result: AsyncResult) -> None:
        """Send SIGINT to the ranks that still run, give them a moment, and repeat it if needed."""
        for _ in range(INTERRUPTS):
            self.ranks.running().signal("SIGINT", self._pending(result))
            deadline = monotonic() + AFTER_AN_INTERRUPT
            while self._pending(result) and monotonic() < deadline:
                result.wait(0.02)

    def _pending(self, result: AsyncResult) -> list[int]:
        """Return the ranks that are not done."""
        return [rank for rank, answer in _answers(result) if not answer.done()]

    def _errors(self, result: AsyncResult) -> dict[int, Exception]:
        results = {rank: answer.result() for rank, answer in _answers(result) if answer.done()}
        return {rank: error for rank, error in results.items() if isinstance(error, Exception)}

    def _raise_if_failed(self, result: AsyncResult, cell: str, interrupted: bool) -> None:
        errors = self._errors(result)
        if self._all_dead():
            # The nannies of other hosts, which would report the deaths, are gone as well.
            gone = ipp.error.EngineError("the command that started the rank has ended")
            errors |= dict.fromkeys(self._pending(result), gone)
        if not errors and not interrupted and not self._pending(result):
            return
        busy = set(self._pending(result)) - set(errors)
        outcome = Outcome(
            self.ranks.n,
            errors,
            interrupted=interrupted,
            cell=cell,
            cells=self._cells,
            lost=self.ranks.lost_names(),
            left_out=left_out.lacks,
        )
        self.ranks.running().examine(outcome, busy)
        error = outcome.explain()
        if isinstance(error, CellLeftOut):
            left_out.show(cell, error, name=error.name)
            return
        if error.diagnosis is not None and error.diagnosis.edges:
            from utils.figures import waits

            waits.show(error.diagnosis, self.ranks.n)
        raise error


def _answers(result: AsyncResult) -> list[tuple[int, Any]]:
    """Return rank and future of each part; the result of a failed future is its error."""
    return list(zip(result._targets, result._children, strict=True))


@contextlib.contextmanager
def nothing_sent_yet(client: Any) -> Iterator[None]:
    """Hold back what ipyparallel sends until the block ends, so that no output comes before.

    Clients of other kinds keep the output that comes, until somebody waits for it.
    """
    until = threading.Event()
    if isinstance(client, ipp.Client):
        client._io_loop.add_callback(until.wait)
    try:
        yield
    finally:
        until.set()


def _has_output(result: AsyncResult) -> bool:
    """Return whether a rank has printed or shown something."""
    kinds = ("stdout", "stderr", "outputs", "execute_result")
    return any(answer.output.metadata[kind] for _, answer in _answers(result) for kind in kinds)


def _is_captured() -> bool:
    """Return whether `%%capture` collects what this cell prints."""
    return isinstance(sys.stdout, io.StringIO)


# --- what `cluster.start` changes in the notebook ------------------------------------------------


def prepare(ranks: Ranks) -> None:
    """Point `%%px` at these ranks, and make its output the same in every run."""
    shell = get_ipython()
    if shell is None:
        return
    shell.magics_manager.register(RanksMagics(shell, ranks))
    shell.run_line_magic("colors", "nocolor")
    shell.display_formatter.mimebundle_formatter.for_type(ExecuteReply, _reproducible)
    show_errors(shell, RemoteError, functools.partial(_of_the_ranks, ranks))
    show_errors(shell, NotImplementedError, _of_a_stub)
    left_out.prepare(shell)


def _of_a_stub(shell: InteractiveShell, error: NotImplementedError) -> Exception:
    """Return the error to show if a cell of the kernel meets a task that is still open."""
    kind = NotImplementedError.__name__
    if not (task := open_task(kind, str(error))):
        return error
    said = NotImplementedError((explained(kind, str(error)) or "").removeprefix(f"{kind}: "))
    return shown_as(said, stopped_here(task, running_cell(shell)))


def _of_the_ranks(here: Ranks, shell: InteractiveShell, error: RemoteError) -> BaseException | None:
    """Return the error to show if a cell of the kernel needs a name or a task that ranks lack."""
    single = (error.ename, error.evalue, None, error.engine_info)
    errors = error.elist if isinstance(error, CompositeError) else [single]
    kind, text, *_ = errors[0]
    if task := open_task(kind, text):
        said = RanksError(explained(kind, text))
        return shown_as(said, stopped_here(task, running_cell(shell)))
    missing = [_missing_name(kind, str(text)) for kind, text, *_ in errors]
    if not all(missing):
        same: BaseException = error
        return same
    if left_out.lacks(missing[0]):
        left_out.show(running_cell(shell), error, name=missing[0])
        return None
    ranks = ", ".join(str(where.get("engine_id")) for *_, where in errors)
    if missing[0] in here.lost_names():
        return RanksError(lost_names.hint(missing[0]))
    who = f"ranks {ranks} have" if len(errors) > 1 else f"rank {ranks} has"
    return RanksError(
        f"{who} no `{missing[0]}`, because the cell that makes it failed or was not run. Run it "
        "first (Run → Run All Above Selected Cell)."
    )


def _missing_name(kind: str, text: str) -> str:
    """Return the name that a rank lacks; "" if the error is about something else."""
    missing = _MISSING.search(text) if kind == "NameError" else None
    return missing[1] if missing else ""


def _reproducible(reply: ExecuteReply, **kwargs: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the reply's data without times, ids and source, which change from run to run."""
    plain: Callable[[], str] = getattr(reply, "_plaintext", lambda: repr(reply))
    return {**reply.data, "text/plain": plain()}, {}


def retire(n: int) -> None:
    """Make `%%px` raise an error with advice after a stop, because its client is closed."""
    shell = get_ipython()
    if shell is None:
        return

    def px(line: str, cell: str | None = None) -> None:
        raise RanksError(
            f"the ranks were stopped. Run the cell with `ranks = cluster.start({n})` again, and "
            "then the cells below it."
        )

    shell.register_magic_function(px, "line_cell", "px")
