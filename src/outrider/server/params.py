"""Parameters of a request: its sampling, its structure, and its tools.

A parameter that this server cannot honour is refused by name. APIs have formats of tools of
their own, each of which is parsed into a `Tooling`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from math import inf, isnan
from typing import Any, ClassVar, Literal, TypeAlias, cast

import msgspec
from msgspec import UNSET, Struct, UnsetType

from outrider.api.structure import KEYS, StructureOptions, structure_of
from outrider.core.errors import ConfigError
from outrider.core.fields import WHOLE, shown
from outrider.core.params import SamplingParams
from outrider.server.errors import invalid, refused
from outrider.server.port import EngineCard
from outrider.server.site import Site, learns_of_all

# Fields of SamplingParams that have the same name and meaning in a request body.
_SAME = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos", "min_tokens"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "n", "max_time"),
    *("skip_special_tokens", "cache_salt"),
)


# Parameters of other servers that would change the text; ignoring them would be wrong.
_UNKNOWN = {
    "include_stop_str_in_output": "texts never include the stop string. Append it yourself.",
    "truncate_prompt_tokens": "prompts are never truncated. Shorten it yourself.",
}


class StreamOptions(Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Speculative(Struct, frozen=True, forbid_unknown_fields=True):
    """A request's own speculation settings. Omitted ones are those of the server."""

    drafter: str | None = None
    drafters: list[str] | None = None
    k: int | None = None
    tree: int | None = None
    trace: bool = False
    sampler: str | None = None


class Asked(Struct, frozen=True, kw_only=True):
    """Parameters of all APIs. None is the same as leaving a parameter out. Those in `IGNORED` are
    accepted without effect, each with the reason, which the answer's warnings report."""

    IGNORED: ClassVar[Mapping[str, str]] = {"store": "this server stores no answers"}

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    max_time: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculative: bool | Speculative | None = None
    best_of: int | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    cache_salt: str | None = None
    keep_alive: str | float | None = None
    thinking_budget: int | None = None
    thinking_budget_tokens: int | None = None
    thinking_token_budget: int | None = None
    reasoning_budget_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: Any = None
    truncate_prompt_tokens: Any = None
    # Parameters of other servers' services: accepted, and without meaning here.
    user: str | None = None
    metadata: Any = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    chat_template: str | UnsetType | None = UNSET


def params_of(
    site: Site,
    asked: Asked,
    *,
    max_tokens: int | None,
    thinking: tuple[str, object] = ("", None),
    **more: object,
) -> SamplingParams:
    """Return the SamplingParams of a request. `thinking` is the API's own parameter for a thinking
    budget, with its value. Raises ApiError, and ConfigError for values out of bounds."""
    _refuse(asked)
    asked = _as_openai(asked)
    card = site.port.card
    values: dict[str, Any] = {}
    for name in _SAME:
        given = getattr(asked, name)
        values[name] = site.default(name) if given is None else given
    values["max_tokens"] = _limit(site, max_tokens)
    values["thinking_budget"] = _budget(site, asked, thinking)
    if asked.min_tokens is None:
        values["min_tokens"] = min(values["min_tokens"], values["max_tokens"])
    stop = asked.stop if asked.stop is not None else site.default("stop")
    values["stop"] = stop if isinstance(stop, str) else tuple(cast("list[str]", stop))
    values["stop_token_ids"] = asked.stop_token_ids
    values["bad_words"] = tuple(asked.bad_words or cast("list[str]", site.default("bad_words")))
    if asked.logit_bias:
        values["logit_bias"] = {_token_id(key): bias for key, bias in asked.logit_bias.items()}
    values.update(_speculation(card, asked.speculative, keeps_apart=site.keeps_apart))
    values.update(more)
    params = SamplingParams(**values)
    if asked.seed is None or params.greedy or params.sampler is not None or not card.exact:
        return params
    # The client chose a seed, so it expects the same text from any drafter.
    return replace(params, sampler="coupled")


def _as_openai(asked: Asked) -> Asked:
    """Translate conventions of other servers: in vLLM a top_k of -1 keeps all tokens; in
    llama-server a seed of -1 means a random seed, and other negative seeds are valid."""
    changed: dict[str, int | None] = {}
    if asked.top_k == -1:
        changed["top_k"] = 0
    if asked.seed is not None and asked.seed < 0:
        changed["seed"] = None if asked.seed == -1 else asked.seed % 2**63
    return msgspec.structs.replace(asked, **changed) if changed else asked


