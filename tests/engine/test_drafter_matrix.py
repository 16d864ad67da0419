"""Whatever drafts, greedy text is that of plain decoding: chains and trees, dense and hybrid.

Here a few rows meet every pair of two settings; `studies/parity_matrix.py drafters` runs all.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from matrices.matrix import Cell, Matrix, Row, Runner, all_pairs
from matrices.settings import drafters

from doubles.grounds import dense_ground, hybrid_ground
from outrider_lab.bench.studies.drafters_lineup import available, known

pytestmark = pytest.mark.weights

TEXT = """def add(a, b):
    return a + b


for i in range(10):
    print(add(i, 2 * i))
"""
# Short and long, two with a common beginning; together more than tight memory holds.
PROMPTS = [TEXT[4:40], TEXT[20:60], TEXT[30:75], TEXT[9:50], TEXT[:9], TEXT * 2, TEXT]
NUM_TOKENS = 9
NUM_PARTS = 8
# Waiting requests and rows of several, chunks within a prompt and beyond it.
FEW = {"batch_size": ("1", "3"), "prefill_chunk": ("3", "256")}


@pytest.fixture(scope="module")
def matrices(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Runner]:
    folder = tmp_path_factory.mktemp("grounds")
    grounds = (
        dense_ground(folder / "dense-heads"),
        hybrid_ground(folder),
        hybrid_ground(folder, "lfm2", "convolutions"),
        hybrid_ground(folder, "falcon_h1", "scans"),
    )
    return {
        ground.factors["ground"][0]: Runner(
            replace(ground, factors={**ground.factors, **FEW}), PROMPTS, NUM_TOKENS
        )
        for ground in grounds
    }


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("part", range(NUM_PARTS))
@pytest.mark.parametrize("name", ["dense", "hybrid", "convolutions", "scans"])
def test_text_is_that_of_plain_decoding(matrices: dict[str, Runner], name: str, part: int) -> None:
    runner = matrices[name]
    for cell in runner.run(runner.matrix.pair_rows()[part::NUM_PARTS]):
        assert cell.first_difference is None, cell.row
        assert cell.num_equal == cell.num_tokens == NUM_TOKENS * len(PROMPTS), cell.row


def cell_of(runner: Runner, **settings: object) -> Cell:
    """Of a row with some settings changed."""
    row = {name: values[0] for name, values in runner.matrix.factors.items()}
    row |= {"k": "4", "batch_size": "3", "prefill_chunk": "16"}
    (cell,) = runner.run([row | {name: str(value) for name, value in settings.items()}])
    assert cell.holds
    return cell


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "hybrid"])
def test_trees_branch_and_parts_of_drafts_are_kept(matrices: dict[str, Runner], name: str) -> None:
    tree = cell_of(matrices[name], drafter="model", shape="tree")
    assert tree.branched
    chain = cell_of(matrices[name], drafter="model")
    assert not chain.branched
    assert 0 < chain.num_accepted < chain.num_drafted


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "hybrid"])
def test_an_mtp_block_branches_too(matrices: dict[str, Runner], name: str) -> None:
    assert cell_of(matrices[name], drafter="mtp", shape="tree").branched


@pytest.mark.slow
@pytest.mark.parametrize("rollback", ["ring", "replay"])
def test_tight_memory_pre_empts_hybrids_too(matrices: dict[str, Runner], rollback: str) -> None:
    cell = cell_of(
        matrices["hybrid"], drafter="model", rollback=rollback, memory="tight", batch_size=8
    )
    assert cell.num_preempted > 0


@pytest.fixture(scope="module")
def ground() -> Matrix:
    return drafters("any", "t", dict.fromkeys(available()), recurrent=True)


def test_rows_meet_every_pair_that_means_anything(ground: Matrix) -> None:
    rows = ground.pair_rows()
    assert len(rows) < 80
    met = {pair for row in rows for pair in pairs_of(row)}
    factors = {name: values for name, values in ground.factors.items() if name != "shape"}
    assert set(all_pairs(factors)) <= met
    for name in available():
        assert known(name).branches == any(
            (("drafter", name), ("shape", "tree")) == pair for pair in met
        )


def test_the_full_product_has_each_configuration_once(ground: Matrix) -> None:
    rows = ground.all_rows()
    assert len(rows) == len({tuple(row.items()) for row in rows}) > 1000
    assert all(row == ground.possible(row) for row in rows)


def pairs_of(row: Row) -> list[tuple[tuple[str, str], tuple[str, str]]]:
    return all_pairs({name: (value,) for name, value in row.items()})
