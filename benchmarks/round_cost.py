"""What a round costs outside its passes: drafting, accepting, and all the rest.

Shapes:  K = drafted tokens, W = K + 1, V = vocabulary.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count, product
from time import perf_counter
from typing import Any

import torch
from common import (
    DRAFT,
    Report,
    bare_pass,
    fill,
    first_prompts,
    in_turns,
    kernel_names,
    medians,
    note,
    study,
    take_turns,
)
from torch import Tensor

from outrider import LLM, EngineConfig, SamplingParams
from outrider.api.tokenizer import Tokenizer
from outrider.bench.workload import load_prompts
from outrider.core.budget import Budget
from outrider.core.draft import Draft
from outrider.core.protocols import Drafter, DraftRow
from outrider.core.rng import KeyedRng, pick_node
from outrider.core.sampling import PLAIN, Sampling, empty_probs, processed_probs
from outrider.core.sequence import LiveSequence
from outrider.drafters.growth import DraftSampler
from outrider.drafters.model import ModelDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.engine.engine import Engine
from outrider.engine.stages import read_pass
from outrider.kernels.native.cpu import num_physical_cores
from outrider.kernels.native.rounds import Decided, NativeRounds
from outrider.kernels.registry import Kernels, choose
from outrider.models.decoder import Room
from outrider.models.llama import LlamaModel
from outrider.models.loading import LoadOptions, load_model, resolve
from outrider.verify.rules import rule_for

VOCABULARIES, LENGTHS = (8192, 32_768, 131_072), (1, 4, 8)
TEMPERATURE = 0.8
PROMPT = [1, 2, 3]
# PyTorch's threads keep their cores busy for so long after a call that they shared.
SETTLE_SECONDS = 0.005
KS, CONTEXT, BARE_SEQ = (1, 2, 4, 8), 256, -1
OVERHEAD_CELLS = (("none", 0), ("ngram", 4), ("ngram", 8), ("model", 4), ("model", 8))


@dataclass(frozen=True, slots=True)
class Chain:
    """A drafted chain and the logits of the pass that verifies it."""

    draft: Draft
    logits_WV: Tensor
    params: SamplingParams


@study(repeats=30, threads=0)
def accept_cost(options: Namespace, report: Report) -> None:
    """What a round spends between logits and verdict: native kernels against the PyTorch reference.

    An accept step is what the engine does after a target pass: distributions of K + 1 rows of
    logits (`read_pass`), the block rule over a chain that a drafter drew, and the target's own
    token. A draft step is one distribution and one draw of a drafter. Logits are normal with a
    spread of 3, the drafter's are the target's with noise added, and temperature is 0.8. Both sides
    run in turn on the same numbers; the figures are medians, with the fastest tenth beside them,
    for on a busy machine that is nearer to the cost. --threads 0 takes the physical cores.
    """
    repeats, grid = options.repeats, list(product(VOCABULARIES, LENGTHS))
    if options.quick:
        repeats, grid = 2, grid[:2]
    threads = options.threads or num_physical_cores()
    torch.set_num_threads(threads)
    kernels = choose(device=torch.device("cpu"), dtype=torch.float32, threads=threads)
    report |= {
        "kernels": kernels.choices[-1].name,
        "threads": threads,
        "temperature": TEMPERATURE,
        "repeats": repeats,
    }
    for size, k in grid:
        note(report, **_accept_cell(kernels, size, k, repeats))


def _accept_cell(kernels: Kernels, vocab_size: int, k: int, repeats: int) -> dict[str, Any]:
    """Microseconds of both sides, and reference / native of the medians."""

    def turns(side: Sampling) -> Callable[[], tuple[float, float, int]]:
        seeds = count()

        def turn() -> tuple[float, float, int]:
            chain = _drawn_chain(vocab_size, k, seed=next(seeds))
            seconds, num_accepted = _accept_seconds(chain, side, kernels)
            return seconds, _draft_seconds(chain, side, kernels), num_accepted

        return turn

    sides = {"native": kernels.sampling, "reference": PLAIN}
    found = in_turns({name: turns(side) for name, side in sides.items()}, repeats, warm_ups=2)
    cell: dict[str, Any] = {"vocab_size": vocab_size, "k": k}
    for index, part in enumerate(("accept", "draft")):
        for side, turn in found.items():
            times = sorted(one[index] for one in turn)
            middle, fast = statistics.median(times), times[len(times) // 10]
            cell[f"{part}_{side}_us"] = round(middle * 1e6, 1)
            cell[f"{part}_{side}_fast_us"] = round(fast * 1e6, 1)
        cell[f"{part}_ratio"] = round(cell[f"{part}_reference_us"] / cell[f"{part}_native_us"], 2)
    cell["accepted_per_round"] = {
        side: sum(one[2] for one in turn) / repeats for side, turn in found.items()
    }
    return cell


def _drawn_chain(vocab_size: int, k: int, seed: int) -> Chain:
    generator = torch.Generator().manual_seed(seed)
    logits_WV = 3 * torch.randn(k + 1, vocab_size, generator=generator)
    near_KV = logits_WV[:k] + 0.5 * torch.randn(k, vocab_size, generator=generator)
    params = SamplingParams(temperature=TEMPERATURE, seed=seed)
    q_KV = processed_probs(near_KV, params)
    rng = KeyedRng(seed, 0, len(PROMPT))
    tokens = [pick_node(q_KV[node], rng, node, node) for node in range(k)]
    return Chain(Draft.chain(tokens, q_KV), logits_WV, params)


def _accept_seconds(chain: Chain, side: Sampling, kernels: Kernels) -> tuple[float, int]:
    """From logits to the verdict, and how many tokens were accepted."""
    rule = rule_for("block", sampling=side)
    seq = LiveSequence(
        seq_id=0,
        tokens=list(PROMPT),
        prompt_length=len(PROMPT),
        params=chain.params,
        limit=100,
        pick=side.pick,
        draft=chain.draft,
    )
    logits_WV = chain.logits_WV.clone()
    _settle(kernels, logits_WV)
    started = perf_counter()
    reading = read_pass([seq], logits_WV, kernels.argmax, exact=True, sampling=side)[0]
    verdict = rule([reading.row])[0]
    return perf_counter() - started, len(verdict.path)


def _draft_seconds(chain: Chain, side: Sampling, kernels: Kernels) -> float:
    """One distribution, where it is to be reported, and one draw from it."""
    rng = KeyedRng(chain.params.seed, 0, len(PROMPT), side.pick)
    logits_1V = chain.logits_WV[:1].clone()
    probs_1V = empty_probs(1, logits_1V[0]).zero_()
    _settle(kernels, logits_1V)
    started = perf_counter()
    probs_1V = processed_probs(logits_1V, chain.params, side, probs_1V)
    pick_node(probs_1V[0], rng, 0, 0)
    return perf_counter() - started


def _settle(kernels: Kernels, logits_NV: Tensor) -> None:
    """As after a pass of the model: cores are warm, our own threads awake and others at rest."""
    end = perf_counter() + SETTLE_SECONDS
    while perf_counter() < end:
        kernels.argmax(logits_NV)


@study()
def drafter_cost(options: Namespace, report: Report) -> None:
    """What drafting alone costs for each K: the other half of every prediction of a speed-up.

    `propose` is a drafter's answer as the stages ask for it: it reads what the last round emitted
    and drafts K tokens. Rounds keep 0 to K of them in turn, so that the text grows as it does in a
    run. `bare` are the passes alone that a model drafter cannot do without: one over two rows,
    which reads the last tokens, and K - 1 over one row, as native calls. The drafters are the
    embedded draft model and the n-gram drafter, greedy, at context 256. All of them take turns.
    """
    room = Room(num_slots=16 * 1024, max_logits=8)
    model = load_model(resolve(DRAFT), LoadOptions(room=room, device="cpu"))
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
def overhead(options: Namespace, report: Report) -> None:
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
        "k": config.k,
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
