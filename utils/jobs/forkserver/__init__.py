"""Ranks that need not import PyTorch: they are forked from a process that has it already.

`mpiexec` starts `stub.py` in place of Python. The stub hands its arguments, environment and
descriptors to the fork server, which forks a keeper, which forks the rank. docs/fork-server.md has
the processes, the messages, and what holds at all times with the test of each.

| module | runs in | |
|---|---|---|
| `client` | kernel, test, script | finds or starts the server, holds a lease on it |
| `identity` | client, server | what a server and its clients must have in common |
| `server` | server | one thread: takes requests, forks keepers, ends itself |
| `keeper` | keeper | passes signals on, tells how the rank ended, ends it with its stub |
| `child` | rank | takes over what the stub was given, and becomes the program |
| `process_title` | rank | what /proc shows of it |
| `stub` | below mpiexec | imports nothing of the course; falls back to an ordinary start |
"""
