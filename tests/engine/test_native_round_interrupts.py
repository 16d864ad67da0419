"""A native round that is interrupted: nothing of it counts, and everyone goes on."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import FrameType
from typing import Any

import pytest

from doubles.rig import round_of
from outrider import LLM
from outrider.api.output import OutputStream
from outrider.cache.paged_kv import PagedKV
from outrider.core.config import EngineConfig
from outrider.core.params import SamplingParams
from outrider.drafters.common import draft_model as drafter_module
from outrider.engine import native_round as round_module
from outrider.engine.native_round import NativeRound
from outrider.kernels.native.rounds import CacheSpan, Lane, NativeRounds
from outrider.models.llama import LlamaModel

pytestmark = [pytest.mark.weights, pytest.mark.usefixtures("native_library")]


def _llm(**config: Any) -> LLM:
    return LLM(config=EngineConfig(**config))


def _check_memory(llm: LLM) -> None:
    pair = llm._pair  # pyright: ignore[reportPrivateUsage]
    for model in (pair.target, pair.draft):
        assert isinstance(model, LlamaModel)
        model.state.check()


@dataclass
class _Interrupt:
    """Raises KeyboardInterrupt at line event number `at` of the code that is watched."""

    at: int
    seen: int = 0

    def __call__(self, frame: FrameType, _event: str, _arg: object) -> Callable[..., Any] | None:
        return self._line if frame.f_code in _watched() else None

    def _line(self, _frame: FrameType, event: str, _arg: object) -> Callable[..., Any]:
        self.seen += event == "line"
        if self.seen == self.at:
            sys.settrace(None)
            raise KeyboardInterrupt
        return self._line


@cache
def _watched() -> frozenset[object]:
    """Code from the start of a round to the call, and from there to the commit."""
    lane, call = Lane, NativeRounds
    drafter, outer = drafter_module.ModelDrafter, round_module.NativeRound
    functions: list[Any] = [
        lane.read, lane._widen, call.fits, call.__call__, call._take, call._distributions,  # pyright: ignore
        drafter.begin, drafter.note, drafter._read,  # pyright: ignore
        PagedKV.reserve, outer.run, outer._row, outer._draft_feed, outer._end, round_module._feed,  # pyright: ignore
    ]  # fmt: skip
    return frozenset(function.__code__ for function in functions)


def _readers(llm: LLM) -> list[OutputStream]:
    asked = (
        ("for i in range(10):\n    print(i)\nfor i", SamplingParams(max_tokens=7)),
        ("x = [0, 1, 2, 3", SamplingParams(max_tokens=9, temperature=0.8, seed=0, stop=("zzz",))),
    )
    return [
        llm.requests.reader(llm.requests.ids(prompt), params, None, live=bool(params.stop))
        for prompt, params in asked
    ]


def _play(llm: LLM, interrupt: _Interrupt) -> tuple[bool, list[object]]:
    """Whether two requests were interrupted, and what became of them, going on all the same."""
    readers, interrupted = _readers(llm), False
    for reader in readers:
        llm._router.submit(reader)  # pyright: ignore[reportPrivateUsage]
    sys.settrace(interrupt)
    try:
        while any(reader.seq.finish is None for reader in readers):
            try:
                llm._router.advance()  # pyright: ignore[reportPrivateUsage]
            except KeyboardInterrupt:
                interrupted = True
    finally:
        sys.settrace(None)
        for reader in readers:
            llm._router.retire(reader)  # pyright: ignore[reportPrivateUsage]
    return interrupted, [(tuple(one.seq.tokens), one.seq.finish) for one in readers]


@pytest.mark.slow
def test_an_interrupted_round_was_never_begun() -> None:
    """Wherever the interrupt comes before the commit: those who go on get the same text, and no
    page is lost."""
    llm = _llm(k=3, batch_size=2, page_size=1)
    interrupt = _Interrupt(at=-1)
    _, wanted = _play(llm, _Interrupt(at=-1))
    assert _play(llm, interrupt) == (False, wanted)  # with pages found again, as from now on
    free, num_interrupted = llm.free_tokens, 0
    # Every line comes up in several rounds; a prime stride meets each line in one of them.
    for at in range(1, interrupt.seen, 17):
        interrupted, got = _play(llm, _Interrupt(at))
        num_interrupted += interrupted
        assert got == wanted, at
        assert llm.free_tokens == free
        _check_memory(llm)
    assert num_interrupted > 25


def test_an_interrupted_page_table_is_written_again() -> None:
    """Other, more pages were to take a row's place, which its own then come back to."""
    one_call = round_of(_llm(k=2, batch_size=2)._engine)  # pyright: ignore[reportPrivateUsage]
    assert isinstance(one_call, NativeRound)
    lane = one_call.call._target  # pyright: ignore[reportPrivateUsage]
    described, interrupted, at = lane.memory.described, True, 0
    while interrupted:
        mine, others, at = [at, at + 1, at + 2], list(range(90, 120 + 40 * at)), at + 1
        lane.read(1, CacheSpan(0, [1], mine), 0)
        sys.settrace(_Interrupt(at))
        try:
            lane.read(1, CacheSpan(0, [1], others), 0)
            interrupted = False
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        lane.read(1, CacheSpan(0, [1], mine), 0)
        columns, pages = described.num_page_columns, lane._pages  # pyright: ignore[reportPrivateUsage]
        assert described.pages == ctypes.addressof(pages)
        assert len(pages) == 2 * columns
        assert pages[columns : columns + 3] == mine
    assert at > 10
