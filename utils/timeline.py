"""A picture of what the ranks communicated in the last cell, from their own records.

from utils import timeline
timeline.watch(ranks)       # once, after the ranks are up
timeline.draw(ranks)        # after any %%px cell
"""

from __future__ import annotations

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from . import figures

COLORS = {"send": figures.BLUE, "recv": figures.ORANGE, "collective": figures.GREEN}
_HEIGHT = 0.5

# -- on the ranks -----------------------------------------------------------------------------

_mark = 0


def start_watching(user_ns: dict, *, rank: int) -> None:
    """Have every cell of this rank begin a new timeline."""
    from IPython import get_ipython

    events = get_ipython().events
    if _begin not in events.callbacks["pre_run_cell"]:
        events.register("pre_run_cell", _begin)


def _begin(info) -> None:
    # The kernel's questions run as silent cells, which IPython does not announce: they leave the
    # timeline of the last cell alone.
    global _mark
    from .mpi.record import log

    _mark = log.mark()


def last_calls(user_ns: dict, *, rank: int) -> list[dict]:
    """What this rank communicated since its last cell began."""
    from .checks.task import as_dict
    from .mpi.record import log

    return [as_dict(call) for call in log.since(_mark)]


# -- in the kernel ----------------------------------------------------------------------------


def watch(ranks) -> None:
    """Have the ranks of this machine keep a timeline for each cell."""
    ranks.ask(f"{__name__}:start_watching")


def calls(ranks) -> list[list[dict]]:
    """The communications of the last cell: one list per rank, of dicts (see ``Call``)."""
    return [reply.value or [] for reply in ranks.ask(f"{__name__}:last_calls")]


def draw(ranks, title: str = "What the ranks communicated") -> Figure | None:
    """Draw the last cell: a lane per rank, a bar per operation, an arrow per message."""
    per_rank = calls(ranks)
    if not any(per_rank):
        print("The ranks communicated nothing in the last cell.")
        return None
    return draw_calls(per_rank, title)


def draw_calls(per_rank: list[list[dict]], title: str) -> Figure:
    """The picture for given calls. Ranks of one machine share a clock, so no shift is needed."""
    figures.use_style()
    begin = min(call["start"] for row in per_rank for call in row)
    figure, axes = plt.subplots(figsize=(9, 1.0 + 0.7 * len(per_rank)))
    for rank, row in enumerate(per_rank):
        for call in row:
            _bar(axes, rank, call, begin)
    for rank, row in enumerate(per_rank):
        for start, end, peer in _messages(rank, row, per_rank):
            axes.annotate(
                "",
                ((end - begin) * 1e3, peer),
                ((start - begin) * 1e3, rank),
                arrowprops={"arrowstyle": "-|>", "color": figures.INK, "linewidth": 1.4},
                zorder=4,
            )
    axes.set_yticks(range(len(per_rank)), [f"rank {r}" for r in range(len(per_rank))])
    axes.set_ylim(len(per_rank) - 0.4, -0.6)
    axes.grid(False, axis="y")
    axes.set_xlabel("time since the first call [ms]")
    axes.set_title(title)
    axes.legend(
        handles=[*(Patch(color=c, label=k) for k, c in COLORS.items()), _arrow_handle()],
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
    )
    figure.tight_layout()
    plt.close(figure)  # shown once, as the value of the cell
    return figure


def _bar(axes, rank: int, call: dict, begin: float) -> None:
    end = call["end"] or call["start"]
    color = COLORS.get(call["op"], COLORS["collective"])
    left, width = (call["start"] - begin) * 1e3, (end - call["start"]) * 1e3
    # Open: not blocking, so the rank may have computed meanwhile.
    axes.barh(
        rank, width, _HEIGHT, left, color=color, alpha=0.9 if call["blocking"] else 0.35,
        edgecolor=color, linewidth=1.2,
    )  # fmt: skip


def _messages(rank: int, row: list[dict], per_rank: list[list[dict]]):
    """Start, end and receiver of each message that ``rank`` sent: the k-th send meets the k-th
    recv of the same pair and tag (MPI 4.1, section 3.5: messages don't overtake)."""
    taken: dict[tuple, int] = {}
    for call in row:
        if call["op"] != "send":
            continue
        key = (call["peer"], call["tag"], tuple(call["group"]))
        k = taken[key] = taken.get(key, -1) + 1
        matches = [
            c
            for c in per_rank[call["peer"]]
            if (c["op"], c["peer"], c["tag"], tuple(c["group"])) == ("recv", rank, *key[1:])
        ]
        if k < len(matches) and matches[k]["end"]:
            yield call["start"], matches[k]["end"], call["peer"]


def _arrow_handle() -> Line2D:
    return Line2D([], [], color=figures.INK, marker=">", label="message")
