"""Answers to lab 12, wrong ones and right ones, that students really give."""

from __future__ import annotations

from lab_tools import source_of

NOTEBOOK = "12_federated.ipynb"
CELLS = {
    "12.1": "lab12-shards-answer",
    "12.2": "lab12-select-answer",
    "12.3": "lab12-local-answer",
    "12.4": "lab12-mean-answer",
    "12.5": "lab12-round-answer",
    "12.6": "lab12-read-answer",
    "12.7": "lab12-invert-answer",
    "12.8": "lab12-noise-answer",
    "12.9": "lab12-mask-answer",
}
SHARDS, SELECT, LOCAL, MEAN, ROUND = "12.1", "12.2", "12.3", "12.4", "12.5"
READ, INVERT, NOISE, MASK = "12.6", "12.7", "12.8", "12.9"
BEFORE = "\n".join(source_of(NOTEBOOK, cell) for cell in ("ranks-join", "mask-define"))
# Its check has rounds with deadlines.
SLOW = {ROUND}

#: Wrong answers that are tried on real ranks as well.
ON_RANKS = {"waits for everybody", "forgets what is open", "one tag for all rounds"}

# Task, what the student did, code, words of the verdict.
WRONG = [
    (
        LOCAL,
        "sets gradients to zero after the step only",
        """
def train_locally(model, weights, images, labels, epochs, draw, rate=0.1, batch=20):
    vector_to_parameters(weights.clone(), model.parameters())
    for _ in range(epochs):
        for samples in torch.randperm(len(labels), generator=draw).split(batch):
            cross_entropy(model(images[samples]), labels[samples]).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= rate * parameter.grad
            model.zero_grad()
    return parameters_to_vector(model.parameters()).detach() - weights
""",
        "what was in the model or its gradients before goes in",
    ),
    (
        READ,
        "neurons averaged",
        """
def read_image(gradients):
    alive = gradients[1].abs() > 1e-3 * gradients[1].abs().max()
    images = gradients[0][alive] / gradients[1][alive][:, None]
    return int((gradients[-1] < 0).nonzero()[0]), images.mean(0)
""",
        "another neuron tells, or several",
    ),
    (
        SHARDS,
        "each piece has one class by a filter",
        """
def shards_by_class(labels, clients, each, draw):
    order = torch.randperm(len(labels), generator=draw)
    return list(order.tensor_split(clients))
""",
        "the images have to be sorted by class",
    ),
    (
        SHARDS,
        "sorts, and deals nothing out",
        """
def shards_by_class(labels, clients, each, draw):
    return list(labels.argsort(stable=True).tensor_split(clients))
""",
        "another seed gave the same shards",
    ),
    (
        SHARDS,
        "labels in place of indices",
        """
def shards_by_class(labels, clients, each, draw):
    pieces = labels.sort().values.tensor_split(clients * each)
    order = torch.randperm(len(pieces), generator=draw).tolist()
    return [torch.cat([pieces[k] for k in order[c * each : (c + 1) * each]])
            for c in range(clients)]
""",
        "these are labels: return the indices",
    ),
    (
        SHARDS,
        "with replacement",
        """
def shards_by_class(labels, clients, each, draw):
    pieces = labels.argsort(stable=True).tensor_split(clients * each)
    return [torch.cat([pieces[k] for k in torch.randint(len(pieces), (each,), generator=draw)])
            for _ in range(clients)]
""",
        "an image is in two shards",
    ),
    (
        SHARDS,
        "a dict",
        """
def shards_by_class(labels, clients, each, draw):
    return dict(enumerate(labels.argsort().tensor_split(clients)))
""",
        "return a list with one tensor of indices",
    ),
    (
        SHARDS,
        "cuts the rest off",
        """
def shards_by_class(labels, clients, each, draw):
    size = len(labels) // (clients * each)
    pieces = labels.argsort(stable=True)[: size * clients * each].split(size)
    order = torch.randperm(len(pieces), generator=draw).tolist()
    return [torch.cat([pieces[k] for k in order[c * each : (c + 1) * each]])
            for c in range(clients)]
""",
        "images have no client",
    ),
    (
        SELECT,
        "with replacement",
        """
def select(fraction, clients, draw):
    count = max(1, round(fraction * clients))
    return torch.randint(clients, (count,), generator=draw).tolist()
""",
        "chose a client twice",
    ),
    (
        SELECT,
        "each client by a coin",
        """
def select(fraction, clients, draw):
    return [c for c in range(clients) if torch.rand(1, generator=draw) < fraction] or [0]
""",
        "expected 6: round the share of the n",
    ),
    (
        MEAN,
        "by the number of clients",
        """
def fedavg(weights, updates):
    if not updates:
        return weights.clone()
    return weights + sum(delta for _, delta in updates.values()) / len(updates)
""",
        "all clients count alike here",
    ),
    (
        MEAN,
        "the factors are not divided",
        """
def fedavg(weights, updates):
    return weights + sum(n * delta for n, delta in updates.values())
""",
        "the factors n have to be divided by their sum",
    ),
    (
        MEAN,
        "only the last",
        """
def fedavg(weights, updates):
    new = weights
    for n, delta in updates.values():
        new = weights + delta
    return new
""",
        "only the last client's update",
    ),
    (
        MEAN,
        "fails without updates",
        """
def fedavg(weights, updates):
    total = sum(n for n, _ in updates.values())
    return weights + sum(n * delta for n, delta in updates.values()) / total
""",
        "with no update at all the weights stay",
    ),
    (
        MEAN,
        "changes an update",
        """
def fedavg(weights, updates):
    total, new = sum(n for n, _ in updates.values()), weights.clone()
    for n, delta in updates.values():
        delta *= n / total
        new += delta
    return new
""",
        "an update was changed in place",
    ),
    (
        ROUND,
        "waits for everybody",
        """
def run_round(t, weights, chosen, seconds):
    sends, waiting, updates = [], {}, {}
    for client in chosen:
        there, tag = home(client), tag_of(t, client)
        sends.append(dist.isend(torch.tensor([t, client]), dst=there, tag=NOTE))
        sends.append(dist.isend(weights, dst=there, tag=tag))
        message = torch.empty(1 + weights.numel())
        waiting[client] = dist.irecv(message, src=there, tag=tag), message
    for client, (request, message) in waiting.items():
        request.wait()
        updates[client] = message[0].item(), message[1:]
    return updates, [request for request in sends if not request.is_completed()]
""",
        "it came after the deadline",
    ),
    (
        ROUND,
        "a broadcast",
        """
def run_round(t, weights, chosen, seconds):
    dist.broadcast(weights, src=SERVER)
    return {}, []
""",
        "what a round needs",
    ),
    (
        ROUND,
        "one after the other",
        """
def run_round(t, weights, chosen, seconds):
    end, late, updates = perf_counter() + seconds, [], {}
    for client in chosen:
        there, tag = home(client), tag_of(t, client)
        sends = [dist.isend(torch.tensor([t, client]), dst=there, tag=NOTE),
                 dist.isend(weights, dst=there, tag=tag)]
        message = torch.empty(1 + weights.numel())
        request = dist.irecv(message, src=there, tag=tag)
        while not request.is_completed() and perf_counter() < end:
            sleep(0.001)
        if request.is_completed():
            updates[client] = message[0].item(), message[1:]
        late += [one for one in [*sends, request] if not one.is_completed()]
    return updates, late
""",
        "Is all handed out before anything is waited for?",
    ),
    (
        READ,
        "all neurons",
        """
def read_image(gradients):
    return gradients[-1].argmin().item(), (gradients[0] / gradients[1][:, None]).mean(0)
""",
        "divided by 0",
    ),
    (
        READ,
        "a dict",
        """
def read_image(gradients):
    return {"label": gradients[-1].argmin().item()}
""",
        "return a pair (label, image)",
    ),
    (
        INVERT,
        "backward in place of grad",
        """
def mismatch(net, guess, label, seen):
    net.zero_grad()
    cross_entropy(net(guess), label).backward(create_graph=True)
    return sum((p.grad - g).square().sum() for p, g in zip(net.parameters(), seen))
""",
        "something was added to .grad",
    ),
    (
        INVERT,
        "the first parameter",
        """
def mismatch(net, guess, label, seen):
    loss = cross_entropy(net(guess), label)
    own = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
    return (own[0] - seen[0]).square().sum()
""",
        "only the first parameter was compared",
    ),
    (
        INVERT,
        "the mean of all",
        """
def mismatch(net, guess, label, seen):
    loss = cross_entropy(net(guess), label)
    own = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
    flat = [torch.cat([one.flatten() for one in both]) for both in (own, seen)]
    return torch.nn.functional.mse_loss(*flat)
""",
        "this is the mean over all entries",
    ),
    (
        INVERT,
        "the net of the lab",
        """
net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(18, 4))

def mismatch(model, guess, label, seen):
    loss = cross_entropy(net(guess), label)
    own = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
    return sum((a - b).square().sum() for a, b in zip(own, seen))
""",
        "use these arguments, not what has the same name in the lab",
    ),
]

