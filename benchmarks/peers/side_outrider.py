"""Outrider itself, driven as its peers are."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from lines import Ask, Cell, RefusedError, serve

import outrider
from outrider import LLM, EngineConfig, SamplingParams
from outrider.core.errors import OutriderError

QUANTISE = {"int8": "int8", "int4": "int4"}


class OutriderSide:
    """One `LLM` a cell."""

    def __init__(self) -> None:
        self._loaded: dict[str, LLM] = {}

    def about(self) -> dict[str, Any]:
        return {"versions": {"outrider": outrider.__version__}}

    def load(self, cell: Cell) -> list[str]:
        config = EngineConfig(
            drafter=cell.drafter,
            k=cell.k,
            dtype="float32" if cell.form == "f32" else "bfloat16",
            quantise=QUANTISE.get(cell.form, "none"),
            batch_size=1,
            threads=cell.threads,
            device="cpu",
            **cell.options,
        )
        draft = cell.draft if cell.drafter == "model" else None
        try:
            self._loaded[cell.name] = LLM(cell.target, draft=draft, config=config)
        except OutriderError as error:
            raise RefusedError(str(error)) from error
        return list(self._loaded[cell.name].notes)

    def run(self, ask: Ask) -> dict[str, Any]:
        llm = self._loaded[ask.name]
        params = SamplingParams(
            max_tokens=ask.max_tokens, temperature=ask.temperature, seed=ask.seed
        )
        started = perf_counter()
        [result] = llm.generate([ask.ids], params)
        seconds = perf_counter() - started
        stats = result.stats
        counts = {"drafted": stats.num_drafted, "accepted": stats.num_accepted}
        return {"ids": list(result.token_ids), "seconds": seconds, **counts}

    def drop(self, name: str) -> None:
        del self._loaded[name]


if __name__ == "__main__":
    serve(OutriderSide())
