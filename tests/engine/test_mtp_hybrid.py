"""The MTP block that hybrids bring along: its arithmetic, and greedy text with every rollback."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checks.engine import check_greedy
from doubles.kinds import close_to
from doubles.rig import Rig, first_maximum
from doubles.tiny_hybrids import hybrid_config, hybrid_kind, write_hybrid
from doubles.tiny_mtp import gated_definition, write_hybrid_with_mtp
from outrider import LLM, EngineConfig, SamplingParams
from outrider.core.errors import CheckpointError
from outrider.core.protocols import StepRow
from outrider.core.spec import ModelSpec, RecurrentCapacity
from outrider.drafters.common.growth import NOT_DRAFTED, DraftSampler
from outrider.models.decoder import LoadOptions, ModelCapacity
from outrider.models.heads import HeadsToLoad, hidden_layers_of
from outrider.models.loading import load_model, resolve
from outrider.plugins.heads.mtp import load_mtp, mtp_drafter, read_mtp_config
from outrider.plugins.hybrids.model import HybridModel

HEADS_ROOM = ModelCapacity(num_slots=256, page_size=4, max_rows=64, max_logits=64)
PROMPTS = ((7, 90, 3, 7, 90), (1,), (40, 41, 42, 43, 44, 45, 46, 47, 48))
TOKENS = (5, 1, 90, 7, 7, 30)


def loaded(folder: Path, rollback: str = "replay") -> HybridModel:
    states = RecurrentCapacity(rollback=rollback, history=8, num_sequences=4, num_checkpoints=4)
    capacity = ModelCapacity(
        num_slots=256, page_size=4, max_rows=64, hidden_layers=(4,), states=states
    )
    model = load_model(folder, LoadOptions(capacity=capacity, device="cpu"))
    assert isinstance(model, HybridModel)
    return model


def test_it_computes_what_the_definition_says(tmp_path: Path) -> None:
    tensors = write_hybrid_with_mtp(tmp_path, "qwen3_5")
    target = loaded(tmp_path)
    config = read_mtp_config(tmp_path, target.spec)
    (net,) = load_mtp(tmp_path, config, target, HEADS_ROOM)
    states_PD = torch.randn(6, 40, generator=torch.Generator().manual_seed(2))
    embedded_PD = tensors["model.embed_tokens.weight"][list(TOKENS)]
    wanted_PD = gated_definition(tensors, hybrid_config("qwen3_5"), embedded_PD, states_PD)
    net.state.open(1, ())
    out = net.step([StepRow.chain(1, TOKENS)], states_PD)
    close_to(out.hidden_ND, wanted_PD)
    close_to(out.logits_MV, wanted_PD @ tensors["lm_head.weight"].T)
    # It reads what the target's last norm gives.
    normed_PD = torch.nn.functional.rms_norm(
        states_PD, (40,), 1 + tensors["model.norm.weight"], 1e-6
    )
    close_to(net.fuse(states_PD[:, None]), normed_PD)


@pytest.mark.parametrize(("name", "num_ids"), [("qwen3_5", 0), ("qwen3_5", 77), ("qwen3_5_moe", 0)])
def test_its_native_pass_has_the_bits_of_its_operators(
    tmp_path: Path, name: str, num_ids: int
) -> None:
    """A block that drafts some ids has the whole block's logits of these."""
    write_hybrid_with_mtp(tmp_path, name)
    target = loaded(tmp_path)
    if target.kernels.forward is None:
        pytest.skip("there are no native kernels here")
    config = read_mtp_config(tmp_path, target.spec)
    (fast,) = load_mtp(tmp_path, config, target, HEADS_ROOM, num_ids)
    target.kernels = replace(target.kernels, forward=None, twin=None)
    (plain,) = load_mtp(tmp_path, config, target, HEADS_ROOM)
    assert plain.native is None
    assert fast.native is not None
    states_PD = torch.randn(6, 40, generator=torch.Generator().manual_seed(2))
    rows = [StepRow.chain(1, TOKENS), StepRow.chain(1, TOKENS[:2])]
    for net in (fast, plain):
        net.state.open(1, ())
    for row in rows:
        found, wanted = (net.step([row], states_PD[: len(row.tokens)]) for net in (fast, plain))
        assert torch.equal(found.hidden_ND, wanted.hidden_ND)
        size = num_ids or wanted.logits_MV.shape[1]
        assert torch.equal(found.logits_MV[:, :size], wanted.logits_MV[:, :size])
        assert (found.logits_MV[:, size:] == NOT_DRAFTED).all()
        for net in (fast, plain):
            net.state.commit({1: range(len(row.tokens))})


