"""Structured text that a caller may request: JSON of a schema, any JSON object, a regex, a
choice of texts, or a grammar; and the keys of HTTP bodies for it (OpenAI, vLLM, llama.cpp). Options
are checked and written in the form that llguidance reads (api/grammar.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias, TypedDict, cast, runtime_checkable

from outrider.api.schema import followed
from outrider.core.errors import ConfigError, words_of
from outrider.core.options import SamplingOptions

# White space between two parts of JSON: a blank, or line ends and an indentation. Without a bound a
# weak model writes nothing else.
WHITE_SPACE = r"( |\n{1,2}[\x20\t]{0,20})"
MAX_STRUCTURE_BYTES = 1 << 16
_NAMES = ("schema", "json", "regex", "choices", "grammar")
# All options, including those that modify one of these.
_ALL = (*_NAMES, "strict", "parts")
_HINTS = {"grammar": "GBNF is a subset of what llama.cpp reads; Lark is read as well"}


@runtime_checkable
class HasSchema(Protocol):
    """A pydantic model class, or a similar class."""

    def model_json_schema(self) -> Mapping[str, object]: ...


Schema: TypeAlias = Mapping[str, object] | str | bool | HasSchema


class StructureOptions(TypedDict, total=False):
    """Structure of the whole text after the prompt. At most one of them; None is none.

    `schema` is a JSON schema: a mapping, its JSON text, or a pydantic model class. `json` requests
    any JSON object. `regex` is matched from the first character to the last, `choices` are texts of
    which one is written, and `grammar` is in the notation of Lark or of GBNF.

    If `strict` is false, keywords of a schema that cannot be followed are left out with a note
    instead of refused. `parts` are the schemas that a grammar was made of, by their names in errors
    and notes.
    """

    schema: Schema | None
    json: bool
    regex: str | None
    choices: Sequence[str] | None
    grammar: str | None
    strict: bool
    parts: Mapping[str, Schema]


class RequestOptions(SamplingOptions, StructureOptions, total=False):
    """Keywords of a request: sampling parameters and structures."""


def sampling_of(options: RequestOptions) -> SamplingOptions:
    """The options that are fields of SamplingParams, and unknown ones."""
    return cast("SamplingOptions", {k: v for k, v in options.items() if k not in _ALL})


def structure_in(options: Mapping[str, object]) -> StructureOptions:
    given = {k: v for k, v in options.items() if k in _ALL}
    return cast("StructureOptions", given)


def chosen(options: StructureOptions) -> str | None:
    """The given option, or None. Raises ConfigError for two, or for an unknown name."""
    unknown = [name for name in options if name not in _ALL]
    if unknown:
        raise ConfigError(
            f"{unknown[0]!r} is no option of a request.", hint=f"known: {', '.join(_NAMES)}"
        )
    given = [name for name in _NAMES if options.get(name) not in (None, False)]
    # A schema may be the truth value: true allows any JSON, false none.
    if options.get("schema") is False:
        given.append("schema")
    if len(given) > 1:
        raise ConfigError(
            f"{given[0]} and {given[1]}: a text follows one structure.", hint="give one of them"
        )
    return given[0] if given else None


class GrammarText(NamedTuple):
    """A grammar for llguidance, and `notes` on requested parts that it leaves out."""

    text: str
    notes: tuple[str, ...] = ()


def grammar_text(name: str, options: StructureOptions) -> GrammarText:
    """The grammar of the option `name`; it is read later. Raises ConfigError if it is none."""
    from llguidance import LLMatcher

    strict = options.get("strict", True)
    if name in ("schema", "json"):
        wanted = options.get("schema") if name == "schema" else {"type": "object"}
        called = next(iter(options.get("parts", ())), name)
        text, notes = _of_schema(wanted, strict=strict, called=called)
        make: Callable[[str], str] = partial(
            LLMatcher.grammar_from_json_schema,
            overrides={"whitespace_pattern": WHITE_SPACE, "coerce_one_of": not strict},
        )
    else:
        text, make, notes = *_of_text(name, options), ()
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_STRUCTURE_BYTES:
        raise ConfigError(
            f"{name}: {size:,} bytes; it may have {MAX_STRUCTURE_BYTES:,}.",
            hint="make it smaller: every token is checked against it",
        )
    try:
        return GrammarText(make(text), notes)
    except ValueError as error:
        raise ConfigError(
            f"{name}: it cannot be read: {words_of(error)}.",
            hint=_HINTS.get(name, "docs/structured.md"),
        ) from None


def _of_text(name: str, options: StructureOptions) -> tuple[str, Callable[[str], str]]:
    """The text of an option other than a schema, and the function that makes a grammar of it."""
    from llguidance import LLMatcher

    if name == "choices":
        return f"start: {choices_rule(options.get('choices'))}", LLMatcher.grammar_from_lark
    given: object = options.get(name)
    if not isinstance(given, str):
        raise _wrong(name, "a string", given)
    return given, LLMatcher.grammar_from_regex if name == "regex" else _of_grammar


def _of_schema(given: object, *, strict: bool, called: str) -> tuple[str, tuple[str, ...]]:
    if isinstance(given, HasSchema):
        given = given.model_json_schema()
    if isinstance(given, str):
        given = _parsed(given)
    if isinstance(given, bool):
        given = {} if given else {"enum": []}
    if not isinstance(given, Mapping):
        raise _wrong(called, "a mapping, JSON text or a pydantic model class", given)
    if "x-guidance" in given:
        raise ConfigError(
            f"{called}: 'x-guidance' sets options of a library, which may leave keywords out.",
            hint="leave it out; docs/structured.md lists what a schema may use",
        )
    try:
        found = followed(cast("Mapping[str, object]", given), strict=strict, called=called)
        return json.dumps(found.schema, allow_nan=False), found.notes
    except ConfigError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{called}: it cannot be written as JSON: {words_of(error)}.",
            hint="a schema has mappings, lists, strings, numbers, booleans and None",
        ) from None


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"schema: it is no JSON: {words_of(error)}.",
            hint='a schema is an object, as in {"type": "object", "properties": {…}}',
        ) from None


def choices_rule(given: object) -> str:
    """A choice of the texts, as the right side of a rule. Raises ConfigError for other values."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise _wrong("choices", "a list of texts", given)
    texts = list(cast("Sequence[object]", given))
    strange = [text for text in texts if not isinstance(text, str)]
    if strange:
        raise _wrong("choices", "a list of texts", strange[0], within=True)
    if not texts:
        raise ConfigError("choices: there is none to choose.", hint="give one text at least")
    return " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


