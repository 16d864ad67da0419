"""Triton has no build for some systems; there its kernels are not tested.

The interpreter multiplies matrices with numpy's BLAS, which on some CPUs sums a row of a product in
an order that depends on where in the matrix the row lies. Our kernels promise that a row's bits
follow from its own masks, tiles and steps; so here every dot sums in one order, with the same bits
on every CPU, and what differs is ours. Whether a device's own dot keeps the order of a row is asked
of that device when kernels are chosen (outrider.plugins.gpu.kernels.trial).
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]


def dot_in_order(builder: Any, a: Any, b: Any, d: Any, *_: object) -> Any:
    """d + a b by one product after the other, each rounded, as `InterpreterBuilder.create_dot`."""
    del builder
    total = d.data.copy()
    a_data, b_data = a.data.astype(total.dtype), b.data.astype(total.dtype)
    with np.errstate(invalid="ignore"):
        for k in range(a_data.shape[-1]):
            total += a_data[..., :, k, None] * b_data[..., k, None, :]
    return type(d)(total, d.dtype.scalar)


@pytest.fixture(scope="package", autouse=True)
def fixed_order_of_dots() -> Iterator[None]:
    """Before anything of this folder computes, module-scoped fixtures too."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", dot_in_order)
        yield
