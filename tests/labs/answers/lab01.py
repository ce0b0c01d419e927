"""Answers to lab 01, wrong ones and right ones, that students really give."""

from __future__ import annotations

import textwrap

NOTEBOOK = "01_c10d.ipynb"
CELLS = {
    "1.1": "hello-answer",
    "1.2": "send-answer",
    "1.3": "isend-answer",
    "1.4": "reduce-answer",
    "1.5": "exchange-answer",
    "1.6": "group-answer",
    "1.7": "pingpong-answer",
}
#: mpi4py needs a process for each rank.
ONLY_ON_RANKS = {"with the clock of MPI"}

# Those that real ranks are tried with, besides the first of each task: what communicates wrongly.
ON_RANKS = {
    *("forgets the send", "forgets the recv", "receives into the wrong dtype", "sends twice"),
    *("both send first", "both receive first", "drops the request", "does not wait"),
    *("makes the group on its members only", "calls the collective on every rank"),
    *("makes another group on the odd ranks", "takes four times the mean"),
    *("stops the clock after the send", "both send first if it is short"),
}

# task, what the student did, the code, words of the message
WRONG = [
    ("1.1", "hard-codes four ranks on another backend", "world_size = 8", "expected 4, got 8"),
    ("1.1", "mixes up rank and size", "rank = world_size", "the variable rank"),
    ("1.2", "sends from every rank", """
        def transfer(tensor, rank):
            if rank == 1:
                dist.recv(tensor, src=0)
            elif rank in (0, 2):
                dist.isend(tensor, dst=1, tag=rank)
        """, "dist.isend, but this task asks for dist.send"),
    ("1.2", "uses a collective", """
        def transfer(tensor, rank):
            copy = tensor.clone()
            dist.broadcast(copy, src=0)
            if rank == 1:
                tensor.copy_(copy)
        """, "You call broadcast. Use only send and recv here"),
    ("1.2", "sends the wrong way round", """
        def transfer(tensor, rank):
            if rank == 1:
                dist.send(tensor, dst=0)
            elif rank == 0:
                dist.recv(tensor, src=1)
        """, "Expected send to rank 1, but your code made recv from rank 1"),
    ("1.2", "receives into a new tensor", """
        def transfer(tensor, rank):
            if rank == 0:
                dist.send(tensor, dst=1)
            elif rank == 1:
                tensor = torch.empty_like(tensor)
                dist.recv(tensor, src=0)
        """, "A message arrived, but your tensor is unchanged"),
    ("1.2", "forgets the send", """
        def transfer(tensor, rank):
            if rank == 1:
                dist.recv(tensor, src=0)
        """, "recv(src=0, tag=0)"),
    ("1.2", "receives into the wrong dtype", """
        def transfer(tensor, rank):
            if rank == 0:
                dist.send(tensor.double(), dst=1)
            elif rank == 1:
                dist.recv(tensor, src=0)
        """, "rank 0 sent float64[3, 4]"),
    ("1.3", "forgets to wait", """
        def transfer_overlapped(tensor, rank, work):
            if rank == 0:
                dist.isend(tensor, dst=1)
            elif rank == 1:
                dist.irecv(tensor, src=0)
            return work()
        """, "You never call wait() on the work of isend"),
    ("1.3", "waits before the work", """
        def transfer_overlapped(tensor, rank, work):
            if rank == 0:
                dist.isend(tensor, dst=1).wait()
            elif rank == 1:
                dist.irecv(tensor, src=0).wait()
            return work()
        """, "You call wait() before work(), so nothing overlaps"),
    ("1.3", "works before the communication", """
        def transfer_overlapped(tensor, rank, work):
            result = work()
            if rank == 0:
                dist.isend(tensor, dst=1).wait()
            elif rank == 1:
                dist.irecv(tensor, src=0).wait()
            return result
        """, "You call isend after work()"),
    ("1.3", "uses the blocking calls", """
        def transfer_overlapped(tensor, rank, work):
            transfer(tensor, rank)
            return work()
        """, "You call dist.send, but this task asks for dist.isend"),
    ("1.3", "returns nothing", """
        def transfer_overlapped(tensor, rank, work):
            request = None
            if rank == 0:
                request = dist.isend(tensor, dst=1)
            elif rank == 1:
                request = dist.irecv(tensor, src=0)
            work()
            if request:
                request.wait()
        """, "You returned None. Return what work() returned"),
    ("1.4", "averages", """
        def sum_over_ranks(tensor):
            dist.all_reduce(tensor)
            return tensor / dist.get_world_size()
        """, "You returned the mean over the ranks"),
    ("1.4", "takes the maximum", """
        def sum_over_ranks(tensor):
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
            return tensor
        """, "You returned the largest element of all ranks"),
    ("1.4", "multiplies by the number of ranks", """
        def sum_over_ranks(tensor):
            dist.all_reduce(tensor.clone())
            return tensor * dist.get_world_size()
        """, "times this rank's tensor, which is the sum only if all"),
    ("1.4", "does not wait", """
        def sum_over_ranks(tensor):
            dist.all_reduce(tensor, async_op=True)
            return tensor
        """, "You never call wait() on all_reduce"),
    ("1.4", "reduces a copy", """
        def sum_over_ranks(tensor):
            dist.all_reduce(tensor.clone())
            return tensor
        """, "You returned this rank's tensor unchanged"),
    ("1.4", "gathers and adds", """
        def sum_over_ranks(tensor):
            parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, tensor)
            return sum(parts)
        """, "You call all_gather. Use only all_reduce here"),
    ("1.4", "returns what all_reduce returns", """
        def sum_over_ranks(tensor):
            return dist.all_reduce(tensor)
        """, "ranks 0–3: the sum: You returned None. Return the tensor"),
    ("1.4", "hard-codes four equal ranks", """
        def sum_over_ranks(tensor):
            dist.all_reduce(tensor.clone())
            return 4 * tensor
        """, "times this rank's tensor, which is the sum only if all"),
    ("1.5", "both send first", """
        def exchange(mine, rank):
            theirs = mine.clone()
            if rank in (0, 1):
                dist.send(mine, dst=1 - rank)
                dist.recv(theirs, src=1 - rank)
            return theirs
        """, "send(dst=1, tag=0)"),
    ("1.5", "both receive first", """
        def exchange(mine, rank):
            theirs = mine.clone()
            if rank in (0, 1):
                dist.recv(theirs, src=1 - rank)
                dist.send(mine, dst=1 - rank)
            return theirs
        """, "both receive first"),
    ("1.5", "drops the request", """
        def exchange(mine, rank):
            theirs = mine.clone()
            if rank in (0, 1):
                dist.isend(mine, dst=1 - rank)
                dist.recv(theirs, src=1 - rank)
            return theirs
        """, "You never call wait() on the work of isend"),
    ("1.5", "returns its own tensor", """
        def exchange(mine, rank):
            theirs = mine.clone()
            if rank in (0, 1):
                request = dist.isend(mine, dst=1 - rank)
                dist.recv(theirs, src=1 - rank)
                request.wait()
            return mine
        """, "You returned this rank's tensor"),
    ("1.5", "receives into what it sends", """
        def exchange(mine, rank):
            if rank in (0, 1):
                request = dist.isend(mine, dst=1 - rank)
                dist.recv(mine, src=1 - rank)
                request.wait()
            return mine
        """, "was changed before wait()"),
    ("1.5", "returns nothing on the others", """
        def exchange(mine, rank):
            if rank == 0:
                dist.send(mine, dst=1)
                dist.recv(mine, src=1)
                return mine
            if rank == 1:
                theirs = torch.empty_like(mine)
                dist.recv(theirs, src=0)
                dist.send(mine, dst=0)
                return theirs
        """, "exchange returned None"),
    ("1.6", "uses the world", """
        def sum_over_even_ranks(tensor, group):
            other = tensor if rank % 2 == 0 else torch.zeros_like(tensor)
            dist.all_reduce(other)
        """, "You didn't use the argument group"),
    ("1.6", "puts the wrong ranks into the group", """
        even_ranks = dist.new_group([0, 1])
        def sum_over_even_ranks(tensor, group):
            if rank < 2:
                dist.all_reduce(tensor, group=group)
        """, "even_ranks consists of the ranks [0, 1]"),
    ("1.6", "communicates nothing", """
        def sum_over_even_ranks(tensor, group):
            tensor *= 2
        """, "You didn't use the argument group"),
    ("1.6", "makes the group on its members only", """
        even_ranks = dist.new_group([0, 2]) if rank % 2 == 0 else None
        """, ") on every rank, even if it isn't a member"),
    ("1.6", "calls the collective on every rank", """
        def sum_over_even_ranks(tensor, group):
            dist.all_reduce(tensor, group=group)
        """, "This rank calls a collective of a group without belonging"),
    ("1.6", "makes a group in the function", """
        def sum_over_even_ranks(tensor, group):
            mine = dist.new_group([0, 2])
            if rank % 2 == 0:
                dist.all_reduce(tensor, group=mine)
        """, "Your function makes a group in each call"),
    ("1.6", "ignores the argument", """
        def sum_over_even_ranks(tensor, group):
            if rank % 2 == 0:
                dist.all_reduce(tensor, group=even_ranks)
        """, "You didn't use the argument group"),
    ("1.7", "returns the round trip", """
        def ping_pong(nbytes, repeats, rank):
            ball, seconds = torch.zeros(nbytes, dtype=torch.uint8), []
            for _ in range(repeats):
                start = time.perf_counter()
                if rank == 0:
                    dist.send(ball, dst=1); dist.recv(ball, src=1)
                elif rank == 1:
                    dist.recv(ball, src=0); dist.send(ball, dst=0)
                seconds.append(time.perf_counter() - start)
            return median(seconds) if rank == 0 else None
        """, "You returned the whole round trip"),
    *(("1.7", what, f"""
        def ping_pong(nbytes, repeats, rank):
            ball, seconds = torch.zeros(nbytes, dtype=torch.uint8), []
            for _ in range(repeats):
                start = time.perf_counter()
                if rank == 0:
                    dist.send(ball, dst=1); dist.recv(ball, src=1)
                elif rank == 1:
                    dist.recv(ball, src=0); dist.send(ball, dst=0)
                seconds.append((time.perf_counter() - start) / 2)
            return {result}
        """, words) for what, result, words in (
            ("takes the mean", "sum(seconds) / repeats if rank == 0 else None", "the mean of the"),
            ("takes the fastest", "min(seconds) if rank == 0 else None", "the fastest round"),
            ("adds up", "sum(seconds) if rank == 0 else None", "the sum of the rounds"),
            ("is not a number", "float('nan')", "Return the seconds as one number"),
            ("returns a time on each rank", "median(seconds)", "Only rank 0 measures"),
    )),
    ("1.7", "lets all points of the fit count alike", """
        def fit(sizes, times):
            slope, latency = np.polyfit(sizes, times, deg=1)
            return latency, 1 / slope
        """, "You weighted all points equally, so the noise of long"),
    ("1.7", "fits a line through two points", """
        def fit(sizes, times):
            slope = (times[-1] - times[0]) / (sizes[-1] - sizes[0])
            return times[0] - slope * sizes[0], 1 / slope
        """, "through the first and the last point"),
    ("1.7", "returns nan", """
        def fit(sizes, times):
            return float("nan"), float("nan")
        """, "two numbers that aren't nan"),
    ("1.7", "swaps the two", """
        def fit(sizes, times):
            times = np.asarray(times)
            slope, latency = np.polyfit(sizes, times, deg=1, w=1 / times)
            return 1 / slope, latency
        """, "Return (latency, bandwidth) in this order"),
    ("1.7", "returns the slope for the bandwidth", """
        def fit(sizes, times):
            times = np.asarray(times)
            slope, latency = np.polyfit(sizes, times, deg=1, w=1 / times)
            return latency, slope
        """, "Return 1 / slope as the bandwidth"),
    ("1.7", "sends floats for bytes", """
        def ping_pong(nbytes, repeats, rank):
            ball, seconds = torch.zeros(nbytes), []
            for _ in range(repeats):
                start = time.perf_counter()
                if rank == 0:
                    dist.send(ball, dst=1); dist.recv(ball, src=1)
                elif rank == 1:
                    dist.recv(ball, src=0); dist.send(ball, dst=0)
                seconds.append((time.perf_counter() - start) / 2)
            return median(seconds) if rank == 0 else None
        """, "- ranks 0 and 1: ping_pong(8, 5) sent [32] bytes"),
    ("1.7", "goes one way only", """
        def ping_pong(nbytes, repeats, rank):
            ball = torch.zeros(nbytes, dtype=torch.uint8)
            start = time.perf_counter()
            for _ in range(repeats):
                if rank == 0:
                    dist.send(ball, dst=1)
                elif rank == 1:
                    dist.recv(ball, src=0)
            return (time.perf_counter() - start) / repeats if rank == 0 else None
        """, "You made 5 sends and 0 recvs"),
    ("1.1", "forgets to call the function", "rank = dist.get_rank", "Call the function"),
    ("1.1", "counts ranks from one", "rank = dist.get_rank() + 1", "You counted the ranks from 1"),
    ("1.1", "makes a text of it", "rank = str(dist.get_rank())", "the variable rank"),
    ("1.1", "takes the last rank for the size", "world_size = dist.get_world_size() - 1",
     "You used the number of the last rank"),
    ("1.1", "swaps the two", "rank, world_size = dist.get_world_size(), dist.get_rank()",
     "You used the number of ranks"),
    ("1.1", "gives each rank the number 0", "rank = 0", "variable rank: expected 3, got 0"),
    ("1.2", "sends a copy of the other's", """
        def transfer(tensor, rank):
            if rank == 0:
                dist.send(torch.zeros_like(tensor), dst=1)
            elif rank == 1:
                dist.recv(tensor, src=0)
        """, "the tensor afterwards"),
    ("1.2", "sends twice", """
        def transfer(tensor, rank):
            if rank == 0:
                dist.send(tensor, dst=1)
                dist.send(tensor, dst=1)
            elif rank == 1:
                dist.recv(tensor, src=0)
                dist.recv(tensor, src=0)
        """, "your code made send to rank 1, send to rank 1"),
    ("1.2", "gives the tags of two messages", """
        def transfer(tensor, rank):
            if rank == 0:
                dist.send(tensor, dst=1, tag=7)
            elif rank == 1:
                dist.recv(tensor, src=0)
        """, "tag=0"),
    ("1.2", "forgets the recv", """
        def transfer(tensor, rank):
            if rank == 0:
                dist.send(tensor, dst=1)
        """, "no rank has received it"),
    ("1.2", "sends to every rank", """
        def transfer(tensor, rank):
            if rank == 0:
                for other in (1, 2, 3):
                    dist.send(tensor, dst=other)
            else:
                dist.recv(tensor, src=0)
        """, "rank 0: Expected send to rank 1, but your code made"),
    ("1.3", "forgets to wait on the receiver", """
        def transfer_overlapped(tensor, rank, work):
            if rank == 0:
                request = dist.isend(tensor, dst=1)
            elif rank == 1:
                dist.irecv(tensor, src=0)
            result = work()
            if rank == 0:
                request.wait()
            return result
        """, "You never call wait() on the work of irecv"),
    ("1.3", "works twice", """
        def transfer_overlapped(tensor, rank, work):
            request = None
            if rank == 0:
                request = dist.isend(tensor, dst=1)
            elif rank == 1:
                request = dist.irecv(tensor, src=0)
            work()
            if request is not None:
                request.wait()
            return work()
        """, "times. Call it once"),
    ("1.3", "works on some ranks only", """
        def transfer_overlapped(tensor, rank, work):
            if rank > 1:
                return None
            call = dist.isend if rank == 0 else dist.irecv
            request = call(tensor, 1 - rank)
            result = work()
            request.wait()
            return result
        """, "times. Call it once"),
    ("1.3", "returns the function", """
        def transfer_overlapped(tensor, rank, work):
            request = None
            if rank < 2:
                request = (dist.isend if rank == 0 else dist.irecv)(tensor, 1 - rank)
            work()
            if request is not None:
                request.wait()
            return work
        """, "Call the function"),
    ("1.3", "receives into a new tensor", """
        def transfer_overlapped(tensor, rank, work):
            request = None
            if rank == 0:
                request = dist.isend(tensor, dst=1)
            elif rank == 1:
                request = dist.irecv(torch.empty_like(tensor), src=0)
            result = work()
            if request is not None:
                request.wait()
            return result
        """, "A message arrived, but your tensor is unchanged"),
    ("1.5", "leaves the waiting to luck", """
        def exchange(mine, rank):
            theirs = mine.clone()
            if rank in (0, 1):
                dist.irecv(theirs, src=1 - rank)
                dist.send(mine, dst=1 - rank)
            return theirs
        """, "You never call wait() on the work of irecv"),
    ("1.5", "exchanges by a collective", """
        def exchange(mine, rank):
            parts = [torch.empty_like(mine) for _ in range(4)]
            dist.all_gather(parts, mine)
            return parts[{0: 1, 1: 0}.get(rank, rank)]
        """, "You call all_gather. Use only send and recv here"),
    ("1.5", "lets every rank take part", """
        def exchange(mine, rank):
            theirs, partner = torch.empty_like(mine), rank ^ 1
            request = dist.isend(mine, dst=partner)
            dist.recv(theirs, src=partner)
            request.wait()
            return theirs
        """, "rank 2: Expected no message"),
    ("1.6", "sums over the odd ranks", """
        even_ranks = dist.new_group([1, 3])
        def sum_over_even_ranks(tensor, group):
            if rank % 2 == 1:
                dist.all_reduce(tensor, group=group)
        """, "even_ranks consists of the ranks [1, 3]"),
    ("1.6", "reduces a copy", """
        def sum_over_even_ranks(tensor, group):
            if rank % 2 == 0:
                dist.all_reduce(tensor.clone(), group=group)
        """, "The tensor is unchanged. all_reduce writes into the tensor that you pass"),
]  # fmt: skip

