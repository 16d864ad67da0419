"""What a user gets: events while text is written, and one result at its end."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from outrider.core.budget import RoundTrace
from outrider.core.draft import Origin
from outrider.core.sequence import FinishReason
from outrider.metrics.summary import Stats


@dataclass(frozen=True, slots=True)
class TextEvent:
    """What one round wrote: the ids it emitted, where each came from, and each one's text.

    A piece is empty while its character is incomplete or may belong to a stop string; the text
    then comes with a later token's piece.
    """

    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]
    pieces: tuple[str, ...]

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """A finished request. `token_ids` has every emitted id, a stop token included; `text` has
    neither stop token nor stop string. `finish_reason` is None if the reader left early. `rounds`
    holds every trace when the engine was asked to profile."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stats: Stats
    notes: tuple[str, ...] = ()
    rounds: tuple[RoundTrace, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """Plain values, ready for JSON; `notes` and `rounds` only when there are any."""
        record: dict[str, object] = {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
            "stats": self.stats.to_dict(),
        }
        if self.notes:
            record["notes"] = list(self.notes)
        if self.rounds:
            record["rounds"] = [asdict(trace) for trace in self.rounds]
        return record

    def summary(self) -> str:
        """The verdict line."""
        stats = self.stats
        parts = [f"{len(self.token_ids)} tokens", f"{stats.tokens_per_second:.0f} tok/s"]
        if stats.num_drafted:
            parts += [
                f"{stats.num_accepted} of {stats.num_drafted} drafts accepted",
                f"{stats.tokens_per_round:.2f} tokens a round",
                f"drafting {100 * stats.draft_share:.0f} % of the time",
            ]
        return " · ".join(parts)
