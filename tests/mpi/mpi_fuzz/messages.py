"""Messages: pairs, bursts under one tag, from any rank, in batches, of objects; and their waits.

Each function draws a *strand*: steps in an order that, one step at a time over all ranks, never
waits for a step behind. So may any mixture of strands, which is what `program` makes of them.
"""

from __future__ import annotations

import torch

from .drawing import Draw
from .tensors import MOVED, of_step

HOW = ("wait", "wait", "wait", "poll", "future")


def wait(d: Draw, step: dict, ranks: list[int]) -> dict:
    """The wait of some ranks for a step before, each in a way of its own."""
    hows = [d.random.choice(HOW if not d.faulty else ("wait",)) for _ in ranks]
    return {"id": d.number(), "do": "wait", "of": step["id"], "ranks": ranks, "how": hows}


def _step(d: Draw, do: str, group: int, rank: int, peer, tag: int, make, **more) -> dict:
    step = {"id": d.number(), "do": do, "group": group, "rank": rank, "peer": peer, "tag": tag}
    return step | {"make": make} | more


def _shape_and_dtype(d: Draw, most: int = 1 << 30) -> tuple[list[int], str]:
    dtype = d.random.choice(MOVED)
    return d.shape(getattr(torch, dtype).itemsize, most), dtype


def pair(d: Draw, group: int) -> list[dict]:
    """One to a few messages between two ranks: blocking or not, the receive first or last."""
    source, target = d.ends(group)
    count = d.random.choice((1, 1, 1, 2, 4))
    tag = d.tag(group, [source], target)
    shape, dtype = _shape_and_dtype(d)
    sends, receives = [], []
    for _ in range(count):
        content = d.spec(shape, dtype, "expanded")
        if count == 1 and d.chance(0.2) and (used := d.use([source])):
            number, _, dtype, shape = used
            content = of_step(number)
        message = d.number()
        sends.append(_step(d, "isend", group, source, target, tag, [content], message=message))
        into = [d.spec(shape, dtype)]
        receives.append(_step(d, "irecv", group, target, source, tag, into, message=message))
    if source != target and count == 1 and d.chance(0.5):
        sends[0]["do"], receives[0]["do"] = "send", "recv"
        sends[0]["with_next"] = True
        strand = [*sends, *receives]
    else:
        strand = _posted(d, sends, receives)
    return _ended(strand, (group, [source], target, tag))


def _posted(d: Draw, sends: list[dict], receives: list[dict]) -> list[dict]:
    """Both sides' calls in a random order, then the waits; the last call of a pair may block."""
    rest, order, waits = [sends[:], receives[:]], [], []
    while rest[0] or rest[1]:
        side = d.random.choice([s for s in (0, 1) if rest[s]])
        step = rest[side].pop(0)
        last = not rest[0] and not rest[1]
        if last and step["rank"] != step["peer"] and d.chance(0.5):
            step["do"] = step["do"].removeprefix("i")
        order.append(step)
    for step in order:
        if step["do"].startswith("i"):
            waits.append(wait(d, step, [step["rank"]]))
    d.random.shuffle(waits)
    return order + waits


def from_any(d: Draw, group: int) -> list[dict]:
    """Some ranks send to one, which receives from any."""
    members = d.groups[group]
    target = d.random.choice(members)
    others = [r for r in members if r != target]
    sources = d.random.sample(others, d.random.randint(1, len(others)))
    tag = d.tag(group, members, target)  # nor one of its own
    shape, dtype = _shape_and_dtype(d)
    sends = [
        _step(d, "isend", group, r, target, tag, [d.spec(shape, dtype)], message=d.number())
        for r in sources
    ]
    into = [d.spec(shape, dtype) for _ in sources]
    messages = [s["message"] for s in sends]
    do = d.random.choice(("recv_any", "irecv_any"))
    receive = _step(d, do, group, target, None, tag, into, messages=messages)
    waits = [wait(d, s, [s["rank"]]) for s in sends]
    if do == "irecv_any":
        sends.insert(d.random.randint(0, len(sends)), receive)
        waits.append(wait(d, receive, [target]))
    else:
        sends.append(receive)
    d.random.shuffle(waits)
    return _ended(sends + waits, (group, members, target, tag))


def batch(d: Draw, group: int) -> list[dict]:
    """Several messages between the members of a group, by ``batch_isend_irecv``."""
    members = d.groups[group]
    messages, lists = [], {r: [] for r in members}
    for _ in range(d.random.randint(1, 4)):
        source, target = d.ends(group)
        tag = d.tag(group, [source], target)
        shape, dtype = _shape_and_dtype(d)
        number = d.number()
        messages.append((group, [source], target, tag))
        sent = {"op": "isend", "peer": target, "tag": tag, "message": number}
        lists[source].append((sent, d.spec(shape, dtype, "expanded")))
        taken = {"op": "irecv", "peer": source, "tag": tag, "message": number}
        lists[target].append((taken, d.spec(shape, dtype)))
    ranks = [r for r in members if lists[r]]
    for r in ranks:
        d.random.shuffle(lists[r])
    step = {"id": d.number(), "do": "batch", "group": group, "members": ranks}
    step["ops"] = [[op for op, _ in lists[r]] for r in ranks]
    step["make"] = [[spec for _, spec in lists[r]] for r in ranks]
    return _ended([step, wait(d, step, ranks)], *messages)


OBJECTS = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")


def objects(d: Draw, group: int) -> list[dict]:
    """Python objects: by a collective, or from one rank to another."""
    members = d.groups[group]
    do = d.random.choice(OBJECTS if len(members) == 1 else (*OBJECTS, "object_message"))
    step = {"id": d.number(), "do": do, "group": group, "members": members}
    step |= {"seed": d.random.randrange(1000), "count": d.random.choice((1, 2))}
    step["root"] = d.random.choice(members)
    if do == "object_message":
        source, target = d.random.sample(members, 2)
        step |= {"members": [source, target], "root": source}
    return [step]


def _ended(strand: list[dict], *tags: tuple) -> list[dict]:
    """With the last step the tags are free again."""
    strand[-1]["frees"] = [list(t) for t in tags]
    return strand
