"""A graph's rows serve one text after another, and each has numbers, memory and filters of its
own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from checks.captured import (
    check_memory_of_host_rounds,
    check_numbers_of_a_request,
    check_rows_in_turn,
    double,
)
from doubles.drafters import RowDrafter
from doubles.graphs import GraphRig, requests, rig, tiny
from doubles.host_drafts import VOCAB, Counting, DoubleRig
from outrider.core.config import EngineConfig
from outrider.core.draft import Draft
from outrider.core.params import SamplingParams
from outrider.core.protocols import DraftRow
from outrider.core.rng import RoundKeys
from outrider.core.sampling import processed_probs
from outrider.plugins.gpu.rounds.host_round import HostRound
from outrider.plugins.gpu.rounds.sampling import Filters, Rows, distributions

pytestmark = pytest.mark.wide


@pytest.mark.covering(1)
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


def test_rows_of_whole_rounds_serve_one_text_after_another() -> None:
    """A greedy row, which keeps all tokens, comes first or last in a batch with filtered ones."""
    rigged, wanted = rig(2), requests((0, 1.5, 1.5, 0.9, 0.9), filtered=True)
    by_stages = rigged.run(wanted, captured=False)
    assert rigged.run(wanted, captured=True) == by_stages
    assert rigged.made is not None
    assert rigged.made.refusals.failed is None


# Temperature, top-k, top-p and min-p of each row, all that chat checkpoints ask for.
LIMITS = (
    (0.7, 0, 0.5, 0.6),
    (1.3, 3, 1.0, 0.0),
    (2.0, 0, 1.0, 0.2),
    (0.9, 9, 0.8, 0.05),
    (1.0, 0, 1.0, 0.0),
)


def test_each_row_has_the_distributions_of_its_own_filters() -> None:
    """Temperature first; min-p is a share of what top-p leaves of the likeliest token."""
    logits_BWV = torch.randn(len(LIMITS), 3, 40, generator=torch.Generator().manual_seed(5))
    temperature_B, top_k_B, top_p_B, min_p_B = torch.tensor(LIMITS, dtype=torch.float64).unbind(1)
    zero_B = torch.zeros(len(LIMITS), dtype=torch.int64)
    filters = Filters(top_k_B.long(), top_p_B, min_p_B.float())
    rows = Rows(temperature_B.float(), zero_B, RoundKeys(zero_B, zero_B, zero_B), filters)
    for (heat, top_k, top_p, min_p), logits_WV, probs_WV in zip(
        LIMITS, logits_BWV, distributions(logits_BWV, rows), strict=True
    ):
        params = SamplingParams(temperature=heat, top_k=top_k, top_p=top_p, min_p=min_p)
        wanted_WV = processed_probs(logits_WV.clone(), params)
        assert torch.equal(probs_WV > 0, wanted_WV > 0)
        torch.testing.assert_close(probs_WV, wanted_WV, rtol=1e-6, atol=0)


@pytest.mark.parametrize("tree", [0, 1])
def test_trees_go_with_chains_that_need_no_padding(tree: int) -> None:
    """A tree's nodes see their own path alone, though no row before lists what it sees. Drafts know
    the text, so the deepest nodes are accepted."""
    config = EngineConfig(drafter="ngram", k=3, tree_nodes=3, batch_size=2)
    plain = GraphRig(tiny("llama2", 3), None, replace(config, drafter="none", k=0, tree_nodes=0))
    wanted = requests((0, 0), max_tokens=24)
    known = plain.run(wanted, captured=False)

    def draft(row: DraftRow) -> Draft:
        number = int(list(row.tokens[: len(wanted[1].prompt)]) == list(wanted[1].prompt))
        text = known[number][len(row.tokens) - len(wanted[number].prompt) :]
        if row.budget.depth < 3 or len(text) < 4:
            return Draft.empty()
        if number == tree:
            return Draft(((text[0] + 1) % VOCAB, *text[:2]), (-1, -1, 1))
        return Draft.chain(text[:3])

    drafter = RowDrafter(draft, num_nodes=3)
    rigged = DoubleRig(tiny("llama2", 3), None, config, Counting(), drafter=drafter)
    assert rigged.run(wanted, captured=True) == known
    assert isinstance(rigged.made, HostRound)
    assert rigged.made.refusals.failed is None
    assert sum(trace.num_accepted for trace in rigged.traces) > 20


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
