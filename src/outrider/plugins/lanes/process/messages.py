"""Messages to a drafter's process, to the byte: requests, answers, and the terms of sampling.

A row's tokens are sent as a difference: how many of them the process has, and those after. Random
numbers are keyed, so a row carries the key and the process draws the very numbers that a drafter
inside the engine would. A row of AHEAD has the key as if its open round emitted nothing. Two things
are not sent: the caller's predicted text, which no draft model reads, and the caller's mask of
allowed tokens, which is code; without the mask fewer drafts are accepted and the text is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import TypeVar

from outrider.core.config import EXACT_SAMPLERS
from outrider.core.draft import Budget, Draft, Outcome, Verdict
from outrider.core.errors import CapacityError, DrafterError, OutriderError, SequenceError
from outrider.core.logits import LogitsProcessor
from outrider.core.params import SamplingParams
from outrider.core.rng import KeyedRng, Rng
from outrider.core.tree import ROOT
from outrider.plugins.lanes.process.frames import BodyReader, BodyWriter, Frame, Kind

T = TypeVar("T")

_SEQ = Struct("<q")
_HELLO = Struct("<II??")
_COUNT = Struct("<I")
# Numbers of a row, and counts of the lists that follow it.
_ROW = Struct("<qIIdQIIiIII?")
_AHEAD = Struct("<qIiIddQIII")
_DRAFT = Struct("<BiI")
_FULL = Struct("<?")
_BUSY = Struct("<dd")

_NO_DISTRIBUTIONS = -1
_HITS: tuple[bool | None, ...] = (None, False, True)


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message: the model's vocabulary, the number of distributions that fit, whether it
    drafts ahead, and whether all messages but this go through memory."""

    vocab_size: int
    num_distributions: int
    drafts_ahead: bool
    in_memory: bool

    def frame(self) -> Frame:
        writer = BodyWriter()
        fields = self.vocab_size, self.num_distributions, self.drafts_ahead, self.in_memory
        writer.put(_HELLO, *fields)
        return writer.frame(Kind.HELLO)

    @classmethod
    def read(cls, body: bytes) -> Hello:
        reader = BodyReader(body)
        hello = cls(*reader.take(_HELLO))
        reader.end()
        return hello


@dataclass(frozen=True, slots=True)
class Asked:
    """A row of PROPOSE. `new` are the tokens after the first `num_known`."""

    seq_id: int
    num_known: int
    new: Sequence[int]
    budget: Budget
    key: KeyedRng
    last: Outcome | None

    def put(self, writer: BodyWriter) -> None:
        budget, key, last = self.budget, self.key, self.last
        draft, verdict = (_NO_DRAFT, _NO_VERDICT) if last is None else (last.draft, last.verdict)
        counts = len(self.new), len(draft.tokens), len(verdict.path)
        about = self.seq_id, self.num_known, budget.depth, budget.temperature
        keyed = key.seed, key.sample, key.start, verdict.next_token
        writer.put(_ROW, *about, *keyed, *counts, last is not None)
        writer.known_ints([*self.new, *draft.tokens, *draft.parents, *verdict.path])

    @classmethod
    def take(cls, reader: BodyReader) -> Asked:
        row = reader.take(_ROW)
        seq_id, num_known, depth, temperature, seed, sample, start, next_token, *counts = row
        num_new, num_nodes, num_path, has_last = counts
        end = num_new + 2 * num_nodes
        numbers = reader.known_ints(end + num_path)
        last = None
        if has_last:
            verdict = Verdict(tuple(numbers[end:]), next_token)
            last = Outcome(seq_id, _draft(numbers[num_new:end]), verdict)
        key = KeyedRng(seed, sample, start)
        return cls(seq_id, num_known, numbers[:num_new], Budget(depth, temperature), key, last)


