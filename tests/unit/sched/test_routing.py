"""Which engine gets a request: by what it has read, and by what it has to do."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from outrider.sched.admission import BLOCK_TOKENS, KnownBlocks, best_known, blocks_of, least_busy


@dataclass
class Engine:
    num_in_flight: int = 0
    known: KnownBlocks = field(default_factory=KnownBlocks)

    def read(self, ids: list[int]) -> None:
        self.known.note(list(blocks_of(ids)))


FAMILY = list(range(4 * BLOCK_TOKENS))


def test_prompts_share_the_blocks_of_their_common_beginning_alone() -> None:
    whole = list(blocks_of(FAMILY))
    assert len(whole) == len(set(whole)) == 4
    other = list(blocks_of([*FAMILY[: 2 * BLOCK_TOKENS], *FAMILY[: 2 * BLOCK_TOKENS]]))
    assert other[:2] == whole[:2]
    assert not set(other[2:]) & set(whole)
    assert list(blocks_of(FAMILY[: BLOCK_TOKENS - 1])) == []
    assert not set(blocks_of(FAMILY, "somebody else's")) & set(whole)


def test_a_request_goes_where_its_beginning_was_read_unless_there_is_clearly_more_to_do() -> None:
    knows, idle = Engine(), Engine()
    knows.read(FAMILY)
    homes: list[Engine] = []
    for _ in range(8):
        chosen = best_known([idle, knows], list(blocks_of(FAMILY)))
        chosen.num_in_flight += 1
        homes.append(chosen)
    assert homes[:3] == [knows] * 3
    # From there on by turns, for neither may be more than two ahead.
    assert (knows.num_in_flight, idle.num_in_flight) == (5, 3)


def test_the_longer_beginning_counts_and_then_the_shorter_queue() -> None:
    short, long = Engine(), Engine(num_in_flight=2)
    short.read(FAMILY[: 2 * BLOCK_TOKENS])
    long.read(FAMILY)
    assert best_known([short, long], list(blocks_of(FAMILY))) is long
    assert best_known([long, short], list(blocks_of(FAMILY[: 2 * BLOCK_TOKENS]))) is short
    assert least_busy([long, short]) is short


def test_idle_engines_share_out_the_families_of_prompts() -> None:
    engines = [Engine(), Engine(), Engine()]
    homes: list[int] = []
    for family in range(6):
        ids = [family, *FAMILY]
        home = best_known(engines, list(blocks_of(ids)))
        home.read(ids)
        homes.append(next(i for i, one in enumerate(engines) if one is home))
    assert homes == [0, 1, 2, 0, 1, 2]


def test_an_engine_that_was_lost_knows_nothing_and_old_blocks_go_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outrider.sched.admission._MOST_BLOCKS", 3)
    engine = Engine()
    engine.read(FAMILY)
    assert engine.known.num_known(list(blocks_of(FAMILY))) == 0
    engine.read(FAMILY[:BLOCK_TOKENS])
    assert engine.known.num_known(list(blocks_of(FAMILY))) == 1
    engine.known.forget()
    assert engine.known.num_known(list(blocks_of(FAMILY))) == 0
