"""Hugging Face `transformers` as a peer: the same weights, prompts and token counter.

`transformers` is an optional dependency; `outrider bench peers` runs it in a process of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from outrider.core.errors import MachineError


class HfPeer:
    """Greedy `generate` of one checkpoint in one dtype. `mode` is plain, assisted or lookup."""

    def __init__(self, target: Path, draft: Path, dtype: torch.dtype) -> None:
        transformers = _import_transformers()
        load = transformers.AutoModelForCausalLM.from_pretrained
        self._target: Any = load(target, dtype=dtype).eval()
        self._draft: Any = load(draft, dtype=dtype).eval()
        self._pad = self._target.config.eos_token_id

    @torch.inference_mode()
    def generate(self, ids: list[list[int]], *, max_tokens: int, **how: Any) -> list[list[int]]:
        """Emitted ids of each prompt; several prompts run as one left-padded batch."""
        longest = max(map(len, ids))
        padded = [[self._pad] * (longest - len(row)) + row for row in ids]
        mask = [[0] * (longest - len(row)) + [1] * len(row) for row in ids]
        out = self._target.generate(
            input_ids=torch.tensor(padded),
            attention_mask=torch.tensor(mask),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=self._pad,
            **how,
        )
        return [self._emitted(row) for row in out[:, longest:].tolist()]

    def assisted(self) -> dict[str, Any]:
        """How to ask for the draft model."""
        return {"assistant_model": self._draft}

    def _emitted(self, row: list[int]) -> list[int]:
        end = row.index(self._pad) + 1 if self._pad in row else len(row)
        return row[:end]


def _import_transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise MachineError(
            "transformers is not installed, and this comparison runs it.",
            hint="pip install 'outrider[hf]'",
        ) from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers
