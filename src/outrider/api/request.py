"""Requests: a sequence from a prompt and parameters, and requests of callers and of tasks.

A tokenizer may be third-party code: any error of it is caught and reported.
"""

from __future__ import annotations

import math
from asyncio import AbstractEventLoop, Future
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import count
from time import monotonic

from outrider.api.callers import OfOneProcess, PromptReader, RequestOptions, structure_in
from outrider.api.chat_template import PromptEnd, Thinking
from outrider.api.grammar import Grammar, Grammars
from outrider.api.loading import LoadedPair
from outrider.api.output import OutputStream
from outrider.api.result import GenerationResult, Mailbox, TextEvent
from outrider.api.stream import StopMatcher
from outrider.api.structure import StructureOptions
from outrider.api.tokenizer import Tokenizer, spellings
from outrider.core.errors import CheckpointError, ConfigError, OutriderError, foreign
from outrider.core.fields import BYTES_PER_TOKEN
from outrider.core.logits import (
    AllowedTokens,
    CallbackConstraint,
    LogitsProcessor,
    ThoughtBudget,
    ThoughtTags,
    TokenConstraint,
)
from outrider.core.params import SamplingParams
from outrider.core.process import breakable
from outrider.engine.round import LiveSequence
from outrider.sched.admission import LEAST_WEIGHT, MOST_WEIGHT


