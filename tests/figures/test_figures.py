"""What every figure has: words for those who don't see it; drawings of labs."""

from __future__ import annotations

import base64
import io
import types

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from IPython.core.formatters import DisplayFormatter
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image
from torch.utils.data.distributed import DistributedSampler

from utils import figures
from utils.figures import alt, forms
from utils.labs.lab04 import pictures as replicas
from utils.labs.lab07 import pictures as staleness
from utils.labs.lab12 import pictures as federated
from utils.labs.lab13 import pictures as fault_figures
from utils.labs.shared import minibatch_pictures as minibatches


def test_a_picture_in_words_has_titles_axes_and_values():
    figure, axes = plt.subplots()
    axes.plot([1, 2, 4], [1, 1.7, 2.5], label="measured")
    axes.plot(np.linspace(0, 1, 100), np.linspace(3, 1, 100), label="ideal")
    axes.plot([9], [9])
    axes.set_title("Speedup")
    axes.set_xlabel("ranks")
    axes.set_ylabel("T(1) / T(p)")
    assert alt.describe(figure) == (
        "Speedup. T(1) / T(p) against ranks. measured: 1 at 1, 1.7 at 2, 2.5 at 4. "
        "ideal: 3 at 0 to 1 at 1, lowest 1, highest 3."
    )


def test_bars_are_told_with_their_names_whatever_way_they_lie():
    figure, (upright, lying) = plt.subplots(2)
    upright.bar(["rank 0", "rank 1"], [3.0, 4.5], label="seconds")
    lying.barh(["a", "b"], [1.0, 2.0])
    said = alt.describe(figure)
    assert "seconds: 3 (rank 0), 4.5 (rank 1)" in said
    assert "bars: 1 (a), 2 (b)" in said


def test_error_bars_are_told_once_by_their_middle():
    figure, axes = plt.subplots()
    axes.errorbar([1, 2], [5.0, 6.0], yerr=[1, 1], label="with band")
    assert alt.describe(figure) == "with band: 5 at 1, 6 at 2."


def test_a_drawing_is_told_by_its_words():
    figure, axes = figures.canvas(4, 2)
    figures.box(axes, 0, 0, "rank 0")
    figures.box(axes, 2, 0, "rank 1")
    assert alt.describe(figure) == "Drawing with the words: rank 0; rank 1."


def test_long_descriptions_end_at_a_word():
    figure, axes = figures.canvas(4, 2)
    for k in range(400):
        axes.text(0, 0, f"word{k}")
    said = alt.describe(figure)
    assert len(said) <= alt.MOST + 2
    assert said.endswith(" …")


def test_a_notebook_gets_the_words_with_the_picture(monkeypatch):
    shell = types.SimpleNamespace(display_formatter=DisplayFormatter())
    monkeypatch.setattr(alt, "get_ipython", lambda: shell)
    alt.install()
    figure, axes = figures.canvas(4, 2)
    axes.text(0, 0, "hello")
    figures.use_style()
    data, metadata = shell.display_formatter.format(figure)
    assert data["text/plain"] == "Drawing with the words: hello."
    assert metadata["image/png"]["alt"] == data["text/plain"]
    assert Image.open(io.BytesIO(data["image/png"])).mode == "P"


def test_a_stored_picture_is_half_as_large_and_looks_the_same():
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3))
    left.imshow(np.random.default_rng(0).random((28, 28)), cmap="gray")
    for k in range(12):
        right.plot(np.sin(np.linspace(0, 6, 200) + k), label=f"curve {k}")
    right.legend()
    whole = io.BytesIO()
    figure.savefig(whole, format="png", dpi=forms.DPI)
    stored = forms.png(figure)
    assert len(stored) < len(whole.getvalue()) / 2
    before, after = (
        np.asarray(Image.open(file).convert("RGB"), dtype=int)
        for file in (whole, io.BytesIO(stored))
    )
    assert np.abs(before - after).mean() < 0.5  # of 255
    assert (after[0, 0] == 255).all(), "paper stays white"


