"""`outrider report`: one self-contained page of everything that some results folders say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from outrider.cli.call import Call, needed
from outrider.cli.output import Meter, answer, check_writable, prose, say, write_whole
from outrider.core.errors import MachineError
from outrider_lab.bench import drawing
from outrider_lab.bench.report.build import build
from outrider_lab.bench.report.page import named, num_figures, render, summary, write_figures
from outrider_lab.bench.report.parts import Part, Report
from outrider_lab.cli.verb_options import ReportOptions


def report(call: Call[ReportOptions]) -> int:
    needed(call, "FOLDER")
    output = Path(call.options.output)
    check_writable(output)
    found = build([Path(word) for word in call.arguments])
    for item in found.skipped:
        say(f"skipped: {item.place}: {item.why}")
    reason = drawing.why_not()
    if reason is not None:
        say(f"note: {reason}")
    page = _rendered(found)
    write_whole(output, page)
    written = _figures(found, call.options.figures)
    num_bytes = len(page.encode())
    text = "\n".join(_lines(found, output, num_bytes, written))
    answer(call.options, _record(found, output, num_bytes, written), text)
    return 0


def _rendered(found: Report) -> str:
    """With a progress bar on stderr, where that is a terminal."""
    with Meter("figures", num_figures(found), unit="figures") as meter:
        return render(found, drawn=lambda _: meter.step())


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


def _lines(found: Report, output: Path, size: int, written: Sequence[Path]) -> Iterator[str]:
    first = summary(found)
    yield from map(prose, first.text)
    kinds = {"gain": named(found, "gain"), "loss": named(found, "loss"), "note": first.warnings}
    yield from (prose(f"{kind}: {one}") for kind, listed in kinds.items() for one in listed)
    yield f"page: {output} ({size / 1e6:.1f} MB)"
    if written:
        yield f"figures: {len(written)} files in {written[0].parent.parent}"


def _record(found: Report, output: Path, size: int, written: Sequence[Path]) -> dict[str, object]:
    first = summary(found)
    return {
        "output": str(output),
        "bytes": size,
        "summary": list(first.text),
        "gains": named(found, "gain"),
        "losses": named(found, "loss"),
        "warnings": list(first.warnings),
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
