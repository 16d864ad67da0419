"""The comparison itself: choose each one's best variant, then let all of them take turns.

Every piece of work is one prompt at one temperature. All contestants run it before the next piece
begins, in an order that rotates, so drift of the machine falls on all alike; a ratio is taken over
the same pieces.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from peers.cells import Contestant, Weights
from peers.process import Cpu, Peer, PeerError

# A variant this much slower than the best of its group is not tried on further prompts.
HOPELESS = 1.25
SETTLE_SECONDS = 0.03
Entry = tuple[Contestant, float]


@dataclass(frozen=True, slots=True)
class Setting:
    """What all contestants share. A peer in `seldom` takes part in every so many-th prompt only:
    one that is far behind needs fewer pairs, and would take most of the time."""

    peers: Mapping[str, Peer]
    weights: Weights
    threads: int
    max_tokens: int
    tell: Callable[[str], None]
    seldom: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True)
class Run:
    """One contestant on one piece of work."""

    ids: tuple[int, ...]
    seconds: float
    drafted: int = 0
    accepted: int = 0

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / max(len(self.ids), 1)


@dataclass(slots=True)
class Found:
    """`trials` are seconds a token of the variants that were tried to the end, `behind` names those
    that were too slow to go on with; `refused` says who could not,
    and why; `notes` are the peers' own; `runs` go by the number of the prompt."""

    trials: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    behind: list[str] = field(default_factory=list[str])
    refused: dict[str, str] = field(default_factory=dict[str, str])
    notes: list[str] = field(default_factory=list[str])
    cpu: Cpu = field(default_factory=Cpu)
    runs: dict[Entry, dict[int, Run]] = field(default_factory=dict[Entry, dict[int, Run]])


class Match:
    """Loads, chooses and races; `found` fills as it goes."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.found = Found()
        self._loaded: set[Contestant] = set()

    def choose(
        self,
        contestants: Iterable[Contestant],
        prompts: Sequence[Sequence[int]],
        temperatures: Sequence[float],
        max_tokens: int,
    ) -> list[Entry]:
        """The best variant of each group at each temperature, on `prompts`; groups of which
        `found.trials` knows the times already are not tried again."""
        groups: dict[tuple[str, str, str], list[Contestant]] = {}
        for contestant in contestants:
            groups.setdefault(contestant.group, []).append(contestant)
        entries: list[Entry] = []
        for group, members in groups.items():
            known = {t: self._known(members, t) for t in temperatures}
            able = [] if all(known.values()) else [who for who in members if self._load(who)]
            best = {t: known[t] or self._best(able, prompts, t, max_tokens) for t in temperatures}
            chosen = [(who, t) for t, who in best.items() if who is not None]
            for member in able:
                if member not in {who for who, _ in chosen}:
                    self._drop(member)
            entries += chosen
            told = ", ".join(f"{who.name} at T={t}" for who, t in chosen)
            self.setting.tell(f"{' '.join(group)}: {told or 'refused'}")
        return entries

    def _known(self, members: Sequence[Contestant], temperature: float) -> Contestant | None:
        times = {who: self.found.trials.get(who.name, {}) for who in members}
        tried = {who: t[str(temperature)] for who, t in times.items() if str(temperature) in t}
        return min(tried, key=lambda who: tried[who], default=None)

    def race(
        self, entries: Sequence[Entry], work: Sequence[Sequence[int]], deadline: float
    ) -> None:
        """Time all `entries` on each piece of `work`, until it or the time ends; one at least."""
        able = {c for c in dict.fromkeys(c for c, _ in entries) if self._load(c)}
        entries = [e for e in entries if e[0] in able and self._warm(e, work[0])]
        for turn, ids in enumerate(work):
            for place in range(len(entries)):
                entry = entries[(turn + place) % len(entries)]
                if turn % self.setting.seldom.get(entry[0].peer, 1) == 0:
                    time.sleep(SETTLE_SECONDS)
                    self._timed(entry, ids, turn)
            entries = [e for e in entries if e in self.found.runs]
            self.setting.tell(f"{turn + 1} of {len(work)} prompts")
            if time.monotonic() > deadline or not entries:
                return

    def _warm(self, entry: Entry, ids: Sequence[int]) -> bool:
        try:
            self._run(entry, ids, seed=0, max_tokens=16)
        except PeerError as error:
            self.found.refused[entry[0].name] = str(error)
            return False
        self.found.runs[entry] = {}
        return True

    def _timed(self, entry: Entry, ids: Sequence[int], seed: int) -> None:
        """One run that counts; whoever fails is out, with all of its runs."""
        if entry not in self.found.runs:
            return
        self.found.cpu.start()
        try:
            run = self._run(entry, ids, seed=seed, max_tokens=self.setting.max_tokens)
        except PeerError as error:
            self.found.refused[entry[0].name] = str(error)
            del self.found.runs[entry]
            return
        self.found.cpu.stop(self.setting.peers[entry[0].peer].pid)
        self.found.runs[entry][seed] = run

    def _best(
        self,
        members: Sequence[Contestant],
        prompts: Sequence[Sequence[int]],
        temperature: float,
        max_tokens: int,
    ) -> Contestant | None:
        """They take turns on every prompt; who is far behind is not asked again."""
        took: dict[Contestant, list[float]] = {member: [] for member in members}
        for seed, ids in enumerate(prompts):
            for member in list(took):
                try:
                    if not seed:
                        self._run((member, temperature), ids, seed=0, max_tokens=8)
                    run = self._run((member, temperature), ids, seed=seed, max_tokens=max_tokens)
                except PeerError as error:
                    self.found.refused[f"{member.name} at {temperature}"] = str(error)
                    del took[member]
                    continue
                took[member].append(run.seconds_per_token)
            limit = HOPELESS * min(map(sum, took.values()), default=0.0)
            behind = [who for who, times in took.items() if sum(times) > limit]
            self.found.behind += [f"{who.name} at T={temperature}" for who in behind]
            took = {who: times for who, times in took.items() if who not in behind}
        for who, times in took.items():
            trials = self.found.trials.setdefault(who.name, {})
            trials[str(temperature)] = round(sum(times) / len(times), 6)
        return min(took, key=lambda who: sum(took[who]), default=None)

    def _drop(self, who: Contestant) -> None:
        self._loaded.discard(who)
        try:
            self.setting.peers[who.peer].ask("drop", name=who.name)
        except PeerError as error:
            self.found.refused[who.name] = str(error)

    def _load(self, who: Contestant) -> bool:
        if who in self._loaded:
            return True
        cell = who.cell(self.setting.weights, self.setting.threads)
        try:
            notes = self.setting.peers[who.peer].ask("load", cell=cell)["notes"]
        except PeerError as error:
            self.found.refused[who.name] = str(error)
            return False
        self._loaded.add(who)
        self.found.notes += [f"{who.name}: {note}" for note in notes]
        return True

    def _run(self, entry: Entry, ids: Sequence[int], *, seed: int, max_tokens: int) -> Run:
        who, temperature = entry
        answer: dict[str, Any] = self.setting.peers[who.peer].ask(
            "run",
            name=who.name,
            ids=list(ids),
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
        )
        counts = {key: answer[key] for key in ("drafted", "accepted") if key in answer}
        return Run(tuple(answer["ids"]), answer["seconds"], **counts)
