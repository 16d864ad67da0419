"""Thinking budget: masks of one token where thoughts have reached it, by the text alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.core.logits import (
    CallbackConstraint,
    LogitsProcessor,
    ThoughtBudget,
    ThoughtTags,
    TokenConstraint,
)
from outrider.core.params import SamplingParams

VOCAB = 128
TAGS = ThoughtTags(b"<t>", (b"</t>",))
CLOSING = "\n</t>\n"


def ids(text: str) -> list[int]:
    """A token is a character."""
    return list(map(ord, text))


def budget(
    limit: int | None,
    *,
    begun: bool = False,
    inner: TokenConstraint | None = None,
    tags: ThoughtTags = TAGS,
) -> ThoughtBudget:
    closing = ids(CLOSING)
    return ThoughtBudget(
        tags, lambda i: bytes([i]), begun=begun, limit=limit, closing=closing, inner=inner
    )


def allowed(mask_V: Tensor) -> str:
    """The characters of a mask; "any" for all."""
    found = [token for token in range(VOCAB) if bool(mask_V[token])]
    return "any" if len(found) == VOCAB else "".join(map(chr, found))


def masks(constraint: ThoughtBudget, text: str, *suffixes: str) -> list[str]:
    found_NV = constraint.masks(ids(text), [ids(one) for one in suffixes], VOCAB)
    return ["any"] * len(suffixes) if found_NV is None else [allowed(row_V) for row_V in found_NV]


def greedy(constraint: ThoughtBudget, own: str, num: int) -> str:
    """A text whose model writes `own`, unless the mask forbids its next character."""
    text = ""
    while len(text) < num:
        (mask,) = masks(constraint, text, "")
        text += mask if mask != "any" else own[len(text)]
    return text


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("limit", [0, 1, 3])
def test_thoughts_are_closed_where_they_reach_the_limit(limit: int, begun: bool) -> None:
    own = ("" if begun else " <t>") + "a" * 40
    start = own[: (0 if begun else 4) + limit]
    text = greedy(budget(limit, begun=begun), own, 30)
    assert text == start + CLOSING + own[len(start) + len(CLOSING) : 30]
    assert budget(limit, begun=begun).count(ids(text)) == (limit, True)


def test_thoughts_that_end_before_it_and_texts_without_are_untouched() -> None:
    for own in ("<t>ab</t>" + "c" * 30, "the tag <t> opens thoughts", "<td>" + "a" * 30):
        constraint = budget(4)
        assert greedy(constraint, own, 26) == own[:26]
        assert constraint.count(ids(own)) == (2 if own.startswith("<t>") else 0, False)


def test_an_end_that_has_begun_is_waited_for() -> None:
    constraint = budget(2)
    suffixes = ["", "<", "</", "</t", "</t>", "</x", "<<", "<<a"]
    assert masks(constraint, "<t>a", *suffixes) == [*["any"] * 5, "\n", "\n", "any"]
    assert greedy(constraint, "<t>a<<<<<<<<<<<", 13) == f"<t>a<<{CLOSING}<"
    assert constraint.count(ids(f"<t>a<<{CLOSING}<")) == (3, True)
    # What begins one again and again is no way around the limit.
    repeated = budget(2, tags=ThoughtTags(b"<t>", (b"aab",)))
    assert "\n" in masks(repeated, "<t>", *("a" * n for n in range(40)))


def test_each_node_of_a_draft_has_the_mask_of_its_own_text() -> None:
    constraint = budget(2)
    found = masks(constraint, "<t>a", "", "b", "b\n", "bx", "<", "cd", "b\n</t>\n", "b\n</t>\nz")
    assert found == ["any", "\n", "<", "any", "any", "any", "any", "any"]
    # Asked for another text, it begins anew.
    assert masks(constraint, "<t>ab\n</", "") == ["t"]
    assert masks(constraint, "x", "", "y") == ["any", "any"]


def test_a_long_text_is_not_read_again_at_each_call() -> None:
    num_read: list[int] = []

    class Text(list[int]):
        def __getitem__(self, index: Any) -> Any:
            found: Any = [*self]
            num_read.append(len(found[index]) if isinstance(index, slice) else 1)
            return found[index]

    constraint, text = budget(2_000), Text(ids("<t>"))
    for _ in range(300):
        text.append(ord("a"))
        assert constraint.count(text) == (len(text) - 3, False)
        constraint.masks(text, [[]], VOCAB)
        assert constraint.is_idle(text)
    assert max(num_read[-30:]) <= 128 < len(text) / 2
    # The same length and another end.
    assert constraint.count([*ids("<t>ab</t>"), *ids("c") * (len(text) - 9)]) == (2, False)


@pytest.mark.parametrize("size", [8, 100])
def test_texts_that_part_and_then_agree_are_told_apart(size: int) -> None:
    """As a draft that was looked at, and the text after it was refused."""
    constraint = budget(200)
    assert constraint.count(ids("<t>ab" + size * "c")) == (2 + size, False)
    for other in ("<tx>b", "<t>ab", "the t"):
        num = 2 + size if other == "<t>ab" else 0
        assert constraint.count(ids(other + size * "c")) == (num, False)


def test_tokens_of_the_closing_sequence_are_drafts() -> None:
    constraint = budget(1)
    assert constraint.knows_forced
    assert list(constraint.forced(ids("<t>"), 9)) == []
    assert list(constraint.forced(ids("<t>a"), 3)) == ids(CLOSING)[:3]
    assert list(constraint.forced(ids("<t>a\n</"), 9)) == ids("t>\n")
    assert list(constraint.forced(ids("<t>a\n</t>\n"), 9)) == []


def test_thoughts_that_are_opened_again_share_the_limit() -> None:
    closed = f"<t>abc{CLOSING}"
    assert masks(budget(3), f"{closed}<t", "", ">", ">\n") == ["any", "\n", "<"]
    assert masks(budget(4), "<t>ab</t>\n<t>c", "", "d") == ["any", "\n"]
    anywhere = ThoughtTags(b"<t>", (b"</t>", b"!"), anywhere=True)
    assert masks(budget(2, tags=anywhere), "x<t>a!so <t>b", "") == ["\n"]


def only(letters: str) -> Tensor:
    mask_V = torch.zeros(VOCAB, dtype=torch.bool)
    mask_V[ids(letters)] = True
    return mask_V


def test_an_inner_mask_holds_too_and_what_it_refuses_is_not_forced() -> None:
    def after_thoughts(text: Sequence[int]) -> Tensor | None:
        return only("yn") if "</t>" in "".join(map(chr, text)) else None

    inner = CallbackConstraint(after_thoughts)
    found = masks(budget(1, begun=True, inner=inner), "a", "", "\n</t>", "\n</t>\n")
    # The line end behind the tag is refused.
    assert found == ["\n", "ny", "ny"]
    refuses = CallbackConstraint(lambda _: only("abc"))
    constraint = budget(0, begun=True, inner=refuses)
    assert masks(constraint, "", "", "a", "ab") == ["abc"] * 3
    assert constraint.count(ids("ab")) == (2, False)


def test_rounds_far_from_the_limit_need_no_mask() -> None:
    """They may be native ones; a text that can have no more thoughts never needs it again."""
    constraint = budget(200)
    shaper = LogitsProcessor(SamplingParams(), 2, constraint=constraint)
    near, far = "<t>" + "a" * 190, "<t>ab"
    for text, idle in ((far, True), (near, False), (f"{near}</t>so", True), ("so", True)):
        assert constraint.is_idle(ids(text)) is idle
        assert (shaper.sparse([1, 1, *ids(text)]) is not None) is idle
    assert not budget(200, inner=CallbackConstraint(lambda _: None)).is_idle(ids(far))


def test_without_a_limit_it_counts() -> None:
    constraint = budget(None)
    assert masks(constraint, "<t>abc", "", "d") == ["any", "any"]
    assert constraint.is_idle(ids("<t>abc"))
    assert constraint.count(ids("<t>abc")) == (3, None)
