"""Memory, ledger and schedule as one state machine, and whole histories of it on lanes.

Requests come, are read, drafted for and verified on whatever lanes the schedule has; any path of a
draft may be accepted; jobs fail, memory ends, the youngest is pre-empted, requests are aborted,
forked, and all of it is lost and begun again. The model of it is the text of each request, from
which follows what its memory holds and what it waits for.
"""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from checks.effort import examples
from checks.state import path_to
from doubles.lanes import SCHEDULES, Arrival, Lanes, Ran
from doubles.stamped import StampedArena
from outrider.core.draft import Draft
from outrider.core.errors import CapacityError, ContractError
from outrider.core.protocols import StepRow
from outrider.core.tree import ROOT
from outrider.sched.jobs import Job, JobKind, LaneSizes, Ledger, Stage

VOCAB = 4
MOST_LIVE = 5
# Often shared, and with the same pages behind another beginning.
BEGINNINGS = ((1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0), (2, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0))
# Forks are what most of it is about.
TROUBLE = ("fork", "fork", "fork", "fail", "fail", "preempt", "abort", "restart")
batches = st.integers(1, 4)
sizes = st.builds(LaneSizes, st.integers(1, 8), batches, batches, batches)
tokens = st.integers(0, VOCAB - 1)


class Machine(RuleBasedStateMachine):
    """`texts` are the requests that live, each with its pending token. `jobs` are those that run,
    by lane, and `drafts` the drafts that wait or are being verified."""

    schedule_name = "single"

    def __init__(self) -> None:
        super().__init__()
        self.texts: dict[int, list[int]] = {}
        self.jobs: dict[str, Job] = {}
        self.drafts: dict[int, Draft] = {}
        self.next_id = 0

    @initialize(
        page_size=st.integers(1, 4),
        num_slots=st.integers(20, 60),
        sizes=sizes,
        reach=st.sampled_from((0, 1, 3, 6)),
        num_local_slots=st.sampled_from((0, 0, 20, 40)),
    )
    def begin(
        self, page_size: int, num_slots: int, sizes: LaneSizes, reach: int, num_local_slots: int
    ) -> None:
        self.page_size, self.num_slots, self.sizes = page_size, num_slots, sizes
        self.reach, self.num_local_slots = reach, num_local_slots if reach else 0
        self._build()

    @precondition(lambda self: len(self.texts) < MOST_LIVE)
    @rule(text=st.sampled_from(BEGINNINGS), length=st.integers(1, 12), more=tokens)
    def add(self, text: tuple[int, ...], length: int, more: int) -> None:
        self._add([*text[:length], more])

    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        """An idle lane takes its next job, as far as memory goes."""
        idle = [lane for lane in self.schedule.lanes if lane not in self.jobs]
        if not idle:
            return
        lane = data.draw(st.sampled_from(idle))
        free = self.arena.state.num_free_tokens
        pool = self.ledger.pool(free, patient=bool(self.jobs))
        job = self.schedule.next_job(lane, pool, self.ledger.num_live)
        if job is None:
            return
        self.ledger.start(job)
        for work in job.of(Stage.DRAFT):
            self.drafts[work.seq_id] = data.draw(drafts)
        rows = self._rows(job)
        try:
            if rows:
                self.arena.step(rows)
        except CapacityError:
            self.ledger.undo(job)
            self._preempt_youngest()
        else:
            self.jobs[lane] = job

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """A job ends well: chunks are kept, and of every draft any path."""
        lane = data.draw(st.sampled_from(sorted(self.jobs)))
        job = self.jobs.pop(lane)
        paths = {work.seq_id: range(work.num_tokens) for work in job.of(Stage.PREFILL)}
        self.arena.commit(paths)
        finished = {
            work.seq_id: self._verify(data, work.seq_id, work.num_tokens)
            for work in job.of(Stage.VERIFY)
        }
        self.ledger.finish(job, finished.__getitem__)
        for seq_id in [seq_id for seq_id, is_over in finished.items() if is_over]:
            self._forget(seq_id)

    @rule(data=st.data(), kind=st.sampled_from(TROUBLE))
    def meet(self, data: st.DataObject, kind: str) -> None:
        """Something that is no request's ordinary course."""
        if kind == "restart":
            self._restart()
        elif kind == "fail":
            self._fail(data)
        elif idle := self._idle():
            seq_id = data.draw(st.sampled_from(idle))
            text = self.texts[seq_id]
            if kind == "fork":
                self._fork(data, seq_id)
                return
            self._abort(seq_id)
            if kind == "preempt":
                self._add(text, seq_id)

    @invariant()
    def no_page_is_lost_or_counted_twice(self) -> None:
        self.arena.state.check()
        if not self.texts:
            whole = -(-self.num_slots // self.page_size) * self.page_size
            assert self.arena.state.num_free_tokens == whole

    @invariant()
    def every_memory_is_that_of_its_text(self) -> None:
        """Also of those that share its pages, and of those that run meanwhile."""
        for seq_id, text in self.texts.items():
            self.arena.check(seq_id)
            read = self.arena.texts[seq_id]
            assert read == text[: len(read)]
            assert len(read) < len(text)

    @invariant()
    def everybody_stands_in_one_place(self) -> None:
        assert self.ledger.num_live == len(self.texts)
        pool = self.ledger.pool(0)
        waiting = [*pool.prefill, *pool.draft, *pool.verify]
        running = [i for job in self.jobs.values() for i in job.seq_ids if not is_ahead(job)]
        assert sorted([*running, *(work.seq_id for work in waiting)]) == sorted(self.texts)
        for work in waiting:
            assert work.num_tokens == len(self.texts[work.seq_id]) - self._length(work.seq_id)
            assert self.arena.state.num_staged(work.seq_id) == 0
            assert (work in pool.prefill) <= (work.num_tokens > 1)
        verified = {w.seq_id for job in self.jobs.values() for w in job.of(Stage.VERIFY)}
        assert {work.seq_id for work in pool.ahead} <= verified

    def _fail(self, data: st.DataObject) -> None:
        """A job fails: nothing of it stays."""
        if not self.jobs:
            return
        job = self.jobs.pop(data.draw(st.sampled_from(sorted(self.jobs))))
        if not is_ahead(job):
            self.arena.commit(dict.fromkeys(job.seq_ids, ()))
        self.ledger.undo(job)

    def _fork(self, data: st.DataObject, source: int) -> None:
        """A twin goes on from some place that its source has read."""
        length = data.draw(st.integers(0, self._length(source)))
        free = self.arena.state.num_free_tokens
        try:
            self.arena.fork(source, self.next_id, length)
        except (CapacityError, ContractError) as error:
            # Where there was a window, the beginning may be gone.
            gone = isinstance(error, ContractError)
            assert not gone or (self.reach and length < self._length(source))
            assert self.arena.state.num_free_tokens == free
            return
        text = [*self.texts[source][:length], data.draw(tokens)]
        self.texts[self.next_id] = text
        self.ledger.add(self.next_id, len(text) - length)
        self.next_id += 1

    def _restart(self) -> None:
        """Everything but the texts is gone."""
        self._build()
        for seq_id, text in list(self.texts.items()):
            self._add(text, seq_id)

    def _build(self) -> None:
        self.arena = StampedArena(
            num_slots=self.num_slots,
            page_size=self.page_size,
            reach=self.reach,
            num_local_slots=self.num_local_slots,
        )
        self.ledger = Ledger(drafts_ahead=self.schedule_name == "ssd")
        self.schedule = SCHEDULES[self.schedule_name](self.sizes)
        self.jobs, self.drafts = {}, {}

    def _add(self, text: list[int], seq_id: int | None = None) -> None:
        if seq_id is None:
            seq_id, self.next_id = self.next_id, self.next_id + 1
        self.texts[seq_id] = text
        reused = self.arena.open(seq_id, text[:-1])
        assert reused == len(self.arena.texts[seq_id]) < len(text)
        self.ledger.add(seq_id, len(text) - reused)

    def _length(self, seq_id: int) -> int:
        return len(self.arena.texts[seq_id])

    def _idle(self) -> list[int]:
        return [seq_id for seq_id in self.texts if not self.ledger.is_running(seq_id)]

    def _forget(self, seq_id: int) -> None:
        del self.texts[seq_id]
        self.drafts.pop(seq_id, None)
        self.arena.close(seq_id)

    def _abort(self, seq_id: int) -> None:
        self.ledger.drop(seq_id)
        self._forget(seq_id)

    def _preempt_youngest(self) -> None:
        if idle := self._idle():
            self._abort(max(idle))

    def _rows(self, job: Job) -> list[StepRow]:
        rows: list[StepRow] = []
        for work in job.of(Stage.PREFILL):
            unread = self.texts[work.seq_id][self._length(work.seq_id) :]
            rows.append(StepRow.chain(work.seq_id, unread[: work.num_tokens]))
        for work in job.of(Stage.VERIFY):
            unread = self.texts[work.seq_id][self._length(work.seq_id) :]
            assert len(unread) == work.num_tokens
            draft = self.drafts[work.seq_id]
            parents = [len(unread) + parent for parent in draft.parents]
            chain = range(ROOT, len(unread) - 1)
            rows.append(StepRow(work.seq_id, (*unread, *draft.tokens), (*chain, *parents)))
        return rows

    def _verify(self, data: st.DataObject, seq_id: int, num_unread: int) -> bool:
        """Keep some path of a draft and one token more; whether that was the request's last."""
        draft = self.drafts.pop(seq_id)
        leaf = data.draw(st.integers(ROOT, len(draft) - 1))
        path = path_to(draft.parents, leaf)
        self.arena.commit({seq_id: [*range(num_unread), *(num_unread + node for node in path)]})
        self.texts[seq_id] += [*(draft.tokens[node] for node in path), data.draw(tokens)]
        return data.draw(st.integers(0, 3)) == 0


def is_ahead(job: Job) -> bool:
    return job.kind is JobKind.AHEAD


@st.composite
def _drafts(draw: st.DrawFn) -> Draft:
    parents = [draw(st.integers(ROOT, node - 1)) for node in range(draw(st.integers(0, 4)))]
    return Draft(tuple(draw(tokens) for _ in parents), tuple(parents))


drafts = _drafts()


def check_histories(name: str, *, percent: int) -> None:
    machine = type("Scheduled", (Machine,), {"schedule_name": name})
    run_state_machine_as_test(
        machine,
        settings=settings(
            examples(percent),
            stateful_step_count=40,
            phases=[Phase.generate],
            report_multiple_bugs=False,
        ),
    )


def histories() -> None:
    """Of the schedule that has every kind of job."""
    check_histories("ssd", percent=30)


def passes_of(ran: Sequence[Ran], seq_id: int) -> list[int]:
    """What each pass that read prompts, while `seq_id` waited for that, gave to it."""
    given: list[int] = []
    for each in ran:
        waiting = {work.seq_id for work in each.pool.prefill}
        reads = [w for s in (Stage.PREFILL, Stage.VERIFY) for w in each.job.of(s)]
        if seq_id in waiting and any(work.seq_id in waiting for work in reads):
            given.append(sum(work.num_tokens for work in reads if work.seq_id == seq_id))
    return given


def waits(name: str, chunk: int, requests: Sequence[Arrival]) -> list[Ran]:
    """All jobs, where each takes a second."""
    lanes = Lanes(
        SCHEDULES[name](LaneSizes(chunk)),
        requests,
        cost=lambda lane, job: 1.0,
        drafts_ahead=name == "ssd",
    )
    return lanes.run()


def check_long_prompt(name: str, long: int, chunk: int, short: Sequence[Arrival]) -> None:
    """While others come, a long prompt gets half of each chunk, and so comes to its end."""
    passes = passes_of(waits(name, chunk, [Arrival(long, 1), *short]), 0)
    assert len(passes) <= -(-long // (chunk // 2)) + 1
    left = long
    for count in passes:
        assert count >= min(left - 1, chunk // 2)
        left -= count


def check_short_prompts(name: str, long: int, shorts: Sequence[int], chunk: int) -> None:
    """The other half of each chunk is theirs, the shortest first."""
    ran = waits(name, chunk, [Arrival(long, 1), *(Arrival(count, 1) for count in shorts)])
    for seq_id, count in enumerate(shorts, start=1):
        before = sum(n for n in shorts if n <= count)
        assert len(passes_of(ran, seq_id)) <= -(-before // (chunk - chunk // 2))


def fairness() -> None:
    for name in SCHEDULES:
        for every in (0.5, 1.0):
            stream = [Arrival(8, 1, index * every) for index in range(40)]
            check_long_prompt(name, 60, 8, stream)
        check_short_prompts(name, 90, (20, 3, 9, 3), 8)
