"""What the samples of engines come to, and what theory makes of the same run's times.

For SD with times T_draft of K passes, T_verify of one verification and T_AR of a plain pass,

    over_plain  = E / (1 + T_draft / T_AR)              as the reference tables define T_SD
    over_verify = E T_AR / (T_draft + T_verify)         verification is not free

and for SSD Theorem 7 (estimate/theory.py) with the share of foreseen verdicts that was seen or
forced, a fallback of T_draft, and work ahead of K + 1 passes: the trunk's and one a token for all
branches at once. Its times are those of drafting in turns, so what SSD lacks of it is what its two
lanes cost each other, and the host. E is that of the script's rate. A batch waits for its slowest
row.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.bench.frame import ratio_of_medians
from outrider.bench.gemm.plan import Contestant
from outrider.bench.gemm.record import Cell, Theory
from outrider.bench.gemm.samples import SamplesFile
from outrider.bench.gemm.units import engine_name
from outrider.estimate.theory import (
    AheadTimes,
    estimated_beta,
    expected_tokens,
    measured_speed_up,
    speed_up,
)

Numbers = Mapping[str, Any]
Repeats = Mapping[int, Numbers]


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Mean seconds of a round's parts: those of a pass in which the whole batch takes part."""

    draft: float
    verify: float
    accept: float
    total: float

    @classmethod
    def of(cls, repeats: Sequence[Numbers]) -> RoundTimes:
        """Medians over repetitions."""

        def each(name: str) -> float:
            return statistics.median(one[name] / one["num_passes"] for one in repeats)

        parts = ("draft_seconds", "verify_seconds", "accept_seconds", "seconds")
        return cls(*(each(name) for name in parts))

    @property
    def rest(self) -> float:
        return max(self.total - self.draft - self.verify - self.accept, 0.0)


@dataclass(frozen=True, slots=True)
class Measured:
    """A pair's samples of engines, by contestant and number of the visit."""

    pair: str
    repeats: Mapping[Contestant, Repeats]
    num_failures: Mapping[Contestant, int]

    @classmethod
    def of(cls, pair: str, contestants: Sequence[Contestant], file: SamplesFile) -> Measured:
        values = file.by_repeat("engines")
        names = {one: engine_name(pair, one) for one in contestants}
        return cls(
            pair,
            {one: values[name] for one, name in names.items() if name in values},
            {one: file.num_failures("engines", name) for one, name in names.items()},
        )

    def cells(self) -> list[Cell]:
        """Of all contestants that have samples, and whose visits have some of plain decoding."""
        found: list[Cell] = []
        for one, repeats in self.repeats.items():
            plain = self._like(one, "ar")
            if plain.keys() & repeats.keys():
                found.append(self._cell(one, repeats, plain))
        return found

    def _cell(self, one: Contestant, visits: Repeats, plain: Repeats) -> Cell:
        repeats = list(visits.values())
        times = RoundTimes.of(repeats)
        # In a visit both have the same texts, a moment apart; either may have failed in another.
        both = [visit for visit in visits if visit in plain]
        gain = ratio_of_medians(
            *([_pace(side[visit]) for visit in both] for side in (plain, visits))
        )
        looks = sum(x["num_looks"] for x in repeats)
        p_hit = sum(x["num_hits"] for x in repeats) / looks if looks else None
        rate = statistics.median(x["num_tokens"] / x["seconds"] for x in repeats)
        return Cell(
            study=one.study,
            pair=self.pair,
            method=one.method,
            k=one.k,
            alpha=one.alpha,
            p_hit=one.p_hit,
            fan_out=one.fan_out,
            batch=one.batch,
            num_samples=len(repeats),
            num_failures=self.num_failures.get(one, 0),
            tokens_per_second=rate,
            token_ms=1e3 * one.batch / rate,
            token_ms_p95=statistics.median(x["token_ms_p95"] for x in repeats),
            speed_up=gain.value,
            low=gain.low,
            high=gain.high,
            tokens_per_round=_total(repeats, "num_tokens") / _total(repeats, "num_rounds"),
            alpha_seen=estimated_beta(
                int(_total(repeats, "num_accepted")), int(_total(repeats, "num_refused"))
            )
            if one.k
            else None,
            p_hit_seen=p_hit,
            draft_ms=1e3 * times.draft,
            verify_ms=1e3 * times.verify,
            accept_ms=1e3 * times.accept,
            rest_ms=1e3 * times.rest,
            ahead_over_verify=_median(repeats, "ahead_over_verify"),
            num_ahead=_median(repeats, "num_ahead"),
            theory=self._theory(one, RoundTimes.of(list(plain.values())), p_hit),
        )

    def _theory(self, one: Contestant, plain: RoundTimes, p_hit: float | None) -> Theory | None:
        """None for plain decoding, and where drafting in turns was not measured."""
        in_turns = self._like(one, "sd")
        if not one.k or not in_turns:
            return None
        tokens = expected_tokens(one.alpha, one.k)
        times = RoundTimes.of(list(in_turns.values()))
        if one.method == "sd":
            return Theory(
                tokens=tokens,
                over_plain=speed_up(tokens, times.draft / plain.verify),
                over_verify=measured_speed_up(
                    tokens, plain=plain.verify, draft=times.draft, verify=times.verify
                ),
            )
        p = one.p_hit if one.p_hit is not None else p_hit or 0.0

        def speed(verify: float) -> float:
            draft = times.draft / verify
            ahead = draft * (one.k + 1) / one.k
            hidden = AheadTimes(p, tokens, tokens, ahead, draft, batch=one.batch)
            return hidden.speed * plain.verify / verify

        return Theory(
            tokens=tokens, over_plain=speed(plain.verify), over_verify=speed(times.verify)
        )

    def _like(self, one: Contestant, method: str) -> Repeats:
        """Samples of `method` in the visits that `one` was in: those of its own study first."""
        for study in (one.study, "alpha"):
            for other, repeats in self.repeats.items():
                same = (other.method, other.study, other.batch) == (method, study, one.batch)
                if same and (method == "ar" or (other.k, other.alpha) == (one.k, one.alpha)):
                    return repeats
        return {}


def _pace(numbers: Numbers) -> float:
    """Seconds a token."""
    return numbers["seconds"] / numbers["num_tokens"]


def _total(repeats: Sequence[Numbers], name: str) -> float:
    return sum(one[name] for one in repeats)


def _median(repeats: Sequence[Numbers], name: str) -> float | None:
    values = [one[name] for one in repeats if one[name] is not None]
    return statistics.median(values) if values else None
