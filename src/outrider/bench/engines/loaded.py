"""LLMs as contestants: each engine with its own models in memory, and what is known of them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.api.llm import LLM
from outrider.bench.engines.bandwidth import bare_reads
from outrider.bench.engines.cells import cells, comparisons
from outrider.bench.engines.findings import Evidence
from outrider.bench.engines.models import ahead_predictions, lane_bounds
from outrider.bench.engines.plan import Contestant, line_up
from outrider.bench.engines.samples import Sample, agreement
from outrider.core.config import EngineConfig
from outrider.core.errors import OutriderError

# What lanes could gain is reckoned from the engine that does one thing after the other.
_SYNCHRONOUS = "single"


@dataclass(frozen=True, slots=True)
class Models:
    """A pair by name, folder or hub id; without a draft the target's own partner is taken."""

    target: str
    draft: str | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """Contestants in order, and the LLMs of those that can run."""

    contestants: Sequence[Contestant]
    llms: dict[str, LLM]

    @property
    def notes(self) -> list[str]:
        """What a user should hear before the run, each once."""
        notes = [note for llm in self.llms.values() for note in llm.notes]
        notes += [f"{c.name} cannot run here: {c.reason}" for c in self.contestants if c.reason]
        return list(dict.fromkeys(notes))

    def close(self) -> None:
        """End their threads and processes."""
        for llm in self.llms.values():
            llm.close()


def load_engines(
    names: Sequence[str], models: Models, base: EngineConfig, *, own_controller: bool = False
) -> Loaded:
    """Raises the first engine's error if none can run."""
    llms: dict[str, LLM] = {}
    errors: list[OutriderError] = []

    def open_one(contestant: Contestant) -> None:
        config = contestant.config
        try:
            draft = models.draft if config.drafter != "none" else None
            llm = LLM(models.target, draft=draft, config=config, on_job=contestant.jobs.append)
        except OutriderError as error:
            errors.append(error)
            raise
        llms[contestant.name] = llm
        contestant.server, contestant.exact = llm, llm.exact and llm.kernels.exact
        contestant.facts = {
            "drafter": llm.drafter,
            "kernels": {choice.op: choice.name for choice in llm.kernels.choices},
            "row_exact_kernels": llm.kernels.exact,
            "notes": list(llm.notes),
        }

    contestants = line_up(names, base, open_one, own_controller=own_controller)
    if not llms:
        raise errors[0]
    return Loaded(contestants, llms)


def evidence_of(samples: Sequence[Sample], loaded: Loaded) -> Evidence:
    found = cells(samples)
    reads = "single was not measured"
    if _SYNCHRONOUS in loaded.llms:
        reads = bare_reads(loaded.llms[_SYNCHRONOUS])
    shares = [s.foreign_cpu_share for s in samples if s.foreign_cpu_share is not None]
    return Evidence(
        cells=found,
        comparisons=comparisons(samples),
        bounds=[] if isinstance(reads, str) else lane_bounds(samples, reads),
        predictions=ahead_predictions(found),
        agreement=agreement(samples),
        hybrid_threshold=next(
            (c.config.hybrid_threshold for c in loaded.contestants if c.name == "pdv"), 0
        ),
        bound_refusal=reads if isinstance(reads, str) else None,
        foreign_cpu_share=round(statistics.fmean(shares), 4) if shares else None,
    )
