"""Pipeline schedules as data, with functions that make, plan, check and measure them.

A schedule has a list for each stage, with the actions ``("F", k)`` and ``("B", k)``: forward and
backward of microbatch k. As text, these are `F2` and `B2`, in a line for each stage. A **span** is
an action with its stage and its time: ``[stage, kind, k, start, end]``, in any unit.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate

Schedule = list[list[tuple[str, int]]]

#: The shortest schedule for 4 stages and 6 microbatches with at most 3 in flight on a stage, if a
#: backward takes twice as long as a forward. No schedule is shorter than 30: the fourth forward can
#: begin when the first backward ends on stage 0, at 12, and reaches the last stage at 15. There, it
#: and two more microbatches take 9, and the last backward takes 6 more to stage 0.
BEST = """
F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5
F0 F1 F2 B0 B1 F3 B2 F4 F5 B3 B4 B5
F0 F1 F2 B0 B1 B2 F3 F4 B3 F5 B4 B5
F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5
"""

_ACTION = re.compile(r"([FB])(\d+)")


def parse(text: str) -> list[list[tuple[str, int]]]:
    """Return a schedule from lines such as ``F0 F1 B1 B0``, one for each stage.

    Raises:
        ValueError: a word isn't an action; the message names the stage and the word.
    """
    lines = [line.split("#")[0].split() for line in text.strip().splitlines()]
    schedule = []
    for stage, words in enumerate(line for line in lines if line):
        matches = [_ACTION.fullmatch(word) for word in words]
        if None in matches:
            odd = words[matches.index(None)]
            raise ValueError(
                f"stage {stage}: {odd!r} is not an action. Write F2 or B2, for example"
            )
        schedule.append([(match[1], int(match[2])) for match in matches])
    return schedule


def written(schedule: Schedule) -> str:
    """Return a schedule as text, the reverse of :func:`parse`."""
    return "\n".join(" ".join(f"{kind}{k}" for kind, k in actions) for actions in schedule)


def gpipe(p: int, m: int) -> Schedule:
    """Return the schedule with all forwards first, then all backwards in reverse order."""
    actions = [("F", k) for k in range(m)] + [("B", k) for k in reversed(range(m))]
    return [list(actions) for _ in range(p)]


def warmed(m: int, warmups: Sequence[int]) -> Schedule:
    """Return a schedule with so many forwards on each stage, then forward and backward in turn."""
    schedule = []
    for first in (min(m, max(w, 0)) for w in warmups):
        actions = [("F", k) for k in range(first)]
        for k in range(m - first):
            actions += [("F", first + k), ("B", k)]
        schedule.append(actions + [("B", k) for k in range(m - first, m)])
    return schedule


def one_f_one_b(p: int, m: int) -> Schedule:
    """Return the schedule of 1F1B."""
    return warmed(m, [p - 1 - s for s in range(p)])


def halved(p: int, m: int) -> Schedule:
    """Return 1F1B whose backward has two halves: I for the input, and W for the weights.

    Stage s lets s of its W wait, so that a microbatch is in flight for as long as on the first
    stage: at most p of them at once, from F to W. This is ZB-H1 of P. Qi et al., "Zero Bubble
    Pipeline Parallelism" (2024).
    """
    schedule = []
    for s, actions in enumerate(one_f_one_b(p, m)):
        mine = []
        for kind, k in actions:
            mine.append(("F" if kind == "F" else "I", k))
            if kind == "B" and k >= s:
                mine.append(("W", k - s))
        schedule.append(mine + [("W", k) for k in range(max(0, m - s), m)])
    return schedule


def zero_bubble(p: int, m: int) -> list[list]:
    """Return the spans of :func:`halved`, if F, I and W take a time of 1 each."""
    return planned(halved(p, m), 1, 1, needs_of_halves)[0]


def needs_of_halves(p: int, stage: int, kind: str, k: int) -> tuple[int, str, int] | None:
    """Return the action that this one waits for: I as a backward, and W for I of its stage."""
    if kind == "W":
        return stage, "I", k
    if kind == "I":
        return (stage + 1, "I", k) if stage < p - 1 else (stage, "F", k)
    return needs(p, stage, kind, k)


def needs(p: int, stage: int, kind: str, k: int) -> tuple[int, str, int] | None:
    """Return the action that this one waits for, on another stage or on the last stage itself."""
    if kind == "F":
        return (stage - 1, "F", k) if stage else None
    return (stage + 1, "B", k) if stage < p - 1 else (stage, "F", k)


def planned(
    schedule: Schedule, forward: float = 1, backward: float = 2, needs: Callable = needs
) -> tuple[list[list], list[int]]:
    """Return the spans of all actions that can run, and how many can run on each stage."""
    p = len(schedule)
    ends = {}
    spans = []
    free = [0] * p
    done = [0] * p
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
    """Return why a schedule isn't complete or isn't legal; None if it is both."""
    return _incomplete(schedule) or _illegal(schedule)


def _incomplete(schedule: Schedule) -> str | None:
    m = 1 + max((k for actions in schedule for _, k in actions), default=-1)
    for s, actions in enumerate(schedule):
        for kind in "FB":
            there = [k for other, k in actions if other == kind]
            missing = set(range(m)) - set(there)
            twice = Counter(there) - Counter(set(there))
            if missing:
                return f"stage {s}: {kind}{min(missing)} is missing"
            if twice:
                return f"stage {s}: {kind}{min(twice)} is there twice"
    return None


def _illegal(schedule: Schedule) -> str | None:
    waits = []
    for s, (actions, count) in enumerate(zip(schedule, planned(schedule)[1], strict=True)):
        for kind, k in actions[count : count + 1]:
            stage, other, other_k = needs(len(schedule), s, kind, k)
            waits.append(f"stage {s} waits with {kind}{k} for {other}{other_k} of stage {stage}")
    return f"not legal, because nobody can continue: {'; '.join(waits)}" if waits else None


def idle(spans: Sequence[Sequence]) -> float:
    """Return the bubble, which is the share of time in which stages are idle."""
    busy = sum(span[4] - span[3] for span in spans)
    length = max(span[4] for span in spans) - min(span[3] for span in spans)
    return 1 - busy / (len({span[0] for span in spans}) * length)


def held(schedule: Schedule) -> list[int]:
    """Return for each stage how many microbatches are in flight at most."""
    most = []
    for actions in schedule:
        counts = accumulate(1 if kind == "F" else -1 for kind, _ in actions)
        most.append(max(counts, default=0))
    return most


def look_at(text: str, limit: int) -> None:
    """Print whether a student's schedule can run, its bubble and its memory."""
    schedule = parse(text)
    if fault := faults(schedule):
        print(f"✗ {fault}")
        return
    spans, _ = planned(schedule)
    p = len(schedule)
    m = len(schedule[0]) // 2
    most = held(schedule)
    bound = warmed(m, [min(limit, p - s) - 1 for s in range(p)])
    known = idle(planned(bound)[0])
    print(f"legal and complete: {p} stages, {m} microbatches, length {max(s[4] for s in spans)}")
    over = f", but {limit} are allowed" * (max(most) > limit)
    print(f"{'✗' if over else '✓'} in flight at most: {most}{over}")
    print(f"bubble {idle(spans):.3f} (1F1B with at most {limit} in flight: {known:.3f})")
    if (p, m, limit) == (4, 6, 3):
        best = idle(planned(parse(BEST))[0])
        reached = "✓ as small as" if not over and idle(spans) <= best + 1e-9 else "→"
        print(f"{reached} the best known: {best:.3f}")
