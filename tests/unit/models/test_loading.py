from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import cast

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import HFValidationError

from doubles.tiny_checkpoints import variant, write_checkpoint
from outrider.core.errors import CheckpointError, ConfigError, MachineError
from outrider.core.plugins import install_command
from outrider.kernels.operators import pick_device
from outrider.models.decoder import Decoder, LoadOptions, ModelCapacity
from outrider.models.families import read_config
from outrider.models.llama import GPT2Model, LlamaModel
from outrider.models.loading import ALIASES, load_model, resolve
from outrider.plugins.hybrids.model import HybridModel

CAPACITY = ModelCapacity(num_slots=64)


def load(folder: Path, *, dtype: str = "auto") -> Decoder:
    return load_model(folder, LoadOptions(capacity=CAPACITY, dtype=dtype, device="cpu"))


def kv_dtype(model: Decoder) -> torch.dtype:
    if isinstance(model, HybridModel):
        return model.state.kv.layers[0][0].dtype
    assert isinstance(model, LlamaModel | GPT2Model)
    return model.state.layers[0][0].dtype


@pytest.mark.weights
@pytest.mark.parametrize("name", ALIASES)
def test_an_alias_is_a_folder_of_the_package(name: str) -> None:
    model = load_model(resolve(name), LoadOptions(capacity=CAPACITY, device="cpu"), name=name)
    assert model.spec.name == name
    assert model.spec.vocab_size == 8192
    assert kv_dtype(model) is torch.bfloat16


def test_a_local_folder_is_itself(tmp_path: Path) -> None:
    assert resolve(str(tmp_path)) == tmp_path


