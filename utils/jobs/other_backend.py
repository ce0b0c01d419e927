"""The choice of gloo instead of our backend, see :mod:`utils.cluster.gloo_ranks`."""

from __future__ import annotations

import os

#: The environment variable, and its only value.
VARIABLE, GLOO = "DDL_LABS_BACKEND", "gloo"
#: What a notebook says when such ranks have started.
LACKING = (
    f"The ranks communicate by gloo ({VARIABLE}={GLOO}). A deadlock gets no explanation, only an "
    "error of gloo after the timeout, and a timeline doesn't show who waited for whom."
)


def is_gloo() -> bool:
    """Return whether ranks communicate by gloo.

    Raises:
        ValueError: The variable has another value.
    """
    value = os.environ.get(VARIABLE, "")
    if value not in ("", GLOO):
        raise ValueError(f"{VARIABLE}={value}: the only value is {GLOO}. Leave it out for MPI")
    return value == GLOO
