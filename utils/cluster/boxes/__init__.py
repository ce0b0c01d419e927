"""Ranks that are processes with one socket each, over which the kernel carries their messages.

``cluster.start(4, where="boxes")`` starts them; they need no MPI. See ``README.md`` of the room
`cluster`.
"""
