"""Answers to lab 06, wrong ones and right ones, that students really give."""

from __future__ import annotations

from lab_tools import source_of

NOTEBOOK = "06_allreduce.ipynb"
CELLS = {
    "6.1": "lab06-crossbar-answer",
    "6.2": "lab06-central-answer",
    "6.3": "lab06-scatter-answer",
    "6.4": "lab06-gather-answer",
    "6.5": "lab06-direct-answer",
    "6.6": "lab06-cost-answer",
    "6.7": "lab06-time-answer",
    "6.8": "lab06-server-answer",
    "6.9": "lab06-halving-answer",
    "6.10": "lab06-levels-answer",
    "6.11": "lab06-racks-answer",
}
RANKS = 6
# Their checks take a moment: many messages.
SLOW = {"6.3", "6.4", "6.5", "6.8", "6.9", "6.10"}
BEFORE = source_of(NOTEBOOK, "ranks-join")
# Those that real ranks are tried with, besides the first of each task.
ON_RANKS = {
    *("sends first, blocking", "adds its own part first", "one step too few"),
    *("sends to the right first, blocking", "never sends back", "waits for each piece at once"),
}

# task, what the student did, a part of the solution, what stands in its place, words of the message
_CHANGES = [
    ("6.1", "sends first, blocking", """
        def crossbar(x, group=None):
            r, p = place_and_size(group)
            parts = [x.clone() if place == r else torch.empty_like(x) for place in range(p)]
            for k in range(1, p):
                isend(parts[r], (r + k) % p, group).wait()
            for k in range(1, p):
                irecv(parts[(r - k) % p], (r - k) % p, group).wait()
            x.copy_(sum(parts))
        """, None, "Short tensors passed, because a short message leaves before anybody"),
    ("6.1", "uses the library", """
        def crossbar(x, group=None):
            dist.all_reduce(x, group=group)
        """, None, "You call all_reduce. Use only send and recv here"),
    ("6.1", "adds its own part first", "    x.copy_(parts[0])\n    for part in parts[1:]:",
     "    for part in parts[:r] + parts[r + 1 :]:",
     "The results don't have the same bits on all ranks, because"),
    ("6.1", "adds as they come", """
        def crossbar(x, group=None):
            r, p = place_and_size(group)
            mine = x.clone()
            sends = [isend(mine, (r + k) % p, group) for k in range(1, p)]
            for k in range(1, p):
                part = torch.empty_like(x)
                irecv(part, (r - k) % p, group).wait()
                x += part
            for request in sends:
                request.wait()
        """, None, "Add in the same order on every rank, or let one rank add and send the"),
    ("6.1", "makes a new tensor", "    x.copy_(parts[0])\n    for part in parts[1:]:",
     "    x = parts[0].clone()\n    for part in parts[1:]:",
     "x is still this rank's own tensor"),
    ("6.1", "takes the mean", "        x += part\n", "        x += part\n    x /= p\n",
     "The task asks for the sum, so don't divide"),
    ("6.1", "never waits", "    for request in requests:\n        request.wait()\n", "",
     "You never call wait() on the work of irecv"),
    ("6.1", "waits for the receives only", "requests.append(isend(parts[r], after, group))",
     "isend(parts[r], after, group)", "You never call wait() on the work of isend"),
    ("6.1", "passes everything round", """
        def crossbar(x, group=None):
            r, p = place_and_size(group)
            parts, out = {r: x.clone()}, x.clone()
            for k in range(1, p):
                part = torch.empty_like(x)
                requests = [irecv(part, (r - 1) % p, group), isend(out, (r + 1) % p, group)]
                for request in requests:
                    request.wait()
                parts[(r - k) % p] = out = part
            x.copy_(sum(parts[place] for place in range(p)))
        """, None, "In a crossbar, each rank sends its tensor once to every other rank of"),
    ("6.1", "forgets its own part", "    x.copy_(parts[0])\n",
     "    parts[r].zero_()\n    x.copy_(parts[0])\n", "lack the part of rank"),
    ("6.1", "counts the first part twice", "parts[1:]", "parts",
     "hold a part more than once (rank 0: 2 times)"),
    ("6.1", "receives into another dtype", "torch.empty_like(x)", "torch.empty(len(x))",
     "Sender and receiver must agree on dtype"),
    ("6.1", "sends x while it adds", """
        def crossbar(x, group=None):
            r, p = place_and_size(group)
            parts = [torch.empty_like(x) for _ in range(p)]
            sends = [isend(x, (r + k) % p, group) for k in range(1, p)]
            receives = {(r - k) % p: irecv(parts[(r - k) % p], (r - k) % p, group)
                        for k in range(1, p)}
            for place, request in sorted(receives.items()):
                request.wait()
                x += parts[place]
            for request in sends:
                request.wait()
        """, None, "was changed before wait()"),
    ("6.1", "does it twice", "    x.copy_(parts[0])\n",
     "    for k in range(1, p):\n"
     "        out = isend(parts[r], (r + k) % p, group)\n"
     "        irecv(parts[(r - k) % p], (r - k) % p, group).wait()\n"
     "        out.wait()\n"
     "    x.copy_(parts[0])\n", "This rank should send"),
    ("6.1", "ignores the group", "place_and_size(group)", "place_and_size()",
     "On all ranks it passed, so pass group on, and count places from"),
    ("6.1", "everybody begins with place 0", "before, after = (r - k) % p, (r + k) % p\n",
     "before = after = [place for place in range(p) if place != r][k - 1]\n",
     "Send the k-th message to place (r + k) mod p, so that the ranks don't"),
    ("6.6", "a table up to 256 ranks", "depth = p.bit_length() - 1",
     "depth = max(k for k in range(9) if 2**k <= p)", "steps: expected"),
    ("6.2", "uses the library", """
        def central(x, group=None):
            dist.reduce(x, group_dst=0, group=group)
            dist.broadcast(x, group_src=0, group=group)
        """, None, "You call broadcast, reduce. Use only send and recv here"),
    ("6.2", "never sends back", "isend(x, place, group) for place in range(1, p)",
     "isend(x, place, group) for place in range(1, 1)", "recv(src="),
    ("6.2", "keeps the result to itself", "        irecv(x, 0, group).wait()\n",
     "        irecv(torch.empty_like(x), 0, group).wait()\n",
     "x is still this rank's own tensor"),
    ("6.2", "takes the mean", "        x += part\n", "        x += part / p\n",
     "which isn't a sum of the ranks' tensors"),
    ("6.2", "divides at the end", "    for request in [isend(x,",
     "    x /= p\n    for request in [isend(x,",
     "The task asks for the sum, so don't divide"),
    ("6.2", "replaces in place of adding", "        x += part\n", "        x.copy_(part)\n",
     "lack the part of rank"),
    ("6.2", "sends before all have come", """
        def central(x, group=None):
            r, p = place_and_size(group)
            if r > 0:
                isend(x, 0, group).wait()
                irecv(x, 0, group).wait()
                return
            part = torch.empty_like(x)
            for place in range(1, p):
                irecv(part, place, group).wait()
                x += part
                isend(x, place, group).wait()
        """, None, "lack the part of rank"),
    ("6.2", "does not wait for the answers",
     "    for request in [isend(x, place, group) for place in range(1, p)]:\n"
     "        request.wait()\n",
     "    for place in range(1, p):\n        isend(x, place, group)\n",
     "You never call wait() on the work of isend"),
    ("6.2", "adds before it waits", """
        def central(x, group=None):
            r, p = place_and_size(group)
            if r > 0:
                isend(x, 0, group).wait()
                irecv(x, 0, group).wait()
                return
            for place in range(1, p):
                part = torch.zeros_like(x)
                request = irecv(part, place, group)
                x += part
                request.wait()
            for place in range(1, p):
                isend(x, place, group).wait()
        """, None, "lack the part of rank"),
    ("6.2", "one buffer for all",
     "parts = [torch.empty_like(x) for _ in range(1, p)]",
     "parts = [torch.empty_like(x)] * (p - 1)",
     "lack the part of rank"),
    ("6.2", "the last one reduces", """
        def central(x, group=None):
            r, p = place_and_size(group)
            if r < p - 1:
                isend(x, p - 1, group).wait()
                irecv(x, p - 1, group).wait()
                return
            for place in range(p - 1):
                part = torch.empty_like(x)
                irecv(part, place, group).wait()
                x += part
            for place in range(p - 1):
                isend(x, place, group).wait()
        """, None, "Each rank sends its tensor to the group's first rank"),
    ("6.2", "is a crossbar", """
        def central(x, group=None):
            crossbar(x, group)
        """, None, "sends the sum back"),
    ("6.2", "takes a place for a rank", """
        def central(x, group=None):
            r, p = place_and_size(group)
            if r > 0:
                dist.send(x, 0, group=group)
                dist.recv(x, 0, group=group)
                return
            for place in range(1, p):
                part = torch.empty_like(x)
                dist.recv(part, place, group=group)
                x += part
            for place in range(1, p):
                dist.send(x, place, group=group)
        """, None, "is a rank of the world, and is not in this group"),
    ("6.2", "asks the rank of the world", "place_and_size(group)",
     "(rank, dist.get_world_size(group))",
     "On all ranks it passed, so pass group on, and count places from"),
    ("6.3", "returns its own place", "return (r + 1) % p", "return r",
     "the complete chunk of this rank"),
    ("6.3", "returns nothing", "    return (r + 1) % p\n", "",
     "Return the number of the chunk that is complete on this rank"),
    ("6.3", "returns the chunk itself", "return (r + 1) % p", "return chunks[(r + 1) % p]",
     "Return the number of the complete chunk, an int"),
    ("6.3", "forgets the modulo", "return (r + 1) % p", "return r + 1", "Take it modulo p"),
    ("6.3", "does not add", "mine += incoming", "mine.copy_(incoming)", "lack the part of rank"),
    ("6.3", "the rest of n / p is forgotten", "chunks = x.tensor_split(p)",
     "chunks = x[: len(x) // p * p].tensor_split(p)", "lack the part of rank"),
    ("6.3", "cuts with chunk", "x.tensor_split(p)", "x.chunk(p)", "IndexError"),
    ("6.3", "uses the library",
     "        requests = [irecv(incoming, left, group), isend(outgoing, right, group)]\n",
     "        dist.barrier(group=group)\n"
     "        requests = [irecv(incoming, left, group), isend(outgoing, right, group)]\n",
     "You call barrier. Use only send and recv here"),
    ("6.3", "sends whole tensors", """
        def ring_reduce_scatter(x, group=None):
            r, p = place_and_size(group)
            out, total = x.clone(), x.clone()
            for step in range(p - 1):
                part = torch.empty_like(x)
                requests = [irecv(part, (r - 1) % p, group), isend(out, (r + 1) % p, group)]
                for request in requests:
                    request.wait()
                total += part
                out = part
            x.copy_(total)
            return (r + 1) % p
        """, None, "rounds, not the whole tensor"),
    ("6.3", "one step too few", "range(p - 1)", "range(p - 2)", "lack the part of rank"),
    ("6.3", "one step too many", "range(p - 1)", "range(p)",
     "160 were expected, because each chunk travels 5 times"),
    ("6.3", "always sends the same chunk", "chunks[(r - step) % p], chunks[(r - step - 1) % p]",
     "chunks[r], chunks[(r - 1) % p]",
     "rounds, send the chunk that you added to in the round before, and add"),
    ("6.3", "adds into a new tensor", "mine += incoming", "mine = mine + incoming",
     "Add into the chunks of x themselves with +=, not into copies or new"),
    ("6.3", "sends to the right first, blocking",
     "        requests = [irecv(incoming, left, group), isend(outgoing, right, group)]\n"
     "        for request in requests:\n            request.wait()\n",
     "        isend(outgoing, right, group).wait()\n        irecv(incoming, left, group).wait()\n",
     "Short tensors passed, because a short message leaves before anybody"),
    ("6.3", "drops the request of the send",
     "requests = [irecv(incoming, left, group), isend(outgoing, right, group)]",
     "isend(outgoing, right, group)\n        requests = [irecv(incoming, left, group)]",
     "You never call wait() on the work of isend"),
    ("6.3", "works on a copy", "chunks = x.tensor_split(p)", "chunks = x.clone().tensor_split(p)",
     "lack the part of rank"),
    ("6.3", "takes the mean", "    return (r + 1) % p", "    x /= p\n    return (r + 1) % p",
     "hold the mean"),
    ("6.3", "sends to everybody", """
        def ring_reduce_scatter(x, group=None):
            r, p = place_and_size(group)
            chunks = list(x.tensor_split(p))
            incoming = [torch.empty_like(chunks[r]) for _ in range(p)]
            others = [place for place in range(p) if place != r]
            requests = [irecv(incoming[place], place, group) for place in others]
            requests += [isend(chunks[place], place, group) for place in others]
            for request in requests:
                request.wait()
            for place in others:
                chunks[r] += incoming[place]
            return r
        """, None, "On a ring, send to one neighbor and receive from the other"),
    ("6.4", "assumes that it is the next one", "mine - step", "r + 1 - step", "mine ="),
    ("6.4", "assumes its own place", "mine - step", "r - step", "mine ="),
    ("6.4", "begins with the wrong chunk", "mine - step", "mine - 1 - step", "was overwritten"),
    ("6.4", "always sends its own chunk", "chunks[(mine - step) % p], ", "chunks[mine], ",
     "Sender and receiver must agree on dtype and number of elements"),
    ("6.4", "adds what comes", """
        def ring_all_gather(x, mine, group=None):
            r, p = place_and_size(group)
            chunks = x.tensor_split(p)
            for step in range(p - 1):
                outgoing, there = chunks[(mine - step) % p], chunks[(mine - step - 1) % p]
                part = torch.empty_like(there)
                requests = [irecv(part, (r - 1) % p, group), isend(outgoing, (r + 1) % p, group)]
                for request in requests:
                    request.wait()
                there += part
        """, None, "Copy, don't add"),
    ("6.4", "one step too few", "range(p - 1)", "range(p - 2)", "still has its old content"),
    ("6.4", "sends the whole tensor", """
        def ring_all_gather(x, mine, group=None):
            r, p = place_and_size(group)
            for step in range(p - 1):
                part = torch.empty_like(x)
                requests = [irecv(part, (r - 1) % p, group), isend(x.clone(), (r + 1) % p, group)]
                for request in requests:
                    request.wait()
                k = (mine - step - 1) % p
                x.tensor_split(p)[k].copy_(part.tensor_split(p)[k])
        """, None, "rounds, not the whole tensor"),
    ("6.4", "uses the library", """
        def ring_all_gather(x, mine, group=None):
            p = dist.get_world_size(group)
            for place in range(p):
                k = [mine]
                dist.broadcast_object_list(k, group_src=place, group=group)
                dist.broadcast(x.tensor_split(p)[k[0]], group_src=place, group=group)
        """, None, "Use only send and recv here"),
    ("6.4", "sends its chunk to everybody", """
        def ring_all_gather(x, mine, group=None):
            r, p = place_and_size(group)
            chunks, requests = x.tensor_split(p), []
            for k in range(1, p):
                requests.append(irecv(chunks[(mine - k) % p], (r - k) % p, group))
                requests.append(isend(chunks[mine], (r + k) % p, group))
            for request in requests:
                request.wait()
        """, None, "On a ring, send to one neighbor and receive from the other"),
    ("6.4", "sends first, blocking",
     "        requests = [irecv(incoming, left, group), isend(outgoing, right, group)]\n"
     "        for request in requests:\n            request.wait()\n",
     "        isend(outgoing, right, group).wait()\n        irecv(incoming, left, group).wait()\n",
     "Short tensors passed, because a short message leaves before anybody"),
    ("6.4", "forgets to wait", "        for request in requests:\n            request.wait()\n",
     "        requests[0].wait()\n", "You never call wait() on the work of isend"),
    ("6.4", "works on a copy", "chunks = x.tensor_split(p)", "chunks = x.clone().tensor_split(p)",
     "still has its old content"),
    ("6.4", "cuts with chunk", "x.tensor_split(p)", "x.chunk(p)", "IndexError"),
    ("6.4", "from the right, to the right", "irecv(incoming, left, group)",
     "irecv(incoming, right, group)", "Deadlock: these ranks wait for each other"),
    ("6.5", "uses the library", """
        def direct(x, group=None):
            dist.all_reduce(x, group=group)
        """, None, "You call all_reduce. Use only send and recv here"),
    ("6.5", "is the ring", """
        def direct(x, group=None):
            ring(x, group)
        """, None, "In the first round, send part k straight to place k of the group, and"),
    ("6.5", "is the crossbar", """
        def direct(x, group=None):
            crossbar(x, group)
        """, None, "In the first round, send part k straight to place k of the group, and"),
    ("6.5", "the first place adds up all parts", """
        def direct(x, group=None):
            r, p = place_and_size(group)
            for part in x.tensor_split(p):
                central(part, group)
        """, None, "In the first round, send part k straight to place k of the group, and"),
    ("6.5", "no second round", "        requests.append(irecv(parts[before], before, group))\n"
     "        requests.append(isend(parts[r], after, group))\n", "        pass\n",
     "lack the part of rank"),
    ("6.5", "sends its own part in the first round",
     "requests.append(isend(parts[after], after, group))",
     "requests.append(isend(parts[r], after, group))", "Sender and receiver must agree"),
    ("6.5", "receives the parts into x", "irecv(incoming[before], before, group)",
     "irecv(parts[r], before, group)", "of x"),
    ("6.5", "adds its own part again", "        if place != r:\n            parts[r].add_",
     "        if place != r or p > 1:\n            incoming[r].copy_(parts[r] if place == r else "
     "incoming[r])\n            parts[r].add_", "hold a part more than once"),
    ("6.5", "works on a copy", "parts = x.tensor_split(p)", "parts = x.clone().tensor_split(p)",
     "Write the result into x itself on every rank, with x.copy_(…) or x +="),
    ("6.5", "forgets the rest of n / p", "parts = x.tensor_split(p)",
     "parts = x[: len(x) // p * p].tensor_split(p)", "lack the part of rank"),
    ("6.5", "cuts with chunk", "x.tensor_split(p)", "x.chunk(p)", "IndexError"),
    ("6.5", "takes the mean", "    requests = []\n    for k in range(1, p):\n"
     "        before, after = (r - k) % p, (r + k) % p\n"
     "        requests.append(irecv(parts[before]",
     "    parts[r].div_(p)\n    requests = []\n    for k in range(1, p):\n"
     "        before, after = (r - k) % p, (r + k) % p\n"
     "        requests.append(irecv(parts[before]", "hold the mean"),
    ("6.5", "does not wait for the second round",
     "        requests.append(isend(parts[r], after, group))\n",
     "        isend(parts[r], after, group)\n",
     "You never call wait() on the work of isend"),
    ("6.5", "sends first, blocking", """
        def direct(x, group=None):
            r, p = place_and_size(group)
            parts = x.tensor_split(p)
            others = [(r + k) % p for k in range(1, p)]
            for place in others:
                isend(parts[place], place, group).wait()
            for place in others:
                part = torch.empty_like(parts[r])
                irecv(part, place, group).wait()
                parts[r].add_(part)
            for place in others:
                isend(parts[r], place, group).wait()
            for place in others:
                irecv(parts[place], place, group).wait()
        """, None, "Short tensors passed, because a short message leaves before anybody"),
    ("6.5", "sends parts of one number", """
        def direct(x, group=None):
            r, p = place_and_size(group)
            parts = x.tensor_split(p)
            others = [(r + k) % p for k in range(1, p)]
            incoming = {q: torch.empty_like(parts[r]) for q in others}
            requests = []
            for q in others:
                requests += [isend(one, q, group) for one in parts[q].split(1)]
                requests += [irecv(one, q, group) for one in incoming[q].split(1)]
            for request in requests:
                request.wait()
            for q in others:
                parts[r].add_(incoming[q])
            requests = [isend(parts[r], q, group) for q in others]
            requests += [irecv(parts[q], q, group) for q in others]
            for request in requests:
                request.wait()
        """, None, "Send the k-th message to place (r + k) mod p, so that the ranks don't"),
    ("6.6", "a message to itself", "return p * (p - 1), p * (p - 1) * n, (p - 1) * n, 1",
     "return p * p, p * (p - 1) * n, (p - 1) * n, 1",
     "You counted messages from a rank to itself"),
    ("6.6", "pairs for messages", "return p * (p - 1), p", "return p * (p - 1) // 2, p",
     "You counted pairs"),
    ("6.6", "messages of the crossbar in a row", "(p - 1) * n, 1", "(p - 1) * n, p - 1",
     "All messages start at once, because none of them waits for another"),
    ("6.6", "only the way there", 'return 2 * (p - 1), 2 * (p - 1) * n, (p - 1) * n, 2',
     "return p - 1, 2 * (p - 1) * n, (p - 1) * n, 2", "Count the messages that come back, too"),
    ("6.6", "only the bytes there", 'return 2 * (p - 1), 2 * (p - 1) * n, (p - 1) * n, 2',
     "return 2 * (p - 1), (p - 1) * n, (p - 1) * n, 2", "Count the way back, too"),
    ("6.6", "steps of the central reducer one by one", "(p - 1) * n, 2\n",
     "(p - 1) * n, 2 * (p - 1)\n",
     "Messages that travel at the same time are one step"),
    ("6.6", "a tree's busiest without a parent", "min(3, (p + 1) // 2)", "2",
     "A large tree has a rank with a parent and two children"),
    ("6.6", "a tree's busiest always has three", "min(3, (p + 1) // 2)", "3",
     "With so few ranks, no rank has two children and a parent"),
    ("6.6", "rounds the depth up", "depth = p.bit_length() - 1", "depth = p.bit_length()",
     "The deepest rank is ⌊log₂ p⌋ edges below the root"),
    ("6.6", "up only", "2 * depth", "depth", "Count the way back, too"),
    ("6.6", "messages of one rank", "return 2 * p * (p - 1), ", "return 2 * (p - 1), ",
     "You counted the messages of one rank"),
    ("6.6", "the steps of the ring for the direct way", 'if algorithm == "ring" else 2', "",
     "All messages of a round start at once, so each of the two rounds is one"),
    ("6.6", "the ring sends whole tensors", "2 * (p - 1) * n // p, ", "2 * (p - 1) * n, ",
     "You counted the bytes of all ranks"),
    ("6.6", "one phase of the ring", "steps = 2 * (p - 1) if",
     "steps = p - 1 if",
     "Count the way back, too"),
    ("6.6", "what rank 0 sends and receives", "(p - 1) * n, 2\n", "2 * (p - 1) * n, 2\n",
     "You counted what rank 0 sends and receives"),
    ("6.6", "steps before the busiest", "(p - 1) * n, 2\n", "2, (p - 1) * n\n",
     "The four numbers are right, but in the wrong order"),
    ("6.6", "counts float32 values", 'def cost(algorithm, p, n):\n',
     "def cost(algorithm, p, n):\n    n *= 4\n",
     "n is in bytes already"),
    ("6.6", "returns one number", "return p * (p - 1), p * (p - 1) * n, (p - 1) * n, 1",
     "return p * (p - 1)",
     "Return four numbers: messages, bytes, bytes of the busiest rank, steps"),
    ("6.7", "one latency for the ring", "return steps * (alpha + share[algorithm] * n * beta)",
     "return alpha + steps * share[algorithm] * n * beta", "Each step costs a latency"),
    ("6.7", "one message at a time for the crossbar", '"crossbar": p - 1', '"crossbar": 1',
     "p − 1 messages share one link"),
    ("6.7", "a latency for each message", "return steps * (alpha + share[algorithm] * n * beta)",
     "return steps * (p - 1 if algorithm in ('crossbar', 'central') else 1) * alpha "
     "+ steps * share[algorithm] * n * beta", "Messages that start together share one latency"),
    ("6.7", "whole tensors on the ring", '"ring": 1 / p', '"ring": 1',
     "A step carries a chunk of n/p bytes, not the whole tensor"),
    ("6.7", "one part in each direct step", "(p - 1) / p", "1 / p",
     "messages of n/p bytes share a link"),
    ("6.7", "whole tensors directly", "(p - 1) / p", "p - 1",
     "A message carries a part of n/p bytes, not the whole tensor"),
    ("6.7", "beta is a bandwidth", "n * beta)\n", "n / beta)\n", "β is in seconds per byte"),
    ("6.7", "counts float32 values", "share[algorithm] * n", "share[algorithm] * 4 * n",
     "n is in bytes already"),
    ("6.7", "half of the tree", "steps = cost(algorithm, p, n)[-1]",
     "steps = cost(algorithm, p, n)[-1] // (2 if algorithm == 'tree' else 1)",
     "Count the way down the tree, too"),
    ("6.7", "milliseconds", "return steps * (alpha", "return 1e3 * steps * (alpha",
     "Return seconds, not milliseconds"),
    ("6.7", "a depth with a fraction", "    share = {",
     "    steps = 2 * math.log2(p) if algorithm == 'tree' else steps\n    share = {",
     "a whole number"),
    ("6.7", "forgets the crossbar's own latency", "return alpha / (fewer",
     "return 2 * alpha / (fewer",
     "The crossbar pays a latency, too, so the difference is one, not two"),
    ("6.7", "the crossover of crossbar and ring", "return alpha / (fewer",
     "return (2 * p - 3) * alpha / (fewer",
     "You returned the size at which crossbar and ring meet"),
    ("6.7", "forgets the bytes of the direct way", "fewer_tensors = (p - 1) - 2 * (p - 1) / p",
     "fewer_tensors = (p - 1) if p > 2 else 0", "The direct all-reduce also sends bytes"),
    ("6.7", "divides by zero", " if fewer_tensors > 0 else math.inf", "", "ZeroDivisionError"),
    ("6.7", "two ranks never meet, and get 0", "else math.inf", "else 0",
     "Expected math.inf, got 0"),
    ("6.7", "numbers, not bytes", "/ (fewer_tensors * beta)", "/ (4 * fewer_tensors * beta)",
     "You returned the number of float32 values"),
    ("6.7", "turns alpha over beta", "alpha / (fewer_tensors * beta)",
     "beta / (fewer_tensors * alpha)",
     "You used β/α instead of α/β"),
    ("6.7", "returns nothing", "return alpha / (fewer", "alpha / (fewer", "returned None"),
    ("6.8", "everybody begins with reducer 0", "(j + r) % reducers for j", "j for j",
     "begin with the same reducer on rank 3"),
    ("6.8", "ignores pieces", "    parts = x.tensor_split(reducers * pieces)",
     "    pieces = 1\n    parts = x.tensor_split(reducers * pieces)",
     "Cut x into reducers × pieces parts"),
    ("6.8", "a reducer adds its own x", "total = sum(incoming[k])",
     "total = sum(incoming[k]) + parts[k]", "A reducer has added its own x"),
    ("6.8", "the first reducer does it all", """
        def reduction_server(x, workers, pieces=1, group=None):
            r, p = place_and_size(group)
            parts = x.tensor_split((p - workers) * pieces)
            if r < workers:
                requests = [isend(part.clone(), workers, group) for part in parts]
                requests += [irecv(part, workers, group) for part in parts]
                for request in requests:
                    request.wait()
            elif r == workers:
                for part in parts:
                    incoming = [torch.empty_like(part) for _ in range(workers)]
                    for i in range(workers):
                        irecv(incoming[i], i, group).wait()
                    for request in [isend(sum(incoming), i, group) for i in range(workers)]:
                        request.wait()
        """, None, ". Piece j goes to reducer j mod"),
    ("6.8", "whole tensors to each reducer", """
        def reduction_server(x, workers, pieces=1, group=None):
            r, p = place_and_size(group)
            reducers = p - workers
            parts = x.tensor_split(reducers)
            if r < workers:
                requests = [isend(x.clone(), workers + (r + k) % reducers, group)
                            for k in range(reducers)]
                requests += [irecv(part, workers + k, group) for k, part in enumerate(parts)]
                for request in requests:
                    request.wait()
                return
            incoming = [torch.empty_like(x) for _ in range(workers)]
            for i in range(workers):
                irecv(incoming[i], i, group).wait()
            total = sum(incoming).tensor_split(reducers)[r - workers]
            for request in [isend(total, i, group) for i in range(workers)]:
                request.wait()
        """, None, "Send each of its"),
    ("6.8", "workers do it among themselves", """
        def reduction_server(x, workers, pieces=1, group=None):
            r, p = place_and_size(group)
            if r >= workers:
                return
            parts = [x.clone() if i == r else torch.empty_like(x) for i in range(workers)]
            others = [i for i in range(workers) if i != r]
            requests = [irecv(parts[i], i, group) for i in others]
            requests += [isend(parts[r], i, group) for i in others]
            for request in requests:
                request.wait()
            x.copy_(sum(parts))
        """, None, "Workers talk only to reducers"),
    ("6.8", "uses the library", """
        def reduction_server(x, workers, pieces=1, group=None):
            r, p = place_and_size(group)
            if r >= workers:
                x.zero_()
            dist.all_reduce(x, group=group)
        """, None, "You call all_reduce. Use only send and recv here"),
    ("6.8", "takes the mean", "total = sum(incoming[k])", "total = sum(incoming[k]) / workers",
     "The task asks for the sum, so don't divide"),
    ("6.8", "forgets the last piece", "for piece in range(pieces) for turn",
     "for piece in range(max(pieces - 1, 1)) for turn", "2 of them workers), with pieces=2"),
    ("6.8", "pieces of another reducer", "range(r - workers, len(parts), reducers)",
     "range((r - workers) * pieces, (r - workers + 1) * pieces)", "Sender and receiver must agree"),
    ("6.8", "never sends back",
     "            requests += [isend(total, i, group) for i in order]\n", "",
     "recv(src="),
    ("6.8", "does not wait for its sends",
     "            requests += [isend(total, i, group) for i in order]",
     "            [isend(total, i, group) for i in order]",
     "You never call wait() on the work of isend"),
    ("6.8", "waits for each piece at once", """
        def reduction_server(x, workers, pieces=1, group=None):
            r, p = place_and_size(group)
            reducers = p - workers
            parts = x.tensor_split(reducers * pieces)
            if r < workers:
                for j in range(len(parts)):
                    k = (j + r) % len(parts)
                    isend(parts[k].clone(), workers + k % reducers, group).wait()
                    irecv(parts[k], workers + k % reducers, group).wait()
                return
            for k in range(r - workers, len(parts), reducers):
                incoming = [torch.empty_like(parts[k]) for _ in range(workers)]
                for i in range(workers):
                    irecv(incoming[i], i, group).wait()
                for request in [isend(sum(incoming), i, group) for i in range(workers)]:
                    request.wait()
        """, None, "wait for each other"),
    ("6.8", "sends no result before all pieces have come",
     "            for request in receives[k]:\n                request.wait()\n",
     "            for request in sum(receives.values(), []):\n                request.wait()\n",
     "A reducer must send the result of a piece as soon as all parts of this"),
    ("6.8", "the result into a copy",
     "irecv(parts[k], workers + k % reducers, group) for k in order]",
     "irecv(parts[k].clone(), workers + k % reducers, group) for k in order]",
     "x is still this rank's own tensor"),
    ("6.9", "is the ring", """
        def halving_doubling(x, group=None):
            ring(x, group)
        """, None, "its partners are"),
    ("6.9", "doubles only", """
        def halving_doubling(x, group=None):
            r, p = place_and_size(group)
            distance = 1
            while distance < p:
                out, part = x.clone(), torch.empty_like(x)
                for request in [irecv(part, r ^ distance, group), isend(out, r ^ distance, group)]:
                    request.wait()
                x += part
                distance *= 2
        """, None, "one to each partner on the way back"),
    ("6.9", "uses the library", """
        def halving_doubling(x, group=None):
            dist.all_reduce(x, group=group)
        """, None, "You call all_reduce"),
    ("6.9", "no way back", "    for partner, keep, give in reversed(trail):",
     "    for partner, keep, give in []:",
     "lack the part of rank"),
    ("6.9", "the way back in the same order", "reversed(trail)", "trail",
     "lack the part of ranks 1, 5"),
    ("6.9", "both keep the front",
     "        if r > partner:\n            keep, give = give, keep\n", "",
     "Sender and receiver must agree"),
    ("6.9", "does not halve any more",
     "        start, stop, distance = keep.start, keep.stop, distance // 2\n",
     "        distance //= 2\n",
     "Halve what travels in each step, and send only the half that the"),
    ("6.9", "keeps what it has, does not add", "        x[keep] += incoming\n", "",
     "lack the part of rank"),
    ("6.9", "sends first, blocking",
     "        requests = [irecv(incoming, partner, group), isend(x[give], partner, group)]\n",
     "        isend(x[give], partner, group).wait()\n"
     "        requests = [irecv(incoming, partner, group)]\n",
     "Short tensors passed, because a short message leaves before anybody"),
    ("6.9", "sends everything in the first half",
     "isend(x[give], partner, group)]\n        for request in requests:\n"
     "            request.wait()\n        x[keep] += incoming",
     "isend(x.clone(), partner, group)]\n        for request in requests:\n"
     "            request.wait()\n        x[keep] += incoming[keep]",
     "Sender and receiver must agree"),
    ("6.9", "takes the mean", "    for partner, keep, give in reversed(trail):",
     "    x /= p\n    for partner, keep, give in reversed(trail):", "hold the mean"),
    ("6.9", "does not wait on the way back",
     "        requests = [irecv(x[give], partner, group), isend(x[keep], partner, group)]\n",
     "        isend(x[keep], partner, group)\n"
     "        requests = [irecv(x[give], partner, group)]\n",
     "You never call wait() on the work of isend"),
    ("6.10", "one rank of each machine speaks for it", """
        def hierarchical(x, node, across):
            central(x, node)
            if dist.get_rank(node) == 0:
                direct(x, across)
            central(x, node)
        """, None, "hold a part more than once"),
    ("6.10", "whole tensors between the machines", """
        def hierarchical(x, node, across):
            ring(x, node)
            direct(x, across)
        """, None, "After the reduce-scatter on its machine, let it sum one of"),
    ("6.10", "ignores the machines", """
        def hierarchical(x, node, across):
            direct(x)
        """, None, "This rank has a message in the group of ranks"),
    ("6.10", "within the machine only",
     "    direct(x.tensor_split(dist.get_world_size(node))[mine],"
     " across)\n", "", "lack the part of rank"),
    ("6.10", "node and across are exchanged", "def hierarchical(x, node, across):",
     "def hierarchical(x, across, node):",
     "After the reduce-scatter on its machine, let it sum one of"),
    ("6.10", "no way back", "    ring_all_gather(x, mine, node)\n", "", "lack the part of rank"),
    ("6.10", "a copy of the part", "[mine], across)", "[mine].clone(), across)",
     "lack the part of rank"),
    ("6.10", "its own place, not what is complete", "[mine], across)",
     "[dist.get_rank(node)], across)", "lack the part of rank"),
    ("6.10", "uses the library", "direct(x.tensor_split(dist.get_world_size(node))[mine], across)",
     "dist.all_reduce(x.tensor_split(dist.get_world_size(node))[mine], group=across)",
     "You call all_reduce. Use only send and recv here"),
    ("6.10", "a crossbar between the machines", "direct(x.tensor", "crossbar(x.tensor",
     "Use the ring or the direct all-reduce between the machines: both send"),
    ("6.10", "takes the mean", "    ring_all_gather(x, mine, node)\n",
     "    ring_all_gather(x, mine, node)\n    x /= dist.get_world_size()\n", "hold the mean"),
    ("6.11", "a ring in one phase", '"ring": 2 * (p', '"ring": (p',
     "You counted one of the two phases"),
    ("6.11", "all ranks of a node send to the next one", '"ring": 2 * (p', '"ring": k * 2 * (p',
     "Only one rank of a node sends to another node. Don't multiply by k"),
    ("6.11", "whole tensors on the ring", '"ring": 2 * (p - 1) * n / p', '"ring": 2 * (p - 1) * n',
     "Each message carries a chunk of n/p bytes, not the whole tensor"),
    ("6.11", "p rounds in each phase", '"ring": 2 * (p - 1) * n / p', '"ring": 2 * n',
     "Each of the two phases has p − 1 rounds, not p"),
    ("6.11", "a ring of nodes", '"ring": 2 * (p - 1) * n / p', '"ring": 2 * (m - 1) * n / m',
     "The ring joins all p ranks, so a chunk is an n/p-th"),
    ("6.11", "forgets the single node", "    if m == 1:\n        return 0\n", "",
     "There is one node, so no message leaves it. Return 0 if p equals k"),
    ("6.11", "the order does not matter", '"scattered ring": k * 2', '"scattered ring": 2',
     "In this order, each rank's neighbor is in another node. Multiply by k"),
    ("6.11", "what comes in counts, too", '"scattered ring": k * 2', '"scattered ring": k * 4',
     "You counted what comes in, too. Count what leaves"),
    ("6.11", "parts for the own node leave it", "2 * k * (p - k)", "2 * k * (p - 1)",
     "Messages to the k − 1 ranks of the same node don't leave it"),
    ("6.11", "one rank of the node", "2 * k * (p - k) * n / p", "2 * (p - k) * n / p",
     "You counted one rank. All k ranks of a node send to other nodes"),
    ("6.11", "all nodes together", "2 * k * (p - k) * n / p", "2 * (p - k) * n",
     "You counted all nodes. Count one node"),
    ("6.11", "one direction of the direct way", "2 * k * (p - k) * n / p", "k * (p - k) * n / p",
     "You counted one of the two phases"),
    ("6.11", "whole tensors directly", "2 * k * (p - k) * n / p", "2 * k * (p - k) * n",
     "Each message carries a chunk of n/p bytes, not the whole tensor"),
    ("6.11", "one ring between the nodes", "2 * (m - 1) * n / m", "2 * (m - 1) * n / m / k",
     "You counted one of the k rings between the nodes. Count all of them"),
    ("6.11", "the whole tensor in each ring", "2 * (m - 1) * n / m", "2 * k * (m - 1) * n / m",
     "Each ring between the nodes has only an n/k-th of the tensor"),
    ("6.11", "all ranks in the ring between the nodes", "2 * (m - 1) * n / m",
     "2 * (p - 1) * n / p", "A ring between nodes joins p/k ranks, one of each node, not p"),
    ("6.11", "the phases in the nodes, too", "2 * (m - 1) * n / m",
     "2 * (m - 1) * n / m + 2 * (k - 1) * n", "Messages inside a node don't leave it"),
    ("6.11", "m rounds in each phase", "2 * (m - 1) * n / m", "2 * n",
     "A ring of m ranks has m − 1 rounds in each phase, not m"),
    ("6.11", "counts messages", '"ring": 2 * (p - 1) * n / p', '"ring": 2 * (p - 1)',
     "You counted messages. Count their bytes"),
    ("6.11", "counts float32 values", "    m = p // k", "    m, n = p // k, 4 * n",
     "You multiplied by 4, but n is in bytes already"),
    ("6.11", "bits", "    m = p // k", "    m, n = p // k, 8 * n", "Return bytes, not bits"),
    ("6.11", "a list", "    }[algorithm]", "    }.values()", "Return one number"),
    ("6.11", "gigabytes", """
        def uplink_bytes(p, k, n, algorithm):
            m = p // k
            sent = {"ring": 2 * (p - 1) / p, "scattered ring": 2 * k * (p - 1) / p,
                    "direct": 2 * k * (p - k) / p, "hierarchical": 2 * (m - 1) / m}
            return round(sent[algorithm] * n / 1e9, 2) if m > 1 else 0
        """, None, "Return bytes, not gigabytes"),
    ("6.11", "megabytes", "    m = p // k", "    m, n = p // k, n / 1e6",
     "Return bytes, not megabytes"),
    ("6.11", "gibibytes", "    m = p // k", "    m, n = p // k, n / 2**30",
     "Return bytes, not gigabytes"),
    ("6.11", "eight ranks in each node", "    m = p // k\n    if m == 1:\n        return 0\n",
     "    m = p // 8\n",
     "by zero, in uplink_bytes(7, 1, "),
    ("6.11", "a number with its unit", """
        def uplink_bytes(p, k, n, algorithm):
            m = p // k
            sent = {"ring": 2 * (p - 1) * n // p, "scattered ring": 2 * k * (p - 1) * n // p,
                    "direct": 2 * k * (p - k) * n // p, "hierarchical": 2 * (m - 1) * n // m}
            return f"{sent[algorithm] if m > 1 else 0} bytes"
        """, None, "You returned text. Return only the number, without a unit"),
    ("6.11", "returns nothing for the last algorithm", """
        def uplink_bytes(p, k, n, algorithm):
            m = p // k
            if m == 1:
                return 0
            if algorithm == "ring":
                return 2 * (p - 1) * n // p
            if algorithm == "scattered ring":
                return 2 * k * (p - 1) * n // p
            if algorithm == "direct":
                return 2 * k * (p - k) * n // p
            result = 2 * (m - 1) * n // m
        """, None, "You returned None. Return the bytes that leave one node"),
    ("6.11", "one neighbor of a scattered ring is inside", '"scattered ring": k * 2',
     '"scattered ring": max(k - 1, 1) * 2',
     "All k ranks of a node send to another node, not k − 1"),
    ("6.11", "nodes of one rank are not hierarchical", "    if m == 1:",
     '    if m == 1 or (k == 1 and algorithm == "hierarchical"):', "expected"),
    ("6.11", "the numbers of the example", """
        def uplink_bytes(p, k, n, algorithm):
            return {"ring": 2.046e9, "scattered ring": 16.368e9, "direct": 16.256e9,
                    "hierarchical": 2.032e9}[algorithm]
        """, None, "expected"),
    ("6.11", "a line in place of a ring", '"ring": 2 * (p - 1) * n / p',
     '"ring": (m - 1) / m * 2 * (p - 1) * n / p', "expected"),
    ("6.11", "both directions between two nodes", "    m = p // k",
     "    m = p // k\n    n = 2 * n if m == 2 else n",
     "There are two nodes. Count once what one of them sends, and not what it receives"),
]  # fmt: skip

