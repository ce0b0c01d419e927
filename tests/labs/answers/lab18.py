"""Answers to lab 18."""

from __future__ import annotations

from answers import ward

NOTEBOOK = "18_the_clinic.ipynb"
CELLS = {**ward.CELLS}
BEFORE = """
import torch.distributed as dist

if dist.is_initialized():
    dist.destroy_process_group()
dist.init_process_group("mpi")
"""
WRONG = [*ward.WRONG]
RIGHT = [*ward.RIGHT]
SLOW = ward.TASKS
ON_RANKS = ward.ON_RANKS
HINTED_BY_THE_ROOM = ward.TASKS
