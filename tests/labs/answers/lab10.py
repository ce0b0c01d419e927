"""Answers to lab 10, wrong ones and right ones, that students really give."""

from __future__ import annotations

from lab_tools import source_of

NOTEBOOK = "10_pipeline.ipynb"
CELLS = {
    "10.1": "lab10-naive-answer",
    "10.2": "lab10-gpipe-answer",
    "10.3": "lab10-plan-answer",
    "10.4": "lab10-count-answer",
    "10.5": "lab10-fb-answer",
    "10.6": "lab10-run-answer",
    "10.7": "lab10-dream-answer",
    "10.8": "lab10-zero-answer",
    "10.9": "lab10-graph-answer",
}
BEFORE = "\n".join(source_of(NOTEBOOK, cell) for cell in ("ranks-join", "run-define"))
NAIVE, RUN, DREAM, PLAN, COUNT = "10.1", "10.6", "10.7", "10.3", "10.4"
GPIPE, FB = "10.2", "10.5"

#: Wrong answers that are tried on real ranks as well.
ON_RANKS = {"group forgotten", "no requires_grad", "sends that block", "a loop without an end"}
#: Ranks that are threads cannot be interrupted.
ONLY_ON_RANKS = {"a loop without an end"}

#: A plan that takes whatever is ready, and its line that takes an action from the list.
READY = """
def plan(schedule, forward=1, backward=2):
    p, ends, spans, free = len(schedule), {}, [], [0] * len(schedule)
    todo = [list(actions) for actions in schedule]
    while any(todo):
        before = len(spans)
        for s in range(p):
            for kind, k in list(todo[s]):
                if kind == "F":
                    needed = (s - 1, "F", k) if s > 0 else None
                else:
                    needed = (s + 1, "B", k) if s < p - 1 else (s, "F", k)
                if needed is None or needed in ends:
                    start = max(free[s], ends.get(needed, 0))
                    free[s] = ends[s, kind, k] = start + (forward if kind == "F" else backward)
                    spans.append((s, kind, k, start, free[s]))
                    todo[s].remove((kind, k))
        if len(spans) == before:
            return None
    return spans
"""
TAKEN = """                    todo[s].remove((kind, k))"""

# Task, what the student did, code, words of the verdict.
WRONG = [
    (
        PLAN,
        "a loop without an end",
        """
def plan(schedule, forward=1, backward=2):
    p, ends, position = len(schedule), {}, [0] * len(schedule)
    spans, free = [], [0] * p
    while len(spans) < sum(map(len, schedule)):
        for s, actions in enumerate(schedule):
            if position[s] == len(actions):
                continue
            kind, k = actions[position[s]]
            before = (s - 1, "F", k) if s else None
            behind = (s + 1, "B", k) if s < p - 1 else (s, "F", k)
            needed = before if kind == "F" else behind
            if needed is None or needed in ends:
                start = max(free[s], ends.get(needed, 0))
                free[s] = ends[s, kind, k] = start + (forward if kind == "F" else backward)
                spans.append((s, kind, k, start, free[s]))
                position[s] += 1
    return spans
""",
        "Leave the loop after a round that planned nothing, and return None",
    ),
    (
        GPIPE,
        "one list only",
        """
def gpipe(p, m):
    return [("F", k) for k in range(m)] + [("B", k) for k in reversed(range(m))]
""",
        "You returned the list of one stage",
    ),
    (
        GPIPE,
        "each microbatch alone",
        """
def gpipe(p, m):
    return [[pair for k in range(m) for pair in (("F", k), ("B", k))] for _ in range(p)]
""",
        "You ran each backward before the next forward, so the pipeline never fills",
    ),
    (
        GPIPE,
        "a dict",
        """
def gpipe(p, m):
    return {s: [("F", k) for k in range(m)] for s in range(p)}
""",
        "Return a list with a list for each stage",
    ),
    (
        GPIPE,
        "the order of 1F1B",
        """
def gpipe(p, m):
    schedule = []
    for s in range(p):
        w = min(m, p - 1 - s)
        actions = [("F", k) for k in range(w)]
        for k in range(m - w):
            actions += [("F", w + k), ("B", k)]
        schedule.append(actions + [("B", k) for k in range(m - w, m)])
    return schedule
""",
        "You returned 1F1B",
    ),
    (
        FB,
        "as GPipe",
        """
def one_f_one_b(p, m):
    return [[("F", k) for k in range(m)] + [("B", k) for k in reversed(range(m))]
            for _ in range(p)]
""",
        "You returned GPipe",
    ),
    (
        PLAN,
        "no waiting at all",
        """
def plan(schedule, forward=1, backward=2):
    spans = []
    for s, actions in enumerate(schedule):
        now = 0
        for kind, k in actions:
            end = now + (forward if kind == "F" else backward)
            spans.append((s, kind, k, now, end))
            now = end
    return spans
""",
        "Your stages don't wait for each other",
    ),
    (
        PLAN,
        "any action that is ready",
        READY,
        "You changed the order of a stage's list",
    ),
    (
        PLAN,
        "any forward that is ready",
        READY.replace(
            TAKEN,
            TAKEN
            + """
                elif kind == "B" or todo[s][todo[s].index((kind, k)) + 1:][:1] == [("B", k)]:
                    break""",
        ),
        "You changed the order of a stage's list",
    ),
    (
        COUNT,
        "a formula",
        """
def bubble(spans):
    p, m = 1 + max(s[0] for s in spans), 1 + max(s[2] for s in spans)
    return (p - 1) / (m + p - 1)
""",
        "You used a formula for equal times",
    ),
    (
        COUNT,
        "own lengths",
        """
def bubble(spans):
    busy = length = 0
    for stage in {s[0] for s in spans}:
        own = [s for s in spans if s[0] == stage]
        busy += sum(s[4] - s[3] for s in own)
        length += max(s[4] for s in own) - min(s[3] for s in own)
    return 1 - busy / length
""",
        "You added up the stages' own lengths",
    ),
    (
        COUNT,
        "forwards only",
        """
def most_held(schedule):
    return [sum(kind == "F" for kind, _ in actions) for actions in schedule]
""",
        "You counted all forwards",
    ),
    (
        COUNT,
        "by p - s",
        """
def most_held(schedule):
    return [len(schedule) - s for s in range(len(schedule))]
""",
        "You used p − s, which holds for some schedules",
    ),
    (
        DREAM,
        "a stash of the module",
        source_of(NOTEBOOK, CELLS[DREAM])
        .replace("self.stash[k]", "COPIES[id(self), k]")
        .replace("self.stash.pop(k)", "COPIES.pop((id(self), k))")
        + "\nCOPIES = {}\n",
        "You put nothing into self.stash[k]",
    ),
    (
        RUN,
        "loss of its own",
        """
def run_schedule(worker, schedule, inputs, labels, group=None):
    s, p = place_and_size(group)
    held, losses, sends = {}, {}, []
    for kind, k in schedule[s]:
        if kind == "F":
            x = inputs[k]
            if s > 0:
                x = torch.empty(len(inputs[k]), worker.features, dtype=inputs[k].dtype)
                dist.recv(x, group_src=s - 1, group=group, tag=forward_tag(k))
                x.requires_grad_()
            y = worker.forward(k, x)
            if s == p - 1:
                y = functional.cross_entropy(y, labels[k])
                losses[k] = y.item()
            else:
                sends.append(dist.isend(y.detach(), group_dst=s + 1, group=group,
                                        tag=forward_tag(k)))
            held[k] = x, y
        else:
            x, y = held.pop(k)
            gradient = None
            if s < p - 1:
                gradient = torch.empty_like(y)
                dist.recv(gradient, group_src=s + 1, group=group, tag=backward_tag(k))
            y.backward(gradient)
            worker.done(k)
            if s > 0:
                sends.append(dist.isend(x.grad, group_dst=s - 1, group=group, tag=backward_tag(k)))
    for send in sends:
        send.wait()
    return [losses[k] for k in sorted(losses)]
""",
        "times too large. Use worker.loss",
    ),
]

