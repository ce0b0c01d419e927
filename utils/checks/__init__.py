"""The engine of the checks: the parts from which a lab's `checks.py` is built.

A check asks every rank (`task`, `probe`), in groups of several sizes (`trials`). It compares the
communication and the results with the expected ones (`comparison`), and shows a verdict
(`verdict`). The checks themselves are in the labs' rooms, such as `utils/labs/lab06/checks.py`.
"""
