"""Chains of a draft model in one call are those that grow token by token, ahead of verdicts too."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from doubles.tiny_checkpoints import variant, write_checkpoint
from outrider.core.draft import Budget, Draft, Outcome, Verdict
from outrider.core.logits import LogitsProcessor
from outrider.core.params import SamplingParams
from outrider.core.protocols import AheadRow, DraftRow
from outrider.core.rng import KeyedRng
from outrider.drafters.common.draft_model import ModelDrafter
from outrider.drafters.common.growth import DraftSampler, FusedDraft, FusedDrafts, TextPart
from outrider.drafters.common.native import fused_model_drafts
from outrider.models.decoder import LoadOptions, ModelCapacity
from outrider.models.llama import LlamaModel
from outrider.models.loading import load_model
from outrider.plugins.lanes.ahead.choices import AheadChoices, capacity_needed
from outrider.plugins.lanes.ahead.drafter import AheadDrafter
from outrider.plugins.lanes.ahead.tree import FusedBranches, Tree
from outrider.testing import GREEDY

BATCH, K, FAN_OUT = 3, 4, 6
# Of the tiny checkpoint.
VOCAB = 96
DRAWN = SamplingParams(temperature=1.3, top_k=20, top_p=0.9, seed=2)


@dataclass(slots=True)
class Counted:
    """Chains at once, and how often they were made."""

    inner: FusedDrafts
    made: int = 0

    def try_rows(self, parts: Sequence[TextPart]) -> Sequence[FusedDraft] | None:
        drafts = self.inner.try_rows(parts)
        self.made += drafts is not None
        return drafts


class CountedBranches(FusedBranches):
    made = 0

    def try_trees(self, trees: Sequence[Tree]) -> bool:
        done = super().try_trees(trees)
        self.made += done
        return done


def draft_model(folder: Path) -> LlamaModel:
    # Small pages, so that branches lie across them.
    capacity = ModelCapacity(num_slots=2048, page_size=4, max_rows=64, max_logits=BATCH * FAN_OUT)
    model = load_model(folder, LoadOptions(capacity=capacity, dtype="float32", device="cpu"))
    assert isinstance(model, LlamaModel)
    return model


@dataclass(slots=True)
class Live:
    """One sequence, followed by hand."""

    seq_id: int
    text: list[int]
    model: LlamaModel
    params: SamplingParams
    last: Outcome | None = None
    shaper: LogitsProcessor | None = None

    def rng_after(self, count: int) -> KeyedRng:
        pick = self.model.kernels.sampling.pick
        return KeyedRng(self.params.rng_seed, 1, len(self.text) + count, pick)

    def row(self, depth: int) -> DraftRow:
        rng = self.rng_after(0)
        text, budget = list(self.text), Budget(depth)
        return DraftRow(self.seq_id, text, self.last, budget, self.params, rng, shaper=self.shaper)

    def ahead(self, draft: Draft, depth: int) -> AheadRow:
        text, budget = self.text, Budget(depth)
        return AheadRow(
            self.seq_id, len(text), text[-1], draft, budget, self.params, self.rng_after
        )

    def go_on(self, draft: Draft, num_accepted: int, token: int) -> None:
        self.last = Outcome(self.seq_id, draft, Verdict(tuple(range(num_accepted)), token))
        self.text += self.last.tokens


def sequences(model: LlamaModel) -> list[Live]:
    return [
        Live(0, [5, 12, 0, 77, 31, 5, 90, 8], model, GREEDY),
        Live(1, [3, 3], model, DRAWN),
        Live(2, [40] * 17, model, replace(DRAWN, temperature=0.6)),
    ]


def sampler_of(model: LlamaModel) -> DraftSampler:
    return DraftSampler(model.kernels.argmax, "the model", sampling=model.kernels.sampling)


def check_alike(one: Draft, other: Draft) -> None:
    """To the bit."""
    assert (one.tokens, one.parents, one.hit) == (other.tokens, other.parents, other.hit)
    assert (one.probs_NV is None) == (other.probs_NV is None)
    if one.probs_NV is not None and other.probs_NV is not None:
        assert torch.equal(one.probs_NV, other.probs_NV)


def some(text: Sequence[int]) -> Tensor | None:
    """Two thirds of the tokens, or all."""
    return None if len(text) % 4 == 0 else torch.arange(VOCAB) % 3 != len(text) % 3


def test_a_chain_at_once_is_the_one_that_grows(tmp_path: Path) -> None:
    """Some of a chain is kept and needs not be read again; texts take turns and share batches. Two
    of them have masks, bans and penalties."""
    written = write_checkpoint(tmp_path, variant("llama2"), seed=4)
    models = [draft_model(written) for _ in range(2)]
    fused = fused_model_drafts(models[0], sampler_of(models[0]), batch_size=BATCH)
    if fused is None:
        pytest.skip("no compiler, no native kernels")
    counted, rng = Counted(fused), random.Random(6)
    one = ModelDrafter(models[0], sampler_of(models[0]), chunk=5, fused=counted)
    other = ModelDrafter(models[1], sampler_of(models[1]), chunk=5)
    sides = [sequences(model) for model in models]
    for drafter, live in zip((one, other), sides, strict=True):
        for seq in live:
            drafter.open(seq.seq_id, seq.text)
        for seq in live[:2]:
            params = replace(seq.params, repetition_penalty=1.3, logit_bias={7: 3.0}, min_tokens=9)
            stops, words = frozenset((7, 9)), ((11,), (5, 12))
            seq.shaper = LogitsProcessor(params, 2, stops, words, allowed=some)
    for _ in range(16):
        ids = rng.sample(range(BATCH), rng.randint(1, BATCH))
        depths = [rng.randint(1, K) for _ in ids]
        made = [
            drafter.propose([live[i].row(depth) for i, depth in zip(ids, depths, strict=True)])
            for drafter, live in zip((one, other), sides, strict=True)
        ]
        for i, ours, theirs in zip(ids, made[0], made[1], strict=True):
            check_alike(ours, theirs)
            kept, token = rng.randint(0, len(ours)), rng.randrange(VOCAB)
            for side in sides:
                side[i].go_on(ours, kept, token)
        assert one._staged == other._staged  # pyright: ignore[reportPrivateUsage]
    assert counted.made == 16


def test_branches_at_once_are_those_that_grow(tmp_path: Path) -> None:
    """Verdicts that were foreseen, and others, over texts that take turns and share batches."""
    written = write_checkpoint(tmp_path, variant("llama2"), seed=4)
    models = [draft_model(written) for _ in range(2)]
    sampler = sampler_of(models[0])
    fused = CountedBranches.of(models[0], sampler, num_branches=BATCH * FAN_OUT)
    if fused is None:
        pytest.skip("no compiler, no native kernels")
    assert isinstance(fused, CountedBranches)
    choices = AheadChoices(k=K, fan_out=FAN_OUT)
    capacity, rng = capacity_needed(K, FAN_OUT, BATCH), random.Random(3)
    one, other = (
        AheadDrafter(ModelDrafter(m, sampler_of(m), chunk=5), choices, capacity, fused=calls)
        for m, calls in zip(models, (fused, None), strict=True)
    )
    sides = [sequences(model) for model in models]
    for drafter, live in zip((one, other), sides, strict=True):
        for seq in live:
            drafter.open(seq.seq_id, seq.text)
    hits = 0
    for _ in range(24):
        ids = rng.sample(range(BATCH), rng.randint(1, BATCH))
        depth = rng.randint(1, K)
        made: list[list[Draft]] = []
        for drafter, live in zip((one, other), sides, strict=True):
            made.append(drafter.propose([live[i].row(K) for i in ids]))
            told = zip(ids, made[-1], strict=True)
            drafter.propose_after([live[i].ahead(draft, depth) for i, draft in told])
        for i, ours, theirs in zip(ids, made[0], made[1], strict=True):
            check_alike(ours, theirs)
            hits += bool(ours.hit)
            prepared = one._table._rounds[i]  # pyright: ignore[reportPrivateUsage]
            foreseen = rng.choice(sorted(prepared.branches))
            kept, token = foreseen if rng.random() < 0.7 else (0, rng.randrange(VOCAB))
            for side in sides:
                side[i].go_on(ours, kept, token)
    assert hits > 12
    assert fused.made == 24
