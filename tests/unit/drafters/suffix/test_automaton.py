"""The suffix automaton against the runs of its texts, listed one by one."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.common.suffix_automaton import ROOT, Cursor, SuffixAutomaton, TextWriter

tokens = st.integers(0, 2)
# Which text grows, and by what: texts grow in turns.
growth = st.lists(st.tuples(st.integers(0, 2), tokens), max_size=24)


def grown(steps: Sequence[tuple[int, int]]) -> tuple[SuffixAutomaton, dict[int, list[int]]]:
    automaton = SuffixAutomaton()
    texts: dict[int, list[int]] = {0: [], 1: [], 2: []}
    lasts = dict.fromkeys(texts, ROOT)
    for which, token in steps:
        texts[which].append(token)
        lasts[which] = automaton.extend(lasts[which], token)
    return automaton, texts


def state_of(automaton: SuffixAutomaton, run: Sequence[int]) -> int | None:
    state: int | None = ROOT
    for token in run:
        if state is None:
            return None
        state = automaton.step(state, token)
    return state


def runs(texts: Sequence[Sequence[int]]) -> set[tuple[int, ...]]:
    return {
        tuple(text[start:end])
        for text in texts
        for start in range(len(text))
        for end in range(start + 1, len(text) + 1)
    }


def ends(texts: Sequence[Sequence[int]], run: Sequence[int]) -> frozenset[tuple[int, int]]:
    """The places, by text, where the run ends."""
    size = len(run)
    return frozenset(
        (which, end)
        for which, text in enumerate(texts)
        for end in range(size, len(text) + 1)
        if list(text[end - size : end]) == list(run)
    )


@given(steps=growth)
def test_its_runs_are_those_of_the_texts_and_what_followed_them(
    steps: list[tuple[int, int]],
) -> None:
    automaton, texts = grown(steps)
    known = runs(list(texts.values()))
    for run in {(), *known}:
        state = state_of(automaton, run)
        assert state is not None
        found = {edge.token for edge in automaton.edges(state)}
        assert found == {token for token in range(3) if (*run, token) in known}
        for token in set(range(3)) - found:
            assert automaton.step(state, token) is None


@given(steps=growth)
def test_a_state_is_the_runs_that_end_at_the_same_places(steps: list[tuple[int, int]]) -> None:
    """And its link that of the longest end of them that also ends elsewhere."""
    automaton, texts = grown(steps)
    listed = list(texts.values())
    by_ends: dict[frozenset[tuple[int, int]], list[tuple[int, ...]]] = {}
    for run in runs(listed):
        by_ends.setdefault(ends(listed, run), []).append(run)
    states: set[int] = set()
    for same in by_ends.values():
        found = {state_of(automaton, run) for run in same}
        assert len(found) == 1
        state = found.pop()
        assert state is not None
        states.add(state)
        longest, shortest = max(same, key=len), min(same, key=len)
        assert automaton.length(state) == len(longest)
        assert automaton.link(state) == state_of(automaton, shortest[1:])
    assert automaton.num_states == len(states) + 1


@given(steps=growth)
def test_it_is_small_and_its_counts_add_up(steps: list[tuple[int, int]]) -> None:
    automaton, _ = grown(steps)
    assert automaton.num_states <= 2 * len(steps) + 1
    assert automaton.num_edges <= 3 * len(steps) + 1
    for state in range(automaton.num_states):
        counts = [edge.times for edge in automaton.edges(state)]
        assert automaton.total(state) == sum(counts)
        best = automaton.foremost(state)
        own = best if best is not None and best[0] == state else None
        assert (own is None) == (state == ROOT or not counts)
        assert own is None or own[3:] == (max(counts), sum(counts))


@given(steps=growth)
def test_a_writer_knows_the_longest_end_that_was_followed(steps: list[tuple[int, int]]) -> None:
    """While other texts grow and split its states, and whatever counts are kept meanwhile."""
    automaton = SuffixAutomaton()
    texts: dict[int, list[int]] = {0: [], 1: [], 2: []}
    writers = {which: TextWriter(automaton) for which in texts}
    for which, token in steps:
        writers[which].follow(token)
        texts[which].append(token)
        followed = {run[:-1] for run in runs(list(texts.values()))}
        for other, text in texts.items():
            state, length = Cursor.after(writers[other]).context()
            wanted = max(size for size in range(len(text) + 1) if _known(text, size, followed))
            assert length == wanted
            assert state == state_of(automaton, text[len(text) - wanted :])


@given(steps=growth, text=st.lists(tokens, max_size=20))
def test_a_cursor_stands_at_the_longest_end_that_occurs(
    steps: list[tuple[int, int]], text: list[int]
) -> None:
    automaton, texts = grown(steps)
    known = runs(list(texts.values()))
    cursor = Cursor(automaton)
    for end in range(1, len(text) + 1):
        cursor.follow(text[end - 1])
        here = text[:end]
        longest = max(size for size in range(end + 1) if _known(here, size, known))
        assert cursor.length == longest
        assert cursor.state == state_of(automaton, here[end - longest :])


def _known(text: Sequence[int], size: int, known: set[tuple[int, ...]]) -> bool:
    return size == 0 or tuple(text[len(text) - size :]) in known


def test_counts_are_those_after_the_longest_run_known() -> None:
    """1 2 is followed by 3, 3 and 4: once it was new, once foreseen, once new again."""
    automaton = SuffixAutomaton()
    writer = TextWriter(automaton)
    for token in (1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 4):
        writer.follow(token)
    state = state_of(automaton, (1, 2))
    assert state is not None
    assert {edge.token: edge.times for edge in automaton.edges(state)} == {3: 2, 4: 1}
    best = automaton.foremost(state)
    assert best is not None
    assert best[:2] == (state, 3)


def test_a_long_text_costs_what_its_length_does() -> None:
    """Of all texts those of one token repeated, and of two in turns, grow most."""
    for text in ([7] * 2000, [1, 2] * 1000, [1] + [2] * 1998 + [3]):
        automaton = SuffixAutomaton()
        writer = TextWriter(automaton)
        for token in text:
            writer.follow(token)
        assert automaton.num_states <= 2 * len(text)
        assert automaton.num_edges <= 3 * len(text)
