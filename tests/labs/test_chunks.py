"""An all-reduce by hand, step by step: what the picture says has to be what the ranks did."""

from __future__ import annotations

import base64
import itertools

import pytest
import torch
import torch.distributed as dist
from ipyparallel.error import RemoteError
from local_ranks import LocalRanks
from matplotlib.backends.backend_agg import FigureCanvasAgg
from torch.distributed import distributed_c10d

from utils.figures import alt
from utils.labs.lab06 import chunk_pictures as draw
from utils.labs.lab06 import chunk_steps, chunk_trace

START = """
import torch, torch.distributed as dist
from utils.labs.lab06 import chunk_trace
dist.init_process_group("mpi")
rank, p = dist.get_rank(), dist.get_world_size()


def isend(tensor, place, group):
    return dist.isend(tensor, group=group, group_dst=place)


def irecv(tensor, place, group):
    return dist.irecv(tensor, group=group, group_src=place)


def who(group):
    return dist.get_rank(group), dist.get_world_size(group)


def exchange(out, to, into, source, group):
    requests = [isend(out, to, group), irecv(into, source, group)]
    for request in requests:
        request.wait()


def crossbar(x, group=None):
    r, p = who(group)
    others = [q for q in range(p) if q != r]
    got = {q: torch.empty_like(x) for q in others}
    requests = [irecv(got[q], q, group) for q in others] + [isend(x, q, group) for q in others]
    for request in requests:
        request.wait()
    got[r] = x.clone()
    x.copy_(sum(got[q] for q in range(p)))


def central(x, group=None):
    r, p = who(group)
    if r == 0:
        got = torch.empty_like(x)
        for q in range(1, p):
            irecv(got, q, group).wait()
            x += got
        for request in [isend(x, q, group) for q in range(1, p)]:
            request.wait()
    else:
        isend(x, 0, group).wait()
        irecv(x, 0, group).wait()


def tree(x, group=None):
    r, p = who(group)
    below = [q for q in (2 * r + 1, 2 * r + 2) if q < p]
    for q in below:
        got = torch.empty_like(x)
        irecv(got, q, group).wait()
        x += got
    if r:
        isend(x, (r - 1) // 2, group).wait()
        irecv(x, (r - 1) // 2, group).wait()
    for request in [isend(x, q, group) for q in below]:
        request.wait()


def ring(x, group=None):
    r, p = who(group)
    part = torch.tensor_split(x, p)
    for k in range(p - 1):
        got = torch.empty_like(part[(r - k - 1) % p])
        exchange(part[(r - k) % p], (r + 1) % p, got, (r - 1) % p, group)
        part[(r - k - 1) % p].add_(got)
    for k in range(p - 1):
        exchange(part[(r + 1 - k) % p], (r + 1) % p, part[(r - k) % p], (r - 1) % p, group)


def halving(x, group=None):  # p is a power of two
    r, p = who(group)
    low, high, halves = 0, len(x), []
    gap = p // 2
    while gap:
        middle = (low + high) // 2
        mine, theirs = (low, middle), (middle, high)
        if r & gap:
            mine, theirs = theirs, mine
        got = torch.empty_like(x[slice(*mine)])
        exchange(x[slice(*theirs)], r ^ gap, got, r ^ gap, group)
        x[slice(*mine)] += got
        halves.append((mine, theirs, gap))
        (low, high), gap = mine, gap // 2
    for mine, theirs, gap in reversed(halves):
        exchange(x[slice(*mine)], r ^ gap, x[slice(*theirs)], r ^ gap, group)


def doubling(x, group=None):  # p is a power of two
    r, p = who(group)
    gap = 1
    while gap < p:
        got = torch.empty_like(x)
        exchange(x, r ^ gap, got, r ^ gap, group)
        x += got
        gap *= 2


def server(x, group=None, reducers=1):  # the last ranks reduce, and have no data of their own
    r, p = who(group)
    workers = p - reducers
    part = torch.tensor_split(x, reducers)
    if r < workers:
        for k in range(reducers):
            k = (k + r) % reducers
            isend(part[k], workers + k, group).wait()
        for k in range(reducers):
            irecv(part[k], workers + k, group).wait()
    else:
        total = torch.zeros_like(part[r - workers])
        got = torch.empty_like(total)
        for q in range(workers):
            irecv(got, q, group).wait()
            total += got
        for request in [isend(total, q, group) for q in range(workers)]:
            request.wait()
"""


