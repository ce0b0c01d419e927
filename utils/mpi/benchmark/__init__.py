"""Measurement of what communication costs on this machine, on mpi, mpi4py and gloo.

The course's command ``ddl-labs bench`` starts the ranks, so this package imports nothing of it.
"""

#: The operations, each of them a function of :mod:`.measurement`, and the transports they run on.
OPERATIONS = ("all_reduce", "broadcast", "all_gather", "ping_pong")
TRANSPORTS = ("mpi", "mpi4py", "gloo")
KI, MI = 2**10, 2**20
