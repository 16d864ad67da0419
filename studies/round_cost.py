"""What a round costs outside its passes: drafting, accepting, and all the rest.

Shapes:  K = drafted tokens, W = K + 1, V = vocabulary.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from time import perf_counter
from typing import Any

from common import (
    DRAFT,
    Report,
    bare_pass,
    fill,
    first_prompts,
    kernel_names,
    medians,
    note,
    study,
    take_turns,
)
from options import Options

from outrider import LLM, EngineConfig, SamplingParams
from outrider.api.tokenizer import Tokenizer
from outrider.core.draft import Budget
from outrider.core.protocols import Drafter, DraftRow
from outrider.core.rng import KeyedRng
from outrider.drafters.common.draft_model import ModelDrafter
from outrider.drafters.common.growth import DraftSampler
from outrider.drafters.ngram import NgramDrafter
from outrider.engine.engine import Engine
from outrider.kernels.native.rounds import Decided, NativeRounds
from outrider.models.decoder import LoadOptions, ModelCapacity
from outrider.models.llama import LlamaModel
from outrider.models.loading import load_model, resolve
from outrider_lab.bench.workload import load_prompts

KS, CONTEXT, BARE_SEQ = (1, 2, 4, 8), 256, -1
OVERHEAD_CELLS = (("none", 0), ("ngram", 4), ("ngram", 8), ("model", 4), ("model", 8))


@study()
def drafter_cost(options: Options, report: Report) -> None:
    """What drafting alone costs for each K: the other half of every prediction of a speed-up.

    `propose` is a drafter's answer as the stages ask for it: it reads what the last round emitted
    and drafts K tokens. Rounds keep 0 to K of them in turn, so that the text grows as it does in a
    run. `bare` are the passes alone that a model drafter cannot do without: one over two rows,
    which reads the last tokens, and K - 1 over one row, as native calls. The drafters are the
    embedded draft model and the n-gram drafter, greedy, at context 256. All of them take turns.
    """
    capacity = ModelCapacity(num_slots=16 * 1024, max_logits=8)
    model = load_model(resolve(DRAFT), LoadOptions(capacity=capacity, device="cpu"))
    assert isinstance(model, LlamaModel)
    text = text_of_length(Tokenizer.load(resolve(DRAFT)), CONTEXT)
    growing: dict[tuple[str, int], Growing] = {}
    for k in KS:
        drafter = ModelDrafter(
            model, DraftSampler(model.kernels.argmax, "the draft model"), chunk=256
        )
        growing["model", k] = Growing(drafter, text, k, seq_id=k)
    for k in KS:
        growing["ngram", k] = Growing(NgramDrafter(), text, k, seq_id=k)
    calls = {key: one.propose for key, one in growing.items()}
    bare = {("bare", k): call for k, call in bare_drafts(model, len(text)).items()}
    found = medians(take_turns({**calls, **bare}, 5 if options.quick else 60))
    report |= {"context": CONTEXT, "kernels": kernel_names(model.kernels)}
    for (name, k), one in growing.items():
        cell: dict[str, Any] = {"drafter": name, "k": k}
        # Rounds of its own count: a turn also grows the text.
        cell["propose_us"] = round(1e6 * statistics.median(one.seconds), 1)
        if name == "model":
            cell["bare_us"] = round(1e6 * found["bare", k], 1)
        note(report, **cell)


def text_of_length(tokenizer: Tokenizer, num_tokens: int) -> list[int]:
    """The beginning of prompts, one after the other."""
    ids: list[int] = []
    for prompt in load_prompts("humaneval"):
        ids += tokenizer.encode(prompt)
        if len(ids) >= num_tokens:
            break
    return ids[:num_tokens]


def bare_drafts(model: LlamaModel, context: int) -> dict[int, Callable[[], object]]:
    """By K, the passes of a draft and their choices, on a sequence of their own."""
    fill(model, BARE_SEQ, context)
    two, one = (bare_pass(model, BARE_SEQ, rows) for rows in (2, 1))

    def drafted(k: int) -> None:
        two()
        for _ in range(k - 1):
            one()

    return {k: partial(drafted, k) for k in KS}


class Growing:
    """A text that grows by what is kept of each draft and one more token."""

    def __init__(self, drafter: Drafter, text: Sequence[int], k: int, *, seq_id: int) -> None:
        self.seconds: list[float] = []
        self._drafter, self._tokens = drafter, list(text)
        self._k, self._seq_id, self._round = k, seq_id, 0
        drafter.open(seq_id, text)

    def propose(self) -> None:
        row = DraftRow(
            seq_id=self._seq_id,
            tokens=self._tokens,
            last=None,
            budget=Budget(self._k),
            params=SamplingParams(),
            rng=KeyedRng(0, 0, len(self._tokens)),
        )
        started = perf_counter()
        (draft,) = self._drafter.propose([row])
        if self._round:
            self.seconds.append(perf_counter() - started)
        kept = self._round % (self._k + 1)
        self._tokens += [*draft.tokens[:kept], self._tokens[self._round]]
        self._round += 1


@study(prompts=6, max_tokens=128, dtype="float32")
def overhead(options: Options, report: Report) -> None:
    """How much of a round is spent outside the models: packing, sampling, rules, commits, text.

    Every engine step and every model step within it are timed from inside a normal run; what an
    engine step takes beyond its model steps is overhead. A whole round in one native call says
    itself how long its passes took, its verdicts left out. Greedy and sampled, batch 1 and 8, so
    many prompts of each workload.
    """
    grid = list(product((0.0, 0.8), (1, 8), OVERHEAD_CELLS))
    if options.quick:
        options.prompts, options.max_tokens, grid = 1, 8, grid[-2:]
    prompts = first_prompts(options.prompts)
    for temperature, batch_size, (drafter, k) in grid:
        config = EngineConfig(drafter=drafter, k=k, batch_size=batch_size, dtype=options.dtype)
        params = SamplingParams(max_tokens=options.max_tokens, temperature=temperature)
        note(report, **_overhead_cell(config, params, prompts))


def _overhead_cell(
    config: EngineConfig, params: SamplingParams, prompts: list[str]
) -> dict[str, Any]:
    """The share of the wall clock outside model steps, and microseconds of it a round."""
    llm = LLM(config=config)
    with StepClock(Engine) as rounds, StepClock(LlamaModel) as models, _fused(models):
        llm.generate(prompts[: config.batch_size], params)
        rounds.seconds = models.seconds = 0.0
        rounds.calls = 0
        started = perf_counter()
        results = llm.generate(prompts, params)
        total = perf_counter() - started
    outside = rounds.seconds - models.seconds
    return {
        "drafter": config.drafter,
        "k": llm.k,
        "batch_size": config.batch_size,
        "temperature": params.temperature,
        "dtype": config.dtype,
        "share_outside": round(outside / rounds.seconds, 4),
        "outside_us_per_round": round(outside / rounds.calls * 1e6, 1),
        "round_us": round(rounds.seconds / rounds.calls * 1e6, 1),
        "tokens_per_second": round(sum(len(r.token_ids) for r in results) / total, 1),
    }


@contextmanager
def _fused(models: StepClock) -> Generator[None]:
    """While entered, adds the passes of whole rounds in one call to `models`."""
    owner: Any = NativeRounds
    inner: Any = owner.__call__

    def timed(*args: Any) -> Decided | None:
        decided: Decided | None = inner(*args)
        if decided is not None:
            models.seconds += decided.draft_seconds + decided.verify_seconds
        return decided

    owner.__call__ = timed
    try:
        yield
    finally:
        owner.__call__ = inner


class StepClock:
    """While entered, adds up the calls of `owner.step` and the seconds spent in them."""

    def __init__(self, owner: type[LlamaModel] | type[Engine]) -> None:
        self.seconds = 0.0
        self.calls = 0
        self._owner: Any = owner
        self._step: Any = owner.step

    def __enter__(self) -> StepClock:
        clock, inner = self, self._step

        def timed(*args: Any) -> Any:
            started = perf_counter()
            try:
                return inner(*args)
            finally:
                clock.seconds += perf_counter() - started
                clock.calls += 1

        self._owner.step = timed
        return self

    def __exit__(self, *_: object) -> None:
        self._owner.step = self._step