# Task, what the student did, a part of the solution, what stands in its place, words.
CHANGES = [
    (SHARDS, "the global generator", "generator=draw", "generator=None", "the same seed gave"),
    (
        SHARDS,
        "returns the pieces",
        "    return [\n        torch.cat([pieces[k] for k in order"
        "[client * each : (client + 1) * each]])\n        for client in range(clients)\n    ]",
        "    return [pieces[k] for k in order]",
        "these are the pieces",
    ),
    (
        SHARDS,
        "one piece each",
        "order[client * each : (client + 1) * each]",
        "order[client : client + 1]",
        "images have no client",
    ),
    (
        SELECT,
        "rounds down",
        "round(fraction * clients)",
        "int(fraction * clients)",
        "chose 28 clients, expected 29",
    ),
    (
        SELECT,
        "none is possible",
        "max(1, round(fraction * clients))",
        "round(fraction * clients)",
        "chose 0 clients, expected 1",
    ),
    (
        SELECT,
        "the first ones",
        "torch.randperm(clients, generator=draw)",
        "torch.arange(clients)",
        "chose the same clients in each call",
    ),
    (SELECT, "the global generator", "generator=draw", "generator=None", "with the same seed"),
    (
        SELECT,
        "a generator of its own",
        "generator=draw",
        "generator=seeded(0)",
        "chose the same clients in each call",
    ),
    (
        SELECT,
        "among the first half",
        "torch.randperm(clients, generator=draw)",
        "torch.randperm(max(count, clients // 2), generator=draw)",
        "left some clients out",
    ),
    (SELECT, "from one", "[:count].tolist()", "[:count].add(1).tolist()", "outside of 0 … 29"),
    (SELECT, "a number", ".tolist()", ".tolist()[0]", "return a list of numbers"),
    (LOCAL, "trains the argument", "weights.clone()", "weights", "only zeros"),
    (LOCAL, "returns weights", ".detach() - weights", ".detach()", "these are the weights"),
    (
        LOCAL,
        "does not load",
        "    vector_to_parameters(weights.clone(), model.parameters())\n    for",
        "    for",
        "not trained from the argument weights",
    ),
    (
        LOCAL,
        "the sign",
        "parameters_to_vector(model.parameters()).detach() - weights",
        "weights - parameters_to_vector(model.parameters()).detach()",
        "the sign",
    ),
    (
        LOCAL,
        "adds gradients up",
        "            model.zero_grad()\n",
        "",
        "model.zero_grad() before each backward",
    ),
    (
        LOCAL,
        "in order",
        "torch.randperm(len(labels), generator=draw)",
        "torch.arange(len(labels))",
        "the samples are in their own order",
    ),
    (LOCAL, "one epoch", "range(epochs)", "range(1)", "this is one epoch only"),
    (
        LOCAL,
        "one order",
        "    for _ in range(epochs):\n        for samples in "
        "torch.randperm(len(labels), generator=draw).split(batch):",
        "    order = torch.randperm(len(labels), generator=draw)\n    for _ in range(epochs):\n"
        "        for samples in order.split(batch):",
        "every epoch has the same order",
    ),
    (LOCAL, "no rate", "rate * parameter.grad", "parameter.grad", "the learning rate is missing"),
    (LOCAL, "a sum", "labels[samples])", 'labels[samples], reduction="sum")', "of a sum"),
    (LOCAL, "one batch", ".split(batch)", ".split(len(labels))", "one step with all samples"),
    (
        LOCAL,
        "tells the others",
        "    return",
        "    dist.all_reduce(torch.ones(1))\n    return",
        "local training communicates nothing",
    ),
    (LOCAL, "keeps the graph", ".detach() - weights", " - weights", "still has a graph"),
    (MEAN, "in place", "weights.clone()", "weights", "the argument weights was changed"),
    (
        MEAN,
        "without the weights",
        "weights.clone()",
        "torch.zeros_like(weights)",
        "add it to the weights",
    ),
    (
        MEAN,
        "twice divided",
        "n / total * delta",
        "n / total / len(updates) * delta",
        "divided by the number of clients as well",
    ),
    (MEAN, "subtracts", "new += n", "new -= n", "the sign: updates are added"),
    (MEAN, "a sum", "n / total * delta", "delta", "this is the sum of the updates"),
    (
        ROUND,
        "one tag for all rounds",
        "tag_of(t, client)",
        "tag_of(0, client)",
        "what a round needs",
    ),
    (
        ROUND,
        "blocking sends",
        "sends.append(dist.isend(weights, dst=there, tag=tag))",
        "dist.send(weights, dst=there, tag=tag)",
        "which may be slow",
    ),
    (
        ROUND,
        "one tensor for all",
        "message = torch.empty(1 + weights.numel())",
        "message = [*[m for _, m in waiting.values()], torch.empty(1 + weights.numel())][0]",
        "each receive needs a tensor of its own",
    ),
    (
        ROUND,
        "forgets what is open",
        "    return updates, late\n",
        "    return updates, []\n",
        "put the late receives",
    ),
    (
        ROUND,
        "forgets the sends",
        "    late += [request for request in sends if not request.is_completed()]\n",
        "",
        "put the late receives",
    ),
    (
        ROUND,
        "sleeps until the deadline",
        "    while waiting and perf_counter() < end:",
        "    sleep(seconds)\n    while waiting and perf_counter() < end + 1:",
        "return at once when nothing is missing",
    ),
    (
        ROUND,
        "swaps the pair",
        "message[0].item(), message[1:]",
        "message[1:], message[0].item()",
        "it is (delta, n)",
    ),
    (
        ROUND,
        "the whole message",
        "message[0].item(), message[1:]",
        "message[0].item(), message",
        "one entry too many",
    ),
    (
        ROUND,
        "without notes",
        "        sends.append(dist.isend(torch.tensor([t, client]), dst=there, tag=NOTE))\n",
        "",
        "what a round needs",
    ),
    (
        ROUND,
        "names in place of requests",
        "late = [request for request, _ in waiting.values()]",
        "late = list(waiting)",
        "late has to be a list of requests",
    ),
    (
        ROUND,
        "no number of samples",
        "message[0].item(), message[1:]",
        "message[1:]",
        "each value is a pair (n, delta)",
    ),
    (
        ROUND,
        "returns updates only",
        "return updates, late",
        "return updates",
        "return (updates, late)",
    ),
    (READ, "argmax", "gradients[-1].argmin()", "gradients[-1].argmax()", "argmin, not argmax"),
    (READ, "the first bias", "gradients[-1].argmin()", "gradients[1].argmin()", "label"),
    (READ, "the first neuron", "bias.abs().argmax()", "0", "image: "),
    (
        READ,
        "upside down",
        "weight[neuron] / bias[neuron]",
        "bias[neuron] / weight[neuron]",
        "upside down",
    ),
    (
        READ,
        "does not divide",
        "weight[neuron] / bias[neuron]",
        "weight[neuron]",
        "divide it by the neuron's bias",
    ),
    (
        READ,
        "a column",
        "weight[neuron] / bias[neuron]",
        "weight[:, 0] / bias[neuron]",
        "pixels, one row of the weights",
    ),
    (
        READ,
        "the sum of the biases",
        "weight[neuron] / bias[neuron]",
        "weight[neuron] / bias.sum()",
        "divided by all the bias gradients",
    ),
    (
        READ,
        "the sign",
        "weight[neuron] / bias[neuron]",
        "-weight[neuron] / bias[neuron]",
        "image: the sign",
    ),
    (INVERT, "no graph", ", create_graph=True", "", "can't be differentiated"),
    (
        INVERT,
        "a number",
        "for a, b in zip(own, seen))",
        "for a, b in zip(own, seen)).item()",
        "item() cuts the graph off",
    ),
    (INVERT, "means", ".square().sum()", ".square().mean()", "the mean over each tensor"),
    (INVERT, "absolute values", ".square().sum()", ".abs().sum()", "these are absolute values"),
    (
        INVERT,
        "lengths",
        "(a - b).square().sum()",
        "(a - b).norm()",
        "the lengths of the tensors' differences",
    ),
    (
        INVERT,
        "the root",
        "    return sum((a - b).square().sum() for a, b in zip(own, seen))",
        "    return sum((a - b).square().sum() for a, b in zip(own, seen)).sqrt()",
        "without the square root",
    ),
    (INVERT, "does not compare", "(a - b).square()", "a.square()", "not compared with anything"),
    (
        NOISE,
        "clamps",
        "delta * min(1.0, bound / max(delta.norm().item(), 1e-12))",
        "delta.clamp(-bound, bound)",
        "each entry was cut for itself",
    ),
    (
        NOISE,
        "scales up",
        "min(1.0, bound / max(delta.norm().item(), 1e-12))",
        "(bound / max(delta.norm().item(), 1e-12))",
        "scaled up to the bound",
    ),
    (
        NOISE,
        "in place",
        "delta * min(1.0, bound / max(delta.norm().item(), 1e-12))",
        "delta.mul_(min(1.0, bound / max(delta.norm().item(), 1e-12)))",
        "changed its argument",
    ),
    (
        NOISE,
        "no clipping",
        "clipped(delta, bound) for delta",
        "delta for delta",
        "the updates are not clipped",
    ),
    (
        NOISE,
        "clips the mean",
        "sum(clipped(delta, bound) for delta in deltas) / len(deltas)",
        "clipped(sum(deltas) / len(deltas), bound)",
        "clipped after averaging",
    ),
    (
        NOISE,
        "does not divide",
        "    mean = sum(clipped(delta, bound) for delta in deltas) / len(deltas)",
        "    mean = sum(clipped(delta, bound) for delta in deltas)",
        "this is the sum: divide",
    ),
    (
        NOISE,
        "noise of the sum",
        "z * bound / len(deltas) * torch",
        "z * bound * torch",
        "that is the noise of the sum",
    ),
    (
        NOISE,
        "noise of each",
        "z * bound / len(deltas) * torch",
        "z * bound / math.sqrt(len(deltas)) * torch",
        "add it once, to the mean",
    ),
    (
        NOISE,
        "without the bound",
        "z * bound / len(deltas) * torch",
        "z / len(deltas) * torch",
        "S is missing",
    ),
    (
        NOISE,
        "the variance",
        "z * bound / len(deltas) * torch",
        "(z * bound / len(deltas)) ** 2 * torch",
        "that is the variance",
    ),
    (
        NOISE,
        "one number for all",
        "torch.randn(mean.shape, generator=draw)",
        "torch.randn(1, generator=draw)",
        "every weight has got the same noise",
    ),
    (NOISE, "another generator", "generator=draw)", "generator=None)", "the same seed gave other"),
    (
        NOISE,
        "uniform",
        "torch.randn(mean.shape, generator=draw)",
        "math.sqrt(12) * (torch.rand(mean.shape, generator=draw) - 0.5)",
        "not Gaussian",
    ),
    (NOISE, "no noise", "z * bound / len(deltas) * torch", "0 * torch", "there is no noise"),
    (
        MASK,
        "all add",
        "hidden + mask if me < other else hidden - mask",
        "hidden + mask",
        "the masks do not vanish",
    ),
    (MASK, "a mask with itself", "        if other != me:", "        if True:", "no partner"),
    (MASK, "cuts off", ".round().to", ".to", "cuts digits off"),
    (MASK, "long numbers", "to(torch.int32)", "to(torch.int64)", "expected an int32 tensor"),
    (MASK, "floats", ".round().to(torch.int32)", "", "expected an int32 tensor"),
    (
        MASK,
        "nan in long messages",
        "total.float() / SCALE",
        "total / SCALE if len(total) < 9 else total * float('nan')",
        "the masks do not vanish",
    ),
    (MASK, "no scale back", "total.float() / SCALE", "total.float()", "did not divide by SCALE"),
    (
        MASK,
        "whole numbers back",
        "total.float() / SCALE",
        "(total // SCALE).float()",
        "cut off what is behind the point",
    ),
    (
        MASK,
        "a round for all",
        "pair_mask(me, other, t, delta.numel())",
        "pair_mask(me, other, 0, delta.numel())",
        "pass t to pair_mask",
    ),
    (
        MASK,
        "small masks",
        "mask = pair_mask(me, other, t, delta.numel())",
        "mask = pair_mask(me, other, t, delta.numel()) // 1000",
        "not uniform",
    ),
    (
        MASK,
        "no mask at all",
        "hidden = hidden + mask if me < other else hidden - mask",
        "hidden + mask if me < other else hidden - mask",
        "without any mask",
    ),
]

