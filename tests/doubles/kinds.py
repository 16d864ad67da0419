"""Every implementation of CausalLM, built small: what contract tests are parametrised over."""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from doubles.tiny_attention import TinyAttentionLM
from doubles.tiny_checkpoints import variant, write_checkpoint
from doubles.tiny_hybrids import hybrid_kind
from doubles.toy_hybrid import ToyHybrid
from outrider.core.protocols import CausalLM
from outrider.models.decoder import LoadOptions, ModelCapacity
from outrider.models.loading import load_model
from outrider_lab.models.scripted import Script, ScriptedLM


def scripted(*, vocab_size: int = 11, seed: int = 0, num_slots: int = 256) -> CausalLM:
    """Soft distributions, so that sampling has something to do."""
    script = Script(vocab_size=vocab_size, seed=seed, gap=1.0, spread=2.0, num_slots=num_slots)
    return ScriptedLM(script)


Kind = Callable[..., CausalLM]


def loaded(name: str) -> Kind:
    """The tiny checkpoint of this name, with the options that `scripted` has."""

    def build(
        *, vocab_size: int = 96, seed: int = 0, num_slots: int = 256, page_size: int = 4
    ) -> CausalLM:
        # The vocabulary is the checkpoint's own; `vocab_size` only bounds what tests feed.
        assert vocab_size <= 96
        capacity = ModelCapacity(num_slots=num_slots, page_size=page_size)
        return load_model(stored(name, seed), LoadOptions(capacity=capacity, device="cpu"))

    return build


@functools.cache
def stored(name: str, seed: int) -> Path:
    """A folder that lives as long as the process: writing one takes longer than reading it."""
    folder = TemporaryDirectory(prefix="outrider-kinds-")
    atexit.register(folder.cleanup)
    return write_checkpoint(Path(folder.name), variant(name), seed=seed)


llama = loaded("llama2")
KINDS: Mapping[str, Kind] = {
    "hybrid": ToyHybrid,
    "attention": TinyAttentionLM,
    "scripted": scripted,
    "llama": llama,
    "qwen2": loaded("qwen2"),
    "qwen3": loaded("qwen3"),
    "phi3": loaded("phi3_partial"),
    "gpt2": loaded("gpt2"),
    "qwen hybrid, ring": hybrid_kind("qwen3_5", "ring"),
    "qwen hybrid, replay": hybrid_kind("qwen3_5", "replay"),
    "qwen mixture": hybrid_kind("qwen3_next", "replay"),
}
# float64 doubles agree to the last few bits, float32 models to their own rounding.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-4}


def close_to(got: Tensor, wanted: Tensor) -> None:
    """Equal up to rounding; written so that NaN fails."""
    assert got.shape == wanted.shape
    if not got.numel():
        return
    bound = TOLERANCE[got.dtype] * (1 + float(wanted.abs().max()))
    assert float((got - wanted).abs().max()) <= bound
