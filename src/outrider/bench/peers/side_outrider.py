"""Outrider itself, driven as its peers are.

Memory finds whole pages of a prompt again that it read before, as at the other temperature. Peers
are told to read every prompt anew, so our pages are longer than any prompt.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import outrider
from outrider import LLM, EngineConfig, SamplingParams
from outrider.bench.peers.lines import Ask, RefusedError, Setup, serve
from outrider.core.errors import OutriderError

QUANTISE = {"int8": "int8", "int4": "int4"}
PAGE_TOKENS = 1024


class OutriderSide:
    """One `LLM` a setup."""

    def __init__(self) -> None:
        self._loaded: dict[str, LLM] = {}

    def about(self) -> dict[str, Any]:
        return {"versions": {"outrider": outrider.__version__}}

    def load(self, setup: Setup) -> list[str]:
        draft = setup.draft if setup.drafter == "model" else None
        try:
            config = EngineConfig(
                drafter=setup.drafter,
                k=setup.k,
                dtype="float32" if setup.form == "f32" else "bfloat16",
                quantise=QUANTISE.get(setup.form, "none"),
                batch_size=1,
                threads=setup.threads,
                device="cpu",
                page_size=PAGE_TOKENS,
                **setup.options,
            )
            self._loaded[setup.name] = LLM(setup.target, draft=draft, config=config)
        except OutriderError as error:
            raise RefusedError(str(error)) from error
        return list(self._loaded[setup.name].notes)

    def run(self, ask: Ask) -> dict[str, Any]:
        llm = self._loaded[ask.name]
        try:
            params = SamplingParams(
                max_tokens=ask.max_tokens, temperature=ask.temperature, seed=ask.seed
            )
            started = perf_counter()
            [result] = llm.generate([ask.ids], params)
        except OutriderError as error:
            raise RefusedError(str(error)) from error
        seconds = perf_counter() - started
        return {
            "ids": list(result.token_ids),
            "seconds": seconds,
            "drafted": result.stats.num_drafted,
            "accepted": result.stats.num_accepted,
            "arrivals": list(result.token_seconds),
        }

    def drop(self, name: str) -> None:
        self._loaded.pop(name).close()


def main() -> None:
    serve(OutriderSide())


if __name__ == "__main__":
    main()
