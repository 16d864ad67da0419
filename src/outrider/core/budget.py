"""Draft budget of a round, and the traces of rounds and jobs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from outrider.core.errors import ContractError

# Why a draft may be so long: nobody chooses; a length is tried at first, or looked at again; it is
# expected to bring most; acceptance or latency is held; drafting rests.
Reason: TypeAlias = Literal["fixed", "trial", "look", "gain", "acceptance", "latency", "rest"]


@dataclass(frozen=True, slots=True)
class Choice:
    """What a controller chose a budget for. One that reckons says what it expected of the whole
    pass: `tokens` in `seconds`, `gain` times as fast as plain decoding."""

    reason: Reason
    tokens: float | None = None
    seconds: float | None = None
    gain: float | None = None


@dataclass(frozen=True, slots=True)
class Budget:
    """At most `depth` draft tokens along any path (K of a chain); 0 means do not speculate. At most
    `num_nodes` of them in all, where that is more: then a drafter that can may branch.

    `temperature` is what the drafter multiplies a request's own by before it draws. It reports the
    distribution that it drew from, so the output keeps its distribution; only acceptance changes.
    `why` says what a depth was set to 0 for, if drafting was found dead; `price` what a node of a
    tree must bring, in expected tokens, to pay for its row, if that was measured; `choice` what its
    controller chose it for, if that says so. All of it is settled before anything is drawn.
    """

    depth: int
    temperature: float = 1.0
    num_nodes: int = 0
    why: str = ""
    price: float | None = None
    choice: Choice | None = field(default=None, compare=False)

    @property
    def size(self) -> int:
        """Draft tokens in all."""
        return max(self.depth, self.num_nodes) if self.depth else 0

    def cut(self, depth: int) -> Budget:
        """The same, only `depth` deep: a tree is cut in size as well, in proportion."""
        if not 0 <= depth <= self.depth:
            raise ContractError("a budget is cut to less than it is")
        if depth == self.depth:
            return self
        return replace(self, depth=depth, num_nodes=self.num_nodes * depth // self.depth)


@dataclass(frozen=True, slots=True)
class RoundTrace:
    """What one pass did for one sequence. Every metric and controller derives from these records.

    A round emits `num_accepted + 1` tokens, always; a pass that only read a chunk of the prompt
    emits none. Seconds are those of the whole pass, in which `batch_size` sequences took part:
    records that share `pass_index` share their seconds. `num_accepted` counts draft nodes kept
    after clamping, `draft_depth` tokens on the longest path of the draft (0: it was not noted), and
    `num_waiting` requests that were not yet admitted. `hit` says whether the draft was ready before
    it was asked for, None where nobody drafts ahead.
    `mask_seconds` are those that this sequence's own allowed-token callback took, as part of the
    pass and of its drafting: a slow one of another sequence shows in the other's record.
    `gap_seconds` went by between the pass before and this one: what the host does in between, and
    idle time.
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
    def num_places(self) -> int:
        """How many tokens could have been kept: all that were drafted, or a tree's depth."""
        return self.draft_depth or self.num_drafted


@dataclass(frozen=True, slots=True)
class JobTrace:
    """What one lane did in one go. Times are those of `core/clock.py`, in seconds.

    `kinds` are the stages of the job (prefill, draft, ahead, verify), in order. `queues` says how
    many sequences waited for (prefill, draft, verify) when the job began, `num_waiting` how many
    requests were not yet admitted, `num_free_tokens` what room the arena then had. `num_failed`
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
