"""The contract that authors run catches each way in which a drafter breaks it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch

from doubles.drafters import RowDrafter
from outrider.core.draft import Draft
from outrider.core.errors import DrafterError
from outrider.core.protocols import Drafter, DraftNeeds, DraftRow
from outrider.core.rng import Role
from outrider.testing import VOCAB, ProposalContract
from outrider_lab.proof.certificate import report_check

Contract = ProposalContract


@dataclass(slots=True)
class Follower:
    """Goes on as the text did after its last token, as `notes` say, but for what is `wrong`."""

    wrong: str = ""
    name: str = "follower"
    needs: DraftNeeds = field(default_factory=DraftNeeds)
    notes: dict[int, dict[int, int]] = field(default_factory=dict[int, dict[int, int]])
    num_read: dict[int, int] = field(default_factory=dict[int, int])

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        del prompt
        self.notes.setdefault(seq_id, {})
        self.num_read[seq_id] = 1

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        return [self._draft(row, rows[0]) for row in rows]

    def close(self, seq_id: int) -> None:
        if self.wrong != "keeps what was closed":
            del self.notes[seq_id]

    def _draft(self, row: DraftRow, first: DraftRow) -> Draft:
        after = self.notes[first.seq_id if self.wrong == "mixes rows" else row.seq_id]
        for place in range(self.num_read[row.seq_id], len(row.tokens)):
            after[row.tokens[place - 1]] = row.tokens[place]
        self.num_read[row.seq_id] = len(row.tokens)
        chain, last = list[int](), row.tokens[-1]
        while len(chain) < row.budget.depth and last in after:
            last = after[last]
            chain.append(last)
        if self.wrong == "believes its drafts" and len(chain) > 1:
            after[chain[-1]] = chain[0]
        return Draft.chain(chain)


def sampling(reported: Sequence[float]) -> Drafter:
    """Draws one token evenly, and reports weights."""

    def draft(row: DraftRow) -> Draft:
        if row.params.greedy or not row.budget.depth:
            return Draft.empty()
        token = row.rng.pick(torch.full((VOCAB,), 0.2), 0, Role.DRAFT)
        return Draft.chain((token,), torch.tensor([reported]))

    return RowDrafter(draft)


def too_long(row: DraftRow) -> Draft:
    return Draft.chain((1,) * (row.budget.depth + 1))


def foreign(row: DraftRow) -> Draft:
    return Draft.chain((VOCAB,) * row.budget.depth)


def drawn_in_secret(row: DraftRow) -> Draft:
    return Draft.chain(
        (row.rng.pick(torch.full((VOCAB,), 0.2), 0, Role.DRAFT),)[: row.budget.depth]
    )


def drawn_as_the_target_draws(row: DraftRow) -> Draft:
    """Its report is right, and the rule's next draw would be the same number."""
    if row.params.greedy or not row.budget.depth:
        return Draft.empty()
    even_V = torch.full((VOCAB,), 0.2)
    return Draft.chain((row.rng.pick(even_V, 0, Role.NEXT),), even_V[None])


def dropped(row: DraftRow) -> Draft:
    """Draws evenly, reports that, and takes back a token that it does not like."""
    if row.params.greedy or not row.budget.depth:
        return Draft.empty()
    even_V = torch.full((VOCAB,), 0.2)
    token = row.rng.pick(even_V, 0, Role.DRAFT)
    return Draft.chain((token,), even_V[None]) if token else Draft.empty()


def sharpened(row: DraftRow) -> Draft:
    """Draws what followed the last token by its count, and reports squares of counts."""
    followed = [b for a, b in pairwise(row.tokens) if a == row.tokens[-1]]
    if row.params.greedy or not followed or not row.budget.depth:
        return Draft.empty()
    counts_V = torch.bincount(torch.tensor(followed), minlength=VOCAB).float()
    token = row.rng.pick(counts_V, 0, Role.DRAFT)
    return Draft.chain((token,), (counts_V**2 / (counts_V**2).sum())[None])


def raises(row: DraftRow) -> Draft:
    raise AttributeError(f"no table of {row.seq_id}")


EVEN, SKEWED = [0.2] * VOCAB, [0.4, 0.15, 0.15, 0.15, 0.15]


@pytest.mark.parametrize(
    ("make", "check"),
    [
        (lambda: RowDrafter(too_long), Contract.test_drafts_keep_to_budget_and_vocabulary),
        (lambda: RowDrafter(foreign), Contract.test_drafts_keep_to_budget_and_vocabulary),
        (lambda: Follower("believes its drafts"), Contract.test_memory_follows_any_history),
        (lambda: Follower("mixes rows"), Contract.test_rows_are_drafted_independently),
        (
            lambda: Follower("keeps what was closed"),
            Contract.test_ids_may_be_used_again_after_closing,
        ),
        (
            lambda: sampling(SKEWED),
            Contract.test_draws_follow_the_distributions_that_are_reported,
        ),
        (
            lambda: RowDrafter(drawn_in_secret),
            Contract.test_draws_follow_the_distributions_that_are_reported,
        ),
        (
            lambda: RowDrafter(drawn_as_the_target_draws),
            Contract.test_draws_follow_the_distributions_that_are_reported,
        ),
        (
            lambda: RowDrafter(sharpened),
            Contract.test_draws_follow_the_distributions_that_are_reported,
        ),
    ],
)
def test_it_is_caught(
    make: Callable[[], Drafter],
    check: Callable[[ProposalContract], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Contract, "make", staticmethod(make))
    with pytest.raises((AssertionError, DrafterError)) as told:
        check(Contract())
    assert str(told.value)


@pytest.mark.parametrize("make", [Follower, lambda: sampling(EVEN)])
def test_a_right_one_is_not(make: Callable[[], Drafter], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Contract, "make", staticmethod(make))
    contract = Contract()
    for name in dir(contract):
        if name.startswith("test_"):
            getattr(contract, name)()


@pytest.mark.parametrize(
    ("make", "holds"),
    [
        (Follower, True),
        (lambda: sampling(EVEN), True),
        (lambda: RowDrafter(drawn_in_secret), True),
        (lambda: sampling(SKEWED), False),
        (lambda: RowDrafter(drawn_as_the_target_draws), False),
        (lambda: RowDrafter(sharpened), False),
        (lambda: RowDrafter(dropped), False),
        (lambda: RowDrafter(raises), None),
    ],
)
def test_the_certificate_names_what_misleads_a_rule(
    make: Callable[[], Drafter], holds: bool | None
) -> None:
    check = report_check("own", make)
    assert (check.holds, bool(check.problems)) == (holds, holds is False)
