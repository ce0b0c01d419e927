"""Answers to lab 08, wrong ones and right ones, that students really give."""

from __future__ import annotations

from lab_tools import answers

NOTEBOOK = "08_elastic_averaging.ipynb"
CELLS = {
    "8.1": "lab08-spring-answer",
    "8.2": "lab08-robin-answer",
    "8.3": "lab08-async-answer",
    "8.4": "lab08-momentum-answer",
    "8.5": "lab08-local-answer",
    "8.6": "lab08-outer-answer",
}
# Those that real ranks are tried with, besides the first of each task: who waits for whom.
ON_RANKS = {"asks in turns without blocking", "counts workers from zero", "answers in the world"}
BEFORE = """
import torch
import torch.distributed as dist
from torch_mpi.record import log

if dist.is_initialized():
    dist.destroy_process_group()
dist.init_process_group("mpi")
rank = dist.get_rank()
"""
WORKER = "return w - eta * (gradient + rho * (w - center))"
CENTER = "return center + eta * rho * (w - center)"

# task, what the student did, a part of the solution, what comes in its place, words of the message;
# None in its place: the whole answer, or one function of it; the others are those of the solution.
_CHANGES = [
    ("8.1", "centre from the new w", CENTER,
     "return center + eta * rho * (w - eta * (3.0 + rho * (w - center)) - center)",
     "You used the worker's new weights"),
    ("8.1", "a number for one weight", WORKER,
     "return (w - eta * (gradient + rho * (w - center))).squeeze()",
     "You returned a single number"),
    ("8.1", "a number for one weight of the centre", CENTER,
     "return (center + eta * rho * (w - center)).squeeze()",
     "You returned a single number"),
    ("8.1", "worker from the new centre", WORKER,
     "return w - eta * (gradient + rho * (w - move_center(center, w, eta, rho)))",
     "You used the center after it had moved"),
    ("8.1", "pushes the centre away", CENTER, "return center - eta * rho * (w - center)",
     "The center moves away from the worker"),
    ("8.1", "pushes the worker away", WORKER, "return w - eta * (gradient - rho * (w - center))",
     "The pull has the wrong sign and drives the worker away from the center"),
    ("8.1", "turns the distance round", WORKER, "return w - eta * (gradient + rho * (center - w))",
     "The pull has the wrong sign and drives the worker away from the center"),
    ("8.1", "rho without eta in the worker", WORKER,
     "return w - eta * gradient - rho * (w - center)",
     "You didn't multiply ρ(W − W̄) by η. Put both terms into the bracket"),
    ("8.1", "rho without eta in the centre", CENTER, "return center + rho * (w - center)",
     "You didn't multiply ρ(W − W̄) by η"),
    ("8.1", "eta twice in the worker", WORKER,
     "return w - eta * (gradient + eta * rho * (w - center))",
     "You multiplied the pull by η twice. Use α = ηρ"),
    ("8.1", "eta twice in the centre", CENTER, "return center + eta * eta * rho * (w - center)",
     "You multiplied the pull by η twice. Use α = ηρ"),
    ("8.1", "does not pull the worker", WORKER, "return w - eta * gradient",
     "Nothing pulls the worker to the center"),
    ("8.1", "does not pull the centre", CENTER, "return center.clone()",
     "Nothing pulls the center"),
    ("8.1", "divides by the workers", CENTER, "return center + eta * rho * (w - center) / 3",
     "You divided by the number of workers"),
    ("8.1", "averages", CENTER, "return (w + center) / 2",
     "You returned the plain average of both"),
    ("8.1", "returns the change", CENTER, "return eta * rho * (w - center)",
     "You returned the change of the center"),
    ("8.1", "climbs", WORKER, "return w + eta * (gradient - rho * (w - center))",
     "The gradient has the wrong sign, so the worker climbs"),
    ("8.1", "forgets the gradient", WORKER, "return w - eta * rho * (w - center)",
     "The gradient is missing, so only the spring acts"),
    ("8.1", "works in place", WORKER, "w -= eta * (gradient + rho * (w - center))\n    return w",
     "Return a new tensor, and leave arguments as they are"),
    ("8.1", "moves the centre in place", CENTER,
     "center += eta * rho * (w - center)\n    return center", "You changed center"),
    ("8.1", "returns nothing", WORKER, WORKER[7:], "You returned None. Return the new weights"),
    ("8.1", "centre descends", CENTER, "return center - eta * 3.0 + eta * rho * (w - center)",
     "You moved the center along the gradient, too"),
    ("8.1", "takes a mean of numbers", WORKER,
     WORKER.replace("(w - center)", "(w - center).mean()"),
     "Without a gradient, W + W̄ must stay, because the spring pulls both"),
    ("8.1", "a number for alpha", CENTER, "return center + 0.2 * (w - center)",
     "Without a gradient, W + W̄ must stay, because the spring pulls both"),
    ("8.1", "numbers for both rates", """
        def move_worker(w, center, gradient, eta, rho):
            return w - 0.1 * (gradient + 2.0 * (w - center))

        def move_center(center, w, eta, rho):
            return center + 0.2 * (w - center)
        """, None, "move_worker, random weights"),
    ("8.1", "rho for both ends", """
        def move_worker(w, center, gradient, eta, rho):
            return w - eta * gradient - rho * (w - center)

        def move_center(center, w, eta, rho):
            return center + rho * (w - center)
        """, None, "You didn't multiply ρ(W − W̄) by η. Put both terms into the bracket"),

    ("8.2", "sends the new weights", """
        def round_robin(w, gradient, steps, eta, rho, note, group=None):
            place, count = dist.get_rank(group), dist.get_world_size(group) - 1
            other = torch.empty_like(w)
            for t in range(steps):
                j = 1 + t % count
                if place == 0:
                    dist.send(w, group_dst=j, group=group)
                    dist.recv(other, group_src=j, group=group)
                    w = move_center(w, other, eta, rho)
                    note(w)
                elif place == j:
                    dist.recv(other, group_src=0, group=group)
                    w = move_worker(w, other, gradient(w), eta, rho)
                    dist.send(w, group_dst=0, group=group)
                    note(w)
            return w
        """, None, "Send the old ones, because line"),
    ("8.2", "counts workers from zero", "j = 1 + t % count", "j = t % count",
     "only the master at place 0 and the worker at place 1 + t mod G take part"),
    ("8.2", "t from one", "j = 1 + t % count", "j = 1 + (t + 1) % count",
     "expected 1, 2, 3, 1, 2, 3"),
    ("8.2", "workers from the last", "j = 1 + t % count", "j = count - t % count",
     "Exchange one message each way in the turn of the worker at place"),
    ("8.2", "counts the master as a worker", "dist.get_world_size(group) - 1",
     "dist.get_world_size(group)", "and the worker at place 1 + t mod G take part"),
    ("8.2", "hard-codes three workers", "dist.get_world_size(group) - 1", "3",
     "rank"),
    ("8.2", "sends before it computes", """
        def round_robin(w, gradient, steps, eta, rho, note, group=None):
            place, count = dist.get_rank(group), dist.get_world_size(group) - 1
            other = torch.empty_like(w)
            for t in range(steps):
                j = 1 + t % count
                if place == 0:
                    dist.send(w, group_dst=j, group=group)
                    dist.recv(other, group_src=j, group=group)
                    w = move_center(w, other, eta, rho)
                    note(w)
                elif place == j:
                    dist.recv(other, group_src=0, group=group)
                    dist.send(w, group_dst=0, group=group)
                    w = move_worker(w, other, gradient(w), eta, rho)
                    note(w)
            return w
        """, None, "line 12 comes after line 11"),
    ("8.2", "computes before the centre comes",
     "            dist.recv(other, group_src=0, group=group)\n            slope = gradient(w)",
     "            slope = gradient(w)\n            dist.recv(other, group_src=0, group=group)",
     "You computed the gradient before the center had come"),
    ("8.2", "computes at the centre", "slope = gradient(w)", "slope = gradient(other)",
     "computes it at the worker's own weights, W^j"),
    ("8.2", "works in every step", "elif place == j:", "else:",
     "and the worker at place 1 + t mod G take part"),
    ("8.2", "takes over the centre", "w = move_worker(w, other, slope, eta, rho)",
     "w = other + eta * rho * (w - other)", "The worker continues with the center's weights"),
    ("8.2", "does not note", "            w = move_center(w, other, eta, rho)  # line 14\n"
     "            note(w)", "            w = move_center(w, other, eta, rho)",
     "once after each update of the center"),
    ("8.2", "notes too early", "            w = move_center(w, other, eta, rho)  # line 14\n"
     "            note(w)", "            note(w)\n            w = move_center(w, other, eta, rho)",
     "You called note(…) before the weights changed"),
    ("8.2", "returns nothing", "    return w", "    pass", "You returned None. Return the weights"),
    ("8.2", "moves in place", "w = move_center(w, other, eta, rho)",
     "w += eta * rho * (other - w)",
     "You changed the given tensor w, so the next run would begin somewhere"),
    ("8.2", "ignores the group", "dist.send(w, group_dst=j, group=group)", "dist.send(w, dst=j)",
     "If it works without a group, pass group=group to every call"),
    ("8.2", "a place for a rank", "group_dst=0, group=group)", "dst=0, group=group)",
     "group_dst"),
    ("8.2", "broadcasts the centre", """
        def round_robin(w, gradient, steps, eta, rho, note, group=None):
            place, count = dist.get_rank(group), dist.get_world_size(group) - 1
            center, local = w.clone(), w.clone()
            for t in range(steps):
                j = 1 + t % count
                shared = center.clone()
                dist.broadcast(shared, group_src=0, group=group)
                if place == j:
                    slope = gradient(local)
                    dist.send(local, group_dst=0, group=group)
                    local = move_worker(local, shared, slope, eta, rho)
                    note(local)
                elif place == 0:
                    dist.recv(shared, group_src=j, group=group)
                    center = move_center(center, shared, eta, rho)
                    note(center)
            return center if place == 0 else local
        """, None, "You call broadcast. Use only send and recv here"),
    ("8.2", "does not wait", "dist.send(w, group_dst=0, group=group)",
     "dist.isend(w, group_dst=0, group=group)", "You never call wait()"),
    ("8.2", "the master returns the worker", "    return w",
     "    return other if place == 0 else w", "the result"),
    ("8.2", "a buffer of its own kind", "torch.empty_like(w)", "torch.empty(w.shape)",
     "float32"),
    ("8.2", "one round too few", "for t in range(steps)", "for t in range(steps - 1)",
     "Exchange one message each way in the turn of the worker at place"),

    ("8.3", "serves in turns", """
        def serve(center, exchanges, eta, rho, note, group=None):
            w = torch.empty_like(center)
            count = dist.get_world_size(group) - 1
            for t in range(exchanges):
                j = 1 + t % count
                dist.recv(w, group_src=j, group=group)
                dist.send(center, group_dst=j, group=group)
                center = move_center(center, w, eta, rho)
                note(center)
            return center
        """, None, "Leave out the source: who = dist.recv(w, group=group) takes what comes"),
    ("8.3", "asks in turns without blocking", """
        def serve(center, exchanges, eta, rho, note, group=None):
            w = torch.empty_like(center)
            count = dist.get_world_size(group) - 1
            for t in range(exchanges):
                j = 1 + t % count
                dist.irecv(w, group_src=j, group=group).wait()
                dist.send(center, group_dst=j, group=group)
                center = move_center(center, w, eta, rho)
                note(center)
            return center
        """, None, "Let the master take what comes first, by dist.recv without a source"),
    ("8.3", "answers with the moved centre",
     "        dist.send(center, dst=who, group=group)  # before it moves\n"
     "        center = move_center(center, w, eta, rho)\n",
     "        center = move_center(center, w, eta, rho)\n"
     "        dist.send(center, dst=who, group=group)\n",
     "You pulled to a center that this worker has already moved"),
    ("8.3", "answers the wrong worker", "dist.send(center, dst=who, group=group)",
     "dist.send(center, group_dst=1, group=group)", "rank"),
    ("8.3", "exchanges in every step", "if k % tau == 0:", "if True:", "exchanges of each worker"),
    ("8.3", "exchanges at the end", "if k % tau == 0:", "if k % tau == tau - 1:",
     "The exchange comes in the last of τ steps"),
    ("8.3", "leaves out step 0", "if k % tau == 0:", "if k and k % tau == 0:",
     "exchanges of each worker"),
    ("8.3", "pulls in every step", """
        def work(w, gradient, steps, tau, eta, rho, note, group=None):
            center = torch.empty_like(w)
            for k in range(steps):
                slope = gradient(w)
                if k % tau == 0:
                    dist.send(w, group_dst=0, group=group)
                    dist.recv(center, group_src=0, group=group)
                w = move_worker(w, center, slope, eta, rho)
                note(w)
            return w
        """, None, "Only descend between two exchanges"),
    ("8.3", "sends after its step", """
        def work(w, gradient, steps, tau, eta, rho, note, group=None):
            center = torch.empty_like(w)
            for k in range(steps):
                old, slope = w, gradient(w)
                w = w - eta * slope
                if k % tau == 0:
                    dist.send(w, group_dst=0, group=group)
                    dist.recv(center, group_src=0, group=group)
                    w = w - eta * rho * (old - center)
                note(w)
            return w
        """, None, "You send W after the worker's own step"),
    ("8.3", "forgets the gradient in an exchange", "move_worker(w, center, slope, eta, rho)",
     "move_worker(w, center, 0 * slope, eta, rho)",
     "The gradient is missing in the step with an exchange"),
    ("8.3", "does not pull", "w = move_worker(w, center, slope, eta, rho)", "w = w - eta * slope",
     "Nothing pulls the worker when it has the center"),
    ("8.3", "takes over the centre", "w = move_worker(w, center, slope, eta, rho)",
     "w = center - eta * gradient(center)", "computed"),
    ("8.3", "goes on from the centre", "slope = gradient(w)\n        if k % tau == 0:\n"
     "            dist.send(w, group_dst=0, group=group)\n"
     "            dist.recv(center, group_src=0, group=group)\n"
     "            w = move_worker(w, center, slope, eta, rho)",
     "if k % tau == 0:\n"
     "            dist.send(w, group_dst=0, group=group)\n"
     "            dist.recv(center, group_src=0, group=group)\n"
     "            w = center.clone()\n"
     "        slope = gradient(w)\n"
     "        if k % tau == 0:\n"
     "            w = w - eta * slope", "The worker takes over the center's weights"),
    ("8.3", "computes only with the master", """
        def work(w, gradient, steps, tau, eta, rho, note, group=None):
            center = torch.empty_like(w)
            for k in range(0, steps, tau):
                slope = gradient(w)
                dist.send(w, group_dst=0, group=group)
                dist.recv(center, group_src=0, group=group)
                w = move_worker(w, center, slope, eta, rho)
                note(w)
            return w
        """, None, "Compute gradient(w) once in each of"),
    ("8.3", "answers and moves on",
     "dist.send(center, dst=who, group=group)  # before it moves",
     "dist.isend(center, dst=who, group=group)", "You never call wait()"),
    ("8.3", "serves too few", "range(exchanges)", "range(exchanges - 1)", "rank"),
    ("8.3", "moves the centre in place", "center = move_center(center, w, eta, rho)",
     "center += eta * rho * (w - center)",
     "You changed the given tensor w, so the next run would begin somewhere"),
    ("8.3", "answers in the world", "dist.send(center, dst=who, group=group)",
     "dist.send(center, dst=who)", "If it works without a group, pass group=group to every call"),
    ("8.3", "reduces", """
        def serve(center, exchanges, eta, rho, note, group=None):
            for _ in range(exchanges // (dist.get_world_size(group) - 1)):
                total = torch.zeros_like(center)
                dist.all_reduce(total, group=group)
                center = center + total
                note(center)
            return center

        def work(w, gradient, steps, tau, eta, rho, note, group=None):
            center = w
            for k in range(steps):
                slope = gradient(w)
                if k % tau == 0:
                    total = eta * rho * (w - center)
                    w = move_worker(w, center, slope, eta, rho)
                    dist.all_reduce(total, group=group)
                    center = center + total
                else:
                    w = w - eta * slope
                note(w)
            return w
        """, None, "You call all_reduce. Use only send and recv here"),
    ("8.3", "the master notes nothing", "        note(center)\n", "", "Call note(…)"),
    ("8.3", "the worker notes exchanges only", "            w = w - eta * slope\n        note(w)",
     "            w = w - eta * slope\n            continue\n        note(w)",
     "once after each step of this worker"),
    ("8.3", "the master returns nothing", "    return center", "    pass",
     "You returned None. Return the weights"),

    ("8.4", "does not look ahead", "gradient(w + delta * v)", "gradient(w)",
     "Nesterov's momentum needs it ahead, at w + δv"),
    ("8.4", "looks ahead by all of v", "gradient(w + delta * v)", "gradient(w + v)",
     "You computed the gradient at w + v"),
    ("8.4", "the spring in v", "w = w + v - pull", "v = v - pull\n        w = w + v",
     "You put the spring into v, which keeps it for later steps"),
    ("8.4", "the spring from ahead", """
        def work_with_momentum(w, gradient, steps, tau, eta, rho, delta, note, group=None):
            center, v = torch.empty_like(w), torch.zeros_like(w)
            for k in range(steps):
                ahead, pull = w + delta * v, 0
                v = delta * v - eta * gradient(ahead)
                if k % tau == 0:
                    dist.send(w, group_dst=0, group=group)
                    dist.recv(center, group_src=0, group=group)
                    pull = eta * rho * (ahead - center)
                w = w + v - pull
                note(w)
            return w
        """, None, "You measured the spring from w + δv"),
    ("8.4", "forgets v", "v = delta * v - eta * gradient(w + delta * v)",
     "v = -eta * gradient(w)", "v begins at 0 in every step"),
    ("8.4", "does not damp", "v = delta * v - eta * gradient(w + delta * v)",
     "v = v - eta * gradient(w + delta * v)", "Multiply the old v by δ"),
    ("8.4", "does not pull", "w = w + v - pull", "w = w + v",
     "Nothing pulls the worker when it has the center"),
    ("8.4", "pulls in every step", "        pull = 0\n", "",
     "The pull of the last exchange acts in later steps, too"),
    ("8.4", "exchanges in every step", "if k % tau == 0:", "if True:", "exchanges of each worker"),
    ("8.4", "exchanges at the end", "if k % tau == 0:", "if (k + 1) % tau == 0:",
     "The exchange comes in the last of τ steps"),
    ("8.4", "sends ahead", """
        def work_with_momentum(w, gradient, steps, tau, eta, rho, delta, note, group=None):
            center, v = torch.empty_like(w), torch.zeros_like(w)
            for k in range(steps):
                ahead = w + delta * v
                v = delta * v - eta * gradient(ahead)
                if k % tau == 0:
                    dist.send(ahead, group_dst=0, group=group)
                    dist.recv(center, group_src=0, group=group)
                    w = w - eta * rho * (w - center)
                w = w + v
                note(w)
            return w
        """, None, "Send w to the master"),
    ("8.4", "climbs", "delta * v - eta * gradient", "delta * v + eta * gradient",
     "the worker climbs"),
    ("8.4", "notes nothing", "        note(w)\n", "", "Call note(…)"),
    ("8.4", "returns the velocity", "    return w", "    return v", "the result"),
    ("8.4", "two gradients", "v = delta * v - eta * gradient(w + delta * v)",
     "gradient(w)\n        v = delta * v - eta * gradient(w + delta * v)",
     "Compute gradient(w) once in each of"),
    ("8.4", "in place", "w = w + v - pull", "w += v - pull",
     "You changed the given tensor w, so the next run would begin somewhere"),
    ("8.4", "takes over the centre", "pull = eta * rho * (w - center)", "pull = w - center",
     "You pulled by the whole distance"),

    ("8.5", "sums", "            w = w / size\n", "", "You noted the sum over the ranks"),
    ("8.5", "hard-codes four ranks", "size = dist.get_world_size(group)", "size = 4",
     "divided by 4, the size of the world"),
    ("8.5", "forgets the rest", "if k % tau == 0 or k == steps:", "if k % tau == 0:",
     "and one at the end"),
    ("8.5", "averages in every step", "if k % tau == 0 or k == steps:", "if True:",
     "one after every τ steps"),
    ("8.5", "averages at first", "for k in range(1, steps + 1):\n        w = w - eta * gradient(w)",
     "for k in range(steps):\n        w = w - eta * gradient(w)",
     "averaged after the first of τ steps"),
    ("8.5", "averages gradients", """
        def local_sgd(w, gradient, steps, tau, eta, note, group=None):
            for k in range(1, steps + 1):
                slope = gradient(w)
                if k % tau == 0 or k == steps:
                    dist.all_reduce(slope, group=group)
                    slope = slope / dist.get_world_size(group)
                w = w - eta * slope
                if k % tau == 0 or k == steps:
                    note(w)
            return w
        """, None, "Call all_reduce on the weights, after the step"),
    ("8.5", "reduces a copy", "dist.all_reduce(w, group=group)\n            w = w / size",
     "dist.all_reduce(w.clone(), group=group)", "You noted this rank's own weights"),
    ("8.5", "goes on from its own",
     "            dist.all_reduce(w, group=group)\n            w = w / size\n            note(w)\n"
     "    return w",
     "            mean = w.clone()\n            dist.all_reduce(mean, group=group)\n"
     "            mean /= size\n            note(mean)\n    return mean",
     "You computed the mean, but the rank continues from its own weights"),
    ("8.5", "ignores the group", "dist.all_reduce(w, group=group)", "dist.all_reduce(w)",
     "Pass group=group"),
    ("8.5", "works in place", "w = w - eta * gradient(w)", "w -= eta * gradient(w)",
     "You changed the given tensor w, so the next run would begin somewhere"),
    ("8.5", "does not wait", "dist.all_reduce(w, group=group)",
     "dist.all_reduce(w, group=group, async_op=True)", "You never call wait()"),
    ("8.5", "gathers", "            dist.all_reduce(w, group=group)\n            w = w / size",
     "            parts = [torch.empty_like(w) for _ in range(size)]\n"
     "            dist.all_gather(parts, w, group=group)\n            w = sum(parts) / size",
     "You call all_gather. Use only all_reduce here"),
    ("8.5", "whole rounds", """
        def local_sgd(w, gradient, steps, tau, eta, note, group=None):
            for begin in range(0, steps, tau):
                for _ in range(tau):
                    w = w - eta * gradient(w)
                dist.all_reduce(w, group=group)
                w = w / dist.get_world_size(group)
                note(w)
            return w
        """, None, "Compute gradient(w) once in each of"),
    ("8.5", "notes each step", "            note(w)\n    return w", "        note(w)\n    return w",
     "once after each all_reduce"),
    ("8.5", "returns nothing", "    return w", "    pass", "You returned None. Return the weights"),
    ("8.5", "notes before", "            dist.all_reduce(w, group=group)",
     "            note(w)\n            dist.all_reduce(w, group=group)",
     "once after each all_reduce"),

    ("8.6", "heavy ball", "center - rate * (pseudo_gradient + momentum * velocity)",
     "center - rate * velocity", "You used heavy-ball momentum"),
    ("8.6", "the step with the old velocity", """
        def outer_step(center, pseudo_gradient, velocity, rate, momentum):
            new = momentum * velocity + pseudo_gradient
            return center - rate * (pseudo_gradient + momentum * velocity), new
        """, None, "Compute v ← μv + g first, and then step along g + μv, as Nesterov does"),
    ("8.6", "climbs in the outer step", "center - rate * (", "center + rate * (",
     "The step goes the wrong way"),
    ("8.6", "the rate in the velocity", """
        def outer_step(center, pseudo_gradient, velocity, rate, momentum):
            velocity = momentum * velocity + rate * pseudo_gradient
            return center - rate * pseudo_gradient - momentum * velocity, velocity
        """, None, "outer_step, rate"),
    ("8.6", "returns the centre only", "momentum * velocity), velocity", "momentum * velocity)",
     "Return two tensors: center, velocity"),
    ("8.6", "swaps the two", "return center - rate * (pseudo_gradient + momentum * velocity), "
     "velocity", "return velocity, center - rate * (pseudo_gradient + momentum * velocity)",
     "You returned velocity, center"),
    ("8.6", "the velocity in place", "velocity = momentum * velocity + pseudo_gradient",
     "velocity *= momentum\n    velocity += pseudo_gradient",
     "outer_step changed one of its arguments"),
    ("8.6", "turns the pseudo-gradient round", "change = center - w", "change = w - center",
     "Descend along the pseudo-gradient W̄ − Wⁱ"),
    ("8.6", "sums the pseudo-gradients", "        change /= dist.get_world_size(group)\n", "",
     "You summed the pseudo-gradients"),
    ("8.6", "hard-codes four ranks", "change /= dist.get_world_size(group)", "change /= 4",
     "divided by 4, the size of the world"),
    ("8.6", "reduces a copy", "dist.all_reduce(change, group=group)\n"
     "        change /= dist.get_world_size(group)", "dist.all_reduce(change.clone(), group=group)",
     "Each rank used its own pseudo-gradient"),
    ("8.6", "does not go back to the centre", "        w = center\n", "",
     "The ranks continue from their own weights after an outer step"),
    ("8.6", "divides by tau", "change = center - w", "change = (center - w) / tau",
     "divided by τ"),
    ("8.6", "the inner rate", "change = center - w", "change = eta * (center - w)",
     "multiplied by η"),
    ("8.6", "plain averages", "center, velocity = outer_step(center, change, velocity, rate, "
     "momentum)", "center = center - change", "The outer step is a plain mean"),
    ("8.6", "forgets the velocity", "center, velocity = outer_step(center, change, velocity, rate, "
     "momentum)", "center, _ = outer_step(center, change, velocity, rate, momentum)",
     "Keep it from round to round"),
    ("8.6", "forgets the rest", "range(0, steps, tau)", "range(0, steps - tau + 1, tau)",
     "and one at the end"),
    ("8.6", "communicates in every step", """
        def diloco(w, gradient, steps, tau, eta, rate, momentum, note, group=None):
            center, velocity = w, torch.zeros_like(w)
            for k in range(1, steps + 1):
                slope = gradient(w)
                dist.all_reduce(slope, group=group)
                w = w - eta * slope / dist.get_world_size(group)
                if k % tau == 0 or k == steps:
                    center, velocity = outer_step(center, center - w, velocity, rate, momentum)
                    w = center
                    note(center)
            return center
        """, None, "one after every τ steps"),
    ("8.6", "sums weights", "change = center - w\n        dist.all_reduce(change, group=group)\n"
     "        change /= dist.get_world_size(group)",
     "dist.all_reduce(w, group=group)\n        change = center - w",
     "You summed W over the ranks before you subtracted it from the center"),
    ("8.6", "ignores the group", "dist.all_reduce(change, group=group)", "dist.all_reduce(change)",
     "Pass group=group"),
    ("8.6", "notes its own weights", "note(center)", "note(w)",
     "You noted this rank's weights before the outer step"),
    ("8.6", "reduces in double rounds", "min(tau, steps - begin)", "tau",
     "Compute gradient(w) once in each of"),
    ("8.6", "in place", "w = w - eta * gradient(w)", "w -= eta * gradient(w)",
     "The pseudo-gradients are zero, because w and the center are one tensor"),
]  # fmt: skip

