"""Structures that are meant to cost much: forty kinds, each below the limit of their size or just
above it. Nobody knows of all of them what they end as; all must end soon."""

from __future__ import annotations

from typing import Any


def _nested(depth: int, *, arrays: bool = False) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        if arrays:
            found = {"type": "array", "items": found}
        else:
            found = {"type": "object", "properties": {"a": found}, "required": ["a"]}
    return found


def _branches(width: int, depth: int) -> dict[str, Any]:
    if not depth:
        return {"type": "string"}
    below = _branches(width, depth - 1)
    return {"anyOf": [{"type": "object", "properties": {f"k{i}": below}} for i in range(width)]}


def _doubling(depth: int, word: str) -> dict[str, Any]:
    """Each definition has the next one twice."""
    found = {
        f"d{i}": {word: [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]}
        for i in range(depth)
    }
    return {"$defs": {**found, f"d{depth}": {"type": "object"}}, "$ref": "#/$defs/d0"}


def _properties(number: int, value: object = None) -> dict[str, Any]:
    return {f"p{i}": value or {"type": "string"} for i in range(number)}


_LETTERS = "abcdefghij"
HOSTILE: dict[str, dict[str, Any]] = {
    "objects in objects": {"schema": _nested(60)},
    "objects in objects, many": {"schema": _nested(240)},
    "arrays in arrays": {"schema": _nested(120, arrays=True)},
    "a huge enum": {"schema": {"enum": [f"value number {i}" for i in range(2_500)]}},
    "a huge enum of one long text": {"schema": {"enum": ["x" * 60_000]}},
    "an enum beyond the limit": {"schema": {"enum": ["x" * 70_000]}},
    "many properties": {"schema": {"type": "object", "properties": _properties(1_800)}},
    "many that are required": {
        "schema": {
            "type": "object",
            "properties": _properties(1_200),
            "required": [f"p{i}" for i in range(1_200)],
        }
    },
    "many patterns of properties": {
        "schema": {
            "type": "object",
            "patternProperties": {f"^{c}.*{d}$": {} for c in _LETTERS for d in _LETTERS},
        }
    },
    "many items": {"schema": {"type": "array", "items": {}, "minItems": 10**5, "maxItems": 10**6}},
    "many items of many": {
        "schema": {
            "type": "array",
            "minItems": 1_000,
            "items": {"type": "array", "minItems": 1_000, "items": {"type": "integer"}},
        }
    },
    "a long text": {"schema": {"type": "string", "minLength": 10**5, "maxLength": 10**7}},
    "a count beyond numbers": {"schema": {"type": "string", "maxLength": 10**18}},
    "a pattern that goes back": {"schema": {"type": "string", "pattern": "^(a+)+$"}},
    "a pattern of counts": {
        "schema": {"type": "string", "pattern": "^(([a-z]{1,100}){1,100}){1,100}$"}
    },
    "a large divisor": {"schema": {"type": "integer", "multipleOf": 99_991}},
    "a small divisor": {"schema": {"type": "number", "multipleOf": 1e-7, "maximum": 1e15}},
    "a wide range": {"schema": {"type": "integer", "minimum": -(10**18), "maximum": 10**18}},
    "no number": {"schema": {"type": "integer", "minimum": 2, "maximum": 1}},
    "a branch of branches": {"schema": _branches(5, 4)},
    "all of many": {
        "schema": {
            "allOf": [
                {"type": "object", "properties": {f"k{i}": {"pattern": f"a{{1,{i + 1}}}"}}}
                for i in range(400)
            ]
        }
    },
    "one of many": {"schema": {"oneOf": [{"multipleOf": i} for i in range(2, 500)]}},
    "a product of branches": {
        "schema": {
            "allOf": [
                {"anyOf": [{"properties": {f"p{i}{j}": {"type": "integer"}}} for j in range(4)]}
                for i in range(10)
            ]
        }
    },
    "itself": {"schema": {"$ref": "#"}},
    "a ring": {
        "schema": {
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
            "$ref": "#/$defs/a",
        }
    },
    "itself, or a list of itself": {
        "schema": {
            "$defs": {
                "a": {"anyOf": [{"$ref": "#/$defs/a"}, {"items": {"$ref": "#/$defs/a"}}]},
            },
            "$ref": "#/$defs/a",
        }
    },
    "twice the next": {"schema": _doubling(24, "allOf")},
    "one of two of the next": {"schema": _doubling(24, "anyOf")},
    "another machine's": {"schema": {"$ref": "http://127.0.0.1:9/schema.json"}},
    "counts of counts": {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    "sixty thousand letters": {"regex": "a?" * 30_000},
    "all words": {"regex": "|".join(f"word{i}" for i in range(6_000))},
    "a far look back": {"regex": "(.*a.{100}){20}"},
    "parentheses": {"regex": "(" * 30_000 + ")" * 30_000},
    "letters of all scripts": {"regex": r"(\p{L}{1,200}\p{N}{1,200}){30}"},
    "a rule of itself twice": {"grammar": 'start: a\na: a a | "x"\n'},
    "a rule of nothing": {"grammar": "start: e e e e\ne: e e |\n"},
    "eight thousand that may be": {"grammar": "start: " + " ".join(['"x"?'] * 8_000)},
    "two thousand rules": {
        "grammar": "start: "
        + " ".join(f"a{i}" for i in range(1_800))
        + "".join(f'\na{i}: "x" | "y" a{i}' for i in range(1_800))
    },
    "a terminal far back": {"grammar": "start: T\nT: /(a|b)*a(a|b){60}/\n"},
    "GBNF that begins with itself": {"grammar": 'root ::= root root | "a"'},
    "eight thousand choices": {"choices": [f"c{i}" for i in range(8_000)]},
}
