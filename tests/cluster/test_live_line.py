"""What a long cell says while it runs, and what it leaves behind; and the names a restart loses."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.manager import KernelManager

from utils.cluster import live_line, lost_names, rank_notes
from utils.cluster.live_line import LiveLine

pytestmark = pytest.mark.timeout(300)

START = """\
from utils import cluster
ranks = cluster.start(2)
"""
# Rank 0 computes until the test has seen what the notebook says; rank 1 waits for it meanwhile.
LONG = """\
%%px
from pathlib import Path
import torch
import torch.distributed as dist
dist.init_process_group("mpi")
print("begin", dist.get_rank())
if dist.get_rank() == 0:
    while not Path({gate!r}).exists():
        sum(range(1000))
    dist.send(torch.ones(1), 1)
else:
    dist.recv(torch.ones(1), 0)
print("end", dist.get_rank())
"""
WAITED_FOR = " · rank 0 is computing, line {} · rank 1 is waiting in recv"


@dataclass
class Frontend:
    """The outputs of a cell as a notebook shows them: what is cleared or replaced is gone."""

    gate: Path
    outputs: list[dict[str, Any]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    to_clear: bool = False

    def take(self, message: dict[str, Any]) -> None:
        """Do what JupyterLab does with a message."""
        kind, content = message["msg_type"], message["content"]
        if kind == "clear_output":
            self.to_clear = content["wait"]
            if not content["wait"]:
                self.outputs = []
        elif kind in ("stream", "display_data", "execute_result", "error"):
            if self.to_clear:
                self.outputs, self.to_clear = [], False
            self.outputs.append(content)
        elif kind == "update_display_data":
            for output in self.outputs:
                if output.get("transient") == content["transient"]:
                    output["data"] = content["data"]
        self.look(content.get("data", {}).get("text/plain", ""))

    def look(self, text: str) -> None:
        """Open the gate once the notebook says what the ranks do."""
        if " s · " in text:
            self.lines.append(text)
            if any(text.endswith(WAITED_FOR.format(line)) for line in (8, 9)):
                self.gate.touch()

    def texts(self) -> list[str]:
        return [output["data"]["text/plain"] for output in self.outputs if "data" in output]


@contextmanager
def kernel(**environment: str) -> Iterator[BlockingKernelClient]:
    """A kernel whose user can press buttons, as in JupyterLab."""
    others = {key: value for key, value in os.environ.items() if key != "IPP_NONINTERACTIVE"}
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(env=others | environment)
    client = manager.blocking_client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=100)
        yield client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=False)


def run(client: BlockingKernelClient, cell: str, shown: Frontend) -> Frontend:
    client.execute_interactive(cell, output_hook=shown.take, timeout=150)
    return shown


def test_a_long_cell_says_what_its_ranks_do_and_keeps_nothing_of_it(tmp_path):
    gate = tmp_path / "gate"
    with kernel() as client:
        run(client, START, Frontend(gate))
        shown = run(client, LONG.format(gate=str(gate)), Frontend(gate))
        run(client, "ranks.stop()", Frontend(gate))
    assert gate.exists(), shown.lines
    assert sorted(shown.texts()) == ["[stdout:0] begin 0\nend 0\n", "[stdout:1] begin 1\nend 1\n"]
    assert len(shown.outputs) == 2


def test_an_error_of_a_long_cell_stays_and_so_does_what_the_ranks_have_printed(tmp_path):
    gate = tmp_path / "gate"
    with kernel() as client:
        run(client, START, Frontend(gate))
        failing = LONG.format(gate=str(gate)).replace('print("end", dist.get_rank())', "1 / 0")
        shown = run(client, failing, Frontend(gate))
        run(client, "ranks.stop()", Frontend(gate))
    assert sorted(shown.texts()) == ["[stdout:0] begin 0\n", "[stdout:1] begin 1\n"]
    assert [output.get("ename") for output in shown.outputs[2:]] == ["CellFailed"]


def test_a_restart_says_what_is_lost_until_a_cell_has_made_it_again(tmp_path):
    cells = {
        "made": "%%px\nmade, kept = 1, 2",
        "fresh": "ranks.restart()",
        "lost": "%%px\nmade",
        "pulled": 'ranks.client[0]["made"]',
        "typo": "%%px\nmaid",
        "again": "%%px\nmade = 3\nprint(made)",
        "stop": "ranks.stop()",
    }
    with kernel() as client:
        run(client, START, Frontend(tmp_path))
        shown = {name: run(client, cell, Frontend(tmp_path)) for name, cell in cells.items()}
    (said,) = shown["fresh"].outputs
    assert "They have lost everything that earlier cells made" in said["text"]
    hint = "The ranks lost `made` in a restart. Choose Run → Run All Above Selected Cell."
    for name in ("lost", "pulled"):
        assert hint in shown[name].outputs[-1]["evalue"], name
    assert "lost" not in shown["typo"].outputs[-1]["evalue"]
    assert "Run the cell that makes `maid` first" in shown["typo"].outputs[-1]["evalue"]
    assert sorted(shown["again"].texts()) == ["[stdout:0] 3\n", "[stdout:1] 3\n"]


# --- without ranks ----------------------------------------------------------------------------


def line_of(folder: Path, notes: dict[int, object], ranks: dict[int, int], busy: set[int]) -> str:
    """The line after 12 s, for ranks that have written these notes since the cell began."""
    line = LiveLine(folder, ranks)
    for rank, note in notes.items():
        rank_notes.path_of(folder, rank).write_text(json.dumps(note))
    return line.text(12.3, busy)


def note(line: int | None = None, waits: str | None = None) -> dict[str, object]:
    return {"line": line, "waits": waits}


WAITS = " · rank 1 is waiting in recv"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("notes", "busy", "said"),
    [
        (
            {0: note(4), 1: note(7, "recv")},
            {0, 1},
            "rank 0 is computing, line 4 · rank 1 is waiting in recv",
        ),
        ({0: note(4), 1: note(4)}, {0, 1}, "ranks 0, 1 are computing, line 4"),
        ({0: note(4), 1: note(4)}, {1}, "rank 1 is computing, line 4 · rank 0 is done"),
        ({}, {0, 1}, "ranks 0, 1 are computing"),
        ({0: "rubbish", 1: {"line": "x", "waits": 3}}, {0, 1}, "ranks 0, 1 are computing"),
    ],
)
def test_the_line_says_what_each_rank_does(tmp_path, notes, busy, said):
    assert line_of(tmp_path, notes, {0: 0, 1: 1}, busy) == f"12 s · {said}"


@pytest.mark.quick
def test_many_different_lines_are_left_out(tmp_path):
    notes = {rank: note(rank) for rank in range(1, 9)}
    ranks = dict.fromkeys(notes) | {rank: rank for rank in notes}
    said = line_of(tmp_path, notes, ranks, set(ranks))
    assert said == "12 s · ranks 1, 2, 3, 4, 5, 6, 7, 8 are computing"


@pytest.mark.quick
def test_survivors_have_the_numbers_that_they_have_now(tmp_path):
    said = line_of(tmp_path, {3: note(5)}, {0: 0, 1: 1, 3: 2}, {3})
    assert said == "12 s · rank 2 is computing, line 5 · ranks 0, 1 are done"


@pytest.mark.quick
def test_a_note_of_an_earlier_cell_counts_for_nothing(tmp_path):
    rank_notes.path_of(tmp_path, 0).write_text(json.dumps(note(4)))
    assert line_of(tmp_path, {}, {0: 0}, {0}) == "12 s · rank 0 is computing"


@pytest.mark.quick
def test_nobody_gets_a_line_in_a_notebook_that_a_program_executes(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(live_line, "display", lambda *data, **more: shown.append(data))
    monkeypatch.setattr(live_line.time, "monotonic", iter([0.0, 100.0]).__next__)
    line = LiveLine(tmp_path, {0: 0})
    line.look({0})
    assert not shown
    assert not line.remove(more=True)


@pytest.mark.quick
def test_the_names_that_a_cell_has_made_are_known_and_no_others(tmp_path):
    source = (
        "import os.path, torch.nn as nn\nfrom a import b\ndef f(x): inside = 1\n"
        "class C: part = 1\nx, *y = 1, 2\nprint(used)\nfor k in x: pass"
    )
    cut = '{"file": "c", "source": "cut = 1'
    notes = [json.dumps({"file": "a", "source": text}) for text in (source, "!not python")]
    (tmp_path / "cells-0").write_text("\n".join([*notes, cut]))
    assert lost_names.of_cells(tmp_path) == {"os", "nn", "b", "f", "C", "x", "y", "k"}
