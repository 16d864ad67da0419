"""The rows of a cost study's `results.json`, from which its tables and figures are made.

AR, SD and SSD (plain decoding, drafting in turns, drafting ahead) run in the real engine on models
that are matrix products of given sizes, with acceptance by script (lab/gemm.py, synthetic.py).
A row is of medians over repeats; the samples are in `samples.jsonl`, a line each (study.py).

    benchmark "ssd", schema, run_id, complete, provenance, machine (bench/machine.py),
    setting       what was asked for
    models        each role of each pair as passes, products and engines had it: widths over
                  `divisor`, and `num_layers` of `whole_layers` are there; `factor` is the latter
                  over the former, and `sampled` says so in words, "" if whole
    draft_shares  `DraftShare`: T_SD by K, both definitions, published values beside (S3.12, S3.13)
    ceilings      `Ceilings`: bytes and operations a second that this machine reaches
    products      `ProductRow`: matrix products against the roofline (S3.10, figure 6)
    windows       `WindowRow`: how much drafting fits beside a verification (S3.26, figure 5)
    cells         `Cell`: engines, measured, beside what theory makes of this run's own times
    findings      sentences
    warnings      sentences that say why figures should be read with care
    num_failures  samples that failed, whose reasons are in `samples.jsonl`
    foreign_cpu_share  the median share of the CPUs that others used meanwhile, null if unknown

Which figure takes which cells (`study` says what a cell was measured for; some serve twice):

    1 speed-ups over alpha and K       study "alpha" (ar, sd, ssd; no p_hit: real hits)
    2 SSD against SD over p_hit        study "hits" (ssd with p_hit), with sd of the same K, alpha
    3 work ahead and hits by fan-out   study "fan_out": p_hit_seen, ahead_over_verify, num_ahead
    4 a round's parts, by method       any cell: `draft_ms`, `verify_ms`, `accept_ms`, `rest_ms`
    5 verification window              windows
    6 roofline                         products, ceilings
    7 batch                            study "batch" (ar, sd, ssd over batch)
    8 throughput against latency       study "batch": tokens_per_second, token_ms
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

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
