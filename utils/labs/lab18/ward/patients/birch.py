"""Smooths a long signal that is cut into one piece for each rank."""

import torch
import torch.distributed as dist


def train(seed: int, n: int = 4_000_000) -> dict:
    """Replace the signal three times by the mean of itself and the piece on the left."""
    rank, world = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % world, (rank + 1) % world
    draw = torch.Generator().manual_seed(seed + rank)
    piece = torch.randn(n, generator=draw)
    print(f"piece of {piece.numel():,} values", flush=True)
    norms = []
    for turn in range(3):
        arriving = torch.empty_like(piece)
        dist.send(piece, dst=right)
        dist.recv(arriving, src=left)
        piece = (piece + arriving) / 2
        norms.append(float(piece.norm()))
        print(f"turn {turn}: norm {norms[-1]:.1f}", flush=True)
    return {"norms": norms}