_STASH = """self.stash[k] = {
            name: w.detach().clone().requires_grad_() for name, w in weights.items()
        }"""

# Task, what the student did, what the solution has, and what stands in its place; words.
CHANGES = [
    (NAIVE, "no requires_grad", "x.requires_grad_()", "pass", "requires_grad_()"),
    (
        NAIVE,
        "backward without the gradient",
        "y.backward(gradient)",
        "y.backward()",
        "Only the last stage has a loss",
    ),
    (
        NAIVE,
        "group forgotten",
        "dist.recv(x, group_src=s - 1, group=group)",
        "dist.recv(x, group_src=s - 1)",
        "Nobody sends a message that a rank is waiting for",
    ),
    (
        NAIVE,
        "a sum as loss",
        "functional.cross_entropy(y, labels)",
        "functional.cross_entropy(y, labels, reduction='sum')",
        "a sum over the samples",
    ),
    (
        NAIVE,
        "divided by the stages",
        "functional.cross_entropy(y, labels)",
        "functional.cross_entropy(y, labels) / p",
        "stages share the layers, not the samples",
    ),
    (
        NAIVE,
        "sends its output back",
        "dist.send(x.grad, group_dst",
        "dist.send(x.detach(), group_dst",
        "Your gradient is wrong",
    ),
    (
        NAIVE,
        "loss as a tensor",
        "loss.item() if s == p - 1 else None",
        "[loss.item()] if s == p - 1 else None",
        "Return a number: loss.item()",
    ),
    (
        NAIVE,
        "a loss on every stage",
        "loss.item() if s == p - 1 else None",
        "loss.item() if s == p - 1 else 0.0",
        "only the last stage has a loss",
    ),
    (
        NAIVE,
        "no loss returned",
        "return loss.item() if s == p - 1 else None",
        "return None",
        "Return the loss on the last stage",
    ),
    (
        NAIVE,
        "the gradient is not sent",
        "if s > 0:\n        dist.send(x.grad",
        "if False:\n        dist.send(x.grad",
        "waits",
    ),
    (
        NAIVE,
        "gradients cleared",
        "return loss.item()",
        "stage.zero_grad()\n    return loss.item()",
        "Your stage has no gradient, or you set it to zero",
    ),
    (
        NAIVE,
        "a barrier in between",
        'with mark("B", 0):',
        'dist.barrier(group=group)\n    with mark("B", 0):',
        "barrier()",
    ),
    (
        NAIVE,
        "backward from ones",
        "y.backward(gradient)",
        "y.backward(torch.ones_like(gradient))",
        "Your gradient is wrong",
    ),
    (
        NAIVE,
        "forward twice",
        "y = stage(x)",
        "stage(x)\n        y = stage(x)",
        "expected one forward and one backward",
    ),
    (
        NAIVE,
        "loss as a tensor without dimensions",
        "return loss.item() if",
        "return loss if",
        "Return a number: loss.item()",
    ),
    (
        NAIVE,
        "receives before it sends",
        "        dist.send(y.detach(), group_dst=s + 1, group=group)\n"
        "        gradient = torch.empty_like(y)\n"
        "        dist.recv(gradient, group_src=s + 1, group=group)\n",
        "        gradient = torch.empty_like(y)\n"
        "        dist.recv(gradient, group_src=s + 1, group=group)\n"
        "        dist.send(y.detach(), group_dst=s + 1, group=group)\n",
        "waits in recv",
    ),
    (NAIVE, "isend without wait", "dist.send(x.grad", "dist.isend(x.grad", "You never call wait()"),
    (
        GPIPE,
        "backwards in order",
        "reversed(range(m))",
        "range(m)",
        "You put the backwards in the order of the forwards",
    ),
    (
        GPIPE,
        "from 1",
        'forwards = [("F", k) for k in range(m)]',
        'forwards = [("F", k) for k in range(1, m + 1)]',
        "Number microbatches from 0 to",
    ),
    (
        GPIPE,
        "a list for each microbatch",
        "for _ in range(p)",
        "for _ in range(m)",
        "one per microbatch. Return one per stage",
    ),
    (
        GPIPE,
        "words",
        '[("F", k) for k in range(m)]',
        '[f"F{k}" for k in range(m)]',
        'Make each action a pair of a letter and a number: ("F", 0)',
    ),
    (
        GPIPE,
        "no backward",
        "forwards + backwards",
        "forwards",
        "Give every stage every F and every B exactly once",
    ),
    (GPIPE, "backwards first", "forwards + backwards", "backwards + forwards", "not legal"),
    (
        GPIPE,
        "forwards reversed",
        '("F", k) for k in range(m)',
        '("F", k) for k in reversed(range(m))',
        "You reversed the forwards",
    ),
    (GPIPE, "returns nothing", "return [", "[", "You returned None. Return a list for each stage"),
    (
        PLAN,
        "the last stage's backward needs nothing",
        'else (s, "F", k)',
        "else None",
        "On the last stage, let a backward wait for its own forward",
    ),
    (
        PLAN,
        "gradients from the stage before",
        'needed = (s + 1, "B", k) if s < p - 1 else (s, "F", k)',
        'needed = (s - 1, "B", k) if s > 0 else None',
        "Your backward waits for stage s − 1",
    ),
    (
        PLAN,
        "backward waits for nobody",
        'needed = (s + 1, "B", k) if s < p - 1 else (s, "F", k)',
        "needed = None",
        "Your backward waits for nobody",
    ),
    (
        PLAN,
        "one time for all",
        '(forward if kind == "F" else backward)',
        "forward",
        "You gave every action the time of a forward",
    ),
    (
        PLAN,
        "times swapped",
        '(forward if kind == "F" else backward)',
        '(backward if kind == "F" else forward)',
        "You swapped the times of forward and backward",
    ),
    (
        PLAN,
        "arguments not used",
        '(forward if kind == "F" else backward)',
        '(1 if kind == "F" else 2)',
        "You didn't use the arguments forward and backward",
    ),
    (
        PLAN,
        "what could be planned",
        "return spans if len(spans) == sum(map(len, schedule)) else None",
        "return spans",
        "You returned an empty list",
    ),
    (
        PLAN,
        "an empty list for an illegal one",
        "schedule)) else None",
        "schedule)) else []",
        "You returned an empty list",
    ),
    (
        PLAN,
        "without waiting for its own stage",
        "start = max(free[s], ends.get(needed, 0))",
        "start = ends.get(needed, 0)",
        "two actions at the same time",
    ),
    (
        PLAN,
        "start and length",
        "spans.append((s, kind, k, start, free[s]))",
        "spans.append((s, kind, k, start, forward))",
        "End a span after its start",
    ),
    (
        PLAN,
        "four entries",
        "spans.append((s, kind, k, start, free[s]))",
        "spans.append((s, kind, k, start))",
        "Return a list of spans (stage, kind, k, start, end)",
    ),
    (
        PLAN,
        "an error for an illegal one",
        "    return spans if",
        "    if len(spans) < sum(map(len, schedule)):\n"
        "        raise ValueError('the schedule is not legal')\n    return spans if",
        "(Return None for a schedule that is not legal",
    ),
    (
        PLAN,
        "the forwards by their numbers",
        "    p, ends = len(schedule), {}\n",
        "    p, ends, numbered = len(schedule), {}, []\n"
        "    for actions in schedule:\n"
        "        forwards = iter(sorted(k for kind, k in actions if kind == 'F'))\n"
        "        numbered.append([(kind, next(forwards) if kind == 'F' else k) "
        "for kind, k in actions])\n"
        "    schedule = numbered\n",
        "You returned None, but the schedule is legal",
    ),
    (
        PLAN,
        "starts at 1",
        "free, position = [], [0] * p, [0] * p",
        "free, position = [], [1] * p, [0] * p",
        "You started an action later than possible",
    ),
    (
        PLAN,
        "returns nothing",
        "return spans if",
        "spans if",
        "You returned None, but the schedule is legal",
    ),
    (
        PLAN,
        "waits for all forwards first",
        'else (s, "F", k)',
        'else (s, "F", len(schedule[0]) // 2 - 1)',
        "You returned None, but the schedule is legal",
    ),
    (
        PLAN,
        "one clock for all stages",
        "start = max(free[s], ends.get(needed, 0))",
        "start = max(max(free), ends.get(needed, 0))",
        "You started an action later than possible",
    ),
    (
        COUNT,
        "the busy share",
        "return 1 - busy",
        "return busy",
        "You returned the busy share",
    ),
    (
        COUNT,
        "percent",
        "return 1 - busy / (len({stage for stage, *_ in spans}) * length)",
        "return 100 - 100 * busy / (len({stage for stage, *_ in spans}) * length)",
        "You returned percent",
    ),
    (COUNT, "from 0", " - min(start for *_, start, _ in spans)", "", "You counted from 0"),
    (
        COUNT,
        "without the stages",
        "(len({stage for stage, *_ in spans}) * length)",
        "length",
        "You left out the number of stages",
    ),
    (
        COUNT,
        "the last span of the list",
        "max(end for *_, end in spans)",
        "spans[-1][4]",
        "You stopped at the last span of the list",
    ),
    (
        COUNT,
        "by the actions",
        "len({stage for stage, *_ in spans})",
        "len(spans)",
        "divided by the number of actions",
    ),
    (
        COUNT,
        "idle over busy",
        "return 1 - busy / (len({stage for stage, *_ in spans}) * length)",
        "return len({stage for stage, *_ in spans}) * length / busy - 1",
        "You divided idle time by busy time",
    ),
    (
        COUNT,
        "held at the end",
        "found.append(most)",
        "found.append(held)",
        "You returned the numbers at the end",
    ),
    (
        COUNT,
        "the longest row of forwards",
        'held += 1 if kind == "F" else -1',
        'held = held + 1 if kind == "F" else 0',
        "the longest row of forwards",
    ),
    (
        COUNT,
        "until the first backward",
        'held += 1 if kind == "F" else -1',
        'if kind == "B":\n                break\n            held += 1',
        "You stopped at the first backward",
    ),
    (
        COUNT,
        "one maximum",
        "return found\n",
        "return max(found)\n",
        "You returned the maximum over the stages",
    ),
    (
        COUNT,
        "the sum",
        "return found\n",
        "return sum(found)\n",
        "You returned the sum over the stages",
    ),
    (
        COUNT,
        "counted before",
        'held += 1 if kind == "F" else -1\n            most = max(most, held)',
        "most = max(most, held if kind == 'F' else 0)\n"
        '            held += 1 if kind == "F" else -1',
        "one too few",
    ),
    (COUNT, "reversed", "return found\n", "return found[::-1]\n", "You reversed the stages"),
    (
        FB,
        "one forward too many",
        "min(m, p - 1 - s)",
        "min(m, p - s)",
        "You put one forward too many into the warm-up",
    ),
    (
        FB,
        "one too few",
        "min(m, p - 1 - s)",
        "max(0, min(m, p - 2 - s))",
        "You put one forward too few into the warm-up, so the pipeline does not fill",
    ),
    (FB, "no warm-up", "min(m, p - 1 - s)", "0", "You left out the warm-up"),
    (FB, "all alike", "min(m, p - 1 - s)", "min(m, p - 1)", "You gave all stages the same warm-up"),
    (FB, "the wrong way round", "min(m, p - 1 - s)", "min(m, s)", "You reversed the stages"),
    (
        FB,
        "fewer microbatches than stages",
        "min(m, p - 1 - s)",
        "p - 1 - s",
        "Number microbatches from 0 to",
    ),
    (
        FB,
        "no drain",
        'actions += [("B", k) for k in range(m - warmup, m)]',
        "pass",
        "Give every stage every F and every B exactly once",
    ),
    (
        FB,
        "drain in reverse",
        "for k in range(m - warmup, m)",
        "for k in reversed(range(m - warmup, m))",
        "the oldest microbatch first",
    ),
    (
        FB,
        "backward first",
        '[("F", warmup + k), ("B", k)]',
        '[("B", k), ("F", warmup + k)]',
        "not legal",
    ),
    (FB, "one list", "return schedule", "return schedule[0]", "You returned the list of one stage"),
    (
        RUN,
        "sends that block",
        "outbox.add(dist.isend(output, group_dst=s + 1, group=group, tag=tag))",
        "dist.send(output, group_dst=s + 1, group=group, tag=tag)",
        "You call dist.send",
    ),
    (
        RUN,
        "waits behind each send",
        "held, losses, outbox = {}, {}, Outbox()",
        "held, losses, outbox = {}, {}, Outbox()\n    outbox.add = lambda request: request.wait()",
        "wait at the end",
    ),
    (
        RUN,
        "waits behind the sends of activations",
        "outbox.add(dist.isend(output, group_dst=s + 1, group=group, tag=tag))",
        "dist.isend(output, group_dst=s + 1, group=group, tag=tag).wait()",
        "wait at the end",
    ),
    (
        RUN,
        "waits behind the sends of gradients",
        "outbox.add(dist.isend(x.grad, group_dst=s - 1, group=group, tag=tag))",
        "dist.isend(x.grad, group_dst=s - 1, group=group, tag=tag).wait()",
        "wait at the end",
    ),
    (
        RUN,
        "waits for the outbox after each action",
        "\n    outbox.wait()",
        "\n        outbox.wait()",
        "wait at the end",
    ),
    (
        RUN,
        "losses in the order of the work",
        "losses[k] = y.item()",
        "losses[len(losses)] = y.item()",
        "You returned them in the order of work",
    ),
    (RUN, "losses are tensors", "y.item()", "y.detach()", "Return numbers: loss.item()"),
    (
        RUN,
        "all microbatches as large as the first",
        "torch.empty(len(x)",
        "torch.empty(len(inputs[0])",
        "must agree on dtype and number of elements",
    ),
    (RUN, "a queue", "held.pop(k)", "held.pop(next(iter(held)))", "stages with different orders"),
    (RUN, "a stack", "held.pop(k)", "held.popitem()[1]", "Your gradient is wrong"),
    (RUN, "labels of the first", "labels[k])", "labels[0])", "Your gradient is wrong"),
    (RUN, "no tags", "forward_tag(k)", "0", "Use forward_tag(k) for activations"),
    (
        RUN,
        "tags forgotten backward",
        "backward_tag(k)",
        "0",
        "backward_tag(k) for gradients",
    ),
    (RUN, "no wait", "outbox.wait()", "pass", "You never call wait()"),
    (
        RUN,
        "nothing is forgotten",
        "held.pop(k)",
        "held[k]",
        "microbatches' activations at once, and",
    ),
    (RUN, "one entry for all", "held[k] = x, y", "held[0] = x, y", "You look up a missing entry"),
    (RUN, "no requires_grad", "x.requires_grad_()", "pass", "requires_grad_()"),
    (
        RUN,
        "group forgotten",
        "group_src=s - 1, group=group",
        "group_src=s - 1",
        "Nobody sends a message that a rank is waiting for",
    ),
    (RUN, "done is not called", "worker.done(k)", "pass", "You never called worker.done"),
    (
        RUN,
        "done before backward",
        "y.backward(gradient)\n                worker.done(k)",
        "worker.done(k)\n                y.backward(gradient)",
        "You called worker.done(k) before microbatch k's backward",
    ),
    (
        RUN,
        "an order of its own",
        "for kind, k in schedule[s]:",
        "for kind, k in sorted(schedule[s], key=lambda one: (one[0] == 'B', one[1])):",
        "this stage's list is",
    ),
    (RUN, "the first stage's list", "schedule[s]:", "schedule[0]:", "this stage's list is"),
    (
        RUN,
        "losses on all stages",
        "return [losses[k] for k in sorted(losses)]",
        "return [losses.get(k, 0.0) for k in range(len(inputs))]",
        "You returned losses on a stage that has none",
    ),
    (
        RUN,
        "their sum",
        "return [losses[k] for k in sorted(losses)]",
        "return sum(losses.values())",
        "You returned their sum",
    ),
    (
        RUN,
        "divided once more",
        "y = worker.loss(y, labels[k])",
        "y = worker.loss(y, labels[k]) / len(inputs)",
        "once too often",
    ),
    (
        RUN,
        "backward from ones",
        "y.backward(gradient)",
        "y.backward(gradient if gradient is None else torch.ones_like(gradient))",
        "Your gradient is wrong",
    ),
    (
        DREAM,
        "no copy",
        "w.detach().clone().requires_grad_()",
        "w",
        "modified by an inplace operation",
    ),
    (
        DREAM,
        "forward by the stage itself",
        "functional_call(self.stage, self.stash[k], (x,))",
        "self.stage(x)",
        "You read a gradient that backward never wrote",
    ),
    (
        DREAM,
        "no stash, through data",
        "return functional_call(self.stage, self.stash[k], (x,))",
        "self.stash[k] = dict(self.stage.named_parameters())\n        return self.stage(x)",
        "modified by an inplace operation",
    ),
    (
        DREAM,
        "one copy for each version",
        _STASH,
        "new = {name: w.detach().clone().requires_grad_() for name, w in weights.items()}\n"
        "        self.copies = getattr(self, 'copies', {})\n"
        "        self.stash[k] = self.copies.setdefault(self.version, new)",
        "You gave two microbatches the same copy, so their gradients add up",
    ),
    (
        DREAM,
        "a list that is never emptied",
        "        self.used[k] = self.version\n",
        "        self.used[k] = self.version\n"
        "        globals().setdefault('copies', []).append(self.stash[k])\n",
        "a list or dict that is never emptied",
    ),
    (
        DREAM,
        "a copy of the module",
        _STASH,
        "self.stash[k] = __import__('copy').deepcopy(self.stage)\n        return self.stash[k](x)",
        "expected a dict {name: tensor}",
    ),
    (DREAM, "nothing is taken out", "self.stash.pop(k)", "self.stash[k]", "The stash still holds"),
    (
        DREAM,
        "from the old copy",
        "weight.sub_(self.rate * old[name].grad)",
        "weight.copy_(old[name] - self.rate * old[name].grad)",
        "You started each update from the old copy, so the updates of other",
    ),
    (DREAM, "uphill", "weight.sub_(", "weight.add_(", "up the slope"),
    (DREAM, "no rate", "self.rate * old[name].grad", "old[name].grad", "You left out the rate"),
    (DREAM, "moves the copy", "weight.sub_(", "old[name].sub_(", "You never changed the weights"),
    (DREAM, "the version stays", "self.version += 1", "pass", "You noted version 0 for all"),
    (
        DREAM,
        "versions not noted",
        "self.used[k] = self.version",
        "pass",
        "You noted no version",
    ),
    (
        DREAM,
        "the microbatch's number",
        "self.used[k] = self.version",
        "self.used[k] = k",
        "You noted the microbatch's number",
    ),
    (
        DREAM,
        "noted when done",
        "self.version += 1",
        "self.version += 1\n        self.used[k] = self.version",
        "You noted the version after the update",
    ),
    (
        DREAM,
        "no grad needed",
        "w.detach().clone().requires_grad_()",
        "w.detach().clone()",
        "You read a gradient that backward never wrote",
    ),
    (DREAM, "with autograd watching", "with torch.no_grad():", "if True:", "torch.no_grad()"),
    (
        DREAM,
        "sends the gradients round",
        "old = self.stash.pop(k)",
        "old = self.stash.pop(k)\n        dist.all_reduce(next(iter(old.values())).grad)",
        "You call all_reduce",
    ),
]

