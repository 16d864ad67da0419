"""The reference round in stages: drafts, one packed target pass, distributions, acceptance.

The pending token is the first row of the next verification, so a round is exactly one target pass
whatever the batch, and plain decoding is the round with an empty draft. A first round also carries
the rest of the prompt, and prompt chunks of other sequences ride in the same pass.

Shapes:  M = packed logits rows, V = vocabulary, N = distributions of one sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.core.clock import host_rows
from outrider.core.draft import (
    Draft,
    NodeTrace,
    NodeVerdict,
    Outcome,
    RoundTrace,
    TokenLogprobs,
    Trim,
    Verdict,
    parents_below,
)
from outrider.core.errors import NumericsError, SequenceError, blaming
from outrider.core.logits import suffixes_of
from outrider.core.params import SamplingParams
from outrider.core.protocols import (
    AcceptanceRule,
    CausalLM,
    Controller,
    Drafter,
    DraftNeeds,
    StepRow,
    VerifyRow,
)
from outrider.core.rng import NotingRng
from outrider.core.sampling import (
    PLAIN,
    Distributions,
    Sampling,
    log_probs,
    mass,
    probs_at,
    processed_probs,
    token_logprobs,
)
from outrider.core.tree import ROOT
from outrider.engine.drafting import (
    Proposals,
    RequestDrafters,
    check_numbers,
    draft_row,
    guarded_drafts,
    trimmed,
    with_forced,
)
from outrider.engine.round import (
    Batch,
    Chunk,
    Chunks,
    FinishedRow,
    FixedLengths,
    Gaps,
    LiveSequence,
    PassTimes,
    RoundTiming,
    clamp,
    settle,
    unread_prompts,
)
from outrider.verify.rules import exact_rules

if TYPE_CHECKING:
    from outrider.plugins.compaction import Compaction


@dataclass(frozen=True, slots=True)
class TargetRow:
    """One sequence's share of a pass: a row for the rule, and requested log-distributions."""

    row: VerifyRow
    log_NV: Tensor | None

    def with_probs(self, outcome: Outcome, verdict: Verdict, params: SamplingParams) -> Outcome:
        """Return `outcome`, which is `verdict` up to the text's end, with the probabilities that
        `params` request."""
        if params.round_events:
            log_NV = self.log_NV if params.greedy else None
            outcome = replace(outcome, nodes=node_traces(self.row, verdict, outcome, log_NV))
        if self.log_NV is None or not params.logprobs:
            return outcome
        distributions = [0, *(node + 1 for node in outcome.verdict.path)][: len(outcome.tokens)]
        logprobs = token_logprobs(self.log_NV, distributions, outcome.tokens, params.top_logprobs)
        return replace(outcome, logprobs=logprobs)


def read_pass(
    batch: Batch,
    logits_MV: Tensor,
    argmax: Callable[[Tensor], list[int]],
    *,
    exact: bool,
    sampling: Sampling = PLAIN,
) -> list[TargetRow]:
    """Return a processed distribution of each draft node and root of each sequence in `batch`.

    Raises SequenceError for a sequence whose shaping fails or whose logits are not numbers. Shaped
    logits are written over the model's own, and on a CPU so are the distributions made of them.
    Greedy rows share one argmax over the whole pass, a greedy round's only host sync. A rule that
    is not `exact` also gets soft distributions.
    """
    _shape(batch, logits_MV)
    best = argmax(logits_MV) if any(seq.params.greedy for seq in batch) else []
    readings: list[TargetRow] = []
    start = 0
    for seq in batch:
        end = start + 1 + len(seq.draft)
        logits_NV = logits_MV[start:end]
        if seq.params.greedy:
            if -1 in best[start:end]:
                raise _not_numbers(seq)
            distributions = Distributions(tokens=tuple(best[start:end]))
        else:
            distributions = _distributions(seq, logits_NV, sampling)
        readings.append(_read(seq, logits_NV, distributions, exact=exact))
        start = end
    return readings


def _shape(batch: Batch, logits_MV: Tensor) -> None:
    start = 0
    for seq in batch:
        num_rows = 1 + len(seq.draft)
        if seq.shaper is not None:
            logits_NV = logits_MV[start : start + num_rows]
            suffixes = suffixes_of(seq.draft.tokens, seq.draft.parents)
            with blaming(seq.seq_id), torch.inference_mode():
                seq.shaper.shape_in_place(logits_NV, seq.tokens, suffixes)
        start += num_rows


def _not_numbers(seq: LiveSequence) -> SequenceError:
    """Return the error of a sequence with a row that has no largest logit."""
    error = SequenceError(seq.seq_id)
    error.__cause__ = NumericsError("the target")
    return error


