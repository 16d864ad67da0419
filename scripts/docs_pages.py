"""Copies the pages of the site to build/docs, for Zensical: `python scripts/docs_pages.py`.

They are the files of docs/, studies/pages/ and project/, those that scripts/reference_pages.py
wrote, CONTRIBUTING.md and CHANGELOG.md; of all pages, those that mkdocs.yml names. A link to
another file of the repository becomes the file's name, for the site has no copy of it; a command
that shows what a written page has becomes a link to that page. With `--watch` it goes on and copies
what changes. Needs Python alone.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIES = ROOT / "build" / "docs"
# Folders of pages, and their folders in the site.
FOLDERS = {"docs": "", "studies/pages": "measured", "project": "project"}
# Pages that are not committed, as if they were in docs/; and the command that shows the same.
WRITTEN = ROOT / "build" / "pages"
SHOWN_BY = {
    "outrider --help": "reference/cli.md",
    "outrider config --help-all": "settings.md",
    "GET /openapi.json": "reference/http.md",
    "GET /metrics": "reference/metrics.md",
}
# Single pages, and what they are in the site; README is what the site begins with.
MOVED = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
ALIASES = {"README.md": "index.md"} | MOVED
# A link, or a command that is no part of one.
NAMED = re.compile(r"^ *- (?:.*: )?([\w./-]+\.md)$", re.MULTILINE)
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^()\s]+)\)|(?<!`)`([^`\n]+)`(?!`)")
FENCE = re.compile(r"(^ *```.*?^ *```)", re.DOTALL | re.MULTILINE)


@cache
def named() -> frozenset[str]:
    """The pages under `nav` of mkdocs.yml."""
    return frozenset(NAMED.findall((ROOT / "mkdocs.yml").read_text("utf-8")))


def sources() -> Iterator[tuple[Path, Path, Path]]:
    """Every file of the site: where it lies, where its links lead from, where its copy goes."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            copy = copy_of(path)
            # Samples are read by programs.
            if path.is_file() and path.suffix != ".jsonl" and copy is not None:
                yield path, path, copy
    for path in sorted(WRITTEN.rglob("*.md")):
        name = path.relative_to(WRITTEN)
        yield path, ROOT / "docs" / name, COPIES / name
    for name, copy in MOVED.items():
        yield ROOT / name, ROOT / name, COPIES / copy


def copy_of(path: Path) -> Path | None:
    """The place in the site of a file of the repository, or None."""
    name = ALIASES.get(path.relative_to(ROOT).as_posix())
    for folder, place in FOLDERS.items():
        if path.is_relative_to(ROOT / folder):
            name = (Path(place) / path.relative_to(ROOT / folder)).as_posix()
    if name is None or (name.endswith(".md") and name not in named()):
        return None
    return COPIES / name


def page(text: str, source: Path, copy: Path) -> str:
    """The Markdown of `source` with links that lead from `copy`."""

    def moved(match: re.Match[str]) -> str:
        words, address, command = match.groups()
        if command is not None:
            shown = SHOWN_BY.get(command)
            return f"[`{command}`]({leading(COPIES / shown)})" if shown else match.group()
        path, mark, anchor = address.partition("#")
        if not path or "://" in path or path.startswith("mailto:"):
            return match.group()
        found = (source.parent / path).resolve()
        target = copy_of(found)
        if target is None:
            name, bare = found.relative_to(ROOT).as_posix(), words.replace("`", "")
            return f"`{name}`" if name.endswith(bare) else f"{words} (`{name}`)"
        return f"[{words}]({leading(target)}{mark}{anchor})"

    def leading(target: Path) -> str:
        return os.path.relpath(target, copy.parent)

    parts = FENCE.split(text)
    return "".join(part if i % 2 else LINK.sub(moved, part) for i, part in enumerate(parts))


def write_copies() -> None:
    """Only what changed, so that a server that watches the copies sees no more."""
    wanted: set[Path] = set()
    for path, source, copy in sources():
        wanted.add(copy)
        content = path.read_bytes()
        if path.suffix == ".md":
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
