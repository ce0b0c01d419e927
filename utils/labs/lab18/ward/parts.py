"""Put a program together: the nightly job's parts, one form of each, and `train`, which calls them.

`parts.txt` has the parts. A part begins with `# NAME` and with its lines in `train`:

- `setup 20: own = …` before the loop, `step 40: …` in the loop, and `end 10: …` after it. The
  numbers say the order.
- `gives: "loss": …` is an entry of the dict that `train` returns.

Then each form begins with `## NAME` and has one or two functions, which all forms of a part have.
A part without forms has only lines in `train`, and each program has it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

FILE = Path(__file__).with_name("parts.txt")
#: A line of a part in `train`.
IN_TRAIN = re.compile(r"(setup|step|end) (\d+): (.*)|gives: (.*)")
#: The parameters of `train`, and their values if a patient says nothing else.
SIZES = {"n": "96", "steps": "8", "width": "16", "length": "2_000"}
#: The import that a word of a program needs.
IMPORTS = {
    "copy.": "import copy",
    "deque(": "from collections import deque",
    "torch.": "import torch",
    "dist.": "import torch.distributed as dist",
    "F.": "import torch.nn.functional as F",
    "nn.": "from torch import nn",
}


@dataclass
class Part:
    """A part of the job.

    Attributes:
        lines: by phase ("setup", "step", "end"), pairs of a number for the order, and a line.
        gives: an entry of the result; "" if the part gives none.
        forms: by name, the text of the part's functions.
    """

    lines: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    gives: str = ""
    forms: dict[str, str] = field(default_factory=dict)


@functools.cache
def parts() -> dict[str, Part]:
    """Return all parts by their names."""
    blocks = FILE.read_text(encoding="utf-8").split("\n# ")[1:]
    return {block.partition("\n")[0].strip(): _part(block.partition("\n")[2]) for block in blocks}


def _part(text: str) -> Part:
    head, *forms = ("\n" + text).split("\n## ")
    part = Part()
    for phase, number, line, gives in IN_TRAIN.findall(head):
        if gives:
            part.gives = gives
        else:
            part.lines.setdefault(phase, []).append((int(number), line))
    part.forms = {form.partition("\n")[0]: form.partition("\n")[2].rstrip() for form in forms}
    return part


def program(name: str, chosen: Mapping[str, str], sizes: Mapping[str, str]) -> str:
    """Return the text of a program.

    Args:
        name: the program's name.
        chosen: by part, the text of its functions, in the order of the program.
        sizes: values of the parameters of `train` that differ from `SIZES`.
    """
    everywhere = [part for name, part in parts().items() if not part.forms]
    used = [*(parts()[one] for one in chosen), *everywhere]
    functions = [*chosen.values(), _train(used, sizes, fixed="steps" in chosen)]
    body = "\n\n\n".join(functions)
    return f"{_head(name, body)}\n\n\n{body}\n"


def _head(name: str, body: str) -> str:
    """Return the docstring of a program, and the imports that its functions need."""
    needed = [
        line for word, line in IMPORTS.items() if re.search(rf"(?<![\w.]){re.escape(word)}", body)
    ]
    standard = [line for line in needed if "torch" not in line]
    blocks = [
        f'"""The nightly job of team {name}: trains a small network, and fills a dashboard."""',
        *(["\n".join(standard)] if standard else []),
        "\n".join(line for line in needed if "torch" in line),
    ]
    return "\n\n".join(blocks)


def _train(used: Iterable[Part], sizes: Mapping[str, str], fixed: bool) -> str:
    """Return the function `train`; `fixed` says that a part computes the number of steps."""
    lines: dict[str, list[tuple[int, str]]] = {"setup": [], "step": [], "end": []}
    gives = ['"losses": losses']
    for part in used:
        gives += [part.gives] if part.gives else []
        for phase, numbered in part.lines.items():
            lines[phase] += numbered
    setup, step, end = ([line for _, line in sorted(lines[phase])] for phase in lines)
    return "\n".join([
        f"def train({_parameters(setup, sizes, fixed)}):",
        '    """Run the job, and return the numbers of its dashboard."""',
        "    rank, world = dist.get_rank(), dist.get_world_size()",
        *(f"    {line}" for line in setup),
        "    losses = []",
        "    for step in range(steps):",
        *(f"        {line}" for line in step),
        *(f"    {line}" for line in end),
        "    return {",
        *(f"        {entry}," for entry in gives),
        "    }",
    ])


def _parameters(setup: list[str], sizes: Mapping[str, str], fixed: bool) -> str:
    """Return the parameters of `train`: a seed, and the sizes that its first lines need."""
    words = set(re.findall(r"\w+", " ".join(setup))) | {"steps"}
    known = [key for key in SIZES if key in words and not (key == "steps" and fixed)]
    return ", ".join(["seed", *(f"{key}={sizes.get(key, SIZES[key])}" for key in known)])
