"""Trees in one call are those that grow level by level, and memory follows them alike."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from doubles.rig import BRANCHING
from doubles.tiny_checkpoints import random_llama, variant, write_checkpoint
from doubles.toy_hybrid import ToyHybrid
from outrider.core.clock import host_ints
from outrider.core.draft import Budget, Draft
from outrider.core.errors import NumericsError
from outrider.core.logits import LogitsProcessor
from outrider.core.params import SamplingParams
from outrider.core.protocols import Drafter, DraftRow, HiddenStates, StepRow
from outrider.core.rng import KeyedRng, Pick
from outrider.core.sampling import TreeLimits
from outrider.core.tree import ROOT
from outrider.drafters.common.draft_model import ModelDrafter
from outrider.drafters.common.growth import FusedDraft, FusedDrafts, TextPart, settled_shape
from outrider.drafters.common.native import FusedTrees, fused_model_drafts
from outrider.kernels.native.rounds import CacheSpan, Draws
from outrider.kernels.native.sampling import PlannedTree
from outrider.kernels.plan import PackedPlan
from outrider.models.decoder import LoadOptions, ModelCapacity
from outrider.models.llama import LlamaModel
from outrider.models.loading import load_model
from outrider.plugins.heads.hidden import HeadLimits, HiddenDrafter
from outrider.plugins.heads.passes import fused_head_drafts
from outrider.plugins.proof.reports import SAMPLED
from outrider.testing import GREEDY
from unit.drafters.test_chain_pass import check_alike
from unit.heads.test_head_pass import EAGLES, TEXT, VOCAB, loaded, row

BATCH = 3
HEADS = ("EAGLE 3", "EAGLE 1", "llama")


@dataclass(slots=True)
class Counted:
    """Trees at once, and how often they were asked for and made."""

    inner: FusedDrafts
    asked: int = 0
    made: int = 0

    def try_rows(self, parts: Sequence[TextPart]) -> Sequence[FusedDraft] | None:
        drafts = self.inner.try_rows(parts)
        self.asked += 1
        self.made += drafts is not None
        return drafts


Pair = tuple[Drafter, Drafter, Counted]


def draft_model(folder: Path, num_slots: int = 2048, max_logits: int = BATCH * 16) -> LlamaModel:
    capacity = ModelCapacity(num_slots=num_slots, page_size=4, max_rows=64, max_logits=max_logits)
    model = load_model(folder, LoadOptions(capacity=capacity, dtype="float32", device="cpu"))
    assert isinstance(model, LlamaModel)
    return model


def of_models(folder: Path, num_slots: int = 2048) -> Pair:
    """A drafter that has trees made at once where it can, and one that never does."""
    written = write_checkpoint(folder, variant("llama2"), seed=4)
    one, other = (draft_model(written, num_slots) for _ in range(2))
    samplers = [replace(BRANCHING, sampling=model.kernels.sampling) for model in (one, other)]
    fused = fused_model_drafts(one, samplers[0], batch_size=BATCH)
    if fused is None:
        pytest.skip("no compiler, no native kernels")
    counted = Counted(fused)
    at_once = ModelDrafter(one, samplers[0], chunk=5, fused=counted)
    return at_once, ModelDrafter(other, samplers[1], chunk=5), counted


def of_heads(name: str, folder: Path) -> Pair:
    target = random_llama()
    limits = HeadLimits(chunk=3, reach=5, window=1000, first=int(name in EAGLES))
    nets = [loaded(name, folder / place, target, num_slots=2048) for place in ("one", "other")]
    sampler = replace(BRANCHING, model_name="the heads", sampling=target.kernels.sampling)
    fused = fused_head_drafts(nets[0].native, nets[0].fuse, sampler, batch_size=BATCH)
    assert fused is not None
    counted = Counted(fused)
    at_once = HiddenDrafter("it", nets[:1], sampler, limits, counted)
    return at_once, HiddenDrafter("it", nets[1:], sampler, limits), counted


MAKERS: dict[str, Callable[[Path], Pair]] = {
    "model": of_models,
    **{name: partial(of_heads, name) for name in HEADS},
}


PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.4,
    "frequency_penalty": 0.3,
    "logit_bias": {5: 2.0, 6: -3.0, 95: 4.0},
}
FILTERED = replace(SAMPLED, top_k=9, top_p=0.9, min_p=0.01)
# Siblings come to an end: two tokens at most, or one.
NARROW = (replace(SAMPLED, top_k=2), replace(SAMPLED, temperature=0.05, top_p=0.5))
WAYS = {
    "greedy": (GREEDY,) * BATCH,
    "drawn": (SAMPLED, replace(SAMPLED, temperature=0.4, seed=11), FILTERED),
    "narrow": (*NARROW, SAMPLED),
    "racing": tuple(replace(one, sampler="coupled") for one in (SAMPLED, FILTERED, NARROW[0])),
    "mixed": (GREEDY, SAMPLED, replace(FILTERED, sampler="coupled")),
    # Each with a mask, some with bans and penalties.
    "shaped": (replace(GREEDY, **PENALTIES), replace(SAMPLED, min_tokens=40), FILTERED),
}


def pick_of(drafter: Drafter) -> Pick:
    if isinstance(drafter, ModelDrafter):
        return drafter.sampler.sampling.pick
    assert isinstance(drafter, HiddenDrafter)
    return drafter._sampler.sampling.pick  # pyright: ignore[reportPrivateUsage]


def asked(
    name: str,
    drafter: Drafter,
    seq_id: int,
    text: Sequence[int],
    budget: Budget,
    params: SamplingParams = GREEDY,
) -> DraftRow:
    """Drawn with the numbers that `drafter` picks tokens by."""
    known = name if name in HEADS else "llama"
    rng = KeyedRng(params.rng_seed, 0, len(text), pick_of(drafter))
    return replace(row(known, seq_id, text, params=params, rng=rng), budget=budget)


def shaped(row: DraftRow) -> DraftRow:
    """With a mask, and what its parameters ask for, after a prompt of two tokens."""
    shaper = LogitsProcessor(
        row.params, 2, stop_ids=frozenset((3, 7)), bad_words=((40,), (5, 6)), allowed=some
    )
    return replace(row, shaper=shaper)


def some(text: Sequence[int]) -> Tensor | None:
    """Two thirds of the tokens, one alone, or all."""
    mask_V = torch.arange(VOCAB) % 3 != len(text) % 3
    if len(text) % 5 == 2:
        mask_V = torch.arange(VOCAB) == 3 * len(text) % VOCAB
    return None if len(text) % 5 == 4 else mask_V


@pytest.mark.covering(1)
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("name", MAKERS)
def test_a_tree_at_once_is_the_one_that_grows(name: str, how: str, tmp_path: Path) -> None:
    """Rounds keep some path of a tree, or go by unasked; texts take turns and share batches."""
    at_once, levels, counted = MAKERS[name](tmp_path)
    rng = random.Random(6)
    texts = [list(TEXT), [3, 3], [40] * 17]
    for seq_id, text in enumerate(texts):
        at_once.open(seq_id, text)
        levels.open(seq_id, text)
    branched = cut = 0
    change = shaped if how == "shaped" else replace
    for _ in range(16):
        ids = rng.sample(range(BATCH), rng.randint(1, BATCH))
        budgets = {
            i: Budget(
                rng.randint(1, 6),
                rng.choice((1.0, 1.3)),
                num_nodes=rng.randint(7, 40),
                price=rng.choice((None, None, 0.01, 0.2)),
            )
            for i in ids
        }
        made = [
            drafter.propose(
                [change(asked(name, drafter, i, texts[i], budgets[i], WAYS[how][i])) for i in ids]
            )
            for drafter in (at_once, levels)
        ]
        for i, one, other in zip(ids, made[0], made[1], strict=True):
            check_alike(one, other)
            branched += len(one) > one.max_depth > 1
            whole = settled_shape(budgets[i])
            cut += one.probs_NV is not None and len(one) < len(whole)
            texts[i] += [*_some_path(one, rng), rng.randrange(VOCAB)]
        if isinstance(at_once, ModelDrafter) and isinstance(levels, ModelDrafter):
            # What a path is found in later.
            assert at_once._staged == levels._staged  # pyright: ignore[reportPrivateUsage]
            assert at_once._parents == levels._parents  # pyright: ignore[reportPrivateUsage]
    assert counted.asked == counted.made == 16
    assert branched > 8
    assert cut or how != "narrow"


def _some_path(draft: Draft, rng: random.Random) -> list[int]:
    path: list[int] = []
    node = ROOT
    while (children := draft.children(node)) and rng.random() < 0.7:
        node = rng.choice(children)
        path.append(draft.tokens[node])
    return path


def only(drafter: Drafter, one: DraftRow) -> Draft:
    drafter.open(one.seq_id, one.tokens)
    try:
        return drafter.propose([one])[0]
    finally:
        drafter.close(one.seq_id)


@pytest.mark.parametrize("name", ["model", "EAGLE 3"])
def test_what_a_call_cannot_do_grows_by_levels(name: str, tmp_path: Path) -> None:
    at_once, levels, counted = MAKERS[name](tmp_path)
    budget = Budget(3, num_nodes=9)

    def compare(change: Callable[[DraftRow], DraftRow], budget: Budget = budget) -> None:
        drafts = [only(one, change(asked(name, one, 0, TEXT, budget))) for one in (at_once, levels)]
        check_alike(*drafts)
        assert drafts[0].tokens

    # Tokens that are picked in another way.
    compare(lambda row: replace(row, params=SAMPLED, rng=KeyedRng(0, 0, 8)))
    compare(lambda row: row, Budget(3, num_nodes=300))
    assert (counted.asked, counted.made) == (2, 0)
    compare(lambda row: row)
    assert counted.made == 1


def test_memory_goes_on_below_a_tree_that_it_was_told_of(tmp_path: Path) -> None:
    state = draft_model(write_checkpoint(tmp_path, variant("llama2"), seed=4)).state
    tokens, parents = (5, 6, 7, 8, 9), (ROOT, 0, 0, 1, 2)
    below = StepRow(0, (1, 2), (4, 5))
    plans: list[PackedPlan] = []
    for told in (True, False):
        state.open(0, ())
        state.reserve({0: len(tokens)})
        if told:
            state.note_tree(0, tokens, parents)
        else:
            state.plan([StepRow(0, tokens, parents)])
        plans.append(state.plan([below]))
        state.close(0)
    one, other = plans
    assert torch.equal(one.positions_N, other.positions_N)
    assert one.extra_offsets_N1 is not None
    assert other.extra_offsets_N1 is not None
    assert host_ints(one.extra_offsets_N1) == host_ints(other.extra_offsets_N1) == [0, 3, 7]


def test_memory_for_the_widest_levels_need_not_be_there(tmp_path: Path) -> None:
    """What a call would need at worst is more than what the tree takes."""
    at_once, levels, counted = of_models(tmp_path, num_slots=48)
    drafts = [
        only(one, asked("model", one, 0, TEXT, Budget(4, num_nodes=18)))
        for one in (at_once, levels)
    ]
    check_alike(*drafts)
    assert (counted.asked, counted.made) == (1, 0)


def test_small_trees_need_few_rows(tmp_path: Path) -> None:
    """A level has no more nodes than its tree."""
    model = draft_model(write_checkpoint(tmp_path, variant("llama2"), seed=4), max_logits=9)
    fused = fused_model_drafts(model, BRANCHING, batch_size=BATCH)
    if fused is None:
        pytest.skip("no compiler, no native kernels")
    assert isinstance(fused, FusedTrees)
    fits = fused._call.fits  # pyright: ignore[reportPrivateUsage]
    for sizes in ((9,), (5, 4), (3, 3, 3)):
        trees = [
            PlannedTree(CacheSpan(0, (1,), ()), TreeLimits(size, depth=4, width=16), Draws())
            for size in sizes
        ]
        assert fits(trees)
        trees[-1] = replace(trees[-1], limits=TreeLimits(sizes[-1] + 1, depth=4, width=16))
        assert not fits(trees)


def test_no_pass_points_to_memory_that_is_gone(tmp_path: Path) -> None:
    at_once, _, counted = of_models(tmp_path)
    assert only(at_once, asked("model", at_once, 0, TEXT, Budget(4, num_nodes=18))).tokens
    assert isinstance(counted.inner, FusedTrees)
    assert counted.made == 1
    described = counted.inner._call._lane.memory.described  # pyright: ignore[reportPrivateUsage]
    assert (described.extra_offsets, described.extra_slots) == (None, None)


def test_exchanged_kernels_are_called(tmp_path: Path) -> None:
    """As a profile exchanges them, to time each."""
    at_once, _, counted = of_models(tmp_path)
    assert isinstance(at_once, ModelDrafter)
    model = at_once.model
    assert isinstance(model, LlamaModel)
    model.kernels = replace(model.kernels)
    assert only(at_once, asked("model", at_once, 0, TEXT, Budget(2, num_nodes=5))).tokens
    assert (counted.asked, counted.made) == (1, 0)


def test_logits_that_are_no_numbers_are_told(tmp_path: Path) -> None:
    at_once, levels, counted = MAKERS["llama"](tmp_path)
    told = asked("llama", at_once, 0, TEXT, Budget(3, num_nodes=9))
    layers = torch.full((len(TEXT) - 1, 1, 64), torch.nan)
    bad = replace(told, hidden=HiddenStates(len(TEXT) - 1, lambda a, b: layers[a:b]))
    with pytest.raises(NumericsError, match="the heads gave logits"):
        only(at_once, bad)
    assert (counted.asked, counted.made) == (1, 0)
    check_alike(only(at_once, told), only(levels, told))


def test_models_without_a_native_pass_have_no_such_call() -> None:
    assert fused_model_drafts(ToyHybrid(vocab_size=VOCAB, seed=5), BRANCHING, batch_size=1) is None
    assert fused_head_drafts(None, torch.clone, BRANCHING, batch_size=1) is None
