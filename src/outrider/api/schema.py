"""JSON schemas in the keywords that llguidance follows in full (docs/structured.md).

Keywords with an equivalent in those are rewritten. A keyword that cannot be followed is an error
that names it, or is left out with a note if the caller is not strict.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, cast

from outrider.core.errors import ConfigError

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
_NAMES = ("$dynamicAnchor", "$recursiveAnchor", "$vocabulary")
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


def has_reference(schema: object) -> bool:
    """True if the schema contains a `$ref`."""
    if isinstance(schema, Mapping):
        entries = cast("Object", schema)
        return "$ref" in entries or any(map(has_reference, entries.values()))
    return isinstance(schema, list) and any(map(has_reference, cast("list[object]", schema)))


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
        for name in (*_PARTS, *_NAMES):
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
