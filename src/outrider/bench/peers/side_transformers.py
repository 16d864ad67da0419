"""Hugging Face `generate`: plain, with an assistant model, with prompt lookup.

Which of float32 and bfloat16 is faster depends on the machine and on how many rows a pass has, so
the dtype is one of a contestant's own options, and the faster one is kept.
"""

from __future__ import annotations

from importlib import import_module
from time import perf_counter
from typing import Any

import torch

from outrider.bench.peers.lines import Ask, Setup, serve

MAX_NGRAM = 3


class TransformersSide:
    """Setups of one checkpoint and dtype share its weights."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._models: dict[tuple[str, str], Any] = {}
        self._setups: dict[str, Setup] = {}
        library.logging.set_verbosity_error()
        library.logging.disable_progress_bar()

    def about(self) -> dict[str, Any]:
        return {"versions": {"transformers": self._library.__version__, "torch": torch.__version__}}

    def load(self, setup: Setup) -> list[str]:
        torch.set_num_threads(setup.threads)
        self._model(setup.target, setup)
        if setup.drafter == "model":
            self._model(setup.draft, setup)
        self._setups[setup.name] = setup
        return []

    @torch.inference_mode()
    def run(self, ask: Ask) -> dict[str, Any]:
        setup = self._setups[ask.name]
        model = self._model(setup.target, setup)
        sampled = {"do_sample": True, "temperature": ask.temperature, "top_k": 0}
        how = sampled if ask.temperature else {"do_sample": False}
        ids = torch.tensor([ask.ids])
        self._library.set_seed(ask.seed)
        started = perf_counter()
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=ask.max_tokens,
            pad_token_id=_first(model.config.eos_token_id),
            **how,
            **self._speculation(setup),
        )
        seconds = perf_counter() - started
        return {"ids": out[0, len(ask.ids) :].tolist(), "seconds": seconds}

    def drop(self, name: str) -> None:
        del self._setups[name]
        wanted = {
            (folder, setup.options["dtype"])
            for setup in self._setups.values()
            for folder in (setup.target, setup.draft)
        }
        self._models = {key: model for key, model in self._models.items() if key in wanted}

    def _speculation(self, setup: Setup) -> dict[str, Any]:
        if setup.drafter == "ngram":
            return {"prompt_lookup_num_tokens": setup.k, "max_matching_ngram_size": MAX_NGRAM}
        if setup.drafter == "none":
            return {}
        draft = self._model(setup.draft, setup)
        # k = 0 leaves the length to the library: it grows and shrinks, and ends at a doubt.
        if setup.k:
            draft.generation_config.num_assistant_tokens = setup.k
            draft.generation_config.num_assistant_tokens_schedule = "constant"
            draft.generation_config.assistant_confidence_threshold = 0.0
        else:
            fresh = self._library.GenerationConfig()
            for name in ("num_assistant_tokens", "num_assistant_tokens_schedule"):
                setattr(draft.generation_config, name, getattr(fresh, name))
            threshold = fresh.assistant_confidence_threshold
            draft.generation_config.assistant_confidence_threshold = threshold
        return {"assistant_model": draft}

    def _model(self, folder: str, setup: Setup) -> Any:
        key = (folder, setup.options["dtype"])
        if key not in self._models:
            load = self._library.AutoModelForCausalLM.from_pretrained
            self._models[key] = load(folder, dtype=getattr(torch, key[1])).eval()
        return self._models[key]


def _first(stop_ids: Any) -> Any:
    """A checkpoint may name several ends."""
    return stop_ids[0] if isinstance(stop_ids, list) else stop_ids  # pyright: ignore[reportUnknownVariableType]


def main() -> None:
    serve(TransformersSide(import_module("transformers")))


if __name__ == "__main__":
    main()
