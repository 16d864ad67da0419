"""Tags of thoughts by templates, the tokens that end thoughts, and switches of templates."""

from __future__ import annotations

from typing import Any

import pytest

from doubles.letters import letters
from outrider.api.chat_template import (
    GEMMA,
    HARMONY,
    MISTRAL,
    SEED,
    THINK,
    ChatTemplate,
    ChatTemplates,
    PromptEnd,
    Thinking,
    switched,
)
from outrider.api.request import Thoughts
from outrider.api.tokenizer import Tokenizer
from outrider.core.errors import CheckpointError
from outrider.plugins.tools.formats import format_of_family

# Byte-level: a line end is Ċ.
LETTERS = letters("a<think>/Ċ")
TAGS = THINK.begin, (THINK.end,)
SOURCES = {
    "<tool_call> arguments {{ content.split('</think>') }}": THINK,
    "<seed:tool_call> <function= <seed:think> {{ content.split('</seed:think>') }}": SEED,
    "[TOOL_CALLS] [THINK] [/THINK]": MISTRAL,
    '<|tool_call> <tool_call|> <|"|> {{ text.split("<channel|>") }}': GEMMA,
    "<|start|> <|channel|> <|message|> <|end|>": HARMONY,
}


def templates(source: str, **more: Any) -> ChatTemplates:
    return ChatTemplates.of({"chat_template": source} | more)


@pytest.mark.parametrize("source", SOURCES)
def test_tags_are_those_that_the_parser_of_answers_knows(source: str) -> None:
    thinking = templates(source).thinking
    assert thinking is not None
    assert thinking == SOURCES[source]
    assert thinking.end in thinking.closing
    given = format_of_family(source)
    assert given is not None
    thoughts = [one for one in given.fields if one.kind == "reasoning"]
    ends = {end.first for one in thoughts for end in one.closes}
    begins = {begin.first for one in thoughts for begin in one.opens}
    assert thinking.end in ends
    assert any(thinking.begin.startswith(begin) for begin in begins)


def test_a_checkpoint_s_own_response_template_goes_first() -> None:
    def found(**spec: Any) -> Thinking | None:
        response = {"fields": {"reasoning_content": spec}}
        return templates("</think>", response_template=response).thinking

    assert found(open="<r>", close="</r>") == Thinking("<r>", "</r>", "</r>", anywhere=True)
    assert found(open_pattern="<r+>", close="</r>") == THINK
    assert templates("no thoughts").thinking is None
    assert ChatTemplates.of({}).thinking is None


def written(tokenizer: Tokenizer, size: int = 1000) -> str:
    """What follows at once where nothing may be thought."""
    ids = tokenizer.encode("a<think>\n", add_special=False)
    budget = Thoughts(THINK, tokenizer, size).of(ids, 0, None)
    return tokenizer.decode(list(budget.forced([], 99)))


def test_the_tokenizer_writes_what_ends_thoughts() -> None:
    assert written(LETTERS) == THINK.closing
    assert written(letters("a<think>/\n", byte_fallback=True)) == THINK.closing
    for tokenizer, size in ((letters("a<think>Ċ"), 1000), (letters("b"), 1000), (LETTERS, 3)):
        with pytest.raises(CheckpointError, match="cannot write '</think>'") as caught:
            written(tokenizer, size)
        assert "leave thinking_budget out" in str(caught.value.hint)


def test_a_prompt_that_has_no_open_thoughts_begins_none() -> None:
    closed = LETTERS.encode("<think>\n\n</think>\n\n", add_special=False)
    assert list(Thoughts(THINK, LETTERS, 1000).of(closed, 0, None).forced([], 9)) == []


@pytest.mark.parametrize(
    ("turn", "is_open"),
    [
        ("<think>\n", True),
        ("assistant\n<think>\nI s", True),
        # As Qwen3's template writes a last message that begins with its own tag.
        ("assistant\n<think>\n\n</think>\n\n<think>\nI s", True),
        ("<think>I say <think> s", True),
        ("assistant\n<think>I</think>s", False),
        ("assistant\nI say <think> s", False),
        ("assistant\n", False),
        ("", False),
    ],
)
def test_thoughts_of_a_message_that_goes_on_are_open(turn: str, is_open: bool) -> None:
    tokenizer = letters("".join(sorted({*"a<think>/Ċ", *"assistant I say so"} - {"\n"})))

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special=False)

    for before in ("", "<think> so<end>", "a<think>\n" * 20 + "<end>"):
        # Without a token before it there is no turn.
        wanted = is_open if before else turn.endswith("<think>\n")
        prompt = ids(before + turn)
        assert PromptEnd.of(tokenizer, prompt).is_open(*TAGS, anywhere=False) is wanted
        budget = Thoughts(THINK, tokenizer, 1000).of(prompt, 0, None)
        assert bool(budget.forced([], 9)) is wanted


def test_a_tag_of_special_tokens_opens_them_too() -> None:
    text = "<|end|><|start|>assistant<|channel|>analysis<|message|>I s"
    for at, is_open in ((text.index("I s"), True), (len(text), False)):
        end = PromptEnd(text, at)
        assert end.is_open(HARMONY.begin, (HARMONY.end,), anywhere=True) is is_open


OFF = {"reasoning_effort": "none"}


@pytest.mark.parametrize(
    ("source", "given", "wanted"),
    [
        ("{% if enable_thinking %}", OFF, {"enable_thinking": False}),
        ("{% if not thinking is defined %}", OFF, {"thinking": False}),
        ("{{ 'x' if thinking | default(true) }}", OFF, {"thinking": False}),
        ("{%- if thinking %}", {"enable_thinking": True}, {"thinking": True}),
        ("{% if enable_thinking %}{{ reasoning_effort }}", OFF, {"enable_thinking": False}),
        ("{% if reasoning_effort == 'none' %}", OFF, OFF),
        ("{% if enable_thinking %}", OFF | {"enable_thinking": True}, {"enable_thinking": True}),
        ("{% if m.thinking %}", {"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
    ],
)
def test_effort_none_is_a_template_s_own_switch(
    source: str, given: dict[str, Any], wanted: dict[str, Any]
) -> None:
    assert switched(source, given) == (wanted, ())


@pytest.mark.parametrize("source", ["{% if m.thinking %}", "Reasoning: {{ reasoning_effort }}"])
def test_a_template_without_a_switch_is_noted(source: str) -> None:
    variables, notes = switched(source, OFF)
    assert variables == {}
    assert "cannot switch thoughts off" in notes[0]


def test_a_prompt_is_rendered_with_the_switch() -> None:
    template = ChatTemplate("{% if enable_thinking %}<think>{% else %}so{% endif %}", {})
    message = [{"role": "user", "content": ""}]
    assert template.render(message, variables={"enable_thinking": True}).text == "<think>"
    assert template.render(message, variables=OFF).text == "so"
    plain = ChatTemplate("{{ messages[0].content }}", {}).render(message, variables=OFF)
    assert any("thoughts off" in note for note in plain.notes)
