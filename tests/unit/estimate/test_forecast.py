"""Forecasts from sizes alone: the planner's figure in closed form."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.core.errors import ConfigError
from outrider.core.plugins import KINDS
from outrider.core.spec import ModelSpec
from outrider.estimate.forecast import Forecast, forecast, sheet_like, sheets
from outrider_lab.planner.advise import Question, advise
from outrider_lab.planner.candidates import DraftOption, Engines, PlannedJob
from outrider_lab.planner.suppose import Candidate, supposed

TARGET = ModelSpec(
    name="target",
    family="llama",
    vocab_size=8192,
    hidden_size=1024,
    num_layers=24,
    num_heads=16,
    num_kv_heads=8,
    head_dim=64,
    ffn_size=4096,
    max_tokens=2048,
    num_parameters=400_000_000,
    bytes_per_weight=2,
    bytes_per_kv=2,
)
MIXTURE = replace(
    TARGET, num_experts=32, num_active_experts=2, expert_parameters=300_000_000, quantise="int8"
)
# Bytes of the draft model or heads; other drafters have none.
BYTES = {"model": 60_000_000, "portfolio": 60_000_000, "eagle": 18_000_000, "medusa": 30_000_000}
NEW_TOKENS = 4096


def of(name: str, k: int = 4, target: ModelSpec = TARGET, sheet: str = "cpu-2core") -> Forecast:
    size = BYTES.get(name, 0)
    return forecast(target, KINDS[name], k, sheets()[sheet], num_bytes=size, context=1000.0)


@pytest.mark.parametrize("sheet", ["cpu-2core", "h100"])
@pytest.mark.parametrize("target", [TARGET, MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize(
    "name", ["model", "eagle", "medusa", "quantised-self", "layer-skip", "ngram", "recycling"]
)
@pytest.mark.parametrize("k", [1, 4, 9])
def test_the_planner_says_the_same_of_a_long_text(
    name: str, k: int, target: ModelSpec, sheet: str
) -> None:
    candidate = Candidate.of(name, name, target, BYTES.get(name, 0))
    question = Question(
        job=PlannedJob(new_tokens=NEW_TOKENS),
        candidates=(DraftOption(name, k),),
        engines=Engines(names=("single",)),
    )
    best = advise(supposed(target, sheets()[sheet], [candidate], machine="here"), question).best
    assert best is not None
    found = forecast(
        target,
        KINDS[name],
        k,
        sheets()[sheet],
        num_bytes=BYTES.get(name, 0),
        context=NEW_TOKENS / 2,
    )
    assert found.speed_up == pytest.approx(best.steady, rel=0.02)
    # Ends of the interval are quantiles of some hundred draws.
    assert found.low / found.speed_up == pytest.approx(best.low / best.speed_up, rel=0.2)
    assert found.high / found.speed_up == pytest.approx(best.high / best.speed_up, rel=0.2)


def test_a_draft_in_one_step_gains_by_length_and_a_slow_one_loses() -> None:
    assert of("medusa", 8).speed_up > of("medusa", 2).speed_up
    assert of("layer-skip", 8).speed_up < of("layer-skip", 2).speed_up < 1
    assert of("suffix").low < 1.2 < of("suffix").high


def test_rows_cost_more_in_a_mixture_and_less_where_arithmetic_is_fast() -> None:
    dense = of("model", 8, sheet="h100").speed_up
    assert of("model", 8, MIXTURE, "h100").speed_up < dense
    large = replace(TARGET, num_parameters=8_000_000_000)
    few_rows, many_rows = (of("medusa", 24, large, name).speed_up for name in ("cpu-2core", "h100"))
    assert few_rows < 1 < many_rows


def test_a_dtype_without_a_rate_is_refused() -> None:
    sheet = replace(sheets()["h100"], flops={"float32": 1e12})
    with pytest.raises(ConfigError, match="no rate of bfloat16"):
        forecast(TARGET, KINDS["ngram"], 4, sheet, num_bytes=0, context=0.0)


@pytest.mark.parametrize(
    ("device", "gpu", "name"),
    [
        ("cpu", None, "cpu-2core"),
        ("cuda", "NVIDIA H100 80GB HBM3", "h100"),
        ("cuda", "NVIDIA GeForce RTX 4090", "rtx4090"),
        ("cuda", "something new", "a100"),
        ("mps", None, "m2-max"),
    ],
)
def test_a_device_is_supposed_to_be_like_one_with_a_sheet(
    device: str, gpu: str | None, name: str
) -> None:
    assert sheet_like(device, gpu).name == name
