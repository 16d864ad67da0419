"""Prices and thresholds that decide whether a token is worth a row of the target's pass.

Each was measured for its own use, and none follows from another: a controller that knows the cost
of rows drafts tokens that a lookup, which does not know it, leaves out. Changing one changes the
drafted tokens, never their distribution.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.tree import Shape, fill_rows

# Prices, as shares of a plain pass of the target.

# One more row: for the watchdog, and to compare several drafters. Measured on CPUs, and smallest
# for a pass that reads much memory.
ROW_COST = 0.04
# One more row, for the goodput controller before it has measured: sixteen make a pass a quarter
# slower.
ASSUMED_ROW_COST = 1 / 64
# A pass of the drafter, until it is measured.
ASSUMED_DRAFT = 0.1

# Least probabilities of acceptance of drafted tokens.

# In a chain of a drafter that scores its own tokens: a row costs some hundredths of a pass.
LEAST_KEPT = 0.12
# In a tree of such a drafter: a caller that requests a tree has rows to spare.
LEAST_IN_TREE = 0.04
# The first token of prompt lookup: below this it would cost its row and mostly gain nothing.
LEAST_BEGUN = 0.15
# Later tokens of prompt lookup, which follow a likely one.
LEAST_GONE_ON = 0.03
# A node of a tree without a measured row cost, unless its row fills a tile and so costs
# nothing.
LEAST_WORTH = 0.02
# A position whose cost and gain the goodput controller weighs: below, no gain is worth computing.
LEAST_WEIGHED = 0.005


def worthwhile(shape: Shape, price: float | None = None) -> Shape:
    """The shape with only the nodes that are worth a row."""
    return shape.first(num_worthwhile(shape.worths, price))


def num_worthwhile(worths: Sequence[float], price: float | None = None) -> int:
    """The number of nodes to draft, given their worths, which never rise: those that gain at least
    the cost of a row, and at least one. Without a price, those above `LEAST_WORTH`, increased to
    fill the last tile of rows."""
    if price is not None:
        return max(sum(worth >= price for worth in worths), min(1, len(worths)))
    wanted = sum(worth >= LEAST_WORTH for worth in worths)
    return fill_rows(wanted, len(worths))
