"""What a rule does to the text: the same prompts plainly and under each acceptance rule.

Plain decoding writes first. Under an exact rule greedy text must be the same, and sampled text too
where the rule ties it to the seed (match, coupled); block and token keep the law, not the words. A
lossy rule may change the text: how much is told by the share of differing texts, and by how well
the target itself foretells what was written, beside how well it foretells its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from outrider.api.llm import LLM
from outrider.api.result import GenerationResult
from outrider.bench.frame import Ratio, ratio_of_medians
from outrider.bench.quality.judge import Nats
from outrider.core.config import EXACT_SAMPLERS, LOSSY_SAMPLERS, EngineConfig
from outrider.core.draft import common_prefix
from outrider.core.errors import OutriderError
from outrider.core.params import SamplingParams

PLAIN = "plain"
RULES = (*EXACT_SAMPLERS, *LOSSY_SAMPLERS)
# Rules under which sampled text is plain decoding's own for the same seed.
TIED = ("match", "coupled")


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleRow:
    """One rule on all prompts. `must_match` says that every text has to be that of plain decoding.
    `first_difference` is the least place at which one parts. `perplexity` is of what was written,
    under the target; `against_plain` is the ratio to plain decoding's, over texts. `reason` says
    why nothing was measured."""

    rule: str
    drafter: str
    exact: bool
    must_match: bool
    num_texts: int = 0
    num_same: int = 0
    num_tokens: int = 0
    first_difference: int | None = None
    acceptance: float | None = None
    tokens_per_round: float | None = None
    perplexity: float | None = None
    against_plain: Ratio | None = None
    reason: str | None = None

    @property
    def differing(self) -> float | None:
        """The share of texts that are not those of plain decoding."""
        return 1 - self.num_same / self.num_texts if self.num_texts else None

    @property
    def broken(self) -> bool:
        """Whether the rule failed to do what it promises."""
        return self.must_match and self.num_same < self.num_texts


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """Who writes what. `read` gives the nats of written ids after a prompt's, under the target."""

    target: str
    draft: str | None
    engine: EngineConfig
    params: SamplingParams
    prompts: Sequence[str]
    read: Callable[[Sequence[int], Sequence[int]], Nats]


@dataclass(frozen=True, slots=True)
class _Texts:
    """What one configuration wrote, and how well the target foretells each text of it."""

    results: Sequence[GenerationResult]
    nats: Sequence[Nats]
    drafter: str
    exact: bool

    @property
    def ids(self) -> list[tuple[int, ...]]:
        return [result.token_ids for result in self.results]


def compare_rules(study: Study, rules: Sequence[str]) -> Iterator[RuleRow]:
    """Plain decoding, then a row for each of `rules`; one that cannot run says why. Raises
    OutriderError if plain decoding cannot."""
    plain = _written(study, replace(study.engine, drafter="none", sampler="block"), None)
    yield _row(PLAIN, plain, plain, must_match=True)
    for rule in rules:
        try:
            texts = _written(study, replace(study.engine, sampler=rule), study.draft)
            own = _baseline(study, rule, plain)
        except OutriderError as error:
            yield _refused(study, rule, error)
            continue
        tied = study.params.greedy or rule in TIED
        yield _row(rule, texts, own, must_match=texts.exact and tied)


def _baseline(study: Study, rule: str, plain: _Texts) -> _Texts:
    """What `rule` is compared with: a rule that ties text to the seed draws otherwise, so where
    text is sampled it has a plain text of its own."""
    if study.params.greedy or rule not in TIED:
        return plain
    return _written(study, replace(study.engine, drafter="none", sampler=rule), None)


def _written(study: Study, config: EngineConfig, draft: str | None) -> _Texts:
    llm = LLM(study.target, draft=draft, config=config)
    with closing(llm):
        results = llm.generate(list(study.prompts), study.params)
        prompts = llm.tokenizer.encode_batch(study.prompts)
        nats = [
            study.read(prompt, result.token_ids)
            for prompt, result in zip(prompts, results, strict=True)
        ]
        return _Texts(results, nats, llm.drafter, llm.exact)


def _row(rule: str, texts: _Texts, plain: _Texts, *, must_match: bool) -> RuleRow:
    stats = [result.stats for result in texts.results]
    drafted, rounds = sum(s.num_drafted for s in stats), sum(s.num_rounds for s in stats)
    emitted = sum(s.num_emitted for s in stats)
    pairs = list(zip(texts.ids, plain.ids, strict=True))
    return RuleRow(
        rule=rule,
        drafter=texts.drafter,
        exact=texts.exact,
        must_match=must_match,
        num_texts=len(pairs),
        num_same=sum(mine == own for mine, own in pairs),
        num_tokens=sum(map(len, texts.ids)),
        first_difference=min(
            (common_prefix(*pair) for pair in pairs if pair[0] != pair[1]), default=None
        ),
        acceptance=sum(s.num_accepted for s in stats) / drafted if drafted else None,
        tokens_per_round=emitted / rounds if rounds else None,
        perplexity=sum(texts.nats, Nats()).perplexity,
        against_plain=None if texts is plain else _against(texts.nats, plain.nats),
    )


def _against(nats: Sequence[Nats], plain: Sequence[Nats]) -> Ratio | None:
    """The ratio of median perplexities, over texts that both have."""
    pairs = [
        (mine.perplexity, own.perplexity)
        for mine, own in zip(nats, plain, strict=True)
        if mine.perplexity is not None and own.perplexity is not None
    ]
    if not pairs:
        return None
    return ratio_of_medians([mine for mine, _ in pairs], [own for _, own in pairs])


def _refused(study: Study, rule: str, error: OutriderError) -> RuleRow:
    return RuleRow(
        rule=rule,
        drafter=study.engine.drafter,
        exact=rule in EXACT_SAMPLERS,
        must_match=False,
        reason=str(error),
    )
