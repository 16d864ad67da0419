"""The contestants of a comparison of drafters: the words that name them, and their engines.

A contestant is a drafter, what it drafts from (a draft model, a folder of heads, or nothing but the
text and the target), its K, and the nodes of its trees; 0 nodes are chains. A word says so as

    NAME[=DRAFT][:K][+NODES]        ngram   model=DRAFT:8   eagle=heads/eagle+16

Each has an engine and models of its own, so that all can take turns: a target takes its memory once
a contestant.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from outrider.api.callers import Prompt
from outrider.api.llm import LLM
from outrider.api.result import GenerationResult
from outrider.core.config import EngineConfig
from outrider.core.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    OutriderError,
    did_you_mean,
)
from outrider.core.params import SamplingParams
from outrider.core.plugins import AUTO, KINDS, DrafterKind, every_drafter
from outrider.core.plugins import OFF as NONE
from outrider.models.heads import HeadKind, find_heads, has_own_mtp, kind_of, name_of
from outrider.models.loading import resolve
from outrider.pairs.catalog import draft_of
from outrider_lab.measure.machine import facts_of, weights_digest

OFF, ALL = "off", "all"
# A chain and a tree of one drafter differ in this only; 16 nodes and the root are 17 rows.
DEFAULT_NODES = 16

_WORD = re.compile(r"(?P<drafter>[\w-]+)(=(?P<draft>.+?))?(:(?P<k>\d+))?(\+(?P<nodes>\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """`name` is what results call it. `k` None is the setting's own, or for a tree as deep as its
    nodes allow: it is a chain where the text is sure."""

    name: str
    drafter: str
    draft: str | None = None
    k: int | None = None
    tree_nodes: int = 0

    def config(self, base: EngineConfig) -> EngineConfig:
        """`base` with this drafter. Rounds are recorded, for all contestants alike. Raises
        ConfigError for a K that cannot be."""
        k = max(base.most_k, self.tree_nodes - 1) if self.k is None else self.k
        return replace(base, drafter=self.drafter, k=k, tree_nodes=self.tree_nodes, profile=True)


PLAIN = Contestant(name=OFF, drafter=NONE)


def known(drafter: str) -> DrafterKind:
    """One that nobody knows is taken to need nothing; loading says what it lacks."""
    return next((kind for kind in every_drafter() if kind.name == drafter), KINDS[NONE])


def available() -> tuple[str, ...]:
    """Every drafter that drafts."""
    return tuple(kind.name for kind in every_drafter() if kind.drafts)


def is_common(drafter: str) -> bool:
    """Whether it takes part where it is not named: one that needs the guess of a caller, or a draft
    model of another vocabulary, does not."""
    return not known(drafter).must_have


def contestants_named(words: str, *, auto: bool = False) -> list[Contestant]:
    """Plain decoding, then what `words` name, each once; `all` is every common drafter, and its
    trees where it can branch. With `auto` they may name what drafts where nobody says. Raises
    ConfigError."""
    found = [PLAIN]
    for word in (word.strip() for word in words.split(",")):
        if word == ALL:
            found += _common()
        elif word and word != OFF:
            found.append(_read(word, auto=auto))
    if len(found) == 1:
        raise ConfigError(
            "--drafters names none.", hint=f"--drafters {ALL}, or some of {', '.join(available())}"
        )
    return list({contestant.name: contestant for contestant in found}.values())


def _common() -> list[Contestant]:
    found: list[Contestant] = []
    for name in filter(is_common, available()):
        found.append(Contestant(name=name, drafter=name))
        if known(name).branches:
            nodes = DEFAULT_NODES
            found.append(Contestant(name=f"{name}+{nodes}", drafter=name, tree_nodes=nodes))
    return found


def _read(word: str, *, auto: bool) -> Contestant:
    match = _WORD.fullmatch(word)
    if match is None:
        raise ConfigError(
            f"--drafters: {word!r} names no contestant.", hint="write NAME[=DRAFT][:K][+NODES]"
        )
    drafter = match["drafter"]
    if drafter not in available() and not (auto and drafter == AUTO):
        raise ConfigError(f"unknown drafter {drafter!r}.", hint=did_you_mean(drafter, available()))
    return Contestant(
        name=word,
        drafter=drafter,
        draft=match["draft"],
        k=None if match["k"] is None else int(match["k"]),
        tree_nodes=int(match["nodes"] or 0),
    )


class Writer(Protocol):
    """What a contestant writes with; `LLM` is one."""

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams, /
    ) -> list[GenerationResult]: ...
    def forget(self) -> None: ...


@dataclass(slots=True)
class Runner:
    """A contestant. Without a writer `reason` says why. `exact` says that its text is the target's
    own, to the last near-tie."""

    name: str
    writer: Writer | None = None
    reason: str | None = None
    exact: bool = True
    k: int = 0
    facts: Mapping[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True, slots=True)
class Lineup:
    """Runners in order, and the LLMs of those that can run."""

    runners: Sequence[Runner]
    llms: Sequence[LLM]

    @property
    def present(self) -> list[Runner]:
        return [one for one in self.runners if one.writer is not None]

    @property
    def skipped(self) -> dict[str, str]:
        """Why the others cannot take part."""
        return {one.name: one.reason for one in self.runners if one.reason is not None}

    @property
    def notes(self) -> list[str]:
        """What a user should hear before the run, each once."""
        notes = [note for llm in self.llms for note in llm.notes]
        alike: dict[str, list[str]] = {}
        for name, reason in self.skipped.items():
            alike.setdefault(reason, []).append(name)
        skipped = [
            f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} skipped: {reason}"
            for reason, names in alike.items()
        ]
        return list(dict.fromkeys([*notes, *skipped]))

    def close(self) -> None:
        """End their threads and processes."""
        for llm in self.llms:
            llm.close()


@dataclass(frozen=True, slots=True)
class Drafts:
    """What contestants that name no draft of their own draft from: a draft model, and heads."""

    model: str | None
    heads: Mapping[HeadKind, Path]
    own_mtp: bool = False

    @classmethod
    def of(cls, target: str, draft: str | None) -> Drafts:
        """`draft` is a model or heads by name; None is the target's own partner, if it has one."""
        folder = resolve(target)
        heads, model = find_heads(folder), draft or draft_of(target)
        kind = "model" if draft is None else kind_of(resolve(draft))
        if draft is not None and kind != "model":
            heads[kind], model = Path(draft), draft_of(target)
        try:
            own_mtp = has_own_mtp(folder)
        except CheckpointError:
            own_mtp = False
        return cls(model, heads, own_mtp)

    def of_drafter(self, drafter: str) -> str | None:
        """None if it drafts from the text or from the target itself. Raises ConfigError if it needs
        what is not there."""
        kind = known(drafter)
        if kind.source in ("model", "draft"):
            return self._model()
        if kind.source != "heads":
            return None
        for name, folder in self.heads.items():
            if name == drafter:
                return name_of(folder)
        if kind.in_target and self.own_mtp:
            return None
        raise ConfigError(
            f"there are no {drafter} heads in the target's folder or beside it.",
            hint=f"name them: --drafters {drafter}=FOLDER; `outrider train` makes some",
        )

    def _model(self) -> str:
        if self.model is None:
            raise ConfigError(
                "there is no draft model.",
                hint="name one with --draft; `outrider draft suggest TARGET` says what fits",
            )
        return self.model


