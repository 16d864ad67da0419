"""Links of the documentation lead somewhere, and its site has few pages, each once.

Zensical is not needed: Markdown files, mkdocs.yml and what scripts/docs_pages.py makes of them are
read as they are. Pages of reference are not committed: they are written here, as for the site.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from checks.documents import FOLDERS, PAGES
from outrider.core.settings import SETTINGS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
OTHERS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]
FLAGS = (ROOT / "tests" / "golden" / "flags.txt").read_text("utf-8").splitlines()
SOURCE = ROOT / "src" / "outrider"
DOORS = ["Start", "Guides", "Reference", "How it works"]
MOST_PAGES = 60
_FENCE = re.compile(r"^ *(```+)[^\n]*\n.*?^ *\1 *$", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^()\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"")
_HEADING = re.compile(r"^#+ +(.*?) *#*$", re.MULTILINE)
_EXCERPT = re.compile(r'^```python title="([^"]+)"\n(.*?)^```', re.DOTALL | re.MULTILINE)


def links(text: str) -> Iterator[str]:
    """Every address of a page that is no address of the web."""
    text = _CODE.sub("``", _FENCE.sub("", text))
    for match in _LINK.finditer(text):
        address = match.group(1) or match.group(2)
        if not re.match(r"[a-z]+:", address):
            yield address


def anchors(text: str) -> set[str]:
    """Of its headings, where GitHub and the site agree on them: the site writes one hyphen where
    GitHub writes several, and ASCII alone."""
    text = _FENCE.sub("", text)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)|`", r"\1", title) for title in _HEADING.findall(text))
    found = (re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in plain)
    return {anchor for anchor in found if anchor.isascii() and "--" not in anchor}


def broken(page: Path, texts: Mapping[Path, str]) -> Iterator[str]:
    """Links of `page` that lead to no file, to no page of `texts`, or to no heading."""
    for address in links(texts[page]):
        path, _, anchor = address.partition("#")
        target = (page.parent / path).resolve() if path else page
        if target not in texts and not target.exists():
            yield f"{page.relative_to(ROOT)}: {address}: there is no such file"
        elif anchor and anchor not in anchors(texts.get(target, "")):
            yield f"{page.relative_to(ROOT)}: {address}: the page has no such heading"


def test_every_link_leads_to_a_file_and_a_heading() -> None:
    """A link to a page that is not committed would lead nowhere on GitHub."""
    texts = {page: page.read_text(encoding="utf-8") for page in [*PAGES, *OTHERS]}
    assert [line for page in texts for line in broken(page, texts)] == []


def test_links_of_written_pages_lead_somewhere(written: Mapping[str, str]) -> None:
    texts = {page: page.read_text(encoding="utf-8") for page in PAGES}
    texts |= {DOCS / name: text for name, text in written.items()}
    assert [line for name in written for line in broken(DOCS / name, texts)] == []


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


def test_the_site_has_four_doors_and_few_pages(written: Mapping[str, str]) -> None:
    site: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    assert [next(iter(door)) for door in site["nav"]] == DOORS
    named = Counter(navigation())
    assert [page for page, count in named.items() if count > 1] == []
    assert len(named) <= MOST_PAGES
    copies = script("docs_pages")
    assert copies.named() == set(named)
    pages = {copies.copy_of(page) for page in PAGES} - {None}
    copied = {page.relative_to(copies.COPIES).as_posix() for page in pages}
    assert set(named) == copied | set(copies.MOVED.values()) | written.keys()
    # A guide that nobody can reach is lost.
    guides = {page.name for page in DOCS.glob("*.md")}
    assert guides - set(named) == set()


def ranked(words: str, texts: Mapping[str, str]) -> list[str]:
    """The pages of `texts` that have `words`, those first that have them in the title, then in a
    heading, then most often: as a search engine for titles and sections orders them."""
    found: list[tuple[int, int, str]] = []
    for name, text in texts.items():
        title, *headings = [one.lower() for one in _HEADING.findall(_FENCE.sub("", text))] or [""]
        pattern = re.compile(rf"\b{re.escape(words)}s?\b")
        count = len(pattern.findall(text.lower()))
        if not count:
            continue
        rank = 0 if pattern.search(title) else 1 if any(map(pattern.search, headings)) else 2
        found.append((rank, -count, name))
    return [name for *_, name in sorted(found)]


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("api key", "server.md"),
        ("context length", "models.md"),
        ("lora", "troubleshooting.md"),
        ("gpu", "gpu.md"),
        ("slow", "troubleshooting.md"),
    ],
)
def test_what_people_search_for_is_found_first(
    words: str, page: str, written: Mapping[str, str]
) -> None:
    copies = script("docs_pages")
    texts: dict[str, str] = {
        copy.relative_to(copies.COPIES).as_posix(): path.read_text("utf-8")
        for path, _, copy in copies.sources()
        if copy.suffix == ".md"
    }
    assert ranked(words, {**texts, **written})[0] == page


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def written() -> Mapping[str, str]:
    """The pages that are not committed, by their paths in the site."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
        return script("reference_pages").pages()


