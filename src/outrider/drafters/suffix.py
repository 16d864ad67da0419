"""Suffix decoding: drafts the continuation of the text's longest suffix that occurred in any text.

Earlier texts are the prompt, the output so far, other requests and a corpus, in suffix automata. A
node is accepted with probability

    P(child) = P(parent) r                             of the likeliest token, r by `Trust`
    P(child) = P(parent) (1 - r) r n / (N - n1 + 1)    of another, seen n of N times

The likeliest token was seen n1 times of N, and r is its rate (`Trust`). A draft is the nodes with
the highest P >= 0.04, a chain the likeliest tokens while P >= 0.12; nothing is drafted if the first
token has P < 0.12. Oliaro et al. 2024, "SuffixDecoding" (arXiv 2411.04975). Drafts depend on other
requests, so a seed's text is the same in every run only under the rules that tie it to the seed;
every exact rule keeps its distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, Protocol

from outrider.core.draft import Budget
from outrider.core.errors import ContractError, given
from outrider.core.plugins import DrafterKind
from outrider.core.protocols import DraftRow
from outrider.drafters.common.context import BuildContext, Found, ScoredDraft, TextDrafter, Texts
from outrider.drafters.common.suffix_automaton import ROOT, Cursor, SuffixAutomaton, TextWriter
from outrider.estimate.acceptance import FadingRate, RequestRates
from outrider.estimate.cost import LEAST_IN_TREE, LEAST_KEPT

if TYPE_CHECKING:
    from outrider.kernels.native.rounds import NativeLookups, SuffixSettings

_NUM_LENGTHS = 5
_NUM_SHARES = 4
# Prior rates of a run of each length, and their weight in trials.
_FIRST_RATES = (0.2, 0.4, 0.6, 0.75, 0.85)
_FIRST_SHARES = (1.0, 0.4, 0.7, 1.0)
_FIRST_WEIGHT = 4.0
# W and V: the weight of requests being alike, in trials of one bucket and in hits of all.
_LIKENESS = 6.0
_EVENNESS = 3.0
_HIGHEST = 0.98
# The factor by which a new trial reduces old counts.
_FADE = 1 - 1 / 64
_SHARED_FADE = 1 - 1 / 512


def bucket(length: int, count: int, total: int) -> int:
    """Return the bucket of a run of `length` tokens with likeliest next `count` of `total`."""
    bits = length.bit_length()
    size = (bits if bits < _NUM_LENGTHS else _NUM_LENGTHS) - 1
    if total == 1:
        share = 0
    elif 2 * count < total:
        share = 1
    else:
        share = 2 if 5 * count < 4 * total else 3
    return size * _NUM_SHARES + share


def _first_trials() -> list[FadingRate]:
    return [
        FadingRate(_SHARED_FADE, _FIRST_WEIGHT * rate * share, _FIRST_WEIGHT)
        for rate in _FIRST_RATES
        for share in _FIRST_SHARES
    ]


def _no_trials() -> RequestRates:
    return RequestRates(_NUM_LENGTHS * _NUM_SHARES, _FADE, _LIKENESS, _EVENNESS, _HIGHEST)


@dataclass(slots=True)
class SharedTrust:
    """Rates of trials over all requests."""

    rates: list[FadingRate] = field(default_factory=_first_trials)


@dataclass(slots=True)
class Trust:
    """Rates of one request's predictions.

    The likeliest continuation is a prediction, drafted or not, and the next token shows whether it
    was right: every token of text is a trial, and none costs a row. Trials are put into buckets by
    the length of the run (1, 2 to 3, 4 to 7, 8 to 15, more tokens) and by what followed it: one
    token seen once, or a token with less than half, up to four fifths, or more of the counts.

        rate = (W f shared + hits) / (W + trials)        hits and trials of the request, fading
        f    = (V + all hits) / (V + all expected)

    `shared` is the same over all requests, and f is how much better or worse than expected this
    request did in all buckets together: secondary estimation, as in PPMZ (Bloom 1996).
    """

    shared: SharedTrust
    own: RequestRates = field(default_factory=_no_trials)

    def rate(self, bucket_id: int) -> float:
        """Return the probability that a prediction in bucket `bucket_id` is right."""
        shared = self.shared.rates[bucket_id]
        return self.own.rate(bucket_id, shared.hits / shared.trials)

    def learn(self, bucket_id: int, *, right: bool) -> None:
        shared = self.shared.rates[bucket_id]
        self.own.add(bucket_id, right, shared.hits / shared.trials)
        shared.add(right)


# An automaton has at most so many states a token.
_STATES_PER_TOKEN = 2


@dataclass(slots=True)
class Memory:
    """The memory of texts: at most `num_tokens` of the corpus, and per generation so many and what
    one request's round adds. `num_generations` counts generations.

    All requests write into one automaton, each from a last state of its own. A full one is retained
    for look-ups only, instead of the one retained before, and the requests go on in a new one.
    """

    num_tokens: int
    corpus: SuffixAutomaton | None = None
    kept: SuffixAutomaton | None = None
    growing: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    trust: SharedTrust = field(default_factory=SharedTrust)
    num_generations: int = 0
    readers: dict[int, SuffixReader] = field(default_factory=dict[int, "SuffixReader"])

    @property
    def num_states(self) -> int:
        automata = (self.corpus, self.kept, self.growing)
        return sum(a.num_states for a in automata if a is not None)

    def open(self, seq_id: int, prompt_length: int) -> None:
        self.readers[seq_id] = SuffixReader(self, prompt_length)

    def offer(self, seq_id: int, tokens: Sequence[int], budget: Budget) -> Found | None:
        reader = self.readers[seq_id]
        context = reader.read(tokens)
        if context is None or not budget.depth or reader.trust.rate(context.bucket_id) < LEAST_KEPT:
            return None
        if budget.size > budget.depth:
            return _tree(context, reader.trust, budget.depth, budget.size)
        return _chain(context, reader.trust, budget.depth)

    def close(self, seq_id: int) -> None:
        del self.readers[seq_id]

    def learn(self, text: Sequence[int]) -> None:
        """Add a text to the corpus."""
        if self.corpus is None:
            self.corpus = SuffixAutomaton()
        last = ROOT
        for token in text:
            last = self.corpus.extend(last, token)

    def forget(self) -> None:
        """Forget everything but the corpus."""
        if self.readers:
            raise ContractError("requests are open")
        self.kept, self.growing, self.trust = None, SuffixAutomaton(), SharedTrust()
        self.num_generations = 0

    def start_generation(self) -> None:
        if self.growing.num_states > _STATES_PER_TOKEN * self.num_tokens:
            self.kept, self.growing = self.growing, SuffixAutomaton()
            self.num_generations += 1


class SuffixMatch(NamedTuple):
    """The prediction from a text's end, by its longest run that any token followed: `token`
    followed it most often, and `bucket_id` is the bucket of such trials."""

    automaton: SuffixAutomaton
    state: int
    length: int
    token: int
    bucket_id: int


class SuffixReader:
    """One request's states in `memory`, and the trust in what is found there.

    The first `prompt_length` tokens are remembered, but teach nothing about the output.
    """

    def __init__(self, memory: Memory, prompt_length: int) -> None:
        self._memory = memory
        self._prompt_length = prompt_length
        self._num_read = 0
        self._context: SuffixMatch | None = None
        self._generation = memory.num_generations
        self._growing = TextWriter(memory.growing)
        self._others = [Cursor(a) for a in (memory.corpus, memory.kept) if a is not None]
        self.trust = Trust(memory.trust)

    def read(self, tokens: Sequence[int]) -> SuffixMatch | None:
        """Catch up with the grown text. Return its end's prediction of the next token, by the
        longest run, of equals that of the requests. None if nothing is known."""
        self._memory.start_generation()
        if self._generation != self._memory.num_generations:
            self._move()
        growing, others, context = self._growing, self._others, self._context
        extend, learn = growing.automaton.extend, self.trust.learn
        for end, token in enumerate(tokens[self._num_read :], start=self._num_read + 1):
            if context is not None:
                # Every token of output is a trial of the prediction, drafted or not.
                learn(context.bucket_id, right=context.token == token)
            growing.state = extend(growing.state, token)
            for cursor in others:
                cursor.follow(token)
            context = self._found() if end >= self._prompt_length else None
        self._num_read, self._context = len(tokens), context
        return context

    def _found(self) -> SuffixMatch | None:
        growing = self._growing
        automaton = growing.automaton
        found = automaton.foremost(growing.state)
        length = 0 if found is None else automaton.length(found[0])
        for cursor in self._others:
            other, other_length = cursor.context()
            if other_length > length:
                automaton, length = cursor.automaton, other_length
                found = automaton.foremost(other)
        if found is None:
            return None
        state, token, _, count, total = found
        return SuffixMatch(automaton, state, length, token, bucket(length, count, total))

    def _move(self) -> None:
        """Go on in the newest generation. The previous one is looked up from the text's state
        there; if a generation was missed, from the start."""
        memory = self._memory
        in_step = self._generation + 1 == memory.num_generations
        kept = given(memory.kept, "generation before")
        before = Cursor.after(self._growing) if in_step else Cursor(kept)
        corpus = [c for c in self._others if c.automaton is memory.corpus]
        self._others = [*corpus, before]
        self._growing = TextWriter(memory.growing)
        self._generation = memory.num_generations
        self._context = self._found()


# Tokens after one run that a tree considers, newest first.
_MOST_CHILDREN = 32


def _settings(num_tokens: int) -> SuffixSettings:
    """Return the settings of the native code."""
    from outrider.kernels.native.rounds import SuffixSettings

    return SuffixSettings(
        tuple(rate.hits for rate in _first_trials()),
        _FIRST_WEIGHT,
        _FADE,
        _SHARED_FADE,
        _LIKENESS,
        _EVENNESS,
        _HIGHEST,
        LEAST_KEPT,
        LEAST_IN_TREE,
        _STATES_PER_TOKEN * num_tokens,
        _MOST_CHILDREN,
    )


class SuffixTexts(Texts, Protocol):
    """Texts that are remembered after their requests end."""

    @property
    def num_states(self) -> int:
        """States of all automata, which determine the memory used."""
        ...

    def learn(self, text: Sequence[int]) -> None: ...
    def forget(self) -> None: ...


class SuffixDrafter(TextDrafter):
    """A drafter of chains and trees. `num_tokens` bounds what is remembered; `corpus` has texts to
    begin with. It looks up natively, if it can."""

    def __init__(
        self,
        *,
        num_tokens: int = 65536,
        corpus: Sequence[Sequence[int]] = (),
        native: NativeLookups | None = None,
    ) -> None:
        if num_tokens <= 0:
            raise ContractError("one token or more is remembered")
        settings = _settings(num_tokens)
        self._new_memory: Callable[[], SuffixTexts] = (
            partial(Memory, num_tokens) if native is None else partial(native.suffix, settings)
        )
        self._memory = self._new_memory()
        self._apart: dict[int, TextDrafter] = {}
        super().__init__("suffix", self._memory)
        left = num_tokens
        for text in corpus:
            self._memory.learn(text[:left])
            left -= min(len(text), left)

    @property
    def num_states(self) -> int:
        """States of all automata that outlive their requests."""
        return self._memory.num_states

    def open_apart(self, seq_id: int, prompt: Sequence[int]) -> None:
        """Open a text that drafts from itself alone, without other requests or the corpus."""
        self._apart[seq_id] = TextDrafter(self.name, self._new_memory())
        self._apart[seq_id].open(seq_id, prompt)

    def offers(self, rows: Sequence[DraftRow]) -> list[ScoredDraft]:
        if not self._apart:
            return super().offers(rows)
        apart, together = self._apart, super().offers
        return [(apart[r.seq_id].offers if r.seq_id in apart else together)([r])[0] for r in rows]

    def close(self, seq_id: int) -> None:
        if self._apart.pop(seq_id, None) is None:
            super().close(seq_id)

    def forget(self) -> None:
        """Forget what requests wrote; the corpus stays."""
        self._memory.forget()


def _chain(context: SuffixMatch, trust: Trust, depth: int) -> Found | None:
    tokens: list[int] = []
    kept: list[float] = []
    automaton, state, probability = context.automaton, context.state, 1.0
    known, rate = None, 0.0
    for length in range(context.length, context.length + depth):
        found = automaton.foremost(state)
        if found is None:
            break
        _, token, state, count, total = found
        bucket_id = bucket(length, count, total)
        if bucket_id != known:
            known, rate = bucket_id, trust.rate(bucket_id)
        probability *= rate
        if probability < LEAST_KEPT:
            break
        tokens.append(token)
        kept.append(probability)
    return (tuple(tokens), tuple(kept), None) if tokens else None


def _tree(context: SuffixMatch, trust: Trust, depth: int, size: int) -> Found | None:
    """Return the likeliest `size` nodes; a parent, being likelier, precedes its children."""
    tokens: list[int] = []
    parents: list[int] = []
    kept: list[float] = []
    # Candidates for the next node: P, negative, and the order of finding, which breaks ties; then
    # token, parent, depth, and state and length of its run.
    ahead: list[tuple[float, int, int, int, int, int, int]] = []
    num_found = 0
    probability, level, state, length = 1.0, 0, context.state, context.length
    while True:
        if level < depth:
            parent = len(tokens) - 1
            for token, target, share in _children(context.automaton, state, length, trust):
                child = probability * share
                if child >= LEAST_IN_TREE:
                    num_found += 1
                    entry = (-child, num_found, token, parent, level + 1, target, length + 1)
                    heappush(ahead, entry)
        if not ahead or len(tokens) == size:
            break
        lost, _, token, parent, level, state, length = heappop(ahead)
        probability = -lost
        tokens.append(token)
        parents.append(parent)
        kept.append(probability)
    if not kept or kept[0] < LEAST_KEPT:
        return None
    return tuple(tokens), tuple(kept), tuple(parents)


def _children(
    automaton: SuffixAutomaton, state: int, length: int, trust: Trust
) -> list[tuple[int, int, float]]:
    """Return (token, state, probability after its parent) of followers, the likeliest first."""
    found = automaton.foremost(state)
    if found is None:
        return []
    state, best, target, count, total = found
    rate = trust.rate(bucket(length, count, total))
    children = [(best, target, rate)]
    if count < total:
        rest = (1 - rate) * rate / (total - count + 1)
        others = islice(automaton.edges(state), _MOST_CHILDREN)
        children += [(e.token, e.target, rest * e.times) for e in others if e.token != best]
    return children


def build(context: BuildContext) -> SuffixDrafter:
    models = context.models
    return SuffixDrafter(
        num_tokens=context.config.suffix_tokens, corpus=models.corpus, native=models.lookups
    )


KIND = DrafterKind(
    name="suffix",
    build=build,
    branches=True,
    reads=("corpus",),
    scores=True,
    drafted=0.4,
    advice="copies what followed the longest part of the text that came before: for edits, logs, "
    "code; costs next to nothing where nothing repeats",
)
