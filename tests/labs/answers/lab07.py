"""Answers to lab 07, wrong ones and right ones, that students really give."""

from __future__ import annotations

from lab_tools import source_of

NOTEBOOK = "07_parameter_server.ipynb"
CELLS = {
    "7.1": "rounds-answer",
    "7.2": "anyone-answer",
    "7.3": "models-answer",
    "7.4": "weak-answer",
    "7.5": "hogwild-answer",
    "7.6": "lost-answer",
    "7.7": "cap-answer",
}
RANKS = 6
# Its check serves four sets of workers.
SLOW = {"7.3"}
BEFORE = source_of(NOTEBOOK, "ranks-join") + "\n" + source_of(NOTEBOOK, "star-helpers")

# Those that real ranks are tried with, besides the first of each task.
ON_RANKS = {
    *("never says goodbye", "counts who has left", "ignores the bound", "one clock too strict"),
    *("forgets who waits", "a fixed order", "does not wait for its sends", "reads too early"),
    *("receives after the sends", "receives for the next round before it asks"),
}

# task, what the student did, a part of the solution, what stands in its place, words of the message
_CHANGES = [
    # -- the worker
    ("7.1", "never says goodbye", "            leave()\n", "",
     "If it returns False, call leave() and return, otherwise push the"),
    ("7.1", "asks before it receives", """
        def work(compute, weights, more):
            while more():
                dist.recv(weights, src=SERVER)
                hand_in(compute(weights))
            leave()
        """, None, "You didn't receive the last weights"),
    ("7.1", "never asks", "        if not more():\n            leave()\n            return\n", "",
     "Receive weights, then ask more() once"),
    ("7.1", "computes one more", "hand_in(compute(weights))", "hand_in(compute(weights))\n"
     "        compute(weights)",
     "Push one gradient each time, and compute nothing after more() has"),
    ("7.1", "hands in the weights", "hand_in(compute(weights))", "compute(weights)\n"
     "        hand_in(weights)", "You pushed the weights"),
    ("7.1", "computes before it asks", """
        def work(compute, weights, more):
            while True:
                dist.recv(weights, src=SERVER)
                gradient = compute(weights)
                if not more():
                    leave()
                    return
                hand_in(gradient)
        """, None, "Push one gradient each time, and compute nothing after more() has"),
    ("7.1", "keeps the first weights", """
        def work(compute, weights, more):
            first = None
            while True:
                dist.recv(weights, src=SERVER)
                first = weights.clone() if first is None else first
                if not more():
                    leave()
                    return
                hand_in(compute(first))
        """, None, "You computed every gradient at the first weights"),
    ("7.1", "sends the gradient without a header", "hand_in(compute(weights))",
     "dist.send(compute(weights), dst=SERVER)",
     "If it returns False, call leave() and return, otherwise push the"),
    # -- the server
    ("7.1", "takes the sum", "lr * total / len(here)", "lr * total",
     "You used the sum of a round's gradients"),
    ("7.1", "divides by all workers", "lr * total / len(here)", "lr * total / len(workers)",
     "If a worker leaves in a round, divide by the number of gradients that"),
    ("7.1", "climbs", "weights -= lr * total", "weights += lr * total", "uphill"),
    ("7.1", "forgets the learning rate", "lr * total / len(here)", "total / len(here)",
     "The learning rate is missing"),
    ("7.1", "makes new weights", "weights -= lr * total / len(here)",
     "weights = weights - lr * total / len(here)", "Update the argument in place"),
    ("7.1", "steps with each gradient", """
        def serve_in_rounds(weights, workers, lr):
            gradient, here, rounds = torch.empty_like(weights), list(workers), 0
            while here:
                for worker in list(here):
                    dist.send(weights, dst=worker)
                    if receive(gradient, source=worker)[1]:
                        weights -= lr * gradient
                    else:
                        here.remove(worker)
                rounds += bool(here)
            return rounds
        """, None, "so that all gradients of a round belong to the same weights"),
    ("7.1", "answers at once", """
        def serve_in_rounds(weights, workers, lr):
            gradient, here, rounds = torch.empty_like(weights), set(workers), 0
            for worker in workers:
                dist.send(weights, dst=worker)
            while here:
                worker, came = receive(gradient)
                if came:
                    weights -= lr * gradient / len(workers)
                    dist.send(weights, dst=worker)
                    rounds += 1
                else:
                    here.discard(worker)
            return rounds
        """, None, "Collect all gradients of a round, take one step, and then send to all"),
    ("7.1", "sends to who has left", "        here = stay\n        if here:",
     "        if stay:", "Don't send to a worker that has left, don't wait for it, and don't"),
    ("7.1", "counts the empty round", "        if here:\n            weights -= lr * total / "
     "len(here)\n            rounds += 1", "        if here:\n            weights -= lr * total / "
     "len(here)\n        rounds += 1", "You counted a round without gradients"),
    ("7.1", "counts gradients", "rounds += 1", "rounds += len(here)", "You counted gradients"),
    ("7.1", "keeps references", """
        def serve_in_rounds(weights, workers, lr):
            gradient, here, rounds = torch.empty_like(weights), list(workers), 0
            while here:
                for worker in here:
                    dist.send(weights, dst=worker)
                came = {worker: gradient for worker in here if receive(gradient, worker)[1]}
                here = list(came)
                if here:
                    weights -= lr * sum(came.values()) / len(here)
                    rounds += 1
            return rounds
        """, None, "receive fills the same tensor each time"),
    ("7.1", "broadcasts", "        for worker in here:\n            dist.send(weights, dst=worker)",
     "        dist.broadcast(weights, src=0)", "broadcast"),
    ("7.1", "serves three ranks", "list(workers), 0", "[1, 2, 3], 0", "workers = [1, 2, 3, 4, 5]"),
    ("7.1", "returns nothing", "    return rounds", "    pass", "Return the number of rounds"),
    # -- asynchronous
    ("7.2", "a fixed order", """
        def serve_anyone(weights, workers, lr):
            gradient, here, applied = torch.empty_like(weights), list(workers), []
            for worker in workers:
                dist.send(weights, dst=worker)
            sent_at = dict.fromkeys(workers, 0)
            while here:
                for worker in list(here):
                    if receive(gradient, source=worker)[1]:
                        weights -= lr * gradient
                        applied.append((worker, len(applied) - sent_at[worker]))
                        dist.send(weights, dst=worker)
                        sent_at[worker] = len(applied)
                    else:
                        here.remove(worker)
            return applied
        """, None, "Call receive(gradient) without a source, which takes the first message"),
    ("7.2", "answers all together", """
        def serve_anyone(weights, workers, lr):
            gradient, here, applied = torch.empty_like(weights), set(workers), []
            while here:
                for worker in sorted(here):
                    dist.send(weights, dst=worker)
                for _ in range(len(here)):
                    worker, came = receive(gradient)
                    if came:
                        weights -= lr * gradient
                        applied.append((worker, 0))
                    else:
                        here.discard(worker)
            return applied
        """, None, "pushed a gradient, but the server turned to another rank before it sent"),
    ("7.2", "takes the mean", "lr * gradient", "lr * gradient / len(workers)",
     "Each gradient is a separate step here, lr · gradient"),
    ("7.2", "climbs", "weights -= lr", "weights += lr", "uphill"),
    ("7.2", "makes new weights", "weights -= lr * gradient", "weights = weights - lr * gradient",
     "the final weights: The weights never changed"),
    ("7.2", "sends before it applies", """
        def serve_anyone(weights, workers, lr):
            gradient, here, applied = torch.empty_like(weights), set(workers), []
            for worker in workers:
                dist.send(weights, dst=worker)
            sent_at = dict.fromkeys(workers, 0)
            while here:
                worker, came = receive(gradient)
                if not came:
                    here.discard(worker)
                    continue
                dist.send(weights, dst=worker)
                weights -= lr * gradient
                applied.append((worker, len(applied) - sent_at[worker]))
                sent_at[worker] = len(applied)
            return applied
        """, None, "You sent a worker the weights without its own gradient"),
    ("7.2", "says zero", "len(applied) - sent_at[worker]", "0",
     "Count the updates of other workers after the server sent the weights"),
    ("7.2", "counts its own", "len(applied) - sent_at[worker]",
     "len(applied) + 1 - sent_at[worker]",
     "Don't count the gradient's own update: note the staleness before it"),
    ("7.2", "counts all", "len(applied) - sent_at[worker]", "len(applied)",
     "Subtract their number when this worker got its weights"),
    ("7.2", "tells the version read", "len(applied) - sent_at[worker]", "sent_at[worker]",
     "Subtract it from the current version"),
    ("7.2", "counts its own steps", "len(applied) - sent_at[worker]",
     "sum(w == worker for w, _ in applied)",
     "Count the updates of other workers since it got its weights"),
    ("7.2", "counts ranks", "len(applied) - sent_at[worker]",
     "len({w for w, _ in applied[sent_at[worker]:]})", "Count their updates"),
    ("7.2", "swaps the pair", "(worker, len(applied) - sent_at[worker])",
     "(len(applied) - sent_at[worker], worker)", "You exchanged the two"),
    ("7.2", "tells no staleness", "(worker, len(applied) - sent_at[worker])", "worker",
     "You returned only the ranks"),
    ("7.2", "answers who leaves", "            here.discard(worker)\n            continue\n",
     "            here.discard(worker)\n            dist.send(weights, dst=worker)\n"
     "            continue\n",
     "Don't send to a worker that has left, don't wait for it, and don't"),
    ("7.2", "sends new weights to everybody",
     "        dist.send(weights, dst=worker)\n        sent_at[worker]",
     "        for worker in sorted(here):\n            dist.send(weights, dst=worker)\n"
     "        sent_at[worker]",
     "After that, answer each gradient by one send to the worker that pushed"),
    ("7.2", "stops when the first leaves", "            here.discard(worker)\n            continue",
     "            break", "Don't send to a worker that has left, don't wait for it, and don't"),
    ("7.2", "does not wait for its sends",
     "        dist.send(weights, dst=worker)\n        sent_at",
     "        dist.isend(weights, dst=worker)\n        sent_at", "You never call wait()"),
    ("7.2", "returns nothing", "    return applied", "    pass",
     "You returned None. Return the list of pairs (rank, staleness)"),
    # -- bounded
    ("7.3", "ignores the bound", "clock[worker] - slowest <= bound", "True",
     "ahead of the slowest. Send only if clock[w] - min(clock.values())"),
    ("7.3", "one clock too strict", "- slowest <= bound", "- slowest < max(bound, 1)",
     "Before each receive, look at all waiting workers"),
    ("7.3", "one clock too lax", "- slowest <= bound", "- slowest <= bound + 1",
     "ahead of the slowest. Send only if clock[w] - min(clock.values())"),
    ("7.3", "forgets who waits", """
        def serve(weights, workers, lr, bound):
            gradient, applied = torch.empty_like(weights), []
            clock, sent_at = dict.fromkeys(workers, 0), dict.fromkeys(workers, 0)
            for worker in workers:
                dist.send(weights, dst=worker)
            while clock:
                worker, came = receive(gradient)
                if not came:
                    del clock[worker]
                    continue
                weights -= lr * gradient
                applied.append((worker, len(applied) - sent_at[worker]))
                clock[worker] += 1
                if clock[worker] - min(clock.values()) <= bound:
                    dist.send(weights, dst=worker)
                    sent_at[worker] = len(applied)
            return applied
        """, None, "When the slowest worker has moved on, look at the waiting workers again"),
    ("7.3", "compares with the fastest", "slowest = min(clock.values())",
     "slowest = max(clock.values())",
     "ahead of the slowest. Send only if clock[w] - min(clock.values())"),
    ("7.3", "compares with the mean", "slowest = min(clock.values())",
     "slowest = sum(clock.values()) / len(clock)",
     "ahead of the slowest. Send only if clock[w] - min(clock.values())"),
    ("7.3", "bounds the staleness", "if clock[worker] - slowest <= bound:",
     "if len(applied) - sent_at.get(worker, 0) <= bound:", "bound = 2 limits the lead, in clocks"),
    ("7.3", "counts updates for clocks", "clock[worker] += 1", "clock[worker] = len(applied)",
     "Before each receive, look at all waiting workers"),
    ("7.3", "counts the clock twice", "clock[worker] += 1", "clock[worker] += 2",
     "Before each receive, look at all waiting workers"),
    ("7.3", "never takes them out of the set", "                waiting.discard(worker)\n", "",
     "KeyError"),
    ("7.3", "takes the mean", "lr * gradient", "lr * gradient / len(workers)",
     "Each gradient is a separate step here, lr · gradient"),
    ("7.3", "applies a round at its end", """
        def serve(weights, workers, lr, bound):
            gradient, applied, pending = torch.empty_like(weights), [], torch.zeros_like(weights)
            clock, sent_at, waiting = dict.fromkeys(workers, 0), {}, set(workers)
            while clock:
                slowest = min(clock.values())
                for worker in sorted(waiting):
                    if clock[worker] - slowest <= bound:
                        dist.send(weights, dst=worker)
                        sent_at[worker] = len(applied)
                        waiting.discard(worker)
                worker, came = receive(gradient)
                if not came:
                    del clock[worker]
                    continue
                pending += lr * gradient
                applied.append((worker, len(applied) - sent_at[worker]))
                clock[worker] += 1
                waiting.add(worker)
                if len(waiting) == len(clock):
                    weights -= pending
                    pending.zero_()
            weights -= pending
            return applied
        """, None, "Apply each gradient when it comes"),
    ("7.3", "tells the lead", "len(applied) - sent_at[worker]", "clock[worker] - slowest",
     "You returned how far the worker is ahead of the slowest"),
    ("7.3", "counts its own", "len(applied) - sent_at[worker]",
     "len(applied) + 1 - sent_at[worker]",
     "Don't count the gradient's own update: note the staleness before it"),
    ("7.3", "notes the version too late", "                sent_at[worker] = len(applied)\n",
     "                sent_at[worker] = len(applied) + 1\n", "because you noted too many updates"),
    ("7.3", "who came first is served first", "sorted(waiting)",
     "sorted(waiting, key=lambda w: -w)", "in the order of their ranks"),
    ("7.3", "no bound above two", "    gradient, applied", "    bound = bound if bound <= 2 else "
     "float('inf')\n    gradient, applied",
     "ahead of the slowest. Send only if clock[w] - min(clock.values())"),
    ("7.3", "waits by name", "receive(gradient)", "receive(gradient, min(clock, key=clock.get))",
     "Call receive(gradient) without a source, which takes the first message"),
    ("7.3", "returns nothing", "    return applied", "    pass", "You returned None. Return the"),
    # -- weak
    ("7.4", "only the last gradient", "hand_in(total)", "hand_in(gradient)",
     "only the last of the"),
    ("7.4", "takes the mean", "hand_in(total)", "hand_in(total / every)", "the mean of the"),
    ("7.4", "never steps", "            weights -= lr * gradient\n", "",
     "Take a step after each, weights -= lr · gradient"),
    ("7.4", "hands in the change", "hand_in(total)", "hand_in(lr * total)",
     "Divide it by lr, because the server multiplies by lr"),
    ("7.4", "hands in the change the other way round", "hand_in(total)", "hand_in(-lr * total)",
     "You pushed weights now − weights that came"),
    ("7.4", "mixes up the sign", "hand_in(total)", "hand_in(-total)", "The sign is wrong"),
    ("7.4", "hands in the weights", "hand_in(total)", "hand_in(weights)", "You pushed the weights"),
    ("7.4", "keeps no copy", """
        def work_locally(compute, weights, more, lr, every):
            while True:
                dist.recv(weights, src=SERVER)
                if not more():
                    leave()
                    return
                start = weights
                for _ in range(every):
                    weights -= lr * compute(weights)
                hand_in((start - weights) / lr)
        """, None, "Keep a copy of the weights that came: start = weights.clone(), not"),
    ("7.4", "hands in each", "            total += gradient\n        hand_in(total)",
     "            hand_in(gradient)",
     "Answer the server's weights exactly once: with a header and a gradient,"),
    ("7.4", "asks before each gradient", "        for _ in range(every):\n",
     "        for _ in range(every):\n            more()\n",
     "Ask more() once each time that weights have come, before you compute,"),
    ("7.4", "one step too few", "range(every)", "range(every - 1)",
     "sum of 2 gradients, one too few. Take 3 steps"),
    ("7.4", "one step too many", "range(every)", "range(every + 1)",
     "sum of 4 gradients, one too many. Take 3 steps"),
    ("7.4", "adds up all its life", """
        def work_locally(compute, weights, more, lr, every):
            total = torch.zeros_like(weights)
            while True:
                dist.recv(weights, src=SERVER)
                if not more():
                    leave()
                    return
                for _ in range(every):
                    gradient = compute(weights)
                    weights -= lr * gradient
                    total += gradient
                hand_in(total)
        """, None, "Your sum contains gradients of earlier exchanges"),
    # -- Hogwild
    ("7.5", "makes a new tensor", "        shared -= lr * gradient",
     "        shared = shared - lr * gradient",
     "Only the other ranks changed shared, because shared = shared - … makes"),
    ("7.5", "reads once", """
        def hogwild(shared, compute, lr, more):
            weights = shared.clone()
            while more():
                shared.sub_(lr * compute(weights))
        """, None, "Read shared before each"),
    ("7.5", "climbs", "shared -= lr", "shared += lr", "uphill"),
    ("7.5", "forgets the learning rate", "shared -= lr * gradient", "shared -= gradient",
     "The learning rate is missing"),
    ("7.5", "takes the mean", "shared -= lr * gradient",
     "shared -= lr * gradient / dist.get_world_size()", "divided by the 6 ranks"),
    ("7.5", "takes one step", "while more():", "if more():",
     "Ask more() before each step, and take one step each time"),
    ("7.5", "asks at the end", """
        def hogwild(shared, compute, lr, more):
            while True:
                shared.sub_(lr * compute(shared.clone()))
                if not more():
                    return
        """, None, "Ask more() before each step, and take one step each time"),
    ("7.5", "tells the others", "shared -= lr * gradient  #",
     "shared -= lr * gradient; dist.barrier()  #",
     "Don't communicate in Hogwild: the ranks share the memory"),
    ("7.5", "averages", "        shared -=", "        dist.all_reduce(gradient)\n        shared -=",
     "Don't communicate in Hogwild: the ranks share the memory"),
    ("7.5", "steps on the copy", """
        def hogwild(shared, compute, lr, more):
            while more():
                weights = shared.clone()
                weights -= lr * compute(weights)
        """, None, "Only the other ranks changed shared, because shared = shared - … makes"),
    ("7.5", "copies the step back", """
        def hogwild(shared, compute, lr, more):
            while more():
                gradient = compute(shared)
                own = shared.clone()
                own -= lr * gradient
                shared.copy_(own)
        """, None, "You overwrote updates that other ranks made after you had read the"),
    ("7.5", "adds up first", """
        def hogwild(shared, compute, lr, more):
            total = torch.zeros_like(shared)
            while more():
                total += compute(shared.clone())
            shared -= lr * total
        """, None, "Apply each one before you compute the next"),
    # -- lost updates
    ("7.6", "reads too early", "    dist.barrier()  # all are done\n", "",
     "A rank reads the counters before all others have finished, so it counts"),
    ("7.6", "begins alone", "    dist.barrier()  # begin together\n", "",
     "begins without the others"),
    ("7.6", "does not wait for the begin", "    dist.barrier()  # begin together\n",
     "    begin = dist.barrier(async_op=True)\n", "begins without the others"),
    ("7.6", "a hello to the next rank", "    dist.barrier()  # begin together\n",
     "    r, p = dist.get_rank(), dist.get_world_size()\n"
     "    hello = dist.isend(torch.zeros(1), (r + 1) % p)\n"
     "    dist.recv(torch.zeros(1), (r - 1) % p)\n    hello.wait()\n", "begins without the others"),
    ("7.6", "the share that arrived", "return 1 - counters", "return counters",
     "You returned the share that arrived"),
    ("7.6", "percent", "return 1 - counters.double().mean().item() / (times * "
     "dist.get_world_size())", "return 100 - 100 * counters.double().mean().item() / (times * "
     "dist.get_world_size())", "not percent"),
    ("7.6", "forgets the other ranks", " / (times * dist.get_world_size())", " / times",
     "You divided by one rank's updates"),
    ("7.6", "how many", "return 1 - counters.double().mean().item() / (times * "
     "dist.get_world_size())", "return times * dist.get_world_size() - counters.double().mean()"
     ".item()", "You returned the number of lost updates"),
    ("7.6", "the best counter", ".mean()", ".max()", "Use the mean over all counters"),
    ("7.6", "the worst counter", ".mean()", ".min()", "Use the mean over all counters"),
    ("7.6", "the sum", ".mean()", ".sum()",
     "You divided the sum over all counters by the updates of one counter"),
    ("7.6", "updates once", "    for _ in range(times):\n        update(counters)",
     "    update(counters)", "Call update(counters) 7 times on each rank, not 1"),
    ("7.6", "updates for all ranks", "range(times)", "range(times * dist.get_world_size())",
     "update was called more than 7 times"),
    ("7.6", "updates a copy", "update(counters)", "update(counters.clone())",
     "update got a tensor whose memory the ranks don't share"),
    ("7.6", "a list", "return 1 - counters.double().mean().item() / (times * "
     "dist.get_world_size())", "return (1 - counters / (times * 6)).tolist()", "one number"),
    ("7.6", "The sign is wrong", "return 1 - counters.double().mean().item() / (times * "
     "dist.get_world_size())", "return counters.double().mean().item() / (times * "
     "dist.get_world_size()) - 1", "missing / made"),
    ("7.6", "returns nothing", "return 1 - counters", "1 - counters",
     "Return the share of lost updates"),
    # -- sharded
    ("7.7", "receives after the sends", """
        def work_sharded(compute, weights, servers, more):
            parts = weights.tensor_split(len(servers))
            while True:
                requests = [dist.irecv(p, src=s) for p, s in zip(parts, servers)]
                for request in requests:
                    request.wait()
                if not more():
                    for server in servers:
                        leave(server)
                    return
                requests = []
                for piece, s in zip(compute(weights).tensor_split(len(servers)), servers):
                    requests += [dist.isend(GRADIENT, dst=s), dist.isend(piece, dst=s)]
                for request in requests:
                    request.wait()
        """, None, "Start isends and irecvs together"),
    ("7.7", "blocking sends", """
        def work_sharded(compute, weights, servers, more):
            parts = weights.tensor_split(len(servers))
            while True:
                requests = [dist.irecv(p, src=s) for p, s in zip(parts, servers)]
                for request in requests:
                    request.wait()
                if not more():
                    for server in servers:
                        leave(server)
                    return
                for piece, s in zip(compute(weights).tensor_split(len(servers)), servers):
                    hand_in(piece, s)
        """, None, "You call dist.send, but this task asks for dist.isend"),
    ("7.7", "blocking receives", """
        def work_sharded(compute, weights, servers, more):
            parts = weights.tensor_split(len(servers))
            while True:
                for part, server in zip(parts, servers):
                    dist.recv(part, src=server)
                if not more():
                    for server in servers:
                        leave(server)
                    return
                requests = []
                for piece, s in zip(compute(weights).tensor_split(len(servers)), servers):
                    requests += [dist.isend(GRADIENT, dst=s), dist.isend(piece, dst=s)]
                for request in requests:
                    request.wait()
        """, None, "You call dist.recv, but this task asks for dist.irecv"),
    ("7.7", "waits for each server in turn", """
        def work_sharded(compute, weights, servers, more):
            parts = weights.tensor_split(len(servers))
            while True:
                for part, server in zip(parts, servers):
                    dist.irecv(part, src=server).wait()
                if not more():
                    for server in servers:
                        leave(server)
                    return
                requests = []
                for piece, s in zip(compute(weights).tensor_split(len(servers)), servers):
                    requests += [dist.isend(GRADIENT, dst=s), dist.isend(piece, dst=s)]
                for request in requests:
                    request.wait()
        """, None, "You started the irecv for one server after you had waited for another"),
    ("7.7", "two servers only", "weights.tensor_split(len(servers))", "weights.tensor_split(2)",
     "Sender and receiver must agree"),
    ("7.7", "leaves one server only", "            for server in servers:\n                "
     "leave(server)", "            leave(servers[0])",
     "Receive a part from each server, and send each server a header and its"),
    ("7.7", "sends no header",
     "            requests.append(dist.isend(GRADIENT, dst=server))\n", "",
     "Receive a part from each server, and send each server a header and its"),
    ("7.7", "does not wait at all",
     "        for request in requests:\n            request.wait()\n", "",
     "You never call wait()"),
    ("7.7", "computes a gradient for each server", "zip(parts, pieces, servers):\n",
     "zip(parts, pieces, servers):\n            compute(weights)\n", "You called compute"),
    ("7.7", "receives into copies", "parts = weights.tensor_split(len(servers))",
     "parts = [p.clone() for p in weights.tensor_split(len(servers))]", "weights that compute got"),
]  # fmt: skip

