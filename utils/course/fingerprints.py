"""Fingerprints: texts that change whenever something changes that a result depends on."""

from __future__ import annotations

import hashlib
from pathlib import Path


def key(*parts: str | bytes, version: int) -> str:
    """Return the fingerprint of all parts together.

    Args:
        parts: Everything that a result depends on.
        version: Number of the way in which the result is made; it goes up with a new way.
    """
    digest = hashlib.sha256(str(version).encode())
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()


def folder_key(folders: list[Path]) -> str:
    """Return the fingerprint of all Python files in some folders."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()
