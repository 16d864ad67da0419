"""What a run leaves behind: `results.json` with everything, a row a request, and the report.

Every number that is printed stands in `results.json`, under a run id that the report names too.
"""

from __future__ import annotations

import csv
import datetime
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from io import StringIO
from pathlib import Path

from outrider.bench.engines.findings import Evidence, findings
from outrider.bench.engines.plan import Contestant, Plan
from outrider.bench.engines.reference import LABEL, PUBLISHED
from outrider.bench.engines.samples import Sample, Taken
from outrider.bench.load.tally import row_of
from outrider.bench.pages import Page, html, markdown
from outrider.bench.store import write_text
from outrider.core.config import EngineConfig

SCHEMA = "outrider-bench-engines/1"
RESULTS, REPORT, WEB_PAGE, REQUESTS = "results.json", "report.md", "report.html", "requests.csv"


def new_run_id() -> str:
    """Moment and chance: sorts by time and is nobody else's."""
    now = datetime.datetime.now(datetime.UTC)
    return f"{now:%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:8]}"


def plan_record(plan: Plan) -> dict[str, object]:
    return {
        "levels": list(plan.levels),
        "repeats": plan.repeats,
        "num_warmup": plan.num_warmup,
        "num_requests": plan.num_requests,
        "max_tokens": plan.max_tokens,
        "gap_seconds": plan.gap_seconds,
        "num_prompts": len(plan.texts),
        "params": asdict(plan.params),
    }


def contestant_record(contestant: Contestant) -> dict[str, object]:
    """What it was and what was found while loading; settings that are not their default."""
    default = asdict(EngineConfig())
    config = {k: v for k, v in asdict(contestant.config).items() if v != default[k]}
    return {
        "engine": contestant.name,
        "settings": config,
        "reason": contestant.reason,
        **contestant.facts,
    }


def evidence_record(found: Evidence) -> dict[str, object]:
    return {
        "cells": [{**asdict(cell), "status": cell.status} for cell in found.cells],
        "comparisons": [asdict(one) for one in found.comparisons],
        "lane_bounds": [asdict(one) for one in found.bounds],
        "lane_bound_refusal": found.bound_refusal,
        "ahead_predictions": [asdict(one) for one in found.predictions],
        "agreement": {"visits": found.agreement[0], "same_tokens": found.agreement[1]},
        "findings": findings(found),
        "foreign_cpu_share": found.foreign_cpu_share,
        "reference": {"label": LABEL, "rows": [asdict(row) for row in PUBLISHED]},
    }


def sample_record(sample: Sample) -> dict[str, object]:
    numbers = sample.numbers
    return {
        "level": sample.level,
        "engine": sample.engine,
        "repeat": sample.repeat,
        "reason": sample.reason,
        "digest": sample.digest,
        "foreign_cpu_share": sample.foreign_cpu_share,
        "numbers": None
        if numbers is None
        else {
            **asdict(numbers),
            "tokens_per_second": round(numbers.tokens_per_second, 3),
            "acceptance": numbers.acceptance,
            "p_hit": numbers.p_hit,
        },
        "usage": None if sample.usage is None else dict(sample.usage),
        "lanes": None if sample.lanes is None else sample.lanes.to_dict(),
    }


def request_rows(taken: Sequence[Taken]) -> list[dict[str, object]]:
    return [
        {
            "level": one.sample.level,
            "engine": one.sample.engine,
            "repeat": one.sample.repeat,
            **row_of(served),
        }
        for one in taken
        for served in one.served
    ]


def csv_text(rows: Sequence[Mapping[str, object]]) -> str:
    """A head and a line a row; only the empty string for no rows."""
    text = StringIO()
    if rows:
        writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return text.getvalue()


def write_page(folder: Path, page: Page) -> None:
    write_text(folder / REPORT, markdown(page))
    write_text(folder / WEB_PAGE, html(page))
