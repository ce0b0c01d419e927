"""The patients that run, but with wrong numbers, too slowly, or with too much memory."""

from __future__ import annotations

from .case import ALL, EVERYONE, Case

WRONG = (
    Case(
        "oak",
        "wrong",
        "The validation loss in the log is not the one that a single process computes over the 80 "
        "validation samples. The weights are the same in both runs.",
        ("log", "curves"),
        (ALL, 0),
        (25, 24, 26),
        ("missing reduction",),
        (
            {
                25: (
                    "        total = errors.sum()\n"
                    "        dist.all_reduce(total)\n"
                    "        mean = total / 80"
                )
            },
        ),
        "Compare the validation losses of the ranks in one epoch. Which line makes that number?",
    ),
    Case(
        "beech",
        "wrong",
        "The loss falls, but more slowly than in a single process with the same learning rate.",
        ("curves", "probe"),
        (ALL,),
        (18, 22),
        ("wrong factor",),
        ({18: "        loss = ((model(x) - y) ** 2).mean()"}, {22: ""}),
        "Divide the gradient of one process by the job's gradient, and find the lines that make "
        "this factor.",
        limits=("work",),
    ),
    Case(
        "spruce",
        "wrong",
        "The loss over all samples stays above the loss of a single process, although all ranks "
        "agree with each other to the last digit.",
        ("log", "curves"),
        (ALL,),
        (15, 14),
        ("same samples",),
        ({15: "    own = order[rank::world]"},),
        "The log says which samples each rank trains on.",
        limits=("work",),
    ),
    Case(
        "fir",
        "wrong",
        "The run differs from a single process that shuffles anew in each epoch. I can't see why, "
        "because the sampler has shuffle=True.",
        ("log",),
        (ALL,),
        (18, 19, 13, 14),
        ("same samples",),
        (
            {18: "    for epoch in range(4):\n        sampler.set_epoch(epoch)"},
            {18: "    for epoch in range(4):\n        sampler.set_epoch(epoch + 1)"},
        ),
        "Compare the first samples of each epoch on one rank.",
    ),
    Case(
        "holly",
        "wrong",
        "I can't reproduce the run with a single process, which starts from the network of rank 0. "
        "The mean loss differs from the first step on.",
        ("log", "curves"),
        (ALL, 1, 2, 3),
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
        (ALL,),
        (17, 18),
        ("stale object",),
        (
            {
                17: "",
                18: (
                    "    model = copy.deepcopy(saved)\n"
                    "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, "
                    "momentum=0.5)"
                ),
            },
        ),
        "Something changes weights in each step, but not these weights. Whose weights are they?",
    ),
    Case(
        "willow",
        "wrong",
        "Two runs with the same seed don't give the same weights, and neither do the ranks of one "
        "run. It began when the averages went into the background.",
        ("log", "curves"),
        (ALL,),
        (24, 26, 25, 23),
        ("not waited for", "replicas differ"),
        (
            {24: "", 26: "            work.wait()\n        optimizer.step()"},
            {20: "", 23: "            dist.all_reduce(p.grad)", 25: "", 26: ""},
        ),
        "Which line reads the gradients, and what is known about the averages when it runs?",
    ),
)

SLOW = (
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
        "The ranks wait for much of each step, although they average only once in a step. The "
        "results are right.",
        ("timeline", "traffic"),
        (ALL,),
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
        (ALL,),
        (23, 22, 24, 25),
        ("needless communication",),
        (
            {
                22: (
                    "        if step % 10 == 0:\n"
                    "            parts = [torch.zeros(()) for _ in range(world)]"
                ),
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
        "Each step takes much longer than with one process, although the network has only 500 "
        "weights.",
        ("traffic", "profile"),
        (ALL,),
        (22, 21, 20),
        ("needless communication",),
        ({21: "            dist.all_reduce(p.grad)", 22: "            p.grad /= world", 23: ""},),
        "Divide the bytes of the all_reduce calls by the number of these calls.",
        limits=("calls",),
    ),
    Case(
        "acacia",
        "slow",
        "The links between the machines are busy all the time, although the gradients are tiny. "
        "The results are right.",
        ("traffic", "timeline"),
        (ALL, 0),
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

MEMORY = (
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
        (ALL,),
        (15, 14),
        ("kept alive",),
        (
            {23: "        optimizer.step()\n        del seen[:-1]"},
            {
                14: "    seen: dict[int, torch.Tensor] = {}",
                15: (
                    "    model[1].register_forward_hook(lambda layer, inputs, output: "
                    "seen.update({-1: output.detach()}))"
                ),
            },
        ),
        "The picture lists the sizes of the tensors at the peak. Which line of the program makes "
        "tensors of the size that occurs most often?",
        limits=("peak",),
    ),
    Case(
        "magnolia",
        "memory",
        "Rank 0's machine runs out of memory in long runs. Rank 0 needs the largest prediction "
        "of each step.",
        ("memory", "traffic"),
        (0,),
        (27, 29),
        ("kept alive",),
        ({27: "            predictions.append(torch.cat(parts).max())"},),
        "The picture lists the sizes of the tensors at the peak. Compare their number with the "
        "number of steps.",
        limits=("peak",),
    ),
    Case(
        "sequoia",
        "memory",
        "With 6,000 samples it worked, and with 24,000 samples every node dies at once. I have "
        "added nodes, but that doesn't help.",
        ("traceback", "log"),
        (ALL,),
        (17,),
        ("too much at once",),
        ({17: "    distances = torch.cdist(own, everyone)", 18: ""},),
        "The traceback says how many bytes were asked for. How many rows has the matrix, and how "
        "many of them does a rank need?",
        limits=("peak",),
        arguments={"n": 400},
    ),
)

DRIFTS = (
    Case(
        "cherry",
        "drifts",
        "The validation loss is off in the third digit, compared with a single process over all 90 "
        "samples. The weights are equal.",
        ("log", "curves"),
        (ALL,),
        (24, 26),
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
        (ALL,),
        (24, 25, 18),
        ("wrong mode",),
        ({24: "        model.eval()\n        with torch.no_grad():"},),
        "What in this network draws random numbers, and when should it not do so?",
    ),
    Case(
        "medlar",
        "drifts",
        "The loss is too low, compared with a single process that clips its gradient at 0.5.",
        ("log", "curves"),
        EVERYONE,
        (21, 22),
        ("replicas differ",),
        ({21: "", 22: "        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)"},),
        "Compare what the ranks print in the same step. Which rank is alone, and what does only "
        "this rank do?",
    ),
)