WRONG = [(t, what, old, words) for t, what, old, new, words in _CHANGES if new is None and words]
CHANGES = [change for change in _CHANGES if change[3] is not None and change[4] is not None]

# Changes that need another one besides: task, what, [(old, new), …], words.
_SOLUTIONS = {task: source_of(NOTEBOOK, cell) for task, cell in CELLS.items()}


def _changed(task: str, *pairs: tuple[str, str]) -> str:
    code = _SOLUTIONS[task]
    for old, new in pairs:
        assert old in code, f"{old!r} is not in the solution of {task}"
        code = code.replace(old, new)
    return code


WRONG += [
    ("7.2", "sends the first weights", _changed(
        "7.2",
        ("    sent_at = dict", "    first = weights.clone()\n    sent_at = dict"),
        ("        dist.send(weights, dst=worker)\n        sent_at",
         "        dist.send(first, dst=worker)\n        sent_at"),
    ), "The weights never changed"),
    ("7.3", "counts who has left", _changed(
        "7.3",
        ("    while clock:", "    here = len(workers)\n    while here:"),
        ("            del clock[worker]\n", "            here -= 1\n"),
    ), "Don't send to a worker that has left, don't wait for it, and don't"),
    ("7.5", "writes back", _changed(
        "7.5",
        ("gradient = compute(shared.clone())", "read = shared.clone()\n        "
         "gradient = compute(read)"),
        ("shared -= lr * gradient", "shared.copy_(read - lr * gradient)"),
    ), "You overwrote updates that other ranks made after you had read the"),
    ("7.7", "parts the wrong way round", _changed(
        "7.7", ("zip(parts, servers)", "zip(parts[::-1], servers)"),
        ("zip(parts, pieces, servers)", "zip(parts[::-1], pieces, servers)"),
    ), "The parts are in wrong places"),
    ("7.7", "pieces the wrong way round", _changed(
        "7.7", ("zip(parts, pieces, servers)", "zip(parts, pieces[::-1], servers)"),
    ), "You sent a part that belongs to another server"),
    ("7.7", "the whole gradient to each", _changed(
        "7.7", ("isend(piece, dst", "isend(torch.cat(pieces), dst"),
    ), "Receive a part from each server, and send each server a header and its"),
    ("7.7", "beginnings for all", _changed(
        "7.7", ("isend(piece, dst", "isend(torch.cat(pieces)[: len(piece)], dst"),
    ), "You sent each server the beginning of the gradient"),
    ("7.7", "receives for the next round before it asks", _changed(
        "7.7",
        ("        if not more():",
         "        begun = [dist.irecv(p, src=s) for p, s in zip(parts, servers)]\n"
         "        if not more():"),
        ("len(servers)), []\n", "len(servers)), begun\n"),
        ("            requests.append(dist.irecv(part, src=server))", "           "),
    ), "You never call wait() on the work of irecv"),
    ("7.7", "cuts otherwise", _changed(
        "7.7", (".tensor_split(len(servers))", ".split(-(-len(weights) // len(servers)))"),
    ), "weights.tensor_split("),
]  # fmt: skip