def _limit(site: Site, given: int | None) -> int:
    """Return max_tokens; WHOLE means the rest of the context window. Raises ApiError."""
    if given is None:
        return cast("int", site.defaults.get("max_tokens", WHOLE))
    if given < 1:
        raise invalid("max_tokens", f"at least 1, got {given}.")
    return given


# Names of the thinking budget in llama-server, vLLM and others.
_BUDGETS = ("thinking_budget_tokens", "thinking_token_budget", "reasoning_budget_tokens")


def _budget(site: Site, asked: Asked, own: tuple[str, object]) -> object:
    """Return the maximum number of thought tokens; None means no limit. Raises ApiError."""
    named = (own, *((name, getattr(asked, name)) for name in (*_BUDGETS, "thinking_budget")))
    for name, given in named:
        if given is None:
            continue
        if isinstance(given, bool) or not isinstance(given, int) or not -1 <= given <= WHOLE:
            words = f"a number of tokens from 0 to {WHOLE}, or -1 for no limit"
            got = f"got {shown(given)}. Send such a number, or leave it out."
            raise invalid(name, f"{words}; {got}")
        return None if given == -1 else given
    return site.default("thinking_budget")


def _token_id(key: str) -> int:
    if key.isascii() and key.isdecimal() and len(key) < 10:
        return int(key)
    raise invalid("logit_bias", f"{key[:40]!r} is no token id.")


def _refuse(asked: Asked) -> None:
    if asked.best_of is not None and asked.best_of != (asked.n or 1):
        raise refused("best_of", "all completions are returned. Send n, and choose yourself.")
    if asked.chat_template is not UNSET and asked.chat_template is not None:
        raise refused(
            "chat_template", "only the model's own template is used. Leave it out, or use prompts."
        )
    for name, why in _UNKNOWN.items():
        if getattr(asked, name):
            raise refused(name, why)
    if asked.cache_salt == "":
        raise refused("cache_salt", "it must not be empty. Leave it out to share the prefix cache.")
    if asked.stream_options is not None and not asked.stream:
        raise invalid("stream_options", "only allowed with stream.")


def structure_asked(
    asked: Asked, response_format: Mapping[str, Any] | None = None, *, name: str = "response_format"
) -> StructureOptions:
    """Return the requested structure; empty if the text is free. `response_format` is for an API
    that has the format in another field, called `name`."""
    body = {name: getattr(asked, name) for name in KEYS}
    if response_format is not None:
        body["response_format"] = response_format
    return structure_of(body, format_name=name)


def ignored_fields(asked: Asked) -> list[str]:
    """Return a warning for each parameter of the request that has no effect."""
    why = asked.IGNORED
    return [f"{name}: {why[name]}" for name in why if getattr(asked, name) not in (None, False)]


_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ms|s|m|h)", re.ASCII)


def keep_alive_of(given: str | float, name: str = "keep_alive") -> float:
    """Parse a number of seconds or a duration like `1h30m`; a negative one is infinite, as in
    Ollama. Raises ConfigError with the parameter's `name`."""
    words = str(given).strip()
    size = words.removeprefix("-")
    parts = [(size, "s")] if _PART.sub("", size) or not size else _PART.findall(size)
    try:
        seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    except ValueError:
        seconds = -1.0
    if isnan(seconds) or seconds < 0:
        raise ConfigError(
            f"{name}: {shown(given)} is no duration.", hint="5m, 90 (seconds), 0, or -1 (never)"
        )
    return inf if words != size else seconds


def kept(site: Site, asked: Asked, warnings: list[str]) -> Site:
    """Return `site` with the request's `keep_alive` for its model. Raises ConfigError."""
    if asked.keep_alive is None:
        return site
    seconds = keep_alive_of(asked.keep_alive)
    if site.held is not nullcontext and not site.keeps_apart:
        return replace(site, held=partial(site.held, seconds))
    warnings.append("keep_alive: ignored; the server's --keep-alive applies to all requests")
    return site


def traced(asked: Asked) -> bool:
    """Return whether the client requested the rounds of its completions."""
    return isinstance(asked.speculative, Speculative) and asked.speculative.trace


