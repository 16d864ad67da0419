"""Contestants with their models in memory, or the reason why one cannot take part.

Each has an engine and models of its own, so that all can take turns: a target takes its memory once
a contestant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from outrider.api.llm import LLM
from outrider.api.result import GenerationResult
from outrider.bench.drafters.heads import has_own_mtp, heads_beside, name_of
from outrider.bench.drafters.table import OFF, Contestant, Source
from outrider.bench.machine import weights_digest
from outrider.core.config import EngineConfig
from outrider.core.errors import CheckpointError, ConfigError, OutriderError
from outrider.core.params import SamplingParams
from outrider.models.heads import HeadKind, kind_of
from outrider.models.loading import resolve
from outrider.pairs.catalog import draft_of


class Writer(Protocol):
    """What a contestant writes with; `LLM` is one."""

    def generate(
        self, prompts: Sequence[str], params: SamplingParams, /
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
        skipped = [f"{name} is skipped: {reason}" for name, reason in self.skipped.items()]
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
        heads, model = heads_beside(folder), draft or draft_of(target)
        kind = "model" if draft is None else kind_of(resolve(draft))
        if draft is not None and kind != "model":
            heads[kind], model = Path(draft), draft_of(target)
        try:
            own_mtp = has_own_mtp(folder)
        except CheckpointError:
            own_mtp = False
        return cls(model, heads, own_mtp)

    def of_drafter(self, drafter: str, source: Source) -> str | None:
        """None if it drafts from the text or from the target itself. Raises ConfigError if it needs
        what is not there."""
        if source not in ("model", "heads"):
            return None
        if source == "model":
            return self._model()
        for kind, folder in self.heads.items():
            if kind == drafter:
                return name_of(folder)
        if drafter == "mtp" and self.own_mtp:
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
) -> Lineup:
    """Load every contestant. Raises the first one's error if none but plain decoding can run."""
    runners: list[Runner] = []
    llms: list[LLM] = []
    errors: list[OutriderError] = []
    for contestant in contestants:
        try:
            config = contestant.config(base)
            draft = contestant.draft
            if draft is None:
                draft = drafts.of_drafter(contestant.drafter, contestant.source)
            llm = opener(target, draft, config)
        except OutriderError as error:
            if contestant.name == OFF:
                raise
            errors.append(error)
            runners.append(Runner(contestant.name, reason=_told(error)))
            continue
        llms.append(llm)
        runners.append(_runner(contestant, llm, draft))
    if len(llms) == 1 and errors:
        raise errors[0]
    return Lineup(runners, llms)


def _runner(contestant: Contestant, llm: LLM, draft: str | None) -> Runner:
    return Runner(
        contestant.name,
        writer=llm,
        exact=llm.exact and llm.kernels.exact,
        k=llm.config.k if llm.drafter != "none" else 0,
        facts={
            "drafter": llm.drafter,
            "draft": draft,
            "draft_weights": None if draft is None else weights_digest(resolve(draft)),
            "k": llm.config.k,
            "tree_nodes": contestant.tree_nodes,
            "kernels": {choice.op: choice.name for choice in llm.kernels.choices},
            "row_exact_kernels": llm.kernels.exact,
            "notes": list(llm.notes),
        },
    )


def _told(error: OutriderError) -> str:
    hint = f" ({error.hint})" if error.hint else ""
    return f"{error}{hint}"
