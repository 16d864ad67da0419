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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from outrider.core.errors import ConfigError
from outrider.estimate.cost import Curve, curve_of

SCHEMA = "outrider-calibration/1"
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
class RoundStats:
    """Outcomes of rounds. `kept` entry j is the probability that a round accepts more than j draft
    tokens. A share `drafting` of rounds drafts anything, and those draft `num_drafted` tokens.

    The probabilities that more than j tokens of drafts of up to K are accepted, for j from 0 to K -
    1, give the tokens of a round: E = 1 + the sum of these probabilities.
    """

    kept: tuple[float, ...]
    drafting: float
    num_drafted: float

    @property
    def tokens(self) -> float:
        """E, the target's own token included."""
        return 1 + math.fsum(self.kept)

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted."""
        drafted = self.drafting * self.num_drafted
        return (self.tokens - 1) / drafted if drafted else 0.0

    @property
    def variance(self) -> float:
        """Variance of the tokens of a round."""
        second = math.fsum((2 * depth + 1) * kept for depth, kept in enumerate(self.kept))
        return max(0.0, second - (self.tokens - 1) ** 2)

    def cut(self, depth: int) -> RoundStats:
        """Outcomes of rounds that may draft no deeper: a tree loses nodes in proportion."""
        if depth >= len(self.kept):
            return self
        drafted = self.num_drafted * depth / len(self.kept)
        return RoundStats(self.kept[:depth], self.drafting if depth else 0.0, drafted)


# Plain decoding.
PLAIN = RoundStats((), 0.0, 0.0)


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
