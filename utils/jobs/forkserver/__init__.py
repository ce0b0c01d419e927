"""The fork server: ranks start faster because they are forked from a process with PyTorch.

docs/fork-server.md describes the processes, the messages, and the invariants with their tests.
"""