# Task, what is different, code.
RIGHT = [
    (
        NAIVE,
        "without blocking",
        """
def train_naively(stage, x, labels, group=None):
    s, p = place_and_size(group)
    first, last = s == 0, s == p - 1
    if not first:
        x = torch.zeros(x.shape[0], stage.features, dtype=x.dtype, requires_grad=True)
        with torch.no_grad():
            dist.irecv(x.data, group_src=s - 1, group=group).wait()
    with mark("F", 0):
        y = stage(x)
    if last:
        with mark("B", 0):
            loss = functional.cross_entropy(y, labels)
            loss.backward()
    else:
        request = dist.isend(y.detach().contiguous(), group_dst=s + 1, group=group)
        gradient = torch.zeros(y.shape, dtype=y.dtype)
        dist.irecv(gradient, group_src=s + 1, group=group).wait()
        request.wait()
        with mark("B", 0):
            torch.autograd.backward(y, gradient)
    if not first:
        dist.isend(x.grad, group_dst=s - 1, group=group).wait()
    return float(loss) if last else None
""",
    ),
    (
        NAIVE,
        "by ranks of the world",
        """
def train_naively(stage, x, labels, group=None):
    s, p = place_and_size(group)
    members = dist.get_process_group_ranks(group or dist.group.WORLD)
    if s:
        x = x.new_empty(len(x), stage.features).requires_grad_()
        dist.recv(x.detach(), members[s - 1], group=group, tag=7)
    with mark("F", 0):
        y = stage(x)
    if s < p - 1:
        dist.send(y.detach(), members[s + 1], group=group, tag=7)
        upstream = torch.empty_like(y)
        dist.recv(upstream, members[s + 1], group=group, tag=8)
        with mark("B", 0):
            (y * upstream).sum().backward()
    else:
        with mark("B", 0):
            loss = functional.cross_entropy(y, labels)
            loss.backward()
    if s:
        dist.send(x.grad, members[s - 1], group=group, tag=8)
    return loss.item() if s == p - 1 else None
""",
    ),
    (
        GPIPE,
        "with a loop",
        """
def gpipe(p, m):
    schedule = []
    for _ in range(p):
        schedule.append([])
        for k in range(m):
            schedule[-1].append(("F", k))
        for k in range(m - 1, -1, -1):
            schedule[-1].append(("B", k))
    return schedule
""",
    ),
    (
        GPIPE,
        "tuples",
        """
def gpipe(p, m):
    one = tuple([("F", k) for k in range(m)] + [("B", m - 1 - k) for k in range(m)])
    return (one,) * p
""",
    ),
    (
        PLAN,
        "by passes over all actions",
        """
def plan(schedule, forward=1, backward=2):
    p, ends = len(schedule), {}
    for _ in range(sum(map(len, schedule)) + 1):
        for s, actions in enumerate(schedule):
            free = 0
            for kind, k in actions:
                needed = (s - 1, "F", k) if kind == "F" else (s + 1, "B", k)
                if kind == "B" and s == p - 1:
                    needed = (s, "F", k)
                if needed[0] >= 0 and needed not in ends:
                    break
                start = max(free, ends.get(needed, (0, 0))[1])
                free = start + (forward if kind == "F" else backward)
                ends[s, kind, k] = (start, free)
    if len(ends) < sum(map(len, schedule)):
        return None
    return [[*action, *times] for action, times in ends.items()]
""",
    ),
    (
        PLAN,
        "by recursion",
        """
def plan(schedule, forward=1, backward=2):
    p, spans, open_ = len(schedule), {}, set()

    def end(s, n):
        kind, k = schedule[s][n]
        if (s, n) in spans:
            return spans[s, n][-1]
        if (s, n) in open_:
            raise RecursionError
        open_.add((s, n))
        start = end(s, n - 1) if n else 0
        other = None
        if kind == "F" and s:
            other = s - 1, ("F", k)
        elif kind == "B":
            other = (s + 1, ("B", k)) if s < p - 1 else (s, ("F", k))
        if other:
            start = max(start, end(other[0], schedule[other[0]].index(other[1])))
        spans[s, n] = (s, kind, k, start, start + {"F": forward, "B": backward}[kind])
        return spans[s, n][-1]

    try:
        for s in range(p):
            for n in range(len(schedule[s])):
                end(s, n)
    except (RecursionError, ValueError):
        return None
    return list(spans.values())
""",
    ),
    (
        COUNT,
        "with tensors",
        """
def bubble(spans):
    times = torch.tensor([span[3:] for span in spans], dtype=torch.float64)
    busy = (times[:, 1] - times[:, 0]).sum()
    length = times.max() - times.min()
    return (1 - busy / length / (1 + max(span[0] for span in spans))).item()


def most_held(schedule):
    counts = [torch.tensor([1 if kind == "F" else -1 for kind, _ in one]) for one in schedule]
    return [int(count.cumsum(0).max()) for count in counts]
""",
    ),
    (
        COUNT,
        "idle time of each stage",
        """
def bubble(spans):
    first, last = min(s[3] for s in spans), max(s[4] for s in spans)
    stages = sorted({s[0] for s in spans})
    idle = [last - first - sum(s[4] - s[3] for s in spans if s[0] == one) for one in stages]
    return sum(idle) / ((last - first) * len(stages))


def most_held(schedule):
    found = []
    for actions in schedule:
        alive, sizes = set(), []
        for kind, k in actions:
            alive ^= {k}
            sizes.append(len(alive))
        found.append(max(sizes))
    return found
""",
    ),
    (
        FB,
        "as a simulation of counts",
        """
def one_f_one_b(p, m):
    schedule = [[] for _ in range(p)]
    for s, actions in enumerate(schedule):
        f = b = 0
        while b < m:
            if f < m and f - b < p - s:
                actions.append(("F", f))
                f += 1
            else:
                actions.append(("B", b))
                b += 1
    return schedule
""",
    ),
    (
        FB,
        "backward first in a pair",
        """
def one_f_one_b(p, m):
    schedule = []
    for s in range(p):
        n = min(m, p - s)
        actions = [("F", k) for k in range(n)]
        for k in range(n, m):
            actions += [("B", k - n), ("F", k)]
        schedule.append(actions + [("B", k) for k in range(m - n, m)])
    return schedule
""",
    ),
    (
        RUN,
        "all receives posted first",
        """
def run_schedule(worker, schedule, inputs, labels, group=None):
    s, p = place_and_size(group)
    m, kept, requests, losses = len(inputs), {}, [], [0.0] * len(inputs)
    x, coming = dict(enumerate(inputs)), {}
    if s > 0:
        for k in range(m):
            x[k] = torch.empty(len(inputs[k]), worker.features, dtype=inputs[k].dtype)
            coming[k] = dist.irecv(x[k], group_src=s - 1, group=group, tag=forward_tag(k))
    for kind, k in schedule[s]:
        if kind == "F":
            if s > 0:
                coming.pop(k).wait()
                x[k].requires_grad_()
            with mark("F", k):
                y = worker.forward(k, x[k])
            if s == p - 1:
                y = worker.loss(y, labels[k])
                losses[k] = float(y)
            else:
                requests.append(dist.isend(y.detach(), group=group, group_dst=s + 1,
                                           tag=forward_tag(k)))
            kept[k] = y
        elif s == p - 1:
            with mark("B", k):
                kept.pop(k).backward()
                worker.done(k)
        else:
            gradient = torch.empty(kept[k].shape, dtype=kept[k].dtype)
            dist.irecv(gradient, group=group, group_src=s + 1, tag=backward_tag(k)).wait()
            with mark("B", k):
                kept.pop(k).backward(gradient)
                worker.done(k)
        if kind == "B" and s > 0:
            requests.append(dist.isend(x.pop(k).grad, group=group, group_dst=s - 1,
                                       tag=backward_tag(k)))
    [request.wait() for request in requests]
    return losses if s == p - 1 else []
""",
    ),
]

