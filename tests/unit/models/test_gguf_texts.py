"""Texts as tokens of GGUF vocabularies: rules that cut, special tokens, tokens of own text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from doubles.gguf_writer import Gguf
from outrider.api.stream import Detokenizer
from outrider.api.tokenizer import Tokenizer
from outrider.api.tokenizer_guard import _BYTE_OF  # pyright: ignore[reportPrivateUsage]
from outrider.models.gguf.reader import read_header
from outrider.models.gguf.splits import RULES
from outrider.models.gguf.vocabulary import tokenizer_of

NORMAL, UNKNOWN, CONTROL, OWN, BYTE = 1, 2, 3, 4, 6
CHARACTER_OF = {byte: character for character, byte in _BYTE_OF.items()}
# Bytes that no UTF-8 has are other tokens.
NO_UTF8 = (0xC0, 0xC1, *range(0xF5, 0x100))
LETTERS = [f"<{i}>" if i in NO_UTF8 else CHARACTER_OF[i] for i in range(256)]
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a", "\n"]
PIECE_KINDS = [UNKNOWN, CONTROL, CONTROL, *([BYTE] * 256), *([NORMAL] * 4)]


def tokenizer(tmp_path: Path, tokens: list[str], kinds: list[int], **more: Any) -> Tokenizer:
    """Of a file with a vocabulary only; `more` are keys, with `__` for a dot."""
    keys = {"model": "gpt2", "tokens": tokens, "token_type": kinds, "add_bos_token": False}
    said = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    said |= {key.replace("__", "."): value for key, value in more.items()}
    path = Gguf(said).write(tmp_path / "vocabulary.gguf")
    folder = tmp_path / "read"
    folder.mkdir()
    written = json.dumps(tokenizer_of(read_header(path)))
    (folder / "tokenizer.json").write_text(written, "utf-8")
    return Tokenizer.load(folder)


def letters(tmp_path: Path, *added: tuple[str, int], **more: Any) -> Tokenizer:
    """A byte-level vocabulary of single bytes, and `added` tokens from id 256 on."""
    tokens, kinds = [*LETTERS, *(text for text, _ in added)], [NORMAL] * 256
    # A vocabulary must have a merge.
    tokens[0xC0] = "qq"
    more = {"tokenizer__ggml__merges": ["q q"], **more}
    return tokenizer(tmp_path, tokens, [*kinds, *(kind for _, kind in added)], **more)


@pytest.mark.parametrize(
    "keys",
    [
        {"general__name": "Phi 3.5 mini", "general__architecture": "phi3"},
        {"general__name": "unsloth Phi-3-mini", "general__architecture": "llama"},
    ],
)
def test_special_tokens_of_phi_3_take_the_blanks_that_follow(
    keys: dict[str, str], tmp_path: Path
) -> None:
    tokens, kinds = [*PIECES, "<|user|>", "<|endoftext|>"], [*PIECE_KINDS, CONTROL, CONTROL]
    scores = {"tokenizer__ggml__scores": [0.0] * len(tokens), "tokenizer__ggml__model": "llama"}
    found = tokenizer(tmp_path, tokens, kinds, **keys, **scores)
    user, space, a = len(PIECES), PIECES.index("▁"), PIECES.index("▁a")
    assert found.encode("<|user|>\n  a<|user|> \t") == [user, a, user]
    assert found.encode("</s>  a") == [2, a]
    # Tokens that are no turn's take none.
    assert found.encode("<|endoftext|> a") == [user + 1, space, a]
    assert found.encode("<s>\n") == [1, space, PIECES.index("\n")]


def test_other_special_tokens_leave_blanks_where_they_are(tmp_path: Path) -> None:
    found = letters(
        tmp_path, ("<|user|>", CONTROL), general__name="Phi 4", general__architecture="phi3"
    )
    assert found.encode("<|user|>\n") == [256, ord("\n")]


def test_tokens_of_the_user_are_their_own_text(tmp_path: Path) -> None:
    """Letters of Latin-1 are bytes in the other tokens of such vocabularies."""
    found = letters(tmp_path, ("ö", OWN), ("ü", OWN), ("Á", CONTROL), ("<|end|>", CONTROL))
    ids = found.encode("Grüöe Á é<|end|>")
    assert ids[2:4] == [257, 256]
    assert found.decode(ids, skip_special=False) == "Grüöe Á é<|end|>"
    assert found.decode(ids) == "Grüöe  é"
    assert found.token_bytes(256) == "ö".encode()
    assert found.token_bytes(0xE9) == b"\xe9"
    stream = Detokenizer(found)
    assert [stream.push(i) for i in ids[:5]] == ["G", "r", "ü", "ö", "e"]
    # Bytes that no character comes of stay broken around them.
    assert found.decode([0xC3, 256, 0xB6]) == "\ufffdö\ufffd"


def test_empty_tokens_and_merges_of_no_token_change_no_text(tmp_path: Path) -> None:
    """A program that applies such merges writes a, b, c for `abc`, and nothing for `ö`."""
    found = letters(
        tmp_path,
        ("", NORMAL),
        ("", NORMAL),
        ("bc", NORMAL),
        tokenizer__ggml__merges=["z z", "a b", "b c", "bc zz", "Ã ¶"],
    )
    assert found.encode("zzabc") == [ord("z"), ord("z"), ord("a"), 258]
    assert found.vocabulary[257] == "[EMPTY_257]"
    assert found.encode("öbc") == [0xC3, 0xB6, 258]
    assert found.decode(found.encode("zzabcö")) == "zzabcö"


def test_gemma_4_merges_within_lines(tmp_path: Path) -> None:
    tokens, kinds = [*PIECES, "\n\n", "▁▁", "a▁"], [*PIECE_KINDS, *([NORMAL] * 3)]
    found = tokenizer(
        tmp_path,
        tokens,
        kinds,
        tokenizer__ggml__model="gemma4",
        tokenizer__ggml__merges=["▁ ▁", "▁ a", "a ▁", "\n \n"],
        tokenizer__ggml__bos_token_id=1,
    )
    ids = found.encode(" a  \n\né")
    assert [found.vocabulary[i] for i in ids] == [
        "<s>", "▁a", "▁▁", "\n\n", "<0xC3>", "<0xA9>",
    ]  # fmt: skip
    assert found.decode(ids[1:]) == " a  \n\né"


EMPTY: dict[str, Any] = {
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "BPE", "vocab": {}, "merges": []},
}
CUTS = json.loads(Path(__file__).with_name("pre_tokenizer_cuts.json").read_text("utf-8"))


@pytest.mark.parametrize("names", CUTS["cuts"])
def test_text_is_cut_as_llama_cpp_and_the_makers_cut_it(names: str) -> None:
    """Pieces of one text, which `scripts/conformance` compares by their tokens."""
    for name in names.split():
        steps = RULES[name].pre_tokenizer(prefix=False)
        said: dict[str, Any] = {**EMPTY, "pre_tokenizer": steps}
        found = Backend.from_str(json.dumps(said)).pre_tokenizer.pre_tokenize_str(CUTS["text"])
        pieces = [CUTS["text"][start:end] for _, (start, end) in found]
        assert pieces == CUTS["cuts"][names].split("¦")


def test_every_rule_has_its_pieces_in_the_table() -> None:
    """Falcon's cut bytes apart, so its pieces are no parts of the text."""
    listed = {name for names in CUTS["cuts"] for name in names.split()}
    assert listed | {"falcon"} == RULES.keys()


def test_files_that_name_no_rule_are_cut_by_characters(tmp_path: Path) -> None:
    """Falcon's rule on bytes cuts the second byte of the sign off, for it looks like a number."""
    square = "".join(map(CHARACTER_OF.__getitem__, "²".encode()))
    found = letters(tmp_path, (square, NORMAL), tokenizer__ggml__merges=[" ".join(square)])
    assert found.encode("x²") == [ord("x"), 256]
