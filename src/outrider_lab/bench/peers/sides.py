"""A peer's own end: a process that answers requests, each a line of JSON on its stdin.

    {"do": "about"}                      {"versions": {...}}
    {"do": "load", "setup": {...}}       {"notes": [...]}
    {"do": "run", "name": ..., "ids": [...], "text": ..., "max_tokens": 128, "temperature": 0,
     "seed": 1}                          {"ids": [...], "seconds": 1.5}
    {"do": "drop", "name": ...}          {}

What a peer cannot do it refuses with a reason: {"refused": "..."}. It takes the time itself, around
the call that writes the tokens, so neither starting, nor loading, nor this protocol is in it. Sides
of libraries of Python are here, those of servers in servers.py. Another environment may run this
file, so until a side is chosen nothing but the standard library is imported.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

from outrider.core.errors import OutriderError

# All look for tails of up to so many tokens in the text.
MAX_NGRAM = 3
# Longer than any prompt: whole pages that were read before, as at the other temperature, would be
# found again, and peers are told to read every prompt anew.
PAGE_TOKENS = 1024


class RefusedError(Exception):
    """This peer cannot do what was asked, and the text says why."""


@dataclass(frozen=True)
class Setup:
    """What is loaded under a name. `target` and `draft` are what this peer reads: a folder, a file
    or an address; `drafter` is none, model or ngram; `options` are the peer's own."""

    name: str
    target: str
    draft: str
    form: str
    drafter: str
    k: int
    threads: int
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Ask:
    """One prompt, as token ids and as text, and how to go on."""

    name: str
    ids: list[int]
    text: str
    max_tokens: int
    temperature: float
    seed: int


class Side(Protocol):
    """What a peer implements.

    `run` answers with `ids` and `seconds`, and where it knows them with `drafted` and `accepted`
    tokens, with `arrivals` (seconds since the request, one a token) and with `usage`, the number of
    tokens that a server counted itself.
    """

    def about(self) -> dict[str, Any]: ...
    def load(self, setup: Setup) -> list[str]: ...
    def run(self, ask: Ask) -> dict[str, Any]: ...
    def drop(self, name: str) -> None: ...


def serve(side: Side) -> None:
    """Answer requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    # Libraries may print: what they print goes to the log.
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(answer(side, json.loads(line))) + "\n")
        answers.flush()


def answer(side: Side, request: dict[str, Any]) -> dict[str, Any]:
    """What `side` says to one request, a refusal included."""
    try:
        return _answer(side, request)
    except (RefusedError, RuntimeError, ValueError, OSError) as error:
        return {"refused": str(error)[:2000]}


def _answer(side: Side, request: dict[str, Any]) -> dict[str, Any]:
    match request.pop("do"):
        case "about":
            return side.about()
        case "load":
            return {"notes": side.load(Setup(**request["setup"]))}
        case "run":
            return side.run(Ask(**request))
        case "drop":
            side.drop(request["name"])
            return {}
        case strange:
            raise RefusedError(f"nobody knows how to {strange!r}")


class OutriderSide:
    """Outrider itself, driven as its peers are: one `LLM` a setup."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._loaded: dict[str, Any] = {}

    def about(self) -> dict[str, Any]:
        return {"versions": {"outrider": self._library.__version__}}

    def load(self, setup: Setup) -> list[str]:
        draft = setup.draft if setup.drafter == "model" else None
        try:
            config = self._library.EngineConfig(
                drafter=setup.drafter,
                k=setup.k,
                dtype={"f32": "float32", "gguf": "auto"}.get(setup.form, "bfloat16"),
                quantise=setup.form if setup.form in ("int8", "int4") else "none",
                batch_size=1,
                threads=setup.threads,
                device="cpu",
                page_size=PAGE_TOKENS,
                **setup.options,
            )
            llm = self._library.LLM(setup.target, draft=draft, config=config)
        except OutriderError as error:
            raise RefusedError(str(error)) from error
        self._loaded[setup.name] = llm
        return list(llm.notes)

    def run(self, ask: Ask) -> dict[str, Any]:
        llm = self._loaded[ask.name]
        try:
            params = self._library.SamplingParams(
                max_tokens=ask.max_tokens, temperature=ask.temperature, seed=ask.seed
            )
            started = perf_counter()
            [result] = llm.generate([ask.ids], params)
            seconds = perf_counter() - started
        except OutriderError as error:
            raise RefusedError(str(error)) from error
        return {
            "ids": list(result.token_ids),
            "seconds": seconds,
            "drafted": result.stats.num_drafted,
            "accepted": result.stats.num_accepted,
            "arrivals": list(result.token_seconds),
        }

    def drop(self, name: str) -> None:
        self._loaded.pop(name).close()


