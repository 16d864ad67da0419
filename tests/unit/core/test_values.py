"""Small values everything else is made of: specs, params, sequences, errors, names."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from doubles.tiny_attention import toy_spec
from outrider.core.config import DRAFTERS, EngineConfig
from outrider.core.draft import Draft
from outrider.core.errors import ConfigError, did_you_mean, reason_of
from outrider.core.params import SamplingParams
from outrider.core.protocols import StepRow
from outrider.core.rng import KeyedRng
from outrider.core.sampling import Distributions, draw, draw_at, mass
from outrider.core.tree import ROOT
from outrider.engine.round import LiveSequence


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 1.01),
        ("top_p", -0.01),
        ("min_p", 2),
        ("seed", -1),
        ("seed", 2**63),
    ],
)
def test_params_out_of_bounds_are_named(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        SamplingParams(**{field: value})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("k", -1),
        ("k", 65),
        ("batch_size", 0),
        ("prefill_chunk", 0),
        ("page_size", 0),
        ("drafter", "eagle9"),
        ("sampler", "Exact"),
    ],
)
def test_settings_out_of_bounds_are_named(field: str, value: int | str) -> None:
    with pytest.raises(ConfigError, match=field):
        EngineConfig(**{field: value})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("paln", "plan"),
        ("pul", "pull"),
        ("generat", "generate"),
        # The beginning of a word means it, however short.
        ("gen", "generate"),
        # Short words have letters in common by chance.
        ("hint", None),
        ("ps", None),
        ("lap", None),
    ],
)
def test_the_nearest_word_is_named_if_it_is_near(word: str, meant: str | None) -> None:
    hint = did_you_mean(word, ("plan", "pull", "generate", "train", "list"))
    assert hint.startswith("did you mean") == (meant is not None)
    assert meant is None or f"did you mean {meant!r}?" in hint


@pytest.mark.parametrize(
    ("word", "other"),
    [
        ("n_ctx", "fan_out"),
        ("num_predict", "prediction"),
        ("temperature", "memory_share"),
        ("response_format", "presence_penalty"),
        ("version", "verify"),
        ("upgrade", "generate"),
    ],
)
def test_a_word_with_other_letters_in_half_is_not_meant(word: str, other: str) -> None:
    assert did_you_mean(word, [other]) == f"Known: {other}."


def test_an_unknown_choice_comes_with_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(drafter="ngrams")
    assert caught.value.hint == did_you_mean("ngrams", DRAFTERS)
    assert "did you mean 'ngram'?" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("temperature", "1"),
        ("ignore_eos", 1),
        ("stop", 3),
    ],
)
def test_values_of_another_type_are_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        SamplingParams(**{field: value})  # pyright: ignore[reportArgumentType]


def test_only_temperature_zero_is_greedy() -> None:
    assert SamplingParams().greedy
    assert not SamplingParams(temperature=1e-9).greedy


def test_a_step_row_counts_its_logits() -> None:
    row = StepRow.chain(3, [7, 8, 9], parent=4, logits_from=2)
    assert row == StepRow(3, (7, 8, 9), (4, 5, 6), 2)
    assert row.num_logits == 1
    assert StepRow.chain(0, [1]).parents == (ROOT,)


def test_a_sequence_counts_what_it_emitted_and_keys_its_rounds() -> None:
    params = SamplingParams(seed=4)
    seq = LiveSequence(1, [5, 6, 7], 2, params, limit=3, sample=2)
    assert (seq.num_emitted, seq.num_remaining) == (1, 2)
    assert seq.rng == KeyedRng(4, 2, 3)
    assert seq.draft == Draft.empty()
    seq.tokens.append(8)
    assert seq.rng == KeyedRng(4, 2, 4)


def test_a_spec_counts_bytes() -> None:
    spec = toy_spec("toy", 11)
    assert spec.kv_bytes_per_token == 2 * 2 * 1 * 4 * 8
    assert spec.weight_bytes == 8


@given(token=st.integers(0, 4))
def test_point_masses_need_no_noise(token: int) -> None:
    distribution = Distributions(tokens=(token,)).at(0)
    rng = KeyedRng(0, 0, 0)
    assert draw(distribution, rng, ROOT) == draw_at(distribution, rng, 3) == token
    assert [mass(distribution, other) for other in range(5)] == [
        float(other == token) for other in range(5)
    ]


@pytest.mark.parametrize(
    "error", [OSError(2, "it is gone", "/a/path"), OSError("it is gone"), ValueError("it is gone")]
)
def test_a_reason_has_words_and_no_path(error: Exception) -> None:
    assert reason_of(error) == "it is gone"
