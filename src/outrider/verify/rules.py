"""Acceptance rules by the names that `--sampler` takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from outrider.core.config import RULES
from outrider.core.errors import ConfigError
from outrider.core.protocols import AcceptanceRule
from outrider.core.sampling import PLAIN, Sampling
from outrider.verify import lossy
from outrider.verify.exact import BlockRule, TokenRule
from outrider.verify.match import CoupledRule, MatchRule

# Each takes the operators that it judges with; the last two compare nothing, they draw.
EXACT: Mapping[str, Callable[[Sampling], AcceptanceRule]] = {
    "block": BlockRule,
    "token": TokenRule,
    "match": lambda _: MatchRule(),
    "coupled": lambda _: CoupledRule(),
}


def exact_rules(sampling: Sampling = PLAIN) -> Mapping[str, AcceptanceRule]:
    """All rules that a request may choose, by name."""
    return {name: make(sampling) for name, make in EXACT.items()}


@dataclass(frozen=True, slots=True)
class _Lossy:
    """A test, its usual threshold and the largest that means anything."""

    passes: lossy.Test
    usual: float
    largest: float = 1.0


LOSSY: Mapping[str, _Lossy] = {
    "typical": _Lossy(lossy.typical, 0.09),
    "p_min": _Lossy(lossy.likeliest_or_above, 0.5),
    "threshold": _Lossy(lossy.above, 0.5),
    "top_k": _Lossy(lossy.among_top, 5, largest=float("inf")),
    "nucleus": _Lossy(lossy.in_nucleus, 0.9),
}


def rule_for(sampler: str, leniency: float = 0.0, sampling: Sampling = PLAIN) -> AcceptanceRule:
    """The rule called `sampler`; `leniency` is a lossy rule's threshold, 0 its usual one.

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
    return lossy.LossyRule(sampler, kind.passes, leniency or kind.usual)


def _of_package(sampler: str, sampling: Sampling) -> AcceptanceRule:
    kind = RULES.load(sampler)
    rule: AcceptanceRule = RULES.build(kind, sampling)
    if rule.exact is not kind.exact:
        raise ConfigError(
            f"rule {sampler!r} says exact={rule.exact}, and its description exact={kind.exact}.",
            hint="make both say the same: exact where it keeps the target's distribution",
        )
    return rule
