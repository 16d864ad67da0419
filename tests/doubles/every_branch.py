"""The enumeration of every branch, which ships with the package, under its names for tests."""

from __future__ import annotations

from outrider.proof.laws import EveryBranch, Law, Tokens, law

__all__ = ["EveryBranch", "Law", "Tokens", "law"]
