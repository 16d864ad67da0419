"""Round traces in, numbers out. Nothing else in the project counts tokens, passes or seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from outrider.core.budget import RoundTrace
from outrider.metrics.acceptance import acceptance_histogram


@dataclass(frozen=True, slots=True)
class Stats:
    """What a request, or a whole run, cost and got.

    `seconds` has the keys prefill (passes that read prompt tokens), draft, verify, accept and
    total (wall clock), to the nanosecond. Entry j of `acceptance_histogram` counts the rounds that
    drafted and kept j tokens. `num_hits` and `num_misses` count the drafts that were ready before
    they were asked for, and that were not, where drafts are made ahead of verdicts. Invariants:
    emitted = accepted + rounds; accepted <= drafted.
    """

    drafter: str
    k: int
    num_rounds: int
    num_target_passes: int
    num_drafted: int
    num_accepted: int
    num_emitted: int
    seconds: Mapping[str, float]
    acceptance_histogram: tuple[int, ...] = ()
    num_hits: int = 0
    num_misses: int = 0

    @property
    def p_hit(self) -> float | None:
        """Share of the verdicts that were foreseen; None where nobody drafted ahead."""
        num = self.num_hits + self.num_misses
        return self.num_hits / num if num else None

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted; 0 when nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def tokens_per_round(self) -> float:
        """Mean emitted per round, the target's own token included; plain decoding is 1."""
        return self.num_emitted / self.num_rounds if self.num_rounds else 0.0

    @property
    def tokens_per_second(self) -> float:
        total = self.seconds["total"]
        return self.num_emitted / total if total > 0 else 0.0

    @property
    def draft_share(self) -> float:
        """Share of the wall clock spent drafting."""
        total = self.seconds["total"]
        return self.seconds["draft"] / total if total > 0 else 0.0

    def to_dict(self) -> dict[str, object]:
        return {
            "drafter": self.drafter,
            "k": self.k,
            "num_rounds": self.num_rounds,
            "num_target_passes": self.num_target_passes,
            "num_drafted": self.num_drafted,
            "num_accepted": self.num_accepted,
            "num_emitted": self.num_emitted,
            "seconds": dict(self.seconds),
            "acceptance_histogram": list(self.acceptance_histogram),
            "num_hits": self.num_hits,
            "num_misses": self.num_misses,
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Stats:
        """What `to_dict` wrote, exactly; other keys are ignored. Raises KeyError for the lack of a
        field that has no default."""
        values = {
            item.name: record[item.name]
            for item in fields(cls)
            if item.default is MISSING or item.name in record
        }
        values["seconds"] = dict(values["seconds"])
        values["acceptance_histogram"] = tuple(values.get("acceptance_histogram", ()))
        return cls(**values)


@dataclass(frozen=True, slots=True)
class PassShapes:
    """Who shared target passes. `mean_sequences` is over all passes; `equal_rows_fraction` is the
    share of passes with several sequences in which each brought as many rows as the others, None
    without such a pass. Rows are prompt tokens, or drafted tokens and the one they follow."""

    num_passes: int
    num_shared: int
    mean_sequences: float
    equal_rows_fraction: float | None


def pass_shapes(traces: Iterable[RoundTrace]) -> PassShapes:
    """`traces` are those of every request that took part, in any order."""
    rows: dict[int, list[int]] = {}
    for trace in traces:
        num_rows = trace.num_prompt_tokens + trace.num_drafted + (trace.num_emitted > 0)
        rows.setdefault(trace.pass_index, []).append(num_rows)
    shared = [group for group in rows.values() if len(group) > 1]
    equal = sum(len(set(group)) == 1 for group in shared)
    return PassShapes(
        num_passes=len(rows),
        num_shared=len(shared),
        mean_sequences=sum(map(len, rows.values())) / len(rows) if rows else 0.0,
        equal_rows_fraction=equal / len(shared) if shared else None,
    )


def summarise(traces: Iterable[RoundTrace], *, drafter: str, k: int, total_seconds: float) -> Stats:
    """Add up `traces`; a pass that several of them share is counted once."""
    records = list(traces)
    passes = {trace.pass_index: trace for trace in records}.values()
    reading = {trace.pass_index for trace in records if trace.num_prompt_tokens}
    verify = {trace.pass_index: trace.verify_seconds for trace in passes}
    rounds = [trace for trace in records if trace.num_emitted]
    seconds = {
        "prefill": sum(seconds for index, seconds in verify.items() if index in reading),
        "draft": sum(trace.draft_seconds for trace in passes),
        "verify": sum(seconds for index, seconds in verify.items() if index not in reading),
        "accept": sum(trace.accept_seconds for trace in passes),
        "total": total_seconds,
    }
    return Stats(
        drafter=drafter,
        k=k,
        num_rounds=len(rounds),
        num_target_passes=sum(trace.num_target_passes for trace in passes),
        num_drafted=sum(trace.num_drafted for trace in records),
        num_accepted=sum(trace.num_accepted for trace in records),
        num_emitted=sum(trace.num_emitted for trace in records),
        seconds={name: round(value, 9) for name, value in seconds.items()},
        acceptance_histogram=acceptance_histogram(records, k),
        num_hits=sum(trace.hit is True for trace in rounds),
        num_misses=sum(trace.hit is False for trace in rounds),
    )
