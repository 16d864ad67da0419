"""Events that nobody reads: they become one, say the same, and cost what their tokens are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import pytest

from outrider.api import result as mailbox
from outrider.api.result import MOST_EVENTS, Mailbox, TextEvent


def event(number: int) -> TextEvent:
    return TextEvent((number,), ("plain",), (f"<{number}>",))


def taken(box: Mailbox) -> list[TextEvent]:
    return list(iter(lambda: cast("TextEvent", box.take()), None))


@pytest.mark.parametrize("num", [0, 1, MOST_EVENTS, MOST_EVENTS + 1, 5 * MOST_EVENTS + 3])
def test_nothing_is_lost_and_a_slow_reader_finds_one_event(num: int) -> None:
    box, events = Mailbox(), [event(number) for number in range(num)]
    for one in events:
        assert box.put((one,)) is None
    assert bool(box) == (num > 0)
    found = taken(box)
    assert not box
    assert TextEvent.merged(found) == TextEvent.merged(events)
    assert len(found) == (num if num <= MOST_EVENTS else 1)


def test_each_event_is_copied_twice_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = 0

    class Counting(TextEvent):
        @classmethod
        def merged(cls, events: Iterable[TextEvent]) -> TextEvent:
            nonlocal copied
            found = list(events)
            copied += sum(len(one.token_ids) for one in found)
            return TextEvent.merged(found)

    monkeypatch.setattr(mailbox, "TextEvent", Counting)
    box = Mailbox()
    for number in range(10_000):
        box.put((event(number),))
    assert len(taken(box)) == 1
    assert 10_000 <= copied <= 20_000
