"""Writes the table of studies/pages/measured.md from studies/results: `scripts/bench_table`.

Each result file is NAME[-VARIANT]-MACHINE.json; a column is a machine, a row is a figure that some
machine has. `--check` only compares, and exits with 1 if the page is out of date. Left out are
results of `--quick` runs and machines called `local`. Needs Python alone.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from textwrap import wrap
from typing import Any

from generated import kept

ROOT = Path(__file__).parent.parent
PAGE, RESULTS = ROOT / "studies" / "pages" / "measured.md", ROOT / "studies" / "results"
BEGIN, END = "<!-- Written by scripts/bench_table; do not edit. -->", "<!-- End of the table. -->"
# A variant is a tier or a shape, perhaps with a number format.
_VARIANT = r"(?P<variant>(a|r|b-0\.4b|b|0\.4b)(-[a-z]+\d+)?)"
NAME = re.compile(rf"(?P<name>[a-z_]+)(-{_VARIANT})?-(?P<machine>.+)")

# What is compared with a peer, and what the table calls it.
SIDES = {"plain": "plain", "model": "draft model", "ngram": "n-gram", "best": "best of each"}
PEERS = {"openvino": "OpenVINO GenAI"}

# Benchmarks that run several requests at once, and when schedules last changed (UTC, as a result's
# provenance has it). Older figures of them are marked.
SCHEDULED = ("batch", "vs_transformers")
SCHEDULES_CHANGED = "2026-11-22T12:57:50"
MARK = " †"
# When int4 became another format; older figures of it are marked.
INT4_CHANGED = "2026-11-23T18:40:00"
INT4_MARK = " ‡"
# How the prose of the page is broken.
_PROSE: dict[str, Any] = {"width": 100, "break_long_words": False, "break_on_hyphens": False}

Report = Mapping[str, Any]
# Pairs of a row's label and its figure.
Figures = Iterator[tuple[str, str]]


def transformers(report: Report) -> Figures:
    """One request at a time is among what `peers` tells."""
    batch = report["batch_8"]
    for label, ratio, mine, theirs in (
        ("Plain decoding against transformers", "plain_ratio", "plain", "hf_plain"),
        ("Best of ours against the best of transformers", "speculation_ratio", "spec", "hf"),
        ("Speculation against our plain decoding", "speed_up_over_own_plain", "spec", "plain"),
    ):
        rates = [
            batch["scores"][batch["best"][side]]["tokens_per_second"] for side in (mine, theirs)
        ]
        figure = f"{times(batch[ratio])} ({rates[0]:.0f} over {rates[1]:.0f} tok/s)"
        yield f"{label}, tier A, batch 8", figure


def peers(report: Report) -> Figures:
    """Greedy ratios to each peer: of like with like, then of the best with the best."""
    owners = {score["contestant"]: score["peer"] for score in report["scores"]}
    found: dict[tuple[str, str], dict[str, str]] = {}
    for ratio in report["ratios"]:
        peer = owners.get(ratio["theirs"])
        if ratio["temperature"] == 0 and peer not in (None, "outrider"):
            found.setdefault((peer, ratio["format"]), {})[ratio["what"]] = times(ratio["faster"])
    for (peer, form), ratios in found.items():
        told = " · ".join(ratios[what] for what in SIDES if what in ratios)
        kinds = ", ".join(SIDES[what] for what in SIDES if what in ratios)
        yield (
            f"Against {PEERS.get(peer, peer)}, tier {report['tier'].upper()}, {form}: {kinds}",
            told,
        )


def limits(report: Report) -> Figures:
    for cell in report["cells"]:
        where = f"tier {cell['tier'].upper()}, {precision(cell)}"
        yield (
            f"A decoding pass's share of the read ceiling, {where}",
            f"{100 * cell['share_of_read_ceiling']:.0f} %",
        )
    layers = report["layers"]
    yield (
        "A narrow layer of a pass (eager PyTorch)",
        f"{layers['native_us']:.1f} µs ({layers['eager_us']:.0f})",
    )


def verify(report: Report) -> Figures:
    found = {(cell["context"], cell["rows"]): cell for cell in report["cells"]}
    for place in ((256, 16), (1000, 16)):
        if place in found:
            context, rows = place
            label = f"A pass of {rows} rows over one of 1, context {context:,}, {precision(report)}"
            yield label, times(found[place]["against_one_row"])


def predicted(report: Report) -> Figures:
    for tier in dict.fromkeys(cell["tier"] for cell in report["cells"]):
        ratios = [cell["ratio"] for cell in report["cells"] if cell["tier"] == tier]
        yield (
            f"Speculation achieved over predicted, tier {tier.upper()}: median (least)",
            f"{median(ratios):.2f} ({min(ratios):.2f})",
        )


def batch(report: Report) -> Figures:
    last = report["cells"][-1]
    yield (
        f"Throughput of {last['sequences']} sequences over 1, plain, tier B",
        times(last["decode_ratio"]),
    )


def accept(report: Report) -> Figures:
    cell = max(report["cells"], key=lambda found: (found["vocab_size"], found["k"]))
    yield (
        f"Accept step, {cell['vocab_size'] // 1024}k tokens, K = {cell['k']} (against PyTorch)",
        f"{cell['accept_native_us'] / 1e3:.2f} ms ({cell['accept_ratio']:.1f}×)",
    )


def lookups(report: Report) -> Figures:
    """The dearest round of each, over lengths and kinds of text, chains and trees."""
    names, cells = ("ngram", "suffix", "recycling", "lookup"), report["cells"]
    contexts = sorted({cell["context"] for cell in cells})
    most = (max(c["round_us"] for c in cells if c["drafter"] == name) for name in names)
    label = f"A round of {', '.join(names)} at {contexts[0]:,} to {contexts[-1]:,} tokens, at most"
    yield label, " · ".join(f"{one:.1f} µs" for one in most)


def memory(report: Report) -> Figures:
    contexts = sorted(map(int, report["append_us"]))
    yield (
        "Appending a token to a long context over a short one",
        f"{times(report['append_ratio'])} ({contexts[0]:,} to {contexts[-1]:,})",
    )
    yield "Rolling back 64 rows over 1", times(report["rollback_ratio"])


def parity(report: Report) -> Figures:
    yield (
        "Greedy tokens equal with and without speculation",
        f"{report['num_equal']:,} of {report['num_tokens']:,}",
    )


def gguf(report: Report) -> Figures:
    """Plain writing and reading of prompts of 512 tokens, on one thread and on two."""
    cells = [cell for cell in report["cells"] if "written_over_llama.cpp" in cell]
    for file in dict.fromkeys(cell["file"] for cell in cells):
        own = sorted((c for c in cells if c["file"] == file), key=lambda cell: cell["threads"])
        told = [times(cell[f"{w}_over_llama.cpp"]) for w in ("written", "read") for cell in own]
        label = f"Against llama-bench, {_model(file)}: writing, reading 512; 1 and 2 threads each"
        yield label, " · ".join(told)


def requests(report: Report) -> Figures:
    """Of both the best speculation, on two threads."""
    cells = [cell for cell in report["cells"] if cell["threads"] == 2]
    for file in dict.fromkeys(cell["file"] for cell in cells):
        own = {cell["workload"]: cell["ratios"] for cell in cells if cell["file"] == file}
        told = [times(found["ours best over llama.cpp best"]["value"]) for found in own.values()]
        label = f"Against llama-server, {_model(file)}, best of each: {', '.join(own)}"
        yield label, " · ".join(told)


def _model(file: str) -> str:
    """SmolLM2-135M-Instruct.Q4_1.gguf, tier-B-Q4_K_M.gguf"""
    kind = re.split(r"[-.](?=Q\d|BF16|F16|F32)", file.removesuffix(".gguf"))[-1]
    return f"tier {'B' if 'tier-B' in file else 'R'}, GGUF {kind}"


# In the order of the table's rows.
MAKERS: Mapping[str, Callable[[Report], Figures]] = {
    "gguf_requests": requests,
    "gguf": gguf,
    "vs_peers": peers,
    "vs_transformers": transformers,
    "limits": limits,
    "verify_cost": verify,
    "batch": batch,
    "predicted": predicted,
    "accept_cost": accept,
    "lookup_cost": lookups,
    "memory_cost": memory,
    "parity": parity,
}


def times(ratio: float) -> str:
    return f"{ratio:.2f}×"


def precision(record: Report) -> str:
    return "bfloat16" if record["quantise"] == "none" else record["quantise"]


def figures(folder: Path) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Machines with what they are, and by label the figure of each machine that has one."""
    machines: dict[str, str] = {}
    table: dict[str, dict[str, str]] = {}
    named = ((path, NAME.fullmatch(path.stem)) for path in sorted(folder.glob("*.json")))
    known = [(path, found) for path, found in named if found and found["name"] in MAKERS]
    for path, found in sorted(known, key=lambda item: place_of(item[1])):
        report = json.loads(path.read_text("utf-8"))
        if report.get("quick") or found["machine"] == "local":
            continue
        machine = found["machine"]
        origin = report["provenance"]
        machines.setdefault(machine, f"{origin['cores']} cores of {origin['cpu']}")
        mark = MARK if found["name"] in SCHEDULED and is_older(origin) else ""
        for label, figure in MAKERS[found["name"]](report):
            was_int4 = "int4" in label and str(origin.get("utc", "")) < INT4_CHANGED
            marked = figure + (INT4_MARK if was_int4 else "") + mark
            # Of two results that tell the same, the first in order counts.
            table.setdefault(label, {}).setdefault(machine, marked)
    return machines, table


