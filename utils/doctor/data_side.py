"""The check of the data set: here, to be downloaded, or the stand-in."""

from __future__ import annotations

import os
from pathlib import Path

from utils.doctor.finding import Finding, check, error, facts_of, needs_pytorch, ok, warning
from utils.doctor.machine_side import existing
from utils.doctor.patient import Machine
from utils.doctor.probes import python_probe
from utils.doctor.words import short

# Seconds. Until the server of the data set must have answered.
DOWNLOAD_DEADLINE = 3


@check("Fashion-MNIST")
def check_data(machine: Machine) -> Finding:
    """Here, or to be downloaded, or the stand-in?"""
    needs_pytorch(machine)
    facts = facts_of(machine.pytorch, "data")
    if not facts["damaged"]:
        return ok(f"all files intact in {short(facts['root'])}")
    if facts["given"]:
        name, fault = next(iter(facts["damaged"].items()))
        return error(
            f"FASHION_MNIST_ROOT={short(facts['root'])}: FashionMNIST/raw/{name} {fault}",
            "unset FASHION_MNIST_ROOT",
        )
    if not os.access(existing(Path(facts["root"])), os.W_OK):
        return warning(f"no place for it: {short(facts['root'])} can't be written", _own_copy())
    answer = machine.start(python_probe("probe_url", facts["url"]), DOWNLOAD_DEADLINE)
    if "error" not in answer.facts("server"):
        return ok("not here yet; a lab downloads it (31 MB), and its server answers")
    return warning("not here, its server does not answer: the labs use a stand-in", _own_copy())


def _own_copy() -> str:
    return (
        "accuracies differ. Go online once, or name a folder with FashionMNIST/raw:\n"
        "export FASHION_MNIST_ROOT=FOLDER"
    )
