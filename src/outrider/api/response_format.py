"""What the body of an HTTP request asks a text to be, as OpenAI, vLLM and llama.cpp say it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from outrider.api.structure import StructureOptions
from outrider.core.errors import ConfigError

# The name of each by the names of others: keys of a body, and of vLLM's `structured_outputs`.
_KEYS = {
    "json_schema": "schema",
    "grammar": "grammar",
    "guided_json": "schema",
    "guided_regex": "regex",
    "guided_choice": "choices",
    "guided_grammar": "grammar",
    # SGLang's.
    "regex": "regex",
    "ebnf": "grammar",
}
_WITHIN = {
    "json": "schema",
    "json_object": "json",
    "regex": "regex",
    "choice": "choices",
    "grammar": "grammar",
}
# What a body may have of these.
KEYS = ("response_format", "structured_outputs", *_KEYS)


def structure_of(
    body: Mapping[str, object], *, format_name: str = "response_format"
) -> StructureOptions:
    """Empty where nothing is asked for. `format_name` is what the body's API calls the format, in
    errors and notes. Raises ConfigError for what is not understood."""
    found: dict[str, object] = {}
    for key, value in body.items():
        if value is None or key not in KEYS:
            continue
        if key == "response_format":
            asked = _of_format(_mapping(key, value))
        elif key == "structured_outputs":
            asked = _of_vllm(_mapping(key, value))
        else:
            asked = {_KEYS[key]: value}
        if asked and found:
            raise ConfigError(f"{key}: the body asks for a structure twice.", hint="keep one")
        if "schema" in asked:
            name = format_name if key == "response_format" else key
            asked = {"strict": False, **asked, "parts": {name: asked["schema"]}}
        found |= asked
    return cast("StructureOptions", found)


def _of_format(given: Mapping[str, object]) -> dict[str, object]:
    kind = given.get("type")
    if kind == "text":
        return {}
    if kind == "json_object":
        # llama.cpp reads a schema here as well.
        schema = given.get("schema")
        return {"json": True} if schema is None else {"schema": schema}
    if kind == "json_schema":
        # llama.cpp reads the schema without an object around it as well.
        flat = given if "schema" in given else given.get("json_schema")
        inner = _mapping("response_format.json_schema", flat)
        schema = _mapping("response_format.json_schema.schema", inner.get("schema"))
        return {"schema": schema, "strict": inner.get("strict") is True}
    raise ConfigError(
        f"response_format: {str(kind)[:40]!r} is no type that is known.",
        hint="text, json_object or json_schema",
    )


def _of_vllm(given: Mapping[str, object]) -> dict[str, object]:
    asked = {key: value for key, value in given.items() if value not in (None, False)}
    unknown = [key for key in asked if key not in _WITHIN]
    if unknown:
        raise ConfigError(
            f"structured_outputs: {unknown[0]!r} is not known.", hint=f"known: {', '.join(_WITHIN)}"
        )
    return {_WITHIN[key]: value for key, value in asked.items()}


def _mapping(name: str, value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name}: wanted is an object, got {type(value).__name__}.")
    return cast("Mapping[str, object]", value)
