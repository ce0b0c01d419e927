"""send, recv, isend, irecv."""

import contextlib
import time
from unittest import mock

import torch
import torch.distributed as dist
from helpers import ALL, of_rank, rank, refused, same, size


def _pair() -> bool:
    return size() >= 2


def case_send_and_recv_deliver_every_dtype():
    if not _pair():
        return "needs two ranks"
    for dtype in ALL:
        if rank() == 0:
            dist.send(of_rank(7, (3, 4), dtype), 1)
        if rank() == 1:
            got = torch.zeros((3, 4), dtype=dtype)
            assert dist.recv(got, 0) == 0
            same(got, of_rank(7, (3, 4), dtype), str(dtype))


def case_isend_and_irecv_go_round_the_ring():
    got = torch.zeros(1000)
    if size() == 1:
        return "needs two ranks"
    works = [
        dist.isend(of_rank(rank(), (1000,)), (rank() + 1) % size()),
        dist.irecv(got, (rank() - 1) % size()),
    ]
    for work in works:
        work.wait()
    same(got, of_rank((rank() - 1) % size(), (1000,)))


def case_messages_with_different_tags_find_their_receives():
    if not _pair():
        return "needs two ranks"
    a, b = torch.zeros(2), torch.zeros(2)
    if rank() == 0:
        for tag in (5, 6):
            dist.send(torch.full((2,), float(tag)), 1, tag=tag)
    if rank() == 1:
        dist.recv(b, 0, tag=6)
        dist.recv(a, 0, tag=5)
        same(a, torch.tensor([5.0, 5.0]))
        same(b, torch.tensor([6.0, 6.0]))


def case_messages_of_one_sender_arrive_in_order():
    if not _pair():
        return "needs two ranks"
    if rank() == 0:
        for k in range(50):
            dist.send(torch.tensor([k]), 1)
    if rank() == 1:
        got = torch.zeros(1, dtype=torch.int64)
        for k in range(50):
            dist.recv(got, 0)
            assert got.item() == k


def case_a_recv_without_a_source_is_known_as_one_on_record():
    from torch_mpi.record import log

    if not _pair():
        return "needs two ranks"
    mark = log.mark()
    if rank() == 1:
        for _ in range(2):
            dist.send(torch.ones(3), 0)
    if rank() == 0:
        dist.recv(torch.zeros(3))
        dist.recv(torch.zeros(3), 1)
        seen = [(c.any_source, c.peer, c.sent, c.received) for c in log.since(mark)]
        assert seen == [(True, 1, 0, 12), (False, 1, 0, 12)], seen
    if rank() == 1:
        assert {(c.any_source, c.sent, c.received) for c in log.since(mark)} == {(False, 12, 0)}


def case_recv_without_a_source_tells_who_sent():
    if rank() != 0:
        dist.send(torch.tensor([rank() * 10]), 0)
        return
    seen = set()
    for _ in range(size() - 1):
        got = torch.zeros(1, dtype=torch.int64)
        source = dist.recv(got)
        assert got.item() == source * 10
        seen.add(source)
    assert seen == set(range(1, size()))


def case_a_strided_tensor_is_sent_and_received_by_value():
    if not _pair():
        return "needs two ranks"
    if rank() == 0:
        dist.send(torch.arange(24.0).reshape(4, 6).t()[1:4], 1)
    if rank() == 1:
        home = torch.zeros(4, 6)
        dist.recv(home.t()[1:4], 0)
        expected = torch.zeros(4, 6)
        expected[:, 1:4] = torch.arange(24.0).reshape(4, 6)[:, 1:4]
        same(home, expected)


def case_an_empty_tensor_and_a_scalar_are_messages_too():
    if not _pair():
        return "needs two ranks"
    if rank() == 0:
        dist.send(torch.empty(0, 3), 1)
        dist.send(torch.tensor(2.5), 1)
    if rank() == 1:
        dist.recv(torch.empty(0, 3), 0)
        scalar = torch.tensor(0.0)
        dist.recv(scalar, 0)
        assert scalar.item() == 2.5


