"""One request's reader: arrivals by the clock, and text that a failed round does not spoil."""

from __future__ import annotations

import signal
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from doubles.clocks import FakeClock
from outrider import LLM, EngineConfig, SamplingParams
from outrider.api.output import MemoryWatch, OutputStream
from outrider.api.result import GenerationResult
from outrider.api.stream import StopMatcher
from outrider.api.tokenizer import Tokenizer
from outrider.core import process
from outrider.core.draft import Draft, Outcome, Verdict
from outrider.core.params import FinishReason
from outrider.core.params import SamplingParams as Params
from outrider.engine.round import LiveSequence, clamp
from outrider.models.loading import resolve

TOKENIZER = Tokenizer.load(resolve("outrider/embedded"))
VOCAB = TOKENIZER.vocab_size


class Characters:
    """A decoder whose id n is the character chr(n)."""

    special_ids: frozenset[int] = frozenset()
    whole_characters = True

    def token_bytes(self, token_id: int) -> bytes | None:
        del token_id
        return None

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        assert skip_special
        return "".join(map(chr, ids))


class Scale:
    """A gauge that always shows the same."""

    def take(self) -> int:
        return 5

    def peak(self) -> int | None:
        return 7


def reader_of(*stops: str) -> tuple[OutputStream, FakeClock]:
    seq = LiveSequence(seq_id=0, tokens=[1], prompt_length=1, params=Params(), limit=50)
    clock = FakeClock(100.0)
    return OutputStream(seq, StopMatcher(Characters(), stops), live=True, clock=clock), clock


def arrive(reader: OutputStream, text: str) -> None:
    """A round that drafted all but the last character, and was believed."""
    ids = [ord(character) for character in text]
    outcome = Outcome(0, Draft.chain(ids[:-1]), Verdict(tuple(range(len(ids) - 1)), ids[-1]))
    assert reader.seq.match is not None
    reader.seq.match(outcome.tokens)
    reader.seq.tokens += outcome.tokens
    reader.take(outcome)


def result_of(reader: OutputStream) -> GenerationResult:
    watch = MemoryWatch(Scale(), active=True)
    return reader.result(drafter="model", k=4, profile=True, exact=True, memory=watch)


def test_tokens_of_a_round_arrive_together() -> None:
    reader, clock = reader_of()
    clock.advance(1)
    reader.start()
    for text, seconds in (("abc", 0.25), ("d", 0.5)):
        clock.advance(seconds)
        arrive(reader, text)
    clock.advance(9)
    result = result_of(reader)
    assert result.token_seconds == (0.25, 0.25, 0.25, 0.75)
    assert result.total_seconds == 0.75
    assert result.text == "abcd"


def test_a_request_without_a_token_took_no_time() -> None:
    reader, clock = reader_of()
    reader.start()
    clock.advance(3)
    assert (result_of(reader).total_seconds, result_of(reader).token_seconds) == (0, ())


def test_memory_comes_from_the_watch() -> None:
    reader, _ = reader_of()
    reader.start()
    result = result_of(reader)
    assert result.peak_memory_bytes == 7
    assert result.memory is not None
    assert result.memory.load_bytes == 5


def test_a_round_that_failed_is_read_once() -> None:
    reader, _ = reader_of("END")
    reader.start()
    arrive(reader, "go E")
    assert reader.seq.match is not None
    for _ in range(3):
        reader.seq.match([ord(character) for character in "ND of a round that died"])
    arrive(reader, "xy")
    assert "".join(event.text for event in reader.events()) == "go Exy"


def test_an_ending_that_failed_may_come_again_or_not() -> None:
    reader, _ = reader_of("END")
    reader.start()
    arrive(reader, "a")
    assert reader.seq.match is not None
    ending = [ord(character) for character in "bEND"]
    assert reader.seq.match(ending) == 4
    assert reader.seq.match(ending) == 4
    assert reader.seq.match([ord("b")]) is None


@given(
    st.lists(st.tuples(st.lists(st.integers(0, VOCAB - 1), max_size=4), st.booleans()), max_size=8)
)
def test_pushes_that_were_taken_back_leave_no_trace(pushes: list[tuple[list[int], bool]]) -> None:
    """Any ids, so also halves of characters."""
    tried, straight = StopMatcher(TOKENIZER, ["ab"]), StopMatcher(TOKENIZER, ["ab"])
    for ids, taken_back in pushes:
        kept = tried.push(ids)
        if taken_back:
            tried.rewind()
            continue
        assert straight.push(ids) == kept
        if kept is not None:
            break
    assert tried.num_read == straight.num_read
    assert (tried.take(), tried.finish()) == (straight.take(), straight.finish())


@pytest.mark.weights
def test_an_interrupt_between_text_and_memory_repeats_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another stream of the same LLM goes on with the text that it would have had."""
    llm = LLM(config=EngineConfig(k=3, batch_size=2))
    params = SamplingParams(max_tokens=24)
    prompts = ("def fibonacci(n):", "Question: What is 2 + 3?\nAnswer:")
    wanted = [result.text for result in llm.generate(prompts, params)]
    streams = [llm.stream(prompt, params) for prompt in prompts]
    shown = [next(stream).text for stream in streams]
    newest = 3  # the second stream, after two requests
    left = [signal.SIGINT]
    # A second signal is then told at once, in the midst of a job.
    monkeypatch.setattr(process, "PATIENCE_SECONDS", 0.0)

    def interrupted(outcome: Outcome, seq: LiveSequence) -> tuple[Outcome, FinishReason | None]:
        clamped = clamp(outcome, seq)
        if left and seq.seq_id == newest:
            number = left.pop()
            signal.raise_signal(number)
            signal.raise_signal(number)
        return clamped

    for module in ("stages", "native_round"):
        monkeypatch.setattr(f"outrider.engine.{module}.clamp", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(streams[0])
    assert not left
    assert shown[1] + "".join(event.text for event in streams[1]) == wanted[1]