# Task, what is different, what the solution has, and what stands in its place.
CHANGES_THAT_ARE_RIGHT = [
    (
        RUN,
        "forgets what has gone before each action",
        "    for kind, k in schedule[s]:\n",
        "    for kind, k in schedule[s]:\n        outbox.requests = [one for one in "
        "outbox.requests if not one.is_completed()]\n",
    ),
    (RUN, "a copy is sent", "(k), y.detach()\n", "(k), y.detach().clone()\n"),
    (
        DREAM,
        "another way to move",
        "weight.sub_(self.rate * old[name].grad)",
        "weight.add_(old[name].grad, alpha=-self.rate)",
    ),
    (
        DREAM,
        "new parameters in place of old ones",
        "weight.sub_(self.rate * old[name].grad)",
        "weight.data = weight.data - self.rate * old[name].grad",
    ),
    (DREAM, "through data", "weight.sub_(", "weight.data.sub_("),
]

#: Made for what the check asked first: other types, lengths and groups are asked, too.
CHANGES += [
    (
        "10.1",
        "is made for one length",
        "torch.empty(len(x), stage.features, dtype=x.dtype)",
        "torch.empty(24, stage.features, dtype=x.dtype)",
        "Communication",
    ),
    ("10.1", "is made for float64", "dtype=x.dtype", "dtype=torch.float64", "Communication"),
]

