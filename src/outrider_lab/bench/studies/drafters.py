"""Drafters compared: every contestant writes the same piece of work in its turn, timed and counted.

A piece is one prompt of a domain, or several that run together. At every repeat contestants forget
what they wrote before, or else a drafter that remembers texts would copy its own. Greedy tokens,
and sampled ones under a rule that ties them to the seed, are compared with those of plain decoding:
what differs has failed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Protocol

from outrider.api.callers import Prompt
from outrider.api.result import GenerationResult
from outrider.core.draft import RoundTrace
from outrider.core.errors import ContractError
from outrider.core.params import SamplingParams
from outrider.core.plugins import KINDS
from outrider.metrics import Stats, position_counts, summarise
from outrider.plugins.measure.turns import Ratio
from outrider_lab.bench.studies.drafters_lineup import OFF, Runner, Writer
from outrider_lab.measure.frame import Sample, spoken
from outrider_lab.measure.machine import Attempt, attempt, different_tokens, in_turns, visit

Texts = tuple[tuple[int, ...], ...]
# Tokens that a contestant writes untimed, to warm up.
_NUM_WARM = 8


@dataclass(frozen=True, slots=True)
class DrafterPiece:
    """Prompts that run together, `number` among those of `domain`."""

    domain: str
    number: int
    prompts: tuple[Prompt, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterNumbers:
    """One contestant's run of one piece. `stats` counts shared passes once, and its total is the
    wall clock. Entry i of `positions` is how many drafts had an i-th token in a row, and how many
    of them kept it; of a tree its depth is taken to be K. `most_nodes` is the largest draft."""

    stats: Stats
    positions: tuple[tuple[int, int], ...]
    most_nodes: int

    @property
    def seconds_per_token(self) -> float:
        return self.stats.seconds["total"] / max(self.stats.num_emitted, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterSample(Sample[DrafterNumbers]):
    """One contestant's run of one piece of a domain."""

    domain: str
    piece: int
    contestant: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RacePlan:
    """Every piece so often. `by_domain` are parameters of domains that have their own; `tied` says
    that the rule ties even sampled text to the seed, so that it may be compared. Prompts of the
    domains in `messages` are in the target's chat template."""

    pieces: Sequence[DrafterPiece]
    repeats: int
    params: SamplingParams
    by_domain: Mapping[str, SamplingParams] = field(default_factory=dict[str, SamplingParams])
    tied: bool = False
    messages: tuple[str, ...] = ()

    def params_of(self, piece: DrafterPiece) -> SamplingParams:
        return self.by_domain.get(piece.domain, self.params)

    def comparable(self, piece: DrafterPiece) -> bool:
        """Whether everybody must write the same tokens."""
        return self.tied or self.params_of(piece).greedy

    def visits(self) -> list[tuple[DrafterPiece, int]]:
        return [(piece, repeat) for repeat in range(self.repeats) for piece in self.pieces]


@dataclass(slots=True)
class Race:
    """Runs a plan with those runners that can run, plain decoding first. `clock` counts seconds."""

    plan: RacePlan
    runners: Sequence[Runner]
    clock: Callable[[], float] = perf_counter
    _plain: dict[tuple[str, int], Texts] = field(default_factory=dict[tuple[str, int], Texts])

    def run(self) -> Iterator[list[DrafterSample]]:
        """Warm up, then yield what every visit found, in the order of the runners."""
        first = self.plan.pieces[0]
        short = replace(self.plan.params_of(first), max_tokens=_NUM_WARM, min_tokens=0)
        for runner in self.runners:
            self._written(runner, first, short)
        last = None
        for turn, (piece, repeat) in enumerate(self.plan.visits()):
            if repeat != last:
                for runner in self.runners:
                    _writer(runner).forget()
                last = repeat
            yield self._visit(turn, piece, repeat)

    def _visit(self, turn: int, piece: DrafterPiece, repeat: int) -> list[DrafterSample]:
        params = self.plan.params_of(piece)
        done = visit(self.runners, turn, lambda runner: self._written(runner, piece, params))
        place = (piece.domain, piece.number)
        plain = done.results[0].value
        if plain is not None:
            self._plain.setdefault(place, _texts(plain))
        return [
            DrafterSample(
                domain=piece.domain,
                piece=piece.number,
                repeat=repeat,
                contestant=runner.name,
                reason=own.reason or self._difference(runner, piece, own.value),
                numbers=None if own.value is None else numbers_of(runner, own.value, own.seconds),
                foreign_cpu_share=done.foreign_cpu_share,
            )
            for runner, own in zip(self.runners, done.results, strict=True)
        ]

    def _written(
        self, runner: Runner, piece: DrafterPiece, params: SamplingParams
    ) -> Attempt[list[GenerationResult]]:
        writer = _writer(runner)
        return attempt(lambda: writer.generate(piece.prompts, params), self.clock)

    def _difference(
        self, runner: Runner, piece: DrafterPiece, results: Sequence[GenerationResult] | None
    ) -> str | None:
        plain = self._plain.get((piece.domain, piece.number))
        comparable = runner.exact and self.plan.comparable(piece)
        if results is None or plain is None or not comparable:
            return None
        return different_tokens(_texts(results), plain, self.runners[0].name)


