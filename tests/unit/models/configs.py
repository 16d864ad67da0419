"""Configs of every family from the tiny checkpoints' keys, a few of them changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from doubles.tiny_checkpoints import COMMON, COMMON_GPT2
from outrider.models.configs import GPT2Config, LlamaConfig
from outrider.models.families import parse_gpt2, parse_llama
from outrider.models.json_object import JsonObject

ABSENT = object()


def json_of(base: Mapping[str, Any], changes: Mapping[str, Any]) -> JsonObject:
    values = {key: value for key, value in {**base, **changes}.items() if value is not ABSENT}
    return JsonObject("config.json", values)


def parse(*, generation: dict[str, Any] | None = None, **changes: Any) -> LlamaConfig:
    extra = JsonObject("generation_config.json", generation) if generation is not None else None
    return parse_llama(json_of(COMMON, changes), extra)


def parse_gpt(*, generation: dict[str, Any] | None = None, **changes: Any) -> GPT2Config:
    extra = JsonObject("generation_config.json", generation) if generation is not None else None
    return parse_gpt2(json_of(COMMON_GPT2, changes), extra)
