"""Drafters of trees keep the target's distribution: whole generations, enumerated, and greedy
texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest

from checks.engine import PROMPT, check_greedy
from checks.engine_distribution import (
    FILTERS,
    LENGTH,
    VOCAB,
    check_engine_distribution,
    engine_distribution,
)
from doubles.native_draws import EveryDraft
from doubles.rig import BRANCHING, SAMPLER, Rig
from doubles.tiny_checkpoints import Variant, random_llama
from doubles.toy_heads import ToyBlock, ToyHeads, WithHidden
from doubles.toy_hybrid import ToyHybrid
from outrider.control.heuristics import FixedController
from outrider.core.draft import Budget
from outrider.core.params import SamplingParams
from outrider.core.protocols import AcceptanceRule, Drafter
from outrider.core.rng import race_node
from outrider.drafters.common.draft_model import ModelDrafter
from outrider.drafters.common.growth import FusedDraft, FusedDrafts, TextPart
from outrider.drafters.common.native import fused_model_drafts
from outrider.plugins.heads.medusa import MedusaDrafter, ParallelHeadSampler
from outrider.verify.exact import BlockRule, CoupledRule, MatchRule, TokenRule
from outrider_lab.models.block_net import BlockDrafter


def medusa(vocab_size: int = VOCAB) -> Drafter:
    heads = ToyHeads(num_heads=2, vocab_size=vocab_size)
    return MedusaDrafter(heads, ParallelHeadSampler(SAMPLER))


def block(vocab_size: int = VOCAB) -> Drafter:
    net = ToyBlock(num_places=2, vocab_size=vocab_size)
    return BlockDrafter(net, ParallelHeadSampler(SAMPLER), least=0.2)


def model(vocab_size: int = VOCAB) -> Drafter:
    draft = ToyHybrid(vocab_size=vocab_size, seed=7, num_slots=2048)
    return ModelDrafter(draft, BRANCHING, chunk=2)


def native_model(vocab_size: int) -> EveryDraft:
    """A draft model whose trees are one native call each."""
    changes = {"vocab_size": vocab_size, "bos_token_id": 1, "eos_token_id": 2}
    # Of these weights the target likes two tokens more than the draft does, so what a younger
    # sibling is said to be drawn from matters.
    draft = random_llama(Variant("few ids", changes), seed=5)
    sampling = draft.kernels.sampling
    sampler = replace(BRANCHING, sampling=sampling)
    fused = fused_model_drafts(draft, sampler, batch_size=1)
    if fused is None:
        pytest.skip("no compiler, no native kernels")
    drafter = ModelDrafter(draft, sampler, chunk=2, fused=AtOnce(fused))
    return EveryDraft(drafter, sampling.pick)


@dataclass(frozen=True, slots=True)
class AtOnce:
    """No draft grows by levels."""

    inner: FusedDrafts

    def try_rows(self, parts: Sequence[TextPart]) -> Sequence[FusedDraft]:
        drafts = self.inner.try_rows(parts)
        assert drafts is not None
        return drafts


# Float32 is summed by the native call.
ROUNDED = 1e-6


# Each rule, depth and filter once: other trees have the rest of the product below.
@pytest.mark.covering(1)
@pytest.mark.slow
@pytest.mark.parametrize("params", FILTERS, ids=["temperature", "top-k", "top-p", "min-p"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("rule", [TokenRule(), BlockRule(), MatchRule()], ids=lambda r: r.name)
def test_trees_of_one_call(params: SamplingParams, depth: int, rule: AcceptanceRule) -> None:
    run = rig(native_model(VOCAB), Budget(depth, num_nodes=3), rule)
    check_engine_distribution(run, ToyHybrid, params, ROUNDED)


def racing() -> Drafter:
    """For the coupled rule alone."""
    heads = ToyHeads(num_heads=2, vocab_size=VOCAB)
    return MedusaDrafter(heads, ParallelHeadSampler(replace(SAMPLER, draw=race_node)))


DRAFTERS: dict[str, Callable[..., Drafter]] = {"medusa": medusa, "block": block, "model": model}
every_drafter = pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS.keys())


def rig(drafter: Drafter, budget: Budget, rule: AcceptanceRule | None = None) -> Rig:
    target = WithHidden(ToyHybrid(vocab_size=VOCAB, seed=0))
    controller = FixedController(budget)
    return Rig(target, drafter, rule or BlockRule(), k=budget.depth, controller=controller, chunk=3)


@pytest.mark.covering(1)
@pytest.mark.parametrize("make", [medusa, block])
@pytest.mark.parametrize("params", FILTERS[:3], ids=["temperature", "top-k", "top-p"])
def test_chains(make: Callable[..., Drafter], params: SamplingParams) -> None:
    check_engine_distribution(rig(make(), Budget(2)), ToyHybrid, params)


@every_drafter
@pytest.mark.parametrize("rule", [BlockRule(), MatchRule()], ids=lambda rule: rule.name)
def test_trees(make: Callable[..., Drafter], rule: AcceptanceRule) -> None:
    check_engine_distribution(rig(make(), Budget(2, num_nodes=3), rule), ToyHybrid, FILTERS[1])


# Filters come before drafters; each drafter and each filter has its distribution. Other
# combinations are `deep`.
@pytest.mark.covering(1)
@pytest.mark.slow
@every_drafter
@pytest.mark.parametrize("params", FILTERS, ids=["temperature", "top-k", "top-p", "min-p"])
def test_trees_under_other_filters(make: Callable[..., Drafter], params: SamplingParams) -> None:
    check_engine_distribution(rig(make(), Budget(2, num_nodes=3), TokenRule()), ToyHybrid, params)


def test_races_in_trees() -> None:
    check_engine_distribution(
        rig(racing(), Budget(2, num_nodes=3), CoupledRule()), ToyHybrid, FILTERS[1]
    )


def test_the_walk_is_not_empty() -> None:
    """Drafts are accepted and refused in it, at both depths."""
    params = SamplingParams(temperature=2.0, max_tokens=LENGTH)
    run = rig(medusa(), Budget(2, num_nodes=3))
    found = engine_distribution(run, (0, 1), params)
    assert sum(found.values()) == pytest.approx(1)
    assert len(found) == VOCAB**LENGTH


@pytest.mark.covering(1)
@every_drafter
@pytest.mark.parametrize("num_nodes", [0, 6, 20])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_greedy_texts_are_plain_decoding_s(
    make: Callable[..., Drafter], num_nodes: int, batch_size: int
) -> None:
    budget = Budget(3, num_nodes=num_nodes)
    run = Rig(
        WithHidden(ToyHybrid(vocab_size=5)),
        make(5),
        controller=FixedController(budget),
        k=3,
        chunk=3,
        batch_size=batch_size,
        spare=24,
    )
    check_greedy(run, ToyHybrid, [PROMPT, (4,), (0, 0, 0, 0)], 11)
    if num_nodes:
        assert any(trace.num_accepted for trace in run.traces)
