"""Text is measured before it is tokenised, and conversations before a template reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from outrider import LLM, EngineConfig, SamplingParams
from outrider.api.tokenizer import Tokenizer
from outrider.core.errors import ConfigError
from outrider.core.fields import BYTES_PER_TOKEN, MESSAGES

WINDOW = 64
MOST = BYTES_PER_TOKEN.most * WINDOW
ASKED: dict[str, Callable[[LLM, str], object]] = {
    "stream": lambda llm, text: llm.stream(text),
    "generate": lambda llm, text: llm.generate([text]),
    "submit": lambda llm, text: llm.submit(text),
    "fitting": lambda llm, text: llm.fitting_tokens(text, SamplingParams()),
    "chat": lambda llm, text: llm.chat([{"role": "user", "content": text}]),
    "prediction": lambda llm, text: llm.submit("x", SamplingParams(prediction=text)),
}

pytestmark = pytest.mark.weights


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(config=EngineConfig(context=WINDOW, drafter="prediction", device="cpu"))


@pytest.mark.parametrize("text", ["x" * (MOST + 1), "é" * (MOST // 2 + 1), "x" * 5_000_000])
@pytest.mark.parametrize("way", ASKED)
def test_text_that_no_window_holds_is_refused_before_it_is_tokenised(
    llm: LLM, way: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    long: list[str] = []
    for name in ("encode", "chat"):
        monkeypatch.setattr(Tokenizer, name, seeing(long, getattr(Tokenizer, name)))
    with pytest.raises(ConfigError, match=f"may have {MOST:,}"):
        ASKED[way](llm, text)
    assert not long


def seeing(long: list[str], call: Callable[..., Any]) -> Callable[..., Any]:
    def see(tokenizer: Tokenizer, what: Any, **options: Any) -> Any:
        if len(str(what)) > MOST:
            long.append(str(what)[:9])
        return call(tokenizer, what, **options)

    return see


def test_text_that_a_window_may_hold_is_tokenised(llm: LLM) -> None:
    """Then its tokens decide."""
    with pytest.raises(ConfigError, match="does not fit a window"):
        llm.stream("x" * MOST)


@pytest.mark.parametrize("num", [MESSAGES.most + 1, 10**6])
def test_too_many_messages_are_refused_before_the_template(llm: LLM, num: int) -> None:
    with pytest.raises(ConfigError, match=f"{num} messages; it may have {MESSAGES.most}"):
        llm.chat([{"role": "user", "content": ""}] * num)
