"""Twenty JSON schemas of increasing difficulty, written for these tests (licence: this project's).

Texts of all but the last but one are bounded, white space apart: a model of any quality ends them.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def closed(**properties: Schema) -> Schema:
    """An object of exactly these."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_SHORT: Schema = {"type": "string", "maxLength": 8}
_YEAR: Schema = {"type": "integer", "minimum": 1900, "maximum": 2100}

SCHEMAS: dict[str, Schema] = {
    "a boolean": {"type": "boolean"},
    "a constant": {"const": {"version": 1, "tags": ["a", None]}},
    "a name of three": {"enum": ["red", "green", 'blue "sky"']},
    "an integer in a range": {"type": "integer", "minimum": -20, "maximum": 99},
    "a multiple": {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 5},
    "a short string": {"type": "string", "minLength": 2, "maxLength": 12},
    "a pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    "a list of booleans": {
        "type": "array",
        "items": {"type": "boolean"},
        "minItems": 1,
        "maxItems": 3,
    },
    "an object": closed(ok={"type": "boolean"}),
    "an optional property": {
        "type": "object",
        "properties": {"id": {"type": "integer", "minimum": 0, "maximum": 9}, "note": _SHORT},
        "required": ["id"],
        "additionalProperties": False,
    },
    "a nested object": closed(at=closed(x={"enum": [0, 1]}, y={"enum": [0, 1]}), name=_SHORT),
    "a list of objects": {
        "type": "array",
        "items": closed(kind={"enum": ["get", "put"]}, done={"type": "boolean"}),
        "minItems": 2,
        "maxItems": 2,
    },
    "one type or another": {
        "anyOf": [{"type": "null"}, {"type": "integer", "minimum": 0, "maximum": 9}, _SHORT]
    },
    "a tuple": {
        "type": "array",
        "prefixItems": [_SHORT, _YEAR, {"type": "boolean"}],
        "items": False,
        "minItems": 3,
    },
    "formats": closed(
        day={"type": "string", "format": "date"}, address={"type": "string", "format": "ipv4"}
    ),
    "a reference": {
        "$defs": {"point": closed(x=_YEAR, y=_YEAR)},
        **closed(start={"$ref": "#/$defs/point"}, end={"$ref": "#/$defs/point"}),
    },
    "all of two": {
        "type": "object",
        "allOf": [
            {"properties": {"a": {"enum": [1, 2]}}, "required": ["a"]},
            {"properties": {"b": {"type": "boolean"}}, "required": ["b"]},
        ],
        "properties": {"a": {"enum": [1, 2, 3]}, "b": {"type": "boolean"}},
        "additionalProperties": False,
    },
    "one of two calls": {
        "oneOf": [
            closed(tool={"const": "search"}, query=_SHORT),
            closed(tool={"const": "add"}, left=_YEAR, right=_YEAR),
        ]
    },
    "a list that links": {
        "$defs": {
            "node": closed(
                value={"type": "boolean"},
                next={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
            )
        },
        "$ref": "#/$defs/node",
    },
    "an order": {
        "title": "Order",
        "description": "As pydantic writes the schema of a model with models in it.",
        "$defs": {
            "Size": {"enum": ["small", "large"], "title": "Size", "type": "string"},
            "Line": {"title": "Line", **closed(article=_SHORT, size={"$ref": "#/$defs/Size"})},
        },
        "type": "object",
        "properties": {
            "number": {"title": "Number", "type": "integer", "minimum": 1, "maximum": 999},
            "lines": {
                "title": "Lines",
                "type": "array",
                "items": {"$ref": "#/$defs/Line"},
                "minItems": 1,
                "maxItems": 2,
            },
            "gift": {"anyOf": [_SHORT, {"type": "null"}], "default": None, "title": "Gift"},
        },
        "required": ["number", "lines", "gift"],
        "additionalProperties": False,
    },
}
# Its texts have no longest one.
ENDLESS = "a list that links"
