"""The comparison itself: choose each one's best variant, then let all of them take turns.

Every piece of work is one prompt at one temperature. All contestants run it before the next piece
begins, in an order that rotates, so drift of the machine falls on all alike; a ratio is taken over
the same pieces of one session. What is known already, from a journal, is neither tried nor run
again; a prompt that some have not run is run by all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from outrider.bench.peers.contestants import Contestant, PeerWeights
from outrider.bench.peers.process import Asked, Cpu, PeerError
from outrider.bench.peers.results import Entry, Found, Place, Run

# A variant this much slower than the best of its group is not tried on further prompts.
HOPELESS = 1.25
SETTLE_SECONDS = 0.03
_NUM_WARM = 16


@dataclass(frozen=True, slots=True)
class Prompt:
    """As everybody gets it: as token ids, or as text."""

    ids: tuple[int, ...]
    text: str


class Keeper(Protocol):
    """Writes down at once what was measured (journal.py)."""

    def keep_trials(self, times: Mapping[str, float], temperature: float) -> None: ...
    def keep_run(self, entry: Entry, place: Place, run: Run) -> None: ...


@dataclass(frozen=True, slots=True)
class Setting:
    """What all contestants share; `session` is its number. A peer in `seldom` takes part in every
    so many-th prompt only: one that is far behind needs fewer pairs, and would take most of the
    time."""

    peers: Mapping[str, Asked]
    weights: PeerWeights
    session: int
    threads: int
    max_tokens: int
    tell: Callable[[str], None]
    seldom: Mapping[str, int] = field(default_factory=dict[str, int])


class Match:
    """Loads, chooses and races; `found` fills as it goes, and `keeper` hears of it."""

    def __init__(self, setting: Setting, found: Found, keeper: Keeper) -> None:
        self.setting, self.found = setting, found
        self._keeper = keeper
        self._loaded: set[Contestant] = set()
        self._out: set[Entry] = set()
        self._cpu = Cpu()

    def choose(
        self,
        contestants: Iterable[Contestant],
        prompts: Sequence[Prompt],
        temperatures: Sequence[float],
        *,
        max_tokens: int,
        late: Callable[[], bool],
    ) -> list[Entry]:
        """The best variant of each group at each temperature, on `prompts`; groups of which
        `found.trials` knows the times already, and those of one, are not tried. Once it is `late`
        no further group is."""
        groups: dict[tuple[str, str, str], list[Contestant]] = {}
        for contestant in contestants:
            groups.setdefault(contestant.group, []).append(contestant)
        entries: list[Entry] = []
        for group, members in groups.items():
            known = {t: self._known(members, t) for t in temperatures}
            if late() and not all(known.values()):
                self.found.refused[" ".join(group)] = "the minutes were over before it was tried"
                continue
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

    def race(
        self,
        entries: Sequence[Entry],
        work: Sequence[Prompt],
        *,
        late: Callable[[], bool],
        tick: Callable[[], None],
    ) -> None:
        """Time all `entries` on each piece of `work`, until it ends or it is `late`; one at least.
        `tick` is called after each."""
        able = {c for c in dict.fromkeys(c for c, _ in entries) if self._load(c)}
        # The last prompt is the one that is least likely to count, should a server remember it.
        entries = [e for e in entries if e[0] in able and self._warm(e, work[-1])]
        for turn, prompt in enumerate(work):
            due = [e for e in entries if turn % self.setting.seldom.get(e[0].peer, 1) == 0]
            if not self.found.is_done(due, turn):
                for place in range(len(due)):
                    self._timed(due[(turn + place) % len(due)], prompt, turn)
            entries = [e for e in entries if e not in self._out]
            tick()
            if late() or not entries:
                return

    def _known(self, members: Sequence[Contestant], temperature: float) -> Contestant | None:
        if len(members) == 1:
            return members[0]
        times = {who: self.found.trials.get(who.name, {}) for who in members}
        tried = {who: t[str(temperature)] for who, t in times.items() if str(temperature) in t}
        return min(tried, key=lambda who: tried[who], default=None)

    def _warm(self, entry: Entry, prompt: Prompt) -> bool:
        try:
            self._run(entry, prompt, seed=0, max_tokens=_NUM_WARM)
        except PeerError as error:
            self._end(entry, error)
        return entry not in self._out

    def _timed(self, entry: Entry, prompt: Prompt, turn: int) -> None:
        """One run that counts. Whoever fails is not asked again; what it did before stays."""
        if entry in self._out:
            return
        time.sleep(SETTLE_SECONDS)
        self._cpu.start()
        try:
            run = self._run(entry, prompt, seed=turn, max_tokens=self.setting.max_tokens)
        except PeerError as error:
            self._end(entry, error)
            return
        # A server's work is not that of its client here; it may be another machine's.
        if not entry[0].url:
            run = replace(run, cpu=self._cpu.stop(self.setting.peers[entry[0].peer].pid))
        place = self.setting.session, turn
        self.found.runs.setdefault(entry, {})[place] = run
        self._keeper.keep_run(entry, place, run)

    def _end(self, entry: Entry, error: PeerError) -> None:
        self._out.add(entry)
        self.found.refused[f"{entry[0].name} at T={entry[1]}"] = str(error)

    def _best(
        self,
        members: Sequence[Contestant],
        prompts: Sequence[Prompt],
        temperature: float,
        max_tokens: int,
    ) -> Contestant | None:
        """They take turns on every prompt; who is far behind is not asked again."""
        took: dict[Contestant, list[float]] = {member: [] for member in members}
        for seed, prompt in enumerate(prompts):
            for member in list(took):
                entry = member, temperature
                try:
                    if not seed:
                        self._run(entry, prompt, seed=0, max_tokens=min(8, max_tokens))
                    run = self._run(entry, prompt, seed=seed, max_tokens=max_tokens)
                except PeerError as error:
                    self._end(entry, error)
                    del took[member]
                    continue
                took[member].append(run.seconds_per_token)
            took = self._near(took, temperature)
        times = {who.name: round(sum(t) / len(t), 6) for who, t in took.items()}
        self.found.note_trials(times, temperature)
        self._keeper.keep_trials(times, temperature)
        return min(took, key=lambda who: sum(took[who]), default=None)

    def _near(
        self, took: dict[Contestant, list[float]], temperature: float
    ) -> dict[Contestant, list[float]]:
        """Those that may still be the best."""
        limit = HOPELESS * min(map(sum, took.values()), default=0.0)
        near = {who: times for who, times in took.items() if sum(times) <= limit}
        self.found.behind += [f"{who.name} at T={temperature}" for who in took if who not in near]
        return near

    def _drop(self, who: Contestant) -> None:
        self._loaded.discard(who)
        try:
            self.setting.peers[who.peer].ask("drop", name=who.name)
        except PeerError as error:
            self.found.refused[who.name] = str(error)

    def _load(self, who: Contestant) -> bool:
        if who in self._loaded:
            return True
        try:
            reason = who.why_not(self.setting.weights)
            if reason is not None:
                raise PeerError(reason)
            setup = who.setup(self.setting.weights, self.setting.threads)
            notes = self.setting.peers[who.peer].ask("load", setup=setup)["notes"]
        except PeerError as error:
            self.found.refused[who.name] = str(error)
            return False
        self._loaded.add(who)
        self.found.notes += [f"{who.name}: {note}" for note in notes]
        return True

    def _run(self, entry: Entry, prompt: Prompt, *, seed: int, max_tokens: int) -> Run:
        who, temperature = entry
        answer: dict[str, Any] = self.setting.peers[who.peer].ask(
            "run",
            name=who.name,
            ids=list(prompt.ids),
            text=prompt.text,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
        )
        counts = {key: answer[key] for key in ("drafted", "accepted", "usage") if key in answer}
        arrivals = tuple(answer.get("arrivals", ()))
        return Run(ids=tuple(answer["ids"]), seconds=answer["seconds"], arrivals=arrivals, **counts)
