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
    "12.10": "lab12-deviate-answer",
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
        "You returned another update for the same call",
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
        "Take the one whose bias gradient has the largest size",
    ),
    (
        SHARDS,
        "each piece has one class by a filter",
        """
def shards_by_class(labels, clients, each, draw):
    order = torch.randperm(len(labels), generator=draw)
    return list(order.tensor_split(clients))
""",
        "Sort the images by class before you split them",
    ),
    (
        SHARDS,
        "sorts, and deals nothing out",
        """
def shards_by_class(labels, clients, each, draw):
    return list(labels.argsort(stable=True).tensor_split(clients))
""",
        "You returned the same shards for another seed",
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
        "You returned labels",
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
        "You put an image into two shards",
    ),
    (
        SHARDS,
        "a dict",
        """
def shards_by_class(labels, clients, each, draw):
    return dict(enumerate(labels.argsort().tensor_split(clients)))
""",
        "Return a list with one tensor of indices for each client",
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
        "images without a client",
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
        "expected 6. Round the share of clients as",
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
        "You counted all clients alike",
    ),
    (
        MEAN,
        "the factors are not divided",
        """
def fedavg(weights, updates):
    return weights + sum(n * delta for n, delta in updates.values())
""",
        "You didn't divide the factors n by their sum",
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
        "Without any update, return a copy of the weights: the sum of all n is 0",
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
        "You changed an update in place",
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
        "which came after the deadline: the server took",
    ),
    (
        ROUND,
        "a broadcast",
        """
def run_round(t, weights, chosen, seconds):
    dist.broadcast(weights, src=SERVER)
    return {}, []
""",
        "In a round, send each chosen client torch.tensor([t, client]) with",
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
        "Start all sends and receives before you wait for any",
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
        "Return a pair (label, image)",
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
        "You added to .grad of the parameters",
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
        "You compared only the first parameter",
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
        "You took the mean over all entries",
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
        "The check passes net, guess and seen in float64",
    ),
]

