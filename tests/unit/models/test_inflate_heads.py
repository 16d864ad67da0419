"""Inflated heads draft for an inflated target what the small ones draft for the small one."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from doubles.eagle_heads import EagleFolder, save_tensors
from doubles.tiny_checkpoints import variant, write_checkpoint
from doubles.tiny_mtp import block_like, mtp_tensors, write_mtp
from outrider import LLM, EngineConfig, SamplingParams
from outrider.api.result import GenerationResult
from outrider.cli.main import run
from outrider.core.errors import CheckpointError, ConfigError
from outrider.core.protocols import StepRow
from outrider.models.configs import LlamaConfig
from outrider.models.decoder import LoadOptions, ModelCapacity
from outrider.models.families import read_native_config
from outrider.models.heads import HeadsToLoad, find_heads, hidden_layers_of, kind_of
from outrider.models.loading import load_model, resolve
from outrider.plugins.heads.eagle import load_eagle
from outrider.plugins.heads.hidden import HeadNet
from outrider.plugins.heads.mtp import MtpConfig, load_mtp, read_mtp_config
from outrider.plugins.heads.target import NormedTarget, normed_target
from outrider_lab.models import inflate
from outrider_lab.models.inflate import ModelShape
from outrider_lab.models.inflate_files import write_inflated, write_inflated_heads

pytestmark = pytest.mark.wide

# Widths of 4 and of 2 times the embedded target's, which are treated differently.
SMALL = {"x4": ModelShape(1024, 10, 8, 2, 768), "x2": ModelShape(512, 9, 8, 4, 1024)}
PROMPTS = ["def quicksort(items):", "Question: Tom has 3 apples and buys 4 more."]
PARAMS = SamplingParams(max_tokens=24)
# Of a random target of 64 channels and 2 layers.
TINY = {"x4": ModelShape(256, 4, 8, 4, 128), "x2": ModelShape(128, 3, 4, 4, 96)}
TEXT = (5, 12, 0, 77, 31, 5, 90, 8)


@pytest.fixture(scope="module")
def inflated(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The embedded target with its heads."""
    root = tmp_path_factory.mktemp("inflated")

    @cache
    def written(name: str) -> Path:
        source, folder = resolve("outrider/embedded"), root / name
        list(write_inflated(source, SMALL[name], folder, torch.bfloat16))
        for kind in ("eagle", "mtp"):
            heads = resolve(f"outrider/embedded-{kind}")
            write_inflated_heads(heads, source, SMALL[name], folder / kind, torch.bfloat16)
        return folder

    return written


def told(results: Sequence[GenerationResult]) -> list[object]:
    return [
        (one.token_ids, [(each.num_drafted, each.num_accepted) for each in one.rounds])
        for one in results
    ]


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.weights
@pytest.mark.parametrize(
    ("name", "kind", "nodes"),
    [("x4", "eagle", 0), ("x2", "eagle", 12), ("x4", "mtp", 0), ("x2", "mtp", 0)],
)
def test_every_round_is_the_small_model_s(
    name: str, kind: str, nodes: int, inflated: Callable[[str], Path]
) -> None:
    config = EngineConfig(
        device="cpu", k=4, batch_size=2, tree_nodes=nodes, drafter=kind, profile=True
    )
    small = LLM(config=config).generate(PROMPTS, PARAMS)
    big = LLM(inflated(name), draft=inflated(name) / kind, config=config)
    assert told(big.generate(PROMPTS, PARAMS)) == told(small)
    assert sum(one.stats.num_accepted for one in small) > 0


@pytest.mark.weights
def test_they_are_found_with_their_target(inflated: Callable[[str], Path]) -> None:
    folder = inflated("x2")
    found = find_heads(folder)
    assert {kind: found[kind] for kind in ("eagle", "mtp")} == {
        "eagle": folder / "eagle",
        "mtp": folder / "mtp",
    }
    assert hidden_layers_of(folder / "eagle", "eagle", 9) == hidden_layers_of(
        resolve("outrider/embedded-eagle"), "eagle", 8
    )


EAGLES = {
    "EAGLE 1": EagleFolder(64, 96, fused=False),
    "EAGLE 3": EagleFolder(64, 96, layers=(0, 1, 2), ids=(3, 4, 9, 17, 40, 41, 95)),
    "EAGLE 3, apart": EagleFolder(64, 96, layers=(0, 1, 2)),
}


