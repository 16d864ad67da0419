"""Budgets, drafts (token trees), verdicts of a rule, outcomes and traces: the values of a round.

Shapes:  N = draft nodes, V = vocabulary, B = sequences, W = longest path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from outrider.core.errors import ContractError, DrafterError
from outrider.core.tree import ROOT

if TYPE_CHECKING:
    from torch import Tensor

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
    expected tokens, above which a tree node pays for its row, and `row_cost` the time of a row as a
    share of a pass without drafts; None if they were not measured.
    `choice` is the controller's reason, if it states one. All fields are set before anything is
    drawn.
    """

    depth: int
    temperature: float = 1.0
    num_nodes: int = 0
    why: str = ""
    price: float | None = None
    row_cost: float | None = None
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
class MemberTrace:
    """One member's part in a round: the tokens that it drafted and those accepted of them; another
    member may have drafted the same. `seconds` are those of its own passes, which all sequences of
    the round share, and a `trial` is a draft that was made to learn, not because it seemed to pay.
    """

    name: str
    num_drafted: int
    num_accepted: int
    seconds: float = 0.0
    trial: bool = False


@dataclass(slots=True, unsafe_hash=True)
class RoundTrace:
    """Record of one pass for one sequence. Every metric and controller derives from these records.
    Nothing changes one; it is not frozen, since one is made for each row of each round.

    A round emits `num_accepted + 1` tokens, always; a pass that only read a chunk of the prompt
    emits none. Seconds are those of the whole pass, in which `batch_size` sequences took part:
    records with equal `pass_index` have the same seconds. `num_accepted` counts accepted draft
    nodes after clamping, `draft_depth` tokens on the longest path of the draft (0: not recorded),
    and `num_waiting` requests that were not yet admitted. `hit` says whether the draft was ready
    before it was requested, None without drafting ahead.
    `mask_seconds` is the time of this sequence's own allowed-token callback, as part of the pass
    and of its drafting; a slow callback of another sequence shows in that sequence's record.
    `gap_seconds` is the time between the previous pass and this one: host work in between, and idle
    time. `members` has the parts of a drafter's members, where it has several.
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
    members: tuple[MemberTrace, ...] = ()

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


Origin = Literal["accepted", "recovered", "bonus", "plain"]
# Verdict on a drafted token (the last two: the rule refused it, or never came to it or came past
# the text's end), and on the target's own token.
NodeVerdict = Literal[Origin, "refused", "unused"]


class DraftPart(NamedTuple):
    """The `nodes` of a draft that the member `name` proposed, in growing order; several members may
    have proposed the same node. `seconds` and `trial` are those of a `MemberTrace`."""

    name: str
    nodes: tuple[int, ...]
    seconds: float = 0.0
    trial: bool = False


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed continuations of one sequence: a tree, parents before children.

    A chain is the tree whose node i has parent i - 1. `probs_NV[i]` is the distribution node i was
    drawn from, given its earlier siblings; None says every node was chosen deterministically. `hit`
    says whether it was made ahead of the verdict that it follows, None without drafting ahead.
    `by` is the name of the member that proposed it, where the engine's drafter has several, or
    their names with + between them, and `parts` says which of them proposed which nodes.
    `accept_probs` has the drafter's estimate of each node's acceptance probability, the likeliest
    first; it is empty if the drafter gives none.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    probs_NV: Tensor | None = None
    hit: bool | None = None
    by: str = ""
    accept_probs: tuple[float, ...] = ()
    parts: tuple[DraftPart, ...] = ()

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raises DrafterError if this is no tree: a drafter may be third-party code."""
        if len(self.tokens) != len(self.parents):
            raise DrafterError(f"{len(self.tokens)} tokens with {len(self.parents)} parents.")
        if not self.is_chain and not all(
            map(_comes_before, self.parents, range(len(self.parents)))
        ):
            raise DrafterError(f"parents {self.parents[:16]} do not come before their children.")
        if self.accept_probs and len(self.accept_probs) != len(self.tokens):
            raise DrafterError(
                f"{len(self.accept_probs)} probabilities for {len(self.tokens)} tokens."
            )
        if self.probs_NV is not None and self.probs_NV.shape[0] != len(self.tokens):
            raise DrafterError(
                f"{self.probs_NV.shape[0]} distributions for {len(self.tokens)} tokens."
            )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        return self.parents == _chain_parents(len(self.parents))

    @staticmethod
    def empty() -> Draft:
        return _EMPTY

    @classmethod
    def chain(
        cls,
        tokens: Sequence[int],
        probs_NV: Tensor | None = None,
        *,
        by: str = "",
        accept_probs: tuple[float, ...] = (),
    ) -> Draft:
        parents = _chain_parents(len(tokens))
        return cls(tuple(tokens), parents, probs_NV, by=by, accept_probs=accept_probs)

    def first(self, count: int) -> Draft:
        """The first `count` nodes, which are a draft too, since parents come before children."""
        if count >= len(self.tokens):
            return self
        if not count and not self.parts:
            return _EMPTY
        probs_NV = None if self.probs_NV is None or not count else self.probs_NV[:count]
        return Draft(
            self.tokens[:count],
            self.parents[:count],
            probs_NV,
            self.hit,
            self.by,
            self.accept_probs[:count],
            tuple(
                part._replace(nodes=tuple(node for node in part.nodes if node < count))
                for part in self.parts
            ),
        )

    def as_trial(self) -> Draft:
        """The same draft, made to learn."""
        parts = self.parts or (DraftPart(self.by, tuple(range(len(self)))),)
        return replace(self, parts=tuple(part._replace(trial=True) for part in parts))

    def followed(self, text: Sequence[int]) -> int:
        """Length of the longest path of the tree that `text` begins with."""
        node, length = ROOT, 0
        for token in text:
            child = next((c for c in self.children(node) if self.tokens[c] == token), None)
            if child is None:
                break
            node, length = child, length + 1
        return length

    def children(self, node: int) -> tuple[int, ...]:
        """Children of `node` in the order they were drawn."""
        return tuple(i for i, parent in enumerate(self.parents) if parent == node)

    @property
    def max_depth(self) -> int:
        """Tokens on the longest path."""
        if self.is_chain:
            return len(self)
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return max(depths, default=0)


