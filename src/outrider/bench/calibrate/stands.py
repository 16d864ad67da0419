"""Engines to be measured: plain decoding and each drafter, with a K that changes while they run.

Each has models of its own, as users' engines do. A drafter that cannot be loaded is left out, with
the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from outrider.api.llm import LLM
from outrider.bench.calibrate.dial import Dial
from outrider.bench.studies.drafters_lineup import OFF, Contestant, Drafts, Lineup, line_up
from outrider.core.config import EngineConfig
from outrider.models.loading import resolve


@dataclass(frozen=True, slots=True)
class Stand:
    """A contestant's engine. `facts` are those of its runner."""

    contestant: Contestant
    llm: LLM
    dial: Dial
    facts: Mapping[str, object]

    @property
    def name(self) -> str:
        return self.contestant.name

    @property
    def is_plain(self) -> bool:
        return self.name == OFF

    @property
    def draft_folder(self) -> Path | None:
        """Of the draft model or heads; None if it drafts without."""
        draft = self.facts["draft"]
        return None if draft is None else resolve(str(draft))


@dataclass(frozen=True, slots=True)
class Stands:
    """The plain one first. `skipped` says why others are missing."""

    present: Sequence[Stand]
    lineup: Lineup

    @property
    def plain(self) -> Stand:
        return self.present[0]

    @property
    def drafting(self) -> Sequence[Stand]:
        return self.present[1:]

    @property
    def skipped(self) -> Mapping[str, str]:
        return self.lineup.skipped

    @property
    def notes(self) -> Sequence[str]:
        return self.lineup.notes

    def named(self, name: str) -> Stand:
        return next(stand for stand in self.present if stand.name == name)

    def close(self) -> None:
        self.lineup.close()


def open_stands(
    contestants: Sequence[Contestant],
    target: str,
    drafts: Drafts,
    base: EngineConfig,
    *,
    most_k: int,
) -> Stands:
    """Load them all, ready for drafts of up to `most_k` tokens. Raises OutriderError if not even
    plain decoding can run, or none of the drafters."""
    dials: list[Dial] = []

    def opener(target: str, draft: str | None, config: EngineConfig) -> LLM:
        dial = Dial()
        llm = LLM(target, draft=draft, config=config, controller=dial)
        dials.append(dial)
        return llm

    base = replace(
        base,
        k=most_k,
        tree_nodes=0,
        schedule="single",
        controller="fixed",
        # Requests without an end would ask for the whole window each, and wait for it.
        reserve=0.0,
    )
    chains = [replace(one, k=None, tree_nodes=0) for one in contestants]
    lineup = line_up(chains, target, drafts, base, opener=opener)
    by_name = {one.name: one for one in chains}
    present = [
        Stand(by_name[runner.name], llm, dial, runner.facts)
        for runner, llm, dial in zip(lineup.present, lineup.llms, dials, strict=True)
    ]
    return Stands(present, lineup)