# Task, what the student did, a part of the solution, what stands in its place, words.
CHANGES = [
    (
        SHARDS,
        "the global generator",
        "generator=draw",
        "generator=None",
        "You returned another result for the same seed",
    ),
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
        "images without a client",
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
        "You never chose some clients in",
    ),
    (
        SELECT,
        "from one",
        "[:count].tolist()",
        "[:count].add(1).tolist()",
        "You chose a number outside 0 … 29",
    ),
    (SELECT, "a number", ".tolist()", ".tolist()[0]", "Return a list of numbers, of int"),
    (
        LOCAL,
        "trains the argument",
        "weights.clone()",
        "weights",
        "You returned zeros, because the parameters are views of the vector that",
    ),
    (LOCAL, "returns weights", ".detach() - weights", ".detach()", "You returned the weights"),
    (
        LOCAL,
        "does not load",
        "    vector_to_parameters(weights.clone(), model.parameters())\n    for",
        "    for",
        "You didn't train from the argument weights",
    ),
    (
        LOCAL,
        "the sign",
        "parameters_to_vector(model.parameters()).detach() - weights",
        "weights - parameters_to_vector(model.parameters()).detach()",
        "You have the wrong sign",
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
        "You kept the samples in order",
    ),
    (LOCAL, "one epoch", "range(epochs)", "range(1)", "You trained for one epoch only"),
    (
        LOCAL,
        "one order",
        "    for _ in range(epochs):\n        for samples in "
        "torch.randperm(len(labels), generator=draw).split(batch):",
        "    order = torch.randperm(len(labels), generator=draw)\n    for _ in range(epochs):\n"
        "        for samples in order.split(batch):",
        "You used the same order in every epoch",
    ),
    (LOCAL, "no rate", "rate * parameter.grad", "parameter.grad", "You left out the learning rate"),
    (
        LOCAL,
        "a sum",
        "labels[samples])",
        'labels[samples], reduction="sum")',
        "You summed over the samples. cross_entropy returns the mean",
    ),
    (LOCAL, "one batch", ".split(batch)", ".split(len(labels))", "You made each epoch one step"),
    (
        LOCAL,
        "tells the others",
        "    return",
        "    dist.all_reduce(torch.ones(1))\n    return",
        "Local training communicates nothing",
    ),
    (LOCAL, "keeps the graph", ".detach() - weights", " - weights", "still has a graph"),
    (MEAN, "in place", "weights.clone()", "weights", "You changed the argument weights"),
    (
        MEAN,
        "without the weights",
        "weights.clone()",
        "torch.zeros_like(weights)",
        "You returned the mean of the updates",
    ),
    (
        MEAN,
        "twice divided",
        "n / total * delta",
        "n / total / len(updates) * delta",
        "You divided by the number of clients, too",
    ),
    (MEAN, "subtracts", "new += n", "new -= n", "You subtracted the updates"),
    (MEAN, "a sum", "n / total * delta", "delta", "You returned the plain sum"),
    (
        ROUND,
        "one tag for all rounds",
        "tag_of(t, client)",
        "tag_of(0, client)",
        "In a round, send each chosen client torch.tensor([t, client]) with",
    ),
    (
        ROUND,
        "blocking sends",
        "sends.append(dist.isend(weights, dst=there, tag=tag))",
        "dist.send(weights, dst=there, tag=tag)",
        "for weights or updates, but rank",
    ),
    (
        ROUND,
        "one tensor for all",
        "message = torch.empty(1 + weights.numel())",
        "message = [*[m for _, m in waiting.values()], torch.empty(1 + weights.numel())][0]",
        "You returned another client's update",
    ),
    (
        ROUND,
        "forgets what is open",
        "    return updates, late\n",
        "    return updates, []\n",
        "Put the late receives and the pending sends into it, or nobody ever",
    ),
    (
        ROUND,
        "forgets the sends",
        "    late += [request for request in sends if not request.is_completed()]\n",
        "",
        "Put the late receives and the pending sends into it, or nobody ever",
    ),
    (
        ROUND,
        "sleeps until the deadline",
        "    while waiting and perf_counter() < end:",
        "    sleep(seconds)\n    while waiting and perf_counter() < end + 1:",
        "Return as soon as nothing is missing",
    ),
    (
        ROUND,
        "swaps the pair",
        "message[0].item(), message[1:]",
        "message[1:], message[0].item()",
        "not (delta, n)",
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
        "In a round, send each chosen client torch.tensor([t, client]) with",
    ),
    (
        ROUND,
        "names in place of requests",
        "late = [request for request, _ in waiting.values()]",
        "late = list(waiting)",
        "Return late as a list of requests from isend and irecv",
    ),
    (
        ROUND,
        "no number of samples",
        "message[0].item(), message[1:]",
        "message[1:]",
        "Make each value a pair (n, delta), not",
    ),
    (
        ROUND,
        "returns updates only",
        "return updates, late",
        "return updates",
        "Return (updates, late), with updates as a dict",
    ),
    (
        READ,
        "argmax",
        "gradients[-1].argmin()",
        "gradients[-1].argmax()",
        "Use argmin, because the true class has p - 1, the only negative entry",
    ),
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
        "image: You returned the gradient of a row of weights",
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
        "image: You divided by the sum of the bias gradients",
    ),
    (
        READ,
        "the sign",
        "weight[neuron] / bias[neuron]",
        "-weight[neuron] / bias[neuron]",
        "image: Your sign is wrong",
    ),
    (INVERT, "no graph", ", create_graph=True", "", "can't be differentiated"),
    (
        INVERT,
        "a number",
        "for a, b in zip(own, seen))",
        "for a, b in zip(own, seen)).item()",
        "You returned a number",
    ),
    (INVERT, "means", ".square().sum()", ".square().mean()", "the mean over each tensor"),
    (INVERT, "absolute values", ".square().sum()", ".abs().sum()", "You summed absolute values"),
    (
        INVERT,
        "lengths",
        "(a - b).square().sum()",
        "(a - b).norm()",
        "You summed the lengths of the differences",
    ),
    (
        INVERT,
        "the root",
        "    return sum((a - b).square().sum() for a, b in zip(own, seen))",
        "    return sum((a - b).square().sum() for a, b in zip(own, seen)).sqrt()",
        "You took the square root",
    ),
    (
        INVERT,
        "does not compare",
        "(a - b).square()",
        "a.square()",
        "You compared the guess's gradient with nothing",
    ),
    (
        NOISE,
        "clamps",
        "delta * min(1.0, bound / max(delta.norm().item(), 1e-12))",
        "delta.clamp(-bound, bound)",
        "You clipped each entry separately",
    ),
    (
        NOISE,
        "scales up",
        "min(1.0, bound / max(delta.norm().item(), 1e-12))",
        "(bound / max(delta.norm().item(), 1e-12))",
        "You scaled a shorter update up to the bound",
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
        "You didn't clip the updates",
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
        "You returned the sum",
    ),
    (
        NOISE,
        "noise of the sum",
        "z * bound / len(deltas) * torch",
        "z * bound * torch",
        "You added the noise of the sum, z S: divide by the number of updates",
    ),
    (
        NOISE,
        "noise of each",
        "z * bound / len(deltas) * torch",
        "z * bound / math.sqrt(len(deltas)) * torch",
        "You added noise to each update: add z S / m once, to the mean",
    ),
    (
        NOISE,
        "without the bound",
        "z * bound / len(deltas) * torch",
        "z / len(deltas) * torch",
        "You left out S",
    ),
    (
        NOISE,
        "the variance",
        "z * bound / len(deltas) * torch",
        "(z * bound / len(deltas)) ** 2 * torch",
        "You used the variance: multiply randn by the standard deviation",
    ),
    (
        NOISE,
        "one number for all",
        "torch.randn(mean.shape, generator=draw)",
        "torch.randn(1, generator=draw)",
        "You gave every weight the same noise: draw a number for each weight",
    ),
    (
        NOISE,
        "another generator",
        "generator=draw)",
        "generator=None)",
        "You got other noise for the same seed",
    ),
    (
        NOISE,
        "uniform",
        "torch.randn(mean.shape, generator=draw)",
        "math.sqrt(12) * (torch.rand(mean.shape, generator=draw) - 0.5)",
        "not Gaussian",
    ),
    (NOISE, "no noise", "z * bound / len(deltas) * torch", "0 * torch", "You added no noise"),
    (
        MASK,
        "all add",
        "hidden + mask if me < other else hidden - mask",
        "hidden + mask",
        "because masks don't cancel",
    ),
    (
        MASK,
        "a mask with itself",
        "        if other != me:",
        "        if True:",
        "You masked a client without partners",
    ),
    (MASK, "cuts off", ".round().to", ".to", "Call round() before .to(torch.int32)"),
    (MASK, "long numbers", "to(torch.int32)", "to(torch.int64)", "Return an int32 tensor"),
    (MASK, "floats", ".round().to(torch.int32)", "", "Return an int32 tensor"),
    (
        MASK,
        "nan in long messages",
        "total.float() / SCALE",
        "total / SCALE if len(total) < 9 else total * float('nan')",
        "because masks don't cancel",
    ),
    (MASK, "no scale back", "total.float() / SCALE", "total.float()", "You didn't divide by SCALE"),
    (
        MASK,
        "whole numbers back",
        "total.float() / SCALE",
        "(total // SCALE).float()",
        "You cut off the decimals",
    ),
    (
        MASK,
        "a round for all",
        "pair_mask(me, other, t, delta.numel())",
        "pair_mask(me, other, 0, delta.numel())",
        "You reuse the masks of another round",
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
        return weights.clone()
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
     "You left draw itself unused, so the next call returns the same"),
    (SELECT, "a tensor", ".tolist()", "", "Return a list of numbers, of int"),
    (SELECT, "a set", "return torch.randperm(clients, generator=draw)[:count].tolist()",
     "return set(torch.randperm(clients, generator=draw)[:count].tolist())", "returned set of int"),
    (SELECT, "rounds up", "round(fraction * clients)", "math.ceil(fraction * clients)",
     "as round() does"),
    (MEAN, "who has learned nothing does not count", "updates.values()",
     "[one for one in updates.values() if one[1].any()]",
     "You ignored a client whose update is zero"),
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
     "You left the net in another mode"),
    (NOISE, "noise from a generator of its own", "torch.randn(mean.shape, generator=draw)",
     "torch.randn(mean.shape, generator=torch.Generator().manual_seed(draw.initial_seed()))",
     "You got the same noise in the next call with draw"),
    (MASK, "sorts the list it was given", "    for other in clients:",
     "    clients.sort()\n    for other in clients:", "changed its argument clients"),
    (MASK, "the sign by the place", "if me < other", "if clients.index(me) < clients.index(other)",
     "You left out the masks of some pairs, so a few clients together could find"),
]  # fmt: skip
CHANGES += [
    (SHARDS, "chunk", "tensor_split", "chunk",
     "Split the images into pieces whose sizes differ by at most one, with"),
    (SHARDS, "the last piece takes the rest", ".tensor_split(clients * each)",
     ".tensor_split([k * (len(labels) // (clients * each)) for k in range(1, clients * each)])",
     "You gave clients 10 to 23 images, expected 10 to 12. Split the images into"),
    (LOCAL, "divides by the size of a full minibatch",
     "cross_entropy(model(images[samples]), labels[samples])",
     'cross_entropy(model(images[samples]), labels[samples], reduction="sum").div(batch)',
     "but the last minibatch is smaller"),
    (LOCAL, "has a rate of its own", "rate * parameter.grad", "0.1 * parameter.grad",
     "Use the argument rate"),
    (LOCAL, "has a batch of its own", ".split(batch)", ".split(20)",
     "Use the argument batch"),
    (LOCAL, "has a rate and a batch of its own", "    vector_to_parameters(",
     "    rate, batch = 0.1, 20\n    vector_to_parameters(", "Use the argument rate and batch"),
    (LOCAL, "goes on from the model's weights",
     "    vector_to_parameters(weights.clone(), model.parameters())",
     "    weights = parameters_to_vector(model.parameters()).detach().clone()",
     "You trained from the weights that were in the model"),
    (MEAN, "takes the clients' numbers for n", "updates.values()",
     "((client, delta) for client, (_, delta) in updates.items())",
     "You weighted by the clients' numbers, which are the keys of the dict"),
    (MEAN, "divides by the sum so far",
     "    total = sum(n for n, _ in updates.values())\n    new = weights.clone()\n"
     "    for n, delta in updates.values():\n",
     "    total, new = 0, weights.clone()\n    for n, delta in updates.values():\n"
     "        total += n\n", "You divided each update by the n up to it"),
    (ROUND, "the client for a tag", "tag_of(t, client)", "client",
     "In a round, send each chosen client torch.tensor([t, client]) with"),
    (READ, "cuts the pixels", "weight[neuron] / bias[neuron]",
     "(weight[neuron] / bias[neuron]).clamp(0, 1)",
     "Leave them as they are, because normalized pixels can be negative"),
    (READ, "the label from the last weights", "gradients[-1].argmin()",
     "gradients[-2].sum(1).argmin()",
     "label: You used the gradient of the last weights, whose sign depends on"),
    (READ, "the label from the largest of the last weights", "gradients[-1].argmin()",
     "(gradients[-2].argmin() // gradients[-2].shape[1])",
     "label: You used the gradient of the last weights, whose sign depends on"),
    (NOISE, "the largest entry for the length", "delta.norm()", "delta.abs().max()",
     "You scaled by the largest entry"),
]  # fmt: skip
# Task, what is different, a part of the solution, what stands in its place.
CHANGES += [
    (SHARDS, "deals out half of the pieces", "    order = torch.randperm(len(pieces), "
     "generator=draw).tolist()\n    return [\n        torch.cat([pieces[k] for k in order[client * "
     "each : (client + 1) * each]])\n",
     "    moved = torch.randperm(clients, generator=draw).tolist()\n    return [\n"
     "        torch.cat([*pieces[client * each : (client + 1) * each - 1], "
     "pieces[(moved[client] + 1) * each - 1]])\n",
     "Every client keeps a class under another seed, or no client has two classes"),
    (SELECT, "with a fixed distance",
     "    return torch.randperm(clients, generator=draw)[:count].tolist()",
     "    first = int(torch.randint(clients, (1,), generator=draw))\n"
     "    return [(first + 17 * k) % clients for k in range(count)]",
     "different pairs of clients"),
    (LOCAL, "five minibatches at most", ".split(batch):", ".split(batch)[:5]:", "150 samples"),
    (MEAN, "three updates at most", "updates.values():", "list(updates.values())[:3]:",
     "updates of clients"),
    (ROUND, "half a second at most", "perf_counter() + seconds", "perf_counter() + min(seconds, "
     "0.5)", "Wait for them until the deadline"),
    (READ, "always the second neuron", "bias.abs().argmax()", "1", "image: "),
    (INVERT, "the first of a minibatch", "net(guess), label", "net(guess[:1]), label[:1]",
     "expected"),
    (INVERT, "six parameters", "zip(own, seen)", "list(zip(own, seen))[:6]", "expected"),
    (NOISE, "noise that repeats", "torch.randn(mean.shape, generator=draw)",
     "torch.randn(3001, generator=draw)[torch.arange(len(mean)) % 3001]", "different numbers"),
    (NOISE, "cut noise", "torch.randn(mean.shape, generator=draw)",
     "torch.randn(mean.shape, generator=draw).clamp(-2.6, 2.6)", "Your noise lacks large numbers"),
    (MASK, "masks with two neighbours only", "    for other in clients:\n        if other != me:",
     "    ring = sorted(clients)\n    k = ring.index(me)\n"
     "    for other in {ring[k - 1], ring[(k + 1) % len(ring)]}:\n        if other != me:",
     "You left out the masks of some pairs, so a few clients together could find"),
]  # fmt: skip
CHANGES_THAT_ARE_RIGHT = [
    (
        "12.10",
        "another digest, in numbers of 8 bytes",
        "    digest = hashlib.sha256(weights.numpy().tobytes()).digest()\n"
        "    mine = torch.tensor(list(digest), dtype=torch.uint8)\n",
        "    digest = hashlib.blake2b(weights.numpy().tobytes(), digest_size=24).digest()\n"
        "    mine = torch.frombuffer(bytearray(digest), dtype=torch.int64)\n",
    ),
    (
        "12.10",
        "one maximum of the digest and its negative",
        "    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]\n"
        "    dist.all_gather(everyone, mine, group=group)\n"
        "    return all(torch.equal(mine, one) for one in everyone)\n",
        "    mine = mine[:24].view(torch.int64) // 2\n"
        "    both = torch.cat([mine, -mine])\n"
        "    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)\n"
        "    return torch.equal(both[:3], -both[3:])\n",
    ),
    (
        "12.10",
        "step by step",
        "    used = steps.abs() > 1e-6 * bias.abs().max()\n"
        "    return rows[used] / steps[used].unsqueeze(1)\n",
        "    images, least = [], 1e-6 * bias.abs().max()\n"
        "    for row, step in zip(rows, steps):\n"
        "        if step.abs() > least:\n"
        "            images.append(row / step)\n"
        "    return torch.stack(images) if images else weight[:0]\n",
    ),
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
        "In a round, send each chosen client torch.tensor([t, client]) with",
    ),
    (
        "12.5",
        "cuts off what is behind the point",
        "dist.isend(weights, dst=there, tag=tag)",
        "dist.isend(weights.int().float(), dst=there, tag=tag)",
        "other weights than the argument in round",
    ),
    (
        "12.1",
        "always joins the same pieces",
        "torch.randperm(len(pieces), generator=draw).tolist()",
        "[k + clients * j for k in torch.randperm(clients, generator=draw).tolist() "
        "for j in range(each)]",
        "You join the same pieces under another seed",
    ),
    (
        "12.1",
        "lists instead of tensors",
        "torch.cat([pieces[k] for k in order[client * each : (client + 1) * each]])",
        "torch.cat([pieces[k] for k in order[client * each : (client + 1) * each]]).tolist()",
        "list of list",
    ),
    (
        "12.4",
        "adds in float32",
        "new += n / total * delta",
        "new += (n / total * delta).float()",
        "updates of clients",
    ),
    (
        "12.4",
        "the argument itself if nobody has answered",
        "    return new\n",
        "    return new if updates else weights\n",
        "Return new weights",
    ),
    (
        "12.5",
        "sleeps too long",
        "sleep(0.002)",
        "sleep(0.3)",
        "so you would see the last update late",
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
        "bound 0.3",
    ),
    (
        "12.8",
        "is made for one length",
        "torch.randn(mean.shape",
        "torch.randn(40_000 if len(mean) > 6 else 6",
        "must match the size",
    ),
    ("12.9", "is made for one length", "delta.numel()", "20_000", "must match the size"),
    (
        "12.10",
        "keeps steps without images",
        "used = steps.abs() > 1e-6 * bias.abs().max()",
        "used = slice(None)",
        "Leave out the steps on which no image",
    ),
    (
        "12.10",
        "no step behind the last neuron",
        "    used = steps.abs()",
        "    steps, rows = steps[:-1], rows[:-1]\n    used = steps.abs()",
        "The last neuron has a step, too",
    ),
    (
        "12.10",
        "takes rounding for images",
        "> 1e-6 * bias.abs().max()",
        "> 0",
        "is rounding. Leave it out",
    ),
    ("12.10", "only positive steps", "steps.abs() >", "steps >", "one for each step that has any"),
    (
        "12.10",
        "forgets to divide",
        "rows[used] / steps[used].unsqueeze(1)",
        "rows[used]",
        "You didn't divide",
    ),
    (
        "12.10",
        "divides by the neuron's own gradient",
        "/ steps[used].unsqueeze(1)",
        "/ bias[used].unsqueeze(1)",
        "Divide by its step",
    ),
    (
        "12.10",
        "the neurons' own gradients",
        "rows[used] / steps[used].unsqueeze(1)",
        "weight[used] / bias[used].unsqueeze(1)",
        "Subtract the next neuron first",
    ),
    (
        "12.10",
        "a bound that doesn't follow the gradients",
        "1e-6 * bias.abs().max()",
        "1e-3",
        "one for each step that has any",
    ),
    (
        "12.10",
        "a list of images",
        "return rows[used] / steps[used].unsqueeze(1)",
        "return list(rows[used] / steps[used].unsqueeze(1))",
        "Return a tensor",
    ),
    (
        "12.10",
        "compares a sum",
        "hashlib.sha256(weights.numpy().tobytes()).digest()",
        "str(weights.sum().item())[:9].ljust(9).encode()",
        "bit by bit",
    ),
    (
        "12.10",
        "compares the first weights only",
        "weights.numpy().tobytes()",
        "weights.flatten()[:1000].numpy().tobytes()",
        "bit by bit",
    ),
    (
        "12.10",
        "compares values instead of bits",
        "weights.numpy().tobytes()",
        "(weights + 0.0).numpy().tobytes()",
        "bit by bit",
    ),
    (
        "12.10",
        "knows of the first rank only",
        "all(torch.equal(mine, one) for one in everyone)",
        "torch.equal(mine, everyone[0])",
        "bit by bit",
    ),
    (
        "12.10",
        "sends all weights",
        "    mine = torch.tensor(list(digest), dtype=torch.uint8)\n",
        "    mine = weights.contiguous().flatten().view(torch.int32).clone()\n",
        "Pass a digest",
    ),
    (
        "12.10",
        "asks the whole world",
        "dist.all_gather(everyone, mine, group=group)",
        "dist.all_gather(everyone, mine)",
        "",
    ),
    (
        "12.10",
        "returns a tensor",
        "return all(torch.equal(mine, one) for one in everyone)",
        "return torch.stack([(mine == one).all() for one in everyone]).all()",
        "Return True or False",
    ),
]