PLAY = """
        def ping_pong(nbytes, repeats, rank{argument}):
            ball, seconds = torch.zeros(nbytes, dtype=torch.uint8), []
            for _ in range(repeats):
                {before}
                start = {clock}
                if rank == 0:
                    dist.send(ball, dst=1); dist.recv(ball, src=1)
                elif rank == 1:
                    dist.recv(ball, src=0); dist.send(ball, dst=0)
                seconds.append({since} / 2)
            return {result} if rank == 0 else None
"""


def play(
    clock="time.perf_counter()", since="(time.perf_counter() - start)", argument="", before="pass",
    result="median(seconds)", first="",
) -> str:  # fmt: skip
    """A right ping_pong that differs in one thing."""
    body = PLAY.format(clock=clock, since=since, argument=argument, before=before, result=result)
    return f"{first}\n{textwrap.dedent(body)}"


# task, what the student did, the code
RIGHT = [
    ("1.1", "asks a tensor", "rank, world_size = torch.tensor(dist.get_rank()), np.int64(4)"),
    ("1.2", "by cases", """
        def transfer(tensor, rank):
            match rank:
                case 0: dist.send(tensor, 1)
                case 1: dist.recv(tensor)
        """),
    ("1.3", "polls until it is over", """
        def transfer_overlapped(tensor, rank, work):
            request = None
            if rank < 2:
                call, peer = (dist.isend, 1) if rank == 0 else (dist.irecv, 0)
                request = call(tensor, peer)
            result = work()
            while request is not None and not request.is_completed():
                pass
            return result
        """),
    ("1.4", "asynchronous and waited for", """
        def sum_over_ranks(tensor):
            total = tensor.clone()
            dist.all_reduce(total, async_op=True).wait()
            return total
        """),
    ("1.5", "sends a clone and receives into the original", """
        def exchange(mine, rank):
            if rank > 1:
                return mine
            request = dist.isend(mine.clone(), 1 - rank)
            dist.recv(mine, 1 - rank)
            request.wait()
            return mine
        """),
    ("1.5", "rank 0 sends first", """
        def exchange(mine, rank):
            theirs = mine.clone()
            if rank == 0:
                dist.send(mine, 1)
                dist.recv(theirs, 1)
            elif rank == 1:
                dist.recv(theirs, 0)
                dist.send(mine, 0)
            return theirs
        """),
    ("1.5", "rank 0 receives into what it has sent", """
        def exchange(mine, rank):
            if rank == 0:
                dist.isend(mine, 1).wait()
                dist.recv(mine, 1)
            elif rank == 1:
                theirs = torch.empty_like(mine)
                dist.recv(theirs, 0)
                dist.send(mine, 0)
                return theirs
            return mine
        """),
    ("1.6", "asks whether it is a member", """
        def sum_over_even_ranks(tensor, group):
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.all_reduce(tensor, group=group)
        """),
    ("1.1", "by the group", """
        rank = torch.distributed.distributed_c10d._get_default_group().rank()
        world_size = len(dist.get_process_group_ranks(dist.group.WORLD))
        """),
    ("1.2", "with a group and a tag", """
        def transfer(tensor, rank):
            if rank == 0:
                dist.send(tensor, 1, dist.group.WORLD, 3)
            if rank == 1:
                dist.recv(tensor, 0, tag=3)
        """),
    ("1.3", "early return", """
        def transfer_overlapped(tensor, rank, work):
            if rank not in (0, 1):
                return work()
            request = (dist.isend, dist.irecv)[rank](tensor, 1 - rank)
            try:
                return work()
            finally:
                request.wait()
        """),
    ("1.4", "into a new tensor, and as a list of rows", """
        def sum_over_ranks(tensor):
            total = tensor.clone()
            dist.all_reduce(total)
            return total.tolist()
        """),
    ("1.6", "asks for its place in the group", """
        def sum_over_even_ranks(tensor, group):
            if dist.get_rank(group) >= 0:
                dist.all_reduce(tensor, dist.ReduceOp.SUM, group)
        """),
    ("1.7", "with the clock of MPI", play(
        "MPI.Wtime()", "(MPI.Wtime() - start)", first="from mpi4py import MPI")),
    ("1.7", "with dates", play(
        "datetime.now()", "(datetime.now() - start).total_seconds()",
        first="from datetime import datetime")),
    ("1.7", "with a clock for an argument", play(
        "clock()", "(clock() - start)", argument=", clock=time.perf_counter")),
    ("1.7", "with a barrier", play(before="dist.barrier()")),
    ("1.7", "with the median of torch", play(result="torch.tensor(seconds).median()")),
    ("1.7", "with nanoseconds", play(
        "time.monotonic_ns()", "(time.monotonic_ns() - start) / 1e9")),
    ("1.7", "by normal equations", """
        def fit(sizes, times):
            w = 1 / torch.tensor(times, dtype=torch.float64)
            a = torch.stack([w, w * torch.tensor(sizes, dtype=torch.float64)], 1)
            latency, slope = torch.linalg.lstsq(a, torch.ones(len(w), dtype=w.dtype)).solution
            return [latency, 1 / slope]
        """),
]  # fmt: skip