def test_written_pages_have_every_flag_of_every_verb(written: Mapping[str, str]) -> None:
    keys = re.findall(r"^\| `(\w+)` \|", written["settings.md"], re.MULTILINE)
    of_settings = {f"--{no}{key.replace('_', '-')}" for key in keys for no in ("", "no-")}
    of_settings |= {"--config", "--set", "--model", "-m", "-hf", "--hf-repo"}
    assert all(f"`{flag}" in written["settings.md"] for flag in ("--set", "--model", "-m", "-hf"))
    _, *sections = re.split(r"^### outrider ", written["reference/cli.md"], flags=re.MULTILINE)
    by_verb = {section.partition("\n")[0]: section for section in sections}
    for line in FLAGS:
        words = line.split()
        flags = {word for word in words if word.startswith("-")}
        section = by_verb[" ".join(word for word in words if word not in flags)]
        own = set(re.findall(r"`(-[\w-]+)`", section.partition("\nSettings of ")[0]))
        assert flags <= (own | of_settings if "\nSettings of " in section else own), line


def test_written_pages_have_every_setting_path_and_metric(written: Mapping[str, str]) -> None:
    assert {f"`{name}`" for name in SETTINGS} <= set(written["settings.md"].split())
    for path in ("POST /v1/chat/completions", "POST /v1/messages", "GET /metrics"):
        assert f"\n| `{path}` |" in written["reference/http.md"]
    assert "\n| `outrider_generation_tokens_total` | counter |" in written["reference/metrics.md"]


def test_a_command_that_shows_a_written_page_is_a_link_to_it(written: Mapping[str, str]) -> None:
    copies = script("docs_pages")
    assert set(copies.SHOWN_BY.values()) == written.keys()
    source = ROOT / "studies" / "pages" / "measured.md"
    text = "`outrider --help`, [`outrider --help`](../../docs/chat.md), ``outrider --help``, "
    text += "`GET /x`\n```\n`GET /metrics`\n```\n"
    assert copies.page(text, source, copies.copy_of(source)) == text.replace(
        "`outrider --help`, ", "[`outrider --help`](../reference/cli.md), ", 1
    ).replace("../../docs/chat.md", "../chat.md")
    front = (DOCS / "index.md").read_text("utf-8")
    assert [command for command in copies.SHOWN_BY if f"(`{command}`)" not in front] == []


def test_copies_are_made_of_every_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: Mapping[str, str]
) -> None:
    copies = script("docs_pages")
    monkeypatch.setattr(copies, "WRITTEN", tmp_path)
    for name, text in written.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")
    assert set(copies.FOLDERS) == set(FOLDERS)
    found = {copy.relative_to(copies.COPIES).as_posix() for *_, copy in copies.sources()}
    assert set(navigation()) | {"site/site.css", "pictures/round.svg"} <= found


def test_links_of_a_copied_page_stay_in_the_site() -> None:
    """Those to other files of the repository become their names."""
    copies = script("docs_pages")
    page, contributing = DOCS / "algorithms" / "x.md", ROOT / "CONTRIBUTING.md"
    text = "[a](../index.md#b), [c](../../scripts/test), [d `e`](../../CHANGELOG.md), [f](#g)"
    assert copies.page(text, page, copies.COPIES / "algorithms" / "x.md") == (
        "[a](../index.md#b), c (`scripts/test`), [d `e`](../changelog.md), [f](#g)"
    )
    copy = copies.COPIES / "contributing.md"
    assert copies.page("[a](docs/chat.md)", contributing, copy) == "[a](chat.md)"
    goals = ROOT / "studies" / "pages" / "goals.md"
    text = "[a](measured.md#b), [c](../gate.py), [d](../../docs/chat.md), [e](log.md)"
    assert copies.page(text, goals, copies.COPIES / "measured" / "goals.md") == (
        "[a](measured.md#b), c (`studies/gate.py`), [d](../chat.md), e (`studies/pages/log.md`)"
    )


def test_commands_of_pages_that_are_not_the_programs_exist() -> None:
    """Targets of make, scripts and studies; verbs have a test of their own, and what else is shown
    (pip, podman, other clients) comes from elsewhere."""
    targets = set(re.findall(r"^(\S+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    lines = [
        (page, line.split())
        for page in [*PAGES, *OTHERS]
        for fence in _FENCE.finditer(page.read_text("utf-8"))
        for line in fence.group().splitlines()
    ]
    made = [(page, words[1]) for page, words in lines if words[:1] == ["make"]]
    assert {"demo", "test"} <= {target for _, target in made}
    assert [(page.name, target) for page, target in made if target not in targets] == []
    run = [
        (page, path)
        for page, words in lines
        for path in words[:2]
        if re.match(r"(scripts|studies|examples)/", path) and words[0] in ("python", path)
    ]
    assert len(run) > 10
    assert [(page.name, path) for page, path in run if not (ROOT / path).exists()] == []


def test_pictures_are_up_to_date() -> None:
    path = ROOT / "scripts" / "pictures.py"
    done = subprocess.run([sys.executable, str(path), "--check"], check=False, timeout=240)
    assert done.returncode == 0, "run `.venv/bin/python scripts/pictures.py`"


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
