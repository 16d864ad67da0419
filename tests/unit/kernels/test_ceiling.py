"""The bare read really reads every byte that it counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.core.errors import MachineError
from outrider.kernels.native import build
from outrider.kernels.native.build import Built
from outrider.plugins.doctor.ceilings import BandwidthReader


def reader(threads: int) -> BandwidthReader:
    try:
        return BandwidthReader(threads)
    except MachineError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("size", [512, 512 * 7, 1 << 18, (1 << 18) + 512, 5 << 18])
def test_every_byte_counts(size: int, threads: int) -> None:
    rng = torch.Generator().manual_seed(size)
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=rng)
    expected = int(np.bitwise_xor.reduce(data.numpy().view(np.uint64)))
    assert reader(threads).read([data]) == expected
    assert reader(threads).read([data, data]) == 0
    for place in (0, size // 2, size - 1):
        data[place] ^= 1
        assert reader(threads).read([data]) != expected
        data[place] ^= 1


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> Built:
        return Built(refusal="no C++ compiler found")

    monkeypatch.setattr(build, "built_kernels", none)
    with pytest.raises(MachineError, match="no C\\+\\+ compiler found"):
        BandwidthReader()
