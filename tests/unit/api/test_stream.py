"""Streaming text: the pieces join to the whole, whatever the grouping, and stops cut exactly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

import outrider.pairs as pairs
from outrider.api.stream import Detokenizer, StopMatcher, _num_begun  # pyright: ignore[reportPrivateUsage]
from outrider.api.tokenizer import Tokenizer
from outrider.core.errors import ConfigError

TARGET = Path(pairs.__path__[0]) / "tiny" / "target"
BYTE_LEVEL = Tokenizer.load(TARGET)
BYTE_IDS = {data[0]: i for i in range(300) if len(data := BYTE_LEVEL.token_bytes(i) or b"") == 1}
BYTES = [i for i, token in sorted(BYTE_LEVEL.vocabulary.items()) if len(token) == 1]


def sentencepiece_style() -> Tokenizer:
    """Words with a leading space mark, single bytes for the rest, first space dropped."""
    words = ["\u2581", "\u2581hello", "\u2581world", "hel", "lo", "!"]
    tokens = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    marked: Any = backend
    marked.add_special_tokens([AddedToken("<s>", special=True)])
    return Tokenizer(backend, {}, [])


def metaspace_style(alphabet: str) -> Tokenizer:
    """Pieces of one character each, and no bytes to fall back to."""
    vocabulary = {token: index for index, token in enumerate(["<unk>", "\u2581", *alphabet])}
    backend = Backend(models.BPE(vocabulary, [], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return Tokenizer(backend, {}, [])


SENTENCEPIECE = sentencepiece_style()
# Characters of one to four bytes, spaces, and the one that stands for broken bytes.
ALPHABET = "\ufffd\ufffd\xe9\u20ac\U0001f600 ab\n"
METASPACE = metaspace_style("\ufffd\xe9\u20ac\U0001f600ab\n")


class Characters:
    """A decoder whose id n is the character chr(n): stop strings can be split at will."""

    special_ids: frozenset[int] = frozenset()
    whole_characters = True

    def token_bytes(self, token_id: int) -> bytes | None:
        del token_id
        return None

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        assert skip_special
        return "".join(map(chr, ids))


def groups(ids: Sequence[int], sizes: Sequence[int]) -> Iterator[Sequence[int]]:
    start = 0
    for size in [*sizes, len(ids)]:
        if start < len(ids):
            yield ids[start : start + size]
        start += size


def streamed(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    detokenizer = Detokenizer(tokenizer)
    return "".join(map(detokenizer.push, ids)) + detokenizer.flush()


@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1)))
def test_any_ids_stream_to_what_they_decode_to(ids: list[int]) -> None:
    assert streamed(BYTE_LEVEL, ids) == BYTE_LEVEL.decode(ids)


@given(st.lists(st.sampled_from(BYTES), max_size=60))
def test_broken_bytes_stream_to_what_they_decode_to(ids: list[int]) -> None:
    assert streamed(BYTE_LEVEL, ids) == BYTE_LEVEL.decode(ids)


@given(st.text())
def test_no_half_characters_on_the_way(text: str) -> None:
    detokenizer = Detokenizer(BYTE_LEVEL)
    pieces = [detokenizer.push(token) for token in BYTE_LEVEL.encode(text)]
    assert text.startswith("".join(pieces))
    assert "".join(pieces) + detokenizer.flush() == text


@given(st.lists(st.sampled_from(["hello", " world", " hello", " ", "lo", "!", "é", "\U0001f600"])))
def test_spaces_of_sentencepiece_words_survive(words: list[str]) -> None:
    text = "hello" + "".join(words)
    ids = [SENTENCEPIECE_IDS[symbol] for symbol in sentencepiece_symbols(text)]
    assert streamed(SENTENCEPIECE, ids) == SENTENCEPIECE.decode(ids) == text


SENTENCEPIECE_IDS = {token: index for index, token in SENTENCEPIECE.vocabulary.items()}


def sentencepiece_symbols(text: str) -> Iterator[str]:
    marked = "\u2581" + text.replace(" ", "\u2581")
    while marked:
        fits = [token for token in SENTENCEPIECE_IDS if marked.startswith(token)]
        if fits:
            best = max(fits, key=len)
            yield best
            marked = marked[len(best) :]
        else:
            yield from (f"<0x{byte:02X}>" for byte in marked[0].encode())
            marked = marked[1:]


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE, METASPACE])
@given(text=st.text(st.sampled_from(ALPHABET)))
def test_a_written_replacement_character_swallows_nothing(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert streamed(tokenizer, ids) == tokenizer.decode(ids)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE, METASPACE])
def test_a_written_replacement_character_is_shown_at_once(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode("a\ufffd" * 9 if tokenizer is not SENTENCEPIECE else "lo\ufffd" * 9)
    assert "".join(map(detokenizer.push, ids)) == tokenizer.decode(ids)
    assert detokenizer.flush() == ""


def test_broken_bytes_before_a_word_are_shown_and_the_word_is_whole() -> None:
    pieces = ("\u2581hello", "<0xE2>", "<0x82>", "\u2581world", "<0xC3>")
    detokenizer = Detokenizer(SENTENCEPIECE)
    shown = [detokenizer.push(SENTENCEPIECE_IDS[piece]) for piece in pieces]
    assert shown == ["hello", "", "", "\ufffd world", ""]
    assert detokenizer.flush() == "\ufffd"


def test_bytes_among_other_decoders_wait_for_the_rest_of_a_character() -> None:
    vocabulary = {token: index for index, token in enumerate(["\xc3", "\xa9", "a"])}
    backend = Backend(models.BPE(vocabulary, []))
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("a", "b")])
    tokenizer = Tokenizer(backend, {}, [])
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(i) for i in (2, 0, 1, 2)] == ["b", "", "\xe9", "b"]


def test_special_tokens_have_no_text_and_keep_the_context() -> None:
    ids = [SENTENCEPIECE_IDS[token] for token in ("\u2581hello", "<s>", "<s>", "\u2581world")]
    assert streamed(SENTENCEPIECE, ids) == "hello world"


def test_a_long_run_of_broken_bytes_costs_a_bounded_window() -> None:
    widest = 0

    class Measured(Characters):
        special_ids = BYTE_LEVEL.special_ids
        whole_characters = False

        def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
            nonlocal widest
            widest = max(widest, len(ids))
            return BYTE_LEVEL.decode(ids, skip_special=skip_special)

    detokenizer = Detokenizer(Measured())
    broken = BYTE_LEVEL.encode("é")[0]
    ids = [token for token in BYTES if "\ufffd" in BYTE_LEVEL.decode([token])][:1] * 500
    text = "".join(map(detokenizer.push, [broken, *ids]))
    assert len(text) > 480
    assert widest < 20


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one two three", ["two"], "one "),
        ("one two three", ["four"], None),
        ("ab", ["b", "ab"], ""),
        ("xabc", ["abc", "b"], "xa"),
        ("aaab", ["aab"], "a"),
        ("line\n\nnext", ["\n\n"], "line"),
        ("stop", ["stop"], ""),
        ("sto", ["stop"], None),
    ],
)
@pytest.mark.parametrize("sizes", [[], [1] * 20, [2] * 10, [3, 1, 5]])
def test_a_stop_string_ends_the_text(
    text: str, stops: list[str], expected: str | None, sizes: list[int]
) -> None:
    assert run_stops(text, stops, sizes)[0] == (text if expected is None else expected)


def run_stops(
    text: str, stops: Sequence[str], sizes: Sequence[int], min_tokens: int = 0
) -> tuple[str, int | None]:
    """The text shown, and the id count at which it stopped."""
    matcher = StopMatcher(Characters(), stops, min_tokens)
    shown, num_before = "", 0
    for group in groups([ord(character) for character in text], sizes):
        keep = matcher.push(group)
        pieces = matcher.take()
        assert len(pieces) == (len(group) if keep is None else keep)
        shown += "".join(pieces)
        if keep is not None:
            return shown + matcher.finish(), num_before + keep
        num_before += len(group)
    return shown + matcher.finish(), None


SMALL = st.text(alphabet="ab", min_size=1, max_size=4)


@given(
    st.text(alphabet="ab", max_size=20),
    st.lists(SMALL, max_size=3),
    st.lists(st.integers(1, 4)),
    st.integers(0, 12),
)
def test_stops_agree_with_reading_letter_by_letter(
    text: str, stops: list[str], sizes: list[int], min_tokens: int
) -> None:
    shown, num_kept = run_stops(text, stops, sizes, min_tokens)
    for end in range(min_tokens, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            assert (shown, num_kept) == (text[: end - max(map(len, hits))], end)
            return
    assert (shown, num_kept) == (text, None)


@pytest.mark.parametrize("sizes", [[], [1] * 40, [2] * 20, [3, 1, 5]])
def test_a_stop_string_that_was_over_before_min_tokens_ends_nothing(sizes: list[int]) -> None:
    text, stops = 'x"""\nmore and more', ['""', '"""\n\u2603\u2603']
    assert run_stops(text, stops, sizes, min_tokens=5) == (text, None)
    assert run_stops(text, stops, sizes, min_tokens=4) == ('x"', 4)


@given(st.text(st.sampled_from(ALPHABET), max_size=12), st.integers(0, 8))
def test_a_stop_string_of_half_characters_ends_with_its_last_byte(
    text: str, min_tokens: int
) -> None:
    stop = "\ufffd"
    ids = [BYTE_IDS[byte] for byte in text.encode()]
    matcher = StopMatcher(BYTE_LEVEL, [stop], min_tokens)
    keep = matcher.push(ids)
    ends = [len(text[: i + 1].encode()) for i, char in enumerate(text) if char == stop]
    ends = [end for end in ends if end >= min_tokens]
    assert keep == (ends[0] if ends else None)
    expected = text if keep is None else text.encode()[: keep - 3].decode()
    assert "".join(matcher.take()) + matcher.finish() == expected


def test_text_that_may_become_a_stop_string_waits() -> None:
    matcher = StopMatcher(Characters(), ["END"])
    assert matcher.push([ord(c) for c in "go E"]) is None
    assert matcher.take() == ("g", "o", " ", "")
    assert matcher.push([ord("N")]) is None
    assert matcher.take() == ("",)
    assert matcher.push([ord("x")]) is None
    assert matcher.take() == ("ENx",)
    assert matcher.finish() == ""
    assert not matcher.stopped


def test_a_stop_string_split_across_real_tokens() -> None:
    ids = BYTE_LEVEL.encode("return x\n\n\ndef other():")
    matcher = StopMatcher(BYTE_LEVEL, ["\n\ndef"])
    keep = matcher.push(ids)
    assert keep is not None
    assert "".join(matcher.take()) + matcher.finish() == "return x\n"
    assert "\n\ndef" in BYTE_LEVEL.decode(ids[:keep])


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ConfigError, match="empty"):
        StopMatcher(Characters(), ["a", ""])


@given(text=st.text("ab", max_size=12), stop=st.text("ab", min_size=1, max_size=6))
def test_the_longest_end_that_a_stop_string_begins_with_is_held(text: str, stop: str) -> None:
    ends = [n for n in range(min(len(stop) - 1, len(text)) + 1) if text.endswith(stop[:n])]
    assert _num_begun(text, stop) == max(ends)
