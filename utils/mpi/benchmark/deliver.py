"""Where the results go: the terminal, a JSON file, a picture."""

from __future__ import annotations

import json

from . import report
from .options import Settings


def deliver(found: dict, settings: Settings) -> None:
    """Print the tables, and write the files that were asked for."""
    report.complete(found)
    print(report.text(found), end="", flush=True)
    if settings.json:
        settings.json.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")
    if settings.plot:
        from .plot import draw

        draw(found).savefig(settings.plot)
