"""A contestant's engine over a pair of costs, run over scripted texts.

Time begins when every sequence has its first token, so prompts are not in it, and ends with the
round in which the batch has emitted what was asked for; nobody's text is cut short, so no round is
smaller than K asks for. Then what still runs is cancelled.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.bench.gemm.pair import CostPair
from outrider.bench.gemm.plan import Contestant, Text
from outrider.core.budget import JobTrace, RoundTrace
from outrider.core.clock import HOST_CLOCK, Clock
from outrider.core.params import SamplingParams
from outrider.core.protocols import CausalLM
from outrider.estimate.theory import PRIOR_CURVE, MissCurve
from outrider.lab.bare_engine import BareEngine, BareModels, Twin
from outrider.lab.synthetic import Agreement, SyntheticLM, WordScript
from outrider.metrics.summary import percentile, token_latencies
from outrider.metrics.timeline import window_use


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
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
class Taken:
    """The numbers, and what each sequence wrote, the first tokens included."""

    numbers: Numbers
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

    def run(self, contestant: Contestant, *, repeat: int = 0) -> Taken:
        """One visit's turn. Raises what the engine raises, and CapacityError if a text ends before
        it is measured."""
        heard = _Heard()
        engine = BareEngine(
            self._models(contestant),
            contestant.config(threads=self.threads),
            on_round=heard.rounds.append,
            on_job=heard.jobs.append,
        )
        try:
            prompts = [
                self._prompt(repeat * contestant.batch + index) for index in range(contestant.batch)
            ]
            turn = _Turn(engine, heard, self.clock)
            return turn.measure(prompts, self._params(contestant), self.text.max_tokens)
        finally:
            engine.close()

    def _models(self, one: Contestant) -> BareModels:
        pair = self.pair
        target: CausalLM = pair.target
        draft: CausalLM | None = pair.draft if one.k else None
        said: SyntheticLM | None = None
        if self.scripted:
            agreement = Agreement(rates=self.rates or (one.alpha,), misses=self.misses)
            target = said = self._said(pair.target, None)
            draft = self._said(pair.draft, agreement) if one.k else None

        def twin() -> Twin | None:
            other = pair.target.twin()
            if other is None:
                return None
            return Twin(other if said is None else said.beside(other), other.kernels)

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

    def _params(self, one: Contestant) -> SamplingParams:
        limit = self.text.most_tokens(one.k) - self.text.prompt_tokens
        return SamplingParams(max_tokens=limit, seed=self.seed)

    def _prompt(self, index: int) -> list[int]:
        """Every sequence and repetition has a text of its own."""
        if self.prompts:
            return list(self.prompts[index % len(self.prompts)])
        size, rng = self.pair.target.spec.vocab_size, random.Random(f"{self.seed} {index}")
        return [rng.randrange(size) for _ in range(self.text.prompt_tokens)]


@dataclass(slots=True)
class _Heard:
    """What the engine told."""

    rounds: list[RoundTrace] = field(default_factory=list[RoundTrace])
    jobs: list[JobTrace] = field(default_factory=list[JobTrace])

    def clear(self) -> None:
        self.rounds.clear()
        self.jobs.clear()


@dataclass(slots=True)
class _Turn:
    """One batch from its first tokens on."""

    engine: BareEngine
    heard: _Heard
    clock: Clock
    _counts: dict[int, int] = field(default_factory=dict[int, int])
    _arrivals: dict[int, list[float]] = field(default_factory=dict[int, list[float]])

    def measure(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, max_tokens: int
    ) -> Taken:
        for prompt in prompts:
            self._counts[self.engine.submit(prompt, params)] = 0
        while min(self._counts.values()) == 0:
            self._step(0.0)
        self.heard.clear()
        self._arrivals.clear()
        ahead = self.engine.drafted_ahead
        first = sum(self._counts.values())
        wanted = first + max_tokens * len(prompts)
        began = self.clock()
        while sum(self._counts.values()) < wanted:
            self._step(began)
        seconds = self.clock() - began
        numbers = self._numbers(seconds, sum(self._counts.values()) - first, ahead)
        return Taken(numbers, tuple(self.engine.texts.values()))

    def _step(self, began: float) -> None:
        """One engine job."""
        emitted = self.engine.step()
        now = self.clock() - began
        for number, num_tokens in emitted.items():
            self._counts[number] += num_tokens
            self._arrivals.setdefault(number, []).extend([now] * num_tokens)

    def _numbers(self, seconds: float, num_tokens: int, before: tuple[int, int]) -> Numbers:
        rounds = [trace for trace in self.heard.rounds if trace.num_emitted]
        passes = list({trace.pass_index: trace for trace in rounds}.values())
        window = window_use(self.heard.jobs)
        nodes, prepared = (a - b for a, b in zip(self.engine.drafted_ahead, before, strict=True))
        gaps = [gap for times in self._arrivals.values() for gap in token_latencies(times)]
        return Numbers(
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
            num_ahead=nodes / prepared if prepared else None,
        )