def probe(user_ns: dict, *, rank: int) -> object:
    """The story of this rank."""
    return user_ns.get("story")


def stories(p: int, code: str, more: str = "") -> list:
    """What p ranks have noted, as it would travel to the kernel."""
    with LocalRanks(p) as up:
        up.run(START + more)
        up.run(code)
        return [reply.value for reply in up.ask(f"{__name__}:probe")]


def told(p: int, call: str, more: str = "") -> chunk_steps.Steps:
    return chunk_steps.steps(stories(p, f"story = chunk_trace.watch({call})", more))


def ways(step: tuple[chunk_steps.Move, ...]) -> set[tuple]:
    """Who sends which chunk to whom, and what becomes of it there."""
    return {(move.source, move.to, move.chunk, move.effect) for move in step}


def ranks_in(steps: chunk_steps.RingSteps, step: int, rank: int) -> list[list[int]]:
    """Which ranks are in the sum of each chunk of a rank, after a step."""
    return [sorted(cell.ranks) for cell in steps.states[step][rank]]


def everything(steps: chunk_steps.Steps) -> list[list[list[int]]]:
    """Over whom each chunk of each rank is summed, after each step, rank by rank."""
    return [
        [ranks_in(steps, s, r) for r in range(len(steps.members))] for s in range(len(steps.states))
    ]


# -- an all-reduce of each kind -------------------------------------------------------------------


@pytest.mark.parametrize("length", [12, 13, 16])
@pytest.mark.parametrize("p", [2, 3, 4, 5, 6])
def test_a_ring_shows_each_chunk_on_its_way_round(p, length):
    steps = told(p, f"ring, {length}")
    sizes = [len(part) for part in torch.arange(length).tensor_split(p)]
    assert [b - a for a, b in itertools.pairwise(steps.bounds)] == sizes
    assert len(steps.moves) == 2 * (p - 1)
    assert steps.amounts == ((p, length),) * (2 * (p - 1))
    for s in range(2 * (p - 1) + 1):
        for r in range(p):
            for c in range(p):
                # Chunk c begins at rank c: one more rank each step, then the sum goes round.
                way = (r - c) % p
                over = {(r - k) % p for k in range(min(way, s) + 1)} if way <= s else {r}
                if s >= p - 1 and (way == p - 1 or way + p <= s):
                    over = set(range(p))
                assert set(ranks_in(steps, s, r)[c]) == over, (s, r, c)
    for s, moves in enumerate(steps.moves):
        effect = "added" if s < p - 1 else "copied"
        assert ways(moves) == {(r, (r + 1) % p, (r - s) % p, effect) for r in range(p)}


@pytest.mark.parametrize("p", [2, 3, 4, 5, 6])
def test_a_crossbar_is_one_step_of_all_to_all(p):
    steps = told(p, "crossbar, 13")
    assert steps.bounds == (0, 13)
    assert everything(steps) == [[[[r]] for r in range(p)], [[list(range(p))]] * p]
    pairs = [(r, q) for r in range(p) for q in range(p) if r != q]
    assert ways(steps.moves[0]) == {(r, q, 0, "added") for r, q in pairs}
    assert steps.amounts == ((p * (p - 1), 13 * p * (p - 1)),)