def _distributions(seq: LiveSequence, logits_NV: Tensor, sampling: Sampling) -> Distributions:
    # These logits are not read again, and new memory would have to be allocated every round.
    out_NV = logits_NV if logits_NV.is_cpu else None
    return Distributions(probs_NV=processed_probs(logits_NV, seq.params, sampling, out_NV))


def _read(
    seq: LiveSequence, logits_NV: Tensor, distributions: Distributions, *, exact: bool
) -> TargetRow:
    soft_NV = log_NV = None
    if not exact:
        soft_NV = (
            logits_NV.softmax(-1) if distributions.probs_NV is None else distributions.probs_NV
        )
    if seq.params.logprobs or (seq.params.round_events and seq.params.greedy):
        log_NV = (
            log_probs(logits_NV) if distributions.probs_NV is None else distributions.probs_NV.log()
        )
    rng = NotingRng.of(seq.rng) if seq.params.round_events else seq.rng
    return TargetRow(VerifyRow(seq.draft, distributions, rng, soft_NV), log_NV)


@dataclass(frozen=True, slots=True)
class Stages:
    """The reference `Round`. `argmax` is the greedy choice shared by drafts, verification and plain
    decoding: the first maximum wins. `sampling` makes distributions of logits. `sink` receives one
    trace per sequence and round. `fixed`, if given, fixes the lengths of some drafts. A draft model
    has `draft_window` positions, if that is a bound. `rules` are those that a request may choose
    instead of `rule`, `others` the drafters that requests chose. `trim` cuts drafts to the lengths
    that pay, if the controller does that; a pass has at most `most_drafted` draft tokens."""

    target: CausalLM
    drafter: Drafter
    rule: AcceptanceRule
    controller: Controller
    argmax: Callable[[Tensor], list[int]]
    sink: Callable[[RoundTrace], None]
    sampling: Sampling = PLAIN
    fixed: FixedLengths | None = None
    trim: Trim | None = None
    most_drafted: int | None = None
    compaction: Compaction | None = None
    draft_window: int | None = None
    rules: Mapping[str, AcceptanceRule] = field(default_factory=exact_rules)
    others: RequestDrafters = field(default_factory=RequestDrafters)
    passes: Iterator[int] = field(default_factory=count)
    gaps: Gaps = field(default_factory=Gaps)

    def run(self, batch: Batch, chunks: Chunks, *, num_waiting: int = 0) -> list[Outcome]:
        seconds = 0.0
        if batch:
            self.assign_budgets(batch)
            seconds = self.draft(batch)
        return self.verify(batch, chunks, num_waiting=num_waiting, draft_seconds=seconds)

    def assign_budgets(self, batch: Batch) -> None:
        """Give each sequence the budget of its next draft."""
        budgets = self.controller.budgets([seq.seq_id for seq in batch])
        for seq, given in zip(batch, budgets, strict=True):
            budget = given if self.fixed is None else self.fixed.of(seq, given)
            most = seq.speculation.most(budget.depth)
            if self.draft_window is not None:
                # The drafter never reads the last token of a draft.
                most = min(most, max(self.draft_window + 1 - len(seq.tokens), 0))
            seq.budget = budget.cut(most)
            if seq.speculation.k != 0:
                seq.rested = budget.why or seq.rested

    def draft(self, batch: Batch) -> float:
        """Give each sequence its next draft; return the seconds that they took."""
        self.read_shared(batch)
        proposals = self.propose(batch)
        proposals.give(batch)
        return proposals.seconds

    def read_shared(self, batch: Batch) -> None:
        """Have texts read to their pending tokens for a drafter in the target's memory: its drafts
        then depend on the text alone."""
        if self.drafter.needs.shares_memory and any(map(self.depth, batch)):
            self.verify([], unread_prompts(batch, self.target.state))

    def propose(self, batch: Batch) -> Proposals:
        """Return each sequence's next draft within its budget. The drafter is not trusted
        (engine/drafting.py). A grammar's own drafts go first (engine/drafting.py)."""
        started = perf_counter()
        row = partial(draft_row, state=self.target.state, needs=self.drafter.needs)
        rows = [row(seq, k) for seq in batch if (k := self.depth(seq)) > 0]
        if not rows:
            return Proposals({}, {})
        size = self.target.spec.vocab_size
        guarded = partial(guarded_drafts, vocab_size=size)
        ask = partial(self.others.drafts, own=self.drafter, ask=guarded)
        drafts, faults = with_forced(rows, ask)
        drafts = trimmed(batch, drafts, self.trim, self.most_drafted)
        return Proposals(drafts, faults, perf_counter() - started)

    def verify(
        self, batch: Batch, chunks: Chunks, *, num_waiting: int = 0, draft_seconds: float = 0.0
    ) -> list[Outcome]:
        """Run one target pass over drafts and prompt chunks; then accept, clamp, commit, append.
        Prompts that lose keys have a pass before it."""
        finish = partial(self.finish_round, [], num_waiting=num_waiting)
        chunks = PromptScorer(self.target, self.drafter.needs, finish).score(batch, chunks)
        if self.compaction is not None:
            read = partial(self._pass, [], num_waiting=num_waiting)
            chunks = self.compaction.before(self.target, batch, chunks, read)
        return self._pass(batch, chunks, num_waiting=num_waiting, draft_seconds=draft_seconds)

    def _pass(
        self, batch: Batch, chunks: Chunks, *, num_waiting: int, draft_seconds: float = 0.0
    ) -> list[Outcome]:
        if not batch and not chunks:
            return []
        started = perf_counter()
        offers = [self._offer(seq) for seq in batch]
        reads = [self._chunk_row(chunk) for chunk in chunks]
        out = self.target.step([*offers, *reads], self.drafter.needs)
        likely = likely_tokens(out.logits_MV, self.num_likely(batch))
        readings = read_pass(
            batch, out.logits_MV, self.argmax, exact=self.rule.exact, sampling=self.sampling
        )
        judged = perf_counter()
        settled = self._settled(batch, offers, readings, likely)
        return self.finish_round(
            settled,
            reads,
            timing=RoundTiming(started - draft_seconds, draft_seconds, judged - started),
            num_waiting=num_waiting,
            num_target_passes=out.num_passes,
        )

    def finish_round(
        self,
        settled: Sequence[FinishedRow],
        reads: Sequence[StepRow] = (),
        *,
        timing: RoundTiming,
        num_waiting: int,
        num_target_passes: int = 1,
    ) -> list[Outcome]:
        """End a round, with the prompt chunks `reads` in its pass: accepted tokens are committed to
        memory and text, and a trace of each sequence is reported."""
        chunk_paths = {row.seq_id: range(len(row.tokens)) for row in reads}
        num_copied = settle(self.target.state, settled, chunk_paths)
        gap = self.gaps.until(timing.began)
        ended = self.gaps.ended = perf_counter() if timing.ended is None else timing.ended
        shared = PassTimes(
            index=next(self.passes),
            drafter=self.drafter.name,
            batch_size=len(settled) + len(reads),
            num_target_passes=num_target_passes,
            num_rows_copied=num_copied,
            num_waiting=num_waiting,
            draft_seconds=timing.draft_seconds,
            verify_seconds=timing.verify_seconds,
            accept_seconds=timing.accept_seconds(ended),
            gap_seconds=gap,
        )
        for row in reads:
            self.report(shared.trace(row.seq_id, len(row.tokens)))
        return [self._reported(shared, one) for one in settled]

    def _reported(self, shared: PassTimes, one: FinishedRow) -> Outcome:
        """Report the trace of one sequence, and return its outcome."""
        spent = _mask_seconds(one.seq)
        chosen = one.seq.speculation.drafter
        trace = shared.trace(one.seq.seq_id, one.num_fed - 1, one.outcome, spent, chosen)
        self.report(trace)
        if not one.outcome.nodes:
            return one.outcome
        return replace(one.outcome, trace=trace, budget=one.seq.budget)

    def drops_keys(self, batch: Batch) -> bool:
        """Return whether some of `batch` has fewer rows in memory than tokens, or will have."""
        gate = self.compaction
        return gate is not None and any(gate.drops(self.target, seq) for seq in batch)

    def depth(self, seq: LiveSequence) -> int:
        """Return how many tokens may be drafted for `seq` now."""
        return 0 if seq.no_drafts else min(seq.budget.depth, seq.num_remaining - 1)

    def report(self, trace: RoundTrace) -> None:
        self.controller.observe(trace)
        self.sink(trace)

    def _settled(
        self,
        batch: Batch,
        offers: Sequence[StepRow],
        readings: Sequence[TargetRow],
        likely: tuple[tuple[int, ...], ...],
    ) -> list[FinishedRow]:
        """Return each sequence's clamped outcome, and the reason if it ended there."""
        verdicts = self._judge(batch, [reading.row for reading in readings])
        settled: list[FinishedRow] = []
        start = 0
        for seq, row, reading, verdict in zip(batch, offers, readings, verdicts, strict=True):
            outcome, reason = clamp(Outcome(seq.seq_id, seq.draft, verdict), seq)
            outcome = reading.with_probs(outcome, verdict, seq.params)
            end = start + 1 + len(seq.draft)
            if likely:
                outcome = replace(outcome, likely=likely[start:end])
            start = end
            settled.append(FinishedRow(seq, row.logits_from + 1, outcome, reason))
        return settled

    def num_likely(self, batch: Batch) -> int:
        """Return how many of the target's likeliest tokens the drafters of `batch` need."""
        return max(self.drafter.needs.num_likely, self.others.num_likely(batch))

    def _judge(self, batch: Batch, rows: Sequence[VerifyRow]) -> Sequence[Verdict]:
        """Judge a batch. Raises SequenceError for the sequence with invalid distributions; its
        cause is a DrafterError if they are the draft's."""
        try:
            return self._verdicts(batch, rows)
        except NumericsError:
            for seq, row in zip(batch, rows, strict=True):
                with blaming(seq.seq_id):
                    check_numbers(seq.draft.by or self.drafter.name, seq.draft)
                    self._verdicts([seq], [row])
            raise

    def _verdicts(self, batch: Batch, rows: Sequence[VerifyRow]) -> Sequence[Verdict]:
        """Return each verdict by the rule that its request chose, else by the engine's."""
        if not any(seq.speculation.sampler for seq in batch):
            return self.rule(rows)
        rules = [self.rules.get(seq.speculation.sampler, self.rule) for seq in batch]
        return [rule([row])[0] for rule, row in zip(rules, rows, strict=True)]

    def _offer(self, seq: LiveSequence) -> StepRow:
        """Return the unread text, ending with the pending token, and the draft below it."""
        unread = seq.tokens[self.target.state.length(seq.seq_id) :]
        root = len(unread) - 1
        tokens = (*unread, *seq.draft.tokens)
        parents = parents_below(root, seq.draft.parents)
        return StepRow(seq.seq_id, tokens, parents, logits_from=root)

    def _chunk_row(self, chunk: Chunk) -> StepRow:
        start = self.target.state.length(chunk.seq.seq_id)
        tokens = chunk.seq.tokens[start : start + chunk.num_tokens]
        return StepRow.chain(chunk.seq.seq_id, tokens, logits_from=len(tokens))


