"""The verb that makes a page of results, for the table of all verbs."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.cli.options import JsonOption
from outrider.cli.verb import Argument, Verb
from outrider.core.fields import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions(JsonOption):
    """Of `report`."""

    output: str = setting("report.html", "Write the page to this file.")
    figures: str | None = setting(
        None, "Also write every figure to this folder, as SVG and PNG, for light and dark pages."
    )


REPORT = Verb(
    name="report",
    target="outrider.cli.report:report",
    text="Make one web page of results: figures, tables, and where speculation gains or loses.",
    example="outrider report results --output report.html",
    arguments=(
        Argument(
            name="FOLDER",
            text="Folders that benchmarks wrote, or single results files.",
            many=True,
        ),
    ),
    options=ReportOptions,
)
