"""Ctrl-C between memory and text, and while a request is ended: whoever goes on gets the text of an
undisturbed run, and no request stays."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from time import monotonic
from types import FrameType

import pytest

from doubles.bell import Bell
from outrider import LLM
from outrider.api.output import OutputStream, RequestRouter
from outrider.core import process
from outrider.core.config import EngineConfig
from outrider.core.draft import RoundTrace
from outrider.core.errors import ConfigError
from outrider.core.params import SamplingParams
from outrider.engine import round as settle
from outrider.engine.engine import Engine
from outrider.engine.stages import Stages

pytestmark = pytest.mark.weights

PROMPTS = ("def add(a, b):\n", "The answer is")
PARAMS = SamplingParams(max_tokens=24, temperature=0.7, seed=4)


class _Interrupting:
    """`call`, with an interrupt before or after its `nth` time."""

    def __init__(self, call: Callable[..., None], nth: int, *, after: bool) -> None:
        self._call, self._left, self._after = call, nth, after

    def __call__(self, *args: object) -> None:
        self._left -= 1
        if self._left or self._after:
            self._call(*args)
        if not self._left:
            raise KeyboardInterrupt


def _texts(llm: LLM) -> list[tuple[int, ...]]:
    """Both requests, driven round by round whatever interrupts them."""
    maker = llm.requests
    readers = [maker.reader(maker.ids(prompt), PARAMS, None, live=False) for prompt in PROMPTS]
    for reader in readers:
        llm._router.submit(reader)  # pyright: ignore[reportPrivateUsage]
    for _ in range(200):
        if all(reader.seq.finish for reader in readers):
            break
        try:
            llm._router.advance()  # pyright: ignore[reportPrivateUsage]
        except KeyboardInterrupt:
            continue
    return [tuple(reader.seq.tokens) for reader in readers]


@pytest.mark.parametrize("fused", [True, False])
def test_an_interrupt_anywhere_in_settling_changes_no_text(
    fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(config=EngineConfig(k=3, batch_size=2, sampler="match", fused_round=fused))
    free, wanted = llm.free_tokens, _texts(llm)
    append = settle._append  # pyright: ignore[reportPrivateUsage]
    for nth in (1, 2, 5):
        for after in (False, True):
            with monkeypatch.context() as patch:
                patch.setattr(settle, "_append", _Interrupting(append, nth, after=after))
                assert _texts(llm) == wanted
            assert llm.free_tokens == free


def test_an_interrupt_while_a_trace_is_told_loses_no_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = LLM(config=EngineConfig(k=3, batch_size=2, sampler="match"))
    wanted, calls = _texts(llm), 0
    report = Stages.report

    def interrupting(stages: Stages, trace: RoundTrace) -> None:
        nonlocal calls
        calls += 1
        if calls % 5 == 0:
            raise KeyboardInterrupt
        report(stages, trace)

    monkeypatch.setattr(Stages, "report", interrupting)
    assert _texts(llm) == wanted


LONG = SamplingParams(max_tokens=200, ignore_eos=True)


class RungError(Exception):
    """Raised by the program's handler of SIGALRM."""


@contextmanager
def raising(number: int) -> Generator[None]:
    """The handler of `number` raises, and is as it was behind the block."""
    bell = Bell(KeyboardInterrupt if number == signal.SIGINT else RungError, armed=True)
    before = signal.signal(number, bell.ring)
    try:
        yield
    finally:
        bell.armed = False
        signal.signal(number, before)


def generated(llm: LLM, number: int) -> None:
    pressed = list[int]()

    def mask(_: Sequence[int]) -> None:
        if not pressed:
            pressed.append(number)
            signal.raise_signal(number)

    llm.generate(PROMPTS, LONG, allowed=mask)


def closed(llm: LLM, _number: int) -> None:
    stream = llm.stream(PROMPTS[0], LONG)
    next(stream)
    stream.close()


