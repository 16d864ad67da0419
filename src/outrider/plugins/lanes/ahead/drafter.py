"""Speculative speculation (SSD): draft for the likely verdicts while the target verifies.

A round's draft s1..sK is being verified. Its verdict will be n accepted tokens and one token t of
the target's own. `propose_after` drafts after the likeliest pairs (n, t); `propose` looks up the
true verdict, and sequences without a hit get the draft of a fallback. A branch has the distribution
and the random numbers of the draft that would be made later, so the output keeps its distribution;
with the fallback `jit` the text equals that of drafting in turns, token for token. (Kumar, Dao,
May, "Speculative speculative decoding".)

Shapes: N = positions of a draft, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from outrider.core.clock import HOST_CLOCK, Clock
from outrider.core.config import EngineConfig
from outrider.core.draft import Draft, Outcome
from outrider.core.protocols import AheadRow, CausalLM, DraftNeeds, DraftRow
from outrider.core.spec import DraftCapacity
from outrider.core.tree import ROOT
from outrider.drafters.common.draft_model import ModelDrafter
from outrider.drafters.common.growth import DraftSampler
from outrider.drafters.common.native import fused_model_drafts
from outrider.drafters.ngram import NgramDrafter
from outrider.plugins.lanes.ahead.choices import AheadChoices, capacity_needed
from outrider.plugins.lanes.ahead.forecast import Fallback, Forecast, Saguaro, Source
from outrider.plugins.lanes.ahead.table import (
    FanOutLimiter,
    ForcedHits,
    PreparedRound,
    SpeculationCache,
    fork,
    rank,
)
from outrider.plugins.lanes.ahead.tree import (
    DraftPrefix,
    DraftPrefixes,
    FusedBranches,
    Tree,
    grow_all,
)


@dataclass(slots=True)
class Looks:
    """Counts of look-ups of verdicts, and of those that were found."""

    asked: int = 0
    found: int = 0

    def add(self, *, found: bool) -> None:
        self.asked += 1
        self.found += found

    @property
    def share(self) -> float:
        """The share p_hit; 0 if nothing was looked up."""
        return self.found / self.asked if self.asked else 0.0


@dataclass(slots=True)
class AheadStats:
    """Statistics since the drafter was made. First rounds look nothing up.

    `looks` are all look-ups; `by_accepted` the same by how many tokens the verdict had accepted;
    `bonus` those after a draft that was accepted whole. `num_made_good` hits were forced and not
    really found. `num_prepared` is how many rounds something was prepared for, `num_tree_nodes` how
    many nodes the draft model read for their trees. `recovered_ranks` and `bonus_ranks` say how
    often the target's own token was the i-th of the draft model's list; their last entry counts
    those beyond it.
    """

    looks: Looks = field(default_factory=Looks)
    by_accepted: dict[int, Looks] = field(default_factory=dict[int, Looks])
    bonus: Looks = field(default_factory=Looks)
    num_made_good: int = 0
    num_prepared: int = 0
    num_branches: int = 0
    num_tree_nodes: int = 0
    recovered_ranks: tuple[int, ...] = ()
    bonus_ranks: tuple[int, ...] = ()

    def add(self, accepted: int, depth: int, *, found: bool) -> None:
        """Count the look-up of a verdict that accepted so many of `depth` drafted tokens."""
        self.looks.add(found=found)
        self.by_accepted.setdefault(accepted, Looks()).add(found=found)
        if accepted == depth:
            self.bonus.add(found=found)


@dataclass(frozen=True, slots=True)
class _Answer:
    """The last draft given for a sequence: its text then, and the origin of the draft."""

    tokens: Sequence[int]
    start: int
    shaped: bool
    hit: bool | None
    source: Source
    ended: float


@dataclass(frozen=True, slots=True)
class _Look:
    """A look-up: the table's draft for a row, and whether its verdict counts as a hit."""

    found: Draft | None = None
    hit: bool | None = None

    @property
    def made_good(self) -> bool:
        return self.found is None and bool(self.hit)


