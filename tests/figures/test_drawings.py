"""The drawings of labs: as wide as a page, with words that can be read, and inside the figure."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import matplotlib.pyplot as plt
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from utils.figures import forms, waits
from utils.forecast import machine
from utils.labs.lab04 import pictures as replicas
from utils.labs.lab06 import pictures as allreduces
from utils.labs.lab07 import pictures as servers
from utils.labs.lab08 import pictures as averaging
from utils.labs.lab09 import pictures as layers
from utils.labs.lab10 import pictures as pipelines
from utils.labs.lab11 import pictures as meshes
from utils.labs.lab11.mixes import Mix
from utils.labs.lab12 import pictures as federated
from utils.labs.lab13 import pictures as faults
from utils.labs.lab14 import pictures as capstone
from utils.labs.lab14.entry_judge import Entry
from utils.labs.lab14.rules import Rules
from utils.labs.shared import minibatch_pictures as minibatches
from utils.labs.shared import schedules

#: Pixels of the smallest words: a label on a thin bar.
LEAST_PIXELS = 9

STEP = {"begin": 1.0, "computed": 1.04, "end": 1.1, "buckets": [(1.01, 1.02, 1.06, 1e6)]}
CURVE = [(0.1 * k, 7 * k, 0.5 + 0.01 * k) for k in range(12)]
RUN = {"curve": CURVE, "gradients": 77, "staleness": [0, 1, 2]}
APPLIED = [(1, 0), (2, 1), (3, 1), (1, 3)]
KINDS = {"parameters": 2e6, "gradients": 2e6, "optimizer state": 4e6, "peak": 9e6, "sent": 2e6}
WAIT = SimpleNamespace(edges=[(0, 1), (1, 0), (2, 0), (3, 0)], cycle=(0, 1, 0))
IMAGES = {"update of 8, E = 5": [[0.0] * 784] * 8}
SPANS = schedules.zero_bubble(4, 8)
LANES = ("batch", "center", "computing", "weights")
TURNS = {lane: [(0.1 * t, 0.1 * t + 0.03) for t in range(3)] for lane in LANES}
GROUPS = ("all clients", "the ten chosen least", "the ten chosen most")
CHOSEN = {"counts": list(range(30)), **dict.fromkeys(GROUPS, 0.7)}

DRAWINGS: dict[str, Callable[[], Figure]] = {
    "partition": lambda: minibatches.partition(25, 8, 4, highlight=3),
    "sampler_view": lambda: minibatches.sampler_view({"epoch 0": [[0, 1], [1, 0]]}, n=4, title="a"),
    "initial_broadcast": lambda: replicas.initial_broadcast(4),
    "gradient_flow": lambda: replicas.gradient_flow(layers=4),
    "bucket_map": lambda: replicas.bucket_map("abc", [100] * 3, [[0], [1, 2]], "caps of 1 MiB"),
    "bucket_lanes": lambda: replicas.bucket_lanes([STEP, STEP], ["one", "two"]),
    "accumulation": lambda: replicas.accumulation(k=3),
    "hook_path": replicas.hook_path,
    "task_picture": lambda: allreduces.task_picture([[1, 10, 0, 1]] * 4),
    "topologies": allreduces.topologies,
    "ring_plan": allreduces.ring_plan,
    "direct_plan": allreduces.direct_plan,
    "incast": allreduces.incast,
    "levels": allreduces.levels,
    "bytes_per_rank": lambda: allreduces.bytes_per_rank({"ring": [1.5] * 6}, "n"),
    "star": lambda: servers.star(workers=3, servers=2),
    "updates_between": servers.updates_between,
    "histograms": lambda: servers.histograms({p: [0, p] for p in range(1, 6)}),
    "of_each_worker": lambda: servers.of_each_worker(APPLIED),
    "plan": lambda: servers.plan([0, 1, 3, None], (2, 3, 6)),
    "clocks": lambda: servers.clocks({0: APPLIED, 2: APPLIED, 6: APPLIED, math.inf: APPLIED}),
    "races": lambda: servers.races({"one slow rank": {"bounded, s = 4": RUN}}),
    "locks": lambda: servers.locks({
        name: {"pushed": 60, "arrived": 20, "accuracy": 0.6} for name in ("by chance", "lock")
    }),
    "springs": averaging.springs,
    "two_loops": averaging.two_loops,
    "paths": lambda: averaging.paths({"weak": [[[0, 1], [1, 2]]] * 4, "strong": [[[0, 1]]] * 4}),
    "turns": lambda: averaging.turns({"in its turn": TURNS, "ahead": TURNS}, first=1, last=2),
    "two_ways": layers.two_ways,
    "megatron": lambda: layers.megatron(4),
    "expert_load": lambda: layers.expert_load({"before": [[4, 1]] * 4, "after": [[2, 3]] * 4}, 18),
    "placed": lambda: pipelines.placed(["784 → 128", "128 → 128", "128 → 10"], stages=3),
    "gantt": lambda: pipelines.gantt({"1F1B, W later": SPANS}, "time of a forward"),
    "mesh": lambda: meshes.mesh((2, 3), ("data", "pipeline")),
    "memory": lambda: meshes.memory({"ZeRO-1": KINDS}, {"ZeRO-1": 8e6}, 2e6),
    "offload": meshes.offload,
    "offload_replicas": lambda: meshes.offload_replicas(
        {"weights": 4e6, "gradients": 2e6, "averaged": 2e6}, model=2e6
    ),
    "mixes": lambda: meshes.mixes(machine("rack-nvlink")),
    "mapping": lambda: meshes.mapping(
        {name: Mix(data=4, tensor=8) for name in ("7 B", "52 B")}, machine("rack-nvlink")
    ),
    "phases": federated.phases,
    "holdings": lambda: federated.holdings({name: [[3, 0, 5]] for name in ("IID", "shards")}),
    "gallery": lambda: federated.gallery(IMAGES, dict.fromkeys(IMAGES, ["mse < 1e-5"] * 8)),
    "by_class": lambda: federated.by_class({"all": [0.5] * 10}, ["ankle boot"] * 10),
    "choices": lambda: federated.choices({name: CHOSEN for name in ("uniform", "by size")}),
    "trade": lambda: federated.trade([0, 1], [0.8, 0.2], [1e-14, 1.0]),
    "deaths": faults.deaths,
    "order_of_writes": faults.order_of_writes,
    "shards": lambda: faults.shards(10, (4, 2, 3)),
    "account": lambda: faults.account([("work", 0, 3), ("lost", 3, 5), ("restart", 5, 6)]),
    "schemes": lambda: faults.schemes(
        {name: {"ring": [(0, 0.2), (1, 0.7)]} for name in "abc"}, 0.5
    ),
    "at_scale": lambda: faults.at_scale(
        {60: {1024: (3000.0, 0.97), 4096: (1500.0, 0.93)}}, {60: 0.94}, 2e8, {"m": 30, "lost": 5}
    ),
    "machine": lambda: capstone.machine(Rules()),
    "both_machines": lambda: capstone.both_machines(
        [
            Entry(
                "a",
                seconds=9.0,
                elsewhere="toy",
                elsewhere_seconds=3.0,
                elsewhere_curve=((1.0, 0.7), (3.0, 0.8)),
            )
        ],
        Rules(),
    ),
    "waits": lambda: waits.picture(WAIT, 6),
}


@pytest.fixture(scope="module", params=DRAWINGS)
def figure(request) -> Iterator[Figure]:
    """A drawing, drawn once for all tests; none of them may change it."""
    figure = DRAWINGS[request.param]()
    FigureCanvasAgg(figure)
    figure.canvas.draw()
    yield figure
    plt.close(figure)


def test_no_drawing_is_scaled_down_by_the_page_that_shows_it(figure):
    shown = Image.open(io.BytesIO(forms.png(figure, tight=True)))
    assert shown.width <= forms.MOST_PIXELS


def test_the_words_of_a_drawing_are_large_enough(figure):
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text()]
    smallest = min(texts, key=Text.get_fontsize)
    assert smallest.get_fontsize() * forms.DPI / 72 >= LEAST_PIXELS, smallest.get_text()


def test_a_title_runs_into_no_other_title(figure):
    renderer = FigureCanvasAgg(figure).get_renderer()
    titles = {axes.get_title(loc="left") for axes in figure.axes} - {""}
    written = [text for text in figure.findobj(Text) if text.get_text() in titles]
    boxes = [text.get_window_extent(renderer) for text in written]
    for k, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:k])
