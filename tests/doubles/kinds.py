"""Every implementation of CausalLM, built small: what contract tests are parametrised over."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from doubles.tiny_attention import TinyAttentionLM
from doubles.tiny_checkpoints import random_llama
from doubles.toy_hybrid import ToyHybrid
from outrider.core.protocols import CausalLM
from outrider.models.fake import Script, ScriptedLM
from outrider.models.llama import Room


def scripted(*, vocab_size: int = 11, seed: int = 0, num_slots: int = 256) -> CausalLM:
    """Soft laws, so that sampling has something to do."""
    script = Script(vocab_size=vocab_size, seed=seed, gap=1.0, spread=2.0, num_slots=num_slots)
    return ScriptedLM(script)


def llama(
    *, vocab_size: int = 96, seed: int = 0, num_slots: int = 256, page_size: int = 4
) -> CausalLM:
    """The vocabulary is the checkpoint's own; `vocab_size` only bounds what tests feed."""
    assert vocab_size <= 96
    return random_llama(seed=seed, room=Room(num_slots=num_slots, page_size=page_size))


Kind = Callable[..., CausalLM]
KINDS: Mapping[str, Kind] = {
    "hybrid": ToyHybrid,
    "attention": TinyAttentionLM,
    "scripted": scripted,
    "llama": llama,
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
