"""What all parts of a program are drawn with: numbers, shapes, and what is in use already."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from .tensors import WRITABLE, spec

# Bytes at which the backend changes its way: a message within its envelope, Open MPI's eager
# limit, a ring instead of MPI's own non-blocking all_reduce.
BORDERS, FAR_BORDER = (2048, 4096), 512 * 1024
_SHAPES = ([], [0], [1], [3], [8], [2, 3], [4, 1, 2], [5, 7], [0, 4], [3, 0], [1, 1])


@dataclass
class Draw:
    """A program that is being drawn.

    Attributes:
        random: where all chance comes from.
        size: ranks of the world.
        groups: global ranks of each group; the first is the world.
        usable: tensors that a later step may go on with: ``(step, members, dtype, shape)``.
        faulty: a fault will be planted: nothing that would wait for ever without an error.
    """

    random: Random
    size: int
    groups: list[list[int]] = field(default_factory=list)
    usable: list[tuple] = field(default_factory=list)
    faulty: bool = False
    _steps: int = 0
    _tags: set[tuple] = field(default_factory=set)

    def number(self) -> int:
        """A number for the next step."""
        self._steps += 1
        return self._steps

    def chance(self, share: float) -> bool:
        """True so often."""
        return self.random.random() < share

    def shape(self, itemsize: int, most: int = FAR_BORDER) -> list[int]:
        """A shape: small, or as many bytes as one of the borders, one element more or less."""
        border = None
        if self.chance(0.03) and most >= FAR_BORDER:
            border = FAR_BORDER
        elif self.chance(0.2):
            border = self.random.choice(BORDERS)
        if border is None:
            return list(self.random.choice(_SHAPES))
        count = border // itemsize + self.random.choice((-1, 0, 1))
        return [count // 2, 2] if count % 2 == 0 and self.chance(0.5) else [count]

    def layout(self, *more: str) -> str:
        """A layout in memory that can be written, or one of `more`."""
        return "plain" if self.chance(0.5) else self.random.choice(WRITABLE + more)

    def spec(self, shape, dtype: str, *more: str, kind: str = "small") -> dict:
        """A tensor with values and a layout of its own."""
        return spec(self.random.randrange(1000), shape, dtype, self.layout(*more), kind)

    def ends(self, group: int) -> tuple[int, int]:
        """Who sends a message, and who receives it; now and then a rank itself."""
        members = self.groups[group]
        return self.random.choice(members), self.random.choice(members)

    def use(self, members: list[int]) -> tuple | None:
        """A usable tensor that these ranks have; until it is given again, nobody else has it."""
        found = [u for u in self.usable if set(members) <= set(u[1])]
        if not found:
            return None
        used = self.random.choice(found)
        self.usable.remove(used)
        return used

    def tag(self, group: int, sources: list[int], destination: int) -> int:
        """A tag that no message under way from these ranks to that one has; it is in use then.

        Never 0, the tag of PyTorch's messages of objects.
        """
        tag = self.random.randrange(1, 5)
        while any((group, s, destination, tag) in self._tags for s in sources):
            tag += self.random.choice((1, 3, 1000))
        self._tags |= {(group, s, destination, tag) for s in sources}
        return tag

    def give_back(self, group: int, sources: list[int], destination: int, tag: int) -> None:
        """Nothing with this tag is under way any more."""
        self._tags -= {(group, s, destination, tag) for s in sources}
