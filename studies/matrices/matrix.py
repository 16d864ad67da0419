"""Parity: whatever a request is written with, its text must be that of plain decoding.

A matrix names factors, and says what a row of their values means: a configuration, how tokens are
sampled, and the plain configuration that writes the expected text. A cell is one row's result.

Few rows still try every value of every factor together with every value of every other: most faults
show when two settings meet, and a covering array of strength two meets all pairs in some tens of
rows where the full product has thousands. Rows are chosen greedily: each is the best of some random
rows that begin with a pair not yet covered. The same factors give the same rows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations, product

from torch import Tensor

from outrider.api.llm import LLM
from outrider.api.result import GenerationResult
from outrider.core.config import EngineConfig
from outrider.core.draft import common_prefix
from outrider.core.params import SamplingParams

Factors = Mapping[str, Sequence[str]]
Row = dict[str, str]
_Pair = tuple[tuple[str, str], tuple[str, str]]
_CANDIDATES = 40


def covering_rows(factors: Factors) -> list[Row]:
    """Rows that cover all pairs of `factors` (at least two of them)."""
    rng = random.Random(0)
    missing = set(all_pairs(factors))
    rows: list[Row] = []
    while missing:
        start = min(missing)
        candidates = [_fill(dict(start), factors, missing, rng) for _ in range(_CANDIDATES)]
        best = max(candidates, key=lambda row: len(_covered(row) & missing))
        missing -= _covered(best)
        rows.append({name: best[name] for name in factors})
    return rows


def all_pairs(factors: Factors) -> list[_Pair]:
    """Every pair of (factor, value) entries of two different factors, in a fixed order."""
    return [
        ((first, a), (second, b))
        for first, second in combinations(sorted(factors), 2)
        for a in factors[first]
        for b in factors[second]
    ]


def _fill(row: Row, factors: Factors, missing: set[_Pair], rng: random.Random) -> Row:
    """Add the other factors in random order, each with the value that covers most."""
    others = [name for name in factors if name not in row]
    rng.shuffle(others)
    for name in others:
        values = list(factors[name])
        rng.shuffle(values)
        row[name] = max(values, key=lambda value: len(_covered({**row, name: value}) & missing))
    return row


def _covered(row: Row) -> set[_Pair]:
    return set(combinations(sorted(row.items()), 2))


Tokens = Sequence[tuple[int, ...]]
# From the tokens so far to a mask over the vocabulary.
Allowed = Callable[[Sequence[int]], Tensor]

EMBEDDED = "outrider/embedded"
# One request at a time, without a draft.
PLAIN = EngineConfig(drafter="none", batch_size=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """`config`, `params` and `allowed` say how the text of a row is written, `plain` by which
    configuration the expected text is. `possible` changes a row to one that can run; the factors
    that `idle` names have no effect in a row. `drafts` has what each drafter drafts from, where it
    is not the target's usual partner."""

    factors: Factors
    config: Callable[[Row], EngineConfig]
    plain: Callable[[Row], EngineConfig] = lambda _: PLAIN
    params: Callable[[Row, int], SamplingParams] = lambda _, most: SamplingParams(
        max_tokens=most, ignore_eos=True
    )
    allowed: Callable[[Row, int], Allowed | None] = lambda *_: None
    possible: Callable[[Row], Row] = dict
    idle: Callable[[Row], Collection[str]] = lambda _: ()
    target: str = EMBEDDED
    drafts: Mapping[str, str | None] = field(default_factory=dict[str, str | None])

    def all_rows(self) -> list[Row]:
        """The full product, each configuration once."""
        values = product(*self.factors.values())
        rows = (dict(zip(self.factors, row, strict=True)) for row in values)
        return [row for row in rows if row == self.possible(row) and self._is_first(row)]

    def pair_rows(self) -> list[Row]:
        """A few rows that meet every pair of two values."""
        rows = map(self.possible, covering_rows(self.factors))
        return list({tuple(row.items()): row for row in rows}.values())

    def _is_first(self, row: Row) -> bool:
        """Whether factors without effect have their first value."""
        return all(row[name] == self.factors[name][0] for name in self.idle(row))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A row's result. `most_nodes` is the largest draft, `first_difference` (completion, token) or
    None."""

    row: Row
    num_tokens: int
    num_equal: int
    equal_logprobs: bool
    num_emitted: int
    num_accepted: int
    num_drafted: int
    num_rounds: int
    num_preempted: int
    most_nodes: int
    exact_kernels: bool
    first_difference: tuple[int, int] | None

    @property
    def holds(self) -> bool:
        return self.first_difference is None and self.equal_logprobs

    @property
    def branched(self) -> bool:
        """Whether some draft was larger than any chain could be."""
        return self.most_nodes > int(self.row["k"])

    @property
    def acceptance_rate(self) -> float:
        return round(self.num_accepted / max(self.num_drafted, 1), 4)

    @property
    def tokens_per_round(self) -> float:
        return round(self.num_emitted / max(self.num_rounds, 1), 4)

    def to_dict(self) -> dict[str, object]:
        rates = {"acceptance_rate": self.acceptance_rate, "tokens_per_round": self.tokens_per_round}
        return {**asdict(self), **rates}


@dataclass(slots=True)
class Runner:
    """Runs rows over `prompts`, each for `max_tokens`; plain results are kept and used again."""

    matrix: Matrix
    prompts: Sequence[str]
    max_tokens: int
    _plain: dict[tuple[EngineConfig, str], list[GenerationResult]] = field(
        default_factory=dict[tuple[EngineConfig, str], list[GenerationResult]]
    )

    def run(self, rows: Sequence[Row]) -> Iterator[Cell]:
        """Yield each row's result as it is done."""
        for row in rows:
            plain, config = self._expected(row), self.matrix.config(row)
            draft = self.matrix.drafts.get(config.drafter)
            llm = LLM(self.matrix.target, draft=draft, config=config)
            try:
                yield _cell(row, plain, self._written(llm, row, plain), llm)
            finally:
                llm.close()

    def plain_tokens(self, row: Row) -> Tokens:
        """The text that `row` must have."""
        return [result.token_ids for result in self._expected(row)]

    def _expected(self, row: Row) -> list[GenerationResult]:
        config = self.matrix.plain(row)
        key = config, f"{self.matrix.params(row, self.max_tokens)} {row.get('feature')}"
        if key not in self._plain:
            llm = LLM(self.matrix.target, config=config)
            self._plain[key] = self._written(llm, row, ())
            llm.close()
        return self._plain[key]

    def _written(
        self, llm: LLM, row: Row, plain: Sequence[GenerationResult]
    ) -> list[GenerationResult]:
        params = self.matrix.params(row, self.max_tokens)
        each = [params] * len(self.prompts)
        if llm.config.drafter == "prediction":
            firsts = plain[:: params.n]
            each = [replace(params, prediction=_edited(result.text)) for result in firsts]
        allowed = self.matrix.allowed(row, llm.spec.vocab_size)
        return llm.generate(self.prompts, each, allowed=allowed)


