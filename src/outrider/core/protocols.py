"""Interfaces: models, KV caches, drafters, acceptance rules, controllers.

Each protocol's docstring names the folder of its implementations.

Shapes:  N = packed tokens, M = packed logits rows, V = vocabulary, D = hidden size,
         K = captured layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from outrider.core.draft import Budget, Draft, Outcome, RoundTrace, Verdict
from outrider.core.spec import ModelSpec
from outrider.core.tree import ROOT

if TYPE_CHECKING:
    # Drafters are listed without PyTorch.
    from torch import Tensor

    from outrider.core.logits import LogitsProcessor
    from outrider.core.params import SamplingParams
    from outrider.core.rng import Rng
    from outrider.core.sampling import Distributions


@dataclass(frozen=True, slots=True)
class DraftNeeds:
    """A drafter's needs of the target pass; the engine reads this instead of its class.

    The states of `hidden_layers` are stored for every token: i is the residual after i layers, 0 to
    L. `num_likely` is the number of likeliest tokens that `Outcome.likely` reports after each
    verified token. A drafter that `shares_memory` drafts in the target's own KV cache, and so must
    never be left in the midst of a draft.
    """

    hidden_layers: tuple[int, ...] = ()
    num_likely: int = 0
    shares_memory: bool = False


@dataclass(frozen=True, slots=True)
class StepRow:
    """New tokens of one sequence, as nodes of the tree that hangs from its committed state.

    Node ids count from the last commit, over all steps since: a step's first token is the node
    after the last one staged, and `parents` may name nodes that earlier steps staged (ROOT is the
    committed state itself). Logits come back for tokens `logits_from` and later.
    """

    seq_id: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    logits_from: int = 0

    @classmethod
    def chain(
        cls, seq_id: int, tokens: Sequence[int], *, parent: int = ROOT, logits_from: int = 0
    ) -> StepRow:
        """A chain of new nodes below `parent`, which must be the last node staged (or ROOT)."""
        parents = tuple(range(parent, parent + len(tokens)))
        return cls(seq_id, tuple(tokens), parents, logits_from)

    @property
    def num_logits(self) -> int:
        return len(self.tokens) - self.logits_from


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Logits packed row by row, from each row's `logits_from` on.

    `logits_MV` is float32 and may be a view of a buffer that the model's next step overwrites; the
    caller may write into it.
    `num_passes` is the number of times that the weights were read.
    """

    logits_MV: Tensor
    hidden_NKD: Tensor | None = None
    num_passes: int = 1


class CacheStore(Protocol):
    """KV cache and states of many sequences (cache/). `step` stages nodes, `commit` keeps them.

    Contract: after `commit(path)` the next step returns the logits of a model that was fed only the
    committed tokens. `commit({seq: ()})` is rollback.
    """

    def open(self, seq_id: int, tokens: Sequence[int], salt: str = "") -> int:
        """Start a sequence that will read `tokens`. Returns the number of them already cached,
        which only sequences of the same `salt` share."""
        ...

    def fork(self, source: int, new: int, length: int | None = None) -> None:
        """Start `new` with the first `length` committed tokens of `source` (None: all of them),
        sharing whole pages. `source` stays as it is."""
        ...

    def length(self, seq_id: int) -> int:
        """Number of committed tokens."""
        ...

    def num_staged(self, seq_id: int) -> int: ...
    def reserve(self, counts: Mapping[int, int]) -> None:
        """Reserve memory for so many more nodes of each sequence. Raises CapacityError, and
        reserves no more than before, if there is not enough."""
        ...

    def commit(self, paths: Mapping[int, Sequence[int]]) -> int:
        """Keep exactly these nodes of each sequence. Returns the number of copied rows."""
        ...

    def close(self, seq_id: int) -> None: ...

    @property
    def num_free_tokens(self) -> int: ...


@runtime_checkable
class HiddenStore(CacheStore, Protocol):
    """A store that also holds the hidden states that a drafter needs."""

    def hidden(self, seq_id: int, start: int, stop: int) -> Tensor:
        """Hidden states of committed tokens `start` to `stop`, hidden_PKD, in the order of the
        drafter's `hidden_layers`; a copy, in the store's dtype."""
        ...


class CausalLM(Protocol):
    """A decoder over packed token trees (models/). Prefill, decode and verify are one call."""

    @property
    def spec(self) -> ModelSpec: ...
    @property
    def state(self) -> CacheStore: ...
    def step(self, rows: Sequence[StepRow], needs: DraftNeeds) -> StepOutput: ...


