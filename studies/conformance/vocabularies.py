"""Tokenizers against llama.cpp's: its vocabularies with their texts, random texts, names of rules.

`.inp` and `.out` beside a vocabulary are texts and the ids that the maker's own tokenizer gives.
Random texts, and texts with special tokens in them, are compared with llama.cpp's library. A
difference that this project decided on is counted by its name.
"""

# ruff: noqa: RUF001 - full-width signs are texts here

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random

from conformance.client import PeerClient
from conformance.counts import Suite

from outrider.api.tokenizer import Tokenizer
from outrider.core.errors import CheckpointError
from outrider.models.gguf.reader import read_header
from outrider.models.gguf.splits import RULES
from outrider.models.gguf.vocabulary import tokenizer_of, vocabulary_of

_BETWEEN = "\n__ggml_vocab_test__\n"
# A rule is tried on this vocabulary, a small one with Chinese tokens.
_CARRIER = "ggml-vocab-deepseek-coder.gguf"
_PRE = b"tokenizer.ggml.pre"
_WORDS = [
    "the",
    "quick",
    "brown",
    "Fox",
    "HTTPServer",
    "camelCase",
    "don't",
    "we'LL",
    "I'm",
    "THEY'RE",
    "x's",
    "naïve",
    "Größe",
    "straße",
    "ÉCOLE",
    "élan",
    "café",
    "Москва",
    "привет",
    "МИР",
    "Ελλάδα",
    "عربي",
    "עברית",
    "हिन्दी",
    "ไทย",
    "한국어",
    "日本語",
    "カタカナ",
    "中文",
    "漢字",
    "你好，世界。",
    "def",
    "return",
    "{x:",
    "1}",
    "http://a.b/c?d=e&f=1",
    "C++",
    "a_b",
    "$x<=>^~|`",
    "#tag",
    "@me",
    "100%",
    "3.14",
    "1,000,000",
    "1234567",
    "２３",
    "½",
    "²",
    "Ⅷ",
    "٣٤٥",
    "🦙",
    "👩\u200d💻",
    "🏳️\u200d🌈",
    "…",
    "—",
    "“q”",
    "„w“",
    "«e»",
    "！？",
    "\xa0",
    "\u3000",
    "\u200b",
    "\ufeff",
    "ﬁ",
    "İ",
    "ǅ",
    "ª",
    "º",
    "K",
]
_SPACES = (" ", " ", " ", "", "", "  ", "   ", "\n", "\n\n", " \n", "\r\n", "\t", "\n \n", "\v")
_RANGES = (
    (0x20, 0x7E), (0x20, 0x7E), (0xA0, 0x17F), (0x370, 0x52F), (0x5D0, 0x6FF), (0x900, 0x97F),
    (0xE00, 0xE4F), (0x1100, 0x11FF), (0x1E00, 0x1FFF), (0x2000, 0x206F), (0x2100, 0x218F),
    (0x3000, 0x30FF), (0x4E00, 0x4FFF), (0xAC00, 0xACFF), (0xFF00, 0xFFEF), (0x1F300, 0x1F64F),
)  # fmt: skip


def random_text(rng: Random, inserted: Sequence[str] = ()) -> str:
    """Words, spaces, digits and characters of many scripts; now and then one of `inserted`."""
    parts: list[str] = []
    for _ in range(rng.randint(1, 12)):
        kind = rng.random()
        if inserted and kind < 0.4:
            parts.append(rng.choice(inserted))
        elif kind < 0.65:
            parts.append(rng.choice(_WORDS))
        elif kind < 0.75:
            parts.append("".join(rng.choice("0123456789") for _ in range(rng.randint(1, 9))))
        elif kind < 0.9:
            low, high = rng.choice(_RANGES)
            parts.append("".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 5))))
        parts.append(rng.choice(_SPACES))
    return "".join(parts)


Classify = Callable[[str, list[int]], str | None]


def documented(
    peer: PeerClient, name: str, specials: frozenset[str], text: str, ours: list[int]
) -> str | None:
    """The name of a decided difference that explains these ids; None if there is none."""
    rule = RULES.get(name)
    normal = unicodedata.normalize("NFC", text)
    if rule is not None and rule.nfc and normal != text and peer.encode([normal]) == [ours]:
        return "NFC: the maker's tokenizer normalises, llama.cpp does not"
    if "</s>" in text and "</s>" not in specials:
        return "</s>: an ordinary text in this vocabulary, a special token in llama.cpp"
    if any(unicodedata.category(char) == "Cn" for char in text):
        return "unassigned code points: two versions of Unicode"
    for rules, reason, explains in _SIMPLIFIED:
        if name in rules and explains(text):
            return reason
    if any(token in text for token in specials) and any(map(_is_far_blank, text)):
        return "blanks behind special tokens: any of Unicode, those of ASCII in llama.cpp"
    return None


def _is_far_letter(char: str) -> bool:
    return char > "\x7f" and unicodedata.category(char)[0] in "LM"


def _is_far_blank(char: str) -> bool:
    return char > "\x7f" and char.isspace()


def _some(explains: Callable[[str], bool]) -> Callable[[str], bool]:
    return lambda text: any(map(explains, text))


