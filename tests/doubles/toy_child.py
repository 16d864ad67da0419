"""A drafter's process around a toy model."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from doubles.child_programs import told_options
from doubles.tiny_attention import toy_spec
from doubles.toy_hybrid import ToyHybrid
from outrider.cache.paged_kv import PagedKV
from outrider.cache.pages import ArenaSize
from outrider.core.draft import Draft
from outrider.core.protocols import (
    AheadRow,
    CacheStore,
    CausalLM,
    Drafter,
    DraftNeeds,
    DraftRow,
    StepOutput,
    StepRow,
)
from outrider.core.rng import inverse_cdf
from outrider.core.spec import ModelSpec
from outrider.drafters.common.draft_model import ModelDrafter
from outrider.drafters.common.growth import DraftSampler
from outrider.kernels.reference import pointwise
from outrider.plugins.lanes.process.options import ChildOptions

NAP_SECONDS = 0.4


@dataclass(frozen=True, slots=True)
class Single:
    """`inner`, whose logits come in float32, as those of real models do."""

    inner: CausalLM

    @property
    def spec(self) -> ModelSpec:
        return self.inner.spec

    @property
    def state(self) -> CacheStore:
        return self.inner.state

    def step(self, rows: Sequence[StepRow], needs: DraftNeeds) -> StepOutput:
        out = self.inner.step(rows, needs)
        return replace(out, logits_MV=out.logits_MV.float())


def toy_drafter(options: ChildOptions) -> ModelDrafter:
    model = ToyHybrid(vocab_size=options.vocab_size, seed=5, num_slots=options.num_slots)
    sampler = DraftSampler(pointwise.argmax, "the draft model")
    return ModelDrafter(Single(model), sampler, chunk=options.chunk)


@dataclass(slots=True)
class Echo:
    """Drafts ahead, after a nap, what it was told: the next draft spells it. Else as `inner`."""

    inner: Drafter
    name: str = "echo"
    needs: DraftNeeds = field(default_factory=DraftNeeds)
    _told: dict[int, list[int]] = field(default_factory=dict[int, list[int]])

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        self.inner.open(seq_id, prompt)

    def close(self, seq_id: int) -> None:
        self.inner.close(seq_id)

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        drafts = self.inner.propose(rows)
        return [self._spelled(row, draft) for row, draft in zip(rows, drafts, strict=True)]

    def propose_after(self, rows: Sequence[AheadRow]) -> None:
        time.sleep(NAP_SECONDS)
        for row in rows:
            distributions = row.draft.probs_NV
            self._told[row.seq_id] = [
                row.start,
                row.pending,
                row.budget.depth,
                0 if distributions is None else len(distributions),
                *row.draft.tokens,
            ]

    def _spelled(self, row: DraftRow, draft: Draft) -> Draft:
        told = self._told.pop(row.seq_id, None)
        if told is None:
            return replace(draft, hit=False)
        accepted = -1 if row.last is None else row.last.num_accepted
        return replace(Draft.chain([accepted, *told]), hit=True)


def toy() -> None:
    """Exactly what the real program does, but for the model."""
    from outrider.plugins.lanes.process.child import Inherited, Inner, serve

    def build(options: ChildOptions) -> Inner:
        drafter = toy_drafter(options)
        if options.ahead is None:
            return Inner(drafter, options.vocab_size, inverse_cdf)
        echo = Echo(drafter)
        return Inner(echo, options.vocab_size, inverse_cdf, echo)

    serve(Inherited.named(sys.argv[2:]), told_options(), build)
    os._exit(0)


@dataclass(slots=True)
class Known:
    """A drafter whose draft of a text is the number of pages that were known when it was opened."""

    kv: PagedKV
    name: str = "known"
    needs: DraftNeeds = field(default_factory=DraftNeeds)
    _num_known: dict[int, int] = field(default_factory=dict[int, int])

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        length = self.kv.open(seq_id, prompt)
        self._num_known[seq_id] = length // self.kv.page_size
        if rest := prompt[length:]:
            self.kv.plan([StepRow.chain(seq_id, rest)])
            self.kv.commit({seq_id: range(len(rest))})

    def close(self, seq_id: int) -> None:
        self.kv.close(seq_id)

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        return [Draft.chain([self._num_known[row.seq_id]]) for row in rows]


def paged() -> None:
    from outrider.plugins.lanes.process.child import Inherited, Inner, serve

    def build(options: ChildOptions) -> Inner:
        size = ArenaSize(options.num_slots, options.page_size)
        spec = toy_spec("paged", options.vocab_size)
        kv = PagedKV(spec, dtype=torch.float32, device=torch.device("cpu"), size=size)
        return Inner(Known(kv), options.vocab_size, inverse_cdf)

    serve(Inherited.named(sys.argv[2:]), told_options(), build)
    os._exit(0)
