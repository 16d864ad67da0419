"""The tables of a cost study, what they say in words, and why they should be read with care."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from outrider.bench.gemm.record import (
    Ceilings,
    Cell,
    DraftShare,
    ProductRow,
    Results,
    Study,
    WindowRow,
)
from outrider.bench.machine import is_busy
from outrider.bench.pages import Section
from outrider.estimate.theory import expected_tokens, measured_speed_up, speed_up

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
# By how much a smaller pass may take longer before that is worth a word.
_SCATTER = 1.05


def sections(found: Results, *, quick: bool) -> Iterator[Section]:
    """Tables in the order of the study; those without rows are left out."""
    yield Section(title="What it says", text=warnings(found, quick=quick), points=findings(found))
    for section in (
        _models(found),
        _shares(found.draft_shares),
        _roof([] if found.ceilings is None else [found.ceilings]),
        _products(found.products),
        _windows(found.windows),
        *(_engines(title, study, found.cells) for study, title in _TITLES.items()),
    ):
        if section.rows:
            yield section


def _models(found: Results) -> Section:
    return Section(
        title="Models",
        text=["Costs alone: random weights, and acceptance by script."],
        header=("pair", "used for", "role", "shape", "width", "ffn", "layers", "MB", "sampled"),
        rows=[
            (
                *(str(one[name]) for name in ("pair", "used_for", "role", "shape")),
                *(str(one[name]) for name in ("hidden_size", "ffn_size")),
                f"{one['num_layers']} of {one['whole_layers']}",
                f"{one['weight_bytes'] / 1e6:.0f}",
                one["sampled"] or "whole",
            )
            for one in found.models
        ],
    )


def _shares(rows: Sequence[DraftShare]) -> Section:
    def theory(one: DraftShare) -> tuple[str, str]:
        tokens = expected_tokens(_ALPHA, one.k)
        plain, draft, verify = one.plain_seconds, one.draft_seconds, one.verify_seconds
        measured = measured_speed_up(tokens, plain=plain, draft=draft, verify=verify)
        return f"{speed_up(tokens, one.over_plain):.2f}", f"{measured:.2f}"

    header = ("pair", "K", "T_draft ms", "T_AR ms", "T_verify ms", "T_SD", "95 %", "over verify")
    return Section(
        title="T_SD: what drafting takes of a target pass",
        text=[REMARK],
        header=(*header, "published", "E/(1+T_SD)", "E T_AR/(T_draft+T_verify)"),
        rows=[
            (
                one.pair,
                str(one.k),
                *(
                    f"{1e3 * seconds:.2f}"
                    for seconds in (one.draft_seconds, one.plain_seconds, one.verify_seconds)
                ),
                f"{one.over_plain:.3f}",
                _interval(one.low, one.high),
                f"{one.over_verify:.3f}",
                _number(one.published),
                *theory(one),
            )
            for one in rows
        ],
    )


def _roof(rows: Sequence[Ceilings]) -> Section:
    return Section(
        title="Ceilings of this machine",
        header=("memory GB/s", "arithmetic Gop/s", "operations a byte at the ridge", "threads"),
        rows=[
            (
                f"{one.gigabytes_per_second:.1f}",
                f"{one.gigaflops_per_second:.0f}",
                f"{one.ridge:.1f}",
                str(one.threads),
            )
            for one in rows
        ],
    )


def _products(rows: Sequence[ProductRow]) -> Section:
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
            for one in rows
        ],
    )


def _windows(rows: Sequence[WindowRow]) -> Section:
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
            for one in rows
        ],
    )


def _engines(title: str, study: Study, cells: Sequence[Cell]) -> Section:
    header = ("pair", "method", "K", "alpha", "p_hit", "F", "batch", "tokens/s", "ms a token")
    more = ("speed-up", "95 %", "theory", "theory 2", "E", "seen", "hits seen", "ahead/verify")
    return Section(
        title=title,
        text=[
            "Theory takes verifying for a plain pass; theory 2 takes its own time, and "
            "Theorem 7 for SSD. E is tokens a round by the script, then as seen."
        ],
        header=(*header, *more, "draft", "verify", "accept", "rest ms"),
        rows=[_engine(one) for one in cells if one.study == study],
    )


def _engine(one: Cell) -> tuple[str, ...]:
    theory = one.theory
    made = (theory.over_plain, theory.over_verify, theory.tokens) if theory else (None,) * 3
    seen = (one.tokens_per_round, one.p_hit_seen, one.ahead_over_verify)
    parts = (one.draft_ms, one.verify_ms, one.accept_ms, one.rest_ms)
    return (
        one.pair,
        one.method,
        str(one.k),
        f"{one.alpha:g}" if one.k else "",
        "" if one.p_hit is None else f"{one.p_hit:g}",
        str(one.fan_out) if one.fan_out else "",
        str(one.batch),
        f"{one.tokens_per_second:.1f}",
        _number(one.token_ms),
        _number(one.speed_up),
        _interval(one.low, one.high),
        *map(_number, (*made, *seen, *parts)),
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _interval(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"{low:.2f}-{high:.2f}"


def warnings(found: Results, *, quick: bool) -> list[str]:
    """Why figures should be read with care, or not at all."""
    said: list[str] = []
    if quick:
        said.append("This is a taste: small models, few repeats. Its figures mean nothing.")
    share = found.foreign_cpu_share
    if share is not None and is_busy(share):
        said.append(
            f"Others used {100 * share:.0f} % of the CPUs meanwhile: measure again on a quiet "
            "machine."
        )
    if found.num_failures:
        said.append(f"{found.num_failures} samples failed; they are in no number.")
    return [*said, *scatter_of(found.windows)]


def scatter_of(windows: Sequence[WindowRow]) -> list[str]:
    """A sentence for each pair of which a pass over fewer branches took longer than one over more.
    It reads the same weights and computes less, so that is how much times scatter."""
    found: list[str] = []
    for pair in dict.fromkeys(row.pair for row in windows):
        times = {row.branches: row.pass_seconds for row in windows if row.pair == pair}
        ratios = [
            (times[few] / times[many], few, many) for few in times for many in times if few < many
        ]
        ratio, few, many = max(ratios, default=(0.0, 0, 0), key=lambda one: one[0])
        if ratio > _SCATTER:
            found.append(
                f"{pair}: a draft pass over {few} of the branches was timed {ratio:.2f} times as "
                f"long as one over {many}, which computes more from the same weights: smaller "
                "differences in the verification window are noise."
            )
    return found


def findings(found: Results) -> list[str]:
    """For each pair what a draft pass takes, what fits beside a verification, and the best of each
    method."""
    return [
        *(_share(one) for one in {one.pair: one for one in found.draft_shares}.values()),
        *_hidden(found.windows),
        *(_best(one) for one in _fastest(found.cells)),
    ]


def _share(last: DraftShare) -> str:
    return (
        f"{last.pair}: a draft pass takes {last.over_plain / last.k:.3f} of a plain pass of the "
        f"target, and verifying {last.k + 1} rows takes "
        f"{last.verify_seconds / last.plain_seconds:.2f} plain passes."
    )


def _hidden(windows: Sequence[WindowRow]) -> Iterator[str]:
    for pair in dict.fromkeys(row.pair for row in windows):
        own = [row for row in windows if row.pair == pair]
        hidden = [row.k for row in own if row.largest_fan_out]
        one = next((row for row in own if row.branches == 1), None)
        if one is not None:
            yield (
                f"{pair}: {one.num_passes:.1f} draft passes fit beside a verification; drafting "
                f"ahead is hidden {f'up to K = {max(hidden)}' if hidden else 'for no K'}, if "
                "neither slows the other down."
            )


def _fastest(cells: Sequence[Cell]) -> list[Cell]:
    """By pair and method, without batches."""
    best: dict[tuple[str, str], Cell] = {}
    for one in cells:
        if one.k and one.batch == 1:
            before = best.setdefault((one.pair, one.method), one)
            if one.speed_up > before.speed_up:
                best[one.pair, one.method] = one
    return list(best.values())


def _best(one: Cell) -> str:
    interval = "" if one.low is None else f" ({one.low:.2f} to {one.high:.2f})"
    hits = "" if one.p_hit is None else f", p_hit {one.p_hit:g}"
    theory = one.theory and f"; theory from this run's times says {one.theory.over_verify:.2f}"
    return (
        f"{one.pair}: {one.method.upper()} is {one.speed_up:.2f} times as fast as plain decoding "
        f"at best{interval}, at K = {one.k}, alpha {one.alpha:g}{hits}{theory or ''}."
    )
