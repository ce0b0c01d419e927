"""Ranks that need not import PyTorch: they are forked from a process that has it already.

`mpiexec` starts `stub.py` in place of Python. The stub hands its arguments, environment and
descriptors to the fork server, which forks a keeper, which forks the rank. docs/fork-server.md has
the processes, the messages, and what holds at all times with the test of each.

| module | runs in | |
|---|---|---|
| `client` | kernel, test, script | finds the server that fits or starts one, holds a lease on it |
| `server` | server, keeper | takes requests, forks keepers; a keeper forks its rank, ends with it |
| `child` | rank | takes over what the stub was given, and becomes the program |
| `stub` | below mpiexec | imports nothing of the course; falls back to an ordinary start |
"""
