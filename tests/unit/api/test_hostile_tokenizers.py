"""Tokenizers from strangers: every published shape loads, and none that is built to hurt does."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.pre_tokenizers import ByteLevel

from outrider.api.tokenizer import Tokenizer
from outrider.core.errors import CheckpointError

BYTES = {char: i for i, char in enumerate(sorted(ByteLevel.alphabet()))}
PIECES = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefgh1"]
TEXTS = ["", "a b  c\n\n  12345 d", "naïve 中文 \U0001f600 don't", "   \t\r\n x", "h" * 300, "ﷺ½İ"]

CL = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    rf"{CL}?|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+"
    rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{CL}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLADA = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)


def bpe(**more: Any) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "BPE", "dropout": None, "vocab": BYTES, "merges": []}
    return made | {"unk_token": None} | more


def pieces(**more: Any) -> dict[str, Any]:
    vocabulary = {piece: i for i, piece in enumerate(PIECES)}
    return bpe(unk_token="<unk>", byte_fallback=True, fuse_unk=True, vocab=vocabulary) | more


def unigram(**more: Any) -> dict[str, Any]:
    vocabulary = [[piece, -float(i)] for i, piece in enumerate(PIECES)]
    return {"type": "Unigram", "unk_id": 0, "vocab": vocabulary} | more


def word_piece(**more: Any) -> dict[str, Any]:
    vocabulary = {text: i for i, text in enumerate(["[UNK]", "[CLS]", "[SEP]", *"abc", "##a"])}
    return {
        "type": "WordPiece",
        "unk_token": "[UNK]",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
        "vocab": vocabulary,
    } | more


def split(pattern: str, behavior: str = "Isolated", *, invert: bool = False) -> dict[str, Any]:
    regex = {"Regex": pattern}
    return {"type": "Split", "pattern": regex, "behavior": behavior, "invert": invert}


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def byte_level(*, use_regex: bool = False, add_prefix_space: bool = False) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": add_prefix_space,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def sequence(key: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", key: list(steps)}


def normalizers(*steps: dict[str, Any]) -> dict[str, Any]:
    return sequence("normalizers", *steps)


def splits(*steps: dict[str, Any]) -> dict[str, Any]:
    return sequence("pretokenizers", *steps, byte_level())


def metaspace(scheme: str, *, split: bool = True) -> dict[str, Any]:
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split}


def template(*places: str, token: str = "</s>", token_id: int = 1) -> dict[str, Any]:
    made = [
        {"Sequence": {"id": place, "type_id": 0}}
        if place in "AB"
        else {"SpecialToken": {"id": token, "type_id": 0}}
        for place in places
    ]
    special = {token: {"id": token, "ids": [token_id], "tokens": [token]}}
    return {
        "type": "TemplateProcessing",
        "single": made,
        "pair": [*made, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": special,
    }


def charsmap(*texts: str) -> str:
    """A map without a single rule, and these texts behind it."""
    blob = bytes(1024) + b"".join(text.encode() + b"\0" for text in texts)
    return base64.b64encode((1024).to_bytes(4, "little") + blob).decode()


def precompiled(*texts: str) -> dict[str, Any]:
    return {"type": "Precompiled", "precompiled_charsmap": charsmap(*texts)}


def added(content: str, token_id: int, **more: Any) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, **flags, "special": True} | more


SPACES = normalizers({"type": "Prepend", "prepend": "▁"}, replace(" ", "▁"))
SENTENCE = sequence(
    "decoders",
    replace("▁", " "),
    {"type": "ByteFallback"},
    {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
)
LEVEL = {"pre_tokenizer": byte_level(use_regex=True), "decoder": byte_level(), "model": bpe()}
DOUBLE = replace(" {2,}", "▁", "Regex")
BERT = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True}


def level(*steps: dict[str, Any], **more: Any) -> dict[str, Any]:
    return LEVEL | {"pre_tokenizer": splits(*steps)} | more


# One file of each shape, named for a model that has it.
PUBLISHED: dict[str, dict[str, Any]] = {
    "gpt2": LEVEL | {"model": {"vocab": BYTES, "merges": [], "unk_token": ""}},
    "gpt-neox": LEVEL | {"normalizer": {"type": "NFC"}, "post_processor": byte_level()},
    "roberta": LEVEL
    | {
        "model": bpe(vocab=BYTES | {"<s>": 256, "</s>": 257}),
        "post_processor": {
            "type": "RobertaProcessing",
            "sep": ["</s>", 257],
            "cls": ["<s>", 256],
            "trim_offsets": True,
            "add_prefix_space": False,
        },
    },
    "llama-2": {
        "normalizer": SPACES,
        "decoder": SENTENCE,
        "model": pieces(),
        "post_processor": template("s", "A"),
        "added_tokens": [added("<unk>", 0), added("</s>", 1)],
    },
    "phi-3": {
        "normalizer": SPACES,
        "decoder": SENTENCE,
        "model": pieces(),
        "added_tokens": [added("</s>", 1, rstrip=True), added("<|end|>", 500, rstrip=True)],
    },
    "mistral": {
        "pre_tokenizer": metaspace("first", split=False),
        "decoder": SENTENCE,
        "model": pieces(),
    },
    "gemma": {
        "normalizer": replace(" ", "▁"),
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
        "decoder": sequence(
            "decoders", replace("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"}
        ),
        "model": pieces(),
    },
    "llama-3": level(
        split(rf"{CL}|{WORD}|\p{{N}}{{1,3}}{REST}"),
        model=bpe(ignore_merges=True),
        post_processor=sequence("processors", byte_level(), template("s", "A")),
    ),
    "qwen2": level(split(rf"{CL}|{WORD}|\p{{N}}{REST}"), normalizer={"type": "NFC"}),
    "qwen3.5": level(
        split(
            rf"{CL}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
    ),
    "granite": level(split(rf"{CL}|{WORD}|\p{{N}}{{1,3}}{REST}", "Removed", invert=True)),
    "minicpm": level(split(r"\p{N}{1,3}"), split(rf"{CL}|{WORD}|\p{{N}}+{REST}")),
    "gpt-oss": level(split(O200K)),
    "cohere": level(split(r"\d{1,3}(?=(?:\d{3})*\b)"), split(O200K)),
    "deepseek-v3": level(
        split(r"\p{N}{1,3}"),
        split("[一-龥\u3040-\u309f\u30a0-\u30ff]+"),
        split(
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
            "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
            "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
        ),
    ),
    "deepseek-coder": level(
        split("[\r\n]"),
        split(r"\s?\p{L}+"),
        split(r"\s?\p{P}+"),
        split(r"\s+$"),
        {"type": "Digits", "individual_digits": True},
    ),
    "smollm": level({"type": "Digits", "individual_digits": True}),
    "falcon": LEVEL
    | {
        "pre_tokenizer": sequence(
            "pretokenizers",
            {"type": "Punctuation", "behavior": "Contiguous"},
            byte_level(use_regex=True),
            {"type": "Digits", "individual_digits": False},
            split("[0-9][0-9][0-9]"),
        )
    },
    "bloom": level(split(" ?[^(\\s|[.,!?…。\uff0c、।۔،])]+")),  # noqa: RUF001 - its signs
    "laguna": level(split(r"(?:\r?\n)+(?!\r?\n)", "MergedWithNext")),
    "llada": level(split(LLADA)),
    "clip": level(
        split(r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+", "Removed", invert=True),
        normalizer=normalizers(
            {"type": "NFC"}, replace(r"\s+", " ", "Regex"), {"type": "Lowercase"}
        ),
    ),
    "t5": {
        "normalizer": normalizers(precompiled("x" * 33), DOUBLE),
        "pre_tokenizer": sequence(
            "pretokenizers", {"type": "WhitespaceSplit"}, metaspace("always")
        ),
        "post_processor": template("A", "s"),
        "decoder": metaspace("always"),
        "model": unigram(),
    },
    "albert": {
        "normalizer": normalizers(
            replace("``", '"'),
            replace("''", '"'),
            {"type": "NFKD"},
            {"type": "StripAccents"},
            {"type": "Lowercase"},
            precompiled("x" * 33),
            replace(" {2,}", " ", "Regex"),
        ),
        "pre_tokenizer": metaspace("always"),
        "decoder": metaspace("always"),
        "model": unigram(),
    },
    "bert": {
        "normalizer": {"type": "BertNormalizer", **BERT},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {"type": "BertProcessing", "sep": ["[SEP]", 2], "cls": ["[CLS]", 1]},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": word_piece(),
    },
    "words": {
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "a": 1}, "unk_token": "[UNK]"},
    },
    "characters": level(split(".")),
}


def chain(count: int, make: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
    return normalizers(*(make(i) for i in range(count)))


def nested(depth: int, key: str) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "Fuse" if key == "decoders" else "NFC"}
    for _ in range(depth):
        found = sequence(key, found)
    return found


HOSTILE: dict[str, dict[str, Any] | str] = {
    "replacements that multiply": {"normalizer": chain(30, lambda _: replace("a", "aa"))},
    "one that multiplies much": {"normalizer": chain(4, lambda _: replace("a", "a" * 60))},
    "a long replacement": {"normalizer": replace("a", "b" * 10_000)},
    "an empty pattern": {"normalizer": replace("", "b")},
    "an expression that matches nothing": {
        "normalizer": chain(9, lambda _: replace("|", "bbbb", "Regex"))
    },
    "a long prefix": {"normalizer": {"type": "Prepend", "prepend": "b" * 10_000}},
    "many steps": {"normalizer": chain(10_000, lambda _: {"type": "Prepend", "prepend": "bb"})},
    "forms between replacements": {
        "normalizer": chain(20, lambda i: {"type": "NFKD"} if i % 2 else replace("l", "ﷺ"))
    },
    "bytes of bytes": {"normalizer": chain(12, lambda _: {"type": "ByteLevel"})},
    "a map to long texts": {"normalizer": precompiled("b" * 10_000)},
    "a map that is cut off": {"normalizer": precompiled() | {"precompiled_charsmap": "//8="}},
    "a map of other letters": {"normalizer": precompiled() | {"precompiled_charsmap": "é"}},
    "deep normalizers": {"normalizer": nested(50, "normalizers")},
    "an unknown normalizer": {"normalizer": {"type": "Script"}},
    "a normalizer without type": {"normalizer": {"prepend": "x"}},
    "a normalizer that is a list": {"normalizer": ["Replace", "a", "b"]},
    "levels on levels": {"pre_tokenizer": splits(*[byte_level()] * 20)},
    "spaces on spaces": {"pre_tokenizer": sequence("pretokenizers", *[metaspace("always")] * 10)},
    "an unknown pre-tokenizer": {"pre_tokenizer": {"type": "Custom"}},
    "nested repetition": {"pre_tokenizer": split("(a+)+b")},
    "competing alternatives": {"pre_tokenizer": split("(a|a|aa)*b")},
    "competing repetitions": {"pre_tokenizer": split(r"a*a*a*a*a*[^a\0]")},
    "a reference": {"pre_tokenizer": split(r"(a*)\1\1b")},
    "recursion": {"pre_tokenizer": split(r"(?<x>a\g<x>?b)")},
    "a repetition of repetitions": {"pre_tokenizer": split("((a{999}){999}){999}")},
    "a long pattern": {"pre_tokenizer": split("a?" * 50_000)},
    "a broken pattern": {"pre_tokenizer": split("[z-a]")},
    "a pattern in the normalizer": {"normalizer": replace("(a*)*b", "c", "Regex")},
    "a pattern in the decoder": {"decoder": replace("(a*)*b", "c", "Regex")},
    "two kinds of one pattern": {
        "pre_tokenizer": split("a") | {"pattern": {"String": "a", "Regex": "(a+)+b"}}
    },
    "decoders that multiply": {"decoder": sequence("decoders", *[replace("a", "a" * 60)] * 5)},
    "a decoder that strips all": {
        "decoder": {"type": "Strip", "content": "a", "start": 2**62, "stop": 2**62}
    },
    "a decoder that strips less than nothing": {
        "decoder": {"type": "Strip", "content": "a", "start": -1, "stop": 0}
    },
    "a decoder for sound": {
        "decoder": {"type": "CTC", "pad_token": "a", "word_delimiter_token": "|", "cleanup": True}
    },
    "deep decoders": {"decoder": nested(100, "decoders")},
    "a text that stands in a template twice": {
        "post_processor": sequence("processors", *[template("A", "A")] * 20)
    },
    "a template that is endless": {"post_processor": template(*["s"] * 100_000)},
    "an unknown post-processor": {"post_processor": {"type": "Mail"}},
    "special ids beyond all": {"post_processor": template("A", "s", token_id=2**31)},
    "a token of a megabyte": {"model": bpe(vocab=BYTES | {"a" * 2**20: 256})},
    "a piece of many": {
        "model": unigram(vocab=[["<unk>", 0.0], *(["a" * i, -1.0] for i in range(1, 900))])
    },
    "an id beyond all": {"model": bpe(vocab=BYTES | {"aa": 2**40})},
    "an id below all": {"model": bpe(vocab=BYTES | {"aa": -1})},
    "an id that is no number": {"model": bpe(vocab=BYTES | {"aa": "1"})},
    "dropout": {"model": bpe(dropout=0.5)},
    "a merge of nobody": {"model": bpe(merges=["zz yy"])},
    "a merge that is cut": {
        "model": bpe(vocab={"a": 0, "b": 1}, merges=["a b"], continuing_subword_prefix="xxx")
    },
    "no unknown piece": {"model": unigram(unk_id=10**9)},
    "words of any length": {"model": word_piece(max_input_chars_per_word=10**9)},
    "an unknown model": {"model": {"type": "Python", "vocab": {}}},
    "no model": {"model": None},
    "an added token of a megabyte": {"added_tokens": [added("a" * 2**20, 256)]},
    "added tokens that grow": {
        "normalizer": chain(2, lambda _: replace("a", "a" * 40)),
        "added_tokens": [added("a" * 2000, 256 + i, normalized=True) for i in range(64)],
    },
    "an added id beyond all": {"added_tokens": [added("x", 2**32 - 1)]},
    "deep JSON": "[" * 100_000,
    "one key twice": '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [], "vocab": {}}}',
    "no object": "[]",
    "no JSON": "{",
    "not UTF-8": "\udcff",
}


def write(folder: Path, parts: dict[str, Any] | str) -> Path:
    path = folder / "tokenizer.json"
    if isinstance(parts, dict):
        parts = json.dumps({"version": "1.0", "added_tokens": [], "model": bpe()} | parts)
    path.write_bytes(parts.encode("utf-8", "surrogateescape"))
    return folder


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_shape_loads_and_encodes_as_the_library_does(
    name: str, tmp_path: Path
) -> None:
    folder = write(tmp_path, PUBLISHED[name])
    ours, theirs = Tokenizer.load(folder), Backend.from_file(str(folder / "tokenizer.json"))
    for text in TEXTS:
        ids = theirs.encode(text).ids
        assert ours.encode(text) == ids
        assert ours.encode_batch([text]) == [ids]
        assert ours.decode(ids) == theirs.decode(ids)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_tokenizer_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: ") as caught:
        Tokenizer.load(write(tmp_path, HOSTILE[name]))
    assert len(str(caught.value)) < 800
    assert "\n" not in str(caught.value)


def test_a_text_that_the_chain_multiplies_is_refused_before_it_is_made(tmp_path: Path) -> None:
    folder = write(tmp_path, {"normalizer": chain(3, lambda _: replace("a", "a" * 12))})
    loaded = Tokenizer.load(folder)
    assert len(loaded.encode("a")) == 12**3
    assert len(loaded.encode("b" * 10_000)) == 10_000
    with pytest.raises(CheckpointError, match="makes more than 16777216 bytes of a text of 20000"):
        loaded.encode("a" * 20_000)
    with pytest.raises(CheckpointError, match="makes more than"):
        loaded.encode_batch(["a", "a" * 20_000])


def test_a_panic_is_an_error_of_the_checkpoint(tmp_path: Path) -> None:
    strip = {"type": "Strip", "content": "a", "start": 1, "stop": 1}
    loaded = Tokenizer.load(write(tmp_path, {"decoder": strip}))
    with pytest.raises(CheckpointError, match="cannot decode tokens: "):
        loaded.decode([BYTES["a"]])
    assert loaded.encode("a") == [BYTES["a"]]


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit, OverflowError])
def test_an_interrupt_stays_one(interrupt: type[BaseException]) -> None:
    class Broken:
        decoder = None

        def get_added_tokens_decoder(self) -> dict[int, Any]:
            return {}

        def encode(self, *_args: object, **_more: object) -> None:
            raise interrupt

        decode = encode_batch_fast = encode

    broken: Any = Broken()
    loaded = Tokenizer(broken, {}, ())
    for call in (lambda: loaded.encode("a"), lambda: loaded.decode([1])):
        with pytest.raises(interrupt):
            call()


_UNDER_A_LIMIT = """
import resource, sys
from pathlib import Path
from outrider.api.tokenizer import Tokenizer
from outrider.core.errors import CheckpointError
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
try:
    Tokenizer.load(Path(sys.argv[1])).encode("a" * 100_000)
except CheckpointError as error:
    print(error)
"""


@pytest.mark.wide
def test_chained_replacements_take_no_memory(tmp_path: Path) -> None:
    folder = write(tmp_path, HOSTILE["replacements that multiply"])
    done = subprocess.run(
        [sys.executable, "-c", _UNDER_A_LIMIT, str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "normalizer makes of a byte" in done.stdout
