from __future__ import annotations

import json
import sys
from pathlib import Path
from threading import Event
from time import monotonic
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HFValidationError
from huggingface_hub.hf_api import ModelInfo

from doubles.tiny_checkpoints import variant, write_checkpoint
from outrider.cli.models import small_files
from outrider.core.errors import CheckpointError, ConfigError, MachineError
from outrider.core.plugins import install_command
from outrider.kernels.operators import pick_device
from outrider.models import hub
from outrider.models.decoder import Decoder, LoadOptions, ModelCapacity
from outrider.models.families import read_config
from outrider.models.llama import GPT2Model, LlamaModel
from outrider.models.loading import load_model, resolve
from outrider.models.names import ALIASES
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

    monkeypatch.setattr(HfApi, "model_info", fail)
    monkeypatch.setattr(hub, "_unreached", {})
    with pytest.raises(CheckpointError, match="it is not in the local cache: ") as caught:
        resolve("org/name")
    assert str(caught.value.hint).startswith("`outrider models pull org/name`")


def test_a_hub_that_never_answers_is_waited_for_once_and_not_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where a name server is out of reach, whose client knows no timeout."""
    ended, calls = Event(), list[object]()

    def never(*names: object, **options: object) -> None:
        calls.append((names, options))
        ended.wait(60)

    monkeypatch.setattr(HfApi, "model_info", never)
    monkeypatch.setattr(hub, "_unreached", {})
    monkeypatch.setattr(hub, "_SILENCE", 0.05)
    monkeypatch.setattr(hub, "PATIENCE", 0.1)
    began = monotonic()
    try:
        for name in ("org/name", "org/other"):
            with pytest.raises(CheckpointError, match="cannot be reached"):
                resolve(name)
    finally:
        ended.set()
    assert monotonic() - began < 30
    assert len(calls) == 1
    assert [record.getMessage() for record in caplog.records] == [
        f"{constants.ENDPOINT} is asked about org/name, for 0 s at most."
    ]


@pytest.mark.parametrize(
    ("name", "revision"),
    [("org/name", "main"), ("org/name@v1.0", "v1.0"), ("o/n@refs/pr/1", "refs/pr/1")],
)
def test_the_hub_is_asked_for_a_revision_and_for_data_files_only(
    name: str, revision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        *("config.json", "model.safetensors", "tokenizer.model"),
        *("modeling.py", "pytorch_model.bin", "onnx/model.onnx"),
    }
    asked: list[str] = []

    def info(_: object, repo: str, **options: Any) -> ModelInfo:
        asked.extend((repo, options["revision"]))
        found = [{"rfilename": file, "blobId": "0", "size": 1} for file in files]
        return ModelInfo(id=repo, sha="0" * 40, siblings=found, gated=False)

    def fetched(model: hub.HubModel) -> Path:
        asked.extend(sorted(file.name for file in model.files))
        return Path("there")

    monkeypatch.setattr(HfApi, "model_info", info)
    monkeypatch.setattr(hub, "fetch_shown", fetched)
    assert resolve(name) == Path("there")
    wanted = ["config.json", "model.safetensors", "tokenizer.model"]
    assert asked == [name.partition("@")[0], revision, *wanted]


def test_a_model_in_the_cache_is_loaded_without_asking_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("the hub is asked")

    folder = tmp_path / "models--org--name" / "snapshots" / ("1" * 40)
    folder.mkdir(parents=True)
    for file in ("config.json", "model.safetensors"):
        (folder / file).write_text("{}")
    refs = tmp_path / "models--org--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text("1" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(HfApi, "model_info", fail)
    assert resolve("org/name") == small_files("org/name", "tokenizer.json") == folder


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
