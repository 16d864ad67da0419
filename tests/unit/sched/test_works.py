"""How a pass is shared out among prompts, what that means for those that wait, and what kinds of
jobs there are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.sched.jobs import (
    Job,
    JobKind,
    ReadyQueues,
    Stage,
    StageItem,
    chunks,
    job_of,
    rounds,
    shares,
)

needs = st.lists(st.integers(2, 40), min_size=1, max_size=8)


def prompts(*unread: int) -> ReadyQueues:
    return ReadyQueues(
        tuple(StageItem(i, Stage.PREFILL, n) for i, n in enumerate(unread)), (), (), 99
    )


def given_to(works: list[StageItem]) -> dict[int, int]:
    assert all(work.stage is Stage.PREFILL for work in works)
    return {work.seq_id: work.num_tokens for work in works}


def test_the_oldest_gets_half_and_the_shortest_of_the_others_come_first() -> None:
    assert given_to(shares(prompts(50, 9, 3), 8, 9)) == {0: 4, 2: 3, 1: 1}
    assert given_to(shares(prompts(50, 4, 4), 8, 9)) == {0: 4, 1: 4}


def test_what_nobody_else_needs_is_the_oldest_s_again() -> None:
    assert given_to(shares(prompts(50), 8, 9)) == {0: 8}
    assert given_to(shares(prompts(50, 2), 8, 9)) == {0: 6, 1: 2}
    assert given_to(shares(prompts(3, 50), 8, 9)) == {0: 3, 1: 5}


def test_no_more_prompts_than_allowed_share_a_pass() -> None:
    assert given_to(shares(prompts(50, 2, 2, 2), 8, 2)) == {0: 6, 1: 2}
    assert given_to(shares(prompts(50, 2), 8, 1)) == {0: 8}


def test_a_room_of_one_token_is_the_oldest_s() -> None:
    assert given_to(shares(prompts(5, 2), 1, 9)) == {0: 1}


@given(unread=needs, room=st.integers(1, 30), most=st.integers(1, 8))
def test_shares_keep_within_the_room_and_leave_none_of_it(
    unread: list[int], room: int, most: int
) -> None:
    given = given_to(shares(prompts(*unread), room, most))
    assert len(given) <= most
    assert all(1 <= count <= unread[seq_id] for seq_id, count in given.items())
    assert given[0] >= min(unread[0], room // 2)
    shared = sorted(unread[1:])[: most - 1]
    assert sum(given.values()) == min(room, unread[0] + sum(shared))


@given(unread=needs, room=st.integers(1, 30), most=st.integers(1, 8))
def test_chunks_are_shares_without_pending_tokens(unread: list[int], room: int, most: int) -> None:
    pool = prompts(*unread)
    whole = given_to(shares(pool, room, most))
    read = given_to(chunks(pool, room, most))
    assert read == {i: min(count, unread[i] - 1) for i, count in whole.items()}
    assert all(read.values())


def test_no_prompts_no_chunks() -> None:
    assert shares(prompts(), 8, 8) == chunks(prompts(), 8, 8) == []


def test_a_round_is_a_draft_and_a_verification() -> None:
    assert rounds([StageItem(3, Stage.PREFILL, 5)]) == [
        StageItem(3, Stage.DRAFT, 5),
        StageItem(3, Stage.VERIFY, 5),
    ]
    assert job_of([]) is None
    assert job_of(rounds([StageItem(3, Stage.DRAFT, 1)])) == Job(
        (StageItem(3, Stage.DRAFT, 1), StageItem(3, Stage.VERIFY, 1))
    )


@pytest.mark.parametrize(
    ("stages", "kind"),
    [
        ((Stage.DRAFT,), JobKind.DRAFT),
        ((Stage.AHEAD,), JobKind.AHEAD),
        ((Stage.VERIFY,), JobKind.VERIFY),
        ((Stage.PREFILL,), JobKind.PREFILL),
        ((Stage.PREFILL, Stage.VERIFY), JobKind.PREFILL),
        ((Stage.DRAFT, Stage.VERIFY), JobKind.ROUND),
        ((Stage.DRAFT, Stage.PREFILL, Stage.VERIFY), JobKind.ROUND),
    ],
)
def test_a_job_says_which_parts_of_the_engine_it_takes(
    stages: tuple[Stage, ...], kind: JobKind
) -> None:
    works = [StageItem(i, stage, 1) for i in range(2) for stage in reversed(stages)]
    job = Job(tuple(works))
    assert (job.stages, job.kind) == (stages, kind)
    assert all(job.of(stage) == tuple(w for w in works if w.stage is stage) for stage in Stage)
    assert job.alone(1).kind is kind
