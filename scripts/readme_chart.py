"""README's chart and its five figures: a real model beside llama.cpp and transformers.

They are made of the newest results of the studies `gguf_requests` and `serving_beside` of tier R.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from readme_svg import WIDTH, svg, text

Report = Mapping[str, Any]
# Contestants by the names of the study, in the order of the chart.
ENGINES = {"ours": "Outrider", "llama.cpp": "llama.cpp", "transformers": "transformers"}
PLAIN, BEST = "none", "best"
FORMAT = "BF16"
# Of the eight requests that a small server may have at once.
IN_FLIGHT = 8
LEFT, GUTTER, ROW, BAR = 18, 112, 22, 14
# What a bar's figures may take, to its right.
FIGURES = 72


def newest(folder: Path, study: str) -> Report:
    """Raises SystemExit if no result of the study is there."""
    found = [json.loads(path.read_text("utf-8")) for path in folder.glob(f"{study}*.json")]
    kept = [report for report in found if not report.get("quick")]
    if not kept:
        raise SystemExit(f"{folder} has no result of {study}")
    return max(kept, key=lambda report: str(report["provenance"]["utc"]))


def cells_of(report: Report) -> list[Report]:
    """Those of one number format on all threads, a workload each."""
    cells = [cell for cell in report["cells"] if FORMAT in cell["file"]]
    threads = max(cell["threads"] for cell in cells)
    return [cell for cell in cells if cell["threads"] == threads]


def alternative(folder: Path) -> str:
    """The chart in words."""
    told: list[str] = []
    for cell in cells_of(newest(folder, "gguf_requests-r-")):
        rates = "; ".join(f"{name} {plain:.0f}, {best:.0f}" for name, plain, best in _rates(cell))
        told.append(f"{cell['workload']}: {rates}")
    return f"Tokens a second, plain and with each engine's best speculation. {'. '.join(told)}"


def draw(folder: Path) -> str:
    report = newest(folder, "gguf_requests-r-")
    cells = cells_of(report)
    most = max(rate for cell in cells for _, *both in _rates(cell) for rate in both)
    scale = (WIDTH - GUTTER - FIGURES - LEFT) / most
    parts = [
        text(LEFT, 28, "Tokens a second, one request at a time", "h"),
        text(LEFT, 47, "Full colour: plain decoding. Pale: what the engine's best", "m s"),
        text(LEFT, 63, "speculation adds to it, chosen on prompts that do not count.", "m s"),
    ]
    y = 76
    for cell in cells:
        y += 18
        parts.append(text(LEFT, y, str(cell["workload"]), "h s"))
        y += 6
        for name, plain, best in _rates(cell):
            kind = "ours" if name == ENGINES["ours"] else "theirs"
            parts += [
                text(GUTTER - 8, y + 12, name, "s", "end"),
                _bar(y, 0, scale * plain, kind),
                _bar(y, scale * plain, scale * max(best, plain), f"{kind} pale"),
                text(
                    GUTTER + scale * max(best, plain) + 6, y + 12, f"{plain:.0f} → {best:.0f}", "s"
                ),
            ]
            y += ROW
    for said in _caption(report, cells):
        y += 17
        parts.append(text(LEFT, y, said, "m s"))
    style = (
        ".h{font-weight:600}.s{font-size:12px}.ours{fill:var(--ours)}.theirs{fill:var(--theirs)}"
        ".pale{fill-opacity:.45}"
    )
    return svg(y + 16, alternative(folder), style, parts)


def rows(folder: Path) -> list[tuple[str, str, str]]:
    """What is compared, the figure, and what it means."""
    return list(_rows(folder))


def table(folder: Path) -> str:
    head = ["| | times as fast | what it means |", "|---|--:|---|"]
    return "\n".join(head + [f"| {' | '.join(cells)} |" for cells in rows(folder)])


def sources(folder: Path) -> str:
    """Under the table: what was run where."""
    alone, served = newest(folder, "gguf_requests-r-"), newest(folder, "serving_beside-")
    places = [
        f"{report['provenance']['cores']} cores of {report['provenance']['cpu']}"
        for report in (alone, served)
    ]
    return (
        f"All rows are of SmolLM2-135M-Instruct, in {FORMAT} where a row names no other format, on "
        f"{places[0]};\nthat of {IN_FLIGHT} users is of {places[1]}."
    )


def _rows(folder: Path) -> Iterator[tuple[str, str, str]]:
    report, served = newest(folder, "gguf_requests-r-"), newest(folder, "serving_beside-")
    cells = cells_of(report)
    yield (
        "Both at their best, against llama.cpp",
        _span(cells, "ours best over llama.cpp best"),
        "what one user gets, over the four kinds of text",
    )
    yield (
        "Both without speculation, against llama.cpp",
        _span(cells, "ours none over llama.cpp none"),
        "the part of it that is faster kernels and no drafts",
    )
    yield (
        "Both at their best, against transformers",
        _span(cells, "ours best over transformers best"),
        "what a script that calls `generate` gains",
    )
    yield (
        "With drafts, against our own plain decoding",
        _span(cells, "ours best over ours none"),
        "the part that is drafts: little, for a model this small is cheap to run itself",
    )
    busy = next(cell for cell in served["cells"] if cell["in_flight"] == IN_FLIGHT)
    firsts = [busy["first_token_ms"][f"{who} {BEST}"] for who in ("ours", "llama.cpp")]
    yield (
        f"{IN_FLIGHT} users at once, against llama-server, Q4_1",
        f"{busy['ratios']['best, per_token']['value']:.2f}",
        "what a small server gets: passes are shared, and the first token comes after "
        f"{firsts[0] / 1e3:.2f} s, not {firsts[1] / 1e3:.1f} s",
    )


def _rates(cell: Report) -> Iterator[tuple[str, float, float]]:
    """Engines of a cell with their tokens a second, plain and at their best."""
    rates = cell["tokens_per_second"]
    for who, name in ENGINES.items():
        if f"{who} {BEST}" in rates:
            yield name, rates[f"{who} {PLAIN}"], rates[f"{who} {BEST}"]


def _span(cells: Sequence[Report], ratio: str) -> str:
    """The least and the greatest of a ratio over workloads."""
    values = [cell["ratios"][ratio]["value"] for cell in cells]
    return f"{min(values):.2f} to {max(values):.2f}"


def _caption(report: Report, cells: Sequence[Report]) -> tuple[str, str]:
    origin = report["provenance"]
    return (
        f"SmolLM2-135M-Instruct in {FORMAT}, {origin['cores']} cores of {origin['cpu']}, no GPU,",
        f"{cells[0]['num_prompts']} prompts of each kind, all engines in turns; "
        f"{str(origin['utc'])[:10]}.",
    )


def _bar(y: float, start: float, end: float, kind: str) -> str:
    return (
        f'<rect x="{GUTTER + start:.1f}" y="{y}" width="{end - start:.1f}" height="{BAR}" '
        f'class="{kind}"/>'
    )
