"""Look-ups: the portfolio of drafters without a model (portfolio.py)."""

from __future__ import annotations

from outrider.core.plugins import DrafterKind
from outrider.drafters import ngram, suffix
from outrider.drafters.common.context import BuildContext
from outrider.drafters.portfolio import PortfolioDrafter, lookup_members


def build(context: BuildContext) -> PortfolioDrafter:
    return PortfolioDrafter(lookup_members(suffix.build(context), ngram.build(context)))


KIND = DrafterKind(
    name="lookup",
    build=build,
    branches=True,
    reads=("corpus", "prediction"),
    scores=True,
    drafted=0.4,
)
