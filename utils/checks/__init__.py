"""The engine of the checks: what a lab's `checks.py` is made of.

A task asks every rank (`task`, `probe`), in groups of several sizes (`groups`), compares what was
communicated (`calls`) and what came out (`mistakes`), and shows a verdict (`verdict`). The checks
themselves are in the labs' rooms: `utils/labs/lab06/checks.py`.
"""
