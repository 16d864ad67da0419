"""A configuration's label and its hash: stable, and different for whatever decides a run."""

from __future__ import annotations

import hashlib
import json
from dataclasses import FrozenInstanceError, fields, replace

import pytest

from outrider_lab.bench.studies.sweep_record import BenchmarkConfig
from outrider_lab.measure.store import RecordError

CONFIG = BenchmarkConfig(
    model_pair_name="embedded",
    prompt_domain="code",
    k=4,
    temperature=0.0,
    max_tokens=64,
    seed=0,
    drafter="model",
    others=(("threads", 2),),
)


def test_the_hash_is_that_of_the_sorted_json() -> None:
    text = json.dumps(CONFIG.to_dict(), sort_keys=True)
    assert CONFIG.config_hash() == hashlib.sha256(text.encode()).hexdigest()[:12]
    assert CONFIG.config_hash() == replace(CONFIG).config_hash()


@pytest.mark.parametrize("name", [item.name for item in fields(BenchmarkConfig)])
def test_every_field_changes_the_hash(name: str) -> None:
    value: object = getattr(CONFIG, name)
    other = (("threads", 4),) if name == "others" else _more(value)
    assert replace(CONFIG, **{name: other}).config_hash() != CONFIG.config_hash()


def _more(value: object) -> object:
    return 2 * value + 1 if isinstance(value, int | float) else "other"


def test_it_is_frozen_and_survives_json() -> None:
    with pytest.raises(FrozenInstanceError):
        CONFIG.k = 5  # pyright: ignore[reportAttributeAccessIssue]
    again = BenchmarkConfig.from_dict(json.loads(json.dumps(CONFIG.to_dict())))
    assert again == CONFIG
    assert hash(again) == hash(CONFIG)
    with pytest.raises(RecordError, match="missing"):
        BenchmarkConfig.from_dict({"k": 1, "others": {}})
