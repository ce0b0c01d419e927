"""The thirty patients: what is said of each one, what is wrong with it, and repairs that help.

The programs are in `patients/`, and what was recorded of them is in `evidence/`. Their names say
nothing about what is wrong. `tests/labs/test_clinic.py` runs every program sick and repaired.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ALL = "all"
EVERYONE = (ALL, 0, 1, 2, 3)

#: How many patients of each group a ward has.
DRAWN = {"hangs": 3, "wrong": 3, "slow": 2, "memory": 2, "dies": 1, "drifts": 1}


@dataclass(frozen=True)
class Case:
    """A patient.

    Attributes:
        name: the name of its program.
        group: a key of `DRAWN`.
        complaint: what a colleague has seen.
        instruments: the evidence that is shown, in this order; see :mod:`.evidence`.
        ranks: guilty ranks of which any is right; "all" means that no rank differs.
        lines: lines of which any is right.
        kinds: classes of which any is right, see :mod:`.kinds`.
        repairs: repairs of which any gives a right program: new text by line.
        hint: what to look at, for a finding with a wrong line.
        limits: what a repaired program may not need more of than the first repair does: "calls",
            "bytes", "work" or "peak", see :func:`.program.measured`.
        arguments: arguments of `train` when the check runs it.
    """

    name: str
    group: str
    complaint: str
    instruments: tuple[str, ...]
    ranks: tuple[int | str, ...]
    lines: tuple[int, ...]
    kinds: tuple[str, ...]
    repairs: tuple[Mapping[int, str], ...]
    hint: str
    limits: tuple[str, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def finding(self) -> dict[str, Any]:
        """Return a right finding."""
        return {"rank": self.ranks[0], "line": self.lines[0], "kind": self.kinds[0]}


_HANGS = (
    Case(
        "rowan",
        "hangs",
        "The job stood still after a few lines of output. It has run well on last week's samples.",
        ("log", "stacks", "flight"),
        (2,),
        (21, 20),
        ("skipped call",),
        ({20: "", 21: ""},),
        "Compare how many calls each rank has made in the flight recorder. What did the rank with "
        "the fewest calls do instead?",
    ),
    Case(
        "larch",
        "hangs",
        "The job hangs in its first step, before it prints a loss. With 1 row of ranks it worked.",
        ("stacks", "flight"),
        EVERYONE,
        (24, 23),
        ("order of calls",),
        ({23: "", 24: ""},),
        "All ranks wait at the same line. Look in the flight recorder at the group in which each "
        "rank waits, and draw an arrow to the rank that it waits for.",
    ),
    Case(
        "birch",
        "hangs",
        "The job hangs in its first turn. My tests with pieces of 100 values all passed.",
        ("log", "stacks"),
        EVERYONE,
        (17,),
        ("order of calls",),
        (
            {
                17: "        sending = dist.isend(piece, dst=right)",
                18: "        dist.recv(arriving, src=left)\n        sending.wait()",
            },
            {
                17: "        if rank % 2:\n            dist.recv(arriving, src=left)\n        dist.send(piece, dst=right)",
                18: "        if rank % 2 == 0:\n            dist.recv(arriving, src=left)",
            },
        ),
        "The stacks show what each rank waits in. Which rank could make the call that all wait for?",
    ),
    Case(
        "elm",
        "hangs",
        "The epoch never ends on some of the ranks. All ranks must make the same number of steps, "
        "and batches that are left over may be dropped.",
        ("log", "stacks"),
        EVERYONE,
        (14,),
        ("skipped call",),
        ({14: "    own = batches[: len(batches) // world * world][rank::world]"},),
        "Count the steps that each rank prints. Which line decides how many they are?",
    ),
    Case(
        "maple",
        "hangs",
        "The job hangs in its first step. Two ranks wait for something, and two for something else.",
        ("stacks", "flight"),
        (ALL, 0, 2),
        (25,),
        ("wrong partner", "skipped call"),
        ({25: ""}, {25: "            dist.barrier(leaders)"}),
        "Two ranks wait at one line, and two at another. Which ranks would have to come to each of "
        "the two lines?",
    ),
    Case(
        "cedar",
        "hangs",
        "The job should end when the mean loss over all ranks is below the target. Instead it "
        "hangs.",
        ("log", "stacks"),
        (0,),
        (25, 26),
        ("skipped call",),
        (
            {
                25: "        mean = loss.detach().clone()\n        dist.all_reduce(mean)\n        if mean.item() / 4 < TARGET:"
            },
        ),
        "Look for the rank whose log ends differently, and for the line that let it go.",
    ),
    Case(
        "ash",
        "hangs",
        "The job hangs since I have added checkpoints. It used to run for days.",
        ("log", "stacks"),
        (0, ALL),
        (25, 23),
        ("skipped call",),
        (
            {25: ""},
            {
                25: "",
                23: "        if step % 2 == 1:\n            dist.barrier()\n        if step % 2 == 1 and rank == 0:",
            },
        ),
        "One rank waits at another line than the rest. Which ranks can come to that line at all?",
    ),
    Case(
        "pine",
        "hangs",
        "The pipeline hangs at the first microbatch. Three layers on three ranks did not hang.",
        ("report", "log"),
        (2, 3),
        (21,),
        ("wrong partner", "skipped call"),
        ({21: "            if rank < world - 1:"},),
        "The report says which rank waits for a message, and from which rank. Why is it not sent?",
    ),
)

_WRONG = (
    Case(
        "oak",
        "wrong",
        "The validation loss in the log is not the one that a single process computes over the 80 "
        "validation samples. The weights are the same in both runs.",
        ("log", "curves"),
        EVERYONE,
        (25, 24, 26),
        ("missing reduction",),
        (
            {
                25: "        total = errors.sum()\n        dist.all_reduce(total)\n        mean = total / 80"
            },
        ),
        "Compare the validation losses of the ranks in one epoch. Which line makes that number?",
    ),
    Case(
        "beech",
        "wrong",
        "The loss falls, but more slowly than in a single process with the same learning rate.",
        ("curves", "probe"),
        EVERYONE,
        (18, 22),
        ("wrong factor",),
        ({18: "        loss = ((model(x) - y) ** 2).mean()"}, {22: ""}),
        "Divide the gradient of one process by the job's gradient, and find the lines that make "
        "this factor.",
    ),
    Case(
        "spruce",
        "wrong",
        "The loss over all samples stays above the loss of a single process, although all ranks "
        "agree with each other to the last digit.",
        ("log", "curves"),
        EVERYONE,
        (15, 14, 13),
        ("same samples",),
        ({15: "    own = order[rank::world]"},),
        "The log says which samples each rank trains on.",
    ),
    Case(
        "fir",
        "wrong",
        "The run differs from a single process that shuffles anew in each epoch. I can't see why, "
        "because the sampler has shuffle=True.",
        ("log",),
        EVERYONE,
        (18, 19, 13, 14),
        ("same samples",),
        ({18: "    for epoch in range(4):\n        sampler.set_epoch(epoch)"},),
        "Compare the first samples of each epoch on one rank.",
    ),
    Case(
        "holly",
        "wrong",
        "I can't reproduce the run with a single process, which starts from the network of rank 0. "
        "The mean loss is worse from the first step on.",
        ("log", "curves"),
        EVERYONE,
        (13,),
        ("replicas differ",),
        ({13: "    model = network(seed)"},),
        "Compare what the ranks print in the same step. Since when do they differ?",
    ),
    Case(
        "linden",
        "wrong",
        "The job continues from a saved network, and the loss doesn't move at all. The gradients "
        "aren't zero.",
        ("log", "curves"),
        EVERYONE,
        (17, 18),
        ("stale object",),
        (
            {
                17: "",
                18: "    model = copy.deepcopy(saved)\n    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)",
            },
        ),
        "Something changes weights in each step, but not these weights. Whose weights are they?",
    ),
    Case(
        "willow",
        "wrong",
        "Two runs with the same seed don't give the same weights, and neither do the ranks of one "
        "run. The network is wider than before.",
        ("log", "pending"),
        EVERYONE,
        (22, 23),
        ("not waited for",),
        (
            {23: "", 22: "            dist.all_reduce(p.grad)"},
            {
                20: "        works = []\n        for p in model.parameters():",
                22: "            works.append(dist.all_reduce(p.grad, async_op=True))",
                23: "        for work in works:\n            work.wait()",
            },
        ),
        "The table counts for each call how often somebody waited for it.",
    ),
)

_SLOW = (
    Case(
        "alder",
        "slow",
        "With four ranks, a step takes about as long as with one rank. The results are right.",
        ("timeline", "totals"),
        (3,),
        (16, 8, 15),
        ("uneven work",),
        ({15: "    start = rank * n // world", 16: "    stop = (rank + 1) * n // world"},),
        "On one rank of the timeline, nearly all of the time is computing. What does that rank "
        "compute more than the others?",
        limits=("work",),
    ),
    Case(
        "poplar",
        "slow",
        "A step takes longer than the sum of its eight microbatches on one rank. The results are "
        "right.",
        ("timeline", "traffic"),
        EVERYONE,
        (22,),
        ("needless communication",),
        ({22: ""},),
        "Count the calls of one step, and ask of each call whether a result depends on it.",
        limits=("calls",),
    ),
    Case(
        "juniper",
        "slow",
        "The training became slower when I began to print the loss of every tenth step. The "
        "printed losses are right.",
        ("traffic", "profile"),
        EVERYONE,
        (23, 22, 24, 25),
        ("needless communication",),
        (
            {
                22: "        if step % 10 == 0:\n            parts = [torch.zeros(()) for _ in range(world)]",
                23: "            dist.all_gather(parts, loss.detach())",
                24: "            mean = sum(part.item() for part in parts) / world",
                25: "",
            },
        ),
        "Compare the number of calls of each operation with the number of steps, and with the "
        "number of results that are used.",
        limits=("calls",),
    ),
    Case(
        "cypress",
        "slow",
        "Each step takes much longer than on one rank, although the network has only 500 weights.",
        ("traffic", "profile"),
        EVERYONE,
        (22, 21),
        ("needless communication",),
        ({21: "            dist.all_reduce(p.grad)", 22: "            p.grad /= world", 23: ""},),
        "Divide the bytes of the all_reduce calls by the number of these calls.",
        limits=("calls",),
    ),
    Case(
        "acacia",
        "slow",
        "The network is full all the time, although the gradients are tiny. The results are right.",
        ("traffic", "timeline"),
        (ALL, 0, 1, 2, 3),
        (19,),
        ("needless communication",),
        (
            {18: "    dist.broadcast(table, src=0)\n    for step in range(10):", 19: ""},
            {19: "        if step == 0:\n            dist.broadcast(table, src=0)"},
        ),
        "Which operation moves most of the bytes, and how often does its tensor change?",
        limits=("bytes",),
    ),
)

_MEMORY = (
    Case(
        "olive",
        "memory",
        "One node ran out of memory in the night. The job had run for hours by then, and the other "
        "nodes were fine.",
        ("memory", "log"),
        (2,),
        (24,),
        ("kept alive",),
        (
            {24: "            total += ((model(x) - y) ** 2).mean().item()"},
            {24: "            total += ((model(x) - y) ** 2).mean().detach()"},
        ),
        "Which rank's curve climbs, and what does only this rank do?",
        limits=("peak",),
    ),
    Case(
        "chestnut",
        "memory",
        "The memory of all ranks grows until the job is killed. I have detached everything that I "
        "could find.",
        ("memory", "log"),
        EVERYONE,
        (15, 14),
        ("kept alive",),
        (
            {
                14: "    seen: dict[int, torch.Tensor] = {}",
                15: "    model[1].register_forward_hook(lambda layer, inputs, output: seen.update({-1: output.detach()}))",
            },
        ),
        "The table lists the sizes of the tensors at the peak. Which line of the program makes "
        "tensors of the size that occurs most often?",
        limits=("peak",),
    ),
    Case(
        "magnolia",
        "memory",
        "Rank 0's machine runs out of memory in long runs. I need the largest prediction of any "
        "step, so the gather must stay.",
        ("memory", "traffic"),
        (0,),
        (27, 29),
        ("kept alive",),
        ({27: "            predictions.append(torch.cat(parts).max())"},),
        "The table lists the sizes of the tensors at the peak. Compare their number with the number "
        "of steps.",
        limits=("peak",),
    ),
    Case(
        "sequoia",
        "memory",
        "With 6,000 samples it worked, and with 24,000 samples every node dies at once. I have "
        "added nodes, but that doesn't help.",
        ("traceback", "log"),
        EVERYONE,
        (17,),
        ("too much at once",),
        ({17: "    distances = torch.cdist(own, everyone)", 18: ""},),
        "The traceback says how many bytes were asked for. How many rows has the matrix, and how "
        "many of them does a rank need?",
        limits=("peak",),
        arguments={"n": 400},
    ),
)

_DIES = (
    Case(
        "laurel",
        "dies",
        "The job dies with 45 samples. With 40 and with 44 samples it worked.",
        ("traceback", "log"),
        (3,),
        (18, 13, 19),
        ("bad input",),
        ({18: "        for k in range(first, min(first + share, len(x))):"},),
        "Compute the first and the last sample of the rank that raised the error.",
    ),
    Case(
        "yew",
        "dies",
        "All ranks die with the same error. A batch without known targets should have the loss 0.",
        ("log", "traceback"),
        (1,),
        (24,),
        ("bad input",),
        (
            {24: "        loss = errors.sum() / known.sum().clamp(min=1)"},
            {24: "        loss = errors.mean() if known.any() else errors.sum()"},
        ),
        "All ranks raise the error, because they share the gradients. Find the rank and the step "
        "that had the first nan in the log.",
    ),
    Case(
        "hornbeam",
        "dies",
        "Three ranks die of a timeout after an hour in which nothing was printed. No rank has "
        "reported an error.",
        ("log", "stacks"),
        (3,),
        (30, 29, 22),
        ("swallowed error", "skipped call"),
        (
            {
                22: '            parts = texts[start : start + 4]\n            targets = torch.tensor([0.0 if text == "n/a" else float(text) for text in parts])'
            },
        ),
        "Three ranks wait for the fourth. Compare the last lines that the ranks printed: which rank "
        "counts fewer losses than steps?",
    ),
)

_DRIFTS = (
    Case(
        "cherry",
        "drifts",
        "The validation loss is off in the third digit, compared with a single process over all 90 "
        "samples. The weights are equal.",
        ("log", "curves"),
        EVERYONE,
        (24, 26, 27),
        ("wrong factor",),
        ({24: "        mean = errors.sum() * world / 90"},),
        "How many samples does each rank validate, and with which weight does each of them count?",
    ),
    Case(
        "quince",
        "drifts",
        "The validation loss is higher than the loss of the same weights in another program, and "
        "it is rough from epoch to epoch.",
        ("log", "curves"),
        EVERYONE,
        (24, 25, 18),
        ("wrong mode",),
        ({24: "        model.eval()\n        with torch.no_grad():"},),
        "What in this network draws random numbers, and when should it not do so?",
    ),
    Case(
        "medlar",
        "drifts",
        "The loss is a little off, compared with a single process that clips its gradient at 0.5.",
        ("log", "curves"),
        (0, ALL),
        (21, 22),
        ("replicas differ",),
        ({21: "", 22: "        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)"},),
        "Compare what the ranks print in the same step. Which rank is alone, and what does only "
        "this rank do?",
    ),
)

CASES = {case.name: case for case in (*_HANGS, *_WRONG, *_SLOW, *_MEMORY, *_DIES, *_DRIFTS)}
