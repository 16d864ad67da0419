"""What a match comes to, run by run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from outrider.bench.peers.contestants import Contestant
from outrider.metrics.summary import inter_token_latencies

# A contestant at a temperature.
Entry = tuple[Contestant, float]
# A session and the number of a prompt. Runs are compared within a session: a moment apart.
Place = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One contestant on one prompt. `arrivals` are seconds since the request, one a token, or none
    where a peer does not tell; `usage` is how many tokens a server counted itself. `cpu` are CPU
    seconds meanwhile (process.py), or none where they are not known."""

    ids: tuple[int, ...]
    seconds: float
    drafted: int = 0
    accepted: int = 0
    arrivals: tuple[float, ...] = ()
    usage: int | None = None
    cpu: tuple[float, ...] = ()

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / max(len(self.ids), 1)

    @property
    def first_seconds(self) -> float | None:
        """To the first token."""
        return self.arrivals[0] if self.arrivals else None

    @property
    def later_seconds(self) -> tuple[float, ...]:
        """Each later token's share of the time since the arrival before its own."""
        return inter_token_latencies(self.arrivals) if self.arrivals else ()


@dataclass(slots=True)
class Found:
    """`trials` are seconds a token of the variants that were tried to the end, `behind` names those
    that were too slow to go on with; `refused` says who could not, and why; `notes` are the peers'
    own; `runs` go by session and prompt."""

    trials: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    behind: list[str] = field(default_factory=list[str])
    refused: dict[str, str] = field(default_factory=dict[str, str])
    notes: list[str] = field(default_factory=list[str])
    runs: dict[Entry, dict[Place, Run]] = field(default_factory=dict[Entry, dict[Place, Run]])

    def note_trials(self, times: dict[str, float], temperature: float) -> None:
        """Seconds a token of variants that were tried at `temperature`."""
        for name, seconds in times.items():
            self.trials.setdefault(name, {})[str(temperature)] = seconds

    def is_done(self, entries: Iterable[Entry], turn: int) -> bool:
        """Whether all `entries` have run this prompt in one and the same session."""
        sessions = [
            {session for session, prompt in self.runs.get(entry, {}) if prompt == turn}
            for entry in entries
        ]
        return bool(sessions) and bool(set[int].intersection(*sessions))
