"""`outrider report`: one self-contained page of everything that some results folders say."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn

from outrider.bench import drawing
from outrider.bench.report.build import build
from outrider.bench.report.page import num_figures, render, write_figures
from outrider.bench.report.parts import Figure, Part, Report
from outrider.bench.report.summary import summarise
from outrider.cli.call import Call, needed
from outrider.cli.output import check_writable, json_line, prose, write_whole
from outrider.cli.paint import Bar, words
from outrider.cli.run_options import ReportOptions
from outrider.core.errors import MachineError


def report(call: Call[ReportOptions]) -> int:
    needed(call, "FOLDER")
    output = Path(call.options.output)
    check_writable(output)
    found = build([Path(word) for word in call.arguments])
    for item in found.skipped:
        _say(f"skipped: {item.place}: {item.why}")
    reason = drawing.why_not()
    if reason is not None:
        _say(f"note: {reason}")
    page = _rendered(found)
    write_whole(output, page)
    written = _figures(found, call.options.figures)
    if call.options.json:
        print(json_line(_record(found, output, len(page.encode()), written)))
    else:
        _print(found, output, len(page.encode()), written)
    return 0


def _rendered(found: Report) -> str:
    """With a progress bar on stderr, where that is a terminal."""
    columns = (words(), BarColumn(), MofNCompleteColumn())
    with Bar(*columns) as progress:
        task = progress.add_task("figures", total=num_figures(found))

        def drawn(figure: Figure) -> None:
            del figure
            progress.advance(task)

        return render(found, drawn=drawn)


def _figures(found: Report, folder: str | None) -> Sequence[Path]:
    if folder is None or drawing.why_not() is not None:
        return []
    try:
        return write_figures(found, Path(folder))
    except OSError as error:
        raise MachineError(
            f"{folder} cannot be written: {error.strerror or error}.",
            hint="name another folder with --figures",
        ) from None


def _print(found: Report, output: Path, size: int, written: Sequence[Path]) -> None:
    summary = summarise(found)
    print("\n".join(map(prose, summary.sentences)))
    for gain in summary.gains:
        print(prose(f"gain: {gain}"))
    for loss in summary.losses:
        print(prose(f"loss: {loss}"))
    for warning in summary.warnings:
        print(prose(f"note: {warning}"))
    print(f"page: {output} ({size / 1e6:.1f} MB)")
    if written:
        print(f"figures: {len(written)} files in {written[0].parent.parent}")


def _record(found: Report, output: Path, size: int, written: Sequence[Path]) -> dict[str, object]:
    summary = summarise(found)
    return {
        "output": str(output),
        "bytes": size,
        "summary": list(summary.sentences),
        "gains": list(summary.gains),
        "losses": list(summary.losses),
        "warnings": list(summary.warnings),
        "parts": [_part_record(part) for part in found.parts],
        "skipped": [asdict(item) for item in found.skipped],
        "figures": [str(path) for path in written],
    }


def _part_record(part: Part) -> dict[str, object]:
    return {
        "kind": part.kind,
        "title": part.title,
        "place": part.place,
        "findings": list(part.findings),
        "warnings": list(part.warnings),
        "claims": [{**asdict(claim), "verdict": claim.verdict} for claim in part.claims],
        "figures": [figure.name for figure in part.figures],
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr)
