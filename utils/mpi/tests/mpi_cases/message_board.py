"""The cases of groups.py, and some collectives, with the board that several machines would have."""

import os

os.environ["MPI_BACKEND_BOARD"] = "messages"

from collectives import (  # noqa: F401
    case_async_all_reduces_complete_in_any_order_of_waiting,
    case_blocking_and_async_calls_of_one_collective_belong_together,
    case_hundreds_of_collectives_may_be_under_way,
)
from groups import *  # noqa: F403