def is_older(origin: Report) -> bool:
    """Whether this was measured before the schedules last changed."""
    return str(origin.get("utc", "")) < SCHEDULES_CHANGED


def place_of(found: re.Match[str]) -> tuple[int, bool, int]:
    """By the order of MAKERS, the real model first, then wider numbers before narrower ones."""
    widths = [int(digits) for digits in re.findall(r"(\d+)$", found["variant"] or "")]
    return list(MAKERS).index(found["name"]), found["variant"] != "r", -sum(widths)


def block(folder: Path) -> str:
    """What stands between the two comments, and they themselves."""
    machines, table = figures(folder)
    names = sorted(machines)
    lines = [BEGIN, ""]
    if names:
        lines += prose(machines, names)
        lines += [row(["", *names]), row(["---", *("--:" for _ in names)])]
        lines += [
            row([label, *(found.get(n, "") for n in names)]) for label, found in table.items()
        ]
        lines.append("")
        told = " ".join(figure for found in table.values() for figure in found.values())
        for mark, note in _OLDER.items():
            lines += [*wrap(f"{mark.strip()} {note}", **_PROSE), ""] if mark in told else []
    return "\n".join([*lines, END])


_OLDER = {
    MARK: "Of several requests at once, measured before the schedules last changed (22 November "
    "2026), and not since.",
    INT4_MARK: "Of int4 before it became groups with scale and minimum (23 November 2026).",
}


def prose(machines: Mapping[str, str], names: Sequence[str]) -> list[str]:
    told = "; ".join(f"`{name}` is {machines[name]}" for name in names)
    text = (
        "Tier R is a real model, SmolLM2-135M-Instruct, whose weights come from the Q4_1 file that "
        "is published. Tier A is the embedded target (8.0 M parameters, 1.4 M its draft), tier B "
        "the same target inflated to 0.4 billion weights; figures of the one say little about the "
        "other. Decoding is greedy, and both sides of a ratio take turns in one run. A share of "
        "the ceiling above 100 % says that the bare read beside it was disturbed. "
        f"{told}. [Results](../results/), [how they are made](benchmarks.md)."
    )
    return [*wrap(text, **_PROSE), ""]


def row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def replaced(text: str, new: str) -> str:
    """The page with its block replaced. Raises SystemExit if it has none."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"studies/pages/measured.md lacks the line {BEGIN} or {END}")
    return before + new + after


def main(words: Sequence[str]) -> int:
    text = PAGE.read_text("utf-8")
    new = replaced(text, block(RESULTS))
    return kept({PAGE: new}, words, again="scripts/bench_table")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
