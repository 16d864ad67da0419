"""A cost study that nobody measured, as a file holds it; and what results files begin with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from outrider_lab.bench.cost_record import (
    SCHEMA,
    Ceilings,
    Cell,
    DraftShare,
    ProductRow,
    Theory,
    WindowRow,
)

Record = dict[str, Any]
PROVENANCE: Record = {
    "command": "outrider bench anything",
    "utc": "2026-11-22T04:10:47+00:00",
    "commit": "fea27747ffc04678fc67f58f32c1c3e5666787c7",
    "dirty": False,
    "python": "3.11.7",
    "packages": {"torch": "2.13.0"},
    "cpu": "abacus",
    "cores": 2,
    "cuda": None,
}


def plain(record: Mapping[str, object]) -> Record:
    """As it comes back from a file."""
    return json.loads(json.dumps(record, allow_nan=False))


def head(benchmark: str, schema: str | None = None) -> Record:
    named = {"schema": schema} if schema else {}
    return {"benchmark": benchmark, **named, "run_id": "run-1", "provenance": PROVENANCE}


def study() -> Record:
    """Two rates, two K, hits, fan-outs and batches; the biggest batch loses."""
    cells = [
        cell("alpha", "ar", 0, speed_up=1.0),
        *(
            cell("alpha", method, k, alpha=alpha, speed_up=1 + alpha * k / 8 + 0.1 * number)
            for number, method in enumerate(("sd", "ssd"))
            for k in (2, 4)
            for alpha in (0.6, 0.9)
        ),
        *(cell("hits", "ssd", 4, p_hit=p, speed_up=1.2 + p) for p in (0.0, 0.5, 1.0)),
        *(cell("fan_out", "ssd", 4, fan_out=n, num_ahead=4.0 * n) for n in (1, 2, 4)),
        *(
            cell("batch", method, 4 if method != "ar" else 0, batch=n, speed_up=speed)
            for n in (1, 4, 16)
            for method, speed in (("ar", 1.0), ("sd", 1.6 - 0.05 * n), ("ssd", 1.7 - 0.05 * n))
        ),
    ]
    shares = DraftShare(
        pair="8b/1b",
        k=4,
        draft_seconds=0.1,
        plain_seconds=0.2,
        verify_seconds=0.25,
        over_plain=0.5,
        over_verify=0.4,
        low=0.48,
        high=0.52,
        published=0.69,
        num_repeats=5,
    )
    windows = [
        WindowRow(
            pair="8b/1b",
            k=k,
            branches=branches,
            verify_seconds=0.25,
            trunk_seconds=0.02,
            pass_seconds=0.02 * branches,
            num_passes=0.23 / (0.02 * branches),
            fits=branches == 1,
            largest_fan_out=1,
        )
        for k in (2, 4)
        for branches in (1, 4)
    ]
    return plain(
        {
            **head("ssd", SCHEMA),
            "complete": True,
            "setting": {"dtype": "bfloat16", "max_tokens": 32, "repeats": 5, "quick": False},
            "models": [{"pair": "8b/1b", "role": "target", "sampled": "2 of 32 layers"}],
            "draft_shares": [asdict(shares)],
            "ceilings": asdict(
                Ceilings(gigabytes_per_second=16.0, gigaflops_per_second=120.0, threads=2)
            ),
            "products": [asdict(product(rows)) for rows in (1, 16, 256)],
            "windows": [asdict(row) for row in windows],
            "cells": [asdict(one) for one in cells],
            "findings": ["SSD hides drafting."],
        }
    )


def product(rows: int) -> ProductRow:
    return ProductRow(
        shape="llama-1b",
        product="gate",
        num_rows=rows,
        num_in=64,
        num_out=64,
        num_bytes=8192,
        num_flops=8192 * rows,
        seconds=1e-6,
        gigabytes_per_second=8.0,
        gigaflops_per_second=min(8.0 * rows, 100.0),
        intensity=float(rows),
        roof=min(16.0 * rows, 120.0),
        share=0.5,
    )


def cell(study: Any, method: Any, k: int, **changes: Any) -> Cell:
    speed = changes.pop("speed_up", 1.5)
    given: Record = {
        "study": study,
        "pair": "8b/1b",
        "method": method,
        "k": k,
        "alpha": 0.9,
        "p_hit": None,
        "fan_out": 1,
        "batch": 1,
        "num_samples": 5,
        "num_failures": 0,
        "tokens_per_second": 10 * speed * changes.get("batch", 1),
        "token_ms": 100 / speed,
        "token_ms_p95": 120 / speed,
        "speed_up": speed,
        "low": 0.95 * speed,
        "high": 1.05 * speed,
        "tokens_per_round": 1 + k / 2,
        "alpha_seen": 0.9,
        "p_hit_seen": 0.7,
        "draft_ms": 10.0 * k,
        "verify_ms": 100.0,
        "accept_ms": 1.0,
        "rest_ms": 2.0,
        "ahead_over_verify": 0.6,
        "num_ahead": 4.0,
        "theory": Theory(tokens=1 + k / 2, over_plain=speed, over_verify=speed)
        if method != "ar"
        else None,
    }
    return Cell(**(given | changes))
