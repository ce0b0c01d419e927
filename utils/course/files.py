"""Files that other programs read, written whole or not at all; and fingerprints of files."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Write a file in one step, as UTF-8, even if the power fails meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="", errors="replace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


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
