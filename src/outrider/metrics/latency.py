"""From arrivals to latencies.

An arrival is the time at which a token's id was on the host, in seconds since the request was
handed in. Reading an id waits for the device, so arrivals need no other synchronisation. All tokens
of a round arrive together; hence two views of the same times:

- `round_latencies` are the gaps between arrivals: the pauses that a reader sees.
- `token_latencies` give every token an equal share of its round's gap. There is one a token, with
  or without speculation, so their percentiles can be compared; they add up to the last arrival.

The first gap is the time to the first token: waiting, prefill and a whole round.
`inter_token_latencies` leave the tokens of that round out.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np


def round_latencies(arrivals: Sequence[float]) -> tuple[float, ...]:
    """Seconds from each arrival to the next, the first one counted from 0."""
    moments = [moment for moment, _ in groupby(arrivals)]
    return tuple(now - before for before, now in zip([0.0, *moments], moments, strict=False))


def token_latencies(arrivals: Sequence[float]) -> tuple[float, ...]:
    """Each token's share of the time since the arrival before its own: one entry a token."""
    sizes = [len(list(tokens)) for _, tokens in groupby(arrivals)]
    gaps = zip(round_latencies(arrivals), sizes, strict=True)
    return tuple(gap / size for gap, size in gaps for _ in range(size))


def inter_token_latencies(arrivals: Sequence[float]) -> tuple[float, ...]:
    """The token latencies after the first round: what writing cost once it had begun."""
    num_first = sum(moment == arrivals[0] for moment in arrivals)
    return token_latencies(arrivals)[num_first:]


def percentile(values: Sequence[float], percent: float) -> float:
    """As np.percentile computes it, between two values in proportion; 0 when there is no value."""
    return float(np.percentile(values, percent)) if values else 0.0
