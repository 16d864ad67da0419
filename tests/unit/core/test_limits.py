"""Whatever value a setting is given, it is accepted or refused as a mistake of the user's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import Field, fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from outrider.core.config import EngineConfig
from outrider.core.errors import ConfigError
from outrider.core.fields import LIMITS, default_of, meta_of
from outrider.core.params import SamplingParams
from outrider.core.settings import SETTINGS, ProgramConfig, command_line, resolve

GROUPS = (SamplingParams, EngineConfig, ProgramConfig)
EVERY = [pytest.param(group, item, id=item.name) for group in GROUPS for item in fields(group)]


class Wordless:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


NUMBERS: list[object] = [
    math.nan,
    math.inf,
    -math.inf,
    -0.0,
    1e999,
    5e-324,
    1.7e308,
    2**31,
    2**63,
    -(2**63) - 1,
    10**400,
    -(10**400),
    10**5000,
    -1,
    0,
    1,
    0.5,
    True,
    False,
    np.int64(3),
    np.float64(0.5),
    np.float32(0.5),
    np.float64(math.nan),
    np.bool_(True),
    np.array(1.0),
    1j,
]
OTHERS: list[object] = [
    None,
    "",
    "nan",
    "\ud800",
    "x" * 10_000,
    b"bytes",
    [],
    ["x"],
    (),
    ("",),
    ("x",) * 10_000,
    ("\ud800",),
    ("x" * 10_000,),
    (1,),
    (None,),
    {},
    {1: 1.0},
    {1: math.nan},
    {1: 10**400},
    {-1: 1.0},
    {10**5000: 1.0},
    {True: 1.0},
    {"1": 1.0},
    {1.0: 1.0},
    {1: "x"},
    dict.fromkeys(range(10_000), 1.0),
    {1},
    object(),
    Wordless(),
    type,
    np.zeros(3),
]
anything = st.one_of(
    st.sampled_from(NUMBERS),
    st.sampled_from(OTHERS),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(max_size=4),
    st.lists(st.text(max_size=3), max_size=3).map(tuple),
    st.dictionaries(st.integers(-2, 99), st.floats(), max_size=3),
)


def accepted(group: Any, **values: object) -> bool:
    try:
        group(**values)
    except ConfigError as error:
        text = str(error)
        assert any(name in text for name in values)
        assert len(text) < 400
        return False
    return True


@pytest.mark.parametrize(("group", "item"), EVERY)
def test_every_strange_value_of_a_setting_is_taken_or_refused(group: Any, item: Field[Any]) -> None:
    for value in (*NUMBERS, *OTHERS):
        if not accepted(group, **{item.name: value}) or value is None:
            continue
        meta = meta_of(item)
        default = default_of(item) if meta.kind is None else meta.kind()
        assert isinstance(value, bool) == isinstance(default, bool)
        if isinstance(value, int | float) and not isinstance(value, bool):
            assert math.isfinite(value)
            assert meta.minimum is not None
            assert meta.maximum is not None
            assert meta.minimum <= value <= meta.maximum


@given(name=st.sampled_from([param.values[1] for param in EVERY]), value=anything)
@hypothesis_settings(max_examples=600, suppress_health_check=[HealthCheck.too_slow])
def test_any_value_of_any_setting_is_taken_or_refused(name: Any, value: object) -> None:
    groups = [group for group in GROUPS if name.name in {item.name for item in fields(group)}]
    for group in groups:
        accepted(group, **{name.name: value})


@given(
    values=st.dictionaries(
        st.sampled_from([item.name for item in fields(SamplingParams)]), anything, max_size=5
    )
)
@example(values={"min_tokens": 10**5000, "max_tokens": 3})
def test_any_values_together_are_taken_or_refused(values: dict[str, object]) -> None:
    accepted(SamplingParams, **values)


@pytest.mark.parametrize("name", SETTINGS)
def test_every_strange_value_of_a_flag_is_taken_or_refused(name: str) -> None:
    """As text of a command line, and as a file's own type."""
    texts = ("nan", "inf", "1e999", "9" * 400, "9" * 5000, "-0.0", "\ud800", "", "1=nan", "[1]")
    lengths: list[int] = []
    for value in (*texts, "[" * 100_000, *NUMBERS, *OTHERS):
        try:
            resolved = resolve(command_line({name: value}))
            resolved.engine()
            resolved.sampling()
            resolved.program()
        except ConfigError as error:
            lengths.append(len(str(error)))
    assert max(lengths, default=0) < 400


AT_MOST: Mapping[str, tuple[object, object]] = {
    "stop": (("x",) * 16, ("x",) * 17),
    "stop_token_ids": (tuple(range(64)), tuple(range(65))),
    "stop, each": (("é" * 128,), ("é" * 128 + "x",)),
    "bad_words": (("x",) * 256, ("x",) * 257),
    "bad_words, each": (("x" * 256,), ("x" * 257,)),
    "logit_bias": (dict.fromkeys(range(1024), 1.0), dict.fromkeys(range(1025), 1.0)),
    "n": (16, 17),
    "top_logprobs": (20, 21),
}


@pytest.mark.parametrize("name", AT_MOST)
def test_as_many_as_the_table_says_are_taken_and_one_more_is_not(name: str) -> None:
    most, more = AT_MOST[name]
    key = name.partition(",")[0]
    params = replace(SamplingParams(logprobs=True), **{key: most})  # pyright: ignore[reportArgumentType]
    assert getattr(params, key) == most
    with pytest.raises(ConfigError, match=rf"{key}.*\b{LIMITS[name].most}\b"):
        replace(SamplingParams(logprobs=True), **{key: more})  # pyright: ignore[reportArgumentType]


def test_every_limit_of_the_table_is_tried() -> None:
    """Those of text before it is tokens need a tokenizer: tests/unit/api/test_request_limits.py."""
    assert set(LIMITS) - set(AT_MOST) == {"messages", "prompt"}


def test_a_bias_is_not_changed_from_outside_after_it_was_checked() -> None:
    bias = {1: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[10**6] = math.nan
    assert params.logit_bias == {1: 1.0}


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_integers_of_other_libraries_become_pythons(kind: Any) -> None:
    params, config = SamplingParams(max_tokens=kind(2), seed=kind(7)), EngineConfig(k=kind(3))
    assert (params.max_tokens, params.seed, config.k) == (2, 7, 3)
    assert {type(params.max_tokens), type(params.seed), type(config.k)} == {int}
    with pytest.raises(ConfigError, match="max_tokens"):
        SamplingParams(max_tokens=kind(0))
