"""What communication costs here, on mpi, mpi4py and gloo.

`options` reads the command line, and `on_ranks` is what each rank runs. The package starts no ranks
and imports nothing of the course, whose command is ``ddl-labs bench``.
"""
