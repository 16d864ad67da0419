"""Whatever code that is not ours raises, of whatever kind, ends one request and nothing else."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Generator, Sequence
from typing import Any

import pytest
import torch

from checks import faults
from checks.faults import finish
from outrider import LLM, EngineConfig, SamplingParams
from outrider.api.request import RequestHandle
from outrider.api.stream import StopMatcher
from outrider.api.tokenizer import Tokenizer
from outrider.core.draft import Budget, JobTrace, RoundTrace
from outrider.core.errors import CallbackError

pytestmark = [pytest.mark.wide, pytest.mark.weights, pytest.mark.slow]


class PanicError(BaseException):
    """As PyO3 makes of a panic in Rust: no Exception."""


class SpeechlessError(Exception):
    """Cannot even be told of."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


KINDS = [
    PanicError,
    SystemExit,
    KeyboardInterrupt,
    SpeechlessError,
    *(
        pytest.param(kind, marks=pytest.mark.deep)
        for kind in (GeneratorExit, asyncio.CancelledError, StopIteration, MemoryError)
    ),
]
# (schedule, whether lanes run at once, whether a round is one native call)
LANES = [
    ("single", False, True),
    ("single", False, False),
    *((schedule, True, True) for schedule in ("pd", "pdv", "ssd")),
    ("ssd", False, False),
]
PROMPTS = ("def f(x):", "for i in", "import os, sys", "x = [1, 2, 3]\n" * 8)
CULPRIT = 1
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)


def config(schedule: str, concurrent: bool, fused: bool) -> EngineConfig:
    return EngineConfig(
        schedule=schedule,
        concurrent_lanes=concurrent,
        fused_round=fused,
        hybrid_threshold=0,
        k=3,
        batch_size=len(faults.PROMPTS),
        prefill_chunk=32,
        device="cpu",
    )


@pytest.fixture(scope="module", params=LANES, ids=str)
def llm(request: pytest.FixtureRequest) -> Generator[LLM]:
    """One for all faults: what one of them leaves behind, the next would find."""
    llm = LLM(config=config(*request.param))
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def wanted(llm: LLM) -> list[tuple[int, ...]]:
    return [result.token_ids for result in llm.generate(PROMPTS, PARAMS)]


@pytest.fixture(scope="module")
def plain() -> list[tuple[int, ...]]:
    """Texts of plain decoding."""
    llm = LLM(config=EngineConfig(drafter="none", device="cpu"))
    return [result.token_ids for result in llm.generate(PROMPTS, PARAMS)]