def _of_grammar(given: str) -> str:
    """A GBNF or Lark grammar, recognised by its sign of definition. May raise ValueError."""
    from llguidance import grammar_from

    return grammar_from("gbnf" if "::=" in given else "lark", given)


def _wrong(name: str, wanted: str, given: object, *, within: bool = False) -> ConfigError:
    kind = "None" if given is None else f"a value of type {type(given).__name__}"
    held = "it holds" if within else "it is"
    return ConfigError(f"{name}: {held} {kind}; wanted is {wanted}.")


# Options by their names in other APIs: keys of a body, and of vLLM's `structured_outputs`.
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
# Keys of a body that request a structure.
KEYS = ("response_format", "structured_outputs", *_KEYS)


def structure_of(
    body: Mapping[str, object], *, format_name: str = "response_format"
) -> StructureOptions:
    """The structure that a body requests, or {}. `format_name` is the format's name in the body's
    API, for errors and notes. Raises ConfigError for unknown values."""
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
            raise ConfigError(f"{key}: the body requests a structure twice.", hint="keep one")
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
        # llama.cpp accepts a schema here as well.
        schema = given.get("schema")
        return {"json": True} if schema is None else {"schema": schema}
    if kind == "json_schema":
        # llama.cpp accepts the schema without an object around it as well.
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
