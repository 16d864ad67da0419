"""Calibration: measured costs and acceptance of a target and its drafters on one machine.

A pass over n sequences with contexts S_i (committed tokens) and rows R_i (new tokens) takes

    T = rows(sum R_i) + per_context sum S_i + per_read sum R_i S_i

because weights are read once for all rows, keys and values once for all rows of a sequence, and
every row attends to each of them. A round adds `overhead`, and `token` per emitted token (its text
and records), `host` per sequence and `rule` per verified row.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self, cast

from outrider.core.budget import RoundTrace
from outrider.core.config import MOST_K
from outrider.core.errors import ConfigError
from outrider.estimate.acceptance import BySequence, RunningMedian
from outrider.estimate.cost import Curve, curve_of
from outrider.estimate.theory import RoundStats, measured_speed_up

SCHEMA = "outrider-calibration/1"
# The folder of stored calibrations within the cache.
CALIBRATIONS = "calibrations"
_HINT = "measure anew: outrider plan --fresh"


@dataclass(frozen=True, slots=True)
class PassCosts:
    """Seconds of a target's pass, as in the formula above. `rows` is the curve at context 0."""

    rows: Curve
    per_context: float = 0.0
    per_read: float = 0.0

    def seconds(self, num_rows: float, context: float, reads: float) -> float:
        """`context` is the sum of S_i, `reads` that of R_i S_i."""
        return self.rows.at(num_rows) + self.per_context * context + self.per_read * reads


@dataclass(frozen=True, slots=True)
class PlaceCount:
    """Counts of one position of drafts: how often it was drafted, and how often accepted.

    Of `drafted` drafts that had a j-th token and whose tokens before it were all accepted,
    `accepted` had it accepted too. Counts come from rounds that could use a whole draft; a position
    that was not drafted counts for neither.
    """

    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class DrafterCosts:
    """Costs and acceptance of one drafter, `name` as in `--drafter`. `draft` has seconds by depth
    for growing numbers of sequences. `places` entry j counts position j + 1 of a chain.
    `memory_bytes` is the size of its weights, and `kv_bytes_per_token` that of a token of context.

    `num_rounds` is the number of counted rounds, if some draft less than requested; 0 says that all
    drafts are as long as requested. `requests` has the counts of each text, if they were kept
    apart. `carry` is the start of the draft after a fully accepted one: 1 if its positions continue
    those of the last, as for a model that agrees with its target or not by position in the text; 0
    if it begins anew. `laws` entry K - 1 has the outcomes of rounds at depth K, if they were
    replayed from deeper ones. `chances` [position][rank] are the probabilities of a tree's
    candidates, if ranks were counted.

    Seconds are by depth, as measured for some numbers of sequences; `per_context` is added per
    token of context for each step, and `per_emitted` per token that was emitted since the draft
    before, because heads read these tokens and their states before they draft. `miss` is the time
    of a round in which a draft was requested and none was found.
    """

    name: str
    draft: tuple[tuple[int, Curve], ...]
    per_context: float = 0.0
    per_emitted: float = 0.0
    places: tuple[PlaceCount, ...] = ()
    memory_bytes: int = 0
    kv_bytes_per_token: int = 0
    num_rounds: int = 0
    carry: float = 0.0
    requests: tuple[tuple[PlaceCount, ...], ...] = ()
    laws: tuple[RoundStats, ...] = ()
    chances: tuple[tuple[float, ...], ...] = ()
    miss: float = 0.0

    def seconds(
        self, depth: float, num_sequences: float, context: float, emitted: float = 0.0
    ) -> float:
        """Seconds of one draft; `context` is the sum of S_i, `emitted` the number of tokens since
        the draft before. Interpolates between measured numbers of sequences; 0 for no draft."""
        if not depth or not num_sequences:
            return 0.0
        taken = Curve.through((count, curve.at(depth), 1.0) for count, curve in self.draft)
        read = self.per_context * depth * context + self.per_emitted * emitted
        return taken.at(num_sequences) + read


