"""How much of its drafts is kept on given prompts: counts only, no times.

A drafter writes every prompt with drafts as deep as any that will be planned; `replay.py` says what
shorter ones would have brought. Plain decoding writes them as well, and where both must write the
same text, it is compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from outrider.api.result import GenerationResult
from outrider.bench.calibrate.replay import Ahead, Round, ahead_of, rounds_at
from outrider.bench.calibrate.stands import Stand
from outrider.core.params import SamplingParams
from outrider.estimate.calibration import DrafterCosts, PlaceCount
from outrider.estimate.theory import RoundStats
from outrider.planner.places import fitted_carry

# K at which the carry of a drafter is found: between the shortest drafts and the deepest.
_MIDDLE_K = 4

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Probe:
    """`texts` has, for each prompt, how a draft from each position of its text would fare, up to
    `deepest` tokens. `same` says whether all texts were those of plain decoding, None where that
    need not be."""

    name: str
    deepest: int
    texts: tuple[tuple[Ahead, ...], ...]
    same: bool | None

    def rounds(self, k: int) -> list[list[Round]]:
        """Of each text, those that were not cut by its end; all of them where every one was."""
        found = [rounds_at(text, k) for text in self.texts]
        whole = [[one for one in rounds if one.room == k] for rounds in found]
        return [some or every for some, every in zip(whole, found, strict=True) if every]

    def law(self, k: int) -> RoundStats:
        """Of rounds at depth `k`, by replay."""
        rounds = [one for text in self.rounds(k) for one in text]
        drafted = [one.drafted for one in rounds if one.drafted]
        return RoundStats(
            tuple(sum(one.kept > place for one in rounds) / len(rounds) for place in range(k)),
            len(drafted) / len(rounds),
            statistics.fmean(drafted) if drafted else 0.0,
        )

    def spread(self, k: int) -> float:
        """The relative deviation between texts of their tokens a round, beyond what a single text
        scatters by itself."""
        texts = self.rounds(k)
        means = [1 + statistics.fmean(one.kept for one in text) for text in texts]
        if len(means) < 2:
            return 0.0
        within = [statistics.pvariance([one.kept for one in text]) / len(text) for text in texts]
        between = statistics.variance(means) - statistics.fmean(within)
        return max(between, 0.0) ** 0.5 / statistics.fmean(means)

    def counted(self, costs: DrafterCosts) -> DrafterCosts:
        """`costs` with the places of deep drafts, text by text, where the next draft stands, and
        what rounds at each depth bring."""
        texts = self.rounds(self.deepest)
        every = [one for text in texts for one in text]
        found = replace(
            costs,
            places=_places(every, self.deepest),
            requests=tuple(_places(text, self.deepest) for text in texts),
            num_rounds=len(every) if any(one.drafted < one.room for one in every) else 0,
        )
        if not found.places:
            return found
        laws = tuple(self.law(k) for k in range(1, self.deepest + 1))
        middle = laws[min(_MIDDLE_K, self.deepest) - 1]
        carry = fitted_carry(found, min(_MIDDLE_K, self.deepest), middle.tokens)
        return replace(found, carry=carry, laws=laws)


def probe(
    stands: Sequence[Stand],
    prompts: Prompts,
    params: SamplingParams,
    *,
    deepest: int,
    comparable: Callable[[Stand], bool],
) -> Iterator[Probe]:
    """One for each stand that drafts; the first of `stands` decodes plainly."""
    plain = [result.token_ids for result in _written(stands[0], prompts, params, 0)]
    for stand in stands[1:]:
        results = _written(stand, prompts, params, deepest)
        same = [result.token_ids for result in results] == plain
        yield Probe(
            stand.name,
            deepest,
            tuple(tuple(ahead_of(result.rounds, deepest=deepest)) for result in results),
            same if comparable(stand) else None,
        )


def _written(
    stand: Stand, prompts: Prompts, params: SamplingParams, k: int
) -> list[GenerationResult]:
    stand.dial.set((k,))
    stand.llm.forget()
    return stand.llm.generate(prompts, params)


def _places(rounds: Sequence[Round], deepest: int) -> tuple[PlaceCount, ...]:
    """Up to the last place that anybody drafted."""
    counts = [
        PlaceCount(
            drafted=sum(one.drafted > place and one.kept >= place for one in rounds),
            accepted=sum(one.kept > place for one in rounds),
        )
        for place in range(deepest)
    ]
    while counts and not counts[-1].drafted:
        counts.pop()
    return tuple(counts)