@pytest.mark.parametrize("p", [2, 4, 6])
def test_a_central_reducer_gathers_one_after_the_other_and_hands_out_at_once(p):
    steps = told(p, "central, 12")
    own, complete = [[r] for r in range(p)], list(range(p))
    for s in range(p):
        assert everything(steps)[s] == [[list(range(s + 1))], *([one] for one in own[1:])]
    assert everything(steps)[p] == [[complete]] * p
    assert [ways(moves) for moves in steps.moves[:-1]] == [
        {(s, 0, 0, "added")} for s in range(1, p)
    ]
    assert ways(steps.moves[-1]) == {(0, r, 0, "copied") for r in range(1, p)}


def test_a_tree_shows_both_branches_in_the_same_steps():
    steps = told(6, "tree, 12")
    assert [ways(moves) for moves in steps.moves] == [
        {(3, 1, 0, "added"), (5, 2, 0, "added")},
        {(4, 1, 0, "added")},
        {(1, 0, 0, "added")},
        {(2, 0, 0, "added")},
        {(0, 1, 0, "copied"), (0, 2, 0, "copied")},
        {(1, 3, 0, "copied"), (1, 4, 0, "copied"), (2, 5, 0, "copied")},
    ]
    assert everything(steps)[2] == [[[0]], [[1, 3, 4]], [[2, 5]], [[3]], [[4]], [[5]]]
    assert everything(steps)[4] == [[[0, 1, 2, 3, 4, 5]], *everything(steps)[2][1:]]


def test_halving_shows_smaller_and_smaller_parts():
    steps = told(4, "halving, 13")
    assert steps.bounds == (0, 3, 6, 9, 13)
    assert everything(steps)[1] == [
        [[0, 2], [0, 2], [0], [0]],
        [[1, 3], [1, 3], [1], [1]],
        [[2], [2], [0, 2], [0, 2]],
        [[3], [3], [1, 3], [1, 3]],
    ]
    mine = [r for row in everything(steps)[2] for r, over in enumerate(row) if len(over) == 4]
    assert mine == [0, 1, 2, 3]
    assert steps.amounts == ((4, 26), (4, 13), (4, 13), (4, 26))
    assert everything(steps)[4] == [[[0, 1, 2, 3]] * 4] * 4


def test_doubling_shows_twice_as_many_ranks_after_each_step():
    steps = told(4, "doubling, 12")
    assert everything(steps) == [
        [[[0]], [[1]], [[2]], [[3]]],
        [[[0, 1]], [[0, 1]], [[2, 3]], [[2, 3]]],
        [[[0, 1, 2, 3]]] * 4,
    ]


@pytest.mark.parametrize(("p", "reducers"), [(2, 1), (4, 1), (5, 2), (6, 3)])
def test_a_reducer_without_data_shows_what_is_in_its_buffer(p, reducers):
    steps = told(p, f"lambda x, group: server(x, group, {reducers}), 13")
    workers = list(range(p - reducers))
    for r in range(p):
        assert all(cell.buffer == (r not in workers) for cell in steps.states[0][r])
    assert everything(steps)[0][len(workers) :] == [[[]] * reducers] * reducers
    for r in workers:
        assert ranks_in(steps, -1, r) == [workers] * reducers
    for k in range(reducers):
        held = [row[len(workers) + k][k] for row in everything(steps)]
        grown = [over for over, _ in itertools.groupby(held)]
        assert grown == [workers[:n] for n in range(len(workers) + 1)]


# -- what students write --------------------------------------------------------------------------


def test_the_picture_does_not_depend_on_which_rank_is_faster():
    slow = """
import time
def late(x, group=None):
    r, p = who(group)
    for q in range(1, p):
        if r == 0:
            got = torch.empty_like(x)
            irecv(got, q, group).wait()
            x += got
        elif r == q:
            while not (sent := isend(x, 0, group)).is_completed():
                pass
"""
    assert [ways(moves) for moves in told(4, "late, 12", slow).moves] == [
        {(q, 0, 0, "added")} for q in (1, 2, 3)
    ]


