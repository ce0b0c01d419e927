"""What `cluster.start` changes in the notebook: `%%px`, and what it shows."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ipyparallel.client.asyncresult import AsyncResult
from ipyparallel.client.client import ExecuteReply
from ipyparallel.error import CompositeError, RemoteError
from IPython import get_ipython

from utils.cluster import open_tasks
from utils.cluster.px import RanksMagics
from utils.cluster.tracebacks import show_errors
from utils.jobs.errors import RanksError

if TYPE_CHECKING:
    from utils.cluster import Ranks

_MISSING = re.compile(r"name '(\w+)' is not defined")


def prepare(ranks: Ranks) -> None:
    """Point `%%px` at these ranks, and make what it shows the same in every run."""
    shell = get_ipython()
    if shell is None:
        return
    shell.magics_manager.register(RanksMagics(shell, ranks))
    _keep_early_output_apart()
    shell.run_line_magic("colors", "nocolor")
    shell.display_formatter.mimebundle_formatter.for_type(ExecuteReply, _reproducible)
    show_errors(shell, RemoteError, _of_the_ranks)
    show_errors(shell, NotImplementedError, _of_a_stub)


def _of_a_stub(shell: object, error: NotImplementedError) -> Exception:
    """What to do where a cell of the kernel meets a task that is still open."""
    said = open_tasks.explained("NotImplementedError", str(error))
    return NotImplementedError(said.removeprefix("NotImplementedError: ")) if said else error


def _of_the_ranks(shell: object, error: RemoteError) -> BaseException:
    """What to do where a cell of the kernel asks ranks for a name that they lack, or for a task."""
    single = (error.ename, error.evalue, None, error.engine_info)
    errors = error.elist if isinstance(error, CompositeError) else [single]
    kind, text, *_ = errors[0]
    if said := open_tasks.explained(kind, text):
        return RanksError(said)
    names = [_missing_name(kind, str(said)) for kind, said, *_ in errors]
    if not all(names):
        same: BaseException = error
        return same
    who = ", ".join(str(where.get("engine_id")) for *_, where in errors)
    return RanksError(
        f"rank{'s' * (len(errors) > 1)} {who}: there is no `{names[0]}` yet. A cell above "
        "makes it, which has failed, or was not run (Run → Run All Above Selected Cell)."
    )


def _missing_name(kind: str, said: str) -> str:
    """Return the name that a rank lacks; "" if its error is another one."""
    found = _MISSING.search(said) if kind == "NameError" else None
    return found[1] if found else ""


def _keep_early_output_apart() -> None:
    """Have `%%px` stream what a rank printed before it listened beside the other ranks' output.

    ipyparallel (9.2) shows such output under a name that it makes of the message's id, which it
    does not pass: all ranks then have the same name, and the last one replaces the others.
    """
    name = "_iopub_streaming_output_callback"
    show = getattr(AsyncResult, name, None)
    if show is None or getattr(show, "knows_the_rank", False):
        return

    def show_apart(self: AsyncResult, rank: int, future: Any, message: dict[str, Any]) -> None:
        parent = message.get("parent_header") or {"msg_id": future.msg_id}
        show(self, rank, future, message | {"parent_header": parent})

    show_apart.knows_the_rank = True  # type: ignore[attr-defined]  # a mark, read above
    setattr(AsyncResult, name, show_apart)


def _reproducible(reply: ExecuteReply, **kwargs: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """The reply's data without its times, ids and source, which change from run to run."""
    plain: Callable[[], str] = getattr(reply, "_plaintext", lambda: repr(reply))
    return {**reply.data, "text/plain": plain()}, {}


def retire_magics(n: int) -> None:
    """After a stop `%%px` would talk to a closed client; let it say what to do instead."""
    shell = get_ipython()
    if shell is None:
        return

    def px(line: str, cell: str | None = None) -> None:
        raise RanksError(
            f"the ranks were stopped. Run the cell with `ranks = cluster.start({n})` again, and "
            "those below it."
        )

    shell.register_magic_function(px, "line_cell", "px")
