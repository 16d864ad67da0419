"""Drafter in another process: the engine's side, which looks like any other drafter.

Each round sends only new tokens; a sequence that the process does not know yet is sent whole. A
process that dies, hangs or sends invalid answers costs drafts and never text: its rows get empty
drafts until the next process serves. `propose_after` only sends: the process drafts ahead while the
target verifies, and answers the next `propose` when it is done.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from threading import Lock

from outrider.cache.pages import SALT
from outrider.core.draft import Draft
from outrider.core.errors import DrafterError, MachineError, OutriderError
from outrider.core.protocols import AheadRow, DraftNeeds, DraftRow
from outrider.core.rng import KeyedRng
from outrider.plugins.lanes.process.frames import Frame, Kind
from outrider.plugins.lanes.process.messages import (
    Answer,
    Asked,
    AskedAhead,
    Proposal,
    SamplingTerms,
    about,
    asking,
    key_of,
    read_failure,
)
from outrider.plugins.lanes.process.options import ChildOptions
from outrider.plugins.lanes.process.worker import CHILD, RestartBackoff, WorkerKeeper, WorkerLine


@dataclass(slots=True)
class _Sent:
    """The state of a sequence that the process at the end of `line` knows. The digest `salt` stands
    for the salt of its request."""

    salt: str = ""
    line: WorkerLine | None = None
    num_tokens: int = 0
    terms: SamplingTerms | None = None


@dataclass(frozen=True, slots=True)
class ProcessStats:
    """Statistics of the process. `pid` is None while no process serves. `num_unserved` counts rows
    that got an empty draft without a process; `reasons` says why the latest ones ended. The seconds
    are those of drafting while the engine waited, and of drafting ahead."""

    pid: int | None
    num_starts: int
    num_ends: int
    num_unserved: int
    draft_seconds: float
    ahead_seconds: float
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """Settings of the process: the seconds after which an engine gives a drafter up, the device of
    its distributions, the pace of restarts, and the program.

    The process must answer in less, `patience`: an engine never again uses a drafter that it gave
    up, while a hung process is replaced."""

    timeout: float
    probs_device: str = "cpu"
    pace: RestartBackoff = field(default_factory=RestartBackoff)
    command: Sequence[str] = CHILD

    @property
    def patience(self) -> float:
        return 0.8 * self.timeout


class ProcessDrafter:
    """A drafter in a process, which starts in the background; `wait_ready` waits for it.

    `propose` and `propose_after` come from one thread at a time, everything else from any.
    """

    name = "model"
    needs = DraftNeeds()

    def __init__(self, options: ChildOptions, home: Home) -> None:
        """Start the process. Raises MachineError if a process cannot inherit descriptors."""
        if os.name != "posix":
            raise MachineError(
                f"a drafter cannot have a process of its own on {os.name}: it needs POSIX.",
                hint="run the drafter inside the engine: --drafter-home thread",
            )
        self._options = options
        self._home = home
        self._known: dict[int, _Sent] = {}
        self._lock = Lock()
        self._num_unserved = 0
        self._draft_seconds = 0.0
        self._ahead_seconds = 0.0
        self._start()

    def wait_ready(self) -> None:
        """Wait for the process. Raises DrafterError, with the reason, if the first process cannot
        serve; the drafter is then shut down."""
        self._keeper.wait(self._home.pace.start)

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        """Open a sequence. It is sent to the process with the first request for a draft. After
        `shut_down` a new process is started and awaited."""
        del prompt
        # A digest: any string can be a salt, and a message has text in UTF-8.
        given = SALT.get().encode("utf-8", "surrogatepass")
        salt = sha256(given).hexdigest() if given else ""
        if not self._end.alive:
            self._start()
            self.wait_ready()
        with self._lock:
            self._known[seq_id] = _Sent(salt)

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        """Return the process's drafts. Raises what its drafter raised, as CapacityError or
        DrafterError; the process lives on."""
        line = self._keeper.line
        if line is None or not rows:
            return self._unserved(len(rows))
        num_new = sum(len(row.tokens) for row in rows if not self._knows(line, row.seq_id))
        indices = self._queue(line, rows)
        if not indices:
            return self._unserved(len(rows))
        try:
            proposed = self._read(line, line.ask(num_new), len(indices))
        except (OSError, DrafterError) as error:
            line.drop(error)
            return self._unserved(len(rows))
        if isinstance(proposed, OutriderError):
            raise proposed
        drafts = [Draft.empty()] * len(rows)
        for index, draft in zip(indices, proposed, strict=True):
            drafts[index] = draft
        return drafts

    def propose_after(self, rows: Sequence[AheadRow]) -> None:
        """Send the rows to draft ahead for, if the process can."""
        line, hello = self._keeper.line, self._keeper.hello
        if line is None or hello is None or not hello.drafts_ahead:
            return
        with self._lock:
            asked = [_asked_ahead(row) for row in rows if self._knows(line, row.seq_id)]
            if asked:
                line.queue([asking(Kind.AHEAD, asked)])
        line.flush()

    def close(self, seq_id: int) -> None:
        line = self._keeper.line
        with self._lock:
            sent = self._known.pop(seq_id)
            known = line is not None and sent.line is line
            if line is not None and known:
                line.queue([about(Kind.CLOSE, seq_id)])
        if line is not None and known:
            line.flush()

    def shut_down(self) -> None:
        """End the process and wait for its end. Until a sequence is opened all drafts are empty."""
        self._end()

    def stats(self) -> ProcessStats:
        keeper, line = self._keeper, self._keeper.line
        return ProcessStats(
            pid=None if line is None else line.process.pid,
            num_starts=keeper.num_starts,
            num_ends=keeper.num_ends,
            num_unserved=self._num_unserved,
            draft_seconds=self._draft_seconds,
            ahead_seconds=self._ahead_seconds,
            reasons=tuple(keeper.reasons),
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on this run for the user; empty if all went well."""
        stats = self.stats()
        if not stats.num_ends:
            return ()
        times = "once" if stats.num_ends == 1 else f"{stats.num_ends} times"
        return (
            f"the drafter's process was lost {times} (the last time {stats.reasons[-1]}), and "
            f"{stats.num_unserved} drafts were left out",
        )

    def _start(self) -> None:
        options, home = self._options, self._home
        self._keeper = WorkerKeeper(
            lambda: WorkerLine(options, timeout=home.patience, command=home.command), home.pace
        )
        self._end = weakref.finalize(self, self._keeper.stop)

    def _unserved(self, count: int) -> list[Draft]:
        self._num_unserved += count
        return [Draft.empty()] * count

    def _queue(self, line: WorkerLine, rows: Sequence[DraftRow]) -> list[int]:
        """Queue the request; return the indices of the rows in it, all but those just closed."""
        # Before anything is recorded as sent.
        keys = [key_of(row.rng) for row in rows]
        with self._lock:
            indices = [i for i, row in enumerate(rows) if row.seq_id in self._known]
            frames = [f for i in indices for f in self._introduction(line, rows[i])]
            if indices:
                asked = [self._asked(rows[i], keys[i]) for i in indices]
                line.queue([*frames, asking(Kind.PROPOSE, asked)])
        return indices

    def _introduction(self, line: WorkerLine, row: DraftRow) -> list[Frame]:
        """Return the frames that the process needs of the sequence before a request."""
        sent = self._known[row.seq_id]
        frames: list[Frame] = []
        if sent.line is not line:
            sent.line, sent.num_tokens, sent.terms = line, len(row.tokens), None
            frames.append(about(Kind.OPEN, row.seq_id, row.tokens, sent.salt))
        terms = SamplingTerms(row.params, row.shaper)
        if not terms.same(sent.terms):
            sent.terms = terms
            frames.append(terms.frame(row.seq_id))
        return frames

    def _asked(self, row: DraftRow, key: KeyedRng) -> Asked:
        sent = self._known[row.seq_id]
        num_known = min(sent.num_tokens, len(row.tokens))
        sent.num_tokens = len(row.tokens)
        new = row.tokens[num_known:]
        return Asked(row.seq_id, num_known, new, row.budget, key, row.last)

    def _knows(self, line: WorkerLine, seq_id: int) -> bool:
        sent = self._known.get(seq_id)
        return sent is not None and sent.line is line

    def _read(self, line: WorkerLine, answer: Frame, count: int) -> list[Draft] | OutriderError:
        """Return the drafts, or the error that came instead. Raises DrafterError for an answer to
        another request."""
        if answer.kind is Kind.FAILED:
            return read_failure(answer.body)
        if answer.kind is not Kind.DRAFTS:
            raise DrafterError(f"it answered {answer.kind.name} instead of DRAFTS")
        received = Answer.read(answer.body)
        if len(received.proposals) != count:
            raise DrafterError(f"it returned {len(received.proposals)} drafts for {count} rows")
        drafts = [self._with_distributions(line, proposal) for proposal in received.proposals]
        self._draft_seconds += received.draft_seconds
        self._ahead_seconds += received.ahead_seconds
        return drafts

    def _with_distributions(self, line: WorkerLine, proposal: Proposal) -> Draft:
        draft = proposal.draft
        if proposal.first_distribution is None:
            return draft
        probs_NV = line.distributions.read(
            proposal.first_distribution, len(draft), self._home.probs_device
        )
        return Draft(draft.tokens, draft.parents, probs_NV, draft.hit)


def _asked_ahead(row: AheadRow) -> AskedAhead:
    # Only the start of the numbers after n tokens depends on n.
    key = key_of(row.rng_after(0))
    return AskedAhead(row.seq_id, row.start, row.pending, row.draft, row.budget, key, row.window)
