"""Schedules of pipelines as data: planned, looked over, counted.

A schedule is a list for each stage, of actions ``("F", k)`` and ``("B", k)``: forward and backward
of microbatch k. As text `F2`, `B2`, a line for each stage. A **span** is an action with its place
and its time: ``[stage, kind, k, start, end]``, in any unit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

Schedule = list[list[tuple[str, int]]]

_ACTION = re.compile(r"([FB])(\d+)")


def parse(text: str) -> list[list[tuple[str, int]]]:
    """A schedule from lines such as ``F0 F1 B1 B0``, one for each stage.

    Raises:
        ValueError: a word is no action; names the line and the word.
    """
    lines = [line.split("#")[0].split() for line in text.strip().splitlines()]
    schedule = []
    for stage, words in enumerate(line for line in lines if line):
        found = [_ACTION.fullmatch(word) for word in words]
        if None in found:
            odd = words[found.index(None)]
            raise ValueError(f"stage {stage}: {odd!r} is no action; write F2 or B2, for example")
        schedule.append([(match[1], int(match[2])) for match in found])
    return schedule


def written(schedule: Schedule) -> str:
    """The reverse of :func:`parse`."""
    return "\n".join(" ".join(f"{kind}{k}" for kind, k in actions) for actions in schedule)


def gpipe(p: int, m: int) -> Schedule:
    """All forwards, then all backwards, the last first."""
    actions = [("F", k) for k in range(m)] + [("B", k) for k in reversed(range(m))]
    return [list(actions) for _ in range(p)]


def warmed(m: int, warmups: Sequence[int]) -> Schedule:
    """So many forwards on each stage, then one forward and one backward in turn."""
    schedule = []
    for first in (min(m, max(w, 0)) for w in warmups):
        actions = [("F", k) for k in range(first)]
        for k in range(m - first):
            actions += [("F", first + k), ("B", k)]
        schedule.append(actions + [("B", k) for k in range(m - first, m)])
    return schedule


def one_f_one_b(p: int, m: int) -> Schedule:
    """The schedule of 1F1B."""
    return warmed(m, [p - 1 - s for s in range(p)])


def needs(p: int, stage: int, kind: str, k: int) -> tuple[int, str, int] | None:
    """What an action waits for on another stage, or on the last one itself."""
    if kind == "F":
        return (stage - 1, "F", k) if stage else None
    return (stage + 1, "B", k) if stage < p - 1 else (stage, "F", k)


def planned(
    schedule: Schedule, forward: float = 1, backward: float = 2, needs: Callable = needs
) -> tuple[list[list], list[int]]:
    """Spans [stage, kind, k, start, end] of all that can be done, and how many of each stage."""
    p, ends = len(schedule), {}
    spans, free, done = [], [0] * p, [0] * p
    while True:
        before = len(spans)
        for s, actions in enumerate(schedule):
            for kind, k in actions[done[s] :]:
                needed = needs(p, s, kind, k)
                if needed is not None and needed not in ends:
                    break
                start = max(free[s], ends.get(needed, 0))
                free[s] = ends[s, kind, k] = start + (forward if kind == "F" else backward)
                spans.append([s, kind, k, start, free[s]])
                done[s] += 1
        if len(spans) == before:
            return spans, done


def faults(schedule: Schedule) -> str | None:
    """Why a schedule is not complete or not legal; ``None`` if it is both."""
    every = {tuple(action) for actions in schedule for action in actions}
    m = 1 + max((k for _, k in every), default=-1)
    for s, actions in enumerate(schedule):
        for kind in "FB":
            there = [k for one, k in actions if one == kind]
            missing, twice = set(range(m)) - set(there), {k for k in there if there.count(k) > 1}
            if missing or twice:
                which, how = (missing, "is missing") if missing else (twice, "is there twice")
                return f"stage {s}: {kind}{min(which)} {how}"
    _, done = planned(schedule)
    stuck = [(s, schedule[s][n]) for s, n in enumerate(done) if n < len(schedule[s])]
    if not stuck:
        return None
    p, said = len(schedule), []
    for s, (kind, k) in stuck:
        where, what, of = needs(p, s, kind, k)
        said.append(f"stage {s} waits with {kind}{k} for {what}{of} of stage {where}")
    return "not legal, nobody can go on: " + "; ".join(said)


def idle(spans: Sequence[Sequence]) -> float:
    """The bubble: the share of time in which stages are idle."""
    busy = sum(span[4] - span[3] for span in spans)
    length = max(span[4] for span in spans) - min(span[3] for span in spans)
    return 1 - busy / (len({span[0] for span in spans}) * length)


def held(schedule: Schedule) -> list[int]:
    """The most microbatches that each stage has at once."""
    most = []
    for actions in schedule:
        counts = [sum(1 if kind == "F" else -1 for kind, _ in actions[: n + 1])
                  for n in range(len(actions))]  # fmt: skip
        most.append(max(counts, default=0))
    return most


def look_at(text: str, limit: int, backward: float = 2) -> None:
    """Say whether a schedule that somebody has drawn up can run, its bubble and its memory."""
    schedule = parse(text)
    if said := faults(schedule):
        print(f"✗ {said}")
        return
    spans, _ = planned(schedule, 1, backward)
    p, m, most = len(schedule), len(schedule[0]) // 2, held(schedule)
    bound = warmed(m, [min(limit, p - s) - 1 for s in range(p)])
    known = idle(planned(bound, 1, backward)[0])
    print(f"legal and complete: {p} stages, {m} microbatches, length {max(s[4] for s in spans)}")
    over = f", but {limit} are allowed" * (max(most) > limit)
    print(f"{'✗' if over else '✓'} held at most: {most}{over}")
    print(f"bubble {idle(spans):.3f}; 1F1B with a warm-up cut to {limit} has {known:.3f}")
