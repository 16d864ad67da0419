"""Models by their sizes alone: known names, and config.json files. No tensors.

The sizes are those of the published configurations; bytes are two a number, bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from outrider.core.errors import CheckpointError, ConfigError, did_you_mean
from outrider.core.spec import ModelSpec
from outrider.models.families import LLAMA_FAMILIES, GPT2Config, LlamaConfig, parse_llama
from outrider.models.json_object import JsonObject
from outrider.pairs.catalog import EMBEDDED_DRAFT, EMBEDDED_TARGET

_LLAMA3 = 128_256


def _llama(
    widths: tuple[int, int],
    num_layers: int,
    heads: tuple[int, int, int],
    vocab_size: int,
    *,
    tied: bool = False,
    family: str = "llama",
) -> LlamaConfig:
    """`widths` of the residual and the feed-forward, `heads` of queries and keys, and their size.
    The window is no limit here."""
    return LlamaConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=widths[0],
        ffn_size=widths[1],
        num_layers=num_layers,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        max_tokens=131_072,
        tie_word_embeddings=tied,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
    )


def _gpt2(hidden_size: int, num_layers: int, num_heads: int) -> GPT2Config:
    return GPT2Config(
        vocab_size=50_257,
        hidden_size=hidden_size,
        ffn_size=4 * hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        max_tokens=1024,
    )


SIZES: Mapping[str, LlamaConfig | GPT2Config] = {
    "llama-1b": _llama((2048, 8192), 16, (32, 8, 64), _LLAMA3, tied=True),
    "llama-3b": _llama((3072, 8192), 28, (24, 8, 128), _LLAMA3, tied=True),
    "llama-8b": _llama((4096, 14336), 32, (32, 8, 128), _LLAMA3),
    "llama-70b": _llama((8192, 28672), 80, (64, 8, 128), _LLAMA3),
    "tinyllama": _llama((2048, 5632), 22, (32, 4, 64), 32_000),
    "phi3-mini": _llama((3072, 8192), 32, (32, 32, 96), 32_064, family="phi3"),
    "smollm2-135m": _llama((576, 1536), 30, (9, 3, 64), 49_152, tied=True),
    "smollm2-1.7b": _llama((2048, 8192), 24, (32, 32, 64), 49_152, tied=True),
    "qwen2.5-0.5b": _llama((896, 4864), 24, (14, 2, 64), 151_936, tied=True, family="qwen2"),
    "qwen2.5-7b": _llama((3584, 18944), 28, (28, 4, 128), 152_064, family="qwen2"),
    "qwen3-0.6b": _llama((1024, 3072), 28, (16, 8, 128), 151_936, tied=True, family="qwen3"),
    "qwen3-8b": _llama((4096, 12288), 36, (32, 8, 128), 151_936, family="qwen3"),
    "qwen3-32b": _llama((5120, 25600), 64, (64, 8, 128), 151_936, family="qwen3"),
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "distilgpt2": _gpt2(768, 6, 12),
    "embedded": _llama((256, 704), 8, (4, 2, 64), 8192, tied=True),
    "embedded-draft": _llama((128, 352), 2, (2, 1, 64), 8192, tied=True),
}
# What `outrider pairs` calls them.
MODEL_IDS: Mapping[str, str] = {
    EMBEDDED_TARGET: "embedded",
    EMBEDDED_DRAFT: "embedded-draft",
    "openai-community/gpt2": "gpt2",
    "openai-community/gpt2-xl": "gpt2-xl",
    "distilbert/distilgpt2": "distilgpt2",
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": "tinyllama",
    "meta-llama/Meta-Llama-3-8B-Instruct": "llama-8b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-8b",
    "meta-llama/Llama-3.2-1B-Instruct": "llama-1b",
    "meta-llama/Llama-3.2-3B-Instruct": "llama-3b",
    "microsoft/Phi-3-mini-4k-instruct": "phi3-mini",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "smollm2-135m",
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": "smollm2-1.7b",
    "Qwen/Qwen2.5-0.5B-Instruct": "qwen2.5-0.5b",
    "Qwen/Qwen2.5-7B-Instruct": "qwen2.5-7b",
    "Qwen/Qwen3-0.6B": "qwen3-0.6b",
    "Qwen/Qwen3-8B": "qwen3-8b",
}
_BYTES = 2


def spec_named(name: str) -> ModelSpec:
    """A known name, a model of `outrider pairs`, a config.json, or the folder of one. Raises
    ConfigError for another name and CheckpointError for a file that cannot be read."""
    known = MODEL_IDS.get(name, name)
    if known in SIZES:
        return SIZES[known].spec(known, bytes_per_weight=_BYTES, bytes_per_kv=_BYTES)
    path = Path(name)
    if name and path.is_dir():
        path /= "config.json"
    if name and path.is_file():
        return _read(path)
    raise ConfigError(
        f"no model sizes {name!r}.",
        hint=did_you_mean(name, SIZES) + " Or name a config.json.",
    )


def _read(path: Path) -> ModelSpec:
    raw = JsonObject.read(path)
    name = path.parent.name or path.stem
    if raw.text("model_type") in LLAMA_FAMILIES:
        return parse_llama(raw).spec(name, bytes_per_weight=_BYTES, bytes_per_kv=_BYTES)
    # Imported here: configs of hybrids, and of what transformers runs, come with tensors.
    from outrider.models.hf_config import read_config

    if path.name != "config.json":
        raise CheckpointError(
            f"{path} must be called config.json, for a model of its family.",
            hint="name its folder",
        )
    return read_config(path.parent).spec(name, bytes_per_weight=_BYTES, bytes_per_kv=_BYTES)
