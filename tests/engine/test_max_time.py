"""A request whose time is up ends with what it has, wherever it is; nobody else notices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from checks.engine import PROMPT, greedy
from checks.state import VOCAB
from doubles.clocks import FakeClock
from doubles.drafters import random_trees
from doubles.rig import Request, Rig
from doubles.tiny_attention import TinyAttentionLM
from doubles.toy_hybrid import ToyHybrid
from outrider import LLM, EngineConfig, SamplingParams
from outrider.api.result import TextEvent
from outrider.engine.engine import Engine

TEXT = "def f(x):"
LONG = SamplingParams(max_tokens=60, ignore_eos=True)
TIMED = replace(LONG, max_time=5.0)
SCHEDULES = ["single", "pd", "pdv", "ssd"]


def timed(engine: Engine) -> FakeClock:
    engine.residents.clock = clock = FakeClock(seconds=100.0)
    return clock


def engine_with(rig: Rig, *params: SamplingParams) -> tuple[Engine, FakeClock]:
    engine = rig.engine()
    clock = timed(engine)
    rig.sequences = [rig.live(i, Request(PROMPT, one)) for i, one in enumerate(params)]
    for seq in rig.sequences:
        engine.submit(seq)
    return engine, clock


def run(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def test_one_that_waits_ends_without_a_token() -> None:
    rig = Rig(ToyHybrid(vocab_size=VOCAB), k=0, batch_size=1)
    engine, clock = engine_with(rig, greedy(30), replace(greedy(30), max_time=5.0))
    for _ in range(3):
        engine.step()
        assert not engine.given_up()
    clock.advance(5)
    engine.step()
    first, second = rig.sequences
    assert engine.given_up() == [second]
    assert (second.finish, second.num_emitted, second.error) == ("timeout", 0, None)
    run(engine)
    assert (first.finish, first.num_emitted) == ("length", 30)


@pytest.mark.sample(4)
@pytest.mark.parametrize("num_steps", range(6))
def test_one_that_runs_ends_between_rounds_in_every_stage(num_steps: int) -> None:
    """While its prompt is read, too: the chunk is two tokens."""
    free = ToyHybrid(vocab_size=VOCAB).state.num_free_tokens
    rig = Rig(ToyHybrid(vocab_size=VOCAB), random_trees(VOCAB), k=3, chunk=2)
    engine, clock = engine_with(rig, replace(greedy(50), max_time=5.0), greedy(50))
    wanted = Rig(ToyHybrid(vocab_size=VOCAB), k=0).outputs([PROMPT], greedy(50))[0]
    for _ in range(num_steps):
        engine.step()
    clock.advance(5)
    run(engine)
    short, whole = rig.sequences
    assert short.finish == "timeout"
    assert engine.given_up() == [short]
    assert short.num_emitted < 50
    assert wanted[: short.num_emitted] == short.tokens[short.prompt_length :]
    assert whole.tokens[whole.prompt_length :] == wanted
    assert rig.target.state.num_free_tokens == free
    counts = engine.residents.counts
    assert (counts.completed, counts.cancelled, counts.failed) == (2, 0, 0)


def test_one_that_lost_its_memory_ends_while_it_waits_again() -> None:
    target = TinyAttentionLM(vocab_size=VOCAB, page_size=4, num_slots=48)
    rig = Rig(target, k=0, batch_size=2, spare=4, reserve=0.01)
    engine, clock = engine_with(rig, greedy(30), replace(greedy(30), max_time=5.0))
    second = rig.sequences[1]
    while not second.num_preempted:
        engine.step()
    clock.advance(5)
    run(engine)
    assert (second.finish, second.num_preempted) == ("timeout", 1)
    assert second.num_emitted
    assert rig.sequences[0].num_emitted == 30


def test_time_that_is_not_up_changes_nothing() -> None:
    rig = Rig(ToyHybrid(vocab_size=VOCAB), k=2)
    engine, clock = engine_with(rig, replace(greedy(20), max_time=5.0))
    while engine.has_work:
        engine.step()
        clock.advance(0.01)
    assert rig.sequences[0].finish == "length"
    assert not engine.given_up()
    clock.advance(100)
    assert not engine.residents.overdue()


@pytest.mark.sample(2)
@pytest.mark.weights
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_stream_ends_with_the_text_it_has(schedule: str) -> None:
    """That text is the beginning of what it would be, what a stop string held back included."""
    llm = LLM(config=EngineConfig(schedule=schedule, k=2, device="cpu"))
    (wanted,) = llm.generate(TEXT, LONG)
    free = llm.free_tokens
    clock = timed(llm._engine)  # pyright: ignore[reportPrivateUsage]
    # Held back from the text's first character on, and never seen whole.
    stop = wanted.text[: len(wanted.text) // 2] + "\0"
    other = llm.submit(TEXT, LONG)
    events: list[TextEvent] = []
    for event in llm.stream(TEXT, replace(TIMED, stop=(stop[:200],))):
        events.append(event)
        clock.advance(1)
    result = llm.last_result
    assert result.finish_reason == "timeout"
    assert 0 < result.num_tokens < 60
    assert result.token_ids == wanted.token_ids[: result.num_tokens]
    assert result.text == "".join(event.text for event in events)
    assert wanted.text.startswith(result.text)
    assert sum(len(event.token_ids) for event in events) == result.num_tokens
    while not other.done:
        llm.advance()
    assert other.result().token_ids == wanted.token_ids
    assert llm.free_tokens == free
    assert llm.generate(TEXT, LONG)[0].token_ids == wanted.token_ids
    llm.close()


@pytest.mark.weights
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_batch_whose_time_is_up_at_once_comes_to_an_end(schedule: str) -> None:
    """Samples that wait for the first one to read the prompt are not forgotten either."""
    llm = LLM(config=EngineConfig(schedule=schedule, k=2, batch_size=2, device="cpu"))
    results = llm.generate([TEXT] * 3, replace(LONG, max_time=1e-9, n=3))
    assert [r.finish_reason for r in results] == ["timeout"] * 9
    assert llm.counts.completed == 9
    assert not llm.has_work
    llm.close()
