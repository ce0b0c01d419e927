"""What a program leaves in the tensors of each rank: all ranks played in one process."""

from __future__ import annotations

import torch

from . import collectives
from .tensors import memory, statements, tensor

PLAIN = ("send", "isend", "recv", "irecv", "recv_any", "irecv_any")


class Model:
    """The tensors of all ranks after the steps of a program, one step after the other.

    Attributes:
        after: by step, what the storages of one rank's tensors hold once the rank is told that the
            step is over, as bytes; a step that receives from any rank has a set of possible ones.
        tensors: by rank and step, as they are at the end.
    """

    def __init__(self, program: dict, rank: int):
        self.rank = rank
        self.tensors: list[dict[int, list]] = [{} for _ in range(program["size"])]
        self.after: dict[int, list] = {}
        self._steps = {step["id"]: step for step in program["steps"]}
        self._sent: dict[int, torch.Tensor] = {}
        for step in program["steps"]:
            self._play(step)

    def _play(self, step: dict) -> None:
        do = step["do"]
        if do in PLAIN:
            self._make(step, step["rank"], step["make"])
            if do in ("send", "isend"):
                self._sent[step["message"]] = self.tensors[step["rank"]][step["id"]][0].clone()
            if do in ("send", "isend", "recv", "recv_any"):
                self._over(step, [step["rank"]])
        elif do == "wait":
            self._over(self._steps[step["of"]], step["ranks"])
        elif do == "batch":
            self._batch(step)
        elif do in collectives.CALLS:
            for rank, made in zip(step["members"], step["make"], strict=True):
                self._make(step, rank, made)
            lists = [self.tensors[rank][step["id"]] for rank in step["members"]]
            collectives.play(step, lists)
            self._over(step, step["members"])

    def _make(self, step: dict, rank: int, specs: list[dict]) -> None:
        names = {"t": self.tensors[rank], "tensor": tensor, "rank": rank}
        exec("\n".join(statements(specs, step["id"])), names)

    def _batch(self, step: dict) -> None:
        for rank, made, ops in zip(step["members"], step["make"], step["ops"], strict=True):
            self._make(step, rank, made)
            for op, content in zip(ops, self.tensors[rank][step["id"]], strict=True):
                if op["op"] == "isend":
                    self._sent[op["message"]] = content.clone()
        for rank, ops in zip(step["members"], step["ops"], strict=True):
            for op, into in zip(ops, self.tensors[rank][step["id"]], strict=True):
                if op["op"] == "irecv":
                    into.copy_(self._sent[op["message"]])
        self._over(step, step["members"])

    def _over(self, step: dict, ranks: list[int]) -> None:
        """These ranks are told that a step is over: what has come is there."""
        for rank in ranks:
            if step["do"] in ("recv", "irecv"):
                self.tensors[rank][step["id"]][0].copy_(self._sent[step["message"]])
            if rank != self.rank:
                continue
            if step["do"] in ("recv_any", "irecv_any"):
                self.after[step["id"]] = self._possible(step)
            else:
                tensors = self.tensors[rank][step["id"]]
                self.after[step["id"]] = [memory(t).clone() for t in tensors]

    def _possible(self, step: dict) -> list[torch.Tensor]:
        """What the receives of any rank may hold: the messages, in no certain order."""
        return [self._sent[message] for message in step["messages"]]


def objects_after(step: dict, rank: int) -> list:
    """The objects that a rank has after a step of objects."""
    members, root, seed = step["members"], step["root"], step["seed"]
    if step["do"] == "all_gather_object":
        return [thing(seed, r) for r in members]
    if step["do"] == "gather_object":
        return [thing(seed, r) for r in members] if rank == root else []
    if step["do"] == "scatter_object_list":
        return [thing(seed, rank)]
    return [thing(seed, root + k) for k in range(step["count"])]


def thing(seed: int, number: int) -> dict:
    """Some object, now and then a large one."""
    return {"seed": seed, "number": number, "text": "x" * (1000 * (seed % 7) * number)}
