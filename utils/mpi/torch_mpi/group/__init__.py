"""The process group: collectives and messages. Nothing is imported here."""