RIGHT = [
    ("8.1", "a share of the distance", """
        def move_worker(w, center, gradient, eta, rho):
            alpha = eta * rho
            return (1 - alpha) * w + alpha * center - eta * gradient

        def move_center(center, w, eta, rho):
            return torch.lerp(center, w, eta * rho)
        """),
    ("8.1", "the functions of tensors", """
        def move_worker(w, center, gradient, eta, rho):
            return w.sub(gradient, alpha=eta).sub(w - center, alpha=eta * rho)

        def move_center(center, w, eta, rho):
            return torch.add(center, w - center, alpha=eta * rho)
        """),
    ("8.1", "on clones", """
        def move_worker(w, center, gradient, eta, rho):
            new = w.clone()
            new -= eta * gradient
            new -= eta * rho * (w - center)
            return new

        def move_center(center, w, eta, rho):
            new = center.clone()
            new += eta * rho * (w - new)
            return new
        """),
    ("8.2", "two functions", """
        def round_robin(w, gradient, steps, eta, rho, note, group=None):
            me, G = dist.get_rank(group), dist.get_world_size(group) - 1
            got = w.clone()
            if me == 0:
                center = w.clone()
                for t in range(steps):
                    dist.send(center, group_dst=1 + t % G, group=group)
                    dist.recv(got, group_src=1 + t % G, group=group)
                    center += eta * rho * (got - center)
                    note(center)
                return center
            mine = w.clone()
            for t in range(me - 1, steps, G):
                dist.recv(got, group_src=0, group=group)
                slope = gradient(mine)
                dist.send(mine, group_dst=0, group=group)
                mine -= eta * (slope + rho * (mine - got))
                note(mine)
            return mine
        """),
    ("8.2", "requests", """
        def round_robin(w, gradient, steps, eta, rho, note, group=None):
            place, count = dist.get_rank(group), dist.get_world_size(group) - 1
            for t in range(1, steps + 1):
                j = (t - 1) % count + 1
                other = torch.zeros_like(w)
                if place == 0:
                    back = dist.irecv(other, group_src=j, group=group)
                    dist.isend(w, group_dst=j, group=group).wait()
                    back.wait()
                    w = move_center(w, other, eta, rho)
                elif place == j:
                    dist.irecv(other, group_src=0, group=group).wait()
                    slope = gradient(w)
                    dist.isend(w, group_dst=0, group=group).wait()
                    w = move_worker(w, other, slope, eta, rho)
                if place in (0, j):
                    note(w)
            return w
        """),
    ("8.3", "requests of each worker", """
        def serve(center, exchanges, eta, rho, note, group=None):
            count = dist.get_world_size(group) - 1
            left = {j: exchanges // count for j in range(1, count + 1)}
            boxes = {j: torch.empty_like(center) for j in left}
            asked = {j: dist.irecv(boxes[j], group_src=j, group=group) for j in left}
            while asked:
                for j in [j for j in asked if asked[j].is_completed()]:
                    asked.pop(j).wait()
                    dist.send(center, group_dst=j, group=group)
                    center = move_center(center, boxes[j], eta, rho)
                    note(center)
                    left[j] -= 1
                    if left[j]:
                        asked[j] = dist.irecv(boxes[j], group_src=j, group=group)
            return center

        def work(w, gradient, steps, tau, eta, rho, note, group=None):
            center = torch.empty_like(w)
            for k in range(steps):
                slope = gradient(w)
                if k % tau == 0:
                    dist.send(w, group_dst=0, group=group)
                    dist.recv(center, group_src=0, group=group)
                    w = move_worker(w, center, slope, eta, rho)
                else:
                    w = w - eta * slope
                note(w)
            return w
        """),
    ("8.3", "communication behind the gradient", """
        def serve(center, exchanges, eta, rho, note, group=None):
            center = center.clone()
            w = center.clone()
            while exchanges:
                who = dist.recv(w, None, group)
                dist.send(center, who, group)
                center += eta * rho * (w - center)
                note(center)
                exchanges -= 1
            return center

        def work(w, gradient, steps, tau, eta, rho, note, group=None):
            center = torch.empty_like(w)
            for k in range(steps):
                exchange = not k % tau
                if exchange:
                    going = dist.isend(w, group_dst=0, group=group)
                    coming = dist.irecv(center, group_src=0, group=group)
                slope = gradient(w)
                if exchange:
                    going.wait()
                    coming.wait()
                w = w - eta * (slope + (rho * (w - center) if exchange else 0))
                note(w)
            return w
        """),
    ("8.4", "a velocity without the rate", """
        def work_with_momentum(w, gradient, steps, tau, eta, rho, delta, note, group=None):
            u, center = torch.zeros_like(w), torch.zeros_like(w)
            for k in range(steps):
                u = delta * u + gradient(w - eta * delta * u)
                new = w - eta * u
                if k % tau == 0:
                    dist.send(w, group_dst=0, group=group)
                    dist.recv(center, group_src=0, group=group)
                    new = new - eta * rho * (w - center)
                w = new
                note(w)
            return w
        """),
    ("8.4", "exchange first, in place on a clone", """
        def work_with_momentum(w, gradient, steps, tau, eta, rho, delta, note, group=None):
            w, v, center = w.clone(), torch.zeros_like(w), torch.zeros_like(w)
            for k in range(steps):
                pull = torch.zeros_like(w)
                if k % tau == 0:
                    dist.send(w, group_dst=0, group=group)
                    dist.recv(center, group_src=0, group=group)
                    pull = eta * rho * (w - center)
                v.mul_(delta)
                v -= eta * gradient(w + v)
                w += v
                w -= pull
                note(w)
            return w
        """),
    ("8.5", "rounds", """
        def local_sgd(w, gradient, steps, tau, eta, note, group=None):
            left = steps
            while left > 0:
                for _ in range(min(tau, left)):
                    w = w - eta * gradient(w)
                left -= tau
                dist.all_reduce(w, group=group)
                w /= dist.get_world_size(group)
                note(w)
            return w
        """),
    ("8.5", "a mean of quotients, on a clone", """
        def local_sgd(w, gradient, steps, tau, eta, note, group=None):
            w = w.clone()
            for k in range(steps):
                w -= eta * gradient(w)
                if (k + 1) % tau == 0 or k + 1 == steps:
                    w /= dist.get_world_size(group)
                    dist.all_reduce(w, op=dist.ReduceOp.SUM, group=group, async_op=True).wait()
                    note(w)
            return w
        """),
    ("8.6", "PyTorch's own optimizer", """
        def outer_step(center, pseudo_gradient, velocity, rate, momentum):
            new = pseudo_gradient + momentum * velocity
            return center.sub(pseudo_gradient + momentum * new, alpha=rate), new

        def diloco(w, gradient, steps, tau, eta, rate, momentum, note, group=None):
            center = torch.nn.Parameter(w.clone())
            outer = torch.optim.SGD([center], lr=rate, momentum=momentum, nesterov=momentum > 0)
            for begin in range(0, steps, tau):
                local = center.detach().clone()
                for _ in range(begin, min(begin + tau, steps)):
                    local -= eta * gradient(local)
                center.grad = (center.detach() - local) / dist.get_world_size(group)
                dist.all_reduce(center.grad, group=group)
                outer.step()
                note(center.detach())
            return center.detach()
        """),
    ("8.6", "averages weights first", """
        def outer_step(center, pseudo_gradient, velocity, rate, momentum):
            velocity = momentum * velocity + pseudo_gradient
            step = pseudo_gradient + momentum * velocity
            return center - rate * step, velocity

        def diloco(w, gradient, steps, tau, eta, rate, momentum, note, group=None):
            center, velocity = w.clone(), torch.zeros_like(w)
            local = w.clone()
            for k in range(1, steps + 1):
                local = local - eta * gradient(local)
                if k % tau == 0 or k == steps:
                    dist.all_reduce(local, group=group)
                    local = local / dist.get_world_size(group)
                    center, velocity = outer_step(
                        center, center - local, velocity, rate, momentum
                    )
                    local = center.clone()
                    note(center)
            return center
        """),
    # The outer step is linear: the mean of its results is its result for the mean.
    ("8.6", "averages the centres after outer steps of its own", """
        def diloco(w, gradient, steps, tau, eta, rate, momentum, note, group=None):
            center, velocity = w, torch.zeros_like(w)
            for begin in range(0, steps, tau):
                w = center
                for _ in range(min(tau, steps - begin)):
                    w = w - eta * gradient(w)
                center, velocity = outer_step(center, center - w, velocity, rate, momentum)
                dist.all_reduce(center, group=group)
                center /= dist.get_world_size(group)
                note(center)
            return center
        """),
]  # fmt: skip

