"""What is remembered of texts, in bounded memory: a corpus, and two generations of requests.

All requests write into one automaton, each from a last state of its own. When that holds as many
states as it may, it is kept as it is, to be looked up only, in place of the one kept before, and
the requests go on in a new one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.core.errors import ContractError
from outrider.drafters.suffix.automaton import ROOT, SuffixAutomaton
from outrider.drafters.suffix.cursor import Cursor, Writer
from outrider.drafters.suffix.trust import SharedTrust, Trust, bucket

# An automaton has at most so many states a token.
_STATES_PER_TOKEN = 2


@dataclass(slots=True)
class Memory:
    """At most `num_tokens` tokens of the corpus, and of each generation so many and what one
    request's round adds. `num_generations` counts how often requests began anew."""

    num_tokens: int
    corpus: SuffixAutomaton | None = None
    kept: SuffixAutomaton | None = None
    growing: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    trust: SharedTrust = field(default_factory=SharedTrust)
    num_generations: int = 0

    def learn(self, texts: Sequence[Sequence[int]]) -> None:
        """Read a corpus, as much as there is room for."""
        self.corpus = SuffixAutomaton()
        left = self.num_tokens
        for text in texts:
            last = ROOT
            for token in text[:left]:
                last = self.corpus.extend(last, token)
            left -= min(len(text), left)

    def forget(self) -> None:
        """All but the corpus."""
        self.kept, self.growing, self.trust = None, SuffixAutomaton(), SharedTrust()
        self.num_generations = 0

    def make_room(self) -> None:
        if self.growing.num_states > _STATES_PER_TOKEN * self.num_tokens:
            self.kept, self.growing = self.growing, SuffixAutomaton()
            self.num_generations += 1


class Context(NamedTuple):
    """What a text's end says of its next token, by its longest run that anything followed: `token`
    did most often, and trials of that kind are told apart by `place`."""

    automaton: SuffixAutomaton
    state: int
    length: int
    token: int
    place: int


class Reader:
    """One request's places in `memory`, and the trust in what is found there.

    The first `prompt_length` tokens are remembered and followed, but nothing is learnt from them of
    how repetitive the output is.
    """

    def __init__(self, memory: Memory, prompt_length: int) -> None:
        self._memory = memory
        self._prompt_length = prompt_length
        self._num_read = 0
        self._context: Context | None = None
        self._generation = memory.num_generations
        self._growing = Writer(memory.growing)
        self._others = [Cursor(a) for a in (memory.corpus, memory.kept) if a is not None]
        self.trust = Trust(memory.trust)

    def read(self, tokens: Sequence[int]) -> Context | None:
        """Catch up with the text, which may only have grown; what its end says of the next token,
        by the longest run, of equals that of the requests. None if nothing is known."""
        self._memory.make_room()
        if self._generation != self._memory.num_generations:
            self._move()
        growing, others, context = self._growing, self._others, self._context
        for end, token in enumerate(tokens[self._num_read :], start=self._num_read + 1):
            if context is not None:
                # Every token of output is a trial of what was foreseen, drafted or not.
                self.trust.learn(context.place, right=context.token == token)
            growing.state = growing.automaton.extend(growing.state, token)
            for cursor in others:
                cursor.follow(token)
            context = self._found() if end >= self._prompt_length else None
        self._num_read, self._context = len(tokens), context
        return context

    def _found(self) -> Context | None:
        growing = self._growing
        automaton = growing.automaton
        state, length = automaton.followed(growing.state, automaton.length(growing.state))
        for cursor in self._others:
            other, other_length = cursor.context()
            if other_length > length:
                automaton, state, length = cursor.automaton, other, other_length
        if not length:
            return None
        token, count, total = automaton.foremost(state)
        return Context(automaton, state, length, token, bucket(length, count, total))

    def _move(self) -> None:
        """Go on in the newest generation. The one before is looked up from where the text stands
        there; one that was missed, from the start."""
        memory = self._memory
        in_step = self._generation + 1 == memory.num_generations
        if memory.kept is None:
            raise ContractError("the generation before is gone")
        before = Cursor.after(self._growing) if in_step else Cursor(memory.kept)
        corpus = [c for c in self._others if c.automaton is memory.corpus]
        self._others = [*corpus, before]
        self._growing = Writer(memory.growing)
        self._generation = memory.num_generations
        self._context = self._found()
