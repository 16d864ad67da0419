"""Draft budget of a round, and the traces of rounds and jobs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from outrider.core.errors import ContractError

# Why a draft has its length: `fixed` by a setting; a first `trial` of a length, or a later `look`
# at it; the largest expected `gain`; a held `acceptance` or `latency`; a `rest` from drafting.
Reason: TypeAlias = Literal["fixed", "trial", "look", "gain", "acceptance", "latency", "rest"]


@dataclass(frozen=True, slots=True)
class Choice:
    """The reason for which a controller chose a budget. A controller with a cost model also states
    its expectation of the whole pass: `tokens` in `seconds`, `gain` times as fast as plain
    decoding."""

    reason: Reason
    tokens: float | None = None
    seconds: float | None = None
    gain: float | None = None


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of one draft: at most `depth` tokens along any path (K of a chain), and at most
    `num_nodes` tokens in all. Depth 0 means no speculation. A drafter that can branch drafts a tree
    where `num_nodes` is above `depth`.

    The drafter multiplies a request's temperature by `temperature` before it draws. It reports the
    distribution that it drew from, so the output keeps its distribution; only acceptance changes.
    `why` is the reason for depth 0 where drafting was found not to pay. `price` is the gain, in
    expected tokens, above which a tree node pays for its row; None if it was not measured.
    `choice` is the controller's reason, if it states one. All fields are set before anything is
    drawn.
    """

    depth: int
    temperature: float = 1.0
    num_nodes: int = 0
    why: str = ""
    price: float | None = None
    choice: Choice | None = field(default=None, compare=False)

    @property
    def size(self) -> int:
        """Number of draft tokens in all."""
        return max(self.depth, self.num_nodes) if self.depth else 0

    def cut(self, depth: int) -> Budget:
        """The same budget with only `depth` levels; the size of a tree falls in proportion."""
        if not 0 <= depth <= self.depth:
            raise ContractError("a cut must not deepen a budget")
        if depth == self.depth:
            return self
        return replace(self, depth=depth, num_nodes=self.num_nodes * depth // self.depth)


@dataclass(frozen=True, slots=True)
class RoundTrace:
    """Record of one pass for one sequence. Every metric and controller derives from these records.

    A round emits `num_accepted + 1` tokens, always; a pass that only read a chunk of the prompt
    emits none. Seconds are those of the whole pass, in which `batch_size` sequences took part:
    records with equal `pass_index` have the same seconds. `num_accepted` counts accepted draft
    nodes after clamping, `draft_depth` tokens on the longest path of the draft (0: not recorded),
    and `num_waiting` requests that were not yet admitted. `hit` says whether the draft was ready
    before it was requested, None without drafting ahead.
    `mask_seconds` is the time of this sequence's own allowed-token callback, as part of the pass
    and of its drafting; a slow callback of another sequence shows in that sequence's record.
    `gap_seconds` is the time between the previous pass and this one: host work in between, and idle
    time.
    """

    seq_id: int
    pass_index: int
    drafter: str
    batch_size: int
    num_target_passes: int
    num_prompt_tokens: int
    num_drafted: int
    num_accepted: int
    num_emitted: int
    num_rows_copied: int
    draft_seconds: float
    verify_seconds: float
    accept_seconds: float
    num_waiting: int = 0
    hit: bool | None = None
    gap_seconds: float = 0.0
    draft_depth: int = 0
    mask_seconds: float = 0.0

    @property
    def num_positions(self) -> int:
        """Number of tokens that could have been accepted: all drafted ones, or a tree's depth."""
        return self.draft_depth or self.num_drafted


@dataclass(frozen=True, slots=True)
class JobTrace:
    """Record of one job of one lane. Times are those of `core/clock.py`, in seconds.

    `kinds` are the stages of the job (prefill, draft, ahead, verify), in order. `queues` has the
    number of sequences that waited for (prefill, draft, verify) when the job began, `num_waiting`
    the number of requests not yet admitted, `num_free_tokens` the free KV positions. `num_failed`
    counts sequences that the job ended with an error.
    """

    lane: str
    kinds: tuple[str, ...]
    seq_ids: tuple[int, ...]
    num_tokens: int
    began: float
    ended: float
    queues: tuple[int, int, int]
    num_waiting: int
    num_live: int
    num_free_tokens: int
    num_failed: int = 0

    @property
    def seconds(self) -> float:
        return self.ended - self.began
