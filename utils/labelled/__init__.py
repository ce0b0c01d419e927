"""Right and wrong programs, labelled: how well does a backend tell what is wrong?

`programs` holds them in pairs, `trial` runs one of them and reads the report, `table` counts.
``ddl-labs diagnosis`` does all of it. The classes follow those of the MPI Bugs Initiative, as far
as they apply to ``torch.distributed``: M. Laurent, E. Saillard, M. Quinson, "The MPI Bugs
Initiative: a Framework for MPI Verification Tools Evaluation" (Correctness 2021).
"""