def _mask_seconds(seq: LiveSequence) -> float:
    """Return the seconds of the sequence's own mask in this round."""
    if seq.shaper is None:
        return 0.0
    seq.mask_seconds, seq.shaper.mask_seconds = seq.shaper.mask_seconds, 0.0
    return seq.mask_seconds


def likely_tokens(logits_MV: Tensor, count: int) -> tuple[tuple[int, ...], ...]:
    """Return the `count` likeliest tokens after each row, best first; nothing for a count of 0."""
    if not count:
        return ()
    return tuple(tuple(row) for row in host_rows(logits_MV.topk(count).indices))


# Log-probabilities of prompt tokens, for the requests that want them.
#
# Their prompts are read in passes of their own, of few rows, so that no more logits are stored than
# for a round of drafts. Each token is read once, and writes the same memory as ever. They share no
# pages with others: a token whose row another request read has no logits.

# Rows of logits in a pass over such a prompt. Any target has space for so many (memory_parts).
SCORED_ROWS = 16


@dataclass(frozen=True, slots=True)
class PromptScorer:
    """Scorer of prompts, in passes of its own. `finish` ends a pass that emits no token."""

    target: CausalLM
    needs: DraftNeeds
    finish: Callable[..., object]

    def score(self, batch: Batch, chunks: Chunks) -> Chunks:
        """Read the unread prompt tokens of `batch`, except pending ones, and of `chunks`, and give
        their sequences the log-probabilities. Return the remaining chunks."""
        if not any(seq.is_unscored for seq in (*batch, *(chunk.seq for chunk in chunks))):
            return chunks
        left: list[Chunk] = []
        for seq in batch:
            self._score(Chunk(seq, len(seq.tokens) - 1 - self.target.state.length(seq.seq_id)))
        for chunk in chunks:
            num_left = chunk.num_tokens - self._score(chunk)
            if num_left:
                left.append(Chunk(chunk.seq, num_left))
        return left

    def _score(self, chunk: Chunk) -> int:
        """Read a chunk if its prompt has to be scored; return the number of tokens read."""
        seq, length = chunk.seq, self.target.state.length
        start = length(seq.seq_id)
        end = min(start + chunk.num_tokens, seq.prompt_length - 1)
        while seq.is_unscored and length(seq.seq_id) < end:
            at = length(seq.seq_id)
            self._read(seq, at, min(at + SCORED_ROWS, end))
        return length(seq.seq_id) - start

    def _read(self, seq: LiveSequence, start: int, end: int) -> None:
        """Run a pass over tokens `start` to `end`; some are known after a pre-emption."""
        began = perf_counter()
        known = min(len(seq.prompt_logprobs) - 1, end)
        row = StepRow.chain(seq.seq_id, seq.tokens[start:end], logits_from=known - start)
        out = self.target.step([row], self.needs)
        # Stored before memory is committed: after a failure between the two the tokens are read
        # again, and are then known.
        seq.prompt_logprobs += _logprobs(seq, out.logits_MV, seq.tokens[known + 1 : end + 1])
        timing = RoundTiming(began, 0.0, perf_counter() - began)
        self.finish([row], timing=timing, num_target_passes=out.num_passes)


