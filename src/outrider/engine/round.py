"""The round: its requests, the protocol of draft, pass, acceptance and commit, and how it ends.

`Stages` (stages.py) is the reference implementation. The native round and the captured round take
the same batch and return the same outcomes; if they cannot run a batch, they say why in a sentence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from outrider.cache.pool import Keep
from outrider.core.config import EXACT_SAMPLERS, SEED_TIED_SAMPLERS
from outrider.core.draft import Budget, Draft, Outcome, RoundTrace, TokenLogprobs
from outrider.core.errors import ContractError
from outrider.core.logits import LogitsProcessor
from outrider.core.params import AS_THE_ENGINE, FinishReason, RequestSpeculation, SamplingParams
from outrider.core.protocols import CacheStore, CausalLM, DraftNeeds, StepOutput, StepRow
from outrider.core.rng import KeyedRng, Pick, inverse_cdf
from outrider.core.spec import ModelSpec

StopMatch = Callable[[Sequence[int]], int | None]


@dataclass(slots=True)
class LiveSequence:
    """A request in flight: the only mutable request state. `tokens` is the prompt and all emitted
    tokens; the last one is pending.

    Pending means: decided and shown to the user, but not yet in the target's KV cache. `limit` is
    the most tokens that may be emitted. `match` gets emitted tokens and returns how many of them to
    keep when a stop string ended within, or None to go on. `shaper` changes logits, if there is
    one. `prediction` is the caller's own guess of the text after the prompt, `speculation` the
    request's own choices. `pick` is the operator of its draws. `budget` is that of its next draft.
    `no_drafts` is the reason if it is not drafted for any more; `rested` the reason if it was not
    for a while. `deadline` is the end of its time on the engine's clock, and `mask_seconds` the
    time of its mask in its last round. `num_cached` of its tokens were in the cache when it came.
    It `is_watched` if its text is read while it is written. `error` is the reason for which the
    engine gave it up, if it did; it is then neither live nor finished. `prompt_logprobs` has an
    entry a prompt token, None for the first, as far as they are known and if they are requested.
    """

    seq_id: int
    tokens: list[int]
    prompt_length: int
    params: SamplingParams
    limit: int
    stop_ids: frozenset[int] = frozenset()
    match: StopMatch | None = None
    shaper: LogitsProcessor | None = None
    sample: int = 0
    prediction: tuple[int, ...] = ()
    speculation: RequestSpeculation = AS_THE_ENGINE
    pick: Pick = inverse_cdf
    budget: Budget = field(default_factory=lambda: Budget(0))
    draft: Draft = field(default_factory=Draft.empty)
    last: Outcome | None = None
    num_rounds: int = 0
    num_preempted: int = 0
    num_cached: int = 0
    no_drafts: str = ""
    rested: str = ""
    deadline: float = math.inf
    mask_seconds: float = 0.0
    is_watched: bool = False
    finish: FinishReason | None = None
    error: Exception | None = None
    prompt_logprobs: list[TokenLogprobs | None] = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_logprobs = [] if self.params.prompt_logprobs is None else [None]

    @property
    def is_unscored(self) -> bool:
        """True if log-probabilities of its prompt are requested and not all known."""
        return 0 < len(self.prompt_logprobs) < self.prompt_length

    @property
    def num_emitted(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def num_remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.limit - self.num_emitted

    @property
    def rng(self) -> KeyedRng:
        """The random numbers of the round that starts now."""
        return self.rng_at(len(self.tokens))

    def rng_at(self, start: int) -> KeyedRng:
        """The random numbers of a round that starts when there are `start` tokens."""
        return KeyedRng(self.params.rng_seed, self.sample, start, self.pick)


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `num_tokens` unread prompt tokens of a sequence."""

    seq: LiveSequence
    num_tokens: int


Batch: TypeAlias = Sequence[LiveSequence]
Chunks: TypeAlias = Sequence[Chunk]


def unread_prompts(batch: Batch, state: CacheStore) -> list[Chunk]:
    """Return chunks of the unread prompts in `batch`, without pending tokens."""
    counts = [len(seq.tokens) - 1 - state.length(seq.seq_id) for seq in batch]
    return [Chunk(seq, count) for seq, count in zip(batch, counts, strict=True) if count]


