"""How much of its own drafts a target keeps, where its copy in 8 or 4 bits writes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from outrider.api.llm import LLM
from outrider.core.config import EngineConfig
from outrider.core.errors import OutriderError
from outrider.core.params import SamplingParams
from outrider_lab.bench.quality import FormatRow, settings_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfDrafts:
    """What targets in several formats write, each with copies of itself in `copies`."""

    target: str
    engine: EngineConfig
    params: SamplingParams
    prompts: Sequence[str]
    copies: Sequence[str]

    def measured(self, rows: Iterable[FormatRow]) -> Iterator[FormatRow]:
        """`rows` with what drafts of each copy are kept; nothing where a target cannot draft for
        itself."""
        for row in rows:
            found = {f"{copy}_drafts": self._kept(row.form, copy) for copy in self.copies}
            yield replace(row, **found)

    def _kept(self, form: str, copy: str) -> float | None:
        config = replace(self.engine, drafter="quantised-self", sampler="block")
        config = replace(config, self_quantise=copy, **settings_of(form))
        try:
            with closing(LLM(self.target, config=config)) as llm:
                results = llm.generate(list(self.prompts), self.params.seeded(0))
        except OutriderError:
            return None
        drafted = sum(result.stats.num_drafted for result in results)
        return sum(result.stats.num_accepted for result in results) / drafted if drafted else None
