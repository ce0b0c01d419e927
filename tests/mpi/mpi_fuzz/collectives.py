"""The collectives: how one is drawn, how it is called, and what it does to the tensors.

The tensors of a call are a list on each member of the group. What a collective does is said on the
lists of all members, in the order of the group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from .drawing import Draw
from .tensors import COMPLEX, FLOATS, INTEGERS, MOVED, of_step, part, same, spec

Lists = Sequence[list[torch.Tensor]]

_ORDER, _BITS = ("SUM", "PRODUCT", "MIN", "MAX"), ("BAND", "BOR", "BXOR")
#: Which reductions the backend has of which dtypes.
REDUCED = {
    **dict.fromkeys(FLOATS, (*_ORDER, "AVG", "PREMUL_SUM")),
    **dict.fromkeys(INTEGERS, (*_ORDER, *_BITS)),
    "bool": (*_ORDER, *_BITS),
}
#: PyTorch hands complex tensors to these as real ones, twice as many numbers.
SUMS_OF_COMPLEX = ("all_reduce", "reduce", "all_reduce_coalesced")
FACTORS = (0.5, 2.0, 4.0)

_AFTER = "group=g[{group}], async_op={async_op})"
_OP = "op={op_text}, " + _AFTER
CALLS = {
    "broadcast": "dist.broadcast(x[0], src={root}, " + _AFTER,
    "all_reduce": "dist.all_reduce(x[0], " + _OP,
    "reduce": "dist.reduce(x[0], dst={root}, " + _OP,
    "gather": "dist.gather(x[0], x[1:] or None, dst={root}, " + _AFTER,
    "scatter": "dist.scatter(x[-1], x[:-1] or None, src={root}, " + _AFTER,
    "all_gather": "dist.all_gather(x[1:], x[0], " + _AFTER,
    "all_gather_into_tensor": "dist.all_gather_into_tensor(x[0], x[1], " + _AFTER,
    "reduce_scatter": "dist.reduce_scatter(x[-1], x[:-1], " + _OP,
    "reduce_scatter_tensor": "dist.reduce_scatter_tensor(x[1], x[0], " + _OP,
    "all_to_all": "dist.all_to_all(x[{size}:], x[:{size}], " + _AFTER,
    "all_to_all_single": "dist.all_to_all_single(x[1], x[0], {splits}, " + _AFTER,
    "barrier": "dist.barrier(" + _AFTER,
    "all_reduce_coalesced": "dist.all_reduce_coalesced(x, " + _OP,
    "all_gather_coalesced": (
        "dist.all_gather_coalesced([x[{count} * r:{count} * (r + 1)] for r in range(1, {size} + 1)]"
        ", x[:{count}], " + _AFTER
    ),
    # PyTorch has no public function for these two; FSDP and DTensor call them by its C++.
    "all_gather_into_tensor_coalesced": (
        "g[{group}].allgather_into_tensor_coalesced(x[{count}:], x[:{count}])"
    ),
    "reduce_scatter_tensor_coalesced": (
        "g[{group}].reduce_scatter_tensor_coalesced(x[{count}:], x[:{count}], options({op_text}))"
    ),
}
#: They give a work whatever they are asked.
ALWAYS_ASYNC = {"all_gather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"}
NAMES = tuple(CALLS)


def call(step: dict, rank: int) -> str:
    """The call of a rank in Python; its tensors are ``x``."""
    members = step["members"]
    splits = step["splits"][members.index(rank)] if step.get("splits") else None
    return CALLS[step["do"]].format(
        group=step["group"],
        async_op=rank in step["async"],
        size=len(members),
        root=step.get("root"),
        count=step.get("count"),
        op_text=_op(step),
        splits="None, None" if splits is None else ", ".join(map(str, splits)),
    )


def _op(step: dict) -> str:
    if step.get("op") == "PREMUL_SUM":
        return f"dist._make_nccl_premul_sum({step['factor']})"
    return f"dist.ReduceOp.{step.get('op')}"


# -- reductions -----------------------------------------------------------------------------------


def reduced(tensors: Sequence[torch.Tensor], op: str, factor: float = 1.0) -> torch.Tensor:
    """The reduction of tensors, one after the other, by NumPy; integers wrap around."""
    dtype = tensors[0].dtype
    arrays = [_array(t) for t in tensors]
    if op == "PREMUL_SUM":
        arrays = [a * factor for a in arrays]
    function = _function(op, dtype)
    total = arrays[0]
    with np.errstate(over="ignore"):  # NumPy warns of an element that wraps around, not of many
        for array in arrays[1:]:
            total = function(total, array)
    if op == "AVG":
        total = total / len(arrays)
    return torch.from_numpy(np.asarray(total)).to(dtype).reshape(tensors[0].shape)


def _array(of: torch.Tensor) -> np.ndarray:
    of = of.detach().contiguous()
    return (of.double() if of.is_floating_point() else of).numpy()


def _function(op: str, dtype: torch.dtype) -> Callable:
    if dtype is torch.bool and op in ("SUM", "AVG"):
        return np.logical_or
    table = {
        "SUM": np.add, "AVG": np.add, "PREMUL_SUM": np.add, "PRODUCT": np.multiply,
        "MIN": np.minimum, "MAX": np.maximum, "BAND": np.bitwise_and, "BOR": np.bitwise_or,
        "BXOR": np.bitwise_xor,
    }  # fmt: skip
    return table[op]


# -- what they do ---------------------------------------------------------------------------------


def play(step: dict, lists: Lists) -> None:
    """What the call does to the tensors of all members, in place."""
    before = [[t.clone() for t in tensors] for tensors in lists]
    root = step["members"].index(step["root"]) if "root" in step else None
    _PLAYS[step["do"]](step, before, lists, root)


def _op_of(step: dict, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return reduced(tensors, step["op"], step.get("factor", 1.0))


def _broadcast(step, before, lists, root) -> None:
    for tensors in (x for r, x in enumerate(lists) if r != root):
        tensors[0].copy_(before[root][0])


def _all_reduce(step, before, lists, root) -> None:
    for place in range(len(lists[0])):
        total = _op_of(step, [tensors[place] for tensors in before])
        for tensors in lists:
            tensors[place].copy_(total)


def _reduce(step, before, lists, root) -> None:
    lists[root][0].copy_(_op_of(step, [tensors[0] for tensors in before]))


def _gather(step, before, lists, root) -> None:
    for rank, tensors in enumerate(before):
        lists[root][1 + rank].copy_(tensors[0].reshape(lists[root][1 + rank].shape))


def _scatter(step, before, lists, root) -> None:
    for rank, tensors in enumerate(lists):
        tensors[-1].copy_(before[root][rank])


def _all_gather(step, before, lists, root) -> None:
    for tensors in lists:
        for rank, sent in enumerate(before):
            tensors[1 + rank].copy_(sent[0])


def _all_gather_into(step, before, lists, root) -> None:
    flat = torch.cat([tensors[1].reshape(-1) for tensors in before])
    for tensors in lists:
        tensors[0].copy_(flat.view(tensors[0].shape))


def _reduce_scatter(step, before, lists, root) -> None:
    for rank, tensors in enumerate(lists):
        tensors[-1].copy_(_op_of(step, [sent[rank] for sent in before]))


def _reduce_scatter_tensor(step, before, lists, root) -> None:
    total = _op_of(step, [sent[0] for sent in before]).reshape(-1)
    for rank, tensors in enumerate(lists):
        count = tensors[1].numel()
        tensors[1].copy_(total[rank * count : (rank + 1) * count].view(tensors[1].shape))


def _all_to_all(step, before, lists, root) -> None:
    size = len(lists)
    for rank, tensors in enumerate(lists):
        for other in range(size):
            tensors[size + other].copy_(before[other][rank])


def _all_to_all_single(step, before, lists, root) -> None:
    size = len(lists)
    for rank, tensors in enumerate(lists):
        rows = []
        for other, sent in enumerate(before):
            splits = step["splits"] and step["splits"][other][1]
            rows.append(sent[0].split(splits or [len(sent[0]) // size] * size)[rank])
        tensors[1].copy_(torch.cat(rows))


def _all_gather_coalesced(step, before, lists, root) -> None:
    count = step["count"]
    for tensors in lists:
        for rank, sent in enumerate(before):
            for place in range(count):
                tensors[(1 + rank) * count + place].copy_(sent[place])


def _by_pairs(one: Callable) -> Callable:
    """A coalesced call: the same of the i-th input and the i-th output."""

    def several(step, before, lists, root) -> None:
        for place in range(step["count"]):
            pairs = [[x[place], x[step["count"] + place]] for x in lists]
            one(step, [[t.clone() for t in pair] for pair in pairs], pairs, root)

    return several


def _outputs_first(step, before, lists, root) -> None:
    _all_gather_into(step, [x[::-1] for x in before], [x[::-1] for x in lists], root)


_PLAYS = {
    "broadcast": _broadcast,
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "barrier": lambda *_: None,
    "all_reduce_coalesced": _all_reduce,
    "all_gather_coalesced": _all_gather_coalesced,
    "all_gather_into_tensor_coalesced": _by_pairs(_outputs_first),
    "reduce_scatter_tensor_coalesced": _by_pairs(_reduce_scatter_tensor),
}


# -- how they are drawn ---------------------------------------------------------------------------


def draw(d: Draw, group: int, name: str | None = None, **fixed) -> dict:
    """A call on a group: its tensors on each member, and who does not wait for it.

    Args:
        name: of the collective; drawn without one.
        fixed: ``dtype``, ``shape``, ``op``, ``root`` that are not to be drawn.
    """
    name = name or d.random.choice(NAMES)
    members = d.groups[group]
    step = {"id": d.number(), "do": name, "group": group, "members": members, "async": []}
    # The future of a coalesced call hides its wait from the other ranks: no deadlock is seen.
    if d.chance(0.4) and not (d.faulty and name.endswith("coalesced")):
        step["async"] = [r for r in members if d.chance(0.8)]
    if name in ALWAYS_ASYNC:
        step["async"] = list(members)
    if name in ("broadcast", "reduce", "gather", "scatter"):
        step["root"] = fixed.get("root", d.random.choice(members))
    kind = "small"
    if "reduce" in name:
        kind = _draw_reduction(d, step, fixed)
    else:
        step["dtype"] = fixed.get("dtype") or d.random.choice(MOVED)
    if name == "barrier":
        step["make"] = [[] for _ in members]
    else:
        step["make"] = _DRAWN[name](d, step, kind, fixed.get("shape"))
    return step


def _draw_reduction(d: Draw, step: dict, fixed: dict) -> str:
    """Dtype and op of a reduction; returns the kind of values that makes it exact."""
    dtypes = REDUCED if step["do"] not in SUMS_OF_COMPLEX else (*REDUCED, *COMPLEX)
    dtype = step["dtype"] = fixed.get("dtype") or d.random.choice(tuple(dtypes))
    op = step["op"] = fixed.get("op") or d.random.choice(REDUCED.get(dtype, ("SUM",)))
    if op == "PREMUL_SUM":
        step["factor"] = d.random.choice(FACTORS)
    if dtype in INTEGERS and d.chance(0.2):
        return "huge"
    return {"PRODUCT": "tiny", "AVG": "twelves"}.get(op, "small")


def _shape(d: Draw, step: dict, shape, most: int = 1 << 30) -> list[int]:
    return d.shape(getattr(torch, step["dtype"]).itemsize, most) if shape is None else shape


def _of_each(d: Draw, step: dict, kind: str, shape) -> list[list[dict]]:
    """One tensor on each member: a new one, or what came of a step before."""
    members, exact = step["members"], step.get("op", "MAX") in ("MIN", "MAX", "BAND", "BOR")
    if shape is None and exact and d.chance(0.4) and (used := d.use(members)):
        number, _, dtype, again = used
        if "op" not in step or step["op"] in REDUCED.get(dtype, ()):
            step["dtype"], step["shape"] = dtype, again
            return [[of_step(number)] for _ in members]
        d.usable.append(used)
    shape = _shape(d, step, shape)
    only_read = {step["root"]} if step["do"] == "broadcast" else set()
    if step["do"] == "reduce":
        only_read = set(members) - {step["root"]}
    return [
        [d.spec(shape, step["dtype"], *(["expanded"] if r in only_read else []), kind=kind)]
        for r in members
    ]


def _several(d: Draw, step: dict, kind: str, shape) -> list[list[dict]]:
    shapes = [shape or _shape(d, step, None, 5000) for _ in range(d.random.randint(1, 3))]
    return [[d.spec(s, step["dtype"], kind=kind) for s in shapes] for _ in step["members"]]


def _draw_gather(d: Draw, step: dict, kind: str, shape) -> list[list[dict]]:
    shape, members, made = _shape(d, step, shape), step["members"], []
    for r in members:
        tensors = [d.spec(shape, step["dtype"], "expanded")]
        if r == step["root"]:
            tensors += [d.spec(shape, step["dtype"]) for _ in members]
            if d.chance(0.2):
                tensors[0] = d.spec(shape, step["dtype"])
                tensors[1 + members.index(r)] = same(0)
        made.append(tensors)
    return made


def _draw_scatter(d: Draw, step: dict, kind: str, shape) -> list[list[dict]]:
    shape, members, made = _shape(d, step, shape), step["members"], []
    for r in members:
        tensors = [d.spec(shape, step["dtype"])]
        if r == step["root"]:
            tensors = [d.spec(shape, step["dtype"], "expanded") for _ in members] + tensors
            if d.chance(0.2):
                tensors[members.index(r)] = d.spec(shape, step["dtype"])
                tensors[-1] = same(members.index(r))
        made.append(tensors)
    return made


def _draw_all_gather(d: Draw, step: dict, kind: str, shape) -> list[list[dict]]:
    members = step["members"]
    shapes = [_shape(d, step, shape)] * len(members)
    if shape is None and d.chance(0.4):
        shapes = [_shape(d, step, None, 5000) for _ in members]
    made = []
    for place in range(len(members)):
        outputs = [d.spec(s, step["dtype"]) for s in shapes]
        if d.chance(0.2):
            made.append([d.spec(shapes[place], step["dtype"]), *outputs])
            made[-1][1 + place] = same(0)
        else:
            made.append([d.spec(shapes[place], step["dtype"], "expanded"), *outputs])
    return made


def _whole(d: Draw, size: int, shape: list[int]) -> list[int]:
    """The shape of a tensor that holds one of `shape` of each rank: one after the other, or new."""
    if not shape or d.chance(0.4):
        return [size, *shape]
    return [size * shape[0], *shape[1:]]


def _draw_all_gather_into(d: Draw, step: dict, kind: str, shape) -> list[list[dict]]:
    shape, size = _shape(d, step, shape), len(step["members"])
    whole, made = _whole(d, size, shape), []
    for place in range(size):
        if d.chance(0.25):
            output = spec(d.random.randrange(1000), whole, step["dtype"])
            made.append([output, part(0, place * math.prod(shape), shape)])
        else:
            made.append([d.spec(whole, step["dtype"]), d.spec(shape, step["dtype"], "expanded")])
    return made


def _draw_reduce_scatter(d: Draw, step: dict, kind: str, shape) -> list[list[dict]]:
    size, dtype, made = len(step["members"]), step["dtype"], []
    shapes = [_shape(d, step, shape)] * size
    if shape is None and d.chance(0.4):
        shapes = [_shape(d, step, None, 5000) for _ in range(size)]
    for place in range(size):
        inputs = [d.spec(s, dtype, "expanded", kind=kind) for s in shapes]
        output = d.spec(shapes[place], dtype)
        if d.chance(0.2):
            inputs[place], output = d.spec(shapes[place], dtype, kind=kind), same(place)
        made.append([*inputs, output])
    return made


def _draw_reduce_scatter_tensor(d: Draw, step: dict, kind: str, shape) -> list[list[dict]]:
    shape, size = _shape(d, step, shape), len(step["members"])
    whole, made = _whole(d, size, shape), []
    for place in range(size):
        if d.chance(0.25):
            whole_spec = spec(d.random.randrange(1000), whole, step["dtype"], "plain", kind)
            made.append([whole_spec, part(0, place * math.prod(shape), shape)])
        else:
            large = d.spec(whole, step["dtype"], "expanded", kind=kind)
            made.append([large, d.spec(shape, step["dtype"])])
    return made


def _draw_all_to_all(d: Draw, step: dict, kind: str, shape) -> list[list[dict]]:
    size, dtype = len(step["members"]), step["dtype"]
    shape = _shape(d, step, shape)
    shapes = [[shape] * size for _ in range(size)]
    if d.chance(0.25):  # in place
        made = [[d.spec(shape, dtype) for _ in range(size)] for _ in range(size)]
        return [[*inputs, *map(same, range(size))] for inputs in made]
    if d.chance(0.6):
        shapes = [[[d.random.randrange(4)] for _ in range(size)] for _ in range(size)]
    return [
        [d.spec(s, dtype, "expanded") for s in shapes[place]]
        + [d.spec(row[place], dtype) for row in shapes]
        for place in range(size)
    ]


def _draw_all_to_all_single(d: Draw, step: dict, kind: str, shape) -> list[list[dict]]:
    size, dtype = len(step["members"]), step["dtype"]
    row = d.random.choice(([], [1], [3], [2, 2], [0]))
    if d.chance(0.4):
        rows = d.random.choice((0, 1, 2, 300))
        whole = [rows * size, *row]
        step["splits"] = None
        if d.chance(0.4):  # in place
            return [[d.spec(whole, dtype), same(0)] for _ in range(size)]
        return [[d.spec(whole, dtype, "expanded"), d.spec(whole, dtype)] for _ in range(size)]
    counts = [[d.random.choice((0, 0, 1, 2, 5)) for _ in range(size)] for _ in range(size)]
    step["splits"], made = [], []
    for place in range(size):
        sends, receives = counts[place], [other[place] for other in counts]
        step["splits"].append([receives, sends])
        large = d.spec([sum(sends), *row], dtype, "expanded")
        made.append([large, d.spec([sum(receives), *row], dtype)])
    return made


def _draw_all_gather_coalesced(d: Draw, step: dict, kind: str, shape) -> list[list[dict]]:
    shapes = [_shape(d, step, None, 5000) for _ in range(d.random.randint(1, 3))]
    step["count"] = len(shapes)
    return [
        [d.spec(s, step["dtype"]) for _ in range(len(step["members"]) + 1) for s in shapes]
        for _ in step["members"]
    ]


def _draw_into_coalesced(d: Draw, step: dict, kind: str, shape) -> list[list[dict]]:
    shapes = [_shape(d, step, None, 5000) for _ in range(d.random.randint(1, 3))]
    step["count"], size, made = len(shapes), len(step["members"]), []
    wholes = [_whole(d, size, s) for s in shapes]
    first, second = (shapes, wholes) if "gather" in step["do"] else (wholes, shapes)
    for _ in range(size):
        inputs = [d.spec(s, step["dtype"], "expanded", kind=kind) for s in first]
        made.append(inputs + [d.spec(s, step["dtype"]) for s in second])
    return made


_DRAWN = {
    "broadcast": _of_each,
    "all_reduce": _of_each,
    "reduce": _of_each,
    "gather": _draw_gather,
    "scatter": _draw_scatter,
    "all_gather": _draw_all_gather,
    "all_gather_into_tensor": _draw_all_gather_into,
    "reduce_scatter": _draw_reduce_scatter,
    "reduce_scatter_tensor": _draw_reduce_scatter_tensor,
    "all_to_all": _draw_all_to_all,
    "all_to_all_single": _draw_all_to_all_single,
    "all_reduce_coalesced": _several,
    "all_gather_coalesced": _draw_all_gather_coalesced,
    "all_gather_into_tensor_coalesced": _draw_into_coalesced,
    "reduce_scatter_tensor_coalesced": _draw_into_coalesced,
}