def _speculation(
    card: EngineCard, given: bool | Speculative | None, *, keeps_apart: bool
) -> Mapping[str, object]:
    """Return the speculation as fields of SamplingParams. Raises ApiError if unsupported."""
    if not isinstance(given, Speculative):
        return {} if given is None else {"speculative": given}
    if given.drafter is not None and given.drafter not in card.drafters:
        known = ", ".join(card.drafters)
        raise refused("speculative.drafter", f"this server has {known}.")
    chosen = {"drafter": [given.drafter] if given.drafter else [], "drafters": given.drafters or []}
    for field, names in chosen.items():
        if keeps_apart and any(map(learns_of_all, names)):
            why = "it learns from requests of other keys. The server's --shared-prefixes allows it."
            raise refused(f"speculative.{field}", why)
    if given.tree is not None:
        raise refused(
            "speculative.tree", "it is a setting of the engine, for all requests. Leave it out."
        )
    return {
        "drafter": given.drafter,
        "drafters": tuple(given.drafters or ()),
        "k": given.k,
        "sampler": given.sampler,
        "round_events": given.trace,
    }


Tool: TypeAlias = Mapping[str, Any]
Choice: TypeAlias = Literal["none", "auto", "required"]


class Tooling(Struct, frozen=True, kw_only=True):
    """The tools of a request, in the form that templates expect. `named` is the tool that must be
    called; `parallel` allows several calls in one answer. If `allowed` is set, only the tools with
    these names may be called, and the model sees no others."""

    tools: tuple[Tool, ...] = ()
    choice: Choice = "auto"
    named: str | None = None
    parallel: bool = True
    allowed: tuple[str, ...] | None = None

    @property
    def offered(self) -> tuple[Tool, ...]:
        """The tools that the template shows to the model."""
        if self.choice == "none":
            return ()
        if self.allowed is None:
            return self.tools
        return tuple(tool for tool in self.tools if name_of(tool) in self.allowed)

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that an answer may call."""
        if self.named is None:
            return self.offered
        return tuple(tool for tool in self.tools if name_of(tool) == self.named)

    @property
    def is_bound(self) -> bool:
        """True if an answer with these tools needs a grammar."""
        strict = any(_function(tool).get("strict") is True for tool in self.offered)
        bound = self.choice == "required" or self.allowed is not None or not self.parallel
        return bound or strict


def tooling_of(
    tools: Sequence[Tool] | None, choice: str | Mapping[str, Any] | None, parallel: bool | None
) -> Tooling:
    """Return the tooling of OpenAI's parameters, in either of its APIs. Raises ApiError."""
    found = tuple(tools or ())
    named: str | None = None
    allowed: tuple[str, ...] | None = None
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        choice, allowed = _allowed(choice, found)
    elif isinstance(choice, Mapping):
        named = name_of(choice)
        if choice.get("type") != "function" or not named:
            raise refused("tool_choice", 'send "none", "auto", "required" or a function.')
        choice = "required"
    choice = choice or "auto"
    if choice not in ("none", "auto", "required"):
        raise refused("tool_choice", 'send "none", "auto", "required" or a function.')
    given = Tooling(
        tools=found,
        choice=choice,
        named=named,
        parallel=parallel is not False and named is None,
        allowed=allowed,
    )
    if choice == "required" and not given.callable:
        raise invalid("tool_choice", f"there is no tool {named!r}." if named else "no tools.")
    return given


def _allowed(choice: Mapping[str, Any], tools: Sequence[Tool]) -> tuple[str, tuple[str, ...]]:
    """Return mode and names of `allowed_tools`, which chat completions nest deeper."""
    inner: object = choice.get("allowed_tools", choice)
    said = cast("Mapping[str, object]", inner if isinstance(inner, Mapping) else {})
    given = said.get("tools")
    entries = cast("list[object]", given) if isinstance(given, list) else []
    names = tuple(name_of(cast("Tool", one)) for one in entries if isinstance(one, Mapping))
    if not names or len(names) < len(entries):
        raise refused("tool_choice", "allowed_tools has tools, each with the name of a function.")
    known = set(map(name_of, tools))
    if unknown := next((name for name in names if name not in known), None):
        raise refused("tool_choice", f"there is no tool {unknown[:64]!r} to allow.")
    return str(said.get("mode") or "auto"), names


def schema_paths(given: Sequence[Tool] | None) -> dict[str, str]:
    """Return for each tool's name the path of its schema in the request, for error messages."""
    found: dict[str, str] = {}
    for i, tool in enumerate(given or ()):
        function = _function(tool)
        key = "input_schema" if "input_schema" in function else "parameters"
        inner = "function." if "function" in tool else ""
        found[name_of(tool)] = f"tools[{i}].{inner}{key}"
    return found


def name_of(tool: Tool) -> str:
    return str(_function(tool).get("name", ""))


def _function(tool: Tool) -> Mapping[str, Any]:
    inner: object = tool.get("function")
    return cast("Mapping[str, Any]", inner) if isinstance(inner, Mapping) else tool
