"""`outrider bench comm`: what it costs to let processes or devices meet."""

from __future__ import annotations

from pathlib import Path

from outrider.bench.comm import CommReport, Fit, Point, measure, pass_seconds
from outrider.bench.machine import provenance
from outrider.cli.call import Call
from outrider.cli.options import CommOptions
from outrider.cli.output import check_writable, json_line, size, table, write_whole
from outrider.core.spec import ModelSpec
from outrider.models.hf_config import read_config
from outrider.models.loading import resolve

# A step of decoding, a verified draft, a prompt chunk.
ROWS = (1, 8, 256)


def comm(call: Call[CommOptions]) -> int:
    options = call.options
    output = None if options.output is None else Path(options.output)
    if output is not None:
        check_writable(output)
    # Sizes alone: weights are not read.
    spec = read_config(resolve(options.model)).spec(
        options.model, bytes_per_weight=2, bytes_per_kv=2
    )
    report = measure(
        size=options.ranks, device=options.device, largest_bytes=options.largest_mb << 20
    )
    record: dict[str, object] = {
        "benchmark": "comm",
        "provenance": provenance(),
        **report.to_dict(),
        "passes": [
            {"model": spec.name, "rows": rows, "seconds": pass_seconds(report.fits[0], spec, rows)}
            for rows in ROWS
        ],
    }
    if output is not None:
        write_whole(output, json_line(record) + "\n")
    if options.json:
        print(json_line(record))
    else:
        print(_page(report, spec))
    return 0


def _page(report: CommReport, spec: ModelSpec) -> str:
    found = report.topology
    header = ("exercise", "bytes", "median us", "shortest us", "GB/s on the wire", "repeats")
    parts = [
        table(
            [
                ("ranks", f"{found.ranks} over {found.backend}"),
                ("devices", ", ".join(found.devices)),
                ("cores", f"{found.physical_cores} with {found.hardware_threads} threads"),
                ("peer access", ", ".join(found.peer_access) or "none"),
                ("used by others", _percent(report.foreign_cpu)),
            ]
        ),
        table([_row(point) for point in report.points], header=header),
        "\n".join(_sentence(found) for found in report.fits),
        f"Sums of one pass of {spec.name}, by this fit: "
        + ", ".join(
            f"{rows} rows {1e3 * pass_seconds(report.fits[0], spec, rows):.2f} ms" for rows in ROWS
        ),
    ]
    return "\n\n".join(parts)


def _row(point: Point) -> tuple[str, ...]:
    return (
        point.exercise,
        size(point.num_bytes),
        f"{1e6 * point.median_seconds:.1f}",
        f"{1e6 * point.min_seconds:.1f}",
        f"{point.gb_per_second:.3f}",
        str(point.repeats),
    )


def _sentence(fit: Fit) -> str:
    beta = fit.beta_bytes_per_second
    bandwidth = "no cost by size" if beta is None else f"{beta / 1e9:.2f} GB/s"
    return (
        f"{fit.exercise}: {1e6 * fit.alpha_seconds:.1f} us a message, {bandwidth} "
        f"(off by {100 * fit.worst_error:.0f} % at most)"
    )


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{100 * share:.0f} % of the CPUs"
