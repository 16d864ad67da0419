"""What number formats and acceptance rules do to the text, judged by the target itself.

A target reads texts and says how likely it finds each token. The perplexity of tokens x_1 ... x_n
is exp of the mean of -ln p(x_i | what is before x_i), here over those tokens that have something
before them in their window. Windows are read by themselves.

Shapes:  N = tokens, M = tokens that count, V = vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from outrider.api.llm import LLM
from outrider.api.result import GenerationResult
from outrider.core.config import EXACT_SAMPLERS, LOSSY_SAMPLERS, EngineConfig
from outrider.core.draft import common_prefix
from outrider.core.errors import OutriderError
from outrider.core.params import SamplingParams
from outrider.plugins.compat.wrapper import Cache, ModelWrapper, load_wrapper
from outrider.plugins.measure.turns import Ratio, ratio_of_medians
from outrider_lab.measure.frame import spoken
from outrider_lab.measure.store import Section, number, percent

# Of the model's matrices, of its keys and values, or of all.
QUANTISED, KV_INT8 = ("int8", "int4"), "kv-int8"
FORMATS = ("float32", "bfloat16", "float16", *QUANTISED, KV_INT8)
PLAIN = "plain"
RULES = (*EXACT_SAMPLERS, *LOSSY_SAMPLERS)
# Rules under which sampled text is plain decoding's own for the same seed.
TIED = ("match", "coupled")
# exp of more is no float.
_MOST_NATS = 700.0

Window = tuple[int, ...]


class Judge(Protocol):
    """Reads ids and gives logits of shape [1, N, V], as `ModelWrapper` does."""

    def forward(
        self, ids: Sequence[int], past_key_values: Cache | None = None, use_cache: bool = True
    ) -> tuple[Tensor, Cache | None]: ...


@dataclass(frozen=True, slots=True)
class Nats:
    """The sum of -ln p over `num_tokens` tokens. Sums add up; perplexities do not."""

    total: float = 0.0
    num_tokens: int = 0

    def __add__(self, other: Nats) -> Nats:
        return Nats(self.total + other.total, self.num_tokens + other.num_tokens)

    @property
    def perplexity(self) -> float | None:
        """None without a token, and where no number is large enough."""
        mean = self.total / self.num_tokens if self.num_tokens else math.inf
        return math.exp(mean) if mean < _MOST_NATS else None


def load_judge(target: str, form: str, device: str = "auto") -> ModelWrapper:
    """`target` in a format of FORMATS; what is not quantised is of the checkpoint's own dtype.
    Raises ConfigError, CheckpointError or MachineError."""
    return load_wrapper(target, device=device, **settings_of(form))[0]


def settings_of(form: str) -> dict[str, str]:
    """What a format of FORMATS means, as fields of EngineConfig."""
    if form == KV_INT8:
        return {"dtype": "auto", "quantise": "none", "kv_dtype": "int8"}
    if form in QUANTISED:
        return {"dtype": "auto", "quantise": form}
    return {"dtype": form, "quantise": "none"}


def read(judge: Judge, ids: Sequence[int], start: int = 1) -> Nats:
    """Of `ids` from place `start` (at least 1) on."""
    return _nats(_log_probs(judge, ids), ids, start) if len(ids) > start else Nats()


def windows_of(texts: Sequence[Sequence[int]], size: int, most: int) -> list[Window]:
    """`texts` cut to windows of at most `size` tokens, until they have `most` tokens together; a
    window of a single token says nothing and is left out."""
    found: list[Window] = []
    left = most
    for ids in texts:
        for start in range(0, len(ids), size):
            window = tuple(ids[start : start + min(size, left)])
            if len(window) > 1:
                found.append(window)
                left -= len(window)
    return found


def _log_probs(judge: Judge, ids: Sequence[int]) -> Tensor:
    """Natural logarithms of the distributions after each of `ids`, of shape [N, V] in float64."""
    logits_1NV, _ = judge.forward(ids, use_cache=False)
    return logits_1NV[0].to("cpu", torch.float64).log_softmax(-1)


def _nats(log_NV: Tensor, ids: Sequence[int], start: int = 1) -> Nats:
    places_M, told_M = torch.arange(start, len(ids)), torch.tensor(ids)[start:]
    return Nats(-float(log_NV[places_M - 1, told_M].sum()), len(places_M))


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatRow:
    """One number format on all windows. `divergence_nats` and `same_first_choice` (a share) are
    against `reference`; None for the reference itself. A target in this format keeps the shares
    `int8_drafts` and `int4_drafts` of what its copies in those write; None if not measured."""

    form: str
    reference: str
    num_windows: int
    num_tokens: int
    perplexity: float | None
    divergence_nats: float | None = None
    same_first_choice: float | None = None
    int8_drafts: float | None = None
    int4_drafts: float | None = None


def compare_formats(
    load: Callable[[str], Judge], forms: Sequence[str], windows: Sequence[Window]
) -> Iterator[FormatRow]:
    """A row for each of `forms`, of which the first is the reference; `load` makes a model of one.
    Every window is read by two models a moment apart, so no more than two are in memory. Divergence
    is that of the format's distribution from the reference's, sum p ln(p / q), as a mean over all
    places. Raises what `load` raises."""
    if not forms or not windows:
        return
    reference = load(forms[0])
    total = sum((_nats(_log_probs(reference, window), window) for window in windows), Nats())
    first = FormatRow(
        form=forms[0],
        reference=forms[0],
        num_windows=len(windows),
        num_tokens=total.num_tokens,
        perplexity=total.perplexity,
    )
    yield first
    for form in forms[1:]:
        yield replace(_beside(reference, load(form), windows, first), form=form)


def _beside(
    reference: Judge, model: Judge, windows: Sequence[Window], first: FormatRow
) -> FormatRow:
    total, divergence, same = Nats(), 0.0, 0
    for window in windows:
        wanted_NV, got_NV = _log_probs(reference, window), _log_probs(model, window)
        total += _nats(got_NV, window)
        divergence += float(_divergence(wanted_NV, got_NV).sum())
        same += int((wanted_NV.argmax(-1) == got_NV.argmax(-1)).sum())
    places = sum(map(len, windows))
    return replace(
        first,
        perplexity=total.perplexity,
        divergence_nats=divergence / places,
        same_first_choice=same / places,
    )


def _divergence(wanted_NV: Tensor, got_NV: Tensor) -> Tensor:
    """Of each place, of shape N; what the first distribution rules out counts for nothing."""
    p_NV = wanted_NV.exp()
    return torch.where(p_NV > 0, p_NV * (wanted_NV - got_NV), torch.zeros_like(p_NV)).sum(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleRow:
    """One rule on all prompts. `must_match` says that every text has to be that of plain decoding.
    `first_difference` is the least position at which a text parts from it. `perplexity` is of what
    was written, under the target; `against_plain` is the ratio to plain decoding's, over texts.
    `reason` says why nothing was measured."""

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
class RuleStudy:
    """Who writes what. `read` gives the nats of written ids after a prompt's, under the target."""

    target: str
    draft: str | None
    engine: EngineConfig
    params: SamplingParams
    prompts: Sequence[str]
    read: Callable[[Sequence[int], Sequence[int]], Nats]


