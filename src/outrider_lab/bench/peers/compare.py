"""One comparison from its plan to its record: make weights, start peers, choose, race, sum up.

Peers that are there are started and closed here, whatever happens. Every run is in the journal at
once, so an interrupt loses nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from outrider.api.tokenizer import Tokenizer
from outrider.core.errors import CheckpointError, MachineError
from outrider.models.families import read_config
from outrider.models.loading import resolve
from outrider.plugins.measure.turns import provenance
from outrider_lab.bench.peers.contestants import (
    FORMS,
    GGUF,
    OURS,
    Contestant,
    PeerWeights,
    Served,
    command_of,
    how_to_get,
    line_up,
)
from outrider_lab.bench.peers.match import LOGS, Journal, Match, Prompt, Setting
from outrider_lab.bench.peers.process import Peer, PeerError
from outrider_lab.bench.peers.report import summary
from outrider_lab.bench.workload import WORKLOADS, fingerprint, load_prompts
from outrider_lab.measure.machine import in_turns, machine, weights_digest
from outrider_lab.models.gguf_export import GgufOptions, export
from outrider_lab.models.inflate import shape_called
from outrider_lab.models.inflate_files import write_inflated

TIERS = ("a", "b")
SHAPE = "0.4b"
# The nearest of llama.cpp's own rules; prompts travel as ids, so no rule is ever used.
PRE_TOKENIZER = "gpt-2"
# Prompts and tokens of each on which variants are chosen.
NUM_TRIALS, TRIAL_TOKENS = 2, 48


@dataclass(frozen=True, slots=True)
class WeightsFolder:
    """Where files that are made are kept, under names that tell their weights, so that a later run
    finds them; and who is told of it."""

    folder: Path
    tell: Callable[[str], None]


def tier_folders(tier: str, weights: WeightsFolder) -> tuple[Path, Path]:
    """Target and draft of a tier, made if need be: a is the embedded pair, b its target at the cost
    of 0.4 billion parameters, which writes the same text, with the same draft."""
    target, draft = resolve("outrider/embedded"), resolve("outrider/embedded-draft")
    return (_inflated(target, weights) if tier == "b" else target), draft


def weights_of(
    target: Path, draft: Path | None, forms: Iterable[str], weights: WeightsFolder, *, gguf: bool
) -> PeerWeights:
    """What contestants of these formats load; GGUF files only where `gguf` asks for them. Raises
    CheckpointError if the target is no model."""
    config = read_config(target)
    names = tuple(name for form in forms for name in FORMS[form]) if gguf else ()
    files: dict[Path, dict[str, Path]] = {target: {}, **({draft: {}} if draft else {})}
    refused: dict[str, str] = {}
    for name in names:
        for source, found in files.items():
            try:
                found[name] = _file(source, name, weights)
            except (CheckpointError, MachineError) as error:
                refused[name] = f"no GGUF file of {source.name}: {error}"
    return PeerWeights(
        target=target,
        draft=draft,
        vocab_size=config.vocab_size,
        stop_ids=tuple(config.stop_ids),
        target_gguf=files[target],
        draft_gguf=files[draft] if draft else {},
        no_gguf=refused,
    )


def digests(weights: PeerWeights) -> dict[str, str]:
    """Fingerprints of the checkpoints, by their part."""
    draft = {"draft": weights_digest(weights.draft)} if weights.draft else {}
    return {"target": weights_digest(weights.target), **draft}


def _inflated(source: Path, weights: WeightsFolder) -> Path:
    place = weights.folder / f"inflated-{SHAPE}-{weights_digest(source)}"
    if not (place / "config.json").exists():
        # Half a folder of a run that was stopped is in the way.
        for left in place.glob("*"):
            left.unlink()
        weights.tell(f"inflating to {SHAPE}, once")
        for _ in write_inflated(source, shape_called(SHAPE), place, torch.bfloat16):
            pass
    return place


def _file(source: Path, form: str, weights: WeightsFolder) -> Path:
    try:
        weights.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MachineError(
            f"{weights.folder} cannot be made: {error.strerror or error}.",
            hint="name another folder with --peers-folder",
        ) from None
    if form == GGUF:
        if source.suffix != ".gguf":
            raise CheckpointError("it is a folder.", hint="name a file with --target FILE.gguf")
        return source
    path = weights.folder / f"{source.name}-{weights_digest(source)}-{form}.gguf"
    if not path.exists():
        weights.tell(f"writing {path.name}, once")
        for _ in export(source, path, GgufOptions(form=form, pre_tokenizer=PRE_TOKENIZER)):
            pass
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is compared: `names` are peers that are started, `servers` those that run. `num_prompts`
    are of each workload at most; the race ends after the prompt in which `minutes` are over.
    `peers_folder` is where scripts/peers builds."""

    names: Sequence[str]
    servers: Sequence[Served]
    forms: Sequence[str]
    drafters: Sequence[str]
    temperatures: Sequence[float]
    num_prompts: int
    max_tokens: int
    minutes: float
    threads: int
    peers_folder: Path
    seldom: Mapping[str, int] = field(default_factory=dict[str, int])
    trials: Mapping[str, Mapping[str, float]] = field(
        default_factory=dict[str, Mapping[str, float]]
    )


