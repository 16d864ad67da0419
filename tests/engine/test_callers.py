"""One LLM and many callers: threads take turns, a callback and a forked child are refused."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import monotonic, sleep
from typing import Any

import pytest

from outrider import LLM, EngineConfig, SamplingParams
from outrider.api.callers import Turns
from outrider.api.output import OutputStream
from outrider.api.result import GenerationResult
from outrider.core.errors import ConfigError, MachineError

pytestmark = pytest.mark.weights

PROMPTS = ("def f(x):", "for i in", "import os, sys", "while True:")
PARAMS = SamplingParams(max_tokens=10)
SCHEDULES = ("single", "pd", "pdv", "ssd")
NUM_THREADS, NUM_CALLS = 4, 4


@pytest.fixture(params=SCHEDULES)
def llm(request: pytest.FixtureRequest) -> Generator[LLM]:
    config = EngineConfig(schedule=request.param, batch_size=3, k=3, hybrid_threshold=0)
    llm = LLM(config=config)
    yield llm
    llm.close()


def generated(llm: LLM, prompt: str) -> str:
    return llm.generate(prompt, PARAMS)[0].text


def streamed(llm: LLM, prompt: str) -> str:
    return "".join(event.text for event in llm.stream(prompt, PARAMS))


def submitted(llm: LLM, prompt: str) -> str:
    """A request that its thread hands in and drives."""
    ticket = llm.submit(prompt, PARAMS)
    while not ticket.done:
        llm.advance()
    return ticket.result().text


def left_early(llm: LLM, prompt: str) -> str:
    """A stream that is let go, and a request that is cancelled; then what the prompt gives."""
    for _ in llm.stream(prompt, PARAMS):
        break
    llm.cancel(llm.submit(prompt, PARAMS))
    return generated(llm, prompt)


CALLS = (generated, streamed, submitted, left_early)


def settle(llm: LLM) -> None:
    """Streams that were let go in the midst of another's turn end with the next job."""
    gc.collect()
    llm.advance()
    while llm._engine.executor.busy:  # pyright: ignore[reportPrivateUsage]
        llm.advance()


def test_an_interrupt_while_a_finished_stream_is_let_go_comes_with_the_next_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = LLM()
    wanted = generated(llm, PROMPTS[0])
    stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=1))
    next(stream)
    result = llm._result  # pyright: ignore[reportPrivateUsage]

    def interrupted(reader: OutputStream) -> GenerationResult:
        signal.raise_signal(signal.SIGINT)
        return result(reader)

    lost: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", lost.append)
    monkeypatch.setattr(llm, "_result", interrupted)
    del stream
    gc.collect()
    monkeypatch.undo()
    assert not lost
    with pytest.raises(KeyboardInterrupt):
        generated(llm, PROMPTS[0])
    assert generated(llm, PROMPTS[0]) == wanted


@pytest.mark.sample(2)
def test_threads_get_the_texts_of_one_thread_and_lose_no_page(llm: LLM) -> None:
    wanted = [generated(llm, prompt) for prompt in PROMPTS]
    free = llm.free_tokens

    def work(number: int) -> list[tuple[str, str]]:
        places = [(number + call) % len(PROMPTS) for call in range(NUM_CALLS)]
        return [
            (CALLS[(number + call) % len(CALLS)](llm, PROMPTS[place]), wanted[place])
            for call, place in enumerate(places)
        ]

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for pairs in pool.map(work, range(NUM_THREADS)):
            for got, expected in pairs:
                assert got == expected
    settle(llm)
    assert not llm.has_work
    assert llm.free_tokens == free
    assert generated(llm, PROMPTS[0]) == wanted[0]


def test_threads_share_passes() -> None:
    """A batch of one thread's requests and another's."""
    llm = LLM(config=EngineConfig(schedule="single", batch_size=4, profile=True))
    begun = threading.Barrier(NUM_THREADS)

    def work(prompt: str) -> int:
        begun.wait(30)
        (result,) = llm.generate(prompt, SamplingParams(max_tokens=64, ignore_eos=True))
        return max(trace.batch_size for trace in result.rounds)

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        assert max(pool.map(work, PROMPTS)) > 1


def test_turns_are_given_in_the_order_in_which_they_are_asked_for() -> None:
    turns, order = Turns(), list[int]()

    def work(number: int) -> None:
        with turns.call(), turns.turn():
            order.append(number)

    with turns.call(), turns.turn():
        threads: list[threading.Thread] = []
        for number in range(5):
            threads.append(threading.Thread(target=work, args=(number,), daemon=True))
            threads[-1].start()
            latest = monotonic() + 30
            while len(turns._callers) < number + 2:  # pyright: ignore[reportPrivateUsage]
                assert monotonic() < latest, "one of them did not wait"
    for thread in threads:
        thread.join(30)
    assert order == list(range(5))


CALLED_BACK: dict[str, Callable[[LLM], object]] = {
    "generate": lambda llm: llm.generate("x"),
    "stream": lambda llm: next(llm.stream("x")),
    "submit": lambda llm: llm.submit("x"),
    "advance": LLM.advance,
    "forget": LLM.forget,
    "close": LLM.close,
}


def within(seconds: float, call: Callable[[], object]) -> list[BaseException]:
    """What a thread of its own raised in `call`, which must not hang."""
    raised: list[BaseException] = []

    def work() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - it is the answer
            raised.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"
    return raised