class AheadDrafter:
    """A drafter that drafts ahead with the model of `jit`.

    It shares the memory and the sampler of `jit`, or cached drafts would differ from later ones;
    `capacity` is that of the model. If `free` is given, it makes the drafts of forced hits in no
    time. With `fused` branches grow in one call where possible.

    Drafting ahead loses where drafter and target compete for one memory bus: branches of verdicts
    that do not come cost time. Requests with logits processors are drafted for in turns only,
    because their effect on a text that is not written yet is not known. The next trunk is read
    again from the text, also after a hit: its last token needs a pass anyhow, at the same cost.
    """

    name = "model"
    needs = DraftNeeds()

    def __init__(
        self,
        jit: ModelDrafter,
        choices: AheadChoices,
        capacity: DraftCapacity,
        *,
        free: ModelDrafter | None = None,
        fused: FusedBranches | None = None,
        clock: Clock = HOST_CLOCK,
    ) -> None:
        self._jit, self._free, self._fused, self._clock = jit, free, fused, clock
        self._fast = NgramDrafter(max_n=choices.max_ngram, min_n=choices.min_ngram)
        self._fallback = Fallback(jit, self._fast, choices.fallback, clock)
        self._forced = ForcedHits(choices.force_hits) if choices.force_hits >= 0 else None
        self._forecast = Forecast(choices.policy)
        self._trunks = DraftPrefixes(jit, capacity)
        self._pace = FanOutLimiter(choices.fan_out, choices.always)
        self._table = SpeculationCache()
        self._answers: dict[int, _Answer] = {}
        self._stats = AheadStats()

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        self._jit.open(seq_id, prompt)
        self._fast.open(seq_id, prompt)
        if self._free is not None:
            self._free.open(seq_id, prompt)

    def close(self, seq_id: int) -> None:
        self._table.drop(seq_id)
        self._answers.pop(seq_id, None)
        if self._free is not None:
            self._free.close(seq_id)
        self._fast.close(seq_id)
        self._jit.close(seq_id)

    def stats(self) -> AheadStats:
        """Return the counts so far, which go on counting; those of ranks are copies."""
        self._stats.recovered_ranks = tuple(self._forecast.recovered.counts)
        self._stats.bonus_ranks = tuple(self._forecast.bonus.counts)
        return self._stats

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        """Return drafts from the table after hits, and from the fallback after misses. `hit` says
        which; it is None if nothing was looked up: in a first round, and for shaped requests."""
        requested = self._clock()
        looks = [self._look(row, requested) for row in rows]
        made: dict[int, tuple[Draft, Source]] = {}
        for now in (True, False):
            part = [
                row
                for row, look in zip(rows, looks, strict=True)
                if look.found is None and look.made_good == now
            ]
            drafts, source = self._made(part, len(rows), now=now)
            for row, draft in zip(part, drafts, strict=True):
                made[row.seq_id] = draft, source
        ended = self._clock()
        found: list[Draft] = []
        for row, look in zip(rows, looks, strict=True):
            draft, source = made[row.seq_id] if look.found is None else (look.found, "table")
            shaped = row.shaper is not None
            self._answers[row.seq_id] = _Answer(
                row.tokens, len(row.tokens), shaped, look.hit, source, ended
            )
            found.append(replace(draft, hit=look.hit))
        return found

    def _made(
        self, rows: Sequence[DraftRow], batch: int, *, now: bool
    ) -> tuple[list[Draft], Source]:
        """Return drafts for misses. `now` says that they count as hits."""
        if now and self._free is not None:
            return self._free.propose(rows), "table"
        return self._fallback.propose(rows, batch, now=now)

    def propose_after(self, rows: Sequence[AheadRow]) -> None:
        """Draft ahead for rounds. Nothing is prepared for rounds whose draft was not made here or
        is not a chain. With too little memory or rows, less is prepared, without an error."""
        fan_out = self._pace.fan_out
        if not rows:
            return
        if not fan_out:
            self._pace.rest()
            return
        began = self._clock()
        texts = {row.seq_id: text for row in rows if (text := self._text(row)) is not None}
        trunks = self._trunks.read([row for row in rows if row.seq_id in texts], texts, fan_out)
        rankings = [rank(t.logits_NV, t.draft, t.row.params.temperature) for t in trunks]
        trees: list[Tree] = []
        for trunk, ranking in zip(trunks, rankings, strict=True):
            hit = bool(self._answers[trunk.row.seq_id].hit)
            branches = fork(ranking, self._forecast, trunk.num_branches, hit=hit)
            trees.append(Tree(trunk.row, trunk.root, branches, self._jit.sampler))
        num_nodes = grow_all(self._jit.model, trees, self._fused)
        for tree, trunk, ranking in zip(trees, trunks, rankings, strict=True):
            prepared = PreparedRound(trunk.row.start, trunk.draft, tree.drafts(), ranking.ids)
            self._table.put(trunk.row.seq_id, prepared)
        self._count(trunks, trees, num_nodes)
        ended = self._clock()
        estimates = self._fallback.estimates
        saved = estimates.hits.mean * estimates.jit_seconds.mean
        self._pace.observe(ended - began, rows[0].window, saved)

    def _count(self, trunks: Sequence[DraftPrefix], trees: Sequence[Tree], num_nodes: int) -> None:
        self._stats.num_prepared += len(trunks)
        self._stats.num_branches += sum(len(tree.branches) for tree in trees)
        self._stats.num_tree_nodes += num_nodes

    def _look(self, row: DraftRow, requested: float) -> _Look:
        answer = self._answers.pop(row.seq_id, None)
        prepared = self._table.take(row)
        if row.last is None or row.shaper is not None:
            return _Look()
        accepted, depth = row.last.num_accepted, len(row.last.draft)
        start = len(row.tokens) - accepted - 1
        if answer is not None and answer.start == start:
            self._learn(row.last, answer, requested)
        found = None
        if prepared is not None:
            found = prepared.find(row)
            self._forecast.observe_rank(prepared.rank(row), bonus=accepted == depth)
        self._stats.add(accepted, depth, found=found is not None)
        self._fallback.estimates.hits.add(found is not None)
        if self._forced is None:
            return _Look(found, hit=found is not None)
        hit = self._forced.hits(row.seq_id, start)
        self._stats.num_made_good += hit and found is None
        return _Look(found if hit else None, hit)

    def _learn(self, last: Outcome, answer: _Answer, requested: float) -> None:
        """Learn from the verdict on the last draft."""
        estimates = self._fallback.estimates
        estimates.verify_seconds.add(requested - answer.ended)
        estimates.tokens[answer.source].add(last.num_accepted + 1)
        self._forecast.observe(len(last.draft), last.num_accepted, hit=bool(answer.hit))

    def _text(self, row: AheadRow) -> Sequence[int] | None:
        """Return the text up to a round's pending token; None if it cannot be drafted ahead of.

        The text may have grown since: a verdict does not wait for this drafter.
        """
        answer = self._answers.get(row.seq_id)
        if answer is None or answer.shaped or answer.start != row.start or not row.budget.depth:
            return None
        if row.draft.parents != tuple(range(ROOT, len(row.draft) - 1)):
            return None
        end = row.start + len(row.draft) + row.budget.depth
        text = answer.tokens[: row.start]
        known = text[-1] == row.pending and end < self._jit.model.spec.max_tokens
        return text if known else None


