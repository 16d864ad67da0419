"""Captured verifications of drafts that the host proposes, run eagerly: the text of the stages, for
every drafter and kind of request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from doubles.drafters import RowDrafter, random_chains, random_trees
from doubles.eagle_heads import EagleFolder
from doubles.graphs import PAGE, WINDOW, GraphRig, requests, tiny
from doubles.head_files import medusa_tensors, write_medusa
from doubles.host_drafts import VOCAB, Counting, DoubleRig, soft_trees
from doubles.rig import Request, round_of
from doubles.tiny_checkpoints import random_model, variant
from doubles.tiny_mtp import block_like, mtp_tensors, write_mtp
from outrider.core.config import EngineConfig
from outrider.core.draft import Draft
from outrider.core.logits import LogitsProcessor
from outrider.core.params import SamplingParams
from outrider.core.protocols import DraftRow
from outrider.engine.round import LiveSequence
from outrider.engine.stages import Stages
from outrider.models.decoder import ModelCapacity
from outrider.models.heads import HeadsToLoad
from outrider.models.llama import LlamaModel
from outrider.plugins.gpu.rounds import verify
from outrider.plugins.gpu.rounds.build import captured_round
from outrider.plugins.gpu.rounds.host_round import HostRound
from outrider.plugins.gpu.rounds.program import EagerLauncher
from outrider.plugins.gpu.rounds.shaping import write_shaping
from outrider.plugins.heads.medusa import MedusaConfig

pytestmark = pytest.mark.wide

# The last layer, which all heads here read.
CAPACITY = ModelCapacity(
    num_slots=512, page_size=PAGE, max_rows=128, max_logits=64, hidden_layers=(2,)
)


@cache
def reading() -> LlamaModel:
    """A target whose last states are kept."""
    model = random_model(variant("llama2"), seed=3, capacity=CAPACITY)
    assert isinstance(model, LlamaModel)
    return model


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, HeadsToLoad]:
    root, model = tmp_path_factory.mktemp("heads"), reading()
    spec, medusa, mtp = model.spec, MedusaConfig(num_heads=3), block_like(model.config)
    folders: dict[str, Path] = {
        "eagle": EagleFolder(spec.hidden_size, VOCAB, fused=False).write(root / "eagle"),
        "medusa": write_medusa(root / "medusa", medusa, spec, medusa_tensors(medusa, spec)),
        "mtp": write_mtp(root / "mtp", mtp, mtp_tensors(mtp)),
    }
    return {kind: HeadsToLoad(folder, kind, CAPACITY) for kind, folder in folders.items()}


# Nodes of a tree, 0 for chains, by drafter.
DRAFTERS = {
    "ngram": 0,
    "suffix": 9,
    "lookup": 9,
    "prediction": 0,
    "model": 7,
    "eagle": 0,
    "eagle, trees": 7,
    "mtp": 0,
    "mtp, trees": 9,
    "medusa": 9,
    "medusa-lite": 7,
    "eagle-lite": 0,
}
KINDS = {
    "greedy": requests((0, 0, 0)),
    "sampled": requests((0.9, 1.2, 0.9)),
    "filtered": requests((0.7, 0.9, 1.5), filtered=True),
    "mixed": requests((0, 0.9, 1.2), filtered=True),
}


def host_rig(
    name: str, heads: Mapping[str, HeadsToLoad], *, sampler: str = "block", batch_size: int = 4
) -> GraphRig:
    drafter, nodes = name.partition(",")[0], DRAFTERS[name]
    config = EngineConfig(
        drafter=drafter,
        k=4,
        tree_nodes=nodes,
        batch_size=batch_size,
        sampler=sampler,
        controller="fixed",
        watchdog="off",
    )
    reads = drafter in heads or drafter.endswith("-lite")
    target = reading() if reads else tiny("llama2", 3)
    draft = tiny("llama2", 4, "draft") if drafter == "model" else None
    return GraphRig(target, draft, config, Counting(), heads=heads.get(drafter))


def check_host(rigged: GraphRig, wanted: Sequence[Request]) -> HostRound:
    """The text of the stages by captured rounds, none of which failed or was refused."""
    by_stages = rigged.run(wanted, captured=False)
    rounds = len({trace.pass_index for trace in rigged.traces if trace.num_emitted})
    assert rigged.run(wanted, captured=True) == by_stages
    made, launcher = rigged.made, rigged.launcher
    assert isinstance(made, HostRound)
    assert isinstance(launcher, Counting)
    assert made.refusals.failed is None
    assert rounds / 2 < launcher.num_launched <= len(rigged.jobs)
    return made


# Every drafter, kind of request and rule comes. Other combinations are `deep`.
@pytest.mark.covering(1)
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampler", ["block", "token", "match"])
def test_text_is_that_of_the_stages(
    name: str, kind: str, sampler: str, heads: Mapping[str, HeadsToLoad]
) -> None:
    check_host(host_rig(name, heads, sampler=sampler), KINDS[kind])


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", ["qwen3", "gpt2", "attention_bias"])
def test_other_families(family: str) -> None:
    config = EngineConfig(drafter="model", k=3, tree_nodes=7, batch_size=4, controller="fixed")
    rigged = GraphRig(tiny(family, 3), tiny(family, 4, "draft"), config, Counting())
    check_host(rigged, requests((0, 0.8, 0), filtered=True))


@pytest.mark.covering(1)
@pytest.mark.parametrize("salt", range(3))
@pytest.mark.parametrize("sampler", ["block", "token"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_trees_of_any_shape_are_judged_as_stages_judge_them(
    salt: int, sampler: str, batch_size: int
) -> None:
    """Hot texts, whose distributions are flat, so that nonsense is sometimes accepted."""
    config = EngineConfig(
        drafter="ngram", k=4, tree_nodes=6, batch_size=batch_size, sampler=sampler
    )
    rigged = DoubleRig(tiny("llama2", 3), None, config, Counting(), drafter=soft_trees(salt))
    wanted = requests((3.0, 9.0, 0), max_tokens=30)
    by_stages = rigged.run(wanted, captured=False)
    assert any(trace.num_accepted for trace in rigged.traces)
    assert rigged.run(wanted, captured=True) == by_stages
    assert isinstance(rigged.made, HostRound)
    assert rigged.made.refusals.failed is None


def test_a_batch_that_is_judged_in_different_ways_goes_by_stages(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Some drafts were drawn, others chosen: the block rule judges the first alone."""
    chosen, drawn = random_chains(VOCAB), random_trees(VOCAB, num_nodes=1)

    def draft(row: DraftRow) -> Draft:
        if row.seq_id:
            return chosen.draft(row)
        made = drawn.draft(row)
        assert made.probs_NV is not None
        return replace(made, probs_NV=made.probs_NV.float())

    config = EngineConfig(drafter="ngram", k=4, batch_size=3)
    rigged = DoubleRig(tiny("llama2", 3), None, config, Counting(), drafter=RowDrafter(draft))
    wanted = requests((3.0, 3.0, 3.0))
    by_stages = rigged.run(wanted, captured=False)
    with caplog.at_level(logging.INFO, logger="outrider.plugins.gpu.rounds.round"):
        assert rigged.run(wanted, captured=True) == by_stages
    assert "judged in different ways" in caplog.text


