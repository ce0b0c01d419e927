"""Ranks that need not import PyTorch: they are forked from a process that has it already.

docs/fork-server.md has the processes, the messages, and what holds at all times with its tests.
"""