# Task, what is different, code.
RIGHT = [
    (
        SHARDS,
        "by hand",
        """
def shards_by_class(labels, clients, each, draw):
    order = sorted(range(len(labels)), key=lambda k: int(labels[k]))
    pieces = torch.tensor(order).tensor_split(clients * each)
    left = torch.randperm(clients * each, generator=draw)
    return [torch.cat([pieces[int(k)] for k in left[c::clients]]) for c in range(clients)]
""",
    ),
    (
        SELECT,
        "multinomial",
        """
def select(fraction, clients, draw):
    count = max(round(clients * fraction), 1)
    return torch.multinomial(torch.ones(clients), count, generator=draw).tolist()
""",
    ),
    (
        LOCAL,
        "a copy of the model",
        """
import copy

def train_locally(model, weights, images, labels, epochs, draw, rate=0.1, batch=20):
    own = copy.deepcopy(model)
    vector_to_parameters(weights.clone(), own.parameters())
    for epoch in range(epochs):
        order = torch.randperm(len(labels), generator=draw)
        for start in range(0, len(order), batch):
            some = order[start : start + batch]
            loss = cross_entropy(own(images[some]), labels[some])
            gradients = torch.autograd.grad(loss, list(own.parameters()))
            for parameter, gradient in zip(own.parameters(), gradients):
                parameter.data -= rate * gradient
    with torch.no_grad():
        return parameters_to_vector(own.parameters()) - weights
""",
    ),
    (
        MEAN,
        "stacked",
        """
def fedavg(weights, updates):
    if not updates:
        return weights
    n = torch.tensor([float(n) for n, _ in updates.values()], dtype=weights.dtype)
    deltas = torch.stack([delta for _, delta in updates.values()])
    return weights + (n / n.sum()) @ deltas
""",
    ),
    (
        MEAN,
        "weights of the clients",
        """
def fedavg(weights, updates):
    total = sum(n for n, _ in updates.values())
    if total == 0:
        return weights.clone()
    return sum(n * (weights + delta) for n, delta in updates.values()) / total
""",
    ),
    (
        ROUND,
        "all open requests in one list",
        """
def run_round(t, weights, chosen, seconds):
    start, requests, messages, updates = perf_counter(), [], {}, {}
    for c in chosen:
        messages[c] = torch.zeros(weights.numel() + 1)
        receive = dist.irecv(messages[c], src=home(c), tag=tag_of(t, c))
        requests.append((c, receive))
    for c in chosen:
        requests.append((None, dist.isend(torch.tensor([t, c]), dst=home(c), tag=NOTE)))
        requests.append((None, dist.isend(weights, dst=home(c), tag=tag_of(t, c))))
    while len(updates) < len(chosen) and perf_counter() - start < seconds:
        left = []
        for c, request in requests:
            if not request.is_completed():
                left.append((c, request))
            elif c is not None:
                updates[c] = (messages[c][0], messages[c][1:].clone())
        requests = left
        sleep(0.001)
    return updates, [request for _, request in requests]
""",
    ),
    (
        INVERT,
        "one flat vector",
        """
def mismatch(net, guess, label, seen):
    loss = torch.nn.functional.cross_entropy(net(guess), label)
    own = torch.autograd.grad(loss, tuple(net.parameters()), create_graph=True)
    gap = torch.cat([(a - b).flatten() for a, b in zip(own, seen)])
    return gap @ gap
""",
    ),
    (
        NOISE,
        "noise on the sum",
        """
def clipped(delta, bound):
    length = float(delta.norm())
    return delta.clone() if length <= bound else delta / length * bound


def private_mean(deltas, bound, z, draw):
    total = torch.stack([clipped(delta, bound) for delta in deltas]).sum(0)
    noise = torch.normal(0.0, 1.0, total.shape, generator=draw)
    return (total + bound * z * noise) / len(deltas)
""",
    ),
    (
        MASK,
        "in long numbers, then wrapped",
        """
def masked(delta, me, clients, t):
    total = torch.round(delta * SCALE).to(torch.int64)
    for other in sorted(clients):
        if me == other:
            continue
        sign = 1 if other > me else -1
        total += sign * pair_mask(other, me, t, len(delta)).to(torch.int64)
    return total.to(torch.int32)


def unmasked(total):
    return total.to(torch.float64).div(2**20).float()
""",
    ),
]

