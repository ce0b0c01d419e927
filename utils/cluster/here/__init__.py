"""Ranks that are threads of the kernel and take turns: no MPI, no other process, one core.

``cluster.start(4, where="here")`` starts them. See ``README.md`` of the room `cluster`.
"""
