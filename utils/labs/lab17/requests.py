"""A simulated server of a language model: requests arrive, join the batch, and leave it.

A step gives each running text a token, and prefills the prompts of joining requests. It takes

    base + decode · (running texts) + prefill · (prompt tokens of those that join)  seconds.

A user gives up if the first token is late. The same seed of `arrivals` gives the same requests.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Server(NamedTuple):
    """A server's seconds for parts of a step, its slots for texts that run, and its promises.

    The first token comes within `first` seconds, and each further token within `gap` seconds.
    """

    base: float = 0.025
    decode: float = 0.0008
    prefill: float = 0.00025
    slots: int = 32
    first: float = 1.5
    gap: float = 0.15


class Request(NamedTuple):
    """A request, as a policy sees it: its number, when it came, and the tokens of its prompt."""

    number: int
    arrival: float
    prompt: int


@dataclass
class Outcome:
    """What became of a request."""

    request: Request
    new: int  # tokens of the answer, which no policy knows in advance
    first: float = math.inf  # when its first token came; infinity if the user gave up
    end: float = math.inf
    longest: float = 0.0  # the longest time between two tokens
    slot: int = -1  # the place in the batch


def arrivals(
    seed: int,
    rate: float,
    count: int = 200,
    prompt: tuple[int, int] = (20, 320),
    new: float = 50,
    burst: int = 1,
) -> list[Outcome]:
    """Return open requests in the order of arrival, at this rate per second, in bursts.

    Args:
        prompt: the fewest and the most tokens of a prompt.
        new: tokens of an answer, on average. A few answers are several times as long.
    """
    draw = random.Random(seed)
    gaps = [draw.expovariate(1) * (number % burst == 0) for number in range(count)]
    times = [count / rate * of / sum(gaps) for of in itertools.accumulate(gaps)]
    answers = [1 + int(draw.expovariate(1 / new)) for _ in times]
    made = [Request(k, time, draw.randint(*prompt)) for k, time in enumerate(times)]
    return list(map(Outcome, made, answers))


def simulate(admit: Callable, server: Server, outcomes: list[Outcome]) -> list[Outcome]:
    """Serve requests as a policy decides, and return their outcomes, which are filled in.

    Raises:
        ValueError: the policy chose something else than waiting requests that have a slot.
    """
    coming = list(outcomes)
    waiting: list[Request] = []
    now = 0.0
    left: dict[int, int] = {}  # tokens that each running request still needs, by its number
    while coming or waiting or left:
        waiting = _waiting(coming, waiting, now, server)
        running = [outcomes[number].request for number in left]
        joining = list(admit(now, list(waiting), list(running), server) or ())
        _refuse_others(joining, waiting, running, server)
        if joining or running:
            span = server.base + server.decode * len(running)
            span += server.prefill * sum(one.prompt for one in joining)
            now += span
            _give_tokens(outcomes, left, joining, now, span)
            waiting = [one for one in waiting if one not in joining]
        else:
            now = _next_moment(coming, waiting, now, server)
    return outcomes


def _waiting(
    coming: list[Outcome], waiting: list[Request], now: float, server: Server
) -> list[Request]:
    """Return the requests that wait now: whoever has come joins, and whoever gave up leaves."""
    while coming and coming[0].request.arrival <= now:
        waiting.append(coming.pop(0).request)
    return [one for one in waiting if now <= one.arrival + server.first]


def _refuse_others(
    joining: list[Request], waiting: list[Request], running: list[Request], server: Server
) -> None:
    """Raise ValueError if something else joins than waiting requests that have a slot."""
    if len(set(joining)) < len(joining) or not set(joining) <= set(waiting):
        raise ValueError("admit returned a request twice, or one that isn't waiting")
    if len(joining) + len(running) > server.slots:
        texts = f"{len(joining)} requests join {len(running)} running texts"
        raise ValueError(f"admit let {texts}, but there are only {server.slots} slots")


def _next_moment(
    coming: list[Outcome], waiting: list[Request], now: float, server: Server
) -> float:
    """Return when the next request comes or the next user gives up, because nobody is served."""
    times = [one.arrival + server.first + 1e-6 for one in waiting]
    return min([*times, *(one.request.arrival for one in coming[:1])], default=now)


def _give_tokens(
    outcomes: list[Outcome], left: dict[int, int], joining: list[Request], now: float, span: float
) -> None:
    """Give each running text a token at the end of a step, and the joining ones their first."""
    for number in left:
        outcomes[number].longest = max(outcomes[number].longest, span)
    for one in joining:
        taken = {outcomes[number].slot for number in left}
        outcomes[one.number].first = now
        outcomes[one.number].slot = min(set(range(len(taken) + 1)) - taken)
        left[one.number] = outcomes[one.number].new
    for number in list(left):
        left[number] -= 1
        if not left[number]:
            outcomes[number].end = now
            del left[number]


def broken(outcomes: Sequence[Outcome], server: Server) -> tuple[int, int]:
    """Return how many users got the first token too late, and how many others a later token."""
    bound = server.first + 1e-9
    in_time = [one for one in outcomes if one.first - one.request.arrival <= bound]
    return len(outcomes) - len(in_time), sum(one.longest > server.gap + 1e-9 for one in in_time)


def goodput(outcomes: Sequence[Outcome], server: Server) -> float:
    """Return the requests per second for which both promises were kept."""
    return (len(outcomes) - sum(broken(outcomes, server))) / outcomes[-1].request.arrival
