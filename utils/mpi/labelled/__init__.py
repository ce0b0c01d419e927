"""Right and wrong programs, labelled: how well does a backend tell what is wrong?

`programs` holds them in pairs, `judge` compares a report with the label; these two import nothing
of the course and go into the backend's source distribution. `trial` runs a program on ranks,
`table` counts, ``ddl-labs diagnosis`` does all of it.

The classes follow those of the MPI Bugs Initiative, as far as they apply to ``torch.distributed``:
M. Laurent, E. Saillard, M. Quinson, "The MPI Bugs Initiative: a Framework for MPI Verification
Tools Evaluation" (Correctness 2021).
"""
