"""Machine code without a GPU: kernels of a round compile as launched, and code is read."""

from __future__ import annotations

import copy
import importlib
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture(name="module", scope="module")
def imported() -> Any:
    return importlib.import_module


@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.parametrize(
    "kernels",
    [("decide_kernel",), pytest.param(("decide_kernel", "attend_kernel"), marks=pytest.mark.deep)],
)
def test_kernels_of_a_round_become_machine_code_without_a_stack(kernels: tuple[str, ...]) -> None:
    """Those of rounds, sampled and in float32, whose types or registers did not fit before. What
    the table has of them is compared: a round's launches always, registers by the same Triton."""
    words = ["--rounds", "few", "--targets", "sm_90", "--kernels", *kernels]
    done = subprocess.run(
        [str(ROOT / "scripts" / "gpu_compile"), *words],
        env={"OUTRIDER_PYTHON": sys.executable, "PATH": "/usr/bin:/bin", "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = {line.split()[0] for line in done.stdout.splitlines() if " sm_90 " in line}
    assert found == set(kernels)
    assert "\n1b, greedy: " in done.stdout
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["passed"]
    assert last["binaries"] >= len(kernels)


class Kernel:
    """As much of a kernel as its launches look at."""

    __name__ = "linear_kernel"
    arg_names = ("x_ptr", "weight_ptr", "out_ptr", "num_rows", "num_in", "OUTPUTS")
    do_not_specialize = ("num_rows",)


def linear(module: Any, rows: int, width: int, offset: int = 0) -> Any:
    meta = module("gpu_compile.meta")
    x_NI = torch.empty(rows * width + offset, device="meta")[offset:].view(rows, width)
    weight_OI = torch.empty(64, width, dtype=torch.bfloat16, device="meta")
    out_NO = torch.empty(rows, 64, device="meta")
    arguments = (x_NI, weight_OI, out_NO, rows, width)
    return meta.Launch(Kernel(), (1, 2), arguments, {"OUTPUTS": 32})


def test_launches_that_share_a_binary_have_one_form(module: Any) -> None:
    assert linear(module, 1, 64).form == linear(module, 7, 64).form
    assert linear(module, 1, 64).form == linear(module, 1, 4096).form
    assert linear(module, 1, 64).form != linear(module, 1, 65).form
    assert linear(module, 1, 65).form != linear(module, 1, 1).form
    assert linear(module, 1, 64).form != linear(module, 1, 64, offset=1).form
    assert linear(module, 1, 64).form == linear(module, 1, 64, offset=4).form
    assert linear(module, 1, 64).types == "float32 bfloat16"


def test_every_program_of_a_linear_reads_its_rows_again(module: Any) -> None:
    found = module("gpu_compile.trace").bytes_of(linear(module, 3, 128), 0)
    assert found == {"weights": 64 * 128 * 2, "activations": 2 * 3 * 128 * 4, "rest": 3 * 64 * 4}


SASS = """
        /*0100*/   LDGSTS.E.BYPASS.LTC128B.128 [R3], desc[UR8][R4.64], P0 ;
        /*0110*/   LDGDEPBAR ;
        /*0120*/   DEPBAR.LE SB0, 0x2 ;
        /*0130*/   LDGSTS.E.BYPASS.LTC128B.128 [R3], desc[UR8][R4.64+0x80], P0 ;
        /*0140*/   LDGSTS.E.64 [R7+0x10], desc[UR8][R6.64], P1 ;
        /*0150*/   LDGDEPBAR ;
        /*0160*/   @!P0 BRA 0x120 ;
        /*0170*/   EXIT ;
        /*0180*/   BRA 0x180 ;
"""


def test_copies_under_way_are_read_from_the_smallest_copying_loop(module: Any) -> None:
    binaries = module("gpu_compile.binaries")
    found = binaries.pipeline_of(SASS, 4)
    assert found == binaries.Pipeline(bytes_a_turn=32 * 4 * (16 + 8), turns=2.0)
    assert binaries.pipeline_of(SASS.replace("LDGSTS", "LDG"), 4) is None


def test_registers_and_stack_are_read_and_bound_what_is_resident(module: Any) -> None:
    binaries = module("gpu_compile.binaries")
    text = "Function k:\n  REG:213 STACK:16 SHARED:0 LOCAL:4 CONSTANT[0]:604 TEXTURE:0"
    assert binaries.usage(text) == (213, 20)
    with pytest.raises(ValueError, match="names no registers"):
        binaries.usage("Function k:")
    target = binaries.TARGETS["sm_90"]
    assert binaries.resident(binaries.Binary(213, 0, 1024, 0, 4), target) == 2
    assert binaries.resident(binaries.Binary(40, 0, 84_224, 0, 4), target) == 2
    assert binaries.resident(binaries.Binary(32, 0, 0, 0, 1), target) == 32


def test_a_name_of_no_kernel_is_no_pass(module: Any) -> None:
    main = module("gpu_compile.main")
    main.check_names(["judge_kernel"], {"judge_kernel", "pick_kernel"})
    with pytest.raises(SystemExit, match="launches juge_kernel\n  try: one of judge_kernel, pick"):
        main.check_names(["judge_kernel", "juge_kernel"], {"judge_kernel", "pick_kernel"})


def test_what_must_not_be_is_a_fault(module: Any) -> None:
    binaries = module("gpu_compile.binaries")
    target = binaries.TARGETS["sm_120"]
    assert binaries.Binary(40, 0, target.shared).fault(target) == ""
    assert "stack" in binaries.Binary(40, 8, 0).fault(target)
    assert "shared" in binaries.Binary(40, 0, target.shared + 1).fault(target)
    assert "CompilationError" in binaries.Binary(error="CompilationError: at 3").fault(target)


TABLE: dict[str, Any] = {
    "triton": "3.6.0",
    "sources": {"a_kernel": "1f", "c_kernel": "3d"},
    "kernels": {
        "a_kernel float32": {"forms": 2, "sm_80": [32, 512], "sm_90": [40, 1024]},
        "c_kernel int8": {"forms": 1, "sm_90": [16, 0]},
    },
    "rounds": {"1b": {"launches": {"a_kernel": 3}, "operators": 5}},
    "matrices": {},
}


def found(**changes: Any) -> dict[str, Any]:
    return copy.deepcopy(TABLE) | changes


def test_what_differs_from_the_table_is_said(module: Any) -> None:
    main = module("gpu_compile.main")
    again = json.loads(main.written(TABLE))
    assert again == TABLE
    assert main.differences(TABLE, again) == []
    again["kernels"]["a_kernel float32"]["sm_90"] = [48, 1024]
    again["rounds"]["1b"]["operators"] = 6
    again["kernels"]["b_kernel float32"] = {"forms": 1}
    assert main.differences(TABLE, again) == [
        "kernels: b_kernel float32 is not in the table",
        "kernels: a_kernel float32: sm_90 is [48, 1024], was [40, 1024]",
        "rounds: 1b: operators is 6, was 5",
    ]
    again["triton"] = "3.7.1"
    assert not any("sm_90" in line for line in main.differences(TABLE, again))


def test_a_kernel_that_has_changed_since_is_reported_and_not_compared(module: Any) -> None:
    main = module("gpu_compile.main")
    row = {"a_kernel float32 int64": {"forms": 9, "sm_90": [99, 0]}}
    rounds = {"1b": {"launches": {"a_kernel": 4}, "operators": 5}}
    again = found(kernels=row, rounds=rounds, sources={"a_kernel": "2e"})
    lines = main.differences(TABLE, again, is_part=True)
    assert len(lines) == 1
    assert lines[0].startswith(
        "reported: a_kernel has changed since the table was written; --write"
    )


def test_a_part_of_the_forms_may_take_less_than_the_table_says(module: Any) -> None:
    main = module("gpu_compile.main")
    again = found(kernels={"a_kernel float32": {"forms": 1, "sm_90": [24, 1024]}})
    assert main.differences(TABLE, again, is_part=True) == []
    again["kernels"]["a_kernel float32"] = {"forms": 1, "sm_90": [24, 1025]}
    assert len(main.differences(TABLE, again, is_part=True)) == 1
    assert len(main.differences(TABLE, again)) == 3


def test_a_part_is_written_among_the_rows_that_stay(module: Any) -> None:
    main = module("gpu_compile.main")
    row: dict[str, Any] = {"a_kernel float32": {"forms": 3, "sm_90": [48, 1024]}}
    part = main.merged(TABLE, found(kernels=row), is_part=True)
    assert part["kernels"] == TABLE["kernels"] | {
        "a_kernel float32": {"forms": 3, "sm_80": [32, 512], "sm_90": [48, 1024]}
    }
    both = {"a_kernel": "2e", "c_kernel": "4c"}
    part = main.merged(TABLE, found(kernels=row, sources=both), is_part=True)
    assert part["kernels"] == TABLE["kernels"] | row
    # The other kernel has changed too, and its rows have not.
    assert part["sources"] == {"a_kernel": "2e", "c_kernel": "3d"}
    assert main.merged(TABLE, found(kernels=row))["kernels"].keys() == row.keys()
    other = found(kernels=row, triton="3.7.1")
    assert main.merged(TABLE, other) == other


HELPER: Any = None


def called_once(number: int) -> int:
    return number


def test_the_source_of_a_kernel_is_that_of_all_that_it_calls(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source_of = module("gpu_compile.meta").source_of

    def kernel() -> int:
        return HELPER.fn(HELPER)

    monkeypatch.setitem(globals(), "HELPER", SimpleNamespace(fn=called_once))
    before = source_of(SimpleNamespace(fn=kernel))
    assert source_of(SimpleNamespace(fn=kernel)) == before
    monkeypatch.setitem(globals(), "HELPER", SimpleNamespace(fn=linear))
    assert source_of(SimpleNamespace(fn=kernel)) != before


def test_the_table_has_numbers_for_every_target_and_round(module: Any) -> None:
    binaries, main = module("gpu_compile.binaries"), module("gpu_compile.main")
    table = json.loads(main.TABLE.read_text(encoding="utf-8"))
    for name, row in table["kernels"].items():
        for target in binaries.CUDA:
            registers, shared = row[target]
            assert 0 < registers <= 255, name
            assert shared <= binaries.TARGETS[target].shared, name
    assert {case.name for case in module("gpu_compile.trace").TABLED} == set(table["rounds"])
    for name, row in table["rounds"].items():
        assert row["launches"]["attend_kernel"] == row["launches"]["merge_kernel"] > 0, name
        assert row["bytes"]["weights"] > row["bytes"]["rest"] > 0, name
