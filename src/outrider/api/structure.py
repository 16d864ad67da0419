"""Structured text that a caller may request: JSON of a schema, any JSON object, a regex, a
choice of texts, or a grammar; and the keys of HTTP bodies for it (OpenAI, vLLM, llama.cpp). Options
are checked and written in the form that llguidance reads (api/grammar.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias, TypedDict, cast, runtime_checkable

from outrider.core.errors import ConfigError, words_of

# JSON schemas in the keywords that llguidance follows in full (docs/structured.md).
#
# Keywords with an equivalent in those are rewritten. A keyword that cannot be followed is an error
# that names it, or is left out with a note if the caller is not strict.
Object: TypeAlias = Mapping[str, object]

_LEAP_YEAR = r"([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DAY = rf"({_LEAP_YEAR}-02-29|[0-9]{{4}}-(02-([01][0-9]|2[0-8])|(0[13-9]|1[0-2])-[0-9]{{2}}))"
# A label that is no A-label: what follows `xn--` would have to be valid Punycode.
_LABEL = r"([^xX.][^.]*|[xX]([^nN.][^.]*)?|[xX][nN]([^.-][^.]*)?|[xX][nN]-([^.-][^.]*)?)"
# Corrections of formats for which the library's own pattern allows too much: days that no year has,
# a second 60 at any time (the right one depends on the offset), names too long or badly encoded.
_FORMATS: Mapping[str, Object | None] = {
    "date": {"pattern": f"^{_DAY}$"},
    "time": {"pattern": "^.{6}[0-5]"},
    "date-time": {"pattern": f"^{_DAY}.{{7}}[0-5]"},
    "hostname": {"pattern": rf"^{_LABEL}(\.{_LABEL})*$", "maxLength": 253},
    **dict.fromkeys(("duration", "email", "ipv4", "ipv6", "uuid", "uri")),
}
# Keywords of the standard's drafts that the library does not follow, with the values of each that
# have no effect.
_UNFOLLOWED: Mapping[str, tuple[object, ...]] = {
    "uniqueItems": (False,),
    "propertyNames": ({}, True),
    "not": (False,),
    "if": (),
    "contains": (),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "unevaluatedProperties": ({}, True),
    "unevaluatedItems": ({}, True),
    "$dynamicRef": (),
    "$recursiveRef": (),
}
# Keywords without an effect unless one of the above is there, or that are names for one.
_PARTS = ("then", "else", "minContains", "maxContains")
_ANCHORS = ("$dynamicAnchor", "$recursiveAnchor", "$vocabulary")
# Keywords whose value is data, and those whose value has a schema under each name.
_DATA = frozenset({"const", "enum", "default", "examples"})
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions"})
# Keywords that apply other schemas to the same value.
_APPLIED = frozenset({"allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas", "contains"})
_ANNOTATIONS = frozenset({"type", "title", "description", "$comment", "examples", "default"})
_TYPES = ("null", "boolean", "number", "string", "array", "object")
# Look-around and references to groups, which the library's expressions lack.
_LOOKS = re.compile(r"(?<!\\)(?:\\\\)*(?:\(\?<?[=!]|\\[1-9])")
# White space of ECMA-262: with U+FEFF and without U+0085, unlike the library's own.
_WHITE = r"\t-\r \xA0\u1680\u2000-\u200A\u2028\u2029\u202F\u205F\u3000\uFEFF]"
_SPACES = {r"\s": f"[{_WHITE}", r"\S": f"[^{_WHITE}"}


@dataclass(frozen=True, slots=True)
class FollowedSchema:
    """A schema that the library follows, and `notes` on omitted parts of the given one."""

    schema: dict[str, object]
    notes: tuple[str, ...]


def followed(given: Object, *, strict: bool, called: str = "schema") -> FollowedSchema:
    """`given` in keywords that are followed. Errors and notes begin with `called`. Raises
    ConfigError for a keyword that cannot be followed if it is `strict`. An unknown format
    constrains nothing, as the standard says, and is always left out with a note."""
    walk = _Walk(given, strict, called)
    found = walk.schema(given, "")
    return FollowedSchema(dict(found), tuple(dict.fromkeys(walk.notes)))


def moved(schema: object, root: str) -> object:
    """The schema for a document that was moved under the pointer `root`."""
    if isinstance(schema, list):
        return [moved(one, root) for one in cast("list[object]", schema)]
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, object] = {}
    for key, value in cast("Object", schema).items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            found[key] = root + value.removeprefix("#")
        elif key not in ("$id", "$schema") or not isinstance(value, str):
            found[key] = value if key in _DATA else moved(value, root)
    return found


def resolved(root: Object, schema: object) -> object:
    """`schema`, or the schema that it refers to within the document `root`: still a reference if it
    leads back to itself, None if there is none."""
    seen: list[object] = []
    while isinstance(schema, Mapping) and "$ref" in schema:
        pointer = cast("Object", schema)["$ref"]
        if pointer in seen:
            break
        seen.append(pointer)
        schema = _at(root, str(pointer))
    return cast("object", schema)


def _at(root: Object, pointer: str) -> object:
    if not pointer.startswith("#"):
        return None
    found: object = root
    level: Object = root
    for step in pointer.split("/")[1:]:
        found = level.get(step.replace("~1", "/").replace("~0", "~"))
        level = cast("Object", found) if isinstance(found, Mapping) else {}
    return cast("object", found)


@dataclass(slots=True)
class _Walk:
    root: Object
    strict: bool
    called: str
    notes: list[str] = field(default_factory=list[str])

    def schema(self, given: Object, path: str) -> Object:
        schema = dict(given)
        target = resolved(self.root, schema)
        if target is not schema and isinstance(target, Mapping) and "$ref" in target:
            raise ConfigError(
                f"{self.called}: the $ref {str(schema['$ref'])[:100]!r} leads back to itself.",
                hint="let it refer to a schema that describes the value",
            )
        if _never(schema):
            return {"enum": []}
        # An `if` without branches still tells which properties are evaluated.
        _name_evaluated(schema)
        if "if" in schema and "then" not in schema and "else" not in schema:
            del schema["if"]
        for name in (*_PARTS, *_ANCHORS):
            schema.pop(name, None)
        self._name_properties(schema)
        for key in [key for key in schema if key in _UNFOLLOWED]:
            if schema.pop(key) not in _UNFOLLOWED[key]:
                self._unfollowed(path, key)
        self._read_strings(schema, path)
        found: dict[str, object] = {}
        for key, value in schema.items():
            inner = f"{path}.{key}".lstrip(".")
            if key in _BY_NAME and isinstance(value, Mapping):
                parts = cast("Object", value).items()
                read = _pattern if key == "patternProperties" else str
                found[key] = {read(name): self._any(p, f"{inner}.{name}") for name, p in parts}
            else:
                found[key] = value if key in _DATA else self._any(value, inner)
        choices = found.get("oneOf")
        # A discriminator tells itself how they differ.
        if isinstance(choices, list) and "discriminator" not in found:
            found["oneOf"] = [_referred(one) for one in cast("list[object]", choices)]
        return found

    def _any(self, value: object, path: str) -> object:
        if isinstance(value, Mapping):
            return self.schema(cast("Object", value), path)
        if isinstance(value, (list, tuple)):
            parts = enumerate(cast("Sequence[object]", value))
            return [self._any(one, f"{path}[{i}]") for i, one in parts]
        return value

    def _unfollowed(self, path: str, keyword: str) -> None:
        where = f"{path}.{keyword}".lstrip(".")
        if self.strict:
            raise ConfigError(
                f"{self.called}: {where[-200:]}: the keyword {keyword} cannot be followed.",
                hint="without strict it is left out with a warning; docs/structured.md has a list",
            )
        self.notes.append(f"{self.called}: {where[-200:]}: left out, so the text may break it")

    def _read_strings(self, schema: dict[str, object], path: str) -> None:
        name, written = schema.get("format"), schema.get("pattern")
        if name is not None and not (isinstance(name, str) and name in _FORMATS):
            del schema["format"]
            if "string" in _types_of(schema):
                where = f"{path}.format".lstrip(".")[-200:]
                shown = str(name)[:40]
                self.notes.append(f"{self.called}: {where}: {shown!r} is not known: left out")
        elif isinstance(name, str) and (more := _FORMATS[name]) is not None:
            among = schema.get("allOf", [])
            if isinstance(among, list) and more not in among:
                schema["allOf"] = [*cast("list[object]", among), more]
        if isinstance(written, str) and _LOOKS.search(written) and not self.strict:
            self._unfollowed(path, "pattern")
            del schema["pattern"]
        elif isinstance(written, str):
            schema["pattern"] = _pattern(written)

    def _name_properties(self, schema: dict[str, object]) -> None:
        """Turn `propertyNames` with a list of names, or a pattern, into properties."""
        given = resolved(self.root, schema.get("propertyNames"))
        if not isinstance(given, Mapping) or "patternProperties" in schema:
            return
        names = cast("Object", given)
        said = {key: value for key, value in names.items() if key not in _ANNOTATIONS}
        known = schema.get("properties", {})
        more = schema.get("additionalProperties", {})
        if not isinstance(known, Mapping):
            return
        known = cast("Object", known)
        listed = [said["const"]] if said.keys() == {"const"} else said.get("enum")
        if not said and names.get("type", "string") == "string":
            del schema["propertyNames"]
        elif said.keys() <= {"const", "enum"} and len(said) == 1 and isinstance(listed, list):
            allowed = [one for one in cast("list[object]", listed) if isinstance(one, str)]
            order = [name for name in known if name in allowed]
            order += [name for name in allowed if name not in known and more is not False]
            schema["properties"] = {name: known.get(name, more) for name in order}
            schema["additionalProperties"] = False
            del schema["propertyNames"]
        elif said.keys() == {"pattern"} and not known and not _LOOKS.search(str(said["pattern"])):
            schema["patternProperties"] = {str(said["pattern"]): more}
            schema["additionalProperties"] = False
            del schema["propertyNames"]


def _pattern(written: str) -> str:
    """An expression of ECMA-262 for the library, which allows classes within classes."""
    return re.sub(r"(?s)\\.", lambda found: _SPACES.get(found[0], found[0]), written)


def _types_of(schema: Object) -> list[str]:
    given = schema.get("type", list(_TYPES))
    entries = cast("list[object]", given if isinstance(given, list) else [given])
    return [str(one) for one in entries]


def _never(schema: dict[str, object]) -> bool:
    """True if a `not` excludes every value; a `not` of types is rewritten as types."""
    refused = schema.get("not")
    if refused is True or refused == {}:
        return True
    if not isinstance(refused, Mapping):
        return False
    said = cast("Object", refused)
    if set(said) != {"type"}:
        return False
    without = set(_types_of(said))
    if "number" in without:
        without.add("integer")
    types = [one for one in _types_of(schema) if one not in without]
    if "integer" in without and "number" in types:
        return False
    schema["type"] = types
    del schema["not"]
    return not types


def _name_evaluated(schema: dict[str, object]) -> None:
    """Turn unevaluated into additional members, if no other schema is applied."""
    if schema.keys() & _APPLIED:
        return
    if "unevaluatedProperties" in schema:
        schema.setdefault("additionalProperties", schema.pop("unevaluatedProperties"))
    if "unevaluatedItems" in schema and not isinstance(schema.get("items"), list):
        schema.setdefault("items", schema.pop("unevaluatedItems"))


def _referred(choice: object) -> object:
    """A reference with one more keyword, so that the library follows it to type and constants."""
    if isinstance(choice, dict) and cast("dict[str, object]", choice).keys() == {"$ref"}:
        return {"type": list(_TYPES), **cast("dict[str, object]", choice)}
    return cast("object", choice)


# White space between two parts of JSON: a blank, or line ends and an indentation. Without a bound a
# weak model writes nothing else.
WHITE_SPACE = r"( |\n{1,2}[\x20\t]{0,20})"
MAX_STRUCTURE_BYTES = 1 << 16
_NAMES = ("schema", "json", "regex", "choices", "grammar")
# All options, including those that modify one of these.
OPTIONS = (*_NAMES, "strict", "parts")
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


def chosen(options: StructureOptions) -> str | None:
    """The given option, or None. Raises ConfigError for two, or for an unknown name."""
    unknown = [name for name in options if name not in OPTIONS]
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
    from llguidance import LLMatcher, grammar_from

    if name == "choices":
        return f"start: {choices_rule(options.get('choices'))}", LLMatcher.grammar_from_lark
    given: object = options.get(name)
    if not isinstance(given, str):
        raise _wrong(name, "a string", given)
    if name == "regex":
        return given, LLMatcher.grammar_from_regex
    # A GBNF or Lark grammar, recognised by its sign of definition.
    return given, partial(grammar_from, "gbnf" if "::=" in given else "lark")


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
