"""What ranks are told is what was done."""

from __future__ import annotations

from array import array
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from outrider.core.protocols import DraftNeeds, StepRow
from outrider.models.parallel import messages
from outrider.models.parallel.ranks import HEADER, encode

numbers = st.integers(0, 2**40)
nodes = st.lists(st.tuples(numbers, st.integers(-1, 99)), max_size=6)
lists = st.lists(numbers, max_size=6)


class CallLog:
    """A model and its memory that write down what they are asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.state = self

    def __getattr__(self, name: str) -> Any:
        def write_down(*given: object) -> None:
            self.calls.append((name, *given))

        return write_down


@given(
    tokens=lists,
    paths=st.dictionaries(numbers, lists, max_size=4),
    counts=st.dictionaries(numbers, numbers, max_size=4),
    layers=st.lists(st.integers(0, 90), max_size=4),
    rows=st.lists(st.tuples(numbers, nodes, numbers), max_size=4),
)
def test_a_message_is_the_call_that_it_was_made_of(
    tokens: list[int],
    paths: dict[int, list[int]],
    counts: dict[int, int],
    layers: list[int],
    rows: list[tuple[int, list[tuple[int, int]], int]],
) -> None:
    made = [
        StepRow(seq_id, tuple(token for token, _ in tree), tuple(up for _, up in tree), logits_from)
        for seq_id, tree, logits_from in rows
    ]
    needs = DraftNeeds(tuple(layers))
    log = CallLog()
    for message in (
        messages.open_message(7, tokens),
        messages.fork_message(7, 8, len(tokens)),
        messages.reserve_message(counts),
        messages.commit_message(paths),
        messages.close_message(7),
        messages.step_message(made, needs),
    ):
        data = encode(message)
        received = array("q", data[HEADER.size :])
        assert HEADER.unpack(data[: HEADER.size]) == (len(received),)
        messages.apply(received.tolist(), cast("Any", log))
    assert log.calls == [
        ("open", 7, tokens),
        ("fork", 7, 8, len(tokens)),
        ("reserve", counts),
        ("commit", paths),
        ("close", 7),
        ("step", made, needs),
    ]
