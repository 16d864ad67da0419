"""Tokenizers: what the checkpoint says, as transformers reads it, and clear errors otherwise."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

import outrider.pairs as pairs
from outrider.api.tokenizer import (
    Difference,
    Tokenizer,
    first_differences,
    num_common_ids,
)
from outrider.core.errors import CheckpointError, ConfigError

TINY = Path(pairs.__path__[0]) / "tiny"
EMBEDDED = Tokenizer.load(TINY / "target")
TEXTS = [
    "",
    "def f(x):\n    return x",
    "naïve café \U0001f600",
    "<|endoftext|>a<|user|>",
    "  12345",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for path in (TINY / "target").glob("*.json"):
        shutil.copy(path, tmp_path)
    return tmp_path


def edit(path: Path, **changes: Any) -> None:
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, **changes}))


@given(st.text())
def test_text_survives_the_round_trip(text: str) -> None:
    assert EMBEDDED.decode(EMBEDDED.encode(text), skip_special=False) == text


@given(st.lists(st.text()), st.booleans())
def test_a_batch_is_encoded_as_its_texts_are(texts: list[str], add_special: bool) -> None:
    alone = [EMBEDDED.encode(text, add_special=add_special) for text in texts]
    assert EMBEDDED.encode_batch(texts, add_special=add_special) == alone


def test_text_that_is_not_unicode_is_refused() -> None:
    for refused in (lambda: EMBEDDED.encode("\udc80"), lambda: EMBEDDED.encode_batch(["\udc80"])):
        with pytest.raises(ConfigError, match="UTF-8"):
            refused()


def test_a_folder_is_read_once_while_its_files_stay(folder: Path) -> None:
    first = Tokenizer.load(folder)
    assert Tokenizer.load(folder) is first
    assert Tokenizer.load(folder / "." / "") is first
    edit(folder / "config.json", note="a longer file")
    second = Tokenizer.load(folder)
    assert second is not first
    (folder / "chat_template.jinja").write_text("new")
    assert Tokenizer.load(folder).chat([]).text == "new"
    assert Tokenizer.load(folder) is not second


def test_a_folder_that_failed_is_read_again(folder: Path) -> None:
    whole = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(whole[:-9])
    with pytest.raises(CheckpointError):
        Tokenizer.load(folder)
    (folder / "tokenizer.json").write_bytes(whole)
    assert Tokenizer.load(folder).encode("x") == EMBEDDED.encode("x")


def test_two_folders_of_one_text_have_it_read_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As target and draft of a family do; what stands beside it in each folder is its own."""
    path, loads = folder / "tokenizer.json", list[str]()
    path.write_text(f"{path.read_text()} ")  # read by no other test
    (folder / "draft").mkdir()
    for beside in folder.glob("*.json"):
        shutil.copy(beside, folder / "draft")
    (folder / "draft" / "chat_template.jinja").write_text("its own")

    def load(text: str) -> Backend:
        loads.append(text)
        return Backend.from_str(text)

    monkeypatch.setattr("outrider.api.tokenizer.Backend", SimpleNamespace(from_str=load))
    first, second = Tokenizer.load(folder), Tokenizer.load(folder / "draft")
    assert len(loads) == 1
    assert first.encode("x = 1") == second.encode("x = 1") == EMBEDDED.encode("x = 1")
    assert first_differences(first, second) == []
    assert second.chat([]).text == "its own"
    path.write_text(f"{path.read_text()} ")
    Tokenizer.load(folder)
    assert len(loads) == 2


def test_the_embedded_pair_shares_one_vocabulary() -> None:
    draft = Tokenizer.load(TINY / "draft")
    assert EMBEDDED.vocab_size == 8192
    assert EMBEDDED.fingerprint() == draft.fingerprint()
    assert first_differences(EMBEDDED, draft) == []


def test_padding_is_no_difference(folder: Path) -> None:
    """Converters name rows that have no token."""
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    data["model"]["vocab"] |= {f"[PAD{i}]": i for i in range(8192, 8256)}
    path.write_text(json.dumps(data))
    padded = Tokenizer.load(folder)
    assert len(padded.vocabulary) == 8256
    assert first_differences(EMBEDDED, padded) == first_differences(padded, EMBEDDED) == []
    assert num_common_ids(padded, 8256, 8300) == num_common_ids(EMBEDDED, 9000, 8256) == 8192
    assert num_common_ids(EMBEDDED, 8000, 8256) == 8000
    data["model"]["vocab"] |= {"[PAD7]": 8256}
    path.write_text(json.dumps(data))
    other = Tokenizer.load(folder)
    assert first_differences(EMBEDDED, other) == [Difference(8256, None, "[PAD7]")]


def test_differences_name_the_lowest_ids_and_both_tokens(folder: Path) -> None:
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    vocabulary: dict[str, int] = data["model"]["vocab"]
    swapped = {4: 5, 5: 4}
    data["model"]["vocab"] = {t: swapped.get(i, i) for t, i in vocabulary.items() if i < 8190}
    data["model"]["merges"] = []
    path.write_text(json.dumps(data))
    other = Tokenizer.load(folder)
    found = first_differences(EMBEDDED, other)
    assert found[:2] == [Difference(4, "!", '"'), Difference(5, '"', "!")]
    assert [(item.token_id, item.second) for item in found[2:]] == [(8190, None), (8191, None)]
    assert len(first_differences(EMBEDDED, other, limit=1)) == 1
    assert EMBEDDED.fingerprint() != other.fingerprint()


