"""The enumeration of every branch, which ships with the package, under its names for tests."""

from __future__ import annotations

from outrider.plugins.proof.distributions import Distribution, EveryBranch, Tokens, distribution

__all__ = ["Distribution", "EveryBranch", "Tokens", "distribution"]