@dataclass(frozen=True, slots=True)
class AskedAhead:
    """A row of AHEAD."""

    seq_id: int
    start: int
    pending: int
    draft: Draft
    budget: Budget
    key: KeyedRng
    window: float = 0.0

    def put(self, writer: BodyWriter) -> None:
        budget, key, draft = self.budget, self.key, self.draft
        about = self.seq_id, self.start, self.pending, budget.depth, budget.temperature, self.window
        writer.put(_AHEAD, *about, key.seed, key.sample, key.start, len(draft.tokens))
        writer.known_ints([*draft.tokens, *draft.parents])

    @classmethod
    def take(cls, reader: BodyReader) -> AskedAhead:
        seq_id, start, pending, depth, temperature, window, *key, num_nodes = reader.take(_AHEAD)
        draft, budget = _draft(reader.known_ints(2 * num_nodes)), Budget(depth, temperature)
        return cls(seq_id, start, pending, draft, budget, KeyedRng(*key), window)


@dataclass(frozen=True, slots=True)
class Proposal:
    """A draft without its distributions, which begin at row `first_distribution` of the shared
    memory (None: it has none)."""

    draft: Draft
    first_distribution: int | None

    def put(self, writer: BodyWriter) -> None:
        draft, first = self.draft, self.first_distribution
        first = _NO_DISTRIBUTIONS if first is None else first
        writer.put(_DRAFT, _HITS.index(draft.hit), first, len(draft.tokens))
        writer.known_ints([*draft.tokens, *draft.parents])

    @classmethod
    def take(cls, reader: BodyReader) -> Proposal:
        hit, first, num_nodes = reader.take(_DRAFT)
        if hit >= len(_HITS):
            raise DrafterError(f"a drafter's process sent {hit} as a hit or a miss.")
        draft = _draft(reader.known_ints(2 * num_nodes), _HITS[int(hit)])
        return cls(draft, None if first == _NO_DISTRIBUTIONS else int(first))


@dataclass(frozen=True, slots=True)
class Answer:
    """Proposals, the seconds that they took, and those spent ahead since the last answer."""

    proposals: Sequence[Proposal]
    draft_seconds: float = 0.0
    ahead_seconds: float = 0.0

    def frame(self) -> Frame:
        writer = BodyWriter()
        writer.put(_BUSY, self.draft_seconds, self.ahead_seconds)
        _put_all(writer, self.proposals)
        return writer.frame(Kind.DRAFTS)

    @classmethod
    def read(cls, body: bytes) -> Answer:
        reader = BodyReader(body)
        seconds = reader.take(_BUSY)
        answer = cls(_take_all(reader, Proposal.take), *seconds)
        reader.end()
        return answer


def asking(kind: Kind, rows: Sequence[Asked | AskedAhead]) -> Frame:
    writer = BodyWriter()
    _put_all(writer, rows)
    return writer.frame(kind)


def read_asking(body: bytes, take: Callable[[BodyReader], T]) -> list[T]:
    reader = BodyReader(body)
    rows = _take_all(reader, take)
    reader.end()
    return rows


def about(kind: Kind, seq_id: int, tokens: Sequence[int] = (), salt: str = "") -> Frame:
    writer = BodyWriter()
    writer.put(_SEQ, seq_id)
    writer.ints(tokens)
    writer.text(salt)
    return writer.frame(kind)


def read_about(body: bytes) -> tuple[int, list[int], str]:
    reader = BodyReader(body)
    (seq_id,) = reader.take(_SEQ)
    tokens, salt = reader.ints(), reader.text()
    reader.end()
    return seq_id, tokens, salt


def failure(error: Exception) -> Frame:
    """Return a frame with `error`, or with its cause if it names one sequence."""
    cause = error.__cause__ if isinstance(error, SequenceError) else error
    writer = BodyWriter()
    writer.put(_FULL, isinstance(cause, CapacityError))
    writer.text(str(cause))
    writer.text(getattr(cause, "hint", None) or "")
    return writer.frame(Kind.FAILED)


def read_failure(body: bytes) -> OutriderError:
    """Return the error, to be raised: CapacityError if memory was full, else DrafterError."""
    reader = BodyReader(body)
    (full,) = reader.take(_FULL)
    text, hint = reader.text(), reader.text()
    reader.end()
    kind = CapacityError if full else DrafterError
    return kind(text, hint=hint or None)