def add_bos_by_post_processor(folder: Path) -> None:
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    backend.save(str(folder / "tokenizer.json"))


@pytest.mark.wide
@pytest.mark.parametrize("by_post_processor", [False, True])
@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": False},
        {"add_eos_token": True},
        {"add_bos_token": True, "add_eos_token": True},
    ],
)
def test_special_tokens_are_added_as_transformers_does(
    folder: Path, flags: dict[str, Any], by_post_processor: bool
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers: Any = pytest.importorskip("transformers")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["add_bos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, **flags}))
    if by_post_processor:
        add_bos_by_post_processor(folder)
    oracle = transformers.AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer.load(folder)
    for text in TEXTS:
        ids = oracle.encode(text)
        assert ours.encode(text) == ids
        assert ours.encode(text, add_special=False) == oracle.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
    messages = [{"role": "user", "content": "hi"}]
    expected = oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.chat(messages).text == expected


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [7, 9]}, {"eos_token_id": 1}, (7, 9)),
        ({"eos_token_id": None}, {"eos_token_id": 1}, (1,)),
        ({}, {"eos_token_id": None}, (0,)),
    ],
)
def test_stop_ids_come_from_the_first_file_that_names_them(
    folder: Path, generation: dict[str, Any], config: dict[str, Any], expected: tuple[int, ...]
) -> None:
    (folder / "generation_config.json").write_text(json.dumps(generation))
    edit(folder / "config.json", **config)
    assert Tokenizer.load(folder).stop_ids == expected


def test_truncation_written_in_the_file_is_ignored(folder: Path) -> None:
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    edit(folder / "tokenizer.json", truncation=truncation)
    assert len(Backend.from_file(str(folder / "tokenizer.json")).encode("one two three").ids) == 2
    assert Tokenizer.load(folder).encode("one two three four five") == EMBEDDED.encode(
        "one two three four five"
    )


def test_chat_templates_may_live_in_a_file_or_a_list(folder: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    edit(
        folder / "tokenizer_config.json",
        chat_template=[{"name": "tool", "template": "no"}, {"name": "default", "template": "yes"}],
    )
    assert Tokenizer.load(folder).chat(messages).text == "yes"
    (folder / "chat_template.jinja").write_text("{{ bos_token }}file")
    assert Tokenizer.load(folder).chat(messages).text == "<|endoftext|>file"


@pytest.mark.parametrize("template", [None, [], [{"name": "tool", "template": "x"}]])
def test_a_checkpoint_without_template_says_so(folder: Path, template: object) -> None:
    edit(folder / "tokenizer_config.json", chat_template=template)
    tokenizer = Tokenizer.load(folder)
    assert not tokenizer.has_chat_template
    with pytest.raises(CheckpointError, match="no chat template") as caught:
        tokenizer.chat([])
    assert "outrider generate" in str(caught.value.hint)


def test_a_missing_tokenizer_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: no such file") as caught:
        Tokenizer.load(folder)
    assert caught.value.hint


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b'{"version": "1.0"}', b"\xff\xfe"])
def test_a_broken_tokenizer_is_named(folder: Path, content: bytes) -> None:
    (folder / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.load(folder)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"[]", b"{", b"\xff"])
def test_a_broken_side_file_is_named(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        Tokenizer.load(folder)


def llama_style(scheme: str, folder: Path, config: dict[str, object]) -> Tokenizer:
    """A folder of the Llama class: `scheme` is of its Metaspace, or "prepend" for a normalizer."""
    words = ["<unk>", "<s>", "</s>", "\u2581", *"helo", "he", "\u2581he", "lo", "llo"]
    merges = [("h", "e"), ("\u2581", "he"), ("l", "o"), ("l", "lo")]
    backend = Backend(models.BPE({word: i for i, word in enumerate(words)}, merges))
    any_backend: Any = backend
    if scheme == "prepend":
        marks = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        any_backend.normalizer = normalizers.Sequence(marks)
    else:
        any_backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    special = [AddedToken(word, special=True, normalized=False) for word in words[:3]]
    any_backend.add_special_tokens(special)
    backend.save(str(folder / "tokenizer.json"))
    told = json.dumps({"tokenizer_class": "LlamaTokenizer", **config})
    (folder / "tokenizer_config.json").write_text(told, "utf-8")
    return Tokenizer.load(folder)


@pytest.mark.parametrize("config", [{}, {"legacy": True}, {"add_prefix_space": False}])
@pytest.mark.parametrize(
    ("scheme", "text", "tokens"),
    [
        ("prepend", "hello", "_he llo"),
        ("prepend", " hello", "_ _he llo"),
        ("prepend", "hello</s>hello", "_he llo </s> _he llo"),
        ("first", "hello</s>hello", "_he llo </s> he llo"),
        ("always", "hello</s>hello", "_he llo </s> _he llo"),
        ("never", "hello", "he llo"),
    ],
)
def test_a_llama_tokenizer_is_what_its_file_says(
    scheme: str, text: str, tokens: str, config: dict[str, object], tmp_path: Path
) -> None:
    """As docs/models.md tells of the Llama class; tokenizer_config.json has no say."""
    tokenizer = llama_style(scheme, tmp_path, config)
    found = [tokenizer.vocabulary[i] for i in tokenizer.encode(text)]
    assert found == tokens.replace("_", "\u2581").split()
