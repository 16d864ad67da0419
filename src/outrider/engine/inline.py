"""The reference executor: every lane runs inline, one job after another, deterministically."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.core.draft import Outcome
from outrider.core.errors import CapacityError, SequenceError
from outrider.core.protocols import CausalLM, Drafter
from outrider.core.sequence import LiveSequence
from outrider.engine.round import Chunk, Round
from outrider.sched.admission import Limits, num_admissible
from outrider.sched.jobs import Job, Schedule, Stage
from outrider.sched.ledger import Ledger


@dataclass(slots=True)
class InlineEngine:
    """Takes requests in, admits them as memory allows, and runs the schedule's jobs.

    `spare` is how many arena tokens a round may stage past what a sequence finally keeps.
    """

    target: CausalLM
    drafter: Drafter
    round: Round
    schedule: Schedule
    ledger: Ledger
    limits: Limits
    page_size: int
    spare: int
    _waiting: deque[LiveSequence] = field(default_factory=deque[LiveSequence])
    _live: dict[int, LiveSequence] = field(default_factory=dict[int, LiveSequence])

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._live)

    def submit(self, seq: LiveSequence) -> None:
        """Queue a request. Raises CapacityError if the whole arena could not hold it."""
        need = self._need(seq)
        if need > self.limits.num_tokens:
            raise CapacityError(
                f"a prompt of {seq.prompt_length} tokens with up to {seq.limit} more needs "
                f"{need} arena tokens; the arena has {self.limits.num_tokens}.",
                hint="raise --arena-tokens or lower --max-tokens",
            )
        self._waiting.append(seq)

    def step(self) -> list[Outcome]:
        """Run one job; the outcomes of the sequences it advanced."""
        self._admit()
        outcomes: list[Outcome] = []
        for lane in self.schedule.lanes:
            pool = self.ledger.pool(self.target.state.num_free_tokens)
            job = self.schedule.next_job(lane, pool, self.ledger.num_live)
            if job is not None:
                outcomes += self._run(job)
        return outcomes

    def cancel(self, seq_id: int) -> None:
        """Stop a request, waiting or live, and free its memory; unknown ids are ignored."""
        self._waiting = deque(seq for seq in self._waiting if seq.seq_id != seq_id)
        if seq_id in self._live:
            self.ledger.drop(seq_id)
            self._close(seq_id)

    def _admit(self) -> None:
        if not self._waiting or len(self._live) >= self.limits.num_sequences:
            return
        waiting = [self._need(seq) for seq in self._waiting]
        running = [self._need(seq) for seq in self._live.values()]
        for _ in range(num_admissible(waiting, running, self.limits)):
            self._open(self._waiting.popleft())

    def _open(self, seq: LiveSequence) -> None:
        reused = self.target.state.open(seq.seq_id, seq.tokens[:-1])
        try:
            self.drafter.open(seq.seq_id, seq.tokens)
        except BaseException as error:
            self.target.state.close(seq.seq_id)
            if not isinstance(error, Exception):
                raise
            seq.error = error
            return
        self._live[seq.seq_id] = seq
        self.ledger.add(seq.seq_id, len(seq.tokens) - reused)

    def _run(self, job: Job) -> list[Outcome]:
        self.ledger.start(job)
        chunks = [Chunk(self._live[w.seq_id], w.num_tokens) for w in job.of(Stage.PREFILL)]
        batch = self._sequences(job, Stage.VERIFY)
        try:
            outcomes = self.round.run(batch, chunks, num_waiting=len(self._waiting))
        except SequenceError as error:
            self._undo(job)
            self._give_up(error)
            return []
        except BaseException:
            self._undo(job)
            raise
        self.ledger.finish(job, lambda seq_id: self._live[seq_id].finish is not None)
        for seq in batch:
            if seq.finish is not None:
                self._close(seq.seq_id)
        return outcomes

    def _give_up(self, error: SequenceError) -> None:
        """The others of its batch go on with the next job."""
        seq = self._live[error.seq_id]
        assert isinstance(error.__cause__, Exception)
        seq.error = error.__cause__
        self.cancel(seq.seq_id)

    def _undo(self, job: Job) -> None:
        """Leave every sequence as it was before `job`, so that others can go on after an error."""
        ids = {work.seq_id for work in job.works}
        self.target.state.commit(dict.fromkeys(ids, ()))
        self.ledger.undo(job)
        for seq_id in ids:
            self._mend(self._live[seq_id])

    def _mend(self, seq: LiveSequence) -> None:
        """An interrupt may fall between memory and text, or between text and the end of the job."""
        ended = seq.finish is not None
        is_ahead = self.target.state.length(seq.seq_id) >= len(seq.tokens)
        if not ended and not is_ahead:
            return
        self.ledger.drop(seq.seq_id)
        self._close(seq.seq_id)
        if not ended:
            # Memory holds more than was said: read the text again.
            self._open(seq)

    def _sequences(self, job: Job, stage: Stage) -> Sequence[LiveSequence]:
        return [self._live[work.seq_id] for work in job.of(stage)]

    def _close(self, seq_id: int) -> None:
        del self._live[seq_id]
        self.target.state.close(seq_id)
        self.drafter.close(seq_id)

    def _need(self, seq: LiveSequence) -> int:
        """Arena tokens, in whole pages, that the sequence may come to hold."""
        tokens = seq.prompt_length + seq.limit + self.spare
        return -(-tokens // self.page_size) * self.page_size
