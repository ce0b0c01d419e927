"""Random cells in one notebook, with errors, interrupts and kills: does it go on working?

    python -m tests.cluster.stress --minutes 60 --seed 3 --ranks 4 --load 2

`cells` and the modules beside it draw the cells, `runner` plays them in a kernel, `census` counts
what the ranks hold, `summary` says what came of it.
"""