# task, what is different, the code
RIGHT = [
    ("7.1", "gradients kept in a list", """
        def serve_in_rounds(weights, workers, lr):
            here, rounds = set(workers), 0
            while here:
                for worker in here:
                    dist.send(weights, dst=worker)
                came = {}
                for worker in here:
                    gradient = torch.empty_like(weights)
                    if receive(gradient, source=worker)[1]:
                        came[worker] = gradient
                here = set(came)
                if came:
                    weights.sub_(torch.stack(list(came.values())).mean(0), alpha=lr)
                    rounds += 1
            return rounds
        """),
    ("7.1", "whoever comes first", """
        def serve_in_rounds(weights, workers, lr):
            gradient, here, rounds = torch.empty_like(weights), set(workers), 0
            while here:
                requests = [dist.isend(weights, dst=worker) for worker in here]
                total, count = torch.zeros_like(weights), 0
                for _ in range(len(here)):
                    worker, came = receive(gradient)
                    if came:
                        total.add_(gradient)
                        count += 1
                    else:
                        here.remove(worker)
                for request in requests:
                    request.wait()
                if count:
                    weights.add_(total, alpha=-lr / count)
                    rounds += 1
            return rounds
        """),
    ("7.1", "a worker in another form", """
        def work(compute, weights, more):
            dist.recv(weights, src=SERVER)
            while more():
                hand_in(compute(weights.clone()))
                dist.irecv(weights, src=SERVER).wait()
            leave()
        """),
    ("7.2", "counts versions", """
        def serve_anyone(weights, workers, lr):
            gradient, left, applied, version = torch.empty_like(weights), len(workers), [], 0
            seen = {}
            for worker in workers:
                dist.send(weights, dst=worker)
                seen[worker] = 0
            while left:
                worker, came = receive(gradient)
                if came:
                    applied.append([worker, version - seen[worker]])
                    weights.sub_(gradient, alpha=lr)
                    version += 1
                    seen[worker] = version
                    dist.send(weights, dst=worker)
                else:
                    left -= 1
            return applied
        """),
    ("7.2", "sends copies without waiting first", """
        def serve_anyone(weights, workers, lr):
            gradient, applied = torch.empty_like(weights), []
            sent_at, requests = dict.fromkeys(workers, 0), {}
            for worker in workers:
                requests[worker] = dist.isend(weights.clone(), dst=worker)
            while sent_at:
                worker, came = receive(gradient)
                requests.pop(worker).wait()
                if came:
                    weights -= lr * gradient
                    applied.append((worker, len(applied) - sent_at[worker]))
                    requests[worker] = dist.isend(weights.clone(), dst=worker)
                    sent_at[worker] = len(applied)
                else:
                    del sent_at[worker]
            return applied
        """),
    ("7.2", "adds one to all the others", """
        def serve_anyone(weights, workers, lr):
            gradient, applied, late = torch.empty_like(weights), [], dict.fromkeys(workers, 0)
            for worker in workers:
                dist.send(weights, dst=worker)
            while late:
                worker, came = receive(gradient)
                if not came:
                    late.pop(worker)
                    continue
                applied.append((worker, late[worker]))
                late = {w: 0 if w == worker else count + 1 for w, count in late.items()}
                weights -= lr * gradient
                dist.send(weights, dst=worker)
            return applied
        """),
    ("7.3", "a helper that releases", """
        def serve(weights, workers, lr, bound):
            gradient, applied = torch.empty_like(weights), []
            clock, sent_at, waiting = dict.fromkeys(workers, 0), {}, list(workers)

            def release():
                for worker in sorted(waiting):
                    if clock[worker] <= min(clock.values()) + bound:
                        waiting.remove(worker)
                        sent_at[worker] = len(applied)
                        dist.send(weights, dst=worker)

            release()
            while clock:
                worker, came = receive(gradient)
                if came:
                    applied.append((worker, len(applied) - sent_at[worker]))
                    weights.sub_(gradient, alpha=lr)
                    clock[worker] += 1
                    waiting.append(worker)
                else:
                    clock.pop(worker)
                if clock:
                    release()
            return applied
        """),
    ("7.3", "sends all at once", """
        def serve(weights, workers, lr, bound):
            gradient, applied = torch.empty_like(weights), []
            clock, sent_at, waiting = {w: 0 for w in workers}, {}, set(workers)
            while clock:
                go = [w for w in waiting if clock[w] - min(clock.values()) <= bound]
                requests = [dist.isend(weights, dst=w) for w in sorted(go)]
                sent_at.update((w, len(applied)) for w in go)
                waiting -= set(go)
                for request in requests:
                    request.wait()
                worker, came = receive(gradient)
                if came:
                    weights -= gradient * lr
                    applied += [(worker, len(applied) - sent_at[worker])]
                    clock[worker] += 1
                    waiting |= {worker}
                else:
                    clock = {w: k for w, k in clock.items() if w != worker}
            return applied
        """),
    ("7.4", "the difference of weights", """
        def work_locally(compute, weights, more, lr, every):
            while True:
                dist.recv(weights, src=SERVER)
                if not more():
                    return leave()
                start = weights.clone()
                for _ in range(every):
                    weights -= lr * compute(weights)
                hand_in((start - weights) / lr)
        """),
    ("7.4", "steps on a copy", """
        def work_locally(compute, weights, more, lr, every):
            dist.recv(weights, src=SERVER)
            while more():
                own, gradients = weights.clone(), []
                for _ in range(every):
                    gradients.append(compute(own).clone())
                    own = own - lr * gradients[-1]
                hand_in(torch.stack(gradients).sum(0))
                dist.recv(weights, src=SERVER)
            leave()
        """),
    ("7.5", "computes at the memory itself", """
        def hogwild(shared, compute, lr, more):
            while more():
                shared.sub_(compute(shared), alpha=lr)
        """),
    ("7.5", "in a slice", """
        def hogwild(shared, compute, lr, more):
            while more():
                step = lr * compute(shared.clone())
                shared[:] -= step
        """),
    ("7.6", "sums over everything", """
        def count_lost(counters, update, times):
            dist.barrier()
            for _ in range(times):
                update(counters)
            dist.barrier()
            made = times * dist.get_world_size() * counters.numel()
            return (made - counters.sum().item()) / made
        """),
    ("7.6", "all_reduce for a barrier", """
        def count_lost(counters, update, times):
            ready = torch.ones(1)
            dist.all_reduce(ready)
            for k in range(times):
                update(counters)
            dist.barrier()
            return 1.0 - float(counters.mean()) / (times * int(ready))
        """),
    ("7.7", "sends first, then receives, then waits", """
        def work_sharded(compute, weights, servers, more):
            parts = torch.tensor_split(weights, len(servers))
            receives, sends = [dist.irecv(p, src=s) for p, s in zip(parts, servers)], []
            while True:
                for request in receives:
                    request.wait()
                for request in sends:
                    request.wait()
                if not more():
                    break
                pieces = torch.tensor_split(compute(weights), len(servers))
                sends = [dist.isend(GRADIENT, dst=s) for s in servers]
                sends += [dist.isend(p, dst=s) for p, s in zip(pieces, servers)]
                receives = [dist.irecv(p, src=s) for p, s in zip(parts, servers)]
            for server in servers:
                leave(server)
        """),
    ("7.7", "receives before it sends", """
        def work_sharded(compute, weights, servers, more):
            parts = weights.tensor_split(len(servers))
            requests = [dist.irecv(part, src=server) for part, server in zip(parts, servers)]
            while True:
                for request in requests:
                    request.wait()
                if not more():
                    for server in servers:
                        dist.send(LEAVE, dst=server)
                    return
                gradient = compute(weights.clone())
                requests = [dist.irecv(part, src=server) for part, server in zip(parts, servers)]
                for piece, server in zip(gradient.tensor_split(len(servers)), servers):
                    requests.append(dist.isend(GRADIENT, dst=server))
                    requests.append(dist.isend(piece, dst=server))
        """),
]  # fmt: skip