def raising(kind: type[BaseException], after: int = 0) -> Callable[..., Any]:
    """Raises from its call number `after` on, always."""
    left = after

    def called(*_: Any, **__: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise kind("planted") if kind is not SpeechlessError else kind()

    return called


def run(
    llm: LLM, change: Callable[[RequestHandle], object] = lambda _: None, **named: Any
) -> list[RequestHandle]:
    """All requests at once; `change` is told of the culprit, whose mask may be given."""
    free = llm.free_tokens
    none: dict[str, Any] = {}
    tickets = [
        llm.submit(prompt, PARAMS, **(named if index == CULPRIT else none))
        for index, prompt in enumerate(PROMPTS)
    ]
    change(tickets[CULPRIT])
    finish(llm)
    assert all(ticket.done for ticket in tickets)
    assert llm.free_tokens == free
    return tickets


def check_one_failed(
    tickets: Sequence[RequestHandle], wanted: Sequence[tuple[int, ...]], kind: type[BaseException]
) -> None:
    for index, ticket in enumerate(tickets):
        if index != CULPRIT:
            assert ticket.result().token_ids == wanted[index]
            continue
        with pytest.raises(Exception) as caught:  # noqa: PT011 - of any kind but its own
            ticket.result()
        assert isinstance(caught.value, CallbackError) != issubclass(kind, Exception)


# Every kind, place and arrangement of lanes; kinds by lanes meet within stages below, and faults of
# an ordinary kind by lanes in test_faults.py. Other combinations are `deep`.
@pytest.mark.sample(4)
@pytest.mark.covering(1)
@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_mask_raises_ends_its_request(
    llm: LLM,
    wanted: list[tuple[int, ...]],
    kind: type[BaseException],
    after: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    check_one_failed(run(llm, allowed=raising(kind, after)), wanted, kind)
    # Its own request is blamed at once: nobody is tried again alone.
    assert "A job failed" not in caplog.text
    assert [ticket.result().token_ids for ticket in run(llm)] == wanted


@pytest.mark.sample(8)
@pytest.mark.covering(2)
@pytest.mark.parametrize("kind", [PanicError, SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["pass", "draft pass", "propose", "rule", "commit"])
def test_what_a_stage_raises_ends_one_request_or_its_drafts(
    llm: LLM, place: str, kind: type[BaseException]
) -> None:
    """As faults of an ordinary kind do (test_faults.py); a Ctrl-C never comes within a stage."""
    if llm.config.fused_round and place != "commit":
        pytest.skip("the round is one call")
    undisturbed = faults.written(faults.run(llm))
    fault = faults.Fault(place, before=True, once=False, kind=kind)
    seqs = faults.run(llm, fault)
    assert fault.num_raised
    for index, (seq, got) in enumerate(zip(seqs, faults.written(seqs), strict=True)):
        if index != faults.CULPRIT or "pro" in place or "draft" in place:
            assert seq.error is None
            assert got == undisturbed[index]
        else:
            assert isinstance(seq.error, CallbackError)
    assert faults.written(faults.run(llm)) == undisturbed


@pytest.mark.sample(3)
@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["push", "finish"])
def test_what_a_tokenizer_raises_ends_its_request(
    llm: LLM, wanted: list[tuple[int, ...]], place: str, kind: type[BaseException]
) -> None:
    def change(ticket: RequestHandle) -> None:
        text: Any = ticket.reader.text
        setattr(text, place, raising(kind, 1 if place == "push" else 0))

    check_one_failed(run(llm, change), wanted, kind)


@pytest.mark.sample(5)
@pytest.mark.covering(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["open", "propose", "close", "propose_after"])
def test_what_a_drafter_raises_ends_drafts_only(
    llm: LLM,
    wanted: list[tuple[int, ...]],
    place: str,
    kind: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter: Any = llm._engine.drafter  # pyright: ignore[reportPrivateUsage]
    if not hasattr(drafter, place):
        pytest.skip("nobody drafts ahead")
    call = getattr(drafter, place)

    def failing(*args: Any) -> Any:
        if place == "close":  # what it holds is given back all the same
            call(*args)
        raise kind if kind is SpeechlessError else kind("planted")

    with monkeypatch.context() as patch:
        patch.setattr(drafter, place, failing)
        assert [ticket.result().token_ids for ticket in run(llm)] == wanted
    assert [ticket.result().token_ids for ticket in run(llm)] == wanted


@pytest.mark.sample(2)
@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["budgets", "observe"])
def test_what_a_controller_raises_ends_speculation_only(
    plain: list[tuple[int, ...]], place: str, kind: type[BaseException]
) -> None:
    class Controller:
        def budgets(self, seq_ids: Sequence[int]) -> list[Budget]:
            self._maybe("budgets")
            return [Budget(3)] * len(seq_ids)

        def observe(self, trace: RoundTrace) -> None:
            del trace
            self._maybe("observe")

        def _maybe(self, name: str) -> None:
            if name == place:
                raise kind if kind is SpeechlessError else kind("planted")

    for one in ("single", "pdv"):
        llm = LLM(config=config(one, True, True), controller=Controller())
        tickets = run(llm)
        assert [ticket.result().token_ids for ticket in tickets] == plain
        assert any("the controller failed" in note for note in tickets[0].result().notes)
        llm.close()


@pytest.mark.sample(3)
@pytest.mark.parametrize("given", [None, [], [Budget(99)], ["3"], 3])
def test_budgets_that_are_none_end_speculation_only(
    plain: list[tuple[int, ...]], given: Any
) -> None:
    class Controller:
        def budgets(self, seq_ids: Sequence[int]) -> Any:
            del seq_ids
            return given

        def observe(self, trace: RoundTrace) -> None:
            pass

    llm = LLM(config=EngineConfig(device="cpu", k=3), controller=Controller())
    (result,) = llm.generate(PROMPTS[0], PARAMS)
    assert result.token_ids == plain[0]
    assert any("the controller failed" in note for note in result.notes)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
def test_what_an_observer_raises_ends_nothing(
    plain: list[tuple[int, ...]], kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[JobTrace] = []

    def observer(trace: JobTrace) -> None:
        heard.append(trace)
        raise kind if kind is SpeechlessError else kind("planted")

    llm = LLM(on_job=observer)
    assert llm.generate(PROMPTS[0], PARAMS)[0].token_ids == plain[0]
    assert len(heard) == 1
    assert "An observer of jobs failed" in caplog.text


@pytest.mark.sample(3)
@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_and_a_batch_raise_it_once_and_go_on(llm: LLM, kind: type[BaseException]) -> None:
    free, wanted = llm.free_tokens, llm.generate(PROMPTS[0], PARAMS)[0].token_ids
    for use in (
        lambda: list(llm.stream(PROMPTS[0], PARAMS, allowed=raising(kind, 2))),
        lambda: llm.generate(PROMPTS, PARAMS, allowed=raising(kind, 2)),
    ):
        with pytest.raises(Exception):  # noqa: B017, PT011 - of any kind but its own
            use()
        assert not llm.has_work
        assert llm.generate(PROMPTS[0], PARAMS)[0].token_ids == wanted
        assert llm.free_tokens == free


@pytest.mark.sample(2)
def test_what_is_raised_where_ctrl_c_is_ignored_is_none(
    llm: LLM, wanted: list[tuple[int, ...]]
) -> None:
    """As of a program that a shell started in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        check_one_failed(run(llm, allowed=raising(KeyboardInterrupt, 2)), wanted, KeyboardInterrupt)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", [PanicError, SystemExit])
def test_what_a_tokenizer_raises_outside_of_jobs_is_told_as_an_error(
    llm: LLM, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where prompts are encoded, and where a text is made at the end."""
    free = llm.free_tokens
    encode = {"encode": Tokenizer}
    for places in (encode, {**encode, "encode_batch": Tokenizer}, {"push": StopMatcher}):
        with monkeypatch.context() as patch:
            for name, place in places.items():
                patch.setattr(place, name, raising(kind))
            with pytest.raises(CallbackError, match="planted"):
                llm.submit("x") if places is encode else llm.generate(["x"], PARAMS)
        assert not llm.has_work
        assert llm.free_tokens == free


@pytest.mark.sample(3)
def test_a_mask_that_is_no_mask_ends_its_request(llm: LLM, wanted: list[tuple[int, ...]]) -> None:
    def words(_: Sequence[int]) -> Any:
        return "all"

    def few(_: Sequence[int]) -> torch.Tensor:
        return torch.zeros(3, dtype=torch.bool)

    def nothing_taken() -> None:
        pass

    masks: tuple[Any, ...] = (words, few, nothing_taken)
    for mask in masks:
        tickets = run(llm, allowed=mask)
        for index, ticket in enumerate(tickets):
            if index != CULPRIT:
                assert ticket.result().token_ids == wanted[index]
        with pytest.raises((TypeError, ValueError)):
            tickets[CULPRIT].result()
