"""Copies the pages of the site to build/docs, for Zensical: `python scripts/docs_pages.py`.

They are the files of docs/, CONTRIBUTING.md and CHANGELOG.md. A link to another file of the
repository becomes the file's name, for the site has no copy of it. With `--watch` it goes on and
copies what changes. Needs Python alone.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS, COPIES = ROOT / "docs", ROOT / "build" / "docs"
# Pages that lie elsewhere, and what they are in the site; README is what the site begins with.
MOVED = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
ALIASES = {"README.md": "index.md"} | MOVED
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^()\s]+)\)")
FENCE = re.compile(r"(^ *```.*?^ *```)", re.DOTALL | re.MULTILINE)


def sources() -> Iterator[tuple[Path, Path]]:
    """Every file of the site: where it is written, and where its copy goes."""
    for path in sorted(DOCS.rglob("*")):
        # Samples are read by programs.
        if path.is_file() and path.suffix != ".jsonl":
            yield path, COPIES / path.relative_to(DOCS)
    for name, copy in MOVED.items():
        yield ROOT / name, COPIES / copy


def page(text: str, source: Path, copy: Path) -> str:
    """The Markdown of `source` with links that lead from `copy`."""

    def moved(match: re.Match[str]) -> str:
        words, address = match.groups()
        path, mark, anchor = address.partition("#")
        if not path or "://" in path or path.startswith("mailto:"):
            return match.group()
        found = (source.parent / path).resolve()
        name = found.relative_to(ROOT).as_posix()
        if found.is_relative_to(DOCS):
            target = COPIES / found.relative_to(DOCS)
        elif name in ALIASES:
            target = COPIES / ALIASES[name]
        else:
            bare = words.replace("`", "")
            return f"`{name}`" if name.endswith(bare) else f"{words} (`{name}`)"
        return f"[{words}]({os.path.relpath(target, copy.parent)}{mark}{anchor})"

    parts = FENCE.split(text)
    return "".join(part if i % 2 else LINK.sub(moved, part) for i, part in enumerate(parts))


def write_copies() -> None:
    """Only what changed, so that a server that watches the copies sees no more."""
    wanted: set[Path] = set()
    for source, copy in sources():
        wanted.add(copy)
        content = source.read_bytes()
        if source.suffix == ".md":
            content = page(content.decode("utf-8"), source, copy).encode("utf-8")
        if not copy.is_file() or copy.read_bytes() != content:
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(content)
    for path in COPIES.rglob("*"):
        if path.is_file() and path not in wanted:
            path.unlink()


def main() -> int:
    if not sys.argv[1:]:
        shutil.rmtree(COPIES, ignore_errors=True)
    write_copies()
    while sys.argv[1:] == ["--watch"]:
        time.sleep(1)
        write_copies()
    return 0


if __name__ == "__main__":
    sys.exit(main())
