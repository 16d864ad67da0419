"""Chat templates that an operator names: what each writes, and where a file is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

from outrider.api.chat_template import ChatTemplate, named_templates, template_source
from outrider.api.plan import plan_pair
from outrider.api.tokenizer import Tokenizer
from outrider.core.config import EngineConfig
from outrider.core.errors import CheckpointError, ConfigError

# As published for Qwen2.5, Gemma 2, Llama 3.1, Mistral 7B v0.2 and Nemo, Phi-3.5 and Zephyr.
WRITTEN = {
    "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"
    "<|im_start|>assistant\nA<|im_end|>\n<|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\n",
    "gemma": "<s><start_of_turn>user\nS\n\nU<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n"
    "<start_of_turn>user\nV<end_of_turn>\n<start_of_turn>model\n",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nU<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nA<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nV<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": "<s>[INST] S\n\nU [/INST] A</s>[INST] V [/INST]",
    "mistral-nemo": "<s>[INST]S\n\nU[/INST]A</s>[INST]V[/INST]",
    "phi3": "<|system|>\nS<|end|>\n<|user|>\nU<|end|>\n<|assistant|>\nA<|end|>\n"
    "<|user|>\nV<|end|>\n<|assistant|>\n",
    "zephyr": "<|system|>\nS</s>\n<|user|>\nU</s>\n<|assistant|>\nA</s>\n<|user|>\nV</s>\n"
    "<|assistant|>\n",
}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "U"},
    {"role": "assistant", "content": "A"},
    {"role": "user", "content": "V"},
]
PAIR = "outrider/embedded"


def test_each_name_writes_what_its_models_were_trained_on() -> None:
    assert named_templates().keys() == WRITTEN.keys()
    for name, text in WRITTEN.items():
        template = ChatTemplate(template_source(name), {"bos_token": "<s>"})
        assert template.render(CHAT).text == text
        template.close()


def test_a_file_is_a_template(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text("{{ messages[0].content }}", encoding="utf-8")
    assert template_source(str(path)) == "{{ messages[0].content }}"


@pytest.mark.parametrize("given", ["chatmll", "no/such/file.jinja", "."])
def test_what_is_neither_a_name_nor_a_file_says_which_names_there_are(given: str) -> None:
    with pytest.raises(ConfigError, match="chat_template") as caught:
        template_source(given)
    assert "chatml, gemma, llama3" in str(caught.value.hint)
    assert ("'chatml'?" in str(caught.value.hint)) == (given == "chatmll")


def test_a_model_has_the_template_that_was_named(tmp_path: Path) -> None:
    config = EngineConfig(drafter="none", chat_template="chatml")
    tokenizer = plan_pair(PAIR, None, config).tokenizer
    assert tokenizer.chat(CHAT).text == WRITTEN["chatml"]
    bad = tmp_path / "bad.jinja"
    bad.write_text("{% if %}", encoding="utf-8")
    with pytest.raises(CheckpointError, match="chat template"):
        plan_pair(PAIR, None, EngineConfig(drafter="none", chat_template=str(bad)))


def test_ends_of_turns_end_texts_where_they_are_tokens() -> None:
    words = {"<|im_end|>": 0, "<|end|>": 1, "</s>": 2, "a": 3}
    plain = Tokenizer(Backend(WordLevel(words, unk_token="a")), {}, (2,))
    assert plain.with_template(template_source("chatml")).stop_ids == (2, 0)
    assert plain.with_template(template_source("phi3")).stop_ids == (2, 1)
    assert plain.with_template(template_source("gemma")).stop_ids == (2,)
    # In harmony the end of a message is none of a turn.
    harmony = {**words, "<|return|>": 4, "<|call|>": 5}
    other = Tokenizer(Backend(WordLevel(harmony, unk_token="a")), {}, (2,))
    assert other.with_template(template_source("phi3")).stop_ids == (2,)


def test_a_vocabulary_without_the_end_of_a_turn_is_a_note() -> None:
    plan = plan_pair(PAIR, None, EngineConfig(drafter="none", chat_template="gemma"))
    assert any("<end_of_turn>" in note for note in plan.notes)