def case_an_isend_completes_without_a_wait():
    if not _pair():
        return "needs two ranks"
    big = torch.ones(1_000_000)
    if rank() == 0:
        work = dist.isend(big, 1)
    if rank() == 1:
        work = dist.irecv(torch.zeros_like(big), 0)
    if rank() < 2:
        deadline = time.monotonic() + 20
        while not work.is_completed() and time.monotonic() < deadline:
            time.sleep(1e-3)
        assert work.is_completed()
        assert work.is_success()


def case_memory_that_a_pending_message_uses_is_neither_freed_nor_moved():
    """FSDP frees storages: MPI would then send somebody else's memory, or write into it."""
    from torch_mpi.errors import CommunicationError

    if not _pair():
        return "needs two ranks"
    frees = (
        lambda x: x.untyped_storage().resize_(0),
        lambda x: x[5:].untyped_storage().resize_(0),
        lambda x: x.resize_(3 * x.numel()),
        lambda x: x.resize_as_(torch.zeros(3 * x.numel())),
        lambda x: x.share_memory_(),
    )
    for free in frees:
        got, sent = torch.zeros(300_000), of_rank(rank(), (300_000,))
        receive = dist.irecv(got, (rank() - 1) % size())
        with refused(CommunicationError, "still uses", "irecv(src="):
            free(got)
        dist.barrier()
        dist.isend(sent, (rank() + 1) % size()).wait()
        receive.wait()
        same(got.clone(), of_rank((rank() - 1) % size(), (300_000,)))
        free(got)  # it is over, so the memory is the program's again
        free(sent)


def case_a_dropped_isend_still_delivers():
    if not _pair():
        return "needs two ranks"
    if rank() == 0:
        for k in range(8):
            dist.isend(torch.full((300_000,), float(k)), 1)
        junk = [torch.full((300_000,), -1.0) for _ in range(8)]
        assert len(junk) == 8
    if rank() == 1:
        for k in range(8):
            got = torch.zeros(300_000)
            dist.recv(got, 0)
            same(got, torch.full((300_000,), float(k)))
    dist.barrier()


