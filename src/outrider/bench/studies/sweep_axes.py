"""What a sweep can vary, and the words that say so: `NAME=VALUE,VALUE`.

An axis is a setting of the engine or of sampling by its name, or one of a few things that are no
settings: the pair, the domain of prompts, how long they are, how many requests are in flight. There
are two kinds. A scene axis changes plain decoding as well (pair, domain, temperature, batch), so
each of its values has plain decoding of its own beside it. A way axis changes only how is drafted
and accepted (drafter, K, rule): all its values share the plain decoding of their scene.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.bench.store import Plain
from outrider.bench.studies.drafters_lineup import available
from outrider.core.errors import ConfigError, ContractError, did_you_mean
from outrider.core.settings import SETTINGS, Given, typed
from outrider.pairs.catalog import get_pair

FLAG = "--over"
PAIR, DOMAIN, CONTEXT, CONCURRENCY, ALPHA = "pair", "domain", "context", "concurrency", "alpha"
# Those that are no settings. `context` is prompt tokens here; the setting of that name is not
# swept, since it only bounds memory.
SPECIAL = (PAIR, DOMAIN, CONTEXT, CONCURRENCY)
# Names that papers and other programs use.
ALIASES: Mapping[str, str] = {
    "batch": "batch_size",
    "rule": "sampler",
    "p_hit": "force_hits",
    "engine": "schedule",
}
# Settings that only speculation reads. Plain decoding has them at their defaults, `schedule` too:
# what drafts are worth is told against one lane that drafts nothing.
OF_WAYS = frozenset((
    "drafter", "k", "tree_nodes", "tree_shape", "least_confidence", "lite_alpha", "lite_heads",
    "head_init", "sampler", "leniency", "controller", "min_k", "target_acceptance", "target_ms",
    "self_quantise", "skip_layers", "schedule", "hybrid_threshold", "lane_order", "verify_margin",
    "concurrent_lanes", "lane_threads", "decode_batch", "verify_batch", "prefill_batch",
    "fallback", "fan_out", "fan_policy", "saguaro", "force_hits", "drafter_home",
    "drafter_device", "drafter_timeout", "max_ngram", "min_ngram", "suffix_corpus",
    "suffix_tokens", "watchdog", "batched_verify",
))  # fmt: skip
# Those that make sense only while drafting ahead.
OF_DRAFTING_AHEAD = frozenset(["fallback", "fan_out", "fan_policy", "force_hits", "saguaro"])
_NOT_SWEPT = frozenset([
    "context", "profile", "prediction", "n", "logprobs", "top_logprobs", "round_events",
    "arena_tokens",
])  # fmt: skip
# Fields of a configuration that axes have other names for.
FIELDS: Mapping[str, str] = {
    "pair": "model_pair_name",
    "domain": "prompt_domain",
    "context": "prompt_tokens",
}
_MOST_TOKENS, _MOST_IN_FLIGHT = 1_000_000, 1024


@dataclass(frozen=True, slots=True)
class SweepAxis:
    """A name as results have it, and its values in the order in which they were given."""

    name: str
    values: tuple[Plain, ...]

    @property
    def of_ways(self) -> bool:
        return self.name in OF_WAYS


def axes_of(words: Sequence[str]) -> tuple[SweepAxis, ...]:
    """One for each of `words`. Raises ConfigError for what cannot be meant."""
    found: dict[str, SweepAxis] = {}
    for word in words:
        written, equals, values = word.partition("=")
        name = axis_name(written.strip())
        if not equals or not values.strip(" ,"):
            raise ConfigError(f"{FLAG} {word} gives no values.", hint=f"{FLAG} {written}=A,B")
        if name in found:
            raise ConfigError(
                f"{FLAG} names {name} twice.", hint="put all its values behind one name"
            )
        parts = [part.strip() for part in values.split(",") if part.strip()]
        found[name] = SweepAxis(name, tuple(dict.fromkeys(_value(name, part) for part in parts)))
    if {"batch_size", CONCURRENCY} <= found.keys():
        raise ConfigError(
            f"batch and {CONCURRENCY} both say how many run at once.", hint="keep one of them"
        )
    return tuple(found.values())


def axis_name(written: str) -> str:
    """The name in results of what a user calls an axis. Raises ConfigError."""
    plain = written.lower().replace("-", "_")
    name = ALIASES.get(plain, plain)
    if name == ALPHA:
        raise ConfigError(
            "alpha is what a pair has, and no setting of it.",
            hint="`outrider bench ssd --alphas 0.6,0.9` sets it, by synthetic acceptance",
        )
    if name not in known_names():
        listed = [*SPECIAL, *ALIASES, *sorted(OF_WAYS - {"force_hits"}), "temperature"]
        raise ConfigError(f"{FLAG}: unknown axis {written!r}.", hint=did_you_mean(name, listed))
    return name


def known_names() -> frozenset[str]:
    """Every axis: the special ones, and settings whose values are words or numbers."""
    of_settings = {
        name
        for name, item in SETTINGS.items()
        if item.group in ("engine", "sampling") and item.kind in (bool, int, float, str)
    }
    return frozenset({*SPECIAL, *of_settings} - (_NOT_SWEPT - {CONTEXT}))


def _value(name: str, word: str) -> Plain:
    """Raises ConfigError for a value that the axis cannot have."""
    if name == PAIR:
        return get_pair(word).pair_name
    if name == DOMAIN:
        # Which there are depends on where prompts come from.
        return word
    if name in (CONTEXT, CONCURRENCY):
        low, high = (16, _MOST_TOKENS) if name == CONTEXT else (0, _MOST_IN_FLIGHT)
        if not word.isdecimal() or not low <= int(word) <= high:
            raise ConfigError(
                f"{FLAG} {name} takes whole numbers from {low} to {high}, got {word!r}.",
                hint=f"{FLAG} {name}={'500,1000' if name == CONTEXT else '0,1,3'}",
            )
        return int(word)
    if name == "drafter" and word not in ("auto", "none"):
        _check_drafter(word)
        return word
    value = typed(SETTINGS[name], Given(word, f"{FLAG} {name}"))
    if not isinstance(value, bool | int | float | str):
        raise ContractError("value is no bool | int | float | str")
    return value


def _check_drafter(word: str) -> None:
    """NAME, or NAME=DRAFT for a model or heads of its own."""
    name, equals, draft = word.partition("=")
    if name not in available():
        hint = did_you_mean(name, available())
        raise ConfigError(f"{FLAG} drafter: unknown drafter {name!r}.", hint=hint)
    if equals and not draft:
        raise ConfigError(
            f"{FLAG} drafter: {word!r} names no draft.", hint=f"{FLAG} drafter={name}=FOLDER"
        )


def named(values: Mapping[str, Plain]) -> str:
    """A cell in words: `k=2, drafter=ngram`."""
    return ", ".join(f"{name}={value}" for name, value in values.items())