#: Made for what the check asked first: other types, lengths and groups are asked, too.
CHANGES += [
    (
        "7.1",
        "cuts off what is behind the point",
        "hand_in(compute(weights))",
        "hand_in(compute(weights.int().float()))",
        "You called compute with other weights than the server had sent",
    ),
    (
        "7.1",
        "is made for one length",
        "torch.empty_like(weights), list(workers), 0",
        "torch.empty(7), list(workers), 0",
        "CommunicationMismatch",
    ),
    (
        "7.2",
        "is made for one length",
        "torch.empty_like(weights)",
        "torch.empty(7)",
        "CommunicationMismatch",
    ),
    (
        "7.3",
        "is made for one length",
        "torch.empty_like(weights)",
        "torch.empty(7)",
        "CommunicationMismatch",
    ),
    (
        "7.4",
        "is made for one length",
        "torch.zeros_like(weights)",
        "torch.zeros(7)",
        "The size of tensor a",
    ),
    (
        "7.5",
        "is made for one length",
        "shared.clone()",
        "shared[:7].clone()",
        "The size of tensor a",
    ),
    (
        "7.6",
        "is made for one length",
        "counters.double().mean().item()",
        "counters.double().sum().item() / 40",
        "the lost share: expected",
    ),
    (
        "7.7",
        "cuts off what is behind the point",
        "isend(piece, dst=server)",
        "isend(piece.int().float(), dst=server)",
        "the part of the gradient that server 5 got",
    ),
    (
        "7.7",
        "is made for one length",
        "compute(weights)",
        "compute(weights[:10])",
        "CommunicationMismatch",
    ),
]

