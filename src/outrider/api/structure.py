"""What a caller may ask a text to be: JSON of a schema, any JSON object, a regex, one of several
choices, or a grammar. Checks it and writes it as llguidance reads grammars (api/grammar.py)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypedDict, cast, runtime_checkable

from outrider.core.errors import ConfigError, words_of
from outrider.core.options import SamplingOptions

if TYPE_CHECKING:
    from llguidance import LLMatcher

# White space between two parts of JSON: a blank, or line ends and an indentation. Without a bound a
# weak model writes nothing else.
_WHITE_SPACE = r"( |\n{1,2}[\x20\t]{0,20})"
MAX_STRUCTURE_BYTES = 1 << 16
_NAMES = ("schema", "json", "regex", "choices", "grammar")
_HINTS = {"grammar": "GBNF is a subset of what llama.cpp reads; Lark is read as well"}
_LEAP_YEAR = r"([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DAY = rf"({_LEAP_YEAR}-02-29|[0-9]{{4}}-(02-([01][0-9]|2[0-8])|(0[13-9]|1[0-2])-[0-9]{{2}}))"
# A label that is no A-label: what follows `xn--` would have to be valid Punycode.
_LABEL = r"([^xX.][^.]*|[xX]([^nN.][^.]*)?|[xX][nN]([^.-][^.]*)?|[xX][nN]-([^.-][^.]*)?)"
# What llguidance's own pattern of a format lets pass: days that no year has, a second 60 at any
# time (the right one depends on the offset), names that are too long or only seem encoded.
_STRICTER: Mapping[str, Mapping[str, object]] = {
    "date": {"pattern": f"^{_DAY}$"},
    "time": {"pattern": "^.{6}[0-5]"},
    "date-time": {"pattern": f"^{_DAY}.{{7}}[0-5]"},
    "hostname": {"pattern": rf"^{_LABEL}(\.{_LABEL})*$", "maxLength": 253},
}
# Keywords whose value is data, and those whose value has a schema under each name.
_DATA = frozenset({"const", "enum", "default", "examples"})
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_ANY_TYPE = ["null", "boolean", "number", "string", "array", "object"]


@runtime_checkable
class HasSchema(Protocol):
    """A pydantic model class, or what looks like one."""

    def model_json_schema(self) -> Mapping[str, object]: ...


Schema: TypeAlias = Mapping[str, object] | str | bool | HasSchema


class StructureOptions(TypedDict, total=False):
    """What the whole text after the prompt must be. At most one of them; None is none.

    `schema` is a JSON schema: a mapping, its JSON text, or a pydantic model class. `json` asks for
    any JSON object. `regex` is matched from the first character to the last, `choices` are texts of
    which one is written, and `grammar` is in the notation of Lark or of GBNF.
    """

    schema: Schema | None
    json: bool
    regex: str | None
    choices: Sequence[str] | None
    grammar: str | None


class RequestOptions(SamplingOptions, StructureOptions, total=False):
    """Both: what a request may be given by keyword."""


def sampling_of(options: RequestOptions) -> SamplingOptions:
    """Those that are fields of SamplingParams, and those that nobody knows."""
    return cast("SamplingOptions", {k: v for k, v in options.items() if k not in _NAMES})


def structure_in(options: Mapping[str, object]) -> StructureOptions:
    return cast("StructureOptions", {k: v for k, v in options.items() if k in _NAMES})


def chosen(options: StructureOptions) -> str | None:
    """Which option is given, if one is. Raises ConfigError for two, or for a name that is none."""
    unknown = [name for name in options if name not in _NAMES]
    if unknown:
        raise ConfigError(
            f"{unknown[0]!r} is no option of a request.", hint=f"known: {', '.join(_NAMES)}"
        )
    given = [name for name, value in options.items() if value is not None and value is not False]
    # A schema may be the truth value: true allows any JSON, false none.
    if options.get("schema") is False:
        given.append("schema")
    if len(given) > 1:
        raise ConfigError(
            f"{given[0]} and {given[1]}: a text follows one structure.", hint="give one of them"
        )
    return given[0] if given else None


def grammar_text(name: str, options: StructureOptions) -> str:
    """The option `name` as llguidance reads grammars. Raises ConfigError for what cannot be one;
    the grammar itself is read later."""
    from llguidance import LLMatcher

    text, make = _read(name, options)
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_STRUCTURE_BYTES:
        raise ConfigError(
            f"{name}: {size:,} bytes; it may have {MAX_STRUCTURE_BYTES:,}.",
            hint="make it smaller: every token is checked against it",
        )
    try:
        return make(LLMatcher, text)
    except ValueError as error:
        raise ConfigError(
            f"{name}: it cannot be read: {words_of(error)}.",
            hint=_HINTS.get(name, "docs/structured.md"),
        ) from None


def _read(
    name: str, options: StructureOptions
) -> tuple[str, Callable[[type[LLMatcher], str], str]]:
    """The text of an option, and what makes a grammar of it."""
    if name in ("schema", "json"):
        wanted = options.get("schema") if name == "schema" else {"type": "object"}
        return _of_schema(wanted), _from_schema
    if name == "choices":
        choices = _of_choices(options.get("choices"))
        return choices, lambda matcher, text: matcher.grammar_from_lark(text)
    given: object = options.get(name)
    if not isinstance(given, str):
        raise _wrong(name, "a string", given)
    if name == "regex":
        return given, lambda matcher, text: matcher.grammar_from_regex(text)
    return given, lambda _, text: _of_grammar(text)


def _from_schema(matcher: type[LLMatcher], text: str) -> str:
    return matcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": _WHITE_SPACE})


def _of_schema(given: object) -> str:
    if isinstance(given, HasSchema):
        given = given.model_json_schema()
    if isinstance(given, str):
        given = _parsed(given)
    if isinstance(given, bool):
        given = {} if given else {"enum": []}
    if not isinstance(given, Mapping):
        raise _wrong("schema", "a mapping, JSON text or a pydantic model class", given)
    if "x-guidance" in given:
        raise ConfigError(
            "schema: 'x-guidance' sets options of a library, under which keywords may be left out.",
            hint="leave it out; docs/structured.md lists what a schema may use",
        )
    try:
        return json.dumps(strict_schema(cast("Mapping[str, object]", given)), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"schema: it cannot be written as JSON: {words_of(error)}.",
            hint="a schema has mappings, lists, strings, numbers, booleans and None",
        ) from None


def strict_schema(schema: Mapping[str, object]) -> dict[str, object]:
    """The same schema in keywords that llguidance keeps in full: formats without the values that
    its patterns wrongly let pass, alternatives of `oneOf` as what they refer to."""
    found: dict[str, object] = {}
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, Mapping):
            parts = cast("Mapping[str, object]", value)
            found[key] = {name: _strict(part) for name, part in parts.items()}
        else:
            found[key] = value if key in _DATA else _strict(value)
    more, among = _STRICTER.get(str(found.get("format"))), found.get("allOf", [])
    if more is not None and isinstance(among, list):
        found["allOf"] = [*cast("list[object]", among), more]
    choices = found.get("oneOf")
    # A discriminator says itself how they differ.
    if isinstance(choices, list) and "discriminator" not in found:
        found["oneOf"] = [_referred(one) for one in cast("list[object]", choices)]
    return found


def _strict(value: object) -> object:
    if isinstance(value, Mapping):
        return strict_schema(cast("Mapping[str, object]", value))
    if isinstance(value, (list, tuple)):
        return [_strict(one) for one in cast("Sequence[object]", value)]
    return value


def _referred(choice: object) -> object:
    """A reference with a keyword beside it is read as what it refers to, whose type and constants
    then count."""
    if isinstance(choice, dict) and cast("dict[str, object]", choice).keys() == {"$ref"}:
        return {"type": _ANY_TYPE, **cast("dict[str, object]", choice)}
    return cast("object", choice)


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"schema: it is no JSON: {words_of(error)}.",
            hint='a schema is an object, as in {"type": "object", "properties": {…}}',
        ) from None


def _of_choices(given: object) -> str:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise _wrong("choices", "a list of texts", given)
    texts = list(cast("Sequence[object]", given))
    strange = [text for text in texts if not isinstance(text, str)]
    if strange:
        raise _wrong("choices", "a list of texts", strange[0], within=True)
    if not texts:
        raise ConfigError("choices: there is none to choose.", hint="give one text at least")
    return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


def _of_grammar(given: str) -> str:
    """GBNF is told by its sign of definition. Raises ValueError where it is not understood."""
    from llguidance import grammar_from

    return grammar_from("gbnf" if "::=" in given else "lark", given)


def _wrong(name: str, wanted: str, given: object, *, within: bool = False) -> ConfigError:
    kind = "None" if given is None else f"a value of type {type(given).__name__}"
    held = "it holds" if within else "it is"
    return ConfigError(f"{name}: {held} {kind}; wanted is {wanted}.")
