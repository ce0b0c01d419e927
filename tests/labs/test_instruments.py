"""What lab 18's checks make up has the form of the real thing, and its instruments read it."""

from __future__ import annotations

import faulthandler
import json
import re
import threading

import pytest
import torch

from utils.labs.lab18 import checks, digests, stacks

RECORDED = """
import json
import torch
import torch.distributed as dist
from utils.labs.lab18 import recorder

dist.init_process_group("mpi")
rank = dist.get_rank()


def work():
    for k in range(3):
        if rank == 0 or k != 1:
            dist.all_reduce(torch.ones(2))
        dist.all_reduce(torch.ones(2))


with recorder.gloo(seconds=2) as recording:
    try:
        work()
    except RuntimeError:
        pass
dist.all_reduce(torch.ones(1))  # the ranks can go on
dumps = [None, None]
dist.all_gather_object(dumps, recording.calls)
if rank == 0:
    print(json.dumps(dumps))
dist.destroy_process_group()
"""
#: A line of a dump: a thread, which Python 3.14 names, a frame, or nothing.
LINE = re.compile(
    r"(Current thread|Thread) 0x[0-9a-f]{16}( \[.*\])? \(most recent call first\):|  File .*|"
)


def test_the_recorder_tells_what_gloo_was_asked_and_on_which_line(mpiexec):
    found = json.loads(mpiexec(2, RECORDED).stdout)
    seq, _, what = checks.difference(found)
    assert (seq, what) == (3, "line")
    assert [dump[seq - 1]["line"] for dump in found] == ["work, line 14", "work, line 15"]
    assert [len(dump) for dump in found] == [6, 5]
    assert {(one["call"], str(one["sizes"])) for one in found[0]} == {("all_reduce", "[[2]]")}


def waiting(begun, go_on):
    begun.set()
    go_on.wait(60)


@pytest.fixture
def real_dump(tmp_path):
    """Return faulthandler's dump of two threads: this one, and one that waits."""
    begun, go_on = threading.Event(), threading.Event()
    other = threading.Thread(target=waiting, args=(begun, go_on))
    other.start()
    begun.wait(60)
    with (tmp_path / "dump").open("w+") as file:
        faulthandler.dump_traceback(file=file)
        go_on.set()
        other.join()
        file.seek(0)
        return file.read()


def test_a_real_dump_ends_with_the_main_thread_as_lab_18_says(real_dump):
    *others, main = stacks.threads_of(real_dump)
    assert main[0].function == "real_dump"
    assert "waiting" in {frame.function for frames in others for frame in frames}


def test_a_made_dump_has_the_form_of_a_real_one(real_dump):
    frames = [("train.py", 7, "step"), ("train.py", 30, "<module>")]
    made = checks.dump_of([[("train.py", 3, "load")], frames], 0)
    assert stacks.own_frames(made, "train.py") == ["step, line 7", "<module>, line 30"]
    lines = [*real_dump.splitlines(), *made.splitlines()[1:]]
    assert all(LINE.fullmatch(line) for line in lines if not line.startswith("Extension"))


def test_a_dump_in_short_names_no_folder():
    text = checks.dump_of([[("/home/ann/lib/queue.py", 9, "get"), ("train.py", 3, "step")]], 0)
    assert stacks.shortened(text, "train.py").splitlines()[1:] == [
        '  File "…/queue.py", line 9 in get',
        '  File "train.py", line 3 in step',
    ]


@pytest.mark.parametrize("seed", range(5))
def test_pairs_of_tensors_differ_as_they_say(seed):
    for what, one, other in digests.pairs(seed):
        left, right = (
            (str(x.dtype), x.shape, x.detach().contiguous().reshape(-1).view(torch.uint8).tolist())
            for x in (one, other)
        )
        assert (left == right) is (not what), what
