"""The table of the project whose three engines ours are compared with, as it was published.

Its engines, models, machine and counters are other ones, so these figures stand beside ours and are
no goals. Its percentile 95 is of cumulative token time, its concurrency an arrival rate, and its
acceptance counts the target's own token when a draft is refused. Rows 9 and 10 of its table are the
same. None where nothing was printed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LABEL = "The source's own figures: other engines, models and hardware, other definitions"
# What the source calls our engines.
NAMES: Mapping[str, str] = {"single": "Baseline", "pd": "PD", "pdv": "PDV"}


@dataclass(frozen=True, slots=True)
class Published:
    """`cumulative_p95_ms` is what the source calls "Token P95 (ms)"."""

    level: int
    engine: str
    tokens_per_second: float
    cumulative_p95_ms: float
    acceptance: float | None = None


PUBLISHED: Sequence[Published] = (
    Published(0, "single", 9.05, 22850.2, 0.530),
    Published(1, "single", 13.03, 66023.5),
    Published(3, "single", 13.63, 68117.9),
    Published(5, "single", 14.22, 64692.1),
    Published(7, "single", 14.22, 59937.3),
    Published(9, "single", 14.35, 53469.2),
    Published(10, "single", 14.22, 55462.9),
    Published(0, "pd", 44.93, 15600.4, 0.448),
    Published(1, "pd", 44.61, 15550.6),
    Published(3, "pd", 44.39, 15740.7),
    Published(5, "pd", 45.98, 18019.9, 0.447),
    Published(7, "pd", 48.17, 17355.5),
    Published(9, "pd", 48.17, 17305.7),
    Published(10, "pd", 48.17, 17305.7),
    Published(0, "pdv", 44.39, 15489.6, 0.452),
    Published(1, "pdv", 44.55, 15579.5),
    Published(3, "pdv", 47.25, 15180.0),
    Published(5, "pdv", 51.27, 16670.6),
    Published(7, "pdv", 48.73, 17890.9),
    Published(9, "pdv", 48.73, 17822.6),
    Published(10, "pdv", 48.73, 17822.6),
)


def published(level: int, engine: str) -> Published | None:
    return next((p for p in PUBLISHED if (p.level, p.engine) == (level, engine)), None)


def published_gain(level: int) -> float | None:
    """Throughput of PDV over PD at `level`, by the source's own table."""
    ours, theirs = published(level, "pdv"), published(level, "pd")
    return ours.tokens_per_second / theirs.tokens_per_second if ours and theirs else None
