"""The rows of a cost study's `results.json`, its tables and sentences.

AR, SD and SSD (plain decoding, drafting in turns, drafting ahead) run in the real engine on models
that are matrix products of given sizes, with acceptance by script (models/gemm.py, synthetic.py).
A row is of medians over repeats; the samples are in `samples.jsonl`, a line each. `models` says how
much of each model was there: widths over `divisor`, and `num_layers` of `whole_layers`. `study`
says what a cell was measured for, which is also the figure that takes it; some serve twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from outrider.estimate.acceptance import expected_tokens, measured_speed_up
from outrider.plugins.measure.turns import is_busy
from outrider_lab.measure.store import Section, plain_table
from outrider_lab.planner.rounds import speed_up

SCHEMA = "outrider-bench-ssd/1"
RESULTS, SAMPLES = "results.json", "samples.jsonl"

Method = Literal["ar", "sd", "ssd"]
Study = Literal["alpha", "hits", "fan_out", "batch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftShare:
    """T_SD of one K, from passes timed by themselves at whole widths; seconds are of all layers:
    those of the sampled ones, times `factor`.

    `over_plain` is T_draft(K) / T_AR, `over_verify` T_draft(K) / T_verify(K + 1); `low` and `high`
    bound the 95 % interval of `over_plain`, None with too few repeats. `published` is the reference
    table's entry for this K, None if it has none.
    """

    pair: str
    k: int
    draft_seconds: float
    plain_seconds: float
    verify_seconds: float
    over_plain: float
    over_verify: float
    low: float | None
    high: float | None
    published: float | None
    num_repeats: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """The most that was measured here: bytes a second from memory, operations a second by the
    largest products of the study's dtype. Beyond `ridge` operations a byte a product is bound by
    arithmetic."""

    gigabytes_per_second: float
    gigaflops_per_second: float
    threads: int

    @property
    def ridge(self) -> float:
        return self.gigaflops_per_second / self.gigabytes_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductRow:
    """One matrix product. `intensity` is operations a byte, `roof` the gigaflops a second that the
    ceilings allow at it, `share` what was reached of that."""

    shape: str
    product: str
    num_rows: int
    num_in: int
    num_out: int
    num_bytes: int
    num_flops: int
    seconds: float
    gigabytes_per_second: float
    gigaflops_per_second: float
    intensity: float
    roof: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRow:
    """Beside one verification of K + 1 rows: `pass_seconds` of the draft model over `branches` rows
    at once, the median of repeats between `pass_least` and `pass_most` (None in older files).
    `num_passes` is how many of them fit. `fits` says whether a trunk and K passes over all
    branches do, and `largest_fan_out` of a K is the largest number of branches that does (0: none).
    """

    pair: str
    k: int
    branches: int
    verify_seconds: float
    trunk_seconds: float
    pass_seconds: float
    num_passes: float
    fits: bool
    largest_fan_out: int
    pass_least: float | None = None
    pass_most: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Theory:
    """Speed-up over plain decoding that follows from a run's own times.

    `over_plain` is E / (1 + T_draft / T_AR), in which verifying takes as long as a plain pass;
    `over_verify` is E T_AR / (T_draft + T_verify), or Theorem 7 with p_hit^batch for SSD.
    `tokens` is E by the script's rates, not as counted.
    """

    tokens: float
    over_plain: float
    over_verify: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One engine at one setting. `p_hit` is the forced share of foreseen verdicts, None where none
    is forced; `p_hit_seen` is the share that counted as foreseen. `alpha` is the script's rate and
    `alpha_seen` accepted / (accepted + refused).

    Times of a round are means in ms: `rest_ms` is what is neither drafting, verifying nor accepting
    (waiting, the host). `ahead_over_verify` is the time of drafting ahead over that of the
    verification beside it; `num_ahead` the draft tokens made ahead in a round. `token_ms` is the
    mean time between tokens of one sequence, `token_ms_p95` its 95th percentile.
    `speed_up` is over plain decoding of the same batch, by medians; `low`, `high` its interval.
    """

    study: Study
    pair: str
    method: Method
    k: int
    alpha: float
    p_hit: float | None
    fan_out: int
    batch: int
    num_samples: int
    num_failures: int
    tokens_per_second: float
    token_ms: float
    token_ms_p95: float
    speed_up: float
    low: float | None
    high: float | None
    tokens_per_round: float
    alpha_seen: float | None
    p_hit_seen: float | None
    draft_ms: float
    verify_ms: float
    accept_ms: float
    rest_ms: float
    ahead_over_verify: float | None
    num_ahead: float | None
    theory: Theory | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What the samples come to, whether the study is whole or was interrupted."""

    models: Sequence[Mapping[str, Any]]
    draft_shares: Sequence[DraftShare]
    ceilings: Ceilings | None
    products: Sequence[ProductRow]
    windows: Sequence[WindowRow]
    cells: Sequence[Cell]
    num_failures: int
    foreign_cpu_share: float | None


REMARK = (
    "Published values are of V100 GPUs in half precision, for orientation. The speed-ups that were "
    "published as theory beside them are 4.7 to 6.4 % above E / (1 + T_SD) of the same table, so "
    "they are no expectation; theory here is from this run's own times."
)
_THEORY = (
    "theory: the speed-up that follows from this run's own times, by Theorem 7 for SSD; over plain "
    "takes verifying for a plain pass."
)
TABLES: Mapping[str, tuple[str, str]] = {
    "models": ("Models", "Costs alone: random weights, and acceptance by script."),
    "draft_shares": ("T_SD by K", f"{REMARK} {_THEORY}"),
    "products": ("Matrix products against the roofline", ""),
    "windows": (
        "Verification windows",
        "Passes of the draft model that fit beside a verification, if neither slows the other "
        "down; a trunk and K passes over all branches have to.",
    ),
    "cells": ("Cells", _THEORY),
}
# The reference tables are for this rate.
_ALPHA = 0.9
# By how much a smaller pass may take longer before that is worth a word.
_SCATTER = 1.05


def sections(record: Mapping[str, Any]) -> Iterator[Section]:
    """What `results.json` says, then its tables."""
    yield Section(title="What it says", text=record["warnings"], points=record["findings"])
    if record["ceilings"]:
        yield plain_table("Ceilings of this machine", [record["ceilings"]])
    yield from tables(record)


def tables(record: Mapping[str, Any]) -> Iterator[Section]:
    """Of a study's results, rows as they are; those without rows are left out."""
    more = {"draft_shares": _of_shares, "cells": _of_theory}
    for name, (title, note) in TABLES.items():
        rows = [{**row, **more.get(name, _nothing)(row)} for row in record.get(name) or ()]
        if rows:
            yield plain_table(title, rows, note=note)


def _nothing(row: Mapping[str, Any]) -> Mapping[str, Any]:
    del row
    return {}


def _of_shares(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Speed-ups at the rate that the reference tables are for."""
    tokens = expected_tokens(_ALPHA, row["k"])
    plain, draft, verify = (row[f"{name}_seconds"] for name in ("plain", "draft", "verify"))
    if not draft + verify:
        return {}
    measured = measured_speed_up(tokens, plain=plain, draft=draft, verify=verify)
    return {"theory_over_plain": speed_up(tokens, row["over_plain"]), "theory": measured}


def _of_theory(row: Mapping[str, Any]) -> Mapping[str, Any]:
    theory = row.get("theory")
    if not theory:
        return {"theory": None}
    return {
        "theory": theory["over_verify"],
        "theory_over_plain": theory["over_plain"],
        "theory_tokens": theory["tokens"],
    }


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
    """The best of each pair and method."""
    return [_best(one) for one in _fastest(found.cells)]


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