def test_what_has_come_but_was_not_waited_for_is_not_shown_before():
    early = """
def early(x, group=None):
    r, p = who(group)
    if r == 0:  # both are there at once, but the first is waited for before the second one is sent
        requests = [irecv(x[:6], 1, group), irecv(x[6:], 1, group)]
        requests[0].wait()
        isend(x[:1], 1, group).wait()
        requests[1].wait()
    else:
        isend(x[:6], 0, group).wait()
        isend(x[6:], 0, group).wait()
        irecv(x[:1], 0, group).wait()
"""
    steps = told(2, "early, 12", early)
    assert [ranks_in(steps, s, 0) for s in range(3)] == [
        [[0], [0], [0]],
        [[1], [1], [0]],
        [[1], [1], [1]],
    ]


@pytest.mark.parametrize(
    "swap",
    [
        "dist.send(x, 1 - r) if r else dist.recv(got, 1 - r); "
        "dist.recv(got, 1 - r) if r else dist.send(x, 1 - r)",
        "[w.wait() for w in dist.batch_isend_irecv(["
        "dist.P2POp(dist.isend, x, 1 - r), dist.P2POp(dist.irecv, got, 1 - r)])]",
        "s = dist.isend(x.clone(), 1 - r); dist.recv(got); s.wait()",
        "s = dist.isend(x, 1 - r); w = dist.irecv(got, 1 - r)\n"
        "    while not (s.is_completed() and w.is_completed()): pass",
    ],
    ids=["blocking", "batch", "of any rank, a copy", "asked until it is there"],
)
def test_messages_are_seen_in_whatever_way_they_are_sent(swap):
    steps = told(
        2,
        "swap, 4",
        f"""
def swap(x, group=None):
    r, got = dist.get_rank(), torch.empty_like(x)
    {swap}
    x += got
""",
    )
    moved = {way[:3] for moves in steps.moves for way in ways(moves)}
    assert moved == {(0, 1, 0), (1, 0, 0)}
    assert everything(steps)[-1] == [[[0, 1]], [[0, 1]]]
    assert steps.notes == ()


def test_a_number_that_waits_in_a_buffer_is_not_said_to_be_in_the_sum():
    later = """
def later(x, group=None):
    got = [torch.empty_like(x) for _ in range(2)]
    own = x.clone()
    for one in got:
        exchange(own, 1 - rank, one, 1 - rank, group)
    x += got[1]
"""
    steps = told(2, "later, 12", later)
    assert [{way[-1] for way in ways(moves)} for moves in steps.moves] == [{"kept"}, {"added"}]
    steps = told(2, "later, 12", later.replace("+= got[1]", "+= 2 * got[1]"))
    assert [{way[-1] for way in ways(moves)} for moves in steps.moves] == [{"kept"}, {"other"}]


TWICE = """
def twice(x, group=None):
    for _ in range(2):
        got = torch.empty_like(x)
        exchange(x.clone(), 1 - rank, got, 1 - rank, group)
        x += got
"""


def test_a_number_that_was_added_twice_is_shown_twice():
    assert [cell.counts for (cell,) in told(2, "twice, 12", TWICE).states[-1]] == [(2, 2)] * 2


def test_a_chunk_in_the_wrong_place_is_not_taken_for_the_sum():
    moved = """
def moved(x, group=None):
    got = torch.empty(6)
    exchange(x[:6], 1 - rank, got, 1 - rank, group)
    x[6:] = got
"""
    steps = told(2, "moved, 12", moved)
    assert [cell.moved for cell in steps.states[-1][0]] == [False, True]
    steps = told(2, "moved, 12", moved.replace("= got", "+= got"))
    assert [ranks_in(steps, -1, 0)[0], steps.states[-1][0][0].moved] == [[0], False]
    assert all(cell.moved or cell.counts is None for cell in steps.states[-1][0][1:])


