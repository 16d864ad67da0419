"""How an answer is read: the parser of the model's text, and the grammar that it must follow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from outrider.api.chat_template import PromptEnd
from outrider.api.structure import StructureOptions, chosen
from outrider.core.params import SamplingParams
from outrider.plugins.tools.fields import OutputFormat
from outrider.plugins.tools.formats import format_of, parser_for
from outrider.plugins.tools.grammar import AnswerGrammar, answer_grammar, form_of, offered_tool
from outrider.server.errors import refused
from outrider.server.params import Tooling, name_of
from outrider.server.parts import OutputParser, PlainParser
from outrider.server.site import Site

# Schemas are processed in this thread, one at a time: 10,000 nodes take 0.2 s, which must not block
# streams.
_SCHEMAS = ThreadPoolExecutor(1, "outrider-schemas")


async def read_with(
    site: Site,
    prompt_ids: Sequence[int],
    tooling: Tooling,
    params: SamplingParams,
    structure: StructureOptions,
    paths: Mapping[str, str],
) -> tuple[SamplingParams, StructureOptions, Callable[[], OutputParser], list[str]]:
    """Return the parameters with which an answer is generated, the structure that it must have, a
    function that makes its parser, and warnings. Raises ApiError for requirements that this model
    cannot satisfy, ConfigError for schemas that cannot be enforced."""
    tools, warnings = tooling.offered, list[str]()
    end = PromptEnd.of(site.port.decoder, prompt_ids)
    given = format_of(site.port.card)
    if tools and (given is None or not given.has_calls):
        warnings.append("calls of tools cannot be distinguished from text in this model's output")
    required = tooling.choice == "required"
    has_form = chosen(structure) is not None and not required
    if has_form or tooling.is_bound:
        form = structure if has_form else None
        begun = given is not None and given.begun(end) is not None
        grammar = await asyncio.get_running_loop().run_in_executor(
            _SCHEMAS, lambda: _grammar(given, tooling, form, paths, begun=begun)
        )
        if grammar is not None:
            structure = grammar.structure
            warnings += grammar.notes
        elif required:
            raise refused("tool_choice", "this model's calls cannot be enforced. Send auto.")
        elif has_form:
            if tools:
                warnings.append("tools: none is called, as this form of the text excludes calls")
            return params, structure, PlainParser, warnings
        elif tools:
            warnings.append(
                "strict, parallel_tool_calls, allowed_tools: this model's calls have no grammar"
            )
    if given is not None and given.needs_special(tools):
        params = replace(params, skip_special_tokens=False)
    make_parser = partial(parser_for, given, tools, prompt=end, has_form=has_form)
    return params, structure, make_parser, warnings


def _grammar(
    given: OutputFormat | None,
    tooling: Tooling,
    structure: StructureOptions | None,
    paths: Mapping[str, str],
    *,
    begun: bool,
) -> AnswerGrammar | None:
    """Return the grammar of calls, and of the form of a `structure`; None if none applies."""
    form = None if structure is None else form_of(structure)
    # A grammar of the client's own cannot be embedded in another grammar.
    if structure is not None and form is None:
        return None
    return answer_grammar(
        given,
        [offered_tool(tool, paths.get(name_of(tool), "tools")) for tool in tooling.callable],
        choice="required" if tooling.choice == "required" else "auto",
        parallel=tooling.parallel,
        begun=begun,
        form=form,
    )