def let_go(llm: LLM, _number: int) -> None:
    """Python prints what a finalizer raises: the next call raises it."""
    next(llm.stream(PROMPTS[0], LONG))
    llm.advance()


def cancelled(llm: LLM, _number: int) -> None:
    ticket = llm.submit(PROMPTS[0], LONG)
    llm.advance()
    llm.cancel(ticket)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGALRM])
@pytest.mark.parametrize("run", [generated, closed, let_go, cancelled])
def test_a_request_ends_with_the_next_job_where_the_wait_for_its_own_is_broken_off(
    run: Callable[[LLM, int], None], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that were to end after it, too."""
    monkeypatch.setattr(process, "PATIENCE_SECONDS", 0.0)
    cancel, num_broken = Engine.cancel, 0

    def broken(engine: Engine, seq_id: int) -> None:
        nonlocal num_broken
        if not num_broken:
            num_broken += 1
            with process.breakable():
                signal.raise_signal(number)
                signal.raise_signal(number)
        cancel(engine, seq_id)

    llm = LLM(config=EngineConfig(k=2, batch_size=2))
    free, lost = llm.free_tokens, list[object]()
    monkeypatch.setattr("sys.unraisablehook", lost.append)
    monkeypatch.setattr(Engine, "cancel", broken)
    with raising(number), pytest.raises((KeyboardInterrupt, RungError)):
        run(llm, number)
    assert num_broken
    llm.advance()
    assert not llm.has_work
    assert llm.free_tokens == free
    assert llm.counts.cancelled == llm.counts.submitted
    assert not lost


def test_an_interrupt_while_a_stream_is_let_go_is_told_by_the_next_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python prints what a finalizer raises, and goes on."""
    llm = LLM()
    free, wanted = llm.free_tokens, llm.generate(PROMPTS[0], PARAMS)[0].text
    stream = llm.stream(PROMPTS[1], PARAMS)
    next(stream)
    retire = RequestRouter.retire

    def interrupted(router: RequestRouter, reader: OutputStream) -> None:
        signal.raise_signal(signal.SIGINT)
        retire(router, reader)

    monkeypatch.setattr(RequestRouter, "retire", interrupted)
    del stream
    monkeypatch.undo()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS[0], PARAMS)
    assert llm.generate(PROMPTS[0], PARAMS)[0].text == wanted
    assert llm.free_tokens == free


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGALRM])
def test_what_is_broken_off_in_a_tokenizer_is_no_fault_of_its_file(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "PATIENCE_SECONDS", 0.0)
    llm, num_asked = LLM(config=EngineConfig(k=2, batch_size=2)), 0

    class Hanging:
        """A library that hangs until it is broken off."""

        def encode(self, *_: object, **_options: object) -> None:
            nonlocal num_asked
            num_asked += 1
            signal.raise_signal(number)
            signal.raise_signal(number)

        encode_batch_fast = encode

    monkeypatch.setattr(llm.tokenizer, "_backend", Hanging())
    calls = (llm.generate, llm.stream, llm.submit, llm.encode)
    for call in calls:
        with raising(number), pytest.raises((KeyboardInterrupt, RungError)):
            call(PROMPTS[0])
    assert num_asked == len(calls)


