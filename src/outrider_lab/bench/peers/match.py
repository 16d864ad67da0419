"""The comparison itself, and the results folder that keeps it run by run.

The best variant of each is chosen, then all take turns: every piece of work is one prompt at one
temperature, which all contestants run before the next piece begins, in an order that rotates, so
drift of the machine falls on all alike; a ratio is taken over the same pieces of one session.

`runs.jsonl` is all that is written meanwhile, a line as soon as it is known. A line of kind
"session" says under what circumstances the lines after it were measured, one of kind "trials" has
seconds a token of the variants that were tried, one of kind "run" a contestant on one prompt. What
is known is neither tried nor run again; a prompt that some have not run is run by all.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from outrider.metrics import inter_token_latencies
from outrider_lab.bench.peers.contestants import Contestant, PeerWeights
from outrider_lab.bench.peers.process import Asked, Cpu, PeerError
from outrider_lab.measure.store import RecordError, Store, difference, entries, made

SCHEMA = "outrider-bench-peers/1"
FILE_NAME = "runs.jsonl"
# What peers print; it may be there before anything is measured.
LOGS = "logs"
# Fields of a run that are seconds in a row.
_MOMENTS = ("arrivals", "cpu")

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


@dataclass(slots=True)
class Journal:
    """What the folder holds, as it was found; new lines are appended to its `store`."""

    folder: Path
    found: Found = field(default_factory=Found)
    store: Store = field(init=False)

    def __post_init__(self) -> None:
        path = self.folder / FILE_NAME
        self.store = Store(path, SCHEMA, "session", self._take, allowed=(LOGS,))

    @classmethod
    def open(cls, folder: Path) -> Journal:
        """Read the folder, to go on in it. Raises ConfigError if it holds anything else, or lines
        of another version; MachineError if it cannot be read."""
        journal = cls(folder)
        journal.store.open()
        return journal

    @property
    def sessions(self) -> list[dict[str, Any]]:
        return self.store.heads

    def begin(self, circumstances: Mapping[str, object], facts: Mapping[str, object]) -> int:
        """Start a session; its number. Raises ConfigError if an earlier one had other
        `circumstances`."""
        ours = cast("dict[str, Any]", json.loads(json.dumps(circumstances)))
        self.store.check(lambda session: _difference(session["circumstances"], ours))
        return self.store.begin({"circumstances": ours, **facts})

    def keep_trials(self, times: Mapping[str, float], temperature: float) -> None:
        self.store.add("trials", [{"temperature": temperature, "times": dict(times)}])

    def keep_run(self, entry: Entry, place: Place, run: Run) -> None:
        """A run of the session that goes on."""
        who, temperature = entry
        about = {"contestant": who.to_dict(), "temperature": temperature, "prompt": place[1]}
        run_record = asdict(run)
        for name in _MOMENTS:
            run_record[name] = [round(seconds, 6) for seconds in run_record[name]]
        self.store.add("run", [about | run_record])

    def _take(self, kind: str, record: dict[str, Any]) -> None:
        if kind == "session":
            entries("circumstances", record.get("circumstances"))
        elif kind == "trials":
            stored = entries("times", record["times"])
            times = {name: float(seconds) for name, seconds in stored.items()}
            self.found.note_trials(times, float(record["temperature"]))
        elif kind == "run":
            del record["record"]
            who = made(Contestant, entries("contestant", record.pop("contestant")))
            entry = who, float(record.pop("temperature"))
            place = len(self.sessions), int(record.pop("prompt"))
            record["ids"] = tuple(map(int, record["ids"]))
            for name in _MOMENTS:
                record[name] = tuple(map(float, record[name]))
            self.found.runs.setdefault(entry, {})[place] = made(Run, record)
        else:
            raise RecordError(f"record is {kind!r:.40}")


def _difference(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str | None:
    """A later session may ask further peers, whose versions are then new."""
    fixed = ({name: side[name] for name in side if name != "versions"} for side in (theirs, ours))
    versions = (side.get("versions", {}) for side in (theirs, ours))
    return difference(*fixed) or difference(*versions, words="{} of version", of_both_only=True)


# A variant this much slower than the best of its group is not tried on further prompts.
HOPELESS = 1.25
SETTLE_SECONDS = 0.03
_NUM_WARM = 16


@dataclass(frozen=True, slots=True)
class Prompt:
    """As everybody gets it: as token ids, or as text."""

    ids: tuple[int, ...]
    text: str


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
    """Loads, chooses and races; what the journal found fills as it goes, and is written down."""

    def __init__(self, setting: Setting, journal: Journal) -> None:
        self.setting, self.found, self._journal = setting, journal.found, journal
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
            names = ", ".join(f"{who.name} at T={t}" for who, t in chosen)
            self.setting.tell(f"{' '.join(group)}: {names or 'refused'}")
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
        self._journal.keep_run(entry, place, run)

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
        self._journal.keep_trials(times, temperature)
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
