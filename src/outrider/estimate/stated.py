"""Value of a folder's drafts as stated in it: acceptance and cost, measured once by its maker.

Times are in plain passes of the target; a machine scales them but keeps their order. With E(K) from
the probabilities of acceptance,

    S(K) = E(K) / (d + (K - 1) e + 1 + K r)

where d is the time of a first draft, e that of each draft after it, and r that of one more row in
the verifying pass.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self, cast

from outrider.core.config import MOST_K
from outrider.estimate.theory import measured_speed_up

# Key in config.json.
KEY = "outrider_worth"


@dataclass(frozen=True, slots=True)
class StatedWorth:
    """Stated acceptance and times. `kept` entry j is the probability that a round accepts more than
    j drafts; `first`, `later` and `row` are d, e and r."""

    kept: tuple[float, ...]
    first: float
    later: float
    row: float

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self | None:
        """The value of `KEY` in config.json; None if it does not have this form: a file may hold
        anything, and a missing estimate costs less than a wrong one."""
        stated, times = values.get("kept"), [values.get(name) for name in ("first", "later", "row")]
        if not isinstance(stated, list):
            return None
        kept = cast("list[object]", stated)
        if not 1 <= len(kept) <= MOST_K:
            return None
        chances = [_number(one) for one in kept]
        first, later, row = (_number(one) for one in times)
        if first is None or later is None or row is None:
            return None
        found = [one for one in chances if one is not None and one <= 1]
        # Longer prefixes are never accepted more often.
        if len(found) < len(kept) or found != sorted(found, reverse=True):
            return None
        return cls(tuple(found), first, later, row)

    def values(self) -> dict[str, object]:
        """The value for config.json."""
        return asdict(self)

    def speed_up(self, k: int) -> float:
        """S over plain decoding, for chains of `k` drafts, up to the length of `kept`."""
        return measured_speed_up(
            1 + math.fsum(self.kept[:k]),
            plain=1.0,
            draft=self.first + (k - 1) * self.later,
            verify=1 + k * self.row,
        )

    @property
    def best_k(self) -> int:
        """The k with the largest speed-up, at least 1; of equals the shortest."""
        return max(range(1, len(self.kept) + 1), key=self.speed_up)

    @property
    def pays(self) -> bool:
        return self.speed_up(self.best_k) > 1


def _number(value: object) -> float | None:
    """A finite number from 0 up as a float; None for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value <= sys.float_info.max else None


def fitted(
    kept: Sequence[float], draft: tuple[float, float], verify: tuple[float, float], plain: float
) -> StatedWorth:
    """StatedWorth from seconds of drafting and verifying at the ends of K, and of a plain round."""
    steps = max(len(kept) - 1, 1)
    later = max(draft[1] - draft[0], 0.0) / steps
    row = max((verify[1] - plain) / len(kept), 0.0)
    first = max(draft[0] + verify[0] - plain - row, 0.0)
    return StatedWorth(tuple(kept), *(round(time / plain, 3) for time in (first, later, row)))
