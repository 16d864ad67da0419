"""OpenVINO GenAI, which reads GGUF: plain, prompt lookup, and the draft model."""

from __future__ import annotations

import shutil
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from outrider.bench.peers.lines import Ask, Setup, serve

MAX_NGRAM = 3


class OpenvinoSide:
    """Setups that differ in what a request says alone share a pipeline. Both libraries are of
    another environment than the project's, so nothing is known of their types."""

    def __init__(self, openvino: Any, genai: Any) -> None:
        self._openvino, self._genai = openvino, genai
        self._setups: dict[str, Setup] = {}
        self._pipelines: dict[tuple[str, ...], Any] = {}

    def about(self) -> dict[str, Any]:
        versions = {"openvino": self._openvino, "openvino_genai": self._genai}
        return {"versions": {name: found.__version__ for name, found in versions.items()}}

    def load(self, setup: Setup) -> list[str]:
        threads = setup.threads
        how: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads}
        if _key(setup) not in self._pipelines:
            more: dict[str, Any] = {"prompt_lookup": True} if setup.drafter == "ngram" else {}
            if setup.drafter == "model":
                draft = self._converted(setup.draft)
                more = {"draft_model": self._genai.draft_model(draft, "CPU", **how)}
            pipeline = self._genai.LLMPipeline(setup.target, "CPU", **how, **more)
            self._pipelines[_key(setup)] = pipeline
        self._setups[setup.name] = setup
        return []

    def run(self, ask: Ask) -> dict[str, Any]:
        setup = self._setups[ask.name]
        pipeline = self._pipelines[_key(setup)]
        config = self._config(setup, ask)
        ids = np.array([ask.ids], dtype=np.int64)
        tensors = [self._openvino.Tensor(part) for part in (ids, np.ones_like(ids))]
        inputs = self._genai.TokenizedInputs(*tensors)
        started = perf_counter()
        result = pipeline.generate(inputs, config)
        seconds = perf_counter() - started
        return {"ids": list(map(int, result.tokens[0])), "seconds": seconds}

    def drop(self, name: str) -> None:
        del self._setups[name]
        kept = {_key(setup) for setup in self._setups.values()}
        self._pipelines = {key: pipe for key, pipe in self._pipelines.items() if key in kept}

    def _config(self, setup: Setup, ask: Ask) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = ask.max_tokens
        config.apply_chat_template = False
        if setup.options["stop_ids"]:
            config.set_eos_token_id(setup.options["stop_ids"][0])
            config.stop_token_ids = set(setup.options["stop_ids"])
        if ask.temperature:
            config.do_sample = True
            config.temperature = ask.temperature
            config.top_k = setup.options["vocab_size"]
            config.rng_seed = ask.seed
        if setup.drafter != "none":
            config.num_assistant_tokens = setup.k
        if setup.drafter == "ngram":
            config.max_ngram_size = MAX_NGRAM
        return config

    def _converted(self, gguf: str) -> str:
        """The folder of a GGUF file in OpenVINO's own form, which alone serves as a draft."""
        place = Path(f"{gguf}.openvino")
        if not place.exists():
            part = Path(f"{gguf}.openvino.part")
            part.mkdir(exist_ok=True)
            try:
                copied = shutil.copy(gguf, part)
                self._genai.LLMPipeline(copied, "CPU", enable_save_ov_model=True)
                part.rename(place)
            finally:
                shutil.rmtree(part, ignore_errors=True)
        return str(place)


def _key(setup: Setup) -> tuple[str, ...]:
    return setup.target, setup.draft, setup.drafter


def main() -> None:
    serve(OpenvinoSide(import_module("openvino"), import_module("openvino_genai")))


if __name__ == "__main__":
    main()
