"""Acceptance rules by name: the exact ones of exact.py, and lossy ones, for study.

Shapes:  N = distributions, V = vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from outrider.core.config import RULES
from outrider.core.draft import Verdict
from outrider.core.errors import ConfigError, ContractError
from outrider.core.protocols import AcceptanceRule, VerifyRow
from outrider.core.sampling import PLAIN, Sampling, draw
from outrider.core.tree import ROOT
from outrider.verify.exact import BlockRule, CoupledRule, MatchRule, TokenRule

# Each takes the operators of its comparisons; the last two do not compare, they draw.
EXACT: Mapping[str, Callable[[Sampling], AcceptanceRule]] = {
    "block": BlockRule,
    "token": TokenRule,
    "match": lambda _: MatchRule(),
    "coupled": lambda _: CoupledRule(),
}


def exact_rules(sampling: Sampling = PLAIN) -> Mapping[str, AcceptanceRule]:
    """Rules that a request may choose, by name."""
    return {name: make(sampling) for name, make in EXACT.items()}


@dataclass(frozen=True, slots=True)
class Candidate:
    """A drafted token and the target's distribution at its position: `distribution` decides,
    `soft_V` has the probabilities for thresholds."""

    token: int
    distribution: int | Tensor
    soft_V: Tensor

    @property
    def probability(self) -> float:
        return float(self.soft_V[self.token])

    @property
    def likeliest(self) -> bool:
        if isinstance(self.distribution, int):
            return self.token == self.distribution
        return self.token == int(self.distribution.argmax())

    def likelier(self) -> Tensor:
        """Booleans of shape V for the tokens that come before this one, likeliest first.

        Among equals the lower id comes first.
        """
        mine_V = self.soft_V[self.token]
        tied_V = self.soft_V == mine_V
        tied_V[self.token :] = False
        return (self.soft_V > mine_V) | tied_V


Test: TypeAlias = Callable[[Candidate, float], bool]


@dataclass(frozen=True, slots=True)
class LossyRule:
    """Accepts draft tokens that the target finds likely: those that `passes` at the threshold
    `leniency`, t below.

    The walk descends from the root to the first child that passes the rule's test; if none passes,
    the target's own token is drawn from its distribution there. The test sees the target's
    distribution at the child's parent (at temperature 1 under greedy decoding). A token of
    probability 0 never passes, so bans and filters hold.

        typical    p(x) > min(t, sqrt(t) exp(-H)), H the entropy of p       t = 0.09
        p_min      x is the likeliest, or p(x) >= t                         t = 0.5
        threshold  p(x) >= t                                                t = 0.5
        top_k      fewer than t tokens are likelier                         t = 5
        nucleus    x is in the smallest set of likeliest tokens of mass t   t = 0.9

    Typical acceptance is that of Medusa (Cai et al. 2024, arXiv 2401.10774), after the truncation
    of Hewitt, Manning, Liang 2022 (arXiv 2210.15191). p_min with t = 1 is strict argmax: at
    temperature 0 the text is the target's own.
    """

    name: str
    passes: Test
    leniency: float
    exact: bool = False

    def __call__(self, rows: Sequence[VerifyRow]) -> list[Verdict]:
        return [self._judge(row) for row in rows]

    def _judge(self, row: VerifyRow) -> Verdict:
        path: list[int] = []
        node = ROOT
        while True:
            child = self._first(row, node)
            if child is None:
                return Verdict(tuple(path), draw(row.distributions.at(node + 1), row.rng, node))
            node = child
            path.append(node)

    def _first(self, row: VerifyRow, node: int) -> int | None:
        """The first child of `node` that passes."""
        soft_NV = row.distributions.probs_NV if row.soft_NV is None else row.soft_NV
        if soft_NV is None:
            raise ContractError("a lossy rule needs soft distributions")
        for child in row.draft.children(node):
            offer = Candidate(
                row.draft.tokens[child], row.distributions.at(node + 1), soft_NV[node + 1]
            )
            if offer.probability > 0 and self.passes(offer, self.leniency):
                return child
        return None


def typical(offer: Candidate, epsilon: float) -> bool:
    """Likelier than `epsilon`, or than the typical token of a flat distribution."""
    soft_V = offer.soft_V.double()
    entropy = -float(torch.xlogy(soft_V, soft_V).sum())
    return offer.probability > min(epsilon, math.sqrt(epsilon) * math.exp(-entropy))


def likeliest_or_above(offer: Candidate, least: float) -> bool:
    return offer.likeliest or offer.probability >= least


def above(offer: Candidate, least: float) -> bool:
    return offer.probability >= least


def among_top(offer: Candidate, count: float) -> bool:
    return int(offer.likelier().sum()) < count


def in_nucleus(offer: Candidate, mass: float) -> bool:
    return float(offer.soft_V.double()[offer.likelier()].sum()) < mass


@dataclass(frozen=True, slots=True)
class _Lossy:
    """A test, its default threshold and its largest sensible one."""

    passes: Test
    usual: float
    largest: float = 1.0


LOSSY: Mapping[str, _Lossy] = {
    "typical": _Lossy(typical, 0.09),
    "p_min": _Lossy(likeliest_or_above, 0.5),
    "threshold": _Lossy(above, 0.5),
    "top_k": _Lossy(among_top, 5, largest=float("inf")),
    "nucleus": _Lossy(in_nucleus, 0.9),
}


def rule_for(sampler: str, leniency: float = 0.0, sampling: Sampling = PLAIN) -> AcceptanceRule:
    """The rule called `sampler`; `leniency` is a lossy rule's threshold, 0 its default.

    Raises ConfigError if the rule has no such threshold, or its package is broken.
    """
    if sampler not in LOSSY:
        if leniency:
            is_what = "is exact and" if sampler in EXACT else "is another package's and"
            raise ConfigError(
                f"sampler {sampler!r} {is_what} has no threshold, but leniency is {leniency:g}.",
                hint=f"leave leniency out, or choose a lossy sampler: {', '.join(LOSSY)}",
            )
        return EXACT[sampler](sampling) if sampler in EXACT else _of_package(sampler, sampling)
    kind = LOSSY[sampler]
    if leniency > kind.largest:
        raise ConfigError(
            f"leniency {leniency:g} is above {kind.largest:g}, the most that sampler {sampler!r} "
            "can use.",
            hint=f"lower --leniency; its usual value is {kind.usual:g}",
        )
    return LossyRule(sampler, kind.passes, leniency or kind.usual)


def _of_package(sampler: str, sampling: Sampling) -> AcceptanceRule:
    kind = RULES.load(sampler)
    rule: AcceptanceRule = RULES.build(kind, sampling)
    if rule.exact is not kind.exact:
        raise ConfigError(
            f"rule {sampler!r} says exact={rule.exact}, and its description exact={kind.exact}.",
            hint="make both say the same: exact where it keeps the target's distribution",
        )
    return rule
