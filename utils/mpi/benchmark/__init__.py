"""``ddl-labs bench``: what communication costs here, on mpi, mpi4py and gloo.

`options` reads the command line, `launch` starts the ranks, `on_ranks` is what each of them runs.
"""