@lru_cache(maxsize=256)
def _chain_parents(num_nodes: int) -> tuple[int, ...]:
    return tuple(range(ROOT, num_nodes - 1))


def _comes_before(parent: int, node: int) -> bool:
    return ROOT <= parent < node


def parents_below(root: int, parents: Sequence[int]) -> tuple[int, ...]:
    """Parents of a chain up to node `root`, the pending token, and of a draft below it."""
    return (*range(ROOT, root), *(root + 1 + parent for parent in parents))


_EMPTY = Draft((), ())
_PLAIN: tuple[Origin, ...] = ("plain",)


class Trimmed(NamedTuple):
    """The drafts of a pass after a controller cut them, and its expectation of the pass."""

    drafts: list[Draft]
    choice: Choice


# Cuts the drafts of sequences that draft together, given their ids and their drafts.
Trim: TypeAlias = Callable[[Sequence[int], Sequence[Draft]], Trimmed]


def common_prefix(drafted: Sequence[int], text: Sequence[int]) -> int:
    """Length of the common beginning: the number of a chain's tokens that `text` repeats. A later
    token was refused, or `text` is not that long yet."""
    count = 0
    for token, written in zip(drafted, text, strict=False):
        if token != written:
            break
        count += 1
    return count


@dataclass(slots=True, unsafe_hash=True)
class Verdict:
    """The target's decision: the accepted path, then one token of its own. As a RoundTrace it is
    not frozen.

    `next_token` is the recovered token after a rejection, the bonus token otherwise.
    """

    path: tuple[int, ...]
    next_token: int


