"""Native look-ups against their definitions: the same drafts, to the last bit of P."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core import env
from outrider.core.draft import Budget
from outrider.core.errors import ContractError
from outrider.drafters.common.context import TextDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.kernels.native.build import built_kernels
from outrider.kernels.native.rounds import NativeLookups
from outrider.testing import row
from unit.kernels.implementations import library_of

CORPUS = ((0, 1, 2, 0, 1, 2, 2, 1, 0, 0, 2), (), (1, 1, 1, 2, 0, 1))
Make = Callable[[NativeLookups | None], TextDrafter]
DRAFTERS: dict[str, Make] = {
    "suffix": lambda native: SuffixDrafter(native=native),
    "with a corpus": lambda native: SuffixDrafter(corpus=CORPUS, native=native),
    # Generations of a few tokens, and a corpus that does not fit.
    "forgetful": lambda native: SuffixDrafter(num_tokens=9, corpus=CORPUS, native=native),
    "ngram": lambda native: NgramDrafter(native=native),
    "single tokens": lambda native: NgramDrafter(max_n=2, min_n=1, native=native),
    "long ngram": lambda native: NgramDrafter(max_n=9, min_n=4, native=native),
}
every_drafter = pytest.mark.parametrize("make", DRAFTERS.values(), ids=list(DRAFTERS))
# Which text goes on, and by what; None ends it, and it begins anew.
steps = st.lists(
    st.tuples(st.integers(0, 2), st.none() | st.lists(st.integers(0, 2), max_size=5)), max_size=40
)


def both(make: Make) -> tuple[TextDrafter, TextDrafter]:
    built = built_kernels(env.compiler(), env.cache_folder())
    return make(NativeLookups(library_of(built))), make(None)


def check_alike(
    drafters: Sequence[TextDrafter], seq_id: int, text: Sequence[int], budget: Budget
) -> int:
    """How many tokens both drafted."""
    asked = replace(row(seq_id, text, depth=budget.depth), budget=budget)
    native, plain = (drafter.offers([asked])[0] for drafter in drafters)
    assert native == plain
    return len(native.tokens)


@every_drafter
@given(
    steps=steps,
    prompt_length=st.integers(0, 6),
    depth=st.integers(0, 5),
    num_nodes=st.sampled_from([0, 0, 3, 9, 70]),
)
def test_drafts_are_those_of_the_definition(
    make: Make,
    steps: list[tuple[int, list[int] | None]],
    prompt_length: int,
    depth: int,
    num_nodes: int,
) -> None:
    """Of texts that grow in turns, end and begin anew, some by nothing and some by several
    tokens."""
    drafters, texts = both(make), dict[int, list[int]]()
    for seq_id, more in steps:
        if more is None and seq_id in texts:
            del texts[seq_id]
            for drafter in drafters:
                drafter.close(seq_id)
            continue
        if seq_id not in texts:
            texts[seq_id] = [seq_id]
            for drafter in drafters:
                drafter.open(seq_id, [0] * prompt_length)
        texts[seq_id] += more or ()
        check_alike(drafters, seq_id, texts[seq_id], Budget(depth, num_nodes=num_nodes))


def lines(vocab_size: int, num_tokens: int) -> Iterator[int]:
    """Copies of earlier text, a few tokens of which are others."""
    rng = random.Random(vocab_size)
    text = [rng.randrange(vocab_size) for _ in range(40)]
    while len(text) < num_tokens:
        start = rng.randrange(len(text))
        copied = text[start : start + rng.randrange(1, 30)]
        text += [token if rng.random() < 0.9 else rng.randrange(vocab_size) for token in copied]
    yield from text[:num_tokens]


@pytest.mark.sample(6)
@every_drafter
@pytest.mark.parametrize("vocab_size", [2, 30, 50_000])
@pytest.mark.parametrize("num_nodes", [0, 16])
def test_long_texts_that_repeat_themselves(make: Make, vocab_size: int, num_nodes: int) -> None:
    """Tables grow, rates fade, and states split again and again."""
    drafters, text = both(make), list(lines(vocab_size, 1500))
    rng, end, num_drafted = random.Random(1), 100, 0
    for drafter in drafters:
        drafter.open(7, text[:end])
    while end <= len(text):
        budget = Budget(6, num_nodes=num_nodes)
        num_drafted += check_alike(drafters, 7, text[:end], budget)
        end += rng.randrange(1, 7)
    assert num_drafted > 100


def test_a_request_that_missed_a_generation_goes_on_from_the_start() -> None:
    """Others fill the memory several times over while it rests."""
    drafters, texts = both(DRAFTERS["forgetful"]), [list(lines(4, 400)), list(lines(5, 400))]
    ends, num_drafted = [0, 0], 0
    for seq_id in range(2):
        for drafter in drafters:
            drafter.open(seq_id, ())
    for turn in range(60):
        seq_id = turn // 10 % 2
        ends[seq_id] += 1 + turn % 7
        text = texts[seq_id][: ends[seq_id]]
        num_drafted += check_alike(drafters, seq_id, text, Budget(4, num_nodes=9))
    assert num_drafted > 50


def test_what_is_remembered_is_forgotten_but_for_the_corpus() -> None:
    drafters = both(DRAFTERS["with a corpus"])
    text = [0, 1, 2, 0, 1]
    for seq_id in range(2):
        for drafter in drafters:
            assert isinstance(drafter, SuffixDrafter)
            drafter.open(seq_id, text)
        check_alike(drafters, seq_id, [*text, *text, 5, 6, 7, *text], Budget(4))
        native, plain = (d.num_states for d in drafters if isinstance(d, SuffixDrafter))
        assert native == plain
        for drafter in drafters:
            assert isinstance(drafter, SuffixDrafter)
            with pytest.raises(ContractError, match="open"):
                drafter.forget()
            drafter.close(seq_id)
            drafter.forget()


@every_drafter
def test_a_text_that_is_not_open_is_an_error(make: Make) -> None:
    for drafter in both(make):
        with pytest.raises(KeyError):
            drafter.close(3)
        with pytest.raises(KeyError):
            drafter.offers([row(3, [1], depth=2)])


@pytest.mark.parametrize("name", ["suffix", "ngram"])
def test_requests_come_and_go_while_another_thread_drafts(name: str) -> None:
    """As where a lane drafts. Without order between the calls, tables that grow end the process."""
    texts, told = both(DRAFTERS[name])[0], threading.Event()

    def come_and_go() -> None:
        for first in range(100, 10_000_000, 3_000):
            if told.is_set():
                return
            for seq_id in range(first, first + 3_000):
                texts.open(seq_id, [0, 1])
            for seq_id in range(first, first + 3_000):
                texts.close(seq_id)

    other = threading.Thread(target=come_and_go)
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for seq_id in range(8):
            texts.open(seq_id, [0, 1])
        other.start()
        asked = [row(seq_id, [0, 1, 0, 1, 0], depth=4) for seq_id in range(8)]
        for _ in range(4_000):
            assert {draft.tokens for draft in texts.offers(asked)} == {(1, 0, 1, 0)}
    finally:
        told.set()
        other.join()
        sys.setswitchinterval(usual)
