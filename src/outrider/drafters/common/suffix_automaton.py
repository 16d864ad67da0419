"""Suffix automaton over token texts, with counts of the tokens after runs, and a cursor.

States are sets of token runs that end at the same positions; `extend` takes a token in amortised
constant time (Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text"), and
several texts may grow in turns, each from its own last state. n tokens make at most 2n states and
3n edges, in flat lists (arrays take twice as long).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

ROOT = 0
NONE = -1
# An edge is found by its state + token * _STEP: keys of one token, and those of one state, differ
# in their low bits, which dictionaries hash by.
_STEP = (1 << 32) + 0x9E3779B1


class Edge(NamedTuple):
    """An edge: `token` was taken so many `times`, and leads to `target`.

    An edge counts how often it was taken from the longest run that was known then, and from no
    shorter one, plus once when it was new: one addition a token, while counting all occurrences
    would take a walk. This is the update exclusion of PPM (Moffat 1990), and predicts no worse.
    """

    token: int
    target: int
    times: int


class SuffixAutomaton:
    """A suffix automaton. States are numbers; ROOT is the empty run. Growing splits states, but the
    state of a whole text remains that of the whole text."""

    def __init__(self) -> None:
        self._length: list[int] = []
        self._link: list[int] = []
        self._total: list[int] = []
        self._newest: list[int] = []
        self._likeliest: list[int] = []
        self._edges: dict[int, int] = {}
        self._token: list[int] = []
        self._target: list[int] = []
        self._count: list[int] = []
        self._older: list[int] = []
        self._new_state(0, NONE)

    @property
    def num_states(self) -> int:
        return len(self._length)

    @property
    def num_edges(self) -> int:
        return len(self._token)

    def extend(self, last: int, token: int) -> int:
        """Return the state of the text of `last` and then `token`; `last` must be that of a whole
        text. The longest run that `token` followed before counts it."""
        edges, link = self._edges, self._link
        edge = edges.get(last + token * _STEP)
        if edge is not None:
            return self._taken(last, edge)
        new, state = self._new_state(self._length[last] + 1, ROOT), last
        while edge is None:
            self._add_edge(state, token, new, 1)
            state = link[state]
            if state == NONE:
                return new
            edge = edges.get(state + token * _STEP)
        link[new] = self._taken(state, edge)
        return new

    def step(self, state: int, token: int) -> int | None:
        """Return the state to which `token` leads, None if it never followed."""
        edge = self._edges.get(state + token * _STEP)
        return None if edge is None else self._target[edge]

    def note(self, state: int, token: int) -> None:
        """Count `token`, which has an edge there, once more."""
        self._note(state, self._edges[state + token * _STEP])

    def followed(self, state: int, length: int) -> tuple[int, int]:
        """Return state and length of the longest end, of a run of `length` tokens of `state`, that
        any token followed; (ROOT, 0) if there is none."""
        while state != ROOT and not self._total[state]:
            state = self._link[state]
            length = self._length[state]
        return state, length

    def link(self, state: int) -> int:
        """Return the state of its runs' longest ends in another state; NONE for the root."""
        return self._link[state]

    def length(self, state: int) -> int:
        """Return the tokens of its longest run."""
        return self._length[state]

    def total(self, state: int) -> int:
        """Return the sum of the counts of its edges."""
        return self._total[state]

    def foremost(self, state: int) -> tuple[int, int, int, int, int] | None:
        """Return what followed the runs of `state` most often, the newest of equals: the state that
        has the edge, its token, target and count, and the sum of that state's counts. If a text
        ended at `state`, it is a state of shorter runs. None if nothing followed any."""
        likeliest = self._likeliest
        while state != ROOT:
            edge = likeliest[state]
            if edge != NONE:
                target = self._target[edge]
                return state, self._token[edge], target, self._count[edge], self._total[state]
            state = self._link[state]
        return None

    def edges(self, state: int) -> Iterator[Edge]:
        """Yield the edges, newest first."""
        edge = self._newest[state]
        while edge != NONE:
            yield self._edge(edge)
            edge = self._older[edge]

    def _note(self, state: int, edge: int) -> None:
        if state == ROOT:
            return
        counts, best = self._count, self._likeliest[state]
        count = counts[edge] = counts[edge] + 1
        self._total[state] += 1
        if best != edge and count >= counts[best]:
            self._likeliest[state] = edge

    def _edge(self, edge: int) -> Edge:
        return Edge(self._token[edge], self._target[edge], self._count[edge])

    def _taken(self, state: int, edge: int) -> int:
        """Count `edge`; return the state whose longest run is that of `state` and its token. If the
        edge leads to longer runs as well, the shorter ones are split off."""
        self._note(state, edge)
        link, targets = self._link, self._target
        target, length = targets[edge], self._length[state] + 1
        if self._length[target] == length:
            return target
        token = self._token[edge]
        split = self._new_state(length, link[target])
        self._copy_edges(target, split)
        link[target] = split
        found: int | None = edge
        while found is not None and targets[found] == target:
            targets[found] = split
            state = link[state]
            found = None if state == NONE else self._edges.get(state + token * _STEP)
        return split

    def _new_state(self, length: int, link: int) -> int:
        self._length.append(length)
        self._link.append(link)
        self._total.append(0)
        self._newest.append(NONE)
        self._likeliest.append(NONE)
        return len(self._length) - 1

    def _add_edge(self, state: int, token: int, target: int, count: int) -> None:
        counts, likeliest, newest = self._count, self._likeliest, self._newest
        edge = len(counts)
        self._edges[state + token * _STEP] = edge
        self._token.append(token)
        self._target.append(target)
        counts.append(count)
        self._older.append(newest[state])
        newest[state] = edge
        self._total[state] += count
        best = likeliest[state]
        if best == NONE or count >= counts[best]:
            likeliest[state] = edge

    def _copy_edges(self, source: int, to: int) -> None:
        tokens, targets, counts, older = self._token, self._target, self._count, self._older
        edge, copied = self._newest[source], list[int]()
        while edge != NONE:
            copied.append(edge)
            edge = older[edge]
        for edge in reversed(copied):
            self._add_edge(to, tokens[edge], targets[edge], counts[edge])


@dataclass(slots=True)
class TextWriter:
    """A writer of a text into `automaton`: `state` is that of the whole text."""

    automaton: SuffixAutomaton
    state: int = ROOT

    def follow(self, token: int) -> None:
        """Append `token` to the text."""
        self.state = self.automaton.extend(self.state, token)


@dataclass(slots=True)
class Cursor:
    """A reader of a text against an automaton that does not grow: its last `length` tokens are a
    run of `state`."""

    automaton: SuffixAutomaton
    state: int = ROOT
    length: int = 0

    @classmethod
    def after(cls, writer: TextWriter) -> Cursor:
        """Return the cursor at the end of a text that is not written any more."""
        return cls(writer.automaton, writer.state, writer.automaton.length(writer.state))

    def follow(self, token: int) -> None:
        """Follow the text's next `token`; the longest run that it followed before counts it."""
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
        """Return state and length of the longest end of the text that any token followed; (ROOT, 0)
        if there is none."""
        return self.automaton.followed(self.state, self.length)