class Thoughts:
    """Thoughts of one model's texts; its tokens are those below `vocab_size`."""

    def __init__(self, thinking: Thinking, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._thinking, self._tokenizer, self._vocab_size = thinking, tokenizer, vocab_size
        begin, end = thinking.begin.encode(), thinking.end.encode()
        self._tags = ThoughtTags(begin, (end,), thinking.anywhere)
        self._pieces = dict[int, bytes]()

    def of(
        self, prompt: Sequence[int], limit: int | None, inner: TokenConstraint | None
    ) -> ThoughtBudget:
        """The budget of an answer to `prompt`. Raises CheckpointError for a `limit` if the
        tokenizer cannot write the end of thoughts."""
        known = self._thinking
        end = PromptEnd.of(self._tokenizer, prompt)
        return ThoughtBudget(
            self._tags,
            self._piece,
            begun=end.is_open(known.begin, (known.end,), anywhere=known.anywhere),
            limit=limit,
            closing=() if limit is None else self._closing(),
            inner=inner,
        )

    def _closing(self) -> Sequence[int]:
        """The tokens that end thoughts, as they are after other text."""
        encode = partial(self._tokenizer.encode, add_special=False)
        before, ids = encode("a"), encode(f"a{self._thinking.closing}")
        same = ids[: len(before)] == before
        ids = ids[len(before) :] if same else encode(self._thinking.closing)
        written = b"".join(map(self._piece, ids))
        if max(ids, default=0) >= self._vocab_size or self._tags.ends[0] not in written:
            raise CheckpointError(
                f"thinking_budget: the tokenizer cannot write {self._thinking.end!r}, which ends "
                "this model's thoughts.",
                hint="leave thinking_budget out",
            )
        return ids

    def _piece(self, token: int) -> bytes:
        if token not in self._pieces:
            found = self._tokenizer.token_bytes(token)
            if found is None:
                found = self._tokenizer.decode([token], skip_special=False).encode()
            self._pieces[token] = found
        return self._pieces[token]


_TWO_BOS = (
    "the prompt begins with BOS twice: the tokenizer writes it before a text, so leave it out of "
    "the prompt"
)


@dataclass(frozen=True, slots=True)
class RequestHandle(OfOneProcess):
    """The result of `LLM.submit`. The request runs while `LLM.advance` of its `owner` is called."""

    reader: OutputStream
    owner: object
    make_result: Callable[[OutputStream], GenerationResult]

    @property
    def done(self) -> bool:
        """True if it has ended: well, with an error, or cancelled."""
        return self.reader.has_ended

    @property
    def has_read(self) -> bool:
        """True if its prompt is in the KV cache, where others find it."""
        return self.reader.has_read

    def events(self) -> Iterator[TextEvent]:
        """Yield and forget the events since the last call."""
        yield from self.reader.events()

    def result(self) -> GenerationResult:
        """The result. Raises the error for which the engine gave the request up, and ConfigError
        while it is still running."""
        self.reader.check()
        if not self.done:
            raise ConfigError("the request has not ended.", hint="call advance until it has")
        return self.make_result(self.reader)


@dataclass(eq=False, slots=True, weakref_slot=True)
class AsyncRequest:
    """A request of a task of `loop`. A `quiet` one is notified only of its end. Requests of several
    `key`s share the engine in proportion to their `weight`.

    The engine's thread writes `handle`, `events`, `ended` and `error`; `waiter` is the loop's.
    """

    loop: AbstractEventLoop
    ids: Sequence[int]
    params: SamplingParams
    allowed: AllowedTokens | Grammar | None = None
    structure: StructureOptions = field(default_factory=StructureOptions)
    sample: int = 0
    written: Sequence[int] = ()
    quiet: bool = False
    key: str = ""
    weight: float = 1.0
    came: float = field(default_factory=monotonic)
    num_charged: int = 0
    handle: RequestHandle | None = None
    events: Mailbox = field(default_factory=Mailbox)
    ended: bool = False
    error: BaseException | None = None
    waiter: Future[None] | None = None

    def __post_init__(self) -> None:
        if not LEAST_WEIGHT <= self.weight <= MOST_WEIGHT:
            raise ConfigError(
                f"the weight of a request is {self.weight}.",
                hint=f"a number from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}; 1 is the default",
            )

    @property
    def deadline(self) -> float:
        return self.came + self.params.max_time if self.params.max_time else math.inf

    async def news(self) -> None:
        """Wait for an event or the end; only the request's own loop may call it."""
        self.waiter = self.loop.create_future()
        try:
            await self.waiter
        finally:
            self.waiter = None

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


def result_of(request: AsyncRequest | None) -> GenerationResult:
    """The result of an ended request. Raises its error, and ConfigError if it never ran."""
    if request is not None and request.error is not None:
        raise request.error
    if request is None or request.handle is None:
        raise ConfigError("the request has not started.", hint="read its events first")
    return request.handle.result()


class RequestMaker(PromptReader):
    """Makes readers of requests to a `pair`, in an arena that holds a text of `longest` tokens."""

    def __init__(self, pair: LoadedPair, longest: int) -> None:
        super().__init__(
            pair.tokenizer, window=pair.plan.window, vocab_size=pair.target.spec.vocab_size
        )
        self._pair, self.plan, self.longest = pair, pair.plan, longest
        self._seq_ids = count()

    def limit(self, num_prompt: int, params: SamplingParams) -> int:
        """The most tokens that may be emitted, with any drafter: drafts end at the window's end."""
        window = self.plan.window
        if num_prompt >= window:
            raise ConfigError(
                f"a prompt of {num_prompt} tokens does not fit a window of {window} tokens "
                f"({self.plan.window_reason}), which must hold at least one more.",
                hint="shorten the prompt, or raise --context if the target allows it",
            )
        if params.is_open:
            window = max(min(window, self.longest), num_prompt + 1)
        return min(params.max_tokens, window - num_prompt)

    @foreign()
    @breakable()
    def constraint(
        self,
        allowed: AllowedTokens | Grammar | None,
        options: RequestOptions | StructureOptions,
        *,
        tried: bool = False,
    ) -> AllowedTokens | Grammar | None:
        """The mask of the vocabulary. Raises ConfigError for a structure that cannot be followed,
        or that takes too long to read with `tried`, and for two masks."""
        structure = structure_in(options)
        grammar = self._grammars.of(structure, tried=tried) if structure else None
        if grammar is None:
            return allowed
        if allowed is not None:
            raise ConfigError(
                f"allowed and {grammar.name}: both mask the vocabulary.", hint="give one of them"
            )
        return grammar

    @cached_property
    def _grammars(self) -> Grammars:
        pair = self._pair
        return Grammars(self.tokenizer, pair.target.spec.vocab_size, pair.stop_ids)

    @foreign()
    @breakable()
    def group(
        self,
        prompt: list[int] | OutriderError,
        params: SamplingParams,
        allowed: AllowedTokens | Grammar | None,
    ) -> list[OutputStream] | OutriderError:
        """Readers of the `n` requests of a prompt, or the error that prevents them."""
        if isinstance(prompt, OutriderError):
            return prompt
        make = partial(self.reader, prompt, params, allowed, live=bool(params.stop))
        try:
            first = make(sample=0)
            # They share one prompt, which only the first of them scores.
            params = replace(params, prompt_logprobs=None)
            make = partial(self.reader, prompt, params, allowed, live=first.live)
            return [first, *(make(sample=sample) for sample in range(1, params.n))]
        except OutriderError as error:
            return error

    def reader(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        allowed: AllowedTokens | Grammar | None,
        *,
        sample: int = 0,
        live: bool,
    ) -> OutputStream:
        """A reader of a request. Raises ConfigError for parameters that do not fit the models."""
        pair, limit = self._pair, self.limit(len(ids), params)
        params = params.seeded()
        if size := self.size_beyond(params.prediction):
            most = BYTES_PER_TOKEN.most * pair.plan.window
            raise ConfigError(f"prediction: it has {size:,} bytes or more; it may have {most:,}.")
        guess = self.tokenizer.encode(params.prediction, add_special=False)
        mask: TokenConstraint | None = None
        if allowed is not None:
            is_grammar = isinstance(allowed, Grammar)
            mask = allowed.start() if is_grammar else CallbackConstraint(allowed)
        budget, thoughts = params.thinking_budget, None
        if self._thoughts is not None:
            thoughts = self._thoughts.of(ids, budget, mask)
            mask = mask if budget is None else thoughts
        ends = self._ends(params)
        seq = LiveSequence(
            seq_id=next(self._seq_ids),
            tokens=list(ids),
            prompt_length=len(ids),
            params=params,
            limit=limit,
            stop_ids=ends,
            shaper=self._shaper(len(ids), params, allowed, mask, ends),
            sample=sample,
            prediction=tuple(i for i in guess if i < pair.target.spec.vocab_size),
            speculation=pair.plan.resolved.of_request(params),
            pick=pair.target.kernels.sampling.pick,
        )
        is_cut = limit < params.max_tokens and not params.is_open
        notes: tuple[str, ...] = ()
        if is_cut:
            window = f"the window of {self.plan.window} ({self.plan.window_reason})"
            notes += (f"at most {limit} of {params.max_tokens} tokens fit {window}",)
        if list(ids[:2]) == [self.tokenizer.bos_id] * 2:
            notes += (_TWO_BOS,)
        if isinstance(allowed, Grammar):
            notes += allowed.notes
        if budget is not None and thoughts is None:
            notes += ("thinking_budget: the chat template has no thoughts to end",)
        special = self.tokenizer.special_ids if params.skip_special_tokens else pair.stop_ids
        hidden = special.union(params.stop_token_ids)
        text = StopMatcher(self.tokenizer, params.stop, params.min_tokens, hidden=hidden)
        return OutputStream(seq, text, live, notes, thoughts)

    @cached_property
    def _thoughts(self) -> Thoughts | None:
        thinking = self.tokenizer.templates.thinking
        size = self._pair.target.spec.vocab_size
        return None if thinking is None else Thoughts(thinking, self.tokenizer, size)

    def _ends(self, params: SamplingParams) -> frozenset[int]:
        """The tokens that end a text. Raises ConfigError for ids that do not exist."""
        size = self._pair.target.spec.vocab_size
        for name in ("logit_bias", "stop_token_ids"):
            foreign = [i for i in getattr(params, name) or () if i >= size]
            if foreign:
                raise ConfigError(
                    f"{name} has ids outside the vocabulary of {size}: {foreign[:5]}."
                )
        own = frozenset[int]() if params.ignore_eos else self._pair.stop_ids
        return own.union(params.stop_token_ids)

    def _shaper(
        self,
        prompt_length: int,
        params: SamplingParams,
        allowed: AllowedTokens | Grammar | None,
        mask: TokenConstraint | None,
        ends: frozenset[int],
    ) -> LogitsProcessor | None:
        size = self._pair.target.spec.vocab_size
        if isinstance(allowed, Grammar) and params.ignore_eos:
            raise ConfigError(
                f"ignore_eos: a text of a {allowed.name} ends where it is complete.",
                hint="leave ignore_eos out",
            )
        if not params.shapes_logits and mask is None:
            return None
        return LogitsProcessor(
            params,
            prompt_length,
            stop_ids=ends,
            bad_words=tuple(
                word for word in spellings(self.tokenizer, params.bad_words) if max(word) < size
            ),
            constraint=mask,
        )


def error_of(group: list[OutputStream] | OutriderError) -> BaseException | None:
    """The error of a prompt that could not be run; None if any of its completions ended well."""
    if isinstance(group, OutriderError):
        return group
    errors = [reader.seq.error for reader in group]
    return errors[0] if errors and all(errors) else None


def check_any(errors: Sequence[BaseException | None]) -> None:
    """Raise the first error if no prompt could be run."""
    if errors and errors[0] is not None and all(errors):
        raise errors[0]