#: Right in a pipeline as small as the lab's, or with its rate.
CHANGES += [
    ("10.1", "computes outside of the mark", """    with mark("F", 0):
        y = stage(x)
""", """    y = stage(x)
    with mark("F", 0):
""", "Your stage computes outside its mark"),
    ("10.1", "no marks", 'with mark("B", 0):', "if True:",
     "Put with mark(kind, k): around the computation"),
    ("10.1", "a message inside of a mark", """        y = stage(x)
        loss""", """        y = stage(x)
        if s < p - 1:
            dist.send(y.detach(), group_dst=s + 1, group=group)
        loss""", ""),
    ("10.6", "messages inside of the marks", """            if s > 0:
                x = torch.empty(len(x), worker.features, dtype=x.dtype)
                dist.recv(x, group_src=s - 1, group=group, tag=forward_tag(k))
                x.requires_grad_()
            with mark("F", k):
""", """            with mark("F", k):
                if s > 0:
                    x = torch.empty(len(x), worker.features, dtype=x.dtype)
                    dist.recv(x, group_src=s - 1, group=group, tag=forward_tag(k))
                    x.requires_grad_()
""", "You made a message inside a mark"),
    ("10.2", "five microbatches at most", "range(m)]\n    b", "range(min(m, 5))]\n    b", ""),
    ("10.3", "a dozen rounds", "    while moved:\n", "    for _ in range(12):\n", ""),
    ("10.4", "from the begin of stage 0", "min(start for *_, start, _ in spans)",
     "min(start for s, *_, start, _ in spans if s == 0)", ""),
    ("10.4", "a dozen actions", "for kind, _ in actions:", "for kind, _ in actions[:12]:", ""),
    ("10.5", "at most three forwards before", "min(m, p - 1 - s)", "min(m, 3, p - 1 - s)", ""),
    ("10.7", "another rate than the one given", "self.rate * old", "0.3 * old", ""),
]  # fmt: skip

