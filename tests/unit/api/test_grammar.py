"""Grammars at the nodes of a draft: a parser that walks says what one that is new says."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models
from torch import Tensor

from checks.effort import examples
from doubles.letters import letters
from outrider.api.grammar import _LIMITS, Grammar, Grammars  # pyright: ignore[reportPrivateUsage]
from outrider.api.structure import StructureOptions
from outrider.api.tokenizer import Tokenizer
from outrider.core.errors import CheckpointError, ConfigError
from outrider.core.logits import suffixes_of

# One character an id, in this order, and an end.
LETTERS = 'ab{}":,1 '
END = len(LETTERS)
VOCAB = END + 1


def grammar(
    options: StructureOptions, *, vocab_size: int = VOCAB, byte_fallback: bool = False
) -> Grammar:
    made = Grammars(letters(LETTERS, byte_fallback=byte_fallback), vocab_size, frozenset([END])).of(
        options
    )
    assert made is not None
    return made


def allowed(
    made: Grammar, text: Sequence[int], suffix: Sequence[int] = (), vocab_size: int = VOCAB
) -> list[int]:
    """What may follow, by a parser of its own."""
    return ones(made.start().masks(text, [suffix], vocab_size)[0])


def ones(mask_V: Tensor) -> list[int]:
    return [token for token in range(len(mask_V)) if bool(mask_V[token])]


def ids(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text]


# Structures whose texts are of these letters.
STRUCTURES: tuple[StructureOptions, ...] = (
    {"regex": "(ab|b1)*a?"},
    {"choices": ["aa", "ab1", "b"]},
    {"grammar": 'start: "a" start "b" | "1"'},
    {"grammar": 'root ::= "a" root "b" | "1"'},
    {"schema": {"type": "object", "additionalProperties": {"enum": [1, "a"]}}},
    {"json": True},
)
IDS = st.integers(0, VOCAB - 1)


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Tokens and parents of a draft tree."""
    tokens = draw(st.lists(IDS, max_size=7))
    parents = [draw(st.integers(-1, node - 1)) for node in range(len(tokens))]
    return tokens, parents


@examples(60)
@given(
    which=st.integers(0, len(STRUCTURES) - 1),
    rounds=st.lists(st.tuples(trees(), st.lists(IDS, max_size=3)), min_size=1, max_size=4),
    likely=st.booleans(),
)
def test_a_parser_that_walks_says_what_a_new_one_says(
    which: int, rounds: list[tuple[tuple[list[int], list[int]], list[int]]], likely: bool
) -> None:
    """Along trees, back, and on after what was committed, right or wrong."""
    made = grammar(STRUCTURES[which])
    walking = made.start()
    text: list[int] = []
    for (tokens, parents), grown in rounds:
        suffixes = suffixes_of(tokens, parents)
        found_NV = walking.masks(text, suffixes, VOCAB)
        again_NV = walking.masks(text, suffixes[::-1], VOCAB)
        assert torch.equal(found_NV, again_NV.flip(0))
        for row_V, suffix in zip(found_NV, suffixes, strict=True):
            assert ones(row_V) == allowed(made, text, suffix)
        # As a rule what is committed follows the grammar.
        text += [choose(made, text, i) for i in grown] if likely else grown


def choose(made: Grammar, text: Sequence[int], number: int) -> int:
    some = allowed(made, text) or [END]
    return some[number % len(some)]


def test_what_may_follow() -> None:
    made = grammar({"regex": "a(b1)?"})
    assert allowed(made, []) == ids("a")
    assert allowed(made, ids("a")) == [*ids("b"), END]
    assert allowed(made, [], ids("ab")) == ids("1")
    # Complete; ended; refused; after what was refused.
    assert allowed(made, ids("ab1")) == [END]
    assert allowed(made, [*ids("ab1"), END]) == []
    assert allowed(made, ids("b")) == []
    assert allowed(made, ids("ba")) == []


def test_one_parser_serves_one_request_and_a_grammar_many() -> None:
    made = grammar({"regex": "ab"})
    one, other = made.start(), made.start()
    assert ones(one.masks(ids("a"), [()], VOCAB)[0]) == ids("b")
    assert ones(other.masks([], [()], VOCAB)[0]) == ids("a")


def test_grammars_are_read_once() -> None:
    grammars = Grammars(letters(LETTERS), VOCAB, frozenset([END]))
    first = grammars.of({"regex": "a+"})
    assert grammars.of({"regex": "a+"}) is first


def test_forced_tokens_are_those_that_a_grammar_leaves_no_choice_of() -> None:
    constraint = grammar({"choices": ["ab1a", "ab1b"]}).start()
    assert constraint.forced([], 9) == ids("ab1")
    assert constraint.forced([], 2) == ids("ab")
    assert constraint.forced(ids("a"), 9) == ids("b1")
    assert constraint.forced(ids("ab1"), 9) == []
    assert list(constraint.forced(ids("b"), 9)) == []


def test_padded_vocabularies_and_larger_tokenizers() -> None:
    for vocab_size in (VOCAB + 50, VOCAB, VOCAB - 1):
        made = grammar({"regex": "a+"}, vocab_size=vocab_size)
        mask_NV = made.start().masks(ids("a"), [(), ids("b")], vocab_size)
        assert mask_NV.shape == (2, vocab_size)
        wanted = [i for i in (*ids("a"), END) if i < vocab_size]
        assert ones(mask_NV[0]) == wanted
        assert not mask_NV[1].any()


def test_pieces_for_bytes_and_for_blanks() -> None:
    made = grammar({"regex": "a (é|b)"}, byte_fallback=True)
    size = VOCAB + 2
    assert allowed(made, ids("a"), vocab_size=size) == ids(" ")
    assert allowed(made, ids("a "), vocab_size=size) == [*ids("b"), VOCAB]
    assert allowed(made, [*ids("a "), VOCAB], vocab_size=size) == [VOCAB + 1]
    assert allowed(made, [*ids("a "), VOCAB, VOCAB + 1], vocab_size=size) == [END]


def test_a_model_that_cannot_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="no token that ends"):
        Grammars(letters(LETTERS), VOCAB, frozenset()).of({"regex": "a"})


def test_a_tokenizer_that_the_library_cannot_read_is_told() -> None:
    backend = Backend(models.WordLevel(vocab={"a": 0, "<end>": 1}, unk_token="a"))
    strange = Tokenizer(backend, {}, [1])
    with pytest.raises(CheckpointError, match="cannot use this tokenizer"):
        Grammars(strange, 2, frozenset([5])).of({"regex": "a"})


def test_a_grammar_that_becomes_too_much_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_LIMITS, "step_max_items", 20)  # pyright: ignore[reportUnknownMemberType]
    constraint = grammar({"grammar": 'start: "1" | start start'}).start()
    constraint.masks([], [()], VOCAB)
    with pytest.raises(ConfigError, match="too much to follow: parser error: Too many items"):
        constraint.masks(ids("1" * 9), [(), ids("1" * 9)], VOCAB)