def _cell(
    row: Row, plain: Sequence[GenerationResult], ours: Sequence[GenerationResult], llm: LLM
) -> Cell:
    expected, got = ([result.token_ids for result in results] for results in (plain, ours))
    return Cell(
        row=row,
        num_tokens=sum(map(len, expected)),
        num_equal=num_equal(expected, got),
        equal_logprobs=[r.logprobs for r in plain] == [r.logprobs for r in ours],
        num_emitted=sum(map(len, got)),
        num_accepted=sum(result.stats.num_accepted for result in ours),
        num_drafted=sum(result.stats.num_drafted for result in ours),
        num_rounds=sum(result.stats.num_rounds for result in ours),
        num_preempted=llm.counts.preempted,
        most_nodes=max((one.num_drafted for result in ours for one in result.rounds), default=0),
        exact_kernels=llm.kernels.exact,
        first_difference=first_difference(expected, got),
    )


def _edited(text: str) -> str:
    """A guess that is right but for one word in the middle, as a caller's would be."""
    words = text.split(" ")
    words[len(words) // 2] = "changed"
    return " ".join(words)


def num_equal(expected: Tokens, got: Tokens) -> int:
    """Tokens of `expected` that `got` has in the same place, up to each prompt's first difference;
    a prompt that goes on longer than expected counts as different at its end."""
    return sum(common_prefix(a, b) - (len(b) > len(a)) for a, b in zip(expected, got, strict=True))


def first_difference(expected: Tokens, got: Tokens) -> tuple[int, int] | None:
    """(prompt, token) of the first difference, or None."""
    for index, (a, b) in enumerate(zip(expected, got, strict=True)):
        if tuple(a) != tuple(b):
            return index, common_prefix(a, b)
    return None
