"""Show that a wrong program does something wrong, without looking at a clock.

The label of a pair has the line ``proof: MANNER: EXPRESSION``. At the end of the wrong program and
of the right one, each rank evaluates the expression, which may use the program's names and the
functions of :data:`BEGIN`. The manner says how the ranks' values of the wrong program (w) and of
the right one (r) have to compare:

=========  =======================================================================
`differ`   r is the same on all ranks, and w is not
`equal`    w is the same on all ranks, and r is not
`other`    r and w are the same on all ranks, and they differ from each other
`more`     the largest w is above the largest r
=========  =======================================================================

`script` puts the programs into one script, so that one job proves them all.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from .programs import PRELUDE, Pair

#: The script's text before all programs. It counts barriers, groups and tensors kept for backward.
BEGIN = """\
import json
import weakref

c10d = dist.distributed_c10d
real_barrier = dist.barrier


class Saved:
    alive = weakref.WeakSet()

    def __init__(self, tensor):
        self.tensor = tensor
        self.alive.add(self)


def begin():
    global before, made
    before, made = len(c10d._world.pg_map), []
    torch.set_num_threads(1)
    Saved.alive.clear()


def counted(*args, **kwargs):
    made.append("barrier")
    return real_barrier(*args, **kwargs)


def weights(model):
    return [parameter.tolist() for parameter in model.parameters()]


def barriers():
    return made.count("barrier")


def groups():
    return len(c10d._world.pg_map) - before


def bytes_for_backward():
    return sum(saved.tensor.nbytes for saved in Saved.alive)


dist.barrier = counted
hooks = torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor)
hooks.__enter__()
values = []
"""
#: The script's text after all programs. Each rank prints one line with its values.
END = 'sys.stdout.write(f"{json.dumps([rank, values])}\\n")\n'


def script(pairs: Iterable[Pair]) -> str:
    """Return a script that runs the wrong and the right program of these pairs, one by one."""
    lines = [PRELUDE, BEGIN]
    for pair in pairs:
        _, _, expression = pair.proof.partition(": ")
        for right in (False, True):
            text = pair.text(right).removeprefix(PRELUDE) + f"result = {expression}\n"
            lines.append("begin()\nnames = dict(globals())")
            lines.append(f"exec({text!r}, names)\nvalues.append(names.pop('result'))")
            # Gloo drops a message if its request is deleted before the message is received.
            lines.append("real_barrier()\ndel names")
    return "\n".join([*lines, END])


def proven(pairs: Sequence[Pair], out: str) -> dict[str, bool]:
    """Return for each pair's name whether the values show a mistake.

    Args:
        out: what all ranks of the `script` printed.
    """
    ranks = [json.loads(line)[1] for line in out.splitlines() if line.startswith("[")]
    found = {}
    for k, pair in enumerate(pairs):
        wrong, right = ([values[2 * k + side] for values in ranks] for side in (0, 1))
        found[pair.name] = shows(pair.proof.partition(": ")[0], wrong, right)
    return found


def shows(manner: str, wrong: list[Any], right: list[Any]) -> bool:
    """Say whether the values of all ranks compare in this manner.

    Raises:
        ValueError: there is no such manner.
    """
    same_wrong, same_right = (all(v == values[0] for v in values) for values in (wrong, right))
    if manner == "differ":
        return same_right and not same_wrong
    if manner == "equal":
        return same_wrong and not same_right
    if manner == "other":
        return same_right and same_wrong and wrong != right
    if manner == "more":
        return bool(max(wrong) > max(right))
    raise ValueError(f"{manner!r} is not a manner to compare values")