def heads_of(name: str, folder: Path, target: LlamaConfig) -> Path:
    """Random heads; those called apart have the sizes of their layer in a part of config.json."""
    if name not in EAGLES:
        config = block_like(target, depth=2, family=name)
        return write_mtp(folder, config, mtp_tensors(config))
    EAGLES[name].write(folder)
    if name.endswith("apart"):
        layer = EAGLES[name].config()
        own = {key: layer.pop(key) for key in ("draft_vocab_size", "architectures")}
        own |= {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "transformer_layer_config": layer}
        (folder / "config.json").write_text(json.dumps(own))
    return folder


def net_in(folder: Path, target: NormedTarget) -> HeadNet:
    kind = kind_of(folder)
    assert kind in ("eagle", "mtp")
    layers = hidden_layers_of(folder, kind, target.spec.num_layers)
    capacity = ModelCapacity(num_slots=64, page_size=4, hidden_layers=layers)
    if kind == "eagle":
        return load_eagle(HeadsToLoad(folder, kind, capacity), target)
    config = read_mtp_config(folder, target.spec)
    assert isinstance(config, MtpConfig)
    return load_mtp(folder, config, target, capacity)[1]


def answers(folder: Path, target: Path, states_PKD: Tensor) -> tuple[Tensor, Tensor]:
    """(logits_PV, the first of the net's own states) of a text read by the heads in `folder`."""
    options = LoadOptions(capacity=ModelCapacity(num_slots=64), dtype="float32", device="cpu")
    net = net_in(folder, normed_target(load_model(target, options)))
    net.state.open(0, ())
    out = net.step([StepRow.chain(0, TEXT)], net.fuse(states_PKD))
    return out.logits_MV, out.hidden_ND


@pytest.mark.parametrize("width", TINY)
@pytest.mark.parametrize("name", [*EAGLES, "llama", "qwen3"])
def test_a_net_of_any_kind_computes_the_same(name: str, width: str, tmp_path: Path) -> None:
    target = write_checkpoint(tmp_path / "small", variant("tied"), seed=0)
    small, shape = read_native_config(target), TINY[width]
    assert isinstance(small, LlamaConfig)
    list(write_inflated(target, shape, tmp_path / "big", torch.float32))
    heads = heads_of(name, tmp_path / "heads", small)
    write_inflated_heads(heads, target, shape, tmp_path / "grown", torch.float32)
    num_layers = 3 if name.startswith("EAGLE 3") else 1
    states_PKD = torch.randn(8, num_layers, 64, generator=torch.Generator().manual_seed(1))
    copies = 2 if width == "x2" else 1
    wide_PKW = torch.cat(
        [*[states_PKD] * copies, torch.zeros(8, num_layers, shape.hidden_size - 64 * copies)], dim=2
    )
    logits_PV, own_PD = answers(heads, target, states_PKD)
    found_PV, found_PW = answers(tmp_path / "grown", tmp_path / "big", wide_PKW)
    torch.testing.assert_close(found_PV, logits_PV, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found_PW[:, :64], own_PD, atol=1e-5, rtol=1e-5)
    assert not found_PW[:, 64 * copies :].any()


def test_what_cannot_be_inflated_is_refused(tmp_path: Path) -> None:
    target = write_checkpoint(tmp_path / "small", variant("tied"), seed=0)

    def refused(heads: Path, kind: type[Exception], message: str) -> None:
        with pytest.raises(kind, match=message) as caught:
            write_inflated_heads(heads, target, TINY["x4"], tmp_path / "new", torch.float32)
        assert getattr(caught.value, "hint", None)
        assert not (tmp_path / "new" / "config.json").exists()

    refused(target, CheckpointError, "cannot be inflated")
    other = EagleFolder(32, 96, layers=(0, 1, 2)).write(tmp_path / "other")
    refused(other, CheckpointError, "hidden_size 32, the target 64")
    odd = EAGLES["EAGLE 1"].write(tmp_path / "odd")
    save_tensors(odd, {**EAGLES["EAGLE 1"].tensors(), "gate.weight": torch.ones(3)})
    refused(odd, CheckpointError, "tensor gate.weight")
    (tmp_path / "new").mkdir(exist_ok=True)
    (tmp_path / "new" / "notes.txt").write_text("mine")
    refused(EAGLES["EAGLE 1"].write(tmp_path / "fine"), ConfigError, "is there already")


@pytest.mark.slow
@pytest.mark.weights
def test_the_command_inflates_heads_with_their_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(inflate, "SHAPES", {"0.4b": SMALL["x2"]})
    assert run(["models", "inflate", "0.4b", str(tmp_path / "big"), "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["heads"]) == {"eagle", "mtp"}
    assert set(find_heads(tmp_path / "big")) == {"eagle", "mtp"}
