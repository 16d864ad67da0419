"""Files that scripts make of the code and of results: compared, or written where they differ."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]


def kept(texts: Mapping[Path, str], *, check: bool, again: str) -> int:
    """The exit status. With `check` those that differ are told, with the command `again` that makes
    them, and the status is 1; else they are written."""
    stale = [p for p, t in texts.items() if not p.is_file() or p.read_text("utf-8") != t]
    for path in stale:
        if check:
            name = path.relative_to(ROOT).as_posix()
            print(f"{name} is out of date: run {again}", file=sys.stderr)
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(texts[path], "utf-8")
    return int(check and bool(stale))
