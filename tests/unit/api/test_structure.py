"""What a text may be asked to be: every way to say it, and what is said of a wrong one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

import pytest

from outrider.api.grammar import Grammars
from outrider.api.structure import StructureOptions, chosen
from outrider.api.tokenizer import Tokenizer
from outrider.core.errors import ConfigError
from outrider.models.loading import resolve

pytestmark = pytest.mark.weights


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    tokenizer = Tokenizer.load(resolve("outrider/embedded"))
    return Grammars(tokenizer, tokenizer.vocab_size, frozenset(tokenizer.stop_ids))


def accepts(grammars: Grammars, options: StructureOptions, text: str) -> bool:
    """Whether `text` is all that was asked for, to its end."""
    made = grammars.of(options)
    assert made is not None
    parser = made.matcher.deep_copy()
    tokenizer = Tokenizer.load(resolve("outrider/embedded"))
    ids = tokenizer.encode(text, add_special=False)
    return parser.try_consume_tokens(ids) == len(ids) and parser.is_accepting()


class Point:
    """As a pydantic model class."""

    @classmethod
    def model_json_schema(cls) -> Mapping[str, object]:
        return {
            "type": "object",
            "properties": {"x": {"type": "integer"}},
            "required": ["x"],
            "additionalProperties": False,
        }


@pytest.mark.parametrize(
    "schema",
    [Point, Point.model_json_schema(), '{"properties": {"x": {"type": "integer"}}}'],
    ids=["model", "mapping", "text"],
)
def test_a_schema_is_a_mapping_a_text_or_a_model(grammars: Grammars, schema: Any) -> None:
    assert accepts(grammars, {"schema": schema}, '{"x": 12}')
    assert not accepts(grammars, {"schema": schema}, '{"x": "12"}')


def test_the_other_ways(grammars: Grammars) -> None:
    assert accepts(grammars, {"schema": True}, "[1, null]")
    assert accepts(grammars, {"json": True}, '{"a": [1, {"b": null}]}')
    assert not accepts(grammars, {"json": True}, "[1]")
    assert accepts(grammars, {"regex": "[a-c]+-[0-9]{2}"}, "abc-12")
    assert not accepts(grammars, {"regex": "[a-c]+-[0-9]{2}"}, "abc-123")
    strange = ['a"b\\', "é 😀\n", ""]
    for text in strange:
        assert accepts(grammars, {"choices": strange}, text)
    assert not accepts(grammars, {"choices": strange}, "é")
    assert accepts(grammars, {"grammar": 'start: "yes" | "no" "!"*'}, "no!!")
    assert accepts(grammars, {"grammar": 'root ::= "yes" | "no" bang*\nbang ::= "!"'}, "no!!")


def test_a_grammar_may_hold_json_and_special_tokens(grammars: Grammars) -> None:
    call = '{"properties": {"tool": {"const": "add"}}, "required": ["tool"]}'
    lark = f'start: "<call>" call "</call>" | <|assistant|> "no"\ncall: %json {call}'
    assert accepts(grammars, {"grammar": lark}, '<call>{"tool": "add"}</call>')
    assert accepts(grammars, {"grammar": lark}, "<|assistant|>no")
    assert not accepts(grammars, {"grammar": lark}, '<call>{"tool": "sub"}</call>')


def test_white_space_comes_to_an_end(grammars: Grammars) -> None:
    for blanks in ("", " ", "\n", "\n\n" + " " * 20):
        assert accepts(grammars, {"json": True}, '{"a":' + blanks + "1}")
    for blanks in ("  ", "\n\n\n", "\n" + " " * 21):
        assert not accepts(grammars, {"json": True}, '{"a":' + blanks + "1}")


FORMATS: dict[str, tuple[str, str]] = {
    # Texts that are right, and texts that are wrong, between commas.
    "date": (
        "2023-02-28,2024-02-29,2000-02-29,0000-02-29,1996-02-29,2023-12-31,2023-10-30",
        "2023-02-29,2100-02-29,0100-02-29,2023-02-30,2023-04-31,2023-13-01,2023-00-10,2023-01-00",
    ),
    "time": (
        "12:00:00Z,23:59:59.5Z,00:00:59+01:00",
        "12:00:60Z,23:59:60Z,22:59:60Z,01:29:60+01:30,24:00:00Z,12:60:00Z",
    ),
    "date-time": (
        "2024-02-29T23:59:59Z,2023-02-28t00:00:00.123-05:30",
        "2023-02-29T00:00:00Z,1900-02-29T00:00:00Z,1998-12-31T23:59:60Z,1998-12-31T22:59:60.1Z",
    ),
    "hostname": (
        f"a,a.b-c.example,x,xn,xna,x.xn.n,X1.de,{'.'.join(['a' * 63] * 3)}.{'b' * 61}",
        f"xn--X,a.xn--4gbwdl,XN--aa,xN--,{'.'.join(['a' * 63] * 3)}.{'b' * 62},{'a' * 64},a_b,-a",
    ),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("among", [{}, {"allOf": [{"pattern": "."}]}, {"pattern": "."}])
def test_a_format_has_no_wrong_value(
    grammars: Grammars, name: str, among: dict[str, object]
) -> None:
    right, wrong = FORMATS[name]
    schema: dict[str, object] = {"type": "string", "format": name, **among}
    for text in right.split(","):
        assert accepts(grammars, {"schema": schema}, f'"{text}"'), text
    for text in wrong.split(","):
        assert not accepts(grammars, {"schema": schema}, f'"{text}"'), text
    # Where a schema may be, and beside other types, as within a property of such a name.
    inner = {"properties": {"format": {"items": {"format": name}}, "const": schema}}
    first, bad = right.split(",")[0], wrong.split(",")[0]
    for text, is_right in ((f'["{first}", 1]', True), (f'["{bad}"]', False)):
        assert accepts(grammars, {"schema": inner}, '{"format": ' + text + "}") is is_right
    assert not accepts(grammars, {"schema": inner}, f'{{"const": "{bad}"}}')


def test_what_is_data_in_a_schema_stays(grammars: Grammars) -> None:
    for schema in ({"const": {"format": "date"}}, {"enum": [{"format": "date"}]}):
        assert accepts(grammars, {"schema": schema}, '{"format": "date"}')


KINDS: dict[str, Any] = {
    "Cat": {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"]},
    "Dog": {"type": "object", "properties": {"kind": {"const": "dog"}}, "required": ["kind"]},
    "Name": {"type": "string"},
}
CAT, DOG, NAME = ({"$ref": f"#/$defs/{name}"} for name in KINDS)


@pytest.mark.parametrize("told", [{}, {"discriminator": {"propertyName": "kind"}}])
def test_one_of_tells_types_and_constants_apart(grammars: Grammars, told: Any) -> None:
    pets = {"$defs": KINDS, "oneOf": [CAT, DOG], **told}
    assert accepts(grammars, {"schema": pets}, '{"kind": "dog"}')
    assert not accepts(grammars, {"schema": pets}, '{"kind": "cow"}')


def test_one_of_a_reference_and_a_type(grammars: Grammars) -> None:
    perhaps = {"$defs": KINDS, "properties": {"pet": {"oneOf": [CAT, NAME, {"type": "null"}]}}}
    for text in ('{"kind": "cat"}', '"Tom"', "null"):
        assert accepts(grammars, {"schema": perhaps}, f'{{"pet": {text}}}')
    assert not accepts(grammars, {"schema": perhaps}, '{"pet": 1}')


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "may overlap"),
        ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, "may overlap"),
        ({"oneOf": [{"maxLength": 1}, {"minLength": 2}]}, "may overlap"),
        (
            {
                "$defs": {
                    "List": {"properties": {"next": {"oneOf": [{"$ref": "#/$defs/List"}, NAME]}}},
                    **KINDS,
                },
                "$ref": "#/$defs/List",
            },
            "refers to itself within oneOf",
        ),
    ],
)
def test_a_one_of_that_cannot_be_kept_is_refused_with_what_helps(
    grammars: Grammars, schema: Any, said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        grammars.of({"schema": schema})
    assert "coerce" not in str(caught.value)
    assert "anyOf" in str(caught.value.hint)


def test_none_is_none() -> None:
    assert chosen({}) is None
    assert chosen({"schema": None, "json": False, "regex": None}) is None
    assert chosen({"schema": {}}) == "schema"


def nested(depth: int) -> dict[str, Any]:
    """A schema so deep."""
    found: dict[str, Any] = {}
    for _ in range(depth):
        found = {"properties": {"a": found}}
    return found


def said(grammars: Grammars, options: StructureOptions) -> tuple[str, ...]:
    made = grammars.of(options)
    assert made is not None
    return made.notes


def test_what_a_loose_schema_leaves_out_is_noted(grammars: Grammars) -> None:
    schema = {"items": {"enum": ["a"]}, "type": "array", "uniqueItems": True}
    options: StructureOptions = {"schema": schema, "strict": False}
    told = "uniqueItems: left out, so the text may break it"
    assert said(grammars, options) == (f"schema: {told}",)
    assert said(grammars, {**options, "parts": {"text.format": {}}}) == (f"text.format: {told}",)
    assert accepts(grammars, options, '["a", "a"]')
    assert not accepts(grammars, options, '["b"]')
    loose: StructureOptions = {"schema": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}
    assert said(grammars, {**loose, "strict": False}) == (
        "schema: alternatives of oneOf may overlap",
    )
    assert accepts(grammars, {**loose, "strict": False}, "1.5")


@pytest.mark.parametrize(
    ("part", "told"),
    [
        ({"type": "objekt"}, "tools[1].x: it cannot be followed: Invalid type: objekt."),
        ({"$ref": "#/nope"}, "tools[1].x: it cannot be followed: Pointer '/nope'"),
        ({"pattern": "("}, "tools[1].x: it cannot be followed: "),
        ({"enum": []}, "tools[1].x: it cannot be followed: "),
        ({"$ref": "#"}, "tools[1].x: the $ref '#' leads back to itself."),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "tools[1].x: it cannot be followed"),
    ],
    ids=str,
)
def test_an_error_of_a_grammar_names_the_part_at_fault(
    grammars: Grammars, part: dict[str, Any], told: str
) -> None:
    """A grammar that the caller did not write is not what it reads about."""
    text = f"start: %json {json.dumps(part)}"
    parts: dict[str, Any] = {"tools[0].x": {"type": "string"}, "tools[1].x": part}
    with pytest.raises(ConfigError) as caught:
        grammars.of({"grammar": text, "parts": parts})
    assert str(caught.value).startswith(told)
    assert "Lark" not in f"{caught.value} {caught.value.hint}"


def test_an_error_of_no_part_names_what_all_are_of(grammars: Grammars) -> None:
    with pytest.raises(ConfigError, match=r"^tools: 70,0.. bytes; it may have 65,536") as caught:
        grammars.of({"grammar": f"start: /{'a' * 70_000}/", "parts": {"tools[0].x": {}}})
    assert "Lark" not in f"{caught.value} {caught.value.hint}"


def test_a_left_recursive_grammar_is_refused_in_words(grammars: Grammars) -> None:
    for text in ('start: a "x"\na: a', "start: a\na: start"):
        with pytest.raises(ConfigError, match="leads back to itself"):
            grammars.of({"grammar": text})


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"schema": {}, "regex": "a"}, "schema and regex: a text follows one"),
    ({"schema": False, "json": True}, "follows one structure"),
    ({"shema": {}}, "'shema' is no option"),
    ({"schema": 3}, "schema: it is a value of type int; wanted"),
    ({"schema": "{"}, "schema: it is no JSON"),
    ({"schema": "[1]"}, "schema: it is a value of type list"),
    ({"schema": {"a": object()}}, "schema: it cannot be written as JSON"),
    ({"schema": {"maximum": float("nan")}}, "schema: it cannot be written as JSON"),
    ({"schema": nested(20_000)}, "schema: it cannot be written as JSON"),
    ({"schema": {"type": "objekt"}}, "schema: it cannot be followed: Invalid type: objekt"),
    ({"schema": {"type": "array", "uniqueItems": True}}, "schema: uniqueItems: the keyword"),
    ({"schema": {"$ref": "#/nope"}}, "schema: it cannot be followed: Pointer '/nope'"),
    ({"schema": {"enum": []}}, "schema: it cannot be followed"),
    ({"schema": {"enum": ["x" * (1 << 20)]}}, "it may have 65,536"),
    ({"regex": "(a"}, "regex: it cannot be followed: .*unclosed group"),
    ({"regex": r"(?=a)b"}, "regex: it cannot be followed"),
    ({"regex": 3}, "regex: it is a value of type int; wanted is a string"),
    ({"choices": []}, "choices: there is none"),
    ({"choices": "red"}, "choices: it is a value of type str"),
    ({"choices": ["red", 1]}, "choices: it holds a value of type int"),
    ({"grammar": 'start: "a" foo'}, 'grammar: it cannot be followed: .*unknown name: "foo"'),
    ({"grammar": "root ::= ("}, "^grammar: it cannot be read: (?!.*it cannot be read)"),
    ({"schema": {"x-guidance": {"lenient": True}}}, "schema: 'x-guidance' sets options"),
]


@pytest.mark.parametrize(("options", "told"), WRONG, ids=[told for _, told in WRONG])
def test_what_is_wrong_is_said(grammars: Grammars, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        grammars.of(cast("StructureOptions", options))
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        (r"^\s$", "\ufeff\xa0\u2029 ", "\x85\u180e\u200ba"),
        (r"^\S$", "\x85\u180e\u200ba", "\ufeff\xa0\u2029 "),
        (r"^[a\s]$", "\ufeffa ", "\x85b"),
        (r"^[^a\s]$", "\x85b", "\ufeffa "),
        (r"^[^a\S]$", "\ufeff ", "\x85ab"),
    ],
)
def test_white_space_in_patterns_is_that_of_ecma_262(
    grammars: Grammars, pattern: str, right: str, wrong: str
) -> None:
    options: StructureOptions = {"schema": {"type": "string", "pattern": pattern}}
    for letter in right + wrong:
        text = json.dumps(letter, ensure_ascii=False)
        assert accepts(grammars, options, text) == (letter in right), hex(ord(letter))