def case_batch_isend_irecv_works():
    if not _pair():
        return "needs two ranks"
    got = torch.zeros(4)
    ops = [
        dist.P2POp(dist.isend, of_rank(rank(), (4,)), (rank() + 1) % size()),
        dist.P2POp(dist.irecv, got, (rank() - 1) % size()),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    same(got, of_rank((rank() - 1) % size(), (4,)))


def case_a_message_of_another_size_or_dtype_is_an_error_on_both_sides():
    from torch_mpi.errors import CommunicationMismatch, CommunicationStopped

    if size() != 2:
        return "needs two ranks"
    for sent, expected in (
        (torch.ones(3), torch.zeros(10)),
        (torch.ones(30), torch.zeros(10)),
        (torch.ones(3000), torch.zeros(3000, dtype=torch.int32)),
    ):
        words = [f"float32[{sent.numel()}]", f"{expected.dtype}"[6:] + f"[{expected.numel()}]"]
        if rank() == 0:
            with refused(CommunicationStopped, "rank 0 sent", "rank 1 receives", *words):
                dist.send(sent, 1)
                dist.barrier()
        else:
            with refused(CommunicationMismatch, "rank 0 sent", "rank 1 receives", *words):
                dist.recv(expected, 0)
        dist.barrier()


def case_object_messages_work():
    if not _pair():
        return "needs two ranks"
    if rank() == 0:
        dist.send_object_list([{"step": 3}, "text"], 1)
    if rank() == 1:
        got = [None, None]
        dist.recv_object_list(got, 0)
        assert got == [{"step": 3}, "text"]


def case_wrong_ranks_tags_and_tensors_are_named():
    with refused(ValueError, str(size() + 3)):
        dist.send(torch.ones(1), size() + 3)
    group = dist.group.WORLD
    with refused(ValueError, f"dst={size()}", "ranks 0 to"):
        group.send([torch.ones(1)], size(), 0)
    with refused(ValueError, "tag=-2"):
        group.recv([torch.ones(1)], 0, -2)
    with refused(ValueError, "meta", ".cpu()"):
        group.send([torch.ones(1, device="meta")], 0, 0)
    with refused(TypeError, "sparse", "to_dense"):
        group.send([torch.eye(3).to_sparse()], 0, 0)


def case_a_receive_nobody_sends_to_ends_at_the_deadline():
    from datetime import timedelta

    from torch_mpi.errors import CommunicationTimeout

    if not _pair():
        return "needs two ranks"
    if rank() == 0:
        work = dist.irecv(torch.zeros(3, 4), 1, tag=9)
        with refused(CommunicationTimeout, "recv(src=1, tag=9)", "float32[3, 4]", "48 bytes",
                     "point_to_point.py:", "rank 1"):  # fmt: skip
            work.wait(timedelta(seconds=0.2))
        dist.send(torch.ones(1), 1)
    if rank() == 1:
        dist.recv(torch.zeros(1), 0)
        dist.send(torch.full((3, 4), 2.0), 0, tag=9)
    if rank() == 0:
        got = torch.zeros(3, 4)
        dist.recv(got, 1, tag=9)
        same(got, torch.full((3, 4), 2.0), "the message after the one given up")


def case_an_mpi_library_with_few_tags_takes_every_message():
    from mpi4py import MPI

    from torch_mpi.group.messages import Channels
    from torch_mpi.network import Network, link

    largest, used = 32_767, set()

    class FewTags(MPI.Intracomm):
        def Get_attr(self, key):
            return largest if key == MPI.TAG_UB else super().Get_attr(key)

        def Isend(self, buffer, dest, tag=0):
            used.add(tag)
            return super().Isend(buffer, dest, tag)

    if not _pair():
        return "needs two ranks"
    group, got = dist.group.WORLD, torch.zeros(1000)
    old = group.channels
    few = Channels(FewTags(old.envelopes), FewTags(old.data), old.members, old.rank)
    with mock.patch.object(group, "channels", few):
        few.sent = 3 * 2**20 + 5  # as after millions of messages
        if rank() < 2:
            works = [dist.isend(of_rank(rank(), (1000,)), 1 - rank(), tag=largest)]
            works.append(dist.irecv(got, 1 - rank(), tag=largest))
            for work in works:
                work.wait()
            same(got, of_rank(1 - rank(), (1000,)))
        link.set(Network(latency=20e-6))
        total = of_rank(rank(), (1000,))
        dist.all_reduce(total)
        link.set(None)
        same(total, sum(of_rank(r, (1000,)) for r in range(size())))
        with refused(ValueError, f"tag={largest + 1}", f"from 0 to {largest}", "MPI_TAG_UB"):
            group.send([got], (rank() + 1) % size(), largest + 1)
    assert max(used) <= largest, sorted(used)[-3:]


def case_a_small_isend_may_have_to_wait_for_its_receive_on_request():
    from torch_mpi.group.messages import synchronous_sends

    if not _pair():
        return "needs two ranks"
    for nbytes in (4, 100_000):
        tensor = torch.ones(nbytes // 4)
        if rank() == 0:
            with synchronous_sends():
                work = dist.isend(tensor, 1)
            dist.isend(torch.ones(1), 1, tag=7).wait()  # outside of the block, as ever
            until = time.monotonic() + 0.05
            while time.monotonic() < until:
                assert not work.is_completed(), nbytes
        dist.barrier()
        if rank() == 1:
            dist.recv(tensor, 0)
            dist.recv(tensor[:1], 0, tag=7)
        if rank() == 0:
            work.wait()
            assert work.is_completed()


def case_two_small_sends_first_are_a_deadlock_when_every_send_waits():
    from torch_mpi.errors import CommunicationError
    from torch_mpi.group.messages import synchronous_sends

    if size() != 2:
        return "needs two ranks"
    for synchronous in (True, False):
        peer, got = 1 - rank(), torch.zeros(1)
        with synchronous_sends() if synchronous else contextlib.nullcontext():
            if synchronous:
                with refused(CommunicationError, "waits in send(dst=", "4 bytes", "never comes"):
                    dist.send(torch.ones(1), peer)
                    dist.barrier()
            else:
                dist.send(torch.full((1,), 5.0), peer)
                dist.recv(got, peer)
                same(got, torch.full((1,), 5.0), "after the deadlock")