def test_an_empty_figure_shows_no_blank_area():
    assert alt._png(plt.figure()) is None


# -- minibatches (lab 02) -----------------------------------------------------------------------


def words_of(figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("n", [24, 25, 7, 1])
def test_a_partition_shows_what_the_sampler_does(n, p, drop_last):
    order = torch.randperm(n, generator=torch.Generator().manual_seed(5)).tolist()
    panel = minibatches._Panel(n, 8, p, order, drop_last)
    kept = [k for k in range(len(panel.samples)) if panel.kinds[k] != "dropped"]
    for r in range(p):
        sampler = DistributedSampler(
            range(n), num_replicas=p, rank=r, shuffle=True, seed=5, drop_last=drop_last
        )
        assert [panel.samples[k] for k in kept if k % p == r] == list(sampler)


def test_a_partition_names_the_microbatches_of_the_highlighted_minibatch():
    words = words_of(minibatches.partition(24, 8, 2, highlight=1))
    assert "rank 0: 8 10 12 14" in words
    assert "rank 1: 9 11 13 15" in words
    assert "repeated (padding)" not in words
    assert "repeated (padding)" in words_of(minibatches.partition(25, 8, 2))
    assert "left out (drop_last)" in words_of(minibatches.partition(25, 8, 2, drop_last=True))


@pytest.mark.parametrize(("n", "m", "p"), [(100, 1, 6), (100, 64, 3), (1, 32, 4), (97, 7, 5)])
def test_all_that_a_partition_draws_is_inside_the_figure(n, m, p):
    figure = minibatches.partition(n, m, p, title="a title", highlight=0)
    axes, renderer = figure.axes[0], FigureCanvasAgg(figure).get_renderer()
    for text in axes.texts:
        box = text.get_window_extent(renderer)
        assert axes.bbox.padded(1).contains(box.x0, box.y0), text.get_text()
        assert axes.bbox.padded(1).contains(box.x1, box.y1), text.get_text()
    assert figure.get_size_inches()[1] < 9


def test_a_sampler_view_tells_what_is_repeated_and_what_is_lost():
    words = words_of(
        minibatches.sampler_view({"good": [[0, 1], [2, 3]], "bad": [[0, 1], [1, 0]]}, n=4)
    )
    assert "every sample once" in words
    assert "repeated: 0, 1" in words
    assert "seen by no rank: 2, 3" in words
    assert "no sample" in words_of(minibatches.sampler_view({"none": [[], []]}, n=1))


def test_drawings_refuse_what_they_cannot_show():
    with pytest.raises(ValueError, match="at least 1"):
        minibatches.partition(0, 8, 2)
    with pytest.raises(ValueError, match="instead of n = 3"):
        minibatches.partition(3, 8, 2, [0, 1])
    with pytest.raises(ValueError, match="at most 6 ranks"):
        minibatches.partition(24, 8, 7)
    with pytest.raises(ValueError, match="nothing to draw"):
        minibatches.sampler_view({}, n=3)


def test_sliders_draw_where_somebody_can_move_them(monkeypatch, capsys):
    monkeypatch.setenv("IPP_NONINTERACTIVE", "1")
    minibatches.explorer()
    assert "sliders" in capsys.readouterr().out
    monkeypatch.delenv("IPP_NONINTERACTIVE")
    minibatches.explorer(n=25, m=8, p=4)
    assert "Error" not in capsys.readouterr().out


def test_sliders_draw_only_minibatches_that_the_ranks_can_share(monkeypatch):
    monkeypatch.delenv("IPP_NONINTERACTIVE", raising=False)
    drawn, draws = [], []
    monkeypatch.setattr(minibatches, "partition", lambda n, m, p, *_, **__: drawn.append((m, p)))
    monkeypatch.setattr("ipywidgets.interactive_output", lambda draw, controls: draws.append(draw))
    minibatches.explorer()
    for p in (1, 2, 3, 6):
        draws[0](n=24, p=p, own=4, number=9, epoch=0, shuffle=False, drop_last=False)
    assert drawn == [(4, 1), (8, 2), (12, 3), (24, 6)]
    with pytest.raises(ValueError, match="can't share minibatches"):
        minibatches.explorer(m=8, p=3)


def test_drawings_of_samples_are_told_rank_by_rank():
    said = alt.describe(minibatches.partition(25, 8, 4, highlight=3, title="an example"))
    assert said.startswith("an example: 25 samples in minibatches of 8, 4 ranks, minibatch 3 fr")
    assert "rank 0: 24; rank 1: 0; rank 2: 1; rank 3: 2; repeated: 0, 1, 2." in said
    assert "left out: 24." in alt.describe(minibatches.partition(25, 8, 4, drop_last=True))
    said = alt.describe(minibatches.sampler_view({"epoch 0": [[0, 1], [1, 0]]}, n=4))
    assert "epoch 0: rank 0: 0 1; rank 1: 1 0; repeated: 0, 1; seen by no rank: 2, 3." in said


# -- replicas and buckets (labs 03 and 04) --------------------------------------------------------


def test_the_figures_of_replicas_and_buckets_are_drawn():
    step = {"begin": 1.0, "computed": 1.04, "end": 1.1}
    step["buckets"] = [(1.01, 1.02, 1.03, 1e6), (1.03, 1.03, 1.06, 2e6), (1.04, 1.05, 1.09, 2e6)]
    drawn = [
        replicas.initial_broadcast(1),
        replicas.initial_broadcast(6),
        replicas.gradient_flow(layers=7),
        replicas.bucket_map(["b", "a"], [4, 400], [[0, 1]]),
        replicas.bucket_map("abcdefgh", [100] * 8, [[k] for k in range(8)], "eight"),
        replicas.bucket_lanes([step, step], ["one", "two"]),
        replicas.accumulation(k=2),
        replicas.hook_path(),
    ]
    for figure in drawn:
        figure.canvas.draw()
        assert figure.axes


# -- parameter servers (lab 07) -------------------------------------------------------------------


def test_the_figures_of_parameter_servers_are_drawn(capsys):
    applied = [(1, 0), (2, 1), (1, 1), (3, 3)]
    curve = [(0.1 * k, 7 * k, 0.5 + 0.01 * k) for k in range(12)]
    run = {"curve": curve, "gradients": 77, "staleness": [0, 1, 2], "lost": 0.01}
    drawn = [
        staleness.star(workers=1),
        staleness.star(workers=4, servers=3),
        staleness.updates_between(),
        staleness.histograms({1: [0, 0]}),
        staleness.histograms({2: [0, 1, 1], 5: [4, 4, 20]}),
        staleness.of_each_worker(applied),
        staleness.clocks({0: applied}),
        staleness.clocks({2: applied, float("inf"): applied}),
        staleness.lost_updates({"in place": 0.0, "write back": 0.8}, ranks=6),
        staleness.races({"random": {"strong": run, "Hogwild": run}}),
        staleness.delays([0, 2], {"lr 0.1": [0.8, 0.1]}),
        staleness.bottleneck(
            {1: {1: 11.0, 2: 22.0}, 2: {1: 13.0}},
            nbytes=4e5, bandwidth=1e7, compute=0.02, latency=1e-3,
        ),
    ]  # fmt: skip
    for figure in drawn:
        figure.canvas.draw()
        assert figure.axes
    lost = {"pushed": 60, "arrived": 20, "accuracy": 0.62}
    said = staleness.locks({"worst case": lost}).alt_text
    assert "worst case: 20 of 60 updates arrived, accuracy 62 %" in said
    staleness.race_table({"random": {"strong": run}})
    assert "77" in capsys.readouterr().out


def test_the_plan_of_consistency_models_keeps_each_bound():
    # Steps of 1 and 4 units: in 8 units the slow worker takes 2. The fast one takes bound + 1 of
    # them before the slow one's first, and another one before its second.
    said = alt.describe(staleness.plan(bounds=[0, 1, 3, None], steps=(1, 4), until=8))
    assert "4 with bound 0, 5 with bound 1, 7 with bound 3, 10 with no bound" in said
    assert "Gradients: 4 with bound 0" in alt.describe(staleness.plan([0], steps=(1, 4), until=8))


def test_drawings_of_federated_learning_tell_what_they_show():
    said = federated.deadline(
        [(0, 4, 10.2), (0, 7, 12.9), (1, 4, 11.6)], [10.0, 11.5], 1.5
    ).alt_text
    assert "2 rounds with a deadline of 1.5 s each. 1 of 3 updates were sent too late" in said
    said = federated.holdings({"IID": [[3, 0, 5], [2, 2, 2]]}).alt_text
    assert "IID: 2 clients with 6 to 8 images of 2 to 3 classes" in said
    rows = {"originals": np.zeros((2, 784)), "read": np.zeros((2, 784))}
    said = federated.gallery(rows, {"read": ["mse 1", "mse 2"]}).alt_text
    assert "originals: 2 images. read: 2 images (mse 1, mse 2)" in said
    run = [{"accuracy": 0.5, "sent": 1e6}, {"accuracy": 0.7, "sent": 2e6}]
    said = alt.describe(federated.courses({"IID": run}, central=0.8, raw=9.4e6))
    assert "IID: 50 at 1, 70 at 2" in said
    assert "the images themselves: 9.4 MB" in said
    groups = ("all clients", "the ten chosen least", "the ten chosen most")
    found = {"by loss": {"counts": [0.0, 0.4, 5.5], **dict.fromkeys(groups, 0.7)}}
    said = federated.choices(found).alt_text
    assert "by loss: 2 clients chosen hardly ever, the most often chosen in 5.5 rounds" in said
    assert "70 % for the ten chosen least" in said


# -- faults (lab 13) ------------------------------------------------------------------------------


def test_the_figures_of_faults_are_told_in_words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "rank 2 is killed" in fault_figures.deaths().alt_text
    assert "barrier" in fault_figures.order_of_writes().alt_text
    assert "2 ranks: rank 0 0 to 3, rank 1 4 to 6" in fault_figures.shards(7, (2, 5)).alt_text
    assert "rank 4 none" in fault_figures.shards(7, (2, 5)).alt_text
    spent = fault_figures.account([("work", 0, 3), ("lost", 3, 5), ("restart", 5, 6)])
    assert "2 s of work that is done again" in spent.alt_text
    still = fault_figures.still({"dcp.save": {"stands still": 0.3, "save": 0.4}})
    assert "stands still for 0.30 s, and the checkpoint is complete after 0.40 s" in still.alt_text
    curve = [(0.1, 0.5), (0.2, 0.6)]
    figure = fault_figures.schemes({"dead": {"all_reduce": curve}}, died=0.15)
    assert "rank 3 is dead" in alt.describe(figure)
    figure = fault_figures.intervals({1.0: 0.2, 9.0: 0.3}, {2.0: 0.2}, {"Young": 3.0}, "s")
    assert "overhead (% of the work)" in alt.describe(figure)
    assert "stopped" in alt.describe(fault_figures.resumed({"a": {0: 2.0, 1: 1.0}}, {"stopped": 1}))


# -- forms --------------------------------------------------------------------------------------


def test_slides_get_lines_and_twice_the_pixels_and_pages_do_not(monkeypatch):
    figure, axes = figures.canvas(4, 2)
    axes.text(0, 0, "rank 0")
    page, _ = forms.bundle(figure)
    assert forms.SVG not in page
    monkeypatch.setenv(forms.VARIABLE, "1")
    slide, about = forms.bundle(figure)
    assert slide[forms.SVG] == forms.bundle(figure)[0][forms.SVG]  # the same bytes each time
    assert about[forms.SVG] == about[forms.PNG] == {"alt": slide["text/plain"]}
    small, large = (
        int.from_bytes(base64.b64decode(one[forms.PNG])[16:20]) for one in (page, slide)
    )
    assert (small, large) == (400, 800)
