"""Verbs that inform: what they print, and that programs can read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from doubles.command_line import Command
from doubles.gguf_writer import wide_llama
from outrider.core.settings import SETTINGS
from outrider.models import names


def read(outrider: Command, *words: str) -> Any:
    shown = outrider(*words, "--json")
    assert shown.code == 0, shown.err
    return json.loads(shown.out)


def test_config_shows_every_setting_with_its_origin(
    outrider: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OUTRIDER_SEED", "7")
    (tmp_path / "outrider.toml").write_text("top_p = 0.5\n")
    found = read(outrider, "config", "--k", "3", "--no-batched-verify")
    assert set(found) == set(SETTINGS)
    assert found["k"] == {"value": 3, "origin": "--k"}
    assert found["batched_verify"] == {"value": False, "origin": "--batched-verify"}
    assert found["seed"] == {"value": 7, "origin": "OUTRIDER_SEED"}
    assert found["top_p"] == {"value": 0.5, "origin": "outrider.toml:top_p"}
    assert found["top_k"] == {"value": 0, "origin": "default"}
    shown = outrider("config").out
    assert all(f"OUTRIDER_{name.upper()}" in shown for name in SETTINGS)
    assert "XDG_CACHE_HOME" in shown


@pytest.mark.weights
def test_models_list_has_the_embedded_pair_without_a_cache(
    outrider: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "none"))
    found = read(outrider, "models", "list")
    assert [model["name"] for model in found[:2]] == [
        "outrider/embedded",
        "outrider/embedded-draft",
    ]
    assert all(model["refusal"] is None for model in found[:2])
    assert "ready" in outrider("models", "list").out


def test_models_inspect_reads_sizes_and_no_weights(outrider: Command) -> None:
    found = read(outrider, "models", "inspect", "outrider/embedded")
    assert found["num_layers"] == 8
    assert found["num_parameters"] == 7_999_744
    assert found["weights_bytes"] == 2 * 7_999_744
    assert found["kv_per_1000_tokens_bytes"] == 1000 * 2 * 8 * 2 * 64 * 2
    shown = outrider("models", "inspect", "outrider/embedded").out
    assert "16 MB" in shown


def test_models_inspect_explains_an_unknown_name(outrider: Command) -> None:
    shown = outrider("models", "inspect", "nobody/nothing")
    assert shown.code == 3
    assert "nobody/nothing" in shown.err


@pytest.mark.weights
def test_doctor_names_kernels_memory_and_machine(outrider: Command) -> None:
    found = read(outrider, "doctor", "--force-reference")
    assert {"python", "torch", "device", "cores", "memory", "compiler"} <= set(found["facts"])
    assert all(kernel["name"] and kernel["op"] for kernel in found["kernels"])
    assert all(kernel["refusals"] for kernel in found["kernels"])
    assert found["memory"][0]["model"] == "outrider/embedded"
    assert found["memory"][0]["num_tokens_that_fit"] > 0
    assert found["problems"] == []
    assert "KV per 1k tokens" in outrider("doctor", "--force-reference").out


@pytest.mark.weights
def test_where_the_hybrid_is_not_installed_nothing_misses_it(
    outrider: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a wheel, which has the pair alone."""
    monkeypatch.setitem(names.ALIASES, "outrider/embedded-hybrid", "not-in-a-wheel")
    assert read(outrider, "doctor", "--force-reference")["problems"] == []
    assert [
        one["name"] for one in read(outrider, "list") if one["name"].startswith("outrider/")
    ] == [
        "outrider/embedded",
        "outrider/embedded-draft",
    ]
    assert "embedded-hybrid" not in outrider("models", "inspect", "nothing").err


def test_doctor_reports_problems_and_exits_with_1(outrider: Command) -> None:
    shown = outrider("doctor", "--force-reference", "--target", "no such model")
    assert shown.code == 1
    assert "problem: " in shown.out
    assert "no such model" in shown.out


@pytest.mark.sample(1)  # The parser's library writes them; what is ours is the same for each.
@pytest.mark.wide
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_verbs_and_flags(outrider: Command, shell: str) -> None:
    shown = outrider("completion", shell)
    assert shown.code == 0
    assert "generate" in shown.out
    assert "max-tokens" in shown.out


def test_models_inspect_counts_the_blocks_of_a_file(outrider: Command, tmp_path: Path) -> None:
    path = wide_llama(["Q4_K"]).write(tmp_path / "a.gguf")
    record = json.loads(outrider("models", "inspect", str(path), "--json").out)
    stored = record["stored_bytes"]
    assert record["weights_bytes"] == stored
    # A table of 32 tokens and matrices of two layers, at 148 bytes for 256 numbers; norms beside.
    numbers = 32 * 256 + 2 * (5 * 256 + 2 * 128) * 256
    assert stored == numbers // 256 * 148 + 5 * 256 * 4