def numbers_of(
    runner: Runner, results: Sequence[GenerationResult], seconds: float
) -> DrafterNumbers:
    """Of requests that ran together and took `seconds`."""
    traces: list[RoundTrace] = [trace for result in results for trace in result.rounds]
    k = runner.k
    return DrafterNumbers(
        stats=summarise(traces, drafter=runner.name, k=k, total_seconds=seconds),
        positions=tuple(position_counts(traces, k)),
        most_nodes=max((trace.num_drafted for trace in traces), default=0),
    )


def pieces_of(texts: Mapping[str, Sequence[Prompt]], *, at_once: int) -> list[DrafterPiece]:
    """The prompts of each domain, so many in a piece, and the domains in turns."""
    return in_turns(
        [
            DrafterPiece(domain, start // at_once, tuple(prompts[start : start + at_once]))
            for start in range(0, len(prompts), at_once)
        ]
        for domain, prompts in texts.items()
    )


def _texts(results: Sequence[GenerationResult]) -> Texts:
    return tuple(result.token_ids for result in results)


def _writer(runner: Runner) -> Writer:
    if runner.writer is None:
        raise ContractError("nothing writes here")
    return runner.writer


class CellOfCopy(Protocol):
    """What a comparison of drafters found of a contestant in a domain (drafters_report.py)."""

    @property
    def domain(self) -> str: ...
    @property
    def contestant(self) -> str: ...
    @property
    def speedup(self) -> Ratio | None: ...
    @property
    def tokens_per_second(self) -> float | None: ...
    @property
    def tokens_per_round(self) -> float | None: ...
    @property
    def acceptance(self) -> float | None: ...
    @property
    def by_position(self) -> tuple[float | None, ...]: ...
    @property
    def draft_share(self) -> float | None: ...
    @property
    def most_nodes(self) -> int: ...


def bounds_of_copies(cells: Sequence[CellOfCopy]) -> Iterator[str]:
    """Of copies of the target, what they can bring at most beside what they brought."""
    plain = {cell.domain: cell.tokens_per_second for cell in cells if cell.contestant == OFF}
    for cell in cells:
        kind = KINDS.get(re.split("[=:+]", cell.contestant)[0])
        if kind is None or kind.source != "copy" or cell.speedup is None:
            continue
        found = best_of_copy(cell, plain[cell.domain])
        if found is not None:
            cost, k, most = found
            yield (
                f"{cell.domain}: a draft token of {cell.contestant} takes {cost:.2f} of a plain "
                f"token's time. With what is accepted and verification for nothing, {most:.2f}× at "
                f"K = {k} is the most that could be reached; {spoken(cell.speedup)} is."
            )


_MOST_K = 64


def best_of_copy(
    cell: CellOfCopy, plain_tokens_per_second: float | None
) -> tuple[float, int, float] | None:
    """The time of a draft token beside a plain one, the best K and its speed-up if a round took no
    longer than its drafts and a plain pass; None where something is not known. Tokens beyond the
    measured positions are kept as the last ones are."""
    tokens, rate, accepted = cell.tokens_per_round, cell.tokens_per_second, cell.acceptance
    kept = [share for share in cell.by_position if share is not None]
    if not (tokens and rate and accepted and plain_tokens_per_second and kept):
        return None
    if cell.draft_share is None or tokens <= 1 or cell.most_nodes > len(cell.by_position):
        return None
    drafted = (tokens - 1) / accepted
    cost = cell.draft_share * tokens / rate / drafted * plain_tokens_per_second
    last = kept[-1] ** (1 / len(kept))
    kept += [kept[-1] * last**more for more in range(1, _MOST_K - len(kept) + 1)]
    speed_ups = [
        (1 + sum(kept[:k])) / (1 + cost * k) for k in range(1, min(len(kept), _MOST_K) + 1)
    ]
    most = max(speed_ups)
    return cost, 1 + speed_ups.index(most), most
