"""Sampling parameters of a request, and when it ends. No tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, TypeVar, cast

from outrider.core.config import EXACT_SAMPLERS, LOSSY_SAMPLERS, EngineConfig
from outrider.core.errors import ConfigError, hint_for, nearest
from outrider.core.fields import (
    BAD_WORD_BYTES,
    BAD_WORDS,
    COMPLETIONS,
    LOGIT_BIAS,
    STOP_BYTES,
    STOP_IDS,
    STOPS,
    TOP_LOGPROBS,
    WHOLE,
    as_ids,
    as_texts,
    check_fields,
    documented,
    setting,
    shown,
)
from outrider.core.plugins import KINDS, OFF

# Settings that a checkpoint may advise, by the same names as in its files.
ADVISED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")

FinishReason = Literal["stop", "length", "timeout", "error"]


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of a request. Raises ConfigError, naming the field, for a bad value.

    Logits pass through these in order: logit_bias, repetition_penalty, frequency_penalty and
    presence_penalty, then bans (bad_words, min_tokens), then the filters temperature, top_k,
    top_p, min_p. repetition_penalty counts prompt and text, the other two the text alone. `stop`
    and `bad_words` may be one text or any sequence of texts.
    """

    max_tokens: int = setting(
        128,
        "Write at most this many tokens; if unset, chat, run and the server go on until the model "
        "ends its turn.",
        minimum=1,
        maximum=WHOLE,
    )
    temperature: float = setting(0.0, "0 is greedy; higher is more random.", minimum=0, maximum=100)
    top_k: int = setting(0, "Keep the k likeliest tokens; 0 keeps all.", minimum=0, maximum=WHOLE)
    top_p: float = setting(
        1.0, "Keep the likeliest tokens that together reach this probability.", minimum=0, maximum=1
    )
    min_p: float = setting(
        0.0, "Drop tokens below this share of the likeliest one's mass.", minimum=0, maximum=1
    )
    seed: int | None = setting(
        None,
        "Seed of the request's random numbers; if unset, each request draws one, which its result "
        "reports.",
        kind=int,
        minimum=0,
        maximum=2**63 - 1,
    )
    stop: Sequence[str] = setting(
        (), "End before any of these strings.", kind=tuple, count=STOPS, each=STOP_BYTES
    )
    stop_token_ids: Sequence[int] = setting(
        (),
        "End at any of these tokens, as at an end-of-text token, also with ignore_eos.",
        kind=tuple,
        minimum=0,
        maximum=WHOLE,
        count=STOP_IDS,
        per_request=True,
    )
    skip_special_tokens: bool = setting(
        True,
        "Leave special tokens out of the text; one that ends the text is never in it.",
        per_request=True,
    )
    ignore_eos: bool = setting(False, "Continue after the model's end-of-text token.")
    min_tokens: int = setting(0, "Do not end before this many tokens.", minimum=0, maximum=WHOLE)
    thinking_budget: int | None = setting(
        None,
        "End the model's thoughts after this many tokens; 0 ends them at once, unset is no limit.",
        kind=int,
        minimum=0,
        maximum=WHOLE,
    )
    repetition_penalty: float = setting(
        1.0, "Above 1, avoid tokens of prompt and text; 1 is off.", minimum=0.01, maximum=100
    )
    presence_penalty: float = setting(
        0.0, "Subtracted from the logits of tokens in the text.", minimum=-2, maximum=2
    )
    frequency_penalty: float = setting(
        0.0, "Subtracted once for each occurrence of a token in the text.", minimum=-2, maximum=2
    )
    logit_bias: Mapping[int, float] | None = setting(
        None,
        "Added to the logits of tokens, as ID=BIAS,ID=BIAS.",
        minimum=-100,
        maximum=100,
        count=LOGIT_BIAS,
    )
    bad_words: Sequence[str] = setting(
        (),
        "Never write these words, as the tokenizer spells them.",
        kind=tuple,
        count=BAD_WORDS,
        each=BAD_WORD_BYTES,
    )
    n: int = setting(1, "Completions of each prompt.", minimum=1, maximum=COMPLETIONS.most)
    max_time: float = setting(
        0.0,
        "End after this many seconds, queueing included, with the text so far; 0 is no limit.",
        minimum=0,
        maximum=1e6,
    )
    logprobs: bool = setting(False, "Report the log-probability of every token.")
    top_logprobs: int = setting(
        0, "Report this many top tokens at every position.", minimum=0, maximum=TOP_LOGPROBS.most
    )
    prompt_logprobs: int | None = setting(
        None,
        "Report the log-probability of every prompt token, and this many likeliest tokens at each "
        "position.",
        kind=int,
        minimum=0,
        maximum=TOP_LOGPROBS.most,
        per_request=True,
    )
    round_events: bool = setting(
        False,
        "Report every round: each drafted token, its probabilities under target and draft, the "
        "verdict, and times.",
    )
    cache_salt: str = setting(
        "", "Share cached prompts only with requests of the same salt.", per_request=True
    )
    prediction: str = setting(
        "",
        "Your guess of the text: any drafter first drafts along it, as far as it is right.",
    )
    speculative: bool | Mapping[str, object] | None = setting(
        None,
        "False drafts nothing for this request; true refuses the request if nothing would be "
        'drafted; {"drafters": [...]} is true with these `drafters`; unset follows the engine.',
        kind=bool,
        per_request=True,
    )
    drafters: Sequence[str] = setting(
        (),
        "Only these members of the engine's drafter, or look-ups, draft for this request.",
        kind=tuple,
        per_request=True,
    )
    drafter: str | None = setting(
        None,
        "Drafter of this request: none, a look-up in texts, or a part of the engine's own drafter; "
        "unset is the engine's own.",
        kind=str,
        choices=tuple(KINDS),
        others=KINDS.names,
        per_request=True,
    )
    sampler: str | None = setting(
        None,
        "Acceptance rule of this request, an exact one: coupled and match tie its text to its "
        "seed, with any drafter; unset is the engine's.",
        kind=str,
        choices=(*EXACT_SAMPLERS, *LOSSY_SAMPLERS),
        per_request=True,
    )
    k: int | None = setting(
        None,
        "Draft at most this many tokens at once for this request; never more than the engine's k.",
        kind=int,
        minimum=0,
        maximum=64,
        per_request=True,
    )

    def __post_init__(self) -> None:
        if isinstance(self.speculative, Mapping):
            object.__setattr__(self, "drafters", _drafters_in(self.speculative))
            object.__setattr__(self, "speculative", True)
        for name in ("stop", "bad_words", "drafters"):
            object.__setattr__(self, name, as_texts(getattr(self, name)))
        ends = as_ids("stop_token_ids", self.stop_token_ids)
        object.__setattr__(self, "stop_token_ids", ends)
        check_fields(self)
        if self.logit_bias is not None:
            # The caller's own mapping may change after it was checked.
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        if self.sampler in LOSSY_SAMPLERS:
            raise ConfigError(
                f"sampler {self.sampler!r} is lossy, and a request may only choose an exact one.",
                hint=f"one of {', '.join(EXACT_SAMPLERS)}; a lossy one is chosen for a whole "
                f"engine (--sampler {self.sampler})",
            )
        if self.drafter and self.drafters:
            raise ConfigError(
                f"drafter {self.drafter!r} and drafters {shown(self.drafters)} were both set.",
                hint="leave one of them out",
            )
        if self.top_logprobs and not self.logprobs:
            raise ConfigError(
                "top_logprobs needs logprobs.", hint="set logprobs as well (--logprobs)"
            )
        if self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}."
            )

    @property
    def is_open(self) -> bool:
        """True if the text goes on until the model ends it, or the window does."""
        return self.max_tokens == WHOLE

    @property
    def shapes_logits(self) -> bool:
        """True if the distribution depends on more than the model's own logits and the filters."""
        return bool(
            self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.bad_words
            or self.min_tokens
        )

    def seeded(self, default: int | None = None) -> SamplingParams:
        """These parameters with a seed: their own, else `default`, else one from the system. Greedy
        decoding draws nothing, so it needs none."""
        if self.seed is not None or (self.greedy and default is None):
            return self
        return replace(self, seed=int.from_bytes(os.urandom(4)) if default is None else default)

    @property
    def rng_seed(self) -> int:
        """The seed of random numbers: `seed`, or 0 if none was chosen."""
        return self.seed or 0

    def numbered(self, number: int) -> SamplingParams:
        """The parameters of request `number` of a run: seeds count up from the first one's."""
        return replace(self, seed=(self.rng_seed + number) % 2**63)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def _drafters_in(given: Mapping[str, object]) -> object:
    """The drafters of `speculative`, given as a mapping. Raises ConfigError for other keys."""
    if list(given) != ["drafters"] or not given["drafters"]:
        raise ConfigError(
            f"speculative must be true, false or drafters, got {shown(dict(given))}.",
            hint='speculative={"drafters": ["suffix", "model"]}',
        )
    return given["drafters"]