@dataclass(frozen=True, slots=True)
class Calibration:
    """Measured costs of `target_name` on `machine`; measuring took `seconds`. `scatter` is the
    median relative deviation of repeated times from their median. The target's weights take
    `memory_bytes` and a token of its context `kv_bytes_per_token`; 0 means unknown."""

    machine: str
    target_name: str
    target: PassCosts
    drafters: tuple[DrafterCosts, ...]
    overhead: float = 0.0
    host: float = 0.0
    rule: float = 0.0
    token: float = 0.0
    scatter: float = 0.0
    seconds: float = 0.0
    memory_bytes: int = 0
    kv_bytes_per_token: int = 0
    provenance: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def to_json(self) -> str:
        return json.dumps({"schema": SCHEMA, **asdict(self)}, sort_keys=True)

    @classmethod
    def of_json(cls, text: str) -> Calibration:
        """The calibration that `to_json` wrote. Raises ConfigError for any other text."""
        try:
            record = json.loads(text)
            if record.pop("schema") != SCHEMA:
                raise ConfigError("the calibration is of another version.", hint=_HINT)
            target, drafters = record.pop("target"), record.pop("drafters")
            target["rows"] = curve_of(target["rows"])
            found = tuple(_drafter(one) for one in drafters)
            return cls(target=PassCosts(**target), drafters=found, **record)
        except ConfigError:
            raise
        except KeyError as error:
            raise ConfigError(f"no calibration: it has no {error}.", hint=_HINT) from error
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"no calibration: {error}.", hint=_HINT) from error


def _drafter(record: dict[str, Any]) -> DrafterCosts:
    record["draft"] = tuple((int(count), curve_of(curve)) for count, curve in record["draft"])
    record["places"] = _counts(record["places"])
    record["requests"] = tuple(_counts(positions) for positions in record["requests"])
    record["laws"] = tuple(_stats(stats) for stats in record["laws"])
    record["chances"] = tuple(tuple(map(float, ranks)) for ranks in record["chances"])
    return DrafterCosts(**record)


def _stats(record: Mapping[str, Any]) -> RoundStats:
    kept = tuple(float(chance) for chance in record["kept"])
    return RoundStats(kept, float(record["drafting"]), float(record["num_drafted"]))


def _counts(positions: Sequence[dict[str, int]]) -> tuple[PlaceCount, ...]:
    return tuple(PlaceCount(**one) for one in positions)


# Number of remembered readings, and the tokens of a reading that is long enough to count.
NUM_READINGS = 31
LEAST_READ = 16


class Reading:
    """Time in which a drafter reads text, learnt from the traces of passes in their order."""

    def __init__(self) -> None:
        # Unread tokens; 0 for a sequence whose last round had a draft.
        self._unread: BySequence[int] = BySequence()
        self._seconds_a_token = RunningMedian(NUM_READINGS)

    def ended(self, traces: Sequence[RoundTrace]) -> int:
        """Count a pass. Returns the tokens that its drafter had to read first; 1 for a new text."""
        unread, total = self._unread, 0
        for trace in traces:
            seq_id = trace.seq_id
            if trace.num_drafted:
                total += unread.get(seq_id, 1)
                unread.note(seq_id, 0)
            else:
                fresh = trace.num_prompt_tokens + trace.num_emitted
                unread.note(seq_id, unread.get(seq_id, 0) + fresh)
        return total

    def add(self, seconds: float, num_tokens: int) -> None:
        """Count a reading of so many tokens."""
        if num_tokens >= LEAST_READ:
            self._seconds_a_token.add(max(seconds, 0.0) / num_tokens)

    def is_due(self, seq_id: int) -> bool:
        """True if the drafter would have to read tokens of this text."""
        return bool(self._unread.get(seq_id))

    def seconds(self, seq_ids: Iterable[int]) -> float:
        """Time of reading the rest of these texts; 0 before it was measured."""
        if not self._seconds_a_token:
            return 0.0
        num_tokens = sum(self._unread.get(seq_id, 0) for seq_id in seq_ids)
        return self._seconds_a_token.low * num_tokens


# Value of a folder's drafts as stated in it: acceptance and cost, measured once by its maker.
#
# Times are in plain passes of the target; a machine scales them but keeps their order. With E(K)
# from the probabilities of acceptance,
#
#     S(K) = E(K) / (d + (K - 1) e + 1 + K r)
#
# where d is the time of a first draft, e that of each draft after it, and r that of one more row in
# the verifying pass.
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
