"""Portfolios of look-ups, models and heads whose drafts are merged, around toy models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from checks.distribution import assert_same_distribution
from checks.engine_distribution import LENGTH, PROMPT, VOCAB, target_distribution
from doubles.every_branch import EveryBranch, Tokens, distribution
from doubles.in_turn import InTurn
from doubles.racing import Racing
from doubles.rig import SAMPLER, Request, Rig, model_drafter, walking
from doubles.toy_heads import LAYER, ToyHeads, WithHidden
from doubles.toy_hybrid import ToyHybrid
from outrider.control.heuristics import FixedController
from outrider.core.draft import Budget
from outrider.core.params import SamplingParams
from outrider.core.protocols import AcceptanceRule, Drafter, DraftNeeds, DraftRow
from outrider.drafters.common.context import NO_OFFER, LayersDrafter, ScoredDraft
from outrider.drafters.portfolio import PortfolioDrafter
from outrider.plugins.heads.medusa import MedusaDrafter, ParallelHeadSampler
from outrider.verify.exact import TokenRule

LOOKUPS = ("next", "same")
MODELS = ("model", "heads", "second")
# Two kinds of heads, by the layer that they read.
HEADS = {"heads": LAYER, "others": 3}
SAMPLED = SamplingParams(temperature=1.3, max_tokens=LENGTH)


@dataclass(slots=True)
class Stepping:
    """Goes on from the last token in steps, after texts of some lengths alone."""

    name: str
    step: int
    vocab_size: int
    every: int
    needs: DraftNeeds = field(default_factory=DraftNeeds)

    def open(self, seq_id: int, prompt: Sequence[int]) -> None: ...

    def offers(self, rows: Sequence[DraftRow]) -> list[ScoredDraft]:
        return [self._offer(one.tokens, one.budget.depth) for one in rows]

    def _offer(self, text: Sequence[int], depth: int) -> ScoredDraft:
        if not depth or len(text) % self.every:
            return NO_OFFER
        tokens = [(text[-1] + (i + 1) * self.step) % self.vocab_size for i in range(depth)]
        return ScoredDraft(tuple(tokens), tuple(0.5 * 0.8**i for i in range(depth)))

    def close(self, seq_id: int) -> None: ...


def merged_portfolio(names: Sequence[str], vocab_size: int, *, every: int = 2) -> Drafter:
    """The members called `names`; those that cost time lead in turn."""
    lookups = {
        "next": Stepping("next", 1, vocab_size, every),
        "same": Stepping("same", 0, vocab_size, every + 1),
    }
    models: dict[str, Drafter] = {}
    for seed, name in enumerate(("model", "second"), start=7):
        if name in names:
            models[name] = model_drafter(ToyHybrid(vocab_size=vocab_size, seed=seed), chunk=2)
            models[name].name = name  # pyright: ignore[reportAttributeAccessIssue]
    for seed, name in enumerate(HEADS, start=7):
        if name in names:
            heads = ToyHeads(vocab_size=vocab_size, seed=seed, layer=HEADS[name])
            drafter = MedusaDrafter(heads, ParallelHeadSampler(SAMPLER), name=name)
            stored = layers_of(names)
            models[name] = drafter if len(stored) == 1 else LayersDrafter(drafter, stored)
    chosen = [name for name in names if name in models]
    return PortfolioDrafter(
        [lookups[name] for name in names if name in lookups],
        *(models[name] for name in chosen),
        leads=InTurn(chosen, k=8) if chosen else None,
    )


def layers_of(names: Sequence[str]) -> tuple[int, ...]:
    """The layers that the target stores for these members."""
    return tuple(layer for name, layer in HEADS.items() if name in names)


def merged_rig(
    names: Sequence[str],
    rule: AcceptanceRule,
    *,
    vocab_size: int = VOCAB,
    depth: int = 2,
    num_nodes: int = 4,
) -> Rig:
    return Rig(
        WithHidden(ToyHybrid(vocab_size=vocab_size, seed=0), layers_of(names)),
        merged_portfolio(names, vocab_size),
        rule,
        k=depth,
        chunk=3,
        spare=16,
        controller=FixedController(Budget(depth, num_nodes=num_nodes)),
    )


def check_merged_distribution(
    names: Sequence[str], rule: AcceptanceRule, num_nodes: int = 4
) -> None:
    """Whole generations, enumerated; each begins with members that have learnt nothing."""

    def generation(rng: EveryBranch) -> Tokens:
        with walking(Racing(rng)):
            rig = merged_rig(names, rule, num_nodes=num_nodes)
            return tuple(rig.run([Request(PROMPT, SAMPLED)])[0])

    wanted = target_distribution(ToyHybrid, PROMPT, SAMPLED, VOCAB)
    assert_same_distribution(distribution(generation), wanted)


def check_members_are_chosen_before_they_draw() -> None:
    """Look-ups and a model that draws: either drafts, whatever the model draws."""
    check_merged_distribution(("next", "model"), TokenRule())
