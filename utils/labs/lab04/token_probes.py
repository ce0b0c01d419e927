"""The probe of task 4.6: microbatches of sentences, in which some tokens don't count."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torch_mpi.record import as_dict, log
from utils.checks.draws import seeded
from utils.checks.groups import in_group
from utils.checks.probe import also_calls, reading_answer
from utils.labs.shared import small_models

from .probes import noted_calls, noted_passes

WORDS = 7  # in the vocabulary
IGNORED = -100  # the target of a position that doesn't count


def language_model(seed: int, awkward: bool) -> nn.Sequential:
    """Return a model from tokens [rows, length] to scores [rows, length, WORDS].

    If `awkward`, it is in double precision and has a frozen parameter.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        layers = (nn.Embedding(WORDS, 6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, WORDS))
    model = nn.Sequential(*layers)
    model[3].bias.requires_grad_(not awkward)
    return model.double() if awkward else model


def drawn_sentences(seed: int, k: int, empty: bool) -> list[tuple[Tensor, Tensor]]:
    """Return a rank's k microbatches of different shapes, of which one has no token that counts.

    If k is 1, its microbatch counts. If there are four, the first and the last one are the same.

    Args:
        empty: whether no token counts in any of them.
    """
    draw = seeded(seed + 100 * k)
    without = {1: None, 4: 1 + seed % 2}.get(k, seed % k)
    microbatches = []
    for j in range(k):
        rows, length = torch.randint(1, 6, (2,), generator=draw).tolist()
        inputs, targets = torch.randint(0, WORDS, (2, rows, length), generator=draw)
        counts = torch.rand(rows, length, generator=draw) < 0.6
        counts[0, 0] = True
        counts &= not (empty or j == without)
        microbatches.append((inputs, targets.where(counts, IGNORED)))
    return [microbatches[-1], *microbatches[1:]] if k == 4 else microbatches


@also_calls("all_gather", "broadcast")
@in_group
def probe_tokens(
    user_ns: dict,
    *,
    rank: int,
    named: dict,
    data_seed: int,
    seed: int,
    ks: list,
    empty: bool,
    awkward: bool,
) -> list:
    """Call `accumulate_tokens` on one model, with each number of microbatches from this data seed.

    In its second step, DDP broadcasts the order in which gradients became ready. These broadcasts
    are counted, and all other calls are returned.
    """
    function = reading_answer(user_ns, "accumulate_tokens")
    net = language_model(seed, awkward)
    model = DistributedDataParallel(net, process_group=named.get("group"))
    before, modes = small_models.weights_of(net), [part.training for part in net.modules()]
    passes, called = noted_passes(model), noted_calls(model)
    begun: list[int] = []

    def note_backward(_, inputs: tuple, scores: Tensor) -> None:
        if scores.requires_grad:
            scores.register_hook(lambda _: begun.append(len(calls_since(mark))))

    net.register_forward_hook(note_backward)
    answers = []
    for k in ks:
        model.zero_grad()
        for notes in (passes, called, begun):
            notes.clear()
        mark = log.mark()
        function(model, drawn_sentences(data_seed, k, empty), **named)
        answers.append({
            "gradient": small_models.gradient_of(net),
            "changed": not torch.equal(before, small_models.weights_of(net)),
            "switched": modes != [part.training for part in net.modules()],
            "passes": list(passes),
            "called": list(called),
            "quiet": not model.require_backward_grad_sync,
            "nbytes": sum(p.nbytes for p in net.parameters() if p.requires_grad),
            "broadcasts": sum(call.op == "broadcast" for call in log.since(mark)),
            "early": begun[0] if begun else 0,
            "calls": calls_since(mark),
        })
    return answers


def calls_since(mark: int) -> list[dict]:
    """Return this rank's calls without broadcasts."""
    return [as_dict(call) for call in log.since(mark) if call.op != "broadcast"]
