"""Engines over a pair of costs, run over scripted texts: what a contestant is, and its turn.

Time begins when every sequence has its first token, so prompts are not in it, and ends with the
round in which the batch has emitted what was asked for; nobody's text is cut short, so no round is
smaller than K asks for. Then what still runs is cancelled.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from cost_study.pair import CostPair
from outrider.core.clock import HOST_CLOCK, Clock
from outrider.core.config import EngineConfig
from outrider.core.draft import JobTrace, RoundTrace
from outrider.core.params import SamplingParams
from outrider.core.protocols import CausalLM
from outrider.kernels.operators import Kernels
from outrider.metrics import percentile, token_latencies
from outrider.models.decoder import ModelCapacity
from outrider.plugins.lanes.ahead.fan_out import PRIOR_CURVE, MissCurve
from outrider_lab.bench.cost_record import Method, Study
from outrider_lab.metrics.timeline import window_use
from outrider_lab.models.bare_engine import BareEngine, BareModels, bare_rooms
from outrider_lab.models.synthetic import Agreement, SyntheticLM, WordScript

PAGE_SIZE = 32
CHUNK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class CostEngine:
    """An engine at one setting, as in `Cell`. Plain decoding has a `k` of 0 and an `alpha` of 0."""

    method: Method
    study: Study = "alpha"
    k: int = 0
    alpha: float = 0.0
    p_hit: float | None = None
    fan_out: int = 0
    batch: int = 1

    @property
    def name(self) -> str:
        """What tells it from all others."""
        names = ("study", "method", "k", "alpha", "p_hit", "fan_out", "batch")
        return " ".join(f"{name}={getattr(self, name)}" for name in names)

    def config(self, *, threads: int = 0) -> EngineConfig:
        """Drafts of K tokens every round, whatever comes of them. Rounds run by stages, since the
        one call that runs a whole round knows no scripts."""
        return EngineConfig(
            drafter="model" if self.k else "none",
            k=self.k,
            schedule="ssd" if self.method == "ssd" else "single",
            batch_size=self.batch,
            fan_out=max(self.fan_out, 1),
            force_hits=-1.0 if self.p_hit is None else self.p_hit,
            # What is called SSD drafts ahead, whether that pays or not.
            hybrid_threshold=0,
            watchdog="off",
            fused_round=False,
            controller="fixed",
            prefill_chunk=CHUNK,
            page_size=PAGE_SIZE,
            threads=threads,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Every sequence begins with `prompt_tokens` and is measured while it emits `max_tokens` more,
    on the mean of its batch."""

    prompt_tokens: int = 16
    max_tokens: int = 96

    def most_tokens(self, k: int) -> int:
        """What a sequence may hold: one whose drafts are all kept is ahead of its batch."""
        return self.prompt_tokens + (k + 2) * self.max_tokens


def rooms(contestants: Sequence[CostEngine], text: Text) -> tuple[ModelCapacity, ModelCapacity]:
    """Of the target and of the draft model: room for any one of the contestants."""
    each = [bare_rooms(one.config(), text.most_tokens(one.k)) for one in contestants]

    def largest(some: Sequence[ModelCapacity]) -> ModelCapacity:
        return ModelCapacity(
            num_slots=max(one.num_slots for one in some),
            page_size=PAGE_SIZE,
            max_rows=max(one.max_rows for one in some),
            max_logits=max(one.max_logits for one in some),
        )

    return largest([target for target, _ in each]), largest([draft for _, draft in each])


@dataclass(frozen=True, slots=True, kw_only=True)
class CostNumbers:
    """What one contestant did in one visit. Seconds of drafting, verifying and accepting are sums
    over passes. `num_refused` rounds refused a token; of `num_looks` verdicts that were looked up
    `num_hits` counted as foreseen. `ahead_over_verify` is the mean over rounds, `num_ahead` the
    draft tokens made ahead in a round; both None where nothing was drafted ahead."""

    seconds: float
    num_tokens: int
    num_rounds: int
    num_passes: int
    num_drafted: int
    num_accepted: int
    num_refused: int
    num_hits: int
    num_looks: int
    draft_seconds: float
    verify_seconds: float
    accept_seconds: float
    token_ms_p95: float
    ahead_over_verify: float | None
    num_ahead: float | None


