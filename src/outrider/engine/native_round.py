"""Native round: a whole round of a batch as one C++ call, for the usual requests.

A native round verifies chains that a draft model draws within the call; the draft model may be a
copy of the target over its memory. It also verifies any draft that a drafter made before: so a
batch with masks, bans or a drafter of its own is drafted for in calls of their own. It takes
requests without reported rounds, lossy rules or dropped prompt keys; all others go stage by stage.
All give the same tokens, so a request may change between them.

Shapes:  M = packed logits rows, N = tokens of one outcome, V = vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Protocol, TypeGuard, runtime_checkable

from torch import Tensor

from outrider.cache.paged_kv import PagedKV
from outrider.core.draft import Draft, Outcome, TokenLogprobs, Verdict, parents_below
from outrider.core.errors import ContractError, SequenceError, blaming, given
from outrider.core.logits import suffixes_of
from outrider.core.params import SamplingParams
from outrider.core.protocols import CausalLM
from outrider.core.rng import Pick
from outrider.core.sampling import MIN_TEMPERATURE, log_probs, token_logprobs
from outrider.drafters.common.draft_model import ModelDrafter, SelfDrafter
from outrider.drafters.common.merge import made_by
from outrider.drafters.common.native import NativeModel
from outrider.drafters.portfolio import PortfolioDrafter
from outrider.engine.round import Batch, Chunks, FinishedRow, LiveSequence, RoundTiming, clamp
from outrider.engine.stages import Stages
from outrider.kernels.native.forward import Forward, NativeForward
from outrider.kernels.native.rounds import (
    RULES,
    CacheSpan,
    Decided,
    NativeRounds,
    RoundModel,
    RoundRow,
    RoundVerdict,
)
from outrider.kernels.native.sampling import MOST_WIDTH, is_plain

_log = logging.getLogger(__name__)


@runtime_checkable
class NativePasses(CausalLM, Protocol):
    """A model whose passes may be one native call each: whole, or shared among ranks."""

    @property
    def state(self) -> PagedKV: ...
    @property
    def logits(self) -> Tensor: ...
    def forward(self) -> Forward | None: ...


@dataclass(frozen=True, slots=True)
class NativeRound:
    """A `Round` over `stages` that runs their target and draft model in native code.

    `rule` is the engine's, a name in RULES; a request may have another. `draft` and `drafter` are
    given together, `draft` alone for a copy in the target's memory; without either drafts come from
    the stages' drafter. Members of a portfolio that draft within the call have rounds of their own,
    by name, in `led`. `checks` verifies drafts where this round does not make them.
    """

    stages: Stages
    call: NativeRounds
    target: NativePasses
    pick: Pick
    rule: str
    draft: NativePasses | None = None
    drafter: ModelDrafter | None = None
    portfolio: PortfolioDrafter | None = None
    led: Mapping[str, NativeRound] = field(default_factory=dict[str, "NativeRound"])
    checks: NativeRound | None = None

    def run(self, batch: Batch, chunks: Chunks, *, num_waiting: int = 0) -> list[Outcome]:
        checks = self.checks or self
        if chunks or not checks._takes(batch):
            return self.stages.run(batch, chunks, num_waiting=num_waiting)
        self.stages.assign_budgets(batch)
        if self.portfolio is not None:
            return self._run_led(self.portfolio, batch, num_waiting)
        if self.draft is not None and self._takes(batch):
            self.stages.read_shared(batch)
            ended = self._drafted(batch, perf_counter(), num_waiting)
            if ended is not None:
                return ended
        seconds = self.stages.draft(batch)
        return checks._verified(batch, seconds, num_waiting)

    def _drafted(
        self,
        batch: Batch,
        started: float,
        num_waiting: int,
        *,
        looked: float = 0.0,
        trial: bool | None = None,
    ) -> list[Outcome] | None:
        """Return the outcomes of a round, begun at `started`, that drafts within the call; None if
        the call cannot. `trial` is given for a member of a portfolio, and the seconds in which
        others `looked` for drafts."""
        rows = self._rows(batch) if all(map(self._drafts, batch)) else None
        if rows is None or not self.call.fits(rows):
            return None
        # The model's reading before the call is drafting too.
        drafting = perf_counter() - started
        decided = self.call(rows)
        if decided is None:
            return None
        for seq, verdict in zip(batch, decided.verdicts, strict=True):
            seq.draft = Draft.chain(verdict.drafted)
            if trial is not None and seq.draft:
                seconds = drafting - looked + decided.draft_seconds
                seq.draft = made_by(seq.draft, self.stages.drafter.name, seconds, trial=trial)
        return self._finish(batch, rows, decided, started, drafting, num_waiting)

    def _run_led(
        self, portfolio: PortfolioDrafter, batch: Batch, num_waiting: int
    ) -> list[Outcome]:
        """Run a round in which the leader of a portfolio drafts within the call, if it can and
        look-ups have no draft."""
        started = perf_counter()
        portfolio.left_to_round = lambda name: name in self.led and self.led[name]._takes(batch)
        try:
            seconds = self.stages.draft(batch)
        finally:
            left = portfolio.take_left()
        if left is None:
            return self._verified(batch, seconds, num_waiting)
        for seq in batch:
            seq.budget = seq.budget.cut(left.depths.get(seq.seq_id, 0))
        led = self.led[left.member.name]
        ended = led._drafted(batch, started, num_waiting, looked=seconds, trial=left.trial)
        if ended is None:
            return self._verified(batch, seconds + self.stages.draft(batch), num_waiting)
        if not any(outcome.draft for outcome in ended):
            portfolio.missed(left)
        return ended

    def verify(
        self, batch: Batch, chunks: Chunks, *, num_waiting: int = 0, draft_seconds: float = 0.0
    ) -> list[Outcome]:
        checks = self.checks or self
        if not chunks and checks._takes(batch):
            return checks._verified(batch, draft_seconds, num_waiting)
        return self.stages.verify(
            batch, chunks, num_waiting=num_waiting, draft_seconds=draft_seconds
        )

    def _verified(self, batch: Batch, draft_seconds: float, num_waiting: int) -> list[Outcome]:
        """Verify drafts in a call; by the stages if a draft has probabilities of another dtype or
        device, or the call met a value that is no number."""
        began = perf_counter() - draft_seconds
        rows = self._rows(batch) if all(_is_plain(seq.draft) for seq in batch) else None
        if rows is not None and self.call.fits(rows):
            decided = self.call(rows, self.stages.num_likely(batch))
            if decided is not None:
                return self._finish(batch, rows, decided, began, draft_seconds, num_waiting)
        return self.stages.verify(batch, (), num_waiting=num_waiting, draft_seconds=draft_seconds)

    def _takes(self, batch: Batch) -> bool:
        models = (self.target,) if self.draft is None else (self.target, self.draft)
        if self.stages.drops_keys(batch) or self.stages.num_likely(batch) > MOST_WIDTH:
            return False
        # A mask's own drafts go before those of a call.
        return all(model.forward() is not None for model in models) and all(
            (self.draft is None or seq.shaper is None or seq.shaper.sparse(seq.tokens) is not None)
            and seq.pick == self.pick
            and not seq.params.round_events
            and not seq.is_unscored
            and (seq.speculation.sampler or self.rule) in RULES
            and (self.draft is None or seq.speculation.engine_drafts)
            for seq in batch
        )

    def _drafts(self, seq: LiveSequence) -> bool:
        """Return whether the call drafts as the stages do: no trees, which only a model with a mask
        makes of a chain's logits, and with the temperature of the text."""
        if (
            self.drafter is not None
            and self.drafter.mask >= 0
            and seq.budget.size > seq.budget.depth
        ):
            return False
        return seq.budget.temperature == 1 or seq.params.greedy

    def _rows(self, batch: Batch) -> list[RoundRow] | None:
        """Return the call's rows; None if the draft model fails, which stages then locate. Raises
        SequenceError for a mask that fails."""
        try:
            return [self._row(*span, len(batch)) for span in self._spans(batch)]
        except SequenceError:
            raise
        except Exception:  # noqa: BLE001 - the stages meet it again, row by row
            _log.warning("The draft model failed before a round.", exc_info=True)
            return None

    def _spans(self, batch: Batch) -> list[tuple[LiveSequence, int, CacheSpan]]:
        """Return each sequence with the depth that the call drafts for it, and the target's span.
        Pages for all are held together."""
        state, found = self.target.state, list[tuple[LiveSequence, int, CacheSpan]]()
        counts = dict[int, int]()
        for seq in batch:
            depth = 0 if self.draft is None else max(self.stages.depth(seq), 0)
            num_drafted = len(seq.draft.tokens) if self.draft is None else depth
            length = state.length(seq.seq_id)
            unread = seq.tokens[length:]
            counts[seq.seq_id] = len(unread) + num_drafted
            found.append((seq, depth, CacheSpan(length, unread, state.pages(seq.seq_id))))
        state.reserve(counts)
        return found

    def _row(self, seq: LiveSequence, depth: int, target: CacheSpan, batch_size: int) -> RoundRow:
        """Return the call's data of `seq`. The draft model reads the prompt if necessary."""
        draft = seq.draft if self.draft is None else Draft.empty()
        limits = None
        if self.draft is None and seq.shaper is not None:
            suffixes = suffixes_of(draft.tokens, draft.parents)
            with blaming(seq.seq_id):
                limits = seq.shaper.limits(seq.tokens, suffixes, self.target.logits.shape[1])
        return RoundRow(
            seed=seq.params.rng_seed,
            sample=seq.sample,
            start=len(seq.tokens),
            temperature=_temperature(seq.params),
            # A value too large for an integer of C keeps all tokens as well.
            top_k=min(seq.params.top_k, self.target.spec.vocab_size),
            top_p=seq.params.top_p,
            min_p=seq.params.min_p,
            target=target,
            drafted=draft.tokens,
            parents=None if draft.is_chain else draft.parents,
            probs_NV=draft.probs_NV,
            draft=self._draft_feed(seq, depth, batch_size, target) if depth else None,
            depth=depth,
            shaping=None if seq.shaper is None else seq.shaper.lists(seq.tokens),
            limits=limits,
            wants_laws=seq.params.logprobs,
            rule=seq.speculation.sampler or self.rule,
        )

    def _draft_feed(
        self, seq: LiveSequence, depth: int, batch_size: int, target: CacheSpan
    ) -> CacheSpan:
        drafter = self.drafter
        if drafter is None:
            # The copy writes the draft to the slots where the target then reads it.
            return target
        num_masks = depth - 1 if drafter.mask >= 0 else 0
        most = drafter.share(batch_size, less=num_masks)
        unread = drafter.begin(seq.seq_id, seq.tokens, most=most)
        return _feed(given(self.draft, "draft model"), seq.seq_id, unread, depth - 1)

    def _finish(
        self,
        batch: Batch,
        rows: Sequence[RoundRow],
        decided: Decided,
        began: float,
        drafting: float,
        num_waiting: int,
    ) -> list[Outcome]:
        """Finish a round that began at `began`; `drafting` seconds of it passed before the call."""
        settled: list[FinishedRow] = []
        start, likely = 0, decided.likely
        for seq, row, verdict in zip(batch, rows, decided.verdicts, strict=True):
            ended, end = self._end(seq, row, verdict, start), start + 1 + len(verdict.drafted)
            if likely:
                ended.outcome = replace(ended.outcome, likely=likely[start:end])
            settled.append(ended)
            start = end
        # A call without a draft model takes no time for drafts.
        drafting += decided.draft_seconds if any(row.depth for row in rows) else 0.0
        timing = RoundTiming(began, drafting, decided.verify_seconds)
        return self.stages.finish_round(settled, timing=timing, num_waiting=num_waiting)

    def _end(
        self, seq: LiveSequence, row: RoundRow, verdict: RoundVerdict, start: int
    ) -> FinishedRow:
        """Clamp the outcome, and record the staged tokens. Its logits begin at row `start`."""
        drafted = verdict.drafted
        if row.depth and self.drafter is not None:
            fed = tuple(given(row.draft, "draft").unread)
            if self.drafter.mask < 0:
                fed += drafted[:-1]
            given(self.draft, "draft model").state.note_chain(seq.seq_id, fed)
            self.drafter.note(seq.seq_id, fed)
        outcome = Outcome(seq.seq_id, seq.draft, Verdict(verdict.path, verdict.next_token))
        outcome, reason = clamp(outcome, seq)
        if seq.params.logprobs:
            outcome = replace(outcome, logprobs=self._logprobs(seq.params, outcome, start))
        fed = (*row.target.unread, *drafted)
        if row.parents is None:
            self.target.state.note_chain(seq.seq_id, fed)
        else:
            parents = parents_below(len(row.target.unread) - 1, row.parents)
            self.target.state.note_tree(seq.seq_id, fed, parents)
        return FinishedRow(seq, len(row.target.unread), outcome, reason)

    def _logprobs(
        self, params: SamplingParams, outcome: Outcome, start: int
    ) -> tuple[TokenLogprobs, ...]:
        """Return log-probabilities of accepted tokens; a sampled request's logits hold them now."""
        tokens = outcome.tokens
        rows = [start, *(start + 1 + node for node in outcome.verdict.path)][: len(tokens)]
        rows_NV = self.target.logits[rows]
        log_NV = log_probs(rows_NV) if params.greedy else rows_NV.log()
        return token_logprobs(log_NV, range(len(tokens)), tokens, params.top_logprobs)


