"""The protocol between the ranks of a job: see ``PROTOCOL.md``. This module imports nothing."""