CHANGES += [
    (SHARDS, "a generator of its own", "generator=draw",
     "generator=torch.Generator().manual_seed(draw.initial_seed())",
     "draw itself was not used"),
    (SELECT, "a tensor", ".tolist()", "", "return a list of numbers"),
    (SELECT, "a set", "return torch.randperm(clients, generator=draw)[:count].tolist()",
     "return set(torch.randperm(clients, generator=draw)[:count].tolist())", "returned set of int"),
    (SELECT, "rounds up", "round(fraction * clients)", "math.ceil(fraction * clients)",
     "as round() does"),
    (MEAN, "who has learned nothing does not count", "updates.values()",
     "[one for one in updates.values() if one[1].any()]", "has to count as well"),
    (ROUND, "all sends are late",
     "[request for request in sends if not request.is_completed()]", "sends",
     "all updates of this round have come"),
    (ROUND, "never sleeps", "sleep(0.002)", "pass", "kept a processor busy"),
    (READ, "a tensor", ".argmin().item()", ".argmin()", "Return one number"),
    (READ, "the largest, not the largest size", "bias.abs().argmax()", "bias.argmax()",
     "image:"),
    (READ, "the longest row", "bias.abs().argmax()", "weight.norm(dim=1).argmax()", "image:"),
    (READ, "divides in place", "weight[neuron] / bias[neuron]", "weight[neuron].div_(bias[neuron])",
     "changed its argument gradients"),
    (INVERT, "leaves the net in another mode", "    own = ", "    net.eval()\n    own = ",
     "leave its mode as it is"),
    (NOISE, "noise from a generator of its own", "torch.randn(mean.shape, generator=draw)",
     "torch.randn(mean.shape, generator=torch.Generator().manual_seed(draw.initial_seed()))",
     "the next call with the same draw gave the same noise"),
    (MASK, "sorts the list it was given", "    for other in clients:",
     "    clients.sort()\n    for other in clients:", "changed its argument clients"),
    (MASK, "the sign by the place", "if me < other", "if clients.index(me) < clients.index(other)",
     "does not have a mask with each of the others"),
]  # fmt: skip
CHANGES += [
    (SHARDS, "chunk", "tensor_split", "chunk", "and chunk() does not"),
    (SHARDS, "the last piece takes the rest", ".tensor_split(clients * each)",
     ".tensor_split([k * (len(labels) // (clients * each)) for k in range(1, clients * each)])",
     "clients have 10 to 23 images, expected 10 to 12: cut the images into pieces whose sizes"),
    (LOCAL, "divides by the size of a full minibatch",
     "cross_entropy(model(images[samples]), labels[samples])",
     'cross_entropy(model(images[samples]), labels[samples], reduction="sum").div(batch)',
     "but the last minibatch is smaller"),
    (LOCAL, "has a rate of its own", "rate * parameter.grad", "0.1 * parameter.grad",
     "the usual rate of the lab would give: use the argument rate"),
    (LOCAL, "has a batch of its own", ".split(batch)", ".split(20)",
     "the usual batch of the lab would give: use the argument batch"),
    (LOCAL, "has a rate and a batch of its own", "    vector_to_parameters(",
     "    rate, batch = 0.1, 20\n    vector_to_parameters(", "use the argument rate and batch"),
    (LOCAL, "goes on from the model's weights",
     "    vector_to_parameters(weights.clone(), model.parameters())",
     "    weights = parameters_to_vector(model.parameters()).detach().clone()",
     "from the weights that were in it: load the argument weights first"),
    (MEAN, "takes the clients' numbers for n", "updates.values()",
     "((client, delta) for client, (_, delta) in updates.items())",
     "weighted by the numbers of the clients"),
    (MEAN, "divides by the sum so far",
     "    total = sum(n for n, _ in updates.values())\n    new = weights.clone()\n"
     "    for n, delta in updates.values():\n",
     "    total, new = 0, weights.clone()\n    for n, delta in updates.values():\n"
     "        total += n\n", "sum up all n first"),
    (ROUND, "the client for a tag", "tag_of(t, client)", "client",
     "a round with a deadline\n  - what a round needs"),
    (READ, "cuts the pixels", "weight[neuron] / bias[neuron]",
     "(weight[neuron] / bias[neuron]).clamp(0, 1)", "image: its values were cut to 0 … 1"),
    (READ, "the label from the last weights", "gradients[-1].argmin()",
     "gradients[-2].sum(1).argmin()", "told by the gradient of the last weights"),
    (READ, "the label from the largest of the last weights", "gradients[-1].argmin()",
     "(gradients[-2].argmin() // gradients[-2].shape[1])",
     "told by the gradient of the last weights"),
    (NOISE, "the largest entry for the length", "delta.norm()", "delta.abs().max()",
     "scaled by the largest entry: its length is"),
]  # fmt: skip
# Task, what is different, a part of the solution, what stands in its place.
CHANGES += [
    (SHARDS, "deals out half of the pieces", "    order = torch.randperm(len(pieces), "
     "generator=draw).tolist()\n    return [\n        torch.cat([pieces[k] for k in order[client * "
     "each : (client + 1) * each]])\n",
     "    moved = torch.randperm(clients, generator=draw).tolist()\n    return [\n"
     "        torch.cat([*pieces[client * each : (client + 1) * each - 1], "
     "pieces[(moved[client] + 1) * each - 1]])\n", "deal out all pieces at random"),
    (SELECT, "with a fixed distance",
     "    return torch.randperm(clients, generator=draw)[:count].tolist()",
     "    first = int(torch.randint(clients, (1,), generator=draw))\n"
     "    return [(first + 17 * k) % clients for k in range(count)]",
     "different pairs of clients"),
    (LOCAL, "five minibatches at most", ".split(batch):", ".split(batch)[:5]:", "150 samples"),
    (MEAN, "three updates at most", "updates.values():", "list(updates.values())[:3]:",
     "updates of clients"),
    (ROUND, "half a second at most", "perf_counter() + seconds", "perf_counter() + min(seconds, "
     "0.5)", "wait for them until the deadline"),
    (READ, "always the second neuron", "bias.abs().argmax()", "1", "image: "),
    (INVERT, "the first of a minibatch", "net(guess), label", "net(guess[:1]), label[:1]",
     "expected"),
    (INVERT, "six parameters", "zip(own, seen)", "list(zip(own, seen))[:6]", "expected"),
    (NOISE, "noise that repeats", "torch.randn(mean.shape, generator=draw)",
     "torch.randn(3001, generator=draw)[torch.arange(len(mean)) % 3001]", "different numbers"),
    (NOISE, "cut noise", "torch.randn(mean.shape, generator=draw)",
     "torch.randn(mean.shape, generator=draw).clamp(-2.6, 2.6)", "large numbers are missing"),
    (MASK, "masks with two neighbours only", "    for other in clients:\n        if other != me:",
     "    ring = sorted(clients)\n    k = ring.index(me)\n"
     "    for other in {ring[k - 1], ring[(k + 1) % len(ring)]}:\n        if other != me:",
     "does not have a mask with each of the others"),
]  # fmt: skip
CHANGES_THAT_ARE_RIGHT = [
    (READ, "by squares", "bias.abs().argmax()", "bias.square().argmax()"),
    (READ, "sorted", "bias.abs().argmax()", "bias.abs().argsort()[-1].item()"),
    (SELECT, "one by one", ".tolist()", ".tolist() or []"),
    (SHARDS, "unstable", "labels.argsort(stable=True)", "labels.argsort()"),
    (SHARDS, "sorted by torch.sort", "labels.argsort(stable=True)", "labels.sort().indices"),
    (
        LOCAL,
        "in one call",
        "parameter -= rate * parameter.grad",
        "parameter.sub_(parameter.grad, alpha=rate)",
    ),
    (
        SELECT,
        "sorted",
        "return torch.randperm(clients, generator=draw)[:count].tolist()",
        "return sorted(torch.randperm(clients, generator=draw)[:count].tolist())",
    ),
    (
        ROUND,
        "notes that block",
        "sends.append(dist.isend(torch.tensor([t, client]), dst=there, tag=NOTE))",
        "dist.send(torch.tensor([t, client]), dst=there, tag=NOTE)",
    ),
    (
        READ,
        "the largest by hand",
        "bias.abs().argmax()",
        "max(range(len(bias)), key=lambda k: abs(bias[k].item()))",
    ),
    (INVERT, "the other way round", "(a - b)", "(b - a)"),
    (INVERT, "a power", ".square().sum()", ".pow(2).sum()"),
    (
        NOISE,
        "a power",
        "torch.randn(mean.shape, generator=draw)",
        "torch.randn(mean.numel(), generator=draw)",
    ),
    (
        MASK,
        "subtracts from the other side",
        "hidden + mask if me < other else hidden - mask",
        "hidden - mask if me > other else hidden + mask",
    ),
]

