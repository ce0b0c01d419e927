"""``ddl-labs doctor``: what on this machine would keep the labs from running.

One line for each check, and below it what to do where something is wrong. `report` has the order
of the checks, which are small functions made by `@check` in python_side, mpi_side, machine_side,
data_side and jupyter_side. What may crash, hang or take seconds (PyTorch, MPI, ranks) runs in
processes with a deadline (`probes`); `facts` is what they find out.

Nothing but the standard library is imported on top: the doctor's patients lack packages.
"""

from utils.doctor.finding import Finding
from utils.doctor.patient import Machine
from utils.doctor.report import as_text, examine, main

__all__ = ["Finding", "Machine", "as_text", "examine", "main"]
