"""Hugging Face `generate`: plain, with an assistant model, with prompt lookup.

Which of float32 and bfloat16 is faster depends on the machine and on how many rows a pass has, so
the dtype is one of the cell's own options, and the faster one is kept.
"""

from __future__ import annotations

from importlib import import_module
from time import perf_counter
from typing import Any

import torch
from lines import Ask, Cell, serve

transformers: Any = import_module("transformers")


class TransformersSide:
    """Cells of one checkpoint and dtype share its weights."""

    def __init__(self) -> None:
        self._models: dict[tuple[str, str], Any] = {}
        self._cells: dict[str, Cell] = {}
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()

    def about(self) -> dict[str, Any]:
        versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        return {"versions": versions}

    def load(self, cell: Cell) -> list[str]:
        torch.set_num_threads(cell.threads)
        self._model(cell.target, cell)
        if cell.drafter == "model":
            self._model(cell.draft, cell)
        self._cells[cell.name] = cell
        return []

    @torch.inference_mode()
    def run(self, ask: Ask) -> dict[str, Any]:
        cell = self._cells[ask.name]
        model = self._model(cell.target, cell)
        sampled = {"do_sample": True, "temperature": ask.temperature, "top_k": 0}
        how = sampled if ask.temperature else {"do_sample": False}
        ids = torch.tensor([ask.ids])
        transformers.set_seed(ask.seed)
        started = perf_counter()
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=ask.max_tokens,
            pad_token_id=model.config.eos_token_id,
            **how,
            **self._speculation(cell),
        )
        seconds = perf_counter() - started
        return {"ids": out[0, len(ask.ids) :].tolist(), "seconds": seconds}

    def drop(self, name: str) -> None:
        del self._cells[name]
        wanted = {
            (folder, cell.options["dtype"])
            for cell in self._cells.values()
            for folder in (cell.target, cell.draft)
        }
        self._models = {key: model for key, model in self._models.items() if key in wanted}

    def _speculation(self, cell: Cell) -> dict[str, Any]:
        if cell.drafter == "ngram":
            return {"prompt_lookup_num_tokens": cell.k, "max_matching_ngram_size": 3}
        if cell.drafter == "none":
            return {}
        draft = self._model(cell.draft, cell)
        # k = 0 leaves the length to the library: it grows and shrinks, and ends at a doubt.
        if cell.k:
            draft.generation_config.num_assistant_tokens = cell.k
            draft.generation_config.num_assistant_tokens_schedule = "constant"
            draft.generation_config.assistant_confidence_threshold = 0.0
        else:
            fresh = transformers.GenerationConfig()
            for name in ("num_assistant_tokens", "num_assistant_tokens_schedule"):
                setattr(draft.generation_config, name, getattr(fresh, name))
            threshold = fresh.assistant_confidence_threshold
            draft.generation_config.assistant_confidence_threshold = threshold
        return {"assistant_model": draft}

    def _model(self, folder: str, cell: Cell) -> Any:
        key = (folder, cell.options["dtype"])
        if key not in self._models:
            load = transformers.AutoModelForCausalLM.from_pretrained
            self._models[key] = load(folder, dtype=getattr(torch, key[1])).eval()
        return self._models[key]


if __name__ == "__main__":
    serve(TransformersSide())