def native_round(
    stages: Stages,
    draft: CausalLM | None,
    *,
    rule: str,
    pick: Pick,
    batch_size: int,
    drafted: bool = False,
) -> NativeRound | str:
    """Return native rounds over the parts of `stages`, or a sentence that says why there are none.
    `rule` is the name of their rule. With `drafted` they only verify drafts that exist already."""
    target, drafter = stages.target, stages.drafter
    if rule not in RULES:
        return f"acceptance rule {rule!r} is judged in Python"
    if not _is_native(target):
        return "the target has no native pass"
    chains = isinstance(drafter, ModelDrafter | SelfDrafter) and not drafter.sampler.branches
    if isinstance(drafter, SelfDrafter):
        draft = drafter.model
        chains = chains and _is_native(draft)
    call = NativeRounds(_model(target), None, batch_size=batch_size)
    checks = NativeRound(stages, call, target, pick, rule)
    if drafted or not chains:
        alike = partial(native_round, draft=draft, rule=rule, pick=pick, batch_size=batch_size)
        led = {} if drafted else _led_rounds(stages, alike)
        portfolio = drafter if isinstance(drafter, PortfolioDrafter) and led else None
        return replace(checks, portfolio=portfolio, led=led)
    own = drafter if isinstance(drafter, ModelDrafter) else None
    native = None if draft is None else NativeModel.of(draft if own is None else own.model)
    if native is None or native.vocab_size != target.spec.vocab_size:
        return checks
    mask = -1 if own is None else own.mask
    call = NativeRounds(_model(target), native.passes, batch_size=batch_size, mask=mask)
    return NativeRound(stages, call, target, pick, rule, native.model, own, checks=checks)


