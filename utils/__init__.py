"""What the lab notebooks share: MPI ranks, the data, the models, the checks.

PyTorch imports this package at every ``import torch`` (entry point ``torch.backends``),
so nothing is imported here.
"""