CHANGES += [
    ("10.2", "the same lists in each call", "return [forwards + backwards for _ in range(p)]",
     "known = gpipe.__dict__.setdefault('known', {})\n"
     "    return known.setdefault((p, m), [forwards + backwards for _ in range(p)])",
     "the same list in two calls"),
    ("10.3", "a set", "return spans if", "return set(spans) if", "set of tuple"),
    ("10.1", "a buffer that stays", "x = torch.empty(len(x), stage.features, dtype=x.dtype)",
     "kept = train_naively.__dict__\n"
     "        x = kept.setdefault((len(x), p, s), torch.empty(len(x), stage.features, "
     "dtype=x.dtype)).detach_()", "Receive each microbatch into a new tensor"),
    ("10.3", "wants a backward for each forward", "return spans if len(spans) == ",
     "whole = all(2 * sum(kind == 'F' for kind, _ in one) == len(one) for one in schedule)\n"
     "    return spans if whole and len(spans) == ", "returned None"),
    ("10.4", "looks before backwards only",
     "            most = max(most, held)",
     "            if kind == 'B':\n                most = max(most, held + 1)", "most_held("),
    ("10.3", "an end at 0 is none", "needed not in ends", "not ends.get(needed)", "returned None"),
    ("10.4", "sorts its argument", "    busy = sum(", "    spans.sort()\n    busy = sum(",
     "changed its argument spans"),
    ("10.4", "knows two kinds only", "end - start for *_, start, end in spans)",
     "end - start for _, kind, _, start, end in spans if kind in 'FB')", "bubble("),
    ("10.4", "a tuple", "    return found", "    return tuple(found)", "<tuple>"),
    ("10.7", "takes out the oldest copy", "self.stash.pop(k)",
     "self.stash.pop(next(iter(self.stash)))", "You read a gradient that backward never wrote"),
    ("10.7", "the version from the number", "self.version += 1", "self.version = k + 1",
     "self.used"),
]  # fmt: skip
CHANGES_THAT_ARE_RIGHT += [
    (NAIVE, "by torch.autograd.grad", """        if s == p - 1:
            loss.backward()
        else:
            y.backward(gradient)
""", """        wanted = [*stage.parameters(), *([x] if s else [])]
        given = (y, wanted, gradient) if loss is None else (loss, wanted)
        found = torch.autograd.grad(*given)
        for one, grad in zip(wanted, found):
            one.grad = grad
"""),
]  # fmt: skip