#: Made for what the check asked first: other types and shapes are asked, too.
WRONG += [
    (
        task,
        what,
        f"""
def transfer(tensor, rank):
    b = tensor.{kind}()
    if rank == 0:
        dist.send(b, dst=1)
    elif rank == 1:
        dist.recv(b, src=0)
        tensor.copy_(b{shape})


def sum_over_ranks(tensor):
    b = tensor.{kind}(){shape}.clone()
    dist.all_reduce(b)
    return b.to(tensor.dtype)


def exchange(mine, rank):
    if rank > 1:
        return mine
    theirs, given = torch.empty_like(mine.{kind}()), mine.{kind}()
    request = dist.isend(given, dst=1 - rank)
    dist.recv(theirs, src=1 - rank)
    request.wait()
    return theirs.to(mine.dtype){".reshape(-1)" * bool(shape)}
""",
        words,
    )
    for what, kind, shape, of_tasks in (
        ("cuts off what is behind the point", "int", "", ("afterwards", "the sum", "is not rank")),
        ("computes in float32", "float", "", ("in float32?", "in float32?", "is not rank")),
        ("is made for one shape", "clone", ".reshape(3, 4)", ("invalid", "invalid", "is not rank")),
    )
    for task, words in zip(("1.2", "1.4", "1.5"), of_tasks, strict=True)
]

