"""A request in flight: the only mutable request state."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.core.budget import Budget
from outrider.core.draft import Draft, Outcome, TokenLogprobs
from outrider.core.logits import LogitsProcessor
from outrider.core.params import AS_THE_ENGINE, FinishReason, RequestSpeculation, SamplingParams
from outrider.core.rng import KeyedRng, Pick, inverse_cdf

StopMatch = Callable[[Sequence[int]], int | None]


@dataclass(slots=True)
class LiveSequence:
    """State of a request. `tokens` is the prompt and all emitted tokens; the last one is pending.

    Pending means: decided and shown to the user, but not yet in the target's KV cache. `limit` is
    the most tokens that may be emitted. `match` gets emitted tokens and returns how many of them to
    keep when a stop string ended within, or None to go on. `shaper` changes logits, if there is
    one. `prediction` is the caller's own guess of the text after the prompt, `speculation` the
    request's own choices. `pick` is the operator of its draws. `budget` is that of its next draft.
    `no_drafts` is the reason if it is not drafted for any more; `rested` the reason if it was not
    for a while. `deadline` is the end of its time on the engine's clock, and `mask_seconds` the
    time of its mask in its last round. `num_cached` of its tokens were in the cache when it came.
    It `is_watched` if its text is read while it is written. `error` is the reason for which the
    engine gave it up, if it did; it is then neither live nor finished. `prompt_logprobs` has an
    entry a prompt token, None for the first, as far as they are known and if they are requested.
    """

    seq_id: int
    tokens: list[int]
    prompt_length: int
    params: SamplingParams
    limit: int
    stop_ids: frozenset[int] = frozenset()
    match: StopMatch | None = None
    shaper: LogitsProcessor | None = None
    sample: int = 0
    prediction: tuple[int, ...] = ()
    speculation: RequestSpeculation = AS_THE_ENGINE
    pick: Pick = inverse_cdf
    budget: Budget = field(default_factory=lambda: Budget(0))
    draft: Draft = field(default_factory=Draft.empty)
    last: Outcome | None = None
    num_rounds: int = 0
    num_preempted: int = 0
    num_cached: int = 0
    no_drafts: str = ""
    rested: str = ""
    deadline: float = math.inf
    mask_seconds: float = 0.0
    is_watched: bool = False
    finish: FinishReason | None = None
    error: Exception | None = None
    prompt_logprobs: list[TokenLogprobs | None] = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_logprobs = [] if self.params.prompt_logprobs is None else [None]

    @property
    def is_unscored(self) -> bool:
        """True if log-probabilities of its prompt are requested and not all known."""
        return 0 < len(self.prompt_logprobs) < self.prompt_length

    @property
    def num_emitted(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def num_remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.limit - self.num_emitted

    @property
    def rng(self) -> KeyedRng:
        """The random numbers of the round that starts now."""
        return self.rng_at(len(self.tokens))

    def rng_at(self, start: int) -> KeyedRng:
        """The random numbers of a round that starts when there are `start` tokens."""
        return KeyedRng(self.params.rng_seed, self.sample, start, self.pick)
