"""A JSON schema checked the plain way, on a value that was read: what a grammar is compared with.

Only the keywords that the tests' schemas use; one that is not known is a mistake of the test.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import date
from ipaddress import IPv4Address
from typing import Any, cast
from uuid import UUID

_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
}
_FORMATS = {"date": date.fromisoformat, "uuid": UUID, "ipv4": IPv4Address}
_NOTES = {"title", "description", "default", "$defs", "format"}


def is_valid(
    value: object, schema: Mapping[str, Any], root: Mapping[str, Any] | None = None
) -> bool:
    """Whether `value` is one of `schema`, whose references are of `root`, itself if None."""
    whole = schema if root is None else root
    if "$ref" in schema:
        parts = str(schema["$ref"]).removeprefix("#/").split("/")
        found: Any = whole
        for part in parts:
            found = found[part]
        return is_valid(value, found, whole)
    if "format" in schema and isinstance(value, str):
        _FORMATS[schema["format"]](value)
    checks = (_is_of_type, _is_combined, _is_number, _is_text, _is_list, _is_object)
    known = {key for check in checks for key in _KEYS[check.__name__]} | _NOTES
    if set(schema) - known:
        raise ValueError(f"keywords that are not checked: {set(schema) - known}")
    return all(check(value, schema, whole) for check in checks)


_KEYS = {
    "_is_of_type": {"type", "enum", "const"},
    "_is_combined": {"anyOf", "oneOf", "allOf"},
    "_is_number": {"minimum", "maximum", "multipleOf"},
    "_is_text": {"minLength", "maxLength", "pattern"},
    "_is_list": {"items", "prefixItems", "minItems", "maxItems"},
    "_is_object": {"properties", "required", "additionalProperties"},
}


def _is_of_type(value: object, schema: Mapping[str, Any], root: Mapping[str, Any]) -> bool:
    del root
    names = schema.get("type", [])
    wanted = [names] if isinstance(names, str) else names
    right = not wanted or any(_is_a(value, name) for name in wanted)
    return (
        right
        and ("enum" not in schema or value in schema["enum"])
        and ("const" not in schema or value == schema["const"])
    )


def _is_a(value: object, name: str) -> bool:
    if name in ("integer", "number"):
        return isinstance(value, int if name == "integer" else (int, float)) and not isinstance(
            value, bool
        )
    return isinstance(value, _TYPES[name])


def _is_combined(value: object, schema: Mapping[str, Any], root: Mapping[str, Any]) -> bool:
    def count(key: str) -> int:
        return sum(is_valid(value, part, root) for part in schema[key])

    return (
        ("anyOf" not in schema or count("anyOf") > 0)
        and ("oneOf" not in schema or count("oneOf") == 1)
        and ("allOf" not in schema or count("allOf") == len(schema["allOf"]))
    )


def _is_number(value: object, schema: Mapping[str, Any], root: Mapping[str, Any]) -> bool:
    del root
    if not isinstance(value, int | float) or isinstance(value, bool):
        return True
    return (
        schema.get("minimum", -math.inf) <= value <= schema.get("maximum", math.inf)
        and value % schema.get("multipleOf", value or 1) == 0
    )


def _is_text(value: object, schema: Mapping[str, Any], root: Mapping[str, Any]) -> bool:
    del root
    if not isinstance(value, str):
        return True
    return (
        schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", math.inf)
        and re.search(schema.get("pattern", ""), value) is not None
    )


def _is_list(value: object, schema: Mapping[str, Any], root: Mapping[str, Any]) -> bool:
    if not isinstance(value, list):
        return True
    items = cast("list[object]", value)
    first = schema.get("prefixItems", [])
    rest = schema.get("items", {})
    if not schema.get("minItems", 0) <= len(items) <= schema.get("maxItems", math.inf):
        return False
    if rest is False:
        return len(items) <= len(first) and all(
            is_valid(item, part, root) for item, part in zip(items, first, strict=False)
        )
    parts = [*first, *[rest] * len(items)]
    return all(is_valid(item, part, root) for item, part in zip(items, parts, strict=False))


def _is_object(value: object, schema: Mapping[str, Any], root: Mapping[str, Any]) -> bool:
    if not isinstance(value, dict):
        return True
    found = cast("dict[str, object]", value)
    known = schema.get("properties", {})
    if any(key not in found for key in schema.get("required", [])):
        return False
    if schema.get("additionalProperties") is False and found.keys() - known.keys():
        return False
    return all(is_valid(item, known[key], root) for key, item in found.items() if key in known)