#: Found by an attacker who looked for what no case asks: lengths, calls, other means.
MEANS = {
    "the mean without the slowest round": "sum(sorted(seconds[1:])[:-1]) / (len(seconds) - 2)",
    "the harmonic mean of the rounds": "repeats / sum(1 / s for s in seconds[1:])",
}
WRONG += [
    ("1.2", "has room for twelve numbers", """
        def transfer(tensor, rank):
            room = torch.zeros(12, dtype=torch.float64)
            if rank == 0:
                room[: tensor.numel()] = tensor.flatten()
                dist.send(room, dst=1)
            elif rank == 1:
                dist.recv(room, src=0)
                tensor.copy_(room[: tensor.numel()].view_as(tensor))
        """, "The call send has a tensor of 96 bytes, but the tensor, float32[3, 4],"),
    ("1.2", "sends the numbers twice", """
        def transfer(tensor, rank):
            both = torch.cat([tensor.flatten(), tensor.flatten()])
            if rank == 0:
                dist.send(both, dst=1)
            elif rank == 1:
                dist.recv(both, src=0)
                tensor.copy_(both[: tensor.numel()].view_as(tensor))
        """, "The call send has a tensor of 96 bytes, but the tensor, float32[3, 4],"),
    ("1.3", "has room for a million bytes", """
        def transfer_overlapped(tensor, rank, work):
            room, n, request = torch.zeros(260_000, dtype=torch.float64), tensor.numel(), None
            if rank == 0:
                room[:n] = tensor.flatten()
                request = dist.isend(room, dst=1)
            elif rank == 1:
                request = dist.irecv(room, src=0)
            result = work()
            if request is not None:
                request.wait()
                tensor.copy_(room[:n].view_as(tensor))
            return result
        """, "The call send has a tensor of 2080000 bytes, but the tensor,"),
    *(("1.3", f"sleeps before the work, {name}", f"""
        {first}
        def transfer_overlapped(tensor, rank, work):
            request = None
            if rank == 0:
                request = dist.isend(tensor, dst=1)
            elif rank == 1:
                request = dist.irecv(tensor, src=0)
            {name}(0.01)
            result = work()
            if request is not None:
                request.wait()
            return result
        """, "You sleep before work()") for first, name in (
            ("import time", "time.sleep"), ("from time import sleep", "sleep"))),
    ("1.3", "polls before the work", """
        def transfer_overlapped(tensor, rank, work):
            request = None
            if rank == 0:
                request = dist.isend(tensor, dst=1)
            elif rank == 1:
                request = dist.irecv(tensor, src=0)
            while request is not None and not request.is_completed():
                pass
            return work()
        """, "You call wait() before work(), so nothing overlaps"),
    ("1.4", "has room for twelve numbers", """
        def sum_over_ranks(tensor):
            row = torch.zeros(12, dtype=torch.float64)
            row[: tensor.numel()] = tensor.flatten()
            dist.all_reduce(row)
            return row[: tensor.numel()].view_as(tensor)
        """, "The call all_reduce has a tensor of 96 bytes, but the tensor,"),
    ("1.4", "returns double precision", """
        def sum_over_ranks(tensor):
            total = tensor.double()
            dist.all_reduce(total)
            return total
        """, "The call all_reduce has a tensor of 96 bytes, but the tensor,"),
    ("1.4", "takes four times the mean", """
        def sum_over_ranks(tensor):
            dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
            return 4 * tensor
        """, "AVG"),
    ("1.5", "has room for a million bytes", """
        def exchange(mine, rank):
            if rank not in (0, 1):
                return mine
            n = mine.numel()
            out, came = (torch.zeros(250_000, dtype=mine.dtype) for _ in range(2))
            out[:n] = mine.flatten()
            request = dist.isend(out, dst=1 - rank)
            dist.recv(came, src=1 - rank)
            request.wait()
            return came[:n].view_as(mine)
        """, "The call send has a tensor of 1000000 bytes, but the tensor,"),
    ("1.5", "both send first if it is short", """
        def exchange(mine, rank):
            if rank > 1:
                return mine
            theirs = torch.empty_like(mine)
            if mine.numel() < 1000:
                dist.send(mine, dst=1 - rank)
                dist.recv(theirs, src=1 - rank)
            else:
                request = dist.isend(mine, dst=1 - rank)
                dist.recv(theirs, src=1 - rank)
                request.wait()
            return theirs
        """, "With 4 elements"),
    ("1.6", "makes the group on its members only, and no member of the others", """
        if rank % 2 == 0:
            even_ranks = dist.new_group([0, 2])
        else:
            even_ranks = dist.GroupMember.NON_GROUP_MEMBER

        def sum_over_even_ranks(tensor, group):
            if rank % 2 == 0:
                dist.all_reduce(tensor, group=group)
        """, "groups, but every rank must call dist.new_group for each"),
    ("1.6", "makes another group on the odd ranks", """
        if rank % 2 == 1:
            odd_ranks = dist.new_group([1, 3])
        even_ranks = dist.new_group([0, 2])

        def sum_over_even_ranks(tensor, group):
            if rank % 2 == 0:
                dist.all_reduce(tensor, group=group)
        """, "groups, but every rank must call dist.new_group for each"),
    ("1.7", "stops the clock after the send", """
        def ping_pong(nbytes, repeats, rank):
            ball, seconds = torch.zeros(nbytes, dtype=torch.uint8), []
            for _ in range(repeats):
                if rank == 0:
                    start = time.perf_counter()
                    dist.send(ball, dst=1)
                    seconds.append(time.perf_counter() - start)
                    dist.recv(ball, src=1)
                elif rank == 1:
                    dist.recv(ball, src=0)
                    dist.send(ball, dst=0)
            return median(seconds) if rank == 0 else None
        """, "You measured the time of send alone, which ends before the message"),
    ("1.3", "waits for long messages only", """
        def transfer_overlapped(tensor, rank, work):
            request = None
            if rank == 0:
                request = dist.isend(tensor, dst=1)
            elif rank == 1:
                request = dist.irecv(tensor, src=0)
            result = work()
            if request is not None and tensor.numel() > 1000:
                request.wait()
            return result
        """, "You never call wait()"),
    ("1.4", "one buffer for all sums", """
        sums = {}
        def sum_over_ranks(tensor):
            total = sums.setdefault((tensor.shape, tensor.dtype), torch.empty_like(tensor))
            dist.all_reduce(total.copy_(tensor))
            return total
        """, "changed what its earlier call had returned"),
    ("1.5", "one buffer for all exchanges", """
        buffers = {}
        def exchange(mine, rank):
            if rank > 1:
                return mine
            theirs = buffers.setdefault((mine.shape, mine.dtype), torch.empty_like(mine))
            request = dist.isend(mine, dst=1 - rank)
            dist.recv(theirs, src=1 - rank)
            request.wait()
            return theirs
        """, "changed what its earlier call had returned"),
    ("1.6", "each rank makes its own group", """
        even_ranks = dist.new_group([0, 2] if rank % 2 == 0 else [1, 3])
        if rank % 2:
            even_ranks = dist.GroupMember.NON_GROUP_MEMBER

        def sum_over_even_ranks(tensor, group):
            if rank % 2 == 0:
                dist.all_reduce(tensor, group=group)
        """, "In one call of dist.new_group, the ranks made different"),
    ("1.7", "five rounds at most",
     play().replace("range(repeats)", "range(min(repeats, 5))"), "Make 10 of each"),
    ("1.7", "remembers the times of a size",
     play(first="times = {}").replace("uint8), []", "uint8), times.setdefault(nbytes, [])"),
     "You returned the median over this call and an earlier call"),
    ("1.7", "keeps the ball of the first call",
     play().replace("torch.zeros(nbytes, dtype=torch.uint8)",
                    "globals().setdefault('kept', torch.zeros(nbytes, dtype=torch.uint8))"),
     "sent [8] bytes"),
    ("1.7", "floats in place of bytes",
     play().replace("torch.zeros(nbytes, dtype=torch.uint8)", "torch.zeros(-(-nbytes // 4))"),
     "elements of dtype torch.uint8"),
    *(("1.7", f"takes {mean}",
       play(result=result).replace("range(repeats)", "range(repeats + 1)"), f"You returned {mean}")
      for mean, result in MEANS.items()),
    *(("1.7", f"fits no line, {k}", f"""
        def fit(sizes, times):
            {line}
            return latency, bandwidth
        """, "Your latency is the mean of short messages") for k, line in enumerate((
            "latency = np.median(times[:8]); bandwidth = np.median("
            "np.array(sizes[-4:]) / (np.array(times[-4:]) - latency))",
            "latency = np.mean(times[:8]); bandwidth = sum(sizes[-4:]) / sum(times[-4:])"))),
]  # fmt: skip
