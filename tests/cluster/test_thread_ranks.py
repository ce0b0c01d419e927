"""Ranks inside the kernel bear what a notebook does to them by accident."""

from __future__ import annotations

import builtins
import gc
import logging
import queue
import re
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from ipyparallel.error import RemoteError
from places import ROOT

from utils import cluster
from utils.cluster.here import patience
from utils.cluster.here.rank import Rank

JOIN = """
import time, torch, torch.distributed as dist
dist.init_process_group("mpi")
rank, p = dist.get_rank(), dist.get_world_size()
"""
# Seconds until a cell that should end has failed its test.
DEADLINE = 30.0


@pytest.fixture
def ranks() -> Iterator[cluster.Ranks]:
    with cluster.start(2, where="here") as up:
        up.view.execute(JOIN, block=True)
        yield up


def run(ranks: cluster.Ranks, code: str) -> None:
    """Run a cell; bring the ranks together again after an error, as `%%px` does."""
    result = ranks.view.execute(code, block=False)
    result.wait(DEADLINE)
    assert result.ready(), f"the cell is not over after {DEADLINE} s: {code}"
    if not result.successful():
        ranks.running().meet_again()
    result.get()


def wait_until_busy(ranks: cluster.Ranks) -> None:
    """Wait until a rank is in its cell."""
    deadline = time.monotonic() + DEADLINE
    while not any("line" in place for place in ranks.running().places(1.0)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("class Odd(Exception):\n    def __str__(self): raise ValueError\nraise Odd", "Odd"),
        ("class Base(BaseException): pass\nraise Base", "Base"),
        ("exit()", "NeedsProcesses"),
        ("quit(3)", "SystemExit|TypeError"),
        ("import sys; sys.exit(3)", "SystemExit"),
        ("raise GeneratorExit", "GeneratorExit"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    ],
)
def test_a_cell_that_ends_in_an_odd_way_is_an_error_and_the_next_one_runs(ranks, code, kind):
    with pytest.raises(RemoteError, match=kind):
        run(ranks, code)
    run(ranks, "dist.barrier()")


def leave(kind: type[BaseException]) -> None:
    """Raise what ends a thread of Python without a word."""
    raise kind


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_a_function_that_ends_in_an_odd_way_is_an_error_and_the_next_cell_runs(ranks, kind):
    with pytest.raises(RemoteError, match=kind.__name__):
        ranks.view.apply_async(leave, kind).get(DEADLINE)
    run(ranks, "dist.barrier()")


def test_ranks_can_communicate_in_a_coroutine_that_a_cell_awaits(ranks):
    run(
        ranks,
        """
import asyncio
async def summed():
    await asyncio.sleep(0.01)
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()
found = await summed()
""",
    )
    assert ranks.view["found"] == [2.0, 2.0]


def test_a_question_on_a_rank_is_refused_instead_of_waiting_for_good(ranks):
    with pytest.raises(RemoteError, match="can't ask you for input"):
        run(ranks, "input('Your name?')")
    run(ranks, "dist.barrier()")
    refusing = builtins.input
    ranks.stop()
    assert builtins.input is not refusing


def test_a_restart_ends_an_endless_loop_and_the_process_has_its_own_values_again(ranks):
    before = (sys.stdout, sys.modules["__main__"])
    loops = (
        "while True: pass",
        "dist.barrier() if rank else None\nwhile True: pass",
        "while True: dist.barrier()",
        "while True: time.sleep(1)",
    )
    for loop in loops:
        result = ranks.view.execute(loop, block=False)
        wait_until_busy(ranks)
        ranks.restart()
        run(ranks, JOIN)
        assert (sys.stdout, sys.modules["__main__"]) == before
        assert len([t for t in threading.enumerate() if t.name.startswith("rank ")]) == 2
        with pytest.raises(RemoteError, match="ended before its cell was over"):
            result.get(DEADLINE)


def test_a_restart_frees_what_the_ranks_had_and_their_threads(ranks):
    def counted() -> tuple[int, int]:
        gc.collect()
        return sum(type(thing) is Rank for thing in gc.get_objects()), threading.active_count()

    before = counted()
    ranks.restart()
    deadline = time.monotonic() + DEADLINE
    while counted() > before:
        assert time.monotonic() < deadline, (before, counted(), threading.enumerate())
        time.sleep(0.1)


@pytest.mark.parametrize("where", ["here", "processes"])
def test_a_rank_cannot_start_ranks_and_says_where_to_start_them(ranks, where):
    with pytest.raises(RemoteError, match="a rank can't start ranks"):
        run(ranks, f"from utils import cluster; cluster.start(2, where={where!r})")
    run(ranks, "dist.barrier()")