def key_of(rng: Rng) -> KeyedRng:
    """Return a key. Raises DrafterError for numbers without one: no other process makes them."""
    if not isinstance(rng, KeyedRng):
        raise DrafterError("a drafter in another process needs random numbers that have a key.")
    return rng


def _put_all(writer: BodyWriter, items: Sequence[Asked | AskedAhead | Proposal]) -> None:
    writer.put(_COUNT, len(items))
    for item in items:
        item.put(writer)


def _take_all(reader: BodyReader, take: Callable[[BodyReader], T]) -> list[T]:
    # One after another: a false count stops at the end of the body.
    return [take(reader) for _ in range(reader.count())]


_NO_DRAFT, _NO_VERDICT = Draft.empty(), Verdict((), 0)


def _draft(numbers: Sequence[int], hit: bool | None = None) -> Draft:
    """Return a draft of its tokens, and as many parents. Raises DrafterError if the nodes are no
    tree, parents before children."""
    size = len(numbers) // 2
    tokens, parents = tuple(numbers[:size]), tuple(numbers[size:])
    if not all(ROOT <= parent < node for node, parent in enumerate(parents)):
        raise DrafterError("a drafter's process sent nodes that are no tree.")
    return Draft(tokens, parents, hit=hit)


# More than any vocabulary has: keeps all tokens, as larger numbers do.
_MOST = 2**31 - 1
_FILTERS = Struct("<qdiddB?")
_RULES: tuple[str | None, ...] = (None, *EXACT_SAMPLERS)
_SHAPE = Struct("<IIdddI")
_BIAS = Struct("<id")


@dataclass(frozen=True, slots=True)
class SamplingTerms:
    """Terms of sampling: only the fields of `params` that shape a distribution, and the rule that
    drafts are drawn for, are sent; the others arrive as their defaults."""

    params: SamplingParams
    shaper: LogitsProcessor | None

    def same(self, other: SamplingTerms | None) -> bool:
        """Return whether the objects are identical: a shaper counts tokens and has no equals."""
        return other is not None and self.params is other.params and self.shaper is other.shaper

    def frame(self, seq_id: int) -> Frame:
        params = self.params
        writer = BodyWriter()
        filters = (params.temperature, min(params.top_k, _MOST), params.top_p, params.min_p)
        rule = _RULES.index(params.sampler)
        writer.put(_FILTERS, seq_id, *filters, rule, self.shaper is not None)
        if self.shaper is not None:
            _put_shaper(writer, self.shaper)
        return writer.frame(Kind.TERMS)


def read_terms(body: bytes) -> tuple[int, SamplingTerms]:
    """Return the sequence, and its terms."""
    reader = BodyReader(body)
    seq_id, temperature, top_k, top_p, min_p, rule, shaped = reader.take(_FILTERS)
    if rule >= len(_RULES):
        raise DrafterError("a drafter's process got a rule that does not exist.")
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, sampler=_RULES[int(rule)]
    )
    terms = SamplingTerms(params, _take_shaper(reader) if shaped else None)
    reader.end()
    return seq_id, terms


def _put_shaper(writer: BodyWriter, shaper: LogitsProcessor) -> None:
    params, bias = shaper.params, shaper.params.logit_bias or {}
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    writer.put(_SHAPE, shaper.prompt_length, params.min_tokens, *penalties, len(bias))
    for token, value in bias.items():
        writer.put(_BIAS, token, value)
    writer.ints(sorted(shaper.stop_ids))
    writer.put(_COUNT, len(shaper.bad_words))
    for word in shaper.bad_words:
        writer.ints(word)


def _take_shaper(reader: BodyReader) -> LogitsProcessor:
    prompt_length, min_tokens, *penalties, num_biases = reader.take(_SHAPE)
    repetition, presence, frequency = penalties
    bias: dict[int, float] = dict(reader.take(_BIAS) for _ in range(num_biases))
    params = SamplingParams(
        max_tokens=max(min_tokens, 1),
        min_tokens=min_tokens,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=bias or None,
    )
    stop_ids = frozenset(reader.ints())
    bad_words = tuple(tuple(reader.ints()) for _ in range(reader.count()))
    return LogitsProcessor(params, prompt_length, stop_ids=stop_ids, bad_words=bad_words)