Opener = Callable[[str, str | None, EngineConfig], LLM]


def line_up(
    contestants: Sequence[Contestant],
    target: str,
    drafts: Drafts,
    base: EngineConfig,
    *,
    opener: Opener = lambda target, draft, config: LLM(target, draft=draft, config=config),
    admit: Callable[[Contestant], None] | None = None,
) -> Lineup:
    """Load every contestant. Raises the first one's error if none but plain decoding can run, but
    for what `admit` refuses, by a CapacityError."""
    runners: list[Runner] = []
    llms: list[LLM] = []
    errors: list[OutriderError] = []
    for contestant in contestants:
        try:
            config = contestant.config(base)
            draft = contestant.draft
            if draft is None:
                draft = drafts.of_drafter(contestant.drafter)
            if admit is not None:
                admit(contestant)
            llm = opener(target, draft, config)
        except OutriderError as error:
            if contestant.name == OFF:
                raise
            errors.append(error)
            runners.append(Runner(contestant.name, reason=_told(error)))
            continue
        llms.append(llm)
        runners.append(_runner(contestant, llm, draft))
    if admit is not None:
        errors = [error for error in errors if not isinstance(error, CapacityError)]
    if len(llms) == 1 and errors:
        raise errors[0]
    return Lineup(runners, llms)


def _runner(contestant: Contestant, llm: LLM, draft: str | None) -> Runner:
    return Runner(
        contestant.name,
        writer=llm,
        exact=llm.exact and llm.kernels.exact,
        k=llm.k,
        facts={
            **facts_of(llm),
            "draft": draft,
            "draft_weights": None if draft is None else weights_digest(resolve(draft)),
            "k": llm.k,
            "tree_nodes": contestant.tree_nodes,
        },
    )


def _told(error: OutriderError) -> str:
    hint = f" ({error.hint})" if error.hint else ""
    return f"{error}{hint}"
