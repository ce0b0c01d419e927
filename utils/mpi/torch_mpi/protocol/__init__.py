"""How the ranks of a job keep together: see ``PROTOCOL.md``. Nothing is imported here."""
