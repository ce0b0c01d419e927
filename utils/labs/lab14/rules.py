"""The rules of the capstone: four ranks on two nodes, a slow network, a budget, a target."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch_mpi.network import Network

#: The ranks of each node.
NODES = ((0, 1), (2, 3))
RANKS = sum(len(node) for node in NODES)
#: Layer sizes of the model: `models.mlp(seed=0, sizes=SIZES)`, 50,890 parameters, 203,560 bytes.
SIZES = (784, 64, 10)
#: Entries train on the first TRAIN images of Fashion-MNIST. The first TEST test images judge them.
TRAIN, TEST = 12_000, 5_000


@dataclass(frozen=True)
class Rules:
    """The played machine, and the budget of an entry on it.

    Attributes:
        target: share of the test images that the model has to classify correctly.
        seconds: allowed on the played machine's clock, from the start to the target.
        slow_bytes: allowed between the nodes, both directions together.
        per_sample: seconds in which a rank computes the gradient of one image.
        between: the network between the nodes, with a link for each rank.
        inside: the network within a node.
        notice: seconds from a death until the other ranks have noticed it and made a new group.
        earliest, latest: how many images' gradients the victim has computed when it dies, at least
            and at most.
    """

    target: float = 0.80
    seconds: float = 12.0
    slow_bytes: int = 10_000_000
    per_sample: float = 1e-3
    between: Network = field(default_factory=lambda: Network(5e-3, 2.5e6))
    inside: Network = field(default_factory=lambda: Network(2e-5, 1.25e9))
    notice: float = 1.0
    earliest: int = 1500
    latest: int = 3000

    def __str__(self) -> str:
        return (
            f"target: {100 * self.target:g} % of the test images\n"
            f"budget: {self.seconds:g} s, {self.slow_bytes / 1e6:g} MB between the nodes "
            f"{' and '.join(str(list(node)) for node in NODES)}\n"
            f"computing: {1e3 * self.per_sample:g} ms for the gradient of one image\n"
            f"between the nodes: {self.between}\ninside a node: {self.inside}\n"
            f"one rank dies after it has computed {self.earliest:,} to {self.latest:,} images; "
            f"the other ranks notice this after {self.notice:g} s"
        )


def is_slow(one: int, other: int) -> bool:
    """Return whether a message between these ranks crosses the slow network."""
    return not any(one in node and other in node for node in NODES)
