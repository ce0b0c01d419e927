"""The check of a federated round, in which :mod:`.probes` plays the clients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from utils.checks.comparison import Calls, is_number, only, same, some
from utils.checks.probe import fingerprint
from utils.checks.task import Report, Step, communication, facts, task, to_each
from utils.checks.trials import enough
from utils.cluster.questions import Ranks, Reply

from .probes import ROUNDS, SERVER, WORLD, Round, probe_round, update_of, weights_of


def facts_about(about: str, wrong: Mapping[str, object]) -> Step:
    """Return the step that none of these is true; each message starts with `about`."""
    return facts({f"{about}: {text}": is_so for text, is_so in wrong.items()})


def has_other_length(n: int) -> Callable[[Any], bool]:
    """Return a function that recognizes anything but a list of n entries."""
    return lambda reply: not isinstance(reply, list) or len(reply) != n


def has_nan(reply: Any) -> bool:
    """Return whether this is a list with a number that is not finite."""
    entries = reply if isinstance(reply, list) else []
    return any(isinstance(entry, float) and not math.isfinite(entry) for entry in entries)


def _home(client: int) -> int:
    """Return the rank that a client is on."""
    return 1 + client % 3


@task("12.5", "a round with a deadline", points=4)
def run_round(ranks: Ranks, report: Report) -> None:
    """Judge whether all updates in time are in, no other is, and no pending request is lost."""
    if not enough(ranks, report, WORLD):
        return
    first = report.seed % 50
    seeds = report.seeds(WORLD)
    answers = report.answers(ranks, probe_round, first=first, each=to_each(seed=seeds))
    if not answers:
        if not report.open:
            # This comes first, because a deadlock's advice may mislead here.
            report.begin_with(NEEDS)
        return
    if _all_arrived(report, answers, first, seeds):
        rounds = enumerate(zip(ROUNDS, answers[0].value, strict=True), first)
        steps = (_round(t, plan, result, seeds) for t, (plan, result) in rounds)
        report.follow(SERVER, itertools.chain.from_iterable(steps))


#: Seconds that a server may sleep between two looks.
LONGEST = 0.1

NEEDS = (
    "In a round, send each chosen client torch.tensor([t, client]) with tag=NOTE and the weights "
    "with tag=tag_of(t, client), both by isend to home(client), and call irecv for 1 + "
    "weights.numel() numbers from there with the same tag. Start everything before you wait, and "
    "don't wait for slow clients: below is what happened"
)


def _all_arrived(report: Report, answers: list[Reply], first: int, seeds: list[int]) -> bool:
    """Report to the server which weights the clients lack; return whether all arrived."""
    wanted = [(t, client) for t, plan in enumerate(ROUNDS, first) for client in plan.chosen]
    for answer in answers[1:]:
        for text in _wrong_notes(answer, seeds[SERVER]):
            report.problem(text, SERVER, "communication")
        pairs = [(t, client) for t, client, _ in answer.value["got"]]
        wanted_here = [(t, client) for t, client in wanted if _home(client) == answer.rank]
        if not report.found and sorted(pairs) != sorted(wanted_here):
            report.problem(f"You sent weights to rank {answer.rank} for {pairs}", SERVER)
    return not report.found


def _wrong_notes(answer: Reply, seed: int) -> Iterator[str]:
    """Yield what a rank of clients received wrongly from the server with this seed."""
    yield from answer.value["said"]
    for t, client, weights in answer.value["got"]:
        if weights != fingerprint(weights_of(t, seed)):
            yield f"You sent client {client} other weights than the argument in round {t}"


def _round(t: int, plan: Round, result: dict[str, Any], seeds: list[int]) -> Iterator[Step]:
    about = f"round {t}, clients {list(plan.chosen)}, {plan.seconds:g} s"
    yield communication(result["calls"], only("send", "recv"), some(range(WORLD)), _large)
    updates = result["updates"]
    seconds = result["seconds"]
    no_pair = f"You returned {result['kind']}. Return (updates, late), with updates as a dict "
    yield facts_about(about, {no_pair + "{client: (n, delta)}": updates is None})
    in_time = plan.in_time(_home)
    returned = {int(client) for client in updates}
    for client in sorted(returned - set(in_time)):
        too_late = (
            f"You returned the update of client {client}, which came after the deadline: the "
            f"server took {seconds:.1f} s. Leave it out"
        )
        yield facts_about(about, {too_late: True})
    for client in sorted(set(in_time) - returned):
        forgotten = (
            f"You left out the update of client {client}, which came in time. Start all sends and "
            "receives before you wait for any"
        )
        yield facts_about(about, {forgotten: True})
    for client in in_time:
        n, delta = update_of(t, client, seeds[_home(client)])
        expected = [n, len(delta), delta[0].item(), delta[-1].item()]
        yield from _update(updates[str(client)], expected, t, f"{about}: client {client}")
    yield from _end(plan, result, len(in_time) == len(plan.chosen), about)


def _end(plan: Round, result: dict[str, Any], all_came: bool, about: str) -> Iterator[Step]:
    """Judge when a round ends, and whether `late` has exactly the pending requests."""
    seconds = result["seconds"]
    late = result["late"]
    still_open = result["open"]
    wrong = {
        f"You returned after {seconds:.2f} s, and updates were missing. Wait for them until the "
        f"deadline, {plan.seconds:g} s from the call": (
            not all_came and seconds < plan.seconds - 0.02
        ),
        f"You returned only after {seconds:.1f} s, but all updates were there. Return as soon as "
        "nothing is missing": all_came and seconds > plan.seconds - 0.5,
        f"You returned after {seconds:.1f} s. The deadline is {plan.seconds:g} s from the call, "
        "for all clients together": not all_came and seconds > plan.seconds + 1,
        "You kept a processor busy while you waited. Call sleep(0.002) between two looks": (
            not (all_came or result["slept"])
        ),
        f"You slept for {result['slept']:.2g} s between two looks, so you would see the last "
        "update late. Call sleep(0.002)": result["slept"] > LONGEST,
        # One or two may have completed since the server looked.
        f"You put {late} requests into late, but all updates of this round have come. Put only "
        "pending requests of this round there": (
            all_came and late is not None and late > still_open + 2
        ),
        "Return late as a list of requests from isend and irecv": late is None,
    }
    yield facts_about(about, wrong)
    forgotten = (
        f"{about}: {still_open} requests are pending, but late has {late}. Put the late receives "
        "and the pending sends into it, or nobody ever completes them"
    )
    yield facts({forgotten: late < still_open}, kind="communication")


def _large(calls: Calls) -> str | None:
    large = next((call for call in calls if call["blocking"] and call["nbytes"] > 16), None)
    if large is None:
        return None
    return (
        f"You called dist.{large['op']} for weights or updates, but rank {large['peer']} may be "
        f"slow. Use dist.i{large['op']}"
    )


def _update(update: Any, expected: list[float], t: int, about: str) -> Iterator[Step]:
    """Judge an update that the server returned: n, its length, its first and last number."""
    if same(update, expected):
        return
    swapped = "(delta, n)" if update == "swapped" else f"{update}"
    no_pair = f"Make each value a pair (n, delta), not {swapped}"
    yield facts_about(about, {no_pair: not isinstance(update, list)})
    n, length, first = update[:3]
    wrong = {
        "Return n as a number, the first entry of the message": not is_number(n),
        "Your update has one entry too many. The first number of the message is n": (
            length == expected[1] + 1
        ),
        f"Your update has {length} entries, expected {expected[1]}": length != expected[1],
    }
    yield facts_about(about, wrong)
    off = abs(first - expected[2])
    wrong = {
        f"You returned another round's update. Use tags that belong to round {t}": off >= 99,
        "You returned another client's update. Receive each into a new tensor": off > 0.5,
        f"You returned n = {n:g} and an update from {first:g}, expected {expected[0]:g} and "
        f"{expected[2]:g}": True,
    }
    yield facts_about(about, wrong)