# Right answers that look different.
RIGHT = [
    ("6.1", "a batch of messages", """
        def crossbar(x, group=None):
            r, p = place_and_size(group)
            parts = torch.empty(p, len(x), dtype=x.dtype)
            parts[r] = x
            others = [(r + k) % p for k in range(1, p)]
            ops = [dist.P2POp(dist.irecv, parts[q], group=group, group_peer=q) for q in others]
            ops += [dist.P2POp(dist.isend, x, group=group, group_peer=q) for q in others]
            for request in dist.batch_isend_irecv(ops) if ops else ():
                request.wait()
            x.copy_(parts.sum(0))
        """),
    ("6.1", "the sends first", """
        def crossbar(x, group=None):
            r, p = place_and_size(group)
            others = [*range(r + 1, p), *range(r)]
            parts = {q: torch.empty_like(x) for q in others} | {r: x.clone()}
            requests = [isend(x, q, group) for q in others]
            requests += [irecv(parts[q], q, group) for q in others]
            for request in requests:
                request.wait()
            x.zero_()
            for q in range(p):
                x.add_(parts[q])
        """),
    ("6.2", "one after the other", """
        def central(x, group=None):
            r, p = place_and_size(group)
            if r:
                dist.send(x, group=group, group_dst=0)
                dist.recv(x, group=group, group_src=0)
            else:
                part = torch.empty_like(x)
                for q in range(1, p):
                    dist.recv(part, group=group, group_src=q)
                    x += part
                for q in range(1, p):
                    dist.send(x, group=group, group_dst=q)
        """),
    ("6.2", "as they come", """
        def central(x, group=None):
            r, p = place_and_size(group)
            if r > 0:
                isend(x, 0, group).wait()
                irecv(x, 0, group).wait()
                return
            for _ in range(p - 1):
                part = torch.empty_like(x)
                dist.recv(part, group=group)
                x += part
            for request in [isend(x, q, group) for q in reversed(range(1, p))]:
                request.wait()
        """),
    ("6.3", "round the other way", """
        def ring_reduce_scatter(x, group=None):
            r, p = place_and_size(group)
            chunks = x.tensor_split(p)
            for step in range(p - 1):
                mine = chunks[(r + step + 1) % p]
                part = torch.empty_like(mine)
                requests = [isend(chunks[(r + step) % p], (r - 1) % p, group),
                            irecv(part, (r + 1) % p, group)]
                for request in requests:
                    request.wait()
                mine += part
            return (r - 1) % p
        """),
    ("6.3", "ends with its own chunk", """
        def ring_reduce_scatter(x, group=None):
            r, p = place_and_size(group)
            chunks = torch.tensor_split(x, p)
            for step in range(1, p):
                mine = chunks[r - step - 1]
                part = torch.zeros_like(mine)
                out = isend(chunks[r - step].clone(), (r + 1) % p, group)
                irecv(part, (r - 1) % p, group).wait()
                out.wait()
                mine.add_(part)
            return r
        """),
    ("6.4", "round the other way", """
        def ring_all_gather(x, mine, group=None):
            r, p = place_and_size(group)
            chunks = x.tensor_split(p)
            for step in range(p - 1):
                requests = [isend(chunks[(mine + step) % p], (r - 1) % p, group),
                            irecv(chunks[(mine + step + 1) % p], (r + 1) % p, group)]
                for request in requests:
                    request.wait()
        """),
    ("6.4", "by a buffer", """
        def ring_all_gather(x, mine, group=None):
            r, p = place_and_size(group)
            chunks = list(x.tensor_split(p))
            for step in range(p - 1):
                part = torch.empty_like(chunks[(mine - step - 1) % p])
                out = isend(chunks[(mine - step) % p], (r + 1) % p, group)
                irecv(part, (r - 1) % p, group).wait()
                out.wait()
                chunks[(mine - step - 1) % p][:] = part
        """),
    ("6.5", "one after the other", """
        def direct(x, group=None):
            r, p = place_and_size(group)
            parts = x.tensor_split(p)
            for adds in (True, False):
                for k in range(1, p):
                    to, source = (r + k) % p, (r - k) % p
                    there = torch.empty_like(parts[r]) if adds else parts[source]
                    out = isend(parts[to].clone() if adds else parts[r], to, group)
                    irecv(there, source, group).wait()
                    out.wait()
                    if adds:
                        parts[r].add_(there)
        """),
    ("6.5", "a batch of messages", """
        def direct(x, group=None):
            r, p = place_and_size(group)
            parts = list(x.tensor_split(p))
            others = [(r + k) % p for k in range(1, p)]
            came = torch.zeros(p, len(parts[r]), dtype=x.dtype)
            came[r] = parts[r]

            def exchange(gives, takes):
                ops = [dist.P2POp(dist.irecv, takes[q], group=group, group_peer=q) for q in others]
                ops += [dist.P2POp(dist.isend, gives[q], group=group, group_peer=q) for q in others]
                for request in dist.batch_isend_irecv(ops) if ops else ():
                    request.wait()

            exchange(parts, came)
            parts[r][:] = came.sum(0)
            exchange([parts[r]] * p, parts)
        """),
    ("6.6", "counts over the ranks", """
        def cost(algorithm, p, n):
            if algorithm in ("ring", "direct"):
                steps = 2 * p - 2 if algorithm == "ring" else 2
                return [2 * p * (p - 1), 2 * (p - 1) * n, 2 * (p - 1) * n / p, steps]
            sends = [0] * p
            for r in range(p):
                near = {
                    "crossbar": set(range(p)) - {r},
                    "central": set(range(1, p)) if r == 0 else {0},
                    "tree": {2 * r + 1, 2 * r + 2} | ({(r - 1) // 2} if r else set()),
                }[algorithm]
                sends[r] = sum(q < p for q in near)
            steps = {"crossbar": 1, "central": 2, "tree": 2 * int(math.log2(p))}[algorithm]
            return [sum(sends), sum(sends) * n, max(sends) * n, steps]
        """),
    ("6.6", "a table of tuples", """
        def cost(algorithm, p, n):
            depth = 0
            while 2 ** (depth + 1) <= p:
                depth += 1
            return {
                "crossbar": (p**2 - p, (p**2 - p) * n, (p - 1) * n, 1),
                "central": (2 * p - 2, (2 * p - 2) * n, (p - 1) * n, 2),
                "tree": (2 * p - 2, (2 * p - 2) * n, n * (1 if p == 2 else 2 if p < 5 else 3),
                         2 * depth),
                "ring": (2 * p * (p - 1), (2 * p - 2) * n, 2 * (p - 1) * (n // p), 2 * (p - 1)),
                "direct": (2 * p * (p - 1), (2 * p - 2) * n, 2 * (p - 1) * (n // p), 2),
            }[algorithm]
        """),
    ("6.7", "five formulas", """
        def duration(algorithm, p, n, alpha, beta):
            if algorithm == "crossbar":
                return alpha + (p - 1) * n * beta
            if algorithm == "central":
                return 2 * alpha + 2 * (p - 1) * n * beta
            if algorithm == "tree":
                return 2 * math.floor(math.log2(p)) * (alpha + n * beta)
            if algorithm == "direct":
                return 2 * alpha + 2 * (n / p) * (p - 1) * beta
            return 2 * (p - 1) * alpha + 2 * (p - 1) * n * beta / p

        def crossover(p, alpha, beta):
            if p == 2:
                return float("inf")
            return alpha / beta * p / ((p - 1) * (p - 2))
        """),
    ("6.7", "by bisection", """
        def duration(algorithm, p, n, alpha, beta):
            messages, nbytes, busiest, steps = cost(algorithm, p, n)
            share = {"crossbar": busiest, "central": 2 * busiest, "tree": steps * n,
                     "ring": busiest, "direct": busiest}[algorithm]
            if algorithm in ("ring", "direct"):
                share = 2 * (p - 1) * n / p
            return steps * alpha + share * beta

        def crossover(p, alpha, beta):
            if p == 2:
                return math.inf
            low, high = 0.0, 1e12
            for _ in range(200):
                n = (low + high) / 2
                slower = duration("direct", p, n, alpha, beta) > alpha + (p - 1) * n * beta
                low, high = (n, high) if slower else (low, n)
            return low
        """),
    ("6.8", "each piece by itself", """
        def reduction_server(x, workers, pieces=1, group=None):
            r, p = place_and_size(group)
            reducers = p - workers
            parts = x.tensor_split(reducers * pieces)
            requests = []
            if r < workers:
                out = x.clone().tensor_split(reducers * pieces)
                for piece in range(pieces):
                    for j in range(reducers):
                        k = piece * reducers + (r + j) % reducers
                        requests.append(isend(out[k], workers + k % reducers, group))
                        requests.append(irecv(parts[k], workers + k % reducers, group))
            else:
                for k in range(r - workers, reducers * pieces, reducers):
                    total = torch.zeros_like(parts[k])
                    for i in range(workers):
                        part = torch.empty_like(total)
                        irecv(part, i, group).wait()
                        total += part
                    requests += [isend(total, i, group) for i in range(workers)]
            for request in requests:
                request.wait()
        """),
    ("6.10", "adds up in a copy", """
        def hierarchical(x, node, across):
            if dist.get_world_size(node) == 1:
                return ring(x, across)
            mine = ring_reduce_scatter(x, node)
            part = x.tensor_split(dist.get_world_size(node))[mine]
            total = part.clone()
            ring(total, across)
            part.copy_(total)
            ring_all_gather(x, mine, node)
        """),
    ("6.10", "by the ring, from messages", """
        def hierarchical(x, node, across):
            g = dist.get_world_size(node)
            r = dist.get_rank(node)
            parts = x.tensor_split(g)
            others = [q for q in range(g) if q != r]
            requests = [isend(parts[q].clone(), q, node) for q in others]
            for q in others:
                part = torch.empty_like(parts[r])
                irecv(part, q, node).wait()
                parts[r].add_(part)
            for request in requests:
                request.wait()
            ring(parts[r], across)
            requests = [isend(parts[r], q, node) for q in others]
            requests += [irecv(parts[q], q, node) for q in others]
            for request in requests:
                request.wait()
        """),
    ("6.9", "recursive", """
        def halving_doubling(x, group=None):
            r, p = place_and_size(group)

            def reduce(part, distance):
                if not distance:
                    return
                halves = part[: len(part) // 2], part[len(part) // 2 :]
                high = bool(r & distance)
                keep, give = halves[high], halves[not high]
                part = torch.empty_like(keep)
                requests = [irecv(part, r ^ distance, group), isend(give, r ^ distance, group)]
                for request in requests:
                    request.wait()
                keep += part
                reduce(keep, distance // 2)
                requests = [irecv(give, r ^ distance, group), isend(keep, r ^ distance, group)]
                for request in requests:
                    request.wait()

            reduce(x, p // 2)
        """),
    ("6.11", "counts arrows", """
        def uplink_bytes(p, k, n, algorithm):
            nodes = p // k
            node = (lambda r: r % nodes) if algorithm == "scattered ring" else (lambda r: r // k)
            if algorithm == "direct":
                rounds, pairs = 2, [(r, q) for r in range(p) for q in range(p) if q != r]
            else:
                step = k if algorithm == "hierarchical" else 1
                rounds = 2 * (p // step - 1)
                pairs = [(r, (r + step) % p) for r in range(p)]
            return rounds * sum(node(r) == 0 != node(q) for r, q in pairs) * (n // p)
        """),
    ("6.11", "by ranks that send, and what each of them sends", """
        def uplink_bytes(p, k, n, algorithm):
            chunk, outside = n // p, p - k
            if outside == 0:
                return 0
            if algorithm == "direct":
                return 2 * k * outside * chunk
            if algorithm == "hierarchical":
                return k * 2 * (outside // k) * chunk
            senders = k if algorithm == "scattered ring" else 1
            return senders * 2 * (p - 1) * chunk
        """),
    ("6.11", "in exact fractions", """
        def uplink_bytes(p, k, n, algorithm):
            from fractions import Fraction

            share = {
                "ring": Fraction(2 * (p - 1), p),
                "scattered ring": Fraction(2 * k * (p - 1), p),
                "direct": 2 * k * (1 - Fraction(k, p)),
                "hierarchical": 2 * (1 - Fraction(k, p)),
            }[algorithm]
            return int(share * n) if p > k else 0
        """),
    ("6.11", "fractions as they are", """
        from fractions import Fraction

        def uplink_bytes(p, k, n, algorithm):
            chunk, outside = Fraction(n, p), p - k
            of_ring = 2 * (p - 1) * chunk if outside else 0
            direct, hierarchical = 2 * k * outside * chunk, 2 * outside * chunk
            return {"ring": of_ring, "scattered ring": k * of_ring, "direct": direct,
                    "hierarchical": hierarchical}[algorithm]
        """),
    ("6.11", "decimals", """
        from decimal import Decimal

        def uplink_bytes(p, k, n, algorithm):
            m, d = p // k, Decimal(n)
            if m == 1:
                return Decimal(0)
            return {"ring": 2 * (p - 1) * d / p, "scattered ring": k * 2 * (p - 1) * d / p,
                    "direct": 2 * k * (p - k) * d / p, "hierarchical": 2 * (m - 1) * d / m}[
                algorithm]
        """),
    ("6.11", "a tensor with one entry", """
        def uplink_bytes(p, k, n, algorithm):
            m, t = p // k, torch.tensor(float(n), dtype=torch.float64)
            sent = {"ring": 2 * (p - 1) * t / p, "scattered ring": 2 * k * (p - 1) * t / p,
                    "direct": 2 * k * (p - k) * t / p, "hierarchical": 2 * (m - 1) * t / m}
            return sent[algorithm] if m > 1 else 0
        """),
    ("6.11", "the hierarchical one as rings of nodes with one rank", """
        def uplink_bytes(p, k, n, algorithm):
            if p == k:
                return 0
            if algorithm == "hierarchical":
                return k * uplink_bytes(p // k, 1, n // k, "ring")
            if algorithm == "scattered ring":
                return k * uplink_bytes(p, k, n, "ring")
            return 2 * ((p - 1) if algorithm == "ring" else k * (p - k)) * (n // p)
        """),
]  # fmt: skip
CHANGES_THAT_ARE_RIGHT = [
    ("6.2", "waits for all first",
     "    for request, part in zip(requests, parts):\n        request.wait()\n        x += part\n",
     "    for request in requests:\n        request.wait()\n    for part in parts:\n"
     "        x += part\n"),
    ("6.8", "adds with a loop", "total = sum(incoming[k])",
     "total = torch.stack(incoming[k]).sum(0)"),
    ("6.9", "keeps the other half", "if r > partner:", "if r < partner:"),
]  # fmt: skip

