"""A cell whose code has ended returns, whatever it awaited, raised, printed or returned."""

from __future__ import annotations

import os

import nbformat
import pytest
from nbclient import NotebookClient
from places import ROOT

pytestmark = pytest.mark.timeout(200)
ODD = """%%px
class Odd(Exception):
    def __str__(self): raise RuntimeError("no text")
    __repr__ = __str__"""
#: Cells of the ranks, and what each shows.
CELLS = {
    "awaits": ("%%px\nimport asyncio\nawait asyncio.sleep(0.1)\nprint('slept')", "slept"),
    "awaits and raises": ("%%px\nawait asyncio.sleep(0.01)\nraise KeyError('late')", "late"),
    "awaits several": (
        "%%px\nasync def one(): await asyncio.sleep(0.01); return 3\n"
        "print(sum(await asyncio.gather(one(), one())))",
        "6",
    ),
    "defines": (ODD, ""),
    "raises what has no text": ("%%px\nif mpi_rank == 1:\n    raise Odd()", "Odd"),
    "is what has no text": ("%%px\nOdd()", "no text"),
    "raises from what has no text": (
        "%%px\ntry:\n    raise Odd()\nexcept Odd as odd:\n    raise ValueError('mine') from odd",
        "mine",
    ),
    "raises half a letter": ("%%px\nraise ValueError('\\ud800 half')", "half"),
    "prints half a letter": ("%%px\nprint('\\ud800 printed')", "printed"),
    "is half a letter": ("%%px\n'\\ud800 value'", "value"),
    "shows what raises": (
        "%%px\nclass Shy:\n    def _repr_html_(self): raise RuntimeError('shy')\n"
        "    def __repr__(self): return 'plain'\nShy()",
        "plain",
    ),
    "asks for help": ("%%px\nprint?", "Prints the values"),
    "asks for a keyboard": ("%%px\nbreakpoint()", "needs a keyboard"),
    "asks for a line": ("%%px\ninput('x')", "can't ask you for input"),
    "asks for a password": ("%%px\nimport getpass\ngetpass.getpass()", "can't ask you for input"),
    "asks in a debugger": ("%%px\nimport pdb\npdb.set_trace()", "can't ask you for input"),
    "raises a text of a megabyte": (
        "%%px\nraise ValueError('line\\n' * 200_000)",
        "the error's text has 1,000,000 characters",
    ),
    "clears": (
        "%%px\nfrom IPython.display import clear_output, display\n"
        "for k in range(3):\n    clear_output(wait=True)\n    print('step', k)\n"
        "clear_output()\ndisplay('kept')",
        "kept",
    ),
    "updates": ("%%px\ndisplay('old', display_id='one').update('new')", "new"),
    "prints late": (
        "%%px\nimport os, threading\ndef late():\n    ended.wait()\n    print('late')\n"
        "    open(f\"{os.environ['LATE']}/{mpi_rank}\", 'w').close()\n"
        "ended = threading.Event()\nthread = threading.Thread(target=late)\nthread.start()\n"
        "get_ipython().events.register('post_run_cell', lambda result: ended.set())",
        "",
    ),
    "waits": ("import os\nwhile len(os.listdir(os.environ['LATE'])) < 2: pass", ""),
    "shows what was late": ("%%px\nthread.join()", ""),
    "is captured": ("%%capture out\n%%px\nprint('captured')", ""),
    "was captured": ("print(out.stdout)", "[stdout:1] \ncaptured"),
    "somebody is present": (
        "from utils.cluster import live_line\nfrom utils.figures import audience\n"
        "live_line.AFTER, audience.is_present = 0, lambda: True",
        "",
    ),
    "clears below a live line": (
        "%%px\nfor k in range(3):\n    clear_output(wait=True)\n    print('step', k)\n"
        "import time\ntime.sleep(0.3)\nprint('end')\n'value'",
        "step 2\nend",
    ),
    "after": ("%%px\nprint('still', mpi_rank)", "still 1"),
}


@pytest.fixture(
    scope="module",
    params=["processes", "here", pytest.param("boxes", marks=pytest.mark.extended)],
)
def shown(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """What each cell shows, by name."""
    start = f'from utils import cluster\nranks = cluster.start(2, where="{request.param}")'
    codes = [start, *(code for code, _ in CELLS.values())]
    cells = [nbformat.v4.new_code_cell(code) for code in codes]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = NotebookClient(
        notebook,
        timeout=100,
        kernel_name="python3",
        resources={"metadata": {"path": str(ROOT)}},
        allow_errors=True,
    )
    late = str(tmp_path_factory.mktemp("late"))
    client.execute(env={**os.environ, "PYTHONPATH": str(ROOT), "LATE": late})
    texts = ["\n".join(map(text_of, cell.outputs)) for cell in notebook.cells]
    return dict(zip(CELLS, texts[1:], strict=True))


def text_of(output: nbformat.NotebookNode) -> str:
    plain = output.get("data", {}).get("text/plain", "")
    return output.get("text", "") or "\n".join(output.get("traceback", [])) or plain


def test_only_what_was_not_cleared_or_updated_is_still_there(shown):
    assert "step" not in shown["clears"]
    assert "old" not in shown["updates"]
    below = shown["clears below a live line"]  # which itself is cleared at the end
    assert "step 0" not in below, below
    assert below.count("'value'") == 2, below
    assert shown["asks for help"].count("Prints the values") == 1


def test_what_a_thread_prints_after_its_cell_is_shown(shown):
    # A thread of the kernel may print while the cell of its rank is still shown.
    later = "".join(shown[name] for name in ("prints late", "waits", "shows what was late"))
    assert later.count("late\n") == 2  # of both ranks


@pytest.mark.parametrize("name", CELLS)
def test_a_cell_whose_code_has_ended_returns_and_shows(shown, name):
    assert CELLS[name][1] in shown[name], shown[name]
