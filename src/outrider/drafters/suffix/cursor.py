"""Where the end of a text stands in an automaton: at the longest end of it that occurs there."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.drafters.suffix.automaton import ROOT, Edge, SuffixAutomaton


@dataclass(slots=True)
class Writer:
    """Of a text that `automaton` grows by: `state` is that of the whole text."""

    automaton: SuffixAutomaton
    state: int = ROOT

    def follow(self, token: int) -> None:
        """The text goes on with `token`."""
        self.state = self.automaton.extend(self.state, token)

    def context(self) -> tuple[int, int]:
        """State and length of the longest end of the text that something followed; (ROOT, 0) if
        there is none."""
        return self.automaton.followed(self.state, self.automaton.length(self.state))


@dataclass(slots=True)
class Cursor:
    """Of a text beside an automaton that does not grow: its last `length` tokens are a run of
    `state`."""

    automaton: SuffixAutomaton
    state: int = ROOT
    length: int = 0

    @classmethod
    def after(cls, writer: Writer) -> Cursor:
        """Where a text stands that will be written no more."""
        return cls(writer.automaton, writer.state, writer.automaton.length(writer.state))

    def follow(self, token: int) -> None:
        """The text goes on with `token`; the longest run that it followed before counts it."""
        automaton, state = self.automaton, self.state
        target = automaton.step(state, token)
        while target is None and state != ROOT:
            state = automaton.link(state)
            self.length = automaton.length(state)
            target = automaton.step(state, token)
        if target is None:
            self.state, self.length = ROOT, 0
            return
        if state != ROOT:
            automaton.note(state, token)
        self.state = target
        self.length += 1

    def context(self) -> tuple[int, int]:
        """As that of a writer."""
        return self.automaton.followed(self.state, self.length)


def next_edge(automaton: SuffixAutomaton, state: int) -> tuple[int, Edge] | None:
    """What follows `state` most often, and the state that says so: where a text ended there, one of
    its shorter runs. None if nothing followed any."""
    while state != ROOT:
        edge = automaton.likeliest(state)
        if edge is not None:
            return state, edge
        state = automaton.link(state)
    return None
