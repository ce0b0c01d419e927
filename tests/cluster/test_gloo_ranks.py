"""Labs 00 to 05 on gloo: what a class does if a new PyTorch breaks our backend."""

from __future__ import annotations

import pytest
from nbformat.v4 import new_code_cell, new_notebook

from utils.course import execute
from utils.course.notebook import KERNELSPEC, SOLUTIONS, dumps, notebooks, read
from utils.jobs import other_backend

#: Two ranks both receive first, and then a message of the same ranks works. The short message that
#: nobody receives isn't found by the next cell.
CELLS = (
    "from utils import cluster\nranks = cluster.start(2, timeout=3)",
    "%%px\nimport torch, torch.distributed as dist\n"
    "dist.init_process_group('mpi')\nrank = dist.get_rank()\nx = torch.zeros(2)",
    "%%px\ndist.recv(x, 1 - rank)",
    "%%px\nif rank == 0:\n    dist.send(torch.ones(2), 1)\nelse:\n    dist.recv(x, 0)\n"
    "dist.all_reduce(x)\nprint(rank, x.tolist(), [call.op for call in log.since(0)][-2:])",
    "ranks.stop()",
)


def test_ranks_on_gloo_say_what_they_lack_and_work_after_a_deadlock(tmp_path, monkeypatch):
    monkeypatch.setenv(other_backend.VARIABLE, other_backend.GLOO)
    cells = [new_code_cell(source, id=f"c{k}") for k, source in enumerate(CELLS)]
    cells[2].metadata["tags"] = ["raises-exception"]
    cells[1].source += "\nfrom torch_mpi.record import log"
    path = tmp_path / "01_toy.ipynb"
    path.write_text(dumps(new_notebook(cells=cells, metadata={"kernelspec": KERNELSPEC})))
    result = execute.execute(path, store=True, timeout=120)
    assert result.error is None
    told = ["".join(output.get("text", "") for output in cell.outputs) for cell in read(path).cells]
    assert "communicate by gloo" in " ".join(told[0].split())
    assert "0 [1.0, 1.0] ['send', 'all_reduce']" in told[3]
    assert "1 [1.0, 1.0] ['recv', 'all_reduce']" in told[3]


def test_another_backend_is_refused_by_its_name(monkeypatch):
    monkeypatch.setenv(other_backend.VARIABLE, "nccl")
    with pytest.raises(ValueError, match="DDL_LABS_BACKEND=nccl: the only value is gloo"):
        other_backend.is_gloo()


@pytest.mark.extended
@pytest.mark.parametrize(
    "path", [path for path in notebooks(SOLUTIONS) if path.name < "06"], ids=lambda path: path.stem
)
def test_without_our_backend_a_lab_passes_on_gloo(path, monkeypatch):
    monkeypatch.setenv(other_backend.VARIABLE, other_backend.GLOO)
    result = execute.execute(path, timeout=300)
    assert result.ok, result
