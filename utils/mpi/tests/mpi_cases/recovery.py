"""What is left of the time before an error: nothing that a later communication could meet."""

import contextlib
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from helpers import of_rank, rank, same, size

from torch_mpi.errors import CommunicationError
from torch_mpi.group.process_group import ProcessGroupMPI, create
from torch_mpi.protocol import rendezvous, world

MEGABYTE = 250_000  # float32


def incident(meanwhile=None) -> None:
    """All ranks but the first wait in vain for an all_reduce, and then all go on together."""
    group = dist.new_group(list(range(size())))
    group.set_timeout(timedelta(seconds=0.2))
    if meanwhile is not None:
        meanwhile()
    with contextlib.suppress(CommunicationError):
        if rank() > 0:
            dist.all_reduce(torch.ones(3), group=group)
        else:
            while True:  # the first one to hear of it is told by an error, too
                dist.recv(torch.empty(1), 1, tag=999)
    works()


def works() -> None:
    """The ranks communicate."""
    tensor = of_rank(rank())
    dist.all_reduce(tensor)
    same(tensor, sum(of_rank(r) for r in range(size())))


def case_messages_from_before_an_error_reach_no_receive_after_it():
    if size() < 2:
        return "needs two ranks"

    def send_too_much() -> None:
        if rank() == 0:
            for count in (3, MEGABYTE):
                dist.isend(torch.full((count,), -1.0), 1, tag=5)

    for _ in range(3):
        incident(send_too_much)
        for count in (3, MEGABYTE):
            if rank() == 0:
                dist.send(torch.full((count,), 7.0), 1, tag=5)
            elif rank() == 1:
                got = torch.zeros(count)
                dist.recv(got, 0, tag=5)
                same(got, torch.full((count,), 7.0))
    return None


def case_what_was_given_up_lets_go_of_its_memory_after_an_error():
    if size() < 2:
        return "needs two ranks"
    from torch_mpi.protocol.progress import progress

    def send_too_much() -> None:
        if rank() == 0:
            dist.isend(torch.full((MEGABYTE,), -1.0), 1, tag=5)

    incident(send_too_much)
    assert progress._leaked == []
    return None


def case_collectives_from_before_an_error_do_not_meet_those_after_it():
    if size() < 2:
        return "needs two ranks"

    def begin_too_many() -> None:
        if rank() > 0:
            for _ in range(5):
                dist.all_reduce(torch.full((4,), -1.0), async_op=True)

    for _ in range(3):
        incident(begin_too_many)
        works()
    return None


def case_many_errors_and_groups_leave_no_communicator_behind():
    if size() < 2:
        return "needs two ranks"
    from mpi4py import MPI

    def free_place() -> int:
        """Libraries number communicators, and give a freed one's number again."""
        works()  # every rank has destroyed its groups
        world.current().groups.free_flushed()
        probe = MPI.COMM_WORLD.Dup()
        number = probe.py2f()
        probe.Free()
        return number

    everybody = list(range(size()))
    incident()
    dist.destroy_process_group(dist.new_group(everybody))
    before = free_place()
    for _ in range(3):
        for _ in range(10):
            group = dist.new_group(everybody)
            dist.all_reduce(torch.ones(1), group=group)
            dist.destroy_process_group(group)
        incident()
    for group in [g for g in world.current().groups if g is not dist.group.WORLD]:
        dist.destroy_process_group(group)
    assert free_place() <= before, "communicators are left"
    return None


def case_a_group_destroyed_between_an_error_and_the_meeting_is_freed():
    if size() < 2:
        return "needs two ranks"
    group = dist.new_group(list(range(size())))

    def destroy() -> None:
        world.current().begin_incident("raised", "a test's error")
        dist.destroy_process_group(group)

    incident(destroy)
    assert world.current().groups.closed == []
    return None


def case_a_message_to_a_rank_that_has_left_its_group_reaches_nobody_after_an_error():
    """A worker that takes the wrong number for its own: it destroys the group and goes on."""
    if size() < 2:
        return "needs two ranks"
    group = dist.new_group([0, 1])

    def leave_a_message() -> None:
        if rank() == 1:
            dist.destroy_process_group(group)
        dist.barrier()
        if rank() == 0:
            dist.send(torch.ones(5), 1, group=group)

    incident(leave_a_message)
    if rank() == 0:
        dist.destroy_process_group(group)
    again, got = dist.new_group([0, 1]), torch.zeros(6)
    if rank() == 0:
        dist.send(torch.full((6,), 7.0), 1, group=again)
    elif rank() == 1:
        dist.recv(got, 0, group=again)
        same(got, torch.full((6,), 7.0))
    works()
    return None


def case_a_group_that_one_rank_never_made_is_freed_without_waiting_for_it():
    if size() < 2:
        return "needs two ranks"
    everybody, groups = tuple(range(size())), world.current().groups

    def destroy() -> None:
        group = dist.new_group(list(everybody))
        if rank() == 1:  # as after a new_group that an error ended on this rank
            groups._known.remove(group)
            groups.made[everybody] -= 1
        else:
            dist.destroy_process_group(group)

    incident(destroy)
    assert groups.closed == []
    return None


def case_a_group_that_only_one_rank_counts_does_not_spoil_the_next_one():
    """As after a new_group that ended by an error on some of its ranks."""
    if size() < 2:
        return "needs two ranks"
    everybody = tuple(range(size()))
    if rank() == 1:
        made = world.current().groups.made
        made[everybody] = made.get(everybody, 0) + 3
    world.current().begin_incident("raised", "a test's error")
    works()
    group = dist.new_group(list(everybody), timeout=timedelta(seconds=20))
    tensor = of_rank(rank())
    dist.all_reduce(tensor, group=group)
    same(tensor, sum(of_rank(r) for r in everybody))
    return None


def case_a_rank_that_left_new_group_is_not_taken_for_one_that_comes_to_the_next():
    if size() != 2:
        return "is about two ranks"

    def fails() -> None:
        world.current().recover_or_raise("an error of the user's")
        while rank() == 1 and world.current().statuses()[0]["state"] != "waiting":
            pass  # until rank 0 has come
        world.current().raised(ValueError("mine"), "here")

    def makes_a_group() -> None:
        with contextlib.suppress(CommunicationError):
            create([0, 1])

    def leaves_after_the_first_round() -> None:
        first = rendezvous._wait
        rounds = mock.Mock(side_effect=[first, KeyboardInterrupt])
        with (
            mock.patch.object(rendezvous, "_wait", lambda *all_of_it: rounds()(*all_of_it)),
            contextlib.suppress(KeyboardInterrupt),
        ):
            create([0, 1])
        fails()

    # What rank 0 sent in vain, of both rounds, is still there when rank 1 makes the third group.
    others = [(makes_a_group, fails), (makes_a_group, leaves_after_the_first_round)]
    for rank_0, rank_1 in others:
        (rank_0 if rank() == 0 else rank_1)()
    if rank() == 0:
        fails()
    else:
        alone = AssertionError("rank 1 makes the communicators, and rank 0 does not")
        with mock.patch.object(ProcessGroupMPI, "_open", side_effect=alone):
            makes_a_group()
    works()
    return None
