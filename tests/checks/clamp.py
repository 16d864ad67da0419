"""Where outcomes end: stop tokens, stop strings and budgets, at every place of a path."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.draft import Draft, Outcome, Verdict
from outrider.core.params import SamplingParams
from outrider.core.sequence import FinishReason, LiveSequence, StopMatch
from outrider.engine.round import clamp

# A branch is accepted: nodes 1, 2 and 4 of a tree, then the target's own token 9.
DRAFT = Draft((7, 5, 6, 8, 4), (-1, -1, 1, 1, 2))
OUTCOME = Outcome(3, DRAFT, Verdict((1, 2, 4), 9))
TOKENS = (5, 6, 4, 9)


def ended(
    room: int, stop_ids: Sequence[int] = (), match: StopMatch | None = None
) -> tuple[Outcome, FinishReason | None]:
    seq = LiveSequence(
        seq_id=3,
        tokens=[1, 2, 0],
        prompt_length=2,
        params=SamplingParams(),
        limit=room + 1,
        stop_ids=frozenset(stop_ids),
        match=match,
    )
    return clamp(OUTCOME, seq)


def expect(found: tuple[Outcome, FinishReason | None], num: int, why: FinishReason | None) -> None:
    outcome, reason = found
    assert outcome.tokens == TOKENS[:num]
    assert outcome.verdict.path == (1, 2, 4)[: num - 1]
    assert outcome.num_accepted == num - 1
    assert (outcome.seq_id, outcome.draft) == (3, DRAFT)
    assert reason == why


def check_budget() -> None:
    for room in range(1, 4):
        expect(ended(room), room, "length")
    expect(ended(4), 4, "length")
    expect(ended(5), 4, None)


def check_stop_tokens() -> None:
    for place, token in enumerate(TOKENS):
        expect(ended(9, [token]), place + 1, "stop")
        expect(ended(9, [token, 9]), place + 1, "stop")
    expect(ended(9, [7, 8]), 4, None)


def check_stop_and_budget() -> None:
    """A stop token within the budget wins, its last place included; one beyond is not seen."""
    expect(ended(2, [6]), 2, "stop")
    expect(ended(2, [5]), 1, "stop")
    expect(ended(2, [4]), 2, "length")


def check_stop_strings() -> None:
    """The matcher is told only of what would be emitted, and its answer is where the text ends."""
    told: list[tuple[int, ...]] = []

    def ends_at(num: int | None) -> StopMatch:
        def match(tokens: Sequence[int]) -> int | None:
            told.append(tuple(tokens))
            return num

        return match

    expect(ended(9, match=ends_at(2)), 2, "stop")
    expect(ended(9, match=ends_at(None)), 4, None)
    expect(ended(3, match=ends_at(None)), 3, "length")
    expect(ended(3, match=ends_at(3)), 3, "stop")
    expect(ended(9, [6], match=ends_at(None)), 2, "stop")
    expect(ended(9, [6], match=ends_at(1)), 1, "stop")
    assert told == [TOKENS, TOKENS, TOKENS[:3], TOKENS[:3], TOKENS[:2], TOKENS[:2]]


def check_clamp() -> None:
    check_budget()
    check_stop_tokens()
    check_stop_and_budget()
    check_stop_strings()
