"""faulthandler's dumps in short, for reading: only threads and frames of the student's file."""

from __future__ import annotations

import re
from pathlib import Path

from utils.cluster.stacks import FRAME, Frame


def threads_of(dump: str) -> list[list[Frame]]:
    """Return the frames of each thread, innermost first, in the order of the dump."""
    found = []
    for text in re.split(r"^(?:Current thread|Thread) 0x", dump, flags=re.MULTILINE)[1:]:
        matches = (FRAME.match(line) for line in text.splitlines())
        found.append([Frame(one[1], int(one[2]), one[3]) for one in matches if one])
    return found


def shortened(dump: str, file: str) -> str:
    """Return the dump with the threads that are in a file, down to its outermost frame there."""
    parts = []
    for frames in threads_of(dump):
        inside = [k for k, frame in enumerate(frames) if frame.file == file]
        if not inside:
            continue
        lines = ["Thread 0x… (most recent call first):"]
        for name, line, function in frames[: inside[-1] + 1]:
            short = file if name == file else f"…/{Path(name).name}"
            lines.append(f'  File "{short}", line {line} in {function}')
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def own_frames(dump: str, file: str) -> list[str]:
    """Return the main thread's frames in a file, innermost first: `average, line 16`."""
    main = (threads_of(dump) or [[]])[-1]
    return [f"{frame.function}, line {frame.line}" for frame in main if frame.file == file]