ZERO, _LATER, _LEFT = "10.8", 'mine.append(("W", k - s))', "range(max(0, m - s), m)"
CHANGES += [
    (
        ZERO,
        "W right after each I",
        f"k >= s:  # stage s lets s of its W wait\n                {_LATER}",
        'True:\n                mine.append(("W", k))',
        "Stage 1 has W",
    ),
    (
        ZERO,
        "W right after each I, and none at the end",
        '        mine += [("W", k) for k in range(max(0, m - s), m)]\n',
        "        p = p\n",
        "lacks W",
    ),
    (ZERO, "all W at the end", _LATER, "pass", "lacks W0"),
    (
        ZERO,
        "W before I",
        'mine.append(("F" if kind == "F" else "I", k))',
        'mine += [("F", k)] if kind == "F" else [("W", k), ("I", k)]',
        "has W",
    ),
    (ZERO, "B instead of I", 'else "I", k', 'else "B", k', "lacks I0"),
    (ZERO, "forgets what is left if there are few microbatches", "max(0, m - s)", "m - s", "has W"),
    (ZERO, "forgets the last W", _LEFT, "range(max(0, m - s), m - 1)", "lacks W"),
    (
        ZERO,
        "for four stages",
        "enumerate(one_f_one_b(p, m))",
        "enumerate(one_f_one_b(4, m))",
        "lists, not 4",
    ),
    (
        ZERO,
        "text instead of pairs",
        "schedule.append(mine)",
        'schedule.append([f"{kind}{k}" for kind, k in mine])',
        "Return a list for each stage",
    ),
    (
        ZERO,
        "the schedule of 1F1B",
        "    schedule = []\n",
        "    return one_f_one_b(p, m)\n",
        "lacks I0",
    ),
]
WRONG += [
    (
        ZERO,
        "waits with no W",
        """
def zero_bubble(p, m):
    return [
        [(half, k) for kind, k in actions for half in ("F" if kind == "F" else "IW")]
        for actions in one_f_one_b(p, m)
    ]
""",
        "because each W comes right after its I",
    ),
    (
        ZERO,
        "lets all W wait",
        """
def zero_bubble(p, m):
    return [
        [("F" if kind == "F" else "I", k) for kind, k in actions] + [("W", k) for k in range(m)]
        for actions in one_f_one_b(p, m)
    ]
""",
        "Don't let all W wait until the end",
    ),
    (
        ZERO,
        "the last stage waits too little",
        """
def zero_bubble(p, m):
    schedule = []
    for s, actions in enumerate(one_f_one_b(p, m)):
        mine, wait = [], min(s, 1)
        for kind, k in actions:
            mine.append(("F" if kind == "F" else "I", k))
            if kind == "B" and k >= wait:
                mine.append(("W", k - wait))
        schedule.append(mine + [("W", k) for k in range(max(0, m - wait), m)])
    return schedule
""",
        "are enough. On which stage does an I wait for a W",
    ),
    (
        ZERO,
        "begins with W",
        """
def zero_bubble(p, m):
    return [
        [("W", k) for k in range(m)] + [("F" if kind == "F" else "I", k) for kind, k in actions]
        for actions in one_f_one_b(p, m)
    ]
""",
        "isn't legal",
    ),
]
CHANGES_THAT_ARE_RIGHT += [
    (ZERO, "with a queue", "        mine = []\n", "        mine, queue = [], []\n"),
    (
        ZERO,
        "inserts W afterwards",
        "        schedule.append(mine)\n",
        "        schedule.append([(kind, int(k)) for kind, k in mine])\n",
    ),
]
RIGHT += [
    (
        ZERO,
        "greedy, with a clock",
        """
def zero_bubble(p, m):
    todo = [[("F" if a == "F" else "I", k) for a, k in one] for one in one_f_one_b(p, m)]
    late, ends, now = [[] for _ in range(p)], {}, 0
    schedule, held = [[] for _ in range(p)], [0] * p
    while any(todo) or any(late):
        begun = []
        for s in range(p):
            ready = bool(todo[s])
            if ready:
                kind, k = todo[s][0]
                needed = (s - 1, "F", k) if kind == "F" else (s + 1, "I", k)
                if s == p - 1 and kind == "I":
                    needed = (s, "F", k)
                ready = (kind == "F" and s == 0) or ends.get(needed, now + 1) <= now
                ready = ready and not (kind == "F" and held[s] == p)
            if ready:
                begun.append((s, *todo[s].pop(0)))
                schedule[s].append((kind, k))
                held[s] += kind == "F"
                late[s] += [k] if kind == "I" else []
            elif late[s]:
                schedule[s].append(("W", late[s].pop(0)))
                held[s] -= 1
        now += 1
        ends |= dict.fromkeys(begun, now)
    return schedule
""",
    ),
]