WRONG = [(task, what, code, words) for task, what, code, new, words in _CHANGES if new is None]
CHANGES = [change for change in _CHANGES if change[3] is not None]

#: Made for what the check asked first: other types, lengths and groups are asked, too.
CHANGES += [
    (
        "8.1",
        "computes in float32",
        "return w - eta * (gradient + rho * (w - center))",
        "return (w.float() - eta * (gradient + rho * (w - center)).float()).to(w.dtype)",
        "Did you compute something in float32?",
    ),
    (
        "8.1",
        "is made for one length",
        "return w - eta",
        "w = w[:5]\n    return w - eta",
        "must match the size",
    ),
    (
        "8.2",
        "is made for one length",
        "other = torch.empty_like(w)",
        "other = torch.empty(5, dtype=w.dtype)",
        "CommunicationMismatch",
    ),
    (
        "8.2",
        "is made for float64",
        "other = torch.empty_like(w)",
        "other = torch.empty(len(w), dtype=torch.float64)",
        "CommunicationMismatch",
    ),
    (
        "8.3",
        "is made for one length",
        "w = torch.empty_like(center)",
        "w = torch.empty(5, dtype=center.dtype)",
        "CommunicationMismatch",
    ),
    (
        "8.4",
        "computes in float32",
        "w = w + v - pull",
        "w = (w + v - pull).float().to(w.dtype)",
        "Did you compute something in float32?",
    ),
    (
        "8.5",
        "computes in float32",
        "w = w / size",
        "w = (w / size).float().to(w.dtype)",
        "Did you compute something in float32?",
    ),
    (
        "8.6",
        "computes in float32",
        "velocity = momentum * velocity + pseudo_gradient\n",
        "velocity = (momentum * velocity + pseudo_gradient).float().to(center.dtype)\n",
        "Did you compute something in float32?",
    ),
]

