"""Does an acceptance rule keep the target's distribution? Checks by enumeration.

Shapes:  N = draft nodes, V = vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from doubles.every_branch import Distribution, EveryBranch, Tokens, distribution
from doubles.racing import Racing
from outrider.core.draft import Draft, Outcome
from outrider.core.params import SamplingParams
from outrider.core.protocols import AcceptanceRule, VerifyRow
from outrider.core.rng import Rng, Role
from outrider.core.sampling import Distributions, processed_probs
from outrider.core.tree import ROOT
from outrider.plugins.proof.distributions import filtered


def floats(values_V: Tensor) -> list[float]:
    return [float(value) for value in values_V]


def near_an_edge(logits: Sequence[float], params: SamplingParams) -> bool:
    """Rounding alone may decide whether a token passes top-p or min-p."""
    closest = math.inf
    probs = filtered(logits, SamplingParams(temperature=params.temperature, top_k=params.top_k))
    mass = 0.0
    for prob in sorted(probs, reverse=True):
        closest = min(closest, abs(mass - params.top_p))
        mass += prob
    if params.top_p < 1:
        closest = min(closest, abs(mass - params.top_p))
    highest = max(probs)
    for prob in probs:
        # Tokens as likely as the likeliest pass at min_p = 1 without any rounding.
        if prob != highest:
            closest = min(closest, abs(prob / highest - params.min_p))
    return closest < 1e-9


def check_filters(logits: Sequence[float], params: SamplingParams) -> None:
    got = processed_probs(torch.tensor([logits], dtype=torch.float64), params)[0]
    wanted = filtered(logits, params)
    assert len(got) == len(wanted)
    assert all(abs(g - w) <= 1e-12 for g, w in zip(floats(got), wanted, strict=True)), (got, wanted)


def check_filter_cases() -> None:
    """Ties at a top-k edge all pass; exact top-p edges close; filters see what is left."""
    flat = [0.0] * 4
    cases: list[tuple[list[float], SamplingParams, list[float]]] = [
        (flat, SamplingParams(temperature=2.0), [0.25] * 4),
        (flat, SamplingParams(temperature=1.0, top_k=2), [0.25] * 4),
        ([1.0, 0.0, 0.0, -9.0], SamplingParams(temperature=1.0, top_k=2, top_p=0.0), [1, 0, 0, 0]),
        (flat, SamplingParams(temperature=1.0, top_p=0.5), [0.5, 0.5, 0, 0]),
        (flat, SamplingParams(temperature=1.0, top_p=0.51), [1 / 3, 1 / 3, 1 / 3, 0]),
        (flat, SamplingParams(temperature=1.0, top_p=0.0), [1, 0, 0, 0]),
        (flat, SamplingParams(temperature=1.0, min_p=1.0), [0.25] * 4),
        ([2.0, 3.0], SamplingParams(temperature=0.1, min_p=1.0), [0, 1]),
    ]
    for logits, params, wanted in cases:
        got = processed_probs(torch.tensor([logits], dtype=torch.float64), params)[0]
        assert torch.allclose(got, torch.tensor(wanted, dtype=torch.float64), atol=1e-15)
        check_filters(logits, params)
    # Half of the mass is left after top-k, so top-p at 0.5 counts shares of what is left.
    check_filters([0.0, 0.0, -0.3, -0.3], SamplingParams(temperature=1.0, top_k=2, top_p=0.4))
    check_filters([1.0, 0.7, 0.1, -2.0], SamplingParams(temperature=0.6, top_p=0.6, min_p=0.4))


TOLERANCE = 1e-9
Weights = tuple[int, ...]
Conditional = Callable[[Tokens], Tensor]


def normal(weights: Sequence[int]) -> Tensor:
    weights_V = torch.tensor(weights, dtype=torch.float64)
    return weights_V / weights_V.sum()


def joint_distribution(conditional: Conditional, length: int) -> Distribution:
    """The distribution of `length` tokens drawn one after another."""
    found: Distribution = {(): 1.0}
    for _ in range(length):
        found = _extended(found, conditional)
    return found


def completed(found: Distribution, conditional: Conditional, length: int) -> Distribution:
    """The distribution of texts of `found`, each cut at or carried on by `conditional` to
    `length`."""
    result: Distribution = {}
    while found:
        for text, weight in found.items():
            if len(text) >= length:
                result[text[:length]] = result.get(text[:length], 0.0) + weight
        found = _extended({t: w for t, w in found.items() if len(t) < length}, conditional)
    return result


def _extended(found: Distribution, conditional: Conditional) -> Distribution:
    return {
        (*text, token): weight * float(share)
        for text, weight in found.items()
        for token, share in enumerate(conditional(text))
        if share > 0
    }


def assert_same_distribution(
    found: Distribution, wanted: Distribution, tolerance: float = TOLERANCE
) -> None:
    for text in found.keys() | wanted.keys():
        difference = abs(found.get(text, 0.0) - wanted.get(text, 0.0))
        assert difference <= tolerance, f"{text} is off by {difference:.3g}"


@dataclass(frozen=True, slots=True)
class TreeCase:
    """A target and a way to draft a tree for it, in small integers.

    `target` gives a distribution per depth and `proposal` one per node; both are turned round by
    the tokens before, so every path has distributions of its own. Nodes in `certain` are not drawn:
    they are their distribution's likeliest token, and the reported distribution is a point mass.
    With `distinct`, siblings are drawn without replacement. With `races`, drawn nodes win the race
    at their place.
    """

    parents: tuple[int, ...]
    target: tuple[Weights, ...]
    proposal: tuple[Weights, ...]
    certain: frozenset[int] = frozenset()
    distinct: bool = False
    races: bool = False

    @property
    def length(self) -> int:
        """Tokens that a whole path and the bonus token have."""
        blank = [0] * len(self.parents)
        return 1 + max((len(self.text(node, blank)) for node in self.nodes), default=0)

    @property
    def nodes(self) -> range:
        return range(len(self.parents))

    def conditional(self, text: Tokens) -> Tensor:
        return normal(_turned(self.target[len(text)], text))

    def text(self, node: int, tokens: Sequence[int]) -> Tokens:
        """The drafted tokens from the root to `node`, itself included."""
        text: list[int] = []
        while node != ROOT:
            text.append(tokens[node])
            node = self.parents[node]
        return tuple(reversed(text))

    def proposal_distribution(self, node: int, tokens: Sequence[int]) -> Tensor:
        """The distribution of `node`, given the tokens of all nodes before it."""
        probs_V = normal(_turned(self.proposal[node], self.text(self.parents[node], tokens)))
        if node in self.certain:
            return torch.zeros_like(probs_V).index_fill(0, probs_V.argmax(), 1.0)
        earlier = [n for n in range(node) if self.parents[n] == self.parents[node]]
        left_V = probs_V.clone()
        left_V[[tokens[n] for n in earlier]] = 0
        return left_V / left_V.sum() if self.distinct and left_V.sum() > 0 else probs_V

    def drawn(self, rng: Rng, known: dict[Tokens, Tensor]) -> Draft:
        """`known` keeps the distribution after each beginning, for there are few."""
        tokens: list[int] = []
        distributions: list[Tensor] = []
        for node in self.nodes:
            before = tuple(tokens)
            if before not in known:
                known[before] = self.proposal_distribution(node, tokens)
            probs_V = known[before]
            depth = len(self.text(self.parents[node], tokens))
            races = self.races and node not in self.certain
            token = rng.race_at(probs_V, depth) if races else rng.pick(probs_V, node, Role.DRAFT)
            tokens.append(token)
            distributions.append(probs_V)
        sampled = len(self.certain) < len(self.parents)
        return Draft(tuple(tokens), self.parents, torch.stack(distributions) if sampled else None)

    def distributions(self, draft: Draft) -> Distributions:
        texts = [self.text(node, draft.tokens) for node in (ROOT, *self.nodes)]
        return Distributions(probs_NV=torch.stack([self.conditional(text) for text in texts]))


def _turned(weights: Weights, text: Tokens) -> Weights:
    by = sum((place + 1) * (token + 1) for place, token in enumerate(text)) % len(weights)
    return weights[by:] + weights[:by]


def _drawer(case: TreeCase) -> Callable[[Rng], tuple[Draft, Distributions]]:
    """Drafts of `case` and the target's distributions for them, which are made once for equal
    drafts."""
    known: dict[Tokens, Tensor] = {}
    distributions: dict[Tokens, Distributions] = {}

    def drawn(rng: Rng) -> tuple[Draft, Distributions]:
        draft = case.drawn(rng, known)
        if draft.tokens not in distributions:
            distributions[draft.tokens] = case.distributions(draft)
        return draft, distributions[draft.tokens]

    return drawn


def check_tree_distribution(
    rule: AcceptanceRule, case: TreeCase, tolerance: float = TOLERANCE
) -> None:
    """What one verified round emits, carried on by the target, follows the target's
    distribution."""

    drawn = _drawer(case)

    def one_round(rng: Rng) -> Tokens:
        draft, distributions = drawn(rng)
        verdict = rule([VerifyRow(draft, distributions, rng)])[0]
        return Outcome(0, draft, verdict).tokens

    found = completed(walked(one_round), case.conditional, case.length)
    assert_same_distribution(found, joint_distribution(case.conditional, case.length), tolerance)


def walked(experiment: Callable[[Rng], Tokens]) -> Distribution:
    """The exact distribution of what `experiment` returns, races among its choices."""
    return distribution(lambda rng: experiment(Racing(rng)))


def accepted_distribution(rule: AcceptanceRule, case: TreeCase) -> list[float]:
    """The probabilities of 0, 1, 2... accepted tokens."""
    drawn = _drawer(case)

    def num_accepted(rng: Rng) -> Tokens:
        draft, distributions = drawn(rng)
        return (len(rule([VerifyRow(draft, distributions, rng)])[0].path),)

    found = walked(num_accepted)
    return [found.get((count,), 0.0) for count in range(case.length)]


def num_accepted(rule: AcceptanceRule, case: TreeCase) -> float:
    """The expected number of accepted tokens."""
    return sum(count * share for count, share in enumerate(accepted_distribution(rule, case)))


def check_acceptance(rule: AcceptanceRule) -> None:
    """A single draft is accepted as often as any rule can: with the mass p and q share."""
    for case in CASES:
        if len(case.parents) == 1:
            shared_V = torch.minimum(case.conditional(()), case.proposal_distribution(0, ()))
            assert abs(accepted_distribution(rule, case)[1] - float(shared_V.sum())) <= TOLERANCE


def best_acceptance(case: TreeCase) -> float:
    """The most tokens of a chain that any exact rule can accept in expectation.

    A beginning of the draft cannot be accepted more often than it is drafted, nor than the target
    writes it given that a beginning before it was accepted: the sum over drafts of p_1 + ... + p_K
    of the block rule (Sun et al. 2024, theorem 2).
    """
    total = 0.0
    beginnings: list[tuple[Tokens, float, float]] = [((), 1.0, 1.0)]
    for node in case.nodes:
        longer: list[tuple[Tokens, float, float]] = []
        for text, drafted, share in beginnings:
            p_V, q_V = case.conditional(text), case.proposal_distribution(node, text)
            for token, (p, q) in enumerate(zip(floats(p_V), floats(q_V), strict=True)):
                if q > 0:
                    longer.append(((*text, token), drafted * q, min(1.0, share * p / q)))
        beginnings = longer
        total += sum(drafted * share for _, drafted, share in beginnings)
    return total


def siblings(target: Weights, proposals: Sequence[Weights], *, distinct: bool = False) -> TreeCase:
    """Any number of candidates for one token; the second target distribution is for what
    follows."""
    parents = (ROOT,) * len(proposals)
    return TreeCase(parents, (target, target), tuple(proposals), distinct=distinct)


def chain(targets: Sequence[Weights], proposals: Sequence[Weights]) -> TreeCase:
    return TreeCase(tuple(range(-1, len(proposals) - 1)), tuple(targets), tuple(proposals))


# Fixed pairs that between them break every known wrong rule: near-uniform, spiky, zeros on either
# side, disjoint supports, point masses, ties.
CASES = (
    siblings((5, 3, 2), [(2, 3, 5)]),
    siblings((5, 3, 2), [(1, 1, 1), (1, 1, 1)]),
    siblings((8, 1, 0), [(0, 1, 8)]),
    siblings((1, 0, 0), [(1, 2, 3), (3, 0, 1)]),
    siblings((4, 4, 1), [(0, 0, 1), (4, 4, 1)], distinct=True),
    siblings((1, 2, 6), [(1, 2, 6), (1, 2, 6), (1, 2, 6)], distinct=True),
    chain([(3, 2, 1), (1, 6, 1), (2, 2, 5), (7, 1, 1)], [(1, 1, 2), (1, 3, 1), (4, 1, 1)]),
    chain([(3, 2, 1), (2, 2, 5), (1, 1, 1)], [(1, 2, 3), (2, 2, 5)]),
    TreeCase((-1, -1, 0, 0), ((3, 2, 2), (1, 4, 2), (2, 1, 1)), ((1, 1, 1), (1, 3, 1)) * 2),
    TreeCase((-1, 0, -1, 2), ((3, 2, 2), (1, 4, 2), (2, 1, 1)), ((2, 1, 1),) * 4, frozenset({2})),
    TreeCase((-1, 0), ((3, 2, 2), (1, 4, 2), (2, 1, 1)), ((2, 1, 1),) * 2, frozenset({0, 1})),
)


def check_distribution_cases(rule: AcceptanceRule) -> None:
    for case in CASES:
        check_tree_distribution(rule, case)


def check_greedy_walk(rule: AcceptanceRule) -> None:
    """With point masses the path follows the likeliest tokens, whatever distributions the draft
    reports."""
    draft = Draft((2, 1, 0, 1, 2), (-1, -1, 1, 1, 3), torch.full((5, 3), 1 / 3))
    best = Distributions(tokens=(1, 0, 1, 2, 2, 0))
    for probs_NV in (None, draft.probs_NV):
        row = VerifyRow(Draft(draft.tokens, draft.parents, probs_NV), best, EveryBranch())
        verdict = rule([row])[0]
        assert (verdict.path, verdict.next_token) == ((1, 3, 4), 0)
    refused = rule([VerifyRow(draft, Distributions(tokens=(0, 0, 1, 2, 2, 0)), EveryBranch())])[0]
    assert (refused.path, refused.next_token) == ((), 0)