@dataclass(frozen=True, slots=True)
class DraftRow:
    """One sequence's request for a draft.

    `tokens` is everything emitted so far, prompt included; the last one is pending (not yet in
    the target's KV cache). `last` is the outcome of the round before, None in a first round.
    `prediction` is the caller's own guess of the text after the prompt. A drafter that processes
    its logits with `shaper` (None: not at all), as the target's are, is accepted more often.
    `hidden` reads the states that the drafter needs; None if it needs none.
    """

    seq_id: int
    tokens: Sequence[int]
    last: Outcome | None
    budget: Budget
    params: SamplingParams
    rng: Rng
    prediction: tuple[int, ...] = ()
    shaper: LogitsProcessor | None = None
    hidden: HiddenStates | None = None


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """Hidden states of one sequence: `read(start, stop)` gives hidden_PKD of those tokens, up to
    `length` of them. In a new text the target may not have read all emitted tokens yet."""

    length: int
    read: Callable[[int, int], Tensor]


class Drafter(Protocol):
    """Proposes drafts; never decides (drafters/). It cannot change the output, only the time.

    It may return less than the budget, never more. A drafter that samples reports the exact
    distribution of each node; `probs_NV` is None only if no node was sampled.
    """

    @property
    def name(self) -> str: ...
    @property
    def needs(self) -> DraftNeeds: ...
    def open(self, seq_id: int, prompt: Sequence[int]) -> None: ...
    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]: ...
    def close(self, seq_id: int) -> None: ...


@runtime_checkable
class Remembering(Protocol):
    """A drafter that learns from the texts of all requests."""

    def forget(self) -> None:
        """Return to the state before the first request. No sequence may be open."""
        ...


@runtime_checkable
class KeepsApart(Protocol):
    """A drafter that remembers texts of requests, and can leave out a text."""

    def open_apart(self, seq_id: int, prompt: Sequence[int]) -> None:
        """Open a sequence that drafts from its own text alone, which no other sequence sees; used
        instead of `open`."""
        ...


@runtime_checkable
class HasMembers(Protocol):
    """A drafter that consists of several others."""

    def member(self, name: str) -> Drafter | None:
        """The member called `name` that can serve requests of its own, or None."""
        ...


@runtime_checkable
class ShutsDown(Protocol):
    """A drafter that holds resources other than memory, such as a process."""

    def shut_down(self) -> None:
        """Release them. The next request may start them again."""
        ...


@runtime_checkable
class HasNotes(Protocol):
    """A drafter with notes for users."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that users should know about this run; empty if all went well."""
        ...


@dataclass(frozen=True, slots=True)
class AheadRow:
    """A round with an open verdict: `draft` is being verified after `pending`, the last of `start`
    tokens. `budget` is the budget of the following round, and `rng_after(n)` its random numbers if
    this round emits n tokens. `window` is the recent duration of such verifications in seconds, 0
    if there were none."""

    seq_id: int
    start: int
    pending: int
    draft: Draft
    budget: Budget
    params: SamplingParams
    rng_after: Callable[[int], Rng]
    window: float = 0.0


@runtime_checkable
class DraftAhead(Drafter, Protocol):
    """A drafter that prepares drafts for likely verdicts while the target finds the true one.

    The prepared drafts serve the next `propose` alone, and only if the verdict was predicted: the
    draft then says `hit`. Between the two calls no other method is called for these sequences.
    """

    def propose_after(self, rows: Sequence[AheadRow]) -> None: ...


@dataclass(frozen=True, slots=True)
class VerifyRow:
    """Input of a rule. `distributions` entry 0 follows the root, entry i + 1 draft node i.

    `soft_NV` has the same rows as probabilities even when decoding is greedy (then at temperature
    1); only lossy rules get it.
    """

    draft: Draft
    distributions: Distributions
    rng: Rng
    soft_NV: Tensor | None = None


class AcceptanceRule(Protocol):
    """Decides on drafts; a pure function of its rows (verify/). A rule that is `exact` claims the
    target's own distribution."""

    @property
    def exact(self) -> bool: ...
    def __call__(self, rows: Sequence[VerifyRow]) -> list[Verdict]: ...


class Controller(Protocol):
    """Chooses the next budgets from past traces (control/)."""

    def budgets(self, seq_ids: Sequence[int]) -> list[Budget]:
        """Budgets of sequences that draft together now, one each."""
        ...

    def observe(self, trace: RoundTrace) -> None: ...