@runtime_checkable
class CostFree(Protocol):
    """A model for studies that has a copy which takes no time."""

    def without_cost(self) -> CausalLM:
        """Return a model with the same outputs that takes no time, with a memory of its own."""
        ...


def ahead(
    model: CausalLM,
    sampler: DraftSampler,
    choices: AheadChoices,
    capacity: DraftCapacity,
    *,
    chunk: int,
    batch_size: int,
) -> AheadDrafter:
    """Return a drafter with `model` that also drafts ahead of verdicts, within the `capacity` of
    the model; it reads at most `chunk` prompt tokens in one pass."""
    if choices.saguaro < 1:
        change = Saguaro.planned(choices.saguaro, budget=choices.fan_out, depth=choices.k)
        sampler = replace(sampler, change=change)
    free = None
    if choices.force_hits >= 0 and isinstance(model, CostFree):
        free = ModelDrafter(model.without_cost(), sampler, chunk=chunk)
    fused = fused_model_drafts(model, sampler, batch_size=batch_size)
    jit = ModelDrafter(model, sampler, chunk=chunk, fused=fused)
    num_branches = batch_size * choices.fan_out
    branches = FusedBranches.of(model, sampler, num_branches=num_branches)
    return AheadDrafter(jit, choices, capacity, free=free, fused=branches)


def ahead_of(config: EngineConfig, model: CausalLM, sampler: DraftSampler) -> AheadDrafter:
    """Return the drafter that drafts with `model` ahead of verdicts, as the settings say."""
    capacity = capacity_needed(config.most_k, config.fan_out, config.most_batch)
    chunk, batch = config.most_chunk, config.most_batch
    return ahead(model, sampler, AheadChoices.of(config), capacity, chunk=chunk, batch_size=batch)
