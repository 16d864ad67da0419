"""EAGLE heads end to end: nothing changes but the number of passes, and faults are told."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from doubles.eagle_heads import EagleFolder, save_tensors
from outrider import LLM, EngineConfig, SamplingParams
from outrider.core.errors import CheckpointError, ConfigError, VocabularyError
from outrider.models.loading import resolve
from outrider_lab.bench.workload import load_prompts

# For the embedded target.
EAGLE3 = EagleFolder(
    256, 8192, ids=tuple(range(3000)), head_dim=64, ffn_size=128, scale=0.02, dtype=torch.float16
)
EAGLE1 = replace(EAGLE3, fused=False, ids=None)
# As the speculators library makes them now.
LAYERED = replace(
    EAGLE3,
    num_layers=2,
    qk_norm=True,
    layers=(1, 2, 3),
    changes={"norm_output": True, "fc_norm": True},
)
KINDS = {"3": EAGLE3, "1": EAGLE1, "layered": LAYERED}
PROMPTS = load_prompts("humaneval")[3:5]
GREEDY = SamplingParams(max_tokens=16)
SAMPLED = SamplingParams(max_tokens=16, temperature=0.8, top_p=0.95, seed=5)
TREE = EngineConfig(k=3, tree_nodes=9)
CHAIN = EngineConfig(k=4)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    root = tmp_path_factory.mktemp("heads")
    return {kind: heads.write(root / kind) for kind, heads in KINDS.items()}


@pytest.fixture(scope="module")
def plain() -> list[tuple[int, ...]]:
    return texts(LLM(config=EngineConfig(drafter="none", batch_size=1)), GREEDY)


def texts(llm: LLM, params: SamplingParams) -> list[tuple[int, ...]]:
    return [tuple(result.token_ids) for result in llm.generate(PROMPTS, params)]


# Batches of trees and of chains are covered in tests/engine/test_drafter_matrix.py. Other
# combinations are `deep`.
@pytest.mark.covering(1)
@pytest.mark.slow
@pytest.mark.weights
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_greedy_tokens_equal_plain_decoding(
    kind: str,
    config: EngineConfig,
    batch_size: int,
    folders: Mapping[str, Path],
    plain: list[tuple[int, ...]],
) -> None:
    """Random heads are almost never right, which is the harder case for memory."""
    llm = LLM(draft=folders[kind], config=replace(config, batch_size=batch_size))
    assert llm.drafter == "eagle"
    assert texts(llm, GREEDY) == plain
    assert llm.last_result.stats.num_drafted > 0
    # Without a compiler, a note says so too.
    assert [note for note in llm.notes if not note.startswith("kernels: ")] == [
        "the heads were trained on 64 tokens; later drafts may be accepted less often"
    ]


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.weights
@pytest.mark.parametrize(
    "changes",
    [
        {"fused_round": False},
        {"batched_verify": False},
        {"controller": "band", "k": 3},
    ],
    ids="-".join,
)
def test_under_other_settings_too(
    changes: Mapping[str, object], folders: Mapping[str, Path], plain: list[tuple[int, ...]]
) -> None:
    config = replace(TREE, batch_size=3, **changes)  # pyright: ignore[reportArgumentType]
    assert texts(LLM(draft=folders["3"], config=config), GREEDY) == plain


@pytest.mark.covering(1)
@pytest.mark.slow
@pytest.mark.weights
@pytest.mark.parametrize("sampler", ["match", "coupled"])
@pytest.mark.parametrize("config", [CHAIN, TREE], ids=["chain", "tree"])
def test_text_that_the_seed_determines(
    sampler: str, config: EngineConfig, folders: Mapping[str, Path]
) -> None:
    config = replace(config, sampler=sampler, batch_size=3)
    alone = LLM(config=replace(config, drafter="none"))
    assert texts(LLM(draft=folders["3"], config=config), SAMPLED) == texts(alone, SAMPLED)


@pytest.mark.weights
@pytest.mark.parametrize("draft", [None, "outrider/embedded-draft"])
def test_heads_that_name_their_target_are_one(
    draft: str | None, plain: list[tuple[int, ...]], tmp_path: Path
) -> None:
    """A draft that is named goes before them."""
    folder = LAYERED.write(tmp_path)
    (folder / "config.json").write_text(json.dumps(LAYERED.speculators("outrider/embedded")))
    llm = LLM(folder, draft=draft, config=EngineConfig(k=3, batch_size=3))
    assert llm.drafter == ("eagle" if draft is None else "model")
    assert texts(llm, GREEDY) == plain
    assert any("the target is outrider/embedded" in note for note in llm.notes)


@pytest.mark.weights
def test_a_target_that_heads_name_and_nobody_has(tmp_path: Path) -> None:
    folder = LAYERED.write(tmp_path)
    (folder / "config.json").write_text(json.dumps(LAYERED.speculators("no-such-folder")))
    with pytest.raises(CheckpointError, match="draft heads for 'no-such-folder'") as caught:
        LLM(folder)
    assert f"--draft {folder}" in (caught.value.hint or "")


@pytest.mark.slow
@pytest.mark.weights
def test_a_seeded_text_does_not_depend_on_its_batch(folders: Mapping[str, Path]) -> None:
    one, three = (LLM(draft=folders["1"], config=replace(TREE, batch_size=size)) for size in (1, 3))
    assert texts(one, SAMPLED) == texts(three, SAMPLED)


@pytest.mark.slow
@pytest.mark.weights
def test_lite_drafts_without_weights(plain: list[tuple[int, ...]]) -> None:
    llm = LLM(config=EngineConfig(drafter="eagle-lite", batch_size=3))
    assert texts(llm, GREEDY) == plain
    stats = llm.last_result.stats
    assert 0 < stats.num_drafted <= 2 * stats.num_rounds
    seeded = LLM(config=EngineConfig(drafter="eagle-lite", sampler="match", batch_size=3))
    alone = LLM(config=EngineConfig(drafter="none", sampler="match", batch_size=1))
    assert texts(seeded, SAMPLED) == texts(alone, SAMPLED)


@pytest.mark.slow
@pytest.mark.weights
def test_the_embedded_heads_draft(plain: list[tuple[int, ...]]) -> None:
    """Nothing is named: they come with the embedded target. Trees keep more than chains."""
    rates: list[float] = []
    for config in (CHAIN, replace(CHAIN, tree_nodes=15)):
        llm = LLM(config=replace(config, drafter="eagle", batch_size=3, watchdog="off"))
        results = llm.generate(PROMPTS, GREEDY)
        assert [tuple(result.token_ids) for result in results] == plain
        num_rounds = sum(result.stats.num_rounds for result in results)
        rates.append(sum(len(result.token_ids) for result in results) / num_rounds)
    assert 1.2 < rates[0] < rates[1]


@pytest.mark.weights
def test_heads_of_another_target_are_refused(tmp_path: Path) -> None:
    wrong = {
        "hidden": (replace(EAGLE3, hidden_size=128), CheckpointError, "hidden_size 128"),
        "vocabulary": (replace(EAGLE3, vocab_size=9000), VocabularyError, "know 9000 ids"),
        "layer": (replace(EAGLE3, layers=(1, 4, 9)), CheckpointError, "the target has layers 0"),
    }
    for name, (heads, kind, message) in wrong.items():
        with pytest.raises(kind, match=message) as caught:
            LLM(draft=heads.write(tmp_path / name))
        assert caught.value.hint


@pytest.mark.weights
def test_heads_with_a_nan_are_refused(tmp_path: Path) -> None:
    tensors = EAGLE3.tensors()
    tensors["lm_head.weight"][5, 5] = torch.nan
    folder = EAGLE3.write(tmp_path)
    save_tensors(folder, tensors)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight holds numbers that are none"):
        LLM(draft=folder)


def test_a_drafter_and_a_folder_that_disagree_are_refused(folders: Mapping[str, Path]) -> None:
    with pytest.raises(ConfigError, match="needs a draft model, and --draft names eagle"):
        LLM(draft=folders["3"], config=EngineConfig(drafter="model"))
    draft = resolve("outrider/embedded-draft")
    with pytest.raises(ConfigError, match="needs eagle heads, and --draft names a draft model"):
        LLM(draft=draft, config=EngineConfig(drafter="eagle"))
    with pytest.raises(ConfigError, match="needs eagle heads, and none was given"):
        LLM(resolve("outrider/embedded"), config=EngineConfig(drafter="eagle"))
    with pytest.raises(ConfigError, match="tensor_parallel=2: draft heads share"):
        LLM(draft=folders["3"], config=EngineConfig(tensor_parallel=2))


def test_pickled_heads_are_refused_with_a_way_to_convert(tmp_path: Path) -> None:
    EAGLE3.write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin, a format") as e:
        LLM(draft=tmp_path)
    assert "weights_only=True" in (e.value.hint or "")