class _Holder:
    """A thread that keeps `llm` in a job. It sends Ctrl-C in each of the `num_waits` next waits of
    the main thread for a turn, which is then to hear it while it waits."""

    def __init__(self, llm: LLM, num_waits: int) -> None:
        self._llm, self._num_waits = llm, num_waits
        self.has_turn, self._release = threading.Event(), threading.Event()
        self._was_released = False
        self._thread = threading.Thread(target=self._work, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._release.set()
        self._thread.join(30)
        assert self._was_released, "the main thread heard nothing while it waited"

    def _work(self) -> None:
        self._llm.generate(PROMPTS[1], SamplingParams(max_tokens=1), allowed=self._mask)

    def _mask(self, _: Sequence[int]) -> None:
        if self._was_released:
            return
        self.has_turn.set()
        waits = list[object]()
        for _number in range(self._num_waits):
            waits.append(self._next_wait(waits))
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        self._was_released = self._release.wait(10)

    def _next_wait(self, known: Sequence[object]) -> object:
        latest = monotonic() + 30
        while monotonic() < latest:
            found = [one for one in callers(self._llm)[1:] if one not in known]
            if found:
                return found[0]
        raise AssertionError("the main thread does not wait for a turn")


def callers(llm: LLM) -> list[object]:
    return list(llm._turns._callers)  # pyright: ignore[reportPrivateUsage]


def test_who_waits_for_a_turn_to_end_its_requests_hears_ctrl_c_and_leaves_none() -> None:
    llm = LLM(config=EngineConfig(k=2, batch_size=3))
    free, holder = llm.free_tokens, _Holder(llm, num_waits=1)
    started = list[bool]()

    def mask(_: Sequence[int]) -> None:
        if not started:
            # The next turn is its own: the one in which these requests are to end comes later.
            started.append(True)
            holder.start()
            while len(callers(llm)) < 2:
                pass
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, LONG, allowed=mask)
    holder.end()
    llm.advance()
    assert not llm.has_work
    assert llm.free_tokens == free


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_stream_that_waits_for_a_turn_hears_ctrl_c(is_begun: bool) -> None:
    """Again where it waits for the turn in which its request is to end."""
    llm = LLM(config=EngineConfig(k=2, batch_size=2))
    free, stream = llm.free_tokens, llm.stream(PROMPTS[0], LONG)
    if is_begun:
        next(stream)
    holder = _Holder(llm, num_waits=1 + is_begun)
    holder.start()
    assert holder.has_turn.wait(30)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    holder.end()
    llm.advance()
    assert not llm.has_work
    assert llm.free_tokens == free


def test_ctrl_c_while_a_prompt_is_read_for_a_stream_does_not_wait_for_its_end() -> None:
    jobs = list[int]()

    def count(_: object) -> None:
        jobs.append(1)
        if len(jobs) == 2:
            signal.raise_signal(signal.SIGINT)

    llm = LLM(config=EngineConfig(drafter="none", prefill_chunk=16), on_job=count)
    with pytest.raises(KeyboardInterrupt):
        next(llm.stream("word " * 150, LONG))
    assert len(jobs) == 2
    assert not llm.has_work


@pytest.mark.parametrize("where", ["mask", "handler"])
def test_a_stream_may_be_closed_in_the_midst_of_its_own_job(where: str) -> None:
    """By a mask and by a handler of a signal: it ends with the job."""
    llm = LLM(config=EngineConfig(k=2, batch_size=2))
    free, before = llm.free_tokens, signal.getsignal(signal.SIGUSR1)

    def mask(_: Sequence[int]) -> None:
        if where == "mask":
            stream.close()
        else:
            signal.raise_signal(signal.SIGUSR1)

    stream = llm.stream(PROMPTS[0], LONG, allowed=mask)

    def close(_number: int, _frame: FrameType | None) -> None:
        stream.close()

    signal.signal(signal.SIGUSR1, close)
    try:
        assert len(list(stream)) < 2
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(stream.result().token_ids) < 200
    assert not llm.has_work
    assert llm.free_tokens == free


def test_a_refused_call_of_a_stream_does_not_close_it() -> None:
    llm = LLM(config=EngineConfig(k=2, batch_size=2))
    refused = list[str]()

    def mask(_: Sequence[int]) -> None:
        with pytest.raises(ConfigError, match="a callback called the LLM") as caught:
            next(stream)
        refused.append(str(caught.value))

    stream = llm.stream(PROMPTS[0], PARAMS, allowed=mask)
    assert len(stream.result().token_ids) == PARAMS.max_tokens
    assert refused