def _led_rounds(
    stages: Stages, member_round: Callable[[Stages], NativeRound | str]
) -> dict[str, NativeRound]:
    """Return the rounds of those members of a portfolio that draft within the call."""
    drafter, found = stages.drafter, dict[str, NativeRound]()
    if isinstance(drafter, PortfolioDrafter) and not drafter.needs.num_likely:
        for name in drafter.names:
            member = drafter.member(name)
            led = "" if member is None else member_round(replace(stages, drafter=member))
            if isinstance(led, NativeRound) and led.draft is not None:
                found[name] = led
    return found


def _is_native(model: CausalLM) -> TypeGuard[NativePasses]:
    return isinstance(model, NativePasses) and isinstance(model.forward(), NativeForward)


def _model(model: NativePasses) -> RoundModel:
    forward = model.forward()
    if not isinstance(forward, NativeForward):
        raise ContractError("forward is no NativeForward")
    return RoundModel(forward, model.logits, model.state.page_size)


def _feed(model: NativePasses, seq_id: int, unread: Sequence[int], num_drafted: int) -> CacheSpan:
    state = model.state
    state.reserve({seq_id: len(unread) + num_drafted})
    return CacheSpan(state.length(seq_id), unread, state.pages(seq_id))


def _temperature(params: SamplingParams) -> float:
    return 0.0 if params.greedy else max(params.temperature, MIN_TEMPERATURE)


def _is_plain(draft: Draft) -> bool:
    return draft.probs_NV is None or is_plain(draft.probs_NV)
