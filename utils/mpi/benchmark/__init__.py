"""What communication costs here, on mpi, mpi4py and gloo.

The package starts no ranks and imports nothing of the course, whose command is ``ddl-labs bench``.
"""

#: The operations, each a function of :mod:`.measurement`, and what they run on.
OPERATIONS = ("all_reduce", "broadcast", "all_gather", "ping_pong")
TRANSPORTS = ("mpi", "mpi4py", "gloo")
KI, MI = 2**10, 2**20
