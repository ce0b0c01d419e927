"""Random programs of messages and collectives, compared with a model that knows no MPI.

A *program* is data: a list of steps (`program`), drawn by a seed, of collectives (`collectives`),
messages (`messages`) and now and then a planted fault (`faults`). `text` writes it as Python, which
is what runs (`ranks`) and what a person reads. `model` plays all ranks in one process and says
what each tensor must hold. `jobs` starts ranks, `shrink` makes a failing program shorter.

    python tests/mpi/fuzz.py -n 3 --minutes 10
"""
