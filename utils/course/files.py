"""Writing a file completely or not at all, because other programs read it; and fingerprints."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Write a file in one step, as UTF-8, so that even a power failure leaves no half a file."""
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
        version: Increase this number whenever the result is made in a new way.
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