GRAPH = "10.9"
CHANGES += [
    (GRAPH, "messages cost nothing", "sizes[one] / bandwidth", "0", "You charged no messages"),
    (
        GRAPH,
        "a rank runs several operators at once",
        "begin = free.get(here, 0)",
        "begin = 0",
        "several operators at once",
    ),
    (
        GRAPH,
        "the operator's bytes instead of its input's",
        "sizes[one] / bandwidth",
        "sizes[name] / bandwidth",
        "expected",
    ),
    (
        GRAPH,
        "multiplies by the bandwidth",
        "sizes[one] / bandwidth",
        "sizes[one] * bandwidth",
        "expected",
    ),
    (
        GRAPH,
        "charges a message on one rank, too",
        "0 if at[one] == here else sizes[one]",
        "sizes[one]",
        "expected",
    ),
    (
        GRAPH,
        "waits for the last input only",
        "for one in inputs:\n            late",
        "for one in inputs[-1:]:\n            late",
        "expected",
    ),
    (
        GRAPH,
        "messages come one after the other",
        "begin = max(begin, ends[one] + late)",
        "begin = max(begin, ends[one]) + late",
        "expected",
    ),
    (
        GRAPH,
        "the end of the last operator of the list",
        "return max(ends.values())",
        "return ends[graph[-1][0]]",
        "Another one ends later",
    ),
    (
        GRAPH,
        "the sum of all",
        "return max(ends.values())",
        "return sum(operator[1] for operator in graph)",
        "You added up all operators",
    ),
    (
        GRAPH,
        "greedy for small graphs, too",
        "if len(graph) <= 8:",
        "if len(graph) <= 1:",
        "The best of all",
    ),
    (
        GRAPH,
        "only two ranks",
        "itertools.product(range(ranks)",
        "itertools.product(range(2)",
        "Ranks go from 0",
    ),
    (
        GRAPH,
        "ignores messages when it places",
        "places: finish(graph, places, bandwidth))",
        "places: finish(graph, places, 1e30))",
        "The best of all",
    ),
    (
        GRAPH,
        "in turn",
        "        chosen = tried.index(min(tried))\n",
        "        chosen = len(places) % ranks\n",
        "in turn where it ends first",
    ),
    (
        GRAPH,
        "greedy by begin",
        "            tried.append(begin + seconds)\n",
        "            tried.append(free[rank] + seconds)\n",
        "in turn where it ends first",
    ),
]
CHANGES_THAT_ARE_RIGHT += [
    (
        GRAPH,
        "the last of the best placements",
        "return list(min(every,",
        "return list(min([*every][::-1],",
    ),
    (GRAPH, "a range of nine", "if len(graph) <= 8:", "if len(graph) <= 9:"),
    (
        GRAPH,
        "by the key of a minimum",
        "chosen = tried.index(min(tried))",
        "chosen = min(range(ranks), key=tried.__getitem__)",
    ),
]
