"""Rows of Gemma 4, as models/family_table.py has those of the core."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from outrider.models.configs import Family
from outrider.models.family_table import GELU, NO_MLP_BIAS, TIED
from outrider.plugins.gemma4.config import (
    gemma4_config,
    gemma4_experts,
    gemma4_ropes,
    gemma4_traits,
    gemma4_windows,
)


def _decoder() -> type[Any]:
    from outrider.plugins.gemma4.model import GemmaModel

    return GemmaModel


_GEMMA4 = Family(
    {
        **TIED,
        "vocab_size": 262144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "sliding_window": 512,
        "eos_token_id": 1,
        "vocab_size_per_layer_input": 262144,
        "hidden_size_per_layer_input": 256,
    },
    NO_MLP_BIAS,
    gemma4_windows,
    ropes=gemma4_ropes,
    traits=gemma4_traits,
    experts=gemma4_experts,
    activation_key="hidden_activation",
    activations=GELU,
    qk_norm=True,
    config=gemma4_config,
    decoder=_decoder,
)


FAMILIES: Mapping[str, Family] = {
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": replace(
        _GEMMA4,
        defaults={**_GEMMA4.defaults, "max_position_embeddings": 262144, "sliding_window": 1024},
        fixed={**NO_MLP_BIAS, "hidden_size_per_layer_input": 0, "enable_moe_block": False},
    ),
}


# Models that also see, by the family of the text model within.
WRAPPERS: Mapping[str, str] = {
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
}