def test_a_file_is_refused_with_its_folder(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(CheckpointError, match="is a file") as caught:
        resolve(str(file))
    assert caught.value.hint == f"name its folder, {tmp_path}"


@pytest.mark.parametrize(
    "name", ["", "nowhere", "./a/b", "a/b/c", "../x", "a b/c", "a/..", "https://x.y/z", "a\0b/c"]
)
def test_a_name_that_can_mean_nothing_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(CheckpointError, match="no model") as caught:
        resolve(name)
    assert caught.value.hint is not None
    assert "outrider/embedded" in caught.value.hint


def test_a_gguf_file_that_is_not_there_is_called_a_file(tmp_path: Path) -> None:
    for name in ("nowhere.gguf", "org/model.gguf"):
        with pytest.raises(CheckpointError, match=f"there is no file {name}") as caught:
            resolve(name)
        assert "outrider run ORG/NAME-GGUF" in str(caught.value.hint)
    (tmp_path / "model-Q4_K_M.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match="there is no file") as caught:
        resolve(str(tmp_path / "model-Q4_K_S.gguf"))
    assert "model-Q4_K_M.gguf" in str(caught.value.hint)


@pytest.mark.parametrize("name", ["gpt2", "distilgpt2"])
def test_models_of_before_organisations_are_known_by_their_new_names(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"no model '{name}'") as caught:
        resolve(name)
    assert f"/{name}` fetches" in str(caught.value.hint)


def test_an_adapter_is_called_one(tmp_path: Path) -> None:
    values = {"base_model_name_or_path": "org/base", "peft_type": "LORA"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"adapter \(LoRA\) of org/base") as caught:
        read_config(tmp_path)
    assert "merge_and_unload" in str(caught.value.hint)


@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert"])
def test_an_encoder_is_called_one(family: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(CheckpointError, match=f"{family} is an encoder") as caught:
        read_config(tmp_path)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("name", ["x" * 5000, "~no-such-user/x"])
def test_a_name_that_no_system_takes_is_refused(name: str) -> None:
    with pytest.raises(CheckpointError):
        resolve(name)


@pytest.mark.parametrize(
    "error", [OSError("no route"), HFValidationError("bad id"), ConnectionError(), TimeoutError()]
)
def test_a_hub_that_fails_is_reported(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match="neither in the local cache nor available") as caught:
        resolve("org/name")
    assert str(caught.value.hint).startswith("`outrider models pull org/name`")


@pytest.mark.parametrize(
    ("name", "revision"),
    [("org/name", "main"), ("org/name@v1.0", "v1.0"), ("o/n@refs/pr/1", "refs/pr/1")],
)
def test_the_hub_is_asked_for_data_files_only(
    name: str, revision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors").touch()
    asked: dict[str, object] = {}

    def download(repo: str, **options: object) -> str:
        asked.update(options, repo=repo)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve(name) == tmp_path
    assert asked["repo"] == name.partition("@")[0]
    assert asked["revision"] == revision
    patterns = cast("list[str]", asked["allow_patterns"])
    assert "*.safetensors" in patterns
    assert not {"*", "*.py", "*.bin", "*.pt"} & set(patterns)


def test_a_folder_wins_over_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name") == Path("org/name")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_auto_takes_the_dtype_of_the_config(dtype: str, tmp_path: Path) -> None:
    item = variant("llama2")
    item = type(item)(item.name, {"torch_dtype": dtype})
    assert kv_dtype(load(write_checkpoint(tmp_path, item))) is getattr(torch, dtype)


def test_auto_takes_the_stored_dtype_if_the_config_has_none(tmp_path: Path) -> None:
    item = type(variant("llama2"))("silent", {"torch_dtype": None})
    folder = write_checkpoint(tmp_path, item, dtype=torch.bfloat16)
    assert kv_dtype(load(folder)) is torch.bfloat16
    assert kv_dtype(load(folder, dtype="float32")) is torch.float32


def test_auto_finds_the_stored_dtype_of_gpt2_too(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, variant("gpt2"), dtype=torch.bfloat16)
    assert kv_dtype(load(folder)) is torch.bfloat16


@pytest.mark.parametrize(
    ("name", "kind"), [("qwen2", LlamaModel), ("qwen3", LlamaModel), ("gpt2", GPT2Model)]
)
def test_the_family_decides_which_decoder_it_is(
    name: str, kind: type[Decoder], tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path, variant(name))
    model = load(folder)
    assert type(model) is kind
    assert model.config.family == name


def test_without_transformers_another_family_is_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt_bigcode"}')
    monkeypatch.setitem(sys.modules, "transformers", None)
    for read in (load, read_config):
        with pytest.raises(CheckpointError, match="'gpt_bigcode' has no decoder") as caught:
            read(tmp_path)
        assert caught.value.hint == install_command("hf")


def test_a_dtype_that_no_kernel_takes_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, type(variant("llama2"))("f64", {"torch_dtype": "float64"}))
    with pytest.raises(CheckpointError, match="type float64"):
        load(folder)
    with pytest.raises(ConfigError, match="dtype: unknown value 'int4'"):
        load(folder, dtype="int4")
    assert kv_dtype(load(folder, dtype="float32")) is torch.float32


def test_invalid_json_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, variant("llama2"))
    (folder / "config.json").write_text(json.dumps(variant("llama2").config)[:-1])
    with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON"):
        load(folder)


def test_auto_is_the_best_device_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"cuda": False, "mps": False}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: here["cuda"])
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: here["mps"])
    assert pick_device("auto").type == "cpu"
    here["mps"] = True
    assert pick_device("auto").type == "mps"
    here["cuda"] = True
    assert pick_device("auto").type == "cuda"
    assert pick_device("cpu").type == "cpu"


def test_a_second_gpu_has_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("cuda:1") == torch.device("cuda", 1)
    assert pick_device("auto") == torch.device("cuda")
    with pytest.raises(MachineError, match="the device cuda:2 was requested") as caught:
        pick_device("cuda:2")
    assert "cuda:1" in str(caught.value.hint)


def test_a_device_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MachineError, match="the device cuda was requested") as caught:
        pick_device("cuda")
    assert caught.value.hint is not None
    assert "cpu" in caught.value.hint
    with pytest.raises(ConfigError, match="unknown value 'tpu'"):
        pick_device("tpu")
