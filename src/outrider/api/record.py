"""From the JSON record of a result back to its parts.

Fields that have a default may be missing, so a record outlives the versions that add fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from outrider.core.budget import RoundTrace
from outrider.core.sampling import TokenLogprobs
from outrider.metrics.profile import MemoryTrace
from outrider.metrics.summary import Stats


def read_fields(record: Mapping[str, Any]) -> dict[str, Any]:
    """Every field of a GenerationResult, typed as it was. Raises KeyError, TypeError or
    ValueError for what `GenerationResult.to_dict` would not write."""
    return {
        "text": record["text"],
        "token_ids": tuple(record["token_ids"]),
        "finish_reason": record["finish_reason"],
        "stats": Stats.from_dict(record["stats"]),
        "notes": tuple(record.get("notes", ())),
        "rounds": tuple(_trace(part) for part in record.get("rounds", ())),
        "logprobs": tuple(_logprobs(part) for part in record.get("logprobs", ())),
        "exact": record.get("exact", True),
        "token_seconds": tuple(record.get("token_seconds", ())),
        "peak_memory_bytes": record.get("peak_memory_bytes"),
        "memory": _memory(record.get("memory")),
    }


def _trace(record: Mapping[str, Any]) -> RoundTrace:
    names = [item.name for item in fields(RoundTrace)]
    return RoundTrace(**{name: record[name] for name in names if name in record})


def _logprobs(record: Mapping[str, Any]) -> TokenLogprobs:
    top = tuple((token, logprob) for token, logprob in record["top"])
    return TokenLogprobs(record["token_id"], record["logprob"], top)


def _memory(record: Mapping[str, Any] | None) -> MemoryTrace | None:
    if record is None:
        return None
    return MemoryTrace(record["load_bytes"], tuple(record["pass_bytes"]))
