"""Is this token worth a row of the target's pass? Every price and threshold of the answer.

Each was measured for its own use, and none follows from another: a controller that knows what rows
cost drafts tokens that a lookup, which does not know, leaves out. Whoever changes one changes which
tokens are drafted, never their distribution.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.tree import Shape, fill_rows

# Prices, as shares of a plain pass of the target.

# A row more: the watchdog, and several drafters that are compared. Measured on CPUs, and least
# where a pass reads much memory.
ROW_COST = 0.04
# A row more, for the goodput controller before it has measured: sixteen make a pass a quarter
# slower.
ASSUMED_ROW_COST = 1 / 64
# A pass of the drafter, until it is measured.
ASSUMED_DRAFT = 0.1

# Probabilities to be kept below which a token is not drafted.

# In a chain of a drafter that scores its own tokens: a row costs some hundredths of a pass.
LEAST_KEPT = 0.12
# In a tree of such a drafter: whoever asks for a tree has rows to spare.
LEAST_IN_TREE = 0.04
# The first token of prompt lookup: it would cost its row and mostly bring nothing.
LEAST_BEGUN = 0.15
# Later tokens of prompt lookup, which follow a likely one.
LEAST_GONE_ON = 0.03
# A node of a tree where nobody measured what a row costs, unless its row fills a tile and so costs
# nothing.
LEAST_WORTH = 0.02
# A place whose cost and gain the goodput controller weighs: below, no gain is worth working out.
LEAST_WEIGHED = 0.005


def worthwhile(shape: Shape, price: float | None = None) -> Shape:
    """Its nodes that are worth a row."""
    return shape.first(num_worthwhile(shape.worths, price))


def num_worthwhile(worths: Sequence[float], price: float | None = None) -> int:
    """How many of the nodes of these worths, which never rise, to draft: those that bring what a
    row costs, one at least. Without a price those that may, and what fills the last tile of
    rows."""
    if price is not None:
        return max(sum(worth >= price for worth in worths), min(1, len(worths)))
    wanted = sum(worth >= LEAST_WORTH for worth in worths)
    return fill_rows(wanted, len(worths))
