"""Schemas in the keywords that the library follows: what is rewritten, left out, or refused."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.api.structure import followed, moved
from outrider.core.errors import ConfigError

STRINGS = {"type": "string"}


def loose(schema: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    found = followed(schema, strict=False, called="s")
    return found.schema, found.notes


@pytest.mark.parametrize(
    "name",
    [
        *("path", "file-path", "password", "binary", "byte", "url", "uri-reference", "regex"),
        *("json-pointer", "color", "phone", "idn-email", "my-own", 7, ["date"]),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_a_format_that_is_not_known_constrains_nothing(name: object, strict: bool) -> None:
    schema = {"properties": {"a": {**STRINGS, "format": name, "maxLength": 3}}}
    found = followed(schema, strict=strict, called="s")
    assert found.schema == {"properties": {"a": {**STRINGS, "maxLength": 3}}}
    assert found.notes == (f"s: properties.a.format: {str(name)!r} is not known: left out",)


def test_formats_of_numbers_are_not_noted() -> None:
    assert loose({"type": "integer", "format": "int32"}) == ({"type": "integer"}, ())


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"uniqueItems": False}, {}),
        ({"then": {}, "else": {}, "minContains": 2, "$dynamicAnchor": "a"}, {}),
        ({"if": {"type": "null"}}, {}),
        ({"not": False, "dependentRequired": {}}, {}),
        ({"unevaluatedItems": True}, {"items": True}),
        ({"unevaluatedProperties": False}, {"additionalProperties": False}),
        ({"unevaluatedItems": STRINGS, "prefixItems": []}, {"prefixItems": [], "items": STRINGS}),
        ({"propertyNames": {"type": "string", "title": "Key"}}, {}),
        ({"propertyNames": True}, {}),
        (
            {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": STRINGS},
            {"properties": {"a": STRINGS, "b": STRINGS}, "additionalProperties": False},
        ),
        (
            {"propertyNames": {"const": "b"}, "properties": {"a": {}, "b": STRINGS}},
            {"properties": {"b": STRINGS}, "additionalProperties": False},
        ),
        (
            {"propertyNames": {"pattern": "^x"}, "additionalProperties": STRINGS},
            {"patternProperties": {"^x": STRINGS}, "additionalProperties": False},
        ),
        ({"not": {}}, {"enum": []}),
        ({"not": {"type": "null"}, "type": ["string", "null"]}, {"type": ["string"]}),
        ({"not": {"type": ["string", "null"]}, "type": "string"}, {"enum": []}),
    ],
    ids=str,
)
def test_what_other_keywords_say_as_well_is_followed(
    given: dict[str, Any], found: dict[str, Any]
) -> None:
    assert followed(given, strict=True).schema == found


def test_names_that_are_referred_to() -> None:
    """As pydantic writes `dict[Colour, int]`."""
    colours = {"$defs": {"C": {"enum": ["red"], "type": "string"}}}
    names = {"propertyNames": {"$ref": "#/$defs/C"}, "additionalProperties": {"type": "integer"}}
    found, _ = loose({**colours, "properties": {"x": names}})
    assert found["properties"]["x"]["properties"] == {"red": {"type": "integer"}}


UNFOLLOWED: list[dict[str, Any]] = [
    {"uniqueItems": True},
    {"not": {"minLength": 3}},
    {"not": {"type": "integer"}},
    {"if": {"type": "string"}, "then": {"maxLength": 3}},
    {"contains": {}},
    {"contains": {"type": "string"}, "minContains": 2},
    {"propertyNames": {"minLength": 3}},
    {"propertyNames": {"pattern": "(?=a)"}},
    {"propertyNames": {"pattern": "^a"}, "properties": {"b": {}}},
    {"propertyNames": False},
    {"dependentRequired": {"a": ["b"]}},
    {"dependentSchemas": {"a": {}}},
    {"dependencies": {"a": ["b"]}},
    {"unevaluatedProperties": False, "allOf": [{"properties": {"a": {}}}]},
    {"unevaluatedProperties": False, "if": {"properties": {"a": {}}}},
    {"unevaluatedItems": False, "if": {"prefixItems": [{}]}},
    {"$dynamicRef": "#x"},
    {"$recursiveRef": "#"},
]


@pytest.mark.parametrize("keywords", UNFOLLOWED, ids=str)
def test_what_cannot_be_followed_is_refused_or_noted_by_name(keywords: dict[str, Any]) -> None:
    name = next(iter(keywords))
    for where, schema in (
        (name, keywords),
        (f"properties.a.items[0].{name}", {"properties": {"a": {"items": [keywords]}}}),
        (f"$defs.b.{name}", {"$defs": {"b": keywords}}),
    ):
        with pytest.raises(ConfigError, match=name.replace("$", "[$]")) as caught:
            followed(schema, strict=True, called="s")
        assert str(caught.value).startswith(f"s: {where}: ")
        found, notes = loose(schema)
        assert [note.startswith(f"s: {where}: ") for note in notes] == [True]
        assert name not in str(found)


def test_a_pattern_that_looks_around_is_left_out() -> None:
    for pattern in (r"^(?!\.)x", r"(?<=a)b", r"(a)\1", r"\\(?=a)"):
        found, notes = loose({**STRINGS, "pattern": pattern})
        assert (found, len(notes)) == (STRINGS, 1)
    for pattern in (r"^(?:a|b)$", r"\(?=", r"(?P<a>b)", r"\\1"):
        assert loose({"pattern": pattern}) == ({"pattern": pattern}, ())


def test_white_space_of_a_pattern_is_that_of_the_standard() -> None:
    """Within classes too; a backslash that is escaped begins nothing."""
    white, black = (str(loose({"pattern": escape})[0]["pattern"]) for escape in (r"\s", r"\S"))
    assert black == f"[^{white[1:]}"
    assert r"\uFEFF" in white
    found, _ = loose({"pattern": r"\\s[^a\s]\\\S", "patternProperties": {r"^\s": STRINGS}})
    assert found == {
        "pattern": rf"\\s[^a{white}]\\{black}",
        "patternProperties": {f"^{white}": STRINGS},
    }


def test_what_is_data_stays() -> None:
    data: dict[str, Any] = {"not": {}, "format": "x", "uniqueItems": True}
    schema: dict[str, Any] = {"const": data, "enum": [data], "default": data}
    assert loose(schema) == (schema, ())
    named: dict[str, Any] = {"properties": {"uniqueItems": STRINGS, "not": STRINGS}}
    assert loose(named) == (named, ())


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"properties": {"a": {"$ref": "#/properties/a"}}},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    ],
    ids=str,
)
def test_a_reference_to_itself_alone_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="leads back to itself"):
        loose(schema)


def test_a_schema_of_lists_refers_to_itself() -> None:
    tree: dict[str, Any] = {"properties": {"kids": {"items": {"$ref": "#"}}}}
    assert loose(tree) == (tree, ())


def test_references_move_with_their_document() -> None:
    schema = {"$id": "x", "items": [{"$ref": "#/$defs/a"}, {"$ref": "#"}], "const": {"$ref": "#"}}
    assert moved(schema, "#/$defs/t") == {
        "items": [{"$ref": "#/$defs/t/$defs/a"}, {"$ref": "#/$defs/t"}],
        "const": {"$ref": "#"},
    }
