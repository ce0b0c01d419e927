"""After a mistake on ranks inside the kernel, students read what is true, and can go on."""

from __future__ import annotations

import os

import nbformat
import pytest
from nbclient import NotebookClient
from places import ROOT

CELLS = {
    "start": 'from utils import cluster\nranks = cluster.start(3, where="here")',
    "join": """%%px
import torch, torch.distributed as dist
dist.init_process_group("mpi")
rank = dist.get_rank()""",
    "draw": """%%px
import random, numpy
drawn = torch.rand(1).item(), random.random(), numpy.random.rand()""",
    "drawn": "[len(set(values)) for values in zip(*ranks.client[:]['drawn'])]",
    "exit": "%%px\nif rank == 1:\n    exit()\ndist.barrier()",
    "endless": """%%px
import _thread
if rank == 1:
    _thread.interrupt_main()  # what the stop button does
    while True:
        pass""",
    "mismatch": """%%px
if rank == 0:
    dist.send(torch.ones(3), dst=1)
    arrived = True
elif rank == 1:
    dist.recv(torch.ones(3, dtype=torch.int64), src=0)""",
    "sent": 'ranks.client[0]["arrived"]',
    "error": "%%px\nif rank == 1:\n    raise ValueError(" + "'words ' + " * 12 + "'end')",
    "next": "%%px\ndist.barrier()\nprint('on', rank)",
}


@pytest.fixture(scope="module")
def shown() -> dict[str, str]:
    """What each of the cells shows, by name."""
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(code) for code in CELLS.values()]
    )
    resources = {"metadata": {"path": str(ROOT)}}
    client = NotebookClient(
        notebook, timeout=60, kernel_name="python3", resources=resources, allow_errors=True
    )
    client.execute(env={**os.environ, "PYTHONPATH": str(ROOT)})
    texts = ["\n".join(map(text_of, cell.outputs)) for cell in notebook.cells]
    return dict(zip(CELLS, texts, strict=True))


def text_of(output: nbformat.NotebookNode) -> str:
    plain = output.get("data", {}).get("text/plain", "")
    return output.get("text", "") or "\n".join(output.get("traceback", [])) or plain


def test_ranks_without_a_seed_draw_different_numbers(shown):
    assert shown["drawn"] == "[3, 3, 3]"  # PyTorch, Python, NumPy


def test_exit_says_that_a_thread_cannot_end_alone(shown):
    assert "exit() would end this kernel" in shown["exit"]
    assert "ask_exit" not in shown["exit"]


def test_the_stop_button_blames_only_the_rank_with_the_endless_loop(shown):
    assert "rank 0 has left the cell" in shown["endless"]
    assert "rank 1 was interrupted at cell line" in shown["endless"]
    assert "rank 2 was interrupted at the start of the cell, before its turn" in shown["endless"]


def test_a_rank_that_sent_a_short_message_of_the_wrong_dtype_goes_on(shown):
    assert "rank 0 sent float32[3] (12 bytes, tag=0), but rank 1" in shown["mismatch"]
    assert "rank 0 has left the cell" in shown["mismatch"]
    assert shown["sent"] == "True"


def test_a_traceback_has_colors_and_whole_lines_of_code(shown):
    assert "\x1b[" in shown["error"]
    assert any(line.count("words") == 12 for line in shown["error"].splitlines())


def test_the_next_cell_works(shown):
    assert all(f"on {rank}" in shown["next"] for rank in range(3))