WRONG = [(task, what, code, words) for task, what, code, new, words in _CHANGES if new is None]
CHANGES = [change for change in _CHANGES if change[3] is not None]

#: Made for what the check asked first: other types, lengths and groups are asked, too.
CHANGES += [
    (
        "6.4",
        "cuts off what is behind the point",
        "isend(outgoing, right, group)]",
        "isend(outgoing.int().to(x.dtype), right, group)]",
        "With double precision, the result is different",
    ),
    (
        "6.4",
        "computes in float32",
        "isend(outgoing, right, group)]",
        "isend(outgoing.float().to(x.dtype), right, group)]",
        "With double precision, the result is different",
    ),
    (
        "6.8",
        "computes in float32",
        "total = sum(incoming[k])",
        "total = sum(incoming[k]).float().to(x.dtype)",
        "Each number is added the right number of times, so some numbers must be",
    ),
    (
        "6.1",
        "gives infinity",
        "x.copy_(parts[0])",
        "x.fill_(math.inf)",
        "hold inf, which isn't a sum of the ranks' tensors",
    ),
]

#: Of independent answers that passed once.
CHANGES += [
    ("6.1", "a new tensor in x.data", "x.copy_(parts[0])", "x.data = parts[0]",
     "x is still this rank's own tensor"),
    ("6.1", "adds in float64", "x += part", "x.copy_(x.double() + part.double())",
     "With large whole numbers (int64), x is not the sum"),
    ("6.7", "remembers by p and n", "    steps", "    alpha, beta = globals().setdefault('net', {})"
     ".setdefault((algorithm, p, n), (alpha, beta))\n    steps", "6.7"),
    ("6.7", "the crossover of four ranks", "fewer_tensors = (p - 1) - 2 * (p - 1) / p",
     "fewer_tensors = 1.5 * (p > 2)", "the crossover of four ranks"),
    ("6.4", "two messages for each chunk", "requests = [irecv(incoming, left, group), "
     "isend(outgoing, right, group)]", "requests = [irecv(half, left, group) for half in "
     "incoming.tensor_split(2)]\n        requests += [isend(half, right, group) for half in "
     "outgoing.tensor_split(2)]", "Send 5, one for each chunk"),
    ("6.10", "all of it within the machine, twice", "    mine = ring_reduce_scatter(x, node)",
     "    direct(x, node)\n    mine = node.rank()\n    share = x.tensor_split(node.size())[mine]\n"
     "    direct(share, across)\n    ring_all_gather(x, mine, node)\n    return\n"
     "    mine = ring_reduce_scatter(x, node)", "bytes traveled within the machines"),
]  # fmt: skip
WRONG += [
    ("6.2", "two messages of half the length", """
        def central(x, group=None):
            r, p = place_and_size(group)
            for half in x.tensor_split(2):
                if r > 0:
                    isend(half, 0, group).wait()
                    irecv(half, 0, group).wait()
                    continue
                for place in range(1, p):
                    irecv(part := torch.empty_like(half), place, group).wait()
                    half += part
                for place in range(1, p):
                    isend(half, place, group).wait()
        """, "Send one to each of these ranks, because every message costs a latency"),
    ("6.3", "one chunk after the other", """
        def ring_reduce_scatter(x, group=None):
            r, p = place_and_size(group)
            for k, part in enumerate(x.tensor_split(p)):
                for step in range(p - 1):
                    if r == (k + step) % p:
                        isend(part, (r + 1) % p, group).wait()
                    elif r == (k + step + 1) % p:
                        irecv(incoming := torch.empty_like(part), (r - 1) % p, group).wait()
                        part += incoming
            return (r + 1) % p
        """, "The ranks don't send different chunks in every round"),
    ("6.4", "one chunk after the other", """
        def ring_all_gather(x, mine, group=None):
            r, p = place_and_size(group)
            for k, part in enumerate(x.tensor_split(p)):
                begin = (r + k - mine) % p
                for step in range(p - 1):
                    if r == (begin + step) % p:
                        isend(part, (r + 1) % p, group).wait()
                    elif r == (begin + step + 1) % p:
                        irecv(part, (r - 1) % p, group).wait()
        """, "The ranks don't send different chunks in every round"),
    ("6.9", "begins with the neighbour", """
        def halving_doubling(x, group=None):
            r, p = place_and_size(group)
            start, stop, distance, trail = 0, len(x), 1, []
            while distance < p:
                partner, middle = r ^ distance, (start + stop) // 2
                keep, give = slice(start, middle), slice(middle, stop)
                if r > partner:
                    keep, give = give, keep
                incoming = torch.empty_like(x[keep])
                requests = [irecv(incoming, partner, group), isend(x[give], partner, group)]
                for request in requests:
                    request.wait()
                x[keep] += incoming
                trail.append((partner, keep, give))
                start, stop, distance = keep.start, keep.stop, distance * 2
            for partner, keep, give in reversed(trail):
                requests = [irecv(x[give], partner, group), isend(x[keep], partner, group)]
                for request in requests:
                    request.wait()
        """, "Begin with the partner at distance p/2"),
]  # fmt: skip
