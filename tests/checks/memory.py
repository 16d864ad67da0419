"""Page accounts (what is shared, free, or found by its content), and recurrent memory on fixed
histories: after each, the bits of a text that was simply read.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

from checks.state import NEEDS, PROBE, path_to
from doubles.stamped import StampedArena
from doubles.tiny_hybrids import tiny_hybrid
from outrider.cache.pages import PagePool
from outrider.core.errors import CapacityError, ContractError
from outrider.core.protocols import StepRow
from outrider.core.spec import RecurrentCapacity
from outrider.core.tree import ROOT
from outrider.models.decoder import ModelCapacity
from outrider.plugins.hybrids.model import HybridModel

SIZE = 2


def fill(pool: PagePool, tokens: list[int]) -> list[int]:
    """The pages of a sequence that committed `tokens`, sharing what the pool still knows."""
    pages = pool.find_prefix(tokens, "")
    for page in pages:
        pool.share(page)
    for index in range(len(pages), len(tokens) // SIZE):
        pages.append(pool.take(pages))
        pool.remember(pages, tokens, index, "")
    return pages


def check_ring() -> None:
    """What holds nothing is taken first, then content in the order in which it became free; of one
    sequence, the last first."""
    pool = PagePool(5, SIZE)
    first, second = fill(pool, [1, 2, 3, 4]), fill(pool, [5, 6])
    assert (first, second) == ([0, 1], [3])
    pool.release(second)
    pool.release(first)
    assert [pool.take() for _ in range(5)] == [2, 4, 3, 1, 0]
    with pytest.raises(CapacityError):
        pool.take()
    pool.check([[0, 1, 2, 3, 4]])


def check_rows() -> None:
    """Sequences that grow in turns have their pages in a row, each as far as it has room."""
    pool = PagePool(32, SIZE)
    held: list[list[int]] = [[] for _ in range(4)]
    for _ in range(8):
        for pages in held:
            pages.append(pool.take(pages, 8))
    assert sorted(pages[0] for pages in held) == [0, 8, 16, 24]
    for pages in held:
        assert pages == list(range(pages[0], pages[0] + 8))
    pool.check(held)


def check_opening() -> None:
    """For a run of pages content is opened, the oldest first, and never the younger half. What is
    open is found until it is taken."""
    pool = PagePool(16, SIZE)
    texts = [[10 * text + token for token in range(8)] for text in range(4)]
    for tokens in texts:
        pool.release(fill(pool, tokens))
    pages = [pool.take((), 3)]
    assert pool.find_prefix(texts[0], "") == [0]
    for _ in range(2):
        pages.append(pool.take(pages))
    assert pages == [1, 2, 3]
    other = [pool.take((), 16)]
    assert [len(pool.find_prefix(tokens, "")) for tokens in texts[2:]] == [4, 4]
    pool.share(0)
    pool.check([pages, other, [0]])


def check_prefixes() -> None:
    """Full pages are found by content from the start on, used or free, until taken again."""
    pool = PagePool(3, SIZE)
    held = fill(pool, [1, 2, 3, 4])
    assert pool.find_prefix([1, 2, 3, 4, 5], "") == held
    assert pool.find_prefix([1, 2, 3], "") == held[:1]
    assert pool.find_prefix([3, 4], "") == []
    assert pool.find_prefix([1], "") == []
    pool.release(held)
    assert pool.num_free == 3
    assert fill(pool, [1, 2, 3, 4]) == held
    pool.check([held])
    assert pool.num_free == 1


def check_holders() -> None:
    """A shared page stays taken until its last holder lets go."""
    pool = PagePool(3, SIZE)
    first = fill(pool, [1, 2, 3, 4])
    second = fill(pool, [1, 2, 5, 6])
    assert (first, second) == ([0, 1], [0, 2])
    assert pool.num_free == 0
    pool.release(first)
    pool.check([second])
    assert pool.num_free == 1
    pool.release(second)
    pool.check([])
    assert pool.num_free == 3


def check_generations() -> None:
    """A page found by its predecessor is not found by what that predecessor holds later.

    Pages 0 and 1 hold [1 2][3 4]. Page 0 is freed and filled anew with [9 9]; page 1 keeps its
    content and its entry, which must not pass for the continuation [9 9][3 4].
    """
    pool = PagePool(2, SIZE)
    fill(pool, [1, 2, 3, 4])
    pool.release([0])
    assert fill(pool, [9, 9]) == [0]
    assert pool.find_prefix([9, 9, 3, 4], "") == [0]
    assert pool.find_prefix([1, 2, 3, 4], "") == []


def check_forgetting() -> None:
    """A page that is taken again no longer answers to its old content."""
    pool = PagePool(1, SIZE)
    pool.release(fill(pool, [1, 2]))
    assert pool.find_prefix([1, 2], "") == [0]
    assert pool.take() == 0
    assert pool.find_prefix([1, 2], "") == []
    pool.release([0])
    assert pool.find_prefix([1, 2], "") == []


def check_twins() -> None:
    """Two pages with the same content: one answers, and freeing either breaks nothing."""
    pool = PagePool(6, SIZE)
    tokens = [1, 2, 3, 4]
    left, right = [pool.take(), pool.take()], [pool.take(), pool.take()]
    for pages in (left, right):
        for index in range(2):
            pool.remember(pages, tokens, index, "")
    assert pool.find_prefix(tokens, "") == left
    # What follows either is found behind the one.
    for twin, more in ((left, [5, 6]), (right, [7, 8])):
        longer = [*twin, pool.take()]
        pool.remember(longer, [*tokens, *more], 2, "")
        assert pool.find_prefix([*tokens, *more], "") == [*left, longer[2]]
        pool.release(longer[2:])
    pool.release(left)
    taken = [pool.take() for _ in range(4)]
    assert taken[2:] == left[::-1]
    assert set(pool.find_prefix(tokens, "")).isdisjoint(left)
    pool.check([taken, right])


def check_poorer_twins() -> None:
    """One that lacks something gives way to a later one of the same text, which has its name."""
    pool = PagePool(4, SIZE)
    old, new = [pool.take(), pool.take()], [pool.take()]
    for index in range(2):
        pool.remember(old, [1, 2, 3, 4], index, "")
    pool.remember(new, [1, 2], 0, "", lambda page: page not in old)
    assert pool.find_prefix([1, 2, 3, 4], "") == [new[0], old[1]]
    pool.release(old)
    pool.check([new])


def check_remembering_again() -> None:
    """A page keeps the name it has while it is held; being told of it again changes nothing."""
    pool = PagePool(2, SIZE)
    pages = fill(pool, [1, 2])
    pool.remember(pages, [7, 7], 0, "")
    assert pool.find_prefix([7, 7], "") == []
    assert pool.find_prefix([1, 2], "") == pages


def check_requirements() -> None:
    pool = PagePool(2, SIZE)
    pool.require(2)
    with pytest.raises(CapacityError, match="3 more pages"):
        pool.require(3)
    assert pool.num_free == 2


def check_freed() -> None:
    """With a window, texts of any length fit; what later tokens see is held, and no page is found
    by way of one that was given back."""
    arena = StampedArena(num_slots=12, page_size=SIZE, reach=4)
    arena.open(0, ())
    arena.open(1, ())
    for token in range(20):
        for seq_id in (0, 1):
            arena.step([StepRow.chain(seq_id, [(token * (seq_id + 2)) % 7])])
            arena.commit({seq_id: (0,)})
            arena.check(0)
            arena.check(1)
            arena.state.check()
    assert arena.state.num_free_tokens >= 12 - 2 * (4 + SIZE)
    arena.fork(0, 2)
    arena.check(2)
    with pytest.raises(ContractError, match="gone"):
        arena.fork(0, 3, 4)

    others = StampedArena(num_slots=4 * SIZE, page_size=SIZE, reach=1)
    for seq_id, text in enumerate(([1, 2, 3], [7, 0, 7], [5, 6])):
        others.open(seq_id, ())
        others.step([StepRow.chain(seq_id, text)])
        others.commit({seq_id: range(len(text))})
    # The third has the page that the first began in.
    assert others.state.pages(2)[0] == others.state.pages(0)[0]
    others.step([StepRow.chain(0, [4])])
    others.commit({0: (0,)})
    assert others.open(3, [5, 6, 3, 4]) == 2


def check_frames() -> None:
    """Where one layer has a window, its arena holds what later tokens see of texts of any length,
    and a beginning is shared where that is still there."""
    arena = StampedArena(num_slots=64, page_size=SIZE, reach=4, num_local_slots=16)
    texts = [[(token * (seq_id + 2)) % 7 for token in range(20)] for seq_id in (0, 1)]
    arena.open(0, ())
    arena.open(1, ())
    for token in range(0, 20, 2):
        for seq_id in (0, 1):
            first, second = texts[seq_id][token : token + 2]
            # A refused sibling before what is kept, which is moved.
            arena.step([StepRow(seq_id, (6, first, second), (ROOT, ROOT, 1))])
            arena.commit({seq_id: (1, 2)})
            arena.check(0)
            arena.check(1)
            arena.state.check()
    arena.step([StepRow.chain(1, [5])])
    arena.commit({1: (0,)})
    arena.fork(1, 2)
    arena.check(2)
    with pytest.raises(ContractError, match="gone"):
        arena.fork(1, 3, 4)
    for seq_id in (1, 2):
        arena.close(seq_id)
    # The end of the second text is still there; of the first, which goes on, no beginning is.
    assert arena.open(1, texts[1]) == 20
    arena.check(1)
    assert arena.open(2, texts[0][:10]) == 0
    with pytest.raises(CapacityError):
        arena.step([StepRow.chain(2, texts[0][:10])])
    arena.state.check()
    arena.close(1)
    for start in (0, 4):
        arena.step([StepRow.chain(2, texts[0][start : start + 4])])
        arena.commit({2: range(4)})
    for seq_id in (0, 2):
        arena.check(seq_id)
    arena.state.check()
    # What is read again is found by others, and what follows it, whoever read that.
    arena.close(2)
    assert arena.open(3, texts[0]) == 20
    assert arena.open(4, texts[0][:9]) == 8
    for seq_id in (0, 3, 4):
        arena.check(seq_id)
    arena.state.check()


def check_pages() -> None:
    check_ring()
    check_rows()
    check_opening()
    check_prefixes()
    check_holders()
    check_generations()
    check_forgetting()
    check_twins()
    check_poorer_twins()
    check_remembering_again()
    check_requirements()


TEXT = (1, 4, 2, 2, 0, 3, 1, 3, 2, 4, 0)
# Tokens, parents and the last node kept: chains and trees, kept whole, in part and not at all.
HISTORY = (
    (TEXT[:6], tuple(range(-1, 5)), 5),
    ((7, 8, 9, 7), (ROOT, 0, 1, 2), 1),
    ((3, 3, 5, 6, 2), (ROOT, 0, 0, 2, 1), 3),
    ((8, 8, 8, 8, 8), (ROOT, 0, 1, 2, 3), 4),
    ((8, 1), (ROOT, ROOT), ROOT),
    ((4, 5, 6), (ROOT, ROOT, 1), 2),
)


# How states return, and whether the kernels are the reference's.
WAYS = (("ring", False), ("replay", False), ("ring", True), ("replay", True))


@cache
def wanted(text: Sequence[int], reference: bool) -> Tensor:
    """What a fresh model that was fed `text` in one step predicts after it."""
    model = tiny_hybrid(force_reference=reference)
    model.state.open(0, ())
    row = StepRow.chain(0, text, logits_from=len(text) - 1)
    return model.step([row], NEEDS).logits_MV[0].clone()


def model_with(rollback: str, reference: bool, *, page_size: int = 4) -> HybridModel:
    states = RecurrentCapacity(rollback=rollback, history=5, num_sequences=4, num_checkpoints=4)
    capacity = ModelCapacity(num_slots=256, page_size=page_size, max_rows=16, states=states)
    return tiny_hybrid(capacity=capacity, force_reference=reference)


def probe(model: HybridModel, seq_id: int, text: Sequence[int]) -> None:
    """The next token of `seq_id`, which holds `text`, is as if it had simply been read."""
    logits_V = model.step([StepRow.chain(seq_id, (PROBE,))], NEEDS).logits_MV[0].clone()
    model.state.commit({seq_id: ()})
    reference = model.kernels.choices[0].name == "reference"
    assert torch.equal(logits_V, wanted((*text, PROBE), reference))
    model.state.check()


def recurrent_rounds() -> None:
    for rollback, reference in WAYS:
        # No page ends, so that nothing but the rounds leaves states.
        model = model_with(rollback, reference, page_size=64)
        model.state.open(0, ())
        kept: tuple[int, ...] = ()
        for tokens, parents, last in HISTORY:
            logits_NV = model.step([StepRow(0, tokens, parents)], NEEDS).logits_MV.clone()
            for node, logits_V in enumerate(logits_NV):
                path = tuple(tokens[n] for n in path_to(parents, node))
                assert torch.equal(logits_V, wanted((*kept, *path), reference))
            model.state.commit({0: path_to(parents, last)})
            kept += tuple(tokens[n] for n in path_to(parents, last))
            model.state.check()
        probe(model, 0, kept)


def recurrent_forks() -> None:
    """Cut anywhere, after rounds that left states and inputs behind."""
    for rollback, reference in WAYS:
        model = model_with(rollback, reference)
        model.state.open(0, ())
        for start, stop in ((0, 6), (6, 11)):
            model.step([StepRow.chain(0, TEXT[start:stop])], NEEDS)
            model.state.commit({0: range(stop - start)})
        for length in range(len(TEXT) + 1):
            model.state.fork(0, 1, length)
            probe(model, 1, TEXT[:length])
            model.state.close(1)
        probe(model, 0, TEXT)


def recurrent_beginnings() -> None:
    """Shared as far as pages and states go, and found by texts that begin alike alone."""
    for rollback, reference in WAYS:
        model = model_with(rollback, reference)
        model.state.open(0, TEXT)
        model.step([StepRow.chain(0, TEXT, logits_from=len(TEXT))], NEEDS)
        model.state.commit({0: range(len(TEXT))})
        for text, reused in (((*TEXT[:9], 7, 7), 8), ((*TEXT[:7], 7, 7), 0), (TEXT[:8], 8)):
            assert model.state.open(1, text) == reused
            probe(model, 1, text[:reused])
            model.state.close(1)
        for seq_id, first in ((2, 11), (3, 12)):
            model.state.open(seq_id, (first,) * 5)
            model.step([StepRow.chain(seq_id, (first,) * 4, logits_from=4)], NEEDS)
            model.state.commit({seq_id: range(4)})
            model.state.close(seq_id)
        for first in (12, 11):
            assert model.state.open(1, (first,) * 9) == 4
            probe(model, 1, (first,) * 4)
            model.state.close(1)
