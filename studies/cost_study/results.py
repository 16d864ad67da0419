"""From a study's samples to the rows of `record.py`, and what theory makes of the same run's times.

For SD with times T_draft of K passes, T_verify of one verification and T_AR of a plain pass,

    over_plain  = E / (1 + T_draft / T_AR)              as the reference tables define T_SD
    over_verify = E T_AR / (T_draft + T_verify)         verification is not free

and for SSD Theorem 7 (`AheadTimes`) with the share of predicted verdicts that was seen or forced, a
fallback of T_draft, and work ahead of K + 1 passes: the trunk's and one a token for all branches at
once. Its times are those of drafting in turns, so what SSD lacks of it is what its two
lanes cost each other, and the host. E is that of the script's rate. A batch waits for its slowest
row. A product of N rows by a matrix of O outputs and I inputs takes 2 N O I operations and reads at
least the matrix, the rows and the results; with B bytes and C operations a second at most,

    operations a second <= min(C, B x operations / bytes)            (Williams et al. 2009)
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from cost_study.engines import CostEngine
from cost_study.pair import draft_chain, draft_rows, facts, target_rows
from cost_study.study import CostStudy
from cost_study.units import (
    BRANCHES,
    CEILINGS,
    ROWS,
    SamplesFile,
    Values,
    engine_name,
    product_name,
)
from outrider.estimate.acceptance import expected_tokens, measured_speed_up
from outrider.plugins.measure.turns import ratio_of_medians
from outrider_lab.bench.cost_record import (
    SCHEMA,
    Ceilings,
    Cell,
    DraftShare,
    ProductRow,
    Results,
    Theory,
    WindowRow,
    findings,
    warnings,
)
from outrider_lab.bench.reference import draft_shares as published_shares
from outrider_lab.measure.frame import paired_ratio
from outrider_lab.models.gemm import GemmShape, products
from outrider_lab.planner.overlap import AheadTimes
from outrider_lab.planner.rounds import estimated_beta, speed_up

_FLOAT_BYTES = 4
# The values of a contestant, by number of the visit.
Repeats = Mapping[int, Values]
# The seconds of passes of a pair, by what was timed.
Seconds = Mapping[str, Sequence[float]]


def results_of(study: CostStudy, file: SamplesFile) -> Results:
    """Whatever was measured so far."""
    roof = _ceilings(file)
    shares: list[DraftShare] = []
    beside: list[WindowRow] = []
    measured: list[Cell] = []
    passes, engines = file.by_repeat("passes"), file.by_repeat("engines")
    for pair in study.pairs:
        start = f"{pair.name} "
        seconds = {
            name.removeprefix(start): [one["seconds"] for one in repeats.values()]
            for name, repeats in passes.items()
            if name.startswith(start)
        }
        names = {one: engine_name(pair.name, one) for one in study.grid_of(pair).contestants()}
        shares += draft_shares(pair.name, study.grid.ks, seconds)
        beside += windows(pair.name, study.grid.ks, BRANCHES, seconds)
        measured += cells(
            pair.name,
            {one: engines[name] for one, name in names.items() if name in engines},
            {one: file.num_failures("engines", name) for one, name in names.items()},
        )
    samples = file.samples.values()
    foreign = [one.foreign_cpu_share for one in samples if one.foreign_cpu_share is not None]
    return Results(
        models=[
            fact
            for pair in study.pairs
            for fact in (
                *facts(study.pass_shape(pair), study.make, "passes"),
                *facts(study.engine_shape(pair), study.make, "engines"),
            )
        ],
        draft_shares=shares,
        ceilings=roof,
        products=_products(study, file, roof),
        windows=beside,
        cells=measured,
        num_failures=sum(one.reason is not None for one in samples),
        foreign_cpu_share=statistics.median(foreign) if foreign else None,
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
        "setting": study.setting,
        **asdict(found),
        "findings": findings(found),
        "warnings": warnings(found, quick=study.quick),
    }


def _ceilings(file: SamplesFile) -> Ceilings | None:
    repeats = list(file.by_repeat("ceilings").get(CEILINGS, {}).values())
    if not repeats:
        return None
    return Ceilings(
        gigabytes_per_second=statistics.median(one["bytes_per_second"] for one in repeats) / 1e9,
        gigaflops_per_second=statistics.median(one["flops_per_second"] for one in repeats) / 1e9,
        threads=repeats[-1]["threads"],
    )


def _products(study: CostStudy, file: SamplesFile, roof: Ceilings | None) -> list[ProductRow]:
    values, size = file.by_repeat("products"), study.make.bytes_per_weight("target")
    return [
        row
        for shape in study.shapes
        for num_rows in ROWS
        if (repeats := values.get(product_name(shape, num_rows)))
        for row in product_rows(shape, num_rows, list(repeats.values()), roof, size)
    ]


def product_rows(
    shape: GemmShape,
    num_rows: int,
    repeats: Sequence[Mapping[str, float]],
    roof: Ceilings | None,
    bytes_per_weight: float,
) -> Iterator[ProductRow]:
    """Of one shape and number of rows, from all repeats by product."""
    for name, (num_out, num_in) in products(shape).items():
        seconds = statistics.median(one[name] for one in repeats)
        num_bytes = int(bytes_per_weight * num_out * num_in)
        num_bytes += _FLOAT_BYTES * num_rows * (num_in + num_out)
        num_flops = 2 * num_rows * num_out * num_in
        intensity = num_flops / num_bytes
        reached = num_flops / seconds / 1e9
        limit = 0.0
        if roof is not None:
            limit = min(roof.gigaflops_per_second, roof.gigabytes_per_second * intensity)
        yield ProductRow(
            shape=shape.name,
            product=name,
            num_rows=num_rows,
            num_in=num_in,
            num_out=num_out,
            num_bytes=num_bytes,
            num_flops=num_flops,
            seconds=seconds,
            gigabytes_per_second=num_bytes / seconds / 1e9,
            gigaflops_per_second=reached,
            intensity=intensity,
            roof=limit,
            share=reached / limit if limit else 0.0,
        )


def draft_shares(pair: str, ks: Sequence[int], seconds: Seconds) -> Iterator[DraftShare]:
    """T_SD of every K that was timed."""
    for k in ks:
        timed = [seconds.get(name) for name in (draft_chain(k), target_rows(1), target_rows(k + 1))]
        draft, plain, verify = timed
        if not draft or not plain or not verify:
            continue
        num = min(len(draft), len(plain))
        share = ratio_of_medians(draft[:num], plain[:num])
        yield DraftShare(
            pair=pair,
            k=k,
            draft_seconds=statistics.median(draft),
            plain_seconds=statistics.median(plain),
            verify_seconds=statistics.median(verify),
            over_plain=share.value,
            over_verify=statistics.median(draft) / statistics.median(verify),
            low=share.low,
            high=share.high,
            published=published_shares(pair).get(k),
            num_repeats=num,
        )


def windows(
    pair: str, ks: Sequence[int], branches: Sequence[int], seconds: Seconds
) -> Iterator[WindowRow]:
    """How much drafting fits beside verifications, if neither slows the other down."""
    for k in ks:
        rows = [_window(pair, k, count, seconds) for count in branches]
        found = [row for row in rows if row is not None]
        most = max((row["branches"] for row in found if row["fits"]), default=0)
        yield from (WindowRow(**row, largest_fan_out=most) for row in found)


def _window(pair: str, k: int, branches: int, seconds: Seconds) -> dict[str, Any] | None:
    names = target_rows(k + 1), draft_rows(k + 1), draft_rows(branches)
    if not all(seconds.get(name) for name in names):
        return None
    verify, trunk, one = (statistics.median(seconds[name]) for name in names)
    return {
        "pair": pair,
        "k": k,
        "branches": branches,
        "verify_seconds": verify,
        "trunk_seconds": trunk,
        "pass_seconds": one,
        "pass_least": min(seconds[names[2]]),
        "pass_most": max(seconds[names[2]]),
        "num_passes": verify / one,
        "fits": trunk + k * one <= verify,
    }


def cells(
    pair: str, measured: Mapping[CostEngine, Repeats], num_failures: Mapping[CostEngine, int]
) -> list[Cell]:
    """Of all contestants that have samples, and whose visits have some of plain decoding."""
    found: list[Cell] = []
    for one, visits in measured.items():
        plain, in_turns = (_like(measured, one, method) for method in ("ar", "sd"))
        if not plain.keys() & visits.keys():
            continue
        repeats = list(visits.values())
        # In a visit both have the same texts, a moment apart; either may have failed in another.
        gain = paired_ratio(*({n: _pace(v) for n, v in side.items()} for side in (plain, visits)))
        looks = _total(repeats, "num_looks")
        p_hit = _total(repeats, "num_hits") / looks if looks else None
        rate = statistics.median(v["num_tokens"] / v["seconds"] for v in repeats)
        found.append(
            Cell(
                study=one.study,
                pair=pair,
                method=one.method,
                k=one.k,
                alpha=one.alpha,
                p_hit=one.p_hit,
                fan_out=one.fan_out,
                batch=one.batch,
                num_samples=len(repeats),
                num_failures=num_failures.get(one, 0),
                tokens_per_second=rate,
                token_ms=1e3 * one.batch / rate,
                token_ms_p95=statistics.median(v["token_ms_p95"] for v in repeats),
                speed_up=gain.value if gain else 1.0,
                low=gain and gain.low,
                high=gain and gain.high,
                tokens_per_round=_total(repeats, "num_tokens") / _total(repeats, "num_rounds"),
                alpha_seen=estimated_beta(
                    int(_total(repeats, "num_accepted")), int(_total(repeats, "num_refused"))
                )
                if one.k
                else None,
                p_hit_seen=p_hit,
                **_round_ms(repeats),
                ahead_over_verify=_median(repeats, "ahead_over_verify"),
                num_ahead=_median(repeats, "num_ahead"),
                theory=_theory(one, list(plain.values()), list(in_turns.values()), p_hit),
            )
        )
    return found


def _like(measured: Mapping[CostEngine, Repeats], one: CostEngine, method: str) -> Repeats:
    """Samples of `method` in the visits that `one` was in: those of its own study first."""
    for study in (one.study, "alpha"):
        for other, repeats in measured.items():
            same = (other.method, other.study, other.batch) == (method, study, one.batch)
            if same and (method == "ar" or (other.k, other.alpha) == (one.k, one.alpha)):
                return repeats
    return {}


def _round_seconds(repeats: Sequence[Values], name: str) -> float:
    """Of a pass in which the whole batch takes part: the median over repeats of the mean."""
    return statistics.median(one[name] / one["num_passes"] for one in repeats)


def _round_ms(repeats: Sequence[Values]) -> dict[str, float]:
    """A round's parts, and the rest of it."""
    names = ("draft", "verify", "accept")
    parts = {name: _round_seconds(repeats, f"{name}_seconds") for name in names}
    rest = _round_seconds(repeats, "seconds")
    for part in parts.values():
        rest -= part
    parts["rest"] = max(rest, 0.0)
    return {f"{name}_ms": 1e3 * part for name, part in parts.items()}


