"""The world of ranks whose messages one process carries: it matches, computes, explains, records.

What runs the ranks is behind :class:`utils.cluster.world.carrier.Carrier`. For ranks inside the
kernel, it is threads that take turns: see :mod:`utils.cluster.here`.
"""
