"""``ddl-labs doctor`` finds out what on this machine would keep the labs from running.

`examination` has the table of checks. Code that may crash, hang or take seconds (PyTorch, MPI,
ranks) runs in processes with a deadline: `machine` starts them, and `probes` has their code.

Module-level imports use only the standard library, because a broken environment lacks packages.
"""

from utils.doctor.examination import as_text, examine, find, main
from utils.doctor.finding import Finding
from utils.doctor.machine import Machine

__all__ = ["Finding", "Machine", "as_text", "examine", "find", "main"]
