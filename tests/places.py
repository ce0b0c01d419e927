"""Where the repository is, for tests of every room."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
