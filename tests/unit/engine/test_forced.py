"""Drafts of forced tokens: who is asked, and whose answer counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from outrider.core.draft import Draft
from outrider.core.errors import CallbackError, ConfigError
from outrider.core.logits import LogitsProcessor
from outrider.core.params import SamplingParams
from outrider.core.protocols import DraftRow
from outrider.engine.drafting import with_forced
from outrider.testing import row

PROMPT = (4, 4)


@dataclass
class Forcing:
    """A TokenConstraint that forces `tokens`, or fails."""

    tokens: Sequence[int] = ()
    error: BaseException | None = None
    knows_forced: bool = True

    def masks(
        self, text: Sequence[int], suffixes: Sequence[Sequence[int]], vocab_size: int
    ) -> Tensor | None:
        raise NotImplementedError

    def is_idle(self, text: Sequence[int]) -> bool:
        raise NotImplementedError

    def forced(self, text: Sequence[int], most: int) -> Sequence[int]:
        assert list(text) == []
        if self.error is not None:
            raise self.error
        return self.tokens[:most]


def asking(constraint: Forcing | None, depth: int = 4, seq_id: int = 0) -> DraftRow:
    shaper = LogitsProcessor(SamplingParams(), len(PROMPT), constraint=constraint)
    return replace(row(seq_id, PROMPT, depth=depth), shaper=shaper)


@dataclass
class Asked:
    """A drafter's `ask` that answers with `draft`, and what it was asked for."""

    draft: Draft | None = None
    rows: list[int] = field(default_factory=list[int])

    def __call__(self, rows: Sequence[DraftRow]) -> tuple[dict[int, Draft], dict[int, str]]:
        self.rows += [one.seq_id for one in rows]
        return ({one.seq_id: self.draft for one in rows} if self.draft else {}), {}


def test_tokens_that_fill_half_of_the_budget_go_first() -> None:
    own = Draft.chain([1, 2, 3, 4])
    for tokens, is_asked in (((7, 8, 9, 7, 8), False), ((7, 8), False), ((7,), True), ((), True)):
        asked = Asked(own)
        drafts, _ = with_forced([asking(Forcing(tokens))], asked)
        assert asked.rows == [0] * is_asked
        assert drafts[0].tokens == (own.tokens if is_asked else tokens[:4])
        assert drafts[0].by == ("" if is_asked else "forced")


def test_fewer_stand_in_where_there_is_no_draft() -> None:
    asked = Asked()
    drafts, _ = with_forced([asking(Forcing((7,)))], asked)
    assert asked.rows == [0]
    assert drafts[0].tokens == (7,)
    assert with_forced([asking(Forcing(()))], Asked()) == ({}, {})


def test_requests_are_apart() -> None:
    asked = Asked(Draft.chain([1]))
    rows = [asking(Forcing((7, 8)), seq_id=0), asking(None, seq_id=1), row(2, PROMPT, depth=4)]
    drafts, _ = with_forced(rows, asked)
    assert asked.rows == [1, 2]
    assert [drafts[i].tokens for i in range(3)] == [(7, 8), (1,), (1,)]


def test_callbacks_are_not_asked_and_failures_wait_for_the_masks() -> None:
    for constraint in (
        Forcing((7, 8), knows_forced=False),
        Forcing((7, 8), ConfigError("too much")),
        Forcing((7, 8), CallbackError(SystemExit())),
        Forcing((7, 8), SystemExit()),
    ):
        asked = Asked(Draft.chain([1]))
        drafts, _ = with_forced([asking(constraint)], asked)
        assert asked.rows == [0]
        assert drafts[0].tokens == (1,)
