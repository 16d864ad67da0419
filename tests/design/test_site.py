"""Links of the documentation lead somewhere, and its site has every page once.

Zensical is not needed: Markdown files, mkdocs.yml and what scripts/docs_pages.py makes of them are
read as they are.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
OTHERS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
SOURCE = ROOT / "src" / "outrider"
_FENCE = re.compile(r"^ *(```+)[^\n]*\n.*?^ *\1 *$", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^()\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"")
_HEADING = re.compile(r"^#+ +(.*?) *#*$", re.MULTILINE)
_EXCERPT = re.compile(r'^```python title="([^"]+)"\n(.*?)^```', re.DOTALL | re.MULTILINE)


def links(page: Path) -> Iterator[str]:
    """Every address of `page` that is no address of the web."""
    text = _CODE.sub("``", _FENCE.sub("", page.read_text(encoding="utf-8")))
    for match in _LINK.finditer(text):
        address = match.group(1) or match.group(2)
        if not re.match(r"[a-z]+:", address):
            yield address


def anchors(page: Path) -> set[str]:
    """Of its headings, where GitHub and the site agree on them: the site writes one hyphen where
    GitHub writes several, and ASCII alone."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)|`", r"\1", title) for title in _HEADING.findall(text))
    found = (re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in plain)
    return {anchor for anchor in found if anchor.isascii() and "--" not in anchor}


def broken(page: Path) -> Iterator[str]:
    for address in links(page):
        path, _, anchor = address.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            yield f"{page.relative_to(ROOT)}: {address}: there is no such file"
        elif anchor and anchor not in anchors(target):
            yield f"{page.relative_to(ROOT)}: {address}: the page has no such heading"


def test_every_link_leads_to_a_file_and_a_heading() -> None:
    assert [line for page in [*PAGES, *OTHERS] for line in broken(page)] == []


def navigation() -> list[str]:
    site: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))

    def pages(entry: Any) -> Iterator[str]:
        match entry:
            case str():
                yield entry
            case list():
                for one in entry:  # pyright: ignore[reportUnknownVariableType]
                    yield from pages(one)
            case _:
                for one in entry.values():
                    yield from pages(one)

    return list(pages(site["nav"]))


def test_every_page_is_in_the_navigation_once() -> None:
    named = Counter(navigation())
    moved = set(script("docs_pages").MOVED.values())
    assert [page for page, count in named.items() if count > 1] == []
    assert set(named) == {page.relative_to(DOCS).as_posix() for page in PAGES} | moved, (
        "name new pages under `nav` of mkdocs.yml"
    )


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_of_a_copied_page_stay_in_the_site() -> None:
    """Those to other files of the repository become their names."""
    copies = script("docs_pages")
    page, contributing = DOCS / "adr" / "x.md", ROOT / "CONTRIBUTING.md"
    text = "[a](../index.md#b), [c](../../scripts/test), [d `e`](../../CHANGELOG.md), [f](#g)"
    assert copies.page(text, page, copies.COPIES / "adr" / "x.md") == (
        "[a](../index.md#b), c (`scripts/test`), [d `e`](../changelog.md), [f](#g)"
    )
    moved = copies.page("[a](docs/gates.md)", contributing, copies.COPIES / "contributing.md")
    assert moved == "[a](gates.md)"


def test_pages_of_the_code_are_up_to_date() -> None:
    for name in ("reference_pages", "pictures"):
        path = ROOT / "scripts" / f"{name}.py"
        done = subprocess.run([sys.executable, str(path), "--check"], check=False, timeout=60)
        assert done.returncode == 0, f"run `.venv/bin/python scripts/{name}.py`"


def test_code_that_a_page_shows_is_the_code() -> None:
    shown = [
        (page, name, text)
        for page in PAGES
        for name, text in _EXCERPT.findall(page.read_text(encoding="utf-8"))
    ]
    assert shown
    for page, name, text in shown:
        path = ROOT / name if name.startswith("examples/") else SOURCE / name
        assert text in path.read_text(encoding="utf-8"), f"{page.name} shows old {name}"
