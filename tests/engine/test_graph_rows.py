"""A graph's rows serve one text after another, and each has numbers, memory and filters of its
own."""

from __future__ import annotations

import pytest

from checks.captured import (
    check_memory_of_host_rounds,
    check_numbers_of_a_request,
    check_rows_in_turn,
    double,
)
from doubles.graphs import GraphRig, requests, tiny
from doubles.host_drafts import Counting
from outrider.core.config import EngineConfig
from outrider.engine.cuda_graph.host_round import HostRound


@pytest.mark.parametrize("salt", range(2))
@pytest.mark.parametrize("sampler", ["token", "match"])
@pytest.mark.parametrize("batch_size", [2, 4])
def test_rows_serve_one_text_after_another(salt: int, sampler: str, batch_size: int) -> None:
    check_rows_in_turn(salt, sampler, batch_size)


@pytest.mark.parametrize(("salt", "sampler"), [(2, "token"), (7, "token"), (1, "block")])
def test_memory_is_that_of_a_model_that_reads_the_text(salt: int, sampler: str) -> None:
    check_memory_of_host_rounds(salt, sampler)


def test_numbers_of_a_request_reach_the_device_whole() -> None:
    check_numbers_of_a_request()


def test_a_text_is_remembered_by_its_own_tokens() -> None:
    """Pages that a round filled are found by the text that they hold."""
    rigged = double(1, "token", 2)
    engine = rigged.engine(captured=True)
    seqs = rigged.submit(engine, requests((3.0, 9.0), max_tokens=30))
    while engine.has_work:
        engine.step()
        for seq in seqs:
            if seq.seq_id in engine.residents.live and seq.num_emitted:
                assert list(rigged.target.state.tokens(seq.seq_id)) == seq.tokens[:-1]
    assert any(trace.num_accepted > 1 for trace in rigged.traces)


def test_page_tables_grow_with_the_text() -> None:
    """Those of host drafts double, and so does the text that has passed them."""
    config = EngineConfig(drafter="ngram", k=3, batch_size=2)
    rigged = GraphRig(tiny("llama2", 3), None, config, Counting())
    wanted = requests((0, 0.9), max_tokens=75)
    by_stages = rigged.run(wanted, captured=False)
    assert rigged.run(wanted, captured=True) == by_stages
    assert isinstance(rigged.made, HostRound)
    assert rigged.made.refusals.failed is None
    assert len({shape.columns for shape in rigged.made.table.shapes}) == 2


def test_idle_rows_follow_row_0_whatever_is_drafted() -> None:
    """The controller changes how many tokens count; rows of the bucket that no text has do the work
    of row 0, in its memory."""
    config = EngineConfig(k=5, batch_size=4, drafter="model", controller="band")
    rigged = GraphRig(tiny("llama2", 3), tiny("llama2", 4, "draft"), config)
    wanted = requests((0, 0, 0), max_tokens=30)
    by_stages = rigged.run(wanted, captured=False)
    assert rigged.run(wanted, captured=True) == by_stages
    assert len({trace.num_drafted for trace in rigged.traces}) > 2
