"""Structures in the words of other servers' bodies."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.api.structure import structure_of
from outrider.core.errors import ConfigError

SCHEMA = {"type": "integer"}


def asked(name: str = "response_format", *, strict: bool = False) -> dict[str, Any]:
    """The schema, as the parameter `name` asks for it."""
    return {"schema": SCHEMA, "strict": strict, "parts": {name: SCHEMA}}


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({"model": "m", "temperature": 0}, {}),
        ({"response_format": None, "grammar": None}, {}),
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}}, {"json": True}),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, asked()),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": True, "schema": SCHEMA},
                }
            },
            asked(strict=True),
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, asked()),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, asked()),
        (
            {"response_format": {"type": "json_schema", "schema": SCHEMA, "strict": True}},
            asked(strict=True),
        ),
        ({"structured_outputs": {"choice": ["a", "b"], "regex": None}}, {"choices": ["a", "b"]}),
        ({"structured_outputs": {"json_object": True}}, {"json": True}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_json": SCHEMA, "response_format": {"type": "text"}}, asked("guided_json")),
        ({"json_schema": SCHEMA}, asked("json_schema")),
        ({"structured_outputs": {"json": SCHEMA}}, asked("structured_outputs")),
        ({"grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
    ],
    ids=str,
)
def test_each_spelling_is_understood(body: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert structure_of(body) == wanted


def test_a_schema_has_the_name_that_its_api_has_for_it() -> None:
    body = {"response_format": {"type": "json_schema", "schema": SCHEMA}}
    assert structure_of(body, format_name="text.format") == asked("text.format")


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"response_format": {"type": "xml"}}, "'xml' is no type"),
        ({"response_format": "json"}, "response_format: wanted is an object, got str"),
        ({"response_format": {"type": "json_schema"}}, "json_schema: wanted is an object"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 1}}},
            "json_schema.schema: wanted is an object, got int",
        ),
        ({"structured_outputs": {"structural_tag": "x"}}, "'structural_tag' is not known"),
        ({"guided_regex": "a", "grammar": "b"}, "a structure twice"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said(body: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        structure_of(body)
