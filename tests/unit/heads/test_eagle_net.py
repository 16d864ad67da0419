"""EAGLE's layer against its definition, from folders in the published formats; and bad folders.

Shapes:  P = tokens, D = hidden size, V = vocabulary, K = captured layers.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from doubles.eagle_heads import EagleFolder, SlowEagle, TargetTables, save_tensors
from doubles.tiny_checkpoints import random_llama, random_tensors, variant
from outrider.core.errors import CheckpointError, OutriderError, VocabularyError
from outrider.core.protocols import StepRow
from outrider.core.tree import ROOT
from outrider.models.decoder import ModelCapacity
from outrider.models.heads import HeadsToLoad
from outrider.models.llama import LlamaModel
from outrider.plugins.heads.eagle import load_eagle
from outrider.plugins.heads.hidden import EntranceNet

IDS = (3, 4, 9, 17, 40, 41, 95)
LAYERS = (0, 1, 2)
EAGLE3 = EagleFolder(64, 96, layers=LAYERS)
EAGLE1 = EagleFolder(64, 96, fused=False)
FOLDERS = {
    "3": replace(EAGLE3, ids=IDS),
    "3, all ids": EAGLE3,
    "3, normed residual": replace(EAGLE3, changes={"norm_before_residual": True}),
    "3, one key head": replace(EAGLE3, num_kv_heads=1, theta=5e5),
    "3, Qwen3 layer": replace(EAGLE3, qk_norm=True),
    "3, biases": replace(EAGLE3, own_bias=True),
    "3, three layers": replace(EAGLE3, num_layers=3, qk_norm=True, ids=IDS),
    "3, each state normed": replace(EAGLE3, changes={"fc_norm": True}),
    "3, states normed": replace(EAGLE3, changes={"norm_before_fc": True}),
    "3, normed output": replace(EAGLE3, changes={"norm_output": True}),
    "3, everything": replace(
        EAGLE3,
        num_layers=2,
        qk_norm=True,
        ids=IDS,
        changes={"norm_output": True, "fc_norm": True, "norm_before_residual": True},
    ),
    "3, a layer that slides": replace(
        EAGLE3,
        num_layers=2,
        changes={"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3},
    ),
    "3, all layers slide": replace(
        EAGLE3,
        num_layers=2,
        changes={"layer_types": ["sliding_attention"] * 2, "sliding_window": 5},
    ),
    "3, layers of the target listed": replace(
        EAGLE3,
        changes={"layer_types": ["full_attention", "sliding_attention"] * 9, "sliding_window": 2},
    ),
    "1": EAGLE1,
    "1, no bias": replace(EAGLE1, bias=False, eps=1e-6),
}
TEXT = (5, 12, 0, 77, 31, 5, 90, 8)


@pytest.fixture(scope="module")
def target() -> LlamaModel:
    return random_llama()


def heads_in(folder: Path, layers: tuple[int, ...]) -> HeadsToLoad:
    return HeadsToLoad(
        folder, "eagle", ModelCapacity(num_slots=256, page_size=4, hidden_layers=layers)
    )


def loaded(folder: Path, written: EagleFolder, target: LlamaModel) -> EntranceNet:
    layers = LAYERS if written.fused else (2,)
    return load_eagle(heads_in(written.write(folder), layers), target)


def slow(written: EagleFolder) -> SlowEagle:
    config = variant("llama2").config
    tensors = random_tensors(config, seed=0)
    tables = TargetTables(
        tensors["model.embed_tokens.weight"],
        tensors["model.norm.weight"],
        tensors["lm_head.weight"],
        config["rms_norm_eps"],
    )
    return SlowEagle(written, tables)


def states(written: EagleFolder, count: int = len(TEXT)) -> Tensor:
    """hidden_PKD as a target might have left it."""
    rng = torch.Generator().manual_seed(4)
    return torch.randn(count, 3 if written.fused else 1, 64, generator=rng)


@pytest.mark.parametrize("written", FOLDERS.values(), ids=FOLDERS)
def test_the_net_is_its_definition(
    written: EagleFolder, target: LlamaModel, tmp_path: Path
) -> None:
    net, definition = loaded(tmp_path, written, target), slow(written)
    fused_PD = net.fuse(states(written))
    torch.testing.assert_close(
        fused_PD.double(), definition.fused(states(written)), atol=1e-5, rtol=1e-4
    )
    net.state.open(0, ())
    out = net.step([StepRow.chain(0, TEXT)], fused_PD)
    logits_PV, states_PD = definition.read(TEXT, fused_PD.double())
    torch.testing.assert_close(out.logits_MV.double(), logits_PV, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(out.hidden_ND.double(), states_PD, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "name", ["3, all ids", "3, three layers", "3, everything", "3, a layer that slides"]
)
def test_a_layer_may_be_described_apart(name: str, target: LlamaModel, tmp_path: Path) -> None:
    """As the speculators library writes folders: names of `layers.0`, and the layer's sizes in a
    part of config.json."""
    written = FOLDERS[name]
    tensors = {
        name.replace("midlayer", "layers.0"): tensor for name, tensor in written.tensors().items()
    }
    folder = written.write(tmp_path)
    save_tensors(folder, tensors)
    (folder / "config.json").write_text(json.dumps(written.speculators("org/model")))
    heads = heads_in(folder, LAYERS)
    assert heads.num_layers == written.num_layers
    net = load_eagle(heads, target)
    net.state.open(0, ())
    out = net.step([StepRow.chain(0, TEXT)], net.fuse(states(written)))
    definition = slow(written)
    wanted, states_PD = definition.read(TEXT, definition.fused(states(written)))
    torch.testing.assert_close(out.logits_MV.double(), wanted, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(out.hidden_ND.double(), states_PD, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", FOLDERS)
def test_one_native_call_has_the_bits_of_the_operators(
    name: str, target: LlamaModel, tmp_path: Path
) -> None:
    net = loaded(tmp_path, FOLDERS[name], target)
    if net.native is None:
        pytest.skip("no native kernels here")
    fused_PD = net.fuse(states(FOLDERS[name]))
    for seq_id in (0, 1):
        net.state.open(seq_id, ())
    whole = net.step([StepRow.chain(0, TEXT)], fused_PD)
    logits_MV = whole.logits_MV.clone()
    net.native = None
    steps = net.step([StepRow.chain(1, TEXT)], fused_PD)
    assert torch.equal(logits_MV, steps.logits_MV)
    assert torch.equal(whole.hidden_ND, steps.hidden_ND)


def test_a_tree_is_its_paths(target: LlamaModel, tmp_path: Path) -> None:
    """Nodes that hang from a committed text see it and their ancestors, whoever is beside them."""
    written = FOLDERS["3"]
    net = loaded(tmp_path, written, target)
    before_PD = net.fuse(states(written, 8))
    tokens, parents = (5, 12, 0, 77, 31), (ROOT, 0, 0, 1, 2)
    for seq_id in (0, 1):
        net.state.open(seq_id, ())
        net.step([StepRow.chain(seq_id, TEXT[:3], logits_from=3)], before_PD[:3])
        net.state.commit({seq_id: range(3)})
    tree = net.step([StepRow(0, tokens, parents)], before_PD[3:])
    # The next step writes its own into the same memory.
    logits_MV, hidden_ND = tree.logits_MV.clone(), tree.hidden_ND.clone()
    for path in ((0, 1, 3), (0, 2, 4)):
        row = StepRow.chain(1, [tokens[node] for node in path])
        alone = net.step([row], before_PD[[3 + node for node in path]])
        net.state.commit({1: ()})
        for found, wanted in ((logits_MV, alone.logits_MV), (hidden_ND, alone.hidden_ND)):
            torch.testing.assert_close(found[list(path)], wanted, atol=1e-5, rtol=1e-5)


def test_only_wanted_logits_are_made(target: LlamaModel, tmp_path: Path) -> None:
    net = loaded(tmp_path, EAGLE1, target)
    before_PD = net.fuse(states(EAGLE1))
    for seq_id in (0, 1):
        net.state.open(seq_id, ())
    rows = [StepRow.chain(0, TEXT[:3], logits_from=2), StepRow.chain(1, TEXT[3:], logits_from=5)]
    out = net.step(rows, before_PD)
    assert (out.logits_MV.shape, out.hidden_ND.shape) == ((1, 96), (8, 64))


def test_a_stored_table_of_tokens_is_used_where_it_differs(
    target: LlamaModel, tmp_path: Path
) -> None:
    own = random_tensors(variant("llama2").config, seed=0)["model.embed_tokens.weight"]
    for index, table_VD in enumerate((own, own + 1)):
        folder = EAGLE1.write(tmp_path / str(index))
        save_tensors(folder, {**EAGLE1.tensors(), "embed_tokens.weight": table_VD})
        net = load_eagle(heads_in(folder, (2,)), target)
        net.state.open(0, ())
        out = net.step([StepRow.chain(0, TEXT)], net.fuse(states(EAGLE1)))
        definition = slow(EAGLE1)
        wanted, _ = definition.read(TEXT, definition.fused(states(EAGLE1)))
        assert torch.allclose(out.logits_MV.double(), wanted, atol=2e-4) == (index == 0)


def broken(name: str, value: float = float("nan")) -> dict[str, Tensor]:
    tensors = EAGLE3.tensors()
    tensors[name].view(-1)[7] = value
    return tensors


BAD_FILES = {
    "a weight is NaN": (broken("midlayer.mlp.up_proj.weight"), "mlp.up_proj.weight holds numbers"),
    "a weight is infinite": (broken("norm.weight", float("inf")), "norm.weight holds numbers"),
    "a tensor is missing": (
        {k: v for k, v in EAGLE3.tensors().items() if k != "fc.weight"},
        "fc.weight.* is missing",
    ),
    "a tensor too many": ({**EAGLE3.tensors(), "other": torch.ones(1)}, "other is not part"),
    "another number of layers": (replace(EAGLE3, layers=(0, 1)).tensors(), "fc.weight has shape"),
}


@pytest.mark.parametrize(("tensors", "message"), BAD_FILES.values(), ids=BAD_FILES)
def test_bad_tensors_are_named(
    tensors: dict[str, Tensor], message: str, target: LlamaModel, tmp_path: Path
) -> None:
    folder = EAGLE3.write(tmp_path)
    save_tensors(folder, tensors)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_eagle(heads_in(folder, LAYERS), target)
    assert caught.value.hint


BAD_CONFIGS: dict[str, tuple[EagleFolder, type[OutriderError], str]] = {
    "hidden size": (replace(EAGLE3, hidden_size=32), CheckpointError, "hidden_size 32, the target"),
    "vocabulary": (replace(EAGLE3, vocab_size=95), VocabularyError, "know 95 ids and the target"),
    "layers": (
        replace(EAGLE3, changes={"num_hidden_layers": 17}),
        CheckpointError,
        "EAGLE heads have at most 16 layers",
    ),
    "layers of EAGLE 1": (
        replace(EAGLE1, changes={"num_hidden_layers": 2}),
        CheckpointError,
        "EAGLE heads have one layer",
    ),
    "a layer that is not there": (
        replace(EAGLE3, changes={"num_hidden_layers": 2}),
        CheckpointError,
        r"layers\.1\..* is missing",
    ),
    "a norm that is not there": (
        replace(EAGLE3, changes={"fc_norm": True}, without=("fc_norm.1.weight",)),
        CheckpointError,
        r"fc_norm\.1\.weight.* is missing",
    ),
    "too many drafted ids": (
        replace(EAGLE3, changes={"draft_vocab_size": 97}),
        VocabularyError,
        "draft_vocab_size 97",
    ),
    "ids outside": (replace(EAGLE3, ids=(1, 2, 96)), VocabularyError, "outside the target"),
    "ids twice": (replace(EAGLE3, ids=(1, 2, 2)), VocabularyError, "twice"),
    "no map": (replace(EAGLE3, ids=IDS, without=("d2t",)), CheckpointError, "d2t.* is missing"),
}


@pytest.mark.parametrize(("written", "kind", "message"), BAD_CONFIGS.values(), ids=BAD_CONFIGS)
def test_heads_of_another_target_are_refused(
    written: EagleFolder,
    kind: type[OutriderError],
    message: str,
    target: LlamaModel,
    tmp_path: Path,
) -> None:
    if message == "outside the target":
        folder = replace(written, ids=(1, 2, 95)).write(tmp_path)
        tensors = {**replace(written, ids=(1, 2, 95)).tensors(), "d2t": torch.tensor([1, 1, 94])}
        save_tensors(folder, tensors)
    else:
        folder = written.write(tmp_path)
    with pytest.raises(kind, match=message) as caught:
        load_eagle(heads_in(folder, LAYERS), target)
    assert caught.value.hint