# Rules that llama.cpp simplifies: for which texts, and how.
_SIMPLIFIED: tuple[tuple[set[str], str, Callable[[str], bool]], ...] = (
    (
        {"deepseek-llm"},
        "DeepSeek's expression: the maker's classes, ranges in llama.cpp",
        _some(lambda char: char > "\x7f" and (char.isspace() or char.isalpha())),
    ),
    (
        {
            "tekken",
            "gpt-4o",
            "llama4",
            "kanana2",
            "talkie",
            "minimax-m2",
            "youtu",
            "tiny_aya",
            "cohere2moe",
        },
        "words by case: the maker's classes of letters, ASCII in llama.cpp",
        _some(_is_far_letter),
    ),
    ({"kimi-k2"}, "words by case: the maker's, any letters in llama.cpp", _some(str.isalpha)),
    (
        {"afmoe", "tiny_aya", "cohere2moe"},
        "numbers: pieces of their own, with the text before them in llama.cpp",
        _some(str.isnumeric),
    ),
    (
        {"falcon"},
        "numbers: Falcon cuts them out of bytes, llama.cpp out of characters",
        lambda text: not text.isascii(),
    ),
)


def suites(peer: PeerClient, folder: Path, num_texts: int) -> Iterator[Suite]:
    """`folder` is `models` of llama.cpp."""
    given, random, special, decoded, names = (
        Suite("vocabulary texts (.inp/.out)"),
        Suite(f"random texts, {num_texts} a vocabulary"),
        Suite("texts with special tokens"),
        Suite("pieces of every token"),
        Suite("names of pre-tokenizers"),
    )
    for path in sorted(folder.glob("ggml-vocab-*.gguf")):
        label = path.stem.removeprefix("ggml-vocab-")
        try:
            tokenizer = tokenizer_in(path, peer.scratch)
        except CheckpointError as error:
            random.refuse(label, str(error))
            continue
        peer.open(path)
        words = vocabulary_of(read_header(path))
        name = words.raw.text("tokenizer.ggml.pre", "default")
        shown = [words.tokens[place] for place in sorted(tokenizer.special_ids)][:64]
        explain = partial(documented, peer, name, frozenset(shown))
        _given(given, label, path, tokenizer, explain)
        rng = Random(label)
        texts = [random_text(rng) for _ in range(num_texts)]
        _compare(random, label, tokenizer, texts, peer, explain)
        if shown:
            texts = [random_text(rng, shown) for _ in range(num_texts // 4)]
            _compare(special, label, tokenizer, texts, peer, explain)
        _pieces(decoded, label, tokenizer, peer)
    _names(names, peer, folder / _CARRIER, num_texts // 8)
    yield from (given, random, special, decoded, names)


def tokenizer_in(path: Path, scratch: Path) -> Tokenizer:
    """The tokenizer of a file that may hold a vocabulary alone."""
    folder = scratch / path.stem
    folder.mkdir(exist_ok=True)
    written = json.dumps(tokenizer_of(read_header(path)))
    (folder / "tokenizer.json").write_text(written, "utf-8")
    return Tokenizer.load(folder)


def _given(suite: Suite, label: str, path: Path, tokenizer: Tokenizer, explain: Classify) -> None:
    if not Path(f"{path}.inp").exists():
        return
    texts = Path(f"{path}.inp").read_bytes().decode().split(_BETWEEN)
    lines = Path(f"{path}.out").read_text("utf-8").split("\n")
    for text, line in zip(texts, lines, strict=False):
        ours = tokenizer.encode(text, add_special=False)
        suite.count(label, ours == list(map(int, line.split())), text, explain(text, ours))


def _compare(
    suite: Suite,
    label: str,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    peer: PeerClient,
    explain: Classify,
) -> None:
    for text, theirs in zip(texts, peer.encode(texts), strict=True):
        ours = tokenizer.encode(text)
        right = ours == theirs
        suite.count(label, right, text, None if right else explain(text, ours))


def _pieces(suite: Suite, label: str, tokenizer: Tokenizer, peer: PeerClient) -> None:
    """The bytes of each token, where a token has bytes of its own."""
    ids = [place for place in range(tokenizer.vocab_size) if tokenizer.token_bytes(place)]
    for place, theirs in zip(ids, peer.pieces(ids), strict=True):
        ours = tokenizer.token_bytes(place)
        lost = "tokens of other letters than bytes: llama.cpp has no text for them"
        reason = lost if b"[UNK_BYTE_" in theirs else None
        suite.count(label, ours == theirs, f"{place}: {ours!r}, not {theirs!r}", reason)


def with_rule(data: bytes, name: str) -> bytes:
    """A vocabulary file that names another pre-tokenizer."""
    start = data.index(_PRE) + len(_PRE) + 4
    length = int.from_bytes(data[start : start + 8], "little")
    text = name.encode()
    return data[:start] + len(text).to_bytes(8, "little") + text + data[start + 8 + length :]


def _names(suite: Suite, peer: PeerClient, carrier: Path, num_texts: int) -> None:
    data = carrier.read_bytes()
    texts = [random_text(Random(place)) for place in range(num_texts)]
    for name in RULES:
        path = peer.scratch / f"{name}.gguf"
        path.write_bytes(with_rule(data, name))
        peer.open(path)
        explain = partial(documented, peer, name, frozenset[str]())
        _compare(suite, name, tokenizer_in(path, peer.scratch), texts, peer, explain)
        path.unlink()
