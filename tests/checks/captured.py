"""Captured rounds, run eagerly: rows that serve one text after another, and their memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from doubles.drafters import random_chains
from doubles.graphs import PAGE, SLOTS, requests, rig, tiny
from doubles.host_drafts import VOCAB, Counting, DoubleRig, soft_trees
from doubles.rig import Request
from doubles.tiny_checkpoints import random_model, variant
from outrider.core.clock import host_floats, host_ints
from outrider.core.config import EngineConfig
from outrider.core.draft import Verdict
from outrider.core.logits import LogitsProcessor
from outrider.core.params import SamplingParams
from outrider.core.protocols import DraftNeeds, StepRow
from outrider.engine.round import FinishedRow, LiveSequence
from outrider.models.decoder import ModelCapacity
from outrider.models.llama import LlamaModel
from outrider.plugins.gpu.rounds.host_round import HostRound
from outrider.plugins.gpu.rounds.round import GraphRound

HOT = (3.0, 0, 9.0, 3.0, 9.0)
SHAPED: Mapping[int, Mapping[str, object]] = {
    0: {"repetition_penalty": 1.5, "logit_bias": {7: 2.5, 8: -3.0, 60: 4.0}},
    3: {"frequency_penalty": 0.8, "presence_penalty": 0.5},
}


def turning_over() -> list[Request]:
    """Five texts, all soon over: of unlike temperatures, filters and penalties."""
    found = requests(HOT, max_tokens=5, filtered=True)
    for index, changes in SHAPED.items():
        params = replace(found[index].params, **changes)  # pyright: ignore[reportArgumentType]
        shaper = LogitsProcessor(params, len(found[index].prompt))
        found[index] = replace(found[index], params=params, shaper=shaper)
    return found


def double(salt: int, sampler: str, batch_size: int) -> DoubleRig:
    config = EngineConfig(
        drafter="ngram", k=4, tree_nodes=6, batch_size=batch_size, sampler=sampler
    )
    # A model of its own: a check that fails leaves texts in its memory.
    capacity = ModelCapacity(num_slots=SLOTS, page_size=PAGE, max_rows=128, max_logits=64)
    model = random_model(variant("llama2"), seed=3, capacity=capacity)
    assert isinstance(model, LlamaModel)
    return DoubleRig(model, None, config, Counting(), drafter=soft_trees(salt))


def check_rows_in_turn(salt: int = 0, sampler: str = "token", batch_size: int = 4) -> None:
    """What the text before had (a longer draft, its distributions, penalties, a bias, filters) is
    gone; in a batch of three of four rows the last one keeps nothing of it either."""
    rigged = double(salt, sampler, batch_size)
    by_stages = rigged.run(turning_over(), captured=False)
    assert rigged.run(turning_over(), captured=True) == by_stages
    assert isinstance(rigged.made, HostRound)
    assert rigged.made.refusals.failed is None
    assert any(trace.num_accepted for trace in rigged.traces)
    assert isinstance(rigged.launcher, Counting)
    assert rigged.launcher.num_launched > 10


def check_memory_of_host_rounds(salt: int = 2, sampler: str = "token") -> None:
    """Bit for bit after every verification that of a model that reads the text: of accepted paths,
    of rows that were refused, and of the row that others repeat. The memory knows which tokens it
    has."""
    rigged, seen = double(salt, sampler, 4), 0
    rowed = HostRound._row  # pyright: ignore[reportPrivateUsage]

    def checked(made: HostRound, seq: LiveSequence, verdict: Verdict) -> FinishedRow:
        nonlocal seen
        row, state = rowed(made, seq, verdict), rigged.target.state
        seen += bool(verdict.path)
        # The end of the round commits so many.
        kept = range(len(row.outcome.tokens))
        length = state.length(seq.seq_id)
        text = [*seq.tokens, *row.outcome.tokens][: length + len(kept)]
        own = torch.tensor(
            [page * PAGE + at for page in state.pages(seq.seq_id) for at in range(PAGE)]
        )
        found = state.arena[:, :, :, own[: len(text)]]
        state.open(77, ())
        rigged.target.step([StepRow.chain(77, text, logits_from=len(text))], DraftNeeds())
        state.commit({77: range(len(text))})
        assert torch.equal(state.read(77), found)
        state.close(77)
        return row

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostRound, "_row", checked)
        first, *others = requests((9.0, 90.0, 90.0, 90.0), max_tokens=24)
        # For long three rows of four have a text, and much of row 0's is accepted.
        short = replace(first, params=replace(first.params, max_tokens=5))
        rigged.run([short, *others], captured=True)
    assert seen > 5


WHOLE = SamplingParams(
    max_tokens=4, temperature=0.7, seed=2**63 - 5, top_p=0.9, min_p=0.05, top_k=2**31 - 1
)


def check_numbers_of_a_request() -> None:
    """Seeds have 63 bits, and the mass of top-p is a float64 there as it is in the stages."""
    rigged = DoubleRig(
        tiny("llama2", 3),
        None,
        EngineConfig(drafter="ngram", k=4, batch_size=1),
        Counting(),
        drafter=random_chains(VOCAB),
    )
    rigged.run([Request([1, 5, 9], WHOLE, sample=3)], captured=True)
    assert isinstance(rigged.made, HostRound)
    table = rigged.made.table
    for shape in table.shapes:
        fields = table.graph(shape).fields.device
        assert host_ints(fields["numbers"][:3, 0]) == [WHOLE.top_k, WHOLE.seed, 3]
        assert host_floats(fields["top_p"]) == [WHOLE.top_p]
        assert torch.equal(fields["min_p"], torch.tensor([WHOLE.min_p]))
        assert torch.equal(fields["temperature"], torch.tensor([WHOLE.temperature]))
    drafted = rig(2, batch_size=1)
    drafted.run([Request([1, 5, 9], WHOLE, sample=3)], captured=True)
    assert isinstance(drafted.made, GraphRound)
    buffers = drafted.made.table.buffers
    assert (host_ints(buffers.seed_B), host_ints(buffers.sample_B)) == ([WHOLE.seed], [3])
    assert host_ints(buffers.top_k_B) == [WHOLE.top_k]
    assert host_floats(buffers.top_p_B) == [WHOLE.top_p]
