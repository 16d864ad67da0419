"""Passes timed by themselves: what a draft, a verification and drafting ahead take of a pair.

Seconds are of all layers: those of the layers that are there, times the shape's factor. The
sequence is empty but for what a pass feeds, and is rolled back after each.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.bench.frame import ratio_of_medians
from outrider.bench.gemm.pair import PUBLISHED, CostPair, PairShape
from outrider.bench.gemm.record import DraftShare, WindowRow
from outrider.core.clock import HOST_CLOCK, Clock, host_floats
from outrider.core.protocols import CausalLM, DraftNeeds, StepRow
from outrider.core.tree import ROOT
from outrider.models.decoder import Room

PASS_ROOM_SLOTS = 512
_NO_NEEDS = DraftNeeds()
_NUM_TIMED = 3
_SEQ = 0
_TARGET_ROWS, _DRAFT_ROWS, _DRAFT_CHAIN = "target rows=", "draft rows=", "draft chain="


@dataclass(frozen=True, slots=True)
class PassTimer:
    """Times passes of a pair of some shape, by name."""

    shape: PairShape
    pair: CostPair
    clock: Clock = HOST_CLOCK

    @staticmethod
    def names(ks: Sequence[int], branches: Sequence[int]) -> list[str]:
        """What has to be timed for these K and numbers of branches."""
        rows = sorted({1, *(k + 1 for k in ks)})
        beside = sorted({*rows, *branches})
        return [
            *(f"{_TARGET_ROWS}{num}" for num in rows),
            *(f"{_DRAFT_ROWS}{num}" for num in beside),
            *(f"{_DRAFT_CHAIN}{k}" for k in ks),
        ]

    def time(self, name: str) -> float:
        """Seconds of all layers: the median of some passes, after one that brings the model's
        weights to where they stay between its passes. Another model's may have pushed them out."""
        self._once(name)
        return statistics.median(self._once(name) for _ in range(_NUM_TIMED))

    def _once(self, name: str) -> float:
        kind, number = name.split("=")
        target, draft = self.pair.target, self.pair.draft
        match kind:
            case "target rows":
                return self.shape.target.factor * self._rows(target, int(number))
            case "draft rows":
                return self.shape.draft.factor * self._rows(draft, int(number))
            case _:
                return self.shape.draft.factor * self._chain(draft, int(number))

    def _rows(self, model: CausalLM, num_rows: int) -> float:
        """One pass over so many tokens that all follow the text."""
        row = StepRow(_SEQ, (1,) * num_rows, (ROOT,) * num_rows)
        return self._timed(model, [row])

    def _chain(self, model: CausalLM, k: int) -> float:
        """`k` passes over a token each."""
        return self._timed(model, [StepRow(_SEQ, (1,), (node - 1,)) for node in range(k)])

    def _timed(self, model: CausalLM, rows: Sequence[StepRow]) -> float:
        model.state.open(_SEQ, ())
        try:
            began = self.clock()
            for row in rows:
                # A device is waited for after each, as a chain's next token is.
                host_floats(model.step([row], _NO_NEEDS).logits_MV[-1, :1])
            return self.clock() - began
        finally:
            model.state.close(_SEQ)


def pass_room(ks: Sequence[int], branches: Sequence[int]) -> Room:
    """For every timing."""
    rows = max(*(k + 1 for k in ks), *branches)
    return Room(num_slots=PASS_ROOM_SLOTS, max_rows=rows, max_logits=rows)


def draft_shares(
    pair: str, ks: Sequence[int], seconds: Mapping[str, Sequence[float]]
) -> list[DraftShare]:
    """T_SD of every K that was timed, from all repeats by name."""
    found: list[DraftShare] = []
    for k in ks:
        parts = f"{_DRAFT_CHAIN}{k}", f"{_TARGET_ROWS}1", f"{_TARGET_ROWS}{k + 1}"
        if any(not seconds.get(name) for name in parts):
            continue
        draft, plain, verify = (seconds[name] for name in parts)
        num = min(len(draft), len(plain))
        share = ratio_of_medians(draft[:num], plain[:num])
        found.append(
            DraftShare(
                pair=pair,
                k=k,
                draft_seconds=statistics.median(draft),
                plain_seconds=statistics.median(plain),
                verify_seconds=statistics.median(verify),
                over_plain=share.value,
                over_verify=statistics.median(draft) / statistics.median(verify),
                low=share.low,
                high=share.high,
                published=PUBLISHED.get(pair, {}).get(k),
                num_repeats=num,
            )
        )
    return found


def windows(
    pair: str,
    ks: Sequence[int],
    branches: Sequence[int],
    seconds: Mapping[str, Sequence[float]],
) -> list[WindowRow]:
    """How much drafting fits beside verifications, if neither slows the other down."""
    found: list[WindowRow] = []
    for k in ks:
        times = {
            count: _window_times(k, count, seconds)
            for count in branches
            if all(
                seconds.get(name)
                for name in (
                    f"{_TARGET_ROWS}{k + 1}",
                    f"{_DRAFT_ROWS}{k + 1}",
                    f"{_DRAFT_ROWS}{count}",
                )
            )
        }
        fitting = [n for n, (verify, trunk, one) in times.items() if trunk + k * one <= verify]
        for count, (verify, trunk, one) in times.items():
            found.append(
                WindowRow(
                    pair=pair,
                    k=k,
                    branches=count,
                    verify_seconds=verify,
                    trunk_seconds=trunk,
                    pass_seconds=one,
                    pass_least=min(seconds[f"{_DRAFT_ROWS}{count}"]),
                    pass_most=max(seconds[f"{_DRAFT_ROWS}{count}"]),
                    num_passes=verify / one,
                    fits=count in fitting,
                    largest_fan_out=max(fitting, default=0),
                )
            )
    return found


def _window_times(
    k: int, branches: int, seconds: Mapping[str, Sequence[float]]
) -> tuple[float, float, float]:
    """Verification, trunk, one pass over all branches."""
    return (
        statistics.median(seconds[f"{_TARGET_ROWS}{k + 1}"]),
        statistics.median(seconds[f"{_DRAFT_ROWS}{k + 1}"]),
        statistics.median(seconds[f"{_DRAFT_ROWS}{branches}"]),
    )