@dataclass(frozen=True, slots=True)
class CostRun:
    """The numbers, and what each sequence wrote, the first tokens included."""

    numbers: CostNumbers
    texts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bed:
    """Models and texts that all contestants share. `seed` chooses words, coins and prompts, unless
    there are `prompts`, which repetitions take in turns. `rates` by place take the place of a
    contestant's alpha. Without `scripted` the models say their own words."""

    pair: CostPair
    text: Text
    seed: int = 0
    misses: MissCurve = PRIOR_CURVE
    threads: int = 0
    clock: Clock = HOST_CLOCK
    prompts: Sequence[Sequence[int]] = ()
    rates: tuple[float, ...] = ()
    scripted: bool = True

    def run(self, contestant: CostEngine, *, repeat: int = 0) -> CostRun:
        """One visit's turn. Raises what the engine raises, and CapacityError if a text ends before
        it is measured."""
        turn = _Turn(self.clock)
        config = contestant.config(threads=self.threads)
        engine = BareEngine(
            self._models(contestant), config, on_round=turn.rounds.append, on_job=turn.jobs.append
        )
        try:
            batch = range(contestant.batch)
            prompts = [self._prompt(repeat * contestant.batch + index) for index in batch]
            limit = self.text.most_tokens(contestant.k) - self.text.prompt_tokens
            params = SamplingParams(max_tokens=limit, seed=self.seed)
            numbers = turn.measure(engine, prompts, params, self.text.max_tokens)
            return CostRun(numbers, tuple(engine.texts.values()))
        finally:
            engine.close()

    def _models(self, one: CostEngine) -> BareModels:
        pair = self.pair
        target: CausalLM = pair.target
        draft: CausalLM | None = pair.draft if one.k else None
        said: SyntheticLM | None = None
        if self.scripted:
            agreement = Agreement(rates=self.rates or (one.alpha,), misses=self.misses)
            target = said = self._said(pair.target, None)
            draft = self._said(pair.draft, agreement) if one.k else None

        def twin() -> tuple[CausalLM, Kernels] | None:
            other = pair.target.twin()
            if other is None:
                return None
            return (other if said is None else said.beside(other)), other.kernels

        return BareModels(
            target=target,
            draft=draft,
            kernels=pair.target.kernels,
            device=pair.device,
            twin=twin,
        )

    def _said(self, model: CausalLM, agreement: Agreement | None) -> SyntheticLM:
        script = WordScript(vocab_size=model.spec.vocab_size, seed=self.seed, agreement=agreement)
        return SyntheticLM(model, script, device=self.pair.device)

    def _prompt(self, index: int) -> list[int]:
        """Every sequence and repetition has a text of its own."""
        if self.prompts:
            return list(self.prompts[index % len(self.prompts)])
        size, rng = self.pair.target.spec.vocab_size, random.Random(f"{self.seed} {index}")
        return [rng.randrange(size) for _ in range(self.text.prompt_tokens)]


@dataclass(slots=True)
class _Turn:
    """One batch from its first tokens on; `rounds` and `jobs` are what the engine told."""

    clock: Clock
    rounds: list[RoundTrace] = field(default_factory=list[RoundTrace])
    jobs: list[JobTrace] = field(default_factory=list[JobTrace])
    _counts: dict[int, int] = field(default_factory=dict[int, int])
    _arrivals: dict[int, list[float]] = field(default_factory=dict[int, list[float]])

    def measure(
        self,
        engine: BareEngine,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        max_tokens: int,
    ) -> CostNumbers:
        for prompt in prompts:
            self._counts[engine.submit(prompt, params)] = 0
        while min(self._counts.values()) == 0:
            self._step(engine, 0.0)
        for heard in (self.rounds, self.jobs, self._arrivals):
            heard.clear()
        before, first = engine.drafted_ahead, sum(self._counts.values())
        wanted = first + max_tokens * len(prompts)
        began = self.clock()
        while sum(self._counts.values()) < wanted:
            self._step(engine, began)
        seconds = self.clock() - began
        nodes, prepared = (a - b for a, b in zip(engine.drafted_ahead, before, strict=True))
        num_ahead = nodes / prepared if prepared else None
        return self._numbers(seconds, sum(self._counts.values()) - first, num_ahead)

    def _step(self, engine: BareEngine, began: float) -> None:
        """One engine job."""
        emitted = engine.step()
        now = self.clock() - began
        for number, num_tokens in emitted.items():
            self._counts[number] += num_tokens
            self._arrivals.setdefault(number, []).extend([now] * num_tokens)

    def _numbers(self, seconds: float, num_tokens: int, num_ahead: float | None) -> CostNumbers:
        rounds = [trace for trace in self.rounds if trace.num_emitted]
        passes = list({trace.pass_index: trace for trace in rounds}.values())
        window = window_use(self.jobs)
        gaps = [gap for times in self._arrivals.values() for gap in token_latencies(times)]
        return CostNumbers(
            seconds=seconds,
            num_tokens=num_tokens,
            num_rounds=len(rounds),
            num_passes=len(passes),
            num_drafted=sum(trace.num_drafted for trace in rounds),
            num_accepted=sum(trace.num_accepted for trace in rounds),
            num_refused=sum(trace.num_accepted < trace.num_drafted for trace in rounds),
            num_hits=sum(bool(trace.hit) for trace in rounds),
            num_looks=sum(trace.hit is not None for trace in rounds),
            draft_seconds=sum(trace.draft_seconds for trace in passes),
            verify_seconds=sum(trace.verify_seconds for trace in passes),
            accept_seconds=sum(trace.accept_seconds for trace in passes),
            token_ms_p95=1e3 * percentile(gaps, 95),
            ahead_over_verify=window.mean_ratio if window else None,
            num_ahead=num_ahead,
        )
