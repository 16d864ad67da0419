"""Records of jobs and rounds that no engine made, and random timelines of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from outrider.core.draft import JobTrace, RoundTrace

LANES = {"decode": ("draft", "ahead"), "verify": ("verify",), "prefill": ("prefill",)}


def job(lane: str, kinds: str, began: float, ended: float, *seq_ids: int) -> JobTrace:
    """`kinds` with + between them; one sequence, 0, unless others are named."""
    return JobTrace(
        lane=lane,
        kinds=tuple(kinds.split("+")),
        seq_ids=seq_ids or (0,),
        num_tokens=max(len(seq_ids), 1),
        began=began,
        ended=ended,
        queues=(0, 0, 0),
        num_waiting=0,
        num_live=max(len(seq_ids), 1),
        num_free_tokens=100,
    )


def trace(seq_id: int, pass_index: int, *, hit: bool | None = None, prompt: int = 0) -> RoundTrace:
    """A round that drafted 4 tokens and kept 2, in 1 + 2 + 0.5 seconds; one that read `prompt`
    tokens emitted nothing."""
    return RoundTrace(
        seq_id=seq_id,
        pass_index=pass_index,
        drafter="model",
        batch_size=1,
        num_target_passes=1,
        num_prompt_tokens=prompt,
        num_drafted=0 if prompt else 4,
        num_accepted=0 if prompt else 2,
        num_emitted=0 if prompt else 3,
        num_rows_copied=0,
        draft_seconds=0.0 if prompt else 1.0,
        verify_seconds=2.0,
        accept_seconds=0.0 if prompt else 0.5,
        hit=hit,
    )


@st.composite
def intervals(draw: st.DrawFn, most: int = 30) -> list[tuple[int, int]]:
    """Whole moments, so that sums are exact; they may touch, overlap or be empty."""
    ends = st.tuples(st.integers(0, most), st.integers(0, most))
    return [(min(two), max(two)) for two in draw(st.lists(ends, max_size=8))]


@st.composite
def timelines(draw: st.DrawFn) -> list[JobTrace]:
    """What three lanes may have done: jobs of one lane do not overlap, times are whole numbers,
    and records come in the order in which jobs ended."""
    found: list[JobTrace] = []
    for lane, kinds in LANES.items():
        now = 0
        for _ in range(draw(st.integers(0, 6))):
            began = now + draw(st.integers(0, 4))
            now = began + draw(st.integers(0, 6))
            seq_ids = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True))
            made = job(lane, draw(st.sampled_from(kinds)), began, now, *seq_ids)
            found.append(_crowded(draw, made))
    return sorted(found, key=lambda made: made.ended)


def _crowded(draw: st.DrawFn, made: JobTrace) -> JobTrace:
    depth = st.integers(0, 9)
    return replace(
        made,
        queues=(draw(depth), draw(depth), draw(depth)),
        num_waiting=draw(depth),
        num_free_tokens=draw(depth),
    )


def cells(intervals: Sequence[tuple[float, float]]) -> set[int]:
    """The unit cells of time that they cover: the slow way to measure them."""
    return {cell for began, ended in intervals for cell in range(int(began), int(ended))}


def job_trace(
    kinds: str,
    sequences: int | Sequence[int],
    seconds: float,
    *,
    ended: float | None = None,
    num_live: int = 1,
    num_failed: int = 0,
) -> JobTrace:
    """Of so many sequences, or of these; `kinds` is written with commas."""
    seq_ids = tuple(range(sequences)) if isinstance(sequences, int) else tuple(sequences)
    end = seconds if ended is None else ended
    return JobTrace(
        lane="verify",
        kinds=tuple(kinds.split(",")),
        seq_ids=seq_ids,
        num_tokens=len(seq_ids),
        began=end - seconds,
        ended=end,
        queues=(0, 0, 0),
        num_waiting=0,
        num_live=num_live,
        num_free_tokens=99,
        num_failed=num_failed,
    )
