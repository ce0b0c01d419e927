"""Tensors beyond the 2**31 that MPI's counts reach: one byte an element, 2 GiB a tensor.

Run on demand: `make test ARGS="-m large"`. In chunks.py a message is large from three elements on.
"""

import torch
import torch.distributed as dist
from helpers import rank, size

LENGTH = 2**31 + 1000


def _marked(value: int) -> torch.Tensor:
    tensor = torch.zeros(LENGTH, dtype=torch.uint8)
    tensor[:: LENGTH - 1] = value
    tensor[2**31] = value
    return tensor


def _ends(tensor: torch.Tensor) -> list[int]:
    return [tensor[0].item(), tensor[1].item(), tensor[2**31].item(), tensor[-1].item()]


def case_a_message_over_2_gib_arrives():
    if size() != 2:
        return "two ranks are enough"
    if rank() == 0:
        dist.send(_marked(7), 1)
    else:
        got = torch.zeros(LENGTH, dtype=torch.uint8)
        dist.recv(got, 0)
        assert _ends(got) == [7, 0, 7, 7], _ends(got)


def case_collectives_over_2_gib_are_right():
    if size() != 2:
        return "two ranks are enough"
    tensor = _marked(rank() + 1)
    dist.all_reduce(tensor)
    assert _ends(tensor) == [3, 0, 3, 3], _ends(tensor)
    tensor.zero_()
    if rank() == 0:
        tensor[:: LENGTH - 1] = 9
    dist.broadcast(tensor, 0)
    assert _ends(tensor) == [9, 0, 0, 9], _ends(tensor)