#: What won the points because the check always gave the same rates, short weights and few steps.
NOTED = "the weights that you noted, with "
CHANGES += [
    ("8.1", "limits alpha", """
        def move_worker(w, center, gradient, eta, rho):
            return w - eta * gradient - min(eta * rho, 0.6) * (w - center)

        def move_center(center, w, eta, rho):
            return center + min(eta * rho, 0.6) * (w - center)
        """, None, "a share of 0.6 of the distance. Use α = ηρ, here 0.8"),
    ("8.1", "goes to the other end at most", """
        def move_worker(w, center, gradient, eta, rho):
            return torch.lerp(w, center, min(eta * rho, 1.0)) - eta * gradient

        def move_center(center, w, eta, rho):
            return torch.lerp(center, w, min(eta * rho, 1.0))
        """, None, "a share of 1 of the distance. Use α = ηρ, here 1.3"),
    ("8.2", "takes ρ for 2 at the centre", "w = move_center(w, other, eta, rho)",
     "w = w + 2 * eta * (other - w)", NOTED + "η = "),
    ("8.2", "multiplies ρ by the gradient", "w = move_worker(w, other, slope, eta, rho)",
     "w = w - eta * rho * (slope / 2 + w - other)", NOTED + "η = "),
    ("8.2", "a number for eta", "w = move_worker(w, other, slope, eta, rho)",
     "w = w - 0.1 * slope - eta * rho * (w - other)", "You multiplied the gradient by"),
    ("8.2", "sends six numbers", """
        def round_robin(w, gradient, steps, eta, rho, note, group=None):
            place, count = dist.get_rank(group), dist.get_world_size(group) - 1
            other = torch.zeros_like(w)
            for t in range(steps):
                j = 1 + t % count
                if place == 0:
                    dist.send(w[:6], group_dst=j, group=group)
                    dist.recv(other[:6], group_src=j, group=group)
                    w = move_center(w, other, eta, rho)
                    note(w)
                elif place == j:
                    dist.recv(other[:6], group_src=0, group=group)
                    slope = gradient(w)
                    dist.send(w[:6], group_dst=0, group=group)
                    w = move_worker(w, other, slope, eta, rho)
                    note(w)
            return w
        """, None, "Send all weights"),
    ("8.3", "another spring at the centre", "center = move_center(center, w, eta, rho)",
     "center = center + 4 * eta / rho * (w - center)", NOTED + "η = "),
    ("8.3", "another spring at the worker", "w = move_worker(w, center, slope, eta, rho)",
     "w = w - eta * slope - 4 * eta / rho * (w - center)", NOTED + "η = "),
    ("8.3", "a number for eta between exchanges", "w = w - eta * slope", "w = w - 0.1 * slope",
     NOTED + "η = "),
    ("8.3", "takes twelve steps", "range(steps)", "range(min(steps, 12))", "exchanges of each"),
    ("8.3", "exchanges at least every ten steps", "k % tau == 0", "k % min(tau, 10) == 0",
     "exchanges of each worker"),
    ("8.4", "a number for eta", "- eta * gradient", "- 0.1 * gradient",
     "You multiplied the gradient by"),
    ("8.5", "a number for eta", "w - eta * gradient(w)", "w - 0.1 * gradient(w)",
     "You multiplied the gradient by"),
    ("8.5", "eta of 0.1 at least", "w - eta * gradient(w)", "w - max(eta, 0.1) * gradient(w)",
     "You multiplied the gradient by"),
    ("8.5", "reduces six numbers", "dist.all_reduce(w, group=group)\n            w = w / size",
     "dist.all_reduce(w[:6], group=group)\n            w[:6] /= size",
     "Send all weights"),
    ("8.6", "momentum of 0.6 at most", "    center, velocity = w, torch.zeros_like(w)\n",
     "    center, velocity, momentum = w, torch.zeros_like(w), min(momentum, 0.6)\n",
     NOTED + "η = "),
    ("8.6", "numbers for the outer step", "velocity, rate, momentum)\n        note",
     "velocity, 0.7, 0.6)\n        note", NOTED + "η = "),
    ("8.6", "the paper's numbers for the outer step", "velocity, rate, momentum)\n        note",
     "velocity, 0.7, 0.9)\n        note", "Use the arguments rate and momentum"),
    ("8.2", "the notebook's numbers", "    place, count = ",
     "    eta, rho = 0.1, 3.0\n    place, count = ",
     "Use the arguments eta and rho"),
    ("8.4", "the notebook's numbers", "    center, v = ",
     "    eta, rho = 0.1, 3.0\n    center, v = ", "Use the arguments eta and rho"),
    ("8.6", "a number for eta", "w - eta * gradient(w)", "w - 0.1 * gradient(w)",
     "You multiplied the gradient by"),
    ("8.6", "reduces six numbers", """
        def outer_step(center, pseudo_gradient, velocity, rate, momentum):
            velocity = momentum * velocity + pseudo_gradient
            return center - rate * (pseudo_gradient + momentum * velocity), velocity

        def diloco(w, gradient, steps, tau, eta, rate, momentum, note, group=None):
            center, velocity = w, torch.zeros_like(w)
            for begin in range(0, steps, tau):
                w = center
                for _ in range(min(tau, steps - begin)):
                    w = w - eta * gradient(w)
                change = center - w
                dist.all_reduce(change[:6], group=group)
                change[:6] /= dist.get_world_size(group)
                center, velocity = outer_step(center, change, velocity, rate, momentum)
                note(center)
            return center
        """, None, "Send all weights"),
]  # fmt: skip
WRONG += [(task, what, code, words) for task, what, code, new, words in CHANGES if new is None]
CHANGES = [change for change in CHANGES if change[3] is not None]

_DILOCO = answers(NOTEBOOK)[CELLS["8.6"]]
WRONG += [
    ("8.6", "the velocity survives", _DILOCO.replace(
        "center, velocity = w, torch.zeros_like(w)",
        "center, velocity = w, getattr(diloco, 'velocity', torch.zeros_like(w))\n"
        "    velocity = velocity if len(velocity) == len(w) else torch.zeros_like(w)",
    ).replace("    return center\n", "    diloco.velocity = velocity\n    return center\n"),
     "the weights that you noted, with η ="),
]  # fmt: skip