def _theory(
    one: CostEngine, plain: Sequence[Values], in_turns: Sequence[Values], p_hit: float | None
) -> Theory | None:
    """None for plain decoding, and where drafting in turns was not measured."""
    if not one.k or not in_turns:
        return None
    tokens = expected_tokens(one.alpha, one.k)
    base = _round_seconds(plain, "verify_seconds")
    draft, verify = (_round_seconds(in_turns, f"{part}_seconds") for part in ("draft", "verify"))
    if one.method == "sd":
        over_verify = measured_speed_up(tokens, plain=base, draft=draft, verify=verify)
        return Theory(
            tokens=tokens, over_plain=speed_up(tokens, draft / base), over_verify=over_verify
        )
    p = one.p_hit if one.p_hit is not None else p_hit or 0.0

    def speed(verify: float) -> float:
        share = draft / verify
        ahead = share * (one.k + 1) / one.k
        hidden = AheadTimes(p, tokens, tokens, ahead, share, batch=one.batch)
        return hidden.speed * base / verify

    return Theory(tokens=tokens, over_plain=speed(base), over_verify=speed(verify))


def _pace(values: Values) -> float:
    """Seconds a token."""
    return values["seconds"] / values["num_tokens"]


def _total(repeats: Sequence[Values], name: str) -> float:
    return sum(one[name] for one in repeats)


def _median(repeats: Sequence[Values], name: str) -> float | None:
    values = [one[name] for one in repeats if one[name] is not None]
    return statistics.median(values) if values else None
