"""Tiny random checkpoints of families that transformers knows and Outrider has no decoder for.

Feed-forward and head sizes are no multiples of a vector register, so that arithmetic which depends
on where a tensor ends would show.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from outrider.models.decoder import LoadOptions, ModelCapacity
from outrider.plugins.transformers.model import AdapterModel, load_adapter

VOCAB = 96
_COMMON: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 40,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# What each family needs beside the common settings.
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "gpt_neox": {"rotary_pct": 0.6},
    "stablelm": {"partial_rotary_factor": 0.4},
    "olmo2": {},
    "gemma": {"head_dim": 12},
    "starcoder2": {},
    "gpt2": {"n_inner": 52},
    "opt": {"ffn_dim": 52, "word_embed_proj_dim": 40},
    "gpt_bigcode": {},
    "phi": {"partial_rotary_factor": 0.4},
    "cohere": {},
}

_ROUTED = {
    "head_dim": 12,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
_LOCAL = {"num_local_experts": 6, "num_experts_per_tok": 2}
_MIXTURE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
# Families with experts in the library's common form.
MIXTURES: Mapping[str, Mapping[str, Any]] = {
    "glm4_moe": {**_ROUTED, "n_shared_experts": 1},
    "minimax_m2": {**_LOCAL, "head_dim": 12},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2},
    "granitemoe": _LOCAL,
    "ernie4_5_moe": {
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_intermediate_size": 20,
        "moe_num_shared_experts": 1,
    },
    "hunyuan_v1_moe": {"num_experts": 6, "moe_topk": 2, "head_dim": 12},
    "dots1": {**_ROUTED, "n_shared_experts": 1},
    "phimoe": _LOCAL,
    "qwen2_moe": {**_MIXTURE, "shared_expert_intermediate_size": 28},
    "qwen3_moe": {**_MIXTURE, "head_dim": 12, "norm_topk_prob": True},
    "exaone_moe": {**_MIXTURE, "sliding_window": 128},
    "hy_v3": {**_MIXTURE, "head_dim": 12},
    "solar_open": {**_ROUTED, "n_shared_experts": 1},
    "mellum": {**_MIXTURE, "head_dim": 12, "sliding_window": 128},
    "cohere2_moe": {**_MIXTURE, "head_dim": 12, "sliding_window": 128},
    "afmoe": {**_MIXTURE, "head_dim": 12, "sliding_window": 128, "num_dense_layers": 1},
    "laguna": {**_MIXTURE, "head_dim": 12, "sliding_window": 128},
    "flex_olmo": {"num_experts": 6, "num_experts_per_tok": 2},
}


@contextmanager
def hushed() -> Generator[None]:
    """transformers warns of its own affairs when it is imported and when it saves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers  # pyright: ignore[reportMissingTypeStubs]

        library: Any = transformers
        library.utils.logging.disable_progress_bar()
        library.utils.logging.set_verbosity_error()
        yield


def random_hf(family: str, changes: Mapping[str, Any] | None = None, *, seed: int = 0) -> Any:
    """A transformers model with weights of our own making, so that distributions are far from
    flat."""
    with hushed():
        from transformers import AutoConfig, AutoModelForCausalLM

        settings = {**_COMMON, **FAMILIES.get(family, MIXTURES.get(family, {})), **(changes or {})}
        configs: Any = AutoConfig
        loader: Any = AutoModelForCausalLM
        model = loader.from_config(configs.for_model(family, **settings))
    randomise(model, seed)
    return model


def random_wrapper(
    family: str,
    text: Mapping[str, Any],
    eyes: Mapping[str, Any],
    *,
    joint: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Any:
    """The same of a model that also sees, from settings of its two parts."""
    with hushed():
        from transformers import AutoConfig, AutoModelForImageTextToText

        configs: Any = AutoConfig
        loader: Any = AutoModelForImageTextToText
        settings = configs.for_model(
            family, text_config=dict(text), vision_config=dict(eyes), **(joint or {})
        )
        settings._attn_implementation = "eager"
        model = loader.from_config(settings).eval()
    randomise(model, seed)
    model.tie_weights()
    return model


def randomise(model: Any, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=rng)
        # Vectors that a family draws by itself, or leaves as memory was, differ each time.
        is_given = bool((weight.data == weight.data.flatten()[0]).all())
        given = weight.data if is_given else torch.zeros_like(weight.data)
        weight.data = 0.15 * noise if weight.dim() > 1 else given + 0.1 * noise
    # What experts are chosen by is no parameter, and neither is a factor of Gemma 4's layers.
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.data = 1 + 0.1 * torch.randn(buffer.shape, generator=rng)
        if name.endswith("e_score_correction_bias"):
            noise = torch.randn(buffer.shape, generator=rng)
            buffer.data = 0.1 * noise


def write_hf(
    folder: Path, family: str, changes: Mapping[str, Any] | None = None, *, seed: int = 0
) -> Path:
    model = random_hf(family, changes, seed=seed)
    with hushed():
        model.tie_weights()
        model.save_pretrained(folder)
    return folder


def tiny_adapter(
    family: str, *, dtype: str = "float32", seed: int = 0, force_reference: bool = False
) -> AdapterModel:
    options = LoadOptions(
        capacity=ModelCapacity(num_slots=256, page_size=4),
        dtype=dtype,
        device="cpu",
        force_reference=force_reference,
    )
    with TemporaryDirectory() as folder:
        return load_adapter(write_hf(Path(folder), family, seed=seed), options, name="tiny")


def with_room(model: AdapterModel, capacity: ModelCapacity) -> AdapterModel:
    """The same weights over a fresh arena."""
    return AdapterModel(model.config, model.body, capacity, name=model.spec.name)
