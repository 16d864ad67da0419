"""Drafters that look up, in fixed cases; what every drafter must keep to is outrider/testing.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from checks.controllers import trace
from outrider.control.heuristics import FixedController, Watchdog
from outrider.core.draft import Budget, Draft, Outcome, Verdict
from outrider.core.protocols import DraftNeeds, DraftRow
from outrider.drafters.common.suffix_automaton import ROOT, Cursor, SuffixAutomaton, TextWriter
from outrider.drafters.ngram import CopyAcceptance, NgramDrafter
from outrider.drafters.portfolio import ReplayScored
from outrider.drafters.suffix import SharedTrust, SuffixDrafter, Trust, bucket
from outrider.plugins.controllers import BandController
from outrider.testing import GREEDY, fresh_draft, row
from outrider_lab.drafters.recycling import RecyclingDrafter


def check_lookup() -> None:
    """Worked examples: the longest tail wins, then the most recent place; copies overlap."""

    def continuation(text: list[int], depth: int, *, max_n: int = 3, min_n: int = 2) -> list[int]:
        return list(
            fresh_draft(partial(NgramDrafter, max_n=max_n, min_n=min_n), text, depth, GREEDY).tokens
        )

    assert continuation([10, 11, 12, 10, 11], 3) == [12, 10, 11]
    assert continuation([7, 8, 9, 1, 8, 9, 2, 7, 8, 9], 1) == [1]
    assert continuation([5, 6, 7, 5, 6, 9, 5, 6], 3) == [9, 5, 6]
    assert continuation([1, 2, 3, 4], 3) == []
    assert continuation([1, 2, 1], 3) == []
    assert continuation([1, 2, 1], 3, min_n=1) == [2, 1, 2]
    assert continuation([4, 4], 4, min_n=1) == [4] * 4
    assert continuation([4], 4, min_n=1) == []
    assert continuation([1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]
    assert continuation([1, 2, 9, 3, 2], 2, max_n=2, min_n=1) == [9, 3]


TEXT = (0, 1, 1, 0, 1, 0, 0, 1, 1, 1, 0, 1, 0, 1, 1, 0, 0, 0, 1)


def check_automaton() -> None:
    """Every run of two texts that grow in turns is found, with what followed it, and no other."""
    automaton = SuffixAutomaton()
    texts = (TEXT, tuple(reversed(TEXT)))
    writers = [TextWriter(automaton), TextWriter(automaton)]
    for tokens in zip(*texts, strict=True):
        for writer, token in zip(writers, tokens, strict=True):
            writer.follow(token)
    known = {text[a:b] for text in texts for a in range(len(text)) for b in range(a + 1, 20)}
    for run in sorted(known):
        state = walked(automaton, run)
        assert state is not None
        followed = {edge.token for edge in automaton.edges(state)}
        assert followed == {token for token in (0, 1) if (*run, token) in known}
        assert automaton.length(state) >= len(run) > automaton.length(automaton.link(state))
    for text, writer in zip(texts, writers, strict=True):
        followed_runs = {run[:-1] for run in known}
        longest = max(size for size in range(20) if text[len(text) - size :] in followed_runs)
        assert Cursor.after(writer).context()[1] == longest


def walked(automaton: SuffixAutomaton, run: Sequence[int]) -> int | None:
    state: int | None = ROOT
    for token in run:
        state = None if state is None else automaton.step(state, token)
    return state


def check_counts() -> None:
    """What followed more often is proposed, and a miss is learnt from."""
    automaton = SuffixAutomaton()
    writer = TextWriter(automaton)
    for token in (1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 4):
        writer.follow(token)
    state = walked(automaton, (1, 2))
    assert state is not None
    assert {edge.token: edge.times for edge in automaton.edges(state)} == {3: 2, 4: 1}
    trust = Trust(SharedTrust())
    place = bucket(2, 1, 1)
    before = trust.rate(place)
    trust.learn(place, right=False)
    assert trust.rate(place) < before


def check_suffix() -> None:
    """Lookups go on as texts went on, in the request itself and in others."""
    drafter = SuffixDrafter()
    line = tuple(range(10, 24))
    drafter.open(0, line)
    drafter.propose([row(0, line, depth=3)])
    drafter.open(1, (5, *line[:8]))
    assert drafter.propose([row(1, (5, *line[:8]), depth=2)])[0].tokens == line[8:10]
    drafter.close(1)
    branching = (1, 2, 3, 9, 1, 2, 4, 7, 1, 2)
    drafter.open(2, branching)
    asked = replace(row(2, branching, depth=2), budget=Budget(2, num_nodes=6))
    offer = drafter.offers([asked])[0]
    tops = offer.draft.children(-1)
    assert {offer.draft.tokens[node] for node in tops} == {3, 4}
    assert sum(offer.kept[node] for node in tops) <= 1
    assert list(offer.kept) == sorted(offer.kept, reverse=True)


def check_recycling() -> None:
    """Each token has what was ranked after it."""
    drafter = RecyclingDrafter(vocab_size=9)
    drafter.open(0, [3])
    ranks = [tuple((best + rank) % 9 for rank in range(8)) for best in (1, 2, 7)]
    last = Outcome(0, Draft((5, 6), (-1, -1)), Verdict((1,), 8), likely=tuple(ranks))
    drafter.propose([row(0, [3, 6, 8], depth=2, last=last)])
    assert [drafter.entries(token) for token in (3, 5, 6)] == ranks


def check_gate() -> None:
    """Look-ups that were wrong are no longer drafted, and right ones go on."""
    wrong, right = CopyAcceptance(), CopyAcceptance()
    for _ in range(20):
        wrong.learn(2, right=False)
        right.learn(2, right=True)
    assert wrong.kept(2, 4) == ()
    assert len(right.kept(2, 4)) == 4


def check_trees() -> None:
    """A tree whose whole depth was kept is no reason to draft less."""
    controller = BandController(k=8, min_k=1, target=0.7, num_nodes=24)
    for _ in range(8):
        depth = controller.budgets([0])[0].depth
        controller.observe(replace(trace(0, 3 * depth, depth), draft_depth=depth))
    assert controller.budgets([0])[0] == Budget(8, num_nodes=24)


def check_shadow() -> None:
    """What the text did not reach is no refusal, and what it refused is one."""

    class Counting:
        name = "counting"
        needs = DraftNeeds()

        def open(self, seq_id: int, prompt: Sequence[int]) -> None: ...

        def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
            return [Draft.chain([asked.tokens[-1] + 1, 0]) for asked in rows]

        def close(self, seq_id: int) -> None: ...

    shadowed = ReplayScored(Counting())
    text = list(range(1, 500))
    for end in range(1, 40):
        shadowed.offers([row(0, text[:end], depth=2)])
    assert len(shadowed.offers([row(0, text[:40], depth=2)])[0].draft) == 2
    for end in range(42, 400, 2):
        shadowed.offers([row(0, text[:end], depth=2)])
    assert len(shadowed.offers([row(0, text[:400], depth=2)])[0].draft) == 1


def check_watchdog() -> None:
    """Dead drafts are left out within 48 rounds, live ones never; and looked at again."""
    for accepted, wanted in ((0, True), (1, False)):
        dog = Watchdog(FixedController(Budget(4)))
        depths = list[int]()
        for _ in range(200):
            depths.append(dog.budgets([0])[0].depth)
            dog.observe(trace(0, depths[-1], min(accepted, depths[-1])))
        assert (0 in depths[:48]) == wanted
        assert depths.count(0) == 0 or 4 in depths[depths.index(0) :]
        assert depths[:20] == [4] * 20