@dataclass(frozen=True, slots=True)
class RequestSpeculation:
    """One request's own choices of speculation. `drafter` and acceptance rule `sampler` are those
    that it chose ("" is the engine's own), only `members` of this drafter serve it (all, if
    there are none), and at most `k` tokens are drafted for it at once (None: as many as the
    engine drafts). A request that `is_guided` has a prediction that its drafter does not read:
    drafts follow the prediction first."""

    drafter: str = ""
    sampler: str = ""
    k: int | None = None
    is_guided: bool = False
    members: tuple[str, ...] = ()

    @property
    def has_own(self) -> bool:
        """True if it chose its drafter."""
        return self.drafter not in ("", OFF)

    @property
    def engine_drafts(self) -> bool:
        """True if only the engine's own drafter drafts for it."""
        return not self.is_guided and not self.has_own

    def most(self, k: int) -> int:
        """Most draft tokens at once, if the engine drafts `k`."""
        return k if self.k is None else min(k, self.k)

    @property
    def exact(self) -> bool:
        """True if its text is the target's own, under any rule of the engine."""
        return self.k == 0 or bool(self.sampler)


AS_THE_ENGINE = RequestSpeculation()
Options = TypeVar("Options", EngineConfig, SamplingParams)
# The calls that take these options as keywords.
_TAKEN_BY: Mapping[type, str] = {
    EngineConfig: "LLM(model, ...)",
    SamplingParams: "llm.generate(prompt, ...)",
}


