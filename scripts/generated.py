"""Files that scripts make of the code and of results: compared, or written where they differ."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]


def kept(
    texts: Mapping[Path, str], words: Sequence[str], *, again: str, others: Sequence[str] = ()
) -> int:
    """The exit status. With --check among `words` those that differ are told, with the command
    `again` that makes them, and the status is 1; else they are written. Words that are neither
    --check nor among `others` change nothing, and the status is 2."""
    unknown = [word for word in words if word not in ("--check", *others)]
    if unknown:
        known = ", ".join(("--check", *others))
        print(f"{again}: unknown argument {unknown[0]}; known: {known}", file=sys.stderr)
        return 2
    stale = [p for p, t in texts.items() if not p.is_file() or p.read_text("utf-8") != t]
    for path in stale:
        if "--check" in words:
            name = path.relative_to(ROOT).as_posix()
            print(f"{name} is out of date: run {again}", file=sys.stderr)
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(texts[path], "utf-8")
    return int("--check" in words and bool(stale))
