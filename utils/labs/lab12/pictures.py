"""Drawings of federated learning: who holds what, what travels, and what an attacker can read.

A run is a list with a dict for each round. Its keys are ``accuracy`` (a share), ``sent`` (bytes
that the server has received so far) and ``seconds``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from utils.figures import (
    BLUE,
    COMMUNICATING,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PALE,
    PINK,
    RED,
    SHARED,
    SKY,
)
from utils.figures.charts import chart, finish, group_bars, legend_below, panels
from utils.figures.shapes import arrow, box, canvas, frame

# Inches of a gallery: its largest width, and the width of the titles at its left.
_GALLERY, _TITLES = 8.8, 2.0
COLORS = (BLUE, ORANGE, GREEN, PINK, RED, SKY, INK)
MARKERS = "osD^vPX"


def phases(clients: int = 5, chosen: Sequence[int] = (1, 3)) -> Figure:
    """Draw the server, clients with their own data, and the five phases of a round."""
    _, axes = canvas(10, 4.4)
    middle = 2.2 * (clients - 1) / 2
    box(axes, middle, 3.2, "server: weights, no data", width=4.4, height=0.7, color=SHARED)
    for k in range(clients):
        x = 2.2 * k
        mine = k in chosen
        color = SKY if mine else "#DDDDDD"
        box(axes, x, 0.5, f"client {k}", width=1.7, height=0.6, color=color, alpha=0.7)
        box(axes, x, -0.35, "local data", width=1.7, height=0.6, color=color, alpha=0.35)
        if mine:
            arrow(axes, (x - 0.2, 2.75), (x - 0.2, 0.9), color=COMMUNICATING)
            arrow(axes, (x + 0.2, 0.9), (x + 0.2, 2.75), color=COMMUNICATING, style=":")
    steps = {
        3.45: ("1 select some of the clients", INK),
        2.3: ("2 send the weights", COMMUNICATING),
        0.1: ("3 train on local data", INK),
        1.5: ("4 return the change", COMMUNICATING),
        2.95: ("5 average the changes", INK),
    }
    for y, (text, color) in steps.items():
        axes.text(2.2 * clients - 0.9, y, text, va="center", color=color)
    words = (
        f"A server that has the weights and no data, above {clients} clients, each with its own "
        f"data. Clients {' and '.join(map(str, chosen))} are chosen: the server sends them the "
        "weights, they send back their changes, and the server averages the changes. Data stays "
        "with the clients."
    )
    return frame(axes, (-1.1, 2.2 * clients + 3.6), (-0.8, 4.1), words)


def holdings(counts: Mapping[str, Sequence[Sequence[int]]]) -> Figure:
    """Draw as dots how many images clients have: ``counts[title][client][class]``."""
    figure, row = panels(9, 3.3, columns=len(counts), sharey=True)
    words = []
    for axes, (title, of_clients) in zip(row, counts.items(), strict=True):
        n = np.asarray(of_clients)
        client, label = np.nonzero(n)
        axes.scatter(client, label, s=0.2 * n[client, label], color=SKY, alpha=0.9, linewidths=0)
        axes.set(title=title, xlabel="client")
        axes.margins(x=0.04)
        sizes = n.sum(1)
        kinds = (n > 0).sum(1)
        words.append(
            f"{title}: {len(n)} clients with {sizes.min()} to {sizes.max()} images of "
            f"{kinds.min()} to {kinds.max()} classes."
        )
    row[0].set(ylabel="class", yticks=range(10))
    return finish(
        figure, "Dots for each client and class, larger for more images. " + " ".join(words)
    )


def courses(runs: Mapping[str, Sequence[dict]], central: float, raw: float) -> Figure:
    """Draw accuracy over rounds, and over bytes.

    Args:
        runs: name → rounds.
        central: accuracy of the training with all data in one place.
        raw: bytes of these data.
    """
    figure, (left, right) = panels(9, 4.4, columns=2, sharey=True)
    for k, (name, rounds) in enumerate(runs.items()):
        accuracy = [100 * of_round["accuracy"] for of_round in rounds]
        look = {"color": COLORS[k], "marker": MARKERS[k], "markersize": 5, "linewidth": 1.5}
        left.plot(range(1, len(rounds) + 1), accuracy, label=name, **look)
        sent = [of_round["sent"] / 1e6 for of_round in rounds]
        right.plot(sent, accuracy, label=f"_{name}", **look)
    for axes, name in ((left, "all data in one place, 3 epochs"), (right, "_")):
        axes.axhline(100 * central, color=INK, linestyle="--", linewidth=1.3, label=name)
    right.axvline(raw / 1e6, color=GREY, linestyle=":", linewidth=1.5)
    right.text(raw / 1e6 + 0.7, 12, f"the images themselves:\n{raw / 1e6:.1f} MB", color=GREY)
    left.set(xlabel="round", ylabel="test accuracy [%]", ylim=(0, 100))
    right.set_xlabel("updates that the server received [MB]")
    right.set_xlim(left=0)
    legend_below(figure, left, columns=3, fontsize=10)
    return finish(figure, below=0.14)


def deadline(sends: Sequence[tuple], starts: Sequence[float], seconds: float) -> Figure:
    """Draw when each update was sent, against the deadline of its round.

    Args:
        sends: (round, client, time) of each update.
        starts: when each round began.
        seconds: the deadline, after the round began.
    """
    figure, axes = chart(9, 0.9 + 0.34 * len(starts))
    begin = starts[0]
    late = 0
    for t, start in enumerate(starts):
        axes.barh(t, seconds, left=start - begin, height=0.75, color=PALE)
    for intime, color, mark, name in ((True, BLUE, "o", "in time"), (False, RED, "X", "too late")):
        points = [(t, at) for t, _, at in sends if (at - starts[t] <= seconds) == intime]
        look = {"color": color, "marker": mark, "label": f"update {name}"}
        axes.scatter([at - begin for _, at in points], [t for t, _ in points], 40, zorder=3, **look)
        late += 0 if intime else len(points)
    axes.set(ylabel="round", yticks=range(len(starts)))
    axes.invert_yaxis()
    axes.set_xlabel(f"time [s]; light gray: the {seconds:g} s of the round")
    axes.legend(loc="upper right")
    words = (
        f"{len(starts)} rounds with a deadline of {seconds:g} s each. {late} of {len(sends)} "
        "updates were sent too late, during a later round or after the last one."
    )
    return finish(figure, words)


def by_class(runs: Mapping[str, Sequence[float]], names: Sequence[str]) -> Figure:
    """Draw the accuracy of each class in several runs."""
    figure, axes = chart(9, 3.8)
    percent = {name: [100 * share for share in shares] for name, shares in runs.items()}
    group_bars(axes, percent, names, share=1.0)
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
    axes.set(ylabel="accuracy of the class [%]", ylim=(0, 100))
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(runs))
    return finish(figure)


def choices(found: Mapping[str, Mapping]) -> Figure:
    """Draw how often clients were chosen, and how good the model is for them.

    Args:
        found: for each way to choose, the "counts" of the clients from the smallest to the largest,
            and the accuracies for "all clients", "the ten chosen least" and "the ten chosen most".
    """
    figure, (left, right) = panels(9, 3.8, columns=2)
    for k, (name, of) in enumerate(found.items()):
        places = range(1, len(of["counts"]) + 1)
        look = {"color": COLORS[k], "marker": MARKERS[k], "markersize": 4, "linewidth": 1.5}
        left.plot(places, of["counts"], label=name, **look)
    left.set(title="How often", xlabel="clients, from the least chosen", ylabel="rounds")
    groups = ["all clients", "the ten chosen least", "the ten chosen most"]
    percent = {name: [100 * of[group] for group in groups] for name, of in found.items()}
    bars = group_bars(right, percent, [group.replace("ten ", "ten\n") for group in groups])
    for container, color in zip(bars, COLORS, strict=False):
        for bar in container:
            bar.set_color(color)
        right.bar_label(container, fmt="%.0f", padding=1, fontsize=9)
    right.set(title="How good the model is for them", ylabel="accuracy [%]", ylim=(0, 100))
    legend_below(figure, left)
    words = []
    for name, of in found.items():
        never = sum(count < 0.5 for count in of["counts"])
        shares = ", ".join(f"{100 * of[group]:.0f} % for {group}" for group in groups)
        words.append(
            f"{name}: {never} clients chosen hardly ever, the most often chosen in "
            f"{of['counts'][-1]:.1f} rounds; accuracy {shares}."
        )
    return finish(figure, " ".join(words), below=0.08)


def gallery(rows: Mapping[str, Sequence], below: Mapping[str, Sequence[str]] | None = None):
    """Draw rows of images, one under the other.

    Args:
        rows: by title, images of 784 pixels each (or [28, 28]).
        below: by title, words under each image.
    """
    below = below or {}
    wide = max(len(images) for images in rows.values())
    across = min(1.15, (_GALLERY - _TITLES) / wide)  # inches, with the space next to an image
    side = across / 1.15
    lines = max((words[0].count("\n") + 1 for words in below.values()), default=0)
    room = 0.12 + 0.17 * lines  # inches under each row
    height = len(rows) * (side + room) + 0.1
    width = across * wide + _TITLES
    figure, grid = panels(width, height, rows=len(rows), columns=wide)
    for row, (title, images) in enumerate(rows.items()):
        line = grid[row * wide : (row + 1) * wide]
        for k, axes in enumerate(line):
            axes.set_axis_off()
            if k < len(images):
                pixels = np.asarray(images[k], float).reshape(28, 28)
                axes.imshow(np.clip(pixels, -0.9, 2.1), cmap="gray", vmin=-0.9, vmax=2.1)
                if title in below:
                    axes.text(14, 31, below[title][k], ha="center", va="top", fontsize=9)
        line[0].text(-3, 14, title, ha="right", va="center", fontsize=10.5)
    figure.subplots_adjust(
        left=(_TITLES - 0.1) / width,
        right=0.99,
        top=1 - 0.05 / height,
        bottom=room / height,
        hspace=room / side,
    )
    words = []
    for title, images in rows.items():
        captions = f" ({', '.join(below[title])})" if title in below else ""
        words.append(f"{title}: {len(images)} image{'s' * (len(images) != 1)}{captions}")
    figure.alt_text = "Images in rows. " + ". ".join(words).replace("\n", " ") + "."
    return figure


def trade(noise: Sequence[float], accuracy: Sequence[float], error: Sequence[float]) -> Figure:
    """Draw what noise costs and spoils, over the noise multiplier; its first entry is 0."""
    figure, (left, right) = panels(9, 3.4, columns=2)
    places = range(len(noise))
    left.plot(places, [100 * share for share in accuracy], "o-", color=BLUE, label="test accuracy")
    left.set(title="what training pays", ylabel="test accuracy [%]", ylim=(0, 100))
    right.plot(places, error, "D-", color=RED, label="error of the image")
    right.set_yscale("log")
    right.set(title="what the attack gets", ylabel="mean squared error per pixel")
    for axes in (left, right):
        axes.set_xticks(places, [f"{z:g}" for z in noise])
        axes.set_xlabel("noise multiplier z")
    return finish(figure)


def disguise(plain: Sequence[float], hidden: Sequence[int]) -> Figure:
    """Draw an update, and the same update under masks."""
    figure, (left, right) = panels(9, 3.1, columns=2)
    left.hist(plain, bins=60, color=SKY)
    left.set_yscale("log")
    left.set(title="an update", xlabel="change of a weight", ylabel="weights")
    right.hist(np.asarray(hidden) / 2**31, bins=40, color=GREY)
    right.set(title="the same, masked", xlabel="entry, as a share of $2^{31}$")
    right.set_xticks([-1, -0.5, 0, 0.5, 1])
    words = (
        f"Two histograms of {len(plain)} entries. Left: the changes of the weights, most of them "
        f"near 0, from {min(plain):.2g} to {max(plain):.2g}. Right: the masked update, in which "
        "all values from -1 to 1 are equally frequent."
    )
    return finish(figure, words)


def ladder(
    bright: Sequence[float] = (0.13, 0.31, 0.36, 0.62, 0.88),
    steps: Sequence[float] = (0.1, 0.25, 0.5, 0.75),
) -> Figure:
    """Draw images by their brightness, and above them to which of them each neuron answers."""
    figure, axes = chart(9, 3.4)
    for k, step in enumerate(steps):
        axes.barh(k + 1, 1.0 - step, left=step, height=0.55, color=PALE, edgecolor=INK)
        axes.axvline(step, color=GREY, linestyle=":", linewidth=1)
    for k, (height, color) in enumerate(zip(bright, COLORS, strict=False)):
        axes.plot([height], [0], "s", color=color, markersize=13)
        axes.text(height, -0.75, str(k), ha="center", va="center", fontsize=9)
        for row, step in enumerate(steps):
            if step < height:
                axes.plot([height], [row + 1], "s", color=color, markersize=8)
    axes.set(xlim=(0, 1), ylim=(-1.1, len(steps) + 0.6))
    axes.set_yticks(range(-1, len(steps) + 1))
    names = ["", "images", *(f"neuron {k} answers" for k in range(len(steps)))]
    axes.set_yticklabels(names)
    axes.set_xlabel("mean of an image's pixels (dotted: the neurons' thresholds)")
    axes.set_title("Each neuron mixes all images to the right of its threshold")
    seen = [
        f"neuron {k} answers to images "
        f"{', '.join(str(i) for i, height in enumerate(bright) if height > step)}"
        for k, step in enumerate(steps)
    ]
    words = f"{len(bright)} images by their mean brightness, and four neurons: {'; '.join(seen)}."
    return finish(figure, words)
