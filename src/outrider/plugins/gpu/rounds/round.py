"""Captured rounds: one launch each, and the host reads a round's decisions one round late.

The device carries the state of its rows, so each call of `run` launches a round and returns the
outcomes of the round before; the first call of a batch returns nothing yet. When the batch changes,
the round in flight is read first, then rows are written anew. A sequence that ended may have one
round in flight too many, whose report is never read. On one stream its memory is reused behind that
round; where lanes have streams of their own, `settle` waits for the round before pages are given
back. Batches that cannot run so, and drafts that exist already, run in the rounds of host_round.py:
`build.py` refuses configurations, `refusal` single batches.

Shapes:  R = numbers of a row's report.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from time import perf_counter

from outrider.core.draft import Draft, Outcome, Verdict
from outrider.core.errors import CapacityError, NumericsError, OutriderError, SequenceError
from outrider.engine.round import (
    Batch,
    Chunks,
    FinishedRow,
    LiveSequence,
    Round,
    RoundTiming,
    clamp,
    unread_prompts,
)
from outrider.engine.stages import Stages
from outrider.plugins.gpu.rounds.memory import (
    BROKE_TARGET,
    Entry,
    RoundMemory,
    RowReport,
    read_reports,
)
from outrider.plugins.gpu.rounds.program import GraphCache, Ticket

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Refusals:
    """Reasons why rounds went by stages, each reported once. One in `failed` is permanent."""

    failed: str | None = None
    _reported: set[str] = field(default_factory=set[str])

    def report(self, refusal: str, level: int = logging.INFO) -> None:
        if refusal not in self._reported:
            self._reported.add(refusal)
            _log.log(level, "Rounds go stage by stage: %s.", refusal)

    def fail(self, error: Exception) -> None:
        """Record that a first launch raised `error`."""
        lines = str(error).strip().splitlines() or [""]
        self.failed = f"a capture failed ({type(error).__name__}: {lines[0]})"
        self.report(self.failed, logging.WARNING)


@dataclass(eq=False, slots=True)
class _Flight:
    """A launched round of `batch`; reports beyond the batch are those of idle rows. `lengths` are
    the lengths of the texts that it continues, `gone` the ids whose pages were given back."""

    batch: Batch
    ticket: Ticket
    launched: float
    lengths: list[int] = field(default_factory=list[int])
    gone: set[int] = field(default_factory=set[int])

    def carries(self, batch: Batch) -> bool:
        return len(batch) == len(self.batch) and all(
            ours is theirs and is_current
            for (ours, is_current), theirs in zip(self.rows(), batch, strict=True)
        )

    def rows(self) -> list[tuple[LiveSequence, bool]]:
        """Return each sequence, and whether the round still continues its text: another lane may
        have verified drafts of it, or read it again into other pages."""
        return [
            (seq, seq.seq_id not in self.gone and len(seq.tokens) == length)
            for seq, length in zip(self.batch, self.lengths, strict=True)
        ]


@dataclass(slots=True)
class GraphRound:
    """A `Round` over a table of captured programs, one per bucket. `others` runs the batches that
    it cannot capture, and drafts that exist already."""

    stages: Stages
    table: GraphCache
    memory: RoundMemory
    others: Round
    refusals: Refusals
    _flight: _Flight | None = None
    _airborne: tuple[_Flight, ...] = ()
    _budgets: list[int] = field(default_factory=list[int])
    _landed: float = 0.0

    def verify(
        self, batch: Batch, chunks: Chunks, *, num_waiting: int = 0, draft_seconds: float = 0.0
    ) -> list[Outcome]:
        return self.others.verify(
            batch, chunks, num_waiting=num_waiting, draft_seconds=draft_seconds
        )

    def run(self, batch: Batch, chunks: Chunks, *, num_waiting: int = 0) -> list[Outcome]:
        # Any failure below leaves nothing in flight: rounds whose reports were not read are run
        # again from the host's state, with the same numbers.
        flight, self._flight = self._flight, None
        refusal = self.refusal(batch)
        if refusal is not None and flight is None:
            return self.others.run(batch, chunks, num_waiting=num_waiting)
        ahead = None
        if flight is not None and refusal is None and flight.carries(batch):
            ahead = self._launch(batch) if self.table.reaches(batch) else None
        self._read(chunks, num_waiting)
        outcomes = self._land(flight, batch, num_waiting) if flight is not None else []
        if ahead is None:
            left = [seq for seq in batch if seq.finish is None]
            ahead = self._entered(left, num_waiting, has_outcomes=bool(outcomes))
        if ahead is not None:
            ahead.lengths = [len(seq.tokens) for seq in ahead.batch]
        self._flight = ahead
        return outcomes

    def settle(self, seq_id: int) -> None:
        """Wait for the last launched round that writes pages of a sequence, which are about to be
        given back. No running job may contain the sequence."""
        for flight in reversed(self._airborne):
            if any(seq.seq_id == seq_id for seq in flight.batch):
                flight.gone.add(seq_id)
                flight.ticket.read()
                return

    def refusal(self, batch: Batch) -> str | None:
        """Return why this batch needs rounds of another kind; None if it does not."""
        if self.refusals.failed is not None:
            return self.refusals.failed
        if self.stages.drops_keys(batch):
            return "keys of a prompt were dropped"
        return next((reason for seq in batch if (reason := self.table.refusal(seq))), None)

    def _read(self, chunks: Chunks, num_waiting: int) -> None:
        """Read prompt chunks in a pass of their own, queued after the round on the device."""
        if chunks:
            self.stages.verify([], chunks, num_waiting=num_waiting)

    def _entered(self, batch: Batch, num_waiting: int, *, has_outcomes: bool) -> _Flight | None:
        """Launch a first round of `batch`. Return None if it needs another kind, or if memory is
        short and there are outcomes to report first."""
        try:
            self._read(unread_prompts(batch, self.stages.target.state), num_waiting)
            if batch and self.refusal(batch) is None:
                return self._captured(batch)
        except CapacityError:
            if not has_outcomes:
                raise
        return None

    def _captured(self, batch: Batch) -> _Flight | None:
        """Launch a first round of `batch`, whose text the target has read up to the pending tokens.
        After a failure of the compiler or the device, stages take over all later rounds."""
        entries: list[Entry] | None = None
        try:
            self._budgets = self._wanted(batch)
            pairs = zip(batch, self._budgets, strict=True)
            entries = [self.memory.enter(seq, budget) for seq, budget in pairs]
            self.table.enter(entries)
            return self._launch(batch)
        except Exception as error:
            if entries is None and isinstance(error, (OutriderError, SequenceError)):
                raise  # an error of a sequence or its memory: nothing was launched
            self.refusals.fail(error)
        return None

    def _wanted(self, batch: Batch) -> list[int]:
        self.stages.assign_budgets(batch)
        return [seq.budget.depth for seq in batch]

    def _launch(self, batch: Batch) -> _Flight:
        budgets = self._wanted(batch)
        if budgets != self._budgets:
            self._budgets = budgets
            self.table.write_budgets(budgets)
        flight = _Flight(tuple(batch), self.table.launch(), perf_counter())
        self._airborne = (*self._airborne, flight)
        return flight

    def _land(self, flight: _Flight, batch: Batch, num_waiting: int) -> list[Outcome]:
        """Read the decisions of `flight` for those of its sequences that are still in `batch`."""
        reports = read_reports(flight.ticket.read(), self.table.k)
        arrived = perf_counter()
        # Rounds end in the order of their launches.
        self._airborne = self._airborne[self._airborne.index(flight) + 1 :]
        wanted = {id(seq) for seq in batch}
        rows = zip(flight.rows(), reports, strict=False)
        live = [(seq, report) for (seq, now), report in rows if now and id(seq) in wanted]
        for seq, report in live:
            self._check(seq, report)
        if not live:
            return []
        finished = [self._row(*pair) for pair in live]
        # Rounds follow each other on the device: one begins where the one before ended.
        began = max(flight.launched, self._landed)
        self._landed = arrived
        # Acceptance is part of the round on the device; the host's share runs during the next
        # round.
        timing = RoundTiming(began, 0.0, arrived - began, ended=arrived)
        outcomes = self.stages.finish_round(finished, timing=timing, num_waiting=num_waiting)
        for row in finished:
            self.memory.keep_draft(row.seq, row.outcome)
        return outcomes

    def _check(self, seq: LiveSequence, report: RowReport) -> None:
        """Raise if the row broke; its flight then does not count, and other rows run again with the
        same numbers. SequenceError is for the target, NumericsError for the draft model."""
        if not report.broke:
            return
        if report.broke & BROKE_TARGET:
            error = SequenceError(seq.seq_id)
            error.__cause__ = NumericsError("the target")
            raise error
        raise NumericsError("the draft model")

    def _row(self, seq: LiveSequence, report: RowReport) -> FinishedRow:
        """Clamp the outcome, and record in the target's memory what the device staged."""
        verdict = Verdict(tuple(range(report.num_kept)), report.next_token)
        outcome, ending = clamp(Outcome(seq.seq_id, Draft.chain(report.drafted), verdict), seq)
        self.memory.note(seq, outcome)
        return FinishedRow(seq, 1, outcome, ending)