@dataclass(frozen=True, slots=True)
class NodeTrace:
    """One node of a round: a drafted token, or the target's own token after them.

    `p` is its probability under the target's processed distribution after its parent, `q` under the
    distribution that it was drawn from, given its earlier siblings; `q` is None for a token that
    was not drawn. Greedy decoding gives its choice all of p; `p_soft` is then the probability at
    temperature 1, as log-probabilities have it, and None otherwise.

    `chance` is the acceptance probability that the rule's coin had, and `draw` the number in [0, 1)
    that it drew: a number below `chance` accepts. A certain coin draws none, and match and coupled
    rules toss none. For the target's own token `draw` is the number that it was picked with, None
    in greedy decoding and in a race.
    """

    token_id: int
    parent: int
    p: float
    q: float | None
    verdict: NodeVerdict
    p_soft: float | None = None
    chance: float | None = None
    draw: float | None = None


@dataclass(frozen=True, slots=True)
class RoundEvent:
    """A full record of a round, for a request that wants round events: the drafted nodes in their
    order, then the target's own token, which is missing where the text ended at a drafted token.
    `budget` is the budget of the draft, and its reason."""

    trace: RoundTrace
    nodes: tuple[NodeTrace, ...]
    budget: Budget | None = None

    @property
    def emitted(self) -> tuple[NodeTrace, ...]:
        """The nodes that became text, in its order."""
        return tuple(node for node in self.nodes if node.verdict not in ("refused", "unused"))


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The natural logarithm of a token's probability, and the likeliest tokens at its position.

    `top` is ordered by probability, ties by id; tokens of no probability are left out.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True, unsafe_hash=True)
class Outcome:
    """Result of one sequence's round: the draft and the verdict on it. As a RoundTrace it
    is not frozen.

    `logprobs` has an entry for each of `tokens` if the request wants them. `likely` has the
    target's likeliest tokens, best first, after the root and after each draft node, if the drafter
    needs them. `nodes`, `trace` and `budget` are there if the request wants round events.
    """

    seq_id: int
    draft: Draft
    verdict: Verdict
    logprobs: tuple[TokenLogprobs, ...] = ()
    likely: tuple[tuple[int, ...], ...] = ()
    nodes: tuple[NodeTrace, ...] = ()
    trace: RoundTrace | None = None
    budget: Budget | None = None

    @property
    def events(self) -> tuple[RoundEvent, ...]:
        """The round as an event, if the request wants events."""
        return () if self.trace is None else (RoundEvent(self.trace, self.nodes, self.budget),)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens that the round emitted: the accepted path, then the target's own token."""
        verdict = self.verdict
        if not verdict.path:
            return (verdict.next_token,)
        tokens = self.draft.tokens
        return (*[tokens[node] for node in verdict.path], verdict.next_token)

    @property
    def num_accepted(self) -> int:
        return len(self.verdict.path)

    @property
    def members(self) -> tuple[MemberTrace, ...]:
        """The parts of the drafter's members, where it has several."""
        path = self.verdict.path
        return tuple(
            MemberTrace(name, len(nodes), sum(node in nodes for node in path), seconds, trial)
            for name, nodes, seconds, trial in self.draft.parts
        )

    @property
    def origins(self) -> tuple[Origin, ...]:
        """The origin of each of `tokens`."""
        if not self.draft.tokens:
            return _PLAIN
        leaf = self.verdict.path[-1] if self.verdict.path else ROOT
        refused = [self.draft.tokens[child] for child in self.draft.children(leaf)]
        last: Origin = "recovered" if refused else "bonus"
        if self.verdict.next_token in refused:
            last = "accepted"  # the outcome was ended at a token that the target had accepted
        accepted: tuple[Origin, ...] = ("accepted",) * self.num_accepted
        return (*accepted, last)

    def keep(self, num_tokens: int) -> Outcome:
        """The same outcome, ended after its first `num_tokens` tokens (at least one)."""
        if not 1 <= num_tokens <= self.num_accepted + 1:
            raise ValueError(f"{num_tokens} of {self.num_accepted + 1} tokens cannot be kept")
        if num_tokens == self.num_accepted + 1:
            return self
        path = self.verdict.path[: num_tokens - 1]
        return Outcome(self.seq_id, self.draft, Verdict(path, self.tokens[num_tokens - 1]))
