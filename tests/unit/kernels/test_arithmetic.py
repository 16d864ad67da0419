"""Ceilings of arithmetic count what was done, by each number of threads."""

from __future__ import annotations

from itertools import count

import pytest

from outrider.core.errors import MachineError
from outrider.kernels.native import build
from outrider.kernels.native.build import Built
from outrider.plugins.doctor import ceilings as arithmetic
from outrider.plugins.doctor.ceilings import ARITHMETIC, ArithmeticCeiling, arithmetic_ceilings


def measured(ticks: float, steps: int, monkeypatch: pytest.MonkeyPatch) -> list[ArithmeticCeiling]:
    monkeypatch.setattr(arithmetic, "STEPS", steps)
    clock = count()
    try:
        return list(arithmetic_ceilings((1, 2, 1), clock=lambda: ticks * next(clock)))
    except MachineError as error:
        pytest.skip(str(error))


def test_twice_the_threads_do_twice_the_work_and_more_steps_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = measured(1e-6, 100, monkeypatch)
    names = list(dict.fromkeys(ceiling.arithmetic for ceiling in found))
    # Only dot products of bfloat16, and tiles, may be lacking.
    assert set(ARITHMETIC) - set(names) <= {"bfloat16 dots", "bfloat16 tiles", "int8 tiles"}
    assert names == [name for name in ARITHMETIC if name in names]
    assert [ceiling.threads for ceiling in found] == [1, 2] * len(names)
    rates = [ceiling.gflops for ceiling in found]
    for one, two in zip(rates[::2], rates[1::2], strict=True):
        assert two == pytest.approx(2 * one, rel=1e-6)
    more = [ceiling.gflops for ceiling in measured(1e-6, 300, monkeypatch)]
    assert more == pytest.approx([3 * rate for rate in rates], rel=1e-6)


def test_a_product_takes_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that a compiler could leave out: no CPU does two thousand billion a second a thread,
    or twenty thousand on tiles."""
    monkeypatch.setattr(arithmetic, "STEPS", 20_000)
    try:
        found = arithmetic_ceilings((1,))
    except MachineError as error:
        pytest.skip(str(error))
    for ceiling in found:
        most = 20_000 if ceiling.arithmetic.endswith("tiles") else 2000
        assert 0 < ceiling.gflops < most


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> Built:
        return Built(refusal="no C++ compiler found")

    monkeypatch.setattr(build, "built_kernels", none)
    with pytest.raises(MachineError, match="no C\\+\\+ compiler found"):
        arithmetic_ceilings((1,))
