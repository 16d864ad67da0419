"""A job of several rounds says and keeps what as many jobs of one do, whatever fails within it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from checks.state import VOCAB
from doubles.rig import Rig, model_drafter
from doubles.tiny_attention import TinyAttentionLM
from doubles.toy_hybrid import ToyHybrid
from engine.test_failures import REQUESTS, FailingAt, FaultError, submitted, written
from outrider import LLM
from outrider.api.output import OutputStream
from outrider.core.draft import JobTrace, Outcome
from outrider.core.params import SamplingParams
from outrider.engine.engine import Engine
from outrider.engine.round import LiveSequence
from outrider.plugins.lanes.schedules import PrefillDecode
from outrider.verify.exact import TokenRule

LONG = 60.0


def rig(schedule: PrefillDecode | None = None, *, num_slots: int = 256, **options: Any) -> Rig:
    target = ToyHybrid(vocab_size=VOCAB, num_slots=num_slots)
    draft = ToyHybrid(vocab_size=VOCAB, seed=5)
    return Rig(target, model_drafter(draft, 3), TokenRule(), k=3, schedule=schedule, **options)


def jobs_of(engine: Engine, seconds: float) -> list[list[Outcome]]:
    jobs: list[list[Outcome]] = []
    while engine.has_work:
        jobs.append(engine.step(seconds))
        assert len(jobs) < 500
    return jobs


def told(jobs: Sequence[Sequence[Outcome]], seqs: Sequence[LiveSequence]) -> list[list[int]]:
    """What the outcomes say that was written."""
    texts: dict[int, list[int]] = {seq.seq_id: [] for seq in seqs}
    for outcome in (outcome for job in jobs for outcome in job):
        texts[outcome.seq_id] += outcome.tokens
    return list(texts.values())


def rounds_run(seconds: float, **options: Any) -> tuple[list[int], list[list[int]]]:
    """How many outcomes each job had, and the texts."""
    engine = rig(**options).engine()
    seqs = submitted(rig(), engine)
    jobs = jobs_of(engine, seconds)
    assert told(jobs, seqs) == written(seqs)
    return [len(job) for job in jobs], written(seqs)


def test_a_job_goes_on_until_a_text_ends() -> None:
    one, texts = rounds_run(0.0)
    several, same_texts = rounds_run(LONG)
    assert texts == same_texts == rig().run(REQUESTS)
    assert sum(one) == sum(several)
    assert max(one) <= len(REQUESTS) < max(several)
    # One that reads the prompts, and one for each text that ends.
    assert len(several) <= 1 + len(REQUESTS)


@pytest.mark.parametrize(
    "options",
    [{"reserve": 0.0, "num_slots": 40}, {"schedule": PrefillDecode(8)}],
    ids=["little memory", "two lanes"],
)
def test_where_others_wait_for_it_a_job_has_one_round(options: dict[str, Any]) -> None:
    sizes, _ = rounds_run(LONG, **options)
    assert max(sizes) <= len(REQUESTS)


def test_who_hears_of_jobs_hears_of_each_round() -> None:
    engine, heard = rig().engine(), list[JobTrace]()
    engine.jobs = heard.append
    seqs = submitted(rig(), engine)
    jobs = jobs_of(engine, LONG)
    assert max(map(len, jobs)) > len(REQUESTS)
    assert sum(seq.num_rounds for seq in seqs) == sum(
        len(job.seq_ids) for job in heard if "verify" in job.kinds
    )
    times = [time for job in heard for time in (job.began, job.ended)]
    assert times == sorted(times)
    assert all(job.seconds > 0 for job in heard)


def test_what_fails_is_told_of_the_round_that_it_failed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    target, heard = TinyAttentionLM(vocab_size=VOCAB), list[JobTrace]()
    step = target.step

    def failing(rows: Any, needs: Any) -> Any:
        if target.state.length(0) > 8:
            raise FaultError
        return step(rows, needs)

    monkeypatch.setattr(target, "step", failing)
    one = Rig(target, k=0)
    engine = one.engine()
    engine.jobs = heard.append
    seq = one.live(0, REQUESTS[0])
    engine.submit(seq)
    assert len(jobs_of(engine, LONG)) < len(heard)
    assert isinstance(seq.error, FaultError)
    assert [job.num_failed for job in heard] == [0] * (len(heard) - 1) + [1]


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("part", ["target", "drafter", "rule"])
def test_what_was_written_before_a_fault_is_told(
    part: str, before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = FailingAt((2, 3, 6), before)
    one = rig()
    place = {"target": (one.target, "step"), "drafter": (one.drafter, "propose")}
    owner, name = place.get(part, (TokenRule, "__call__"))
    monkeypatch.setattr(owner, name, failing.wrap(getattr(owner, name)))
    engine = one.engine()
    seqs = submitted(one, engine)
    free = one.target.state.num_free_tokens
    jobs = jobs_of(engine, LONG)
    assert failing.num_raised
    monkeypatch.undo()
    assert told(jobs, seqs) == written(seqs) == rig().run(REQUESTS)
    assert one.target.state.num_free_tokens == free


def test_who_fails_in_a_later_round_keeps_what_was_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = TinyAttentionLM(vocab_size=VOCAB)
    wanted = Rig(TinyAttentionLM(vocab_size=VOCAB), k=0).run(REQUESTS)
    step = target.step

    def failing(rows: Any, needs: Any) -> Any:
        if any(row.seq_id == 1 and target.state.length(1) > 14 for row in rows):
            raise FaultError
        return step(rows, needs)

    monkeypatch.setattr(target, "step", failing)
    one = Rig(target, k=0)
    engine = one.engine()
    seqs = submitted(one, engine)
    jobs = jobs_of(engine, LONG)
    assert [type(seq.error) for seq in seqs] == [type(None), FaultError, type(None)]
    texts = told(jobs, seqs)
    assert texts == written(seqs)
    assert texts[0] == wanted[0]
    assert texts[2] == wanted[2]
    assert 0 < len(texts[1]) < len(wanted[1])
    assert texts[1] == wanted[1][: len(texts[1])]


@pytest.mark.weights
def test_a_stream_has_an_event_a_round_with_its_own_tokens_and_text() -> None:
    llm = LLM(drafter="none")
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    events = list(llm.stream("Once upon a time", params))
    whole = llm.generate("Once upon a time", params)[0]
    assert [token for event in events for token in event.token_ids] == list(whole.token_ids)
    assert "".join(piece for event in events for piece in event.pieces) == whole.text
    assert len(events) == 40
    assert all(len(event.pieces) == 1 for event in events)


@pytest.mark.weights
def test_who_cancels_within_a_callback_hears_no_more() -> None:
    llm = LLM(drafter="none")
    handle = llm.submit("Once upon a time", max_tokens=200, ignore_eos=True)
    heard: list[int] = []

    def on_event(reader: OutputStream) -> None:
        heard.append(len(list(reader.events())))
        if len(heard) == 3:
            llm.cancel(handle)

    handle.reader.on_event = on_event
    while llm.has_work:
        llm.advance()
    assert heard == [1, 1, 1]
