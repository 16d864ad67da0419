"""README's table of speeds: models of several sizes and formats, with ours and other engines.

It is made of the newest results of the studies `gguf_requests` and `serving_beside` of tier R, and
of `vs_peers` of tier B.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Report = Mapping[str, Any]
# Workloads of the study that are shown: its least and its most repetitive kinds are left out.
WORKLOADS = ("chat", "code")
FORMATS = ("Q4_1", "Q8_0", "BF16")
# Ours of tier B, and the nearest of GGUF.
FORMATS_B = {"int4": "int4 (Q4_0)", "int8": "int8 (Q8_0)", "bf16": "BF16"}
# Of the eight requests that a small server may have at once.
IN_FLIGHT = 8


def newest(folder: Path, study: str) -> Report:
    """Raises SystemExit if no result of the study is there."""
    found = [json.loads(path.read_text("utf-8")) for path in folder.glob(f"{study}*.json")]
    kept = [report for report in found if not report.get("quick")]
    if not kept:
        raise SystemExit(f"{folder} has no result of {study}")
    return max(kept, key=lambda report: str(report["provenance"]["utc"]))


def table(folder: Path) -> str:
    head = [
        "| model | format | text | Outrider, tokens a second | llama.cpp | ratio of the best | "
        "transformers |",
        "|---|---|---|--:|--:|--:|--:|",
    ]
    rows = [*_real(folder), *_inflated(folder)]
    return "\n".join(head + [f"| {' | '.join(cells)} |" for cells in rows])


def sources(folder: Path) -> str:
    """Under the table: what was run where, and several users at once."""
    alone, served = newest(folder, "gguf_requests-r-"), newest(folder, "serving_beside-")
    inflated = newest(folder, "vs_peers-b-")
    busy = next(cell for cell in served["cells"] if cell["in_flight"] == IN_FLIGHT)
    ours, theirs = (busy["first_token_ms"][f"{who} best"] for who in ("ours", "llama.cpp"))
    rate = busy["tokens_per_second"]
    return (
        "Plain decoding → with drafts, for one greedy request at a time. SmolLM2 ran on "
        f"{_machine(alone)}, the\n0.4 B on {_machine(inflated)}; it is the embedded model with "
        "the work of a larger one. Formats in brackets are\nllama.cpp's. "
        f"With {IN_FLIGHT} users at once, SmolLM2 in Q4_1 wrote {rate['ours best']:.0f} tokens a "
        f"second with Outrider and {rate['llama.cpp best']:.0f}\nwith llama-server, the first "
        f"after {ours / 1e3:.2f} s and {theirs / 1e3:.1f} s, on {_machine(served)}."
    )


def _real(folder: Path) -> Iterator[tuple[str, ...]]:
    cells = newest(folder, "gguf_requests-r-")["cells"]
    threads = max(cell["threads"] for cell in cells)
    for form in FORMATS:
        for work in WORKLOADS:
            for cell in cells:
                if (cell["threads"], cell["workload"]) != (threads, work) or form not in cell[
                    "file"
                ]:
                    continue
                rates = cell["tokens_per_second"]
                ratio = cell["ratios"]["ours best over llama.cpp best"]["value"]
                both = [_pair(rates, who) for who in ("ours", "llama.cpp", "transformers")]
                yield "SmolLM2-135M", form, work, both[0], both[1], f"{ratio:.2f}", both[2]


def _pair(rates: Mapping[str, float], who: str) -> str:
    """An engine's plain decoding and its best; a dash where it did not run."""
    if f"{who} best" not in rates:
        return "-"
    return f"{rates[f'{who} none']:.0f} → {rates[f'{who} best']:.0f}"


def _inflated(folder: Path) -> Iterator[tuple[str, ...]]:
    report = newest(folder, "vs_peers-b-")
    rates = {score["contestant"]: score["tokens_per_second"] for score in report["scores"]}
    for form, shown in FORMATS_B.items():
        found = {
            ratio["what"]: ratio
            for ratio in report["ratios"]
            if ratio["format"] == form and ratio["theirs"].startswith("llama.cpp")
        }
        plain, best = found["plain"], found["best"]
        both = [f"{rates[plain[who]]:.0f} → {rates[best[who]]:.0f}" for who in ("ours", "theirs")]
        yield "0.4 B, inflated", shown, "code, maths", *both, f"{best['faster']:.2f}", "-"


def _machine(report: Report) -> str:
    return f"{report['provenance']['cores']} cores of {report['provenance']['cpu']}"
