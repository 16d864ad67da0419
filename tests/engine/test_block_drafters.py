"""Block drafters, P-EAGLE and DSpark end to end: the text is the target's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from doubles.published_drafters import drawn
from doubles.tiny_checkpoints import save_tensors
from outrider import LLM, EngineConfig, SamplingParams
from outrider_lab.bench.workload import load_prompts

# For the embedded target.
HIDDEN, VOCAB, HEADS, KV_HEADS, HEAD, FFN = 256, 8192, 4, 2, 64, 128
CONFIG: dict[str, object] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "block_size": 5,
    "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 1, 2]},
}
LAYER: dict[str, tuple[int, ...]] = {
    "input_layernorm.weight": (HIDDEN,),
    "post_attention_layernorm.weight": (HIDDEN,),
    "self_attn.q_proj.weight": (HEADS * HEAD, HIDDEN),
    "self_attn.k_proj.weight": (KV_HEADS * HEAD, HIDDEN),
    "self_attn.v_proj.weight": (KV_HEADS * HEAD, HIDDEN),
    "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
    "mlp.gate_proj.weight": (FFN, HIDDEN),
    "mlp.up_proj.weight": (FFN, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, FFN),
}
OUTER: dict[str, tuple[int, ...]] = {
    "fc.weight": (HIDDEN, 3 * HIDDEN),
    "hidden_norm.weight": (HIDDEN,),
    "norm.weight": (HIDDEN,),
}
MARKOV = {"markov_head.markov_w1.weight": (VOCAB, 8), "markov_head.markov_w2.weight": (VOCAB, 8)}
PROMPTS = load_prompts("humaneval")[3:5]
GREEDY = SamplingParams(max_tokens=16)
SAMPLED = SamplingParams(max_tokens=16, temperature=0.8, top_p=0.95, seed=5, sampler="coupled")
CHAIN, TREE = EngineConfig(k=4), EngineConfig(k=3, tree_nodes=9)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    root = tmp_path_factory.mktemp("drafters")
    shapes = {**OUTER, **{f"layers.0.{name}": shape for name, shape in LAYER.items()}}
    return {
        "dflash": written(root / "dflash", CONFIG, shapes),
        "dspark": written(root / "dspark", {**CONFIG, "markov_rank": 8}, {**shapes, **MARKOV}),
    }


def written(
    folder: Path, config: Mapping[str, object], shapes: Mapping[str, tuple[int, ...]]
) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_tensors(folder / "model.safetensors", drawn(shapes, None))
    return folder


def texts(llm: LLM, params: SamplingParams) -> list[tuple[int, ...]]:
    return [tuple(result.token_ids) for result in llm.generate(PROMPTS, params)]


# Other combinations are `deep`.
@pytest.mark.covering(1)
@pytest.mark.slow
@pytest.mark.weights
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
@pytest.mark.parametrize("config", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_texts_equal_plain_decoding(
    kind: str, config: EngineConfig, batch_size: int, folders: Mapping[str, Path]
) -> None:
    plain = LLM(config=EngineConfig(drafter="none", batch_size=1))
    llm = LLM(draft=folders[kind], config=replace(config, batch_size=batch_size))
    assert llm.drafter == kind
    for params in (GREEDY, SAMPLED):
        assert texts(llm, params) == texts(plain, params)
    assert llm.last_result.stats.num_drafted > 0
