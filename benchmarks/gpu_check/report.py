"""The one JSON file, and the table at the end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from outrider.bench.store import write_json

State = Literal["passed", "failed", "skipped"]


@dataclass(slots=True)
class Section:
    """What became of one section. `error` is a traceback, or why it was skipped."""

    name: str
    state: State
    seconds: float
    record: dict[str, Any] = field(default_factory=dict[str, Any])
    error: str = ""


def failed_checks(section: Section) -> list[dict[str, Any]]:
    return [one for one in section.record.get("checks", []) if not one["passed"]]


def write(path: Path, sections: list[Section], *, device: str, quick: bool) -> None:
    write_json(
        path,
        {
            "benchmark": "gpu_check",
            "device": device,
            "quick": quick,
            "passed": all(section.state != "failed" for section in sections),
            "sections": [asdict(section) for section in sections],
        },
    )


def lines(sections: list[Section]) -> Iterator[str]:
    """A line a section, its failed checks and its most telling numbers."""
    for section in sections:
        yield f"{section.name:12} {section.state:8} {section.seconds:6.1f} s  {_gist(section)}"
        for one in failed_checks(section):
            yield f"{'':12} FAILED   {one['name']} ({one['detail']})"
        if section.error:
            yield f"{'':12} {section.error.strip().splitlines()[-1]}"
        for cell in section.record.get("cells", [])[:40]:
            yield f"{'':14}{_told(cell)}"


def _gist(section: Section) -> str:
    plain = {k: v for k, v in section.record.items() if isinstance(v, int | float)}
    return _told(plain)


def _told(cell: dict[str, Any]) -> str:
    return "  ".join(f"{name}={_shown(value)}" for name, value in cell.items())


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
