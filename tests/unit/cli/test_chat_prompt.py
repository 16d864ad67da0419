"""What `outrider generate` takes for a message: by the model's ends, by its name, or when told."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from doubles.command_line import Command
from outrider.api.llm import LLM
from outrider.cli.conversation import is_instruct

SHORT = ("--max-tokens", "8")


def llm(folder: str, *ends: str, template: bool = True) -> LLM:
    def decode(ids: list[int], *, skip_special: bool) -> str:
        assert not skip_special
        return ends[ids[0]]

    tokenizer = SimpleNamespace(has_chat_template=template, decode=decode)
    found: Any = SimpleNamespace(
        tokenizer=tokenizer, stop_ids=range(len(ends)), folder=Path(folder)
    )
    return cast("LLM", found)


@pytest.mark.parametrize(
    ("model", "target", "wanted"),
    [
        (llm("/m/Qwen3-8B", "<|endoftext|>", "<|im_end|>"), "Qwen/Qwen3-8B", True),
        (llm("/m/Qwen3-8B-Base", "<|endoftext|>"), "Qwen/Qwen3-8B-Base", False),
        (llm("/m/Llama-2-7b-chat-hf", "</s>"), "x", True),
        (llm("/m/gemma-3-1b-it", "<eos>"), "x", True),
        (llm("/m/Mistral-7B-Instruct-v0.3", "</s>"), "x", True),
        (llm("/m/hub/models--org--Some-Chat/snapshots/0ab1", "</s>"), "x", True),
        (llm("/m/hub/models--org--Some/snapshots/0ab1", "</s>"), "org/Some-Instruct@main", True),
        (llm("/chat/instruct/models/gpt2", "<|endoftext|>"), "/chat/instruct/models/gpt2", False),
        (llm("/m/fitter", "</s>"), "fitter", False),
        (llm("/m/Some-Instruct", "<|im_end|>", template=False), "x", False),
    ],
)
def test_an_instruct_model_is_known(model: LLM, target: str, wanted: bool) -> None:
    assert is_instruct(model, target) == wanted


@pytest.mark.wide
@pytest.mark.weights
def test_chat_is_what_chat_writes(outrider: Command) -> None:
    question = "What is 3 plus 4?"
    shown = outrider("generate", question, "--chat", "--json", *SHORT)
    assert (shown.code, shown.err) == (0, "")
    talked = outrider("chat", "--prompt", question, "--json", *SHORT)
    assert json.loads(shown.out)["token_ids"] == json.loads(talked.out)["token_ids"]
    bare = outrider("generate", question, "--json", *SHORT)
    raw = outrider("generate", question, "--raw", "--json", *SHORT)
    assert json.loads(bare.out)["token_ids"] == json.loads(raw.out)["token_ids"]
    assert json.loads(bare.out)["token_ids"] != json.loads(shown.out)["token_ids"]


@pytest.mark.wide
@pytest.mark.weights
def test_an_instruct_model_is_chatted_with_and_told_so(
    outrider: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def always(*_: object) -> bool:
        return True

    monkeypatch.setattr("outrider.cli.conversation.is_instruct", always)
    shown = outrider("generate", "What is 3 plus 4?", "--json", *SHORT)
    told = outrider("generate", "What is 3 plus 4?", "--chat", "--json", *SHORT)
    assert json.loads(shown.out)["token_ids"] == json.loads(told.out)["token_ids"]
    assert shown.err.startswith("note: an instruct model")
    assert told.err == ""
    raw = outrider("generate", "What is 3 plus 4?", "--raw", "--json", *SHORT)
    assert raw.err == ""


@pytest.mark.wide
@pytest.mark.weights
def test_two_wishes_are_refused(outrider: Command) -> None:
    shown = outrider("generate", "hi", "--chat", "--raw")
    assert (shown.code, shown.out) == (2, "")
    assert "--chat and --raw exclude each other" in shown.err
