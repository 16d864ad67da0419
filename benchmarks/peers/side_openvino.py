"""OpenVINO GenAI, which reads GGUF: plain, prompt lookup, and the draft model."""

from __future__ import annotations

import shutil
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from lines import Ask, Cell, serve

# Of another environment than the project's, so nothing is known of their types.
openvino: Any = import_module("openvino")
genai: Any = import_module("openvino_genai")

MAX_NGRAM = 3


class OpenvinoSide:
    """Cells that differ in what a request says alone share a pipeline."""

    def __init__(self) -> None:
        self._cells: dict[str, Cell] = {}
        self._pipelines: dict[tuple[str, ...], Any] = {}

    def about(self) -> dict[str, Any]:
        versions = {"openvino": openvino.__version__, "openvino_genai": genai.__version__}
        return {"versions": versions}

    def load(self, cell: Cell) -> list[str]:
        how: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": cell.threads}
        if _key(cell) not in self._pipelines:
            more: dict[str, Any] = {"prompt_lookup": True} if cell.drafter == "ngram" else {}
            if cell.drafter == "model":
                more = {"draft_model": genai.draft_model(_converted(cell.draft), "CPU", **how)}
            pipeline = genai.LLMPipeline(cell.target, "CPU", **how, **more)
            self._pipelines[_key(cell)] = pipeline
        self._cells[cell.name] = cell
        return []

    def run(self, ask: Ask) -> dict[str, Any]:
        cell = self._cells[ask.name]
        pipeline = self._pipelines[_key(cell)]
        config = genai.GenerationConfig()
        config.max_new_tokens = ask.max_tokens
        config.apply_chat_template = False
        config.set_eos_token_id(cell.options["stop_id"])
        if ask.temperature:
            config.do_sample = True
            config.temperature = ask.temperature
            config.top_k = cell.options["vocab_size"]
            config.rng_seed = ask.seed
        if cell.drafter != "none":
            config.num_assistant_tokens = cell.k
        if cell.drafter == "ngram":
            config.max_ngram_size = MAX_NGRAM
        ids = np.array([ask.ids], dtype=np.int64)
        inputs = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        started = perf_counter()
        result = pipeline.generate(inputs, config)
        seconds = perf_counter() - started
        return {"ids": list(map(int, result.tokens[0])), "seconds": seconds}

    def drop(self, name: str) -> None:
        del self._cells[name]
        kept = {_key(cell) for cell in self._cells.values()}
        self._pipelines = {key: pipe for key, pipe in self._pipelines.items() if key in kept}


def _converted(gguf: str) -> str:
    """The folder of a GGUF file in OpenVINO's own form, which alone serves as a draft."""
    place = Path(f"{gguf}.openvino")
    if not place.exists():
        part = Path(f"{gguf}.openvino.part")
        part.mkdir(exist_ok=True)
        try:
            copied = shutil.copy(gguf, part)
            genai.LLMPipeline(copied, "CPU", enable_save_ov_model=True)
            part.rename(place)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return str(place)


def _key(cell: Cell) -> tuple[str, ...]:
    return cell.target, cell.draft, cell.drafter


if __name__ == "__main__":
    serve(OpenvinoSide())