def _logprobs(seq: LiveSequence, logits_NV: Tensor, tokens: Sequence[int]) -> list[TokenLogprobs]:
    if not tokens:
        return []
    num_top = seq.params.prompt_logprobs or 0
    found = token_logprobs(log_probs(logits_NV), range(len(tokens)), tokens, num_top)
    if any(math.isnan(one.logprob) for one in found):
        raise SequenceError(seq.seq_id) from NumericsError("the target")
    return list(found)


# Traces of every node of a draft, with probabilities and verdicts, for requests that want them.
#
# Shapes:  N = draft nodes and the root, V = vocabulary.
def node_traces(
    row: VerifyRow, verdict: Verdict, outcome: Outcome, log_NV: Tensor | None
) -> tuple[NodeTrace, ...]:
    """Return traces of the draft's nodes and of the target's own token. `outcome` is `verdict` up
    to the text's end. `log_NV` are greedy decoding's log-probabilities at temperature 1."""
    draft, num_tokens = row.draft, len(outcome.tokens)
    kept = verdict.path[:num_tokens]
    tokens, parents = [*draft.tokens], [*draft.parents]
    verdicts: list[NodeVerdict] = verdicts_of(draft, kept, ended=num_tokens == len(kept))
    if num_tokens > len(kept):
        tokens.append(verdict.next_token)
        parents.append(kept[-1] if kept else ROOT)
        verdicts.append(_own_verdict(draft, parents[-1]))
    rows = [parent + 1 for parent in parents]
    p: Sequence[float]
    if row.distributions.probs_NV is not None:
        p = probs_at(row.distributions.probs_NV, rows, tokens)
    else:
        p = [
            mass(row.distributions.at(index), token)
            for index, token in zip(rows, tokens, strict=True)
        ]
    q: list[float | None] = [None] * len(tokens)
    if draft.probs_NV is not None and len(draft):
        q[: len(draft)] = probs_at(draft.probs_NV, range(len(draft)), draft.tokens)
    soft: Sequence[float | None] = [None] * len(tokens)
    if log_NV is not None:
        soft = [math.exp(value) for value in probs_at(log_NV, rows, tokens)]
    coins = _coins(row, len(tokens))
    each = zip(tokens, parents, p, q, verdicts, soft, *coins, strict=True)
    return tuple(NodeTrace(*fields) for fields in each)


