"""GGUF files on the command line: they are listed, and wrong ones are told without a traceback."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from doubles.command_line import Command
from doubles.gguf_writer import small_llama
from outrider.cli.models import read_spec


@pytest.mark.weights
def test_models_list_shows_them_with_the_name_that_target_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outrider: Command
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "none"))
    folder = tmp_path / ".lmstudio" / "models" / "org" / "tiny"
    folder.mkdir(parents=True)
    whole, cut = folder / "tiny.gguf", folder / "cut.gguf"
    small_llama().write(whole)
    cut.write_bytes(small_llama().to_bytes()[:5000])
    found = {model["name"]: model for model in json.loads(outrider("list", "--json").out)}
    model = found[str(whole)]
    assert (model["refusal"], model["family"]) == (None, "llama")
    assert (model["where"], model["num_bytes"]) == (
        "tiny/tiny.gguf of LM Studio",
        whole.stat().st_size,
    )
    assert "cut off" in found[str(cut)]["refusal"]
    assert "ready; tiny/tiny.gguf of LM Studio" in outrider("list").out
    assert "llama" in outrider("models", "inspect", str(whole)).out


def test_a_local_file_needs_no_client_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outrider: Command
) -> None:
    small_llama().write(tmp_path / "a.gguf")
    # An import of the module fails.
    monkeypatch.setitem(sys.modules, "outrider.cli.models", None)
    shown = outrider("generate", "ab", "--target", str(tmp_path / "a.gguf"), "--max-tokens", "2")
    assert shown.code == 0, shown.err


def test_the_command_line_tells_what_is_wrong(tmp_path: Path, outrider: Command) -> None:
    (tmp_path / "cut.gguf").write_bytes(small_llama().to_bytes()[:3000])
    for name in ("cut.gguf", "none.gguf"):
        shown = outrider("generate", "ab", "--target", str(tmp_path / name))
        assert (shown.code, shown.out) == (3, "")
        assert name in shown.err
        assert "Traceback" not in shown.err


def test_a_plan_for_a_device_elsewhere_reckons_with_floats(
    tmp_path: Path, outrider: Command
) -> None:
    """Blocks of a file stay as they are on CPUs alone."""
    file = tmp_path / "tiny.gguf"
    small_llama().write(file)
    words = ("--drafters", "ngram", "--alpha", "0.8", "--batch", "1", "--json")

    def weights_on(device: str) -> int:
        shown = outrider("plan", str(file), "--device", device, *words)
        assert shown.code == 0, shown.err
        return json.loads(shown.out)["calibration"]["memory_bytes"]

    spec = read_spec(str(file))
    assert 0 < weights_on("cpu-2core") == spec.stored_bytes
    assert weights_on("h100") == spec.num_parameters * spec.bytes_per_weight > spec.stored_bytes