@dataclass(frozen=True, slots=True)
class Watch:
    """Who is told what: `tell` gets sentences, `begin` the number of prompts, and `tick` is called
    after each of them."""

    tell: Callable[[str], None]
    begin: Callable[[int], None]
    tick: Callable[[], None]


@dataclass(slots=True)
class Comparison:
    """`run` fills the journal, also where it does not come to its end; `record` is then what was
    found."""

    plan: Plan
    weights: PeerWeights
    journal: Journal
    watch: Watch
    missing: dict[str, str] = field(default_factory=dict[str, str])
    versions: dict[str, Any] = field(default_factory=dict[str, Any])

    def run(self) -> None:
        """Raises ConfigError if the journal was kept under other circumstances."""
        plan = self.plan
        deadline = time.monotonic() + 60 * plan.minutes

        def late() -> bool:
            return time.monotonic() > deadline

        trials, work = prompts(self.weights, plan.num_prompts)
        with self._started() as peers:
            session = self.journal.begin(
                circumstances(self.weights, plan, self.versions),
                {"provenance": provenance(), "plan": _told(plan)},
            )
            for name, times in plan.trials.items():
                self.journal.found.trials.setdefault(name, dict(times))
            setting = Setting(
                peers=peers,
                weights=self.weights,
                session=session,
                threads=plan.threads,
                max_tokens=plan.max_tokens,
                tell=self.watch.tell,
                seldom=plan.seldom,
            )
            match = Match(setting, self.journal)
            entries = match.choose(
                self._contestants(peers),
                trials,
                plan.temperatures,
                max_tokens=min(TRIAL_TOKENS, plan.max_tokens),
                late=late,
            )
            if entries:
                self.watch.begin(len(work))
                match.race(entries, work, late=late, tick=self.watch.tick)

    def record(self) -> dict[str, Any]:
        """Everything that is known, earlier sessions included."""
        return {
            "versions": self.versions,
            "sessions": self.journal.sessions,
            "order": "one prompt, all contestants and temperatures, in an order that rotates",
            "missing": self.missing,
            **summary(self.journal.found, self.weights.stop_ids),
        }

    def _contestants(self, peers: Mapping[str, Peer]) -> list[Contestant]:
        plan = self.plan
        servers = [server for server in plan.servers if server.peer in peers]
        own = [name for name in (OURS, *plan.names) if name in peers]
        return line_up(own, plan.forms, plan.drafters, servers)

    @contextmanager
    def _started(self) -> Generator[dict[str, Peer]]:
        """The peers that are there and answer."""
        peers: dict[str, Peer] = {}
        hurry = True
        try:
            for name in dict.fromkeys(
                (OURS, *self.plan.names, *(s.peer for s in self.plan.servers))
            ):
                self._start(name, peers)
            yield peers
            hurry = False
        finally:
            for peer in peers.values():
                peer.close(hurry=hurry)

    def _start(self, name: str, peers: dict[str, Peer]) -> None:
        folder = self.plan.peers_folder
        command = command_of(name, folder, self.weights.target)
        if command is None:
            self.missing[name] = how_to_get(name, folder)
            self.watch.tell(f"{name} is missing; get it with: {self.missing[name]}")
            return
        peers[name] = Peer(name, command, self.journal.folder / LOGS / f"{name}.log")
        try:
            self.versions[name] = peers[name].ask("about")["versions"]
        except PeerError as error:
            peers.pop(name).close(hurry=True)
            self.journal.found.refused[name] = f"does not start: {error}"


def prompts(weights: PeerWeights, limit: int) -> tuple[list[Prompt], list[Prompt]]:
    """Those for the choice of variants (the last of each workload) and those that count, the
    workloads in turns."""
    tokenizer = Tokenizer.load(weights.target)
    texts = [load_prompts(name) for name in WORKLOADS]
    trials = [found[-1] for found in texts][:NUM_TRIALS]
    work = in_turns([found[:-1][:limit] for found in texts])
    return _encoded(tokenizer, trials), _encoded(tokenizer, work)


def circumstances(
    weights: PeerWeights, plan: Plan, versions: Mapping[str, Any]
) -> dict[str, object]:
    """What must not change among the sessions of one folder."""
    return {
        "machine": machine("cpu"),
        "weights": digests(weights),
        "prompts": fingerprint([text for name in WORKLOADS for text in load_prompts(name)]),
        "max_tokens": plan.max_tokens,
        "threads": plan.threads,
        "versions": dict(versions),
    }


def _encoded(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Prompt]:
    found = tokenizer.encode_batch(texts)
    return [Prompt(tuple(ids), text) for ids, text in zip(found, texts, strict=True)]


def _told(plan: Plan) -> dict[str, object]:
    names = ("drafters", "temperatures", "minutes", "num_prompts", "seldom")
    return {"formats": plan.forms, **{name: getattr(plan, name) for name in names}}
