"""Process groups: their making, their end, their isolation."""

import time
from unittest import mock

import torch
import torch.distributed as dist
from helpers import everybody, of_rank, rank, refused, same, size


def case_rank_and_size_are_those_of_mpi():
    from mpi4py import MPI

    assert (rank(), size()) == (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    assert dist.get_backend() == "mpi"
    assert dist.is_mpi_available()


def case_a_subgroup_reduces_among_its_members_only():
    evens = list(range(0, size(), 2))
    group = dist.new_group(evens)
    tensor = of_rank(rank())
    if rank() in evens:
        dist.all_reduce(tensor, group=group)
        same(tensor, sum(of_rank(r) for r in evens))
        assert dist.get_world_size(group) == len(evens)
        assert dist.get_rank(group) == evens.index(rank())
    else:
        assert group == dist.GroupMember.NON_GROUP_MEMBER
        same(tensor, of_rank(rank()))


def case_global_ranks_are_translated_in_a_subgroup():
    if size() < 3:
        return "needs three ranks"
    group = dist.new_group([1, 2])
    if rank() not in (1, 2):
        return None
    tensor = of_rank(rank())
    dist.broadcast(tensor, 2, group=group)
    same(tensor, of_rank(2))
    if rank() == 1:
        dist.send(torch.tensor([11]), 2, group=group)
    if rank() == 2:
        got = torch.zeros(1, dtype=torch.int64)
        assert dist.recv(got, group=group) == 1
        assert got.item() == 11


def case_a_message_to_a_rank_that_has_destroyed_the_group_reaches_no_later_group():
    """MPI gives a new communicator the number of one that was freed."""
    if size() < 2:
        return "needs two ranks"
    old = dist.new_group([0, 1])
    if rank() == 1:
        dist.destroy_process_group(old)
    dist.barrier()
    if rank() == 0:
        dist.send(torch.tensor([13]), 1, group=old)
        dist.destroy_process_group(old)
    new, got = dist.new_group([0, 1]), torch.zeros(1, dtype=torch.int64)
    if rank() == 0:
        dist.send(torch.tensor([7]), 1, group=new)
    elif rank() == 1:
        dist.recv(got, 0, group=new)
        assert got.item() == 7
    dist.barrier()
    return None


def case_groups_that_ranks_destroy_at_different_times_leave_no_communicator_behind():
    if size() < 2:
        return "needs two ranks"
    from torch_mpi.protocol import world

    known = len(world.current().groups.closed)
    for turn in range(20):
        group = dist.new_group([0, 1])
        if rank() == turn % 2:
            dist.destroy_process_group(group)
        dist.barrier()
        if rank() == (turn + 1) % 2:
            dist.destroy_process_group(group)
    if rank() < 2:
        dist.destroy_process_group(dist.new_group([0, 1]))
        # At most the last one waits for the other rank's last message.
        assert len(world.current().groups.closed) <= known + 1
    else:
        dist.new_group([0, 1])
    return None


def case_messages_of_two_groups_never_meet():
    if size() < 2:
        return "needs two ranks"
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    if rank() == 0:
        dist.send(torch.tensor([1]), 1, group=first)
        dist.send(torch.tensor([2]), 1, group=second)
    if rank() == 1:
        got = torch.zeros(1, dtype=torch.int64)
        dist.recv(got, 0, group=second)
        assert got.item() == 2
        dist.recv(got, 0, group=first)
        assert got.item() == 1


def case_overlapping_groups_and_async_operations_do_not_mix():
    groups = [dist.new_group([r, (r + 1) % size()]) for r in range(size())] if size() > 2 else []
    for r, group in enumerate(groups):
        members = {r, (r + 1) % size()}
        if rank() in members:
            tensor = of_rank(rank())
            dist.all_reduce(tensor, group=group)
            same(tensor, sum(of_rank(m) for m in members))
    tensor = of_rank(rank())
    dist.all_reduce(tensor)
    same(tensor, sum(everybody()))


def case_many_groups_can_be_made_and_destroyed():
    for _ in range(60):
        group = dist.new_group(list(range(size())))
        dist.all_reduce(torch.ones(1), group=group)
        dist.destroy_process_group(group)


def case_a_destroyed_group_says_so():
    group = dist.new_group(list(range(size())))
    dist.destroy_process_group(group)
    with refused(RuntimeError, "destroyed"):
        group.allreduce([torch.ones(1)], dist.AllreduceOptions())


def case_initialising_again_gives_a_working_world():
    for _ in range(3):
        dist.destroy_process_group()
        dist.init_process_group("mpi")
        tensor = of_rank(rank())
        dist.all_reduce(tensor)
        same(tensor, sum(everybody()))


def case_a_group_splits_by_the_method_of_the_group():
    half = [r for r in range(size()) if r % 2 == rank() % 2]
    child = dist.group.WORLD.split_group(half)
    tensor = of_rank(rank())
    child.allreduce([tensor], dist.AllreduceOptions()).wait()
    same(tensor, sum(of_rank(r) for r in half))


def case_pytorchs_split_group_gives_each_rank_its_part():
    from torch_mpi.compat import minor

    if minor(torch.__version__) < (2, 15):
        return "before 2.15 PyTorch splits groups of accelerators only"
    halves = [[r for r in range(size()) if r % 2 == half] for half in range(min(2, size()))]
    child = dist.split_group(split_ranks=halves)
    mine = halves[rank() % 2]
    assert dist.get_process_group_ranks(child) == mine
    tensor = of_rank(rank())
    dist.all_reduce(tensor, group=child)
    same(tensor, sum(of_rank(r) for r in mine))


def case_a_group_of_a_bound_device_splits_and_makes_groups():
    dist.destroy_process_group()
    dist.init_process_group("mpi", device_id=torch.device("cpu"))
    group = dist.new_group([0])
    if rank() == 0:
        dist.barrier(group)
    dist.barrier()


def case_new_subgroups_works():
    if size() % 2:
        return "needs an even number of ranks"
    group, _ = dist.new_subgroups(2)
    tensor = of_rank(rank())
    dist.all_reduce(tensor, group=group)
    first = rank() - rank() % 2
    same(tensor, of_rank(first) + of_rank(first + 1))


def case_the_timeout_of_the_group_is_the_one_that_was_asked_for():
    from datetime import timedelta

    assert dist.group.WORLD.timeout == 30.0
    group = dist.new_group(list(range(size())), timeout=timedelta(seconds=7))
    assert group.timeout == 7.0
    group.set_timeout(timedelta(seconds=3))
    assert group.timeout == 3.0


def case_a_rank_missing_from_a_collective_is_named_and_the_group_works_afterwards():
    from datetime import timedelta

    from torch_mpi.errors import CommunicationStopped, CommunicationTimeout

    if size() < 2:
        return "needs two ranks"
    group = dist.new_group(list(range(size())), timeout=timedelta(seconds=0.3))
    if rank() == 0:
        with refused(CommunicationTimeout, "all_reduce", "groups.py:", "rank 1", "0.3 s"):
            dist.all_reduce(torch.ones(3), group=group)
    else:
        with refused(CommunicationStopped, "barrier", "because rank 0", "all_reduce"):
            dist.barrier()
    got = torch.ones(3)
    dist.all_reduce(got, group=group)
    same(got, torch.full((3,), float(size())), "after the error")


def case_a_group_destroyed_under_a_running_collective_waits_for_it():
    for _ in range(3):
        group = dist.new_group(list(range(size())))
        tensor = of_rank(rank(), (1000,))
        if rank() == size() - 1:
            time.sleep(0.05)  # the others are in destroy by then
        work = dist.all_reduce(tensor, group=group, async_op=True)
        dist.destroy_process_group(group)
        assert work.is_completed()
        same(tensor, sum(everybody((1000,))))


def case_a_group_destroyed_under_a_receive_that_never_comes_does_not_wait():
    if size() < 2:
        return "needs two ranks"
    group = dist.new_group(list(range(size())))
    if rank() == 0:
        dist.irecv(torch.zeros(3), 1, group=group)
    # Who waits for the receive does so for hours: the job's deadline ends it.
    from torch_mpi.protocol import progress

    with mock.patch.object(progress, "PATIENCE", 9999.0):
        dist.destroy_process_group(group)