class Round(Protocol):
    """A round of `batch`, with prompt `chunks` of other sequences in the same target pass.

    Outcomes are clamped, committed and appended to their sequences' tokens: every round ends in
    `Stages.finish_round`. `num_waiting` is the number of requests not yet admitted; traces report
    it to controllers.
    """

    def run(self, batch: Batch, chunks: Chunks, *, num_waiting: int = 0) -> list[Outcome]: ...

    def verify(
        self, batch: Batch, chunks: Chunks, *, num_waiting: int = 0, draft_seconds: float = 0.0
    ) -> list[Outcome]:
        """Verify the drafts that the sequences already have, which took `draft_seconds`."""
        ...


def clamp(outcome: Outcome, seq: LiveSequence) -> tuple[Outcome, FinishReason | None]:
    """Return `outcome` up to its end, and the reason for the end (None: the text goes on).

    Stop tokens, stop strings, `max_tokens` and the context window end a text here. The function
    runs before memory is committed and before any drafter gets the outcome, so every memory ends
    exactly where the text does, wherever in the accepted path the end lies.
    """
    tokens = outcome.tokens[: seq.num_remaining]
    reason: FinishReason | None = "length" if len(tokens) == seq.num_remaining else None
    if not seq.stop_ids.isdisjoint(tokens):
        stop = next(i for i, token in enumerate(tokens) if token in seq.stop_ids)
        tokens, reason = tokens[: stop + 1], "stop"
    matched = seq.match(tokens) if seq.match else None
    if matched is not None:
        tokens, reason = tokens[:matched], "stop"
    return outcome.keep(len(tokens)), reason


@dataclass(frozen=True, slots=True)
class FixedLengths:
    """`budget` for texts that would depend on a controller's choice, so that a seed repeats them;
    `sampler` is the engine's own rule."""

    budget: Budget
    sampler: str

    def of(self, seq: LiveSequence, given: Budget) -> Budget:
        """The budget of `seq`, given the controller's choice `given`."""
        rule = seq.speculation.sampler or self.sampler
        is_greedy = seq.params.greedy and rule in EXACT_SAMPLERS
        rests = given.choice is not None and given.choice.reason == "rest"
        is_free = is_greedy or rests or rule in SEED_TIED_SAMPLERS
        return given if is_free else self.budget


@dataclass(slots=True)
class FinishedRow:
    """One sequence's round. `num_fed` tokens of its text were read in it, before the draft. With
    `in_order` the rows of the accepted tokens already follow them in memory. Not frozen, since one
    is made for each row of each round."""

    seq: LiveSequence
    num_fed: int
    outcome: Outcome
    ending: FinishReason | None
    in_order: bool = False


def settle(
    state: CacheStore,
    settled: Sequence[FinishedRow],
    chunks: Mapping[int, Sequence[int]] = MappingProxyType({}),
) -> int:
    """Commit the accepted tokens, in `state` and in the text, and `chunks` of other sequences;
    return how many rows had to be copied."""
    paths = dict(chunks)
    for one in settled:
        nodes = _kept(one.num_fed, one.outcome)
        paths[one.seq.seq_id] = range(len(nodes)) if one.in_order else nodes
    num_copied = state.commit(paths)
    # The text follows memory at once: nothing that may fail comes between the two.
    for one in settled:
        _append(one.seq, one.outcome, one.ending)
    return num_copied


@dataclass(slots=True)
class Gaps:
    """The time between passes; `ended` is when the last one ended."""

    ended: float = 0.0

    def until(self, started: float) -> float:
        """Return the seconds since the last pass; 0 before the first."""
        return max(started - self.ended, 0.0) if self.ended else 0.0


class RoundTiming(NamedTuple):
    """The times of a round up to its verdicts. `began` is when its drafting began. `ended` is given
    for a round that ended on a device; None means that it ends with the host's part."""

    began: float
    draft_seconds: float
    verify_seconds: float
    ended: float | None = None

    def accept_seconds(self, ended: float) -> float:
        """Return the seconds of neither drafting nor the pass, if the round ended at `ended`."""
        return max(ended - self.began - self.draft_seconds - self.verify_seconds, 0.0)