def test_few_graphs_serve_all_rounds(heads: Mapping[str, HeadsToLoad]) -> None:
    """Lengths of drafts and texts change from round to round, shapes hardly do."""
    rigged = host_rig("ngram", heads, batch_size=1)
    check_host(rigged, requests((0, 0, 0, 0), max_tokens=40))
    assert isinstance(rigged.launcher, Counting)
    # One for rounds without a draft, one for the others.
    assert rigged.launcher.num_graphs <= 2 < rigged.launcher.num_launched


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"logprobs": True}, "log-probabilities"),
        ({"round_events": True}, "round events"),
        ({"min_tokens": 5}, "bans or a mask"),
    ],
)
def test_requests_that_need_stages(
    change: Mapping[str, object],
    reason: str,
    heads: Mapping[str, HeadsToLoad],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They have the same text, and the others of their batch too."""

    def wanted() -> list[Request]:
        first, *others = requests((0.9, 0.9))
        params = replace(first.params, **change)  # pyright: ignore[reportArgumentType]
        shaper = LogitsProcessor(params, len(first.prompt)) if "min_tokens" in change else None
        return [replace(first, params=params, shaper=shaper), *others]

    rigged = host_rig("ngram", heads)
    by_stages = rigged.run(wanted(), captured=False)
    with caplog.at_level(logging.INFO, logger="outrider.plugins.gpu.rounds.round"):
        assert rigged.run(wanted(), captured=True) == by_stages
    assert len([record for record in caplog.records if reason in record.message]) == 1


PENALTIES: Mapping[str, object] = {
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.4,
    "presence_penalty": -0.3,
    "logit_bias": {7: 2.5, 8: -3.0, 60: 1.0},
}


# Each value comes. Other combinations are `deep`.
@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ["ngram", "suffix", "model", "mtp, trees"])
@pytest.mark.parametrize("change", [*PENALTIES, "all"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_penalties_are_counted_along_each_path(
    name: str, change: str, temperature: float, heads: Mapping[str, HeadsToLoad]
) -> None:
    """Of two requests of three."""
    values = PENALTIES if change == "all" else {change: PENALTIES[change]}

    def wanted() -> list[Request]:
        found: list[Request] = []
        for index, request in enumerate(requests((temperature,) * 3, max_tokens=24)):
            if index != 1:
                params = replace(request.params, **values)  # pyright: ignore[reportArgumentType]
                shaper = LogitsProcessor(params, len(request.prompt))
                request = replace(request, params=params, shaper=shaper)  # noqa: PLW2901
            found.append(request)
        return found

    rigged = host_rig(name, heads)
    by_stages = rigged.run(wanted(), captured=False)
    assert rigged.run(wanted(), captured=True) == by_stages
    assert isinstance(rigged.made, HostRound)
    assert rigged.made.refusals.failed is None
    assert any(shape.num_ids for shape in rigged.made.table.shapes)


def test_a_drafter_that_reads_likely_tokens_is_refused() -> None:
    rigged = GraphRig(tiny("llama2", 3), None, EngineConfig(drafter="recycling", k=3))
    stages = round_of(rigged.engine(captured=False))
    assert isinstance(stages, Stages)
    config = replace(rigged.config, page_size=PAGE)
    made = captured_round(
        config, stages, draft=None, window=lambda: WINDOW, launcher=EagerLauncher()
    )
    assert made == "drafter 'recycling' reads the target's likely next tokens"


class Refusing:
    """A device that captures nothing."""

    def make(self, program: Callable[[], None], prepare: Callable[[], None]) -> Callable[[], None]:
        del program
        prepare()
        raise ValueError("at 25:4")


@pytest.mark.parametrize("name", ["ngram", "mtp, trees"])
def test_stages_take_over_where_a_capture_fails(
    name: str, heads: Mapping[str, HeadsToLoad], caplog: pytest.LogCaptureFixture
) -> None:
    """The drafts of that round are verified by stages too, and nothing stays staged."""
    rigged = host_rig(name, heads)
    by_stages = rigged.run(KINDS["mixed"], captured=False)
    rigged.launcher = Refusing()
    assert rigged.run(KINDS["mixed"], captured=True) == by_stages
    assert "Rounds go stage by stage: a capture failed (ValueError: at 25:4)." in caplog.text
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_logits_that_are_no_numbers_cost_one_request(heads: Mapping[str, HeadsToLoad]) -> None:
    host_rig("ngram", heads, batch_size=2).check_poison(requests((0.8, 0.8)))


def test_memory_that_is_scarce_loses_no_text(heads: Mapping[str, HeadsToLoad]) -> None:
    """Padding takes pages, where there are some; else the round goes by stages."""
    rigged = host_rig("ngram", heads, batch_size=3)
    wanted = requests((0, 0.8, 0.8), max_tokens=20)
    by_stages = rigged.run(wanted, captured=False)
    rigged.target = random_model(  # pyright: ignore
        variant("llama2"), seed=3, capacity=replace(CAPACITY, hidden_layers=(), num_slots=72)
    )
    rigged.num_slots = 72
    assert rigged.run(wanted, captured=True) == by_stages


def test_greedy_params_keep_all_tokens() -> None:
    """Filters of greedy requests change nothing, so they need no other graph."""
    params = SamplingParams(max_tokens=9, top_k=3, top_p=0.4, min_p=0.9)
    config = EngineConfig(drafter="ngram", k=3, batch_size=2)
    rigged = GraphRig(tiny("llama2", 3), None, config, Counting())
    made = check_host(rigged, [Request([1, 5, 9], params), Request([3], params)])
    assert not any(shape.filtered for shape in made.table.shapes)


def test_rows_that_round_a_batch_up_have_no_lists_of_their_own(
    heads: Mapping[str, HeadsToLoad], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three requests in four rows: the lists of penalties are made for three."""
    rows: list[int] = []

    def noted(fields: Mapping[str, Any], row: int, seq: LiveSequence) -> None:
        rows.append(row)
        write_shaping(fields, row, seq)

    monkeypatch.setattr(verify, "write_shaping", noted)
    rigged, (first, *others) = host_rig("ngram", heads), requests((0.9,) * 3, max_tokens=24)
    params = replace(first.params, repetition_penalty=1.3)
    shaped = [replace(first, params=params, shaper=LogitsProcessor(params, len(first.prompt)))]
    rigged.run([*shaped, *others], captured=True)
    assert isinstance(rigged.made, HostRound)
    assert 4 in {shape.rows for shape in rigged.made.table.shapes if shape.num_ids}
    assert set(rows) == {0, 1, 2}
