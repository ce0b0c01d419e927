"""``ddl-labs doctor``: what on this machine would keep the labs from running.

`examination` has the table of checks. What may crash, hang or take seconds (PyTorch, MPI, ranks)
runs in processes with a deadline, started by `machine`; `probes` is what they find out.

Nothing but the standard library is imported on top: the doctor's patients lack packages.
"""

from utils.doctor.examination import as_text, examine, find, main
from utils.doctor.finding import Finding
from utils.doctor.machine import Machine

__all__ = ["Finding", "Machine", "as_text", "examine", "find", "main"]