def test_a_stream_that_a_cell_replaces_for_good_takes_no_answer_of_a_rank(ranks):
    run(ranks, "import io, sys; sys.stdout = io.StringIO(); print('into it')")
    run(ranks, "print('into it')")
    assert [reply.value for reply in ranks.ask(f"{__name__}:double", n=2)] == [4, 4]
    with pytest.raises(RemoteError, match="ZeroDivisionError"):
        run(ranks, "1 / 0")
    run(ranks, "dist.barrier()")


def double(user_ns: dict, *, rank: int, n: int) -> int:
    """An answer of a rank."""
    return 2 * n


def test_a_flood_of_output_ends_after_1_mb_in_the_first_cell_too(ranks):
    code = "for _ in range(30): print('x' * 100_000)"
    result = ranks.view.execute(code, silent=False, block=False)
    result.get(DEADLINE)
    printed = result.metadata[0]["stdout"]
    assert "rank 0 printed more than 1 MB" in printed
    assert len(printed) < 1_100_000


def test_many_short_lines_of_a_rank_are_shown_in_few_pieces(ranks):
    shown: list[tuple[int, str]] = []
    result = ranks.view.execute("for k in range(1000): print(rank, k)", silent=False, block=False)
    for rank, future in enumerate(result._children):
        future.iopub_callbacks.append(
            lambda message, rank=rank: shown.append((rank, message["content"]["text"]))
        )
    result.get(DEADLINE)
    assert len(shown) < 1000
    for rank in range(2):
        text = "".join(piece for of, piece in shown if of == rank)
        assert result.metadata[rank]["stdout"].endswith(text)


def test_what_a_rank_logs_is_in_its_own_output(ranks):
    code = "import logging; log = logging.getLogger('ranks'); log.propagate = False\n"
    run(ranks, code + "if rank == 0: log.addHandler(logging.StreamHandler())\ndist.barrier()")
    result = ranks.view.execute("log.error('from %d', rank); log.handlers", block=False)
    result.get(DEADLINE)
    assert [one["stderr"] for one in result.metadata] == ["from 0\n", "from 1\n"]
    logging.getLogger("ranks").handlers.clear()


def test_a_default_dtype_belongs_to_the_rank_that_sets_it(ranks):
    run(ranks, "if rank == 0: torch.set_default_dtype(torch.float64)\ndist.barrier()")
    assert ranks.view["str(torch.zeros(1).dtype)"] == ["torch.float64", "torch.float32"]
    assert torch.get_default_dtype() == torch.float32


def test_after_a_stop_during_a_cell_the_process_is_as_before():
    before = (sys.stdout, sys.modules["__main__"], time.sleep, time.time)
    with cluster.start(2, where="here") as ranks:
        ranks.view.execute("while True: pass", block=False)
        wait_until_busy(ranks)
    after = (sys.stdout, sys.modules["__main__"], time.sleep, time.time)
    assert after == before


def test_a_tensor_of_a_receive_is_freed_at_once_although_another_thread_has_looked_at_the_wait(
    ranks,
):
    run(
        ranks,
        f"""
import weakref
row = torch.zeros(1000)
if rank == 0:
    dist.recv(row, 1)
    kept = weakref.ref(row)
    row = None
    assert kept() is None, "somebody keeps the received tensor"
else:
    began = time.perf_counter()  # computes while rank 0 waits, and the watching thread looks
    while time.perf_counter() - began < {1.2 * patience.EVERY}:
        pass
    dist.send(row, 0)
""",
    )


def test_the_sketch_of_turns_gives_the_result_of_ranks_and_tells_a_deadlock_at_once():
    page = (ROOT / "utils/cluster/here/TURNS.md").read_text(encoding="utf-8")
    said, names = queue.Queue(), {}
    names["print"] = lambda *words: said.put(" ".join(words))
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], names)

    def swap(ranks, rank):
        ranks.send(rank, 1 - rank, f"from {rank}")
        said.put(f"{rank} got {ranks.recv(rank, 1 - rank)}")

    names["Turns"](swap, swap)
    assert [said.get(timeout=DEADLINE) for _ in range(2)] == ["1 got from 0", "0 got from 1"]
    names["Turns"](*[lambda ranks, rank: ranks.recv(rank, 1 - rank)] * 2)
    assert f"`{said.get(timeout=DEADLINE)}`" in page
