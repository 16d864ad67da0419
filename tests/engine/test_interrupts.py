"""Ctrl-C between memory and text: whoever goes on gets the text of an undisturbed run."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outrider import LLM
from outrider.core.budget import RoundTrace
from outrider.core.config import EngineConfig
from outrider.core.params import SamplingParams
from outrider.engine import round as settle
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
