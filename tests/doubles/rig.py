"""The shipped engine around any models and drafter, run to its end on token lists."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

import pytest
from torch import Tensor

from doubles.drafters import RowDrafter
from outrider.control.heuristics import FixedController
from outrider.core.draft import Budget, Outcome, RoundTrace
from outrider.core.logits import LogitsProcessor
from outrider.core.params import RequestSpeculation, SamplingParams
from outrider.core.protocols import AcceptanceRule, CausalLM, Controller, Drafter
from outrider.core.rng import DrawNode, Pick, Rng, pick_node
from outrider.drafters.common.draft_model import ModelDrafter
from outrider.drafters.common.growth import DraftSampler
from outrider.drafters.none import NoDrafter
from outrider.engine.drafting import DrafterHandle
from outrider.engine.engine import Engine
from outrider.engine.lanes import InlineLanes, LaneRunner
from outrider.engine.requests import Counts, RequestTable
from outrider.engine.round import LiveSequence, Round, StopMatch
from outrider.engine.stages import Stages
from outrider.plugins.compaction import Compaction
from outrider.sched.jobs import Ledger, Limits, Schedule, SingleLane
from outrider.verify.exact import BlockRule

MANY = 2000


def first_maximum(logits_MV: Tensor) -> list[int]:
    return [int(token) for token in logits_MV.argmax(-1)]


SAMPLER = DraftSampler(first_maximum, "the draft model")
BRANCHING = replace(SAMPLER, branches=True)


def model_drafter(model: CausalLM, chunk: int = 256, draw: DrawNode = pick_node) -> ModelDrafter:
    return ModelDrafter(model, replace(SAMPLER, draw=draw), chunk=chunk)


@dataclass(frozen=True, slots=True)
class Request:
    prompt: Sequence[int]
    params: SamplingParams
    stop_ids: frozenset[int] = frozenset()
    match: StopMatch | None = None
    sample: int = 0
    shaper: LogitsProcessor | None = None


def live(seq_id: int, request: Request) -> LiveSequence:
    return LiveSequence(
        seq_id=seq_id,
        tokens=list(request.prompt),
        prompt_length=len(request.prompt),
        params=request.params,
        limit=request.params.max_tokens,
        stop_ids=request.stop_ids,
        match=request.match,
        shaper=request.shaper,
        sample=request.sample,
        speculation=RequestSpeculation(sampler=request.params.sampler or ""),
    )


@dataclass(slots=True)
class Rig:
    """Wires an engine and runs requests through it; `traces` and `jobs` record what it did.

    An `honest` drafter keeps to its contract: then no request may have lost its drafts at the end,
    for an engine would go on without them, whatever its drafter did wrong. Without a `schedule` the
    engine has one lane. `counts` are those of the last run, after each of whose steps a target that
    `is_watched` checks its pages.
    """

    target: CausalLM
    drafter: Drafter = field(default_factory=NoDrafter)
    rule: AcceptanceRule = field(default_factory=BlockRule)
    k: int = 4
    chunk: int = 256
    batch_size: int = 8
    page_size: int = 4
    spare: int = 8
    reserve: float = 1.0
    controller: Controller | None = None
    compaction: Compaction | None = None
    schedule: Schedule | None = None
    honest: bool = True
    is_watched: bool = False
    counts: Counts = field(default_factory=Counts)
    traces: list[RoundTrace] = field(default_factory=list[RoundTrace])
    jobs: list[list[Outcome]] = field(default_factory=list[list[Outcome]])
    sequences: list[LiveSequence] = field(default_factory=list[LiveSequence])

    def stages(self) -> Stages:
        return Stages(
            target=self.target,
            drafter=self.drafter,
            rule=self.rule,
            controller=self.controller or FixedController(self._budget()),
            argmax=first_maximum,
            sink=self.traces.append,
            compaction=self.compaction,
        )

    def _budget(self) -> Budget:
        """Chains, but for a double that makes trees."""
        drafter = self.drafter
        return Budget(self.k, num_nodes=drafter.num_nodes if isinstance(drafter, RowDrafter) else 0)

    def engine(self) -> Engine:
        schedule = self.schedule or SingleLane(self.chunk)
        limits = Limits(
            self.batch_size,
            self.target.state.num_free_tokens,
            page_size=self.page_size,
            spare=self.spare,
            reserve=self.reserve,
        )
        runner = LaneRunner(self.stages(), self.stages())
        residents = RequestTable(
            self.target,
            DrafterHandle(self.drafter),
            Ledger(),
            limits,
            compaction=self.compaction,
        )
        return Engine(
            residents=residents,
            executor=InlineLanes(dict.fromkeys(schedule.lanes, runner)),
            schedule=schedule,
        )

    def live(self, seq_id: int, request: Request) -> LiveSequence:
        return live(seq_id, request)

    def run(self, requests: Sequence[Request]) -> list[list[int]]:
        """What each request got. Every memory must be empty again at the end."""
        free = self.target.state.num_free_tokens
        engine = self.engine()
        self.traces.clear()
        self.jobs.clear()
        self.sequences = [self.live(seq_id, request) for seq_id, request in enumerate(requests)]
        for seq in self.sequences:
            engine.submit(seq)
        while engine.has_work:
            self.jobs.append(engine.step())
            assert len(self.jobs) < MANY, "the engine does not come to an end"
            if self.is_watched:
                self.target.state.check()  # pyright: ignore
        self.counts = engine.residents.counts
        assert self.target.state.num_free_tokens == free
        assert not self.honest or not any(seq.no_drafts for seq in self.sequences)
        return [seq.tokens[seq.prompt_length :] for seq in self.sequences]

    def alone(self, request: Request) -> LiveSequence:
        """Runs one request without the engine, and checks its memory after every round.

        At the end of a round the target holds all but the pending token, and nothing is staged.
        Memory stays open for a look at it; `end` closes it.
        """
        stages, state = self.stages(), self.target.state
        self.traces.clear()
        self.jobs.clear()
        seq = self.live(0, request)
        state.open(0, seq.tokens[:-1])
        self.drafter.open(0, seq.tokens)
        while seq.finish is None:
            assert seq.num_remaining > 0, "the text does not come to an end"
            self.jobs.append(stages.run([seq], []))
            assert state.length(0) == len(seq.tokens) - 1
            assert state.num_staged(0) == 0
        return seq

    def end(self) -> None:
        self.target.state.close(0)
        self.drafter.close(0)

    def outputs(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[int]]:
        return self.run([Request(prompt, params) for prompt in prompts])


def round_of(engine: Engine) -> Round:
    """What its one lane runs."""
    assert isinstance(engine.executor, InlineLanes)
    return engine.executor.round


def exchange_round(engine: Engine, other: Round) -> None:
    """Have its one lane run `other`."""
    assert isinstance(engine.executor, InlineLanes)
    engine.executor.exchange(other)


class Rounds(Protocol):
    """Random numbers of many rounds; `at` says where the next one starts."""

    def at(self, start: int) -> Rng: ...


@contextmanager
def walking(rng: Rounds) -> Generator[None]:
    """Sequences draw from `rng`, under the keys that they choose themselves."""

    def keyed(seed: int, sample: int, start: int, choose: Pick) -> Rng:
        del seed, sample, choose
        return rng.at(start)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outrider.engine.round.KeyedRng", keyed)
        yield
