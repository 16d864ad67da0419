"""Choice of the output format of a checkpoint, and the parser and the grammar of its answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from outrider.api.chat_messages import has_place_for_tools
from outrider.api.chat_template import PromptEnd
from outrider.api.structure import resolved
from outrider.server.events import OutputParser, PlainParser
from outrider.server.parsing.calls import Schemas
from outrider.server.parsing.families import GENERIC, format_of_family
from outrider.server.parsing.fields import OutputFormat
from outrider.server.parsing.grammar import (
    AnswerGrammar,
    Choice,
    Form,
    OfferedTool,
    answer_grammar,
    format_of_template,
)
from outrider.server.parsing.json_text import mapping
from outrider.server.parsing.parser import FormatParser, new_call_id
from outrider.server.port import EngineCard

_log = logging.getLogger(__name__)


def format_of(card: EngineCard) -> OutputFormat | None:
    """Return the format of the model's output; None if all of it is text. If the chat template does
    not support tools, the prompt describes them in text; calls then have the format that this text
    requests, or the one that the model was trained to write."""
    source = card.tool_template or card.chat_template
    given = _own_format(card, source)
    if not source or has_place_for_tools(source):
        return given
    if given is None:
        return GENERIC
    fields = (*GENERIC.fields, *given.fields)
    return replace(given, name=GENERIC.name, fields=fields)


def _own_format(card: EngineCard, source: str) -> OutputFormat | None:
    template = card.response_template
    if template is not None:
        try:
            return format_of_template(template)
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            _warn_once(str(problem))
    return format_of_family(source)


def shows_special(card: EngineCard, tools: Sequence[Mapping[str, Any]] = ()) -> bool:
    """Return whether the parser needs special tokens in the text."""
    given = format_of(card)
    return given is not None and given.shows_special and (bool(tools) or _thinks(given))


def parser_for(
    card: EngineCard,
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    prompt: PromptEnd | str = "",
    has_form: bool = False,
    new_id: Callable[[], str] = new_call_id,
) -> OutputParser:
    """Return the parser of one answer. The end of `prompt` shows whether the chat template, or a
    continued message, has opened a field such as `<think>`. Calls are recognised only if `tools`
    were offered; with `has_form`, thoughts and calls only before the text."""
    given = format_of(card)
    if given is None:
        return PlainParser()
    if has_form:
        given = given.at_start()
    return FormatParser(given, schemas_of(tools), begun=given.begun(prompt), new_id=new_id)


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> Schemas:
    """Return by each tool's name the schemas of its arguments."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = mapping(tool.get("function", tool))
        schema = mapping(function.get("parameters"))
        properties = mapping(schema.get("properties"))
        known = {name: _with_types(schema, value) for name, value in properties.items()}
        found[str(function.get("name"))] = known
    return found


def _with_types(root: Mapping[str, Any], schema: object) -> object:
    """Return the schema with its own and its alternatives' references resolved, for types."""
    given = mapping(resolved(root, schema))
    choices = {
        name: given[name] for name in ("anyOf", "oneOf") if isinstance(given.get(name), list)
    }
    return {**given, **{name: [resolved(root, one) for one in choices[name]] for name in choices}}


def _thinks(given: OutputFormat) -> bool:
    return any(field.kind != "calls" for field in given.fields)


@lru_cache(maxsize=8)
def _warn_once(problem: str) -> None:
    _log.warning("The checkpoint's response_template is not followed: %s.", problem)


def grammar_for(
    card: EngineCard,
    tools: Sequence[OfferedTool],
    *,
    choice: Choice,
    parallel: bool = True,
    prompt: PromptEnd | str = "",
    form: Form | None = None,
) -> AnswerGrammar | None:
    """Return the grammar for calls of `tools` or for a `form`; None if the format has none."""
    given = format_of(card)
    if given is None:
        return None
    begun = given.begun(prompt) is not None
    return answer_grammar(given, tools, choice=choice, parallel=parallel, begun=begun, form=form)
