"""The process group with its collectives and messages. This module imports nothing."""
