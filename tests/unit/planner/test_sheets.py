"""Device sheets, by name and from a user's file; and calibrations made of them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.effort import examples
from outrider.core.errors import ConfigError
from outrider.core.spec import ModelSpec
from outrider.estimate.forecast import (
    Mixture,
    PassWork,
    mixture_of,
    row_seconds,
    rows_seconds,
    sheets,
)
from outrider_lab.planner.roofline import (
    calibrate,
    critical_context,
    device_sheet,
    pass_seconds,
    ridge_rows,
)
from outrider_lab.planner.rounds import DecodeLoad


def spec(name: str, parameters: int, layers: int, width: int, quantise: str = "none") -> ModelSpec:
    return ModelSpec(
        name=name,
        family="llama",
        vocab_size=128_256,
        hidden_size=width,
        num_layers=layers,
        num_heads=width // 128,
        num_kv_heads=8,
        head_dim=128,
        ffn_size=7 * width // 2,
        max_tokens=8192,
        num_parameters=parameters,
        bytes_per_weight=2,
        bytes_per_kv=2,
        quantise=quantise,
    )


EIGHT_B = spec("8b", 8_030_261_248, 32, 4096)
ONE_B = spec("1b", 1_235_814_400, 16, 2048)
MINE = {
    "bandwidth": 1e12,
    "flops": {"bfloat16": 100e12},
    "memory_bytes": 16_000_000_000,
    "row_tile": 32,
    "power": {"static_watts": 50, "byte_joules": 1e-10, "flop_joules": 1e-12},
}


@pytest.mark.parametrize("name", sheets())
def test_every_sheet_makes_a_calibration(name: str) -> None:
    sheet = device_sheet(name.upper())
    found = calibrate(EIGHT_B, ONE_B, sheet)
    assert found.memory_bytes == EIGHT_B.weight_bytes
    once = found.target.seconds(1, 0, 0)
    assert once >= EIGHT_B.weight_bytes / sheet.bandwidth
    assert found.drafters[0].seconds(1, 1, 0) < once / 3
    assert found.target.seconds(4096, 0, 0) > 2 * once
    assert type(found).of_json(found.to_json()) == found


def test_where_memory_and_arithmetic_meet() -> None:
    assert round(ridge_rows(PassWork(EIGHT_B), device_sheet("h200"))) == 183
    sheet = device_sheet("h100")
    below, above = (rows_seconds(PassWork(EIGHT_B), sheet, rows) for rows in (64, 1024))
    once = rows_seconds(PassWork(EIGHT_B), sheet, 1)
    assert below == pytest.approx(once, rel=0.02)
    arithmetic = 1024 * 2 * EIGHT_B.num_parameters / sheet.flops_per_second("bfloat16")
    assert above == pytest.approx(arithmetic, rel=0.05)


def test_rows_cost_by_whole_tiles() -> None:
    sheet = device_sheet("cpu-2core")
    seconds = [rows_seconds(PassWork(EIGHT_B), sheet, rows) for rows in (61, 64, 65)]
    assert seconds[0] == seconds[1] < seconds[2]


@examples(20)
@given(rows=st.lists(st.integers(1, 4096), min_size=2, max_size=8))
def test_more_rows_never_take_less(rows: list[int]) -> None:
    target = calibrate(EIGHT_B, None, device_sheet("a100")).target
    seconds = [target.seconds(count, 0, 0) for count in sorted(rows)]
    assert all(a <= b for a, b in pairwise(seconds))


def test_keys_and_values_are_read_once_a_pass() -> None:
    sheet = device_sheet("h100")
    target = calibrate(EIGHT_B, None, sheet).target
    context = 10 * round(critical_context(EIGHT_B, 1))
    once = target.seconds(1, context, context) - target.seconds(1, 0, 0)
    five = target.seconds(5, context, 5 * context) - target.seconds(5, 0, 0)
    assert once == pytest.approx(10 * EIGHT_B.weight_bytes / sheet.bytes_per_second, rel=0.05)
    assert five < 1.1 * once


@examples(20)
@given(experts=st.integers(1, 64), rows=st.integers(1, 200), share=st.floats(0, 1))
def test_a_mixture_reads_more_as_rows_grow(experts: int, rows: int, share: float) -> None:
    mixture = Mixture(experts, max(1, experts // 8), share)
    assert mixture.read_share(1) == pytest.approx(mixture.active_share)
    assert mixture.read_share(rows) <= mixture.read_share(rows + 1) + 1e-12
    assert mixture.read_share(rows) <= 1 + 1e-12


def test_a_mixture_leaves_less_room_for_drafts() -> None:
    """8 of 128 experts: five rows read more than twice the weights of one."""
    experts = round(0.9 * EIGHT_B.num_parameters)
    sparse = replace(EIGHT_B, num_experts=128, num_active_experts=8, expert_parameters=experts)
    mixture = mixture_of(sparse)
    assert mixture is not None
    assert mixture.read_share(5) / mixture.read_share(1) == pytest.approx(2.23, abs=0.005)
    sheet = device_sheet("h100")
    dense, mixed = calibrate(EIGHT_B, None, sheet), calibrate(sparse, None, sheet)
    ratios = [one.target.seconds(5, 0, 0) / one.target.seconds(1, 0, 0) for one in (dense, mixed)]
    assert ratios[0] < 1.01 < 1.9 < ratios[1]
    assert mixed.target.seconds(1, 0, 0) < dense.target.seconds(1, 0, 0) / 4


def test_a_mixture_is_at_its_ridge_where_computing_takes_as_long_as_reading() -> None:
    experts = round(0.9 * EIGHT_B.num_parameters)
    sparse = replace(EIGHT_B, num_experts=128, num_active_experts=8, expert_parameters=experts)
    work, sheet = PassWork(sparse), device_sheet("h200")
    rows = ridge_rows(work, sheet)
    assert 183 < rows < 183 / 0.1
    assert rows * row_seconds(work, sheet) == pytest.approx(
        work.weight_bytes(rows) / sheet.bytes_per_second, rel=1e-3
    )


def test_a_pass_costs_what_the_calibration_says_of_it() -> None:
    sheet = device_sheet("a100")
    costs = calibrate(EIGHT_B, None, sheet).target
    found = pass_seconds(PassWork(EIGHT_B), sheet, DecodeLoad(4, 1000), 4)
    assert found == pytest.approx(costs.seconds(16, 4 * 1000, 16 * 1000))


def test_eight_bits_are_read_in_half_the_time() -> None:
    sheet = device_sheet("h100")
    small = spec("8b", EIGHT_B.num_parameters, 32, 4096, "int8")
    ratio = rows_seconds(PassWork(small), sheet, 1) / rows_seconds(PassWork(EIGHT_B), sheet, 1)
    assert 0.5 < ratio < 0.6


def test_a_drafter_with_a_device_of_its_own() -> None:
    found = calibrate(EIGHT_B, ONE_B, device_sheet("h100"), draft_sheet=device_sheet("rtx4090"))
    apart = calibrate(EIGHT_B, ONE_B, device_sheet("rtx4090"))
    assert found.drafters == apart.drafters
    assert found.machine == "h100, drafting on rtx4090"


def test_a_model_that_keeps_no_context() -> None:
    assert critical_context(spec("none", 10**9, 0, 1024), 4) == math.inf


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_a_sheet_of_ones_own(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"mine.{suffix}"
    path.write_text(json.dumps(MINE))  # JSON is YAML as well.
    sheet = device_sheet(str(path))
    assert (sheet.name, sheet.row_tile, sheet.memory_bytes) == ("mine", 32, 16 * 10**9)
    assert sheet.bytes_per_second == pytest.approx(0.9e12)
    assert sheet.power is not None
    assert sheet.power.static_watts == 50
    assert calibrate(EIGHT_B, ONE_B, sheet).machine == "mine"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bandwith": 1e9}, "unknown field"),
        ({"bandwidth": 0}, "must be a number above 0"),
        ({"bandwidth": "fast"}, "must be a number above 0"),
        ({"bandwidth": True}, "must be a number above 0"),
        ({"memory_bytes": float("nan")}, "must be a number above 0"),
        ({"bandwidth_share": 1.5}, "above 1"),
        ({"flops": {}}, "no values by name"),
        ({"flops": {"bf16": 1e12}}, "unknown field"),
        ({"flops": [1e12]}, "no values by name"),
        ({"power": {"watts": 3}}, "unknown field"),
        ({"power": {"static_watts": 3}}, "must be a number from 0 up"),
        ({"overhead": -1}, "must be a number from 0 up"),
    ],
)
def test_a_damaged_sheet(tmp_path: Path, change: dict[str, object], words: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**MINE, **change}))
    with pytest.raises(ConfigError, match=words) as caught:
        device_sheet(str(path))
    assert caught.value.hint


@pytest.mark.parametrize("text", ["", "[1]", "{", "bandwidth: [", "\t- :"])
def test_a_file_that_is_no_sheet(tmp_path: Path, text: str) -> None:
    for suffix in ("json", "yml"):
        path = tmp_path / f"mine.{suffix}"
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"no device sheet|lacks"):
            device_sheet(str(path))


def test_a_sheet_that_lacks_something_or_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"bandwidth": 1e9}))
    with pytest.raises(ConfigError, match="lacks flops, memory_bytes"):
        device_sheet(str(path))
    with pytest.raises(ConfigError, match="cannot read"):
        device_sheet(str(tmp_path / "other.json"))
    with pytest.raises(ConfigError, match="no device sheet is called 'h10'") as caught:
        device_sheet("h10")
    assert caught.value.hint is not None
    assert "'h100'" in caught.value.hint


def test_a_dtype_that_a_sheet_does_not_have(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(MINE))
    small = spec("8b", EIGHT_B.num_parameters, 32, 4096, "int8")
    with pytest.raises(ConfigError, match="no rate of int8"):
        calibrate(small, None, device_sheet(str(path)))