def _coins(row: VerifyRow, num_nodes: int) -> tuple[list[float | None], list[float | None]]:
    """Return the probability and the random number that judged each node, if any."""
    chances: list[float | None] = [None] * num_nodes
    draws: list[float | None] = [None] * num_nodes
    rng = row.rng
    if not isinstance(rng, NotingRng):
        return chances, draws
    for node, (chance, draw) in rng.coins.items():
        chances[node], draws[node] = chance, draw
    if rng.picks and num_nodes > len(row.draft):
        draws[-1] = rng.picks[-1]
    return chances, draws


def verdicts_of(draft: Draft, kept: Sequence[int], *, ended: bool) -> list[NodeVerdict]:
    """Return the verdict on each drafted token, if the nodes `kept` became text. Children of an
    accepted node were tried in order until one was accepted; none where the text `ended`."""
    follower = dict(zip((ROOT, *kept), kept, strict=False))
    tried = {ROOT, *kept} - ({kept[-1]} if ended and kept else set())
    verdicts: list[NodeVerdict] = []
    for node, parent in enumerate(draft.parents):
        if follower.get(parent) == node:
            verdicts.append("accepted")
        elif parent in tried and node < follower.get(parent, len(draft)):
            verdicts.append("refused")
        else:
            verdicts.append("unused")
    return verdicts


def _own_verdict(draft: Draft, leaf: int) -> NodeVerdict:
    if not len(draft):
        return "plain"
    return "recovered" if draft.children(leaf) else "bonus"
