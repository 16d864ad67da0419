"""Reads a Hugging Face `config.json` by the family that its `model_type` names. No tensors.

Each family has a config of its own (families.py, qwen_hybrid_config.py); `DecoderConfig` has their
common fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from outrider.core.errors import CheckpointError, ConfigError, nearest
from outrider.core.params import ADVISED, params_for_one
from outrider.core.spec import DecoderConfig
from outrider.models.checkpoint import GENERATION, Checkpoint, config_document, open_checkpoint
from outrider.models.families import (
    DECODER_FAMILIES,
    GPT2Config,
    LlamaConfig,
    parse_gpt2,
    parse_llama,
)
from outrider.models.json_object import JsonObject
from outrider.models.qwen_hybrid_config import HYBRID_FAMILIES, QwenHybridConfig, parse_qwen_hybrid

NativeConfig = LlamaConfig | GPT2Config | QwenHybridConfig

_PARSERS: Mapping[str, Callable[[JsonObject, JsonObject | None], NativeConfig]] = {
    **dict.fromkeys(DECODER_FAMILIES, parse_llama),
    "gpt2": parse_gpt2,
    **dict.fromkeys(HYBRID_FAMILIES, parse_qwen_hybrid),
}
FAMILIES = tuple(sorted(_PARSERS))
_ENCODERS = frozenset((
    "albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "modernbert",
    "mpnet", "roberta", "xlm-roberta",
))  # fmt: skip


def read_config(path: Path) -> DecoderConfig:
    """Read `config.json` and, if there is one, `generation_config.json` of a folder or GGUF file.

    A family without a decoder of ours is read by transformers, if it is installed. Raises
    CheckpointError, naming file and key, for a bad or unknown value.
    """
    checkpoint = open_checkpoint(path)
    family = model_type_of(checkpoint)
    if family in FAMILIES:
        return native_config_of(checkpoint)
    if family in _ENCODERS and not _config(checkpoint).flag("is_decoder", default=False):
        raise CheckpointError(
            f"{path}: a model of type {family} is an encoder: it reads a text and writes none.",
            hint="choose a model that writes, such as `outrider pull HuggingFaceTB/"
            "SmolLM2-135M-Instruct`",
        )
    # Imported here: only such a family needs torch, and transformers, to be read.
    from outrider.plugins.transformers.config import read_adapter_config

    return read_adapter_config(checkpoint)


def read_native_config(path: Path) -> NativeConfig:
    """Read the config of a family that a decoder of ours runs, as `read_config` does."""
    return native_config_of(open_checkpoint(path))


def read_model_type(path: Path) -> str:
    """The `model_type` of a folder or GGUF file. Raises CheckpointError if its config has none."""
    return model_type_of(open_checkpoint(path))


def read_sampling(path: Path) -> dict[str, float]:
    """The sampling that a checkpoint recommends, as fields of SamplingParams. Empty if it names
    none, or greedy decoding. Values that SamplingParams would refuse are left out."""
    generation = _generation(open_checkpoint(path))
    values: Mapping[str, object] = {} if generation is None else generation.values
    if values.get("do_sample") is False:
        return {}
    found = dict[str, float]()
    for name in ADVISED:
        value = values.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            number = max(int(value), 0) if name == "top_k" else float(value)
            with suppress(ConfigError):
                params_for_one(None, {name: number})
                found[name] = number
    if values.get("do_sample") is True or found.keys() & {"top_k", "top_p", "min_p"}:
        found.setdefault("temperature", 1.0)
    return found


def native_config_of(checkpoint: Checkpoint) -> NativeConfig:
    """The config of a checkpoint that a decoder of ours runs. Raises CheckpointError."""
    config = parse_config(_config(checkpoint), _generation(checkpoint))
    return replace(config, notes=(*config.notes, *checkpoint.notes))


def model_type_of(checkpoint: Checkpoint) -> str:
    """The `model_type` of a checkpoint. Raises CheckpointError if its config has none."""
    return _config(checkpoint).text("model_type")


def parse_config(raw: JsonObject, generation: JsonObject | None = None) -> NativeConfig:
    """Parse a config. Raises CheckpointError, naming file and key, for a bad or unknown value."""
    family = raw.text("model_type")
    if family not in _PARSERS:
        known = ", ".join(FAMILIES)
        raise CheckpointError(
            f"{raw.where}: Outrider has no decoder for model_type {family!r}.",
            hint=nearest(
                family,
                FAMILIES,
                f"It has {known}; others run through transformers: pip install 'outrider[hf]'",
            ),
        )
    return _PARSERS[family](raw, generation)


def _config(checkpoint: Checkpoint) -> JsonObject:
    return config_document(checkpoint, "is it a Hugging Face model folder?")


def _generation(checkpoint: Checkpoint) -> JsonObject | None:
    return checkpoint.document(GENERATION) if checkpoint.has(GENERATION) else None