@dataclass(frozen=True, slots=True)
class PassTimes:
    """The fields that all traces of one pass share."""

    index: int
    drafter: str
    batch_size: int
    num_target_passes: int
    num_rows_copied: int
    num_waiting: int
    draft_seconds: float
    verify_seconds: float
    accept_seconds: float
    gap_seconds: float = 0.0

    def trace(
        self,
        seq_id: int,
        num_prompt_tokens: int,
        outcome: Outcome | None = None,
        mask_seconds: float = 0.0,
        drafter: str = "",
    ) -> RoundTrace:
        """Return the trace of one sequence; without an outcome, of a pass that only read a prompt
        chunk. `drafter` is the one that the request chose, if it did."""
        draft = Draft.empty() if outcome is None else outcome.draft
        num_accepted = 0 if outcome is None else outcome.num_accepted
        return RoundTrace(
            seq_id=seq_id,
            pass_index=self.index,
            drafter=draft.by or drafter or self.drafter,
            batch_size=self.batch_size,
            num_target_passes=self.num_target_passes,
            num_prompt_tokens=num_prompt_tokens,
            num_drafted=len(draft.tokens),
            num_accepted=num_accepted,
            num_emitted=0 if outcome is None else num_accepted + 1,
            num_rows_copied=self.num_rows_copied,
            num_waiting=self.num_waiting,
            hit=draft.hit,
            draft_seconds=self.draft_seconds,
            verify_seconds=self.verify_seconds,
            accept_seconds=self.accept_seconds,
            gap_seconds=self.gap_seconds,
            mask_seconds=mask_seconds,
            draft_depth=draft.max_depth if draft.tokens else 0,
            members=outcome.members if outcome is not None and draft.parts else (),
        )


def _append(seq: LiveSequence, outcome: Outcome, ending: FinishReason | None) -> None:
    seq.tokens += outcome.tokens
    seq.last = outcome
    seq.num_rounds += 1
    seq.draft = Draft.empty()
    seq.finish = ending


def _kept(num_fed: int, outcome: Outcome) -> Sequence[int]:
    """Return the nodes of the pass that stay: all that was fed as text, then the accepted path."""
    if not outcome.verdict.path:
        return range(num_fed)
    return [*range(num_fed), *(num_fed + node for node in outcome.verdict.path)]


@runtime_checkable
class CompactingLM(CausalLM, Protocol):
    """A target that can drop keys of tokens that it has read."""

    def compact(self, seq_id: int, keep: Keep) -> None: ...


@dataclass(frozen=True, slots=True)
class StepwiseLM:
    """A CausalLM over `model` whose passes compute logits of at most one token of a row: the kill
    switch for batched verification.

    Logits must be bit-identical to the batched pass on row-invariant kernels, so switching this on
    and off distinguishes a numerics problem from a bookkeeping one. A round costs as many passes as
    its longest row has tokens with logits.
    """

    model: CausalLM

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    @property
    def state(self) -> CacheStore:
        return self.model.state

    def compact(self, seq_id: int, keep: Keep) -> None:
        """Compact a sequence, if the model can."""
        if not isinstance(self.model, CompactingLM):
            raise ContractError("model is no CompactingLM")
        self.model.compact(seq_id, keep)

    def step(self, rows: Sequence[StepRow], needs: DraftNeeds) -> StepOutput:
        logits: list[list[Tensor]] = [[] for _ in rows]
        heads = [_part(row, 0, row.logits_from + 1) for row in rows]
        self._pass(list(enumerate(heads)), logits, needs)
        for at in range(1, max((row.num_logits for row in rows), default=0)):
            parts = [
                (index, _part(row, row.logits_from + at, row.logits_from + at + 1))
                for index, row in enumerate(rows)
                if at < row.num_logits
            ]
            self._pass(parts, logits, needs)
        num_passes = max([1, *(row.num_logits for row in rows)])
        flat = [row_V for row_logits in logits for row_V in row_logits]
        if not flat:
            return StepOutput(torch.empty(0, self.spec.vocab_size), num_passes=num_passes)
        return StepOutput(torch.stack(flat), num_passes=num_passes)

    def _pass(
        self, parts: Sequence[tuple[int, StepRow]], logits: list[list[Tensor]], needs: DraftNeeds
    ) -> None:
        out = self.model.step([part for _, part in parts], needs)
        if out.hidden_NKD is not None:
            raise ContractError("hidden states have to be stored in memory")
        wanted = [index for index, part in parts if part.num_logits]
        for index, row_V in zip(wanted, out.logits_MV.clone(), strict=True):
            logits[index].append(row_V)


def _part(row: StepRow, start: int, end: int) -> StepRow:
    tokens, parents = row.tokens[start:end], row.parents[start:end]
    return StepRow(row.seq_id, tokens, parents, max(row.logits_from - start, 0))
