"""LiteLLM as a gateway to the server."""

from __future__ import annotations

import pytest

litellm = pytest.importorskip("litellm")
ASK = [{"role": "user", "content": "Say hello."}]


def given(served, **more):
    return {
        "model": f"openai/{served.model}",
        "api_base": f"{served.url}/v1",
        "api_key": "none",
        "messages": ASK,
        "max_tokens": 24,
        "temperature": 0,
    } | more


def test_completion_and_stream_write_the_same(served):
    whole = litellm.completion(**given(served)).choices[0].message.content
    chunks = litellm.completion(**given(served, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole


def test_text_completion(served):
    found = litellm.text_completion(
        model=f"text-completion-openai/{served.model}",
        api_base=f"{served.url}/v1",
        api_key="none",
        prompt="def quicksort(items):",
        max_tokens=8,
        temperature=0,
    )
    assert found.choices[0].text


@pytest.mark.parametrize("count", [5_000, 50_000])
@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])
def test_a_prompt_beyond_the_window_is_known(served, provider, count):
    base = served.url if provider == "anthropic" else f"{served.url}/v1"
    messages = [{"role": "user", "content": "word " * count}]
    more = {"model": f"{provider}/{served.model}", "api_base": base, "messages": messages}
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**given(served, **more))


def test_an_error_keeps_its_kind(served):
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**given(served, max_tokens=-1))
