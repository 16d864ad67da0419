"""The outcome table finds what was prepared for the very round that was verified, or nothing."""

from __future__ import annotations

import torch

from outrider.core.draft import Draft, Outcome, Verdict
from outrider.core.protocols import DraftRow
from outrider.plugins.lanes.ahead.table import ForcedHits, PreparedRound, SpeculationCache
from outrider.testing import row

DRAFT = (5, 6, 7)
BRANCH = Draft.chain((1, 2, 3), torch.arange(12.0).view(3, 4))
FORESEEN = PreparedRound(4, DRAFT, {(1, 9): BRANCH}, [[8], [3, 9], [], [2]])


def asked(accepted: int, token: int, *, start: int = 4, depth: int = 3) -> DraftRow:
    """The round after one that began with `start` tokens and verified DRAFT."""
    outcome = Outcome(0, Draft.chain(DRAFT), Verdict(tuple(range(accepted)), token))
    return row(0, [0] * start + list(outcome.tokens), depth=depth, last=outcome)


def find(ask: DraftRow, foreseen: PreparedRound = FORESEEN) -> Draft | None:
    table = SpeculationCache()
    table.put(0, foreseen)
    found = table.take(ask)
    assert len(table) == 0
    return None if found is None else found.find(ask)


def test_the_verdict_that_was_foreseen_is_found() -> None:
    found = find(asked(1, 9))
    assert found is not None
    assert found.tokens == BRANCH.tokens


def test_another_verdict_is_not() -> None:
    assert find(asked(2, 9)) is None
    assert find(asked(1, 8)) is None


def test_another_rounds_verdict_is_not_though_it_reads_the_same() -> None:
    """A round may go by without asking; what is left over was drafted for another text."""
    assert find(asked(1, 9, start=5)) is None
    empty = PreparedRound(4, (), {(0, 9): BRANCH}, [[9]])
    later = Outcome(0, Draft.empty(), Verdict((), 9))
    assert find(row(0, [0] * 6 + [9], depth=3, last=later), empty) is None


def test_a_verdict_on_another_draft_is_not() -> None:
    other = Outcome(0, Draft.chain((5, 5, 7)), Verdict((0,), 9))
    assert find(row(0, [0, 0, 0, 0, 5, 9], depth=3, last=other)) is None


def test_a_first_round_finds_nothing() -> None:
    assert find(row(0, [0, 0, 0, 0, 5, 9], depth=3)) is None


def test_an_entry_is_used_once_and_only_for_its_sequence() -> None:
    table = SpeculationCache()
    table.put(1, FORESEEN)
    assert table.take(asked(1, 9)) is None
    table.put(0, FORESEEN)
    assert table.take(asked(1, 9)) is not None
    assert table.take(asked(1, 9)) is None
    table.drop(1)
    table.drop(1)
    assert len(table) == 0


def test_a_shorter_budget_gets_the_beginning_and_its_distributions() -> None:
    found = find(asked(1, 9, depth=2))
    assert found is not None
    assert (found.tokens, found.parents) == ((1, 2), (-1, 0))
    assert found.probs_NV is not None
    assert torch.equal(found.probs_NV, torch.arange(8.0).view(2, 4))


def test_the_rank_of_the_targets_own_token() -> None:
    assert FORESEEN.rank(asked(1, 9)) == 1
    assert FORESEEN.rank(asked(1, 4)) is None
    assert FORESEEN.rank(asked(3, 2)) == 0


def test_forced_hits_are_a_share_of_rounds_and_the_same_each_time() -> None:
    for share in (0.0, 0.5, 1.0):
        forced = ForcedHits(share)
        coins = [forced.hits(seq_id, start) for seq_id in range(20) for start in range(50)]
        assert abs(sum(coins) / len(coins) - share) < 0.05
        assert forced.hits(3, 7) == forced.hits(3, 7)