@dataclass(frozen=True, slots=True)
class _Texts:
    """What one configuration wrote, and how likely the target finds each text of it."""

    results: Sequence[GenerationResult]
    nats: Sequence[Nats]
    drafter: str
    exact: bool


def compare_rules(study: RuleStudy, rules: Sequence[str]) -> Iterator[RuleRow]:
    """Plain decoding, then a row for each of `rules`; a rule that cannot run says why. Raises
    OutriderError if plain decoding cannot.

    Under an exact rule greedy text must be the same, and sampled text too where the rule ties it to
    the seed; block and token keep the distribution, not the words. How much a lossy rule changes is
    told by the share of differing texts, and by the perplexity of what was written, beside that of
    plain decoding's own."""
    plain = _written(study, replace(study.engine, drafter="none", sampler="block"), None)
    yield _rule_row(PLAIN, plain, plain, must_match=True)
    for rule in rules:
        tied = rule in TIED
        try:
            texts, own = _written(study, replace(study.engine, sampler=rule), study.draft), plain
            if tied and not study.params.greedy:
                # It draws in a way of its own, so there is a plain text of its own.
                own = _written(study, replace(study.engine, drafter="none", sampler=rule), None)
        except OutriderError as error:
            exact = rule in EXACT_SAMPLERS
            yield RuleRow(
                rule=rule,
                drafter=study.engine.drafter,
                exact=exact,
                must_match=False,
                reason=str(error),
            )
            continue
        must_match = texts.exact and (study.params.greedy or tied)
        yield _rule_row(rule, texts, own, must_match=must_match)


def _written(study: RuleStudy, config: EngineConfig, draft: str | None) -> _Texts:
    with closing(LLM(study.target, draft=draft, config=config)) as llm:
        results = llm.generate(list(study.prompts), study.params.seeded(0))
        prompts = llm.tokenizer.encode_batch(study.prompts)
        pairs = zip(prompts, results, strict=True)
        nats = [study.read(prompt, result.token_ids) for prompt, result in pairs]
        return _Texts(results, nats, llm.drafter, llm.exact)