def test_a_sum_of_neighbouring_chunks_is_not_taken_for_that_of_the_one_between():
    off_by_rank = """
def off_by_rank(x, group=None):  # rank r hands out its chunk r as if it were chunk 1
    r, p = who(group)
    got = [torch.empty(4) for _ in range(p)]
    requests = [irecv(got[q], q, group) for q in range(p) if q != r]
    requests += [isend(x[4 * r : 4 * r + 4], q, group) for q in range(p) if q != r]
    for request in requests:
        request.wait()
    got[r] = x[4 * r : 4 * r + 4]
    x[4:8] = sum(got)
"""
    row = told(3, "off_by_rank, 12", off_by_rank).states[-1][0]
    assert all(cell.moved or cell.counts is None for cell in row[1:-1])


def test_a_mean_or_rubbish_is_not_taken_for_a_sum():
    steps = told(2, "mean, 12", "def mean(x, group=None):\n    doubling(x, group); x /= 2\n")
    assert all(cell.counts is None for row in steps.states[-1] for cell in row)


def test_what_the_picture_leaves_out_is_said():
    code = """
from torch.distributed import isend as directly
def careless(x, group=None):
    if rank == 1:
        isend(x, 0, group)
        isend(x, 0, group).wait()
        directly(x, 0).wait()
    else:
        irecv(x, 1, group).wait()
        dist.recv(torch.empty(5), 1)
    dist.barrier()
    return x + 1
"""
    notes = told(2, "careless, 5", code).notes
    assert "rank 1 did not wait for 1 of its messages" in notes
    assert "rank 1 had 1 messages that watch could not follow" in notes
    assert "rank 0 returned a new tensor, but the picture shows the tensor it got" in notes
    assert "not drawn: barrier" in notes


def test_a_message_that_nobody_receives_is_said():
    code = "def lost(x, group=None):\n    rank and isend(x, 0, group).wait()\n"
    assert told(2, "lost, 5", code).notes == ("rank 0 did not receive 1 message of rank 1",)


def test_a_function_that_raises_is_reported_as_its_own_error_and_leaves_nothing_behind():
    before = (dist.isend, dist.irecv, distributed_c10d.isend, distributed_c10d.irecv)
    code = """
def stub(x, group=None):
    raise NotImplementedError("Task 6.4: ring")
try:
    chunk_trace.watch(stub, 5)
except NotImplementedError as error:
    story = str(error), dist.isend.__module__, distributed_c10d_isend() is dist.isend
"""
    more = "from torch.distributed import distributed_c10d as c\n"
    more += "def distributed_c10d_isend():\n    return c.isend\n"
    expected = ["Task 6.4: ring", "torch.distributed.distributed_c10d", True]
    assert stories(2, code, more) == [expected] * 2
    assert (dist.isend, dist.irecv, distributed_c10d.isend, distributed_c10d.irecv) == before


def test_a_deadlock_is_told_with_the_students_line_not_with_ours():
    wait = "def stuck(x, group=None):\n    dist.recv(x, 1 - rank)\n"
    with pytest.raises(RemoteError, match=r"at cell line \d+ in stuck\(\)"):
        told(2, "stuck, 5", wait)


def test_a_smaller_group_is_named_by_its_own_ranks():
    code = """
group = dist.new_group([0, 2, 3])
story = chunk_trace.watch(ring, 12, group) if rank != 1 else None
"""
    noted = stories(4, code)
    steps = chunk_steps.steps(noted)
    assert steps.members == (0, 2, 3)
    assert ranks_in(steps, -1, 2) == [[0, 1, 2]] * 3
    words = [text.get_text() for text in draw.still(noted).axes[0].texts]
    assert {"rank 0", "rank 2", "rank 3"} <= set(words)
    assert "1" not in words


@pytest.mark.parametrize("length", [0, 10_000])
def test_a_length_that_cannot_be_told_apart_is_refused(length):
    with pytest.raises(ValueError, match=r"can't distinguish .* elements on 4 ranks"):
        chunk_trace.base_for(4, length)


def test_stories_of_some_ranks_only_are_refused():
    one = stories(2, "story = chunk_trace.watch(ring, 5)")
    with pytest.raises(ValueError, match=r"the stories of ranks \[1\]"):
        chunk_steps.steps(one[1:])
    assert chunk_steps.steps([*one[::-1], None]) == chunk_steps.steps(one)


