"""What parts of several kinds have in common: sections of a page as tables, and stored pictures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from outrider.bench.pages import Section
from outrider.bench.report.reading import Record, objects_of, shown, text_of
from outrider.bench.report.values import Picture, Table
from outrider.core.files import Kind, read_bytes

_MAX_PICTURE_BYTES = 400_000
_MAX_PICTURES = 8


def tables_of(sections: Iterable[Section]) -> list[Table]:
    """Those that have rows; sentences are the findings of a part."""
    return [
        Table(title=s.title, header=s.header, rows=s.rows, note=" ".join(s.text))
        for s in sections
        if s.rows
    ]


def own_words(findings: Sequence[str]) -> list[str]:
    """Without the sentence about a busy machine, which is among the warnings (reading.py)."""
    return [text for text in findings if not text.startswith("Other programs used")]


def by_tier(record: Record) -> list[tuple[Record, str]]:
    """What a results file says of each tier of a committed benchmark, or of the pair that it is of,
    each with its name."""
    tiers = objects_of(record, "tiers")
    if not tiers:
        return [(record, text_of(record, "pair", "a pair"))]
    head = {name: value for name, value in record.items() if name != "tiers"}
    return [({**head, **tier}, f"tier {text_of(tier, 'tier', '?').upper()}") for tier in tiers]


def plain_table(title: str, records: Sequence[Record], *, note: str = "") -> Table:
    """A row an object, a column a field that holds one value in any of them."""
    names = list(dict.fromkeys(name for record in records for name in record))
    plain = [
        name for name in names if not any(isinstance(r.get(name), dict | list) for r in records)
    ]
    return Table(
        title=title,
        header=[name.replace("_", " ") for name in plain],
        rows=[[shown(record.get(name)) for name in plain] for record in records],
        note=note,
    )


def stored(folder: Path, prefix: str, words: str) -> list[Picture]:
    """Figures that a run drew itself, by the beginning of their name; `words` stand before the rest
    of it. Of lanes nothing else is kept (bench/figure_lanes.py)."""
    found: list[Picture] = []
    paths = sorted((folder / "figures").glob(f"{prefix}*.svg"))
    for path in [path for path in paths if not path.stem.endswith("-dark")][:_MAX_PICTURES]:
        light = _bytes(path)
        if light is None:
            continue
        title = f"{words} {path.stem.removeprefix(prefix)}"
        found.append(
            Picture(
                title=title,
                alt=f"{title}, as the run drew it.",
                light=light,
                dark=_bytes(path.with_name(f"{path.stem}-dark.svg")),
            )
        )
    return found


def _bytes(path: Path) -> bytes | None:
    """None for a file that is missing, a link, or larger than such a figure is."""
    try:
        if path.is_symlink() or path.stat().st_size > _MAX_PICTURE_BYTES:
            return None
        return read_bytes(path, Kind.PICTURE)
    except OSError:
        return None
