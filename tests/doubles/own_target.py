"""Models that draft in the memory of the target that they draft for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from doubles.rig import SAMPLER
from doubles.tiny_attention import TinyAttentionLM
from outrider.core.draft import Draft
from outrider.core.protocols import CacheStore, DraftNeeds, DraftRow, StepOutput, StepRow
from outrider.core.rng import DrawNode, pick_node
from outrider.core.spec import ModelSpec
from outrider.drafters.common.draft_model import SelfDrafter


def over(target: TinyAttentionLM, seed: int = 7) -> TinyAttentionLM:
    """Other weights over the arena of `target`: it reads keys that the target wrote."""
    other = TinyAttentionLM(vocab_size=target.spec.vocab_size, seed=seed, num_slots=4)
    other.state = target.state
    return other


def self_drafter(target: TinyAttentionLM, seed: int = 7, draw: DrawNode = pick_node) -> SelfDrafter:
    return SelfDrafter(over(target, seed), replace(SAMPLER, draw=draw), name="layer-skip")


@dataclass(slots=True)
class Poisoned:
    """A self-drafter after which every slot that holds no committed row is NaN."""

    target: TinyAttentionLM
    drafter: SelfDrafter
    name: str = "layer-skip"
    needs: DraftNeeds = field(default_factory=lambda: SelfDrafter.needs)

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        self.drafter.open(seq_id, prompt)

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        drafts = self.drafter.propose(rows)
        assert not any(self.target.state.num_staged(row.seq_id) for row in rows)
        self.target.poison_dead_space()
        return drafts

    def close(self, seq_id: int) -> None:
        self.drafter.close(seq_id)


@dataclass(slots=True)
class Breaking:
    """A model that raises at its `fatal`-th step, after it has staged what it was fed."""

    model: TinyAttentionLM
    fatal: int
    num_steps: int = 0

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    @property
    def state(self) -> CacheStore:
        return self.model.state

    def step(self, rows: Sequence[StepRow], needs: DraftNeeds) -> StepOutput:
        out = self.model.step(rows, needs)
        self.num_steps += 1
        if self.num_steps == self.fatal:
            raise RuntimeError("the copy broke")
        return out