CHANGES += [
    ("7.1", "asks before anything has come",
     "    while True:\n        dist.recv(weights, src=SERVER)\n        if not more():\n"
     "            leave()\n            return\n        hand_in(compute(weights))\n",
     "    while more():\n        dist.recv(weights, src=SERVER)\n"
     "        hand_in(compute(weights))\n    dist.recv(weights, src=SERVER)\n    leave()\n",
     "You asked more() before the weights had come"),
    ("7.1", "receives into a tensor of its own", "    while True:\n        dist.recv(weights,",
     "    weights = torch.empty_like(weights)\n    while True:\n        dist.recv(weights,",
     "The last weights that came aren't in the argument weights"),
    ("7.1", "other memory", "            weights -= lr * total / len(here)",
     "            weights.data = weights - lr * total / len(here)", "Update it in place, with -="),
    ("7.2", "removes workers from its argument", "            here.discard(worker)",
     "            here.discard(worker)\n            workers.remove(worker)",
     "changed its argument workers"),
    ("7.3", "sends in the order of the argument", "sorted(waiting)",
     "[w for w in workers if w in waiting]", "in the order of their ranks"),
    ("7.5", "reads before it asks",
     "    while more():\n        gradient = compute(shared.clone())\n"
     "        shared -= lr * gradient  # to what is there now, not to what was read\n",
     "    read = shared.clone()\n    while more():\n        shared -= lr * compute(read)\n"
     "        read = shared.clone()\n",
     "You read the weights before you asked more(), and others have changed"),
    ("7.7", "empties the list of servers", "                leave(server)\n            return",
     "                leave(server)\n            servers.clear()\n            return",
     "changed its argument servers"),
]  # fmt: skip
