"""An inflated model computes what the small one computes, over dense weights of a bigger shape."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from doubles.tiny_checkpoints import variant, write_checkpoint
from outrider import LLM, EngineConfig, SamplingParams
from outrider.core.errors import CheckpointError, ConfigError, MachineError
from outrider.core.protocols import DraftNeeds, StepRow
from outrider.kernels.registry import is_native
from outrider.models.configs import LlamaConfig
from outrider.models.decoder import LoadOptions, ModelCapacity
from outrider.models.families import read_native_config
from outrider.models.loading import load_model, resolve
from outrider.models.weights import Weights
from outrider_lab.models import inflate_files
from outrider_lab.models.inflate import SHAPES, Inflation, ModelShape, inflated_config, shape_called
from outrider_lab.models.inflate_files import write_inflated

# Widths of 4 and of 2 times the embedded target's, which are treated differently.
SMALL = {"x4": ModelShape(1024, 9, 8, 2, 768), "x2": ModelShape(512, 10, 8, 4, 1024)}
PROMPTS = ["def quicksort(items):", "Question: Tom has 3 apples and buys 4 more."]

pytestmark = pytest.mark.weights


@pytest.fixture(scope="module")
def inflated(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("inflated")

    @cache
    def written(name: str) -> Path:
        source = resolve("outrider/embedded")
        *_, last = write_inflated(source, SMALL[name], root / name, torch.bfloat16)
        assert last.num_files == last.num_files_in_all == SMALL[name].num_layers + 1
        assert last.num_bytes == 2 * last.num_parameters
        assert 0 < last.num_zeros < 0.5 * last.num_parameters
        return root / name

    return written


def logits(folder: Path, dtype: str = "auto") -> Tensor:
    model = load_model(
        folder, LoadOptions(capacity=ModelCapacity(num_slots=128), device="cpu", dtype=dtype)
    )
    model.state.open(0, ())
    ids = [(11 * i * i + 5) % 8192 for i in range(50)]
    return model.step([StepRow.chain(0, ids)], DraftNeeds()).logits_MV


def test_a_width_of_a_power_of_four_keeps_every_bit(inflated: Callable[[str], Path]) -> None:
    if not is_native(torch.device("cpu"), torch.bfloat16):
        pytest.skip("sums of a library's products have an order of their own for each width")
    small, big = logits(resolve("outrider/embedded")), logits(inflated("x4"))
    assert torch.equal(big, small)


@pytest.mark.parametrize("name", SMALL)
def test_a_width_differs_by_rounding_at_most(name: str, inflated: Callable[[str], Path]) -> None:
    small = logits(resolve("outrider/embedded"), "float32")
    big = logits(inflated(name), "float32")
    assert (big - small).abs().max() < 1e-3 * small.std()


# Sizes change shapes only. Other combinations are `deep`.
@pytest.mark.covering(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_its_text_and_acceptance_are_the_small_model_s(
    name: str, temperature: float, inflated: Callable[[str], Path]
) -> None:
    config = EngineConfig(device="cpu", k=4, sampler="coupled")
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=2)
    draft = "outrider/embedded-draft"
    small = LLM(draft=draft, config=config).generate(PROMPTS, params)
    big = LLM(inflated(name), draft=draft, config=config).generate(PROMPTS, params)
    assert [r.token_ids for r in big] == [r.token_ids for r in small]
    assert [r.stats.num_accepted for r in big] == [r.stats.num_accepted for r in small]
    assert sum(r.stats.num_accepted for r in big) > 0


def test_no_weight_is_skipped_or_shared(inflated: Callable[[str], Path]) -> None:
    """Random where nothing depends on it: a kernel cannot skip what it must read."""
    config = read_native_config(inflated("x4"))
    with Weights.at(inflated("x4")) as weights:
        last = weights.take("model.layers.8.mlp.gate_proj.weight", 768, 1024)
        assert (last == 0).float().mean() < 0.01
        assert last.float().std() == pytest.approx(0.02, rel=0.05)
    assert config.num_parameters == sum(
        tensor.numel() for shard in _shards(SMALL["x4"]) for tensor in shard.values()
    )


def _shards(shape: ModelShape) -> list[dict[str, Tensor]]:
    source = resolve("outrider/embedded")
    small = read_native_config(source)
    assert isinstance(small, LlamaConfig)
    with Weights.at(source) as weights:
        return list(Inflation(small, weights, shape, torch.bfloat16).shards())


def test_it_is_the_same_whenever_it_is_made() -> None:
    for one, other in zip(_shards(SMALL["x2"]), _shards(SMALL["x2"]), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "shape",
    [
        ModelShape(1024, 4, 8, 2, 768),
        ModelShape(1000, 9, 8, 2, 768),
        ModelShape(768, 9, 8, 2, 768),
        ModelShape(1024, 9, 8, 8, 768),
        ModelShape(1024, 9, 8, 2, 512),
    ],
)
def test_a_shape_that_cannot_hold_it_is_refused(shape: ModelShape, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        next(write_inflated(resolve("outrider/embedded"), shape, tmp_path, torch.bfloat16))


def test_what_cannot_be_inflated_is_refused(tmp_path: Path) -> None:
    for name in ("gpt2", "qwen2"):
        source = write_checkpoint(tmp_path / name, variant(name))
        with pytest.raises(CheckpointError, match="cannot be inflated"):
            next(write_inflated(source, SMALL["x2"], tmp_path / "out", torch.bfloat16))
    with pytest.raises(ConfigError, match="no shape '1bb'") as caught:
        shape_called("1bb")
    assert "'1b'" in str(caught.value.hint)


def test_places_that_are_taken_or_too_small_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = resolve("outrider/embedded")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is there already"):
        next(write_inflated(source, SMALL["x2"], tmp_path / "full", torch.bfloat16))

    def nearly_full(_: Path) -> SimpleNamespace:
        return SimpleNamespace(free=1_000_000)

    monkeypatch.setattr("shutil.disk_usage", nearly_full)
    with pytest.raises(MachineError, match="free"):
        next(write_inflated(source, SHAPES["8b"], tmp_path / "new", torch.bfloat16))
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
    assert (tmp_path / "full" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("error", [OSError(28, "No space left"), SafetensorError("No space left")])
def test_a_failure_leaves_the_place_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, there: bool
) -> None:
    folder = tmp_path / "deep" / "new"
    if there:
        folder.mkdir(parents=True)

    def full(tensors: dict[str, torch.Tensor], path: Path, about: dict[str, str]) -> None:
        save_file(tensors, path, about)
        if path.name.startswith("model-00002"):
            raise error

    monkeypatch.setattr(inflate_files, "save_file", full)
    steps = write_inflated(resolve("outrider/embedded"), SMALL["x2"], folder, torch.bfloat16)
    next(steps)
    (folder / "a stranger's").touch()
    with pytest.raises(MachineError, match="No space left") as caught:
        list(steps)
    assert caught.value.hint is not None
    assert [path.name for path in folder.iterdir()] == ["a stranger's"]
    (folder / "a stranger's").unlink()
    assert folder.exists()


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "new"
    steps = write_inflated(resolve("outrider/embedded"), SMALL["x2"], folder, torch.bfloat16)
    next(steps)
    with pytest.raises(KeyboardInterrupt):
        steps.throw(KeyboardInterrupt())
    assert not list(tmp_path.iterdir())


def test_half_a_folder_is_no_model(tmp_path: Path) -> None:
    steps = write_inflated(resolve("outrider/embedded"), SMALL["x2"], tmp_path, torch.bfloat16)
    next(steps)
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        read_native_config(tmp_path)


def test_sizes_are_those_of_the_names() -> None:
    config = read_native_config(resolve("outrider/embedded"))
    assert isinstance(config, LlamaConfig)
    sizes = {name: inflated_config(config, shape).num_parameters for name, shape in SHAPES.items()}
    assert {name: round(size / 1e9, 2) for name, size in sizes.items()} == {
        "0.4b": 0.39,
        "1b": 1.01,
        "8b": 7.05,
        "70b-layer": 6.98,
    }