class TransformersSide:
    """Hugging Face `generate`: plain, with an assistant model, with prompt lookup.

    Which of float32 and bfloat16 is faster depends on the machine and on how many rows a pass has,
    so the dtype is one of a contestant's own options, and the faster one is kept. Setups of one
    checkpoint and dtype share its weights."""

    def __init__(self, library: Any, torch: Any) -> None:
        self._library, self._torch = library, torch
        self._models: dict[tuple[str, str], Any] = {}
        self._setups: dict[str, Setup] = {}
        library.logging.set_verbosity_error()
        library.logging.disable_progress_bar()

    def about(self) -> dict[str, Any]:
        libraries = {"transformers": self._library, "torch": self._torch}
        return {"versions": {name: found.__version__ for name, found in libraries.items()}}

    def load(self, setup: Setup) -> list[str]:
        self._torch.set_num_threads(setup.threads)
        self._model(setup.target, setup)
        if setup.drafter == "model":
            self._model(setup.draft, setup)
        self._setups[setup.name] = setup
        return []

    def run(self, ask: Ask) -> dict[str, Any]:
        setup = self._setups[ask.name]
        model = self._model(setup.target, setup)
        sampled = {"do_sample": True, "temperature": ask.temperature, "top_k": 0}
        ids = self._torch.tensor([ask.ids])
        self._library.set_seed(ask.seed)
        with self._torch.inference_mode():
            started = perf_counter()
            out = model.generate(
                input_ids=ids,
                attention_mask=self._torch.ones_like(ids),
                max_new_tokens=ask.max_tokens,
                pad_token_id=_first(model.config.eos_token_id),
                **(sampled if ask.temperature else {"do_sample": False}),
                **self._speculation(setup),
            )
            seconds = perf_counter() - started
        return {"ids": out[0, len(ask.ids) :].tolist(), "seconds": seconds}

    def drop(self, name: str) -> None:
        del self._setups[name]
        kept = self._setups.values()
        wanted = {(place, s.options["dtype"]) for s in kept for place in (s.target, s.draft)}
        self._models = {key: model for key, model in self._models.items() if key in wanted}

    def _speculation(self, setup: Setup) -> dict[str, Any]:
        if setup.drafter == "ngram":
            return {"prompt_lookup_num_tokens": setup.k, "max_matching_ngram_size": MAX_NGRAM}
        if setup.drafter == "none":
            return {}
        draft = self._model(setup.draft, setup)
        how = draft.generation_config
        # k = 0 leaves the length to the library: it grows and shrinks, and ends at a doubt.
        usual = self._library.GenerationConfig()
        how.num_assistant_tokens = setup.k or usual.num_assistant_tokens
        schedule = usual.num_assistant_tokens_schedule
        how.num_assistant_tokens_schedule = "constant" if setup.k else schedule
        threshold = usual.assistant_confidence_threshold
        how.assistant_confidence_threshold = 0.0 if setup.k else threshold
        return {"assistant_model": draft}

    def _model(self, folder: str, setup: Setup) -> Any:
        key = (folder, setup.options["dtype"])
        if key not in self._models:
            load = self._library.AutoModelForCausalLM.from_pretrained
            self._models[key] = load(folder, dtype=getattr(self._torch, key[1])).eval()
        return self._models[key]


def _first(stop_ids: Any) -> Any:
    """A checkpoint may name several ends."""
    return stop_ids[0] if isinstance(stop_ids, list) else stop_ids  # pyright: ignore[reportUnknownVariableType]


class OpenvinoSide:
    """OpenVINO GenAI, which reads GGUF: plain, prompt lookup, and the draft model. Setups that
    differ in what a request says alone share a pipeline."""

    def __init__(self, openvino: Any, genai: Any, numpy: Any) -> None:
        self._openvino, self._genai, self._numpy = openvino, genai, numpy
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
        ids = self._numpy.array([ask.ids], dtype=self._numpy.int64)
        parts = (ids, self._numpy.ones_like(ids))
        inputs = self._genai.TokenizedInputs(*map(self._openvino.Tensor, parts))
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


_SIDES = {
    "outrider": (OutriderSide, ("outrider",)),
    "transformers": (TransformersSide, ("transformers", "torch")),
    "openvino": (OpenvinoSide, ("openvino", "openvino_genai", "numpy")),
}


def main(name: str) -> None:
    side, libraries = _SIDES[name]
    serve(side(*map(import_module, libraries)))


if __name__ == "__main__":
    main(sys.argv[1])
