"""The tables of a cost study."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from outrider.bench.gemm.record import Cell, Study
from outrider.bench.gemm.results import Results
from outrider.bench.pages import Section
from outrider.estimate.theory import expected_tokens, speed_up

REMARK = (
    "Published values are of V100 GPUs in half precision, for orientation. The speed-ups that were "
    "published as theory beside them are 4.7 to 6.4 % above E / (1 + T_SD) of the same table, so "
    "they are no expectation; theory here is from this run's own times."
)
_TITLES: dict[Study, str] = {
    "alpha": "Speed-up by K and alpha, with verdicts as they were foreseen",
    "hits": "Speed-up by the share of verdicts foreseen",
    "fan_out": "Work ahead and hits by fan-out",
    "batch": "Batches",
}
# The reference tables are for this rate.
_ALPHA = 0.9


def sections(found: Results) -> Iterator[Section]:
    """Tables in the order of the study; those without rows are left out."""
    yield Section(title="What it says", text=found.warnings, points=found.findings)
    tables = (_models, _shares, _roof, _products, _windows, *_of_cells(found.cells))
    for table in tables:
        section = table if isinstance(table, Section) else table(found)
        if section.rows:
            yield section


def _models(found: Results) -> Section:
    return Section(
        title="Models",
        text=["Costs alone: random weights, and acceptance by script."],
        header=("pair", "used for", "role", "shape", "width", "ffn", "layers", "MB", "sampled"),
        rows=[
            (
                one.pair,
                one.used_for,
                one.role,
                one.shape,
                str(one.hidden_size),
                str(one.ffn_size),
                f"{one.num_layers} of {one.whole_layers}",
                f"{one.weight_bytes / 1e6:.0f}",
                one.sampled or "whole",
            )
            for one in found.models
        ],
    )


def _shares(found: Results) -> Section:
    header = ("pair", "K", "T_draft ms", "T_AR ms", "T_verify ms", "T_SD", "95 %", "over verify")
    return Section(
        title="T_SD: what drafting takes of a target pass",
        text=[REMARK],
        header=(*header, "published", "E/(1+T_SD)", "E T_AR/(T_draft+T_verify)"),
        rows=[
            (
                one.pair,
                str(one.k),
                f"{1e3 * one.draft_seconds:.2f}",
                f"{1e3 * one.plain_seconds:.2f}",
                f"{1e3 * one.verify_seconds:.2f}",
                f"{one.over_plain:.3f}",
                _interval(one.low, one.high),
                f"{one.over_verify:.3f}",
                "" if one.published is None else f"{one.published:.2f}",
                f"{speed_up(expected_tokens(_ALPHA, one.k), one.over_plain):.2f}",
                f"{_measured(one.k, one.plain_seconds, one.draft_seconds, one.verify_seconds):.2f}",
            )
            for one in found.draft_shares
        ],
    )


def _measured(k: int, plain: float, draft: float, verify: float) -> float:
    return expected_tokens(_ALPHA, k) * plain / (draft + verify)


def _roof(found: Results) -> Section:
    roof = found.ceilings
    return Section(
        title="Ceilings of this machine",
        header=("memory GB/s", "arithmetic Gop/s", "operations a byte at the ridge", "threads"),
        rows=[]
        if roof is None
        else [
            (
                f"{roof.gigabytes_per_second:.1f}",
                f"{roof.gigaflops_per_second:.0f}",
                f"{roof.ridge:.1f}",
                str(roof.threads),
            )
        ],
    )


def _products(found: Results) -> Section:
    return Section(
        title="Matrix products against the roofline",
        header=("shape", "product", "rows", "ms", "GB/s", "Gop/s", "roof Gop/s", "reached"),
        rows=[
            (
                one.shape,
                one.product,
                str(one.num_rows),
                f"{1e3 * one.seconds:.3f}",
                f"{one.gigabytes_per_second:.1f}",
                f"{one.gigaflops_per_second:.1f}",
                f"{one.roof:.1f}",
                f"{100 * one.share:.0f} %" if one.roof else "",
            )
            for one in found.products
        ],
    )


def _windows(found: Results) -> Section:
    return Section(
        title="The verification window",
        text=[
            "Passes of the draft model that fit beside a verification, if neither slows the "
            "other down; a trunk and K passes over all branches have to."
        ],
        header=("pair", "K", "branches", "verify ms", "pass ms", "passes", "fits", "most branches"),
        rows=[
            (
                one.pair,
                str(one.k),
                str(one.branches),
                f"{1e3 * one.verify_seconds:.2f}",
                f"{1e3 * one.pass_seconds:.2f}",
                f"{one.num_passes:.1f}",
                "yes" if one.fits else "no",
                str(one.largest_fan_out),
            )
            for one in found.windows
        ],
    )


def _of_cells(cells: Sequence[Cell]) -> list[Section]:
    found: list[Section] = []
    for study, title in _TITLES.items():
        header = ("pair", "method", "K", "alpha", "p_hit", "F", "batch", "tokens/s", "ms a token")
        more = ("speed-up", "95 %", "theory", "theory 2", "E", "seen", "hits seen", "ahead/verify")
        found.append(
            Section(
                title=title,
                text=[
                    "Theory takes verifying for a plain pass; theory 2 takes its own time, and "
                    "Theorem 7 for SSD. E is tokens a round by the script, then as seen."
                ],
                header=(*header, *more, "draft", "verify", "accept", "rest ms"),
                rows=[_row(one) for one in cells if one.study == study],
            )
        )
    return found


def _row(one: Cell) -> tuple[str, ...]:
    theory = one.theory
    return (
        one.pair,
        one.method,
        str(one.k),
        f"{one.alpha:g}" if one.k else "",
        "" if one.p_hit is None else f"{one.p_hit:g}",
        str(one.fan_out) if one.fan_out else "",
        str(one.batch),
        f"{one.tokens_per_second:.1f}",
        f"{one.token_ms:.2f}",
        f"{one.speed_up:.2f}",
        _interval(one.low, one.high),
        "" if theory is None else f"{theory.over_plain:.2f}",
        "" if theory is None else f"{theory.over_verify:.2f}",
        "" if theory is None else f"{theory.tokens:.2f}",
        f"{one.tokens_per_round:.2f}",
        "" if one.p_hit_seen is None else f"{one.p_hit_seen:.2f}",
        "" if one.ahead_over_verify is None else f"{one.ahead_over_verify:.2f}",
        f"{one.draft_ms:.2f}",
        f"{one.verify_ms:.2f}",
        f"{one.accept_ms:.2f}",
        f"{one.rest_ms:.2f}",
    )


def _interval(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"{low:.2f}-{high:.2f}"