def params_for_each(
    params: SamplingParams | Sequence[SamplingParams] | None,
    count: int,
    options: Mapping[str, object] | None = None,
) -> Sequence[SamplingParams]:
    """Parameters for each of `count` prompts, with `options` replacing their own values. Raises
    ConfigError if a list has another length, or an item is no SamplingParams."""
    options = options or {}
    if not isinstance(params, list | tuple):
        one = cast("SamplingParams | None", params)
        return [_with_options(SamplingParams, one, options)] * count
    if len(params) != count:
        raise ConfigError(f"{len(params)} sampling params for {count} prompts.")
    return [_with_options(SamplingParams, item, options) for item in params]


def params_for_one(params: SamplingParams | None, options: Mapping[str, object]) -> SamplingParams:
    """Parameters of a request with one completion. Raises ConfigError for several, and as above."""
    found = _with_options(SamplingParams, params, options)
    if found.n > 1:
        raise ConfigError("a request has one completion, n asks for more.", hint="use generate")
    return found


def engine_config(given: EngineConfig | None, options: Mapping[str, object]) -> EngineConfig:
    """`given`, or all defaults, with `options` replacing its own values. Raises ConfigError."""
    return _with_options(EngineConfig, given, options)


def _with_options(
    kind: type[Options], given: Options | None, options: Mapping[str, object]
) -> Options:
    """`given`, or all defaults, with `options` replacing its own values. Raises ConfigError for an
    unknown option, or a `given` of another type."""
    if given is None:
        given = kind()
    if not isinstance(cast("object", given), kind):
        raise ConfigError(
            f"expected {kind.__name__}, got {shown(given)}.",
            hint=f"{kind.__name__}(...), or its fields as keywords",
        )
    known = _names(kind)
    for name in options:
        if name not in known:
            every = f"help({kind.__name__}) lists all options."
            takers = [call for other, call in _TAKEN_BY.items() if name in _names(other)]
            hint = f"{takers[0]} takes {name}" if takers else hint_for(name)
            raise ConfigError(f"unknown option {name!r}.", hint=hint or nearest(name, known, every))
    return replace(given, **options) if options else given


def _names(kind: type) -> list[str]:
    return [item.name for item in fields(kind)]
