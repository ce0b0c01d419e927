"""The engine of the checks: what a lab's `checks.py` is made of.

A task asks every rank (`task`, `probe`), in groups of several sizes (`trials`), compares what was
communicated and what came out (`comparison`), and shows a verdict (`verdict`). The checks
themselves are in the labs' rooms: `utils/labs/lab06/checks.py`.
"""
