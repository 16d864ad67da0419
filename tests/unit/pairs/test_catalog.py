"""The catalogue of pairs: what each is made of, needs and says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.core.errors import ConfigError
from outrider.kernels.operators import DTYPES
from outrider.models.configs import HybridConfig
from outrider.models.families import read_config
from outrider.models.heads import find_heads, has_own_mtp
from outrider.models.loading import resolve
from outrider.pairs.catalog import (
    EMBEDDED_DRAFT,
    EMBEDDED_HYBRID,
    EMBEDDED_TARGET,
    PAIRS,
    ModelPair,
    UnknownPairError,
    draft_of,
    get_pair,
    list_pairs,
    partner_of,
)

EVERY = pytest.mark.parametrize("pair", list_pairs(), ids=lambda pair: pair.pair_name)


def test_an_unknown_name_is_a_key_error_that_lists_names() -> None:
    for kind in (KeyError, ConfigError, UnknownPairError):
        with pytest.raises(kind) as caught:
            get_pair("gtp2_dev")
        message = str(caught.value)
        assert "did you mean 'gpt2_dev'?" in message
        assert all(name in message for name in PAIRS)
    assert UnknownPairError.exit_code == 2


def test_the_embedded_pair_comes_first_and_its_sizes_are_those_of_its_files() -> None:
    pair = list_pairs()[0]
    assert (pair.target_model_id, pair.draft_model_id) == (EMBEDDED_TARGET, EMBEDDED_DRAFT)
    assert draft_of(EMBEDDED_TARGET) == EMBEDDED_DRAFT
    assert draft_of("else") is None
    assert draft_of("else", "eagle") is None
    assert draft_of(EMBEDDED_TARGET, "eagle") == "outrider/embedded-eagle"
    for side in (pair.target, pair.draft):
        config = read_config(resolve(side.model_id))
        stored = {"bfloat16": 2, "int8": 1}[side.dtype]
        spec = config.spec("x", bytes_per_weight=stored, bytes_per_kv=2)
        assert side.kv_bytes_per_token == spec.kv_bytes_per_token
        assert side.weights_gb == pytest.approx(spec.weight_bytes / 1e9, rel=0.02)


def test_the_embedded_hybrid_brings_a_block_and_nothing_lies_beside_it() -> None:
    """Heads of the embedded target have its sizes, and were not trained for it."""
    folder = resolve(EMBEDDED_HYBRID)
    assert isinstance(read_config(folder), HybridConfig)
    assert has_own_mtp(folder)
    assert find_heads(folder) == {}
    assert draft_of(EMBEDDED_HYBRID, "eagle") is None


@EVERY
def test_every_pair_says_what_it_needs(pair: ModelPair) -> None:
    assert pair.licence
    assert pair.notes
    assert pair.weights_gb < pair.memory_gb() < pair.memory_gb(8192)
    kv_gb = pair.memory_gb(8192) - pair.memory_gb()
    assert pair.memory_gb() == pytest.approx(pair.weights_gb + kv_gb)
    for side in (pair.draft, pair.target):
        assert side.model_id.count("/") == 1
        assert side.gated == side.model_id.startswith("meta-llama/")
        assert side.dtype in (*DTYPES, "int8") or side.dtype == pair.self_quantise
    assert pair.gated == (pair.draft.gated or pair.target.gated)


@EVERY
def test_the_command_names_both_models(pair: ModelPair) -> None:
    command = pair.command()
    if pair.target_model_id == EMBEDDED_TARGET:
        assert command == "outrider generate PROMPT"
        return
    assert f"--target {pair.target_model_id} " in command
    assert (f"--draft {pair.draft_model_id} " in command) == (pair.self_quantise is None)
    assert ("--drafter bridge" in command) == (pair.vocabulary == "bridge")


def test_a_target_has_a_partner_if_a_pair_is_known() -> None:
    assert partner_of("Qwen/Qwen3-8B") is get_pair("qwen3")
    assert partner_of("org/name") is None


def test_the_partner_has_the_same_vocabulary_if_one_has_and_is_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of three for one target that do not, TinyLlama is small, and the target itself needs no
    fetching."""
    bridged = get_pair("tinyllama_llama3")
    assert partner_of(bridged.target_model_id) is bridged
    alike = replace(get_pair("phi3_llama3"), pair_name="alike", vocabulary="same")
    refused = replace(bridged, vocabulary="same", refusal="not yet")
    monkeypatch.setattr(
        "outrider.pairs.catalog.PAIRS", {**PAIRS, "alike": alike, "refused": refused}
    )
    assert partner_of(bridged.target_model_id) is alike
