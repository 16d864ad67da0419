"""JSON-Schema-Test-Suite, draft 2020-12, which the source archive of the package jsonschema holds.

A text is right where it is accepted exactly if it is valid. Schemas that cannot be followed are
refused by name, and counted for each of their texts.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator, Mapping
from itertools import permutations
from pathlib import Path
from typing import Any, cast

from conformance.counts import Suite

from outrider.api.grammar import Grammar, Grammars
from outrider.api.tokenizer import Tokenizer
from outrider.core.errors import OutriderError
from outrider.models.loading import resolve

_MAX_PERMUTED = 4


def suites(archive: Path) -> Iterator[Suite]:
    required, optional = (Suite(f"JSON schemas, {part} part") for part in ("required", "optional"))
    tokenizer = Tokenizer.load(resolve("outrider/embedded"))
    grammars = Grammars(tokenizer, tokenizer.vocab_size, frozenset(tokenizer.stop_ids))
    for name, groups in _files(archive):
        suite = optional if name.startswith("optional/") else required
        for group in groups:
            _group(suite, grammars, tokenizer, name, group)
    yield from (required, optional)


def _files(archive: Path) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    with tarfile.open(archive) as opened:
        for member in sorted(opened.getmembers(), key=lambda one: one.name):
            _, _, name = member.name.partition("/json/tests/draft2020-12/")
            file = opened.extractfile(member) if name.endswith(".json") else None
            if file is not None:
                yield name.removesuffix(".json"), json.load(file)


def _group(
    suite: Suite, grammars: Grammars, tokenizer: Tokenizer, name: str, group: Mapping[str, Any]
) -> None:
    """One schema with its texts."""
    label = f"{name}: {group['description']}"
    try:
        made = grammars.of({"schema": group["schema"]})
    except OutriderError as error:
        suite.refuse(label, str(error)[:160], count=len(group["tests"]))
        return
    assert made is not None
    for test in group["tests"]:
        accepted = _accepts(made, tokenizer, test["data"])
        reason = None
        if test["valid"] and any(_accepts(made, tokenizer, one) for one in _spelt(test["data"])):
            reason = "spellings: 1.0 for 1, and orders of properties, are not written"
        elif name.startswith("optional/format/"):
            reason = "formats: patterns, looser or narrower than their definitions"
        elif test["valid"] and name == "format":
            reason = "formats: applied, where the suite takes them for notes"
        suite.count(name, accepted == test["valid"], f"{label}: {test['description']}", reason)


def _accepts(made: Grammar, tokenizer: Tokenizer, data: object) -> bool:
    ids = tokenizer.encode(json.dumps(data, ensure_ascii=False), add_special=False)
    matcher = made.matcher.deep_copy()
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def _spelt(data: Any) -> Iterator[Any]:
    """Other spellings of the same value."""
    if isinstance(data, float) and data.is_integer():
        yield int(data)
    elif isinstance(data, list):
        yield [next(_spelt(item), item) for item in cast("list[Any]", data)]
    elif isinstance(data, dict):
        items = cast("dict[str, Any]", data).items()
        plain = [(key, next(_spelt(item), item)) for key, item in items]
        yield from map(dict, permutations(plain) if len(plain) <= _MAX_PERMUTED else [plain])
