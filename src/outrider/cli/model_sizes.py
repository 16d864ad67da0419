"""Models by their sizes alone: known names, and config.json files. No tensors.

Bytes are two a number, bfloat16.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from outrider.core.errors import CheckpointError, ConfigError, did_you_mean
from outrider.core.spec import ModelSpec
from outrider.models.families import LLAMA_FAMILIES, GPT2Config, LlamaConfig, parse_llama
from outrider.models.json_object import JsonObject

_BYTES = 2
_LONG = 131_072


@cache
def _table() -> Mapping[str, Any]:
    return json.loads(files("outrider.cli").joinpath("model_sizes.json").read_text("utf-8"))


def known_sizes() -> Mapping[str, Mapping[str, Any]]:
    return _table()["models"]


def known_ids() -> Mapping[str, str]:
    """What `outrider pairs` calls them."""
    return _table()["names"]


def _config(sizes: Mapping[str, Any]) -> LlamaConfig | GPT2Config:
    family = sizes["family"]
    if family == "gpt2":
        return GPT2Config(**sizes)
    more = {"max_tokens": _LONG, "qkv_bias": family == "qwen2", "qk_norm": family == "qwen3"}
    return LlamaConfig(**more, **sizes)


def spec_named(name: str) -> ModelSpec:
    """A known name, a model of `outrider pairs`, a config.json, or the folder of one. Raises
    ConfigError for another name and CheckpointError for a file that cannot be read."""
    known = known_ids().get(name, name)
    if known in known_sizes():
        config = _config(known_sizes()[known])
        return config.spec(known, bytes_per_weight=_BYTES, bytes_per_kv=_BYTES)
    path = Path(name)
    if name and path.is_dir():
        path /= "config.json"
    if name and path.is_file():
        return _read(path)
    raise ConfigError(
        f"no model sizes {name!r}.",
        hint=did_you_mean(name, known_sizes()) + " Or name a config.json.",
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