# The refusal is one check for all schedules. Other combinations are `deep`.
@pytest.mark.covering(1)
@pytest.mark.parametrize("call", CALLED_BACK)
def test_a_callback_may_not_call_back(llm: LLM, call: str) -> None:
    """In whatever thread it runs: that of a lane, too."""
    free, wanted = llm.free_tokens, generated(llm, PROMPTS[0])
    told: list[str] = []

    def mask(_: Sequence[int]) -> None:
        with pytest.raises(ConfigError, match="a callback called the LLM that runs it") as caught:
            CALLED_BACK[call](llm)
        told.append(str(caught.value))

    def work() -> None:
        assert llm.generate(PROMPTS[0], PARAMS, allowed=mask)[0].text == wanted

    assert not within(60, work)
    assert told
    settle(llm)
    assert llm.free_tokens == free


@pytest.mark.sample(2)
def test_a_callback_may_cancel_and_the_job_goes_on(llm: LLM) -> None:
    free, wanted = llm.free_tokens, generated(llm, PROMPTS[0])
    tickets: list[Any] = []

    def mask(text: Sequence[int]) -> None:
        if len(text) > 3:
            llm.cancel(tickets[0])

    def work() -> None:
        tickets.append(llm.submit(PROMPTS[1], SamplingParams(max_tokens=64), allowed=mask))
        tickets.append(llm.submit(PROMPTS[0], PARAMS))
        while not all(ticket.done for ticket in tickets):
            llm.advance()

    assert not within(60, work)
    assert "cancelled before its end" in tickets[0].result().notes
    assert len(tickets[0].result().token_ids) < 64
    assert tickets[1].result().text == wanted
    settle(llm)
    assert llm.free_tokens == free


def test_a_finalizer_gets_no_turn_in_a_lane() -> None:
    """The collector may run there between two turns; it would wait for the job that it is in."""
    turns = Turns(is_lane=lambda: True)
    with turns.turn(now=True) as given:
        assert not given


@pytest.mark.sample(2)
def test_two_threads_may_read_one_stream(llm: LLM) -> None:
    """Each event is told once, to one of them."""
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    wanted = "".join(event.text for event in llm.stream(PROMPTS[0], params))
    stream, begun = llm.stream(PROMPTS[0], params), threading.Barrier(2)
    told: list[str] = []

    def read(_: int) -> None:
        begun.wait(30)
        for event in stream:
            told.append(event.text)  # noqa: PERF401 - the other one appends too

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(read, range(2)))
    assert sorted("".join(told)) == sorted(wanted)


@pytest.mark.sample(2)
def test_a_stream_may_be_closed_by_another_thread_than_its_reader(llm: LLM) -> None:
    free = llm.free_tokens
    stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=1000, ignore_eos=True))
    begun = threading.Event()
    told: list[str] = []

    def read() -> None:
        for event in stream:
            told.append(event.text)
            begun.set()

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        assert begun.wait(30)
        stream.close()
        reading.result(30)
    assert len(told) < 1000
    settle(llm)
    assert llm.free_tokens == free


def test_a_handler_may_cancel_while_its_thread_waits_for_a_turn() -> None:
    """It is told of the signal in the midst of the wait."""
    turns, told = Turns(), list[str]()

    def handle(*_: object) -> None:
        assert turns.in_turn
        with pytest.raises(ConfigError), turns.call():
            pass
        told.append("handled")

    before = signal.signal(signal.SIGINT, handle)
    held, latest = threading.Event(), monotonic() + 30

    def hold() -> None:
        with turns.call(), turns.turn():
            held.set()
            while len(turns._callers) < 2 and monotonic() < latest:  # pyright: ignore[reportPrivateUsage]
                sleep(0.001)
            os.kill(os.getpid(), signal.SIGINT)
            while not told and monotonic() < latest:
                sleep(0.001)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert held.wait(30)
        with turns.call(), turns.turn():
            told.append("given")
    finally:
        # No signal comes after it.
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert told == ["handled", "given"]


def _use(call: Any, told: Any) -> None:
    try:
        call()
    except MachineError as error:
        told.put(str(error))
    except BaseException as error:  # noqa: BLE001 - it goes to the parent
        told.put(f"not refused: {error!r}")
    else:
        told.put("not refused")


@pytest.mark.sample(1)
@pytest.mark.wide
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_gets_an_error_and_the_parent_goes_on(llm: LLM) -> None:
    wanted, free = generated(llm, PROMPTS[0]), llm.free_tokens
    stream = llm.stream(PROMPTS[1], PARAMS)
    next(stream)
    ticket = llm.submit(PROMPTS[2], PARAMS)
    calls = (
        lambda: llm.generate(PROMPTS[0], PARAMS),
        lambda: next(stream),
        stream.close,
        lambda: llm.submit(PROMPTS[0], PARAMS),
        llm.advance,
        lambda: llm.cancel(ticket),
        llm.forget,
        llm.close,
        LLM,
    )
    context = multiprocessing.get_context("fork")
    for call in calls:
        told = context.SimpleQueue()
        child = context.Process(target=_use, args=(call, told))
        child.start()
        child.join(30)
        assert child.exitcode == 0, "the child hangs"
        answer = told.get()
        assert "fork" in answer
        assert "not refused" not in answer
    stream.close()
    while not ticket.done:
        llm.advance()
    settle(llm)
    assert generated(llm, PROMPTS[0]) == wanted
    assert llm.free_tokens == free
