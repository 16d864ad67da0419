"""From a study's samples to its results: every row of `record.py`, and what they say in words."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from outrider.bench.gemm.cells import Measured
from outrider.bench.gemm.findings import findings, scatter_of, warnings
from outrider.bench.gemm.pair import PairShape, facts
from outrider.bench.gemm.passes import draft_shares, windows
from outrider.bench.gemm.record import (
    SCHEMA,
    Ceilings,
    Cell,
    DraftShare,
    ModelFacts,
    ProductRow,
    WindowRow,
)
from outrider.bench.gemm.roof import ROWS, product_rows
from outrider.bench.gemm.samples import SamplesFile
from outrider.bench.gemm.study import CostStudy
from outrider.bench.gemm.units import BRANCHES, CEILINGS, pass_name, product_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    models: Sequence[ModelFacts]
    draft_shares: Sequence[DraftShare]
    ceilings: Ceilings | None
    products: Sequence[ProductRow]
    windows: Sequence[WindowRow]
    cells: Sequence[Cell]
    num_failures: int
    foreign_cpu_share: float | None
    quick: bool

    @property
    def findings(self) -> list[str]:
        return findings(self.draft_shares, self.windows, self.cells)

    @property
    def warnings(self) -> list[str]:
        return [
            *warnings(
                quick=self.quick,
                num_failures=self.num_failures,
                foreign_cpu_share=self.foreign_cpu_share,
            ),
            *scatter_of(self.windows),
        ]

    def rows(self) -> dict[str, object]:
        """As `results.json` has them."""
        return {
            "models": [asdict(one) for one in self.models],
            "draft_shares": [asdict(one) for one in self.draft_shares],
            "ceilings": None if self.ceilings is None else asdict(self.ceilings),
            "products": [asdict(one) for one in self.products],
            "windows": [asdict(one) for one in self.windows],
            "cells": [asdict(one) for one in self.cells],
            "num_failures": self.num_failures,
            "foreign_cpu_share": self.foreign_cpu_share,
            "findings": self.findings,
            "warnings": self.warnings,
        }


def results_of(study: CostStudy, file: SamplesFile) -> Results:
    """Whatever was measured so far."""
    roof = _ceilings(file)
    shares: list[DraftShare] = []
    found: list[WindowRow] = []
    cells: list[Cell] = []
    for pair in study.pairs:
        seconds = _pass_seconds(file, pair.name)
        shares += draft_shares(pair.name, study.grid.ks, seconds)
        found += windows(pair.name, study.grid.ks, BRANCHES, seconds)
        cells += Measured.of(pair.name, study.grid_of(pair).contestants(), file).cells()
    foreign = [
        one.foreign_cpu_share for one in file.samples.values() if one.foreign_cpu_share is not None
    ]
    return Results(
        models=[one for pair in study.pairs for one in _facts(study, pair)],
        draft_shares=shares,
        ceilings=roof,
        products=_products(study, file, roof),
        windows=found,
        cells=cells,
        num_failures=sum(one.reason is not None for one in file.samples.values()),
        foreign_cpu_share=statistics.median(foreign) if foreign else None,
        quick=study.quick,
    )


def study_record(
    study: CostStudy, found: Results, about: Mapping[str, object]
) -> dict[str, object]:
    """The whole of `results.json`; `about` is the run: its id, provenance, completeness."""
    return {
        "benchmark": "ssd",
        "schema": SCHEMA,
        **about,
        "machine": study.circumstances["machine"],
        "setting": asdict(study.setting),
        **found.rows(),
    }


def _facts(study: CostStudy, pair: PairShape) -> list[ModelFacts]:
    return [
        *facts(study.pass_shape(pair), study.make, "passes"),
        *facts(study.engine_shape(pair), study.make, "engines"),
    ]


def _ceilings(file: SamplesFile) -> Ceilings | None:
    repeats = file.values("ceilings").get(CEILINGS)
    if not repeats:
        return None
    return Ceilings(
        gigabytes_per_second=statistics.median(one["bytes_per_second"] for one in repeats) / 1e9,
        gigaflops_per_second=statistics.median(one["flops_per_second"] for one in repeats) / 1e9,
        threads=repeats[-1]["threads"],
    )


def _products(study: CostStudy, file: SamplesFile, roof: Ceilings | None) -> list[ProductRow]:
    values, size = file.values("products"), study.make.bytes_per_weight("target")
    found: list[ProductRow] = []
    for shape in study.shapes:
        for num_rows in ROWS:
            repeats = values.get(product_name(shape, num_rows))
            if repeats:
                found += product_rows(shape, num_rows, repeats, roof, size)
    return found


def _pass_seconds(file: SamplesFile, pair: str) -> dict[str, list[float]]:
    """By what was timed, of one pair."""
    start = pass_name(pair, "")
    return {
        name.removeprefix(start): [one["seconds"] for one in repeats]
        for name, repeats in file.values("passes").items()
        if name.startswith(start)
    }
