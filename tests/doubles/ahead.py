"""Rounds with a drafter that drafts ahead, one after another: draft, draft ahead, verify."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from doubles.rig import Request, first_maximum, live
from outrider.control.heuristics import FixedController
from outrider.core.draft import Budget, RoundTrace
from outrider.core.protocols import (
    AcceptanceRule,
    CausalLM,
    Controller,
    DraftAhead,
    Drafter,
)
from outrider.core.sampling import PLAIN, Sampling
from outrider.drafters.common.draft_model import ModelDrafter
from outrider.drafters.common.growth import ChangeProbs, DraftSampler
from outrider.engine.drafting import ahead_row
from outrider.engine.round import LiveSequence
from outrider.engine.stages import Stages
from outrider.plugins.lanes.ahead.choices import AheadChoices, capacity_needed
from outrider.plugins.lanes.ahead.drafter import AheadDrafter
from outrider.plugins.lanes.ahead.forecast import Kind, Policy
from outrider.verify.exact import BlockRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """How to draft ahead in a test."""

    k: int = 4
    batch: int = 3
    fan_out: int = 6
    policy: Policy = "top"
    fallback: Kind = "jit"
    force_hits: float = -1.0


def ahead_drafter(
    model: CausalLM,
    ways: Ways,
    *,
    argmax: Callable[[Tensor], list[int]] = first_maximum,
    sampling: Sampling = PLAIN,
    change: ChangeProbs | None = None,
) -> AheadDrafter:
    sampler = DraftSampler(argmax, "the draft model", sampling=sampling, change=change)
    jit = ModelDrafter(model, sampler, chunk=3)
    choices = AheadChoices(
        k=ways.k,
        fan_out=ways.fan_out,
        policy=ways.policy,
        fallback=ways.fallback,
        force_hits=ways.force_hits,
        max_ngram=2,
        min_ngram=1,
    )
    return AheadDrafter(jit, choices, capacity_needed(ways.k, ways.fan_out, ways.batch))


@dataclass(slots=True)
class AheadRig:
    """Runs requests to their ends in one batch. `ahead` says in which rounds, counted from 0, there
    is time to draft ahead; a drafter that cannot is asked in none."""

    target: CausalLM
    drafter: Drafter
    rule: AcceptanceRule = field(default_factory=BlockRule)
    k: int = 4
    controller: Controller | None = None
    argmax: Callable[[Tensor], list[int]] = first_maximum
    sampling: Sampling = PLAIN
    ahead: Callable[[int], bool] = lambda index: True
    traces: list[RoundTrace] = field(default_factory=list[RoundTrace])

    def run(self, requests: Sequence[Request]) -> list[list[int]]:
        """What each request got."""
        self.traces.clear()
        stages = Stages(
            target=self.target,
            drafter=self.drafter,
            rule=self.rule,
            controller=self.controller or FixedController(Budget(self.k)),
            argmax=self.argmax,
            sink=self.traces.append,
            sampling=self.sampling,
        )
        seqs = [live(seq_id, request) for seq_id, request in enumerate(requests)]
        for seq in seqs:
            self.target.state.open(seq.seq_id, seq.tokens[:-1])
            self.drafter.open(seq.seq_id, seq.tokens)
        index = 0
        while batch := [seq for seq in seqs if seq.finish is None]:
            stages.assign_budgets(batch)
            stages.draft(batch)
            if self.ahead(index):
                draft_ahead(self.drafter, batch)
            stages.verify(batch, [])
            index += 1
        for seq in seqs:
            self.target.state.close(seq.seq_id)
            self.drafter.close(seq.seq_id)
        return [seq.tokens[seq.prompt_length :] for seq in seqs]

    @property
    def hits(self) -> list[bool | None]:
        return [trace.hit for trace in self.traces]


def draft_ahead(drafter: Drafter | DraftAhead, batch: Sequence[LiveSequence]) -> None:
    if isinstance(drafter, AheadDrafter):
        drafter.propose_after([ahead_row(seq) for seq in batch])
