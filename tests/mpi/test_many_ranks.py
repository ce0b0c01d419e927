"""More ranks than a laptop has cores: 16 and 32 in a notebook, 64 in a script."""

from __future__ import annotations

from pathlib import Path

import pytest
from fault_tools import notebook

pytestmark = pytest.mark.timeout(600)

SET_UP = """%%px
import torch, torch.distributed as dist
dist.init_process_group("mpi")
rank, size = dist.get_rank(), dist.get_world_size()
"""
RING = """%%px --targets 0
print("sum", int(total), "after a round", int(token))
"""
WORK = """%%px
total = torch.ones(1)
dist.all_reduce(total)
token, received = torch.tensor([float(rank)]), torch.empty(1)
for _ in range(size):
    sending = dist.isend(token, (rank + 1) % size)
    dist.recv(received, (rank - 1) % size)
    sending.wait()
    token, received = received.clone(), token
"""
DEADLOCK = """%%px
dist.recv(received, (rank - 1) % size)
"""


@pytest.mark.parametrize("n", [16, 32])
def test_a_notebook_with_many_ranks_reduces_passes_round_and_tells_a_deadlock(n):
    with notebook(IPP_NONINTERACTIVE="1") as opened:
        start = f"from utils import cluster\nranks = cluster.start({n}, timeout=60)"
        assert opened.run(start, timeout=240).streams.strip() == f"{n} MPI ranks have started."
        for cell in (SET_UP, WORK):
            assert not opened.run(cell, timeout=240).failed()
        assert f"sum {n} after a round 0" in opened.run(RING).streams
        told = opened.run(DEADLOCK, timeout=240)
        text = told.message()
        assert text.startswith("Deadlock"), text
        assert all(f"rank {k} waits in recv(src={(k - 1) % n}" in text for k in range(n))
        assert told.pictures == 1
        assert not opened.run(WORK, timeout=240).failed(), "the next cell works"
        assert not opened.run("ranks.stop()").failed()


@pytest.mark.large
def test_a_script_of_64_ranks_reduces_and_passes_round(mpiexec, tmp_path: Path):
    script = tmp_path / "many.py"
    lines = [*SET_UP.splitlines()[1:], *WORK.splitlines()[1:]]
    lines += ["if rank == 0:\n    print('sum', int(total), 'after a round', int(token))"]
    script.write_text("\n".join([*lines, "dist.destroy_process_group()"]))
    done = mpiexec(64, script, timeout=300, env={"MPI_BACKEND_TIMEOUT": "120"})
    assert done.stdout == "sum 64 after a round 0\n"
