"""One room for each lab: `labs/lab06/` holds the checks, pictures and tools of lab 06.

    from utils.labs import lab06
    lab06.crossbar(ranks)               # a check, from labs/lab06/checks.py
    lab06.pictures.topologies()         # a picture, from labs/lab06/pictures.py

`shared/` holds what two or more labs use.
"""
