"""The patients that don't reach the end of their program: they hang or die."""

from __future__ import annotations

from .case import ALL, EVERYONE, Case

HANGS = (
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
        "The job hangs in its first step, before it prints a loss. With one row it worked.",
        ("stacks", "flight"),
        EVERYONE,
        (24, 23),
        ("order of calls",),
        ({23: "", 24: ""},),
        "All ranks wait at the same line. Look in the flight recorder in which group each rank "
        "waits, and draw an arrow to the rank that it waits for.",
    ),
    Case(
        "birch",
        "hangs",
        "The job hangs in its first turn. My tests with pieces of 100 values all passed.",
        ("log", "stacks"),
        (ALL,),
        (17, 18),
        ("order of calls",),
        (
            {
                17: "        sending = dist.isend(piece, dst=right)",
                18: "        dist.recv(arriving, src=left)\n        sending.wait()",
            },
            {
                17: (
                    "        if rank % 2:\n"
                    "            dist.recv(arriving, src=left)\n"
                    "        dist.send(piece, dst=right)"
                ),
                18: "        if rank % 2 == 0:\n            dist.recv(arriving, src=left)",
            },
        ),
        "The stacks show what each rank waits in. Which rank could make the call they wait for?",
        arguments={"n": 300_000},
    ),
    Case(
        "elm",
        "hangs",
        "The epoch never ends on some of the ranks. All ranks must make the same number of steps, "
        "and batches that are left over are dropped.",
        ("log", "stacks"),
        EVERYONE,
        (14, 18),
        ("skipped call", "uneven work"),
        ({14: "    own = batches[: len(batches) // world * world][rank::world]"},),
        "Count the steps that each rank prints. Which line decides how many they are?",
    ),
    Case(
        "maple",
        "hangs",
        "The job hangs in its first step. Each pair by itself, without the leaders, was fine.",
        ("stacks", "flight"),
        EVERYONE,
        (25, 24),
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
        (0, ALL),
        (25, 26),
        ("skipped call", "missing reduction"),
        (
            {
                25: (
                    "        mean = loss.detach().clone()\n"
                    "        dist.all_reduce(mean)\n"
                    "        if mean.item() / 4 < TARGET:"
                )
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
                23: (
                    "        if step % 2 == 1:\n"
                    "            dist.barrier()\n"
                    "        if step % 2 == 1 and rank == 0:"
                ),
            },
        ),
        "One rank waits at another line than the rest. Which ranks can come to that line at all?",
    ),
    Case(
        "pine",
        "hangs",
        "The pipeline hangs. Its last rank has not printed a single microbatch, although the other "
        "ranks are done with all of theirs.",
        ("report", "log"),
        (2,),
        (21,),
        ("skipped call",),
        ({21: "            if rank < world - 1:"},),
        "The report says which rank waits for a message, and from which rank. Why is it not sent?",
    ),
)

DIES = (
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
        limits=("work",),
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
                22: (
                    "            parts = texts[start : start + 4]\n"
                    '            targets = torch.tensor([0.0 if text == "n/a" else '
                    "float(text) for text in parts])"
                )
            },
        ),
        "Three ranks wait for the fourth. Compare the last lines of the log: which rank counts "
        "fewer losses than steps?",
    ),
)
