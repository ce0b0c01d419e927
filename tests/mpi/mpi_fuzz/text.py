"""A program as Python: what the ranks run, and what a person reads and runs.

    mpiexec -n 3 python program.py

A rank's part of a step stands below ``if rank in (…)``. ``t[3]`` are the tensors of step 3,
``w[3]`` are its works; ``check(3)`` compares with the model.
"""

from __future__ import annotations

import json

from . import collectives
from .tensors import statements

#: What reports name the lines of a program by.
NAME = "program.py"

_HEAD = '''\
"""Program {seed} of the fuzzer{fault}: mpiexec -n {size} python {name}"""

import sys

sys.path.insert(0, {tests!r})

import json
from datetime import timedelta

import torch
import torch.distributed as dist

from mpi_fuzz.running import Checks, completed, options, thing
from mpi_fuzz.tensors import tensor

PROGRAM = json.loads(
    r"""
{data}
"""
)
check = Checks(PROGRAM)
check.begin()
rank, g, t, w = dist.get_rank(), {{0: dist.group.WORLD}}, check.tensors, {{}}
'''
_TAIL = """
closing = torch.full((7,), 1, dtype=torch.int64)
dist.all_reduce(closing)
check.end()
"""


def python(program: dict, tests: str) -> str:
    """The program's text. `tests` is the folder of the package, as the text shall name it."""
    fault = f", with a fault ({program['fault']['kind']})" if "fault" in program else ""
    data = _broken(json.dumps(program))
    head = _HEAD.format(
        seed=program["seed"], size=program["size"], name=NAME, tests=tests, data=data, fault=fault
    )
    return head + "".join(_step(program, step) for step in program["steps"]) + _TAIL


def _broken(data: str) -> str:
    """JSON on lines: a step each."""
    return data.replace('{"id"', '\n{"id"')


def _step(program: dict, step: dict) -> str:
    """Every rank's part; ranks with the same part share it."""
    parts: dict[tuple, list[int]] = {}
    for rank in range(program["size"]):
        mine = step.get("instead", {}).get(str(rank), step)
        if mine is not None and (lines := _lines(mine, rank, "fault" in program)):
            parts.setdefault(tuple(lines), []).append(rank)
    text = f"\n# {step['id']}: {step['do']}\n"
    for lines, ranks in parts.items():
        ranks = list(range(program["size"])) if step["do"] == "new_group" else ranks
        which = f"if rank == {ranks[0]}:" if len(ranks) == 1 else f"if rank in {tuple(ranks)}:"
        if len(ranks) == program["size"]:
            text += "\n".join(lines) + "\n"
        else:
            text += "\n".join([which, *(f"    {line}" for line in lines)]) + "\n"
    return text


def _lines(step: dict, rank: int, faulty: bool) -> list[str]:
    """What a rank does in a step; nothing, where it has no part in it."""
    do, number = step["do"], step["id"]
    if do == "new_group":
        return [f"g[{step['group']}] = dist.new_group({step['members']})"]
    if do == "raise":
        return ['raise ValueError("planted")'] if rank == step["rank"] else []
    if do == "exit":
        return ["sys.exit()"] if rank == step["rank"] else []
    if rank not in _ranks(step):
        return []
    if do == "wait":
        how = step["how"][step["ranks"].index(rank)]
        waited = [f"completed(w[{step['of']}], {how!r})".replace("'", '"')]
        return [*waited, *([] if faulty else [f"check({step['of']})"])]
    if do in collectives.CALLS:
        lines = _collective(step, rank)
    elif do == "batch":
        lines = _batch(step, rank)
    elif "tag" in step:
        lines = _message(step)
    else:
        return _objects(step, rank)
    if (
        not faulty
        and rank not in step.get("async", ())
        and not do.startswith("i")
        and do != "batch"
    ):
        lines.append(f"check({number})")
    return lines


def _ranks(step: dict) -> list[int]:
    if step["do"] == "wait":
        return step["ranks"]
    return [step["rank"]] if "rank" in step else step["members"]


def _collective(step: dict, rank: int) -> list[str]:
    number = step["id"]
    made = statements(step["make"][step["members"].index(rank)], number)
    call = collectives.call(step, rank)
    return [*made, f"x = t[{number}]", f"w[{number}] = [{call}]"]


def _message(step: dict) -> list[str]:
    """A message from the view of one of its ranks."""
    number, do = step["id"], step["do"]
    after = f"group=g[{step['group']}], tag={step['tag']})"
    lines = statements(step["make"], number)
    if do == "recv_any":
        call = f"who = [dist.recv(x, {after} for x in t[{number}]]"
    elif do == "irecv_any":
        call = f"w[{number}] = [dist.irecv(x, {after} for x in t[{number}]]"
    elif do.startswith("i"):
        call = f"w[{number}] = [dist.{do}(t[{number}][0], {step['peer']}, {after}]"
    else:
        call = f"dist.{do}(t[{number}][0], {step['peer']}, {after}"
    return [*lines, call]


def _batch(step: dict, rank: int) -> list[str]:
    place, number = step["members"].index(rank), step["id"]
    ops = [
        f"    dist.P2POp(dist.{op['op']}, t[{number}][{k}], {op['peer']}, g[{step['group']}], "
        f"{op['tag']}),"
        for k, op in enumerate(step["ops"][place])
    ]
    made = statements(step["make"][place], number)
    return [*made, "ops = [", *ops, "]", f"w[{number}] = dist.batch_isend_irecv(ops)"]


def _objects(step: dict, rank: int) -> list[str]:
    do, root, group = step["do"], step["root"], f"group=g[{step['group']}]"
    mine = f"thing({step['seed']}, rank)"
    size = len(step["members"])
    several = f"[thing({step['seed']}, {root} + k) for k in range({step['count']})]"
    empty = f"[None] * {step['count']}"
    if do == "all_gather_object":
        lines = [f"o = [None] * {size}", f"dist.all_gather_object(o, {mine}, {group})"]
    elif do == "gather_object":
        lines = [f"o = [None] * {size} if rank == {root} else None"]
        lines.append(f"dist.gather_object({mine}, o, {root}, {group})")
    elif do == "scatter_object_list":
        each = f"[thing({step['seed']}, r) for r in {step['members']}]"
        lines = ["o = [None]", f"dist.scatter_object_list(o, {each}, {root}, {group})"]
    elif do == "broadcast_object_list":
        lines = [f"o = {several if rank == root else empty}"]
        lines.append(f"dist.broadcast_object_list(o, {root}, {group})")
    elif rank == root:
        lines = [f"o = {several}", f"dist.send_object_list(o, {step['members'][1]}, {group})"]
    else:
        lines = [f"o = {empty}", f"dist.recv_object_list(o, {root}, {group})"]
    return [*lines, f"check.objects({step['id']}, o)"]
