"""A text that was broken off goes on elsewhere as it would have: same tokens, same text."""

from __future__ import annotations

import pytest

from outrider import LLM, SamplingParams
from outrider.core.errors import ConfigError

pytestmark = pytest.mark.weights
PROMPT = "def quicksort(items):"
HALF = 13


@pytest.fixture(scope="module", params=["greedy", "match", "coupled"])
def case(request: pytest.FixtureRequest) -> tuple[LLM, SamplingParams]:
    kind: str = request.param
    llm = LLM(threads=1, k=3, sampler="match" if kind == "greedy" else kind)
    warm = 0.0 if kind == "greedy" else 0.9
    return llm, SamplingParams(
        max_tokens=40, temperature=warm, seed=7, ignore_eos=True, presence_penalty=0.4
    )


def finished(llm: LLM, params: SamplingParams, written: tuple[int, ...]) -> tuple[str, list[int]]:
    handle = llm.submit(PROMPT, params, written=written)
    while not handle.done:
        llm.advance()
    events = list(handle.events())
    result = handle.result()
    new = [token for event in events for token in event.token_ids]
    assert list(result.token_ids) == [*written, *new]
    assert result.text.endswith("".join(event.text for event in events))
    return result.text, list(result.token_ids)


@pytest.mark.sample(4)
@pytest.mark.parametrize("length", [1, HALF, 39])
def test_goes_on_with_the_same_text(case: tuple[LLM, SamplingParams], length: int) -> None:
    llm, params = case
    whole = llm.generate(PROMPT, params)[0]
    text, ids = finished(llm, params, whole.token_ids[:length])
    assert (text, ids) == (whole.text, list(whole.token_ids))


def test_a_stop_string_may_lie_across_the_break() -> None:
    llm = LLM(threads=1, drafter="none")
    whole = llm.generate(PROMPT, max_tokens=40, ignore_eos=True)[0]
    event_ids = whole.token_ids
    cut = llm.generate(PROMPT, max_tokens=len(event_ids) - 4, ignore_eos=True)[0].text
    stop = whole.text[len(cut) - 3 : len(cut) + 2]
    params = SamplingParams(max_tokens=40, ignore_eos=True, stop=[stop])
    ended = llm.generate(PROMPT, params)[0]
    assert ended.finish_reason == "stop"
    text, ids = finished(llm, params, ended.token_ids[:-1])
    assert (text, ids) == (ended.text, list(ended.token_ids))


def test_a_whole_text_has_ended() -> None:
    """As it did where it was written: at its length, a stop string or a stop token."""
    llm = LLM(threads=1, drafter="none")
    whole = llm.generate(PROMPT, max_tokens=20, ignore_eos=True)[0]
    eos = llm.tokenizer.stop_ids[0]
    for params in (
        SamplingParams(max_tokens=20, ignore_eos=True),
        SamplingParams(max_tokens=40, ignore_eos=True, stop=[whole.text[-6:]]),
        SamplingParams(max_tokens=40, min_tokens=3, logit_bias={eos: 100.0}),
    ):
        ended = llm.generate(PROMPT, params)[0]
        handle = llm.submit(PROMPT, params, written=ended.token_ids)
        assert handle.done
        found = handle.result()
        assert not list(handle.events())
        assert (found.text, found.token_ids) == (ended.text, ended.token_ids)
        assert (found.finish_reason, found.stop) == (ended.finish_reason, ended.stop)


def test_what_is_longer_than_a_text_is_refused() -> None:
    llm = LLM(threads=1, drafter="none")
    ids = llm.generate(PROMPT, max_tokens=5, ignore_eos=True)[0].token_ids
    eos = llm.tokenizer.stop_ids[0]
    with pytest.raises(ConfigError, match="longer than the text"):
        llm.submit(PROMPT, SamplingParams(max_tokens=4), written=ids)
    with pytest.raises(ConfigError, match="longer than the text"):
        llm.submit(PROMPT, SamplingParams(max_tokens=9), written=[eos, *ids])
    with pytest.raises(ConfigError, match="after a stop string"):
        llm.submit(
            PROMPT, SamplingParams(max_tokens=9, stop=[llm.tokenizer.decode(ids[1:3])]), written=ids
        )
    with pytest.raises(ConfigError, match="outside the vocabulary"):
        llm.submit(PROMPT, SamplingParams(max_tokens=4), written=[10**7])
