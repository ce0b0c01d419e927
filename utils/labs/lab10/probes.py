"""The probes of lab 10, which run on the ranks beside the student's answers."""

from __future__ import annotations

import copy
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from utils.checks.clock import ends_within
from utils.checks.groups import Group, Partition, in_group, keywords
from utils.checks.probe import answer_named, kind_of, number, reading_answer, recorded, told
from utils.labs.shared.pipeline_stages import Piece, Worker, number_of, played, samples_and_labels
from utils.labs.shared.small_models import gradient_of, weights_of

# -- pipelines -------------------------------------------------------------------------------------


@in_group
def probe_naive(
    user_ns: dict, *, rank: int, group: Group, partition: Partition, seed: int, n: int, single: bool
) -> dict:
    """Run a minibatch of n samples through the stages, which have layers from different seeds."""
    function = reading_answer(user_ns, "train_naively")
    marks = answer_named(user_ns, "marks")
    place, p = dist.get_rank(group), dist.get_world_size(group)
    calls: list[dict] = []
    for minibatch in (seed + 1, seed):  # an earlier one may leave nothing behind
        earlier = calls
        piece = Piece(seed, place, p)
        x, labels = samples_and_labels(minibatch, n)
        if single:
            piece, x = piece.float(), x.float()
        if place:  # only the first stage may use x
            x = torch.full_like(x, float("nan"))
        marks.clear()
        loss, calls = recorded(function, piece, x, labels, **keywords(partition, group))
    return {
        "marks": told(marks),
        "times": piece.log.times,
        "loss": number(loss),
        "calls": calls,
        "calls of the earlier one": earlier,
        "gradient": gradient_of(piece),
        "events": piece.log.events,
    }


@in_group
def probe_run(
    user_ns: dict, *, rank: int, group: Group, partition: Partition, seed: int, schedules: dict
) -> list:
    """Run schedules for as many stages as this group has."""
    from torch_mpi.record import log

    place = dist.get_rank(group)
    p = dist.get_world_size(group)
    function = reading_answer(user_ns, "run_schedule")
    marks = answer_named(user_ns, "marks")
    results = []
    for lists, n in schedules[str(p)]:
        schedule = [[(kind, k) for kind, k in actions] for actions in lists]
        m = len(schedule[0]) // 2
        worker = Worker(Piece(seed, place, p), n)
        x, labels = samples_and_labels(seed, n)
        if place:  # only the first stage may use x
            x = torch.full_like(x, float("nan"))
        marks.clear()
        mark = log.mark()
        arguments = (worker, schedule, list(x.chunk(m)), list(labels.chunk(m)))
        losses, calls = recorded(function, *arguments, **keywords(partition, group))
        tensors = isinstance(losses, list) and any(isinstance(loss, Tensor) for loss in losses)
        of_stage = worker.piece.log
        results.append({
            "losses": ["<Tensor>"] if tensors else told(losses),
            "calls": calls,
            "gradient": gradient_of(worker.piece),
            "marks": told(marks),
            "times": of_stage.times,
            "early": any(_is_early(call, of_stage.times) for call in log.since(mark)),
            "asked": worker.asked,
            "most": of_stage.most,
        })
    return results


def _is_early(call: Any, times: list[float]) -> bool:
    """Return whether the stage was blocked on its send before its next computation."""
    following = next((time for time in times if time > call.start), 0)
    return call.op == "send" and any(begin < following for begin, _ in call.waits)


# -- plans, counts and stashes ---------------------------------------------------------------------


#: Seconds that a plan may take, and the message if it takes longer.
PLANNING = 10.0
NEVER_PLANNED = (
    "A schedule that is not legal can never be planned completely, so your loop over all actions "
    "never ends. Leave the loop after a round that planned nothing, and return None."
)


def probe_plans(user_ns: dict, *, rank: int, cases: list) -> list:
    """Return plans of schedules, and whether the schedules stayed the same."""
    plans = []
    for schedule, times in cases:
        pairs = [[(kind, k) for kind, k in actions] for actions in schedule]
        before = copy.deepcopy(pairs)
        with ends_within(PLANNING, NEVER_PLANNED):
            spans = answer_named(user_ns, "plan")(pairs, *times)
        shown = kind_of(spans) if isinstance(spans, set | dict | tuple) else told(spans)
        plans.append([shown, pairs == before])
    return plans


def probe_counts(user_ns: dict, *, rank: int, calls: list) -> list:
    """Return bubbles and counts for spans and actions that are tuples."""
    results = []
    for name, rows in calls:
        if name == "most_held":
            rows = [[tuple(action) for action in actions] for actions in rows]
        else:
            rows = [tuple(span) for span in rows]
        result = reading_answer(user_ns, name)(rows)
        results.append(told(result) if isinstance(result, list) else told(number(result)))
    return results


@dataclass
class StashLog:
    """What happened in the stash of one stage.

    Attributes:
        most: the largest number of microbatches in the stash at once.
        copies: whether the stash held copies, and not the stage's own tensors.
        missing: whether a forward stored nothing.
        whole: whether the stash held each of the stage's parameters.
        alive: the largest number of microbatches with copies in memory at once.
    """

    most: int = 0
    copies: bool = True
    missing: bool = False
    whole: bool = True
    alive: int = 0
    _refs: list[list[weakref.ref]] = field(default_factory=list)

    def look(self, stage: Piece, stash: dict, action: str, k: int) -> None:
        """Note the state of a stage's stash after an action for microbatch k."""
        self.most = max(self.most, len(stash))
        if action == "B":
            return
        if k not in stash:
            self.missing = True
            return
        if not isinstance(stash[k], dict):
            kind = type(stash[k]).__name__
            raise TypeError(f"self.stash[{k}] is a {kind}, expected a dict {{name: tensor}}")
        self._look_at_copies(dict(stage.named_parameters()), stash[k])

    def _look_at_copies(self, parameters: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
        pairs = [(parameters[name], w) for name, w in weights.items() if name in parameters]
        self.whole &= len(pairs) == len(parameters)
        self.copies &= bool(pairs) and all(q.data_ptr() != w.data_ptr() for q, w in pairs)
        self._refs.append([weakref.ref(w) for _, w in pairs])
        alive = sum(any(ref() is not None for ref in refs) for refs in self._refs)
        self.alive = max(self.alive, alive)


def probe_stash(user_ns: dict, *, rank: int, seed: int, p: int, n: int, order: list) -> dict:
    """Run `Stashed` on all stages of a pipeline in this process."""
    kind = answer_named(user_ns, "Stashed")
    logs = [StashLog() for _ in range(p)]

    def look(s: int, *seen: Any) -> None:
        logs[s].look(*seen)

    (stages, workers), calls = recorded(played, kind, seed, p, n, order, look)
    of_stages = [
        {
            "weights": weights_of(piece),
            "used": [told(worker.used.get(number_of(k))) for k in range(n)],
            "version": told(worker.version),
            "left": len(worker.stash),
            "most": log.most,
            "copies": log.copies,
            "missing": log.missing,
            "whole": log.whole,
            "graded": any(q.grad is not None for q in piece.parameters()),
            "alive": log.alive,
        }
        for piece, worker, log in zip(stages, workers, logs, strict=True)
    ]
    return {"stages": of_stages, "calls": calls}
