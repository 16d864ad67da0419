"""Acceptance rules by the names that `--sampler` takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

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

    Raises ConfigError if the rule has no such threshold.
    """
    if sampler in EXACT:
        if leniency:
            raise ConfigError(
                f"sampler {sampler!r} is exact and has no threshold, but leniency is {leniency:g}.",
                hint=f"leave leniency out, or choose a lossy sampler: {', '.join(LOSSY)}",
            )
        return EXACT[sampler](sampling)
    kind = LOSSY[sampler]
    if leniency > kind.largest:
        raise ConfigError(
            f"leniency {leniency:g} is above {kind.largest:g}, the most that sampler {sampler!r} "
            "can use.",
            hint=f"lower --leniency; its usual value is {kind.usual:g}",
        )
    return lossy.LossyRule(sampler, kind.passes, leniency or kind.usual)
