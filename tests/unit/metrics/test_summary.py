"""Traces to numbers: shared passes count once, shares and rates follow their definitions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.core.draft import MemberTrace, RoundTrace
from outrider.metrics import MemberStats, Stats, summarise, together
from outrider_lab.metrics.timeline import PassShapes, pass_shapes

ROUND = RoundTrace(
    seq_id=0,
    pass_index=0,
    drafter="ngram",
    batch_size=1,
    num_target_passes=1,
    num_prompt_tokens=0,
    num_drafted=4,
    num_accepted=2,
    num_emitted=3,
    num_rows_copied=0,
    draft_seconds=0.5,
    verify_seconds=2.0,
    accept_seconds=0.25,
)
READ = replace(ROUND, num_prompt_tokens=8, num_drafted=0, num_accepted=0, num_emitted=0)


def stats(*traces: RoundTrace, total_seconds: float = 10.0) -> Stats:
    return summarise(traces, drafter="ngram", k=4, total_seconds=total_seconds)


def test_counts_add_up() -> None:
    found = stats(ROUND, replace(ROUND, pass_index=1, num_accepted=0, num_emitted=1))
    assert (found.num_rounds, found.num_target_passes) == (2, 2)
    assert (found.num_drafted, found.num_accepted, found.num_emitted) == (8, 2, 4)
    assert found.seconds == {
        "prefill": 0,
        "draft": 1.0,
        "verify": 4.0,
        "accept": 0.5,
        "total": 10.0,
    }


def test_a_shared_pass_counts_once() -> None:
    mate = replace(ROUND, seq_id=1, batch_size=2)
    found = stats(replace(ROUND, batch_size=2), mate)
    assert (found.num_rounds, found.num_target_passes, found.num_emitted) == (2, 1, 6)
    assert (found.seconds["draft"], found.seconds["verify"]) == (0.5, 2.0)


def test_a_pass_that_reads_a_prompt_is_prefill_for_all() -> None:
    found = stats(ROUND, replace(READ, seq_id=1), replace(ROUND, pass_index=1))
    assert (found.seconds["prefill"], found.seconds["verify"]) == (2.0, 2.0)
    assert found.num_rounds == 2


def test_several_passes_of_one_round_all_count() -> None:
    assert stats(replace(ROUND, num_target_passes=5)).num_target_passes == 5


def test_rates() -> None:
    found = stats(ROUND)
    assert found.acceptance_rate == 0.5
    assert found.tokens_per_round == 3
    assert found.tokens_per_second == pytest.approx(0.3)
    assert found.draft_share == pytest.approx(0.05)


def test_nothing_done_divides_by_nothing() -> None:
    found = stats(total_seconds=0.0)
    assert found.acceptance_rate == found.tokens_per_round == 0
    assert found.tokens_per_second == found.draft_share == 0


def test_rounds_that_drafted_are_counted_by_what_they_kept() -> None:
    plain = replace(ROUND, pass_index=1, num_drafted=0, num_accepted=0, num_emitted=1)
    assert stats(ROUND, plain).acceptance_histogram == (0, 0, 1, 0, 0)


def test_hits_and_misses_are_counted_of_rounds_that_could_have_been_foreseen() -> None:
    hits = [None, True, True, False]
    found = stats(*(replace(ROUND, pass_index=i, hit=hit) for i, hit in enumerate(hits)))
    assert (found.num_hits, found.num_misses) == (2, 1)
    assert found.p_hit == pytest.approx(2 / 3)
    assert stats(ROUND).p_hit is None


def test_rounds_are_counted_by_their_drafter() -> None:
    """A round without a draft has the name of the whole drafter in its trace."""
    mtp, suffix = replace(ROUND, drafter="mtp"), replace(ROUND, drafter="suffix")
    empty = replace(ROUND, drafter="portfolio", num_drafted=0, num_accepted=0, num_emitted=1)
    found = stats(mtp, replace(suffix, pass_index=1), replace(mtp, pass_index=2), empty, READ)
    assert found.rounds_by == {"mtp": 2, "suffix": 1, "none": 1}
    assert sum(found.rounds_by.values()) == found.num_rounds
    both = together([found, stats(mtp)], total_seconds=1.0)
    assert both.rounds_by == {"mtp": 3, "suffix": 1, "none": 1}


def test_members_are_counted_with_their_time_and_their_trials() -> None:
    """A round of several members counts for each; one without parts for its drafter."""
    parts = (MemberTrace("suffix", 3, 2), MemberTrace("model", 2, 1, 0.25, trial=True))
    shared = replace(ROUND, drafter="suffix+model", members=parts)
    cut = replace(shared, pass_index=1, num_drafted=0, members=(MemberTrace("model", 0, 0, 0.5),))
    found = stats(shared, cut, replace(ROUND, drafter="suffix", pass_index=2), READ)
    assert found.members == {
        "model": MemberStats(
            num_rounds=2,
            num_drafted=2,
            num_accepted=1,
            seconds=0.75,
            num_trials=1,
            trial_tokens=2,
            trial_seconds=0.25,
        ),
        "suffix": MemberStats(
            num_rounds=2,
            num_drafted=3 + ROUND.num_drafted,
            num_accepted=2 + ROUND.num_accepted,
            seconds=0,
            num_trials=0,
            trial_tokens=0,
            trial_seconds=0,
        ),
    }
    assert together([found, found], total_seconds=1.0).members["model"]["seconds"] == 1.5
    assert stats(replace(ROUND, num_drafted=0, num_accepted=0)).members == {}


def test_as_a_dictionary() -> None:
    found = stats(replace(ROUND, verify_seconds=1 / 3)).to_dict()
    assert (found["num_accepted"], found["num_emitted"]) == (2, 3)
    assert found["acceptance_histogram"] == [0, 0, 1, 0, 0]
    assert found["seconds"] == {
        "prefill": 0,
        "draft": 0.5,
        "verify": 0.333333333,
        "accept": 0.25,
        "total": 10.0,
    }


def test_passes_are_counted_by_who_shared_them() -> None:
    """Alone; two alike; a prompt of 5 beside a draft of 4 and its pending token, alike too; two
    that differ by a token drafted."""
    mate = replace(ROUND, seq_id=1)
    found = pass_shapes(
        [
            ROUND,
            *(replace(one, pass_index=1) for one in (ROUND, mate)),
            *(replace(one, pass_index=2) for one in (ROUND, replace(READ, num_prompt_tokens=5))),
            *(replace(one, pass_index=3) for one in (ROUND, replace(mate, num_drafted=3))),
        ]
    )
    assert found == PassShapes(
        num_passes=4, num_shared=3, mean_sequences=7 / 4, equal_rows_fraction=2 / 3
    )


def test_without_shared_passes_there_is_no_share_of_them() -> None:
    assert pass_shapes([ROUND]) == PassShapes(1, 0, 1.0, None)
    assert pass_shapes([]) == PassShapes(0, 0, 0.0, None)
