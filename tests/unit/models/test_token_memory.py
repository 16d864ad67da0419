from __future__ import annotations

import pytest

from outrider.core.errors import CapacityError, ContractError
from outrider.core.protocols import StepRow
from outrider_lab.models.scripted import TokenMemory


def opened(*seq_ids: int, num_slots: int = 100) -> TokenMemory:
    memory = TokenMemory(num_slots)
    for seq_id in seq_ids:
        assert memory.open(seq_id, (1, 2, 3)) == 0
    return memory


def test_a_path_is_kept_and_the_rest_forgotten() -> None:
    memory = opened(1)
    memory.stage([StepRow(1, (10, 11, 12, 13), (-1, 0, 0, 2))])
    assert memory.num_staged(1) == 4
    assert memory.context(1, 3, 5) == (10, 12, 13)
    assert memory.commit({1: (0, 2, 3)}) == 0
    assert (memory.length(1), memory.num_staged(1)) == (3, 0)
    memory.stage([StepRow.chain(1, (14,))])
    assert memory.context(1, 0, 3) == (12, 13, 14)
    assert memory.context(1, 0, 9) == (10, 12, 13, 14)
    assert memory.context(1, 0, 1) == (14,)


def test_a_fork_goes_its_own_way() -> None:
    memory = opened(1)
    memory.stage([StepRow.chain(1, (5, 6))])
    memory.commit({1: (0, 1)})
    memory.fork(1, 2)
    memory.stage([StepRow.chain(2, (7,))])
    memory.commit({2: (0,)})
    assert (memory.length(1), memory.length(2)) == (2, 3)


def test_memory_is_bounded_and_given_back() -> None:
    memory = opened(1, 2, num_slots=5)
    memory.stage([StepRow.chain(1, (5, 6, 7))])
    assert memory.num_free_tokens == 2
    with pytest.raises(CapacityError):
        memory.stage([StepRow.chain(1, (8,), parent=2), StepRow.chain(2, (8, 9))])
    assert (memory.num_staged(1), memory.num_staged(2)) == (3, 0)
    memory.commit({1: ()})
    assert memory.num_free_tokens == 5
    memory.close(1)
    memory.close(2)
    assert memory.num_free_tokens == 5


@pytest.mark.parametrize("path", [(1,), (0, 2), (1, 0), (0, 0), (-1,), (0, -1), (2, 1)])
def test_a_path_must_go_from_the_root_down(path: tuple[int, ...]) -> None:
    memory = opened(1)
    memory.stage([StepRow(1, (10, 11, 12), (-1, 0, -1))])
    with pytest.raises(ContractError):
        memory.commit({1: path})


def test_other_misuse_is_caught() -> None:
    memory = opened(1)
    with pytest.raises(ContractError):
        memory.open(1, ())
    with pytest.raises(ContractError):
        memory.fork(1, 1)
    with pytest.raises(ContractError):
        memory.stage([StepRow(1, (10,), (0,))])
    for call in (lambda: memory.length(9), lambda: memory.close(9), lambda: memory.fork(9, 8)):
        with pytest.raises(KeyError):
            call()