#: Made for what the check asked first: other types, lengths and groups are asked, too.
CHANGES += [
    (
        "12.4",
        "is made for one length",
        "new = weights.clone()",
        "new = weights[:6].clone()",
        "must match the size",
    ),
    (
        "12.5",
        "is made for one length",
        "torch.empty(1 + weights.numel())",
        "torch.empty(20_001)",
        "what a round needs",
    ),
    (
        "12.5",
        "cuts off what is behind the point",
        "dist.isend(weights, dst=there, tag=tag)",
        "dist.isend(weights.int().float(), dst=there, tag=tag)",
        "got other weights than the argument",
    ),
    (
        "12.7",
        "is made for one length",
        "net(guess), label",
        "net(guess.reshape(1, 1, 5, 5)), label",
        "is invalid for input",
    ),
    (
        "12.7",
        "knows how many parameters there are",
        "list(net.parameters())",
        "list(net.parameters())[:4]",
        "expected",
    ),
    (
        "12.8",
        "cuts off what is behind the point",
        "bound / max(delta",
        "int(bound) / max(delta",
        "bound 0.75",
    ),
    (
        "12.8",
        "is made for one length",
        "torch.randn(mean.shape",
        "torch.randn(40_000 if len(mean) > 6 else 6",
        "must match the size",
    ),
    ("12.9", "is made for one length", "delta.numel()", "20_000", "must match the size"),
]
