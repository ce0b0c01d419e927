"""Which tests run in one process, which begin first, and which `make check` runs."""

from __future__ import annotations

import re
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

# Groups other than a file: patterns of test ids. What shares a cluster or a job has one group; each
# lab's solution has its own, and so have its answers.
GROUPS = (
    (r"test_(hub|slurm|launchers)\.py", "slurm"),
    (r"test_site_(pages|reading)\.py", "test_site_pages"),
    (r"test_answers\.py::.*\[(?:lab)?0?(\d+)[.\]]", r"answers-\1"),
    (r"test_answers_on_ranks\.py::.*\[(\d+)\.", r"on-ranks-\1"),
    (r"test_solutions\.py::.*\[(\d\d_\w+)\]", r"\1"),
    (r"test_mpi_backend\.py::.*\[(message_board|large)-(\d)-", r"\1-\2"),
    (r"test_mpi_backend\.py::.*\[\w+-(\d)-", r"mpi-\1"),
    (r"test_c10d_suite\.py::.*-(\d)\]", r"c10d-\1"),
)
# Groups of tests that take a minute or more, the longest first.
LONGEST = (
    *("slurm", "test_grading", "test_faults", "12_federated", "on-ranks-1", "on-ranks-6"),
    *("11_hybrid", "test_site_mpi", "test_hosts", "test_browser", "test_grading_accidents"),
    *("05_scaling", "14_capstone", "13_faults", "08_elastic_averaging", "test_site_pages"),
    *("18_the_clinic", "04_ddp", "test_forkserver", "test_cluster", "03_data_parallel"),
    *("07_parameter_server", "10_pipeline", "15_memory_and_precision", "09_tensor_parallel"),
    *("answers-11", "answers-6", "answers-18", "answers-3", "answers-12", "answers-9"),
)

# Files of which `make check` runs what takes no ranks. Single tests have the mark `quick`, too.
QUICK = {
    *("test_backend_core", "test_chunks", "test_diagnosis", "test_figures", "test_interactive"),
    *("test_five_metrics", "test_hosted", "test_hpc", "test_house", "test_local_ranks"),
    *("test_map", "test_models", "test_network", "test_pack", "test_predictions", "test_readme"),
    *("test_release", "test_statistics", "test_timeline", "test_timeline_ideal"),
    "test_timeline_page",
}
RANKS = {"mpiexec", "ranks"}

# What `make test-all` adds to `make test`: tests that need a cluster, a browser, another PyTorch, a
# library of MPI from a package or many minutes, attacks, accidents and stress tests. Of these files
# all but the quick tests. A single test elsewhere carries the mark `extended` itself.
EXTENDED = {
    "test_answers_on_ranks",
    "test_bench",
    "test_browser",
    "test_checkpoints",
    "test_forged_replies",
    "test_flight_recorder",
    "test_fuzz",
    "test_grading_accidents",
    "test_grading_attacks",
    "test_cases_in_boxes",
    "test_hosts",
    "test_hpc_readme",
    "test_hub",
    "test_launchers",
    "test_many_ranks",
    "test_names_in_the_way",
    "test_platforms",
    "test_site_mpi",
    "test_slurm",
    "test_stress",
    "test_survivors",
}
# And every test that asks for one of these fixtures, in whichever file.
EXTENDED_FIXTURES = {"chromium", "hub", "slurm_cluster"}


# Families of tests that differ only in the lab, the answer, the attack or the look of a page.
# `make test-all` runs all of them. `.ci/run` runs an eighth, which the commit chooses, because it
# must end on a slow machine, too.
# The answers and notebooks that `make test` tries are in every run.
SHARED_OUT = re.compile(
    r"test_answers_on_ranks\.py|test_forged_(replies|answers)\.py|::test_nbval_alone_reproduces"
    r"|test_cases_in_boxes\.py::test_a_call"
    r"|::test_(no_honest_answer_is_held|code_that_could_hide|an_answer_that_tampers)"
    r"|::test_no_launcher_makes_processes|::test_everyone_can_read_every_(kind_of_)?page"
    r"|::test_without_our_backend_a_lab|::test_without_mpi_the_solutions_pass|::test_a_sick_program_leaves_real_ranks_usable"
    r"|::test_a_sick_program_does_not_pass.*-(5|66|777)\]"
)


class Share(NamedTuple):
    """A part of the tests that are shared out: part 2 of 3, for example."""

    part: int
    of: int

    @classmethod
    def read(cls, text: str) -> Share:
        """Return the share that a text such as "2/3" names.

        Raises:
            ValueError: there is no such share.
        """
        found = re.fullmatch(r"(\d+)/(\d+)", text)
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            raise ValueError(f"a share is a text such as 2/3, not {text}")
        return cls(int(found[1]), int(found[2]))

    def has(self, nodeid: str, rest: bool) -> bool:
        """Return whether this share has a test.

        Args:
            nodeid: the test.
            rest: whether it tries an answer or a notebook that `make test` leaves out.
        """
        if not rest and not SHARED_OUT.search(nodeid):
            return True
        return zlib.crc32(nodeid.encode()) % self.of == self.part - 1


def is_extended(stem: str, fixtures: Collection[str], quick: bool) -> bool:
    """Return whether only `make test-all` runs a test.

    Args:
        stem: the name of the test's file, without its suffix.
        fixtures: the names of all fixtures that the test uses.
        quick: whether `make check` runs the test.
    """
    return bool(EXTENDED_FIXTURES & set(fixtures)) or (stem in EXTENDED and not quick)


def group_of(nodeid: str) -> str:
    """What runs in one process, one after the other: a file, unless GROUPS says otherwise."""
    for pattern, name in GROUPS:
        if found := re.search(pattern, nodeid):
            return found.expand(name)
    return Path(nodeid.partition("::")[0]).stem
