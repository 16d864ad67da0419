"""Texts in two vocabularies: nothing is lost, committed ids stay, drafts continue the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.effort import examples
from doubles.vocabularies import EMBEDDED, END, byte_level, sentence_pieces, tokenizer
from outrider.api.stream import REPLACEMENT
from outrider.api.tokenizer import TextTranslator, Tokenizer

TARGET = Tokenizer.load(EMBEDDED)
FILLER = "Filler words: "
DRAFTS: dict[str, Callable[[], Tokenizer]] = {
    "same": lambda: TARGET,
    "byte level": cache(lambda: tokenizer(byte_level)),
    "with a lead": cache(lambda: tokenizer(lambda: byte_level(with_lead=True))),
    "pieces": cache(lambda: tokenizer(sentence_pieces)),
}
every_draft = pytest.mark.parametrize("draft", DRAFTS)
# What decoders write for broken bytes: at the end of a text it waits for more, as they do.
letters = st.characters(exclude_characters=REPLACEMENT, exclude_categories=("Cs",))
pieces = st.lists(
    st.one_of(
        st.text(letters, max_size=6),
        st.sampled_from(
            ["def ", "return", " the", "  ", "\n\n", " 12345", "é", "日本", "\U0001f600"]
        ),
    ),
    min_size=1,
    max_size=12,
)


def translator(draft: Tokenizer, target: Tokenizer = TARGET) -> TextTranslator:
    return TextTranslator(target, draft, target_size=target.vocab_size, draft_size=draft.vocab_size)


def plain(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special=False)


def own_text(draft: Tokenizer, ids: Sequence[int]) -> str:
    return draft.decode([i for i in ids if i not in draft.special_ids])


@every_draft
@examples(40)
@given(pieces=pieces, cuts=st.lists(st.integers(1, 5)))
def test_a_text_is_the_same_text_in_draft_ids(
    draft: str, pieces: list[str], cuts: list[int]
) -> None:
    """Tokens arrive in any portions, some of which end within a character."""
    # One known beginning: at the very start of a text, pieces have no leading space to lose.
    tokens = plain(TARGET, FILLER) + [i for piece in pieces for i in plain(TARGET, piece)]
    other = DRAFTS[draft]()
    translation = translator(other).open()
    seen, before = len(plain(TARGET, FILLER)), list[int]()
    for cut in [0, *cuts, len(tokens)]:
        seen = min(seen + cut, len(tokens))
        ids = list(translation.to_draft(tokens[:seen]))
        assert ids[: max(len(before) - 1, 0)] == before[:-1]
        assert len(ids) >= len(before)
        before = ids
    whole = FILLER + "".join(pieces)
    assert own_text(other, before) == whole


@every_draft
@examples(40)
@given(pieces=pieces, drafted=pieces)
def test_a_draft_continues_the_text_by_what_it_says(
    draft: str, pieces: list[str], drafted: list[str]
) -> None:
    other = DRAFTS[draft]()
    tokens = plain(TARGET, FILLER) + [i for piece in pieces for i in plain(TARGET, piece)]
    translation = translator(other).open()
    ids = list(translation.to_draft(tokens))
    said = [i for piece in drafted for i in plain(other, piece)]
    spelled = translation.to_target(said)
    assert TARGET.decode([*tokens, *spelled]) == own_text(other, [*ids, *said])


@examples(40)
@given(text=st.text(letters), more=st.text(letters))
def test_one_tokenizer_needs_no_translation(text: str, more: str) -> None:
    tokens, longer = plain(TARGET, text), plain(TARGET, text + more)
    translation = translator(TARGET).open()
    assert translation.to_draft(tokens) == tokens
    if longer[: len(tokens)] == tokens:
        whole = text + more if text else ""
        assert whole == "" or translation.to_target(longer[len(tokens) :]) == longer[len(tokens) :]


def test_a_draft_that_ends_in_a_character_waits_for_its_bytes() -> None:
    other = DRAFTS["byte level"]()
    translation = translator(other).open()
    translation.to_draft(plain(TARGET, FILLER))
    smile = plain(other, "ok \U0001f600")
    assert len(smile) > 3
    assert TARGET.decode(translation.to_target(smile[:-1])) == "ok "
    assert TARGET.decode(translation.to_target(smile)) == "ok \U0001f600"


def test_a_text_that_ends_in_a_character_is_drafted_from_within_it() -> None:
    """The draft reads what is whole; of what it says, the bytes already there are left out."""
    other = DRAFTS["byte level"]()
    tokens = plain(TARGET, "ok日")
    assert len(tokens) > 2
    translation = translator(other).open()
    assert own_text(other, translation.to_draft(tokens[:-1])) == "ok"
    assert translation.to_target(plain(other, "日")) == tokens[-1:]
    assert translation.to_target(plain(other, " no, this is another text")) == []


@pytest.mark.parametrize("draft", ["byte level", "pieces"])
def test_long_runs_of_bytes_are_read_from_a_whole_character(draft: str) -> None:
    """A byte-fallback decoder gives up a whole run of bytes if it begins within a character."""
    other = DRAFTS[draft]()
    translation, tokens, text = translator(other).open(), plain(TARGET, "ok"), "ok"
    ids = translation.to_draft(tokens)
    for letter in "日本語日本語":
        tokens, text = tokens + plain(TARGET, letter), text + letter
        ids = translation.to_draft(tokens)
        assert own_text(other, ids) == text
    assert TARGET.decode(translation.to_target(plain(other, "語")[-3:])) == "語"


def test_the_last_id_is_spelled_again_with_what_follows() -> None:
    translation = translator(TARGET).open()
    head, tail = plain(TARGET, "a re"), plain(TARGET, "turn")
    assert translation.to_draft(head) == head
    assert translation.to_draft([*head, *tail]) == plain(TARGET, "a return") != [*head, *tail]


def test_ids_never_become_fewer_than_were_committed() -> None:
    """With 257 ids there are no merges: "t" can be written, and "th" cannot."""
    other = DRAFTS["byte level"]()
    translation = TextTranslator(TARGET, other, target_size=8192, draft_size=257).open()
    tokens = plain(TARGET, "(t")
    before = list(translation.to_draft(tokens))
    after = translation.to_draft([*tokens, *plain(TARGET, "h")])
    assert own_text(other, before).endswith("t")
    assert list(after[: len(before)]) == before


def test_bytes_that_are_no_character_do_not_stop_the_text() -> None:
    other = DRAFTS["byte level"]()
    byte = plain(TARGET, "\U0001f600")[-1]
    translation = translator(other).open()
    tokens = [*plain(TARGET, "ok"), *[byte] * 9, *plain(TARGET, " and on")]
    assert own_text(other, translation.to_draft(tokens)).endswith(" and on")


def test_the_lead_is_there_once() -> None:
    lead = DRAFTS["with a lead"]()
    (end,) = plain(lead, END)
    assert translator(lead).open().to_draft(plain(TARGET, "def f"))[:2] != [end, end]
    assert translator(lead).open().to_draft(plain(TARGET, "def f"))[0] == end
    # A target whose text begins with the same token does not make it two.
    ids = translator(lead, lead).open().to_draft(lead.encode("def f"))
    assert ids == lead.encode("def f")


def test_special_tokens_are_translated_where_both_have_them() -> None:
    other = DRAFTS["byte level"]()
    (stop,) = plain(TARGET, "<|endoftext|>")
    (end,) = plain(other, END)
    tokens = [*plain(TARGET, "a"), stop, *plain(TARGET, "b")]
    assert own_text(other, translator(other).open().to_draft(tokens)) == "ab"
    assert translator(TARGET).open().to_draft(tokens) == tokens
    translation = translator(other).open()
    translation.to_draft(plain(TARGET, "a"))
    said = [*plain(other, " b"), end, *plain(other, " c")]
    assert TARGET.decode(translation.to_target(said)) == " b"


def test_a_prompt_without_text_gives_no_ids_and_the_next_one_does() -> None:
    other = DRAFTS["byte level"]()
    (stop,) = plain(TARGET, "<|endoftext|>")
    translation = translator(other).open()
    assert translation.to_draft([stop]) == []
    assert own_text(other, translation.to_draft([stop, *plain(TARGET, "x = 1")])) == "x = 1"


def test_ids_that_a_model_lacks_are_not_written() -> None:
    """A tokenizer may know more tokens than the embedding has rows."""
    other = DRAFTS["byte level"]()
    few = TextTranslator(TARGET, other, target_size=300, draft_size=300)
    translation = few.open()
    assert max(translation.to_draft(plain(TARGET, "def return the"))) < 300
    assert all(i < 300 for i in translation.to_target(plain(other, " return the")))
    assert few.open().to_target([10_000]) == []