def _rule_row(rule: str, texts: _Texts, plain: _Texts, *, must_match: bool) -> RuleRow:
    stats = [result.stats for result in texts.results]
    drafted, rounds = sum(s.num_drafted for s in stats), sum(s.num_rounds for s in stats)
    pairs = [
        (mine.token_ids, own.token_ids)
        for mine, own in zip(texts.results, plain.results, strict=True)
    ]
    parted = [common_prefix(mine, own) for mine, own in pairs if mine != own]
    return RuleRow(
        rule=rule,
        drafter=texts.drafter,
        exact=texts.exact,
        must_match=must_match,
        num_texts=len(pairs),
        num_same=len(pairs) - len(parted),
        num_tokens=sum(len(mine) for mine, _ in pairs),
        first_difference=min(parted, default=None),
        acceptance=sum(s.num_accepted for s in stats) / drafted if drafted else None,
        tokens_per_round=sum(s.num_emitted for s in stats) / rounds if rounds else None,
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
    return ratio_of_medians([a for a, _ in pairs], [b for _, b in pairs]) if pairs else None


_FORMAT_NOTE = (
    "Perplexity of the target on the text, each window read by itself. Divergence and first choice "
    "are against the first format, at every place of the text."
)
_DRAFTS_NOTE = (
    "Drafts kept: of drafter quantised-self, whose copy of the target is held in 8 or in 4 bits."
)
_RULE_NOTE = (
    "Perplexity is of what was written, under the target: lower is likelier to it, not better. "
    "Over plain: medians over texts, with 95 % bootstrap intervals. Rules that tie sampled text to "
    "the seed draw in a way of their own, and are compared with plain decoding that draws so too."
)
_FORMAT_COLUMNS: Mapping[str, Callable[[FormatRow], str]] = {
    "format": lambda row: row.form,
    "perplexity": lambda row: number(row.perplexity, 4),
    "divergence (nats)": lambda row: number(row.divergence_nats, 6),
    "same first choice %": lambda row: percent(row.same_first_choice),
    "int8 drafts kept %": lambda row: percent(row.int8_drafts),
    "int4 drafts kept %": lambda row: percent(row.int4_drafts),
    "tokens": lambda row: str(row.num_tokens),
}
_RULE_COLUMNS: Mapping[str, Callable[[RuleRow], str]] = {
    "rule": lambda row: row.rule,
    "drafter": lambda row: row.drafter,
    "promise": lambda row: (
        "the text" if row.must_match else "the distribution" if row.exact else "none"
    ),
    "texts as plain": lambda row: f"{row.num_same}/{row.num_texts}",
    "differing %": lambda row: percent(row.differing),
    "first difference": lambda row: number(row.first_difference, 0),
    "perplexity": lambda row: number(row.perplexity, 3),
    "over plain": lambda row: "-" if row.against_plain is None else spoken(row.against_plain),
    "accepted %": lambda row: percent(row.acceptance),
    "tok/round": lambda row: number(row.tokens_per_round, 2),
}


@dataclass(frozen=True, slots=True)
class Quality:
    """All rows of a run."""

    formats: Sequence[FormatRow] = ()
    rules: Sequence[RuleRow] = ()

    @property
    def holds(self) -> bool | None:
        """Whether every rule that must keep the text kept it; None where none was judged."""
        judged = [row.broken for row in self.rules if row.must_match and row.rule != PLAIN]
        return not any(judged) if judged else None

    @property
    def findings(self) -> list[str]:
        """What no table shows: promises that were broken, and rules that could not run."""
        broken = [row for row in self.rules if row.broken]
        absent = [row for row in self.rules if row.reason is not None]
        return [
            *(f"{r.rule} broke its promise: a text parts at {r.first_difference}." for r in broken),
            *(f"{r.rule} was not measured: {r.reason}" for r in absent),
        ]

    def to_record(self) -> dict[str, object]:
        rules = [{**asdict(r), "differing": r.differing, "broken": r.broken} for r in self.rules]
        return {"holds": self.holds, "findings": self.findings, **asdict(self), "rules": rules}


def sections(found: Quality) -> Iterator[Section]:
    if found.formats:
        drafts = any(row.int8_drafts or row.int4_drafts for row in found.formats)
        columns = {k: show for k, show in _FORMAT_COLUMNS.items() if drafts or "drafts" not in k}
        yield Section(
            title="Number formats",
            text=[_FORMAT_NOTE, *([_DRAFTS_NOTE] if drafts else [])],
            header=tuple(columns),
            rows=[[show(row) for show in columns.values()] for row in found.formats],
        )
    if found.rules:
        measured = [row for row in found.rules if row.reason is None]
        yield Section(
            title="Acceptance rules",
            text=[_RULE_NOTE],
            header=tuple(_RULE_COLUMNS),
            rows=[[show(row) for show in _RULE_COLUMNS.values()] for row in measured],
        )
    if found.findings:
        yield Section(title="Read with care", points=found.findings)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfDrafts:
    """Targets in several formats, and the copies of them in 8 or 4 bits, `copies`, that draft: how
    many of these drafts a target accepts."""

    target: str
    engine: EngineConfig
    params: SamplingParams
    prompts: Sequence[str]
    copies: Sequence[str]

    def measured(self, rows: Iterable[FormatRow]) -> Iterator[FormatRow]:
        """`rows` with what drafts of each copy are kept; nothing where a target cannot draft for
        itself."""
        for row in rows:
            found = {f"{copy}_drafts": self._kept(row.form, copy) for copy in self.copies}
            yield replace(row, **found)

    def _kept(self, form: str, copy: str) -> float | None:
        config = replace(self.engine, drafter="quantised-self", sampler="block")
        config = replace(config, self_quantise=copy, **settings_of(form))
        try:
            with closing(LLM(self.target, config=config)) as llm:
                results = llm.generate(list(self.prompts), self.params.seeded(0))
        except OutriderError:
            return None
        drafted = sum(result.stats.num_drafted for result in results)
        return sum(result.stats.num_accepted for result in results) / drafted if drafted else None