def test_a_hybrid_without_a_block_says_so(tmp_path: Path) -> None:
    write_hybrid(tmp_path, hybrid_config("qwen3_5"))
    target = loaded(tmp_path)
    config = read_mtp_config(tmp_path, target.spec)
    with pytest.raises(CheckpointError, match="this hybrid has no MTP block") as caught:
        load_mtp(tmp_path, config, target, HEADS_ROOM)
    assert "--drafter ngram" in str(caught.value.hint)


# Both rollbacks, every model. Other combinations are `deep`.
@pytest.mark.covering(1)
@pytest.mark.slow
@pytest.mark.parametrize("rollback", ["ring", "replay"])
@pytest.mark.parametrize(("name", "depth"), [("qwen3_5", 1), ("qwen3_5_moe", 2), ("qwen3_next", 1)])
def test_greedy_text_is_that_of_plain_decoding(
    tmp_path: Path, name: str, depth: int, rollback: str
) -> None:
    write_hybrid_with_mtp(tmp_path, name, depth=depth)
    target = loaded(tmp_path, rollback)
    sampler = DraftSampler(first_maximum, "the MTP block")
    heads = HeadsToLoad(tmp_path, "mtp", HEADS_ROOM)
    drafter = mtp_drafter(heads, target, sampler, chunk=4, batch_size=3)
    rig = Rig(target, drafter, k=4, chunk=4, batch_size=3)
    check_greedy(rig, hybrid_kind(name, rollback), PROMPTS, 10)
    assert sum(trace.num_drafted for trace in rig.traces) > 20


@pytest.mark.slow
@pytest.mark.weights
@pytest.mark.parametrize("schedule", ["single", "pdv"])
def test_a_user_names_the_drafter_and_gets_the_same_text(tmp_path: Path, schedule: str) -> None:
    """Greedy and sampled, from the hybrid's own files."""
    write_hybrid_with_mtp(tmp_path, "qwen3_5", vocab_size=8192)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve("outrider/embedded") / file, tmp_path)
    prompts = ["def add(a, b):\n", "The river", "2 + 2 = 2 + 2 = 2 + 2"]
    params = [
        SamplingParams(max_tokens=16),
        SamplingParams(max_tokens=12, repetition_penalty=1.4),
        SamplingParams(max_tokens=16, temperature=0.7, seed=4),
    ]
    common = EngineConfig(
        device="cpu", batch_size=3, k=3, context=96, sampler="coupled", schedule=schedule
    )
    plain = LLM(tmp_path, config=replace(common, drafter="none")).generate(prompts, params)
    num_ids = 4096 if schedule == "single" else 0
    llm = LLM(tmp_path, config=replace(common, drafter="mtp", draft_vocab=num_ids))
    found = llm.generate(prompts, params)
    assert [result.token_ids for result in found] == [result.token_ids for result in plain]
    assert all(result.stats.num_drafted > 0 for result in found)


def spec_of(name: str) -> ModelSpec:
    return hybrid_kind(name, "ring")().spec


def test_config_says_how_many_blocks_there_are(tmp_path: Path) -> None:
    spec = spec_of("qwen3_5")
    path = tmp_path / "config.json"
    nested = {"model_type": "qwen3_5", "text_config": hybrid_config("qwen3_5")}
    for values, depth in (
        (hybrid_config("qwen3_5"), 1),
        (hybrid_config("qwen3_5", mtp_num_hidden_layers=3), 3),
        (hybrid_config("qwen3_next", num_nextn_predict_layers=2), 2),
        (nested, 1),
    ):
        path.write_text(json.dumps(values))
        found = read_mtp_config(tmp_path, spec)
        assert (found.depth, found.reads_normed, found.gives_normed) == (depth, True, True)
    assert hidden_layers_of(tmp_path, "mtp", spec.num_layers) == (4,)