# -- the pictures ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "call"),
    [
        (2, "ring, 5"),
        pytest.param(6, "ring, 16", marks=pytest.mark.extended),
        (6, "crossbar, 12"),
        (4, "halving, 13"),
        (6, "lambda x, group: server(x, group, 3), 13"),
    ],
)
def test_nothing_that_is_drawn_is_cut_off(p, call):
    noted = stories(p, f"story = chunk_trace.watch({call})")
    for figure in (draw.still(noted, "a title"), draw.stills({"one": noted, "the other": noted})):
        (axes,), renderer = figure.axes, FigureCanvasAgg(figure).get_renderer()
        for text in axes.texts:
            box = text.get_window_extent(renderer)
            assert axes.bbox.padded(1).contains(box.x0, box.y0), text.get_text()
            assert axes.bbox.padded(1).contains(box.x1, box.y1), text.get_text()
        assert figure.get_size_inches()[0] == pytest.approx(8.8)


def test_who_does_not_see_the_picture_is_told_each_step():
    said = alt.describe(draw.still(stories(2, "story = chunk_trace.watch(ring, 4)"), "A ring"))
    assert said == (
        "A ring: 2 ranks, 4 elements in 2 chunks, 2 rounds. "
        "Round 1: rank 0 sends x[0:2], the sum over rank 0, to rank 1, which adds it; "
        "rank 1 sends x[2:4], the sum over rank 1, to rank 0, which adds it. "
        "Round 2: rank 0 sends x[2:4], the sum over ranks 0 and 1, to rank 1, which keeps it; "
        "rank 1 sends x[0:2], the sum over ranks 0 and 1, to rank 0, which keeps it."
    )


def test_a_film_says_what_is_in_each_chunk_after_each_round():
    ring = draw.film_of("ring", told(2, "ring, 4"))
    assert [move[:2] for move in ring["rounds"][1]["moves"]] == [[0, 1], [1, 0]]
    assert [round["cells"] for round in ring["rounds"]] == [
        [["10", "10"], ["01", "01"]],
        [["10", "11"], ["11", "01"]],
        [["11", "11"], ["11", "11"]],
    ]
    words = ring["rounds"][1]["words"]
    assert words.startswith("rank 0 sends x[0:2], the sum over rank 0, to rank 1, which adds")


def test_a_film_of_a_wrong_sum_calls_no_chunk_complete():
    film = draw.film_of("twice", told(2, "twice, 4", TWICE))
    assert film["complete"] == "11"
    assert "11" not in itertools.chain(*film["rounds"][-1]["cells"])


def test_films_of_several_all_reduces_have_all_steps_in_the_picture_without_scripts():
    noted = {name: stories(4, f"story = chunk_trace.watch({name}, 8)") for name in ("ring", "tree")}
    film = draw.film(noted)
    data, metadata = film._repr_mimebundle_()
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert metadata["image/png"]["alt"] == film.words
    assert film.words.startswith("ring: 4 ranks, 8 elements in 4 chunks, 6 rounds.")
    titles = [text.get_text() for text in film.still.axes[0].texts]
    assert {"ring", "tree"} <= set(titles)


@pytest.mark.parametrize(("p", "length"), [(1, 5), (4, 3)])
def test_a_single_rank_and_empty_chunks_are_drawn_too(p, length):
    noted = stories(p, f"story = chunk_trace.watch(ring, {length})")
    steps = chunk_steps.steps(noted)
    assert len(steps.states) == 2 * (p - 1) + 1
    assert steps.bounds == (tuple(range(length + 1)) if p > 1 else (0, length))
    assert draw.still(noted).axes


def test_more_ranks_than_colours_are_refused():
    with pytest.raises(ValueError, match="room for 6 ranks"):
        draw.still(stories(7, "story = chunk_trace.watch(ring, 7)"))
