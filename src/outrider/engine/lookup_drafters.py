"""Drafters that look up instead of computing, and the portfolio of them, perhaps with a model."""

from __future__ import annotations

from outrider.core.config import EngineConfig
from outrider.core.protocols import Drafter
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.portfolio import ForcedDrafter, PortfolioDrafter, Shadowed
from outrider.drafters.portfolio_model import Neural
from outrider.drafters.prediction import PredictionDrafter
from outrider.drafters.proposals import Offerer
from outrider.drafters.recycling import RecyclingDrafter
from outrider.drafters.suffix.drafter import SuffixDrafter
from outrider.engine.parts import Parts


def build_suffix(config: EngineConfig, parts: Parts) -> SuffixDrafter:
    return SuffixDrafter(num_tokens=config.suffix_tokens, corpus=parts.corpus)


def build_recycling(parts: Parts) -> Drafter:
    return RecyclingDrafter(vocab_size=parts.target.spec.vocab_size)


def build_portfolio(config: EngineConfig, parts: Parts, neural: Drafter | None) -> Drafter:
    ngram = NgramDrafter(max_n=config.max_ngram, min_n=config.min_ngram)
    members = lookup_members(build_suffix(config, parts), ngram)
    return PortfolioDrafter(members, None if neural is None else Neural(neural))


def lookup_members(suffix: SuffixDrafter, ngram: NgramDrafter) -> tuple[Offerer, ...]:
    """What is surer comes first: of equal offers the first one is taken."""
    guessed = Shadowed(PredictionDrafter(), serves=lambda row: bool(row.prediction))
    return (ForcedDrafter(), guessed, suffix, ngram)
