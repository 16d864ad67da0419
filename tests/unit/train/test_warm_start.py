"""Blocks that begin as their target's last layer, on a target whose layers are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from doubles.kinds import stored
from outrider.core.clock import host_ints
from outrider.models.configs import LlamaConfig
from outrider_lab.train.llama_module import read_llama_config
from outrider_lab.train.mtp import Mtp, MtpLayer, MtpRecipe, begin_as_last_layer, fits_last_layer
from outrider_lab.train.shapes import plain_layers
from outrider_lab.train.target import Exam, FrozenTarget
from outrider_lab.train.tokens import Windows, covering_ids, frequent_ids

CPU = torch.device("cpu")
FAMILIES = ["llama2", "qwen3"]


def frozen(family: str = "llama2") -> FrozenTarget:
    return FrozenTarget(stored(family, 0), device=CPU, max_tokens=64)


def windows() -> Windows:
    ids = np.random.default_rng(3).integers(0, 96, size=64 * 32).astype(np.uint16)
    return Windows(ids, "random", batch_size=4, window=32, seed=0)


def recipe(*, depth: int = 1, text: Windows | None = None) -> MtpRecipe:
    target = frozen()
    return MtpRecipe(
        target=target,
        block=plain_layers(target.config, depth),
        exam=Exam((), CPU),
        window=32,
        num_turns=depth,
        dtype=torch.float32,
        text=text,
    )


def layers_of(net: Mtp) -> list[MtpLayer]:
    return [cast("MtpLayer", layer) for layer in net.model.layers]


def begun(own: MtpRecipe) -> Mtp:
    return own.build(torch.Generator().manual_seed(0))


def read_and_wanted(own: MtpRecipe, layer: MtpLayer, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
    """What the join reads, and what the target's last layer reads at the same tokens."""
    reading = own.target.read(ids_BT, (own.target.config.num_layers - 1,))
    embedded_BTD = functional.embedding(ids_BT, own.target.embedding)
    read_BTE = layer.pair(embedded_BTD[:, 1:], reading.last_BTD[:, :-1]).detach()
    return read_BTE.flatten(0, 1), reading.hidden_BTKD[:, 1:, 0].flatten(0, 1)


def test_all_blocks_have_the_weights_of_the_last_layer() -> None:
    own = recipe(depth=2, text=windows())
    last = dict(own.target.net.model.layers[-1].named_parameters())
    for layer in layers_of(begun(own)):
        mine = dict(layer.named_parameters())
        assert all(torch.equal(mine[name], one) for name, one in last.items())
        assert torch.equal(layer.shared_head.norm.weight, own.target.norm)


def test_the_join_is_the_closest_linear_guess() -> None:
    """No other matrix is closer on the text that was read: nor a slightly changed one."""
    own = recipe(text=windows())
    layer = layers_of(begun(own))[0]
    parts = [read_and_wanted(own, layer, windows().batch(step, CPU).ids_BT) for step in range(32)]
    read_PE, wanted_PD = (torch.cat(side).double() for side in zip(*parts, strict=True))
    found_ED = layer.eh_proj.weight.detach().double().T
    linalg = cast("Any", torch.linalg)
    best_ED = cast("Tensor", linalg.lstsq(read_PE, wanted_PD).solution)

    def error(weight_ED: Tensor) -> float:
        return float((read_PE @ weight_ED - wanted_PD).square().mean())

    assert error(found_ED) == pytest.approx(error(best_ED), rel=0.02)
    assert error(found_ED) < 0.9 * float(wanted_PD.square().mean())
    assert error(found_ED * 1.1) > error(found_ED)


def test_a_warm_start_is_nearer_to_the_target_than_noise() -> None:
    batch = windows().batch(40, CPU)
    warm, cold = recipe(text=windows()), recipe()
    with torch.no_grad():
        assert float(warm.loss(begun(warm), batch)) < 0.8 * float(cold.loss(begun(cold), batch))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_target_with_other_weights_in_its_layers_is_not_copied(family: str) -> None:
    """Norms of heads have no place in a block."""
    target = frozen(family)
    layer = MtpLayer(plain_layers(target.config, 1))
    assert fits_last_layer(layer, target) == (not read_llama_config(target.folder).qk_norm)


def test_without_text_a_block_begins_as_noise() -> None:
    own = recipe()
    last = dict(own.target.net.model.layers[-1].named_parameters())
    mine = dict(layers_of(begun(own))[0].named_parameters())
    assert not torch.equal(mine["mlp.up_proj.weight"], last["mlp.up_proj.weight"])


def test_the_fit_is_a_function_of_text_and_seed(tmp_path: Path) -> None:
    """A run that goes on has the start that it had."""
    del tmp_path
    first, second = (begun(recipe(text=windows())).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_distributions_over_most_ids_are_close_to_distributions_over_all() -> None:
    own = recipe(text=windows())
    net, batch = begun(own), windows().batch(50, CPU)
    everything = replace(own, ids_W=torch.arange(96))
    with torch.no_grad():
        assert float(everything.loss(net, batch)) == pytest.approx(float(own.loss(net, batch)))
        some = float(replace(own, ids_W=torch.arange(0, 96, 2)).loss(net, batch))
    assert some != pytest.approx(float(own.loss(net, batch).detach()))


def small(stop: int) -> LlamaConfig:
    return replace(read_llama_config(frozen().folder), vocab_size=8, stop_ids=(stop,))


def test_the_fewest_ids_that_cover_a_text() -> None:
    tokens = np.array([1] * 50 + [2] * 30 + [3] * 15 + [4] * 5)
    assert host_ints(covering_ids(tokens, small(stop=1), 0.5)) == [1]
    assert host_ints(covering_ids(tokens, small(stop=1), 0.8)) == [1, 2]
    assert host_ints(covering_ids(tokens, small(stop=1), 0.95)) == [1, 2, 3]
    assert 7 in host_ints(covering_ids(tokens, small(stop=7), 0.5))


def test_frequent_ids_are_as_many_as_asked() -> None:
    tokens = np.array([5, 5, 5, 2, 2, 6])
    assert host_ints(frequent_ids(tokens, small(stop=0), 3)) == [0, 2, 5]


def test_a_layer_takes_its_weights_in_place() -> None:
    """What an optimiser already holds are the weights that change."""
    own = recipe()
    layer = layers_of(begun(own))[0]
    before = {name: id(one) for name, one in layer.named_parameters()}
    begin_as_last_layer(layer, own.target, [windows().batch(0, CPU).ids_BT])
    assert before == {name: id(one) for name, one in layer.named_parameters()}
